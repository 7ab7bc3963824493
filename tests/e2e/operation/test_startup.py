"""How a server starts, and how it reports that it cannot: exit code 2 and one sentence."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import stat
import sys
from pathlib import Path

import pytest

from cairn.engine.machine.blas import find_blas
from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import Serving, ask, run_ops, user

STORY = "The stone lies on the path, and the path goes over the hill. "


def refusal(*arguments: object) -> str:
    """The last line of `ops serve` if it does not start; nothing goes to stdout."""
    code, out, err = run_ops("serve", "--port", 0, *arguments)
    assert (2, "") == (code, out)
    assert "Traceback" not in err
    # Long steps are announced first; the sentence comes last.
    return err.strip().splitlines()[-1]


def rows(data_dir: Path) -> list[tuple[object, ...]]:
    """All rows of a journal's table, as they are stored."""
    with sqlite3.connect(f"file:{data_dir / 'journal.db'}?mode=ro", uri=True) as database:
        found = database.execute("SELECT * FROM events ORDER BY position").fetchall()
    database.close()
    return found


def test_address_and_folder(shared: Serving):
    """
    Port 0 selects a free port of this machine, and only the owner can read the data directory.
    """
    assert shared.url.startswith("http://127.0.0.1:")
    assert not shared.url.endswith(":0")
    assert shared.health()["status"] == "ok"
    files = ("secret", "journal.db", "journal.db-wal", "journal.db-shm", "logs/cairn.jsonl")
    modes = {
        name: stat.S_IMODE((shared.data_dir / name).stat().st_mode)
        for name in (".", "logs", *files)
    }
    assert {".": 0o700, "logs": 0o700, **dict.fromkeys(files, 0o600)} == modes
    assert 32 == len((shared.data_dir / "secret").read_bytes())


def test_a_port_in_use(tmp_path: Path, model_directory: Path):
    """The sentence names the port; nothing was journaled, because no model was loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refusal(
            "--port", port, "--data-dir", tmp_path / "home", "--model", model_directory
        )
    assert f"Port {port} on 127.0.0.1 cannot be used" in sentence
    assert not (tmp_path / "home" / "journal.db").exists()


@pytest.mark.long_but("nosuchhost.invalid")
@pytest.mark.parametrize("host", ["nosuchhost.invalid", "a..b", "192.0.2.1"])
def test_a_host_that_is_not_here(tmp_path: Path, model_directory: Path, host: str):
    """
    An unknown name, an invalid name, and another machine's address: the error does not blame the
    port.
    """
    options = ("--host", host, "--data-dir", tmp_path / "home", "--model", model_directory)
    sentence = refusal(*options)
    assert sentence.startswith(f"--host {host} cannot be used: ")
    assert "or omit --host" in sentence
    assert "--port" not in sentence
    assert not (tmp_path / "home" / "journal.db").exists()


def test_a_second_server_on_one_folder(shared: Serving, model_directory: Path):
    """The sentence names the process that holds it, which continues."""
    before = shared.position()
    sentence = refusal("--data-dir", shared.data_dir, "--model", model_directory)
    assert f"process {shared.pid}" in sentence
    assert str(shared.data_dir) in sentence
    assert [] == shared.events(ev.ServerStarted, after=before)
    assert [] == shared.requests(after=before)
    assert 2 == ask(shared, user("Hello"), max_tokens=2).completion_tokens


@pytest.mark.long
def test_no_model(tmp_path: Path):
    """The sentence names an empty directory, and one whose model is invalid."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in refusal("--data-dir", tmp_path / "home", "--model", empty)
    (empty / "config.json").write_text('{"model_type": "none of ours"}')
    assert str(empty) in refusal("--data-dir", tmp_path / "home", "--model", empty)


@pytest.mark.long
def test_a_pool_that_holds_nothing(tmp_path: Path, model_directory: Path):
    """A server that could only refuse every prompt does not start."""
    options = ("--block-tokens", 280, "--pool-mb", 1)
    sentence = refusal("--data-dir", tmp_path / "home", "--model", model_directory, *options)
    assert "--pool-mb" in sentence
    assert "280 tokens" in sentence


@pytest.mark.long
def test_a_damaged_journal(start: Start, model_directory: Path):
    """
    With a changed byte, a server that folds the whole journal refuses, says how to find it, and
    writes nothing. From then on every start refuses.
    """
    server = start()
    ask(server, user("Hello"), max_tokens=4)
    assert 0 == server.stop()
    with sqlite3.connect(server.data_dir / "journal.db") as database:
        (position, public) = database.execute(
            "SELECT position, public FROM events WHERE kind = 'tokens_emitted'"
        ).fetchone()
        public = public.encode() if isinstance(public, str) else public
        damaged = public.replace(b'"first":0', b'"first":1')
        assert damaged != public
        database.execute("UPDATE events SET public = ? WHERE position = ?", (damaged, position))
    database.close()
    before = rows(server.data_dir)
    for whole in (("--fold-all",), ()):
        sentence = refusal("--data-dir", server.data_dir, "--model", model_directory, *whole)
        assert f"`ops verify --data-dir {server.data_dir}`" in sentence
        assert f"row {position}" in sentence
        assert before == rows(server.data_dir)
    assert 1 == run_ops("verify", "--data-dir", server.data_dir)[0]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_a_library_that_the_caller_preloads(start: Start, tmp_path: Path):
    """It stays in force: no other BLAS is loaded before it."""
    found = find_blas()
    if found is None:
        pytest.skip("no BLAS here to be preloaded")
    mine = tmp_path / "libopenblas-mine.so"
    shutil.copy(found, mine)
    server = start(env={"LD_PRELOAD": str(mine)})
    maps = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
    assert str(mine) in maps
    assert str(found) not in maps


def test_options_go_into_the_fingerprint(start: Start, shared: Serving):
    """W, C and the cache classes have the requested values, and give another fingerprint."""
    server = start("--decode-rows", 1, "--block-tokens", 32, "--kv-cache", "mlx-lm", "--queue", 3)
    (loaded,) = server.events(ev.ModelLoaded)
    (ran,) = server.events(ev.ServerStarted)
    fields = ("decode_rows", "block_tokens", "kv_cache")
    assert (1, 32, "mlx-lm") == tuple(loaded.fields[name] for name in fields)
    assert (1, 32) == (loaded.decode_rows, loaded.block_tokens)
    assert loaded.fingerprint != shared.health()["fingerprint"]
    assert 3 == ran.settings["queue"]
    talk = [user(STORY * 12)]
    first = ask(server, *talk)
    again = ask(server, *talk)
    assert (0, (first.prompt_tokens - 1) // 32 * 32) == (first.cached_tokens, again.cached_tokens)
    assert first.bits == again.bits
