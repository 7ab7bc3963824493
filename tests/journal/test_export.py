"""An export gives back the rows it was made of, byte for byte, whatever is in them."""

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.journal.errors import StoreError
from cairn.journal.export import from_line, read_export, to_line
from tests.support.journals import BREAKABLE, broken, healthy, tampered


@pytest.mark.parametrize("name", ["healthy", "tampered", *BREAKABLE])
def test_rows_come_back(name: str, tmp_path: Path):
    """All rows of a journal come back as they were, of a broken one as well."""
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
    """Payloads that are no JSON, or not as we write it, and times of no calendar come back too."""
    row = attrs.evolve(healthy()[0], public=public, private=private, time_us=time_us)
    line = to_line(row)
    assert 1 == line.count(b"\n")
    assert row == from_line(line)


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
    """What is no row of an export is refused by the number of its line."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(to_line(healthy()[0]) + line + b"\n")
    with pytest.raises(StoreError, match="line 2"):
        list(read_export(path))


def test_no_file(tmp_path: Path):
    """A file that is not there is an error of the store."""
    with pytest.raises(StoreError, match="No such file"):
        list(read_export(tmp_path / "none.jsonl"))
