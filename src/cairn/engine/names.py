"""What clients call their sessions and groups of them, and operators their models."""

from __future__ import annotations

from typing import Final

NAME_MAX: Final = 200


def is_name(text: str) -> bool:
    """Whether something may be called so."""
    return 1 <= len(text) <= NAME_MAX and text.isprintable()
