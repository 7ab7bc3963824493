"""
Path selection: which session serves a request, by which path, and what it reuses.

Rules of this module:

1. Pure: a decision depends only on the request, the state and ``RULES_VERSION``. No clock, no order
   of tasks, no secret.
2. Total: every request gets one of two paths. There is no third case; both paths are correct for
   their requests and give the same bits.
3. A change of any decision raises ``RULES_VERSION``. The rules before it stay, because a replay
   decides again by the rules of the time.

The conversation is found by its chain of parts. What can be reused is found by the keys of sealed
blocks, in the prefix cache. The two are independent: a new session may reuse blocks, too.

A request whose blocks another one computes now, its *leader*, joins that one (``join``): it waits,
and its path is selected when these are sealed or will not be (``waits``). A leader's path is
selected, and that of a request that waits is not, so no request waits for one that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal, TypeGuard

import attrs

from cairn.journal import events as ev
from cairn.journal.keys import ID_BYTES, ids_bytes
from cairn.journal.lifecycle import SessionState
from cairn.journal.losses import Cause
from cairn.journal.state import (
    CONTINUED,
    Block,
    OpenRequest,
    Part,
    Session,
    SessionId,
    State,
    Turn,
    beginning,
    prewarmed_rows_before,
    slab_ids,
    spoken,
)

RULES_VERSION = 1

LEAST_PARTIAL = 2
"""
The fewest rows of a block that are copied: the last one is computed again, so that a single row
would spare nothing.
"""
_JOIN_FARTHEST = 2
"""
How many times as many blocks a leader may still have to compute as the request that joins it would
compute itself. Two that compute take turns, so alone it would wait for twice its own.
"""
LOAD_PARTIAL = 4
"""A file is read for a part of its block only if that spares a quarter of it."""

Reason = Literal[
    "cold_start",
    "shorter_history",
    "diverged",
    "evicted",
    "expired",
    "too_short",
    "session_busy",
    "quarantined",
    "fingerprint_changed",
    "cache_disabled",
    "cache_mode_prefix",
]

_AROUND = 24
"""How many tokens before and after the first one that differs people are shown."""
_MEANT = 16
"""The most conversations with the same last message that are compared, the most recent ones."""
_CHANGED = {"model": "model_changed", "tools": "tools_changed", "system": "system_changed"}


@attrs.frozen(kw_only=True)
class Ask:
    """
    What choosing a session reads of a request.

    Attributes:
        cache_prompt: False if nothing may be reused, in any mode.
        cache_mode: ``prefix`` if no session may be continued.
    """

    tenant: str
    fingerprint: str
    chain: tuple[Part, ...]
    session_name: str | None
    group: str | None
    cache_prompt: bool
    cache_mode: ev.CacheMode

    @property
    def goes_on(self) -> bool:
        """Whether a session may be continued."""
        return self.cache_prompt and self.cache_mode == "full"


@attrs.frozen(kw_only=True)
class Decision:
    """A decision, as it is recorded in ``events.PathSelected``."""

    path: ev.Path
    reason: Reason | None
    tokens_from_slab: int
    blocks_from_slab: int
    blocks_from_pool: int
    partial_key: str | None
    tokens_from_partial: int
    reused_tokens: int
    prewarmed_tokens: int
    rerendered_tokens: int
    nearest: str | None
    diverged_part: str | None
    diverged_token: int | None


@attrs.frozen(kw_only=True)
class Join:
    """Whose blocks a request waits for, as it is recorded in ``events.PrefixJoined``."""

    leader: str
    blocks: int
    reused_blocks: int


@attrs.frozen
class Reuse:
    """
    What a request or a prewarm reuses, from the first token on.

    Attributes:
        tokens: those whose KV the session's slab holds.
        blocks: the full blocks among them.
        shared: blocks from the pool, after these.
        partial: the block in the pool whose first rows come after all these; None if there is none.
        rows: how many rows that are.
    """

    tokens: int = 0
    blocks: int = 0
    shared: int = 0
    partial: str | None = None
    rows: int = 0

    def total(self, block_tokens: int) -> int:
        """All that is reused, in tokens."""
        return self.tokens + self.shared * block_tokens + self.rows


def ask_of(event: ev.RequestReceived, chain: tuple[Part, ...]) -> Ask:
    """What choosing a session read of a recorded request."""
    return Ask(
        tenant=event.tenant,
        fingerprint=event.fingerprint,
        chain=chain,
        session_name=event.session_name,
        group=event.group,
        cache_prompt=event.cache_prompt,
        cache_mode=event.cache_mode,
    )


def choose_session(state: State, ask: Ask) -> SessionId | None:
    """
    The session that is to serve a request, or None for a new one. Changes nothing.

    A session that the client names is strict, and found only within the client's tenant.
    Otherwise the session continues whose chain is the longest beginning of this one; among equals,
    the most recently used; within its group, if the client names one. A session that is working is
    skipped, because its chain will be different when it is done. A request that continues none gets
    a new session.
    """
    if ask.session_name is not None:
        named = SessionId(ask.session_name)
        held = state.sessions.get(named)
        return named if held is not None and held.tenant == ask.tenant else None
    if not ask.goes_on:
        return None
    for session in _continued(state, ask):
        assert session.last is not None
        same_model = session.last.fingerprint == ask.fingerprint
        if session.free and session.bug_id is None and same_model:
            return session.id
    return None


def decide(state: State, session: Session, request: OpenRequest) -> Join | Decision:
    """Whom a request joins, else its path. Changes nothing."""
    return join(state, session, request) or select(state, session, request)


def join(state: State, session: Session, request: OpenRequest) -> Join | None:
    """
    The request that computes more blocks of this prompt than are reusable now; of several, the one
    that gives the most, then the one whose path was selected first. None if there is none. Changes
    nothing.
    """
    if state.model is None or not state.model.reusable or not request.ask.cache_prompt:
        return None
    reused = _blocks_reusable(state, session, request)
    found: list[tuple[int, int, str]] = []
    for name in state.requests.values():
        leader = state.sessions[name]
        if not _leads(state, leader) or not _can_be_joined(leader, session):
            continue
        assert leader.request is not None and leader.request.path is not None
        blocks = _blocks_after(state, session, request, leader, reused)
        far = blocks - _sealed_by(leader) > _JOIN_FARTHEST * (blocks - reused)
        if not far and _has_more(state, leader, request.prompt_keys, reused, blocks):
            found.append((-blocks, leader.request.path.decided_at, leader.request.ask.request))
    if not found:
        return None
    fewest, _, chosen = min(found)
    return Join(leader=chosen, blocks=-fewest, reused_blocks=reused)


def waits(state: State, session: Session) -> bool:
    """Whether the request of a session still waits for blocks of the request that it joined."""
    joined = session.request.joined if session.request is not None else None
    if session.request is None or joined is None:
        return False
    named = state.requests.get(joined.leader)
    if named is None or not _leads(state, state.sessions[named]):
        return False
    keys, leader = session.request.prompt_keys, state.sessions[named]
    return _has_more(state, leader, keys, joined.reused_blocks, joined.blocks)


def followers(state: State, request: str) -> int:
    """How many requests have joined a request and wait for it."""
    found = [state.sessions[name].request for name in state.requests.values()]
    joined = [one.joined for one in found if one is not None and one.joined is not None]
    return sum(one.leader == request for one in joined)


def _leads(state: State, leader: Session) -> bool:
    """Whether a session's request prefills, and seals the blocks of its prompt as it does."""
    request = leader.request
    if request is None or request.path is None or state.model is None:
        return False
    if leader.state not in (SessionState.RESTORING, SessionState.PREFILLING):
        return False
    last = state.blocks.get(_last_key(request, _sealed_by(leader)))
    sealing = request.ask.prompt_tokens >= state.model.min_cache_tokens
    return sealing and (last is None or last.bug_id is None)


