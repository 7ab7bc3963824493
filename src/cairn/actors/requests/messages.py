"""
What the HTTP layer asks of the actors, and what it hears from them.

Plain values. Nothing of a wire protocol goes in, nothing of MLX comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from cairn.engine.answer.grammar import Constraint
from cairn.engine.answer.parts import AnswerPart, Calling
from cairn.engine.prompt.template import Conversation, Message, message_of
from cairn.engine.sampling import Sampling
from cairn.journal.events import CacheMode, FinishReason, Path
from cairn.journal.windows import SinkWindow


@attrs.frozen(kw_only=True)
class Keep:
    """
    What is kept of a request beside its answer, so that another one may go on from there.

    Attributes:
        previous: the request whose turn comes before, if any; its turn is kept for itself.
        asked: the messages that this request brought and no turn before had. What has to come with
            every request, such as instructions, is none of them.
        note: the protocol's own, for who looks the turn up.
        texts: what else is its own and seldom changes from turn to turn, by name: each is written
            once in a session.
        agent: whose turn it is, by the agent's name; None for one that is looked up by its request.
        created: the row in which that agent was created, as a name may be given again; None for no
            matter which.
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
        conversation: what was said; None for a raw prompt.
        prompt: a raw prompt, as text or token ids; None for a conversation.
        sampling: parameters with defaults filled in.
        seed: None to have one drawn; the journal has it either way.
        max_tokens: the longest answer; None for the server's default, 0 to have the prompt read and
            nothing answered. Clamped to what is left of the context.
        stop: texts that end the answer and are not part of it.
        top_logprobs: how many alternatives to report for each token; None for no log-probabilities.
        session_name: the session that the client names, if any, by its own name for it. Strict.
        group: the group that a client's header names, if any.
        cache_prompt: False to take the cold path, whatever ``cache_mode`` is.
        cache_mode: ``full`` to go on from a session, by its name or found by content; ``prefix`` to
            go on from none, built on shared blocks alone.
        ttl_s: the life of what the request uses and leaves, from its last use on, in seconds; None
            for the server's default.
        least_ttl_s: where that is the default, it is at least so long.
        requested_model: the model's name as the client wrote it.
        constraint: what the answer is held to; None for nothing.
        keep: what is kept of it, with the answer; None for nothing.
        choices: how many answers, each a request of its own. The first one is as if it were alone;
            the others begin once the prompt has its KV, with the seeds that follow. They are of
            no named session, and nothing is kept of them.
        context_max: the tokens that prompt and answer may have together, where that is less than
            the model's context.
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


@attrs.frozen(kw_only=True)
class Accepted:
    """
    A session took the request, by this path. Comes before any token.

    Attributes:
        session: the client's name for it.
        model: the name of the model that answers.
        fingerprint: of it.
        created_s: seconds since 1970.
        choice: which of the answers that were asked for.
        context_left: the tokens of the context that the prompt leaves: for this answer, and for
            what comes after it.
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


@attrs.frozen(kw_only=True)
class Waiting:
    """
    Nothing yet; the request waits in the queue or is in a long prefill. For keep-alives.

    Attributes:
        prefilled_tokens: how much of the prompt has its KV.
    """

    queued: bool
    prefilled_tokens: int


@attrs.frozen(kw_only=True)
class TokenInfo:
    """
    A token of the answer with its log-probability and the likeliest alternatives.

    Attributes:
        text: the token alone, as text; may hold U+FFFD where it is part of a character.
        raw: its bytes, those of part of a character too; None where they are not known.
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
    A piece of the answer. It is committed.

    Attributes:
        parts: what became certain with it; nothing while its text may still become a marker or a
            call.
        tokens: the tokens that it is made of, where the client asked for them.
        choice: which of the answers that were asked for.
        calling: behind the parts, what came of a call that is held; all of it follows as a part.
    """

    parts: tuple[AnswerPart, ...]
    tokens: tuple[TokenInfo, ...] = ()
    choice: int = 0
    calling: Calling | None = None


@attrs.frozen(kw_only=True)
class Finished:
    """
    The answer is complete; nothing follows of it.

    Attributes:
        sealed_tokens: of the prompt, those whose KV was computed for it and became blocks.
        stop_text: which of the client's texts ended the answer, if one did.
        ended_in_call: whether it ended, or was ended, in the midst of a call.
        choice: which of the answers that were asked for.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    sealed_tokens: int = 0
    stop_text: str | None = None
    ended_in_call: bool = False
    choice: int = 0


