"""INV-1 and INV-2: what a session's slab holds after each mutation, and which passes ran."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from cairn.journal import events as ev
from cairn.journal import paths, speculation
from cairn.journal.invariants.sentences import Violation, broken
from cairn.journal.keys import ids_hash
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import Session, State, cut_out, slab_ids


def _coverage(
    state: State, session: Session, coverage: ev.Coverage, end: int, start_due: int
) -> Iterator[Violation]:
    layers = state.model.layers if state.model else 0
    counted = sum(run[0] for run in coverage)
    if counted != layers or any(run[0] < 1 for run in coverage):
        yield broken("INV-1", "not every layer was measured", layers, counted)
    for _, _start, stop in coverage:
        if stop != end:
            yield broken("INV-1", "a layer's KV does not end where it should", end, coverage)
            break
    for _, start, _stop in coverage:
        if start != start_due:
            yield broken(
                "INV-2", "the cached window does not start where it should", start_due, coverage
            )
            break
    capacity = session.slab.capacity_tokens if session.slab else 0
    if end > capacity:
        yield broken("INV-5", "KV past the end of the slab", capacity, end)


def _window_after(
    state: State, session: Session, event: ev.CacheExtended | ev.BlocksRestored
) -> int:
    """
    Where the policy starts the window after passes over, or blocks for, ``[start, end)``. If blocks
    between the sinks and the window were left out, it starts with the first block after them.
    """
    policy = state.model.policy if state.model else None
    start, capacity = session.window_start, session.slab.capacity_tokens if session.slab else 0
    if policy is None:
        return 0
    if isinstance(event, ev.BlocksRestored):
        chunk, (kept, shared) = _block_tokens(state), _decided_reuse(session)
        resumed = policy.resumed_at(kept, kept + shared, chunk)
        if resumed is not None and event.start <= resumed * chunk < event.end:
            return resumed * chunk
    decodes = isinstance(event, ev.CacheExtended) and event.step == "decode"
    rows = 1 if decodes else _block_tokens(state)
    for place in range(event.start, event.end, max(1, rows)):
        start = policy.start_after(start, place, min(place + rows, event.end), capacity)
    return start


def _block_tokens(state: State) -> int:
    return state.model.block_tokens if state.model else 0


def extended(state: State, event: ev.CacheExtended) -> Iterator[Violation]:
    session = state.session(event.session)
    if event.start != session.cached_tokens:
        yield broken("INV-1", "a pass left a gap", session.cached_tokens, event.start)
    start_due = _window_after(state, session, event)
    yield from _coverage(state, session, event.coverage, event.end, start_due)
    due = _tokens(session, event)
    ran = ids_hash(due)
    if len(due) != event.end - event.start:
        yield broken("INV-1", "a pass ran past the tokens", event.start + len(due), event.end)
    elif ran != event.input_hash:
        yield broken("INV-1", "a pass ran over other tokens", ran, event.input_hash)
    yield from _schedule(state, session, event)
    if len(event.logprobs) != len(event.sampled):
        yield broken(
            "INV-1",
            "the number of log-probabilities is not the number of tokens",
            len(event.sampled),
            event.logprobs,
        )
    yield from _drafts(session, event)


def _drafts(session: Session, event: ev.CacheExtended) -> Iterator[Violation]:
    """
    Only decode passes have drafts, and only while these pay. Each pass has one row that is not of a
    draft, so fewer tokens were accepted than rows were added.
    """
    if not (event.drafted or event.accepted):
        return
    counts = session.drafted_tokens, session.accepted_tokens
    if event.step != "decode" or not speculation.pays(*counts):
        yield broken("INV-1", "a draft where there was to be none", 0, event.drafted)
    # Each pass adds the row of one token, and those of the tokens of its draft that were accepted.
    allowed = speculation.DRAFT_TOKENS_MAX * (event.end - event.start - event.accepted)
    if event.drafted > allowed:
        yield broken(
            "INV-1", "more tokens drafted than passes can have", f"<= {allowed}", event.drafted
        )
    most = min(event.drafted, event.end - event.start - 1)
    if event.accepted > most:
        yield broken(
            "INV-1", "more tokens accepted than were drafted", f"<= {most}", event.accepted
        )


def _tokens(session: Session, event: ev.CacheExtended) -> tuple[int, ...]:
    """The tokens that the passes of an event had to compute."""
    parts = session.work_ids
    if session.request is not None:
        parts = (*parts, event.sampled)
    return cut_out(parts, event.start, event.end)


def _schedule(state: State, session: Session, event: ev.CacheExtended) -> Iterator[Violation]:
    """
    Where a pass begins and ends: at the end of the slab, and at that of a chunk or of the tokens.
    With the grain C a pass begins with a chunk and has one, and settling computes full ones only.
    """
    chunk, grain = (state.model.block_tokens, state.model.grain) if state.model else (0, 0)
    prompt = session.request.ask.prompt_tokens if session.request else 0
    to_end = chunk - event.start % chunk if chunk else 0
    rows = event.end - event.start
    if rows == 0:
        yield broken("INV-1", "a pass over nothing", ">= 1", rows)
    if event.step != "decode" and session.canonical_tokens != session.cached_tokens:
        yield broken(
            "INV-1",
            "a canonical pass on KV that is not",
            session.canonical_tokens,
            session.cached_tokens,
        )
    first = event.step == "prefill" and session.state is SessionState.RESTORING
    if first and session.request is not None and session.request.path is not None:
        path = session.request.path
        if event.start != path.reused_tokens:
            yield broken("INV-4", "other reuse than decided", path.reused_tokens, event.start)
        checks = paths.row_to_check(state, path) is not None
        if session.request.row_checked != checks:
            yield broken("INV-1", "the last row was not computed again, or was", checks, not checks)
    match event.step:
        case "prefill":
            ends = event.end == prompt or (event.end % chunk == 0 and event.end < prompt)
            due = rows if grain == 1 and ends else min(to_end, prompt - event.start)
            drawn = 1 if event.end == prompt else 0
        case "settle":
            left = sum(map(len, session.work_ids)) - event.start
            due, drawn = (min(to_end, left) if grain == 1 else chunk), 0
            yield from _on_prewarm(session, event, chunk)
        case "decode":
            due, drawn = rows, rows
            if event.start < prompt:
                yield broken("INV-1", "a decode step inside the prompt", prompt, event.start)
    if event.step != "decode":
        if event.start % grain:
            yield broken("INV-1", "a pass off the canonical schedule", f"k * {grain}", event.start)
        yield from _on_own_rows(session, event, chunk)
    if rows != due:
        yield broken("INV-1", "a pass of another shape than the schedule's", due, rows)
    if len(event.sampled) != drawn:
        yield broken("INV-1", "tokens drawn from other passes", drawn, len(event.sampled))


def row(state: State, event: ev.RowChecked) -> Iterator[Violation]:
    session = state.session(event.session)
    assert session.request is not None and session.request.path is not None
    due = paths.row_to_check(state, session.request.path)
    if event.row != due or session.cached_tokens != event.row + 1 or session.request.row_checked:
        yield broken("INV-1", "another row was computed again than was due", due, event.row)
    if event.digest != event.held_digest:
        yield broken(
            "INV-3",
            f"row {event.row} of {_origin(session.request.path)} computed again is another",
            event.held_digest,
            event.digest,
        )


def _origin(path: ev.PathSelected) -> str:
    """What the last row that a request reuses was taken from."""
    return "the slab" if path.partial_key is None else f"block {path.partial_key}"


def _on_own_rows(session: Session, event: ev.CacheExtended, chunk: int) -> Iterator[Violation]:
    """
    The rows that a pass continues are those of its own sequence: the last block of the slab, whose
    key covers all tokens before it, and the last rows.
    """
    words, held = "a pass on rows of other tokens", session.slab_keys
    due = session.work_keys[len(held) - 1 : len(held)]
    # The keys of an answer's blocks are not known when it is settled as it is.
    all_known = session.request is not None or session.prewarm is not None
    if due != held[-1:] and (due or all_known):
        yield broken("INV-1", words, due, held[-1:])
        return
    found = slab_ids(session, max(0, event.start - chunk), event.start)
    continued = cut_out(session.work_ids, event.start - len(found), event.start)
    if session.slab_ids and found != continued:
        yield broken("INV-1", words, ids_hash(continued), ids_hash(found))


def _on_prewarm(session: Session, event: ev.CacheExtended, chunk: int) -> Iterator[Violation]:
    """A pass of a prewarm comes after all that it reuses."""
    if session.prewarm is None:
        return
    prewarm = session.prewarm
    reused = prewarm.tokens_from_slab + prewarm.blocks_from_pool * chunk
    reused += prewarm.tokens_from_partial
    if event.start < reused:
        yield broken("INV-4", "other reuse than decided", reused, event.start)


def restored(state: State, event: ev.BlocksRestored) -> Iterator[Violation]:
    session = state.session(event.session)
    if event.start != session.cached_tokens:
        yield broken("INV-1", "blocks left a gap", session.cached_tokens, event.start)
    start_due = _window_after(state, session, event)
    yield from _coverage(state, session, event.coverage, event.end, start_due)
    yield from _as_decided(state, session, event)
    if len(event.digests) != len(event.keys):
        yield broken(
            "INV-3",
            "the number of digests is not the number of blocks",
            len(event.keys),
            len(event.digests),
        )
    for key, digest in zip(event.keys, event.digests, strict=False):
        block = state.blocks.get(key)
        if block is None or block.digest != digest:
            known = block.digest if block else "a sealed block"
            yield broken("INV-3", f"block {key} does not have its digest", known, digest)
            return


def _as_decided(state: State, session: Session, event: ev.BlocksRestored) -> Iterator[Violation]:
    """
    The copied blocks are those that were decided, or the next part of them. A part ends where it
    can be continued. Rows of a partial match are copied after all blocks, in a part of their own.
    """
    kept, shared = _decided_reuse(session)
    chunk = _block_tokens(state)
    partial, rows = _decided_part(session)
    if partial is not None and (event.keys == (partial,) or event.end % chunk):
        at = (kept + shared) * chunk
        due_part, found = ((partial,), at, at + rows), (event.keys, event.start, event.end)
        if found != due_part:
            yield broken("INV-4", "other rows were restored than decided", due_part, found)
        return
    decided = _to_copy(state, session)
    # The places from its start to its end: a long copy has many parts.
    first, after = (bisect_left(decided, -(-at // chunk)) for at in (event.start, event.end))
    places = decided[first:after]
    due = tuple(session.work_keys[place] for place in places if place < len(session.work_keys))
    if event.keys != due:
        yield broken("INV-4", "other blocks were restored than decided", due, event.keys)
    if event.start < kept * chunk or not places or event.end != (places[-1] + 1) * chunk:
        span = (kept * chunk, (kept + shared) * chunk)
        yield broken(
            "INV-4", "blocks were restored at another place", span, (event.start, event.end)
        )
    rule = state.model.checkpoints if state.model else None
    if rule is not None and not rule.at(event.end):
        yield broken("INV-1", "blocks were restored up to one without states", rule, event.end)


def _to_copy(state: State, session: Session) -> Sequence[int]:
    """
    The indexes of the blocks to copy: of those that were decided, the ones that the policy needs.
    """
    kept, shared = _decided_reuse(session)
    policy = state.model.policy if state.model else None
    if policy is None:
        return range(kept, kept + shared)
    return policy.copied(kept, kept + shared, _block_tokens(state))


def _decided_reuse(session: Session) -> tuple[int, int]:
    """The decided reuse: (blocks from the slab, blocks from the pool)."""
    if session.prewarm is not None:
        return session.prewarm.blocks_from_slab, session.prewarm.blocks_from_pool
    assert session.request is not None and session.request.path is not None
    return session.request.path.blocks_from_slab, session.request.path.blocks_from_pool


def _decided_part(session: Session) -> tuple[str | None, int]:
    """The block that was decided to be matched in part, and how many rows of it."""
    if session.prewarm is not None:
        return session.prewarm.partial_key, session.prewarm.tokens_from_partial
    assert session.request is not None and session.request.path is not None
    return session.request.path.partial_key, session.request.path.tokens_from_partial


def trimmed(state: State, event: ev.CacheTrimmed) -> Iterator[Violation]:
    session = state.session(event.session)
    if event.cached_tokens != session.cached_tokens or event.end > event.cached_tokens:
        yield broken(
            "INV-1", "a trim from another length", session.cached_tokens, event.cached_tokens
        )
    policy, start = state.model.policy if state.model else None, session.window_start
    if policy is not None and event.end and not policy.reaches(start, event.end):
        needed = policy.first(event.end)
        yield broken("INV-2", "trimmed to where tokens of the window are missing", needed, start)
    kept = len(session.slab_keys) * _block_tokens(state)
    if state.model is not None and state.model.checkpoints and event.end not in (0, kept):
        yield broken("INV-1", "trimmed to where no state was kept", (0, kept), event.end)
    yield from _coverage(state, session, event.coverage, event.end, start if event.end else 0)


def settled(state: State, event: ev.SessionSettled) -> Iterator[Violation]:
    session = state.session(event.session)
    if event.canonical_tokens != session.cached_tokens:
        yield broken(
            "INV-1", "settled at another length", session.cached_tokens, event.canonical_tokens
        )
    if (due := paths.canonical_end(state, session)) != event.canonical_tokens:
        yield broken("INV-1", "settled with KV that is not canonical", due, event.canonical_tokens)
    # After a bug the session has no slab, and settles as it is.
    done = session.planned_done
    if session.slab is not None and done not in (None, event.complete):
        yield broken("INV-1", "settled with more or less than was computed", done, event.complete)
