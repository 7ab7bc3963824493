"""Copies of values that are made for each row of a journal."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def changed(value: T, /, **changes: Any) -> T:
    """
    ``attrs.evolve`` in a third of the time, which counts when a start folds a long journal.
    Changes nothing.

    Args:
        value: of an attrs class without slots, validators, converters and cached properties.

    Raises:
        TypeError: it has no such field.
    """
    copy: T = object.__new__(type(value))
    fields = copy.__dict__
    fields |= value.__dict__
    count = len(fields)
    fields |= changes
    if len(fields) != count:
        raise TypeError(f"{sorted(changes - value.__dict__.keys())} of {type(value).__name__}")
    return copy
