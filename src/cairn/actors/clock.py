"""
Ids and time for the pure core. Imports nothing that would slow a command down.
"""

from __future__ import annotations

import time
import uuid

import cairn
from cairn.journal.ledger import Clock
from cairn.journal.nodes import on_node


def wall_clock_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def new_id() -> str:
    """A fresh unique id."""
    return str(uuid.uuid4())


def request_id(node: str | None) -> str:
    """
    A fresh id of a request, which those of responses are made of.

    Args:
        node: which serves it; None for a server that is alone.
    """
    return on_node(node, new_id())


def clock() -> Clock:
    """Ids and time for a ledger."""
    return Clock(new_id=new_id, now_us=wall_clock_us, version=cairn.__version__)
