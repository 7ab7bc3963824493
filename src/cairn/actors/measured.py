"""An event from what the engine measured."""

from __future__ import annotations

from typing import Any, TypeVar

import attrs

from cairn.journal.events import Event

E = TypeVar("E", bound=Event)


def measured(kind: type[E], report: Any, **more: Any) -> E:
    """
    An event that takes each field it shares with a report from there.

    Args:
        report: an attrs object.
        more: fields that the report does not have, or that are to have other values.
    """
    names = {field.name for field in attrs.fields(kind)}
    shared = {
        field.name: getattr(report, field.name)
        for field in attrs.fields(type(report))
        if field.name in names
    }
    return kind(**{**shared, **more})
