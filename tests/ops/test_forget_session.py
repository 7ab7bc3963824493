"""`ops forget`: the texts of a session cannot be read in any copy, and all else holds."""

import json
import re
import sqlite3
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.actors.journal_keys import KeyFile
from cairn.actors.journal_start import start_journal
from cairn.actors.settings import JournalBroken, no_progress
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import GENESIS, Row, decode, encode
from cairn.journal.rows.database import postgres as postgres_store
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.sealing import subject_of
from cairn.journal.rows.store_sql import SqlStore
from cairn.journal.tenants import agent_session
from cairn.ops import forget as ops_forget
from tests.support.forgetting_killed import PLACES as KILLED
from tests.support.forgetting_killed import killed
from tests.support.journals import NOTES, TENANT, Builder, healthy
from tests.support.journals import stored as with_turns
from tests.support.processes.postgres import Postgres


@pytest.fixture
def sealed(stored: Any, tmp_path: Path) -> Callable[[Sequence[Row]], Path]:
    """Puts rows into the journal of the default data directory, sealed as a server does it."""

    def store(rows: Sequence[Row]) -> Path:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        with closing(KeyFile.open(folder / "keys.db")) as keys:
            found: list[Row] = []
            for row in rows:
                recorded = decode(row)
                key = keys.key_of(subject_of(recorded.event))
                found.append(encode(recorded, found[-1].hash if found else GENESIS, key))
            keys.commit()
        stored(found)
        return folder

    return store


@pytest.fixture
def folder(sealed: Any) -> Path:
    """A data directory whose sessions s1 and s2 begin alike; s3 is another."""
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello", "Hi", "Who?"], range(11, 21), (21, 22))
    made.turn("s2", "r2", ["Hello", "Hi", "What?"], (*range(11, 19), 90, 91), (61, 62))
    made.turn("s3", "r3", ["Another"], range(40, 50), (51, 52))
    made.stop()
    assert made.bug is None
    found: Path = sealed(made.rows)
    return found


def rows_in(folder: Path, *, with_keys: bool = True) -> list[Row]:
    """The rows of the journal."""
    keys = KeyFile.read(folder / "keys.db") if with_keys else None
    try:
        with closing(SqlStore.open(journal_url(folder), read_only=True, keys=keys)) as store:
            return list(store.read())
    finally:
        if keys is not None:
            keys.close()


def readable(folder: Path, session: str) -> bool:
    """Whether a text of a session can be read."""
    found = [decode(row) for row in rows_in(folder)]
    mine = [one for one in found if getattr(one.event, "session", None) == session]
    return any(one.unread is None for one in mine if isinstance(one.event, ev.RequestReceived))


# --- done as a whole ------------------------------------------------------------------------------


def test_a_session_is_forgotten(run: Any, folder: Path, tmp_path: Path):
    """
    Its texts cannot be read, in the journal and in an export of before; the others can. The chain
    holds, and what was not checked is counted, with an exit code of its own.
    """
    export = tmp_path / "before.jsonl"
    assert 0 == run("export", "-o", export).exit_code
    assert 0 == run("verify").exit_code
    (folder / "snapshot").write_bytes(b"texts")
    assert readable(folder, "s1")
    assert readable(folder, "s2")

    result = run("forget", "s1", "--yes")

    assert 0 == result.exit_code, result.output
    assert "the same beginning is in session s2" in result.stdout
    assert "Session s1 is forgotten.\nIt can still be read:\n- where its keys" in result.stdout
    assert "in the sessions named" in result.stdout
    assert "prune" not in result.stdout
    assert not readable(folder, "s1")
    assert readable(folder, "s2")
    assert not (folder / "snapshot").exists()
    events = [decode(row).event for row in rows_in(folder)]
    forgotten = events[-1]
    assert isinstance(forgotten, ev.SessionForgotten)
    assert ("s1", ("s2",)) == (forgotten.of_session, forgotten.same_text)
    verified = run("verify")
    assert 4 == verified.exit_code, verified.output
    assert f"not checked: {forgotten.rows} rows (forgotten), 0 rows (no key)" in verified.stdout
    assert "broken: 0\n" in verified.stdout
    # The export of before has the sealed bytes, and no key is in it.
    again = run("verify", export)
    assert 4 == again.exit_code
    assert "0 rows (forgotten)" in again.stdout
    assert b'"text"' not in export.read_bytes()


