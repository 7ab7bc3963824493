"""A sealed payload is opened with its key and for its row, and tells nothing without it."""

import hashlib
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow
from cairn.journal.replay import replay
from cairn.journal.rows.codec import GENESIS, Row, chain_fault, decode, encode, opened, row_hash
from cairn.journal.rows.sealing import (
    SERVER,
    Key,
    key_id,
    keys_from_text,
    keys_to_text,
    subject_of,
)
from tests.support.journals import stored

KEY = Key(bytes(range(32)))
PLAIN = b'{"ids":[1],"text":"Gr\xc3\xbc\xc3\x9fe"}'


def row_of(kind: str, key: Key | None = KEY) -> Row:
    """A row with an event of a kind."""
    recorded = next(one for one in map(decode, stored()) if one.event.kind == kind)
    return attrs.evolve(encode(recorded, GENESIS, key), opened=None)


def test_the_vector_of_the_docs():
    """The sealed bytes of docs/journal-format.md."""
    private = b'{"text":"Gr\xc3\xbc\xc3\x9fe"}'
    sealed = KEY.seal("00000000-0000-4000-8000-000000000002", "example", 2, private)
    page = (Path(__file__).resolve().parents[3] / "docs" / "journal-format.md").read_text("utf-8")
    assert f"id `{KEY.id}`" in page
    assert f"| sealed | `{sealed.hex()}` |" in page
    assert f"| digest of the sealed bytes | `{hashlib.sha256(sealed).hexdigest()}` |" in page
    assert 1 + 8 + 18 + 16 == len(sealed)


def test_a_payload_is_opened_for_its_own_row():
    """With its key, and the id, kind and position of its row, it is read, and otherwise not."""
    row: tuple[str, str, int] = ("one", "turn_stored", 7)
    sealed = KEY.seal(*row, PLAIN)
    assert PLAIN == KEY.open(*row, sealed)
    for other in (
        ("other", "turn_stored", 7),
        ("one", "request_received", 7),
        ("one", "turn_stored", 8),
    ):
        assert None is KEY.open(*other, sealed)
    assert None is KEY.open(*row, sealed[:-1] + bytes([sealed[-1] ^ 1]))
    assert None is Key(bytes(32)).open(*row, sealed)
    assert KEY.id == key_id(sealed)
    assert (None, None) == (key_id(PLAIN), key_id(None))
    assert KEY.seal(*row, PLAIN) == sealed != KEY.seal("two", *row[1:], PLAIN)


def test_a_row_is_read_with_its_key():
    """Its event is the same as of the plain row; the chain covers the sealed bytes."""
    row = row_of("turn_stored")
    plain = row_of("turn_stored", None)
    assert None is chain_fault(row, GENESIS)
    assert row.hash != plain.hash
    assert decode(plain) == decode(opened(row, {KEY.id: KEY}))
    assert plain.opened is None
    assert decode(plain) == decode(opened(plain, {KEY.id: KEY}))


def test_a_row_without_its_key_has_no_text():
    """Its event has the public fields, and says which key is missing."""
    row = row_of("turn_stored")
    for keys in ({}, {"other": KEY}):
        recorded = decode(opened(row, keys))
        assert KEY.id == recorded.unread
        event = recorded.event
        assert isinstance(event, ev.TurnStored)
        assert ("", "", "", {}) == (event.question, event.answer, event.note, event.texts)
        plain = decode(row_of("turn_stored", None)).event
        assert isinstance(plain, ev.TurnStored)
        assert plain.request == event.request


def test_what_the_key_did_not_seal_is_damaged():
    """Bytes in the place of a payload that name a key and are not of it are no text to miss."""
    row = row_of("turn_stored")
    assert row.private is not None
    other = KEY.seal("another row", row.kind, row.position, b"{}")
    forged = attrs.evolve(row, private=other, private_digest=hashlib.sha256(other).hexdigest())
    forged = attrs.evolve(forged, hash=row_hash(forged))
    assert None is chain_fault(forged, GENESIS)
    with pytest.raises(DamagedRow, match="not what its key sealed"):
        decode(opened(forged, {KEY.id: KEY}))


def test_a_strange_row_is_left_as_it_is():
    """A row with another type in a column is a finding, whether it is sealed or not."""
    row = row_of("turn_stored")
    strange: list[dict[str, Any]] = [{"event_id": 5}, {"event_id": "\ud800"}, {"private": "text"}]
    for odd in (attrs.evolve(row, **fields) for fields in strange):
        assert odd == opened(odd, {KEY.id: KEY})
        assert None is opened(odd, {KEY.id: KEY}).opened


def test_subjects():
    """Private fields are of the session, of the one that was checked, or of the agent's."""
    found = {recorded.event.kind: subject_of(recorded.event) for recorded in map(decode, stored())}
    assert SERVER == found["model_loaded"]
    assert found["agent_created"].startswith("@")
    assert "agent/" in found["agent_created"]
    assert found["turn_stored"] != SERVER
    shadow = ev.ShadowSkipped(of_session="s", request="r", reason="failed")
    assert "s" == subject_of(shadow)


def test_keys_are_handed_over():
    """The text of keys is read again; another text is refused."""
    keys = [KEY, Key(bytes(32))]
    assert {key.id: key.secret for key in keys} == {
        name: key.secret for name, key in keys_from_text(keys_to_text(keys)).items()
    }
    with pytest.raises(ValueError, match="object"):
        keys_from_text(b"[]")


def test_a_journal_of_sealed_rows_replays():
    """Sealed and opened, the journal has the same state."""
    rows: list[Row] = []
    keys: dict[str, Key] = {}
    for row in stored():
        recorded = decode(row)
        key = Key(hashlib.sha256(subject_of(recorded.event).encode()).digest())
        keys[key.id] = key
        rows.append(encode(recorded, rows[-1].hash if rows else GENESIS, key))
    read = [opened(attrs.evolve(row, opened=None), keys) for row in rows]
    assert replay(stored()).state == replay(read).state
    assert () == replay(read).findings
