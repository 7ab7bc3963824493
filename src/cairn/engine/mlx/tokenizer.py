"""Loads a model's tokenizer and chat template without the model."""

from __future__ import annotations

from pathlib import Path

import mlx_lm.utils

from cairn.engine.contract import ModelTokenizer


def know_family(directory: str) -> None:
    """
    Have mlx-lm import its module for a model's family, from which the tokenizer takes defaults.
    Must run on the engine's thread, because it may use MLX.

    Raises:
        Exception: mlx-lm does not know the family, or cannot read the directory.
    """
    mlx_lm.utils._get_classes(mlx_lm.utils.load_config(Path(directory)))


def load_tokenizer(directory: str) -> ModelTokenizer:
    """
    The tokenizer in a model's directory. Computes nothing: may run on any thread, after
    ``know_family``.

    Raises:
        Exception: there is no usable tokenizer.
    """
    place = Path(directory)
    ends = mlx_lm.utils.load_config(place).get("eos_token_id")
    tokenizer: ModelTokenizer = mlx_lm.utils.load_tokenizer(place, eos_token_ids=ends)
    return tokenizer
