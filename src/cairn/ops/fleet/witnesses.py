"""What the other nodes of a fleet saw of a node's journal, with which a start compares it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.fleet_audit import NAMING, Reference, references
from cairn.journal.rows.base import state_of
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database.fleet import nodes_of
from cairn.journal.rows.database.urls import fleet_url, node_of, node_url
from cairn.journal.rows.heads import Head
from cairn.journal.rows.store_sql import SqlStore


def seen_by_others(url: str, skipped: Callable[[str, str], None]) -> list[tuple[str, Head]]:
    """
    The last head of a node's journal that each other node has on record, but for heads whose loss
    an operator accepted. Changes nothing.

    Args:
        url: of the journal, which may be without tables; nothing is read if it is not a node's.
        skipped: called with another node whose journal cannot be read, and why.

    Returns:
        The names of nodes, and what they saw.

    Raises:
        StoreError: the database, or this journal, cannot be read.
    """
    node, database = node_of(url), fleet_url(url)
    if node is None:
        return []
    names, found = nodes_of(database), list[tuple[str, Head]]()
    for other in names:
        if other == node:
            continue
        try:
            last = _last(node_url(database, other), other, node)
        except StoreError as error:
            skipped(other, str(error))
            continue
        if last is not None:
            found.append((other, last.head))
    accepted = _accepted(url) if found and node in names else set()
    return [(other, head) for other, head in found if str(head) not in accepted]


def _last(url: str, by: str, node: str) -> Reference | None:
    """The last row of a node that another one names, since it saw a loss."""
    last: Reference | None = None
    with contextlib.closing(SqlStore.open(url, read_only=True)) as store:
        for one in references(by, store.base(), store.read(kinds=NAMING)):
            if one.node != node:
                continue
            begins = last is None or one.kind == ev.LossSeen.kind
            last = one if begins else max(last, one, key=lambda each: each.head.position)
    return last


def _accepted(url: str) -> set[str]:
    """The heads of a journal whose loss an operator accepted."""
    with contextlib.closing(SqlStore.open(url, read_only=True)) as store:
        base = store.base()
        accepted = set(state_of(base).lost) if base is not None else set[str]()
        for row in store.read(kinds=(ev.LossAccepted.kind,)):
            event = decode(row).event
            assert isinstance(event, ev.LossAccepted)
            accepted.update(event.heads)
    return accepted
