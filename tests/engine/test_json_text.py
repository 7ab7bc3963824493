"""JSON from outside: the one error of its reader, and values that may be passed on."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.engine.json_text import DEPTH_MAX, fault_of, parsed


def nested(depth: int) -> Any:
    """Lists and objects in turn."""
    value: Any = 1
    for level in range(depth - 1):
        value = [value] if level % 2 else {"a": value, "b": "text"}
    return value


@pytest.mark.parametrize("text", ["{", b"\xff", 200_000 * "["])
def test_a_text_that_is_no_json(text: str | bytes) -> None:
    """Every fault is a ValueError, also a nesting that the interpreter cannot follow."""
    with pytest.raises(ValueError, match=r".+"):
        parsed(text)
    assert {"a": [1]} == parsed('{"a": [1]}')


def test_values_that_are_passed_on() -> None:
    """Their depth and their integers are limited."""
    assert None is fault_of(nested(DEPTH_MAX))
    assert "is nested deeper than 64 levels" in (fault_of(nested(DEPTH_MAX + 1)) or "")
    assert None is fault_of([2**64 - 1, -(2**63), 1.5, None, True, "1"])
    for number in (2**64, -(2**63) - 1):
        assert "more than 64 bits" in (fault_of({"a": [number]}) or "")
