"""
Measures what the journal costs: rows, bytes kept and bytes written for each token of an answer, the
delay that gathering adds to a token, and tokens a second beside a journal written nowhere.

The server is real except for its engine, a fake one whose decode passes take a given time, so that
the figures depend on the journal alone. All rows of an answer's request count. Run
it as ``python -P -m tools.journal_cost``; ``--help`` has the options. Written bytes are those of
/proc, up to the end of the last checkpoint, so it needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import attrs
import structlog
import trio

from cairn.actors.boot import booted
from cairn.actors.journal_keys import KeyFile
from cairn.actors.server import Server
from cairn.engine.contract import StartedEngine
from cairn.engine.reports import DecodeRow, RowReport
from cairn.journal.rows.codec import Row
from cairn.journal.rows.database.connections import Sync
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import sqlite_url
from cairn.journal.rows.store import MemoryStore, Store
from cairn.journal.rows.store_sql import SqlStore
from tests.support import fake_engine
from tests.support.in_process_server import (
    SECRET,
    ask,
    chat,
    generate,
    settings,
    wait_idle,
)

_PROMPT = "Write about the stones of the cairn, one after the other. " * 4
_NOWHERE = "nowhere"
_PLAIN = "plain"
"""As ``full``, with texts that are not sealed."""


class PacedEngine(fake_engine.FakeEngine):
    """The fake engine, whose decode passes take time."""

    decode_rows = 8
    decode_shapes: Sequence[int] = (8,)
    pass_s = 0.0

    def decode(self, rows: Sequence[DecodeRow | None]) -> list[RowReport]:
        time.sleep(self.pass_s)
        return super().decode(rows)


@attrs.define
class Measured:
    """
    What answers cost.

    Attributes:
        cpu_s: of all threads.
        delays_s: of each token.
    """

    tokens: int
    seconds: float = 0.0
    cpu_s: float = 0.0
    rows: int = 0
    commits: int = 0
    kept_bytes: int = 0
    written_bytes: int = 0
    asked_bytes: int = 0
    writes: int = 0
    delays_s: list[float] = attrs.field(factory=list)

    def for_each(self, count: float) -> float:
        """A count for each token."""
        return count / self.tokens


def main() -> None:
    """Run the server with each journal in turn, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="answers at once")
    parser.add_argument("--pass-ms", type=float, default=9.5, help="the time of a decode pass")
    parser.add_argument("--tokens", type=int, default=600, help="of an answer")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; medians are printed")
    parser.add_argument(
        "--turns",
        type=int,
        help="instead, one conversation of so many turns, as of a coding agent: each has 1,500 new "
        "tokens, mostly the output of a tool, and an answer of 300",
    )
    parser.add_argument("--plain", action="store_true", help="also with texts that are not sealed")
    parser.add_argument("--dir", type=Path, help="where the journals are; default: a temporary one")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        if given.turns:
            _agent(Path(folder), given.turns, given.pass_ms / 1000)
            return
        for streams in given.streams:
            _compare(Path(folder), streams, given)


def _agent(folder: Path, turns: int, pass_s: float) -> None:
    measured = Measured(tokens=turns)
    _measure(measured, "full", folder / "agent.db", 0, pass_s)
    print(
        f"{turns} turns, each: rows {measured.for_each(measured.rows):.0f}"
        f"  commits {measured.for_each(measured.commits):.0f}"
        f"  kept {measured.for_each(measured.kept_bytes) / 1024:.0f} KiB"
        f"  written {measured.for_each(measured.written_bytes) / 1024:.0f} KiB"
    )


def _compare(folder: Path, streams: int, given: argparse.Namespace) -> None:
    names = [_NOWHERE, *get_args(Sync), *([_PLAIN] if given.plain else [])]
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for repeat in range(given.repeats):
        for name in names if repeat % 2 else reversed(names):
            place = folder / f"{streams}-{name}-{repeat}.db"
            measured = Measured(tokens=streams * given.tokens)
            _measure(measured, name, place, streams, given.pass_ms / 1000)
            found[name].append(measured)
    print(f"{streams} at once, passes of {given.pass_ms:g} ms, answers of {given.tokens} tokens")
    for name, runs in found.items():
        # Runs of one repeat are neighbours in time.
        ratio = _middle(
            lambda pair: pair[0].seconds / pair[1].seconds, zip(found[_NOWHERE], runs, strict=True)
        )
        delays = sorted(delay for one in runs for delay in one.delays_s)
        print(
            f"  {name:8}"
            f"{_middle(lambda one: one.tokens / one.seconds, runs):7.1f} tokens/s ({ratio:.3f})"
            f"  CPU {_middle(lambda one: 1000 * one.cpu_s / one.tokens, runs):.2f} ms"
            f"  rows {_middle(lambda one: one.for_each(one.rows), runs):.3f}"
            f"  commits {_middle(lambda one: one.for_each(one.commits), runs):.3f}"
            f"  kept {_middle(lambda one: one.for_each(one.kept_bytes), runs):.0f} B"
            f"  written {_middle(lambda one: one.for_each(one.written_bytes) / 1024, runs):.2f} KiB"
            f" ({_middle(lambda one: one.for_each(one.asked_bytes) / 1024, runs):.2f} KiB in"
            f" {_middle(lambda one: one.for_each(one.writes), runs):.1f} calls)"
            f"  delay p50 {1000 * delays[len(delays) // 2]:.1f}"
            f" p99 {1000 * delays[len(delays) * 99 // 100]:.1f} ms"
        )


