"""
A model of a chosen size with random weights, for measuring: the time of a pass depends only on the
shapes.

It writes plain words without end, so that answers have the requested length and every token is
visible: the rows of its head for all other tokens are zero.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from tokenizers import Tokenizer

from cairn.engine.model.builtin import builtin_directory
from cairn_bench.servers.sizes import Size

_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Scores that are well apart, so that a near tie hardly ever decides.
_HEAD_GAIN = 4.0
# Of what attention and the MLP add to a token.
_QUOTING_GAIN = 0.001
_LAYER_ENDS = ("o_proj.weight", "down_proj.weight")


def make_sized_model(
    directory: Path,
    size: Size,
    *,
    seed: int = 0,
    source: Path | None = None,
    quoting: bool = False,
) -> None:
    """
    Write a model's directory: tokenizer and template of an existing Qwen3, and weights drawn from a
    seed.

    Args:
        source: the existing model's directory; by default the built-in model's.
        quoting: whether its layers hardly change what they are given. Then the most likely next
            token follows from the last one alone, as good as always, so that a greedy answer quotes
            an earlier one; its log-probabilities follow from all tokens.
    """
    source = source or builtin_directory()
    directory.mkdir(parents=True, exist_ok=True)
    for name in _TEXT_FILES:
        if (source / name).exists():  # a template may be in the tokenizer's settings too
            shutil.copyfile(source / name, directory / name)
    config = json.loads((source / "config.json").read_text("utf-8"))
    config |= {
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.intermediate_size,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.context_tokens,
        # With one table for both, the last token wins its own scores, and repeats forever.
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    said = [0.0] * config["vocab_size"]
    for token in _plain_words(tokenizer):
        said[token] = _HEAD_GAIN
    mx.random.seed(seed)
    found: Any = tree_flatten(Model(ModelArgs.from_dict(config)).parameters())
    weights = {name: array.astype(mx.float32) for name, array in found}
    weights["lm_head.weight"] *= mx.array(said)[:, None]
    for name in weights if quoting else ():
        if name.endswith(_LAYER_ENDS):
            weights[name] *= _QUOTING_GAIN
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})


def _plain_words(tokenizer: Tokenizer) -> Iterator[int]:
    """The tokens that consist only of letters and spaces."""
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if text.isascii() and text.strip().isalpha():
            yield token
