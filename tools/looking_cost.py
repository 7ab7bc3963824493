"""
Measures what looking at a large journal costs: the processor time until the first byte of each
page, and the memory of the fold that the pages come from.

Run it as ``python -P -m tools.looking_cost DIRECTORY``. A journal of a million rows and ten
thousand open sessions is made by::

    python -P tools/long_journal.py --step make --rows 1000000 --block-tokens 4 --turns 6 \\
        --prompt-tokens 10 --answer-tokens 4 --open DIRECTORY

The processor time is that of all threads.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from cairn.actors.looking import Looking
from cairn.actors.threads.writer import JournalWriter
from cairn.http.app import create_app
from cairn.journal.replay import Replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.snapshots import Folds, pieces
from cairn.journal.rows.store_sql import SqlStore
from cairn.journal.state import State
from cairn.journal.summaries import Summaries
from cairn.journal.tenants import LOCAL
from tests.http.fake_service import FakeService, FakeTenantService

ROUNDS = 20


class Tenant(FakeTenantService):
    """Looks at a journal, and serves nothing."""

    look: Any

    def looking(self, *, of_all: bool, texts: bool) -> Looking:
        """What the journal has."""
        return Looking(tenant=LOCAL, of_all=of_all, texts=texts, **Tenant.look)


class Over(FakeService):
    """A server over that."""

    def for_tenant(self, tenant: str) -> FakeTenantService:
        """The same for each."""
        return Tenant(self, tenant)


def mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read(directory: Path) -> tuple[State, Summaries]:
    """Fold a journal; prints what the summaries cost in time and memory."""
    store = SqlStore.open(journal_url(directory))
    fold, folds = Replay(store.base()), Folds()
    for row in store.read():
        fold.feed(row)
    before = mib()
    took, rows = 0.0, 0
    for row in store.read():
        recorded, rows = decode(row), rows + 1
        begins = time.process_time()
        folds.summaries.see(recorded)
        took += time.process_time() - begins
    print(
        f"{rows} rows, {len(folds.summaries)} sessions: {mib() - before:.0f} MiB "
        f"more, {took / rows * 1e6:.1f} us a row"
    )
    for which in ("first", "next"):
        begins = time.perf_counter()
        snapshot = folds.snapshot(fold.state, "")
        took_ms = 1000 * (time.perf_counter() - begins)
        print(f"the {which} snapshot is taken in {took_ms:.0f} ms")
    size = sum(len(one) for one in pieces(snapshot) if one.startswith(b"summaries."))
    print(f"summaries are {size / 2**20:.1f} MiB of it")
    store.close()
    return fold.state, folds.summaries


async def measure(directory: Path, state: State, summaries: Summaries) -> None:
    """Print the processor time of each page."""
    store = SqlStore.open(journal_url(directory))
    async with trio.open_nursery() as nursery:
        writer = JournalWriter(store)
        await nursery.start(writer.run)
        sequencer: Any = SimpleNamespace(state=state, append=lambda _: writer.committed)
        Tenant.look = {"summaries": summaries, "sequencer": sequencer, "writer": writer}
        client = create_app(Over()).test_client()
        name = next(iter(summaries.latest_first())).id
        last = list(summaries.latest_first())[-1].used
        for path in (
            "/v1/sessions",
            "/v1/sessions?limit=100",
            f"/v1/sessions?before={last + 1000}",
            "/v1/sessions?q=nothing+has+these+words",
            "/v1/sessions?state=closed",
            f"/v1/sessions/{name}",
            f"/v1/sessions/{name}/events",
            f"/v1/sessions/{name}/events?limit=100&texts=true",
            "/v1/cache",
            "/v1/cache?limit=100",
            "/v1/bugs",
        ):
            took = []
            for _ in range(ROUNDS):
                begins = time.process_time()
                response = await client.get(path)
                await response.get_data()
                took.append(1000 * (time.process_time() - begins))
                assert response.status_code == 200
            print(f"{path:52} {statistics.median(took):6.1f} ms, at most {max(took):6.1f} ms")
        writer.close()
    print(f"peak {mib():.0f} MiB")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    state, summaries = read(options.directory)
    trio.run(measure, options.directory, state, summaries)


if __name__ == "__main__":
    main()