def _middle(value: Callable[[Any], float], of: Any) -> float:
    return statistics.median(map(value, of))


def _measure(measured: Measured, name: str, place: Path, streams: int, pass_s: float) -> None:
    with _store(name, place) as (store, keys):
        before = trio.run(_answered, measured, store, keys, place, streams, pass_s)
    now = _io()  # the store is closed, and its log is in the file
    measured.written_bytes = now["write_bytes"] - before["write_bytes"]
    measured.asked_bytes = now["wchar"] - before["wchar"]
    measured.writes = now["syscw"] - before["syscw"]


@contextlib.contextmanager
def _store(name: str, place: Path) -> Iterator[tuple[Store, KeyFile | None]]:
    if name == _NOWHERE:
        yield MemoryStore(), None
        return
    url = sqlite_url(place)
    migrate(url)
    if name == _PLAIN:
        with contextlib.closing(SqlStore.open(url)) as store:
            yield store, None
        return
    with (
        contextlib.closing(KeyFile.open(place.with_suffix(".keys"))) as keys,
        contextlib.closing(SqlStore.open(url, sync=name, keys=keys)) as store,  # type: ignore[arg-type]
    ):
        yield store, keys


async def _answered(
    measured: Measured,
    store: Store,
    keys: KeyFile | None,
    place: Path,
    streams: int,
    pass_s: float,
) -> dict[str, int]:
    """Have answers generated. Returns what was written before."""
    append = store.append

    def counting(rows: Sequence[Row]) -> None:
        measured.commits += 1
        append(rows)

    store.append = counting  # type: ignore[method-assign]
    made = settings(fake_engine.NO_MODEL, prewarm=streams == 0, pool_bytes=1 << 33, keys=keys)
    async with booted(made, store, SECRET, start_engine=_started(pass_s)) as server:
        await ask(server, _command("warm", 4))
        gathering = server.loaded.gathering

        def waited(tokens: int, delay_s: float) -> None:
            measured.delays_s.extend([delay_s] * tokens)

        gathering.waited = waited  # type: ignore[method-assign]
        position, kept, before = server.statistics().journal_position, _size(place), _io()
        measured.commits = 0
        begun, cpu = time.perf_counter(), time.process_time()
        if streams == 0:
            await _converse(server, measured.tokens)
        async with trio.open_nursery() as nursery:
            for number in range(streams):
                command = _command(str(number), measured.tokens // streams)
                nursery.start_soon(ask, server, command)
        measured.seconds = time.perf_counter() - begun
        measured.cpu_s = time.process_time() - cpu
        commits = measured.commits
        measured.rows = server.statistics().journal_position - position
        measured.kept_bytes = _size(place) - kept
    measured.commits = commits
    return before


async def _converse(server: Server, turns: int) -> None:
    """A conversation, each of whose turns is prewarmed before the next one comes."""
    said: list[str] = []
    for turn in range(turns):
        said.append(f"{turn} " + _PROMPT[:100] * 15)
        command = generate(chat(*said), max_tokens=300, top_logprobs=None)
        said.append((await ask(server, command)).text)
        await wait_idle(server)


def _size(place: Path) -> int:
    if not place.exists():
        return 0
    with contextlib.closing(SqlStore.open(sqlite_url(place), read_only=True)) as reader:
        return reader.size_bytes()


def _command(salt: str, tokens: int) -> Any:
    return generate(chat(f"{salt} {_PROMPT}"), max_tokens=tokens, top_logprobs=None)


def _started(pass_s: float) -> Any:
    def started(of: Any, *given: Any) -> StartedEngine:
        made = fake_engine.started(of, *given)
        engine = PacedEngine()
        engine.pass_s = pass_s
        facts = attrs.evolve(made.facts, decode_rows=engine.decode_rows, context_tokens=1 << 17)
        return attrs.evolve(made, engine=engine, facts=facts)

    return started


def _io() -> dict[str, int]:
    lines = Path(f"/proc/{os.getpid()}/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


if __name__ == "__main__":
    main()
