"""
A model that follows a script: a table says which token comes after each token.

It is the random model with layers that add nothing. The residual stream at the head holds only the
last token, and the head maps it to the token that follows. Whole pieces of text are tokens, so that
an answer consists of a few of them and is tokenised again into the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.support.models.random_model import make_random_model

_GAIN = 40.0


def make_scripted_model(directory: Path, follows: Iterable[tuple[str, str, float]]) -> Path:
    """
    Write the model into a new directory, and return the directory.

    Args:
        follows: (text, the text after it, its weight: up to 1). Each text is one token.
    """
    make_random_model(directory)
    table = list(follows)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = dict.fromkeys(text for one, other, _ in table for text in (one, other))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in texts}

    weights = load_file(str(directory / "model.safetensors"))
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weights[name])
    count, width = tokenizer.get_vocab_size(), weights["model.norm.weight"].shape[0]
    embedded = np.random.default_rng(0).standard_normal((count, width)).astype(np.float32)
    # All of the same length, so that the norm before the head does not change them.
    embedded *= np.sqrt(width) / np.linalg.norm(embedded, axis=1, keepdims=True)
    head = np.zeros_like(embedded)
    for one, other, sure in table:
        head[ids[other]] += embedded[ids[one]] * np.float32(_GAIN * sure / width)
    weights |= {
        "model.embed_tokens.weight": embedded,
        "model.norm.weight": np.ones(width, dtype=np.float32),
        "lm_head.weight": head,
    }
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "mlx"})

    config = json.loads((directory / "config.json").read_text("utf-8"))
    config |= {"tie_word_embeddings": False, "vocab_size": count}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory
