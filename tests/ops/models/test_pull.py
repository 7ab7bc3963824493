"""`cairn pull` and `cairn rm` against a hub of the tests."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from cairn.engine.model.files import directory_fault
from tests.ops.models.conftest import NAME, WEIGHTS, WEIGHTS_BYTES, Shell
from tests.support.hub import Hub, digest_of
from tests.support.processes.subprocess_server import eventually, started

SHORT = "qwen3-0.6b"
CHUNKS = 20 * 1024 * 1024
"""What the hub's client has written of a file when it was cut off a little later."""


def blobs(shell: Shell) -> dict[str, int]:
    """The files with contents in the hub's cache, and their sizes."""
    folder = shell.folder / "blobs"
    return {one.name: one.stat().st_size for one in folder.iterdir()} if folder.exists() else {}


def test_a_model_is_pulled(shell: Shell, hub: Hub, files: Path) -> None:
    """What it takes is said first; the last line is the directory; nothing is left beside it."""
    hub.add(NAME, files)
    done = shell.run("pull", SHORT)
    assert (0, []) == (done.returncode, [] if done.returncode == 0 else [done.stderr])
    directory = Path(done.stdout.strip())
    assert None is directory_fault(str(directory))
    assert {"config.json", "tokenizer.json", WEIGHTS} == {one.name for one in directory.iterdir()}
    assert (files / WEIGHTS).read_bytes() == (directory / WEIGHTS).read_bytes()
    assert [] == [name for name in blobs(shell) if "." in name]
    before, _, after = done.stderr.partition("downloading")
    assert f"{NAME}: 24 MB to download." in before
    assert "disk    fits:" in before
    assert "memory  fits" in before
    assert "24 MB of 24 MB ...\nChecked the hashes of 3 files.\nReady: `cairn serve" in after

    again = shell.run("pull", NAME)
    assert 0 == again.returncode
    assert ": 0 bytes to download; 24 MB are here." in again.stderr
    assert [0] == hub.sent(WEIGHTS)


def test_a_download_that_was_cut_off_continues(shell: Shell, hub: Hub, files: Path) -> None:
    """What was received is not sent again, and the model is complete at the end."""
    hub.add(NAME, files)
    hub.cut_after[WEIGHTS] = CHUNKS + 1_000_000
    done = shell.run("pull", SHORT)
    assert 2 == done.returncode
    assert "did not send" in done.stderr
    assert "Traceback" not in done.stderr
    assert [CHUNKS] == [size for name, size in blobs(shell).items() if name.endswith(".part")]

    lines = json.loads(shell.run("models", "--json").stdout)
    (line,) = (one for one in lines if one["name"] == SHORT)
    assert ("incomplete", True) == (line["state"], line["size_bytes"] > CHUNKS)

    hub.refused.clear()
    done = shell.run("pull", SHORT)
    assert 0 == done.returncode
    assert ": 3 MB to download; 21 MB are here." in done.stderr
    # The first process tried to continue too.
    assert [0, CHUNKS, CHUNKS] == hub.sent(WEIGHTS)
    directory = Path(done.stdout.strip())
    assert (files / WEIGHTS).read_bytes() == (directory / WEIGHTS).read_bytes()


def test_ctrl_c(shell: Shell, hub: Hub, files: Path) -> None:
    """It says how much is here, and the next download continues there."""
    hub.add(NAME, files)
    hub.held = threading.Event()
    hub.cut_after[WEIGHTS] = CHUNKS + 1_000_000
    process = subprocess.Popen(
        shell.command("pull", SHORT),
        env=shell.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: CHUNKS in blobs(shell).values())
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        hub.held.set()
    assert 130 == process.returncode
    assert f"Stopped. 21 MB of 24 MB are here; the next download of {NAME} continues" in stderr
    assert 0 == shell.run("pull", SHORT).returncode
    assert [0, CHUNKS] == hub.sent(WEIGHTS)


@pytest.mark.long_but("model.safetensors")
@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json"])
def test_a_wrong_hash(shell: Shell, hub: Hub, files: Path, file: str) -> None:
    """A file that is not what the hub lists is removed, and the model is not served."""
    hub.add(NAME, files)
    hub.altered.add(file)
    done = shell.run("pull", SHORT)
    assert 2 == done.returncode
    assert f"{file} of {NAME} is not what 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr
    digest = digest_of(file, (files / file).read_bytes())
    assert [] == [name for name in blobs(shell) if name.startswith(digest)]
    assert not (shell.folder / "refs").exists()

    hub.altered.clear()
    assert 0 == shell.run("pull", SHORT).returncode


def test_a_file_that_was_damaged_here(shell: Shell, hub: Hub, files: Path) -> None:
    """It is found by its hash, and downloaded again."""
    hub.add(NAME, files)
    directory = Path(shell.run("pull", SHORT).stdout.strip())
    blob = (directory / WEIGHTS).resolve()
    damaged = bytearray(blob.read_bytes())
    damaged[-1] ^= 1
    blob.write_bytes(damaged)
    done = shell.run("pull", SHORT)
    assert 0 == done.returncode
    assert "checking what is here" in done.stderr
    assert (files / WEIGHTS).read_bytes() == (directory / WEIGHTS).read_bytes()
    assert [0, 0] == hub.sent(WEIGHTS)


@pytest.mark.long
def test_an_update(shell: Shell, hub: Hub, files: Path) -> None:
    """Only what is new is downloaded; one that is cut off leaves the model as it was."""
    hub.add(NAME, files)
    before = Path(shell.run("pull", SHORT).stdout.strip())
    hub.models[NAME]["tokenizer.json"] = b"{ }"
    hub.altered.add("tokenizer.json")
    assert 2 == shell.run("pull", SHORT).returncode
    assert before.name == (shell.folder / "refs" / "main").read_text()
    hub.altered.clear()
    done = shell.run("pull", SHORT)
    assert Path(done.stdout.strip()).name == hub.revision_of(NAME) != before.name
    assert [0] == hub.sent(WEIGHTS)


def test_no_room_on_the_disk(shell: Shell, hub: Hub, files: Path) -> None:
    """Nothing large is downloaded, and the sentence says what there is."""
    hub.add(NAME, files)
    hub.sizes[WEIGHTS] = 10**15
    done = shell.run("pull", SHORT, "--yes")
    assert 2 == done.returncode
    assert f"{NAME} does not fit on the disk: 1000000.0 GB are to be downloaded" in done.stderr
    assert "`cairn rm NAME`" in done.stderr
    assert [] == hub.sent(WEIGHTS)


def test_no_room_in_memory(shell: Shell, hub: Hub, files: Path) -> None:
    """It is refused before the download, with a model that fits, unless --yes is given."""
    hub.add(NAME, files)
    hub.sizes[WEIGHTS] = 10**15
    done = shell.run("pull", SHORT)
    assert 2 == done.returncode
    assert f"{NAME} does not fit in memory" in done.stderr
    assert "Download it all the same?" in done.stderr
    assert "so nothing was changed. Add --yes to do it." in done.stderr
    assert [] == hub.sent(WEIGHTS)
    served = shell.run("serve", "--model", SHORT, "--port", "0")
    assert 2 == served.returncode
    assert f"{NAME} does not fit in memory" in served.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/none", "There is no model owner/none on 127.0.0.1"),
        ("mlx-community/Qwen3-4B-4bits", "Did you mean qwen3-4b"),
        ("qwen3", "Did you mean qwen3-0.6b or qwen3-1.7b or qwen3-4b?"),
        ("a/b/c", "There is no model a/b/c: it is no directory, and no short name"),
        ("owner/gated", "owner/gated on 127.0.0.1"),
        ("owner/gguf", "owner/gguf is not a model for MLX: it has weights in GGUF alone."),
        ("owner/empty", "is not a model for MLX: it has no weights"),
        ("owner/bert", "is not a model for MLX: mlx-lm has no model_type 'bert-of-none'."),
        ("pebble", "pebble is built in."),
        ("./here", "./here is a path on this machine."),
    ],
)
def test_what_is_no_model(shell: Shell, hub: Hub, files: Path, name: str, words: str) -> None:
    """Each is a sentence of its own, and not a stack."""
    hub.add("owner/gated", files)
    hub.gated.add("owner/gated")
    hub.models["owner/gguf"] = {"model.gguf": b"GGUF"}
    hub.models["owner/empty"] = {"config.json": b"{}"}
    hub.models["owner/bert"] = {
        "config.json": b'{"model_type": "bert-of-none"}',
        "model.safetensors": b"",
    }
    done = shell.run("pull", name)
    assert 2 == done.returncode
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_offline(shell: Shell, hub: Hub, files: Path) -> None:
    """A hub that cannot be reached is not a model that does not exist."""
    closed = "http://127.0.0.1:9"
    for more, words in (
        ({"HF_ENDPOINT": closed}, "127.0.0.1:9 cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "$HF_HUB_OFFLINE forbids downloads"),
    ):
        for command in (("pull", SHORT), ("serve", "--model", SHORT, "--port", "0")):
            done = shell.run(*command, **more)
            assert 2 == done.returncode
            assert words in done.stderr
            assert "Traceback" not in done.stderr
            assert "reading the journal" not in done.stderr


@pytest.mark.long
def test_removal(shell: Shell, hub: Hub, files: Path) -> None:
    """Nothing is removed without an answer; then all of it, also what is incomplete."""
    missing = shell.run("rm", SHORT)
    assert (2, True) == (missing.returncode, f"{NAME} is not here" in missing.stderr)
    hub.add(NAME, files)
    for cut in (False, True):
        if cut:
            hub.cut_after[WEIGHTS] = CHUNKS + 1
        shell.run("pull", SHORT)
        asked = shell.run("rm", SHORT)
        assert (2, True) == (asked.returncode, "Add --yes to do it." in asked.stderr)
        assert shell.folder.exists()
        near = shell.run("rm", f"{NAME}s")
        assert f"Did you mean {NAME}?" in near.stderr
        done = shell.run("rm", "--yes", SHORT)
        assert (0, f"Removed {NAME}: ") == (done.returncode, done.stdout[: len(NAME) + 10])
        assert not shell.folder.exists()
    for name in ("pebble", str(files)):
        done = shell.run("rm", "--yes", name)
        assert (2, True) == (done.returncode, "is not removed" in done.stderr)
    assert (files / WEIGHTS).stat().st_size > WEIGHTS_BYTES


@pytest.mark.long
def test_a_short_name_is_served(
    shell: Shell, hub: Hub, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Downloaded at the first start; at the next the hub is not asked. It cannot be removed now."""
    hub.add(NAME, model_directory)
    for key, value in shell.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    data = shell.home / "data"
    with started(data, "--model", SHORT) as server:
        assert NAME == server.health()["model"]
        removal = shell.run("rm", "--yes", SHORT)
        assert (2, True) == (removal.returncode, "is served at the moment" in removal.stderr)
        listed = json.loads(shell.run("models", "--json").stdout)
        assert "loaded" == next(one for one in listed if one["name"] == SHORT)["state"]
    asked = len(hub.requests)
    done = shell.run("chat", "--model", SHORT, "--max-tokens", "4", "Hello")
    assert 0 == done.returncode, done.stderr
    assert asked == len(hub.requests)


@pytest.mark.long
def test_a_chat_changes_to_a_short_name(shell: Shell, hub: Hub, model_directory: Path) -> None:
    """Downloaded before the chat's server is restarted; a name that is none leaves the model."""
    hub.add(NAME, model_directory)
    lines = f"/model {SHORT}\n/model\n/model qwne3-4b\n"
    done = shell.run("chat", lines=lines)
    assert 1 == done.returncode
    assert f"Started a server for this chat: {NAME} at" in done.stderr
    assert f"* {NAME}  loaded\nAlso on this machine: pebble.\n" in done.stderr
    assert "There is no model qwne3-4b: " in done.stderr
    assert "Did you mean qwen3-4b" in done.stderr