def test_an_export_with_keys_stays_readable(run: Any, folder: Path, tmp_path: Path):
    """Keys that were handed over open the rows; that is the operator's decision."""
    export = tmp_path / "x.jsonl"
    assert 0 == run("export", "-o", export, "--with-keys").exit_code
    beside = tmp_path / "x.jsonl.keys"
    assert 0o600 == stat.S_IMODE(beside.stat().st_mode)
    assert 0 == run("forget", "s1", "--yes").exit_code
    assert 0 == run("verify", export).exit_code
    beside.unlink()
    assert 4 == run("verify", export).exit_code
    beside.write_text("not keys")
    assert 2 == run("verify", export).exit_code
    assert 2 == run("export", "--with-keys").exit_code


def test_what_a_snapshot_left_goes(run: Any, folder: Path):
    """A snapshot whose writing was cut short has texts, too."""
    draft = folder / ".snapshot.abc.new"
    draft.write_bytes(b"texts")
    assert 0 == run("forget", "s1", "--yes").exit_code
    assert not draft.exists()


def test_it_asks_first(run: Any, folder: Path):
    """Without --yes and without an answer nothing is changed."""
    before = rows_in(folder)
    result = run("forget", "s1")
    assert 0 != result.exit_code
    assert before == rows_in(folder)
    assert readable(folder, "s1")


def test_the_files_of_its_own_blocks_go(run: Any, folder: Path):
    """The blocks that only it has are recorded, and those that another has are not among them."""
    assert 0 == run("forget", "s3", "--yes").exit_code
    event = decode(rows_in(folder)[-1]).event
    assert isinstance(event, ev.SessionForgotten)
    assert (event.blocks, ()) == (event.removed, event.same_text)
    assert event.blocks
    assert 0 == run("forget", "s2", "--yes").exit_code
    event = decode(rows_in(folder)[-1]).event
    assert isinstance(event, ev.SessionForgotten)
    assert set(event.removed) < set(event.blocks)
    state = replay(rows_in(folder)).state
    assert all(not state.blocks[key].ids for key in event.blocks)


def test_no_key_is_left_in_the_file(run: Any, folder: Path):
    """The wrapped key is not in the file any more, and no log is beside it."""
    with closing(sqlite3.connect(folder / "keys.db")) as database:
        ((wrapped,),) = database.execute("SELECT wrapped FROM keys WHERE subject = 's1'").fetchall()
    assert wrapped in (folder / "keys.db").read_bytes()
    assert 0 == run("forget", "s1", "--yes").exit_code
    assert wrapped not in (folder / "keys.db").read_bytes()
    assert ["keys.db"] == sorted(path.name for path in folder.glob("keys.db*"))


def test_readers_say_that_a_text_is_forgotten(run: Any, folder: Path):
    """Commands that show texts show that they cannot be read."""
    assert 0 == run("forget", "s1", "--yes").exit_code
    lines = run("tail", "--journal", "--private", "-n", "500").stdout.split("\n")
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    mine = [row["private"] for row in rows if row["stream"] == "session/s1" and row["private"]]
    others = [row["private"] for row in rows if row["stream"] == "session/s2" and row["private"]]
    assert mine
    assert others
    assert all(isinstance(one, str) for one in mine)
    assert all(isinstance(one, dict) for one in others)
    assert 0 == run("sessions").exit_code
    assert 0 == run("replay", "s1").exit_code


# --- refused --------------------------------------------------------------------------------------


def test_a_session_that_is_not_there(run: Any, folder: Path):
    """A typing error forgets nothing."""
    result = run("forget", "nowhere", "--yes")
    assert 2 == result.exit_code
    assert "No session nowhere" in result.output


