"""
What goes between the HTTP layer and the actors: plain values.

They have nothing of a wire protocol and nothing of MLX. ``errors.py`` has the refusals.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import attrs

from cairn.engine.answer.grammar import Constraint
from cairn.engine.answer.parts import AnswerPart, Calling
from cairn.engine.prompt.infill import Infill
from cairn.engine.prompt.template import Conversation, Message, message_of
from cairn.engine.row_class import RowClass
from cairn.engine.sampling import Sampling
from cairn.journal.cache.windows import SinkWindow
from cairn.journal.events import CacheMode, FinishReason, Path, StallReason
from cairn.journal.summaries import TurnCounts

if TYPE_CHECKING:
    from cairn.engine.contract import EmbedderFacts


@attrs.frozen(kw_only=True)
class Keep:
    """
    What to store of a request with its answer, so that a later request may continue from it.

    Attributes:
        previous: the request whose turn comes before, if any; that turn is stored by itself.
        asked: the messages that are new in this request. What comes with every request, such as
            instructions, is not among them.
        note: the protocol's own data, given back when the turn is looked up.
        texts: further data of the protocol that seldom changes from turn to turn, by name: each is
            written once in a session.
        agent: the name of the agent whose turn it is; None for a turn that is looked up by its
            request.
        created: the row in which that agent was created, because a name may be used again; None for
            any.
    """

    previous: str | None
    asked: tuple[Message, ...]
    note: str
    texts: Mapping[str, str] = attrs.field(factory=dict)
    agent: str | None = None
    created: int | None = None


@attrs.frozen(kw_only=True)
class Generate:
    """
    Ask for an answer.

    Attributes:
        protocol: the adapter's name, for the journal.
        conversation: its messages and tools; None for a raw prompt.
        prompt: a raw prompt, as text or token ids; None for a conversation.
        sampling: parameters with defaults filled in.
        seed: None to draw one; the journal has it either way.
        max_tokens: the longest answer; None for the server's default, 0 to prefill the prompt
            without an answer. Clamped to the rest of the context.
        stop: texts that end the answer and are not part of it.
        top_logprobs: how many alternatives to report for each token; None for no log-probabilities.
        session_name: the client's name for the session that must serve it, if it names one.
        group: the group that a header of the client names, if any.
        cache_prompt: False to take the cold path, whatever ``cache_mode`` is.
        cache_mode: ``full`` to continue a session, found by name or by content; ``prefix`` to
            continue none, and reuse shared blocks alone.
        ttl_s: the TTL of what the request uses and leaves, from its last use on, in seconds; None
            for the server's default.
        least_ttl_s: a lower bound of that default, in seconds.
        requested_model: the model's name as the client wrote it.
        constraint: constrains the answer; None for nothing.
        keep: what to store of it, with the answer; None for nothing.
        choices: how many answers, each a separate request. The first one is as if it were alone;
            the others begin once the prompt is prefilled, with the seeds that follow. They have no
            named session, and nothing is stored of them.
        context_max: the limit of prompt and answer together, if it is less than the model's
            context; in tokens.
        explain: whether the client wants its path explained in words.
        client: the program that sent it, by its own word: short and of few characters; None if it
            gave no name.
        traceparent: the span that the client calls from, in the form of ``events.TRACEPARENT``.
    """

    protocol: str
    conversation: Conversation | None
    prompt: str | tuple[int, ...] | None
    sampling: Sampling
    seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    session_name: str | None = None
    group: str | None = None
    cache_prompt: bool = True
    cache_mode: CacheMode = "full"
    ttl_s: int | None = None
    least_ttl_s: int = 0
    requested_model: str = ""
    constraint: Constraint | None = None
    keep: Keep | None = None
    choices: int = 1
    context_max: int | None = None
    explain: bool = False
    client: str | None = None
    traceparent: str | None = None


@attrs.frozen(kw_only=True)
class Accepted:
    """
    A session took the request, by this path. Comes before any token.

    Attributes:
        session: the client's name for it.
        model: the name of the model that answers.
        fingerprint: of it.
        created_s: seconds since 1970.
        choice: the index of the answer.
        context_left: how many tokens of the context the prompt leaves free.
        explanation: the path in words, if the client asked for it; private.
    """

    request: str
    session: str
    model: str
    fingerprint: str
    path: Path
    reason: str | None
    prompt_tokens: int
    cached_tokens: int
    seed: int
    created_s: int
    context_left: int
    choice: int = 0
    explanation: str | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True)
class Waiting:
    """
    A keep-alive: the request waits in the queue or is in a long prefill.

    Attributes:
        prefilled_tokens: how much of the prompt is prefilled.
    """

    queued: bool
    prefilled_tokens: int


@attrs.frozen(kw_only=True)
class TokenInfo:
    """
    A token of the answer with its log-probability and the likeliest alternatives.

    Attributes:
        text: the token alone, as text; may have U+FFFD if it is part of a character.
        raw: its bytes, which may be part of a character; None if they are not known.
        top: (id, text, bytes, log-probability), likeliest first.
    """

    id: int
    text: str
    raw: bytes | None
    logprob: float
    top: tuple[tuple[int, str, bytes | None, float], ...] = ()


@attrs.frozen(kw_only=True)
class Delta:
    """
    A piece of the answer. Its events are committed.

    Attributes:
        parts: what became certain with it; empty while its text may still become a marker or a
            call.
        tokens: the tokens of the piece, if the client asked for them.
        choice: the index of the answer.
        calling: after the parts, the beginning of a call that is not complete; the whole call
            follows as a part.
    """

    parts: tuple[AnswerPart, ...]
    tokens: tuple[TokenInfo, ...] = ()
    choice: int = 0
    calling: Calling | None = None


@attrs.frozen(kw_only=True)
class Finished:
    """
    The answer is complete. It is the last reply of an answer.

    Attributes:
        sealed_tokens: prompt tokens whose KV was computed for this request and became blocks.
        stop_text: which of the client's stop texts ended the answer, if one did.
        ended_in_call: whether it ended in the middle of a call.
        choice: the index of the answer.
        turn: its times, as the journal has them; None if it no longer has them.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    sealed_tokens: int = 0
    stop_text: str | None = None
    ended_in_call: bool = False
    choice: int = 0
    turn: TurnCounts | None = attrs.field(default=None, eq=False)

    @property
    def is_cut(self) -> bool:
        """Whether the model had not ended it: it is too long, or repeats itself."""
        return self.finish_reason != "stop"


