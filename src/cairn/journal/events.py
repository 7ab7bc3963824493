"""
What can happen. Every path decision and every cache mutation is one of these.

Rules of this module:

1. An event that exists is legal in itself: its constructor validates. Whether it may happen *now*
   is asked in ``invariants.py``.
2. Fields are plain values: text, numbers, booleans, tuples of them. No array, no clock, no default
   id. What engine and store **measured** stands beside what was asked for, since a check that
   reads the same number twice checks nothing.
3. ``kind`` names an event for ever; a class may be renamed, a kind may not. A change of shape
   raises ``version`` and adds a step to ``codec.UPCASTS``.
4. A field marked ``private()`` (text, token ids) is stored apart from the rest of its row, so that
   it can be encrypted or forgotten while the hash chain stays valid.

Token positions are half-open ranges ``[start, end)``, counted from the first token of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

#: For each run of equal layers: (number of layers, first token held, one past the last token held).
Coverage = tuple[tuple[int, int, int], ...]

Step = Literal["prefill", "decode", "settle"]
Path = Literal["continuation", "new_session"]
FinishReason = Literal["stop", "length"]
CacheMode = Literal["full", "prefix"]
CancelStage = Literal[
    "prefill",
    "decode",
    "no_memory",
    "grammar_failed",
    "timed_out",
    "sibling_failed",
    "server_stopped",
    "journal_full",
    "bug",
]
RemovalReason = Literal["space", "expired", "window"]
FileFault = Literal["missing", "unreadable", "foreign", "digest"]
NextRole = Literal["user", "tool"]
AbandonReason = Literal[
    "request", "slab_needed", "closing", "busy", "quarantined", "bug", "render_failed"
]
ShadowResult = Literal["same", "differs", "interrupted", "failed"]
ShadowSkip = Literal["interrupted", "queue_full", "session_changed", "failed", "model_unloaded"]
CallFault = Literal["truncated", "unparsable", "no_name", "invalid_arguments"]


def private(**kwargs: Any) -> Any:
    """A field that is stored in the private payload of its row."""
    return attrs.field(metadata={"private": True}, **kwargs)


def _range(instance: Any, attribute: Any, value: int) -> None:
    if not 0 <= instance.start <= value:
        raise ValueError(f"[{instance.start}, {value}) is no range of tokens")


def _natural(instance: Any, attribute: Any, value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} is {value}; it counts something and cannot be negative")


def natural(**kwargs: Any) -> Any:
    """A count: an integer that is not negative."""
    return attrs.field(validator=_natural, **kwargs)


@attrs.frozen(kw_only=True)
class Event:
    """What all events have in common."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1

    @property
    def stream(self) -> str:
        """The stream that the event belongs to: one for each session, one for the server."""
        session = getattr(self, "session", None)
        return f"session/{session}" if session else "server"


# --- the server ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ServerStarted(Event):
    """A server took hold of the journal. ``boot`` names this run of it."""

    kind: ClassVar[str] = "server_started"
    boot: str
    cairn_version: str
    settings: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class ServerStopped(Event):
    """The server drained and let go of the journal; what was in memory only is gone."""

    kind: ClassVar[str] = "server_stopped"
    boot: str
    reason: str


@attrs.frozen(kw_only=True)
class ServerLost(Event):
    """
    Found at the next start: the run ``boot`` never stopped. Its open requests have ended and what
    it held in memory is gone.
    """

    kind: ClassVar[str] = "server_lost"
    boot: str


