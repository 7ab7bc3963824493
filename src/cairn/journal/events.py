"""
The events. Every path decision and every cache mutation is one of these.

Rules of this module:

1. An event that exists is valid in itself, because its constructor validates it. Whether it may
   happen *now* is decided in ``lifecycle.py`` and ``invariants/``.
2. Fields are plain values: text, numbers, booleans, tuples of them. No arrays, no clocks, no
   defaults. Fields that engine and store **measured** are recorded next to those that were asked
   for, because a check that reads the same number twice checks nothing.
3. ``kind`` is permanent: a class may be renamed, a kind may not. A change of the fields raises
   ``version`` and adds a step to ``rows.codec.UPCASTS``.
4. A field marked ``private()`` (text, token ids) is stored apart from the rest of its row, so that
   it can be encrypted or erased while the hash chain stays valid.

Token positions are half-open ranges ``[start, end)``, counted from the first token of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

#: For each run of equal layers: (number of layers, first cached token, one past the last one).
Coverage = tuple[tuple[int, int, int], ...]

Step = Literal["prefill", "decode", "settle"]
Path = Literal["continuation", "new_session"]
FinishReason = Literal["stop", "length", "repetition"]
CacheMode = Literal["full", "prefix"]
CancelStage = Literal[
    "prefill",
    "decode",
    "no_memory",
    "grammar_failed",
    "timed_out",
    "sibling_failed",
    "server_stopped",
    "journal_stalled",
    "bug",
]
StallReason = Literal["disk_full", "locked", "no_descriptors", "connection_lost"]
RemovalReason = Literal["space", "expired", "window", "superseded"]
FileFault = Literal["missing", "unreadable", "foreign", "digest"]
NextRole = Literal["user", "tool"]
AbandonReason = Literal[
    "request", "slab_needed", "closing", "busy", "quarantined", "bug", "render_failed"
]
ShadowResult = Literal["same", "differs", "interrupted", "failed"]
ShadowSkip = Literal["interrupted", "queue_full", "session_changed", "failed", "model_unloaded"]
CallFault = Literal["truncated", "unparsable", "no_name", "invalid_arguments"]

TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""The form of a trace context of W3C: version, trace, parent span and flags."""


def private(**kwargs: Any) -> Any:
    """A field that is stored in the private payload of its row."""
    return attrs.field(metadata={"private": True}, **kwargs)


def _range(instance: Any, attribute: Any, value: int) -> None:
    if not 0 <= instance.start <= value:
        raise ValueError(f"[{instance.start}, {value}) is not a range of tokens")


def _natural(instance: Any, attribute: Any, value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} is {value}; a count must not be negative")


def _traceparent(instance: Any, attribute: Any, value: str | None) -> None:
    if value is not None and not TRACEPARENT.fullmatch(value):
        raise ValueError(f"{value!r} is not a trace context")


def natural(**kwargs: Any) -> Any:
    """A count: an integer that is not negative."""
    return attrs.field(validator=_natural, **kwargs)


@attrs.frozen(kw_only=True)
class Event:
    """The base class of all events."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1

    @property
    def stream(self) -> str:
        """The stream of the event: each session has one, and the server has one."""
        session = getattr(self, "session", None)
        return f"session/{session}" if session else "server"


# --- the server ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ServerStarted(Event):
    """A server opened the journal. ``boot`` is the id of this run."""

    kind: ClassVar[str] = "server_started"
    boot: str
    cairn_version: str
    settings: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class ServerStopped(Event):
    """The server drained and closed the journal. What was only in memory is gone."""

    kind: ClassVar[str] = "server_stopped"
    boot: str
    reason: str


@attrs.frozen(kw_only=True)
class ServerLost(Event):
    """
    The next start found that the run ``boot`` never stopped. Its open requests have ended, and what
    was only in memory is gone.
    """

    kind: ClassVar[str] = "server_lost"
    boot: str


@attrs.frozen(kw_only=True)
class ModelLoaded(Event):
    """
    A model is ready. ``fingerprint`` covers everything that can change a bit of an answer.

    Attributes:
        name: the name that clients see.
        directory: where it was loaded from.
        adapter: where the adapter on its weights was loaded from; empty if there is none.
        fingerprint: the hash that names ``fields``.
        fields: the fingerprint as a whole.
        dtype: the dtype it computes in, and why, for people to read; ``fields`` has it, too.
        layers: the number of layers that keep KV or a state.
        block_tokens: C, the rows of a canonical pass.
        decode_rows: W, the most rows of a decode pass.
        context_tokens: the longest sequence that the model serves.
        reusable: whether sealed blocks can be made of this model's cache.
        pool_slabs: the most slabs at a time.
        pool_bytes: the budget of all slabs.
        blocks_bytes: the budget of the sealed blocks in memory.
        blocks_max: the most sealed blocks in memory; 0 if only their bytes are limited.
        kv_sinks, kv_window, kv_rows: the policy ``sink_window``, see ``windows.SinkWindow``; 0 if
            the model's own layers decide what a token attends to.
        min_cache_tokens: no blocks are sealed of a prompt shorter than this.
        state_blocks: every how many blocks one carries the states of recurrent layers, see
            ``checkpoints.Checkpoints``; 0 if no layer has a state, or if nothing is reused.
        grain: a session continues after any multiple of this many tokens of its slab: 1, or C.
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
    blocks_max: int = natural()
    kv_sinks: int = natural()
    kv_window: int = natural()
    kv_rows: int = natural()
    min_cache_tokens: int = natural()
    state_blocks: int = natural()
    grain: int = natural()


