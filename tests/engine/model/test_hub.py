"""The progress of a download from a hub, with a stub that has all files locally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm.utils
import pytest

from cairn.engine.errors import ModelRefused
from cairn.engine.mlx.model import load_model
from cairn.engine.model.hub import WHAT, download


class Hub:
    """
    Stands in for the hub's client: gives a directory, and shows its progress as the client does, by
    one bar of files and two of bytes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[tuple[str, list[str]]] = []

    def __call__(self, name: str, *, allow_patterns: list[str], tqdm_class: Any, **_: Any) -> str:
        """Download a model."""
        self.asked.append((name, allow_patterns))
        received = tqdm_class(desc="received", total=0, initial=0, unit="B", unit_scale=True)
        written = tqdm_class(desc="written", total=0, unit="B", bar_format="{l_bar}", name="w")
        with tqdm_class(desc="files", total=2) as files, tqdm_class.get_lock():
            for size in (30, 70):
                written.total = (written.total or 0) + size
                written.refresh()
                written.update(size)
                files.update(1)
        received.set_description_str("done")
        received.close()
        return str(self.directory)


def test_a_download_is_shown_by_its_bytes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """
    The bytes go to whoever shows progress, not the number of files, and no bar is drawn beside it.
    """
    reported: list[tuple[str, int, int]] = []

    found = download("owner/model", lambda *step: reported.append(step), Hub(tmp_path))

    assert tmp_path == found
    assert (WHAT, 100, 100) == reported[-1]
    assert (WHAT, 30, 30) in reported
    assert ("", "") == capfd.readouterr()


def test_a_hubs_model_is_loaded_under_its_name(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model with a name is downloaded and loaded, and progress reports each step."""
    hub = Hub(model_directory)
    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", hub)
    reported: list[tuple[str, int, int]] = []

    loaded = load_model("owner/model", progress=lambda *step: reported.append(step))

    assert ("owner/model", model_directory) == (loaded.name, loaded.directory)
    ((name, patterns),) = hub.asked
    assert "owner/model" == name
    assert {"*.json", "model*.safetensors", "*.jinja"} <= set(patterns)
    assert [WHAT, "loading the model"] == list(dict.fromkeys(step[0] for step in reported))
    assert reported[-1][1] == reported[-1][2] > 1 << 20


def test_a_broken_snapshot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded model is checked like any other directory."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", Hub(tmp_path))

    with pytest.raises(ModelRefused, match="has no model_type"):
        load_model("owner/model")