def test_a_journal_on_postgresql_that_is_in_use(
    run: Any, postgres: Postgres, tmp_path: Path, monkeypatch: Any
):
    """A server that has the journal can be asked itself: that comes before stopping it."""
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(postgres_store, "CLAIM_TRIES", 2)
    url = postgres.new_database()
    migrate(url)
    with closing(SqlStore.open(url)) as server:
        server.append(healthy())
        refused = run("forget", "s1", "--journal", url, "--yes")
        assert (2, "") == (refused.exit_code, refused.stdout)
        assert (
            "A server can forget the session itself: POST /v1/sessions/SESSION/forget. Otherwise: "
            "Stop it, or choose another journal" in refused.stderr
        )


def test_again(run: Any, folder: Path):
    """A second time there is nothing to do."""
    assert 0 == run("forget", "s1", "--yes").exit_code
    before = rows_in(folder)
    result = run("forget", "s1", "--yes")
    assert 0 == result.exit_code
    assert "has no keys here" in result.stdout
    assert before == rows_in(folder)


def test_texts_that_are_not_sealed(run: Any, stored: Any):
    """Rows that are plain would stay readable, so that it is refused."""
    stored(healthy())
    result = run("forget", "s1", "--yes")
    assert 2 == result.exit_code
    assert "not sealed" in result.output


def test_an_agent_goes_first(run: Any, sealed: Any):
    """The session of an agent is forgotten with its agent, or not at all."""
    folder = sealed(with_turns())
    copy = agent_session(TENANT, "copy")
    needed = run("forget", NOTES, "--yes")
    assert (2, True) == (needed.exit_code, "begins with turns of" in needed.output)
    refused = run("forget", copy, "--yes")
    assert (2, True) == (refused.exit_code, "Add --agent" in refused.output)
    assert 0 == run("forget", copy, "--yes", "--agent").exit_code
    assert copy not in replay(rows_in(folder)).state.agents
    done = run("forget", NOTES, "--yes")
    assert 0 == done.exit_code, done.output
    assert not readable(folder, NOTES)
    assert 4 == run("verify").exit_code


# --- cut short ------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


PLACES: dict[str, tuple[Any, str, int]] = {
    "before the session is closed": (SqlStore, "append", 0),
    "before the files go": (ops_forget, "remove_files", 0),
    "before the snapshot goes": (ops_forget, "remove_snapshot", 0),
    "before it is on record": (SqlStore, "append", 1),
    "before the key goes": (KeyFile, "remove", 0),
}
"""Where the command may end: before which call of which function."""


