"""Adapters that cannot be served are refused with a message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from cairn.engine.errors import ModelRefused
from cairn.engine.mlx.model import load_model
from tests.support.models.lora_adapters import PARAMETERS, make_adapter

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def whole(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that can be served."""
    return make_adapter(model_directory, tmp_path_factory.mktemp("adapters") / "whole", seed=1)


def configured(**changes: object) -> Callable[[Path], None]:
    """Change the adapter_config.json."""

    def change(adapter: Path) -> None:
        config = json.loads((adapter / CONFIG).read_text())
        kept = {name: value for name, value in {**config, **changes}.items() if value is not None}
        (adapter / CONFIG).write_text(json.dumps(kept))

    return change


def without(name: str) -> Callable[[Path], None]:
    """Remove a file."""
    return lambda adapter: (adapter / name).unlink()


def peft(adapter: Path) -> None:
    """Make it an adapter of a different library."""
    (adapter / WEIGHTS).rename(adapter / "adapter_model.safetensors")


def cut(adapter: Path) -> None:
    """Remove the last byte of the weights."""
    (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-1])


def weights(**arrays: mx.array) -> Callable[[Path], None]:
    """Replace the weights."""
    return lambda adapter: mx.save_safetensors(
        str(adapter / WEIGHTS), {name.replace("__", "."): array for name, array in arrays.items()}
    )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, "There is no adapter directory"),
        (without(WEIGHTS), "it has no adapters.safetensors (mlx_lm.lora writes it)"),
        (peft, "convert PEFT adapters first"),
        (without(CONFIG), "it has no adapter_config.json"),
        (cut, "is cut off"),
        (configured(num_layers=None), "lacks num_layers"),
        (configured(lora_parameters={"rank": 4}), "does not fit the model"),
        (configured(lora_parameters={**PARAMETERS, "rank": 8}), "adapter"),
        (weights(model__embed__lora_a=mx.zeros((2, 2))), "model.embed.lora_a"),
        (weights(), "it has no tensors"),
    ],
)
def test_a_broken_adapter_is_refused_with_a_sentence(
    model_directory: Path, whole: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """The message names what is missing or belongs to a different model, and its path."""
    adapter = tmp_path / "adapter"
    shutil.copytree(whole, adapter)
    damage(adapter)

    with pytest.raises(ModelRefused) as refused:
        load_model(str(model_directory), adapter=str(adapter))

    assert says in str(refused.value)
    assert str(adapter) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_whole_one_is_loaded(model_directory: Path, whole: Path) -> None:
    """The control: without the damage, the adapter above is loaded."""
    assert whole == load_model(str(model_directory), adapter=str(whole)).adapter
