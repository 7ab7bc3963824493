"""`ops journal` shows the size of a journal and prunes it; what is left reads as before."""

import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from cairn.actors.boot import BootRefused, read_journal
from cairn.journal import events as ev
from cairn.journal import pruning
from cairn.journal.errors import StoreError, StoreFull
from cairn.journal.replay import replay
from cairn.journal.retention import NeededIds, Survey
from cairn.journal.rows.base import VERSION, forgotten, loaded_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.database import connections
from cairn.journal.rows.database import postgres as postgres_store
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.export import (
    base_from_line,
    excerpt_from_line,
    excerpt_to_line,
    read_base,
    read_excerpt,
    read_export,
)
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops import doctor
from cairn.ops.common.locations import bytes_on_disk
from cairn.ops.common.output import size_text
from cairn.ops.journal.growth import growth
from cairn.ops.serve.data_dir import hold_journal
from tests.support.journals import (
    FINGERPRINT,
    JUNE_US,
    SLAB_BYTES,
    TENANT,
    Builder,
    aged,
    broken,
    conversation,
    healthy,
    in_mid_request,
    tampered,
)
from tests.support.processes.postgres import Postgres

BEFORE = ("--before", "2026-03-01")


SLAB_GONE = ev.SlabReleased(
    session="s1", slab=1, bytes=SLAB_BYTES, pool_slabs=0, pool_bytes=0, reason="-"
)
FIRST_RUN = next(n for n, row in enumerate(aged(), start=1) if row.kind == "server_stopped")


def there(folder: Path) -> tuple[Any, list[Row]]:
    """Base and rows of a journal."""
    store = SqlStore.open(journal_url(folder), read_only=True)
    base, rows = store.base(), list(store.read())
    store.close()
    return base, rows


@pytest.fixture
def pruned(run, stored) -> Path:
    """The journal above, less the sessions of January."""
    folder: Path = stored(aged())
    assert 0 == run("journal", "prune", *BEFORE, "--close-idle").exit_code
    return folder


# --- prune ---------------------------------------------------------------------------------------


def test_nothing_can_go(run, stored):
    """The session that holds the rows back is named, with what to do; nothing is changed."""
    folder = stored(aged())
    result = run("journal", "prune", *BEFORE)
    assert 0 == result.exit_code
    date, first, held = result.stdout.splitlines()
    assert ("before: 2026-03-01 00:00:00.000Z (UTC)", "nothing to prune") == (date, first)
    assert "session s1 (opened at row 3, last used 2026-01-01 00:00:00" in held
    assert held.endswith("it is not closed. --close-idle closes it.")
    assert (None, aged()) == there(folder)


def test_nothing_is_old_enough(run, stored):
    """If every row is young, the command says so."""
    stored(aged())
    result = run("journal", "prune", "--before", "2025-12-31")
    assert (0, "nothing to prune") == (result.exit_code, result.stdout.splitlines()[1])
    assert "No session is older than 2025-12-31 00:00:00.000Z" in result.stdout


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_bug_limits_the_cut(run, stored, more: tuple[str, ...]):
    """A session is old enough, but its bug is not: the message says what holds back the row."""
    made = Builder()
    made.start()
    opened = ev.SessionOpened(
        session="s1", tenant=TENANT, fingerprint=FINGERPRINT, group=None, named=False
    )
    made.propose(opened)
    made.crash("s1")
    made.stop()
    folder = stored(made.rows)
    result = run("journal", "prune", "--before", "2026-01-01T00:00:00.003500", *more)
    assert (0, "nothing to prune") == (result.exit_code, result.stdout.splitlines()[1])
    words = "row 3 broke an invariant, and row 4 records that. They are removed together"
    assert f"The rows up to 3 are old enough, but {words}" in result.stdout
    assert "No session is older" not in result.stdout
    assert (None, made.rows) == there(folder)


def test_a_dry_run(run, stored):
    """It shows what would be removed, also while a server runs, and changes nothing."""
    folder = stored(aged())
    with hold_journal(journal_url(folder), who="serve"):
        result = run("journal", "prune", *BEFORE, "--close-idle", "--dry-run")
    assert 0 == result.exit_code
    assert "2 sessions would be closed\n" in result.stdout
    words = f"{FIRST_RUN} rows, 2 sessions would be removed, up to row {FIRST_RUN}; "
    assert f"{words}{len(aged()) - FIRST_RUN} rows would stay\n" in result.stdout
    assert (None, aged()) == there(folder)


def test_a_dry_run_beside_a_server_that_writes(run, stored, monkeypatch: pytest.MonkeyPatch):
    """What is appended between two readings is passed over: each ends where the first one did."""
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22, 23))
    made.stop()
    made.time_us = JUNE_US
    made.start()
    folder = stored(made.rows)
    alone = run("journal", "prune", *BEFORE, "--close-idle", "--dry-run")
    written = len(made.rows)
    read = SqlStore.read

    def beside(self, *arguments, **options):
        nonlocal written
        yield from read(self, *arguments, **options)
        made.turn("s2", f"r{written}", ["Another"], range(5, 15), (6, 7))
        writer = SqlStore.open(journal_url(folder))
        writer.append(made.rows[written:])
        writer.close()
        written = len(made.rows)

    monkeypatch.setattr(SqlStore, "read", beside)
    result = run("journal", "prune", *BEFORE, "--close-idle", "--dry-run")
    assert (0, "") == (result.exit_code, result.stderr)
    # The digest of the base is the same too: it replaces the same rows.
    assert alone.stdout == result.stdout
    assert "1 session would be removed" in result.stdout


