"""
The constraints of Anthropic's messages: ``tool_choice``, and ``output_config.format``, which was
formerly called ``output_format``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cairn.engine.answer.grammar import Constraint
from cairn.http.wire.checks import ClientError, JsonObject, check_known, missing, schema_at
from cairn.http.wire.formats import Choice, constraint_of

_CHOICES = ("auto", "any", "tool", "none")


class WireToolChoice(msgspec.Struct):
    """``tool_choice`` as it is sent."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def offers_tools(wire: WireToolChoice | None) -> bool:
    """
    Whether any tool may be called.

    Raises:
        ClientError: the choice is unknown.
    """
    if wire is None:
        return True
    check_known(wire.type, _CHOICES, "tool_choice.type")
    return wire.type != "none"


def read_constraint(
    output_config: JsonObject | None,
    output_format: JsonObject | None,
    choice: WireToolChoice | None,
    tools: Sequence[JsonObject],
) -> Constraint | None:
    """
    The constraint on an answer; None for none.

    Args:
        output_config: its ``format``.
        tools: those that may be called, in canonical form.

    Raises:
        ClientError: a format is unknown, or there is no tool for a required call.
    """
    if output_config is not None and output_format is not None:
        raise ClientError(
            "output_format is the older name of output_config.format; send only one of them",
            param="output_format",
        )
    # Clients rely on the schema being followed exactly, so one that cannot be enforced is refused.
    return constraint_of(
        _schema(output_config, "output_config.format")
        if output_format is None
        else _schema(output_format, "output_format"),
        _choice(choice),
        tools,
        strict=True,
    )


def _choice(wire: WireToolChoice | None) -> Choice:
    if wire is None:
        return Choice()
    where = "tool_choice.name"
    if wire.type == "tool" and wire.name is None:
        raise missing(where)
    return Choice(
        required=wire.type in ("any", "tool"),
        named=wire.name if wire.type == "tool" else None,
        named_at=where,
        one_call=wire.disable_parallel_tool_use is True,
    )


def _schema(given: JsonObject | None, where: str) -> JsonObject | None:
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise ClientError(
            f"{where}.type must be json_schema", param=f"{where}.type", code="unsupported_value"
        )
    return schema_at(given.get("schema"), f"{where}.schema")
