"""Write Pebble as a directory that mlx-lm loads, and read it back to continue training."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model, quantize_model
from tokenizers import Tokenizer

from cairn_pebble.recipe import Packing, Shape
from cairn_pebble.sequences import TEXT_END, TURN_END


def export(
    folder: Path,
    model: Any,
    tokenizer: Tokenizer,
    template: str,
    shape: Shape,
    packing: Packing | None = None,
) -> None:
    """
    Write the files. Existing files of the same names are replaced. Does not modify the model.

    Args:
        folder: created if it does not exist.
        packing: None to store the weights as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = tokenizer.get_vocab()
    turn_end, text_end = vocabulary[TURN_END], vocabulary[TEXT_END]
    config = {
        **_of_shape(shape),
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "hidden_act": "silu",
        "model_type": "qwen3",
        "pad_token_id": text_end,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    stored = model
    if packing is not None:
        stored = _copy(model)
        stored, config = quantize_model(stored, config, packing.group_size, packing.bits)
    generation = {
        "chat_template_kwargs": {"enable_thinking": False},
        "do_sample": False,
        "eos_token_id": [turn_end, text_end],
        "pad_token_id": text_end,
        "repetition_guard": True,
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
    weights: Any = dict(tree_flatten(stored.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def _copy(model: Any) -> Any:
    """A model of its own with the same weights."""
    copied = type(model)(model.args)
    copied.update(model.parameters())
    return copied


@attrs.frozen
class Exported:
    """
    A trained model without the state of its training.

    Attributes:
        weights: float32, by name.
        digest: the SHA-256 of the file that they were read from.
    """

    weights: dict[str, mx.array]
    digest: str


class OtherModel(Exception):
    """The directory has no weights of this shape."""


def read_exported(folder: Path, shape: Shape) -> Exported:
    """
    Read the weights of an exported directory in the form used for training.

    Weights that were quantised after training become float32 again, but do not get their old values
    back.

    Args:
        folder: as written by ``export``, or by ``mlx_lm.convert`` after it; it must hold a model.

    Raises:
        OtherModel: the model is of a different kind or shape.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    due = _of_shape(shape) | {"model_type": "qwen3", "tie_word_embeddings": True}
    other = [name for name, value in due.items() if config.get(name) != value]
    if other:
        raise OtherModel(
            f"{folder} is a model of another shape than the recipe's ({', '.join(other)} in "
            "config.json). Name one that this script exported."
        )
    loaded: Any = load_model(folder)
    weights = dict(tree_flatten(dequantize_model(loaded[0]).parameters()))
    weights = {name: one.astype(mx.float32) for name, one in weights.items()}
    mx.eval(weights)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return Exported(weights, digest)


def _of_shape(shape: Shape) -> dict[str, float]:
    """The part of the configuration that describes the shape."""
    return {
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
    }