@attrs.frozen(kw_only=True)
class SelfTestFinished(Event):
    """
    The engine tested its guarantees on the model that it loaded.

    Attributes:
        base_fingerprint: the fingerprint without its field ``row_class``, which the test finds.
        findings: name of the check to its result, true if it passed. ``naive_differs`` says whether
            naive reuse would have changed bits on this device.
        passed: whether all checks that the guarantees need hold.
        error_max: the largest relative difference from mlx-lm's plain pass.
        decode_shapes: the numbers of rows that a decode pass may have, because a row has the same
            bits in any of them; ascending, the last one W. Empty if that was not measured.
        row_class: the prefill passes that give a token the same bits wherever they begin: C, the
            quantum, the fewest and the most rows, and the least product of an attention. Empty if
            these are only the passes of the canonical schedule.
        row_class_reason: why there is no row class, or not the cheapest; empty if it is.
        without_drafts: why decode passes have no draft rows; empty if these have the bits of
            single passes.
        from_cache: whether the findings are those of an earlier start with this fingerprint.
    """

    kind: ClassVar[str] = "self_test_finished"
    fingerprint: str
    base_fingerprint: str
    findings: Mapping[str, bool]
    passed: bool
    error_max: float
    decode_shapes: tuple[int, ...]
    row_class: tuple[int, ...]
    row_class_reason: str
    without_drafts: str
    duration_us: int = natural()
    from_cache: bool


@attrs.frozen(kw_only=True)
class ModelUnloaded(Event):
    """
    The model was unloaded, and with it every slab and every block in memory. No request was open.

    Attributes:
        reason: why it was unloaded.
        active_bytes: measured: what MLX still has in arrays.
    """

    kind: ClassVar[str] = "model_unloaded"
    fingerprint: str
    reason: str
    active_bytes: int = natural()


@attrs.frozen(kw_only=True)
class ModelLoadFailed(Event):
    """
    A model was requested and could not be loaded. The loaded model is not affected.

    Attributes:
        name: the name that clients see.
        reason: what failed, in a sentence, with paths on this machine.
    """

    kind: ClassVar[str] = "model_load_failed"
    name: str
    reason: str = private()


@attrs.frozen(kw_only=True)
class OperatorActed(Event):
    """An operator made a decision that the rules leave to a person."""

    kind: ClassVar[str] = "operator_acted"
    action: str
    detail: str


@attrs.frozen(kw_only=True)
class LossAccepted(Event):
    """
    The journal lacked rows that it had, and an operator accepted that.

    Attributes:
        fact: what was lost, in words.
        heads: the heads that were recorded or signed and were not in the chain at that moment, each
            as POSITION:HASH.
    """

    kind: ClassVar[str] = "loss_accepted"
    fact: str
    heads: tuple[str, ...]


@attrs.frozen(kw_only=True)
class NodeTakenOver(Event):
    """
    An operator had the journal of a node taken over: the writer before can commit nothing more.

    Attributes:
        token: of the lease from then on, which each commit compares with its own.
        by: who did that.
    """

    kind: ClassVar[str] = "node_taken_over"
    token: int = natural()
    by: str


@attrs.frozen(kw_only=True)
class HeadsSeen(Event):
    """
    The heads of other nodes' journals, as this node read them: rows that are removed from the end
    of one of those are missing then.

    Attributes:
        heads: (node, position, hash of the row there), of those that have changed since.
    """

    kind: ClassVar[str] = "heads_seen"
    heads: tuple[tuple[str, int, str], ...]


@attrs.frozen(kw_only=True)
class LossSeen(Event):
    """
    The journal of another node lacks rows that this node saw, and that node's operator accepted it.
    From then on, this node sees the rows that the other one has since.

    Attributes:
        lost: the head that this node saw last, as POSITION:HASH.
        position: of the ``loss_accepted`` in the other journal that names this head.
        row_hash: the hash of that row.
    """

    kind: ClassVar[str] = "loss_seen"
    node: str
    lost: str
    position: int = natural()
    row_hash: str