@attrs.frozen(kw_only=True)
class StoredTurn:
    """
    The messages of a request and its answer, from the journal.

    Attributes:
        created_s: when the request arrived: seconds since 1970.
        parts: the answer, as its client got it.
        texts: see ``Keep``; in a history only those that are new in the turn.
        finished: how it ended, as far as that is on record.
    """

    request: str
    previous: str | None
    created_s: int
    asked: tuple[Message, ...]
    parts: tuple[AnswerPart, ...]
    note: str
    texts: Mapping[str, str] = attrs.field(factory=dict)
    finished: Finished

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that the turn adds to a conversation."""
        return (*self.asked, message_of(self.parts))


@attrs.frozen(kw_only=True)
class PromptTokens:
    """
    A prompt in tokens.

    Attributes:
        text: what they spell, if the prompt was token ids; else empty.
    """

    ids: tuple[int, ...]
    text: str = ""


@attrs.frozen(kw_only=True)
class Embed:
    """
    A request for the vectors of texts.

    Attributes:
        model: the name or an alias of an embedding model.
        inputs: each a text, or token ids.
        dimensions: how many numbers of each vector are wanted; None for all.
    """

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None


@attrs.frozen(kw_only=True)
class Embedded:
    """
    The vectors of texts.

    Attributes:
        model: the name of the model that made them.
        vectors: of length 1, in the order of the texts, as little-endian float32.
        tokens: that were computed.
    """

    request: str
    model: str
    fingerprint: str
    vectors: tuple[bytes, ...]
    tokens: int


@attrs.frozen(kw_only=True)
class ForgottenSession:
    """
    A session whose texts can be read no more.

    Attributes:
        rows: how many rows of the journal had its texts; 0 if it was forgotten before.
        blocks: how many blocks only it had, which are removed.
        same_text: the other sessions that have the same beginning, or quote a few words of it.
        still_readable: where texts or token ids of it can be read all the same, a phrase each.
    """

    session: str
    rows: int = 0
    blocks: int = 0
    same_text: tuple[str, ...] = ()
    still_readable: tuple[str, ...] = ()


Reply = Accepted | Waiting | Delta | Finished


@attrs.frozen(kw_only=True)
class ServerFacts:
    """
    Facts about the server and one of its models.

    Attributes:
        decode_rows: W, the most answers that decode in one pass.
        decode_shapes: the numbers of rows that a decode pass may have; the last one is W.
        row_class: the prefill passes that give the same bits wherever they begin; None if each
            begins with a block.
        row_class_reason: why there is none, or not the cheapest; empty if it is.
        without_drafts: why decode passes have no draft rows; empty if they may.
        vocabulary_tokens: the number of tokens that can be drawn; their ids begin at 0.
        defaults: the sampling parameters of a request that sets none.
        template: the settings of the chat template of a request that sets none.
        switches: the settings of thinking that the template knows.
        infill: the special tokens for filling a gap in a text; None if the model has none.
        dtype: in which dtype the model computes, and why, for people.
        policy: what a token attends to; None for what the model's layers say.
        min_cache_tokens: shorter prompts leave no blocks for other requests.
        model_context_tokens: the model's own context, if the memory for sessions limits
            ``context_tokens``; else 0.
        shadow_share: the share of answers that are computed again in idle time.
        node: the name of the server in its fleet; None if it is alone.
    """

    model: str
    fingerprint: str
    context_tokens: int
    block_tokens: int
    decode_rows: int
    kv_cache: str
    started_s: int
    default_max_tokens: int
    vocabulary_tokens: int
    defaults: Sampling = attrs.field(factory=Sampling)
    template: Mapping[str, object] = attrs.field(factory=dict)
    switches: frozenset[str] = frozenset({"enable_thinking"})
    infill: Infill | None = None
    decode_shapes: tuple[int, ...] = ()
    row_class: RowClass | None = None
    row_class_reason: str = ""
    without_drafts: str = ""
    dtype: str = ""
    policy: SinkWindow | None = None
    min_cache_tokens: int = 0
    model_context_tokens: int = 0
    shadow_share: float = 0.0
    node: str | None = None


@attrs.frozen(kw_only=True)
class ContextUse:
    """
    How much of the context a conversation has filled.

    Attributes:
        session: the tenant's name for it.
        tokens: of its last prompt and answer together.
        left: how many more the context holds.
    """

    session: str
    tokens: int
    left: int


@attrs.frozen(kw_only=True)
class ListedModel:
    """
    A model that a request may name.

    Attributes:
        aliases: further names of it.
        waiting: requests that wait until it is loaded.
        failure: why it could not be loaded when that was last tried; None if it was, or was never
            tried. For the operator.
        facts: with its name. Until it is loaded for the first time its fingerprint is empty, and
            its numbers are those of its files.
        embeds: facts about an embedding model; None for a model that answers.
    """

    aliases: tuple[str, ...]
    state: Literal["loaded", "loading", "not_loaded"]
    waiting: int
    facts: ServerFacts
    failure: str | None = None
    embeds: EmbedderFacts | None = None


DELAYS_S = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.1)
"""The upper bounds of the classes in which delays are counted."""


@attrs.frozen(kw_only=True)
class Delays:
    """
    How long tokens waited to be appended.

    Attributes:
        tokens: how many waited for at most each of ``DELAYS_S``, but longer than the one before,
            and in the end how many waited for longer.
        sum_s: of all delays, in seconds.
    """

    tokens: tuple[int, ...] = (0,) * (len(DELAYS_S) + 1)
    sum_s: float = 0.0


@attrs.frozen(kw_only=True)
class Statistics:
    """
    The server at this moment.

    Attributes:
        sessions: the number of sessions in each ``SessionState``.
        queued: requests that wait for a session.
        running: requests that a session serves.
        slabs, slabs_total: slabs in use, and how many there may be.
        slab_bytes, slab_bytes_total: likewise in bytes.
        blocks, block_bytes, block_bytes_total: sealed blocks in memory.
        disk_blocks, disk_bytes, disk_bytes_total: block files.
        index_blocks: sealed blocks in memory or in a file, each once.
        kv_live_bytes: arrays of slabs and blocks, measured.
        kv_expected_bytes: what the tokens in them take by the model's shapes, each once.
        weights_bytes: arrays of the model, measured.
        active_bytes, cache_bytes: MLX's count of bytes in arrays, and in freed ones it has kept.
        encoded_characters: characters of prompts that the tokenizer encoded since the start.
        cached_characters: characters of prompts whose token ids were cached.
        text_cache_bytes: the bytes of cached texts and token ids.
        journal_head: position and hash of the last committed row.
        journal_checkpoint: likewise of the last signed head of this run; empty before the first.
        bugs: violations on record.
        admission_bug: the id of the bug that closed admission, if one did.
        journal_stall: why the journal cannot be written at the moment; None if it can.
        journal_log_bytes: the size of the write-ahead log of the journal's database.
        gather_delays: how long tokens waited to be appended to the journal.
        degraded: the idle work that a bug has ended (``expiry``, ``shadow_checks``), with the bug's
            id; and ``block_files`` if their folder is gone or read-only, with its path and the
            system's error.
    """

    sessions: dict[str, int]
    queued: int
    running: int
    slabs: int
    slabs_total: int
    slab_bytes: int
    slab_bytes_total: int
    blocks: int
    block_bytes: int
    block_bytes_total: int
    disk_blocks: int
    disk_bytes: int
    disk_bytes_total: int
    index_blocks: int
    kv_live_bytes: int
    kv_expected_bytes: int
    weights_bytes: int
    active_bytes: int
    cache_bytes: int
    journal_position: int
    journal_head: str
    journal_checkpoint: str
    encoded_characters: int
    cached_characters: int
    text_cache_bytes: int
    bugs: int
    admission_bug: str | None
    journal_stall: StallReason | None
    journal_log_bytes: int = 0
    gather_delays: Delays = Delays()
    degraded: Mapping[str, str] = MappingProxyType({})
