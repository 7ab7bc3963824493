"""
What the journal implies: ``apply(state, event) -> state``.

Rules of this module:

1. ``apply`` is the only way to make a state. It changes nothing in place: a state is a value, and
   the one before it stays as it was.
2. It is only called with events that broke no invariant, so it does not check them again. An event
   that does not fit raises ``LookupError`` or ``AssertionError``, which is a bug.
3. No event is ignored silently: ``match`` is exhaustive, and ``assert_never`` proves it.

Maps are ``immutables.Map`` (hash array mapped tries): a changed copy costs the logarithm of the
size, so that folding an event costs no more than the event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NewType, assert_never

import attrs
from immutables import Map

from cairn.journal import events as ev
from cairn.journal import speculation
from cairn.journal.cache import adoption
from cairn.journal.cache.checkpoints import Checkpoints
from cairn.journal.cache.gone_blocks import without_gone
from cairn.journal.cache.windows import SinkWindow
from cairn.journal.calls import form_of
from cairn.journal.copies import changed
from cairn.journal.keys import IdBytes, framed, ids_bytes
from cairn.journal.lifecycle import SessionState, next_state, trigger
from cairn.journal.tenants import agent_session

SessionId = NewType("SessionId", str)
Part = tuple[str, str, str]
"""(name of the part, its hash over all parts up to it, its hash alone)"""
CONTINUED: Final = "continued"
"""The name of a last part that is the beginning of the answer: the request continues it."""

Pins = Map[SessionId, tuple[str, ...]]

ACCEPTED_UNSTABLE = "accept_unstable"
"""The action of an operator who serves a model that failed its self-test."""

CHILDREN = 64
"""
The most blocks after one that are compared with a prompt, so that a decision takes no longer if
thousands of conversations have the same beginning.
"""


@attrs.frozen(kw_only=True)
class Model:
    """
    What the state needs of a loaded model. See ``events.ModelLoaded``.

    Attributes:
        markers: the texts that divide its answers, from its fingerprint's fields.
        calls: how its answers have calls, see ``calls.form_of``.
    """

    name: str
    fingerprint: str
    layers: int
    block_tokens: int
    decode_rows: int
    context_tokens: int
    reusable: bool
    pool_slabs: int
    pool_bytes: int
    blocks_bytes: int
    blocks_max: int
    kv_sinks: int
    kv_window: int
    kv_rows: int
    min_cache_tokens: int
    state_blocks: int
    grain: int
    markers: tuple[str, ...] = ()
    calls: tuple[str, ...] | None = None

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Which blocks carry recurrent states; None if no layer has one."""
        if not self.state_blocks:
            return None
        return Checkpoints(block_tokens=self.block_tokens, blocks=self.state_blocks)

    @property
    def policy(self) -> SinkWindow | None:
        """What a token attends to; None if the model's own layers decide that."""
        if not self.kv_window:
            return None
        return SinkWindow(sinks=self.kv_sinks, window=self.kv_window, rows=self.kv_rows)


@attrs.frozen(kw_only=True)
class Slab:
    """The slab of a session."""

    id: int
    capacity_tokens: int
    bytes: int


