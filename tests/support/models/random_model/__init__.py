"""
A small Qwen3 with random weights. It hardly ever ends an answer, and each of its tokens depends on
many tokens before it.

Its answers are meaningless, and different for any two prompts. If one bit of a cache is wrong, the
answer is therefore different, and answers are as long as a test needs. Pebble, which ends its turns
and has confident predictions, would not show such errors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save as tensors_to_bytes
from tokenizers import Tokenizer

from cairn_pebble.sequences import (
    MARKER_TOKENS,
    SPECIAL_TOKENS,
    TEXT_END,
    TURN_END,
    train_tokenizer,
)
from cairn_pebble.sequences import template as pebble_template

_Array: TypeAlias = npt.NDArray[np.float32]

_CONTROL_TOKENS: Final = SPECIAL_TOKENS + MARKER_TOKENS
_CORPUS: Final = Path(__file__).with_name("corpus.txt")

_HIDDEN_SIZE: Final = 256
_LAYERS: Final = 4
_HEADS: Final = 8
_KV_HEADS: Final = 4
_HEAD_DIM: Final = 32
_INTERMEDIATE_SIZE: Final = 768
_VOCAB_SIZE: Final = 2048
_CONTEXT_TOKENS: Final = 32_768
_ROPE_THETA: Final = 1_000_000.0
_NORM_EPS: Final = 1e-06

# How a text is split before pairs are merged: words with their space, single digits, punctuation.
_SPLIT_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# Scales of the weights, found by experiment. With tied embeddings, the last token's embedding is in
# the residual stream and would get the largest logit, so the model would repeat one token forever.
# Therefore the layers add about ten times as much as the embeddings. Sharp attention (norms of
# queries and keys whose product is 3, not 1) makes the next token depend on many tokens before it;
# without it, greedy output soon repeats in a cycle.
_EMBEDDING_STD: Final = 0.16
_LAYER_GAIN: Final = 2.0
_HEAD_NORM: Final = 1.75
_NORM_STD: Final = 0.05
# A turn occasionally ends by itself. Other control tokens, and parts of characters, which would
# make answers hard to read, are very unlikely.
_TURN_END_GAIN: Final = 1.7
_QUIET_GAIN: Final = 0.25


def make_random_model(directory: Path, seed: int = 0) -> Path:
    """
    Write the model into a new directory, and return the directory.

    Args:
        seed: a different seed gives different weights, with the same tokenizer.
    """
    directory.mkdir(parents=True)
    corpus = _CORPUS.read_text("utf-8").splitlines(keepends=True)
    tokenizer = train_tokenizer(corpus, _VOCAB_SIZE, split=_SPLIT_PATTERN, least=1)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", "utf-8")
    vocabulary = tokenizer.get_vocab()
    turn_end_id, text_end_id = vocabulary[TURN_END], vocabulary[TEXT_END]
    for name, content in (
        ("tokenizer_config.json", _tokenizer_config()),
        ("config.json", _config(turn_end_id, text_end_id)),
        ("generation_config.json", _generation_config(turn_end_id, text_end_id)),
    ):
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
        (directory / name).write_text(text + "\n", "utf-8")
    bits = np.random.PCG64(seed)
    weights = _outer_weights(bits, _row_gains(tokenizer))
    for layer in range(_LAYERS):
        weights.update(_layer_weights(bits, layer))
    content_bytes = tensors_to_bytes(weights, metadata={"format": "mlx"})
    (directory / "model.safetensors").write_bytes(content_bytes)
    return directory


def _config(turn_end_id: int, text_end_id: int) -> dict[str, object]:
    """Build config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": turn_end_id,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _INTERMEDIATE_SIZE,
        "max_position_embeddings": _CONTEXT_TOKENS,
        "model_type": "qwen3",
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "pad_token_id": text_end_id,
        "rms_norm_eps": _NORM_EPS,
        "rope_scaling": None,
        "rope_theta": _ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": _VOCAB_SIZE,
    }


def _generation_config(turn_end_id: int, text_end_id: int) -> dict[str, object]:
    """Build generation_config.json."""
    return {
        "do_sample": True,
        "eos_token_id": [turn_end_id, text_end_id],
        "pad_token_id": text_end_id,
        "temperature": 0.8,
        "top_p": 0.95,
    }


