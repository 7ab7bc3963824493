"""The random model with weights in different dtypes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

HALF = "bfloat16"
FOUR_BITS = "4-bit"


def make_model(source: Path, target: Path, kind: str) -> Path:
    """
    A copy of a model directory with converted weights: all in ``bfloat16``, or the matrices in
    ``4-bit`` with the rest in ``float16``.
    """
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    loaded: Any = mlx_lm.load(str(source))
    model = loaded[0]
    if kind == FOUR_BITS:
        model.set_dtype(mx.float16)
        quantize(model, group_size=32, bits=4)
        config["quantization"] = {"group_size": 32, "bits": 4}
    else:
        model.set_dtype(mx.bfloat16)
    for path in target.glob("*.safetensors"):
        path.unlink()
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config))
    return target