@attrs.frozen(kw_only=True)
class ModelLoaded(Event):
    """
    A model is ready. All that may change a bit of an answer is in ``fingerprint``.

    Attributes:
        name: the name that clients see.
        directory: where it was loaded from.
        adapter: where the adapter over its weights was loaded from; empty where there is none.
        fingerprint: the hash that names ``fields``.
        fields: the fingerprint as a whole.
        dtype: in which dtype it computes, and why, for people; what counts is in ``fields``.
        layers: the number of layers that keep KV or a state.
        block_tokens: C, the rows of a canonical pass.
        decode_rows: W, the rows of a decode pass.
        context_tokens: the longest sequence that the model serves.
        reusable: whether sealed blocks can be made of this model's cache.
        pool_slabs: the number of slabs that may be held.
        pool_bytes: the budget of all slabs.
        blocks_bytes: the budget of the sealed blocks in memory.
        kv_sinks, kv_window, kv_rows: of the policy ``sink_window``, see ``windows.SinkWindow``; 0
            where a token attends to all before it, or to what the model's own layers say.
        min_cache_tokens: of a shorter prompt no blocks are sealed.
        state_blocks: each so-manieth block carries the states of recurrent layers, see
            ``checkpoints.Checkpoints``; 0 where no layer has one, or nothing is reused.
    """

    kind: ClassVar[str] = "model_loaded"
    name: str
    directory: str = private()
    adapter: str = private()
    fingerprint: str
    fields: Mapping[str, Any]
    dtype: str
    layers: int = natural()
    block_tokens: int = natural()
    decode_rows: int = natural()
    context_tokens: int = natural()
    reusable: bool
    pool_slabs: int = natural()
    pool_bytes: int = natural()
    blocks_bytes: int = natural()
    kv_sinks: int = natural()
    kv_window: int = natural()
    kv_rows: int = natural()
    min_cache_tokens: int = natural()
    state_blocks: int = natural()


@attrs.frozen(kw_only=True)
class SelfTestFinished(Event):
    """
    The engine's own measurement of its promises on the model that it loaded.

    Attributes:
        findings: name of the check to what was found, true where it holds. ``naive_differs`` tells
            whether the naive way would have changed bits on this device.
        passed: whether all that the promises need holds.
        error_max: the largest relative difference from mlx-lm's plain pass.
        from_cache: whether the findings come from an earlier start with this fingerprint.
    """

    kind: ClassVar[str] = "self_test_finished"
    fingerprint: str
    findings: Mapping[str, bool]
    passed: bool
    error_max: float
    duration_us: int = natural()
    from_cache: bool


@attrs.frozen(kw_only=True)
class ModelUnloaded(Event):
    """
    The model left memory, and with it every slab and every block in memory. No request was under
    way.

    Attributes:
        reason: why it left.
        active_bytes: measured: what MLX still has in arrays.
    """

    kind: ClassVar[str] = "model_unloaded"
    fingerprint: str
    reason: str
    active_bytes: int = natural()


@attrs.frozen(kw_only=True)
class ModelLoadFailed(Event):
    """
    A model was asked for and could not be loaded. What was served before goes on.

    Attributes:
        name: the name that clients see.
        reason: what stood in the way, in a sentence, with places on this machine.
    """

    kind: ClassVar[str] = "model_load_failed"
    name: str
    reason: str = private()


@attrs.frozen(kw_only=True)
class OperatorActed(Event):
    """An operator decided something that the rules leave to a person."""

    kind: ClassVar[str] = "operator_acted"
    action: str
    detail: str


@attrs.frozen(kw_only=True)
class JournalStalled(Event):
    """
    There was no room for the journal, and there is again. What was under way has ended without its
    answer, and who came in the meantime was turned away.

    Attributes:
        error: what the database said.
        rows_waiting: rows that were held until there was room.
        requests_refused: requests that were turned away, none of which has a row of its own.
        duration_us: from the first row that found no room to the one that found it.
    """

    kind: ClassVar[str] = "journal_stalled"
    error: str
    rows_waiting: int = natural()
    requests_refused: int = natural()
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class JournalPruned(Event):
    """
    The first rows of the journal were removed. What stands in their place is the *base*: their last
    position and hash, and the fold of them.

    Attributes:
        cut: the position of the last row that was removed.
        head: its hash.
        rows: how many were removed this time.
        sessions: how many sessions they were, each of them whole.
        first_us: when the first of them was written.
        last_us: when the last of them was written.
        before_us: the operator's choice: only what is older was removed.
        base_digest: measured: what names the base.
    """

    kind: ClassVar[str] = "journal_pruned"
    cut: int = natural()
    head: str
    rows: int = natural()
    sessions: int = natural()
    first_us: int
    last_us: int
    before_us: int
    base_digest: str


