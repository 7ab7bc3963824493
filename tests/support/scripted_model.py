"""
A model that says what is written down: after each token comes the one that a table names.

It is the random model without its layers' words: what stands in the residual stream at the head is
the last token alone, and the head knows which token follows it. Whole pieces of text are tokens, so
that an answer is a few of them and is tokenised again as it was said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.support.random_model import make_random_model

_GAIN = 40.0


def make_scripted_model(directory: Path, follows: Iterable[tuple[str, str, float]]) -> Path:
    """
    Write the model into a directory that is not there yet, and return it.

    Args:
        follows: (text, text that comes after it, how sure that is: up to 1). Each is one token.
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
    # Of one length, so that the norm in front of the head leaves them as they are.
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
