"""`ops status`: what is shown of a server, and of a data directory without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.journal.growth import Growth
from cairn.ops.serve.data_dir import hold_directory
from cairn.ops.state.running import Running, health_of
from cairn.ops.state.status import Reuse, Status, as_object, lines, reused_since
from tests.ops.chat.conftest import faked
from tests.support.journals import healthy

HEALTH: dict[str, Any] = {
    "status": "ok",
    "model": "tiny",
    "context_tokens": 4096,
    "models": [{"name": "tiny", "state": "loaded"}, {"name": "big", "state": "not_loaded"}],
    "started": 1000,
    "sessions": {"idle": 2, "decoding": 1, "cold": 0},
    "queue": {"queued": 2, "running": 1},
    "pool": {"bytes_total": 1024},
    "blocks": {"bytes_total": 1024, "disk_count": 3, "disk_bytes": 512, "disk_bytes_total": 2048},
    "memory": {"weights_bytes": 100, "kv_live_bytes": 300},
    "bugs": 0,
}
FOUND = Status(
    data_dir=Path("/d"),
    server=Running(Path("/d"), 42, "http://127.0.0.1:8000"),
    health=HEALTH,
    resident=4096,
    reuse=Reuse(3, 200, 150),
    rows=9,
    journal_bytes=2048,
    log_bytes=0,
    grown=Growth(1024, 300),
    is_elsewhere=False,
    free_bytes=1 << 30,
)


def shown(found: Status) -> dict[str, str]:
    """The lines with a value, an hour and a minute after the start."""
    return {name: words for name, words in lines(found, 4_660_000_000) if words is not None}


def test_a_running_server():
    """Address, model, load, memory, sessions, reuse, journal and disk."""
    assert {
        "server": "up for 1 h 1 min (process 42)",
        "address": "http://127.0.0.1:8000",
        "model": "tiny, context 4096 tokens; also big (not loaded)",
        "requests": "1 running, 2 waiting",
        "memory": "4.0 KiB in RAM; weights 100 bytes; KV 300 bytes of at most 2.0 KiB",
        "sessions": "3 (2 idle, 1 decoding)",
        "reused": "75 % of 200 prompt tokens in the last hour (3 answers)",
        "journal": "9 rows, 2.0 KiB, which grew by 1.0 KiB in 5 minutes",
        "disk": "3 block files, 512 bytes of at most 2.0 KiB; 1.0 GiB free",
        "data": "/d",
    } == shown(FOUND)
    assert 0 == FOUND.code


@pytest.mark.parametrize(
    ("changes", "server", "code"),
    [
        (
            {"server": None, "health": None},
            "not running; start it with `ops serve --data-dir /d`",
            3,
        ),
        ({"health": None}, "not answering (process 42): it is stopping, or too busy", 1),
        (
            {"health": {"status": "starting", "step": "loading the model"}},
            "starting (process 42): loading the model",
            1,
        ),
        (
            {"health": {"status": "starting", "step": "reading rows", "done": 3, "total": 4}},
            "starting (process 42): reading rows, 75 %",
            1,
        ),
        (
            {"server": Running(Path("/d"), 42, None), "health": None},
            "starting (process 42): it does not listen yet",
            1,
        ),
        (
            {"health": {"status": "starting", "api_key": "required"}},
            "starting (process 42)",
            1,
        ),
        (
            {"health": {"status": "ok", "api_key": "required"}},
            "up (process 42); it shows more with an API key: set $CAIRN_API_KEY",
            0,
        ),
        (
            {"health": {"status": "degraded", "degraded": {"disk": "is \x1b[2Jfull"}}},
            "degraded (process 42); disk: is \\x1b[2Jfull",
            1,
        ),
        ({"server": Running(Path("/d"), None, None), "health": None}, "starting", 1),
    ],
)
def test_a_server_that_is_not_as_it_should(changes: dict[str, Any], server: str, code: int):
    """The first line says how it is; the exit code too."""
    found = attrs.evolve(FOUND, **changes)
    assert shown(found)["server"].startswith(server)
    assert code == found.code


@pytest.mark.parametrize(
    ("reuse", "words"),
    [
        (None, None),
        (Reuse(0, 0, 0), "no request was answered in the last hour"),
        (Reuse(1, 0, 0), "0 % of 0 prompt tokens in the last hour (1 answer)"),
    ],
)
def test_little_to_say_of_reuse(reuse: Reuse | None, words: str | None):
    """Without requests there is no share."""
    assert words == shown(attrs.evolve(FOUND, reuse=reuse)).get("reused")


def test_the_write_ahead_log_is_named_apart():
    """It is no growth of the journal: SQLite uses the same file again."""
    words = shown(attrs.evolve(FOUND, log_bytes=4096))["journal"]
    assert words.startswith("9 rows, 2.0 KiB, which grew by 1.0 KiB in 5 minutes; and 4.0 KiB of w")
    assert {"rows": 9, "bytes": 2048, "log_bytes": 0} == as_object(FOUND)["journal"]


def test_a_journal_elsewhere(run, tmp_path: Path):
    """That of a node is in a database, which the server names and this command does not."""
    away = attrs.evolve(FOUND, rows=None, is_elsewhere=True)
    health = {"status": "ok", "journal_position": 7, "node": "n1"}
    assert (
        "up to row 7, not in the data directory; for more, add --journal URL --node n1"
        == shown(attrs.evolve(away, health=health))["journal"]
    )
    (tmp_path / "head-0d1e2f3a").touch()
    assert (
        "journal:  not in the data directory; for more, add --journal URL\n"
        in run("status", "--data-dir", tmp_path).stdout
    )
    found = run("doctor", "--data-dir", tmp_path).stdout
    assert "journal   not in the data directory; add --journal URL, and --node" in found
    (tmp_path / "journal.db").touch()
    assert "journal:  none yet" in run("status", "--data-dir", tmp_path).stdout


def test_json():
    """The same figures, as numbers; what is not known is null."""
    found = as_object(FOUND)
    assert ("ok", 42, {"requests": 3, "prompt_tokens": 200, "reused_tokens": 150}) == (
        *(found["status"], found["pid"]),
        found["last_hour"],
    )
    empty = as_object(attrs.evolve(FOUND, server=None, health=None, rows=None, reuse=None))
    assert ("not_running", None, None) == (empty["status"], empty["pid"], empty["last_hour"])


def test_what_was_reused_since(stored):
    """Only requests that were finished since then count."""
    folder = stored(healthy())
    store = SqlStore.open(journal_url(folder), read_only=True)
    times = [row.time_us for row in healthy() if row.kind == "request_finished"]
    everything = reused_since(store, 0)
    assert len(times) == everything.requests > 0
    assert everything.prompt_tokens > 0
    assert Reuse(0, 0, 0) == reused_since(store, healthy()[-1].time_us + 1)
    assert everything == reused_since(store, times[0])
    store.close()


def test_without_a_server(run, stored):
    """The journal is read all the same; nothing is created where there is none."""
    folder = stored(healthy())
    result = run("status")
    assert 3 == result.exit_code
    assert "server:   not running; start it with `ops serve`\n" in result.stdout
    assert "journal:  31 rows" in result.stdout
    found = json.loads(run("status", "--json").stdout)
    assert ("not_running", 31) == (found["status"], found["journal"]["rows"])
    other = folder.with_name("none")
    assert 3 == run("status", "--data-dir", other).exit_code
    assert not other.exists()


def test_over_a_server(run, tmp_path: Path):
    """The lock leads to its address."""
    with faked() as server, hold_directory(tmp_path, "", who="serve") as held:
        starting = run("status", "--data-dir", tmp_path)
        held.record_address(server.url)
        result = run("status", "--data-dir", tmp_path)
    assert "address:  none yet: the server starts" in starting.stdout
    assert (1, 0) == (starting.exit_code, result.exit_code)
    assert f"address:   {server.url}\n" in result.stdout
    assert "model:     cairn/small-1, context " in result.stdout


def test_what_is_not_cairn():
    """Nothing there, or something else: no health."""
    assert health_of("http://127.0.0.1:9", None) is None


def test_a_damaged_journal(run, tmp_path: Path):
    """It does not stop the command; `ops doctor` reports it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "journal.db").write_bytes(b"no database, but long enough to be read")
    result = run("status")
    assert 3 == result.exit_code
    assert "journal:  none yet" in result.stdout
