"""No code of a model's directory runs, whatever its files say."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from cairn.engine.errors import ModelRefused
from cairn.engine.mlx.model import load_model

_CODE = "from pathlib import Path\nPath(__file__).with_name('it-ran').touch()\n"


@pytest.fixture(name="model")
def model_(model_directory: Path, tmp_path: Path) -> Path:
    """A model with Python files of the names that its configuration will give."""
    model = tmp_path / "model"
    shutil.copytree(model_directory, model)
    for name in ("modeling_own", "tokenization_own", "configuration_own"):
        (model / f"{name}.py").write_text(_CODE)
    return model


def _change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_its_python_files_are_not_run(model: Path) -> None:
    """Neither those of transformers' kind."""
    _change(
        model / "config.json",
        auto_map={
            "AutoConfig": "configuration_own.Config",
            "AutoModelForCausalLM": "modeling_own.Model",
            "AutoTokenizer": ["tokenization_own.Tokenizer", None],
        },
    )
    _change(
        model / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_own.Tokenizer", None]},
    )
    load_model(str(model))
    assert not (model / "it-ran").exists()


def test_a_model_that_needs_its_own_code_is_refused(model: Path) -> None:
    """Nor those of mlx-lm's kind, which build the model."""
    _change(model / "config.json", model_file="modeling_own.py")
    with pytest.raises(ModelRefused, match=r"modeling_own\.py.*no code of a model is run"):
        load_model(str(model))
    assert not (model / "it-ran").exists()


def test_the_files_would_leave_a_trace(model: Path) -> None:
    """Control: run by hand, one does."""
    runpy.run_path(str(model / "modeling_own.py"))
    assert (model / "it-ran").exists()