@attrs.frozen(kw_only=True)
class RequestRejected(Event):
    """
    A request was turned away before a session took it.

    Attributes:
        tenant: whose it was.
    """

    kind: ClassVar[str] = "request_rejected"
    request: str
    tenant: str
    status: int
    code: str


# --- a session and its requests ---------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SessionOpened(Event):
    """A session exists. ``named`` says that the client gave it its id."""

    kind: ClassVar[str] = "session_opened"
    session: str
    tenant: str
    fingerprint: str
    group: str | None
    named: bool


@attrs.frozen(kw_only=True)
class RequestReceived(Event):
    """
    A session takes a request in hand.

    The prompt is the first ``base_tokens`` of the prompt of ``base_request`` and then ``new_ids``;
    its block keys likewise. So the journal grows with what is new.

    Attributes:
        chain: (name of the part, its hash over all before it) from the first part on. Parts that
            the session's last request had at the same place are only counted, in ``base_parts``.
        sampling: the sampling parameters as they are used, defaults filled in.
        seed: the seed in use; ``seed_given`` says whether the client chose it.
        cache_mode: ``prefix`` where it goes on from no session and is built on shared blocks alone.
        ttl_s: the life of what the request uses and leaves, from its last use on, in seconds; None
            where it has no end.
        grammar: what the answer is held to, as the library llguidance reads it; None where it is
            held to nothing.
    """

    kind: ClassVar[str] = "request_received"
    session: str
    request: str
    protocol: str
    tenant: str
    fingerprint: str
    session_name: str | None
    group: str | None
    cache_prompt: bool
    base_request: str | None
    base_parts: int = natural()
    new_parts: tuple[tuple[str, str], ...]
    base_tokens: int = natural()
    new_ids: tuple[int, ...] = private()
    base_keys: int = natural()
    new_keys: tuple[str, ...]
    prompt_tokens: int = natural()
    max_tokens: int = natural()
    sampling: Mapping[str, Any]
    seed: int
    seed_given: bool
    requested_model: str
    grammar: str | None = private()
    cache_mode: CacheMode
    ttl_s: int | None = attrs.field(validator=attrs.validators.optional(_natural))


@attrs.frozen(kw_only=True)
class PathSelected(Event):
    """
    The decision of ``paths.select``: which path, why, and what is reused. From here on the session
    is claimed by the request and the reused blocks are pinned.

    Attributes:
        decided_at: the position of the journal that the decision was made on.
        blocks_from_slab: sealed blocks that lie in the session's own slab already.
        blocks_from_pool: sealed blocks that are copied in from the store.
        reused_tokens: (blocks_from_slab + blocks_from_pool) * C.
        prewarmed_tokens: how many of the reused tokens were computed ahead of any request, and
            are reused for the first time.
        rerendered_tokens: tokens that the session held and the template now renders differently.
        nearest: the session that the request was compared with, if any.
        diverged_part: for ``diverged``: which part changed, by Anthropic's names.
        diverged_token: the first token that differs from the nearest session's.
        diverged_text: the text around it.
    """

    kind: ClassVar[str] = "path_selected"
    session: str
    request: str
    rules_version: int
    decided_at: int = natural()
    path: Path
    reason: str | None
    blocks_from_slab: int = natural()
    blocks_from_pool: int = natural()
    reused_tokens: int = natural()
    prewarmed_tokens: int = natural()
    rerendered_tokens: int = natural()
    nearest: str | None
    diverged_part: str | None
    diverged_token: int | None
    diverged_text: str | None = private()


@attrs.frozen(kw_only=True)
class SlabAcquired(Event):
    """
    A session holds a slab: KV arrays of a fixed capacity.

    Attributes:
        bytes: measured: the size of the slab's arrays.
        pool_slabs: measured: the slabs held by all sessions after this.
        pool_bytes: measured: the bytes of all slabs held after this.
    """

    kind: ClassVar[str] = "slab_acquired"
    session: str
    slab: int
    capacity_tokens: int = natural()
    bytes: int = natural()
    pool_slabs: int = natural()
    pool_bytes: int = natural()


