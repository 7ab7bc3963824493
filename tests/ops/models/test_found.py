"""What `cairn models` finds on a machine, and how it lists it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cairn.ops.models.command import Line, lines_of, notes
from cairn.ops.models.fitting import Fit, Machine
from cairn.ops.models.found import Found, all_found, at_hand, family_fault, held_in, ollama_names
from cairn.ops.models.short_names import KNOWN_MODELS, known_model
from tests.ops.models.conftest import NAME, make_files
from tests.support.hub import digest_of

GIB = 1 << 30
MAC = Machine(memory_bytes=16 * GIB, free_bytes=12 * GIB, on_cpu=False)
SHA = "a" * 40


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, whose cache of the hub is elsewhere in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def cached(home: Path, name: str, files: Path) -> Path:
    """Put files into the hub's cache, as its client does. Returns the directory of the model."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / SHA
    for part in (snapshot, folder / "blobs", folder / "refs"):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(SHA)
    for file in files.iterdir():
        blob = folder / "blobs" / digest_of(file.name, file.read_bytes())
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def in_lm_studio(home: Path, name: str, folder: str = ".lmstudio/models") -> Path:
    """A folder of LM Studio for a model."""
    directory = home / folder / name
    directory.mkdir(parents=True)
    return directory


def names(found: Found) -> list[str]:
    """The names of the models that can be served."""
    return [one.name for one in found.models]


def test_nothing_is_here(home: Path) -> None:
    """The built-in model always is."""
    found = all_found()
    assert (["pebble"], {}) == (names(found), found.unreadable)
    assert None is at_hand(NAME)


def test_the_hubs_cache(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A complete model is offered; one of another kind is named and not offered."""
    files = make_files(tmp_path_factory.mktemp("files"), 10_000)
    snapshot = cached(home, NAME, files)
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text('{"model_type": "wav2vec2"}')
    make_weights_of(files, other)
    cached(home, "owner/speech", other)
    found = all_found()
    assert ["pebble", NAME] == names(found)
    assert {"hub cache": ["owner/speech"]} == found.unreadable
    held = found.models[1]
    assert (10_000, 2048, None) == (held.weights_bytes, held.context_tokens, held.fault)
    # Four bits, and 32 for the scale and the bias of 64 weights.
    assert round(10_000 * 32 / 4.5) == held.float32_bytes
    assert snapshot == at_hand(NAME)
    assert None is at_hand("owner/none")


def make_weights_of(files: Path, other: Path) -> None:
    """Copy the weights of a model."""
    (other / "model.safetensors").write_bytes((files / "model.safetensors").read_bytes())


def test_lm_studio(home: Path) -> None:
    """Its MLX models are offered by their path, and serve their name on the hub; GGUF is not."""
    directory = in_lm_studio(home, NAME)
    make_files(directory, 10_000)
    earlier = in_lm_studio(home, "owner/old", ".cache/lm-studio/models")
    make_files(earlier, 10_000)
    (in_lm_studio(home, "owner/gguf") / "m.gguf").write_text("GGUF")
    in_lm_studio(home, "owner/empty")
    found = all_found()
    assert ["pebble", str(directory), str(earlier)] == names(found)
    (unreadable,) = found.unreadable["LM Studio"]
    assert unreadable.endswith("owner/gguf")
    assert directory == at_hand(NAME)


def test_ollama(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models are named, and not offered."""
    own = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai"
    for name in ("library/llama3.2/latest", "me/notes/8b"):
        (own / name).parent.mkdir(parents=True)
        (own / name).write_text("{}")
    assert ["llama3.2:latest", "me/notes:8b"] == all_found().unreadable["Ollama"]
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "none"))
    assert [] == ollama_names()
    shown = list(
        notes(Found(models=(), unreadable={"Ollama": ["a", "b", "c", "d"]}), MAC, of_all=True)
    )
    assert "Ollama also holds 4 models (a, b, c, ...): GGUF, which mlx-lm cannot read." in shown


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3"}, None),
        ({"model_type": "mistral"}, None),  # mlx-lm has it under another name
        ({"model_type": "bert"}, "mlx-lm has no model_type 'bert'"),
        ({"model_type": "../qwen3"}, "mlx-lm has no model_type"),
        ({"model_type": 3}, "has no model_type"),
        ([], "has no model_type"),
    ],
)
def test_families(config: object, words: str | None) -> None:
    """Only what mlx-lm has a family for is offered."""
    fault = family_fault("m", config)
    assert words is None if fault is None else words is not None and words in fault


def listed(found: Found, health: dict[str, object], *, of_all: bool = False) -> dict[str, Line]:
    """The list on a machine, by name."""
    return {one.name: one for one in lines_of(found, health, MAC, of_all=of_all)}


def test_what_is_listed(home: Path) -> None:
    """What the server has is loaded; other models of the server have their own lines."""
    files = make_files(in_lm_studio(home, "owner/model"), 10_000)
    held = held_in(NAME, "hub cache", files, fault=None)
    found = Found(models=(held,), unreadable={})
    plain = listed(found, {})
    assert {"qwen3-0.6b"} == set(plain)
    assert ("here", Fit.YES) == (plain["qwen3-0.6b"].state, plain["qwen3-0.6b"].fits)
    health = {
        "model": NAME,
        "context_tokens": 99,
        "models": [
            {"name": NAME, "state": "loaded"},
            {"name": "other", "state": "not_loaded"},
        ],
    }
    lines = listed(found, health)
    assert ("loaded", "not loaded") == (lines["qwen3-0.6b"].state, lines["other"].state)
    every = listed(found, health, of_all=True)
    assert {model.name for model in KNOWN_MODELS} | {"other"} == set(every)
    assert "" == every["llama3.3-70b"].state
    assert Fit.NO is every["llama3.3-70b"].fits
    known = known_model("qwen3-4b")
    assert known is not None
    assert known.weights_bytes == every["qwen3-4b"].size_bytes


def test_the_command(run, home: Path) -> None:
    """A table for programs, and JSON."""
    make_files(in_lm_studio(home, NAME), 10_000)
    rows = [line.split("\t") for line in run("models").stdout.splitlines()]
    assert ["name", "state", "size", "context", "fits", "where"] == rows[0]
    assert ["pebble", "here", "8 MB", "65536"] == rows[1][:4]
    assert "LM Studio" == rows[2][-1]
    assert "`ops models --all` lists more." in run("models").stderr
    objects = json.loads(run("models", "--all", "--json").stdout)
    assert {"yes", "no"} <= {one["fits"] for one in objects} | {"no"}
    assert len(KNOWN_MODELS) + 2 == len(objects)
