"""
Converts events to stored rows and back, and computes the hash chain over the rows.

A row's payload is two JSON texts, one public and one private. The row's hash covers the stored
bytes of all its columns and the hash of the row before. Of the private payload it covers only a
digest, so the private payload can be sealed (``sealing``), left out or forgotten, and the chain
stays valid.

Rows of an older version are brought up step by step by ``UPCASTS`` and never rewritten.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.rows.sealing import Key, Keys, key_id
from cairn.journal.token_ids import shared
from cairn.journal.unread import filled

GENESIS = "0" * 64
"""The hash before the first row."""

Payload = dict[str, Any]
UPCASTS: Mapping[tuple[str, int], Callable[[Payload], Payload]] = {}
"""Maps (kind, version) to the function that converts its payload to version + 1."""


def _empty(kind: str) -> Any:
    """An empty value of the type of a field."""
    if kind.endswith("| None"):
        return None
    return "" if kind == "str" else {} if kind.startswith("Mapping") else []


KINDS = {event.kind: event for event in ev.ALL_EVENTS}
_PRIVATE = {
    event.kind: tuple(f.name for f in attrs.fields(event) if f.metadata.get("private"))
    for event in ev.ALL_EVENTS
}
_HIDDEN = {kind: set(names) for kind, names in _PRIVATE.items()}
_PUBLIC = {
    event.kind: {f.name for f in attrs.fields(event)} - _HIDDEN[event.kind]
    for event in ev.ALL_EVENTS
}
_EMPTY: Mapping[str, Payload] = {
    event.kind: {
        field.name: _empty(str(field.type))
        for field in attrs.fields(event)
        if field.metadata.get("private")
    }
    for event in ev.ALL_EVENTS
}
_encoder = msgspec.json.Encoder()
_TYPES: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("position", "seq", "version", "time_us"), (int, "an integer")),
    **dict.fromkeys(("stream", "event_id", "kind"), (str, "a text")),
    **dict.fromkeys(("private_digest", "previous_hash", "hash"), (str, "a text")),
    **dict.fromkeys(("public", "private"), (bytes, "bytes")),
}


@attrs.frozen(kw_only=True)
class Row:
    """
    A row as it is stored.

    Attributes:
        public: JSON, UTF-8.
        private: JSON, UTF-8, sealed or plain; None if the event has no private fields, or if they
            were left out (``private_digest`` then remains).
        private_digest: SHA-256 of ``private``, or empty.
        previous_hash: the hash of the row before, ``GENESIS`` for the first.
        opened: what ``private`` says, if it is sealed and was opened; empty if its key does not
            open it. Not stored.
    """

    position: int
    stream: str
    seq: int
    event_id: str
    kind: str
    version: int
    time_us: int
    public: bytes
    private: bytes | None
    private_digest: str
    previous_hash: str
    hash: str
    opened: bytes | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def plain(self) -> bytes | None:
        """The private payload as JSON; None if there is none, or if it cannot be read."""
        return self.private if key_id(self.private) is None else self.opened or None


COLUMNS = tuple(field.name for field in attrs.fields(Row) if field.eq)
"""What is stored of a row."""


def encode(recorded: ev.Recorded, previous_hash: str, key: Key | None = None) -> Row:
    """
    The row of an event. Changes nothing.

    Args:
        key: seals the private payload; None to store it plain.

    Raises:
        ValueError: JSON cannot represent it: text that is not valid Unicode, or a float that is not
            finite.
    """
    event = recorded.event
    payload = msgspec.to_builtins(event)
    names = _PRIVATE[event.kind]
    hidden = {name: payload.pop(name) for name in names}
    plain = _json(hidden) if hidden else None
    private = plain
    if plain is not None and key is not None:
        private = key.seal(recorded.event_id, event.kind, recorded.position, plain)
    row = Row(
        position=recorded.position,
        stream=recorded.stream,
        seq=recorded.seq,
        event_id=recorded.event_id,
        kind=event.kind,
        version=event.version,
        time_us=recorded.time_us,
        public=_json(payload),
        private=private,
        private_digest=hashlib.sha256(private).hexdigest() if private is not None else "",
        previous_hash=previous_hash,
        hash="",
        opened=plain if private is not plain else None,
    )
    return attrs.evolve(row, hash=row_hash(row))


def has_private(event: ev.Event) -> bool:
    """Whether an event has private fields."""
    return bool(_PRIVATE[event.kind])


def opened(row: Row, keys: Keys) -> Row:
    """The row with its sealed private payload opened, if its key is there."""
    if type(row.private) is not bytes or (named := key_id(row.private)) is None:
        return row
    key = keys.get(named)
    if key is None or type_fault(row) is not None:
        return row
    plain = key.open(row.event_id, row.kind, row.position, row.private)
    return attrs.evolve(row, opened=plain or b"")


def _json(payload: Payload) -> bytes:
    stored = _encoder.encode(payload)
    if b"null" in stored and _has_unfinite(payload):  # the encoder writes null for such a float
        raise ValueError("a float is not finite, so it could not be read again")
    return stored


def _has_unfinite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_unfinite, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_unfinite, value))
    return isinstance(value, float) and not math.isfinite(value)


def row_hash(row: Row) -> str:
    """The hash that a row must carry."""
    fields = (
        row.previous_hash.encode(),
        row.position.to_bytes(8, "big"),
        row.stream.encode(),
        row.seq.to_bytes(8, "big"),
        row.event_id.encode(),
        row.kind.encode(),
        row.version.to_bytes(4, "big"),
        row.time_us.to_bytes(8, "big"),
        row.public,
        row.private_digest.encode(),
    )
    digest = hashlib.sha256()
    for field in fields:
        digest.update(len(field).to_bytes(8, "big"))
        digest.update(field)
    return digest.hexdigest()


def type_fault(row: Row) -> tuple[str, str, str] | None:
    """
    A column that has a value of another type than Cairn writes there, as another program may have
    stored it: (fact, expected, actual), or None. Such a row has no hash and no event.
    """
    texts = (
        *(row.stream, row.event_id, row.kind),
        *(row.private_digest, row.previous_hash, row.hash),
    )
    if (
        type(row.position) is type(row.seq) is type(row.version) is type(row.time_us) is int
        and type(row.public) is bytes
        and (row.private is None or type(row.private) is bytes)
        and all(type(text) is str and (text.isascii() or _is_unicode(text)) for text in texts)
    ):
        return None
    return next(filter(None, (column_fault(row, name) for name in _TYPES)))


def column_fault(row: Row, name: str) -> tuple[str, str, str] | None:
    """As ``type_fault``, of one column."""
    kind, what = _TYPES[name]
    value: Any = getattr(row, name)
    if isinstance(value, kind) and not (isinstance(value, str) and not _is_unicode(value)):
        return None
    if value is None and name == "private":
        return None
    return f"the column `{name}` is not {what}", what, shown(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """A stored value for people, whatever its type; a text of Unicode is itself."""
    return value if isinstance(value, str) and _is_unicode(value) else ascii(value)


def misplaced(row: Row, after: int) -> tuple[str, str, str] | None:
    """
    How a row stands where none can be (INV-8): (fact, expected, actual), or None.

    Args:
        after: the position of the base; 0 without one.
    """
    if type(row.position) is not int or row.position > after:
        return None
    fact = "the row is at a position where none can be"
    return fact, f"a position above {after}", str(row.position)


def chain_fault(
    row: Row, previous_hash: str, previous_position: int | None = None
) -> tuple[str, str, str] | None:
    """
    How a row breaks the chain (INV-8): (fact, expected, actual), or None if it does not.

    Args:
        previous_position: with it, the fact names the rows that are missing before this one.
    """
    if (odd := type_fault(row)) is not None:
        return odd
    if row.previous_hash != previous_hash:
        fact = "the row is not chained to the one before"
        last = row.position - 1
        if previous_position is not None and previous_position < last:
            first = previous_position + 1
            fact = f"row {last} is missing before it"
            if first < last:
                fact = f"rows {first} to {last} are missing before it"
        return fact, previous_hash, row.previous_hash
    if row.private is not None:
        digest = hashlib.sha256(row.private).hexdigest()
        if digest != row.private_digest:
            return "the private payload was changed", row.private_digest, digest
    try:
        due = row_hash(row)
    except OverflowError:
        return "the row was changed", "numbers in their range", "a number out of range"
    if row.hash != due:
        return "the row was changed", due, row.hash
    return None


def unique(pairs: list[tuple[str, object]]) -> Payload:
    """
    An object of JSON.

    Raises:
        ValueError: a key is there twice: which of the values counts depends on who reads it.
    """
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key `{name}` is there twice")
    return dict(pairs)


def _canonical(stored: bytes, names: set[str] | None) -> Payload:
    """
    The fields of a stored text, which is as ``encode`` writes it: no field is there twice, none is
    missing, and none is unknown.

    Args:
        names: the fields; None if another version had others.

    Raises:
        msgspec.MsgspecError, ValueError: it is not.
    """
    payload = msgspec.json.decode(stored, type=Payload)
    if _encoder.encode(payload) != stored:
        json.loads(stored, object_pairs_hook=unique)
        raise ValueError("it is not in the form in which rows are written")
    if names is not None and payload.keys() != names:
        other = ", ".join(sorted(payload.keys() ^ names))
        raise ValueError(f"fields that are missing, or that its kind does not have: {other}")
    return payload


def decode(row: Row) -> ev.Recorded:
    """
    The event of a row, brought up to the current version. If its private payload is sealed and was
    not opened, placeholders take the place of the private fields, and ``unread`` says so.

    Raises:
        UnknownEvent: the kind or version is newer than this Cairn.
        DamagedRow: the payload does not make an event, or its private part was left out.
    """
    if (odd := type_fault(row)) is not None:
        raise DamagedRow(row.position if type(row.position) is int else 0, f"{odd[0]}: {odd[2]}")
    event_type = KINDS.get(row.kind)
    if event_type is None or row.version > event_type.version:
        raise UnknownEvent(
            f"row {row.position} is {row.kind} version {row.version}, which this Cairn does not "
            "know; use the version that wrote the journal, or a newer one"
        )
    try:
        current = row.version == event_type.version
        payload = _canonical(row.public, _PUBLIC[row.kind] if current else None)
        unread = key_id(row.private) if row.opened is None else None
        if row.opened == b"":
            raise ValueError("its private payload is not what its key sealed")
        if unread is not None:
            payload |= _EMPTY[row.kind]
        elif (private := row.opened or row.private) is not None:
            payload |= _canonical(private, _HIDDEN[row.kind] if current else None)
        for version in range(row.version, event_type.version):
            payload = UPCASTS[row.kind, version](payload)
        event = msgspec.convert(payload, event_type)
        if isinstance(event, ev.RequestReceived | ev.PrewarmStarted):
            event = attrs.evolve(event, new_ids=shared(event.new_ids))
        if unread is not None:
            event = filled(event, row.position)
    except (
        *(msgspec.MsgspecError, LookupError, ValueError),
        *(TypeError, AttributeError, RecursionError),
    ) as error:
        raise DamagedRow(row.position, f"{row.kind} cannot be decoded: {error}") from error
    return ev.Recorded(
        position=row.position,
        stream=row.stream,
        seq=row.seq,
        event_id=row.event_id,
        time_us=row.time_us,
        event=event,
        unread=unread,
    )
