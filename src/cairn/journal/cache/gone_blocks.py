"""
Which blocks leave the state when the journal is pruned: those that are gone everywhere.

A block stays in the state when it has left memory and disk, because a key has one digest for ever
(INV-3). That would be some 500 bytes for each block that was ever sealed. So ``journal_pruned``
removes the blocks that nothing can lead to any more. If one of them is computed again, it is a new
block, and its digest is not compared with the one from before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs
from immutables import Map

if TYPE_CHECKING:  # the state imports this module
    from cairn.journal.state import Block, Session, State, Use


def without_gone(state: State) -> State:
    """
    The state without the blocks that are neither in memory nor in a file nor quarantined, that no
    open session has, and on which no remaining block is built. Their last uses become uses of the
    block that they were built on, so that it and those before it are evicted when they would have
    been.
    """
    blocks = state.blocks
    needed = set(_needed(state))
    kept: set[str] = set()
    for key, block in blocks.items():
        if block.there or block.bug_id is not None or key in needed:
            kept.update(_up_from(blocks, key, kept))
    gone = [key for key in blocks if key not in kept]
    uses = _moved(state.uses, blocks, kept, needed)
    with blocks.mutate() as left:
        for key in gone:
            del left[key]
        blocks = left.finish()
    children = state.children
    for name, after in children.items():
        there = tuple(key for key in after if key in kept)
        if not there:
            children = children.delete(name)
        elif there != after:
            children = children.set(name, there)
    return attrs.evolve(state, blocks=blocks, uses=uses, children=children)


def _needed(state: State) -> Iterator[str]:
    """The keys that open sessions have, of blocks or of what may become one."""
    for session in state.sessions.values():
        yield from _keys_of(session)
    for pinned in state.pins.values():
        yield from pinned


def _keys_of(session: Session) -> Iterator[str]:
    parts: Iterable[tuple[str, ...]] = (
        session.slab_keys,
        session.last.prompt_keys if session.last is not None else (),
        session.request.prompt_keys if session.request is not None else (),
        session.prewarm.keys if session.prewarm is not None else (),
    )
    for keys in parts:
        yield from keys


def _up_from(blocks: Map[str, Block], key: str | None, until: set[str]) -> Iterator[str]:
    """A block and those that it is built on, up to the first one that is in ``until``."""
    while key is not None and key in blocks and key not in until:
        yield key
        key = blocks[key].parent


def _moved(
    uses: Map[str, Use], blocks: Map[str, Block], kept: set[str], needed: set[str]
) -> Map[str, Use]:
    """The uses, those of chains whose last blocks go at the last block that stays."""
    for key, use in uses.items():
        if key in kept or key in needed:
            continue
        uses = uses.delete(key)
        at: str | None = key
        while at is not None and at not in kept:
            at = blocks[at].parent if at in blocks else None
        if at is None:
            continue
        known = uses.get(at)
        uses = uses.set(at, use if known is None else _joined(known, use))
    return uses


def _joined(one: Use, other: Use) -> Use:
    """The later of two uses, with the later expiry."""
    later = max(one, other, key=lambda use: use.position)
    due = [use.expires_us for use in (one, other) if use.expires_us is not None]
    return attrs.evolve(later, expires_us=max(due, default=None))
