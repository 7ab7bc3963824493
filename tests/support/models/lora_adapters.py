"""Small untrained adapters for the random model, made with mlx-lm's own tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

PARAMETERS: dict[str, Any] = {"rank": 4, "scale": 4.0, "dropout": 0.1}


def make_adapter(
    model_directory: Path, folder: Path, seed: int, rank: int = PARAMETERS["rank"]
) -> Path:
    """An adapter over the last two layers, with weights drawn from a seed."""
    parameters = {**PARAMETERS, "rank": rank}
    model: Any = mlx_lm.load(str(model_directory))[0]
    model.freeze()
    linear_to_lora_layers(model, 2, parameters)
    mx.random.seed(seed)
    trained: Any = tree_flatten(model.trainable_parameters())
    weights = {name: 0.1 * mx.random.normal(array.shape) for name, array in trained}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