def _can_be_joined(leader: Session, session: Session) -> bool:
    """
    Whether a session may wait for a leader. With a slab of its own it waits only for one that has
    its slab, because the leader might wait for that slab in turn.
    """
    request = leader.request
    assert request is not None
    fits = request.ask.prompt_tokens + request.ask.max_tokens
    return leader.tenant == session.tenant and (session.slab is None or _has_room(leader, fits))


def _sealed_by(leader: Session) -> int:
    """How many blocks of its prompt a leader has sealed or found: it does not seal these again."""
    assert leader.request is not None and leader.request.path is not None
    path = leader.request.path
    if leader.state is SessionState.RESTORING:  # its slab may have blocks of another prompt
        return path.blocks_from_slab + path.blocks_from_pool
    return len(leader.slab_keys)


def _last_key(request: OpenRequest, blocks: int) -> str:
    return request.prompt_keys[blocks - 1] if blocks else ""


def _has_more(
    state: State, leader: Session, keys: tuple[str, ...], reused: int, blocks: int
) -> bool:
    """
    Whether a leader is still to seal one of the first ``blocks`` blocks, of which ``reused`` were
    reusable from the start. Not after one that it sealed was not stored, for want of room.
    """
    sealed = _sealed_by(leader)
    if not reused < blocks or sealed >= blocks:
        return False
    last = state.blocks.get(keys[sealed - 1]) if sealed > reused else None
    return sealed <= reused or (last is not None and last.usable)