@attrs.frozen(kw_only=True)
class JournalStalled(Event):
    """
    The journal could not be written for a time. Requests that were open ended without their answer,
    and new ones were refused in the meantime.

    Attributes:
        reason: ``disk_full``: there was no space; ``locked``: another program had locked it;
            ``connection_lost``: the database server did not answer; ``no_descriptors``: the process
            may open no more files.
        error: the message of the database.
        rows_waiting: rows that waited to be written.
        requests_refused: requests that were refused; they have no rows of their own.
        duration_us: from the first row that was not stored to the first that was.
    """

    kind: ClassVar[str] = "journal_stalled"
    reason: StallReason
    error: str
    rows_waiting: int = natural()
    requests_refused: int = natural()
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class JournalPruned(Event):
    """
    The first rows of the journal were removed. The *base* replaces them: their last position and
    hash, and the state that they fold to.

    Attributes:
        cut: the position of the last row that was removed.
        head: its hash.
        rows: how many were removed this time.
        sessions: how many sessions were removed, each as a whole.
        first_us: when the first of them was written.
        last_us: when the last of them was written.
        before_us: the limit that the operator set: only older rows were removed.
        base_digest: measured: the digest of the base.
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
    A request was refused before a session took it.
    """

    kind: ClassVar[str] = "request_rejected"
    request: str
    tenant: str
    status: int
    code: str


@attrs.frozen(kw_only=True)
class EmbeddingsComputed(Event):
    """
    The vectors of a request for embeddings are complete. It uses no session, no slab and no block.

    Attributes:
        model: the name that clients see.
        fingerprint: covers everything that can change a bit of a vector.
        inputs: how many texts.
        tokens: measured: in the passes over them, with those that the tokenizer adds.
        duration_us: measured: of these passes.
    """

    kind: ClassVar[str] = "embeddings_computed"
    request: str
    tenant: str
    model: str
    fingerprint: str
    inputs: int = natural()
    tokens: int = natural()
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class SessionForgotten(Event):
    """
    An operator had a session forgotten. The keys of its private fields are removed after this, so
    that its texts and token ids cannot be read any more, in any copy.

    Attributes:
        of_session: the session, which is closed.
        rows: how many rows are sealed with its keys.
        key_ids: the ids of these keys.
        blocks: the keys of its blocks that the journal has.
        removed: those of them that no other session names: they are removed from memory and disk.
        same_text: the other sessions that name a block of it, and so have the same text, or that
            quote a few words of it, see ``PathSelected.diverged_from``.
    """

    kind: ClassVar[str] = "session_forgotten"
    of_session: str
    tenant: str
    rows: int = natural()
    key_ids: tuple[str, ...]
    blocks: tuple[str, ...]
    removed: tuple[str, ...]
    same_text: tuple[str, ...]


# --- a session and its requests ---------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SessionOpened(Event):
    """A session exists. ``named`` says whether the client chose its id."""

    kind: ClassVar[str] = "session_opened"
    session: str
    tenant: str
    fingerprint: str
    group: str | None
    named: bool


@attrs.frozen(kw_only=True)
class RequestReceived(Event):
    """
    A session starts on a request.

    The prompt is the first ``base_tokens`` of the prompt of ``base_request`` and then ``new_ids``;
    its block keys likewise. So a turn adds to the journal only what is new in it.

    Attributes:
        new_parts: (name of the part, its hash over all before it, its hash alone) of the parts that
            the session's last request did not have in the same place. Those before are only
            counted, in ``base_parts``.
        sampling: the sampling parameters as they are used, defaults filled in.
        seed: the seed in use; ``seed_given`` says whether the client chose it.
        client: the program that sent it, by its own word, in at most 40 characters of ASCII; None
            if it gave no name. No decision depends on it.
        cache_mode: ``prefix`` if it continues no session and reuses only blocks from the pool.
        ttl_s: the TTL of what the request uses and leaves, in seconds from its last use; None for
            no expiry.
        grammar: the grammar that constrains the answer, in llguidance's form; None if there is
            none.
        thoughts: how many of its messages have the thinking of an answer: those that its client
            sends back.
        words: the first words of the last message of a user, or of a raw prompt, for people; if the
            session is new, after those of the conversation; None if there are none.
        waited_us: measured: from the arrival of the request to this event.
        traceparent: the span that the client called from, as W3C's header has it; None if it named
            none.
    """

    kind: ClassVar[str] = "request_received"
    session: str
    request: str
    protocol: str
    client: str | None
    tenant: str
    fingerprint: str
    session_name: str | None
    group: str | None
    cache_prompt: bool
    base_request: str | None
    base_parts: int = natural()
    new_parts: tuple[tuple[str, str, str], ...]
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
    thoughts: int = natural()
    words: str | None = private()
    cache_mode: CacheMode
    ttl_s: int | None = attrs.field(validator=attrs.validators.optional(_natural))
    waited_us: int = natural()
    traceparent: str | None = attrs.field(validator=_traceparent)


