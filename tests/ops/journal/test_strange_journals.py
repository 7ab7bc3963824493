"""
A journal that another program changed in strange ways: each command names the row or the part of
the database, and none fails with a traceback.
"""

import contextlib
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.actors.boot import read_journal
from cairn.actors.settings import JournalBroken
from cairn.journal.errors import StoreError
from cairn.journal.rows.codec import GENESIS, Row, row_hash
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.export import from_line, read_export, to_line
from cairn.journal.rows.store_sql import SqlStore
from cairn.journal.rows.verification import Verification
from tests.support.journals import healthy

LAST = len(healthy())
ROWS = (
    LAST // 2,
    *(pytest.param(position, marks=pytest.mark.long) for position in (1, LAST)),
)
INTEGERS = ("seq", "version", "time_us")
TEXTS = ("stream", "event_id", "kind", "private_digest", "previous_hash", "hash")
BLOBS = ("public", "private")
CHANGES = [
    *((column, change) for column in INTEGERS for change in ("'x'", "1.5", "x'00ff'", "9e999")),
    *((column, change) for column in TEXTS for change in ("x'00ff'", "cast(x'ff41' as text)")),
    *((column, change) for column in BLOBS for change in ("7", "1.5", "cast(x'ff41' as text)")),
    *(("public", change) for change in ("x'00ff'", "'text'")),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a healthy journal."""
    folder = tmp_path_factory.mktemp("template")
    migrate(journal_url(folder))
    with contextlib.closing(SqlStore.open(journal_url(folder))) as store:
        store.append(healthy())
    return folder / "journal.db"


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """The default data directory, with a copy of it."""
    (tmp_path / "data").mkdir()
    shutil.copy(template, tmp_path / "data")
    return tmp_path / "data"


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database, as another program opens it."""
    with contextlib.closing(sqlite3.connect(folder / "journal.db")) as connection:
        yield connection
        connection.commit()


def assert_start_refused(folder: Path, words: str) -> None:
    """A server that starts on the journal says what is broken, and serves nothing."""
    with (
        contextlib.closing(SqlStore.open(journal_url(folder))) as store,
        pytest.raises(JournalBroken, match=words),
    ):
        read_journal(store)


@pytest.mark.parametrize("position", ROWS)
@pytest.mark.parametrize(("column", "change"), CHANGES)
def test_a_value_of_another_type(run, folder: Path, tmp_path: Path, column, change, position):
    """Each column, each type: a violation at the row, in the journal and in its export."""
    with changing(folder) as database:
        database.execute(f"UPDATE events SET {column} = {change} WHERE position = {position}")
    result = run("verify")
    assert 1 == result.exit_code
    assert f"\tINV-8\trow {position}\t" in result.stdout
    assert_start_refused(folder, f"at row {position} ")
    export = tmp_path / "x.jsonl"
    assert 0 == run("export", "-o", export).exit_code
    again = run("verify", export)
    assert (1, result.stdout) == (again.exit_code, again.stdout)
    assert run("replay", "s1").exit_code in (0, 1, 2)
    assert run("replay", "--at", LAST).exit_code in (0, 2)
    for command in (("export", "--session", "s1"), ("sessions",), ("tail", "--journal")):
        assert run(*command).exit_code in (0, 2)


@pytest.mark.parametrize("column", [*INTEGERS, *TEXTS, "public", "position"])
def test_null(column):
    """A value is missing: a violation, and it comes back from an export."""
    rows = healthy()
    changed: dict[str, Any] = {column: None}
    rows[3] = attrs.evolve(rows[3], **changed)
    assert rows[3] == from_line(to_line(rows[3]))
    checked = Verification(may_be_excerpt=True)
    for row in rows:
        checked.feed(row)
    first = checked.findings()[0]
    assert ("INV-8", 3 if column == "position" else 4) == (first.invariant, first.position)
    assert f"`{column}`" in first.message


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("position", [0, -1, -(2**63)])
def test_a_row_where_none_can_be(run, folder: Path, tmp_path: Path, position: int, private: bool):
    """It is found, and only it: a row at position 0 that has the right hash is in no chain."""
    row = attrs.evolve(healthy()[0], position=position, seq=99, event_id="zero")
    if position >= 0:
        row = attrs.evolve(row, previous_hash=GENESIS)
        row = attrs.evolve(row, hash=row_hash(row))
    names = [field.name for field in attrs.fields(Row) if field.eq]
    with changing(folder) as database:
        marks = ", ".join("?" * len(names))
        values = [getattr(row, name) for name in names]
        database.execute(f"INSERT INTO events ({', '.join(names)}) VALUES ({marks})", values)
    result = run("verify")
    assert 1 == result.exit_code
    assert f"INV-8\trow {position}\tserver\tthe row is at a position where none" in result.stdout
    assert "broken: 1\n" in result.stdout
    assert_start_refused(folder, f"at row {position} ")
    export = tmp_path / "x.jsonl"
    options = () if private else ("--no-private",)
    assert 0 == run("export", "-o", export, *options).exit_code
    again = run("verify", export)
    assert 1 == again.exit_code
    assert f"row {position}\t" in again.stdout
    assert "broken: 1\n" in again.stdout


SCHEMAS = [
    ("CREATE TRIGGER spoil AFTER INSERT ON events BEGIN SELECT 1; END", "trigger spoil"),
    ("ALTER TABLE events ADD COLUMN note TEXT", "column events.note"),
    ("ALTER TABLE bases ADD COLUMN note TEXT", "column bases.note"),
    ("CREATE TABLE notes (text)", "table notes"),
    ("CREATE VIEW shown AS SELECT * FROM events", "view shown"),
    ("ALTER TABLE bases RENAME COLUMN head TO heads", None),
    ("DROP TABLE bases", None),
]


@pytest.mark.parametrize(("change", "part"), SCHEMAS, ids=lambda value: str(value)[:24])
def test_a_schema_that_was_changed(run, folder: Path, change: str, part: str | None):
    """
    What another program added is named, and broken; a journal in which a part is missing cannot be
    read. A server refuses both.
    """
    with changing(folder) as database:
        database.execute(change)
    result = run("verify")
    if part is None:
        assert (2, "") == (result.exit_code, result.stdout)
    else:
        assert 1 == result.exit_code
        assert f"\tINV-8\t{part}\tserver\tCairn did not make it\t" in result.stdout
        assert f"first broken: {part}\n" in result.stdout


def test_a_column_of_another_type(run, folder: Path):
    """A column whose type was changed is named."""
    with changing(folder) as database:
        database.execute("DROP TABLE bases")
        database.execute(
            "CREATE TABLE bases (position TEXT, head TEXT NOT NULL, state BLOB NOT NULL, "
            "state_digest TEXT NOT NULL)"
        )
    result = run("verify")
    assert 1 == result.exit_code
    assert "\tcolumn bases.position\tserver\tit was changed\t" in result.stdout


def test_a_trigger_beneath_a_server(stored):
    """A trigger that is made while a server writes stops the next append; an index does not."""
    folder = stored(healthy()[:-2])
    with contextlib.closing(SqlStore.open(journal_url(folder))) as store:
        with changing(folder) as database:
            database.execute("CREATE INDEX by_kind ON events (kind)")
        store.append(healthy()[-2:-1])
        with changing(folder) as database:
            database.execute(SCHEMAS[0][0])
        with pytest.raises(StoreError, match="trigger spoil: Cairn did not make it"):
            store.append(healthy()[-1:])
        assert LAST - 1 == store.head()[0]


@pytest.mark.parametrize("value", ["x'00ff'", "'9999'", "'0000'"])
def test_a_schema_version_that_is_none(run, folder: Path, value: str):
    """A revision that is not Cairn's is refused with a sentence; so are two of them."""
    with changing(folder) as database:
        database.execute(f"INSERT INTO cairn_schema VALUES ({value})")
    result = run("verify")
    assert 2 == result.exit_code
    assert "names two schemas" in result.stderr
    with changing(folder) as database:
        database.execute("DELETE FROM cairn_schema WHERE version_num = '0001'")
    assert 2 == run("verify").exit_code


def test_a_key_that_is_there_twice(run, tmp_path: Path):
    """
    Which value counts depends on who reads the line, so it is refused, with its number; a line that
    was only laid out in another way is not.
    """
    lines = list(map(to_line, healthy()))
    export = tmp_path / "x.jsonl"

    def verified(line: bytes) -> tuple[int, str]:
        export.write_bytes(b"".join([*lines[:4], line, *lines[5:]]))
        result = run("verify", export)
        return result.exit_code, result.stderr

    for old, new in (
        (b'"payload":', b'"payload":{"forged":true},"payload":'),
        (b'"position":5', b'"position":1,"position":5'),
        (b'"private":', b'"private":null,"private":'),
    ):
        code, words = verified(lines[4].replace(old, new, 1))
        assert 2 == code
        assert "line 5, is not a row of an export: the key" in words
    assert (0, "") == verified(lines[4].replace(b',"seq":', b' , "seq": ', 1))
    shuffled = dict(reversed(json.loads(lines[4]).items()))
    assert 0 == verified(json.dumps(shuffled, separators=(",", ":")).encode() + b"\n")[0]


def test_nesting_without_end(run, tmp_path: Path):
    """A line or a payload of brackets alone is refused with a sentence."""
    export = tmp_path / "x.jsonl"
    export.write_bytes(b"[" * 100_000 + b"\n")
    assert 2 == run("verify", export).exit_code
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    row = attrs.evolve(healthy()[0], public=deep)
    export.write_bytes(to_line(attrs.evolve(row, hash=row_hash(row))))
    assert run("verify", export).exit_code in (1, 2)
    assert next(iter(read_export(export))).public == deep


@pytest.mark.parametrize(
    ("column", "payload", "words"),
    [
        ("public", b'{"forged":1,"forged":2}', "the key `forged` is there twice"),
        ("public", b'{"a":{"b":1,"b":1}}', "the key `b` is there twice"),
        ("private", b'{"a":1,"a":1}', "the key `a` is there twice"),
        ("private", b'{"request":"r9"}', "fields that are missing, or that its kind does not have"),
        ("public", b"[]", "cannot be decoded"),
        ("private", b"7", "cannot be decoded"),
    ],
)
def test_a_payload_that_says_two_things(
    run, tmp_path: Path, column: str, payload: bytes, words: str
):
    """Its hashes are right, so another program wrote it: it is refused, with its row."""
    changed: dict[str, Any] = {column: payload}
    row = attrs.evolve(healthy()[3], **changed)
    if row.private is not None:
        row = attrs.evolve(row, private_digest=hashlib.sha256(row.private).hexdigest())
    row = attrs.evolve(row, hash=row_hash(row))
    export = tmp_path / "x.jsonl"
    export.write_bytes(b"".join(map(to_line, [*healthy()[:3], row])))
    result = run("verify", export)
    assert (2, "") == (result.exit_code, result.stdout)
    assert f"row 4: {row.kind}" in result.stderr
    assert words in result.stderr


def test_a_value_of_another_type_without_private_contents(run, tmp_path: Path):
    """It is found where the chain alone can be checked, too."""
    rows: list[Row] = [attrs.evolve(row, private=None) for row in healthy()]
    changed: dict[str, Any] = {"seq": "x"}
    rows[9] = attrs.evolve(rows[9], **changed)
    export = tmp_path / "x.jsonl"
    export.write_bytes(b"".join(map(to_line, rows)))
    result = run("verify", export)
    assert 1 == result.exit_code
    assert "\tINV-8\trow 10\tserver\tthe column `seq` is not an integer\t" in result.stdout


def test_a_time_in_another_form(tmp_path: Path):
    """The same moment in other letters is not what an export has."""
    line = to_line(healthy()[0])
    assert b"T00:" in line
    with pytest.raises(ValueError, match="is not written as an export writes it"):
        from_line(line.replace(b"T00:", b" 00:", 1))


def test_a_database_without_a_table(folder: Path):
    """The table is named as missing."""
    with contextlib.closing(SqlStore.open(journal_url(folder))) as store:
        with changing(folder) as database:
            database.execute("DROP TABLE bases")
        assert [("table bases", "it is missing")] == store.schema_faults()
        assert str(folder / "journal.db") == store.place
