"""
What must hold, as pure functions over the state before an event and the event.

Rules of this module:

1. A check compares what the state implies with what engine, store or session *reported* in the
   event. It never compares a number with itself.
2. A check returns violations and raises nothing; it reads, and changes nothing.
3. The same code runs before an event is committed and again on replay.

``check`` runs all of them. Legality (INV-6, ``lifecycle.py``) comes first: an event that may not
happen now is not checked further.

``http/wire/errors.py`` says how a violation becomes an HTTP error.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import attrs

from cairn.journal import events as ev
from cairn.journal import paths, speculation
from cairn.journal.keys import ids_hash
from cairn.journal.lifecycle import SessionState, illegal_steps
from cairn.journal.shadow import answer_hash, others
from cairn.journal.state import (
    Block,
    Session,
    Slab,
    State,
    cut_out,
    opened_request,
    prewarmed,
    slab_ids,
)

Scope = Literal["session", "blocks", "admission", "server"]

SENTENCES: dict[str, tuple[str, Scope]] = {
    "INV-1": (
        (
            "after every mutation each layer's measured coverage ends at the session's token "
            "count, and the passes that were run are those of the canonical schedule over its "
            "tokens"
        ),
        "session",
    ),
    "INV-2": (
        "the start of the cached window is what the policy gives, and it never moves back",
        "session",
    ),
    "INV-3": (
        (
            "a block key has one digest, for ever, and a row or an answer that is computed once "
            "more is the same"
        ),
        "blocks",
    ),
    "INV-4": (
        "the decision recorded is what the rules give on the state that replay has reached",
        "session",
    ),
    "INV-5": (
        (
            "slabs, blocks, files and bytes acquired less those released equal what is measured, "
            "no block leaves memory that a session works with, and the budgets are kept"
        ),
        "admission",
    ),
    "INV-6": (
        (
            "a session follows its table of legal steps, one command at a time, without gaps in "
            "its sequence"
        ),
        "session",
    ),
    "INV-7": (
        "a token emitted is explained: the pass that made it is committed with it, or before",
        "session",
    ),
    "INV-8": ("the hash chain holds", "server"),
}
"""
Each invariant: what holds, and what a violation takes out of service in addition to the request.
"""


@attrs.frozen(kw_only=True)
class Violation:
    """
    A broken invariant.

    Attributes:
        expected: what the state implies.
        actual: what the event says.
    """

    invariant: str
    message: str
    expected: str
    actual: str

    @property
    def scope(self) -> Scope:
        """What the violation takes out of service."""
        return SENTENCES[self.invariant][1]


def _broken(invariant: str, message: str, expected: object, actual: object) -> Violation:
    return Violation(
        invariant=invariant, message=message, expected=str(expected), actual=str(actual)
    )


def check(state: State, recorded: ev.Recorded) -> list[Violation]:
    """The violations of an event on ``state``; empty if all invariants hold."""
    illegal = [_broken("INV-6", *step) for step in illegal_steps(state, recorded)]
    if illegal:
        return illegal
    event = recorded.event
    return [found for one in CHECKS.get(type(event), ()) for found in one(state, event)]


# --- INV-1, INV-2 --------------------------------------------------------------------------------


def _coverage(
    state: State, session: Session, coverage: ev.Coverage, end: int, start_due: int
) -> Iterator[Violation]:
    layers = state.model.layers if state.model else 0
    counted = sum(run[0] for run in coverage)
    if counted != layers or any(run[0] < 1 for run in coverage):
        yield _broken("INV-1", "not every layer was measured", layers, counted)
    for _, _start, stop in coverage:
        if stop != end:
            yield _broken("INV-1", "a layer's KV does not end where it should", end, coverage)
            break
    for _, start, _stop in coverage:
        if start != start_due:
            yield _broken(
                "INV-2", "the cached window does not start where it should", start_due, coverage
            )
            break
    capacity = session.slab.capacity_tokens if session.slab else 0
    if end > capacity:
        yield _broken("INV-5", "KV past the end of the slab", capacity, end)


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


def _extended(state: State, event: ev.CacheExtended) -> Iterator[Violation]:
    session = state.session(event.session)
    if event.start != session.cached_tokens:
        yield _broken("INV-1", "a pass left a gap", session.cached_tokens, event.start)
    start_due = _window_after(state, session, event)
    yield from _coverage(state, session, event.coverage, event.end, start_due)
    due = _tokens(session, event)
    ran = ids_hash(due)
    if len(due) != event.end - event.start:
        yield _broken("INV-1", "a pass ran past the tokens", event.start + len(due), event.end)
    elif ran != event.input_hash:
        yield _broken("INV-1", "a pass ran over other tokens", ran, event.input_hash)
    yield from _schedule(state, session, event)
    if len(event.logprobs) != len(event.sampled):
        yield _broken(
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
        yield _broken("INV-1", "a draft where there was to be none", 0, event.drafted)
    # Each pass adds the row of one token, and those of the tokens of its draft that were accepted.
    allowed = speculation.DRAFT_TOKENS_MAX * (event.end - event.start - event.accepted)
    if event.drafted > allowed:
        yield _broken(
            "INV-1", "more tokens drafted than passes can have", f"<= {allowed}", event.drafted
        )
    most = min(event.drafted, event.end - event.start - 1)
    if event.accepted > most:
        yield _broken(
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
        yield _broken("INV-1", "a pass over nothing", ">= 1", rows)
    if event.step != "decode" and session.canonical_tokens != session.cached_tokens:
        yield _broken(
            "INV-1",
            "a canonical pass on KV that is not",
            session.canonical_tokens,
            session.cached_tokens,
        )
    first = event.step == "prefill" and session.state is SessionState.RESTORING
    if first and session.request is not None and session.request.path is not None:
        path = session.request.path
        if event.start != path.reused_tokens:
            yield _broken("INV-4", "other reuse than decided", path.reused_tokens, event.start)
        checks = paths.row_to_check(state, path) is not None
        if session.request.row_checked != checks:
            yield _broken(
                "INV-1", "the last row was not computed again, or was", checks, not checks
            )
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
                yield _broken("INV-1", "a decode step inside the prompt", prompt, event.start)
    if event.step != "decode":
        if event.start % grain:
            yield _broken("INV-1", "a pass off the canonical schedule", f"k * {grain}", event.start)
        yield from _on_own_rows(session, event, chunk)
    if rows != due:
        yield _broken("INV-1", "a pass of another shape than the schedule's", due, rows)
    if len(event.sampled) != drawn:
        yield _broken("INV-1", "tokens drawn from other passes", drawn, len(event.sampled))


def _row(state: State, event: ev.RowChecked) -> Iterator[Violation]:
    session = state.session(event.session)
    assert session.request is not None and session.request.path is not None
    due = paths.row_to_check(state, session.request.path)
    if event.row != due or session.cached_tokens != event.row + 1 or session.request.row_checked:
        yield _broken("INV-1", "another row was computed again than was due", due, event.row)
    if event.digest != event.held_digest:
        yield _broken(
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
        yield _broken("INV-1", words, due, held[-1:])
        return
    found = slab_ids(session, max(0, event.start - chunk), event.start)
    continued = cut_out(session.work_ids, event.start - len(found), event.start)
    if session.slab_ids and found != continued:
        yield _broken("INV-1", words, ids_hash(continued), ids_hash(found))


def _on_prewarm(session: Session, event: ev.CacheExtended, chunk: int) -> Iterator[Violation]:
    """A pass of a prewarm comes after all that it reuses."""
    if session.prewarm is None:
        return
    prewarm = session.prewarm
    reused = prewarm.tokens_from_slab + prewarm.blocks_from_pool * chunk
    reused += prewarm.tokens_from_partial
    if event.start < reused:
        yield _broken("INV-4", "other reuse than decided", reused, event.start)


def _restored(state: State, event: ev.BlocksRestored) -> Iterator[Violation]:
    session = state.session(event.session)
    if event.start != session.cached_tokens:
        yield _broken("INV-1", "blocks left a gap", session.cached_tokens, event.start)
    start_due = _window_after(state, session, event)
    yield from _coverage(state, session, event.coverage, event.end, start_due)
    yield from _as_decided(state, session, event)
    if len(event.digests) != len(event.keys):
        yield _broken(
            "INV-3",
            "the number of digests is not the number of blocks",
            len(event.keys),
            len(event.digests),
        )
    for key, digest in zip(event.keys, event.digests, strict=False):
        block = state.blocks.get(key)
        if block is None or block.digest != digest:
            known = block.digest if block else "a sealed block"
            yield _broken("INV-3", f"block {key} does not have its digest", known, digest)
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
            yield _broken("INV-4", "other rows were restored than decided", due_part, found)
        return
    decided = _to_copy(state, session)
    # The places from its start to its end: a long copy has many parts.
    first, after = (bisect_left(decided, -(-at // chunk)) for at in (event.start, event.end))
    places = decided[first:after]
    due = tuple(session.work_keys[place] for place in places if place < len(session.work_keys))
    if event.keys != due:
        yield _broken("INV-4", "other blocks were restored than decided", due, event.keys)
    if event.start < kept * chunk or not places or event.end != (places[-1] + 1) * chunk:
        span = (kept * chunk, (kept + shared) * chunk)
        yield _broken(
            "INV-4", "blocks were restored at another place", span, (event.start, event.end)
        )
    rule = state.model.checkpoints if state.model else None
    if rule is not None and not rule.at(event.end):
        yield _broken("INV-1", "blocks were restored up to one without states", rule, event.end)


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


def _trimmed(state: State, event: ev.CacheTrimmed) -> Iterator[Violation]:
    session = state.session(event.session)
    if event.cached_tokens != session.cached_tokens or event.end > event.cached_tokens:
        yield _broken(
            "INV-1", "a trim from another length", session.cached_tokens, event.cached_tokens
        )
    policy, start = state.model.policy if state.model else None, session.window_start
    if policy is not None and event.end and not policy.reaches(start, event.end):
        needed = policy.first(event.end)
        yield _broken("INV-2", "trimmed to where tokens of the window are missing", needed, start)
    kept = len(session.slab_keys) * _block_tokens(state)
    if state.model is not None and state.model.checkpoints and event.end not in (0, kept):
        yield _broken("INV-1", "trimmed to where no state was kept", (0, kept), event.end)
    yield from _coverage(state, session, event.coverage, event.end, start if event.end else 0)


def _settled(state: State, event: ev.SessionSettled) -> Iterator[Violation]:
    session = state.session(event.session)
    if event.canonical_tokens != session.cached_tokens:
        yield _broken(
            "INV-1", "settled at another length", session.cached_tokens, event.canonical_tokens
        )
    if (due := paths.canonical_end(state, session)) != event.canonical_tokens:
        yield _broken("INV-1", "settled with KV that is not canonical", due, event.canonical_tokens)


# --- INV-3 ---------------------------------------------------------------------------------------


def _sealed(state: State, event: ev.BlockSealed) -> Iterator[Violation]:
    session = state.session(event.session)
    chunk = state.model.block_tokens if state.model else 0
    grain = state.model.grain if state.model else 1
    ended = event.end <= session.cached_tokens if grain == 1 else event.end == session.cached_tokens
    rests = session.state is SessionState.SETTLING and session.prewarm is None
    short = grain == 1 and rests and 0 < event.end - event.start < chunk
    if not ended or not (short or event.end - event.start == chunk):
        yield _broken(
            "INV-1",
            "a sealed block that the slab does not have, or has no longer as its last",
            session.cached_tokens,
            event,
        )
    if event.end > session.canonical_tokens:
        yield _broken(
            "INV-1", "a block of KV that is not canonical", session.canonical_tokens, event.end
        )
    elif short and event.end != session.canonical_tokens:
        yield _broken(
            "INV-1", "a short block that is not the last", session.canonical_tokens, event.end
        )
    parent = session.slab_keys[-1] if session.slab_keys else None
    if event.parent != parent or event.start != len(session.slab_keys) * chunk:
        yield _broken("INV-3", "a block sealed on another one", parent, event.parent)
    # Only the engine can compute the keys of an answer's chunks: they need the tenant's secret.
    keys = session.work_keys
    place = event.start // chunk if chunk else 0
    if not short and place < len(keys) and keys[place] != event.key:
        yield _broken("INV-3", "a block under another key", keys[place], event.key)
    if place >= len(keys) and (session.request is not None or session.prewarm is not None):
        yield _broken("INV-3", "a block past the prompt", len(keys), place)
    known = state.blocks.get(event.key)
    if event.resealed != (known is not None):
        yield _broken("INV-3", "a block sealed again, or not", known is not None, event.resealed)
    if known is not None and known.digest != event.digest:
        yield _broken("INV-3", f"block {event.key} has a second digest", known.digest, event.digest)
    if known is not None:
        before = (known.parent, known.start, known.bytes)
        if before != (event.parent, event.start, event.bytes):
            again = (event.parent, event.start, event.bytes)
            yield _broken("INV-3", f"block {event.key} is another one now", before, again)
    present = known is not None and known.present
    if present and not event.stored:
        yield _broken("INV-5", "a block in memory disappeared", "stored", "not stored")
    added = event.stored and not present
    yield from _store_measured(
        state,
        blocks=state.pool.blocks + added,
        size=state.pool.block_bytes + (event.bytes if added else 0),
        event=event,
    )


def _spilled(state: State, event: ev.BlockSpilled) -> Iterator[Violation]:
    block = state.blocks[event.key]
    yield from _same_digest(block, event.digest)
    if not block.present or block.file_bytes is not None:
        found = (block.present, block.file_bytes)
        yield _broken("INV-5", "a file of a block not in memory, or a second", (True, None), found)
        return
    pool = state.pool
    yield from _disk_measured(pool.disk_blocks + 1, pool.disk_bytes + event.bytes, event)
    if event.disk_bytes > state.disk_budget:
        yield _broken("INV-5", "block files over the budget", state.disk_budget, event.disk_bytes)


def _loaded(state: State, event: ev.BlockLoaded) -> Iterator[Violation]:
    block = state.blocks[event.key]
    yield from _same_digest(block, event.digest)
    if block.bytes != event.bytes:
        yield _broken("INV-3", f"block {block.key} is another one now", block.bytes, event.bytes)
    if block.bug_id is not None:
        yield _broken("INV-3", "a quarantined block was loaded", None, block.bug_id)
    if not block.loadable and block.bug_id is None:
        found = (block.present, block.file_bytes)
        yield _broken("INV-5", "a block loaded twice, or from no file", (False, "a size"), found)
        return
    pool = state.pool
    yield from _store_measured(
        state, blocks=pool.blocks + 1, size=pool.block_bytes + event.bytes, event=event
    )


def _shadowed(state: State, event: ev.ShadowChecked) -> Iterator[Violation]:
    measured = (len(event.digests), len(event.memory_digests))
    if measured != (len(event.keys), len(event.keys)):
        yield _broken(
            "INV-3", "the number of digests is not the number of blocks", len(event.keys), measured
        )
    ids_on_record = answer_hash(state, event)
    if ids_on_record not in (None, event.ids_expected):
        yield _broken(
            "INV-3",
            f"the answer to request {event.request} of session {event.of_session} was compared "
            "with other tokens than are on record",
            ids_on_record,
            event.ids_expected,
        )
        return
    for other in others(state, event):
        if other.known:
            continue  # what is wrong with it is on record
        how = "computed again is another" if other.computed else "changed in memory"
        yield _broken(
            "INV-3",
            f"block {other.key}, met in the check of session {event.of_session}, {how}",
            other.expected,
            other.found,
        )
    if event.drawn != event.drawn_expected:
        yield _broken(
            "INV-3",
            f"the answer to request {event.request} of session {event.of_session} computed again "
            f"is another from its token {event.first_difference} on",
            event.drawn_expected,
            event.drawn,
        )


def _same_digest(block: Block, digest: str) -> Iterator[Violation]:
    if block.digest != digest:
        yield _broken("INV-3", f"block {block.key} does not have its digest", block.digest, digest)


# --- INV-4 ---------------------------------------------------------------------------------------


def _received(state: State, event: ev.RequestReceived) -> Iterator[Violation]:
    session = state.session(event.session)
    last = session.last
    model = state.model
    if model is None or model.fingerprint != event.fingerprint:
        loaded = model.fingerprint if model is not None else None
        yield _broken("INV-4", "a request for another model", loaded, event.fingerprint)
        return
    if event.tenant != session.tenant:
        yield _broken("INV-4", "another tenant's session", session.tenant, event.tenant)
    base = last.request if last is not None else None
    if event.base_request not in (None, base):
        yield _broken("INV-4", "a prompt built on another request", base, event.base_request)
    if event.base_request is None and (event.base_tokens or event.base_parts or event.base_keys):
        yield _broken("INV-4", "a prompt built on nothing", 0, event.base_tokens)
    if last is not None and event.base_parts > len(last.chain):
        yield _broken(
            "INV-4", "more base parts than the last request had", len(last.chain), event.base_parts
        )
    same_model = last is not None and last.fingerprint == event.fingerprint
    keepable = event.base_tokens // model.block_tokens if same_model else 0
    if event.base_keys > keepable:
        yield _broken(
            "INV-4", "base keys of tokens that are not base tokens", keepable, event.base_keys
        )
    request = opened_request(session, event)
    if len(request.prompt_ids) != event.prompt_tokens:
        yield _broken("INV-4", "another prompt", len(request.prompt_ids), event.prompt_tokens)
    keys = event.prompt_tokens // model.block_tokens
    if len(request.prompt_keys) != keys:
        yield _broken(
            "INV-4",
            "the number of keys is not the number of blocks",
            keys,
            len(request.prompt_keys),
        )
    if state.admission_bug is not None:
        yield _broken("INV-5", "admission is closed", state.admission_bug, event.request)
    chosen = paths.choose_session(state, paths.ask_of(event, request.chain))
    unnamed = event.session_name is None  # a session that is named exists by then
    fresh = unnamed and session.last is None and session.state is SessionState.COLD
    if chosen != session.id and not (chosen is None and fresh):
        yield _broken("INV-4", "another session serves than the rules choose", chosen, session.id)


def _decided(state: State, event: ev.PrefixJoined | ev.PathSelected) -> Iterator[Violation]:
    session = state.session(event.session)
    assert session.request is not None
    if event.rules_version != paths.RULES_VERSION:
        yield _broken("INV-4", "unknown rules", paths.RULES_VERSION, event.rules_version)
        return
    if event.decided_at != state.position:
        yield _broken("INV-4", "decided on another state", state.position, event.decided_at)
    if paths.waits(state, session):
        joined = session.request.joined
        yield _broken("INV-4", "decided during a wait for another request", joined, event.kind)
        return
    decided = paths.decide(state, session, session.request)
    of = paths.Join if isinstance(event, ev.PrefixJoined) else paths.Decision
    recorded = {field.name: getattr(event, field.name) for field in attrs.fields(of)}
    if not isinstance(decided, of) or attrs.asdict(decided) != recorded:
        yield _broken("INV-4", "another decision", attrs.asdict(decided), recorded)


def _prewarm_started(state: State, event: ev.PrewarmStarted) -> Iterator[Violation]:
    session = state.session(event.session)
    last, chunk = session.last, state.model.block_tokens if state.model else 1
    if last is None or not last.answered or session.slab is None or session.request is not None:
        yield _broken(
            "INV-4", "a prewarm without an answer and a slab", "answer and slab", session.state
        )
        return
    if event.rules_version != paths.RULES_VERSION:
        yield _broken("INV-4", "unknown rules", paths.RULES_VERSION, event.rules_version)
        return
    prewarm = prewarmed(last, event)
    grain = state.model.grain if state.model else 1
    made, due = (len(prewarm.ids), len(prewarm.keys)), (event.tokens, event.tokens // chunk)
    if made != due or event.tokens % grain:
        yield _broken("INV-4", "a prewarm of other tokens than recorded", due, made)
    # Base keys must cover base tokens only, and those of the prompt only.
    keepable = min(event.base_tokens, len(last.prompt_ids)) // chunk
    if event.base_keys > keepable:
        yield _broken(
            "INV-4", "base keys of tokens that are not base tokens", keepable, event.base_keys
        )
    if event.tokens > session.slab.capacity_tokens:
        room = session.slab.capacity_tokens
        yield _broken("INV-4", "a prewarm longer than the slab", room, event.tokens)
    decided = paths.reusable_prewarm(state, session, prewarm.ids, prewarm.keys)
    recorded = paths.Reuse(
        event.tokens_from_slab,
        event.blocks_from_slab,
        event.blocks_from_pool,
        event.partial_key,
        event.tokens_from_partial,
    )
    if decided != recorded:
        yield _broken("INV-4", "other reuse for a prewarm than the rules give", decided, recorded)


def _prewarm_ended(
    state: State, event: ev.PrewarmFinished | ev.PrewarmAbandoned
) -> Iterator[Violation]:
    session = state.session(event.session)
    prewarm, cached = session.prewarm, session.cached_tokens
    computed = prewarm.computed_tokens if prewarm is not None else 0
    if event.computed_tokens != computed:
        yield _broken(
            "INV-1", "other prewarm passes than recorded", computed, event.computed_tokens
        )
    if isinstance(event, ev.PrewarmFinished) and prewarm is not None:
        due, found = len(prewarm.ids), (event.tokens, cached)
        if found != (due, due):
            yield _broken("INV-1", "a prewarm finished before all of it was computed", due, found)


# --- INV-5 ---------------------------------------------------------------------------------------


def _acquired(state: State, event: ev.SlabAcquired) -> Iterator[Violation]:
    session = state.session(event.session)
    if session.slab is not None:
        yield _broken("INV-5", "a second slab for one session", session.slab.id, event.slab)
    yield from _opened(state, event)


def _opened(state: State, event: ev.SlabAcquired | ev.ShadowStarted) -> Iterator[Violation]:
    yield from _pool_measured(event, state.pool.slabs + 1, state.pool.slab_bytes + event.bytes)
    model = state.model
    if model is not None and event.pool_slabs > model.pool_slabs:
        yield _broken("INV-5", "more slabs than the pool has", model.pool_slabs, event.pool_slabs)
    if model is not None and event.pool_bytes > model.pool_bytes:
        yield _broken("INV-5", "slabs over the budget", model.pool_bytes, event.pool_bytes)


def _released(state: State, event: ev.SlabReleased) -> Iterator[Violation]:
    yield from _given_back(state, event, state.session(event.session).slab)


def _given_back(
    state: State, event: ev.SlabReleased | ev.ShadowEnded, slab: Slab | None
) -> Iterator[Violation]:
    if slab is None or slab.id != event.slab:
        yield _broken(
            "INV-5", "a slab was released that the session does not have", slab, event.slab
        )
        return
    if slab.bytes != event.bytes:
        yield _broken("INV-5", "a slab of another size", slab.bytes, event.bytes)
    yield from _pool_measured(event, state.pool.slabs - 1, state.pool.slab_bytes - slab.bytes)


def _gave_back(state: State, event: ev.ShadowEnded) -> Iterator[Violation]:
    yield from _given_back(state, event, state.shadow.slab if state.shadow is not None else None)


def _pool_measured(
    event: ev.SlabAcquired | ev.SlabReleased | ev.ShadowStarted | ev.ShadowEnded,
    slabs: int,
    size: int,
) -> Iterator[Violation]:
    if event.pool_slabs != slabs:
        yield _broken("INV-5", "slabs do not add up", slabs, event.pool_slabs)
    if event.pool_bytes != size:
        yield _broken("INV-5", "bytes of slabs do not add up", size, event.pool_bytes)


def _evicted(state: State, event: ev.BlockEvicted) -> Iterator[Violation]:
    block = state.blocks[event.key]
    if not block.present:
        yield _broken("INV-5", "a block evicted twice", "in memory", "gone")
        return
    if state.is_pinned(event.key):
        who = sorted(session for session, keys in state.pins.items() if event.key in keys)
        yield _broken("INV-5", "a pinned block evicted", "one that no session is working with", who)
    if block.bytes != event.bytes:
        yield _broken("INV-5", "a block of another size", block.bytes, event.bytes)
    yield from _store_measured(
        state, blocks=state.pool.blocks - 1, size=state.pool.block_bytes - block.bytes, event=event
    )


def _store_measured(
    state: State,
    *,
    blocks: int,
    size: int,
    event: ev.BlockSealed | ev.BlockEvicted | ev.BlockLoaded,
) -> Iterator[Violation]:
    if event.memory_blocks != blocks:
        yield _broken("INV-5", "blocks in memory do not add up", blocks, event.memory_blocks)
    if event.memory_bytes != size:
        yield _broken("INV-5", "bytes of blocks do not add up", size, event.memory_bytes)
    budget = state.model.blocks_bytes if state.model else 0
    if event.memory_bytes > budget:
        yield _broken("INV-5", "blocks over the budget", budget, event.memory_bytes)
    most = state.model.blocks_max if state.model else 0
    if most and event.memory_blocks > most:
        yield _broken("INV-5", "more blocks than allowed", most, event.memory_blocks)


def _rejected(state: State, event: ev.BlockFileRejected) -> Iterator[Violation]:
    if state.blocks[event.key].file_bytes is None:
        yield _broken("INV-5", "a file was rejected that did not exist", "a file", event.reason)


def _dropped(state: State, event: ev.BlockFileRemoved) -> Iterator[Violation]:
    size = state.blocks[event.key].file_bytes
    if size != event.bytes:
        yield _broken(
            "INV-5", "a file was removed that did not exist, or another one", size, event.bytes
        )
        return
    pool = state.pool
    yield from _disk_measured(pool.disk_blocks - 1, pool.disk_bytes - size, event)


def _found(state: State, event: ev.BlockFilesScanned) -> Iterator[Violation]:
    yield from _disk_measured(state.pool.disk_blocks, state.pool.disk_bytes, event)


def _disk_measured(
    blocks: int, size: int, event: ev.BlockSpilled | ev.BlockFileRemoved | ev.BlockFilesScanned
) -> Iterator[Violation]:
    if event.disk_blocks != blocks:
        yield _broken("INV-5", "block files do not add up", blocks, event.disk_blocks)
    if event.disk_bytes != size:
        yield _broken("INV-5", "bytes of block files do not add up", size, event.disk_bytes)


def _closed(state: State, event: ev.SessionClosed) -> Iterator[Violation]:
    slab = state.session(event.session).slab
    if slab is not None:
        yield _broken("INV-5", "a session closed with its slab", None, slab)


# --- INV-7 ---------------------------------------------------------------------------------------


def _emitted(state: State, event: ev.TokensEmitted) -> Iterator[Violation]:
    request = state.session(event.session).request
    assert request is not None
    if event.first != request.emitted:
        yield _broken("INV-7", "tokens emitted out of order", request.emitted, event.first)
        return
    made = request.sampled[event.first : event.first + len(event.ids)]
    if made != event.ids or not request.sampled:
        yield _broken("INV-7", "tokens emitted that no pass made", made, event.ids)


def _emitted_with(state: State, event: ev.CacheExtended) -> Iterator[Violation]:
    """Only decode steps release tokens, and no more than they and the passes before have made."""
    request, decodes = state.session(event.session).request, event.step == "decode"
    left = len(request.sampled) - request.emitted if request is not None else 0
    made = left + len(event.sampled) if decodes else 0
    if event.emitted > made or (event.text and not decodes):
        yield _broken("INV-7", "tokens emitted that no pass made", f"<= {made}", event.emitted)


def _finished(state: State, event: ev.RequestFinished) -> Iterator[Violation]:
    request = state.session(event.session).request
    assert request is not None and request.path is not None
    if not request.sampled:
        yield _broken("INV-7", "an answer before the prompt has run", ">= 1 token", 0)
    if not request.emitted <= event.answer_tokens <= len(request.sampled):
        yield _broken(
            "INV-7",
            "an answer of other tokens",
            f"{request.emitted} to {len(request.sampled)}",
            event.answer_tokens,
        )
    if event.prompt_tokens != len(request.prompt_ids):
        yield _broken(
            "INV-7", "another prompt is billed", len(request.prompt_ids), event.prompt_tokens
        )
    if event.cached_tokens != request.path.reused_tokens:
        yield _broken(
            "INV-7", "other reuse is reported", request.path.reused_tokens, event.cached_tokens
        )
    if event.completion_tokens != event.answer_tokens:
        yield _broken(
            "INV-7", "another answer is billed", event.answer_tokens, event.completion_tokens
        )
    if event.finish_reason == "length" and event.answer_tokens != request.ask.max_tokens:
        yield _broken(
            "INV-7",
            "an answer cut off at another length than was asked for",
            request.ask.max_tokens,
            event.answer_tokens,
        )


CHECKS: dict[type[ev.Event], tuple[Callable[[State, object], Iterator[Violation]], ...]] = {
    ev.RequestReceived: (_received,),  # type: ignore[dict-item]  # each takes the key's type
    ev.PrefixJoined: (_decided,),  # type: ignore[dict-item]  # likewise, down to the end
    ev.PathSelected: (_decided,),  # type: ignore[dict-item]
    ev.SlabAcquired: (_acquired,),  # type: ignore[dict-item]
    ev.SlabReleased: (_released,),  # type: ignore[dict-item]
    ev.BlocksRestored: (_restored,),  # type: ignore[dict-item]
    ev.RowChecked: (_row,),  # type: ignore[dict-item]
    ev.CacheExtended: (_extended, _emitted_with),  # type: ignore[dict-item]
    ev.CacheTrimmed: (_trimmed,),  # type: ignore[dict-item]
    ev.BlockSealed: (_sealed,),  # type: ignore[dict-item]
    ev.BlockEvicted: (_evicted,),  # type: ignore[dict-item]
    ev.BlockFilesScanned: (_found,),  # type: ignore[dict-item]
    ev.BlockSpilled: (_spilled,),  # type: ignore[dict-item]
    ev.BlockLoaded: (_loaded,),  # type: ignore[dict-item]
    ev.BlockFileRejected: (_rejected,),  # type: ignore[dict-item]
    ev.BlockFileRemoved: (_dropped,),  # type: ignore[dict-item]
    ev.TokensEmitted: (_emitted,),  # type: ignore[dict-item]
    ev.RequestFinished: (_finished,),  # type: ignore[dict-item]
    ev.PrewarmStarted: (_prewarm_started,),  # type: ignore[dict-item]
    ev.PrewarmFinished: (_prewarm_ended,),  # type: ignore[dict-item]
    ev.PrewarmAbandoned: (_prewarm_ended,),  # type: ignore[dict-item]
    ev.SessionSettled: (_settled,),  # type: ignore[dict-item]
    ev.SessionClosed: (_closed,),  # type: ignore[dict-item]
    ev.ShadowStarted: (_opened,),  # type: ignore[dict-item]
    ev.ShadowChecked: (_shadowed,),  # type: ignore[dict-item]
    ev.ShadowEnded: (_gave_back,),  # type: ignore[dict-item]
}
