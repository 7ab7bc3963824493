"""
Reads Anthropic's system prompt, messages and tools into canonical form.

Conversations are compared by hashes of this form, so differences without meaning are removed:
content as a string or a list of blocks, cache hints, the billing header line, deferred tools that
no message has loaded yet. The form of a message depends only on the message itself, the tools and
the messages before it, so it never changes later. (Later messages only decide whether it is still
refused.)

Tool results that are not text, and blocks from Anthropic's own server tools, are replaced by
constant texts (``placeholders``), so that a conversation that began elsewhere can continue here.
Some clients put a tool's output after its result, in the content of the user message (Claude Code
does this with the pages of a PDF). So images and documents count as tool output from a result to
the next assistant message, and so do those in a turn that was already answered, perhaps by a model
that reads images.

A user message may contain tool results and system text among its own blocks. It is then split into
several messages, in the order of its blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from cairn.engine.json_text import fault_of
from cairn.engine.prompt.template import Message
from cairn.http.wire.checks import (
    BODY_BYTES_MAX,
    CALLS_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    ClientError,
    JsonObject,
    check_count,
    check_known,
    check_name,
    given,
    missing,
    schema_at,
)
from cairn.http.wire.formats import function_tool
from cairn.http.wire.placeholders import DOCUMENT, OF_PARTS, UNKNOWN, answered, of_server_tools

_ROLES = ("user", "assistant", "system")

#: The first line of Claude Code's system prompt. It says which account is billed, and differs in
#: each version and conversation.
_BILLING = "x-anthropic-billing-header:"

_OFFERED = "This function can be called from here on:\n{definition}\n"
_WITHDRAWN = "This function cannot be called any more: {name}\n"

#: Prefixes a failed tool result: templates have no field for it.
_FAILED = "Error: "

#: The parts of a tool result that are text, or are converted to text.
_READ_IN_RESULTS = ("text", "document", "search_result", "tool_reference")


class WireBlock(msgspec.Struct):
    """
    A block of any type. Only the type of an image block is read. ``content`` is an object in some
    blocks that server tools make.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[WireBlock] | JsonObject | None = None
    is_error: bool | None = None
    title: str | None = None
    context: str | None = None
    source: JsonObject | str | None = None
    tool_name: str | None = None
    tool: JsonObject | None = None
    cache_control: JsonObject | None = None


class WireMessage(msgspec.Struct):
    """A message as it is sent."""

    role: str
    content: str | list[WireBlock]


class WireTool(msgspec.Struct):
    """A tool as it is sent."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    defer_loading: bool | None = None
    strict: bool | None = None
    input_examples: list[Any] | None = None
    cache_control: JsonObject | None = None


@attrs.frozen(kw_only=True)
class Tools:
    """
    The tools of a request, in canonical form.

    Attributes:
        offered: from the beginning.
        deferred: by name, those that are offered once a message refers to them.
    """

    offered: tuple[JsonObject, ...] = ()
    deferred: Mapping[str, JsonObject] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Talk:
    """
    The messages of a request in canonical form.

    Attributes:
        loaded: the deferred tools that the messages offer, in order.
        withdrawn: names of the tools that, by the last mention, can no longer be called.
    """

    messages: tuple[Message, ...]
    loaded: tuple[JsonObject, ...]
    withdrawn: frozenset[str]


def read_tools(wire: Sequence[WireTool]) -> tuple[Tools, set[str]]:
    """
    The tools in canonical form, and what of them is ignored. Tools that run on Anthropic's servers,
    and tools that only its models know, are left out.

    Raises:
        ClientError: one of them cannot be used.
    """
    check_count(wire, "tools", TOOLS_MAX)
    offered: list[JsonObject] = []
    deferred: dict[str, JsonObject] = {}
    ignored: set[str] = set()
    for index, tool in enumerate(wire):
        if tool.input_examples:
            ignored.add("tools.input_examples")
        if tool.type not in (None, "custom"):
            ignored.add(f"tools.{tool.type}")
            continue
        read = _tool(tool, f"tools[{index}]")
        if tool.defer_loading:
            deferred[read["function"]["name"]] = read
        else:
            offered.append(read)
    return Tools(offered=tuple(offered), deferred=deferred), ignored


def read_talk(
    system: str | Sequence[WireBlock] | None, wire: Sequence[WireMessage], tools: Tools
) -> tuple[Talk, set[str]]:
    """
    The system prompt and the messages in canonical form, and the types of the blocks that are
    replaced by a placeholder or left out.

    Raises:
        ClientError: one of them cannot be used.
    """
    if not wire:
        raise ClientError("messages is empty; send at least one message", param="messages")
    check_count(wire, "messages", MESSAGES_MAX)
    reader = _MessageReader(tools)
    messages = list(reader.system(system))
    for index, (message, is_past) in enumerate(_with_past(wire)):
        messages += reader.message(message, f"messages[{index}]", is_past=is_past)
        # One message on the wire may become several, and a template iterates over all of them.
        check_count(messages, "messages", MESSAGES_MAX)
    talk = Talk(
        messages=tuple(messages),
        loaded=tuple(reader.loaded.values()),
        withdrawn=frozenset(reader.withdrawn),
    )
    return talk, reader.ignored


def continues_last(messages: Sequence[Message]) -> bool:
    """Whether the answer is the rest of the last message: it is the assistant's, without calls."""
    return messages[-1].role == "assistant" and not messages[-1].tool_calls


