"""
What of a pruned conversation lies clock the journal: the KV of its blocks, in files.

A block may be that of many conversations. Its file stays as long as a row that is left names it.
All rows of a session that is open are left, so that they name what it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from cairn.actors.clock import clock
from cairn.engine.block_folder import Named, files_in, place_of, run_of
from cairn.journal import events as ev
from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Ledger
from cairn.journal.replay import Replay
from cairn.journal.state import Block
from cairn.ops.cli import Unreadable
from cairn.ops.common.output import counted, progress
from cairn.ops.serve.data_dir import hold_directory

if TYPE_CHECKING:
    from cairn.journal.store_sql import SqlStore

_FILE = "block file of what was removed is"
_FILES = "block files of what was removed are"


def forget_files(store: SqlStore, data_dir: Path, runs: Collection[str]) -> None:
    """
    Remove the block files that only pruned conversations had, and put that on record. For who holds
    the journal. What an earlier prune left is removed too.

    Files go first: should this end in between, the next prune or start finds that they are missing.
    They go only while no server uses the directory: one with another journal may need them.

    Args:
        data_dir: the data directory, with the folder of blocks.
        runs: the runs of the server that the journal tells of, or told of before the prune.

    Raises:
        StoreError: the journal cannot be read, or what was removed cannot be put on record.
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
    orphans = {key: block for key, block in fold.state.blocks.items() if key not in kept}
    if not orphans:
        return
    filed = {key for key, block in orphans.items() if block.file_bytes is not None}
    folder = data_dir / "blocks"
    removal = _Removal(why="not there")
    if folder.is_dir():
        try:
            with hold_directory(data_dir, "and give the same command again", who="journal prune"):
                removal = _removed(folder, orphans, runs)
        except Unreadable as error:
            if filed:
                click.echo(f"{counted(len(filed), _FILE, _FILES)} not gone. {error}", err=True)
            return
    rows = _on_record(fold, [orphans[key] for key in sorted(removal.gone)])
    if rows:
        store.append(rows)
        click.echo(f"{counted(len(rows), _FILE, _FILES)} gone too")
    _tell(removal, len(filed - removal.gone), folder)


@attrs.frozen(kw_only=True)
class _Removal:
    """
    What became of files.

    Attributes:
        gone: the blocks on record that have no file any more.
        absent: how many of them had none before.
        foreign: how many files of the same blocks were left, as another journal's runs wrote them.
        why: what the system said where one could not be removed.
    """

    gone: frozenset[str] = frozenset()
    absent: int = 0
    foreign: int = 0
    why: str | None = None


def _tell(removal: _Removal, stuck: int, folder: Path) -> None:
    """
    Say what is not as it should be.

    Args:
        stuck: how many blocks on record still have a file, as far as can be told.
    """
    if removal.absent:
        were = counted(removal.absent, "of them was", "of them were")
        click.echo(
            f"{were} not in {folder} before. If the server has another --data-dir, look there.",
            err=True,
        )
    if removal.foreign:
        files = counted(removal.foreign, "file", "files")
        click.echo(
            f"{files} of the same blocks, set aside or not finished, may be another journal's, and "
            f"stay in {folder}: no run on record wrote them. If they are not, remove them there.",
            err=True,
        )
    if stuck:
        why = removal.why or "something is in the way"
        click.echo(
            f"{counted(stuck, _FILE, _FILES)} not gone ({why}). "
            f"They were looked for in {folder}. If the server has another --data-dir, name that; "
            "else remove them there. The same command tries again.",
            err=True,
        )


def _keys_in(event: ev.Event) -> Iterator[str]:
    """
    The blocks that a conversation has, as far as this event tells: those of its prompts, and those
    of answers and of what it prewarms, whose keys no prompt may ever have had. What it shares is
    of one of these.
    """
    match event:
        case ev.RequestReceived() | ev.PrewarmStarted():
            yield from event.new_keys
        case ev.BlockSealed():
            yield event.key
        case _:
            pass


def _removed(folder: Path, orphans: Mapping[str, Block], runs: Collection[str]) -> _Removal:
    """Remove the files of blocks, and of those too that were set aside or never finished."""
    gone: set[str] = set()
    foreign, why = 0, None
    named, _ = files_in(folder)
    for one in named:
        if one.key not in orphans:
            continue
        if not _is_ours(one, orphans[one.key], runs):
            foreign += one.kind != "block"
            continue
        try:
            one.path.unlink()
        except OSError as error:
            why = error.strerror
            continue
        if one.kind == "block":
            gone.add(one.key)
        with contextlib.suppress(OSError):
            one.path.parent.rmdir()  # only where it is empty
    absent = {
        key
        for key, block in orphans.items()
        if block.file_bytes is not None and key not in gone and _is_absent(folder, key)
    }
    return _Removal(gone=frozenset(gone | absent), absent=len(absent), foreign=foreign, why=why)


def _is_ours(one: Named, block: Block, runs: Collection[str]) -> bool:
    """
    Whether a file is this journal's. See ``mlx_files``, whose rule this is; but nobody is asked
    about a block's file that no record tells of.
    """
    match one.kind:
        case "block":
            return block.file_bytes is not None
        case "draft":
            return one.run in runs
        case "aside":
            # One that is damaged where it says who wrote it goes by its key.
            return run_of(one.path, one.fingerprint, one.key) in (None, *runs)


def _is_absent(folder: Path, key: str) -> bool:
    """
    Whether nothing is at a block's place, under any fingerprint. What cannot be told is not so.
    """
    try:
        for above in folder.iterdir():
            try:
                place_of(folder, above.name, key).lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            return False
    except OSError:
        return False
    return True


def _on_record(fold: Replay, blocks: list[Block]) -> tuple[Row, ...]:
    """The rows that say that files are gone."""
    state = fold.state
    count, size = state.pool.disk_blocks, state.pool.disk_bytes
    dropped = []
    for block in blocks:
        count, size = count - 1, size - (block.file_bytes or 0)
        dropped.append(
            ev.BlockFileRemoved(
                key=block.key,
                bytes=block.file_bytes or 0,
                disk_blocks=count,
                disk_bytes=size,
                reason="space",
            )
        )
    outcome = Ledger(clock(), state=state, head=fold.report().head).propose(dropped)
    if outcome.bug is not None:
        raise StoreError(f"Block files are gone that could not be put on record: {outcome.bug}.")
    return outcome.rows
