"""
Pebble, the small model that comes with Cairn: where it lies. README.md beside its weights is its
card.

Nothing but the model lies in its directory: what is changed there gives another fingerprint.
"""

from __future__ import annotations

from pathlib import Path

BUILTIN_NAME = "pebble"


def builtin_directory() -> Path:
    """
    Pebble, as mlx-lm loads it.
    """
    return Path(__file__).parents[1] / BUILTIN_NAME


def builtin_template() -> str:
    """
    What turns a conversation into Pebble's prompt: ChatML, with the behaviour of Qwen3.
    """
    return (builtin_directory() / "chat_template.jinja").read_text("utf-8")