@attrs.frozen(kw_only=True)
class PrefixJoined(Event):
    """
    A request waits for blocks of its prompt that another request computes now. Its path is selected
    when these are sealed, or will not be; until then it holds no more than it held before, and
    these blocks stay in memory once they are there. See ``paths.join``.

    Attributes:
        decided_at: the position of the journal that the decision was made on.
        leader: the other request.
        blocks: how many blocks of the prompt are to be reusable then.
        reused_blocks: how many are reusable now.
    """

    kind: ClassVar[str] = "prefix_joined"
    session: str
    request: str
    rules_version: int
    decided_at: int = natural()
    leader: str
    blocks: int = natural()
    reused_blocks: int = natural()


@attrs.frozen(kw_only=True)
class PathSelected(Event):
    """
    The decision of ``paths.select``: which path, why, and what is reused. From here on the session
    is claimed by the request, and the reused blocks are pinned.

    Attributes:
        decided_at: the position of the journal that the decision was made on.
        tokens_from_slab: the tokens whose KV the session's own slab already holds.
        blocks_from_slab: the sealed blocks among them.
        blocks_from_pool: sealed blocks that are copied in from the pool, after those of the slab.
        partial_key: the block whose first rows are copied in after all these (grain 1); None if
            there is none.
        tokens_from_partial: how many rows that are.
        reused_tokens: tokens_from_slab + blocks_from_pool * C + tokens_from_partial.
        prewarmed_tokens: how many of the reused tokens were prewarmed and are reused for the first
            time.
        rerendered_tokens: tokens of the session that the template now renders differently.
        nearest: the session that the request was compared with, if any.
        diverged_part: for ``diverged``: which part changed, by Anthropic's names; or
            ``tools_reordered``.
        diverged_token: for ``diverged``, and if tokens are rendered differently: the first token
            that differs from the nearest session's.
        diverged_text: the text around it.
        diverged_from: the text around it in the nearest session.
    """

    kind: ClassVar[str] = "path_selected"
    session: str
    request: str
    rules_version: int
    decided_at: int = natural()
    path: Path
    reason: str | None
    tokens_from_slab: int = natural()
    blocks_from_slab: int = natural()
    blocks_from_pool: int = natural()
    partial_key: str | None
    tokens_from_partial: int = natural()
    reused_tokens: int = natural()
    prewarmed_tokens: int = natural()
    rerendered_tokens: int = natural()
    nearest: str | None
    diverged_part: str | None
    diverged_token: int | None
    diverged_text: str | None = private()
    diverged_from: str | None = private()