@attrs.frozen(kw_only=True)
class SlabReleased(Event):
    """
    A session gave up its slab, and with it all KV that it held. Figures as in ``SlabAcquired``.
    """

    kind: ClassVar[str] = "slab_released"
    session: str
    slab: int
    bytes: int = natural()
    pool_slabs: int = natural()
    pool_bytes: int = natural()
    reason: str


@attrs.frozen(kw_only=True)
class BlocksRestored(Event):
    """
    Sealed blocks were copied into a session's slab, which now covers ``[0, end)``: all that were
    decided, or the next part of them.

    Attributes:
        request: whose prompt they are of; None where they are of what is anticipated.
        keys: the blocks that were copied, in order of their tokens; under ``sink_window`` those
            with the sinks and those of the window at the end.
        digests: measured: of the bytes that the slab holds of each after the copy.
        coverage: measured: what each layer holds after it.
    """

    kind: ClassVar[str] = "blocks_restored"
    session: str
    request: str | None
    start: int = natural()
    end: int = attrs.field(validator=_range)
    keys: tuple[str, ...]
    digests: tuple[str, ...]
    coverage: Coverage
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class CacheExtended(Event):
    """
    Passes of the model added KV for the tokens ``[start, end)``.

    A prefill or settling pass is one event. Decode steps that follow each other within one commit
    are one event: a step for each token of ``sampled``.

    Attributes:
        input_hash: measured: ``keys.ids_hash`` of the token ids that the passes were given.
        coverage: measured: what each layer holds after it.
        sampled: measured: the tokens drawn from the logits of these passes, if any were.
        logprobs: measured: the log-probability of each token of ``sampled``.
    """

    kind: ClassVar[str] = "cache_extended"
    session: str
    request: str | None
    step: Step
    start: int = natural()
    end: int = attrs.field(validator=_range)
    # A hash of few token ids can be guessed back.
    input_hash: str = private()
    coverage: Coverage
    sampled: tuple[int, ...] = private()
    logprobs: tuple[float, ...] = private()
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class CacheTrimmed(Event):
    """A session's KV was cut back from ``cached_tokens`` to ``[0, end)``."""

    kind: ClassVar[str] = "cache_trimmed"
    session: str
    cached_tokens: int = natural()
    end: int = natural()
    coverage: Coverage
    reason: str


@attrs.frozen(kw_only=True)
class BlockSealed(Event):
    """
    A full chunk of canonical KV became a block that never changes.

    Attributes:
        digest: measured: a hash over the bytes of its KV.
        resealed: whether the key was sealed before; the digest must then be the same.
        stored: whether the block is kept in memory; false where nothing could make room for it.
        memory_blocks: measured: blocks in memory after this.
        memory_bytes: measured: their bytes.
    """

    kind: ClassVar[str] = "block_sealed"
    session: str
    key: str
    parent: str | None
    digest: str
    start: int = natural()
    end: int = attrs.field(validator=_range)
    bytes: int = natural()
    resealed: bool
    stored: bool
    memory_blocks: int = natural()
    memory_bytes: int = natural()


@attrs.frozen(kw_only=True)
class BlockEvicted(Event):
    """
    A block left memory. Figures as in ``BlockSealed``.

    Attributes:
        reason: ``space`` for another one, ``expired``, or ``window``: no window at the end of a
            conversation at rest reaches back to it.
    """

    kind: ClassVar[str] = "block_evicted"
    key: str
    bytes: int = natural()
    memory_blocks: int = natural()
    memory_bytes: int = natural()
    reason: RemovalReason


@attrs.frozen(kw_only=True)
class BlockFilesScanned(Event):
    """
    The block files that earlier runs left were looked for, by name and size. Each that was not as
    it should be stands before this as ``block_file_rejected``. From here on files may be written.

    Attributes:
        budget_bytes: what the files may take together; 0 for none.
        disk_blocks: measured: block files that are there.
        disk_bytes: measured: their bytes.
        removed_files: files of no record that runs of this journal wrote, and that were removed.
    """

    kind: ClassVar[str] = "block_files_scanned"
    budget_bytes: int = natural()
    disk_blocks: int = natural()
    disk_bytes: int = natural()
    removed_files: int = natural()


