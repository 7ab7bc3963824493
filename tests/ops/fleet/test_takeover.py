"""``ops takeover``: what it appends, whom it fences, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import attrs
import pytest
from click.testing import Result

from cairn.actors.journal_start import start_journal
from cairn.actors.settings import JournalBroken, no_progress
from cairn.journal import events as ev
from cairn.journal.errors import LeaseLost
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import node_url
from cairn.journal.rows.store_sql import SqlStore
from tests.support.journals import conversation, in_mid_request, unrecorded
from tests.support.processes.postgres import Postgres

Run = Callable[..., Result]


@pytest.fixture
def fleet(postgres: Postgres) -> str:
    """The URL of the database of a fleet, in which the node n1 has an empty journal."""
    url = postgres.new_database()
    migrate(node_url(url, "n1"))
    return url


def events_of(url: str) -> list[ev.Event]:
    """The events of the journal of n1."""
    with closing(SqlStore.open(node_url(url, "n1"), read_only=True)) as store:
        return [decode(row).event for row in store.read()]


def test_a_run_that_was_under_way(run: Run, fleet: str):
    """
    Its end and the takeover are in the journal, which stays sound. Its writer stores nothing more.
    A further takeover has a higher token.
    """
    rows = in_mid_request().rows
    with closing(SqlStore.open(node_url(fleet, "n1"))) as old:
        old.append(rows)
        done = run("takeover", "n1", "--journal", fleet, "--by", "jo", "--yes")
        assert 0 == done.exit_code, done.output
        assert "ended 1 connection of the server of n1" in done.stdout
        assert "n1 is taken over: lease 2" in done.stdout
        with pytest.raises(LeaseLost, match="taken over by"):
            old.append(rows[-1:])
    lost, taken = events_of(fleet)[len(rows) :]
    assert isinstance(lost, ev.ServerLost)
    assert ev.NodeTakenOver(token=2, by="jo") == taken

    again = run("takeover", "n1", "--journal", fleet, "--yes")
    assert (0, "lease 3" in again.stdout) == (0, True), again.output
    assert "connection" not in again.stdout
    last = events_of(fleet)[-1]
    assert isinstance(last, ev.NodeTakenOver)
    assert (3, True) == (last.token, "@" in last.by)
    found = run("verify", "--journal", fleet, "--node", "n1")
    assert (0, True) == (found.exit_code, "broken: 0" in found.stdout.splitlines()), found.output


def test_a_journal_that_fails_verification(run: Run, fleet: str):
    """
    A takeover reads only the rows on which it depends, so it is on record although another row
    broke an invariant. Nothing is built on the journal: that row is found as before, and no server
    starts.
    """
    rows = unrecorded("INV-1")
    with closing(SqlStore.open(node_url(fleet, "n1"))) as old:
        old.append(rows)
        done = run("takeover", "n1", "--journal", fleet, "--yes")
        assert 0 == done.exit_code, done.output
        with pytest.raises(LeaseLost):
            old.append(rows[-1:])
    assert len(rows) + 2 == len(events_of(fleet))
    found = run("verify", "--journal", fleet, "--node", "n1")
    assert (1, True) == (found.exit_code, "broken: 1" in found.stdout), found.output
    assert f"first broken: row {len(rows)}\n" in found.stdout
    with (
        closing(SqlStore.open(node_url(fleet, "n1"), read_only=True)) as store,
        pytest.raises(JournalBroken, match=f"INV-1 at row {len(rows)}"),
    ):
        start_journal(store, None, no_progress, lambda: None)


@pytest.mark.parametrize("place", [0, -1])
def test_a_row_that_it_needs_was_changed(run: Run, fleet: str, place: int):
    """The start of the run, or the last row: the writer is fenced, and nothing is appended."""
    rows = in_mid_request().rows
    rows[place] = attrs.evolve(rows[place], time_us=1)
    with closing(SqlStore.open(node_url(fleet, "n1"))) as old:
        old.append(rows)
        refused = run("takeover", "n1", "--journal", fleet, "--yes")
        assert 2 == refused.exit_code
        at = rows[place].position
        assert f"its journal is damaged (row {at}: the row was changed)" in refused.stderr
        assert "the takeover is not on record. Run `ops verify --node n1`" in refused.stderr
        with pytest.raises(LeaseLost):
            old.append(rows[-1:])
    assert len(rows) == len(events_of(fleet))


def test_what_is_not_taken_over(run: Run, fleet: str, postgres: Postgres, tmp_path: Path):
    """A node that was never there, a journal that is no node's, and a node that needs a yes."""
    migrate(node_url(fleet, "n2"))
    with closing(SqlStore.open(node_url(fleet, "n1"))) as server:
        server.append(conversation().rows)
        for arguments, code, words in (
            (("n7", "--journal", fleet, "--yes"), 2, "There is no node n7 in postgresql://"),
            (("n7", "--journal", fleet, "--yes"), 2, "; the nodes are n1, n2."),
            (("n7", "--journal", postgres.new_database()), 2, "it has none; check --journal"),
            (("n1", "--journal", tmp_path / "file.db", "--yes"), 2, "needs the PostgreSQL"),
            (("N1", "--journal", fleet, "--yes"), 2, "lower-case letters and digits"),
            (("n1", "--yes"), 2, "--journal"),
            (
                ("n1", "--journal", fleet),
                2,
                "no terminal to ask at, so nothing was changed. Add --yes",
            ),
        ):
            refused = run("takeover", *arguments)
            assert (code, True) == (refused.exit_code, words in refused.stderr), refused.output
        server.append(conversation().rows[-1:])
        assert 1 == server.token
