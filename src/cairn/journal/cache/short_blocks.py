"""
Short blocks: what an idle session holds after its last full block, sealed so that others can match
it in part (grain 1). Pure decisions over the journal's fold.

A short block has a key, a digest and token ids like any other, and fewer than C tokens. No block is
built on it: the block with the next tokens is a full one with the same parent, or a longer short
one. It has no file.
"""

from __future__ import annotations

from collections.abc import Iterator

from cairn.journal.keys import IdBytes, ids_bytes
from cairn.journal.paths import LEAST_PARTIAL, canonical_end
from cairn.journal.state import Block, Session, State, beginning, slab_ids


def rest_to_seal(state: State, session: Session) -> tuple[int, int] | None:
    """
    The rows of a session's slab that become a short block when it is idle. None if there are too
    few of them, if they may not be cached, or if a block in memory begins with the same tokens.
    """
    model = state.model
    if model is None or model.grain != 1 or session.slab is None:
        return None
    start, end = len(session.slab_keys) * model.block_tokens, canonical_end(state, session)
    ids = slab_ids(session, start, end)
    if len(ids) < max(LEAST_PARTIAL, end - start) or end < model.min_cache_tokens:
        return None
    parent = session.slab_keys[-1] if session.slab_keys else None
    if parent is not None and state.blocks[parent].bug_id is not None:
        return None
    packed = ids_bytes(ids)
    covered = any(
        block.usable and block.ids.startswith(packed) for block in _after(state, session, parent)
    )
    return None if covered else (start, end)


def superseded(state: State, session: Session, key: str) -> tuple[str, ...]:
    """
    The short blocks in memory that a block makes needless: it begins with their tokens. Without
    those that a session is working with.

    Args:
        session: that sealed the block.
    """
    block = state.blocks[key]
    if not block.usable or not block.ids:
        return ()
    return tuple(
        other.key
        for other in _after(state, session, block.parent)
        if state.is_short(other)
        and other.present
        and other.key != key
        and _begins_with(block.ids, other.ids)
        and not state.is_pinned(other.key)
    )


def is_superseded(state: State, session: Session, key: str) -> bool:
    """
    Whether a short block in memory is needless, because another block begins with its tokens. Not
    while a session is working with it.

    Args:
        session: of the block's tenant.
    """
    block = state.blocks[key]
    if not (state.is_short(block) and block.present) or state.is_pinned(key):
        return False
    others = _after(state, session, block.parent)
    return any(
        other.usable and other.key != key and _begins_with(other.ids, block.ids) for other in others
    )


def _begins_with(ids: IdBytes, other: IdBytes) -> bool:
    return bool(other) and ids.startswith(other)


def _after(state: State, session: Session, parent: str | None) -> Iterator[Block]:
    """The blocks that can be matched in part after another, of the session's tenant and model."""
    name = parent or beginning(session.fingerprint, session.tenant)
    return (state.blocks[key] for key in state.children.get(name, ()))
