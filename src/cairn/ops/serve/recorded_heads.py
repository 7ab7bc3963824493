"""
What a server keeps of its journal's head outside of it, and the comparison with that at a start,
and with what the other nodes of a fleet saw of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from cairn.actors.threads.heads import HeadKeeper
from cairn.journal.errors import StoreError
from cairn.journal.events import LossAccepted
from cairn.journal.rows.database.schema import schema_revision
from cairn.journal.rows.heads import Head, lost_words
from cairn.journal.rows.signed_notes import Signer, last_of, signed_heads
from cairn.journal.rows.store import MemoryStore, Store
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.cli import Unreadable
from cairn.ops.common.heads import HeadFiles
from cairn.ops.fleet.witnesses import seen_by_others

_SEED_BYTES = 32
_ACCEPT = "To go on with what is there, start once with --accept-lost-rows; that is journaled."


def require_known_head(files: HeadFiles, url: str, *, accept: bool) -> LossAccepted | None:
    """
    Compare a journal with what was recorded of it outside. Changes nothing, and creates no journal.

    Args:
        accept: whether the operator accepts what is lost.

    Returns:
        What is lost and accepted, to be journaled; None if nothing is.

    Raises:
        Unreadable: rows are lost or others are in their place, or the record is damaged, and the
            operator has not accepted it.
    """
    try:
        lost = _lost(files, url)
    except StoreError as error:
        if not files.record.exists() or "head record" not in str(error):
            raise
        lost = str(error)
    gone = _gone_from_others(url)
    if lost is None and gone:
        node, _, words = gone[0]
        lost = f"The journal does not contain what node {node} saw of it: {words}."
    if lost is not None and not accept:
        raise Unreadable(
            f"{lost} Nothing was changed. Restore the journal, with the files whose names begin "
            f"like its own, or a backup of it. {_ACCEPT}"
        )
    return _accepted(files, url, lost, [head for _, head, _ in gone]) if accept else None


def _accepted(
    files: HeadFiles, url: str, lost: str | None, seen: Sequence[Head]
) -> LossAccepted | None:
    """
    What an operator accepts who starts with --accept-lost-rows.

    Args:
        lost: how the journal does not contain the last head that is known, in words; None if it
            does, so that only earlier checkpoints can be lost.
        seen: what other nodes saw of it and is lost.
    """
    heads = [*seen]
    with contextlib.suppress(StoreError):  # a damaged record names no head
        if (recorded := files.recorded_head()) is not None:
            heads.append(recorded)
    if (public := files.public_key()) is not None:
        with contextlib.suppress(StoreError):  # damaged checkpoints stay a finding of `ops verify`
            heads.extend(signed_heads(files.notes(), public, public.origin_of(files.tag)))
    with _opened(url) as store:
        gone = [str(head) for head in heads if lost_words(head, store) is not None]
    if lost is None and not gone:
        return None
    fact = lost or "The journal does not contain rows that were signed for."
    return LossAccepted(fact=fact, heads=tuple(dict.fromkeys(gone)))


def _lost(files: HeadFiles, url: str) -> str | None:
    known = files.recorded_head()
    what = f"the head record {files.record}"
    if known is None:
        known, what = _last_signed(files), f"the checkpoints {files.checkpoints}"
    if known is None:
        return None
    with _opened(url) as store:
        words = lost_words(known, store)
    if words is None:
        return None
    return f"The journal does not contain what {what} says: {words}."


def _gone_from_others(url: str) -> list[tuple[str, Head, str]]:
    """
    What other nodes of a fleet saw of a journal and is not in it: the node, the head, and how it is
    not. Heads whose loss was accepted are left out.
    """
    seen = seen_by_others(url, _warn_of)
    if not seen:
        return []
    with _opened(url) as store:
        return [
            (node, head, words)
            for node, head in seen
            if (words := lost_words(head, store)) is not None
        ]


def _warn_of(node: str, fact: str) -> None:
    words = f"Warning: What node {node} saw of this journal cannot be read: {fact}"
    click.echo(words, err=True)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[Store]:
    """A journal to read; an empty one if there is none."""
    if schema_revision(url) is None:
        yield MemoryStore()
        return
    with contextlib.closing(SqlStore.open(url, read_only=True)) as store:
        yield store


def _last_signed(files: HeadFiles) -> Head | None:
    public = files.public_key()
    if public is None:
        return None
    return last_of(files.notes(), public, public.origin_of(files.tag))


@contextlib.contextmanager
def head_keeper(
    files: HeadFiles, elsewhere: Path | None, accepted: LossAccepted | None
) -> Iterator[HeadKeeper]:
    """
    Keeps the head of the journal while the context lasts.

    Args:
        elsewhere: another file that the operator wants the checkpoints in.
        accepted: the loss of rows that the operator has accepted.

    Raises:
        Unreadable: a file cannot be written, or the key is damaged.
    """
    signer = Signer(_seed(files), files.tag)
    _write(files.public, f"{signer.public}\n".encode())
    paths = [files.checkpoints, *([elsewhere] if elsewhere is not None else [])]
    try:
        keeper = HeadKeeper(files.record, paths, signer, accepted)
    except OSError as error:
        raise Unreadable(
            f"{error.filename or files.record} cannot be written: {error.strerror}. Checkpoints of "
            "the journal are appended there; check who owns it, or choose another with "
            "--checkpoints."
        ) from error
    with contextlib.closing(keeper):
        yield keeper


def _seed(files: HeadFiles) -> bytes:
    """The private half of the key; made at first use, readable by its owner alone."""
    if not files.key.exists():
        _write(files.key, secrets.token_bytes(_SEED_BYTES))
    try:
        seed = files.key.read_bytes()
    except OSError as error:
        raise Unreadable(f"{files.key} cannot be read: {error.strerror}.") from error
    if len(seed) != _SEED_BYTES:
        raise Unreadable(
            f"{files.key} is damaged: it has {len(seed)} bytes instead of {_SEED_BYTES}. Restore "
            "it from a backup. If there is none, remove it: a new key is made, and its public half "
            "has to be given to all who verify checkpoints."
        )
    return seed


def _write(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    draft = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        raise Unreadable(
            f"{path} cannot be written: {error.strerror}. Check the free space on its disk, and "
            "who owns the directory."
        ) from error