def _blocks_reusable(state: State, session: Session, request: OpenRequest) -> int:
    reuse = _reusable(state, session, request, ask_of(request.ask, request.chain))
    return reuse.blocks + reuse.shared


def _blocks_after(
    state: State, session: Session, request: OpenRequest, leader: Session, reused: int
) -> int:
    """How many blocks of a prompt are reusable when a leader has sealed what it is to seal."""
    assert leader.request is not None
    theirs, sealed = leader.request.prompt_keys, _sealed_by(leader)
    same = common_length(theirs, request.prompt_keys)
    if same <= max(reused, sealed):
        return 0
    blocks = state.blocks.mutate()
    for key in theirs[sealed:same]:
        known = blocks.get(key)
        if known is not None and known.bug_id is not None:
            break
        blocks[key] = _to_come(key) if known is None else attrs.evolve(known, present=True)
    after = _blocks_reusable(attrs.evolve(state, blocks=blocks.finish()), session, request)
    return min(after, same)


def _to_come(key: str) -> Block:
    """A block that is not sealed yet, for what would be reusable if it were."""
    return Block(key=key, parent=None, digest="", start=0, tokens=0, bytes=0, present=True)


def select(state: State, session: Session, request: OpenRequest) -> Decision:
    """The path of a request that ``session`` has claimed. Changes nothing."""
    ask = ask_of(request.ask, request.chain)
    reuse = _reusable(state, session, request, ask)
    chunk = state.model.block_tokens if state.model else 0
    reused = reuse.total(chunk)
    goes_on = session.last is not None and continues(session.last, ask.chain)
    nearest = session if goes_on else _nearest(state, session, ask)
    reason = _reason(state, nearest, ask, goes_on, reused)
    last = nearest.last if nearest is not None else None
    found = reuse.blocks + reuse.shared
    if _is_new(reason, last, ask.chain) and _expired(state, request.prompt_keys[found : found + 1]):
        reason = "expired"
    held = last.sequence if last else ()
    differs = common_length(held, request.prompt_ids)
    diverged = reason == "diverged" and last is not None
    rerendered = 0 if reason else len(held) - differs
    return Decision(
        path="new_session" if reason else "continuation",
        reason=reason,
        tokens_from_slab=reuse.tokens,
        blocks_from_slab=reuse.blocks,
        blocks_from_pool=reuse.shared,
        partial_key=reuse.partial,
        tokens_from_partial=reuse.rows,
        reused_tokens=reused,
        prewarmed_tokens=_first_used(state, request.prompt_keys[: reuse.blocks + reuse.shared])
        + prewarmed_rows_before(session, reuse.tokens),
        rerendered_tokens=rerendered,
        nearest=nearest.id if nearest is not None else None,
        diverged_part=_diverged_part(last.chain, ask.chain) if last and diverged else None,
        diverged_token=differs if diverged or rerendered else None,
    )


def continues(last: Turn, chain: tuple[Part, ...]) -> bool:
    """
    Whether a chain continues where a session's last request ended.

    After an answer comes the client's version of it: a part of the assistant, in any words, or one
    that this request continues. If the last request continued a message, its answer is the rest of
    that message. A request that was cancelled has no answer; the same chain again continues it.
    """
    held = spoken(last.chain)
    if chain[: len(held)] != held:
        return False
    if not last.answered:
        return True
    return len(chain) > len(held) and chain[len(held)][0] in ("assistant", CONTINUED)