def test_a_dry_run_beside_a_prune(run, stored, monkeypatch: pytest.MonkeyPatch):
    """A reader during a prune is asked to read again; the journal is not at fault."""
    stored(aged())
    read = SqlStore.read

    def slowly(self, *arguments, **options):
        yield from read(self, *arguments, **options)
        monkeypatch.setattr(SqlStore, "read", read)
        assert 0 == run("journal", "prune", *BEFORE, "--close-idle").exit_code

    monkeypatch.setattr(SqlStore, "read", slowly)
    result = run("journal", "prune", *BEFORE, "--close-idle", "--dry-run")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "The journal was pruned while it was read. Run this again." in result.stderr


def test_a_prune(run, stored):
    """Rows are removed, the rest stays byte for byte, and an event records it."""
    folder = stored(aged())
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert 0 == result.exit_code
    assert f"2 sessions closed\n{FIRST_RUN} rows, 2 sessions removed, up to row" in result.stdout
    base, rows = there(folder)
    young = aged()[FIRST_RUN:]
    assert young == rows[: len(young)]
    events = [decode(row).event for row in rows[len(young) :]]
    closed = [event for event in events[:-1] if isinstance(event, ev.SessionClosed)]
    assert [("s1", "retention"), ("s2", "retention")] == [(e.session, e.reason) for e in closed]
    event = events[-1]
    assert isinstance(event, ev.JournalPruned)
    assert (FIRST_RUN, aged()[FIRST_RUN - 1].hash) == (event.cut, event.head)
    assert (FIRST_RUN, 2) == (event.rows, event.sessions)
    assert (aged()[0].time_us, aged()[FIRST_RUN - 1].time_us) == (event.first_us, event.last_us)
    assert base.digest == event.base_digest
    again = run("journal", "prune", *BEFORE, "--close-idle")
    assert (0, "nothing to prune") == (again.exit_code, again.stdout.splitlines()[1])
    assert rows == there(folder)[1]


def test_a_second_prune(run, pruned: Path):
    """What was young then goes later: the base moves on, and the closing rows with it."""
    result = run("journal", "prune", "--before", "0m", "--recent", "--close-idle")
    assert "1 session closed\n" in result.stdout
    base, rows = there(pruned)
    assert ["session_closed", "journal_pruned"] == [row.kind for row in rows[-2:]]
    assert rows[0].position == base.position + 1
    assert 0 == run("verify").exit_code
    assert "s3" not in run("sessions").stdout


def test_texts_are_gone(run, stored):
    """Nothing private of what was pruned is in any file of the journal."""
    builder = Builder()
    builder.start()
    builder.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22, 23))
    builder.crash("s1")
    builder.stop()
    words = (b"Traceback: here", b'"new_ids":[11,12,')
    folder = stored(builder.rows)
    (folder / "snapshot").write_bytes(b"".join(words))

    def found() -> list[bool]:
        files = [*folder.glob("journal.db*"), *folder.glob("snapshot*")]
        contents = b"".join(path.read_bytes() for path in files)
        return [word in contents for word in words]

    assert [True, True] == found()
    result = run("journal", "prune", *BEFORE, "--close-quarantined")
    assert "1 session closed\n" in result.stdout
    assert [False, False] == found()
    assert 0 == run("verify").exit_code


def test_a_snapshot_that_cannot_be_removed(run, stored):
    """The rows are removed, and the operator learns which file still has texts of them."""
    folder = stored(aged())
    (folder / "snapshot").mkdir()
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert 0 == result.exit_code
    assert f"{folder / 'snapshot'}, which has texts of them, is not: " in result.stderr


def test_a_bug_that_was_pruned(run, stored):
    """A quarantined session is removed only with an option; its bug id then leads to a sentence."""
    rows, bug_id = broken("INV-7")
    folder = stored(rows)
    held = run("journal", "prune", *BEFORE, "--close-idle").stdout
    assert "it is quarantined" in held
    assert f"`ops replay {bug_id}`; --close-quarantined closes it." in held
    result = run("journal", "prune", *BEFORE, "--close-quarantined")
    assert 0 == result.exit_code
    assert f"{len(rows)} rows, 1 session removed" in result.stdout
    for name in (bug_id, bug_id[:8]):
        result = run("replay", name)
        assert (2, "") == (result.exit_code, result.stdout)
        assert f"Bug {bug_id} was pruned with the rows up to " in result.stderr
    result = run("verify")
    assert 0 == result.exit_code
    assert "\npruned: 1 violation on record\n" in result.stdout
    assert there(folder)[0] is not None


