"""What OpenAI's clients want an answer held to: ``response_format`` and ``tool_choice``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.engine.answer.grammar import Constraint
from cairn.http.wire.errors import ClientError
from cairn.http.wire.formats import Choice, allowed_tools, constraint_of, object_at, read_format

_CHOICES = ("none", "auto", "required")

_NAMED = '{"type": "function", "function": {"name": ...}}'


def read_constraint(
    response_format: Mapping[str, Any] | None,
    choice: str | Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    one_call: bool,
) -> Constraint | None:
    """
    What the answer is held to; None for nothing.

    Args:
        tools: those on offer, in canonical form.
        one_call: not several calls.

    Raises:
        ClientError: a format or a choice is unknown, or there is no tool for it.
    """
    schema, strict = read_format(response_format or {}, "response_format", within="json_schema")
    wanted, among = _choice(choice, tools)
    return constraint_of(
        schema,
        attrs.evolve(wanted, one_call=one_call),
        tools if among is None or not wanted.required else among,
        strict=strict,
    )


def ignored_choice(choice: str | Mapping[str, Any] | None) -> frozenset[str]:
    """
    What of a choice is not acted on: a list of tools that may be called, where calls are free.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return frozenset()
    wanted, _ = _allowed(choice, ())
    return frozenset(() if wanted.required else {"tool_choice.allowed_tools.tools"})


def _choice(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]
) -> tuple[Choice, tuple[Mapping[str, Any], ...] | None]:
    """What is said of calls, and the tools to which a choice of several narrows them."""
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
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise ClientError(
            f"tool_choice is an object that does not name a function; send {_NAMED}",
            param="tool_choice",
            code="unsupported_value",
        )
    return Choice(required=True, named=name, named_at="tool_choice.function.name"), None


def _allowed(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[Choice, tuple[Mapping[str, Any], ...] | None]:
    where = "tool_choice.allowed_tools"
    holder = object_at(choice.get("allowed_tools"), where)
    listed, names = holder.get("tools"), None
    if isinstance(listed, list):
        functions = [one.get("function") for one in listed if isinstance(one, dict)]
        names = [one.get("name") for one in functions if isinstance(one, dict)]
    return allowed_tools(holder.get("mode"), names, tools, where)
