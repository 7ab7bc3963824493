"""
Reads the journal when a server starts: all of it, or the rows after a snapshot.

It runs on a thread of its own, so that the server can answer and be stopped meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import structlog

from cairn.actors.clock import clock
from cairn.actors.journal_keys import JournalKeys
from cairn.actors.settings import JournalBroken, Progress, no_progress
from cairn.actors.snapshots import SnapshotFile
from cairn.journal.ledger import Ledger
from cairn.journal.replay import Replay
from cairn.journal.rows.snapshots import Folds, Snapshot
from cairn.journal.rows.store import Store

log = structlog.get_logger("cairn")


@attrs.frozen(kw_only=True)
class JournalStart:
    """
    A journal that was read.

    Attributes:
        snapshot: the position of the snapshot from which it was read; 0 if there was none.
    """

    ledger: Ledger
    folds: Folds
    snapshot: int


def start_journal(
    store: Store,
    file: SnapshotFile | None,
    progress: Progress,
    check: Callable[[], None],
    keys: JournalKeys | None = None,
) -> JournalStart:
    """
    Read the journal, from a snapshot if there is one to use. Runs on any thread.

    Args:
        file: with the snapshot; None to fold the whole.
        check: called again and again; what it raises ends the reading.
        keys: see ``Settings``. Those of forgotten sessions are removed, if that was not finished.

    Raises:
        JournalBroken: it violates an invariant, so nothing may be built on it, or keys are missing.
    """
    begins = file.read(store, check) if file is not None else None
    folds = Folds(begins, store.base() if begins is None else None)
    fold = read_journal(store, progress, begins=begins, folds=folds, check=check)
    _require_keys(fold)
    if keys is not None:
        keys.confirm()
        # Also those of a snapshot: it may be of a row after `session_forgotten` and before the keys
        # went.
        for session, key_ids in folds.forgotten.items():
            keys.remove(session, key_ids)
        folds.forgotten.clear()
        if fold.forgotten and file is not None and begins is not None:
            file.remove()  # it is of a row before that, and has texts of the session
    outside = attrs.evolve(clock(), key_of=keys.key_of if keys is not None else None)
    ledger = Ledger(outside, state=fold.state, head=fold.report().head)
    _ = ledger.order  # computed now, on this thread
    return JournalStart(
        ledger=ledger, folds=folds, snapshot=begins.place.position if begins is not None else 0
    )


def _require_keys(fold: Replay) -> None:
    """Refuse a journal whose keys are not those that are here, so that no texts are missed."""
    missing = fold.report().not_checked.no_key
    if missing:
        raise JournalBroken(
            f"the texts of {missing} rows cannot be read: their keys are missing, and no row says "
            "that they were forgotten. The journal was not changed. Restore `keys.db` "
            "(of a node: its database) and `journal-key` from a backup, or start with a different "
            "--data-dir."
        )


def read_journal(
    store: Store,
    progress: Progress = no_progress,
    *,
    begins: Snapshot | None = None,
    folds: Folds | None = None,
    check: Callable[[], None] = lambda: None,
) -> Replay:
    """
    Fold and check a journal, without changing it.

    Args:
        begins: a snapshot of it; only the rows after that are read.
        folds: get each event.
        check: as for ``start_journal``.

    Raises:
        JournalBroken: it violates an invariant, so nothing may be built on it.
    """
    fold, total = Replay(store.base(), begins), store.head()[0]
    for row in store.read(begins.place.position if begins is not None else None):
        check()
        recorded = fold.feed(row)
        if folds is not None and recorded is not None:
            folds.see(recorded)
        if row.position % 1000 == 0 or row.position == total:
            progress("reading the journal", row.position, total)
    news = [found for found in fold.report().findings if not found.recorded]
    if news:
        first = news[0]
        log.error(
            "the journal failed verification",
            bug_id=first.bug_id,
            invariant=first.invariant,
            row=first.position,
            fact=first.message,
        )
        raise JournalBroken(
            f"the journal failed verification: {first.invariant} at row {first.position} "
            f"({first.message}), bug id {first.bug_id}. Nothing was changed. To continue "
            "without it, keep the file for the record and start with a different --data-dir."
        )
    return fold
