"""
JSON in files that others wrote: whatever is wrong with it is one kind of error.
"""

from __future__ import annotations

import json
from typing import Any


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
