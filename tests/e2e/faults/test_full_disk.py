"""
The disk fills up under a running server: no answer leaves it that is not journaled, and once there
is room again, it continues normally.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from cairn.journal import events as ev
from tests.support.journals import released
from tests.support.processes.subprocess_server import (
    DEADLINE_S,
    Listener,
    Serving,
    ask,
    assert_valid,
    eventually,
    recorded,
    started,
    user,
)

E = TypeVar("E", bound=ev.Event)

PATH = "The stone lies on the path, and the path goes over the hill. "


def small_disk(where: Path, mib: int, before: str = "true") -> list[str]:
    """
    A command that runs another one with a disk of ``mib`` MiB at ``where``, which only that one
    sees. Skips the test if the system does not allow it.

    Args:
        before: a shell line to run first, with the disk's path as $0.
    """
    where.mkdir()
    # A preloaded BLAS starts threads at once, and a process with threads cannot create a user
    # namespace. So the preload is set again after `unshare`.
    preloaded = os.environ.get("LD_PRELOAD", "")
    script = f'mount -t tmpfs -o size={mib}m none "$0" && {{ {before}; }}'
    if preloaded:
        script += f" && export LD_PRELOAD={shlex.quote(preloaded)}"
    script += ' && exec "$@"'
    within = ["env", "-u", "LD_PRELOAD", "unshare", "-rm", "sh", "-c", script, str(where)]
    tried = subprocess.run([*within, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no small disk can be mounted here: {tried.stderr.strip()}")
    return within


@pytest.fixture
def server(tmp_path: Path, model_directory: Path) -> Iterator[Serving]:
    """A server on a disk of its own with 8 MiB."""
    disk = tmp_path / "disk"
    within = small_disk(disk, 8)
    with started(disk / "home", "--model", model_directory, within=within) as found:
        yield found


def seen(server: Serving) -> Path:
    """The server's data directory, as seen from outside its namespace."""
    return Path(f"/proc/{server.pid}/root") / server.data_dir.relative_to("/")


def copied(server: Serving) -> Path:
    """A copy of the server's journal: SQLite opens no file on a disk of another namespace."""
    copy = server.data_dir / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in ("journal.db", "journal.db-wal", "keys.db", "journal-key"):
        shutil.copy(seen(server) / name, copy / name)
    return copy


def events(server: Serving, kind: type[E], **fields: str) -> list[E]:
    """The journal's events of one kind with these fields."""
    found = (place.event for place in recorded(copied(server)))
    return [
        event
        for event in found
        if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items())
    ]


def fill(server: Serving) -> Path:
    """Fill the server's disk to the last byte; returns the file that does it."""
    filler = seen(server) / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return filler


def refused(server: Serving) -> httpx.Response | None:
    """The answer to a request if it reports a full disk, otherwise None."""
    answer = server.post(messages=[user("Is there room?")], max_tokens=64)
    return answer if answer.status_code == 503 else None


def test_a_full_disk_and_room_again(server: Serving, cold: Serving, lengthy):
    """
    A running stream ends with the error, and new requests are refused with a time to retry. All
    tokens that were sent are in the journal. Once there is room, the same server answers with the
    same bits, and the journal has the length of the interruption.
    """
    before = ask(server, user(PATH * 12))
    client = Listener(server, **lengthy[0], max_tokens=250).decoding(3)
    filler = fill(server)
    answer = eventually(lambda: refused(server))
    assert "journal_stalled" == answer.json()["error"]["code"]
    assert answer.headers["retry-after"].isdigit()
    error = client.end().error
    assert error is not None
    assert "journal_stalled" == error["code"]
    assert not client.done
    assert "journal_stalled" == server.health()["status"]
    assert refused(server) is not None
    assert server.running

    text, _ = released(events(server, ev.Event), client.request)
    assert text.startswith(client.text)
    assert [] == events(server, ev.RequestFinished, request=client.request)

    filler.unlink()
    eventually(lambda: server.health()["status"] == "ok")
    ended = events(server, ev.RequestCancelled, request=client.request)
    assert ["journal_stalled"] == [event.stage for event in ended]
    stalled = eventually(lambda: events(server, ev.JournalStalled))
    assert 1 <= stalled[0].requests_refused
    assert 1 <= stalled[0].rows_waiting
    again = ask(server, **lengthy[0], max_tokens=250)
    assert ask(cold, **lengthy[0], max_tokens=250, cache_prompt=False).bits == again.bits
    assert before.bits == ask(server, user(PATH * 12)).bits
    server.wait_idle()
    assert_valid(copied(server))
    assert "Traceback" not in server.stderr()
    assert 0 == server.stop()


@pytest.mark.parametrize("own_model", [True, False])
def test_started_on_a_full_disk(tmp_path: Path, model_directory: Path, own_model: bool):
    """A server that finds no room to start reports it in one sentence, with exit code 2."""
    disk = tmp_path / "disk"
    within = small_disk(disk, 1, 'cat /dev/zero 2>&- > "$0"/filler; true')
    model = ["--model", str(model_directory)] if own_model else []
    command = [sys.executable, "-P", "-m", "cairn.ops", "serve", "--port", "0", *model]
    done = subprocess.run(
        [*within, *command, "--data-dir", str(disk / "home")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert 2 == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert "space" in done.stderr.casefold()


def test_stopped_on_a_full_disk(server: Serving):
    """
    A server that is stopped while the disk is full does not hang: it ends with a sentence that says
    what is not journaled.
    """
    ask(server, user(PATH))
    fill(server)
    eventually(lambda: refused(server))
    assert 1 == server.stop(), server.stderr()
    assert "Traceback" not in server.stderr()
    assert "Free some space" in server.stderr()
