"""INV-3: the digests of blocks, and what is computed once more."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.journal import events as ev
from cairn.journal.invariants.memory import disk_measured, store_measured
from cairn.journal.invariants.sentences import Violation, broken
from cairn.journal.lifecycle import SessionState
from cairn.journal.shadow import answer_hash, others
from cairn.journal.state import Block, SessionId, State


def sealed(state: State, event: ev.BlockSealed) -> Iterator[Violation]:
    session = state.session(event.session)
    chunk = state.model.block_tokens if state.model else 0
    grain = state.model.grain if state.model else 1
    ended = event.end <= session.cached_tokens if grain == 1 else event.end == session.cached_tokens
    rests = session.state is SessionState.SETTLING and session.prewarm is None
    short = grain == 1 and rests and 0 < event.end - event.start < chunk
    if not ended or not (short or event.end - event.start == chunk):
        yield broken(
            "INV-1",
            "a sealed block that the slab does not have, or has no longer as its last",
            session.cached_tokens,
            event,
        )
    if event.end > session.canonical_tokens:
        yield broken(
            "INV-1", "a block of KV that is not canonical", session.canonical_tokens, event.end
        )
    elif short and event.end != session.canonical_tokens:
        yield broken(
            "INV-1", "a short block that is not the last", session.canonical_tokens, event.end
        )
    parent = session.slab_keys[-1] if session.slab_keys else None
    if event.parent != parent or event.start != len(session.slab_keys) * chunk:
        yield broken("INV-3", "a block sealed on another one", parent, event.parent)
    # Only the engine can compute the keys of an answer's chunks: they need the tenant's secret.
    keys = session.work_keys
    place = event.start // chunk if chunk else 0
    if not short and place < len(keys) and keys[place] != event.key:
        yield broken("INV-3", "a block under another key", keys[place], event.key)
    if place >= len(keys) and (session.request is not None or session.prewarm is not None):
        yield broken("INV-3", "a block past the prompt", len(keys), place)
    known = state.blocks.get(event.key)
    if event.resealed != (known is not None):
        yield broken("INV-3", "a block sealed again, or not", known is not None, event.resealed)
    if known is not None and known.digest != event.digest:
        yield broken("INV-3", f"block {event.key} has a second digest", known.digest, event.digest)
    if known is not None:
        before = (known.parent, known.start, known.bytes)
        if before != (event.parent, event.start, event.bytes):
            again = (event.parent, event.start, event.bytes)
            yield broken("INV-3", f"block {event.key} is another one now", before, again)
    present = known is not None and known.present
    if present and not event.stored:
        yield broken("INV-5", "a block in memory disappeared", "stored", "not stored")
    added = event.stored and not present
    yield from store_measured(
        state,
        blocks=state.pool.blocks + added,
        size=state.pool.block_bytes + (event.bytes if added else 0),
        event=event,
    )


def spilled(state: State, event: ev.BlockSpilled) -> Iterator[Violation]:
    block = state.blocks[event.key]
    yield from _same_digest(block, event.digest)
    if not block.present or block.file_bytes is not None:
        found = (block.present, block.file_bytes)
        yield broken("INV-5", "a file of a block not in memory, or a second", (True, None), found)
        return
    pool = state.pool
    yield from disk_measured(pool.disk_blocks + 1, pool.disk_bytes + event.bytes, event)
    if event.disk_bytes > state.disk_budget:
        yield broken("INV-5", "block files over the budget", state.disk_budget, event.disk_bytes)


def loaded(state: State, event: ev.BlockLoaded) -> Iterator[Violation]:
    block = state.blocks[event.key]
    yield from _same_digest(block, event.digest)
    if block.bytes != event.bytes:
        yield broken("INV-3", f"block {block.key} is another one now", block.bytes, event.bytes)
    if block.bug_id is not None:
        yield broken("INV-3", "a quarantined block was loaded", None, block.bug_id)
    if not block.loadable and block.bug_id is None:
        found = (block.present, block.file_bytes)
        yield broken("INV-5", "a block loaded twice, or from no file", (False, "a size"), found)
        return
    pool = state.pool
    yield from store_measured(
        state, blocks=pool.blocks + 1, size=pool.block_bytes + event.bytes, event=event
    )


def adopted(state: State, event: ev.BlockAdopted) -> Iterator[Violation]:
    known = state.blocks.get(event.key)
    if known is not None:
        if known.digest != event.digest:
            fact = f"block {event.key} has a second digest, in row {event.position} of {event.node}"
            yield broken("INV-3", fact, known.digest, event.digest)
        before = (known.parent, known.start, known.bytes)
        if before != (event.parent, event.start, event.bytes):
            again = (event.parent, event.start, event.bytes)
            yield broken("INV-3", f"block {event.key} is another one now", before, again)
        if known.bug_id is not None:
            yield broken("INV-3", "a quarantined block was adopted", None, known.bug_id)
        if known.there:
            found = (known.present, known.file_bytes)
            yield broken("INV-5", "a block adopted that the node has", (False, None), found)
            return
    chunk = state.model.block_tokens if state.model else 0
    if event.end - event.start != chunk:
        yield broken("INV-3", "a block of another size adopted", chunk, event.end - event.start)
    parent = state.blocks.get(event.parent) if event.parent is not None else None
    above = (parent.start + parent.tokens, None) if parent is not None else (0, event.parent)
    if (event.start, None) != above:
        yield broken("INV-3", "a block adopted on another one", above, (event.start, None))
    if parent is not None and parent.bug_id is not None:
        yield broken("INV-3", "a block adopted on a quarantined one", None, parent.bug_id)
    pool = state.pool
    yield from store_measured(
        state, blocks=pool.blocks + 1, size=pool.block_bytes + event.bytes, event=event
    )


def shadowed(state: State, event: ev.ShadowChecked) -> Iterator[Violation]:
    measured = (len(event.digests), len(event.memory_digests))
    if measured != (len(event.keys), len(event.keys)):
        yield broken(
            "INV-3", "the number of digests is not the number of blocks", len(event.keys), measured
        )
    ids_on_record = answer_hash(state, event)
    if ids_on_record not in (None, event.ids_expected):
        yield broken(
            "INV-3",
            f"the answer to request {event.request} of session {event.of_session} was compared "
            "with other tokens than are on record",
            ids_on_record,
            event.ids_expected,
        )
        return
    yield from _of_the_answer(state, event)
    for other in others(state, event):
        if other.known:
            continue  # what is wrong with it is on record
        how = "computed again is another" if other.computed else "changed in memory"
        yield broken(
            "INV-3",
            f"block {other.key}, met in the check of session {event.of_session}, {how}",
            other.expected,
            other.found,
        )
    if event.drawn != event.drawn_expected:
        yield broken(
            "INV-3",
            f"the answer to request {event.request} of session {event.of_session} computed again "
            f"is another from its token {event.first_difference} on",
            event.drawn_expected,
            event.drawn,
        )


def _of_the_answer(state: State, event: ev.ShadowChecked) -> Iterator[Violation]:
    """The check was of the whole prompt and answer, and says where it differed if it did."""
    session = state.sessions.get(SessionId(event.of_session))
    last = session.last if session is not None else None
    found = (event.prompt_tokens, event.answer_tokens)
    if last is not None and last.request == event.request and last.answer_ids:
        due = (len(last.prompt_ids), len(last.answer_ids))
        if found != due:
            yield broken("INV-3", "a check of another prompt or answer", due, found)
    same = event.drawn == event.drawn_expected
    if same != (event.first_difference is None):
        yield broken("INV-3", "a difference that is none", same, event.first_difference)


def _same_digest(block: Block, digest: str) -> Iterator[Violation]:
    if block.digest != digest:
        yield broken("INV-3", f"block {block.key} does not have its digest", block.digest, digest)
