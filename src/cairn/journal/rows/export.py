"""
Converts rows to lines of JSON and back, byte for byte: a journal that can be copied, searched and
verified.

There is one event per line. ``payload`` and ``private`` are the stored texts, unchanged, because
the hashes cover their bytes. If the payload of a row is not a JSON object (it was damaged), its
bytes are written as a base64 string, so the export of a damaged journal is damaged in the same way.

If the first rows were pruned, the first line is the base that replaces them. It is recognized by
its field ``base``, the version of this format. A base cannot start the rows of one session. They
begin with a line, recognized by its field ``excerpt``, that names the base and the number of the
session's rows that were pruned. Without it, pruned rows and lost rows would look the same.

The last line, recognized by its field ``checkpoint``, has the public half of the key that signs the
journal's checkpoints, and the last of these.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import attrs
import msgspec

from cairn.journal.errors import StoreError
from cairn.journal.rows.base import Base
from cairn.journal.rows.codec import COLUMNS, Row, column_fault, type_fault, unique

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


_Odd = tuple[Literal["integer", "real", "text", "blob", "null"], str]
"""
A value of another type than its column has: the type by SQLite's name, and base64 of the bytes of a
blob or text, or of a number's digits.
"""


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    position: int | _Odd
    stream: str | _Odd
    seq: int | _Odd
    event_id: str | _Odd
    kind: str | _Odd
    version: int | _Odd
    time: str | int | _Odd
    hash: str | _Odd
    previous_hash: str | _Odd
    private_digest: str | _Odd
    payload: msgspec.Raw
    private: msgspec.Raw


class _BaseLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    base: Literal[1]
    position: int
    head: str
    state_digest: str
    state: msgspec.Raw


class _ExcerptLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    excerpt: Literal[1]
    stream: str
    seq: int
    position: int
    head: str
    state_digest: str


class _CheckpointLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    checkpoint: Literal[1]
    public_key: str
    note: str


@attrs.frozen(kw_only=True)
class SignedEnd:
    """
    The last line of an export: what its journal's key has signed.

    Attributes:
        public_key: the public half of the key, as text.
        note: the last checkpoint of a row up to the end of the export; empty if there is none.
    """

    public_key: str
    note: str


@attrs.frozen(kw_only=True)
class Excerpt:
    """
    The first line of one session's rows from a journal that was pruned.

    Attributes:
        seq: how many rows of the stream were pruned.
        base: the journal's base, without its state.
    """

    stream: str
    seq: int
    base: Base


First = TypeVar("First")
"""What a first line can be."""

Read = TypeVar("Read")
"""What a line can be."""

LINE_FIELDS = _Line.__struct_fields__
"""The fields of a row's line."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Line)
_base_decoder = msgspec.json.Decoder(_BaseLine)
_excerpt_decoder = msgspec.json.Decoder(_ExcerptLine)
_checkpoint_decoder = msgspec.json.Decoder(_CheckpointLine)
_CHECKPOINT_BEGINS = b'{"checkpoint":'
_CHECKPOINT_BYTES = 64 * 1024  # more than such a line has
_BASE_BEGINS = b'{"base":'
_EXCERPT_BEGINS = b'{"excerpt":'
_NULL = msgspec.Raw(b"null")


def to_line(row: Row) -> bytes:
    """The line of a row, with its line feed. Changes nothing."""
    if type_fault(row) is not None:
        row = _with_odd(row)
    line = _Line(
        position=row.position,
        stream=row.stream,
        seq=row.seq,
        event_id=row.event_id,
        kind=row.kind,
        version=row.version,
        time=_time(row.time_us) if type(row.time_us) is int else row.time_us,
        hash=row.hash,
        previous_hash=row.previous_hash,
        private_digest=row.private_digest,
        payload=_embedded(row.public),
        private=_embedded(row.private) if row.private is not None else _NULL,
    )
    return _encoder.encode(line) + b"\n"