def test_a_server_that_was_lost(run, stored):
    """No server holds the journal, so its run is recorded as lost before sessions are closed."""
    rows = conversation().rows
    stored(rows)
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert "1 session closed\n" in result.stdout
    store = SqlStore.open(journal_url(stored([])), read_only=True)
    kinds = [row.kind for row in store.read()]
    store.close()
    assert ["server_lost", "session_closed", "journal_pruned"] == kinds[-3:]
    assert 0 == run("verify").exit_code


def test_a_prune_that_is_interrupted(run, stored, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """
    The base is there and not all rows before it are gone: no command sees them, and the next prune
    removes them, though there is nothing else to prune.
    """
    folder = stored(aged())
    removal = SqlStore.removal

    def ends(self, most=3):
        for place, count in enumerate(removal(self, most)):
            yield count
            if place == 16:
                raise StoreFull("no room.")

    monkeypatch.setattr(SqlStore, "removal", ends)
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert 0 == result.exit_code
    assert "not all of them could be removed: no room. Run the same command" in result.stderr
    monkeypatch.setattr(SqlStore, "removal", removal)
    with closing(SqlStore.open(journal_url(folder), read_only=True)) as store:
        assert FIRST_RUN > next(store.read(0)).position > 1
    base, rows = there(folder)
    assert (FIRST_RUN, FIRST_RUN + 1) == (base.position, rows[0].position)
    path = tmp_path / "x.jsonl"
    assert (0, 0) == (run("verify").exit_code, run("export", "-o", path).exit_code)
    assert rows == list(read_export(path))
    assert 0 == run("verify", path).exit_code
    sessions = run("sessions").stdout
    assert ("s3" in sessions, "s1" in sessions) == (True, False)
    with closing(SqlStore.open(journal_url(folder), read_only=True)) as store:
        assert () == read_journal(store).report().findings
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert (0, "nothing to prune") == (result.exit_code, result.stdout.splitlines()[1])
    with closing(SqlStore.open(journal_url(folder), read_only=True)) as store:
        assert rows == list(store.read(0))


def test_a_prune_on_postgresql(run, postgres: Postgres, monkeypatch):
    """
    The database's lock says whether a server has the journal: while it does, nothing is pruned.
    Once it was killed, its run is recorded as lost.
    """
    monkeypatch.setattr(postgres_store, "CLAIM_TRIES", 2)
    url, rows = postgres.new_database(), conversation().rows
    migrate(url)
    prune = ("journal", "prune", "--journal", url, *BEFORE, "--close-idle")
    with closing(SqlStore.open(url)) as server:
        server.append(rows)
        result = run(*prune)
        assert (2, "") == (result.exit_code, result.stdout)
        assert "Another server or command uses postgresql" in result.stderr
        assert "of the database server" in result.stderr
        assert 0 == run(*prune, "--dry-run").exit_code
        assert rows == list(server.read())
    assert 0 == run(*prune).exit_code
    with closing(SqlStore.open(url, read_only=True)) as store:
        kinds = [row.kind for row in store.read()]
    assert ["server_lost", "session_closed", "journal_pruned"] == kinds[-3:]
    assert 0 == run("verify", "--journal", url).exit_code


def test_a_server_that_was_lost_in_a_request(run, stored):
    """
    The request ends with the loss, which is put on record only now: its session is closed, and goes
    when that is old enough. Its texts are in no base.
    """
    folder = stored(in_mid_request().rows)
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert 0 == result.exit_code
    assert "1 session closed\nno row can be removed yet" in result.stdout
    assert "session s1 (opened at row 3, last used " in result.stdout
    base, rows = there(folder)
    assert (None, "server_lost", "session_closed") == (base, rows[-2].kind, rows[-1].kind)
    result = run("journal", "prune", "--before", "0m", "--recent")
    assert "1 session removed" in result.stdout
    assert b"35777" not in there(folder)[0].state
    assert b"35777" not in b"".join(path.read_bytes() for path in folder.glob("journal.db*"))
    assert 0 == run("verify").exit_code


def test_an_open_request_in_a_base(run, stored, monkeypatch: pytest.MonkeyPatch):
    """A cut in the middle of a request would be a fault of ours, and is found before it is made."""
    rows = in_mid_request().rows
    folder = stored(rows)
    monkeypatch.setattr(Survey, "feed", survey_blind_to_loss(Survey.feed))
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "(texts would be left in the base)" in result.stderr
    assert (None, rows) == there(folder)


def survey_blind_to_loss(feed: Callable[..., None]) -> Callable[..., None]:
    """A survey that does not take in that a server was lost."""

    def blind(self: Any, recorded: ev.Recorded, state: Any) -> None:
        if not isinstance(recorded.event, ev.ServerLost):
            feed(self, recorded, state)

    return blind


def test_a_lost_server_is_not_recorded_for_nothing(run, stored):
    """Where no session is closed, that a server was lost is left to the next one to find."""
    folder = stored(conversation().rows)
    run("journal", "prune", "--before", "2025-12-31", "--close-idle")
    assert (None, conversation().rows) == there(folder)


def test_a_server_uses_it(run, stored):
    """Refused, with what to do, and nothing is changed."""
    folder = stored(aged())
    with hold_journal(journal_url(folder), who="serve"):
        result = run("journal", "prune", *BEFORE, "--close-idle")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "Stop it, and prune then, start it with --keep TIME," in result.stderr
    assert (None, aged()) == there(folder)


def test_a_broken_journal(run, stored):
    """What is broken is looked at before it may go."""
    folder = stored(tampered())
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "INV-8 at row 4" in result.stderr
    assert (None, tampered()) == there(folder)


def test_what_would_not_read_the_same(run, stored, monkeypatch: pytest.MonkeyPatch):
    """A base that gives another state is found before anything is cut."""
    folder = stored(aged())
    forget = forgotten

    def too_much(state, kept):
        return attrs.evolve(forget(state, kept), self_tests=state.self_tests.set("x", 1))

    for wrong in (lambda state, _: forget(state, NeededIds()), too_much):
        monkeypatch.setattr(pruning, "forgotten", wrong)
        result = run("journal", "prune", *BEFORE, "--close-idle")
        assert (2, "") == (result.exit_code, result.stdout)
        assert "nothing was pruned" in result.stderr
        assert (None, aged()) == there(folder)


def test_space_that_cannot_be_given_back(run, stored, monkeypatch: pytest.MonkeyPatch):
    """The prune is done all the same, and that is said."""
    stored(aged())

    def full(_):
        raise StoreError("Cannot shrink it: disk full.")

    monkeypatch.setattr(SqlStore, "give_back", full)
    result = run("journal", "prune", *BEFORE, "--close-idle")
    assert 0 == result.exit_code
    assert "The rows are removed, but the file has not shrunk" in result.stderr
    assert "may still be readable in it: Cannot shrink it: disk full. Run" in result.stderr
    assert 0 == run("verify").exit_code


def test_space_is_given_back_later(run, stored, monkeypatch: pytest.MonkeyPatch):
    """The same command goes on where one ended early; then there is nothing left to do."""
    made = Builder()
    made.start()
    for number in range(20):
        made.turn(f"s{number}", f"r{number}", [f"{number}"], range(35000, 35100), (21, 22, 23))
    made.stop()
    folder = stored(made.rows)
    with monkeypatch.context() as killed:
        killed.setattr(SqlStore, "give_back", lambda _: None)
        run("journal", "prune", *BEFORE, "--close-idle")
    large = (folder / "journal.db").stat().st_size
    again = run("journal", "prune", *BEFORE, "--close-idle")
    assert "nothing to prune" == again.stdout.splitlines()[1]
    assert "on disk: " in again.stdout
    assert "giving the space back" in again.stderr
    assert (folder / "journal.db").stat().st_size < large // 2
    again = run("journal", "prune", *BEFORE, "--close-idle")
    assert ("", False) == (again.stderr, "on disk" in again.stdout)


def test_a_prune_beside_an_open_reader(run, stored, monkeypatch: pytest.MonkeyPatch):
    """
    The removed rows stay in the file until no reader is left; that is reported, and done later.
    """
    monkeypatch.setattr(connections, "BUSY_S", 0.05)
    folder = stored(in_mid_request().rows)
    run("journal", "prune", *BEFORE, "--close-idle")
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM events").fetchall()
        result = run("journal", "prune", "--before", "0m", "--recent")
        assert "1 session removed" in result.stdout
        assert "another program reads it" in result.stderr
        assert "Run the same command again to finish." in result.stderr
        reader.execute("ROLLBACK")
        run("journal", "prune", "--before", "0m", "--recent")
        contents = b"".join(path.read_bytes() for path in folder.glob("journal.db*"))
        assert b"35777" not in contents


@pytest.mark.parametrize(
    ("date", "says"),
    [
        ("999999999d", "is not a date"),
        ("yesterday", "is not a date"),
        ("30", "is not a date"),
        ("2999-01-01", "in the future"),
        ("", "is not a date"),
        ("0001-01-01T00:00+14:00", "is not a date"),
    ],
)
def test_invalid_dates(run, stored, date: str, says: str):
    """A date is a day, a time or an age, and not in the future."""
    stored(aged())
    result = run("journal", "prune", "--before", date)
    assert 2 == result.exit_code
    assert says in result.stderr


@pytest.mark.parametrize(
    ("date", "rows"),
    [
        ("2026-01-01", 0),
        ("2026-01-01T00:01", FIRST_RUN),
        ("2026-01-01T00:01:00+01:00", 0),
        ("30d", FIRST_RUN),
    ],
)
def test_dates(run, stored, date: str, rows: int):
    """A date without a zone is UTC."""
    folder = stored(aged()[:FIRST_RUN])
    run("journal", "prune", "--before", date, "--close-idle")
    base = there(folder)[0]
    assert rows == (base.position if base is not None else 0)


@pytest.mark.parametrize("date", ["1m", "0d", "23h"])
def test_a_date_within_a_day(run, stored, date: str):
    """
    A month that is written 1m is a minute: what is younger than a day goes only where that was
    said. The output names the date, and with --dry-run nothing has to be said.
    """
    folder = stored(aged())
    result = run("journal", "prune", "--before", date, "--close-idle")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "is less than a day ago (m means minutes" in result.stderr
    assert None is there(folder)[0]
    words = ("journal", "prune", "--before", date, "--close-idle")
    assert 0 == run(*words, "--dry-run").exit_code
    result = run(*words, "--recent")
    assert 0 == result.exit_code
    assert re.match(r"before: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z \(UTC\)\n", result.stdout)
    assert len(aged()) == there(folder)[0].position


# --- what is left --------------------------------------------------------------------------------


def test_verify_of_what_is_left(run, pruned: Path):
    """All checks pass, and the output says where the journal begins."""
    result = run("verify")
    assert 0 == result.exit_code
    assert f"begins: at row {FIRST_RUN + 1}, with a base that replaces the rows" in result.stdout
    assert "(journal_pruned at row " in result.stdout
    assert "broken: 0\n" in result.stdout
    assert "or changes to rows that were pruned. To check for that, pass a" in result.stdout


def test_saved_heads(run, pruned: Path):
    """
    A head from after the prune vouches for all; one from before it cannot for the base, and one
    from below the cut can no longer be found: neither is a pass.
    """
    rows = aged()
    for place in (FIRST_RUN, len(rows)):
        result = run("verify", "--head", f"{place}:{rows[place - 1].hash}")
        words = (
            f"saved head: in the chain, at row {place}; the base was made after that head, "
            f"which does not vouch for the rows before row {FIRST_RUN + 1}\n"
        )
        assert (3, True) == (result.exit_code, words in result.stdout)
    last = there(pruned)[1][-1]
    result = run("verify", "--head", f"{last.position}:{last.hash}")
    assert 0 == result.exit_code
    assert f"saved head: in the chain, at row {last.position}\n" in result.stdout
    assert 3 == run("verify", "--head", f"0:{'0' * 64}").exit_code
    result = run("verify", "--head", f"5:{rows[4].hash}")
    assert 3 == result.exit_code
    assert "saved head: not in the chain: row 5 was pruned\n" in result.stdout


def _no_base(_: Path) -> str:
    return "DELETE FROM bases"


def _other_state(folder: Path) -> str:
    base = there(folder)[0]
    state = json.loads(base.state)
    state["state"]["admission_bug"] = "x"
    return f"UPDATE bases SET state = CAST('{json.dumps(state)}' AS BLOB)"


CHANGES: dict[str, Callable[[Path], str]] = {
    "base gone": _no_base,
    "state": _other_state,
    "digest": lambda _: "UPDATE bases SET state_digest = hex(zeroblob(32))",
    "head": lambda _: "UPDATE bases SET head = hex(zeroblob(32))",
    "position": lambda _: "UPDATE bases SET position = position - 1",
    "no state": lambda _: "UPDATE bases SET state = x'00'",
    "head of bytes": lambda _: "UPDATE bases SET head = x'00ff'",
    "head a number": lambda _: "UPDATE bases SET head = 5",
    "digest of bytes": lambda _: "UPDATE bases SET state_digest = x'80'",
    "digest a number": lambda _: "UPDATE bases SET state_digest = 5",
    "state a number": lambda _: "UPDATE bases SET state = 5",
    "position below nothing": lambda _: "UPDATE bases SET position = -1",
    "event gone": lambda _: (
        "DELETE FROM events WHERE position >= "
        "(SELECT position FROM events WHERE kind = 'journal_pruned')"
    ),
    "first row gone": lambda _: (
        "DELETE FROM events WHERE position = (SELECT min(position) FROM events)"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_base_changed_by_hand(run, pruned: Path, tmp_path: Path, change: str):
    """Whatever was changed: INV-8, in the journal and in its exports; no server starts on it."""
    statement = CHANGES[change](pruned)
    with closing(sqlite3.connect(pruned / "journal.db")) as other, other:
        other.execute(statement)
    result = run("verify")
    assert 1 == result.exit_code
    assert "INV-8" == result.stdout.split("\t")[1]
    for options in ((), ("--no-private",)):
        export = tmp_path / "x.jsonl"
        run("export", "-o", export, *options)
        if options and change in ("state", "no state", "state a number"):
            continue  # it is not in there
        result = run("verify", export)
        assert 1 == result.exit_code
        assert "\tINV-8\t" in result.stdout
    store = SqlStore.open(journal_url(pruned), read_only=True)
    with pytest.raises(BootRefused, match="INV-8"):
        read_journal(store)
    store.close()


def test_two_bases(run, pruned: Path):
    """There is only one at a time, so the test adds a second; which one is right is unknown."""
    with closing(sqlite3.connect(pruned / "journal.db")) as other, other:
        other.execute("INSERT INTO bases SELECT 1, head, state, state_digest FROM bases")
    for words in (("verify",), ("journal",), ("export",)):
        result = run(*words)
        assert (2, "") == (result.exit_code, result.stdout)
        assert "has more than one base" in result.stderr


def test_a_base_of_a_newer_cairn(run, pruned: Path):
    """The message says so; the journal is not broken."""
    base = there(pruned)[0]
    state = json.loads(base.state) | {"version": VERSION + 1}
    encoded = json.dumps(state)
    digest = hashlib.sha256(encoded.encode()).hexdigest()
    with closing(sqlite3.connect(pruned / "journal.db")) as other, other:
        other.execute("UPDATE bases SET state = CAST(? AS BLOB)", (encoded,))
        other.execute("UPDATE bases SET state_digest = ?", (digest,))
    for words in (("verify",), ("sessions",), ("replay", "s3"), ("journal", "prune", *BEFORE)):
        result = run(*words)
        assert (2, "") == (result.exit_code, result.stdout)
        assert "use the version that pruned the journal, or a newer one" in result.stderr


def test_a_server_reads_on(pruned: Path):
    """
    The state that a server starts with is that of all rows, its sessions closed, without the blocks
    that are gone everywhere.
    """
    store = SqlStore.open(journal_url(pruned), read_only=True)
    state = read_journal(store).state
    store.close()
    whole = replay(aged()).state
    assert 0 < len(state.blocks)
    assert {key: whole.blocks[key] for key in state.blocks} == dict(state.blocks)
    assert not any(whole.blocks[key].present for key in whole.blocks if key not in state.blocks)
    assert ["s3"] == list(state.sessions)
    assert whole.session("s3") == state.session("s3")


def test_sessions_and_replay(run, pruned: Path):
    """A session that is left is shown in full; one that is not, in a sentence."""
    assert ["s3"] == [line.split("\t")[0] for line in run("sessions").stdout.splitlines()[1:]]
    result = run("replay", "s3")
    assert 0 == result.exit_code
    assert result.stdout.endswith("same: 1 path decisions made again, all checks pass\n")
    for session in ("s1", "s2"):
        result = run("replay", session)
        assert (2, "") == (result.exit_code, result.stdout)
        words = f"Session {session} was pruned with the rows up to {FIRST_RUN}. "
        assert result.stderr.startswith(words)
    assert 2 == run("replay", "s9").exit_code


def test_states_of_the_past(run, pruned: Path):
    """The base is the earliest of them."""
    assert f"as of row:       {FIRST_RUN}\n" in run("replay", "--at", FIRST_RUN).stdout
    result = run("replay", "--at", FIRST_RUN - 1)
    assert (2, "") == (result.exit_code, result.stdout)
    assert f"Row {FIRST_RUN - 1} was pruned" in result.stderr


def test_exports(run, pruned: Path, tmp_path: Path):
    """The base is the first line of an export, which verifies and replays like the journal."""
    export = tmp_path / "x.jsonl"
    run("export", "-o", export)
    base, rows = there(pruned)
    assert (base, rows) == (read_base(export), list(read_export(export)))
    assert base == base_from_line(export.read_bytes().splitlines()[0])
    assert 1 == json.loads(export.read_text().splitlines()[0])["base"]
    assert run("verify").stdout == run("verify", export).stdout
    assert run("replay", "s3").stdout == run("replay", "s3", export).stdout
    assert 2 == run("replay", "s1", export).exit_code

    run("export", "-o", export, "--no-private")
    result = run("verify", export)
    assert 3 == result.exit_code
    assert "broken: 0\n" in result.stdout
    result = run("replay", "s3", export)
    assert 2 == result.exit_code
    assert "--no-private" in result.stderr

    result = run("export", "--session", "s9")
    assert ("", True) == (result.stdout, "No session s9" in result.stderr)


def in_the_middle() -> list[Row]:
    """
    Session s1 of January, which gives its slab back in June; it is open across a cut, and is opened
    again.
    """
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22, 23))
    made.propose(SLAB_GONE)
    made.time_us = JUNE_US
    made.propose(ev.SessionClosed(session="s1", reason="-"))
    made.turn("s1", "r2", ["Again"], range(30, 40), (51, 52))
    made.stop()
    return made.rows


def test_one_session_of_a_pruned_journal(run, stored, tmp_path: Path):
    """
    Its rows begin with what says how many are gone, and with which base. So what was pruned is no
    violation, and what was lost is one: at the beginning, in the middle, or with the line itself.
    """
    folder = stored(in_the_middle())
    assert 0 == run("journal", "prune", *BEFORE).exit_code
    base, rows = there(folder)
    export = tmp_path / "x.jsonl"
    run("export", "-o", export, "--session", "s1")
    begins = read_excerpt(export)
    assert begins is not None
    assert (None, "session/s1") == (read_base(export), begins.stream)
    assert [row for row in rows if row.stream == begins.stream] == list(read_export(export))
    assert (base.digest, begins.seq + 1) == (begins.base.digest, rows[0].seq)
    assert begins == excerpt_from_line(excerpt_to_line(begins))
    result = run("verify", export)
    assert 3 == result.exit_code
    words = f"begins: after row {base.position}; {begins.seq} rows of session/s1 were pruned, with "
    assert f"{words}base {base.digest}\n" in result.stdout
    assert "broken: 0\n" in result.stdout
    assert "or changes to rows that were pruned" in result.stdout
    assert "only one session's rows" in run("replay", "s1", export).stderr

    first, *lines = export.read_bytes().splitlines(keepends=True)
    again = next(n for n, line in enumerate(lines) if b'"session_opened"' in line)
    assert 0 < again
    for left in (
        lines,
        [first, *lines[1:]],
        lines[again:],
        [first, *lines[again:]],
        [first, *lines[:1], *lines[2:]],
        [first.replace(b"session/s1", b"session/s2"), *lines],
        [first.replace(base.head[:8].encode(), b"00000000"), *lines],
        [first.replace(b'"position":', b'"position":1'), *lines],
    ):
        export.write_bytes(b"".join(left))
        result = run("verify", export)
        assert (1, "INV-8") == (result.exit_code, result.stdout.split("\t")[1])
    export.write_bytes(b"".join([b'{"excerpt":2}\n', *lines]))
    assert "line 1, is not the beginning of an excerpt" in run("verify", export).stderr


def test_one_session_of_a_journal_whose_base_was_changed(run, stored, tmp_path: Path):
    """Then it is unknown what was pruned of it: rows are missing."""
    folder = stored(in_the_middle())
    run("journal", "prune", *BEFORE)
    with closing(sqlite3.connect(folder / "journal.db")) as other, other:
        other.execute("UPDATE bases SET state = x'00'")
    export = tmp_path / "x.jsonl"
    assert 0 == run("export", "-o", export, "--session", "s1").exit_code
    assert "rows of session/s1 are missing before it" in run("verify", export).stdout


def test_a_damaged_base_line(run, pruned: Path, tmp_path: Path):
    """The message names a first line that is an invalid base, and a base on a later line."""
    export = tmp_path / "x.jsonl"
    run("export", "-o", export)
    first, *rest = export.read_bytes().splitlines(keepends=True)
    export.write_bytes(b'{"base":1}\n' + b"".join(rest))
    assert "line 1, is not a base" in run("verify", export).stderr
    export.write_bytes(b"".join([rest[0], first, *rest[1:]]))
    assert "line 2, is not a row" in run("verify", export).stderr


def test_a_prune_beside_a_reader(run, stored, monkeypatch: pytest.MonkeyPatch):
    """A reader during a prune is asked to read again, and finds nothing broken."""
    folder = stored(aged())
    read = SqlStore.read

    def slowly(self, *arguments, **options):
        yield from read(self, *arguments, **options)
        if monkeypatch is not None:
            monkeypatch.undo()
            monkeypatch.setenv("CAIRN_DATA_DIR", str(folder))
            run("journal", "prune", *BEFORE, "--close-idle")

    monkeypatch.setattr(SqlStore, "read", slowly)
    result = run("verify")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "was pruned while it was read" in result.stderr


def test_tail_of_what_is_left(run, pruned: Path):
    """It begins where the journal does, and says so if an earlier row is requested."""
    result = run("tail", "--journal", "--after", 2, "-n", 500)
    assert f"The events up to {FIRST_RUN} were pruned.\n" in result.stderr
    assert FIRST_RUN + 1 == json.loads(result.stdout.splitlines()[0])["position"]
    assert "were pruned" not in run("tail", "--journal").stderr


@pytest.mark.usefixtures("pruned")
def test_no_pass_is_run_again_without_its_base(run, monkeypatch: pytest.MonkeyPatch):
    """What runs the model again gets the rows that are left, and what they stand on."""
    calls: list[Any] = []

    def rerun(*given: object) -> int:
        calls.append(given)
        return 3

    module = ModuleType("cairn.ops.journal.replay_engine")
    monkeypatch.setattr(module, "rerun", rerun, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    assert 3 == run("replay", "s3", "--engine").exit_code
    ((rows, session, _, _, base),) = calls
    assert (FIRST_RUN, "s3") == (base.position, session)
    assert FIRST_RUN + 1 == rows[0].position


def test_a_cut_in_the_middle_of_a_run(run, stored):
    """The base has the model that was loaded then; none where none was."""
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22, 23))
    cut = len(made.rows)
    made.propose(SLAB_GONE)
    made.time_us = JUNE_US
    made.turn("s3", "r3", ["Well"], (90, 91), (61, 62))
    made.stop()
    folder = stored(made.rows)
    assert 0 == run("journal", "prune", *BEFORE, "--close-idle").exit_code
    base = there(folder)[0]
    assert cut + 1 == base.position
    loaded = decode(made.rows[1]).event
    assert loaded == loaded_of(base)
    assert 0 == run("verify").exit_code
    assert 0 == run("replay", "s3").exit_code
    run("journal", "prune", "--before", "0m", "--recent", "--close-idle")
    assert loaded_of(there(folder)[0]) is None


