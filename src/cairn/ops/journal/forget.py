"""
Removes the block files that only pruned or forgotten conversations had: the KV of their blocks.

A block may belong to many conversations. Its file stays as long as a row that is left names it
(``cairn.journal.pruning.orphaned_blocks``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from cairn.actors.clock import clock
from cairn.engine.block_folder import Named, files_in, place_of, run_of
from cairn.journal.errors import StoreError
from cairn.journal.pruning import files_removed, orphaned_blocks
from cairn.journal.replay import Report
from cairn.journal.state import Block
from cairn.ops.cli import Unreadable
from cairn.ops.common.output import counted, progress
from cairn.ops.serve.data_dir import hold_directory

if TYPE_CHECKING:
    from cairn.journal.rows.store_sql import SqlStore


def forget_files(
    store: SqlStore, data_dir: Path, runs: Collection[str], blocks: Path | None = None
) -> None:
    """
    Remove the block files that only pruned conversations had, and record that. The caller holds the
    journal's lock. Files that an earlier prune left are removed too.

    Files are removed first: if this is interrupted, the next prune or start finds that they are
    missing. None is removed while a server uses the directory, because one with another journal may
    need them.

    Args:
        data_dir: the data directory, with the folder of blocks.
        runs: the server's runs that are in the journal, or were before the prune.
        blocks: the folder of blocks, if it is not there.

    Raises:
        StoreError: the journal cannot be read or written.
    """
    base = store.base()
    if base is None:
        return
    left = store.head()[0] - base.position
    report, orphans = orphaned_blocks(progress(store.read(), "block files", left), base)
    remove_files(store, data_dir, runs, report, orphans, who="journal prune", blocks=blocks)


def require_place(node: str | None, shared: bool | None, blocks: Path | None) -> None:
    """
    Refuse to look for a node's block files where they are not, because those that are not found
    would count as removed.

    Args:
        node: whose journal it is; None if it is not that of a node.
        shared: where the node's last run kept them, see ``Runs``.
        blocks: the folder that the operator names; None for the data directory.

    Raises:
        StoreError: that is another place, or not on record.
    """
    if node is None or shared == (blocks is not None):
        return
    if shared:
        raise StoreError(
            f"Node {node} keeps its blocks in a folder that other nodes see. Nothing was "
            "changed. Add --blocks DIR, with the folder that it was started with."
        )
    if shared is None:
        raise StoreError(
            f"No row says where node {node} keeps its blocks, because its last start was "
            "pruned. Nothing was changed. Start it, stop it, and run the same command again."
        )
    raise StoreError(
        f"Node {node} keeps its blocks in its data directory. Nothing was changed. Omit "
        "--blocks, and name that directory with --data-dir."
    )


def remove_files(
    store: SqlStore,
    data_dir: Path,
    runs: Collection[str],
    report: Report,
    orphans: Mapping[str, Block],
    *,
    who: str,
    blocks: Path | None = None,
) -> bool:
    """
    Remove the files of blocks, and record that. See ``forget_files``.

    Args:
        report: the replay up to the head.
        orphans: the blocks.
        who: this command.
        blocks: the folder of blocks, if it is not in the data directory.

    Returns:
        Whether no file of them is left that a server could use. A file that is not in a folder
        which nodes share counts as left: it may be in another one.
    """
    if not orphans:
        return True
    filed = {key for key, block in orphans.items() if block.file_bytes is not None}
    folder = blocks or data_dir / "blocks"
    removal = _Removal(why="it does not exist")
    if folder.is_dir():
        try:
            with hold_directory(data_dir, "and run the same command again", who=who):
                removal = _removed(folder, orphans, runs, is_shared=blocks is not None)
        except Unreadable as error:
            if filed:
                click.echo(f"{counted(len(filed), 'block file')} not removed. {error}", err=True)
            return not filed
    rows = files_removed(report, orphans, removal.gone, clock())
    if rows:
        store.append(rows)
        click.echo(f"{counted(len(rows), 'block file')} removed")
    _report(removal, len(filed - removal.gone), folder, is_shared=blocks is not None)
    return filed <= removal.gone


@attrs.frozen(kw_only=True)
class _Removal:
    """
    The result of removing files.

    Attributes:
        gone: the blocks on record that have no file any more.
        absent: how many of them had none before.
        foreign: how many files of the same blocks were left, because runs of another journal wrote
            them.
        why: the system's message if a file could not be removed.
    """

    gone: frozenset[str] = frozenset()
    absent: int = 0
    foreign: int = 0
    why: str | None = None


def _report(removal: _Removal, stuck: int, folder: Path, *, is_shared: bool) -> None:
    """
    Print what was not as expected.

    Args:
        stuck: how many blocks on record still have a file, as far as is known.
    """
    if removal.absent:
        were = counted(removal.absent, "of them was", "of them were")
        click.echo(
            f"{were} missing from {folder} already. If the server uses another --data-dir, look "
            "there.",
            err=True,
        )
    if removal.foreign:
        files = counted(removal.foreign, "file", "files")
        click.echo(
            f"{files} of the same blocks, set aside or incomplete, left in {folder}: no run in "
            "this journal wrote them, so they may belong to another journal. If they do not, "
            "remove them yourself.",
            err=True,
        )
    if stuck:
        why = removal.why or "another file is in the way"
        other, cure = "server uses another --data-dir", "fix the cause"
        if is_shared:
            other = "node uses another --blocks"
            cure = "fix the cause, or start the node once to have missing files recorded,"
        click.echo(
            f"{counted(stuck, 'block file')} not removed from {folder} ({why}). If the {other}, "
            f"run the same command with it; otherwise {cure} and run it again.",
            err=True,
        )


def _removed(
    folder: Path, orphans: Mapping[str, Block], runs: Collection[str], *, is_shared: bool
) -> _Removal:
    """Remove the files of blocks, including files that were set aside or are incomplete."""
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
            one.path.parent.rmdir()  # only if it is empty
    absent = {
        key
        for key, block in orphans.items()
        if block.file_bytes is not None and key not in gone and _is_absent(folder, key)
    }
    if is_shared:
        why, absent = why or ("they are not there" if absent else None), set()
    return _Removal(gone=frozenset(gone | absent), absent=len(absent), foreign=foreign, why=why)


def _is_ours(one: Named, block: Block, runs: Collection[str]) -> bool:
    """
    Whether a file belongs to this journal, by the rule of ``engine.mlx.block_files``. A block's
    file that is not on record is left alone.
    """
    match one.kind:
        case "block":
            return block.file_bytes is not None
        case "draft":
            return one.run in runs
        case "aside":
            # If the part that names its run is damaged, the key decides.
            return run_of(one.path, one.fingerprint, one.key) in (None, *runs)


def _is_absent(folder: Path, key: str) -> bool:
    """
    Whether a block has no file under any fingerprint. False if that cannot be determined.
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
