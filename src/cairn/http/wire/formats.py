"""
What an answer is to be held to, as far as it is the same in every protocol. No protocol's types
stand here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.engine.answer.grammar import ANY_OBJECT, Constraint
from cairn.engine.json_text import fault_of
from cairn.http.wire.errors import ClientError, missing

_FORMATS = ("text", "json_object", "json_schema")


@attrs.frozen(kw_only=True)
class Choice:
    """
    What a client says of calls.

    Attributes:
        required: whether there has to be one.
        named: of which tool; None for any. Then there is exactly one.
        named_at: where it is named, as a path into the body.
        one_call: not several calls.
    """

    required: bool = False
    named: str | None = None
    named_at: str = ""
    one_call: bool = False


def constraint_of(
    schema: Mapping[str, Any] | None,
    choice: Choice,
    tools: Sequence[Mapping[str, Any]],
    *,
    strict: bool,
) -> Constraint | None:
    """
    What the answer is held to; None for nothing.

    Args:
        schema: of the answer's words; None for any.
        tools: those on offer, in canonical form.
        strict: refuse a schema of which something cannot be held.

    Raises:
        ClientError: there has to be a call, and there is no tool for it.
    """
    offered = tuple(tool["function"]["name"] for tool in tools)
    if not choice.required:
        if schema is None:
            return None
        return Constraint(schema=schema, strict=strict, calls=offered, one_call=choice.one_call)
    if not offered:
        raise ClientError(
            "tool_choice requires a call, but the request has no tools; send some, or leave it out",
            param="tool_choice",
        )
    if choice.named is None:
        return Constraint(calls=offered, one_call=choice.one_call)
    if choice.named not in offered:
        raise ClientError(
            f"tool_choice names {choice.named[:200]!r}, which is not among the request's tools",
            param=choice.named_at,
        )
    return Constraint(calls=(choice.named,), one_call=True)


def ignored_strict(
    tools: Sequence[Mapping[str, Any]], constraint: Constraint | None
) -> frozenset[str]:
    """
    ``tools.strict``, where a tool on offer asks that its calls be held to its schema and they are
    not: free calls are held to nothing.

    Args:
        tools: those on offer, in canonical form.
    """
    held = constraint.calls if constraint is not None else ()
    functions = [tool["function"] for tool in tools]
    asked = any(one.get("strict") is True and one["name"] not in held for one in functions)
    return frozenset({"tools.strict"} if asked else ())


def ignored_format(
    given: Mapping[str, Any] | None, constraint: Constraint | None, where: str
) -> frozenset[str]:
    """
    The format, where calls have to be: then no words are, which could be of it.

    Args:
        given: the format, with its ``type``.
        where: it stands, as a path into the body.
    """
    wanted = given is not None and given.get("type", "text") != "text"
    calls = constraint is not None and constraint.schema is None
    return frozenset({where} if wanted and calls else ())


def allowed_tools(
    mode: Any, names: Any, tools: Sequence[Mapping[str, Any]], where: str
) -> tuple[Choice, tuple[Mapping[str, Any], ...] | None]:
    """
    What a choice of the type ``allowed_tools`` says, and the tools that it leaves.

    Args:
        names: of the tools that are allowed; None where they are no list.
        where: mode and list stand, as a path into the body.

    Raises:
        ClientError: the mode is unknown, or there is no list.
    """
    if mode not in ("auto", "required"):
        raise ClientError(f"{where}.mode must be auto or required", param=f"{where}.mode")
    if names is None:
        raise ClientError(
            f"{where}.tools must be a list", param=f"{where}.tools", code="invalid_type"
        )
    among = tuple(tool for tool in tools if tool["function"]["name"] in names)
    return Choice(required=mode == "required"), among


def read_format(
    given: Mapping[str, Any], where: str, *, within: str | None = None
) -> tuple[Mapping[str, Any] | None, bool]:
    """
    The schema of the answer, None for any text, and whether it is strict.

    Args:
        where: the format stands, as a path into the body.
        within: its field that holds the schema; None where that stands in the format itself.

    Raises:
        ClientError: it is unknown, or its schema cannot be read.
    """
    kind = given.get("type", "text")
    if kind not in _FORMATS:
        raise ClientError(
            f"{where}.type must be one of {', '.join(_FORMATS)}",
            param=f"{where}.type",
            code="unsupported_value",
        )
    if kind == "text":
        return None, False
    if kind == "json_object":
        if given.get("schema") is not None:
            # Other servers take one here. To pass over it would promise what is not held.
            raise ClientError(
                f"{where}.schema is not supported with json_object; use the type json_schema",
                param=f"{where}.schema",
                code="unsupported_value",
            )
        return ANY_OBJECT, False
    if within is not None:
        where = f"{where}.{within}"
        given = object_at(given.get(within), where)
    schema = schema_at(given.get("schema"), f"{where}.schema")
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ClientError(
            f"{where}.strict must be true or false", param=f"{where}.strict", code="invalid_type"
        )
    return schema, strict is True


def schema_at(found: Any, where: str) -> Mapping[str, Any]:
    """
    The schema that stands at a place of the body.

    Raises:
        ClientError: there is none, or it cannot be read.
    """
    schema = object_at(found, where)
    if (fault := fault_of(dict(schema))) is not None:
        raise ClientError(f"{where} {fault}", param=where)
    return schema


def object_at(found: Any, where: str) -> Mapping[str, Any]:
    """
    The object that stands at a place of the body.

    Raises:
        ClientError: there is none.
    """
    if found is None:
        raise missing(where)
    if not isinstance(found, Mapping):
        raise ClientError(f"{where} must be an object", param=where, code="invalid_type")
    return found