def _comparable(session: Session, ask: Ask) -> bool:
    """Whether a session may be matched by content: only unnamed ones of its tenant and group."""
    grouped = ask.group is None or session.group == ask.group
    return session.tenant == ask.tenant and not session.named and grouped


def _continued(state: State, ask: Ask) -> Iterator[Session]:
    """The sessions that this request continues: longest chain first, then most recently used."""
    for _, name, _ in reversed(ask.chain):
        found = [state.sessions[session] for session in state.tips.get(name, ())]
        for session in sorted(found, key=lambda s: s.last_used, reverse=True):
            assert session.last is not None
            if _comparable(session, ask) and continues(session.last, ask.chain):
                yield session


def _nearest(state: State, session: Session, ask: Ask) -> Session | None:
    """
    The conversation with the longest common beginning. It gives the reason, and nothing is reused
    because of it. If the client named a session, no other conversation is considered.
    """
    if session.last is not None:
        return session
    if ask.session_name is not None:
        return None
    for found in _continued(state, ask):
        return found
    front = _front(ask.chain)
    return (
        _with_part(state, ask, ask.chain[front:])
        or _meant(state, ask, front)
        or _with_part(state, ask, ask.chain[:front])
    )


def _front(chain: tuple[Part, ...]) -> int:
    """How many parts come before the messages of a conversation: tools and system prompts."""
    return next((at for at, part in enumerate(chain) if part[0] not in _CHANGED), len(chain))


def _with_part(state: State, ask: Ask, parts: tuple[Part, ...]) -> Session | None:
    """The conversation that has the last of these parts, after the same beginning."""
    for _, name, _ in reversed(parts):
        for known in reversed(state.parts.get(name, ())):
            if _comparable(state.sessions[known], ask):
                return state.sessions[known]
    return None


def _meant(state: State, ask: Ask, front: int) -> Session | None:
    """
    The conversation that a request was meant to continue although its beginning is different: its
    last message is one of the request's, and so is all that comes before that after tools and
    system prompts. Of several, the one whose last message comes latest, then the most recent. If
    there is none, one of which at least the message before is the request's, too, or the two
    before if tools or system prompts differ: "Noted." and a usual question alone say little. Of
    several, the one with the most in common.
    """
    names = [alone for _, _, alone in ask.chain]
    in_part: Session | None = None
    for end in range(len(names), front, -1):
        found: list[tuple[int, Session]] = []
        for known in reversed(state.ends.get(names[end - 1], ())[-_MEANT:]):
            session = state.sessions[known]
            assert session.last is not None
            if _comparable(session, ask):
                held = spoken(session.last.chain)
                theirs = [alone for _, _, alone in held]
                same = common_length(tuple(reversed(theirs)), tuple(reversed(names[front:end])))
                their_front = _front(held)
                if same == len(theirs) - their_front == end - front:
                    return session
                if same > (1 if theirs[:their_front] == names[:front] else 2):
                    found.append((same, session))
        if found and in_part is None:
            in_part = max(found, key=lambda one: one[0])[1]
    return in_part


def _reason(
    state: State, nearest: Session | None, ask: Ask, goes_on: bool, reused: int
) -> Reason | None:
    """Why a request takes the path of a new session; None if it continues one."""
    if not ask.cache_prompt:
        return "cache_disabled"
    if not ask.goes_on:
        return "cache_mode_prefix"
    if nearest is None or nearest.last is None:
        return "cold_start"
    if continues(nearest.last, ask.chain):
        if nearest.bug_id is not None:
            return "quarantined"
        if nearest.last.fingerprint != ask.fingerprint:
            return "fingerprint_changed"
        if not goes_on:
            return "session_busy"
        if not reused and _too_short(state, nearest.last):
            return "too_short"
        # What is left may be of other conversations that begin with the same words.
        gone = _gone(state, nearest.last)
        if reused >= len(gone) * _chunk(state):
            return None
        return "expired" if all(map(_has_expired, gone)) else "evicted"
    if nearest.last.chain[: len(ask.chain)] == ask.chain:
        return "cold_start" if _is_first(ask) else "shorter_history"
    return "diverged"


def _is_first(ask: Ask) -> bool:
    """
    Whether a request is the first of a conversation, as far as its client says: it has no answer
    yet, and names no session. That another conversation began with the same words is no fault.
    """
    return ask.session_name is None and all(name != "assistant" for name, _, _ in ask.chain)