def spoken(chain: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts of a chain that are complete: all but the beginning of an answer."""
    return chain[:-1] if len(chain) > 1 and chain[-1][0] == CONTINUED else chain


def continues_text(chain: tuple[Part, ...]) -> bool:
    """Whether an answer directly continues the text of its prompt, raw or a message."""
    return bool(chain) and (chain[0][0] == "prompt" or chain[-1][0] == CONTINUED)


@attrs.frozen(kw_only=True)
class Turn:
    """
    The last request that a session served.

    Attributes:
        fingerprint: of the model that served it.
        answered: whether its answer was completed.
        answer_ids: the answer, with its end token; empty if it was not completed, or if no token
            was requested.
    """

    request: str
    fingerprint: str
    chain: tuple[Part, ...]
    prompt_ids: tuple[int, ...]
    prompt_keys: tuple[str, ...]
    answered: bool
    answer_ids: tuple[int, ...]

    @property
    def tip(self) -> str:
        """The hash of the last part that was complete, which names the chain up to it."""
        return spoken(self.chain)[-1][1]

    @property
    def end(self) -> str:
        """The hash of that part alone."""
        return spoken(self.chain)[-1][2]

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt_ids + self.answer_ids


@attrs.frozen(kw_only=True)
class StoredTurn:
    """
    Whose a stored turn is. Its texts are in the row.

    Attributes:
        agent: the name of its agent; None if it has none.
        row: the row of ``turn_stored``.
    """

    tenant: str
    agent: str | None
    row: int


@attrs.frozen(kw_only=True)
class AgentHead:
    """
    An agent, by the id of its session.

    Attributes:
        head: the request of its last turn; None before the first.
        persist: whether it outlives this run of the server.
        awaited: how many turns of its history are still to be adopted.
    """

    head: str | None
    persist: bool
    awaited: int = 0


@attrs.frozen(kw_only=True, slots=False)  # see ``changed``
class OpenRequest:
    """
    The request that a session is serving.

    Attributes:
        ask: the event that opened it.
        sampled: the tokens sampled so far; the last one has no KV yet.
        emitted: how many of them were released for delivery.
        joined: whose blocks it waits for, until its path is selected.
        path: the decision, once it is made.
        row_checked: whether the last row of the slab was computed again.
        texts: the text that was released, in few pieces, see ``lengthened_texts``; private.
        stored: the row of its ``turn_stored``; None before it, or if there is none.
    """

    ask: ev.RequestReceived
    chain: tuple[Part, ...]
    prompt_ids: tuple[int, ...]
    prompt_keys: tuple[str, ...]
    sampled: tuple[int, ...] = ()
    emitted: int = 0
    joined: ev.PrefixJoined | None = None
    path: ev.PathSelected | None = None
    row_checked: bool = False
    texts: tuple[str, ...] = ()
    stored: StoredTurn | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and the tokens sampled so far."""
        return self.prompt_ids + self.sampled


@attrs.frozen(kw_only=True)
class OpenPrewarm:
    """
    The beginning of the next prompt, from ``prewarm_started`` to the event that ends it. Meanwhile
    the passes of settling compute these tokens instead of prompt and answer.

    Attributes:
        ids: the token ids, from the first one of the prompt on.
        keys: the key of each full block of them.
        tokens_from_slab: those that the slab has from before.
        blocks_from_slab: the full blocks among these.
        blocks_from_pool: the blocks to be copied in from the pool.
        partial_key: the block whose first rows are to be copied in after these; None for none.
        tokens_from_partial: how many rows that are.
        computed_tokens: the tokens computed since.
    """

    ids: tuple[int, ...]
    keys: tuple[str, ...]
    tokens_from_slab: int
    blocks_from_slab: int
    blocks_from_pool: int
    partial_key: str | None = None
    tokens_from_partial: int = 0
    computed_tokens: int = 0


@attrs.frozen(kw_only=True, slots=False)  # see ``changed``
class Session:
    """
    A conversation and its KV.

    Attributes:
        state: its state in ``lifecycle.STEPS``.
        cached_tokens: the slab has the KV of the tokens ``[0, cached_tokens)``.
        canonical_tokens: how many of them, from the first on, canonical passes computed; a decode
            step adds none.
        window_start: the first token that the layers still have; 0 if none was dropped.
        slab_keys: the keys of the canonical blocks at the beginning of the slab.
        slab_ids: the token ids of the canonical rows are the first ``canonical_tokens`` of these,
            in consecutive parts.
        prewarmed_rows: how many of the rows after these blocks a prewarm computed that no request
            has reused yet; they are the last canonical ones.
        prewarm: the prewarm that is running, if any.
        drafted_tokens, accepted_tokens: the draft tokens of its answers, see ``speculation``.
        bug_id: why it is quarantined.
        last_used: position of its last request.
        previous_use: position of the request before that; None if there was none.
        ttl_s: its TTL in seconds, from that request; None for no expiry.
        expires_us: when it expires, in microseconds since 1970; None for never.
        texts_at: the rows of its turns that have texts of their own, each with their names.
        planned_done: whether all that was planned was computed since the last answer; None if
            nothing on record says so.
    """

    id: SessionId
    tenant: str
    fingerprint: str
    group: str | None
    named: bool
    state: SessionState = SessionState.COLD
    request: OpenRequest | None = None
    last: Turn | None = None
    prewarm: OpenPrewarm | None = None
    slab: Slab | None = None
    cached_tokens: int = 0
    canonical_tokens: int = 0
    window_start: int = 0
    slab_keys: tuple[str, ...] = ()
    slab_ids: tuple[tuple[int, ...], ...] = ()
    prewarmed_rows: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    bug_id: str | None = None
    last_used: int = 0
    previous_use: int | None = None
    ttl_s: int | None = None
    expires_us: int | None = None
    texts_at: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    planned_done: bool | None = None

    @property
    def free(self) -> bool:
        """Whether it can take a request. A settling session stops settling for one."""
        return self.state in (SessionState.IDLE, SessionState.COLD, SessionState.SETTLING)

    @property
    def work_ids(self) -> tuple[tuple[int, ...], ...]:
        """
        The tokens that its passes compute, in consecutive parts: of prompt and answer, or of a
        prewarm. They are not joined, because a prompt may be long.
        """
        if self.request is not None:
            return self.request.prompt_ids, self.request.sampled
        if self.prewarm is not None:
            return (self.prewarm.ids,)
        return (self.last.prompt_ids, self.last.answer_ids) if self.last is not None else ()

    @property
    def work_keys(self) -> tuple[str, ...]:
        """The keys of the blocks of these tokens, as far as the journal knows them."""
        if self.request is not None:
            return self.request.prompt_keys
        if self.prewarm is not None:
            return self.prewarm.keys
        return self.last.prompt_keys if self.last is not None else ()


@attrs.frozen(kw_only=True)
class Block:
    """
    A sealed block: in memory, in a file, or known only by its digest.

    Its uses are in ``State.uses``, once for a whole chain.

    Attributes:
        bytes: of its KV in memory.
        present: whether it is in memory.
        prewarmed: how many of its tokens were computed for a prewarm, if no request has reused it
            yet; else 0.
        file_bytes: the size of its file; None if it has none.
        last_used: position at which it was last sealed or loaded.
        previous_use: position of the use before that, see ``Use``; None if there was none.
        expires_us: the latest expiry that a session sealed it with, in microseconds since 1970;
            None for never.
        gone: why it last left memory or disk since it was sealed; None if it never did, or if the
            model was unloaded since.
        tokens: C, or fewer in a short block, see ``cache/short_blocks``.
        ids: its token ids, see ``keys.ids_bytes``, while it can be matched in part; private. Empty
            if it is neither in memory nor in a file, with the grain C, and if a prune removed them.
        node: the other node whose file it was read from; None if it was last sealed here.
    """

    key: str
    parent: str | None
    digest: str
    start: int
    tokens: int
    bytes: int
    present: bool
    ids: IdBytes = b""
    prewarmed: int = 0
    file_bytes: int | None = None
    last_used: int = 0
    previous_use: int | None = None
    expires_us: int | None = None
    gone: ev.RemovalReason | None = None
    bug_id: str | None = None
    node: str | None = None

    @property
    def there(self) -> bool:
        """Whether it is in memory or in a file."""
        return self.present or self.file_bytes is not None

    @property
    def usable(self) -> bool:
        """Whether it may be shared."""
        return self.present and self.bug_id is None

    @property
    def loadable(self) -> bool:
        """Whether it can be loaded from its file."""
        return not self.present and self.file_bytes is not None and self.bug_id is None


@attrs.frozen(kw_only=True)
class Use:
    """
    The last use of a chain of blocks: of the block with its key in ``State.uses``, and of all
    blocks before that. Longer chains with the same beginning may have later uses.

    Attributes:
        position: of the decision to use it.
        previous: of the use before that: the previous request of the same session or, if this is
            its first, the last use that another session made of the chain; None if there is none.
            What a session does between two of its requests is one use.
        expires_us: the latest expiry that such decisions gave the chain, in microseconds since
            1970; None for never.
    """

    position: int
    previous: int | None = None
    expires_us: int | None = None


@attrs.frozen(kw_only=True)
class Fault:
    """
    A violation on record.

    Attributes:
        position: of ``invariant_violated``; the event that broke the invariant is at
            ``event.at_position``.
    """

    event: ev.InvariantViolated
    position: int


@attrs.frozen(kw_only=True)
class Pool:
    """
    How many slabs, blocks in memory and block files there are, their bytes, and the tokens of the
    blocks in memory.
    """

    slabs: int = 0
    slab_bytes: int = 0
    blocks: int = 0
    block_bytes: int = 0
    block_tokens: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0


@attrs.frozen(kw_only=True)
class Shadow:
    """
    The shadow check that is running.

    Attributes:
        checked: whether it found the answer the same as on record.
    """

    of_session: str
    request: str
    slab: Slab
    checked: bool = False


@attrs.frozen(kw_only=True, slots=False)  # see ``changed``
class State:
    """
    All that the journal implies up to ``position``.

    Attributes:
        time_us: the latest time on a row, in microseconds since 1970. It never goes back, even if
            the clock does. TTLs are counted from it; no decision depends on it.
        boot: the run of the server that has the journal open; None between runs.
        lease: the token of the writer that may commit, on PostgreSQL.
        heads_seen: node to position and hash of the last head of its journal that this one saw.
        streams: last sequence number of each stream.
        model: what is loaded in this run of the server.
        tips: tip of a chain to the sessions whose last request had this chain. Named sessions are
            neither here nor in ``parts`` and ``ends``, because they are never matched by content.
        parts: hash of a part to the sessions whose last request had it, the most recent last; finds
            the nearest conversation.
        ends: hash of a part alone to the sessions whose last request ended with it, the most recent
            last; finds a conversation whose beginning changed.
        blocks: the prefix cache: every block that was sealed, by its key, because a key has one
            digest, also when it comes again. A prune removes those that are gone everywhere, see
            ``gone_blocks``.
        uses: key of a chain's last block to the last two uses of that chain. One entry for a whole
            chain, so that using a long one costs no more than a short one;
            ``eviction_order.Order`` derives the uses of each block.
        children: key of a block to the blocks that were sealed on it, those sealed or matched in
            part last at the end; the latest ``CHILDREN`` of those in memory or in files. The first
            blocks of sequences are under ``beginning``. With the grain C there are none.
        pins: session to the blocks that must not leave memory while it works with them, or waits
            for them: such a block may not be sealed yet.
        requests: open request to its session.
        self_tests: fingerprint without its row class to what its self-test found.
        shadow: the shadow check that is running, if any.
        disk_budget: the most bytes of block files in this run; 0 if none may be written.
        rates: what computing and adopting blocks took, since the model was loaded.
        tested: the last self-test since a run began or a model was loaded, which is that of the
            next model; None if there was none.
        unstable_accepted: whether the operator accepted since then that it failed.
        turns: request to whose its stored turn is, deleted or not.
        turns_pruned: whether stored turns were pruned, so that a row may name one of them.
        agents: the agents, by the ids of their sessions.
        released: the agents that were handed over to other nodes, by the ids of their sessions, to
            their names there; also those that were forgotten since.
        adopted: the releases by which agents came from other nodes (NODE:POSITION:HASH), to the ids
            of their sessions; also those that were deleted since.
        lost: heads (POSITION:HASH) that the journal has lost, each with the row by which the
            operator accepted that.
    """

    position: int = 0
    time_us: int = 0
    boot: str | None = None
    lease: int = 1
    heads_seen: Map[str, tuple[int, str]] = Map()
    model: Model | None = None
    streams: Map[str, int] = Map()
    sessions: Map[SessionId, Session] = Map()
    requests: Map[str, SessionId] = Map()
    tips: Map[str, tuple[SessionId, ...]] = Map()
    parts: Map[str, tuple[SessionId, ...]] = Map()
    ends: Map[str, tuple[SessionId, ...]] = Map()
    blocks: Map[str, Block] = Map()
    uses: Map[str, Use] = Map()
    children: Map[str, tuple[str, ...]] = Map()
    pins: Map[SessionId, tuple[str, ...]] = Map()
    faults: Map[str, Fault] = Map()
    self_tests: Map[str, ev.SelfTestFinished] = Map()
    pool: Pool = Pool()
    shadow: Shadow | None = None
    disk_budget: int = 0
    rates: adoption.Rates = adoption.NO_RATES
    admission_bug: str | None = None
    tested: ev.SelfTestFinished | None = None
    unstable_accepted: bool = False
    turns: Map[str, StoredTurn] = Map()
    turns_pruned: bool = False
    agents: Map[str, AgentHead] = Map()
    released: Map[str, str] = Map()
    released_kept: Map[str, int] = Map()
    adopted: Map[str, str] = Map()
    lost: Map[str, int] = Map()

    def session(self, session: str) -> Session:
        """
        The session of that id.

        Raises:
            KeyError: there is no such session.
        """
        return self.sessions[SessionId(session)]

    def is_short(self, block: Block) -> bool:
        """Whether a block has fewer than C tokens, see ``short_blocks``."""
        return self.model is not None and block.tokens < self.model.block_tokens

    def is_pinned(self, key: str) -> bool:
        """Whether a session is working with this block."""
        return any(key in keys for keys in _pin_sets.of(self.pins))


class _PinSets:
    """
    The pins of the last look-up, as sets: searching the pins of long conversations is slow, and
    blocks are evicted one after the other. This is only a cache: pins are values, so the same
    object has the same contents, and nothing has to be invalidated.
    """

    def __init__(self) -> None:
        none: dict[SessionId, tuple[tuple[str, ...], frozenset[str]]] = {}
        pins: Pins = Map()
        self._last = pins, none, tuple[frozenset[str], ...]()

    def of(self, pins: Pins) -> tuple[frozenset[str], ...]:
        """A set for each session. Takes time in proportion to the pins that changed."""
        last, known, sets = self._last
        if last is pins:
            return sets
        now = {}
        for session, keys in pins.items():
            was = known.get(session)
            now[session] = was if was is not None and was[0] is keys else (keys, frozenset(keys))
        sets = tuple(pinned for _, pinned in now.values())
        self._last = pins, now, sets  # in one step, because other threads read it
        return sets


_pin_sets = _PinSets()

EMPTY = State()


def lengthened(state: State, recorded: ev.Recorded) -> State:
    """The state with one more row and no other change: the whole effect of a violating event."""
    return changed(
        state,
        position=recorded.position,
        time_us=max(state.time_us, recorded.time_us),
        streams=state.streams.set(recorded.stream, recorded.seq),
    )


def apply(state: State, recorded: ev.Recorded) -> State:
    """The state after an event that breaks no invariant. Changes nothing in place."""
    state = lengthened(state, recorded)
    event = recorded.event
    match event:
        case ev.ServerStarted():
            return attrs.evolve(_untested(state), boot=event.boot, admission_bug=None)
        case ev.ServerStopped() | ev.ServerLost():
            return _memory_gone(attrs.evolve(state, boot=None, agents=_persistent(state.agents)))
        case ev.ModelLoaded():
            return attrs.evolve(_untested(state), model=_model(event))
        case ev.ModelUnloaded():
            return _memory_gone(state)
        case ev.SelfTestFinished():
            tests = state.self_tests.set(event.base_fingerprint, event)
            return attrs.evolve(state, self_tests=tests, tested=event)
        case ev.ModelLoadFailed():
            return _untested(state)
        case ev.OperatorActed(action=action):
            accepted = state.unstable_accepted or action == ACCEPTED_UNSTABLE
            return attrs.evolve(state, unstable_accepted=accepted)
        case ev.AgentCreated():
            agent = AgentHead(head=event.head, persist=event.persist)
            named = agent_session(event.tenant, event.agent)
            return attrs.evolve(state, agents=state.agents.set(named, agent))
        case ev.AgentDeleted():
            named = agent_session(event.tenant, event.agent)
            if named in state.released_kept:
                return attrs.evolve(state, released_kept=state.released_kept.delete(named))
            return attrs.evolve(state, agents=state.agents.delete(named))
        case ev.SessionReleased():
            named = agent_session(event.tenant, event.agent)
            return attrs.evolve(
                state,
                agents=state.agents.delete(named),
                released=state.released.set(named, event.to),
                released_kept=state.released_kept.set(named, state.position),
            )
        case ev.SessionAdopted():
            named = agent_session(event.tenant, event.agent)
            agent = AgentHead(head=None, persist=True, awaited=event.turns)
            adopted = state.adopted.set(release_name(event), named)
            return attrs.evolve(state, agents=state.agents.set(named, agent), adopted=adopted)
        case ev.TurnAdopted():
            return _turn_adopted(state, event)
        case ev.LossAccepted(heads=heads):
            return attrs.evolve(state, lost=state.lost.update(dict.fromkeys(heads, state.position)))
        case ev.NodeTakenOver(token=token):
            return attrs.evolve(state, lease=token)
        case ev.HeadsSeen(heads=heads):
            seen = {node: (at, row_hash) for node, at, row_hash in heads}
            return attrs.evolve(state, heads_seen=state.heads_seen.update(seen))
        case ev.LossSeen(node=node):
            head = event.position, event.row_hash
            return attrs.evolve(state, heads_seen=state.heads_seen.set(node, head))
        case (
            ev.JournalStalled()
            | ev.RequestRejected()
            | ev.EmbeddingsComputed()
            | ev.TurnForgotten()
        ):
            return state  # only on record
        case ev.JournalPruned():
            return without_gone(state)
        case ev.SessionForgotten():
            return _session_forgotten(state, event)
        case ev.SessionOpened():
            return _session_opened(state, event)
        case ev.RequestReceived():
            return _request_received(state, event)
        case ev.PrefixJoined():
            return _prefix_joined(state, event)
        case ev.PathSelected():
            return _path_selected(state, event)
        case ev.SlabAcquired():
            return _slab_acquired(state, event)
        case ev.SlabReleased():
            return _slab_released(state, event)
        case ev.BlocksRestored():
            return _blocks_restored(state, event)
        case ev.CacheExtended():
            return _cache_extended(state, event)
        case ev.CacheTrimmed():
            return _cache_trimmed(state, event)
        case ev.RowChecked():
            return _row_checked(state, event)
        case ev.BlockSealed():
            return _block_sealed(state, event)
        case ev.BlockEvicted():
            return _block_evicted(state, event)
        case ev.BlockFilesScanned():
            return attrs.evolve(state, disk_budget=event.budget_bytes)
        case ev.BlockSpilled():
            return _with_file(state, event.key, event.bytes)
        case ev.BlockSpillFailed():
            return state  # only on record; the block is as it was
        case ev.BlockLoaded():
            return _block_loaded(state, event)
        case ev.BlockFileRejected():
            return _with_file(state, event.key, None) if event.node is None else state
        case ev.BlockFileRemoved():
            block = attrs.evolve(state.blocks[event.key], gone=event.reason)
            state = attrs.evolve(state, blocks=state.blocks.set(event.key, block))
            return _with_file(state, event.key, None)
        case ev.BlockAdopted():
            return _block_adopted(state, event)
        case ev.AdoptionDeclined():
            return state
        case ev.TokensEmitted():
            return _tokens_emitted(state, event)
        case ev.CallRejected():
            return _stepped(state, state.session(event.session), event)
        case ev.TurnStored():
            return _turn_stored(state, event)
        case ev.RequestFinished():
            session = state.session(event.session)
            state = _with_turn(_stepped(state, session, event), session)
            return _request_ended(state, event.session, event)
        case ev.RequestCancelled():
            session = state.session(event.session)
            return _request_ended(_stepped(state, session, event), event.session, None)
        case ev.PrewarmStarted():
            return _prewarm_started(state, event)
        case ev.PrewarmFinished() | ev.PrewarmAbandoned():
            done = planned_done(event)
            session = state.session(event.session)
            return _stepped(state, session, event, prewarm=None, planned_done=done)
        case ev.SessionSettled():
            return _session_settled(state, event)
        case ev.SessionClosed():
            return _session_closed(state, event)
        case ev.ShadowStarted():
            return _shadow_started(state, event)
        case ev.ShadowChecked():
            assert state.shadow is not None
            return attrs.evolve(state, shadow=attrs.evolve(state.shadow, checked=True))
        case ev.ShadowEnded():
            assert state.shadow is not None
            state = _slabs_changed(state, -1, -state.shadow.slab.bytes)
            return attrs.evolve(state, shadow=None)
        case ev.ShadowSkipped():
            return state  # only on record
        case ev.InvariantViolated():
            return _invariant_violated(state, event)
        case ev.SessionQuarantined():
            return _session_quarantined(state, event)
        case ev.BlocksQuarantined():
            return _blocks_quarantined(state, event)
        case ev.AdmissionClosed():
            session = state.session(event.session)
            return attrs.evolve(
                _stepped(state, session, event), admission_bug=state.admission_bug or event.bug_id
            )
        case _:
            assert_never(event)  # type: ignore[arg-type]  # Event is open to mypy; ALL_EVENTS is not


# --- helpers -----------------------------------------------------------------------------------


def _put(state: State, session: Session) -> State:
    return changed(state, sessions=state.sessions.set(session.id, session))


def _stepped(state: State, session: Session, event: ev.Event, **changes: Any) -> State:
    """The session with changes, in the state that follows by the table of legal steps."""
    life = next_state(session.state, trigger(event))
    assert life is not None, f"{trigger(event)} on a {session.state} session was not checked"
    return _put(state, changed(session, state=life, **changes))


def _chain_used(state: State, session: Session, keys: tuple[str, ...]) -> State:
    """A session starts to use the chain of these blocks, which gets the session's TTL."""
    if not keys:
        return state
    known = state.uses.get(keys[-1])
    use = Use(
        position=state.position,
        previous=_previous_use(state, session, keys[-1]),
        expires_us=_renewed(state, known.expires_us if known is not None else None, session.ttl_s),
    )
    return _pinned(attrs.evolve(state, uses=state.uses.set(keys[-1], use)), session.id, keys)


def _reused(
    state: State, session: Session, keys: tuple[str, ...], partial_key: str | None
) -> State:
    """
    A session starts to use the chain of these blocks and, after them, a part of another block. That
    one counts as used and is pinned like the others.
    """
    if partial_key is None:
        return _chain_used(state, session, keys)
    state = _with_child(state, session, state.blocks[partial_key])
    return _chain_used(state, session, (*keys, partial_key))


def _previous_use(state: State, session: Session, key: str) -> int | None:
    """The use before the one that a session makes of a chain now, by the chain's last block."""
    if session.previous_use is not None:
        return session.previous_use
    uses = _last_two_uses(state, key)
    return next((at for at in uses if at is not None and at < session.last_used), None)


def _last_two_uses(state: State, key: str) -> tuple[int | None, int | None]:
    """
    The last use of a block, by itself or as the end of a chain, and the one before; None if there
    is none.
    """
    block, use = state.blocks.get(key), state.uses.get(key)
    if use is not None and (block is None or block.last_used < use.position):
        return use.position, use.previous
    return (block.last_used, block.previous_use) if block is not None else (None, None)


def _pinned(state: State, session: SessionId, keys: tuple[str, ...]) -> State:
    pins = state.pins.set(session, state.pins.get(session, ()) + keys)
    return attrs.evolve(state, pins=pins)


def _unpinned(state: State, session: SessionId) -> State:
    if session not in state.pins:
        return state
    return attrs.evolve(state, pins=state.pins.delete(session))


def _renewed(state: State, expires_us: int | None, ttl_s: int | None) -> int | None:
    """
    When something used now expires. A use never shortens the expiry that another use gave. What had
    no expiry gets that of this use.
    """
    if ttl_s is None:
        return expires_us
    return max(expires_us or 0, state.time_us + 1_000_000 * ttl_s)


def _prewarm_used(state: State, keys: tuple[str, ...], tokens: int) -> State:
    """
    A request reuses prewarmed blocks for the first time. They are at the end of the chain, so the
    search starts there, and the length of the chain does not matter.

    Args:
        tokens: how many of their tokens were prewarmed.
    """
    blocks = state.blocks
    for key in reversed(keys):
        if not tokens:
            break
        if prewarmed := blocks[key].prewarmed:
            blocks = blocks.set(key, attrs.evolve(blocks[key], prewarmed=0))
            tokens -= prewarmed
    return attrs.evolve(state, blocks=blocks)


def beginning(fingerprint: str, tenant: str) -> str:
    """
    The name in ``State.children`` for the first blocks of sequences, which are built on none. The
    key of a block covers both, so blocks after the first need no name of their own.
    """
    return framed((b"cairn beginning", fingerprint.encode(), tenant.encode())).hex()


def _with_child(state: State, session: Session, block: Block) -> State:
    """The state with a block as the latest one that was sealed on another or matched in part."""
    name = block.parent or beginning(session.fingerprint, session.tenant)
    known = state.children.get(name, ())
    there = [key for key in known if key != block.key and state.blocks[key].there]
    latest = (*there[-(CHILDREN - 1) :], block.key)
    return attrs.evolve(state, children=state.children.set(name, latest))


def _forgotten_ids(block: Block) -> Block:
    """A block without its token ids if it is neither in memory nor in a file."""
    return block if block.there else attrs.evolve(block, ids=b"")


_Sessions = Map[str, tuple[SessionId, ...]]


def _without(index: _Sessions, name: str, session: SessionId) -> _Sessions:
    rest = tuple(other for other in index.get(name, ()) if other != session)
    return index.set(name, rest) if rest else index.delete(name)


def _with_last(index: _Sessions, name: str, session: SessionId) -> _Sessions:
    known = index.get(name, ())
    if known[-1:] == (session,):
        return index
    return index.set(name, (*(other for other in known if other != session), session))


def _with_tip(state: State, session: Session, new: Turn | None) -> State:
    """The state with ``new`` as the session's last turn in ``tips``, ``parts`` and ``ends``."""
    if session.named:
        return state
    tips, parts, ends = state.tips, state.parts, state.ends
    old_chain = session.last.chain if session.last is not None else ()
    new_chain = new.chain if new is not None else ()
    if old_chain:
        assert session.last is not None
        tips = _without(tips, session.last.tip, session.id)
        ends = _without(ends, session.last.end, session.id)
    if new is not None and new_chain:
        tips = _with_last(tips, new.tip, session.id)
        ends = _with_last(ends, new.end, session.id)
    still_there = {name for _, name, _ in new_chain}
    for _, name, _ in old_chain:
        if name not in still_there:
            parts = _without(parts, name, session.id)
    for _, name, _ in new_chain:
        parts = _with_last(parts, name, session.id)
    return attrs.evolve(state, tips=tips, parts=parts, ends=ends)


def _memory_gone(state: State) -> State:
    """
    The model was unloaded: open requests, slabs, pins and the blocks in memory went with it. Files
    stay.
    """
    # In the order in which they came, because a Map's own order differs between processes.
    open_requests = [state.session(session) for session in state.requests.values()]
    for session in sorted(open_requests, key=lambda session: session.last_used):
        state = _request_ended(state, session.id, None)
    sessions = state.sessions
    for session in state.sessions.values():
        unloaded = SessionState.IDLE if session.last is not None else SessionState.COLD
        keeps = session.state in (SessionState.QUARANTINED, SessionState.CLOSED)
        sessions = sessions.set(
            session.id,
            attrs.evolve(
                session,
                state=session.state if keeps else unloaded,
                prewarm=None,
                slab=None,
                **_NO_KV,
            ),
        )
    blocks = state.blocks
    for block in state.blocks.values():
        if block.present:
            left = attrs.evolve(block, present=False, gone=None)
            blocks = blocks.set(block.key, _forgotten_ids(left))
    pool = Pool(disk_blocks=state.pool.disk_blocks, disk_bytes=state.pool.disk_bytes)
    return attrs.evolve(
        state,
        model=None,
        sessions=sessions,
        blocks=blocks,
        pins=Map(),
        pool=pool,
        shadow=None,
        disk_budget=0,
        rates=adoption.NO_RATES,
    )


def _request_ended(state: State, session_id: str, finished: ev.RequestFinished | None) -> State:
    """The open request becomes the session's last turn."""
    session = state.session(session_id)
    request = session.request
    if request is None:
        return state
    answer = request.sampled[: finished.answer_tokens] if finished is not None else ()
    turn = Turn(
        request=request.ask.request,
        fingerprint=request.ask.fingerprint,
        chain=request.chain,
        prompt_ids=request.prompt_ids,
        prompt_keys=request.prompt_keys,
        answered=finished is not None,
        answer_ids=answer,
    )
    state = _with_tip(state, session, turn)
    state = attrs.evolve(state, requests=state.requests.delete(request.ask.request))
    expires_us = _renewed(state, None, session.ttl_s)
    return _put(state, attrs.evolve(session, request=None, last=turn, expires_us=expires_us))


def _model(event: ev.ModelLoaded) -> Model:
    of_fields: dict[str, Any] = {
        "markers": tuple(map(str, event.fields.get("markers", ()))),
        "calls": form_of(event.fields),
    }
    names = [field.name for field in attrs.fields(Model) if field.name not in of_fields]
    return Model(**{name: getattr(event, name) for name in names}, **of_fields)


# --- one function for each event ---------------------------------------------------------------

_NO_KV: dict[str, Any] = {
    "cached_tokens": 0,
    "canonical_tokens": 0,
    "window_start": 0,
    "slab_keys": (),
    "slab_ids": (),
    "prewarmed_rows": 0,
}


def _session_opened(state: State, event: ev.SessionOpened) -> State:
    return _put(
        state,
        Session(
            id=SessionId(event.session),
            tenant=event.tenant,
            fingerprint=event.fingerprint,
            group=event.group,
            named=event.named,
            last_used=state.position,
        ),
    )


def _request_received(state: State, event: ev.RequestReceived) -> State:
    session = state.session(event.session)
    request = opened_request(session, event)
    state = _stepped(
        state,
        session,
        event,
        request=request,
        fingerprint=event.fingerprint,
        drafted_tokens=speculation.of_next_request(session.drafted_tokens),
        accepted_tokens=speculation.of_next_request(session.accepted_tokens),
        last_used=state.position,
        previous_use=session.last_used if session.last is not None else None,
        planned_done=None,
        ttl_s=event.ttl_s,
        expires_us=_renewed(state, None, event.ttl_s),
    )
    requests = state.requests.set(event.request, session.id)
    return attrs.evolve(state, requests=requests, rates=adoption.with_request(state.rates))


def opened_request(session: Session, event: ev.RequestReceived) -> OpenRequest:
    """The request, its prompt joined from the session's last prompt and what is new."""
    last = session.last
    base_chain = last.chain[: event.base_parts] if last else ()
    base_ids = last.prompt_ids[: event.base_tokens] if last else ()
    base_keys = last.prompt_keys[: event.base_keys] if last else ()
    return OpenRequest(
        ask=event,
        chain=base_chain + event.new_parts,
        prompt_ids=base_ids + event.new_ids,
        prompt_keys=base_keys + event.new_keys,
    )


def _prefix_joined(state: State, event: ev.PrefixJoined) -> State:
    session = state.session(event.session)
    assert session.request is not None
    request = attrs.evolve(session.request, joined=event)
    # Those that are not sealed yet, too: they are pinned from the moment at which they are there.
    state = _pinned(state, session.id, request.prompt_keys[: event.blocks])
    return _stepped(state, session, event, request=request)


def _path_selected(state: State, event: ev.PathSelected) -> State:
    session = state.session(event.session)
    assert session.request is not None
    keys = session.request.prompt_keys[: event.blocks_from_slab + event.blocks_from_pool]
    if event.prewarmed_tokens:
        rows = prewarmed_rows_before(session, event.tokens_from_slab)
        state = _prewarm_used(state, keys, event.prewarmed_tokens - rows)
    state = _reused(state, session, keys, event.partial_key)
    request = attrs.evolve(session.request, joined=None, path=event)
    return _stepped(state, session, event, request=request, prewarmed_rows=0)


def prewarmed_rows_before(session: Session, end: int) -> int:
    """How many rows of the slab before a position are among its ``prewarmed_rows``."""
    return max(0, end - (session.canonical_tokens - session.prewarmed_rows))


def slab_ids(session: Session, start: int, end: int) -> tuple[int, ...]:
    """
    The token ids of the canonical rows ``[start, end)`` of a session's slab, as far as they are
    known: a base has none.
    """
    return cut_out(session.slab_ids, start, min(end, session.canonical_tokens))


def cut_out(parts: tuple[tuple[int, ...], ...], start: int, end: int) -> tuple[int, ...]:
    """The tokens ``[start, end)`` of consecutive parts. These are not joined: they may be long."""
    found: tuple[int, ...] = ()
    offset = 0
    for part in parts:
        found += part[max(0, start - offset) : max(0, end - offset)]
        offset += len(part)
    return found


def _slab_acquired(state: State, event: ev.SlabAcquired) -> State:
    session = state.session(event.session)
    slab = Slab(id=event.slab, capacity_tokens=event.capacity_tokens, bytes=event.bytes)
    state = _slabs_changed(state, +1, event.bytes)
    return _stepped(state, session, event, slab=slab, **_NO_KV)


def _slab_released(state: State, event: ev.SlabReleased) -> State:
    session = state.session(event.session)
    state = _slabs_changed(state, -1, -event.bytes)
    return _stepped(state, session, event, slab=None, **_NO_KV)


def _shadow_started(state: State, event: ev.ShadowStarted) -> State:
    slab = Slab(id=event.slab, capacity_tokens=event.capacity_tokens, bytes=event.bytes)
    state = _slabs_changed(state, +1, event.bytes)
    shadow = Shadow(of_session=event.of_session, request=event.request, slab=slab)
    return attrs.evolve(state, shadow=shadow)


def _slabs_changed(state: State, slabs: int, size: int) -> State:
    """Add to the number of slabs and to their bytes."""
    old = state.pool
    pool = attrs.evolve(old, slabs=old.slabs + slabs, slab_bytes=old.slab_bytes + size)
    return attrs.evolve(state, pool=pool)


def _blocks_restored(state: State, event: ev.BlocksRestored) -> State:
    session = state.session(event.session)
    assert state.model is not None
    return _stepped(
        state,
        session,
        event,
        cached_tokens=event.end,
        canonical_tokens=event.end,
        window_start=event.coverage[0][1] if event.coverage else 0,
        # Including those before the window, which were not copied.
        slab_keys=session.work_keys[: event.end // state.model.block_tokens],
        slab_ids=session.work_ids,
        prewarmed_rows=0,
    )


def _cache_extended(state: State, event: ev.CacheExtended) -> State:
    session = state.session(event.session)
    request = session.request
    if request is not None and event.sampled:
        request = changed(
            request,
            sampled=request.sampled + event.sampled,
            emitted=request.emitted + event.emitted,
            texts=lengthened_texts(request.texts, event.text),
        )
    prewarm, prewarmed = session.prewarm, session.prewarmed_rows
    if prewarm is not None:
        computed = prewarm.computed_tokens + event.end - event.start
        prewarm = attrs.evolve(prewarm, computed_tokens=computed)
        prewarmed += event.end - event.start
    tokens = event.end - event.start
    if event.step == "prefill" and state.model is not None and tokens >= state.model.block_tokens:
        rates = adoption.with_prefill(state.rates, tokens, event.duration_us)
        state = attrs.evolve(state, rates=rates)
    return _stepped(
        state,
        session,
        event,
        cached_tokens=event.end,
        canonical_tokens=session.canonical_tokens if event.step == "decode" else event.end,
        window_start=event.coverage[0][1] if event.coverage else 0,
        slab_ids=session.work_ids,
        prewarmed_rows=prewarmed,
        drafted_tokens=session.drafted_tokens + event.drafted,
        accepted_tokens=session.accepted_tokens + event.accepted,
        request=request,
        prewarm=prewarm,
    )


def _cache_trimmed(state: State, event: ev.CacheTrimmed) -> State:
    session = state.session(event.session)
    block_tokens = state.model.block_tokens if state.model else 1
    return _stepped(
        state,
        session,
        event,
        cached_tokens=event.end,
        canonical_tokens=min(session.canonical_tokens, event.end),
        window_start=event.coverage[0][1] if event.coverage else 0,
        slab_keys=session.slab_keys[: event.end // block_tokens],
        prewarmed_rows=prewarmed_rows_before(session, min(session.canonical_tokens, event.end)),
    )


def _row_checked(state: State, event: ev.RowChecked) -> State:
    session = state.session(event.session)
    assert session.request is not None
    request = attrs.evolve(session.request, row_checked=True)
    return _stepped(state, session, event, request=request)


def _block_sealed(state: State, event: ev.BlockSealed) -> State:
    session = state.session(event.session)
    known = state.blocks.get(event.key)
    present = known if known is not None and known.present else None
    short = state.model is not None and event.end - event.start < state.model.block_tokens
    added = event.stored and present is None
    block = Block(
        key=event.key,
        parent=event.parent,
        digest=event.digest,
        start=event.start,
        bytes=event.bytes,
        present=event.stored,
        tokens=event.end - event.start,
        ids=_ids_to_match(state, session, event),
        # Computing it again does not change why the one in memory was computed. The rows of a short
        # block stay in the slab, where they count.
        prewarmed=present.prewarmed if present else 0 if short else session.prewarmed_rows,
        file_bytes=known.file_bytes if known else None,
        last_used=state.position,
        previous_use=_previous_use(state, session, event.key),
        expires_us=_renewed(state, known.expires_us if known else None, session.ttl_s),
        bug_id=known.bug_id if known else None,
    )
    pool = state.pool
    if added:
        pool = attrs.evolve(
            pool,
            blocks=pool.blocks + 1,
            block_bytes=pool.block_bytes + event.bytes,
            block_tokens=pool.block_tokens + block.tokens,
        )
    state = _pinned(state, session.id, (event.key,))
    chain: dict[str, Any] = {}
    if not short:
        chain = {"slab_keys": (*session.slab_keys, event.key), "prewarmed_rows": 0}
    state = _stepped(state, session, event, **chain)
    block = _forgotten_ids(block)
    state = attrs.evolve(state, blocks=state.blocks.set(event.key, block), pool=pool)
    return _with_child(state, session, block) if block.ids else state


def _ids_to_match(state: State, session: Session, event: ev.BlockSealed) -> IdBytes:
    """The token ids of a block that is sealed; empty with the grain C, as nothing uses them."""
    if state.model is None or state.model.grain != 1:
        return b""
    return ids_bytes(slab_ids(session, event.start, event.end))


def _block_evicted(state: State, event: ev.BlockEvicted) -> State:
    block = state.blocks[event.key]
    pool = attrs.evolve(
        state.pool,
        blocks=state.pool.blocks - 1,
        block_bytes=state.pool.block_bytes - event.bytes,
        block_tokens=state.pool.block_tokens - block.tokens,
    )
    block = _forgotten_ids(attrs.evolve(block, present=False, gone=event.reason))
    return attrs.evolve(state, blocks=state.blocks.set(event.key, block), pool=pool)


def _block_loaded(state: State, event: ev.BlockLoaded) -> State:
    last, _ = _last_two_uses(state, event.key)
    block = attrs.evolve(
        state.blocks[event.key], present=True, last_used=state.position, previous_use=last
    )
    pool = attrs.evolve(
        state.pool,
        blocks=state.pool.blocks + 1,
        block_bytes=state.pool.block_bytes + event.bytes,
        block_tokens=state.pool.block_tokens + block.tokens,
    )
    return attrs.evolve(state, blocks=state.blocks.set(event.key, block), pool=pool)


def _block_adopted(state: State, event: ev.BlockAdopted) -> State:
    known = state.blocks.get(event.key)
    last, _ = _last_two_uses(state, event.key)
    tokens = event.end - event.start
    block = Block(
        key=event.key,
        parent=event.parent,
        digest=event.digest,
        start=event.start,
        bytes=event.bytes,
        present=True,
        tokens=tokens,
        # Without the token ids, which only the other node's keys open: it is matched whole alone.
        last_used=state.position,
        previous_use=last,
        expires_us=_renewed(state, known.expires_us if known else None, event.ttl_s),
        node=event.node,
    )
    pool = attrs.evolve(
        state.pool,
        blocks=state.pool.blocks + 1,
        block_bytes=state.pool.block_bytes + event.bytes,
        block_tokens=state.pool.block_tokens + tokens,
    )
    rates = adoption.with_adopted(state.rates, tokens, event.duration_us)
    blocks = state.blocks.set(event.key, block)
    return attrs.evolve(state, blocks=blocks, pool=pool, rates=rates)


def _with_file(state: State, key: str, file_bytes: int | None) -> State:
    """Set the size of a block's file; None if the file is gone."""
    block = state.blocks[key]
    count, size = state.pool.disk_blocks, state.pool.disk_bytes
    if block.file_bytes is not None:
        count, size = count - 1, size - block.file_bytes
    if file_bytes is not None:
        count, size = count + 1, size + file_bytes
    block = _forgotten_ids(attrs.evolve(block, file_bytes=file_bytes))
    blocks = state.blocks.set(key, block)
    pool = attrs.evolve(state.pool, disk_blocks=count, disk_bytes=size)
    return attrs.evolve(state, blocks=blocks, pool=pool)


def _tokens_emitted(state: State, event: ev.TokensEmitted) -> State:
    session = state.session(event.session)
    assert session.request is not None
    request = attrs.evolve(
        session.request,
        emitted=session.request.emitted + len(event.ids),
        texts=lengthened_texts(session.request.texts, event.text),
    )
    return _stepped(state, session, event, request=request)


def lengthened_texts(texts: tuple[str, ...], text: str) -> tuple[str, ...]:
    """
    Add text to a few pieces, each longer than those after it: adding takes time in proportion to
    the text, however long the whole is.
    """
    while texts and len(texts[-1]) <= len(text):
        text = texts[-1] + text
        texts = texts[:-1]
    return (*texts, text)


def _turn_stored(state: State, event: ev.TurnStored) -> State:
    session = state.session(event.session)
    assert session.request is not None
    turn = StoredTurn(tenant=event.tenant, agent=event.agent, row=state.position)
    texts_at = session.texts_at
    if event.texts:
        texts_at = {**texts_at, str(state.position): tuple(event.texts)}
    request = attrs.evolve(session.request, stored=turn)
    return _stepped(state, session, event, request=request, texts_at=texts_at)


def is_known(state: State, session: str) -> bool:
    """Whether a session has rows of its own, or is that of an agent that was adopted."""
    return f"session/{session}" in state.streams or session in state.adopted.values()


def release_name(event: ev.SessionAdopted) -> str:
    """How ``State.adopted`` names the release of an agent that was adopted."""
    return f"{event.node}:{event.position}:{event.row_hash}"


def _turn_adopted(state: State, event: ev.TurnAdopted) -> State:
    named = agent_session(event.tenant, event.agent)
    awaited = state.agents[named].awaited - 1
    agent = attrs.evolve(state.agents[named], head=event.request, awaited=awaited)
    turn = StoredTurn(tenant=event.tenant, agent=event.agent, row=state.position)
    turns = state.turns.set(event.request, turn)
    return attrs.evolve(state, turns=turns, agents=state.agents.set(named, agent))


def _with_turn(state: State, session: Session) -> State:
    """The turn of an answer that is complete is stored, and is the last one of its agent."""
    request = session.request
    if request is None or (turn := request.stored) is None:
        return state
    agents, agent = state.agents, state.agents.get(session.id)
    if turn.agent is not None and agent is not None:
        agents = agents.set(session.id, attrs.evolve(agent, head=request.ask.request))
    turns = state.turns.set(request.ask.request, turn)
    return attrs.evolve(state, turns=turns, agents=agents)


def _persistent(agents: Map[str, AgentHead]) -> Map[str, AgentHead]:
    for name, agent in agents.items():
        if not agent.persist:
            agents = agents.delete(name)
    return agents


def _untested(state: State) -> State:
    """What was tested and accepted for a model is not for the next one."""
    return attrs.evolve(state, tested=None, unstable_accepted=False)


def planned_done(event: ev.PrewarmFinished | ev.PrewarmAbandoned) -> bool | None:
    """
    Whether all that was planned was computed when a prewarm ended; None if prompt and answer may be
    computed then, or a bug ended it.
    """
    if isinstance(event, ev.PrewarmFinished):
        return True
    if event.reason in ("render_failed", "bug"):
        return None
    return event.reason == "quarantined"


def _prewarm_started(state: State, event: ev.PrewarmStarted) -> State:
    session = state.session(event.session)
    assert session.last is not None
    prewarm = prewarmed(session.last, event)
    keys = prewarm.keys[: event.blocks_from_slab + event.blocks_from_pool]
    state = _reused(state, session, keys, event.partial_key)
    return _stepped(state, session, event, prewarm=prewarm)


def prewarmed(last: Turn, event: ev.PrewarmStarted) -> OpenPrewarm:
    """The prewarm, joined from the session's last turn and what is new."""
    return OpenPrewarm(
        ids=last.sequence[: event.base_tokens] + event.new_ids,
        keys=last.prompt_keys[: event.base_keys] + event.new_keys,
        tokens_from_slab=event.tokens_from_slab,
        blocks_from_slab=event.blocks_from_slab,
        blocks_from_pool=event.blocks_from_pool,
        partial_key=event.partial_key,
        tokens_from_partial=event.tokens_from_partial,
    )


def _session_settled(state: State, event: ev.SessionSettled) -> State:
    session = state.session(event.session)
    return _stepped(_unpinned(state, session.id), session, event)


def _session_closed(state: State, event: ev.SessionClosed) -> State:
    session = state.session(event.session)
    state = _with_tip(state, session, None)
    return attrs.evolve(state, sessions=state.sessions.delete(session.id))


def _session_forgotten(state: State, event: ev.SessionForgotten) -> State:
    """What the fold still has of a closed session's texts: ids of blocks, and of its violations."""
    blocks, faults = state.blocks, state.faults
    for key in event.blocks:
        known = blocks.get(key)
        if known is not None and known.ids:
            blocks = blocks.set(key, attrs.evolve(known, ids=b""))
    for bug_id, fault in state.faults.items():
        of = fault.event
        if event.of_session in (of.session, of.of_session):
            blank = attrs.evolve(of, expected="", actual="", trace="")
            faults = faults.set(bug_id, attrs.evolve(fault, event=blank))
    return attrs.evolve(state, blocks=blocks, faults=faults)


def _invariant_violated(state: State, event: ev.InvariantViolated) -> State:
    fault = Fault(event=event, position=state.position)
    state = attrs.evolve(state, faults=state.faults.set(event.bug_id, fault))
    if event.invariant == "INV-5":
        # ``admission_closed`` needs a session, and an eviction has none.
        state = attrs.evolve(state, admission_bug=state.admission_bug or event.bug_id)
    if event.session is None:
        return state
    state = _stepped(state, state.session(event.session), event)
    return _request_ended(state, event.session, None)


def _session_quarantined(state: State, event: ev.SessionQuarantined) -> State:
    session = state.session(event.session)
    state = _unpinned(state, session.id)
    state = _stepped(state, session, event, prewarm=None, bug_id=event.bug_id)
    return _request_ended(state, event.session, None)


def _blocks_quarantined(state: State, event: ev.BlocksQuarantined) -> State:
    blocks = state.blocks
    for key in event.keys:
        known = blocks.get(key)
        if known is None and event.bug_id in state.faults:
            # The violation was of its adoption, which had no effect. It must not be read again.
            known = Block(
                key=key, parent=None, digest="", start=0, tokens=0, bytes=0, present=False
            )
        if known is None:
            raise KeyError(key)
        blocks = blocks.set(key, attrs.evolve(known, bug_id=event.bug_id))
    state = attrs.evolve(state, blocks=blocks)
    if event.session is None:
        return state
    return _stepped(state, state.session(event.session), event)