def _tokenizer_config() -> dict[str, object]:
    """Build tokenizer_config.json, with a class that takes tokenizer.json as it is."""
    return {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": _template(),
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": _CONTEXT_TOKENS,
        "pad_token": TEXT_END,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def _template() -> str:
    """Pebble's template, except that thinking is on by default, as with Qwen3."""
    before, after = (
        "if not enable_thinking",
        "if enable_thinking is defined and not enable_thinking",
    )
    template = pebble_template()
    assert before in template
    return template.replace(before, after)


# -- the weights -----------------------------------------------------------------------------------


def _outer_weights(bits: np.random.PCG64, row_gains: _Array) -> dict[str, _Array]:
    """
    Draw the embeddings, which are also the head, and the final norm.

    Args:
        row_gains: (vocab_size, 1), float32; scales the rows that compute the logits.
    """
    shape = (_VOCAB_SIZE, _HIDDEN_SIZE)
    weights = {
        "model.embed_tokens.weight": _normal(bits, shape, std=_EMBEDDING_STD),
        "model.norm.weight": _norm(bits, _HIDDEN_SIZE),
    }
    weights["model.embed_tokens.weight"] *= row_gains
    return weights


def _row_gains(tokenizer: Tokenizer) -> _Array:
    """The scale of each token's row in the head: (vocab_size, 1), float32."""
    gains = np.ones((tokenizer.get_vocab_size(), 1), dtype=np.float32)
    for token, token_id in tokenizer.get_vocab().items():
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if token == TURN_END:
            gains[token_id] = _TURN_END_GAIN
        elif token in _CONTROL_TOKENS or not _is_readable(text):
            gains[token_id] = _QUIET_GAIN
    return gains


def _is_readable(text: str) -> bool:
    """Whether a text is neither a part of a character nor a control character."""
    # Not str.isprintable, because its tables differ between Python versions.
    return "\ufffd" not in text and all(char == "\n" or " " <= char != "\x7f" for char in text)


def _layer_weights(bits: np.random.PCG64, layer: int) -> dict[str, _Array]:
    """
    Draw one layer, under the names of mlx-lm's Qwen3.

    Inputs are normalised, so a matrix with standard deviation gain / sqrt(fan in) adds about the
    gain to each dimension of the residual stream.
    """
    hidden, middle = _HIDDEN_SIZE, _INTERMEDIATE_SIZE
    queries, keys = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    place = f"model.layers.{layer}"

    def matrix(rows: int, columns: int, gain: float = 1.0) -> _Array:
        return _normal(bits, (rows, columns), std=gain / math.sqrt(columns))

    return {
        f"{place}.input_layernorm.weight": _norm(bits, hidden),
        f"{place}.self_attn.q_proj.weight": matrix(queries, hidden),
        f"{place}.self_attn.k_proj.weight": matrix(keys, hidden),
        f"{place}.self_attn.v_proj.weight": matrix(keys, hidden),
        f"{place}.self_attn.o_proj.weight": matrix(hidden, queries, _LAYER_GAIN),
        f"{place}.self_attn.q_norm.weight": _norm(bits, _HEAD_DIM, mean=_HEAD_NORM),
        f"{place}.self_attn.k_norm.weight": _norm(bits, _HEAD_DIM, mean=_HEAD_NORM),
        f"{place}.post_attention_layernorm.weight": _norm(bits, hidden),
        f"{place}.mlp.gate_proj.weight": matrix(middle, hidden),
        f"{place}.mlp.up_proj.weight": matrix(middle, hidden),
        f"{place}.mlp.down_proj.weight": matrix(hidden, middle, _LAYER_GAIN),
    }


def _norm(bits: np.random.PCG64, size: int, mean: float = 1.0) -> _Array:
    """Draw the weights of a norm, spread around the mean so that an omitted norm is noticed."""
    return _normal(bits, (size,), std=_NORM_STD, mean=mean)


def _normal(
    bits: np.random.PCG64, shape: tuple[int, ...], *, std: float, mean: float = 0.0
) -> _Array:
    """
    Draw nearly normal numbers: the sum of four 16-bit integers each, scaled (tails end at 3.5 std).

    All arithmetic before the scaling is on integers, and the scaling is one multiplication and one
    addition in float64, whose rounding IEEE 754 defines. The weights are therefore the same on
    every machine.
    """
    raw = np.asarray(bits.random_raw(math.prod(shape)), dtype="<u8")
    sums = raw.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64)
    # Each of the four has mean (2^16 - 1) / 2 and variance (2^32 - 1) / 12.
    centred = (sums - 2 * (2**16 - 1)).astype(np.float64)
    drawn: _Array = (centred * (std / math.sqrt((2**32 - 1) / 3)) + mean).astype(np.float32)
    return drawn.reshape(shape)