def check_last(messages: Sequence[Message], wire: Sequence[WireMessage]) -> None:
    """
    Refuse messages that no answer can follow.

    Args:
        messages: those of the request in canonical form.

    Raises:
        ClientError: the last one has calls, which no text continues.
    """
    if messages[-1].role == "assistant" and not continues_last(messages):
        raise ClientError(
            f"messages[{len(wire) - 1}] is an assistant message with tool_use, which no text "
            "continues; send the results, or leave it out",
            param=f"messages[{len(wire) - 1}].content",
            code="unsupported_value",
        )


def _with_past(wire: Sequence[WireMessage]) -> Iterator[tuple[WireMessage, bool]]:
    """
    Each message, and whether placeholders replace its images and documents. They do in a user
    message that was already answered, that has a tool result, or that follows one that has, with no
    assistant message in between.
    """
    first = answered([message.role for message in wire])
    has_results = False
    for index, message in enumerate(wire):
        if message.role == "assistant":
            has_results = False
        elif message.role == "user" and isinstance(message.content, list):
            has_results |= any(block.type == "tool_result" for block in message.content)
        yield message, message.role == "user" and (has_results or index < first)


def ttls(
    hint: JsonObject | None,
    system: str | Sequence[WireBlock] | None,
    wire: Sequence[WireMessage],
    tools: Sequence[WireTool],
) -> tuple[Any, ...]:
    """
    The ``ttl`` of each cache hint: how long to keep what comes before it.

    Args:
        hint: that of the request itself.
    """
    hints = [hint, *(tool.cache_control for tool in tools), *_hints(system)]
    for message in wire:
        hints += _hints(message.content)
    return tuple(one.get("ttl") for one in hints if one is not None)


def _hints(
    content: str | Iterable[WireBlock] | JsonObject | None,
) -> Iterator[JsonObject | None]:
    # Not recursive, because a client may nest blocks very deeply.
    waiting = [content]
    while waiting:
        blocks = waiting.pop()
        for block in () if blocks is None or isinstance(blocks, str | Mapping) else blocks:
            yield block.cache_control
            waiting.append(block.content)


def _tool(wire: WireTool, where: str) -> JsonObject:
    if wire.name is None:
        raise missing(f"{where}.name")
    check_name(wire.name, f"{where}.name")
    schema = schema_at(wire.input_schema, f"{where}.input_schema")
    return function_tool(wire.name, wire.description, schema, strict=wire.strict)