def end_before(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Have the process end at a place."""
    owner, name, skip = PLACES[place]
    step, calls = getattr(owner, name), iter(range(100))

    def ending(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == skip:
            raise Killed
        return step(*args, **kwargs)

    monkeypatch.setattr(owner, name, ending)


@pytest.mark.parametrize("place", PLACES)
def test_cut_short(run: Any, folder: Path, place: str):
    """
    Wherever it ends, the journal holds and can be served, nothing is half forgotten, and the same
    command finishes.
    """
    with pytest.MonkeyPatch.context() as patched:
        end_before(patched, place)
        with pytest.raises(Killed):
            run("forget", "s1", "--yes")
    assert 0 == run("verify").exit_code
    assert readable(folder, "s1")
    assert 0 == run("forget", "s1", "--yes").exit_code
    assert not readable(folder, "s1")
    assert 4 == run("verify").exit_code
    events = [decode(row).event for row in rows_in(folder)]
    assert 1 == sum(isinstance(event, ev.SessionForgotten) for event in events)


@pytest.mark.long_but("before it is closed", "before the keys go", "after the snapshot went")
@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [one for one in KILLED if not re.search("block|file|a snapshot", one)]
)
def test_killed(run: Any, folder: Path, where: str):
    """A process that is killed leaves the same as one that ends by an exception."""
    (folder / "snapshot").write_bytes(b"texts")
    killed(where, "ops", "forget", "s1", "--yes", env={"CAIRN_DATA_DIR": str(folder)})
    gone = where == "after the keys went"
    assert (4 if gone else 0) == run("verify").exit_code
    assert gone != readable(folder, "s1")
    assert 0 == run("forget", "s1", "--yes").exit_code
    assert not readable(folder, "s1")
    assert readable(folder, "s2")
    assert not (folder / "snapshot").exists()
    events = [decode(row).event for row in rows_in(folder)]
    assert 1 == sum(isinstance(event, ev.SessionForgotten) for event in events)
    assert 4 == run("verify").exit_code


def test_a_start_finishes_it(run: Any, folder: Path):
    """If only the key is left, the next start of the server removes it."""
    with pytest.MonkeyPatch.context() as patched:
        end_before(patched, "before the key goes")
        with pytest.raises(Killed):
            run("forget", "s1", "--yes")
    assert readable(folder, "s1")
    with (
        closing(KeyFile.open(folder / "keys.db")) as keys,
        closing(SqlStore.open(journal_url(folder), keys=keys)) as store,
    ):
        begun = start_journal(store, None, no_progress, lambda: None, keys)
        assert "s1" not in begun.ledger.state.sessions
    assert not readable(folder, "s1")
    assert readable(folder, "s2")


def test_a_start_without_the_keys_is_refused(folder: Path):
    """
    A server whose keys are not those of its journal would miss texts, and refuses, as often as it
    starts: no snapshot is used in place of the rows.
    """
    (folder / "keys.db").unlink()
    for _ in range(2):
        with (
            closing(KeyFile.open(folder / "keys.db")) as keys,
            closing(SqlStore.open(journal_url(folder), keys=keys)) as store,
        ):
            assert keys.is_new
            with pytest.raises(JournalBroken, match="their keys are missing"):
                start_journal(store, None, no_progress, lambda: None, keys)


def test_verify_without_keys(run: Any, folder: Path):
    """Without its journal key a journal is verified as far as that goes."""
    (folder / "journal-key").unlink()
    result = run("verify")
    assert 4 == result.exit_code
    assert "Texts cannot be read. The journal key" in result.stderr
    assert "0 rows (forgotten)" in result.stdout


def test_a_changed_row_is_still_found(run: Any, folder: Path):
    """After forgetting, a change of a row that can be read is found."""
    assert 0 == run("forget", "s1", "--yes").exit_code
    with closing(sqlite3.connect(folder / "journal.db")) as database:
        (public,) = database.execute("SELECT public FROM events WHERE position = 5").fetchone()
        fields = json.loads(public)
        changed = json.dumps(fields | {"kind_of": 1}).encode()
        database.execute("UPDATE events SET public = ? WHERE position = 5", (changed,))
        database.commit()
    assert 1 == run("verify").exit_code


def test_no_field_of_a_row_is_added(folder: Path):
    """What was opened is not stored."""
    (row, *_) = [row for row in rows_in(folder) if row.opened is not None]
    assert row == attrs.evolve(row, opened=None)


# --- with a prune ---------------------------------------------------------------------------------

PRUNE = ("journal", "prune", "--before", "2026-03-01", "--close-idle")


def test_a_prune_after_forgetting(run: Any, folder: Path):
    """Rows that cannot be read are pruned as others are, and what is left can be checked whole."""
    assert 0 == run("forget", "s1", "--yes").exit_code
    pruned = run(*PRUNE)
    assert 0 == pruned.exit_code, pruned.output
    assert "3 sessions removed" in pruned.stdout
    verified = run("verify")
    assert 0 == verified.exit_code, verified.output
    assert "not checked" not in verified.stdout


def test_a_pruned_session_is_forgotten(run: Any, folder: Path, tmp_path: Path):
    """Of a session whose rows were pruned, copies of before become unreadable."""
    export = tmp_path / "before.jsonl"
    assert 0 == run("export", "-o", export).exit_code
    assert 0 == run(*PRUNE).exit_code
    done = run("forget", "s1", "--yes")
    assert 0 == done.exit_code, done.output
    with closing(KeyFile.open(folder / "keys.db")) as keys:
        assert {"s2", "s3"} <= keys.subjects()
        assert "s1" not in keys.subjects()
    verified = run("verify")
    assert 0 == verified.exit_code, verified.output