# --- size ----------------------------------------------------------------------------------------


def facts_of(stdout: str) -> dict[str, str]:
    """The facts at the head of what was printed."""
    pairs = (line.split(":", 1) for line in stdout.split("\n\n")[0].splitlines())
    return {name: value.strip() for name, value in pairs}


def test_size(run, stored):
    """Bytes, rows, sessions, kinds and days; what pruning would free."""
    folder = stored(aged())
    plain = run("journal")
    assert 0 == plain.exit_code
    assert plain.stdout == run("journal", "size").stdout
    assert plain.stdout == run("journal", "--data-dir", folder).stdout
    result = facts_of(plain.stdout)
    assert str(folder / "journal.db") == result["journal"]
    assert str(len(aged())) == result["rows"]
    assert "2026-01-01 00:00:00.001Z" == result["first row"]
    assert "3 open, 0 closed" == result["sessions"]
    lines = [line.split("\t") for line in plain.stdout.splitlines()]
    received = [row for row in aged() if row.kind == "request_received"]
    private = sum(len(row.private or b"") for row in received)
    public = sum(len(row.public) for row in received)
    assert ["request_received", "3", str(public), str(private)] in lines
    assert "growth: 0 bytes a day over the last 7 days\n" in plain.stdout
    assert "--before 30d` would free 0 rows, about 0 bytes; " in plain.stdout
    assert f"with --close-idle {len(aged())} rows, about " in plain.stdout


