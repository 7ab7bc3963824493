"""
JSON that others wrote: whatever is wrong with a file is one kind of error, and what goes on as it
came is looked at first.
"""

from __future__ import annotations

import json
from typing import Any

#: Values that go on as they came (tool schemas, template settings) are walked again by recursion
#: further in, so they are kept far from the interpreter's limit.
DEPTH_MAX = 64


def parsed(text: str | bytes) -> Any:
    """
    What a JSON text says.

    Raises:
        ValueError: it is none, or not one that anybody means.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fault_of(value: Any) -> str | None:
    """Why a value cannot go on as it came, in words; None where it can. Changes nothing."""
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