def from_line(line: bytes) -> Row:
    """
    The row of a line, byte for byte as it was stored.

    Raises:
        ValueError: the line is not a line of an export.
    """
    read = _read(_decoder, line)
    if bytes(read.payload) == b"null":
        raise ValueError("the payload is missing")
    return Row(
        position=_plain(read.position),
        stream=_plain(read.stream),
        seq=_plain(read.seq),
        event_id=_plain(read.event_id),
        kind=_plain(read.kind),
        version=_plain(read.version),
        time_us=_time_us(read.time),
        public=_stored(read.payload),
        private=_stored(read.private),
        private_digest=_plain(read.private_digest),
        previous_hash=_plain(read.previous_hash),
        hash=_plain(read.hash),
    )


def base_to_line(base: Base) -> bytes:
    """The line of a base, with its line feed. Changes nothing."""
    line = _BaseLine(
        base=1,
        position=base.position,
        head=base.head,
        state_digest=base.state_digest,
        state=_embedded(base.state) if base.state is not None else _NULL,
    )
    return _encoder.encode(line) + b"\n"


def base_from_line(line: bytes) -> Base:
    """
    The base of a line, byte for byte as it was stored.

    Raises:
        ValueError: the line is not a base.
    """
    read = _read(_base_decoder, line)
    return Base(
        position=read.position,
        head=read.head,
        state=_stored(read.state),
        state_digest=read.state_digest,
    )


def excerpt_to_line(excerpt: Excerpt) -> bytes:
    """The first line of an excerpt, with its line feed. Changes nothing."""
    line = _ExcerptLine(
        excerpt=1,
        stream=excerpt.stream,
        seq=excerpt.seq,
        position=excerpt.base.position,
        head=excerpt.base.head,
        state_digest=excerpt.base.state_digest,
    )
    return _encoder.encode(line) + b"\n"


def excerpt_from_line(line: bytes) -> Excerpt:
    """
    The excerpt of a first line.

    Raises:
        ValueError: the line does not begin an excerpt.
    """
    read = _read(_excerpt_decoder, line)
    return Excerpt(
        stream=read.stream,
        seq=read.seq,
        base=Base(
            position=read.position, head=read.head, state=None, state_digest=read.state_digest
        ),
    )


def checkpoint_to_line(end: SignedEnd) -> bytes:
    """The last line of an export, with its line feed. Changes nothing."""
    line = _CheckpointLine(checkpoint=1, public_key=end.public_key, note=end.note)
    return _encoder.encode(line) + b"\n"


