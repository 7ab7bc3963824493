"""The special tokens with which models for code fill a gap in a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from mlx_lm.utils import load_tokenizer

from cairn.engine.prompt.infill import infill_in, infill_of, infill_prompt

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@attrs.frozen
class Words:
    """A tokenizer that has some texts as single tokens."""

    tokens: tuple[str, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A token, or one for each character."""
        return [0] if text in self.tokens else [ord(character) for character in text]

    def decode(self, ids: Any) -> str:
        """Never called."""
        raise NotImplementedError

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        """Never called."""
        raise NotImplementedError


@pytest.mark.parametrize("known", [QWEN, STARCODER])
def test_tokens_that_are_known(known: tuple[str, str, str]) -> None:
    """All three have to be tokens, of the tokenizer or in its files."""
    assert known == infill_of(Words(("x", *known)))
    assert None is infill_of(Words(known[:2]))
    assert known == infill_in(json.dumps([{"content": one} for one in known]))
    assert None is infill_in(json.dumps(known[1:]))


def test_a_model_without_them(model_directory: Path) -> None:
    """It fills no gaps."""
    assert None is infill_of(load_tokenizer(model_directory))


def test_a_prompt() -> None:
    """The text before the gap, the text after it, then the answer."""
    assert "<fim_prefix>a<fim_suffix>b<fim_middle>" == infill_prompt(STARCODER, "a", "b")