def _gone(state: State, last: Turn) -> list[Block]:
    """The blocks of this conversation that were sealed and are not available any more."""
    sealed = [state.blocks[key] for key in last.prompt_keys if key in state.blocks]
    return [block for block in sealed if not block.usable]


def cause_of_loss(state: State, path: ev.PathSelected) -> Cause | None:
    """
    What happened to the blocks of the conversation that a path just selected continues; None if not
    all had the same end, or none is gone.
    """
    held = state.sessions.get(SessionId(path.nearest)) if path.nearest is not None else None
    if path.reason != "evicted" or held is None or held.last is None:
        return None
    ends = {block.gone is None for block in _gone(state, held.last) if not _has_expired(block)}
    return ("lost" if ends.pop() else "evicted") if len(ends) == 1 else None


def _is_new(reason: Reason | None, last: Turn | None, chain: tuple[Part, ...]) -> bool:
    """Whether a request has no message of the nearest conversation, or there is none."""
    if reason != "diverged" or last is None:
        return reason == "cold_start"
    return common_length(last.chain, chain) <= _front(chain) and last.end not in [
        alone for _, _, alone in chain
    ]


def _expired(state: State, keys: tuple[str, ...]) -> bool:
    """Whether blocks of these were sealed, and all are gone because their TTL was over."""
    sealed = [state.blocks[key] for key in keys if key in state.blocks]
    return bool(sealed) and all(map(_has_expired, sealed))


def _has_expired(block: Block) -> bool:
    return not block.there and block.gone == "expired"


