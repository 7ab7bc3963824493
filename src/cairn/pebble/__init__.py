"""
Pebble, the small model that comes with Cairn. README.md beside its weights is its card.
"""

from __future__ import annotations

from pathlib import Path


def directory() -> Path:
    """
    Where it lies, as mlx-lm loads it.
    """
    return Path(__file__).parent


def chat_template() -> str:
    """
    What turns a conversation into its prompt: ChatML, with the behaviour of Qwen3.
    """
    return (directory() / "chat_template.jinja").read_text("utf-8")
