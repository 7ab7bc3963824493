"""
From a conversation to token ids, and to the chain of parts by which conversations are compared.

A conversation here is in canonical form: adapters have removed what differs only on the wire
(string or block list, cache hints). The token ids of a prompt are a function of the request alone:
the template renders the whole, and the ids are those of the whole text (``encoder`` does not
tokenise again what it knows).

The tokenizer is an argument; nothing here knows MLX.
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
from cairn.journal.keys import framed, part_alone, part_hash
from cairn.journal.state import CONTINUED, Part

if TYPE_CHECKING:
    from cairn.engine.contract import Tokenizer

_encoder = msgspec.json.Encoder(order="deterministic")

CanonicalPart = tuple[str, bytes, bytes]
"""(label, canonical bytes, the bytes that name the part alone)"""

# Two messages that have no common prefix, even after a template strips them. One begins with a
# newline, which a tokenizer may join with the newline before it.
_NEXT_TEXTS = ("\nAnd then?", "7 more")


_CUT = "\ufdd1"
"""
After the content of a message that is continued, to find its end in the rendered prompt. Unicode
keeps this code point for such uses.
"""


@attrs.frozen(kw_only=True)
class Message:
    """
    One message in canonical form.

    Attributes:
        role: ``system``, ``user``, ``assistant``, ``tool``, ...
        content: its text.
        reasoning: the thinking that a client sends back with an assistant's message.
        tool_calls: ``{"id", "type": "function", "function": {"name", "arguments"}}``, arguments as
            an object if they are JSON.
        tool_call_id: for a tool's result, the call that it answers.
        name: the name of the speaker or the tool.
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
    A chat request in canonical form.

    Attributes:
        tools: as the template takes them.
        loaded_tools: tools that are available from a later message on. They are text in that
            message, so they are not a separate part and the template does not get them.
        calls: whether tools may be called. If not, they are in the prompt anyway, because
            leaving them out would change it from its first tokens on; what looks like a call is
            text then.
        template: further arguments of the template, such as ``enable_thinking``.
        continued: whether the last message is the assistant's, and the answer is the rest of it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    loaded_tools: tuple[Mapping[str, Any], ...] = ()
    calls: bool = True
    template: Mapping[str, Any] = attrs.field(factory=dict)
    continued: bool = False


class TemplateError(Exception):
    """The chat template refuses the conversation, or there is none. The client's fault."""


def render(tokenizer: Tokenizer, conversation: Conversation) -> str:
    """
    The prompt of a conversation, as text. Modifies nothing.

    Raises:
        TemplateError: the template raised, or the model has none.
    """
    messages = [_template_message(message) for message in conversation.messages]
    if conversation.continued:
        messages[-1]["content"] += _CUT
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in conversation.tools] or None,
            add_generation_prompt=not conversation.continued,
            tokenize=False,
            **conversation.template,
        )
    except Exception as error:  # the template is the model's code and may raise anything
        raise TemplateError(
            f"the chat template cannot render this conversation: {error}"
        ) from error
    if not conversation.continued:
        return str(text)
    before, cut, _ = str(text).rpartition(_CUT)
    if not cut:
        raise TemplateError(
            "the chat template does not show the last message as it is, so it cannot be continued"
        )
    return before


def characters_of(conversation: Conversation) -> int:
    """How many characters a conversation has, roughly, without what its template adds."""
    objects = [conversation.tools, *(message.tool_calls for message in conversation.messages)]
    texts = (text for one in conversation.messages for text in (one.content, one.reasoning))
    sizes = (len(_encoder.encode(one)) for one in objects if one)
    return sum(sizes) + sum(len(text) for text in texts if text is not None)


def switches(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> frozenset[str]:
    """
    The settings of thinking that the template supports: those that change the prompt.

    Args:
        settings: those that the server sets in any case.
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
        special: whether the tokenizer adds its special tokens; a rendered template contains them.
    """
    return tuple(tokenizer.encode(text, add_special_tokens=special))


def prompt_ids(tokenizer: Tokenizer, conversation: Conversation) -> tuple[int, ...]:
    """
    The token ids of a conversation's prompt. Modifies nothing.

    Raises:
        TemplateError: the template raised, or the model has none.
    """
    return encode(tokenizer, render(tokenizer, conversation), special=False)


def call_arguments(text: str) -> str | dict[str, Any]:
    """
    The arguments of a call as a template renders them: an object. Text that is not an object (a
    model may write anything) is returned unchanged.
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
    """
    The words of a part. A call that was cut off counts as words, because templates need complete
    arguments.
    """
    match part:
        case Said(text):
            return text
        case Called(cut=str(text)):
            return text
        case _:
            return ""


def next_role(said: Message) -> NextRole:
    """Who speaks after an answer: a tool if it calls one, else the user."""
    return "tool" if said.tool_calls else "user"


def next_turns(conversation: Conversation, said: Message) -> tuple[Conversation, Conversation]:
    """
    The conversation as a client will send it after an answer, with two different texts next.

    All calls get a result, because some templates refuse a conversation with an unanswered call.
    """
    if conversation.continued:
        begun = conversation.messages[-1]
        said = attrs.evolve(
            said,
            content=begun.content + said.content,
            reasoning=(begun.reasoning or "") + (said.reasoning or "") or None,
        )
        conversation = attrs.evolve(
            conversation, messages=conversation.messages[:-1], continued=False
        )
    called = [call["id"] for call in said.tool_calls]

    def going_on(text: str) -> Conversation:
        results = [Message(role="tool", content=text, tool_call_id=one) for one in called]
        follows = results or [Message(role="user", content=text)]
        return attrs.evolve(conversation, messages=(*conversation.messages, said, *follows))

    one, other = _NEXT_TEXTS
    return going_on(one), going_on(other)


def conversation_parts(conversation: Conversation) -> tuple[CanonicalPart, ...]:
    """
    The parts of a conversation in order. Tools have the same name alone in any order.

    Tools come first, because a change in front changes all that follows. Things that clients change
    within one conversation are not part of it: template settings (thinking is switched on and off),
    thoughts, and the ids of calls. If they change the prompt, its token ids show from where on, and
    only the token ids decide what is reused.
    """
    parts: list[CanonicalPart] = []
    if conversation.tools:
        in_order = framed(sorted(map(_encoder.encode, conversation.tools)))
        parts.append(("tools", _encoder.encode(conversation.tools), in_order))
    for message in conversation.messages:
        content = _encoder.encode(_compared(message))
        parts.append((message.role, content, content))
    if conversation.continued:
        parts[-1] = (CONTINUED, *parts[-1][1:])
    return tuple(parts)


def _compared(message: Message) -> dict[str, Any]:
    """
    A message as it is compared. Clients drop thoughts as soon as a user speaks, and proxies may
    number calls again.
    """
    calls = [
        {key: value for key, value in call.items() if key != "id"} for call in message.tool_calls
    ]
    return {"content": message.content, "name": message.name, "tool_calls": calls}


def chain_of(parts: Sequence[CanonicalPart], *, secret: bytes, tenant: str) -> tuple[Part, ...]:
    """The chain of parts: the hash of each part covers the hash before it."""
    chain: list[Part] = []
    parent = ""
    for label, content, by_itself in parts:
        parent = part_hash(
            secret=secret, tenant=tenant, parent=parent, label=label, content=content
        )
        alone = part_alone(secret=secret, tenant=tenant, label=label, content=by_itself)
        chain.append((label, parent, alone))
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
