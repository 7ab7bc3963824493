"""Models that cannot be served are refused with a message before they are journaled as loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cairn.engine.errors import ModelRefused
from cairn.engine.mlx.model import load_model
from cairn.engine.model.files import adapter_fault, directory_fault, is_path, weights_bytes

DEEP = 200_000 * "["
LONG = 5000 * "x"
OFFSETS = (
    '["0", "4"]',
    "[0, null]",
    "[0, -4]",
    "[-4, 4]",
    "[8, 4]",
    "[0, 4.5]",
    "[0, NaN]",
    "[false, true]",
    "[4]",
    "7",
    f"[0, {4300 * '9'}]",
)


def cut_weights(model: Path) -> None:
    """Cut the weights off within their header."""
    cut(model / "model.safetensors", 1000)


def cut_data(model: Path) -> None:
    """Remove the last byte of the weights, which only their size shows."""
    cut(model / "model.safetensors", -1)


def cut(path: Path, end: int) -> None:
    """Cut a file off."""
    path.write_bytes(path.read_bytes()[:end])


def no_header(model: Path) -> None:
    """Replace the weights by a file of a different kind."""
    (model / "model.safetensors").write_text("<!DOCTYPE html><html>Sign in</html>")


def missing_shard(model: Path) -> None:
    """Write an index that names a missing file."""
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": names})
    (model / "model.safetensors.index.json").write_text(index)


def other_shapes(model: Path) -> None:
    """Replace config.json by that of a different model."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))


def only_gguf(model: Path) -> None:
    """A directory of GGUF files."""
    shutil.rmtree(model)
    model.mkdir()
    (model / "model.Q4_K_M.gguf").write_bytes(b"GGUF")


def generation_config(text: str) -> Callable[[Path], None]:
    """Replace the generation_config.json."""

    def write(model: Path) -> None:
        (model / "generation_config.json").write_text(text)

    return write


def header(text: str) -> Callable[[Path], None]:
    """Replace the header of the weights."""

    def write(model: Path) -> None:
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())

    return write


def offsets(text: str) -> Callable[[Path], None]:
    """Weights with a tensor of these offsets."""
    return header(f'{{"layer": {{"dtype": "F32", "shape": [1], "data_offsets": {text}}}}}')


def index(text: str) -> Callable[[Path], None]:
    """An index of the files of weights."""

    def write(model: Path) -> None:
        (model / "model.safetensors.index.json").write_text(text)

    return write


def config(text: str) -> Callable[[Path], None]:
    """Replace the config.json."""

    def write(model: Path) -> None:
        (model / "config.json").write_text(text)

    return write


def no_weights(model: Path) -> None:
    """No weights at all."""
    (model / "model.safetensors").unlink()


def no_tokenizer(model: Path) -> None:
    """No tokenizer."""
    for path in model.glob("tokenizer*"):
        path.unlink()


def no_template(model: Path) -> None:
    """A tokenizer without a chat template."""
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    for template in model.glob("chat_template*"):
        template.unlink()


def refused_setting(model: Path) -> None:
    """A setting that the model's own chat template refuses."""
    (model / "generation_config.json").write_text('{"chat_template_kwargs": {"mood": "sad"}}')
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    refusing = "{% if mood is defined %}{{ raise_exception('no moods here') }}{% endif %}"
    path.write_text(json.dumps({**config, "chat_template": refusing + config["chat_template"]}))


def no_config(model: Path) -> None:
    """No config.json."""
    (model / "config.json").unlink()


def broken_config(model: Path) -> None:
    """Write a config.json that is not JSON."""
    (model / "config.json").write_text("{")