@attrs.frozen(kw_only=True)
class StoredTurn:
    """
    What a request brought and what it was answered, from the journal.

    Attributes:
        created_s: when it came: seconds since 1970.
        parts: the answer, as its client was told.
        texts: those of its note, by name; of a history only what the turn itself brought.
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
        """What it adds to a conversation."""
        return (*self.asked, message_of(self.parts))


Reply = Accepted | Waiting | Delta | Finished


@attrs.frozen(kw_only=True)
class ServerFacts:
    """
    What the server tells of itself.

    Attributes:
        vocabulary_tokens: the tokens that a draw can give, by their ids from 0.
        defaults: the sampling of a request that says nothing of it.
        template: settings of the chat template, likewise.
        switches: the settings of thinking that the template heeds.
        dtype: in which dtype the model computes, and why, for people.
        policy: what a token attends to; None for what the model's layers say.
        min_cache_tokens: of a shorter prompt nothing is kept for other requests.
        model_context_tokens: what the model itself takes, where the memory for sessions bounds
            ``context_tokens``; else 0.
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
    template: Mapping[str, Any] = attrs.field(factory=dict)
    switches: frozenset[str] = frozenset({"enable_thinking"})
    dtype: str = ""
    policy: SinkWindow | None = None
    min_cache_tokens: int = 0
    model_context_tokens: int = 0


@attrs.frozen(kw_only=True)
class ContextUse:
    """
    How much of the context a conversation has filled.

    Attributes:
        session: what its tenant calls it.
        tokens: of its last prompt and answer together.
        left: what the context has beside them.
    """

    session: str
    tokens: int
    left: int


@attrs.frozen(kw_only=True)
class ListedModel:
    """
    A model that may be asked for.

    Attributes:
        aliases: further names of it.
        waiting: requests that wait until it is loaded.
        facts: with its name. As long as it was never loaded, its fingerprint is empty, and counts
            are those that its files tell.
    """

    aliases: tuple[str, ...]
    state: Literal["loaded", "loading", "not_loaded"]
    waiting: int
    facts: ServerFacts


@attrs.frozen(kw_only=True)
class Statistics:
    """
    The server at this moment.

    Attributes:
        sessions: sessions by their step in ``lifecycle.Life``.
        queued: requests that wait for a session.
        running: requests that a session has in hand.
        slabs, slabs_total: slabs held, and how many may be.
        slab_bytes, slab_bytes_total: likewise in bytes.
        blocks, block_bytes, block_bytes_total: sealed blocks in memory.
        disk_blocks, disk_bytes, disk_bytes_total: block files.
        index_blocks: sealed blocks in memory or in a file, each once.
        kv_live_bytes: arrays of slabs and blocks, measured.
        kv_expected_bytes: what the tokens in them take by the model's shapes, each once.
        weights_bytes: arrays of the model, measured.
        active_bytes, cache_bytes: what MLX has in arrays, and keeps of freed ones, by its count.
        encoded_characters: of prompts, that went through the tokenizer since the start.
        cached_characters: of prompts, whose token ids were remembered.
        text_cache_bytes: that texts and token ids take which are remembered.
        bugs: violations on record.
        admission_bug: the bug that closed admission, if one did.
        journal_full: whether there is no room for the journal at the moment.
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
    encoded_characters: int
    cached_characters: int
    text_cache_bytes: int
    bugs: int
    admission_bug: str | None
    journal_full: bool