def test_size_of_today(run, stored):
    """Rows of these days stand in the table of days."""
    folder = stored(aged())
    run("journal", "prune", *BEFORE, "--close-idle")
    result = run("journal")
    assert f"the rows up to {FIRST_RUN}" == facts_of(result.stdout)["pruned"]
    assert "\t3\t" in result.stdout.split("day\trows\tbytes\n")[1].splitlines()[0]
    assert "growth: 0 bytes a day" not in result.stdout
    assert there(folder)[0] is not None


@pytest.mark.parametrize(
    ("ago_s", "old_rows", "words"),
    [
        (172_800, 0, "growth: {} over the last 7 days\n"),
        (43_200, 20, "growth: {} over the last 7 days\n"),
        (300, 0, "growth: {} in 5 minutes; too short to give a daily rate\n"),
    ],
)
def test_growth_is_what_the_doctor_reports(run, stored, ago_s: int, old_rows: int, words: str):
    """One figure for both: of a journal of two days, of one with older rows, and of a new one."""
    began_us = time.time_ns() // 1000 - ago_s * 1_000_000
    rows = [
        attrs.evolve(row, time_us=1 if place < old_rows else began_us)
        for place, row in enumerate(healthy())
    ]
    folder = stored(rows)
    url = journal_url(folder)
    grown = growth(url)
    size = size_text(grown.size) if "minutes" in words else f"{size_text(grown.daily)} a day"
    assert words.format(size) in run("journal").stdout
    assert f"the journal gr{'ew' if 'minutes' in words else 'ows'} by {grown}" in (
        doctor.check_disk(folder, url).fact
    )


