"""
The constraints that a request puts on its answer: the format of its text, and the tools that it may
or must call. Shared by all protocols; OpenAI's two spellings of ``tool_choice`` are read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.engine.answer.grammar import ANY_OBJECT, Constraint
from cairn.http.wire.checks import ClientError, JsonObject, object_at, schema_at

_FORMATS = ("text", "json_object", "json_schema")
_CHOICES = ("none", "auto", "required")

Tool = JsonObject


@attrs.frozen(kw_only=True)
class Choice:
    """
    Which calls an answer may or must make.

    Attributes:
        required: whether it must make a call.
        named: the only tool that it may call, exactly once; None for any tool.
        named_at: the path of that name in the body.
        one_call: whether it may make at most one call.
    """

    required: bool = False
    named: str | None = None
    named_at: str = ""
    one_call: bool = False


def function_tool(
    name: str, description: str | None, parameters: JsonObject | None, *, strict: bool | None
) -> Tool:
    """A tool in canonical form. What is left out does not appear in the prompt."""
    function: dict[str, object] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def constraint_of(
    schema: JsonObject | None,
    choice: Choice,
    tools: Sequence[Tool],
    *,
    strict: bool,
) -> Constraint | None:
    """
    The constraint on an answer; None for none.

    Args:
        schema: of the answer's text; None for any text.
        tools: those that may be called, in canonical form.
        strict: whether to refuse a schema that cannot be enforced completely.

    Raises:
        ClientError: a call is required, and there is no tool for it.
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


def ignored_strict(tools: Sequence[Tool], constraint: Constraint | None) -> frozenset[str]:
    """
    ``tools.strict``, if a tool asks that its calls be constrained to its schema and they are not:
    calls that the model is free to make are not constrained.

    Args:
        tools: those that may be called, in canonical form.
    """
    held = constraint.calls if constraint is not None else ()
    functions = [tool["function"] for tool in tools]
    asked = any(one.get("strict") is True and one["name"] not in held for one in functions)
    return frozenset({"tools.strict"} if asked else ())


def ignored_format(
    given: JsonObject | None, constraint: Constraint | None, where: str
) -> frozenset[str]:
    """
    The format, if a call is required: then there is no text to be constrained.

    Args:
        given: the format, with its ``type``.
        where: its path in the body.
    """
    is_format = given is not None and given.get("type", "text") != "text"
    calls = constraint is not None and constraint.schema is None
    return frozenset({where} if is_format and calls else ())


@attrs.frozen(kw_only=True)
class ToolChoiceForm:
    """
    How OpenAI's two protocols spell ``tool_choice``.

    Attributes:
        nested: whether a function, and the list of allowed tools, are objects within the choice.
        named: how to name a function, for error messages.
    """

    nested: bool
    named: str

    def within(self, found: JsonObject, field: str) -> Any:
        """The object within another one, or that one itself."""
        return found.get(field) if self.nested else found

    def at(self, where: str, field: str) -> str:
        """The path of that object."""
        return f"{where}.{field}" if self.nested else where


def read_constraint(
    answer_format: JsonObject | None,
    choice: str | JsonObject | None,
    parallel: bool | None,
    tools: Sequence[Tool],
    form: ToolChoiceForm,
    *,
    format_at: str,
    schema_within: str | None = None,
) -> tuple[Constraint | None, frozenset[str]]:
    """
    The constraint that a request of OpenAI's protocols puts on its answer, None for none; and the
    parameters of it that are ignored, as paths.

    Args:
        parallel: whether several calls are allowed; None if the request does not say.
        tools: those that may be called, in canonical form.
        format_at: the path of the format.
        schema_within: the field of the format that holds the schema; None for the format itself.

    Raises:
        ClientError: a format or a choice is unknown, or there is no tool for it.
    """
    schema, strict = read_format(answer_format or {}, format_at, within=schema_within)
    read, allowed = _read_tool_choice(choice, tools, form)
    ignored: set[str] = set()
    if allowed is not None and not read.required:
        # Calls that the model is free to make are not constrained.
        ignored.add(f"{form.at('tool_choice', 'allowed_tools')}.tools")
        allowed = None
    constraint = constraint_of(
        schema,
        attrs.evolve(read, one_call=parallel is False),
        tools if allowed is None else allowed,
        strict=strict,
    )
    if parallel is False and constraint is None and tools:
        ignored.add("parallel_tool_calls")
    ignored |= ignored_strict(tools, constraint)
    ignored |= ignored_format(answer_format, constraint, format_at)
    return constraint, frozenset(ignored)


def _read_tool_choice(
    choice: str | JsonObject | None, tools: Sequence[Tool], form: ToolChoiceForm
) -> tuple[Choice, tuple[Tool, ...] | None]:
    """The choice, and the tools to which it is limited; None for all."""
    if choice is None or choice in _CHOICES:
        return Choice(required=choice == "required"), None
    if isinstance(choice, str):
        raise ClientError(
            f"tool_choice is {choice[:40]!r}; it must be one of {', '.join(_CHOICES)}, or name a "
            f"function: {form.named}",
            param="tool_choice",
        )
    if choice.get("type") == "allowed_tools":
        return _read_allowed_tools(choice, tools, form)
    function = form.within(choice, "function")
    name = function.get("name") if isinstance(function, Mapping) else None
    kind = choice.get("type", "function" if form.nested else None)
    if kind != "function" or not isinstance(name, str):
        raise ClientError(
            f"tool_choice is an object that does not name a function; send {form.named}",
            param="tool_choice",
            code="unsupported_value",
        )
    where = form.at("tool_choice", "function")
    return Choice(required=True, named=name, named_at=f"{where}.name"), None


def _read_allowed_tools(
    choice: JsonObject, tools: Sequence[Tool], form: ToolChoiceForm
) -> tuple[Choice, tuple[Tool, ...]]:
    where = form.at("tool_choice", "allowed_tools")
    holder = object_at(form.within(choice, "allowed_tools"), where)
    mode, listed = holder.get("mode"), holder.get("tools")
    if mode not in ("auto", "required"):
        raise ClientError(f"{where}.mode must be auto or required", param=f"{where}.mode")
    if not isinstance(listed, list):
        raise ClientError(
            f"{where}.tools must be a list", param=f"{where}.tools", code="invalid_type"
        )
    functions = [form.within(one, "function") for one in listed if isinstance(one, dict)]
    names = [one.get("name") for one in functions if isinstance(one, dict)]
    allowed = tuple(tool for tool in tools if tool["function"]["name"] in names)
    return Choice(required=mode == "required"), allowed


def read_format(
    given: JsonObject, where: str, *, within: str | None = None
) -> tuple[JsonObject | None, bool]:
    """
    The schema of the answer, None for any text, and whether it is strict.

    Args:
        where: the path of the format in the body.
        within: the field of the format that holds the schema; None for the format itself.

    Raises:
        ClientError: the format is unknown, or its schema cannot be read.
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
        if given.get("schema") in (None, {}):
            return ANY_OBJECT, False
        return schema_at(given["schema"], f"{where}.schema"), False
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
