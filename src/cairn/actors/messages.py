"""
What the HTTP layer asks of the actors, and what it hears from them.

Plain values. Nothing of a wire protocol goes in, nothing of MLX comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from cairn.engine.prompt import Conversation
from cairn.engine.sampling import Sampling
from cairn.journal.events import FinishReason, Path


@attrs.frozen(kw_only=True)
class Generate:
    """
    Ask for an answer.

    Attributes:
        protocol: the adapter's name, for the journal.
        tenant: whose blocks and sessions may be used.
        conversation: what was said; None for a raw prompt.
        prompt: a raw prompt, as text or token ids; None for a conversation.
        sampling: parameters with defaults filled in.
        seed: None to have one drawn; the journal has it either way.
        max_tokens: the longest answer; None for the server's default. Clamped to what is left of
            the context.
        stop: texts that end the answer and are not part of it.
        top_logprobs: how many alternatives to report for each token; None for no log-probabilities.
        session_name: the session that the client names, if any. Strict.
        group: the group that a client's header names, if any.
        cache_prompt: False to take the cold path.
        asked_model: the model's name as the client wrote it.
    """

    protocol: str
    tenant: str
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
    asked_model: str = ""


@attrs.frozen(kw_only=True)
class Accepted:
    """
    A session took the request, by this path. Comes before any token.

    Attributes:
        created_s: seconds since 1970.
    """

    request: str
    session: str
    path: Path
    reason: str | None
    prompt_tokens: int
    cached_tokens: int
    seed: int
    created_s: int


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
        raw: its bytes.
        top: (id, text, bytes, log-probability), likeliest first.
    """

    id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()


@attrs.frozen(kw_only=True)
class Delta:
    """
    A piece of the answer. It is committed.

    Attributes:
        text: what the client sees of it.
        tokens: the tokens that it is made of.
    """

    text: str
    tokens: tuple[TokenInfo, ...]


@attrs.frozen(kw_only=True)
class Finished:
    """
    The answer is complete; nothing follows.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


Reply = Accepted | Waiting | Delta | Finished


class RefusalError(Exception):
    """
    A request that is not served, told to its client. Nothing was changed by it.

    The tree::

        RefusalError
          |- PromptTooLong      the client's: 400
          |- PromptRefused      the client's: 400; the template or the tokenizer cannot take it
          |- QueueFull          the load's: 429, with a time to come back
          |- NoMemory           the load's: 503, with a time to come back
          |- JournalFull        the disk's: 503, with a time to come back
          |- Stopping           the operator's: 503, with a time to come back
          |- Broken             ours: 500, with the bug id

    Attributes:
        request: the request's id, by which journal and log know it; None until the server has set
            it.
        session: the session that the request named, if it did.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.request: str | None = None
        self.session: str | None = None


class PromptTooLong(RefusalError):
    """
    The prompt leaves no room for an answer in the model's context.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"prompt is too long: {prompt_tokens} tokens > {context_tokens - 1} maximum "
            f"(the model's context is {context_tokens} tokens and an answer needs at least one)"
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class PromptRefused(RefusalError):
    """
    The chat template or the tokenizer cannot take what was sent.
    """


class QueueFull(RefusalError):
    """
    Too many requests wait already.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoMemory(RefusalError):
    """
    The prompt's KV does not fit beside what other requests hold at the moment.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class JournalFull(RefusalError):
    """
    There is no room to put anything on record, so nothing is answered.
    """

    def __init__(self, retry_after_s: int = 10) -> None:
        super().__init__(
            "the disk of the server's journal is full, so that nothing can be put on record; "
            "try again when its operator has made room"
        )
        self.retry_after_s = retry_after_s


class Stopping(RefusalError):
    """
    The server is draining.
    """

    def __init__(self, message: str, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Broken(RefusalError):
    """
    An invariant broke, or the session that was named is quarantined.
    """

    def __init__(self, bug_id: str) -> None:
        super().__init__(f"internal cache invariant violation; bug id {bug_id}")
        self.bug_id = bug_id


@attrs.frozen(kw_only=True)
class ServerFacts:
    """
    What the server tells of itself.

    Attributes:
        vocabulary_tokens: the tokens that a draw can give, by their ids from 0.
        defaults: the sampling of a request that says nothing of it.
        template: settings of the chat template, likewise.
    """

    model: str
    fingerprint: str
    context_tokens: int
    chunk_tokens: int
    decode_rows: int
    kv_cache: str
    started_s: int
    default_max_tokens: int
    vocabulary_tokens: int
    defaults: Sampling = attrs.field(factory=Sampling)
    template: Mapping[str, Any] = attrs.field(factory=dict)


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
        kv_live_bytes: KV in slabs up to each session's token count, by the model's shapes.
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
    kv_live_bytes: int
    journal_position: int
    bugs: int
    admission_bug: str | None
    journal_full: bool