def unknown_type(model: Path) -> None:
    """A model type that mlx-lm does not know."""
    (model / "config.json").write_text('{"model_type": "gpt9"}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_weights, "cannot be read as safetensors: its header is cut off"),
        (cut_data, "is cut off: it has"),
        (no_header, "cannot be read as safetensors"),
        (missing_shard, "lacks 1 of the 2 weights files"),
        (other_shapes, "cannot be loaded as a model"),
        (only_gguf, "`mlx_lm.convert --hf-path"),
        *((offsets(text), "does not say where layer begins and ends") for text in OFFSETS),
        (header("[]"), "its header is not a JSON object"),
        (header('{"layer": 5}'), "does not say where layer begins and ends"),
        (header(DEEP), "it is nested too deeply"),
        (index(DEEP), "it is nested too deeply"),
        (index("[]"), "it has no weight_map"),
        (index('{"weight_map": ["a"]}'), "it has no weight_map"),
        (index('{"weight_map": {"a": 5, "b": "c"}}'), "the file of a is 5, not a name"),
        (
            index(f'{{"weight_map": {{"a": "{LONG}"}}}}'),
            f"in its index, for example {LONG[:80]}....",
        ),
        (index('{"weight_map": {"a": ""}}'), "lacks 1 of the 1 weights files"),
        (config(DEEP), "config.json cannot be read: it is nested too deeply"),
        (config('{"model_type": ["llama"]}'), "cannot be loaded as a model"),
        (generation_config(DEEP), "it is nested too deeply"),
        (
            generation_config(f'{{"temperature": 1{400 * "0"}}}'),
            "generation_config.json cannot be used: temperature is too large. Correct it",
        ),
        (generation_config("{"), "generation_config.json cannot be used"),
        (generation_config("[]"), "it is not a JSON object"),
        (
            generation_config('{"temperature": "hot"}'),
            "temperature must be a number, not 'hot'. Correct it",
        ),
        (generation_config('{"temperature": NaN}'), "temperature must be between 0 and 100"),
        (generation_config('{"top_p": 0}'), "top_p must be above 0"),
        (generation_config('{"top_k": 1.5}'), "top_k must be an integer, not 1.5"),
        (generation_config('{"do_sample": "no"}'), "do_sample must be true or false, not"),
        (
            generation_config('{"eos_token_id": ["<end>"]}'),
            "eos_token_id must be a token id or a list of them, not ['<end>']",
        ),
        (no_weights, "no weights"),
        (no_tokenizer, "chat template"),
        (no_template, "chat template"),
        (refused_setting, "no moods here"),
        (no_config, "no config.json"),
        (broken_config, "config.json cannot be read"),
        (unknown_type, "gpt9"),
    ],
)
def test_a_broken_model_is_refused_with_a_sentence(
    model_directory: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """Whatever is missing or broken, the message says what, where and what is needed."""
    model = tmp_path / "model"
    shutil.copytree(model_directory, model)
    damage(model)

    with pytest.raises(ModelRefused) as refused:
        load_model(str(model))

    assert says in str(refused.value)
    assert str(model) in str(refused.value)


def test_a_gguf_file_is_not_taken_for_a_name(tmp_path: Path) -> None:
    """A name with that suffix is a path, even if missing; the message says how to convert it."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")

    for where in (str(file), "model.gguf", "owner/model.Q4_K_M.gguf"):
        assert is_path(where)
        assert "is a GGUF file" in (directory_fault(where) or "")
        assert "mlx_lm.convert --hf-path" in (directory_fault(where) or "")


def test_the_bytes_of_weights_are_known_before_they_are_read(tmp_path: Path) -> None:
    """The headers have the sizes; the data is not read."""
    for place, size in enumerate((7 << 40, 12)):
        tensors = {"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        header = json.dumps({"__metadata__": {"format": "mlx"}, **tensors}).encode()
        path = tmp_path / f"model-{place}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header)

    assert (7 << 40) + 12 == weights_bytes(tmp_path)


def test_a_path_is_never_asked_of_a_hub(tmp_path: Path) -> None:
    """A name that looks like a path is a path, so that a typo in it is reported at once."""
    missing = tmp_path / "missing"

    assert all(map(is_path, (str(missing), "./model", "~/model", "")))
    assert not is_path("some-owner/some-model")
    assert str(missing) in (directory_fault(str(missing)) or "")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (f"/{LONG}", "cannot be read: File name too long."),
        ("~nosuchuser/model", "cannot be read: Could not determine home directory."),
    ],
    ids=["long", "home"],
)
def test_a_place_that_cannot_be(where: str, says: str) -> None:
    """Impossible paths are refused with a message too, for models and for adapters."""
    assert is_path(where)
    assert f"{where} {says}" == directory_fault(where)
    assert f"{where} {says}" == adapter_fault(where)
    assert not is_path(LONG)
    with pytest.raises(ModelRefused):
        load_model(where)


def test_a_directory_that_may_not_be_read(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message does not claim that a file is missing."""

    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    expected = f"{model_directory} cannot be read: Permission denied."

    assert expected == directory_fault(str(model_directory))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "chat_template.jinja", "generation_config.json"]
)
def test_a_pipe_is_not_read(model_directory: Path, tmp_path: Path, name: str) -> None:
    """Reading one may never end, so the directory is refused before; the message names the file."""
    model = Path(shutil.copytree(model_directory, tmp_path / "model"))
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    for where in (model / name, tmp_path / "linked"):
        if where != model / name:  # a link to a pipe is one too
            (model / name).rename(where)
            (model / name).symlink_to(where)
        assert f"{model / name} is not a regular file, so it is not read." == directory_fault(
            str(model)
        )


@pytest.mark.parametrize("where", ["config", "text_config"])
def test_a_number_of_layers_that_would_never_be_made(
    model_directory: Path, tmp_path: Path, where: str
) -> None:
    """A billion layers are refused with a sentence; the most that are loaded are not."""
    model = Path(shutil.copytree(model_directory, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    for layers in (10_000, 10_001, 10**9):
        part = {"num_hidden_layers": layers, "tags": ["num_layers"], "n_layer": True}
        config.update(part if where == "config" else {where: part})
        (model / "config.json").write_text(json.dumps(config))
        fault = directory_fault(str(model))
        if layers == 10_000:
            assert fault is None
        else:
            assert f"says that the model has {layers} layers; at most 10000" in (fault or "")
            assert str(model / "config.json") in (fault or "")
