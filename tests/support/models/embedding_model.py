"""
A small embedding model with random weights, in the form of sentence-transformers' checkpoints: no
head, no ``model.`` in the names of the weights, no chat template, and the files that say how its
vectors are made.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tests.support.models.random_model import make_random_model

DIMENSIONS = 256


def make_embedding_model(directory: Path, seed: int = 0) -> Path:
    """Write the model into a new directory, and return the directory."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_random_model(Path(folder) / "chat", seed)
        directory.mkdir(parents=True)
        weights = load_file(made / "model.safetensors")
        save_file(
            {name.removeprefix("model."): array for name, array in weights.items()},
            directory / "model.safetensors",
            metadata={"format": "mlx"},
        )
        (directory / "tokenizer.json").write_bytes((made / "tokenizer.json").read_bytes())
        for name in ("config.json", "tokenizer_config.json"):
            content = json.loads((made / name).read_text("utf-8"))
            content.pop("chat_template", None)
            change_json(directory / name, **content)
    change_json(directory / "config.json", tie_word_embeddings=False)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (directory / "modules.json").write_text(json.dumps(modules), "utf-8")
    (directory / "1_Pooling").mkdir()
    change_json(directory / "1_Pooling" / "config.json", pooling_mode_lasttoken=True)
    return directory


def change_json(path: Path, **fields: object) -> None:
    """Set fields of a file, which may not exist yet."""
    there = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**there, **fields}, indent=2) + "\n", "utf-8")
