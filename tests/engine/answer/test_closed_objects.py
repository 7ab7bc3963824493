"""Objects are closed where a schema is silent, and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cairn.engine.answer.closed_objects import closed

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"properties": {"b": {}}}
CLOSED: dict[str, Any] = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, A | CLOSED),
        ({"type": ["object", "null"], **B}, {"type": ["object", "null"], **B, **CLOSED}),
        ({"properties": {"in": A}}, {"properties": {"in": A | CLOSED}} | CLOSED),
        ({"items": A, "prefixItems": [A]}, {"items": A | CLOSED, "prefixItems": [A | CLOSED]}),
        ({"additionalProperties": A}, {"additionalProperties": A | CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A | CLOSED, {"type": "null"}]}),
        ({"allOf": [A], "title": "An a"}, {"allOf": [A | CLOSED], "title": "An a"}),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": A}},
            {"$ref": "#/$defs/A", "$defs": {"A": A | CLOSED}},
        ),
        (
            {"properties": {"next": {"$ref": "#"}}},
            {"properties": {"next": {"$ref": "#"}}} | CLOSED,
        ),
        ({"properties": {"properties": B}}, {"properties": {"properties": B | CLOSED}} | CLOSED),
    ],
)
def test_a_silent_object_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    """One that names its properties has no others, wherever it is; the argument stays as it is."""
    before = copy.deepcopy(schema)
    assert expected == closed(schema)
    assert before == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "string", **B},
        {**A, "additionalProperties": True},
        {**A, "enum": [{"a": 1, "b": 2}]},
        {**A, "required": ["a", "other"]},
        {**A, "required": "a"},
        {**A, "minProperties": 2},
        {**A, "patternProperties": {"^x": A}},
        {"allOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}], "$defs": {"A": A}},
        {"allOf": A},
        {**A, "anyOf": [B]},
        {"anyOf": [A, B], "required": ["other"]},
        {"if": A, "then": B},
        {"items": A, "contains": B},
        {"properties": 5, "allOf": [{"not": A}]},
        {**B, "$ref": "#/$defs/A", "$defs": {"A": A}},
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": {"$ref": "#/$defs/C"}, "C": A}},
        {"properties": {"x": {"$ref": "other.json"}}},
        {"properties": {"x": {"$ref": "#/$defs/a%20b"}}},
        {"default": A, "examples": [A]},
    ],
)
def test_other_objects_stay_as_they_are(schema: dict[str, Any]) -> None:
    """A schema that says more than which properties there are, or is not alone, is unchanged."""
    assert schema == closed(schema)