@attrs.frozen(kw_only=True)
class SlabAcquired(Event):
    """
    A session holds a slab: KV arrays of a fixed capacity.

    Attributes:
        bytes: measured: the size of the slab's arrays.
        pool_slabs: measured: the open slabs of all sessions after this.
        pool_bytes: measured: their bytes.
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
    A session gave up its slab, and with it all KV in it. Figures as in ``SlabAcquired``.
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
    decided, or the next part of them. A partial match has an event of its own, which ends within
    the block: only its first rows were copied.

    Attributes:
        request: the request whose prompt they belong to; None for a prewarm.
        keys: the blocks that were copied, in order of their tokens; under ``sink_window`` those
            with the sinks and those of the window at the end.
        digests: measured: of the bytes that the slab holds of each after the copy; of a partial
            match with the rows of the block that were not copied, so that the whole is checked.
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
class RowChecked(Event):
    """
    The first pass of a request that reuses the first rows of a block (grain 1) computed the last of
    them again, in other company than before. INV-3 compares the bits.

    Attributes:
        row: the position of the token.
        held_digest: measured: a digest of the row's KV in all layers, before the pass.
        digest: measured: of what the pass computed for it.
    """

    kind: ClassVar[str] = "row_checked"
    session: str
    request: str
    row: int = natural()
    held_digest: str
    digest: str


@attrs.frozen(kw_only=True)
class CacheExtended(Event):
    """
    Passes of the model added KV for the tokens ``[start, end)``.

    A prefill or settling pass is one event. Decode steps that follow each other within one commit
    are one event: one step for each token of ``sampled`` that was not accepted from a draft. Such
    an event also releases the tokens that are certain by then, as ``TokensEmitted`` does.

    Attributes:
        input_hash: measured: ``keys.ids_hash`` of the token ids that the passes were given.
        coverage: measured: what each layer holds after it.
        sampled: measured: the tokens drawn from the logits of these passes, if any were.
        logprobs: measured: the log-probability of each token of ``sampled``.
        drafted: measured: how many tokens of drafts the passes computed.
        accepted: measured: how many of these were drawn; only their KV is kept.
        emitted: for decode steps: how many tokens of the answer were released, the first of those
            that were not yet.
        text: their text, as in ``TokensEmitted``.
    """

    kind: ClassVar[str] = "cache_extended"
    session: str
    request: str | None
    step: Step
    start: int = natural()
    end: int = attrs.field(validator=_range)
    # The tokens can be guessed from a hash of only a few of them.
    input_hash: str = private()
    coverage: Coverage
    sampled: tuple[int, ...] = private()
    logprobs: tuple[float, ...] = private()
    drafted: int = natural(default=0)
    accepted: int = natural(default=0)
    emitted: int = natural(default=0)
    text: str = private(default="")
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
    A full block of canonical KV was sealed: it never changes. With the grain 1 a session that is
    about to be idle also seals what it holds after its last full block, as a short block of fewer
    than C tokens.

    Attributes:
        digest: measured: a hash over the bytes of its KV.
        resealed: whether the key was sealed before; the digest must then be the same.
        stored: whether the block is in memory; false if no space could be made for it.
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
        reason: ``space``: another block needed its space; ``expired``: its TTL is over;
            ``window``: it is in the attention window of no idle conversation; ``superseded``: a
            short block, and another block has its tokens and more.
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
    The block files of earlier runs were looked up, by name and size. Those that were missing or
    wrong are in ``block_file_rejected`` events before this. From here on files may be written.

    Attributes:
        budget_bytes: what the files may take together; 0 for none.
        disk_blocks: measured: the number of block files.
        disk_bytes: measured: their bytes.
        removed_files: files that runs of this journal wrote, that no row knows, and that were
            removed.
    """

    kind: ClassVar[str] = "block_files_scanned"
    budget_bytes: int = natural()
    disk_blocks: int = natural()
    disk_bytes: int = natural()
    removed_files: int = natural()


@attrs.frozen(kw_only=True)
class BlockSpilled(Event):
    """
    A block in memory was also written to a file.

    Attributes:
        digest: measured: of the KV that was written.
        bytes: measured: the size of the file.
        disk_blocks: measured: the number of block files after this.
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
    A block could not be written. It has no file, and is reused only while it is in memory.

    Attributes:
        reason: the message of the system.
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
    A block's file is not what was written, and is not used any more.

    This is a fault of the environment and not a bug: nothing of the file was used.

    Attributes:
        reason: ``missing``; ``unreadable``, also for a wrong size; ``foreign``: it says that it
            belongs to another block; ``digest``: its KV has another digest.
        moved_to: the file's new name below the folder of blocks; None if nothing is left of it, or
            if it is a file of another node, which stays.
        node: the other node that wrote it; None if it is a file of this journal.
    """

    kind: ClassVar[str] = "block_file_rejected"
    key: str
    reason: FileFault
    moved_to: str | None
    node: str | None = None


@attrs.frozen(kw_only=True)
class BlockFileRemoved(Event):
    """
    A block's file was removed. Figures as in ``BlockSpilled``.

    Attributes:
        reason: ``space``: to keep the budget, or by a prune; or ``expired``.
    """

    kind: ClassVar[str] = "block_file_removed"
    key: str
    bytes: int = natural()
    disk_blocks: int = natural()
    disk_bytes: int = natural()
    reason: RemovalReason


@attrs.frozen(kw_only=True)
class BlockAdopted(Event):
    """
    A block that another node of the fleet sealed was read from its file into memory. From then on
    it is used as if this node had sealed it; the file stays the other node's. Figures as in
    ``BlockSealed``.

    Attributes:
        digest: measured: of the KV that was read. It is the one in the other node's row.
        node: the node that sealed it.
        position: of the row in that node's journal by which it did.
        row_hash: the hash of that row.
        ttl_s: the TTL that the request asks for; None for none.
    """

    kind: ClassVar[str] = "block_adopted"
    key: str
    parent: str | None
    digest: str
    start: int = natural()
    end: int = attrs.field(validator=_range)
    bytes: int = natural()
    node: str
    position: int = natural()
    row_hash: str
    ttl_s: int | None = attrs.field(validator=attrs.validators.optional(_natural))
    memory_blocks: int = natural()
    memory_bytes: int = natural()
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class AdoptionDeclined(Event):
    """
    Blocks of other nodes were not read, because computing them takes less time: see
    ``cache.adoption``. The requests that follow do not look for any, until one is due to measure
    again.

    Attributes:
        key: the first of them.
        blocks: how many they are.
        prefill_tokens, prefill_us, adopted_tokens, adopted_us: what was measured of both so far.
    """

    kind: ClassVar[str] = "adoption_declined"
    key: str
    blocks: int = natural()
    prefill_tokens: int = natural()
    prefill_us: int = natural()
    adopted_tokens: int = natural()
    adopted_us: int = natural()


