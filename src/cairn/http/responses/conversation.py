"""
The items and tools of OpenAI's responses in canonical form.

On the wire, an assistant's turn is several items (reasoning, text, each call). Consecutive ones are
one message here, as an answer is. So an answer that a client sends back item by item is the same
message as before, and so is one from the journal.

Items and tools of unsupported types are left out, and reported as ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from cairn.actors.requests.messages import StoredTurn
from cairn.engine.answer.parts import AnswerPart, Called, Said, Thought
from cairn.engine.prompt.template import Message, call_arguments
from cairn.http.wire.checks import (
    CALLS_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    ClientError,
    JsonObject,
    check_count,
    check_json,
    check_known,
    check_name,
    given,
)
from cairn.http.wire.formats import function_tool
from cairn.http.wire.json import to_struct
from cairn.http.wire.placeholders import OF_PARTS, answered

T = TypeVar("T")

ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "item_reference",
    "compaction",
)
"""The item types that are read."""

SEALED = "cairn:"
"""
The prefix of ``encrypted_content`` in reasoning and summaries from this server. The text is not
encrypted: clients keep it unchanged and send it back, even those that drop the reasoning itself.
"""

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_REFERENCE = re.compile(
    r"(?:msg|rs|fc|fco)_(?P<request>.+)_(?P<asked>in)?(?P<index>[0-9]{1,9})", re.ASCII
)
"""The id of an output item, or, with ``asked``, of an input item of the request."""


Item = JsonObject


class WirePart(msgspec.Struct):
    """A part of a content list. Only the type of an image part is read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class WireMessage(msgspec.Struct):
    """An item that is a message."""

    role: str
    content: str | list[WirePart]


class WireCall(msgspec.Struct):
    """An item that is a function call."""

    call_id: str
    name: str
    arguments: str


class WireResult(msgspec.Struct):
    """An item that is the result of a function call."""

    output: str | list[WirePart]
    call_id: str | None = None


class WireReasoning(msgspec.Struct):
    """A reasoning item."""

    summary: list[WirePart] | None = None
    content: list[WirePart] | None = None
    encrypted_content: str | None = None


