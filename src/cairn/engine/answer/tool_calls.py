"""
Reads tool calls from the text of an answer, with the parser that mlx-lm has for the model.

A parser is library code that runs on arbitrary model output. Whatever it returns or raises, this
module returns calls that a client can act on, or raises ``NoCall``. It does not import MLX.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from cairn.journal.call_formats import OPEN_MAX, arguments_text, open_too_often
from cairn.journal.events import CallFault

_DETAIL_MAX = 500

Parser = Callable[[str, Any], Any]
"""
mlx-lm's ``parse_tool_call``: takes the text between the markers and the available tools, and
returns one call or a list, each with ``name``, ``arguments`` and, in some formats, ``id``.
"""


@attrs.frozen(kw_only=True)
class Call:
    """
    A tool call.

    Attributes:
        arguments: a JSON object, as text.
        id: the id that the model gave it, if any.
    """

    name: str
    arguments: str
    id: str | None


class NoCall(Exception):
    """
    Text that began like a call is not one. ``AnswerParts`` passes it to the client as text.

    Attributes:
        reason: for the public part of the journal.
        detail: what is wrong, in Unicode; may contain words of the answer.
    """

    def __init__(self, reason: CallFault, detail: str) -> None:
        super().__init__(detail)
        self.reason: CallFault = reason
        self.detail = detail[:_DETAIL_MAX].encode(errors="replace").decode()


def read_calls(parse: Parser, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[Call, ...]:
    """
    The calls in a text, at least one. Modifies nothing.

    Raises:
        NoCall: it contains no call, or one of them is invalid.
    """
    if not is_json(text) and (tag := open_too_often(text)) is not None:
        raise NoCall("unparsable", f"<{tag}> is open in it more than {OPEN_MAX} times")
    try:
        found = parse(text, [_for_parser(tool) for tool in tools])
    except Exception as error:
        raise NoCall("unparsable", f"{type(error).__name__}: {error}") from error
    calls = found if isinstance(found, list) else [found]
    if not calls:
        raise NoCall("unparsable", "it has no call")
    offered = {tool["function"]["name"]: _properties(tool) for tool in tools}
    return tuple(_call(one, text, offered) for one in calls)


def is_json(text: str) -> bool:
    """Whether a text is a complete JSON value, which cannot have been cut off."""
    try:
        json.loads(text.strip())
    except (ValueError, RecursionError):
        return False
    return True


def _for_parser(tool: Mapping[str, Any]) -> dict[str, Any]:
    """
    A tool in a form that every parser accepts: ``parameters`` is present, and all schemas are
    objects. Some parsers would fail otherwise, and the model would be blamed for it.
    """
    function = tool["function"]
    parameters = function.get("parameters")
    plain = {
        **(parameters if isinstance(parameters, Mapping) else {}),
        "properties": {
            name: schema if isinstance(schema, Mapping) else {}
            for name, schema in _properties(tool).items()
        },
    }
    return {**tool, "function": {**function, "parameters": plain}}


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = tool["function"].get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _call(found: Any, text: str, offered: Mapping[str, Mapping[str, Any]]) -> Call:
    if not isinstance(found, dict):
        raise NoCall("unparsable", "it is not an object")
    name, arguments, given_id = found.get("name"), found.get("arguments"), found.get("id")
    if not isinstance(name, str) or not name or not _is_unicode(name):
        raise NoCall("no_name", "it does not name a function")
    if arguments is None and ("arguments" in found or found.keys() <= {"name", "id"}):
        arguments = {}
    # The parser of GLM's format makes a call of any text: the first word is the name, and the rest,
    # if any, an argument "raw".
    is_raw = isinstance(arguments, dict) and arguments.keys() == {"raw"}
    if is_raw and "raw" not in offered.get(name, ()):
        raise NoCall("unparsable", "the parser found no arguments in it")
    if name not in offered and name == text.strip():
        raise NoCall("unparsable", "it is a word, but not the name of an available tool")
    is_id = isinstance(given_id, str) and bool(given_id) and _is_unicode(given_id)
    return Call(name=name, arguments=_arguments(arguments), id=given_id if is_id else None)


def _arguments(found: Any) -> str:
    """Arguments as JSON text."""
    try:
        value = json.loads(found) if isinstance(found, str) else found
        if not isinstance(value, dict):
            raise NoCall("invalid_arguments", f"its arguments are not a JSON object: {found}")
        return arguments_text(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoCall("invalid_arguments", f"its arguments are not JSON: {error}") from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
