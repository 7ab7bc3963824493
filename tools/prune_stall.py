"""
Prunes a long journal as a server does while it runs, and prints what a commit waits meanwhile::

    python -P tools/long_journal.py --rows 300000 --step make DIRECTORY
    python -P tools/prune_stall.py DIRECTORY

The journal is copied first. A row is appended every 20 ms, and its commit is waited for, before the
cut and until all pruned rows are removed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import trio

from cairn.actors.clock import clock
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter
from cairn.journal import events as ev
from cairn.journal.ledger import Ledger
from cairn.journal.pruning import PruneOptions, prepare_prune
from cairn.journal.replay import replay
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore

EVERY_S = 0.02


class Waits:
    """How long commits waited, in milliseconds."""

    def __init__(self, sequencer: Sequencer, writer: JournalWriter) -> None:
        self._sequencer, self._writer = sequencer, writer
        self.found: list[float] = []

    async def commit(self) -> None:
        """Append a row, and wait until it is committed."""
        began = time.perf_counter()
        acted = ev.OperatorActed(action="note", detail="a row")
        await self._writer.wait_committed(self._sequencer.append(acted))
        self.found.append(1000 * (time.perf_counter() - began))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on until it is cancelled."""
        task_status.started()
        while True:
            await self.commit()
            await trio.sleep(EVERY_S)

    def show(self, when: str) -> None:
        """Print them, and begin again."""
        found, self.found = sorted(self.found), []
        if found:
            p99 = found[int(0.99 * (len(found) - 1))]
            print(
                f"{when:24} {len(found):6} commits, median {statistics.median(found):7.1f} ms, "
                f"p99 {p99:7.1f} ms, longest {found[-1]:8.1f} ms",
                flush=True,
            )


async def measure(directory: Path, share: float) -> None:
    """Prune a share of the rows."""
    url = journal_url(directory)
    store = SqlStore.open(url)
    report = replay(store.read(), base=store.base())
    head = store.head()[0]
    row = store.row(int(share * head))
    assert row is not None
    writer = JournalWriter(store)
    sequencer = Sequencer(Ledger(clock(), state=report.state, head=report.head), writer)
    reader = SqlStore.open(url, read_only=True)
    options = PruneOptions(before_us=row.time_us)
    prepared = await trio.to_thread.run_sync(partial(prepare_prune, reader, options, clock()))
    assert prepared.base is not None
    assert prepared.cut is not None
    print(f"{prepared.removed} of {head} rows, a base of {len(prepared.base.state or b'')} bytes")
    base, cut = await trio.to_thread.run_sync(partial(prepared.cut.later, []))
    async with trio.open_nursery() as nursery:
        await nursery.start(writer.run)
        waits = Waits(sequencer, writer)
        await nursery.start(waits.run)
        await trio.sleep(3)
        waits.show("before the cut")
        began = time.perf_counter()
        receipt = sequencer.prune(base, cut)
        print(f"{'the state':24} {1000 * (time.perf_counter() - began):.1f} ms")
        await writer.wait_committed(receipt)
        print(f"{'the cut':24} {time.perf_counter() - began:.1f} s")
        await trio.sleep(2 * EVERY_S)
        waits.show("in the cut")
        while True:
            found = await trio.to_thread.run_sync(partial(next, reader.read(0)))
            if found.position > base.position:
                break
            await trio.sleep(0.2)
        print(f"{'all rows removed after':24} {time.perf_counter() - began:.1f} s")
        waits.show("while rows are removed")
        await trio.sleep(3)
        waits.show("after it")
        writer.close()
        nursery.cancel_scope.cancel()
    store.close()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--share", type=float, default=0.8, help="of the rows that go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory.parent) as copy:
        shutil.copy(options.directory / "journal.db", copy)
        trio.run(measure, Path(copy), options.share)


if __name__ == "__main__":
    main()