def test_size_beside_a_writer(run, stored):
    """It reads while a server writes, and a broken journal has a size too."""
    folder = stored(healthy()[:12])
    writer = SqlStore.open(journal_url(folder))
    writer.append(healthy()[12:])
    with hold_journal(journal_url(folder), who="serve"):
        assert "31" == facts_of(run("journal").stdout)["rows"]
    writer.close()


def test_growth_beside_a_writer(stored):
    """The write-ahead log does not count, but the rows that are only in it do."""
    now = time.time_ns() // 1000
    rows = [attrs.evolve(row, time_us=now - 10) for row in healthy()]
    url = journal_url(stored(rows[:12]))
    writer = SqlStore.open(url)
    writer.append(rows[12:])
    file, log = bytes_on_disk(url)
    grown = growth(url).size
    writer.close()
    assert log > 0
    assert file <= grown == sum(bytes_on_disk(url))


def test_size_of_nothing(run, stored):
    """An empty journal has a size; where there is none, that is a sentence."""
    assert 2 == run("journal").exit_code
    stored([])
    result = run("journal")
    assert 0 == result.exit_code
    assert "0" == facts_of(result.stdout)["rows"]


def test_sizes_for_people():
    """In the unit that fits."""
    assert ["0 bytes", "1.0 KiB", "2.5 MiB", "3.0 GiB"] == [
        size_text(size) for size in (0, 1024, 2.5 * 2**20, 3 * 2**30)
    ]


@pytest.mark.parametrize("words", [("size",), ("prune", "--before", "30d", "--close-idle")])
def test_nothing_heavy_is_loaded(stored, words: tuple[str, ...]):
    """Both work without MLX and without the web framework."""
    folder = stored(healthy())
    code = (
        "import sys\n"
        "from cairn.ops.cli import ops\n"
        "try:\n"
        f"    ops(['journal', *{words!r}, '--data-dir', {str(folder)!r}])\n"
        "except SystemExit as ended:\n"
        "    assert ended.code == 0, ended.code\n"
        "heavy = {'mlx', 'mlx_lm', 'quart', 'quart_trio', 'trio', 'hypercorn', 'alembic'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("\n[]\n")
