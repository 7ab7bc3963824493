"""Reading an export gives back the rows it was made of, byte for byte, whatever is in them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.journal.errors import StoreError
from cairn.journal.rows.base import Base
from cairn.journal.rows.export import (
    Excerpt,
    base_to_line,
    excerpt_to_line,
    from_line,
    read_base,
    read_excerpt,
    read_export,
    require_complete,
    to_line,
)
from tests.support.journals import BREAKABLE, broken, healthy, tampered


@pytest.mark.parametrize("name", ["healthy", "tampered", *BREAKABLE])
def test_rows_come_back(name: str, tmp_path: Path):
    """All rows of a journal come back unchanged, even those of a broken one."""
    rows = {"healthy": healthy, "tampered": tampered}.get(name, lambda: broken(name)[0])()
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(map(to_line, rows)))
    assert rows == list(read_export(path))


def test_a_line_can_be_read_by_others():
    """A line is one JSON object with the fields of the event in it."""
    row = healthy()[4 - 1]
    line = json.loads(to_line(row))
    assert "2026-01-01T00:00:00.004000Z" == line["time"]
    assert "r1" == line["payload"]["request"]
    assert list(range(11, 21)) == line["private"]["new_ids"]
    assert list(line) == [
        *("position", "stream", "seq", "event_id", "kind", "version", "time", "hash"),
        *("previous_hash", "private_digest", "payload", "private"),
    ]


PAYLOADS = st.one_of(
    st.binary(),
    st.sampled_from(
        [b"{}", b"{", b"null", b"[]", b'"x"', b'{"a":1}\n', b' {"a":1}', b'{"a":\xff}']
    ),
    st.sampled_from([b'{"a":1e400,"b":-0.0,"c":1E5,"d":1.50}', b'{"a":"\\u00fc","a":2}']),
)


@given(public=PAYLOADS, private=st.none() | PAYLOADS, time_us=st.integers(-(2**63), 2**63 - 1))
def test_any_bytes_come_back(public: bytes, private: bytes | None, time_us: int):
    """
    Payloads that are not JSON, or not as Cairn writes it, and times outside the calendar come back,
    too.
    """
    row = attrs.evolve(healthy()[0], public=public, private=private, time_us=time_us)
    line = to_line(row)
    assert 1 == line.count(b"\n")
    assert row == from_line(line)


@pytest.mark.parametrize("time_us", [-(2**63), 2**63 - 1])
def test_a_time_outside_the_calendar_is_a_number(time_us: int):
    """No date has a name for it."""
    row = attrs.evolve(healthy()[0], time_us=time_us)
    assert time_us == json.loads(to_line(row))["time"]
    assert row == from_line(to_line(row))


@pytest.mark.parametrize("public", [b"[]", b"{no json}", b'{"a":\xff}'])
def test_a_payload_that_is_not_a_json_object(public: bytes):
    """It is exported as base64, so that the line is still JSON."""
    row = attrs.evolve(healthy()[0], public=public)
    assert public == base64.b64decode(json.loads(to_line(row))["payload"])
    assert row == from_line(to_line(row))


def test_contents_left_out():
    """A row without its private contents keeps their digest."""
    row = attrs.evolve(healthy()[3], private=None)
    assert row == from_line(to_line(row))
    assert row.private_digest != ""


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"{}",
        b"",
        to_line(healthy()[0]).replace(b'"position":1', b'"position":"1"'),
        to_line(healthy()[0]).replace(b"Z", b""),
        to_line(healthy()[0])[:-20],
        to_line(healthy()[0]).replace(b'"seq"', b'"sec"'),
    ],
)
def test_a_line_that_is_none(tmp_path: Path, line: bytes):
    """A line that is not a row of an export is refused, with its number."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(to_line(healthy()[0]) + line + b"\n")
    with pytest.raises(StoreError, match="line 2"):
        list(read_export(path))


def test_no_file(tmp_path: Path):
    """A missing file is an error of the store."""
    with pytest.raises(StoreError, match="No such file"):
        list(read_export(tmp_path / "none.jsonl"))


BASE = Base(position=7, head="h" * 64, state=b'{"version":1}', state_digest="d" * 64)


@pytest.mark.parametrize("state", [BASE.state, None])
def test_a_base_comes_back(tmp_path: Path, state: bytes | None):
    """The first line of a pruned journal, with or without its state; the rows follow it."""
    base = attrs.evolve(BASE, state=state)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(base_to_line(base) + b"".join(map(to_line, healthy())))
    assert base == read_base(path)
    assert read_excerpt(path) is None
    assert healthy() == list(read_export(path))


def test_the_beginning_of_an_excerpt_comes_back(tmp_path: Path):
    """It names the base without its state, and how many rows of the stream were pruned."""
    excerpt = Excerpt(stream="session/s1", seq=4, base=attrs.evolve(BASE, state=None))
    path = tmp_path / "session.jsonl"
    path.write_bytes(excerpt_to_line(excerpt) + b"".join(map(to_line, healthy())))
    assert excerpt == read_excerpt(path)
    assert read_base(path) is None
    assert healthy() == list(read_export(path))


@pytest.mark.parametrize(
    ("line", "read", "words"),
    [
        (b'{"base":2}', read_base, "line 1, is not a base of a journal: Invalid enum value"),
        (b'{"excerpt":1}', read_excerpt, "line 1, is not the beginning of an excerpt: .* missing"),
    ],
    ids=["base", "excerpt"],
)
def test_a_first_line_that_cannot_be_read(
    tmp_path: Path, line: bytes, read: Callable[[Path], object], words: str
):
    """The error names the line and what it should be."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(StoreError, match=words):
        read(path)
    path.unlink()
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        read(path)


@pytest.mark.parametrize("payload", [b"null", b"7", b'"no base64"'])
def test_a_payload_that_was_never_exported(payload: bytes):
    """Every row has a payload: an object, or base64 of what was stored."""
    line = json.loads(to_line(healthy()[0]))
    line["payload"] = json.loads(payload)
    with pytest.raises(ValueError, match="payload"):
        from_line(json.dumps(line).encode())


def test_rows_that_are_complete():
    """They pass unchanged. If contents or rows were left out, the message says which option did."""
    rows = healthy()
    assert rows == list(require_complete(rows, None))
    mine = [row for row in rows if row.stream == "session/s1"]
    with pytest.raises(StoreError, match="only one session's rows"):
        list(require_complete(mine, None))
    base = Base(position=2, head="h", state=b"{}", state_digest="d")
    assert mine == list(require_complete(mine, base))
    with pytest.raises(StoreError, match="were left out of this export"):
        list(require_complete([attrs.evolve(row, private=None) for row in rows], None))
    with pytest.raises(StoreError, match="and with them the base"):
        list(require_complete(rows, attrs.evolve(base, state=None)))