@attrs.frozen(kw_only=True)
class BlockSpilled(Event):
    """
    A block in memory was written to a file too.

    Attributes:
        digest: measured: of the KV that was written.
        bytes: measured: the size of the file.
        disk_blocks: measured: block files that are there after this.
        disk_bytes: measured: their bytes.
    """

    kind: ClassVar[str] = "block_spilled"
    key: str
    digest: str
    bytes: int = natural()
    disk_blocks: int = natural()
    disk_bytes: int = natural()


@attrs.frozen(kw_only=True)
class BlockSpillFailed(Event):
    """
    A block could not be written. There is no file of it, and it is served from memory as long as it
    is there.

    Attributes:
        reason: what the system said.
    """

    kind: ClassVar[str] = "block_spill_failed"
    key: str
    reason: str


@attrs.frozen(kw_only=True)
class BlockLoaded(Event):
    """
    A block was read from its file into memory. Figures as in ``BlockSealed``.

    Attributes:
        digest: measured: of the KV that was read.
    """

    kind: ClassVar[str] = "block_loaded"
    key: str
    digest: str
    bytes: int = natural()
    memory_blocks: int = natural()
    memory_bytes: int = natural()
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class BlockFileRejected(Event):
    """
    A block's file is not what was written. It does not count as there any more.

    That is the world's fault and no bug: nothing of the file was used.

    Attributes:
        reason: ``missing``; ``unreadable`` also where it has another size; ``foreign`` where it
            says that it is another block's; ``digest`` where its KV is other KV.
        moved_to: the file's new name below the folder of blocks; None if nothing is left of it.
    """

    kind: ClassVar[str] = "block_file_rejected"
    key: str
    reason: FileFault
    moved_to: str | None


@attrs.frozen(kw_only=True)
class BlockFileRemoved(Event):
    """
    A block's file was removed. Figures as in ``BlockSpilled``.

    Attributes:
        reason: ``space`` to keep the budget, or by a prune; or ``expired``.
    """

    kind: ClassVar[str] = "block_file_removed"
    key: str
    bytes: int = natural()
    disk_blocks: int = natural()
    disk_bytes: int = natural()
    reason: RemovalReason


@attrs.frozen(kw_only=True)
class TokensEmitted(Event):
    """
    Tokens were released for delivery. Whether they arrive is not known; what may still become a
    marker or a call waits until that is settled, and is delivered then.

    Attributes:
        first: how many tokens of the answer were released before.
        text: their text as the model wrote it, with the markers of thoughts and calls.
    """

    kind: ClassVar[str] = "tokens_emitted"
    session: str
    request: str
    first: int = natural()
    ids: tuple[int, ...] = private()
    text: str = private()


@attrs.frozen(kw_only=True)
class CallRejected(Event):
    """
    What began as a call of a tool is none; the client is given it as text.

    Attributes:
        reason: ``truncated``: the answer ended inside it; ``unparsable``: it is not in the model's
            format of calls; ``no_name``: it names no function; ``invalid_arguments``: its arguments
            are not a JSON object.
        text: as the model wrote it, with its markers, up to where another call begins in it.
        detail: what is wrong with it.
    """

    kind: ClassVar[str] = "call_rejected"
    session: str
    request: str
    reason: CallFault
    text: str = private()
    detail: str = private()


@attrs.frozen(kw_only=True)
class TurnStored(Event):
    """
    What a request brought and what it was answered is kept: its tenant may look it up by the
    request's id, and another request may go on from there by naming it. It is kept once the request
    has finished.

    Attributes:
        agent: whose turn it is, by the agent's name; None for one that is looked up by its request.
        previous: the request whose turn comes before this one, and is kept for itself.
        created_s: when the request came: seconds since 1970.
        question: what it brought that no turn before had, as ``engine.turns`` writes messages.
        answer: what its client was told, as ``engine.turns`` writes the parts of an answer.
        note: the protocol's own, for who looks the turn up; nothing else reads it.
        texts: what else is the protocol's own and seldom changes from turn to turn, by name: those
            that no earlier turn of the session has under this name.
        texts_at: the names of the others, each with the row of that earlier turn. What a turn of
            another session has is not referred to, since its rows may be pruned alone.
    """

    kind: ClassVar[str] = "turn_stored"
    session: str
    request: str
    tenant: str
    agent: str | None
    previous: str | None
    created_s: int
    question: str = private()
    answer: str = private()
    note: str = private()
    texts: Mapping[str, str] = private()
    texts_at: Mapping[str, int]