class _MessageReader:
    """
    Reads messages in order.

    Attributes:
        loaded: the deferred tools that were offered so far, by name.
        withdrawn: the names of the tools that were withdrawn since.
        ignored: the types of the blocks that were replaced by a placeholder or left out.
    """

    def __init__(self, tools: Tools) -> None:
        self._deferred = tools.deferred
        self._offered = {tool["function"]["name"]: tool for tool in tools.offered}
        self._loaded_characters = 0
        self.withdrawn: set[str] = set()
        self.loaded: dict[str, JsonObject] = {}
        self.ignored: set[str] = set()

    def system(self, wire: str | Sequence[WireBlock] | None) -> Iterator[Message]:
        """The system prompt, if there is one."""
        text = "".join(
            _unbilled(self._system_text(block, f"system[{index}]"))
            for index, block in enumerate(_blocks(wire or ""))
        )
        if text:
            yield Message(role="system", content=text)

    def message(self, wire: WireMessage, where: str, *, is_past: bool = False) -> Iterator[Message]:
        """
        The canonical messages of one message on the wire.

        Args:
            is_past: whether placeholders replace images and documents.
        """
        check_known(wire.role, _ROLES, f"{where}.role")
        blocks = _blocks(wire.content)
        match wire.role:
            case "user":
                yield from self._user(blocks, f"{where}.content", is_past=is_past)
            case "assistant":
                yield self._assistant(blocks, f"{where}.content")
            case _:  # system
                yield self._inserted(blocks, f"{where}.content")

    def _user(self, blocks: Sequence[WireBlock], where: str, *, is_past: bool) -> Iterator[Message]:
        words: list[str] = []
        is_whole = True

        def said() -> Iterator[Message]:
            if words:
                yield Message(role="user", content="".join(words))
            words.clear()

        for index, block in enumerate(blocks):
            place = f"{where}[{index}]"
            if block.type == "tool_result":
                yield from said()
                yield self._result(block, place)
                is_whole = False
            elif block.type == "mid_conv_system":
                yield from said()
                yield self._inserted(_content(block, place), f"{place}.content")
                is_whole = False
            else:
                placeholder = _placeholder(block) if is_past else None
                words.append(self._replaced(block, placeholder) or self._text(block, place))
        if is_whole:
            # Even if it is empty.
            yield Message(role="user", content="".join(words))
        else:
            yield from said()

    def _assistant(self, blocks: Sequence[WireBlock], where: str) -> Message:
        said, thought, calls = "", "", []
        check_count([block for block in blocks if block.type == "tool_use"], where, CALLS_MAX)
        for index, block in enumerate(blocks):
            place = f"{where}[{index}]"
            match block.type:
                case "text":
                    said += given(block.text, f"{place}.text")
                case "thinking":
                    thought += given(block.thinking, f"{place}.thinking")
                case "redacted_thinking":
                    pass  # another model's; it cannot be read
                case "tool_use":
                    calls.append(_call(block, place))
                case _:
                    said += self._of_server(block, place)
        return Message(
            role="assistant", content=said, reasoning=thought or None, tool_calls=tuple(calls)
        )

    def _inserted(self, blocks: Sequence[WireBlock], where: str) -> Message:
        """A system message in the middle of a conversation."""
        text = "".join(
            self._system_text(block, f"{where}[{index}]") for index, block in enumerate(blocks)
        )
        return Message(role="system", content=text)

    def _system_text(self, block: WireBlock, where: str) -> str:
        match block.type:
            case "text":
                return given(block.text, f"{where}.text")
            case "tool_addition":
                return self._offer(given(block.tool, f"{where}.tool"), f"{where}.tool")
            case "tool_removal":
                name = _name_of(given(block.tool, f"{where}.tool"), f"{where}.tool")
                self.withdrawn.add(name)
                return _WITHDRAWN.format(name=name)
            case _:
                raise _unsupported(block, where)

    def _result(self, block: WireBlock, where: str) -> Message:
        text = "".join(
            self._replaced(part, _of_result(part)) or self._text(part, f"{where}.content[{index}]")
            for index, part in enumerate(_content(block, where))
        )
        return Message(
            role="tool",
            content=f"{_FAILED}{text}" if block.is_error else text,
            tool_call_id=given(block.tool_use_id, f"{where}.tool_use_id") or None,
        )

    def _text(self, block: WireBlock, where: str) -> str:
        """The text of a block of a user or a tool."""
        match block.type:
            case "text":
                return given(block.text, f"{where}.text")
            case "document":
                return _document(block, where)
            case "search_result":
                return _search_result(block, where)
            case "tool_reference":
                name = given(block.tool_name, f"{where}.tool_name")
                return self._load(self._named(name, f"{where}.tool_name"), where)
            case _:
                return self._of_server(block, where)

    def _of_server(self, block: WireBlock, where: str) -> str:
        """The placeholder for a block of Anthropic's server tools. Refuses other kinds."""
        found = self._replaced(block, of_server_tools(block.type))
        if found is None:
            raise _unsupported(block, where)
        return found

    def _replaced(self, block: WireBlock, placeholder: str | None) -> str | None:
        """The placeholder, if there is one for the block. Records the block as ignored."""
        if placeholder is not None:
            self.ignored.add(f"messages.{block.type}")
        return placeholder

    def _offer(self, tool: JsonObject, where: str) -> str:
        if tool.get("type") == "tool_definition":
            definition = _converted(tool.get("definition"), f"{where}.definition")
            return self._load(_tool(definition, f"{where}.definition"), where)
        name = _name_of(tool, where)
        return self._load(self._named(name, f"{where}.name"), where)

    def _named(self, name: str, where: str) -> JsonObject:
        """The tool that a message refers to."""
        for known in (self.loaded, self._deferred, self._offered):
            if name in known:
                return known[name]
        raise ClientError(
            f"{where} is {name[:100]!r}, which is not among the tools of this request; add it",
            param=where,
        )

    def _load(self, tool: JsonObject, where: str) -> str:
        """The text that offers a tool to the model. Records the tool as loaded."""
        name = tool["function"]["name"]
        self.withdrawn.discard(name)
        if self._offered.get(name) is not tool:
            self.loaded[name] = tool
        text = _OFFERED.format(definition=json.dumps(tool, ensure_ascii=False))
        self._loaded_characters += len(text)
        if self._loaded_characters > BODY_BYTES_MAX:
            # A few bytes can name a tool with a long definition any number of times.
            raise ClientError(
                f"{where}: the definitions of the tools that messages name are longer than "
                f"{BODY_BYTES_MAX} characters together; name fewer",
                param=where,
            )
        return text


