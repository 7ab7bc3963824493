"""
What OpenAI's clients want an answer held to: ``response_format`` and ``tool_choice``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.engine.answer_grammar import ANY_OBJECT, Constraint

from .errors import ClientError
from .formats import Choice, allowed_tools, constraint_of, object_at, schema_at

_CHOICES = ("none", "auto", "required")
_FORMATS = ("text", "json_object", "json_schema")

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
    schema, strict = _schema(response_format or {})
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
    """
    What is said of calls, and the tools to which a choice of several narrows them.
    """
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
            f"tool_choice is an object that names no function; send {_NAMED}",
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


def _schema(given: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, bool]:
    """
    The schema of the answer, None for any text, and whether it is strict.
    """
    kind = given.get("type", "text")
    if kind not in _FORMATS:
        raise ClientError(
            f"response_format.type must be one of {', '.join(_FORMATS)}",
            param="response_format.type",
            code="unsupported_value",
        )
    if kind == "text":
        return None, False
    if kind == "json_object":
        if given.get("schema") is not None:
            # Other servers take one here. To pass over it would promise what is not held.
            raise ClientError(
                "response_format.schema is not looked at for json_object; send it as json_schema",
                param="response_format.schema",
                code="unsupported_value",
            )
        return ANY_OBJECT, False
    where = "response_format.json_schema"
    holder = object_at(given.get("json_schema"), where)
    schema = schema_at(holder.get("schema"), f"{where}.schema")
    strict = holder.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ClientError(
            f"{where}.strict must be true or false", param=f"{where}.strict", code="invalid_type"
        )
    return schema, strict is True