@attrs.frozen(kw_only=True)
class TurnForgotten(Event):
    """
    A client wants a turn to be kept no longer. Nobody finds it from here on; its text goes when the
    journal is pruned.

    Attributes:
        of_request: the request that it was the turn of.
        tenant: whose it was.
    """

    kind: ClassVar[str] = "turn_forgotten"
    of_request: str
    tenant: str


@attrs.frozen(kw_only=True)
class AgentCreated(Event):
    """
    An agent is there: a conversation that its tenant goes on with by name, and whose history the
    server keeps. Its turns are ``turn_stored`` with its name.

    Attributes:
        agent: its name, one of its kind among those of its tenant.
        model: the model that it asks for; empty for the one that is served.
        max_context: the tokens that a prompt of its and the answer may have together; None for as
            many as the model takes.
        persist: whether it is there after this run of the server.
        created_s: seconds since 1970.
        forked_from: the agent whose history it begins with, if any.
        head: the request whose turn is the last one of that.
        system: its system prompt; None where it has none.
        tools: those on offer to it, as JSON.
    """

    kind: ClassVar[str] = "agent_created"
    agent: str
    tenant: str
    model: str
    max_context: int | None
    persist: bool
    created_s: int
    forked_from: str | None
    head: str | None
    system: str | None = private()
    tools: str = private()


@attrs.frozen(kw_only=True)
class AgentDeleted(Event):
    """
    An agent is there no more. Nobody finds its turns from here on, but for those with which another
    agent begins; their text goes when the journal is pruned.
    """

    kind: ClassVar[str] = "agent_deleted"
    agent: str
    tenant: str


@attrs.frozen(kw_only=True)
class RequestFinished(Event):
    """
    The answer is complete.

    Attributes:
        answer_tokens: how many of the sampled tokens belong to the answer, its end token included.
        completion_tokens: how many the client is told.
    """

    kind: ClassVar[str] = "request_finished"
    session: str
    request: str
    finish_reason: FinishReason
    prompt_tokens: int = natural()
    cached_tokens: int = natural()
    answer_tokens: int = natural()
    completion_tokens: int = natural()


@attrs.frozen(kw_only=True)
class RequestCancelled(Event):
    """
    The request ended without its answer being complete. What was computed stays.

    Attributes:
        stage: ``prefill`` or ``decode``: where it was when its client disconnected. Otherwise why
            it ended: ``no_memory``: no slab could be opened; ``grammar_failed``: its grammar allows
            no next token; ``timed_out``: it took longer than a request may; ``sibling_failed``:
            another answer to the same request failed; ``server_stopped``: the time to drain was
            over; ``journal_full``: there was no space to record it; ``bug``: a fault elsewhere
            ended it.
    """

    kind: ClassVar[str] = "request_cancelled"
    session: str
    request: str
    stage: CancelStage


@attrs.frozen(kw_only=True)
class PrewarmStarted(Event):
    """
    What the next prompt will begin with is to be computed: the conversation with its answer, as a
    client would send it back, as far as it is the same whatever is said next.

    Its full chunks are told by what is new: they are the first ``base_tokens`` of prompt and answer
    and then ``new_ids``; their keys the first ``base_keys`` of the prompt's and then ``new_keys``.

    Attributes:
        next_role: who is expected to speak.
        rules_version: by these rules the two counts of blocks were decided.
        tokens: of its full chunks.
        blocks_from_slab: sealed blocks of it that lie in the session's slab already.
        blocks_from_pool: sealed blocks of it that are copied in from the pool. The rest is run.
    """

    kind: ClassVar[str] = "prewarm_started"
    session: str
    next_role: NextRole
    rules_version: int = natural()
    tokens: int = natural()
    base_tokens: int = natural()
    new_ids: tuple[int, ...] = private()
    base_keys: int = natural()
    new_keys: tuple[str, ...]
    blocks_from_slab: int = natural()
    blocks_from_pool: int = natural()