def _blocks(content: str | Sequence[WireBlock]) -> Sequence[WireBlock]:
    return [WireBlock(type="text", text=content)] if isinstance(content, str) else content


def _content(block: WireBlock, where: str) -> Sequence[WireBlock]:
    """The blocks within a block."""
    if isinstance(block.content, Mapping):
        raise ClientError(
            f"{where}.content must be a string or a list of blocks",
            param=f"{where}.content",
            code="invalid_type",
        )
    return _blocks(block.content or "")


def _of_result(part: WireBlock) -> str | None:
    """The placeholder for a part of a result; None for a part that can be read."""
    if (found := _placeholder(part)) is not None:
        return found
    return None if part.type in _READ_IN_RESULTS else of_server_tools(part.type) or UNKNOWN


def _placeholder(block: WireBlock) -> str | None:
    """
    The placeholder for an image or a document that a tool returned; None for other blocks, and for
    a text document.
    """
    if block.type == "document" and block.source is not None and _text_of(block.source) is None:
        return DOCUMENT
    return OF_PARTS.get(block.type)


def _unbilled(text: str) -> str:
    while text.startswith(_BILLING):
        _, _, text = text.partition("\n")
    return text


def _call(block: WireBlock, where: str) -> JsonObject:
    arguments: str | JsonObject = given(block.input, f"{where}.input")
    if fault_of(arguments) is not None:
        # The model wrote these arguments, so they must not end the conversation.
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except RecursionError as error:
            raise ClientError(
                f"{where}.input is nested too deeply", param=f"{where}.input"
            ) from error
    function = {"name": given(block.name, f"{where}.name"), "arguments": arguments}
    return {"id": block.id or "", "type": "function", "function": function}


def _document(block: WireBlock, where: str) -> str:
    if block.source is None:
        raise missing(f"{where}.source")
    text = _text_of(block.source)
    if text is None:
        raise ClientError(
            f"{where} is not a text document; this model accepts documents with a source of type "
            "text or content",
            param=f"{where}.source",
            code="unsupported_content",
        )
    return _titled(block.title, block.context, text)


def _text_of(source: JsonObject | str) -> str | None:
    """The text of a document's source; None if the source is not text."""
    match source:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": list(parts)}:
            texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
            words = [text for text in texts if isinstance(text, str)]
            return "".join(words) if len(words) == len(texts) else None
        case _:
            return None


def _search_result(block: WireBlock, where: str) -> str:
    source = block.source if isinstance(block.source, str) else None
    texts = [
        given(part.text, f"{where}.content[{index}].text")
        for index, part in enumerate(_content(block, where))
    ]
    return _titled(block.title, source, "".join(texts))


def _titled(*lines: str | None) -> str:
    """The given lines, one below the other, without the empty ones."""
    return "\n".join(line for line in lines if line) + "\n"


def _name_of(tool: JsonObject, where: str) -> str:
    name = tool.get("name")
    if tool.get("type") != "tool_reference" or not isinstance(name, str):
        raise ClientError(
            f'{where} must be {{"type": "tool_reference", "name": ...}}',
            param=where,
            code="unsupported_value",
        )
    return name


def _converted(definition: Any, where: str) -> WireTool:
    try:
        return msgspec.convert(definition, WireTool)
    except msgspec.ValidationError as error:
        raise ClientError(f"{where}: {error}", param=where, code="invalid_type") from error


def _unsupported(block: WireBlock, where: str) -> ClientError:
    return ClientError(
        f"{where} has the type {block.type[:40]!r}, which is not supported; send text",
        param=f"{where}.type",
        code="unsupported_content",
    )