def around(
    state: State, request: OpenRequest, decision: Decision
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """
    The tokens of a prompt around the first one that differs, and those of the nearest session
    there, to show to people; None if nothing differs.
    """
    token = decision.diverged_token
    if token is None or decision.nearest is None:
        return None, None
    last = state.session(decision.nearest).last
    assert last is not None
    held = last.sequence
    start, end = max(0, token - _AROUND), token + _AROUND
    return request.prompt_ids[start:end], held[start:end]


def _too_short(state: State, last: Turn) -> bool:
    """
    Whether this conversation fills a block, and none was sealed because its prompt was shorter than
    the minimum.
    """
    if state.model is None or not last.prompt_keys:
        return False
    tokens = len(last.prompt_keys) * state.model.block_tokens
    return tokens < state.model.min_cache_tokens and not any(
        key in state.blocks for key in last.prompt_keys
    )


def _reusable(state: State, session: Session, request: OpenRequest, ask: Ask) -> Reuse:
    """
    What a request reuses.

    The pass over the last prompt token always runs, because its logits are needed. A slab that is
    too small for prompt and answer is replaced, so nothing in it is reused; nor is anything if the
    session may not be continued.
    """
    if state.model is None or not state.model.reusable or not ask.cache_prompt:
        return Reuse()
    ids, tokens = request.prompt_ids[:-1], len(request.prompt_ids)
    fits = request.ask.prompt_tokens + request.ask.max_tokens
    mine = session if ask.goes_on else None
    first = beginning(ask.fingerprint, ask.tenant)
    return _reuse(state, mine, ids, request.prompt_keys, fits, tokens, first)


def reusable_prewarm(
    state: State, session: Session, ids: tuple[int, ...], keys: tuple[str, ...]
) -> Reuse:
    """What a prewarm reuses. Changes nothing. A decision by the same rules as a path."""
    first = beginning(session.fingerprint, session.tenant)
    return _reuse(state, session, ids, keys, 0, len(ids), first)


def _reuse(
    state: State,
    session: Session | None,
    ids: tuple[int, ...],
    keys: tuple[str, ...],
    fits: int,
    tokens: int,
    first: str,
) -> Reuse:
    """
    What is reused of a sequence: from the slab, and then from the pool. Blocks of the pool replace
    the rows of a block that the slab has only the first of. So do the first rows of a block of the
    pool if these are more.

    Args:
        session: whose slab may be used; None for none.
        ids: the tokens whose KV may be reused.
        keys: of the blocks; more than ``ids`` fill are ignored.
        tokens: the length of the whole sequence.
        first: the name of the first blocks of sequences, see ``state.beginning``.
    """
    chunk = _chunk(state)
    keys = keys[: len(ids) // chunk]
    kept = _in_slab(state, session, keys, fits)
    shared = _in_store(state, keys, kept)
    rows = 0
    if not shared and state.model is not None and tokens >= state.model.min_cache_tokens:
        rows = _rows_in_slab(state, session, ids, kept, fits)
    whole = kept + shared
    parent = keys[whole - 1] if whole else first
    partial, most = _in_part(state, parent, ids[whole * chunk : (whole + 1) * chunk - 1], rows)
    if partial is not None:
        return Reuse(kept * chunk, kept, shared, partial, most)
    return Reuse(kept * chunk + rows, kept, shared)


def _in_part(
    state: State,
    parent: str,
    ids: tuple[int, ...],
    least: int,
    there: Callable[[Block], bool] = lambda block: block.usable,
) -> tuple[str | None, int]:
    """
    The block after ``parent`` that begins with the most of these tokens, and with how many: more
    than ``least``. Among equals, the one that was sealed or matched in part last. (None, 0) if
    there is none, as always with the grain C: recurrent states and the rows of a window are those
    at the end of a block.
    """
    wanted = ids_bytes(ids)
    partial, most = None, max(least, LEAST_PARTIAL - 1)
    for key in reversed(state.children.get(parent, ())):
        block = state.blocks[key]
        # Most are no better than the best so far, and are not compared any further.
        more = wanted[: ID_BYTES * (most + 1)]
        if len(more) > ID_BYTES * most and block.ids.startswith(more) and there(block):
            partial, most = key, common_length(block.ids, wanted) // ID_BYTES
    return (partial, most) if partial is not None else (None, 0)


def _in_store(state: State, keys: tuple[str, ...], kept: int) -> int:
    """
    How many of these blocks, after those from the slab, can be restored from memory. If tokens
    attend to sinks and a window, the blocks of these are enough. If layers have states, up to the
    last block that carries them.
    """
    if state.model is not None and state.model.policy is not None:
        return _by_window(state, keys, kept, lambda block: block.usable)
    shared, find = 0, state.blocks.get
    for key in keys[kept:]:
        block = find(key)
        # ``usable``, written out because a long prompt has many blocks
        if block is None or not block.present or block.bug_id is not None:
            break
        shared += 1
    return _up_to_a_checkpoint(state, kept, shared)


def _up_to_a_checkpoint(state: State, kept: int, blocks: int) -> int:
    """How many of these blocks, after those from the slab, can be continued from."""
    rule = state.model.checkpoints if state.model is not None else None
    return blocks if rule is None else max(0, rule.last(kept + blocks) - kept)


def _by_window(
    state: State, keys: tuple[str, ...], kept: int, there: Callable[[Block], bool]
) -> int:
    """
    How many of these blocks, after those from the slab, can be continued from: up to the last one
    for which the blocks of the sinks and of the window are available. The blocks between are on
    record and not quarantined, because the blocks after them are. Looks at no more blocks than a
    window has if the last ones are available.
    """
    assert state.model is not None and state.model.policy is not None
    policy, chunk = state.model.policy, state.model.block_tokens
    end = len(keys)
    while end > kept and ((block := state.blocks.get(keys[end - 1])) is None or block.bug_id):
        end -= 1
    for place in range(kept, min(policy.sink_blocks(chunk), end)):
        if not there(state.blocks[keys[place]]):
            end = place
            break
    lowest = end  # those in [lowest, end) are there
    while end > kept:
        begin = max(policy.first_block(end, chunk), kept)
        while lowest > begin and there(state.blocks[keys[lowest - 1]]):
            lowest -= 1
        if lowest <= begin:
            break
        end = lowest = lowest - 1
    return end - kept


def _first_used(state: State, keys: tuple[str, ...]) -> int:
    """How many tokens of these blocks were prewarmed and have not been reused yet."""
    blocks = state.blocks
    return sum([blocks[key].prewarmed for key in keys])


def _has_room(session: Session | None, fits: int) -> TypeGuard[Session]:
    """Whether a session has a slab of at least ``fits`` tokens."""
    return session is not None and session.slab is not None and session.slab.capacity_tokens >= fits


def _in_slab(state: State, session: Session | None, keys: tuple[str, ...], fits: int) -> int:
    """
    How many of these blocks are at the beginning of a session's slab, if prompt and answer fit in
    it; 0 if the slab cannot be trimmed to them, because its window has moved on, or because layers
    have states and more was sealed since.
    """
    if not _has_room(session, fits):
        return 0
    blocks = state.blocks
    same = keys[: common_length(session.slab_keys, keys)]
    kept = len(same)
    for place, bug_id in enumerate([blocks[key].bug_id for key in same]):
        if bug_id is not None:
            kept = place
            break
    if state.model is not None and state.model.checkpoints and kept < len(session.slab_keys):
        return 0
    policy = state.model.policy if state.model is not None else None
    if policy is not None and not policy.reaches(session.window_start, kept * _chunk(state)):
        return 0
    return kept


def _rows_in_slab(
    state: State, session: Session | None, ids: tuple[int, ...], kept: int, fits: int
) -> int:
    """
    How many rows of a session's slab, after its first ``kept`` blocks and in the next one, are
    those of a sequence. 0 with the grain C, and if the block that they are in is quarantined or was
    not sealed although it is full.
    """
    model = state.model
    if model is None or model.grain != 1 or not _has_room(session, fits):
        return 0
    start, canonical = kept * model.block_tokens, canonical_end(state, session)
    if kept < len(session.slab_keys) and state.blocks[session.slab_keys[kept]].bug_id is not None:
        return 0
    end = min(start + model.block_tokens, canonical, len(ids))
    return common_length(slab_ids(session, start, end), ids[start:end])


def row_to_check(state: State, path: ev.PathSelected) -> int | None:
    """
    The row that the first pass of a request computes again: with the grain 1 the last one that it
    reuses, of the slab or of a partial match, if it is in a block that the pass continues. None if
    there is none.
    """
    if state.model is None or path.reused_tokens % state.model.block_tokens == 0:
        return None
    return path.reused_tokens - 1


def canonical_end(state: State, session: Session) -> int:
    """
    The position up to which a session's slab is kept between requests. With the grain C: its sealed
    blocks. With the grain 1 also the canonical rows of a block that is not full yet: a full one
    that was not sealed is quarantined, or of a sequence that is too short to be cached.
    """
    chunk = state.model.block_tokens if state.model is not None else 1
    sealed = len(session.slab_keys) * chunk
    if state.model is None or state.model.grain != 1 or session.canonical_tokens >= sealed + chunk:
        return sealed
    return session.canonical_tokens


def _chunk(state: State) -> int:
    assert state.model is not None
    return state.model.block_tokens


def keys_on_record(state: State, ask: Ask, ids: tuple[int, ...]) -> tuple[str, ...]:
    """
    The keys of the first blocks of a prompt that the conversation with the longest common beginning
    has, so that only new tokens have to be hashed. This is only for speed: the tokens have these
    keys anyway. Changes nothing.
    """
    last = _same_beginning(state, ask)
    if last is None or state.model is None:
        return ()
    return last.prompt_keys[: common_length(last.prompt_ids, ids) // state.model.block_tokens]


def _same_beginning(state: State, ask: Ask) -> Turn | None:
    """The last turn of the session that a request names, else of one that has its first parts."""
    if ask.session_name is not None:
        names: Iterator[SessionId] = iter((SessionId(ask.session_name),))
    else:
        deepest_first = (name for _, name, _ in reversed(ask.chain))
        names = (known for part in deepest_first for known in reversed(state.parts.get(part, ())))
    for name in names:
        held = state.sessions.get(name)
        last = held.last if held is not None and held.tenant == ask.tenant else None
        if last is not None and last.fingerprint == ask.fingerprint:
            return last
    return None


def chain_to_load(
    state: State,
    session: Session | None,
    ask: Ask,
    keys: tuple[str, ...],
    prompt_ids: tuple[int, ...],
    fits: int,
) -> tuple[str, ...]:
    """
    The blocks that a decision could reuse if those that are only in files were in memory, from the
    first one that the session's slab does not have. The last one may be reused in part, if that
    spares at least a quarter of it. Empty if none needs to be loaded.

    Loading is an event before the decision, so that the decision depends only on the state.

    Args:
        session: the one that serves; None for a new one.
        keys: of the prompt's full blocks.
        fits: tokens of prompt and answer.
    """
    if state.model is None or not state.model.reusable or not state.disk_budget:
        return ()
    if not ask.cache_prompt:
        return ()
    chunk, ids = state.model.block_tokens, prompt_ids[:-1]
    keys = keys[: len(ids) // chunk]
    kept = _in_slab(state, session, keys, fits) if ask.goes_on else 0
    if (policy := state.model.policy) is not None:
        found = _by_window(state, keys, kept, lambda block: block.usable or block.loadable)
        places = policy.copied(kept, kept + found, state.model.block_tokens)
        copied = tuple(keys[place] for place in places)
        return () if all(state.blocks[key].present for key in copied) else copied
    chain: list[Block] = []
    for key in keys[kept:]:
        block = state.blocks.get(key)
        if block is None or not (block.usable or block.loadable):
            break
        chain.append(block)
    del chain[_up_to_a_checkpoint(state, kept, len(chain)) :]
    rows = 0
    if not chain and ask.goes_on and len(prompt_ids) >= state.model.min_cache_tokens:
        rows = _rows_in_slab(state, session, ids, kept, fits)
    whole = kept + len(chain)
    parent = keys[whole - 1] if whole else beginning(ask.fingerprint, ask.tenant)
    ids = ids[whole * chunk : (whole + 1) * chunk - 1]
    _, now = _in_part(state, parent, ids, rows)
    partial, then = _in_part(
        state, parent, ids, max(rows, now), lambda block: block.usable or block.loadable
    )
    if partial is not None and LOAD_PARTIAL * (then - max(rows, now)) >= chunk:
        chain.append(state.blocks[partial])
    return () if all(block.present for block in chain) else tuple(block.key for block in chain)


def chain_to_adopt(
    state: State,
    session: Session | None,
    ask: Ask,
    keys: tuple[str, ...],
    prompt_ids: tuple[int, ...],
    fits: int,
) -> tuple[str, ...]:
    """
    The full blocks of a prompt after those that a decision could reuse, up to one that is
    quarantined: other nodes may have them. None under ``sink_window``, where a block between the
    sinks and the window is not needed. Arguments as for ``chain_to_load``.
    """
    model = state.model
    if model is None or not model.reusable or model.policy is not None:
        return ()
    if not ask.cache_prompt or len(prompt_ids) < model.min_cache_tokens:
        return ()
    keys = keys[: len(prompt_ids[:-1]) // model.block_tokens]
    place = _in_slab(state, session, keys, fits) if ask.goes_on else 0
    while place < len(keys) and _is_there(state, keys[place]):
        place += 1
    chain: list[str] = []
    for key in keys[place:]:
        block = state.blocks.get(key)
        if block is not None and block.bug_id is not None:
            break
        chain.append(key)
    return tuple(chain)


def _is_there(state: State, key: str) -> bool:
    block = state.blocks.get(key)
    return block is not None and (block.usable or block.loadable)


def adoptable(
    state: State, keys: tuple[str, ...], chain: tuple[str, ...], found: Collection[str]
) -> tuple[str, ...]:
    """
    How much of a chain can be continued from, if the blocks that were found are adopted.

    Args:
        keys: of the prompt's full blocks.
        chain: of ``chain_to_adopt``.
        found: the keys that other nodes have.
    """
    if not chain:
        return ()
    shared = 0
    for key in chain:
        if key not in found and not _is_there(state, key):
            break
        shared += 1
    return chain[: _up_to_a_checkpoint(state, keys.index(chain[0]), shared)]


def _diverged_part(held: tuple[Part, ...], chain: tuple[Part, ...]) -> str:
    """
    The first part that differs, by the names that Anthropic's API has for it.

    If one of them has a part that the other does not have, the first one is named: tools come
    before the system prompt.
    """
    for mine, theirs in zip(held, chain, strict=False):
        if mine[1] != theirs[1] and mine[2] == theirs[2] and mine[0] == "tools":
            return "tools_reordered"
        if mine != theirs:
            found = (_CHANGED[name] for name in _CHANGED if name in (mine[0], theirs[0]))
            return next(found, "messages_changed")
    return "messages_changed"


def common_length(one: tuple[object, ...] | bytes, other: tuple[object, ...] | bytes) -> int:
    """The length of the longest common beginning."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, high = 0, length
    while low < high:  # slices are compared in C, and no element twice
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