@attrs.frozen(kw_only=True)
class PrewarmFinished(Event):
    """
    All of what was anticipated lies in the session's slab, canonical.

    Attributes:
        computed_tokens: how many of its tokens passes were run over for it.
    """

    kind: ClassVar[str] = "prewarm_finished"
    session: str
    tokens: int = natural()
    computed_tokens: int = natural()


@attrs.frozen(kw_only=True)
class PrewarmAbandoned(Event):
    """
    What was anticipated is not computed to its end; or nothing was, as it cannot be known.

    Attributes:
        reason: ``request``: a request came for the session; ``slab_needed``: another session needs
            its slab; ``closing``: the session is closing; ``busy``: other requests were in flight
            for too long; ``quarantined``: one of its blocks is quarantined; ``bug``: a fault was
            found; ``render_failed``: the conversation could not be turned into tokens, so that
            there was no ``prewarm_started`` (before all other reasons there was one).
        computed_tokens: how many tokens passes were run over until then.
    """

    kind: ClassVar[str] = "prewarm_abandoned"
    session: str
    reason: AbandonReason
    computed_tokens: int = natural()


@attrs.frozen(kw_only=True)
class SessionSettled(Event):
    """
    The session is at rest: its KV is canonical up to its last sealed block.

    Attributes:
        complete: false where somebody wanted something before settling was done, or requests of
            others were under way for too long.
    """

    kind: ClassVar[str] = "session_settled"
    session: str
    canonical_tokens: int = natural()
    complete: bool


@attrs.frozen(kw_only=True)
class SessionClosed(Event):
    """The session is forgotten. It held no slab any more."""

    kind: ClassVar[str] = "session_closed"
    session: str
    reason: str


# --- the shadow check ---------------------------------------------------------------------------
# What it does is no step of the session's, so these stand on the server's stream and name the
# session in a field of another name.


@attrs.frozen(kw_only=True)
class ShadowStarted(Event):
    """
    An answer is computed once more from its tokens alone, in a slab of the check's own. Figures as
    in ``SlabAcquired``.

    Attributes:
        of_session: the session that gave the answer.
        request: the request that it answered.
    """

    kind: ClassVar[str] = "shadow_started"
    of_session: str
    request: str
    slab: int
    capacity_tokens: int = natural()
    bytes: int = natural()
    pool_slabs: int = natural()
    pool_bytes: int = natural()


@attrs.frozen(kw_only=True)
class ShadowChecked(Event):
    """
    An answer was computed once more to its end. What came out, beside what is on record of it.

    Attributes:
        prompt_tokens: the tokens that were prefilled.
        answer_tokens: the tokens that were drawn again, and compared.
        keys: the blocks on record that prompt and answer make, in order of their tokens.
        digests: measured: of the KV of each as it was computed now.
        memory_digests: measured: of each as it lies in memory; empty where it does not.
        ids_expected: ``keys.ids_hash`` of the tokens that were compared with.
        drawn_expected: ``shadow.drawn_hash`` of the same tokens and their log-probabilities, as the
            events told them when they were committed.
        drawn: measured: that of those drawn now.
        first_difference: the place in the answer of the first that differs, or for which no
            log-probability came out.
        duration_us: of the passes.
    """

    kind: ClassVar[str] = "shadow_checked"
    of_session: str
    request: str
    prompt_tokens: int = natural()
    answer_tokens: int = natural()
    keys: tuple[str, ...]
    digests: tuple[str, ...]
    memory_digests: tuple[str, ...]
    # A hash of few token ids can be guessed back.
    ids_expected: str = private()
    drawn_expected: str = private()
    drawn: str = private()
    first_difference: int | None
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class ShadowEnded(Event):
    """
    The check gave its slab back, and with it all KV that it had computed. Figures as in
    ``SlabReleased``.

    Attributes:
        result: ``same`` or ``differs``; ``interrupted``: a request came, which goes first, or the
            server stopped, admits no request or has no room for its journal; ``failed``: a pass or
            the check itself failed.
    """

    kind: ClassVar[str] = "shadow_ended"
    of_session: str
    request: str
    slab: int
    bytes: int = natural()
    pool_slabs: int = natural()
    pool_bytes: int = natural()
    result: ShadowResult


