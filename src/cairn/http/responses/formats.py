"""
What clients of OpenAI's responses want an answer held to: ``text.format`` and ``tool_choice``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.engine.answer.grammar import Constraint
from cairn.http.wire.errors import ClientError
from cairn.http.wire.formats import (
    Choice,
    allowed_tools,
    constraint_of,
    ignored_format,
    ignored_strict,
    read_format,
)

_CHOICES = ("none", "auto", "required")

_NAMED = '{"type": "function", "name": ...}'

Tool = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Held:
    """
    What an answer is held to, and which wishes of that kind are not followed.

    Attributes:
        constraint: None for nothing.
        ignored: by their paths into the body.
    """

    constraint: Constraint | None
    ignored: frozenset[str]


def read_held(
    text_format: Mapping[str, Any] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    tools: Sequence[Tool],
) -> Held:
    """
    What the answer is held to.

    Args:
        parallel: whether there may be several calls; None where nothing is said.
        tools: those on offer, in canonical form.

    Raises:
        ClientError: a format or a choice is unknown, or there is no tool for it.
    """
    ignored: set[str] = set()
    wanted, among = _choice(choice, tools)
    if among is not None and not wanted.required:
        ignored.add("tool_choice.tools")  # free calls are held to nothing
    schema, strict = read_format(text_format or {}, "text.format")
    constraint = constraint_of(
        schema,
        attrs.evolve(wanted, one_call=parallel is False),
        tools if among is None or not wanted.required else among,
        strict=strict,
    )
    if parallel is False and constraint is None and tools:
        ignored.add("parallel_tool_calls")
    ignored |= ignored_strict(tools, constraint)
    ignored |= ignored_format(text_format, constraint, "text.format")
    return Held(constraint=constraint, ignored=frozenset(ignored))


def _choice(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]
) -> tuple[Choice, tuple[Tool, ...] | None]:
    """What is said of calls, and the tools among which a client wants them; None for all."""
    if choice is None or choice in _CHOICES:
        return Choice(required=choice == "required"), None
    if isinstance(choice, str):
        raise ClientError(
            f"tool_choice is {choice[:40]!r}; it must be one of {', '.join(_CHOICES)}, or name a "
            f"function: {_NAMED}",
            param="tool_choice",
        )
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, tools)
    name = choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ClientError(
            "tool_choice is an object that does not name a function, and other tools are not "
            f"supported; send {_NAMED}",
            param="tool_choice",
            code="unsupported_value",
        )
    return Choice(required=True, named=name, named_at="tool_choice.name"), None


def _allowed(
    choice: Mapping[str, Any], tools: Sequence[Tool]
) -> tuple[Choice, tuple[Tool, ...] | None]:
    listed, names = choice.get("tools"), None
    if isinstance(listed, list):
        names = [one.get("name") for one in listed if isinstance(one, dict)]
    return allowed_tools(choice.get("mode"), names, tools, "tool_choice")
