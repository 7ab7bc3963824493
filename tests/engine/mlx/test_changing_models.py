"""
A model whose files change while they are read is refused. Otherwise the weights in memory could
differ from those that were hashed, and blocks would be kept under a wrong fingerprint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cairn.engine.errors import ModelRefused
from cairn.engine.mlx import start as mlx_start
from cairn.engine.model.fingerprint import seen
from cairn.engine.reports import PassShapes
from tests.support.models.lora_adapters import make_adapter

MIB = 1 << 20
LOADING = "loading the model"
HASHING = "reading the weights for the fingerprint"
TESTING = "self-test: same bits on this device? (once per fingerprint)"


@pytest.fixture
def model(model_directory: Path, tmp_path: Path) -> Path:
    """A copy of a model, to be changed."""
    copy = tmp_path / "model"
    shutil.copytree(model_directory, copy)
    return copy


def start(where: Path, progress: Callable[[str, int, int], None], **more: Any) -> mlx_start.Started:
    """A start of the engine."""
    asked: dict[str, Any] = {
        "name": None,
        "block_tokens": 32,
        "decode_rows": 1,
        "kv_cache": "slab",
        "pool_bytes": 16 * MIB,
        "blocks_bytes": MIB,
        "tested_shapes": lambda fingerprint: PassShapes(),
        "progress": progress,
    }
    return mlx_start.start_engine(str(where), **{**asked, **more})


def unwatched(what: str, done: int, total: int) -> None:
    """Change nothing."""


def at(moment: tuple[str, bool], change: Callable[[], None]) -> Callable[[str, int, int], None]:
    """A progress callback that changes something once, at the beginning or end of a step."""
    done: list[str] = []

    def progress(what: str, so_far: int, total: int) -> None:
        step, at_end = moment
        if what == step and (so_far == total) == at_end and not done:
            done.append(what)
            change()

    return progress


def write_in_place(path: Path) -> None:
    """Flip one bit, and restore the file's times."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_another(path: Path) -> None:
    """Replace it by a different file, as a download does, with the same size and times."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    write_in_place(other)
    other.replace(path)


def cut_off(path: Path) -> None:
    """Cut the file off in the middle."""
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    """Remove the file."""
    path.unlink()


def add(path: Path) -> None:
    """Add one more file of its kind."""
    shutil.copy(path, path.with_name(f"model-2{path.suffix}"))


MOMENTS = [(LOADING, False), (LOADING, True), (HASHING, True)]
CHANGES = [write_in_place, put_another, cut_off, remove, add]


@pytest.mark.parametrize("moment", MOMENTS, ids=["before", "loaded", "hashed"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_weights_that_change_while_they_are_read(
    model: Path, change: Callable[[Path], None], moment: tuple[str, bool]
) -> None:
    """
    However and whenever they change, the model is refused with a message that names the file.
    """
    weights = model / "model.safetensors"

    with pytest.raises(ModelRefused, match="changed while the model was being read") as refused:
        start(model, at(moment, lambda: change(weights)))

    assert str(model) in str(refused.value)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_other_files_of_the_model(model: Path, name: str) -> None:
    """The other files that are hashed are checked like the weights."""
    with pytest.raises(ModelRefused, match=f"{name} changed while the model was being read"):
        start(model, at((LOADING, True), lambda: put_another(model / name)))


def test_a_file_that_goes_while_others_are_hashed(model: Path) -> None:
    """A file that disappears after it was found is reported as changed."""
    shutil.copy(model / "model.safetensors", model / "first.safetensors")

    with pytest.raises(
        ModelRefused, match=r"model\.safetensors changed while the model was being read"
    ):
        start(model, at((HASHING, False), lambda: remove(model / "model.safetensors")))


def test_the_adapter(model: Path, tmp_path: Path) -> None:
    """An adapter's weights are checked too."""
    adapter = make_adapter(model, tmp_path / "adapter", seed=1)
    weights = adapter / "adapters.safetensors"

    with pytest.raises(ModelRefused, match=f"{weights} changed while"):
        start(model, at((HASHING, True), lambda: put_another(weights)), adapter=str(adapter))


def test_unread_files_may_change(model: Path) -> None:
    """
    A change of a file that is not part of the model is ignored, and so is reading a file.
    """

    def change() -> None:
        (model / "README.md").write_text("A model.", encoding="utf-8")
        (model / "model.safetensors").read_bytes()

    calm = start(model, unwatched)
    started = start(model, at((HASHING, True), change))

    assert (model / "README.md").exists()
    assert calm.facts.fingerprint == started.facts.fingerprint


@pytest.mark.long
def test_a_model_may_change_once_it_is_read(model: Path) -> None:
    """A change during the self-test has no effect, because nothing is read any more."""
    calm = start(model, unwatched)
    change = at((TESTING, False), lambda: put_another(model / "model.safetensors"))
    started = start(model, change, tested_shapes=lambda fingerprint: None)

    assert calm.facts.base_fingerprint == started.facts.base_fingerprint
    assert started.self_test is not None
    again = start(model, unwatched)
    assert again.facts.fingerprint != started.facts.fingerprint


def test_a_disk_that_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that cannot be read although the files did not change are reported as such."""

    def fails(arrays: Any) -> None:
        raise RuntimeError("[read] Unable to read from file.")

    monkeypatch.setattr(mx, "eval", fails)

    with pytest.raises(
        ModelRefused, match=r"cannot be read: .* Unable to read from file\."
    ) as refused:
        start(model, unwatched)

    assert str(model) in str(refused.value)


def test_a_look_reads_nothing_and_misses_nothing(model: Path) -> None:
    """
    ``seen`` is equal for the same files, but not for a link to a directory with the same names.
    """
    before = seen(model)
    assert before == seen(model)

    link = model.with_name("link")
    link.symlink_to(model)
    other = model.with_name("other")
    shutil.copytree(model, other)
    at_first = seen(link)
    link.unlink()
    link.symlink_to(other)

    assert before == seen(model)
    assert at_first != seen(link)
