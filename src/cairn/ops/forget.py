"""
What of a pruned conversation lies outside the journal: the KV of its blocks, in files.

A block may be that of many conversations. Its file stays as long as a row that is left names it, or
an open session: who has its key there needs it.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

import cairn
from cairn.engine.block_folder import files_in
from cairn.journal import events as ev
from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Ledger, Outside
from cairn.journal.replay import Replay
from cairn.journal.state import Block, State
from cairn.ops.output import progress

if TYPE_CHECKING:
    from cairn.journal.store_sql import SqlStore


def forget_files(store: SqlStore, folder: Path) -> None:
    """
    Remove the block files that only pruned conversations had, and put that on record. For who holds
    the journal. What an earlier prune left is removed too.

    Files go first: should this end in between, the next start finds that they are missing.

    Args:
        folder: the folder of blocks.
    """
    base = store.base()
    if base is None:
        return
    fold, kept = Replay(base), set[str]()
    left = store.head()[0] - base.position
    for row in progress(store.read(), "block files", left):
        recorded = fold.feed(row)
        if recorded is not None:
            kept.update(_keys_in(recorded.event))
    kept.update(_keys_of(fold.state))
    orphans = {key: block for key, block in fold.state.blocks.items() if key not in kept}
    if not orphans:
        return
    gone, why = _removed(folder, orphans)
    rows = _on_record(fold, [orphans[key] for key in sorted(gone)])
    if rows:
        store.append(rows)
        click.echo(f"{_files(len(rows))} of what was removed {_are(len(rows))} gone too")
    stuck = sum(one.file_bytes is not None and key not in gone for key, one in orphans.items())
    if stuck:
        click.echo(
            f"{_files(stuck)} of what was removed {_are(stuck)} not gone ({why or 'not there'}). "
            f"They were looked for in {folder}. If the server has another --data-dir, name that; "
            "else remove them there. The same command tries again.",
            err=True,
        )


def _keys_in(event: ev.Event) -> Iterator[str]:
    """
    The blocks that a conversation has, as far as this event tells.
    """
    match event:
        case ev.RequestReceived():
            yield from event.new_keys
        case ev.BlockSealed():
            yield event.key
        case ev.BlocksShared():
            yield from event.keys
        case _:
            pass


def _keys_of(state: State) -> Iterator[str]:
    """
    Those of the sessions that are open.
    """
    for session in state.sessions.values():
        yield from session.slab_keys
        if session.last is not None:
            yield from session.last.prompt_keys


def _removed(folder: Path, orphans: dict[str, Block]) -> tuple[set[str], str | None]:
    """
    Remove the files of blocks, those too that were set aside, never finished or never on record.

    Returns:
        The blocks on record whose files are gone, and what the system said where one could not be
        removed.
    """
    gone: set[str] = set()
    why = None
    named, _ = files_in(folder)
    for one in named:
        if one.key not in orphans:
            continue
        filed = orphans[one.key].file_bytes is not None
        if one.kind == "block" and not filed:
            continue  # another journal's, or nobody's: no record says that it was written
        try:
            one.path.unlink()
        except OSError as error:
            why = error.strerror
            continue
        if one.kind == "block":
            gone.add(one.key)
        with contextlib.suppress(OSError):
            one.path.parent.rmdir()  # only where it is empty
    return gone, why


def _on_record(fold: Replay, blocks: list[Block]) -> tuple[Row, ...]:
    """
    The rows that say that files are gone.
    """
    state = fold.state
    count, size = state.pool.disk_blocks, state.pool.disk_bytes
    dropped = []
    for block in blocks:
        count, size = count - 1, size - (block.file_bytes or 0)
        dropped.append(
            ev.BlockDropped(
                key=block.key, bytes=block.file_bytes or 0, disk_blocks=count, disk_bytes=size
            )
        )
    outside = Outside(
        new_id=lambda: str(uuid.uuid4()),
        now_us=lambda: time.time_ns() // 1000,
        version=cairn.__version__,
    )
    outcome = Ledger(outside, state=state, head=fold.report().head).propose(dropped)
    if outcome.bug is not None:
        raise StoreError(f"Block files are gone that could not be put on record: {outcome.bug}.")
    return outcome.rows


def _files(count: int) -> str:
    return f"{count} block file" if count == 1 else f"{count} block files"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
