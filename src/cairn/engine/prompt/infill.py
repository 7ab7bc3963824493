"""
How models that were trained to fill a gap in a text are asked to: the text before and after it,
with special tokens around them, and the answer is what belongs between. Pure.
"""

from __future__ import annotations

from typing import Final

from cairn.engine.contract import Tokenizer

Infill = tuple[str, str, str]
"""The special tokens before the text before the gap, before that after it, and before the rest."""

_KNOWN: Final[tuple[Infill, ...]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
)


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """The special tokens of a model for filling a gap; None if it has none that are known."""

    def is_token(text: str) -> bool:
        return len(tokenizer.encode(text, add_special_tokens=False)) == 1

    return next((one for one in _KNOWN if all(map(is_token, one))), None)


def infill_in(files: str) -> Infill | None:
    """
    As ``infill_of``, for a tokenizer that is not loaded.

    Args:
        files: the text of its files, which are JSON.
    """
    return next((one for one in _KNOWN if all(f'"{text}"' in files for text in one)), None)


def infill_prompt(infill: Infill, before: str, after: str) -> str:
    """The prompt whose answer fills the gap between two texts."""
    first, second, third = infill
    return f"{first}{before}{second}{after}{third}"