@attrs.frozen(kw_only=True)
class TokensEmitted(Event):
    """
    Tokens were released for delivery: the first one of an answer, and what is left at its end. The
    others are released with the decode steps that made them certain, see ``CacheExtended``. Whether
    they arrive is not known. Text that may still become a marker or a tool call waits until that is
    decided, and is delivered then.

    Attributes:
        first: how many tokens of the answer were released before.
        emitted: how many are released now.
        text: their text as the model wrote it, with the markers of thinking and calls.
    """

    kind: ClassVar[str] = "tokens_emitted"
    session: str
    request: str
    first: int = natural()
    emitted: int = natural()
    ids: tuple[int, ...] = private()
    text: str = private()


@attrs.frozen(kw_only=True)
class CallRejected(Event):
    """
    Text that began like a tool call is not a valid one; the client gets it as text.

    Attributes:
        reason: ``truncated``: the answer ended inside it; ``unparsable``: it is not in the model's
            format of calls; ``no_name``: it names no function; ``invalid_arguments``: its arguments
            are not a JSON object.
        text: as the model wrote it, with its markers, up to the next call in it.
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
    The messages and the answer of a request are stored. Its tenant can look them up by the id of
    the request, and another request can continue from there by naming it. They can be looked up as
    soon as the request has finished.

    Attributes:
        agent: the name of the agent that the turn belongs to; None for one that is looked up by its
            request.
        previous: the request of the turn before this one, which is stored by an event of its own.
        created_s: when the request came: seconds since 1970.
        question: the messages that no turn before had, in the form of the engine's turns.
        answer: the parts of the answer that the client got, in the same form.
        note: data of the protocol's adapter; nothing else reads it.
        texts: other texts of the adapter that seldom change from turn to turn, by name: those that
            no earlier turn of the session has under this name.
        texts_at: the names of the other texts, each with the row of the earlier turn. It never
            refers to another session, because that may be pruned alone.
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
    A client deleted a turn. It cannot be looked up any more; its text goes when the journal is
    pruned.

    Attributes:
        of_request: the request of the turn.
        tenant: the tenant of the turn.
    """

    kind: ClassVar[str] = "turn_forgotten"
    of_request: str
    tenant: str


@attrs.frozen(kw_only=True)
class AgentCreated(Event):
    """
    An agent exists: a conversation that its tenant continues by name, and whose history the server
    stores. Its turns are ``turn_stored`` events with its name.

    Attributes:
        agent: its name, unique among the agents of its tenant.
        model: the model that it uses; empty for the default model.
        max_context: the most tokens of a prompt and its answer together; None for the model's own
            limit.
        persist: whether it outlives this run of the server.
        created_s: seconds since 1970.
        forked_from: the agent whose history it starts with, if any.
        head: the request of the last turn of that history.
        system: its system prompt; None if it has none.
        tools: its tools, as JSON.
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
    An agent was deleted. Its turns cannot be looked up any more, except those that another agent's
    history starts with. Their text goes when the journal is pruned.
    """

    kind: ClassVar[str] = "agent_deleted"
    agent: str
    tenant: str


@attrs.frozen(kw_only=True)
class SessionReleased(Event):
    """
    An operator or the agent's tenant handed an agent over to another node. This node serves it no
    more, and its name cannot be used again. Its history stays until it is deleted or forgotten.

    Attributes:
        to: the name of the agent from then on, unless it is adopted under another one.
        to_node: the node that may adopt it.
    """

    kind: ClassVar[str] = "session_released"
    agent: str
    tenant: str
    to: str
    to_node: str


@attrs.frozen(kw_only=True)
class SessionAdopted(Event):
    """
    An agent that another node released exists here, as by ``agent_created``. Its turns follow, each
    by ``turn_adopted``.

    Attributes:
        created_s: when it was first created: seconds since 1970.
        of_agent: its name on the other node.
        turns: how many turns its history has.
        node, position, row_hash: the row ``session_released`` in the journal of that node.
    """

    kind: ClassVar[str] = "session_adopted"
    agent: str
    tenant: str
    model: str
    max_context: int | None
    created_s: int
    of_agent: str
    turns: int = natural()
    node: str
    position: int = natural()
    row_hash: str
    system: str | None = private()
    tools: str = private()


