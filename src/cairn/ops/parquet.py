"""Writes the rows of a journal as a Parquet file with a manifest, for analysis by other tools."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cairn.journal.errors import StoreError
from cairn.journal.rows.codec import Row, shown, type_fault
from cairn.journal.rows.heads import Head
from cairn.journal.rows.sealing import key_id

BATCH_ROWS = 10_000
_READ_BYTES = 1024 * 1024


def write_parquet(file: BinaryIO, rows: Iterable[Row], head: Head) -> tuple[int, Head]:
    """
    Write rows as a Parquet file.

    Args:
        head: before the first row.

    Returns:
        How many rows were written, and the head of the last one.

    Raises:
        StoreError: pyarrow is not installed, or a row has a value that no server writes.
        OSError: the file cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise StoreError(
            f"--format parquet needs the package {error.name}; install the extra `parquet`."
        ) from error
    text, number, moment = pa.string(), pa.int64(), pa.timestamp("us", tz="UTC")
    schema = pa.schema(
        [
            ("position", number),
            ("stream", text),
            ("seq", number),
            ("event_id", text),
            ("kind", text),
            ("version", number),
            ("time", moment),
            ("hash", text),
            ("previous_hash", text),
            ("private_digest", text),
            ("payload", text),
            ("private", text),
        ]
    )
    count = 0
    left = iter(rows)
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        while batch := list(islice(left, BATCH_ROWS)):
            columns = list(zip(*map(_values, batch), strict=True))
            arrays = list(map(pa.array, columns, schema.types))
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            count += len(batch)
            head = Head(batch[-1].position, shown(batch[-1].hash))
    return count, head


def _values(row: Row) -> Iterator[object]:
    if (fault := type_fault(row)) is not None:
        raise StoreError(
            f"Row {row.position}: {fault[0]}, so it fits no table. Export it with --format jsonl."
        )
    yield from (row.position, row.stream, row.seq, row.event_id, row.kind, row.version)
    yield from (row.time_us, row.hash, row.previous_hash, row.private_digest)
    for stored in (row.public, row.private):
        if key_id(stored) is not None:
            assert stored is not None
            yield base64.b64encode(stored).decode()
            continue
        try:
            yield stored.decode() if stored is not None else None
        except UnicodeDecodeError as error:
            raise StoreError(
                f"Row {row.position}: a payload is not UTF-8, so it fits no table. Export it with "
                "--format jsonl."
            ) from error


def manifest_path(path: Path) -> Path:
    """The manifest of a Parquet file."""
    return path.with_name(f"{path.name}.manifest.json")


def manifest_of(path: Path, facts: Mapping[str, Any]) -> bytes:
    """
    The manifest of a Parquet file.

    Args:
        facts: about the journal.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    made = {"manifest": 1, "file": path.name, "sha256": digest.hexdigest(), **facts}
    return msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n"
