"""The names of sessions, groups of sessions and models."""

from __future__ import annotations

from typing import Final

NAME_MAX: Final = 200


def is_name(text: str) -> bool:
    """Whether a text is a valid name."""
    return 1 <= len(text) <= NAME_MAX and text.isprintable()