@attrs.frozen(kw_only=True)
class ShadowSkipped(Event):
    """
    An answer that was chosen is not checked.

    Attributes:
        reason: ``interrupted`` where requests came each time that it was tried; ``queue_full``
            where too many younger answers waited; ``session_changed`` where the session had other
            tokens by then; ``failed`` where the check did; ``model_unloaded`` where the model was
            to leave memory before there was time.
    """

    kind: ClassVar[str] = "shadow_skipped"
    of_session: str
    request: str
    reason: ShadowSkip


# --- faults -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class InvariantViolated(Event):
    """
    The event at ``at_position`` broke an invariant. It stands in the journal and has no effect.

    Attributes:
        invariant: its name; ``CRASH`` where a session's own code failed.
        expected: what the fold of the journal gives.
        actual: what the event says.
        trace: the stack at the time.
    """

    kind: ClassVar[str] = "invariant_violated"
    bug_id: str
    invariant: str
    at_position: int = natural()
    session: str | None
    request: str | None
    fingerprint: str | None
    cairn_version: str
    message: str
    # They may hold token ids.
    expected: str = private()
    actual: str = private()
    trace: str = private()


@attrs.frozen(kw_only=True)
class SessionQuarantined(Event):
    """A broken session serves no more. Requests that name it get its bug id."""

    kind: ClassVar[str] = "session_quarantined"
    session: str
    bug_id: str


@attrs.frozen(kw_only=True)
class BlocksQuarantined(Event):
    """
    A broken block and all that were built on it are reused no more.

    Attributes:
        session: whose doing showed it; None where it was the store's.
    """

    kind: ClassVar[str] = "blocks_quarantined"
    session: str | None
    bug_id: str
    keys: tuple[str, ...]


@attrs.frozen(kw_only=True)
class AdmissionClosed(Event):
    """Memory does not add up: no request is admitted until the server starts anew."""

    kind: ClassVar[str] = "admission_closed"
    session: str
    bug_id: str


ALL_EVENTS: tuple[type[Event], ...] = (
    ServerStarted,
    ServerStopped,
    ServerLost,
    ModelLoaded,
    SelfTestFinished,
    ModelUnloaded,
    ModelLoadFailed,
    OperatorActed,
    JournalStalled,
    JournalPruned,
    RequestRejected,
    SessionOpened,
    RequestReceived,
    PathSelected,
    SlabAcquired,
    SlabReleased,
    BlocksRestored,
    CacheExtended,
    CacheTrimmed,
    BlockSealed,
    BlockEvicted,
    BlockFilesScanned,
    BlockSpilled,
    BlockSpillFailed,
    BlockLoaded,
    BlockFileRejected,
    BlockFileRemoved,
    TokensEmitted,
    CallRejected,
    TurnStored,
    TurnForgotten,
    AgentCreated,
    AgentDeleted,
    RequestFinished,
    RequestCancelled,
    PrewarmStarted,
    PrewarmFinished,
    PrewarmAbandoned,
    SessionSettled,
    SessionClosed,
    ShadowStarted,
    ShadowChecked,
    ShadowEnded,
    ShadowSkipped,
    InvariantViolated,
    SessionQuarantined,
    BlocksQuarantined,
    AdmissionClosed,
)
"""Every event, in the order in which they are told in docs/architecture.md."""


@attrs.frozen(kw_only=True)
class Recorded:
    """
    An event with its place in the journal.

    Attributes:
        position: place among all events, from 1, without gaps.
        seq: place within its stream, from 1, without gaps.
        event_id: makes an append idempotent.
        time_us: microseconds since 1970, for people; no decision reads it.
    """

    position: int
    stream: str
    seq: int
    event_id: str
    time_us: int
    event: Event
