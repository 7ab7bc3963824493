"""The progress of a download from a hub, with a stub that has all files locally."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import httpx2
import mlx_lm.utils
import pytest
from huggingface_hub import errors

from cairn.engine.errors import ModelRefused
from cairn.engine.mlx.model import load_model
from cairn.engine.model.hub import WHAT, download, download_fault


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


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class ConnectError(Exception):
    """As the hub's HTTP library raises it."""


RESPONSE = httpx2.Response(401, request=httpx2.Request("GET", "https://hub.test/api"))
NOT_HERE = errors.LocalEntryNotFoundError("An error happened while trying to locate the files")


@pytest.mark.parametrize(
    ("error", "offline", "words"),
    [
        (_caused(NOT_HERE, ConnectError("Name or service not known")), False, "cannot be reached"),
        (ConnectError("refused"), False, "cannot be reached"),
        (NOT_HERE, True, "$HF_HUB_OFFLINE forbids downloads"),
        (errors.OfflineModeIsEnabled("no"), False, "$HF_HUB_OFFLINE forbids downloads"),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), False, "There is no model m on"),
        (errors.HFValidationError("bad"), False, "There is no model m on"),
        (errors.GatedRepoError("403", response=RESPONSE), False, "set $HF_TOKEN to a token"),
        (errors.HfHubHTTPError("500\nmore", response=RESPONSE), False, "did not send m: 500."),
        (OSError(errno.ENOSPC, "No space left on device"), False, "The disk is full"),
        (ValueError("odd."), False, "could not be downloaded from huggingface.co: odd."),
    ],
)
def test_why_there_is_no_model(
    error: Exception, offline: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, no such model, no permission and a full disk are different sentences."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    found = download_fault("m", error)
    assert words in found
    assert "\n" not in found
    assert found.endswith(".")


def test_the_refusal_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the error of the hub's client."""

    def fails(*_: object, **__: object) -> str:
        raise errors.HFValidationError("bad")

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", fails)
    with pytest.raises(ModelRefused, match="There is no model owner/none on "):
        load_model("owner/none")