@attrs.frozen(kw_only=True)
class TurnAdopted(Event):
    """
    A turn of an agent that was adopted. It has what ``turn_stored`` and ``request_finished`` have.

    Attributes:
        request: a new id, because a turn may come from several agents that share it.
        of_request: its id on the other node.
        previous: the turn before it here.
        node, position, row_hash: the row that stored the turn in the journal of that node.
        end_position, end_hash: the row there that ended its request; the same if it was adopted
            there, too.
    """

    kind: ClassVar[str] = "turn_adopted"
    agent: str
    tenant: str
    request: str
    of_request: str
    previous: str | None
    created_s: int
    finish_reason: FinishReason
    prompt_tokens: int = natural()
    cached_tokens: int = natural()
    completion_tokens: int = natural()
    answer_tokens: int = natural()
    node: str
    position: int = natural()
    row_hash: str
    end_position: int = natural()
    end_hash: str
    question: str = private()
    answer: str = private()


@attrs.frozen(kw_only=True)
class RequestFinished(Event):
    """
    The answer is complete.

    Attributes:
        finish_reason: ``repetition`` if it repeated itself, and its request has a guard against
            that. See ``repetition``.
        answer_tokens: how many of the sampled tokens belong to the answer, its end token included.
        completion_tokens: how many are reported to the client.
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
    The request ended before its answer was complete. What was computed stays in the cache.

    Attributes:
        stage: ``prefill`` or ``decode``: where it was when its client disconnected. Otherwise why
            it ended: ``no_memory``: no slab could be opened; ``grammar_failed``: its grammar allows
            no next token; ``timed_out``: it took longer than a request may; ``sibling_failed``:
            another answer to the same request failed; ``server_stopped``: the time to drain was
            over; ``journal_stalled``: it could not be recorded; ``bug``: a fault elsewhere ended
            it.
    """

    kind: ClassVar[str] = "request_cancelled"
    session: str
    request: str
    stage: CancelStage


