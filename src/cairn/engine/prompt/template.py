"""
From a conversation to token ids, and to the chain of parts by which conversations are compared.

A conversation is in canonical form here: adapters have brought their wire form into it, so that
what clients move about (string or block list, cache hints) is gone. A prompt's token ids are a
function of the request alone: the template renders the whole, and the ids are those of the whole
text (`encoding` does not tokenise again what it knows).

The tokenizer comes in from outside; nothing here knows MLX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from cairn.engine.answer.parts import AnswerPart, Called, Said, Thought
from cairn.engine.json_text import fault_of
from cairn.engine.prompt.template_settings import SWITCHES
from cairn.journal.events import NextRole
from cairn.journal.keys import part_hash
from cairn.journal.state import Part

if TYPE_CHECKING:
    from cairn.engine.contract import Tokenizer

_encoder = msgspec.json.Encoder(order="deterministic")

# Two messages that share no beginning, not even behind a template that strips them. One begins with
# an end of line, with which a tokenizer may join the one before it.
_NEXT_TEXTS = ("\nAnd then?", "7 more")


@attrs.frozen(kw_only=True)
class Message:
    """
    One message in canonical form.

    Attributes:
        role: ``system``, ``user``, ``assistant``, ``tool``, ...
        content: its text.
        reasoning: the thinking that a client sends back with an assistant's message.
        tool_calls: ``{"id", "type": "function", "function": {"name", "arguments"}}``, arguments as
            an object where they are JSON.
        tool_call_id: for a tool's result, the call that it answers.
        name: of the speaker or the tool.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@attrs.frozen(kw_only=True)
class Conversation:
    """
    What a chat request says, in canonical form.

    Attributes:
        tools: as the template takes them.
        loaded_tools: those that are on offer from a message on. They stand there as text, so they
            are no part of their own, and the template is not given them.
        calls: whether tools may be called. Where not, they stand in the prompt all the same, since
            it would be another one from its first tokens on; what looks like a call is text.
        template: further arguments of the template, such as ``enable_thinking``.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    loaded_tools: tuple[Mapping[str, Any], ...] = ()
    calls: bool = True
    template: Mapping[str, Any] = attrs.field(factory=dict)


class TemplateError(Exception):
    """The chat template refuses the conversation, or there is none. The client's fault."""


def render(tokenizer: Tokenizer, conversation: Conversation) -> str:
    """
    The prompt of a conversation, as text. Changes nothing.

    Raises:
        TemplateError: the template raised, or the model has none.
    """
    messages = [_template_message(message) for message in conversation.messages]
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in conversation.tools] or None,
            add_generation_prompt=True,
            tokenize=False,
            **conversation.template,
        )
    except Exception as error:  # the template is the model's code: anything may come out of it
        raise TemplateError(
            f"the chat template cannot render this conversation: {error}"
        ) from error
    return str(text)


def switches(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> frozenset[str]:
    """
    The settings of thinking that the template heeds: with which a prompt is another one.

    Args:
        settings: those that the server gives in any case.
    """
    hello = Conversation(messages=(Message(role="user", content="Hello"),))

    def rendered(name: str, value: Any) -> str:
        return render(tokenizer, attrs.evolve(hello, template={**settings, name: value}))

    found = set()
    for name, values in SWITCHES.items():
        try:
            if len({rendered(name, value) for value in values}) > 1:
                found.add(name)
        except TemplateError:  # it does not take the setting
            continue
    return frozenset(found)


def encode(tokenizer: Tokenizer, text: str, *, special: bool) -> tuple[int, ...]:
    """
    The token ids of a prompt.

    Args:
        special: whether the tokenizer adds its special tokens; a rendered template has them.
    """
    return tuple(tokenizer.encode(text, add_special_tokens=special))


def prompt_ids(tokenizer: Tokenizer, conversation: Conversation) -> tuple[int, ...]:
    """
    The token ids of a conversation's prompt. Changes nothing.

    Raises:
        TemplateError: the template raised, or the model has none.
    """
    return encode(tokenizer, render(tokenizer, conversation), special=False)


def call_arguments(text: str) -> str | dict[str, Any]:
    """
    The arguments of a call as a template renders them: an object. What is none (a model may write
    anything) stays as it is.
    """
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) and fault_of(found) is None else text


def message_of(parts: Sequence[AnswerPart]) -> Message:
    """An answer as its client will send it back: words, thoughts and calls apart."""

    words = (_words(part) for part in parts)
    return Message(
        role="assistant",
        content="".join(words),
        reasoning="".join(part.text for part in parts if isinstance(part, Thought)) or None,
        tool_calls=tuple(
            {
                "id": part.id,
                "type": "function",
                "function": {"name": part.name, "arguments": call_arguments(part.arguments)},
            }
            for part in parts
            if isinstance(part, Called) and part.cut is None
        ),
    )


def _words(part: AnswerPart) -> str:
    """What a part says. A call that was cut off is only words: templates want whole arguments."""
    match part:
        case Said(text):
            return text
        case Called(cut=str(text)):
            return text
        case _:
            return ""


def next_role(said: Message) -> NextRole:
    """Who speaks after an answer: a tool, where it calls one."""
    return "tool" if said.tool_calls else "user"


def next_turns(conversation: Conversation, said: Message) -> tuple[Conversation, Conversation]:
    """
    The conversation as a client will send it after an answer, with one and another text next.

    A client answers all calls, and some templates refuse one that is not answered.
    """
    called = [call["id"] for call in said.tool_calls]

    def going_on(text: str) -> Conversation:
        results = [Message(role="tool", content=text, tool_call_id=one) for one in called]
        follows = results or [Message(role="user", content=text)]
        return attrs.evolve(conversation, messages=(*conversation.messages, said, *follows))

    one, other = _NEXT_TEXTS
    return going_on(one), going_on(other)


def conversation_parts(conversation: Conversation) -> tuple[tuple[str, bytes], ...]:
    """
    The parts of a conversation in order: (label, canonical bytes).

    Tools come first, since what stands in front of everything else changes everything behind it.
    What clients change while the conversation stays the same one is no part: template settings
    (thinking is switched on and off), what was thought, and the ids of calls. Where these make
    another prompt, its token ids say from where on, and they alone decide what is reused.
    """
    parts: list[tuple[str, bytes]] = []
    if conversation.tools:
        parts.append(("tools", _encoder.encode(conversation.tools)))
    for message in conversation.messages:
        parts.append((message.role, _encoder.encode(_compared(message))))
    return tuple(parts)


def _compared(message: Message) -> dict[str, Any]:
    """
    A message as it is compared. Clients drop what was thought as soon as a user speaks, and those
    in between number calls anew.
    """
    calls = [
        {key: value for key, value in call.items() if key != "id"} for call in message.tool_calls
    ]
    return {"content": message.content, "name": message.name, "tool_calls": calls}


def chain_of(parts: Sequence[tuple[str, bytes]], *, secret: bytes, tenant: str) -> tuple[Part, ...]:
    """The chain of parts: each part's hash goes over the one before."""
    chain: list[Part] = []
    parent = ""
    for label, content in parts:
        parent = part_hash(
            secret=secret, tenant=tenant, parent=parent, label=label, content=content
        )
        chain.append((label, parent))
    return tuple(chain)


def _template_message(message: Message) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        rendered["name"] = message.name
    return rendered