class WireTool(msgspec.Struct):
    """A function tool."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


def read_input(
    wire: str | Sequence[Item] | None, turns: Mapping[str, StoredTurn]
) -> tuple[tuple[Message, ...], set[str]]:
    """
    The input in canonical form; and the types of items that are left out, and of parts that are
    replaced by placeholders.

    Args:
        turns: those that references may refer to, by their requests.

    Raises:
        ClientError: an item cannot be used.
    """
    if wire is None or isinstance(wire, str):
        return () if wire is None else (Message(role="user", content=wire),), set()
    check_count(wire, "input", MESSAGES_MAX)
    reader = _ItemReader(turns)
    for index, (item, placeholders) in enumerate(_with_placeholders(wire)):
        reader.read(item, f"input[{index}]", placeholders)
    return reader.messages(), reader.ignored


def referred_to(wire: str | Sequence[Item] | None) -> frozenset[str]:
    """The requests whose answers the input refers to."""
    if wire is None or isinstance(wire, str):
        return frozenset()
    names = (_REFERENCE.fullmatch(str(item.get("id"))) for item in wire if _is_reference(item))
    return frozenset(found["request"] for found in names if found is not None)


def _with_placeholders(
    wire: Sequence[Item],
) -> Iterator[tuple[Item, Mapping[str, str]]]:
    """Each item with the placeholders for its parts, by part type."""
    roles = [
        "assistant" if _type_of(item) in ("function_call", "reasoning") else str(item.get("role"))
        for item in wire
    ]
    first = answered(roles)
    for index, (item, role) in enumerate(zip(wire, roles, strict=True)):
        is_past = role == "user" and index < first
        is_result = _type_of(item) == "function_call_output"
        yield item, OF_PARTS if is_past or is_result else {}


def read_tools(
    wire: Sequence[JsonObject],
) -> tuple[tuple[JsonObject, ...], set[str]]:
    """
    The functions as the template takes them, and the types of other tools, which are ignored.

    Raises:
        ClientError: one of them cannot be used.
    """
    check_count(wire, "tools", TOOLS_MAX)
    functions, ignored = [], set()
    for index, tool in enumerate(wire):
        kind = tool.get("type", "function")
        if kind == "function":
            functions.append(_tool(tool, f"tools[{index}]"))
        else:
            ignored.add(f"tools.{kind}")
    return tuple(functions), ignored


def _tool(tool: JsonObject, where: str) -> JsonObject:
    wire = _at(tool, WireTool, where)
    check_name(wire.name, f"{where}.name")
    if wire.parameters is not None:
        check_json(wire.parameters, f"{where}.parameters")
    return function_tool(wire.name, wire.description, wire.parameters, strict=wire.strict)


class _ItemReader:
    """
    Reads items in order. Consecutive items of an assistant become one message.

    Attributes:
        ignored: the types of items that were left out, and of parts that were replaced.
    """

    def __init__(self, turns: Mapping[str, StoredTurn]) -> None:
        self.ignored: set[str] = set()
        self._turns = turns
        self._asked: dict[str, Mapping[str, Item]] = {}
        self._messages: list[Message] = []
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[JsonObject] = []
        self._acts = False

    def messages(self) -> tuple[Message, ...]:
        """The messages that were read."""
        self._pass_turn()
        return tuple(self._messages)

    def read(self, item: Item, where: str, placeholders: Mapping[str, str]) -> None:
        """
        Read an item.

        Args:
            placeholders: for its parts, by their types.
        """
        kind = _type_of(item)
        match kind:
            case "message":
                self._message(_at(item, WireMessage, where), where, placeholders)
            case "function_call":
                wire = _at(item, WireCall, where)
                self._call(wire.call_id, wire.name, wire.arguments, where)
            case "function_call_output":
                result = _at(item, WireResult, where)
                self._pass_turn()
                text = self._text(result.output, f"{where}.output", placeholders)
                self._messages.append(
                    Message(role="tool", content=text, tool_call_id=result.call_id or None)
                )
            case "reasoning":
                self._think(_thought(_at(item, WireReasoning, where), where))
            case "item_reference":
                self._refer(item, where)
            case "compaction" if str(item.get("encrypted_content")).startswith(SEALED):
                self._acts = True
                self._said.append(str(item["encrypted_content"]).removeprefix(SEALED))
            case None:
                raise ClientError(
                    f"{where} has neither a type nor a role; send a message with a role, or an "
                    f"item of one of the types {', '.join(ITEMS)}",
                    param=f"{where}.type",
                    code="missing_required_parameter",
                )
            case _:
                self.ignored.add(f"input.{kind}")

    def _message(self, wire: WireMessage, where: str, placeholders: Mapping[str, str]) -> None:
        check_known(wire.role, _ROLES, f"{where}.role")
        text = self._text(wire.content, f"{where}.content", placeholders)
        if wire.role == "assistant":
            self._acts = True
            self._said.append(text)
            return
        self._pass_turn()
        role = "system" if wire.role == "developer" else wire.role
        self._messages.append(Message(role=role, content=text))

    def _text(
        self, content: str | Sequence[WirePart], where: str, placeholders: Mapping[str, str]
    ) -> str:
        if isinstance(content, str):
            return content
        self.ignored |= {f"input.{part.type}" for part in content if part.type in placeholders}
        return "".join(
            placeholders.get(part.type) or _part(part, f"{where}[{index}]")
            for index, part in enumerate(content)
        )

    def _call(self, call_id: str, name: str, arguments: str, where: str) -> None:
        self._acts = True
        function = {"name": name, "arguments": call_arguments(arguments)}
        self._calls.append({"id": call_id, "type": "function", "function": function})
        check_count(self._calls, where, CALLS_MAX)

    def _think(self, text: str) -> None:
        self._acts = True
        self._thought.append(text)

    def _refer(self, item: Item, where: str) -> None:
        name = str(item.get("id"))
        if (asked := self._asked_item(name)) is not None:
            self.read(asked, where, {})  # stored turns contain only text
            return
        match self._referred(name):
            case Said(text):
                self._acts = True
                self._said.append(text)
            case Thought(text):
                self._think(text)
            case Called(cut=str(text)):
                self._acts = True
                self._said.append(text)
            case Called() as call:
                self._call(call.id, call.name, call.arguments, where)
            case None:
                raise ClientError(
                    f"{where}.id is {name[:100]!r}, which is not an item of a stored response; "
                    "send the item itself",
                    param=f"{where}.id",
                    code="item_not_found",
                )

    def _referred(self, name: str) -> AnswerPart | None:
        found = _REFERENCE.fullmatch(name)
        turn = self._turns.get(found["request"]) if found is not None else None
        if found is None or found["asked"] is not None or turn is None:
            return None
        if int(found["index"]) >= len(turn.parts):
            return None
        return turn.parts[int(found["index"])]

    def _asked_item(self, name: str) -> Item | None:
        """An input item of a stored request."""
        found = _REFERENCE.fullmatch(name)
        if found is None or found["asked"] is None or found["request"] not in self._turns:
            return None
        request = found["request"]
        if request not in self._asked:
            items = items_of(self._turns[request].asked, request)
            self._asked[request] = {item["id"]: item for item in items}
        return self._asked[request].get(name)

    def _pass_turn(self) -> None:
        """Complete the current assistant message, if there is one."""
        if self._acts:
            self._messages.append(
                Message(
                    role="assistant",
                    content="".join(self._said),
                    reasoning="".join(self._thought) or None,
                    tool_calls=tuple(self._calls),
                )
            )
        self._said, self._thought, self._calls = [], [], []
        self._acts = False


def _type_of(item: Item) -> str | None:
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference" if "id" in item else None
    return str(kind)


def _is_reference(item: Item) -> bool:
    return _type_of(item) == "item_reference"


def _thought(wire: WireReasoning, where: str) -> str:
    if wire.encrypted_content is not None and wire.encrypted_content.startswith(SEALED):
        return wire.encrypted_content.removeprefix(SEALED)
    # Content encrypted by another server cannot be read, but the item may also have text.
    field = "content" if wire.content else "summary"
    parts = wire.content or wire.summary or ()
    return "".join(given(part.text, f"{where}.{field}[{n}].text") for n, part in enumerate(parts))


def _part(part: WirePart, where: str) -> str:
    if part.type not in _TEXTS:
        raise ClientError(
            f"{where} has the type {part.type[:40]!r}; this model accepts only text parts",
            param=f"{where}.type",
            code="unsupported_content",
        )
    if part.type == "refusal":
        return given(part.refusal, f"{where}.refusal")
    return given(part.text, f"{where}.text")


def _at(fields: JsonObject, kind: type[T], where: str) -> T:
    """
    The fields at a path of the body, as a struct.

    Raises:
        ClientError: one is missing or of another type.
    """
    try:
        return to_struct(dict(fields), kind)
    except ClientError as error:
        below = f"{where}.{error.param}" if error.param else where
        _, _, fact = error.message.partition(error.param or "the body")
        raise ClientError(f"{below}{fact}", param=below, code=error.code) from error


def items_of(messages: Sequence[Message], name: str) -> Iterator[JsonObject]:
    """
    The input items of a request, as a client would send them; used for looking them up.

    Args:
        name: the part of the items' ids after their kind.
    """
    index = 0
    for message in messages:
        for item in _items(message):
            kind = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
            yield {"id": f"{kind.get(item['type'], 'msg')}_{name}_in{index}", **item}
            index += 1


def _items(message: Message) -> Iterator[JsonObject]:
    if message.role == "tool":
        yield {
            "type": "function_call_output",
            "status": "completed",
            "call_id": message.tool_call_id or "",
            "output": message.content,
        }
        return
    if message.reasoning is not None:
        text = {"type": "reasoning_text", "text": message.reasoning}
        yield {"type": "reasoning", "summary": [], "content": [text]}
    is_answer = message.role == "assistant"
    if message.content or not is_answer:
        text = {"type": "output_text" if is_answer else "input_text", "text": message.content}
        yield {
            "type": "message",
            "status": "completed",
            "role": message.role,
            "content": [{**text, "annotations": []} if is_answer else text],
        }
    for call in message.tool_calls:
        function = call["function"]
        arguments = function["arguments"]
        yield {
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": arguments
            if isinstance(arguments, str)
            else msgspec.json.encode(arguments).decode(),
        }
