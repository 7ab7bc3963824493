"""
Models that cannot be served: a sentence each, before anything is journaled as loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.engine.mlx_model import ModelRefused, load_model
from cairn.engine.model_files import directory_fault, is_path


def cut_weights(model: Path) -> None:
    """Weights of which the end is missing."""
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:1000])


def no_weights(model: Path) -> None:
    """No weights at all."""
    (model / "model.safetensors").unlink()


def no_tokenizer(model: Path) -> None:
    """No tokenizer."""
    for path in model.glob("tokenizer*"):
        path.unlink()


def no_template(model: Path) -> None:
    """A tokenizer without a chat template."""
    import json

    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    for template in model.glob("chat_template*"):
        template.unlink()


def no_config(model: Path) -> None:
    """No config.json."""
    (model / "config.json").unlink()


def broken_config(model: Path) -> None:
    """A config.json that is no JSON."""
    (model / "config.json").write_text("{")


def unknown_type(model: Path) -> None:
    """A model type that mlx-lm does not know."""
    (model / "config.json").write_text('{"model_type": "gpt9"}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_weights, "cannot be loaded as a model"),
        (no_weights, "no weights"),
        (no_tokenizer, "chat template"),
        (no_template, "chat template"),
        (no_config, "no config.json"),
        (broken_config, "config.json cannot be read"),
        (unknown_type, "gpt9"),
    ],
)
def test_a_broken_model_is_refused_with_a_sentence(
    model_directory: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """
    Whatever is missing or broken, loading ends with what, where and what is needed.
    """
    model = tmp_path / "model"
    shutil.copytree(model_directory, model)
    (model / "cairn-builtin.json").unlink()
    damage(model)

    with pytest.raises(ModelRefused) as refused:
        load_model(str(model))

    assert says in str(refused.value)
    assert str(model) in str(refused.value)


def test_a_path_is_never_asked_of_a_hub(tmp_path: Path) -> None:
    """
    What looks like a path is a path: a typo in it is said at once.
    """
    missing = tmp_path / "missing"

    assert all(map(is_path, (str(missing), "./model", "~/model", "")))
    assert not is_path("some-owner/some-model")
    assert str(missing) in (directory_fault(str(missing)) or "")
