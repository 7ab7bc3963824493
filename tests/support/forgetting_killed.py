"""
A process that is killed in the middle of forgetting a session.

`python -P -m tests.support.forgetting_killed PLACE server FOLDER` runs a server there that forgets
one of two conversations; `... PLACE ops forget ...` runs a command. PLACE says where the process is
killed, as by the kernel: nothing of it runs after that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cairn.actors.journal_keys import KeyFile
from cairn.actors.requests.limits import Limits
from cairn.actors.snapshots import SnapshotFile
from cairn.journal.rows.store_sql import SqlStore
from tests.support.processes.child_process import die_with_parent
from tests.support.sealed_place import LONG, OTHER, Place, forget, talked

MINE = "mine"
OTHERS = "others"

_LIMIT_S = 120.0


def killed(*arguments: object, env: dict[str, str] | None = None) -> str:
    """Run this module to its kill; returns what it printed."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", "-m", __spec__.name, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, **(env or {})},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
        preexec_fn=die_with_parent,
    )
    assert -signal.SIGKILL == done.returncode, done.stdout + done.stderr
    return done.stdout


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _around(owner: Any, name: str, before: Callable[..., bool], after: Callable[..., bool]) -> None:
    """Have the process killed before or after a call of a method."""
    step = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        if before(*given):
            _kill()
        found = step(*given, **named)
        if after(*given):
            _kill()
        return found

    setattr(owner, name, call)


def _at_row(kind: str, *, committed: bool) -> None:
    """Killed before or after the commit of the first row of a kind."""

    def has(_: SqlStore, rows: Any) -> bool:
        return any(row.kind == kind for row in rows)

    _around(SqlStore, "append", *((_no, has) if committed else (has, _no)))


def _in_keys() -> None:
    """Killed when the keys are deleted, and that is not committed."""

    def trace(keys: KeyFile, *_: Any) -> bool:
        def see(statement: str) -> None:
            if statement.startswith("COMMIT"):
                _kill()

        keys._connection.set_trace_callback(see)
        return False

    _around(KeyFile, "remove", trace, _no)


def _with_snapshot(keys: KeyFile, *_: object) -> bool:
    """Wait for the snapshot that follows ``session_forgotten``."""
    deadline = time.monotonic() + _LIMIT_S / 2
    while not keys._path.with_name("snapshot").exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return True


def _no(*_: object) -> bool:
    return False


def _yes(*_: object) -> bool:
    return True


PLACES: dict[str, Callable[[], None]] = {
    "before it is closed": lambda: _at_row("session_closed", committed=False),
    "after it was closed": lambda: _at_row("session_closed", committed=True),
    "before a block goes": lambda: _at_row("block_evicted", committed=False),
    "after a block went": lambda: _at_row("block_evicted", committed=True),
    "after a file went": lambda: _at_row("block_file_removed", committed=True),
    "before the snapshot goes": lambda: _around(SnapshotFile, "remove", _yes, _no),
    "after the snapshot went": lambda: _around(SnapshotFile, "remove", _no, _yes),
    "before it is on record": lambda: _at_row("session_forgotten", committed=False),
    "after it was recorded": lambda: _at_row("session_forgotten", committed=True),
    "before the keys go": lambda: _around(KeyFile, "remove", _yes, _no),
    "after a snapshot, before the keys go": lambda: _around(KeyFile, "remove", _with_snapshot, _no),
    "while the keys go": _in_keys,
    "after the keys went": lambda: _around(KeyFile, "remove", _no, _yes),
}
"""Where the process may be killed, in order."""

ON_RECORD = list(PLACES)[list(PLACES).index("after it was recorded") :]
"""Those after which only the keys are left, or nothing."""


async def _served(folder: Path, place: str) -> None:
    from tests.support.in_process_server import without_slabs

    async with Place(folder).serving(limits=Limits(slab_idle_s=0.0)) as server:
        await talked(server, LONG, session_name=MINE)
        await talked(server, OTHER, session_name=OTHERS)
        await without_slabs(server)
        PLACES[place]()
        await forget(server, MINE)


def main() -> None:
    """Run to the kill."""
    place, what, *rest = sys.argv[1:]
    if what == "server":
        import trio

        trio.run(_served, Path(rest[0]), place)
        return
    from cairn.ops.cli import ops

    PLACES[place]()
    ops.main(args=rest)


if __name__ == "__main__":
    main()
