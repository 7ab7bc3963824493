"""A model's tokenizer with its chat template, without the model: as mlx-lm gives it with one."""

from __future__ import annotations

from pathlib import Path

import mlx_lm.utils

from cairn.engine.contract import ModelTokenizer


def know_family(directory: str) -> None:
    """
    Have mlx-lm import what it knows of a model's family, of which its tokenizer takes defaults. On
    the engine's thread, as all that may make something of MLX.

    Raises:
        Exception: mlx-lm knows no such family, or cannot read what the directory says.
    """
    mlx_lm.utils._get_classes(mlx_lm.utils.load_config(Path(directory)))


def load_tokenizer(directory: str) -> ModelTokenizer:
    """
    The tokenizer in a model's directory. Computes nothing: on any thread, behind ``know_family``.

    Raises:
        Exception: there is none that can be used.
    """
    place = Path(directory)
    ends = mlx_lm.utils.load_config(place).get("eos_token_id")
    tokenizer: ModelTokenizer = mlx_lm.utils.load_tokenizer(place, eos_token_ids=ends)
    return tokenizer