@attrs.frozen(kw_only=True)
class PrewarmStarted(Event):
    """
    The beginning of the next prompt is to be computed: the conversation with its answer as a client
    would send it back, as far as that does not depend on the next message.

    It is recorded by what is new: it is the first ``base_tokens`` of prompt and answer and then
    ``new_ids``; the keys of its full blocks are the first ``base_keys`` of the prompt's keys and
    then ``new_keys``. With the grain C it consists of full blocks.

    Attributes:
        next_role: the expected role of the next message.
        rules_version: the rules that decided what is reused.
        tokens: its tokens.
        tokens_from_slab: the tokens of it whose KV the session's slab already holds.
        blocks_from_slab: the sealed blocks among them.
        blocks_from_pool: sealed blocks of it that are copied in from the pool.
        partial_key, tokens_from_partial: as in ``PathSelected``. The rest is computed.
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
    tokens_from_slab: int = natural()
    blocks_from_slab: int = natural()
    blocks_from_pool: int = natural()
    partial_key: str | None
    tokens_from_partial: int = natural()


@attrs.frozen(kw_only=True)
class PrewarmFinished(Event):
    """
    The session's slab holds all tokens of the prewarm, canonical.

    Attributes:
        computed_tokens: how many of them were computed for it.
    """

    kind: ClassVar[str] = "prewarm_finished"
    session: str
    tokens: int = natural()
    computed_tokens: int = natural()


@attrs.frozen(kw_only=True)
class PrewarmAbandoned(Event):
    """
    A prewarm ended early, or could not start.

    Attributes:
        reason: ``request``: a request came for the session; ``slab_needed``: another session needs
            its slab; ``closing``: the session is closing; ``busy``: other requests were in flight
            for too long; ``quarantined``: one of its blocks is quarantined; ``bug``: a fault was
            found; ``render_failed``: the conversation could not be turned into tokens, so that
            there was no ``prewarm_started`` (before all other reasons there was one).
        computed_tokens: how many tokens were computed until then.
    """

    kind: ClassVar[str] = "prewarm_abandoned"
    session: str
    reason: AbandonReason
    computed_tokens: int = natural()


@attrs.frozen(kw_only=True)
class SessionSettled(Event):
    """
    The session is idle: its KV is canonical up to its last sealed block.

    Attributes:
        complete: false if settling was interrupted by a request, or if other requests were in
            flight for too long.
    """

    kind: ClassVar[str] = "session_settled"
    session: str
    canonical_tokens: int = natural()
    complete: bool


@attrs.frozen(kw_only=True)
class SessionClosed(Event):
    """The session was closed. It had no slab any more."""

    kind: ClassVar[str] = "session_closed"
    session: str
    reason: str


# --- the shadow check ---------------------------------------------------------------------------
# Its events are not steps of the session. They are on the server's stream, and name the session in
# the field ``of_session``.


@attrs.frozen(kw_only=True)
class ShadowStarted(Event):
    """
    An answer is computed again from its tokens alone, in a slab that only the check uses. Figures
    as in ``SlabAcquired``.

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
    A shadow check computed an answer again up to its end. The result, next to what is on record.

    Attributes:
        prompt_tokens: the tokens that were prefilled.
        cuts: where the passes over the prompt ended, and then those over the answer. With the grain
            1 they are other passes than those that gave the answer; with the grain C there is only
            one way to cut a sequence.
        answer_tokens: the tokens that were sampled again and compared.
        keys: the blocks of prompt and answer that are on record, in order of their tokens.
        digests: measured: of the KV of each block as the check computed it.
        memory_digests: measured: of each block in memory; empty for a block that is not.
        ids_expected: ``keys.ids_hash`` of the tokens on record.
        drawn_expected: ``shadow.drawn_hash`` of the same tokens and their log-probabilities, from
            the events that recorded them.
        drawn: measured: the same hash of the tokens that the check sampled.
        first_difference: the index in the answer of the first token that differs, or that got no
            log-probability.
        duration_us: of the passes.
    """

    kind: ClassVar[str] = "shadow_checked"
    of_session: str
    request: str
    prompt_tokens: int = natural()
    cuts: tuple[int, ...]
    answer_tokens: int = natural()
    keys: tuple[str, ...]
    digests: tuple[str, ...]
    memory_digests: tuple[str, ...]
    # The tokens can be guessed from a hash of only a few of them.
    ids_expected: str = private()
    drawn_expected: str = private()
    drawn: str = private()
    first_difference: int | None
    duration_us: int = natural()


@attrs.frozen(kw_only=True)
class ShadowEnded(Event):
    """
    The check released its slab, and with it all KV that it had computed. Figures as in
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
    An answer that was chosen for a check is not checked.

    Attributes:
        reason: ``interrupted``: requests came each time that it was tried; ``queue_full``: too many
            younger answers waited; ``session_changed``: the session had other tokens by then;
            ``failed``: the check failed; ``model_unloaded``: the model was unloaded before there
            was time.
    """

    kind: ClassVar[str] = "shadow_skipped"
    of_session: str
    request: str
    reason: ShadowSkip


# --- faults -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class InvariantViolated(Event):
    """
    The event at ``at_position`` broke an invariant. It is in the journal and has no effect.

    Attributes:
        of_session: the session whose answer was checked, if the event is a shadow check.
        invariant: its name; ``CRASH`` if the code of a session, or of the server's idle work,
            raised an exception.
        expected: the value that the state of the journal implies.
        actual: the value in the event.
        trace: the stack at that time.
    """

    kind: ClassVar[str] = "invariant_violated"
    bug_id: str
    invariant: str
    at_position: int = natural()
    session: str | None
    of_session: str | None
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
    """A broken session serves no more requests. Those that name it get its bug id."""

    kind: ClassVar[str] = "session_quarantined"
    session: str
    bug_id: str


@attrs.frozen(kw_only=True)
class BlocksQuarantined(Event):
    """
    A broken block, and all blocks after it in their chains, are not reused any more.

    Attributes:
        session: the session whose step showed it; None if it was not a step of a session.
    """

    kind: ClassVar[str] = "blocks_quarantined"
    session: str | None
    bug_id: str
    keys: tuple[str, ...]


@attrs.frozen(kw_only=True)
class AdmissionClosed(Event):
    """Memory does not add up: no request is admitted until the server starts again."""

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
    LossAccepted,
    NodeTakenOver,
    HeadsSeen,
    LossSeen,
    JournalStalled,
    JournalPruned,
    SessionForgotten,
    RequestRejected,
    EmbeddingsComputed,
    SessionOpened,
    RequestReceived,
    PrefixJoined,
    PathSelected,
    SlabAcquired,
    SlabReleased,
    BlocksRestored,
    CacheExtended,
    CacheTrimmed,
    RowChecked,
    BlockSealed,
    BlockEvicted,
    BlockFilesScanned,
    BlockSpilled,
    BlockSpillFailed,
    BlockLoaded,
    BlockFileRejected,
    BlockFileRemoved,
    BlockAdopted,
    AdoptionDeclined,
    TokensEmitted,
    CallRejected,
    TurnStored,
    TurnForgotten,
    AgentCreated,
    AgentDeleted,
    SessionReleased,
    SessionAdopted,
    TurnAdopted,
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
"""Every event, in the order of docs/architecture.md."""


@attrs.frozen(kw_only=True)
class Recorded:
    """
    An event with its position in the journal.

    Attributes:
        position: place among all events, from 1, without gaps.
        seq: place within its stream, from 1, without gaps.
        event_id: a random id, which names the event in copies too.
        time_us: microseconds since 1970, for people to read; no decision depends on it.
        unread: the id of the key without which the private fields of the event are placeholders;
            None if they are what was recorded.
    """

    position: int
    stream: str
    seq: int
    event_id: str
    time_us: int
    event: Event
    unread: str | None = None
