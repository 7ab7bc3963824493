"""
JSON from outside: one kind of error for any text, and a check of values before they are passed on
unchanged.
"""

from __future__ import annotations

import json
from typing import Any

# Values that are passed on unchanged (tool schemas, template settings) are walked recursively
# later, so their depth must stay far from the interpreter's recursion limit.
DEPTH_MAX = 64


def parsed(text: str | bytes) -> Any:
    """
    The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fault_of(value: Any) -> str | None:
    """Why a value cannot be passed on unchanged; None if it can. Does not modify it."""
    level = [value]
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                return "has an integer of more than 64 bits; send it as a string"
        if not below:
            return None
        level = below
    return f"is nested deeper than {DEPTH_MAX} levels; make it flatter"
