"""
Makes a journal of many rows, and prints how long a start and the commands that read it take::

    python -P tools/long_journal.py --rows 200000 DIRECTORY

The rows are those of a server with a few sessions at a time: each turn prefills some tokens, draws
an answer token by token, and every session is closed after some turns. They are written through the
ledger, so every invariant holds. A journal that is already in the directory is measured as it is.

Each step is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from tqdm import tqdm

from cairn.actors.journal_keys import JournalKeys, open_keys
from cairn.actors.journal_start import start_journal
from cairn.actors.settings import no_progress
from cairn.actors.snapshots import SnapshotFile
from cairn.journal import events as ev
from cairn.journal.keys import fingerprint_of
from cairn.journal.ledger import Ledger
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.common.locations import snapshot_path
from tests.support import journals

BLOCK_TOKENS = 64
TURNS = 8
"""Turns of a session before it is closed."""
AT_ONCE = 4
BATCH_ROWS = 5000


class LongBuilder(journals.Builder):
    """Turns whose answers are drawn token by token, with the rows that a server writes."""

    def __init__(self, keys: JournalKeys | None = None) -> None:
        super().__init__()
        if keys is not None:
            self.ledger = Ledger(attrs.evolve(self.ledger.clock, key_of=keys.key_of))

    def decoded(
        self, name: str, request: str, prompt: Sequence[int], answer: Sequence[int]
    ) -> Iterator[ev.Event]:
        """The decode passes of an answer, each with the token that it releases."""
        for place in range(1, len(answer)):
            at = len(prompt) + place - 1
            span, ran, drawn = (at, at + 1), (answer[place - 1],), (answer[place],)
            step = self.extended(name, request, "decode", span, ran, drawn)
            yield attrs.evolve(step, emitted=1, text="word ")

    def steps(
        self,
        name: str,
        request: str,
        messages: Sequence[str],
        prompt: tuple[int, ...],
        answer: tuple[int, ...],
    ) -> Any:
        """See ``Builder.steps``."""
        for event in super().steps(name, request, messages, prompt, answer):
            later = isinstance(event, ev.TokensEmitted) and event.first > 0
            if isinstance(event, ev.CacheExtended) and event.step == "decode":
                yield from self.decoded(name, request, prompt, answer)
            elif not later:  # each pass has released its token
                yield event

    def close(self, name: str, *, stays: bool = False) -> None:
        """The session gives up its slab, and is closed unless it stays open."""
        session, pool = self.ledger.state.session(name), self.ledger.state.pool
        assert session.slab is not None
        self.propose(
            ev.SlabReleased(
                session=name,
                slab=session.slab.id,
                bytes=session.slab.bytes,
                pool_slabs=pool.slabs - 1,
                pool_bytes=pool.slab_bytes - session.slab.bytes,
                reason="idle",
            )
        )
        if not stays:
            self.propose(ev.SessionClosed(session=name, reason="closed"))


def make(
    directory: Path,
    rows: int,
    prompt_tokens: int,
    answer_tokens: int,
    *,
    block_tokens: int = BLOCK_TOKENS,
    turns: int = TURNS,
    stays: bool = False,
    journal: str | None = None,
    sealed: Path | None = None,
) -> None:
    """
    Write a journal of at least this many rows.

    Args:
        journal: its URL; None for a file in the directory.
        sealed: the data directory with the journal key of the keys that seal private fields; None
            to store these plain.
    """
    blocks = turns * (prompt_tokens + answer_tokens) // block_tokens + 1
    journals.CHUNK, journals.CONTEXT = block_tokens, blocks * block_tokens
    shape = {"block_tokens": journals.CHUNK, "context_tokens": journals.CONTEXT}
    journals.FIELDS = {**journals.FIELDS, **shape}
    journals.FINGERPRINT = fingerprint_of(journals.FIELDS)
    directory.mkdir(parents=True, exist_ok=True)
    url = journal or journal_url(directory)
    migrate(url)
    keys = open_keys(sealed / "keys.db", url) if sealed is not None else None
    store = SqlStore.open(url, keys=keys)
    builder, drawn = LongBuilder(keys), random.Random(1)
    builder.start()
    number = 0
    talks: list[tuple[str, list[str], list[int]]] = []
    bar = tqdm(total=rows, desc="making rows", disable=None)
    while builder.ledger.state.position < rows:
        if not talks:  # all of the last ones are closed, so that a prune may cut here
            talks = [(f"session-{number + n}", [], []) for n in range(1, AT_ONCE + 1)]
            number += AT_ONCE
        name, messages, ids = talks.pop(0)
        messages.append(f"question {len(messages)} of {name}")
        ids.extend(drawn.choices(range(32_000), k=prompt_tokens))
        answer = drawn.choices(range(32_000), k=answer_tokens)
        request = f"{name}/{len(messages)}"
        builder.turn(name, request, messages, ids, answer)
        assert builder.bug is None, (name, len(messages), builder.bug)
        messages.append("an answer")
        ids.extend(answer)
        if len(messages) >= 2 * turns:
            builder.close(name, stays=stays)
        else:
            talks.append((name, messages, ids))
        if len(builder.rows) >= BATCH_ROWS:
            store.append(builder.rows)
            bar.update(len(builder.rows))
            builder.rows.clear()
    bar.close()
    for name, messages, _ in talks:
        if messages:
            builder.close(name, stays=stays)
    builder.stop()
    store.append(builder.rows)
    store.close()
    if keys is not None:
        keys.close()


def start(directory: Path, *, snapshot: bool, write: bool) -> None:
    """Read the journal as a start does, and print how long that took."""
    store = SqlStore.open(journal_url(directory))
    file = SnapshotFile(snapshot_path(directory))
    began = time.perf_counter()
    read = start_journal(store, file if snapshot else None, no_progress, lambda: None)
    took = time.perf_counter() - began
    state = read.ledger.state
    print(
        f"{took:.2f} s to the state, from row {read.snapshot} on; "
        f"{state.position} rows, {len(state.blocks)} blocks"
    )
    if write:
        began = time.perf_counter()
        size = file.write(read.folds.snapshot(state, read.ledger.head))
        print(f"{time.perf_counter() - began:.2f} s to write a snapshot of {size} bytes")


def measured(name: str, arguments: Sequence[str]) -> None:
    """Run a command, and print its time and its peak memory."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-P", *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    last = b""
    for line in process.stdout:
        last = line
    _, status, usage = os.wait4(process.pid, 0)
    took, kib = time.perf_counter() - began, usage.ru_maxrss
    mib = kib // 1024 if sys.platform != "darwin" else kib // 1024**2
    print(
        f"{name:28} {took:7.1f} s {usage.ru_utime + usage.ru_stime:7.1f} s CPU {mib:6} MiB  "
        f"exit {os.waitstatus_to_exitcode(status)}  {last.decode().strip()[:100]}",
        flush=True,
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--prompt-tokens", type=int, default=200, help="new ones of each turn")
    parser.add_argument("--answer-tokens", type=int, default=100)
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS)
    parser.add_argument("--turns", type=int, default=TURNS, help="of each session")
    parser.add_argument("--open", action="store_true", help="close no session; for --step make")
    parser.add_argument("--journal", metavar="URL", help="where to make it; for --step make")
    parser.add_argument(
        "--sealed", type=Path, metavar="DATA_DIR", help="seal the rows; for --step make"
    )
    parser.add_argument("--step", choices=["make", "all", "write", "snapshot"], default=None)
    options = parser.parse_args()
    directory: Path = options.directory
    match options.step:
        case "make":
            make(
                directory,
                options.rows,
                options.prompt_tokens,
                options.answer_tokens,
                block_tokens=options.block_tokens,
                turns=options.turns,
                stays=options.open,
                journal=options.journal,
                sealed=options.sealed,
            )
        case "all" | "write" | "snapshot":
            start(directory, snapshot=options.step == "snapshot", write=options.step == "write")
        case _:
            this, where = str(Path(__file__)), str(directory)
            tokens = ("--prompt-tokens", "--answer-tokens")
            counts = (str(options.prompt_tokens), str(options.answer_tokens))
            shape = [part for pair in zip(tokens, counts, strict=True) for part in pair]
            if not (directory / "journal.db").exists():
                rows = ["--rows", str(options.rows)]
                measured("make it", [this, where, "--step", "make", *rows, *shape])
            measured("start, no snapshot", [this, where, "--step", "all"])
            measured("start, then write one", [this, where, "--step", "write"])
            measured("start, with a snapshot", [this, where, "--step", "snapshot"])
            ops = ["-m", "cairn.ops"]
            here = ["--data-dir", where]
            measured("ops verify", [*ops, "verify", *here])
            measured("ops export", [*ops, "export", *here])
            prune = ["journal", "prune", "--before", "2026-06-01", "--dry-run"]
            measured("ops journal prune --dry-run", [*ops, *prune, *here])
            measured("ops replay SESSION", [*ops, "replay", "session-3", *here])


if __name__ == "__main__":
    main()