def read_checkpoint(path: Path) -> SignedEnd | None:
    """
    What the last line of an export says about checkpoints; None if it is a row.

    Raises:
        StoreError: the file cannot be read, or the line is damaged.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _CHECKPOINT_BYTES))
            line = file.read().rstrip(b"\n").rpartition(b"\n")[2] + b"\n"
        if not line.startswith(_CHECKPOINT_BEGINS):
            return None
        read = _read(_checkpoint_decoder, line)
        return SignedEnd(public_key=read.public_key, note=read.note)
    except ValueError as error:
        raise StoreError(f"{path}: its last line is not a checkpoint: {error}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def read_base(path: Path) -> Base | None:
    """
    The base that an export begins with, or None if it begins with a row.

    Raises:
        StoreError: the file cannot be read, or its first line is an invalid base.
    """
    return _read_first(path, _BASE_BEGINS, base_from_line, "a base of a journal")


def read_excerpt(path: Path) -> Excerpt | None:
    """
    The excerpt that one session's rows begin with if the journal was pruned; else None.

    Raises:
        StoreError: the file cannot be read, or its first line is invalid.
    """
    return _read_first(path, _EXCERPT_BEGINS, excerpt_from_line, "the beginning of an excerpt")


def _read_first(
    path: Path, begins: bytes, decode: Callable[[bytes], First], what: str
) -> First | None:
    try:
        with path.open("rb") as file:
            line = file.readline()
            return decode(line) if line.startswith(begins) else None
    except ValueError as error:
        raise StoreError(f"{path}, line 1, is not {what}: {error}.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def read_export(path: Path) -> Iterator[Row]:
    """
    The rows of an export, in the order of its lines, without a base or excerpt before them.

    Raises:
        StoreError: the file cannot be read, or a line of it is not a row; the message names the
            line.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and line.startswith((_BASE_BEGINS, _EXCERPT_BEGINS)):
                    continue
                if line.startswith(_CHECKPOINT_BEGINS) and not file.read(1):
                    return
                try:
                    yield from_line(line)
                except ValueError as error:
                    raise StoreError(
                        f"{path}, line {number}, is not a row of an export: {error}. "
                        "`ops export` writes such files."
                    ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def require_complete(rows: Iterable[Row], base: Base | None) -> Iterator[Row]:
    """
    The rows, if none of them and none of their contents were left out of an export.

    Raises:
        StoreError: something is missing, so the events cannot be folded.
    """
    left_out = "Texts and token ids were left out of this export"
    if base is not None and base.state is None:
        raise StoreError(
            f"{left_out}, and with them the base that it begins with. Export the journal without "
            "--no-private."
        )
    for count, row in enumerate(rows):
        readable = type_fault(row) is None
        excerpt = readable and row.position > 1 and row.stream.startswith("session/")
        if count == 0 and base is None and excerpt:
            raise StoreError(
                "This export has only one session's rows, and the server's decisions depended on "
                "the others too. Export the journal without --session."
            )
        if row.private is None and row.private_digest:
            raise StoreError(f"{left_out}. Export the journal without --no-private.")
        yield row


def _read(decoder: msgspec.json.Decoder[Read], line: bytes) -> Read:
    """
    Decode a line.

    Raises:
        ValueError: it does not have these fields, or has a key twice: which of the values counts
            depends on who reads it.
    """
    try:
        read = decoder.decode(line)
        # As Cairn writes it, it has no key twice, and does not have to be looked at again.
        if line.rstrip(b"\n") != _encoder.encode(read):
            json.loads(line, object_pairs_hook=unique)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return read


def _with_odd(row: Row) -> Any:
    """A row in which each value of another type is as its line has it."""
    fields = {
        name: value if column_fault(row, name) is None else _odd(value)
        for name, value in ((name, getattr(row, name)) for name in COLUMNS)
    }
    return SimpleNamespace(**fields)


def _odd(value: object) -> _Odd:
    match value:
        case None:
            return "null", ""
        case str():
            return "text", _base64(value.encode(errors="surrogateescape"))
        case bytes():
            return "blob", _base64(value)
        case int():
            return "integer", _base64(str(value).encode())
        case _:
            return "real", _base64(repr(value).encode())


def _plain(value: Any) -> Any:
    """The value of a field; what ``_odd`` made is converted back."""
    if not isinstance(value, tuple):
        return value
    kind, encoded = value
    stored = base64.b64decode(encoded, validate=True)
    match kind:
        case "null":
            return None
        case "text":
            return stored.decode(errors="surrogateescape")
        case "blob":
            return stored
        case "integer":
            return int(stored)
        case _:
            return float(stored)


def _base64(stored: bytes) -> str:
    return base64.b64encode(stored).decode()


def _time(time_us: int) -> str | int:
    """Format in ISO 8601 in UTC with microseconds; a time outside the calendar stays a number."""
    try:
        moment = _EPOCH + time_us * _MICROSECOND
    except OverflowError:
        return time_us
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _time_us(time: str | int | _Odd) -> Any:
    if not isinstance(time, str):
        return _plain(time)
    moment = datetime.fromisoformat(time)
    if moment.tzinfo is None:
        raise ValueError(f"the time {time} has no zone")
    time_us = (moment - _EPOCH) // _MICROSECOND
    if _time(time_us) != time:
        raise ValueError(f"the time {time} is not written as an export writes it")
    return time_us


def _embedded(stored: bytes | _Odd) -> msgspec.Raw:
    if isinstance(stored, tuple):
        return msgspec.Raw(_encoder.encode(stored))
    if stored[:1] == b"{" and stored[-1:] == b"}" and b"\n" not in stored:
        try:
            stored.decode()
            msgspec.json.decode(stored, type=dict[str, msgspec.Raw])
            return msgspec.Raw(stored)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    return msgspec.Raw(_encoder.encode(base64.b64encode(stored).decode()))


def _stored(embedded: msgspec.Raw) -> Any:
    text = bytes(embedded)
    if text == b"null":
        return None
    if text[:1] == b"{":
        return text
    try:
        if text[:1] == b"[":
            return _plain(msgspec.json.decode(text, type=_Odd))
        return base64.b64decode(msgspec.json.decode(text, type=str), validate=True)
    except (msgspec.MsgspecError, binascii.Error) as error:
        raise ValueError(f"a payload is neither an object nor base64: {error}") from error
