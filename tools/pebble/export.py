"""
Pebble as a directory that mlx-lm loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from pebble.recipe import Shape
from pebble.sequences import TEXT_END, TURN_END


def export(folder: Path, model: Any, tokenizer: Tokenizer, template: str, shape: Shape) -> None:
    """
    Write the files. Those of the same names are replaced.

    Args:
        folder: is made where it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = tokenizer.get_vocab()
    turn_end, text_end = vocabulary[TURN_END], vocabulary[TEXT_END]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": text_end,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }
    generation = {
        "chat_template_kwargs": {"enable_thinking": False},
        "do_sample": False,
        "eos_token_id": [turn_end, text_end],
        "pad_token_id": text_end,
    }
    tokens = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": shape.max_position_embeddings,
        "pad_token": TEXT_END,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokens),
    ):
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str() + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
