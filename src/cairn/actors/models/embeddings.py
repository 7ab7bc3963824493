"""
Embeds texts with models that are loaded at the start and stay beside the model that answers.

Rules of this module:

1. A text is computed alone, in passes of bounded length. Each is a job of the engine's thread that
   is never ahead of a job of an answer (``threads/scheduling.py``), and none is asked for while an
   answer is in flight, or it would run in each moment between two of that answer's prefill passes.
2. One text has the turn at a time. Tenants have it in turn, and the requests of a tenant too,
   whatever number of texts each has.
3. A request that is complete is one event, ``embeddings_computed``, which is committed before its
   client gets the vectors. One that ends otherwise is on record as ``request_rejected``, as is any
   request that no session took.
4. A failure of the model is a bug on record. It ends its request alone: no state outlives a text.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from cairn.actors.clock import new_id, wall_clock_us
from cairn.actors.errors import (
    Broken,
    InputTooLong,
    PromptRefused,
    QueueFull,
    RefusalError,
    Stopping,
    TimedOut,
)
from cairn.actors.requests.admission import RETRY_AFTER_S
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Embed, Embedded, ListedModel, ServerFacts
from cairn.actors.requests.replies import unless_dead
from cairn.actors.threads.engine import EngineGone
from cairn.actors.threads.prompts import GivenUp, kind_of
from cairn.actors.threads.writer import WriterDied
from cairn.journal import events as ev

if TYPE_CHECKING:
    from cairn.actors.models.load import Run
    from cairn.actors.settings import Progress
    from cairn.engine.contract import Embedder
    from cairn.engine.model.models_file import ModelEntry

REQUEST_TOKENS_MAX = 300_000
"""The most tokens of all texts of a request, as with OpenAI."""

log = structlog.get_logger("cairn")

StartEmbedder = Callable[["ModelEntry", "Progress"], "Embedder"]
"""Loads an embedding model, on the engine's thread. See ``embedder_on_mlx``."""


@attrs.frozen
class LoadedEmbedder:
    """An embedding model, and its entry in the file of models."""

    entry: ModelEntry
    embedder: Embedder


def embedder_on_mlx(entry: ModelEntry, progress: Progress) -> Embedder:
    """
    Load an embedding model with MLX. Must run on the engine's thread.

    Raises:
        ModelRefused: it cannot be served.
    """
    from cairn.engine.mlx.embedding import start_embedder  # MLX, on the engine's thread

    return start_embedder(
        entry.directory,
        name=entry.name,
        dtype=entry.dtype or "auto",
        matryoshka=entry.matryoshka,
        progress=progress,
    )


async def load_embedders(
    run: Run, entries: Sequence[ModelEntry], start: StartEmbedder
) -> tuple[LoadedEmbedder, ...]:
    """
    Load embedding models on the engine's thread.

    Raises:
        ModelRefused: one of them cannot be served.
    """
    loaded = []
    for entry in entries:
        embedder = await run.engine.load(partial(start, entry, run.progress))
        facts = embedder.facts
        log.info(
            "embedding model loaded",
            model=facts.name,
            fingerprint=facts.fingerprint,
            dimensions=facts.dimensions,
            dtype=facts.dtype,
        )
        loaded.append(LoadedEmbedder(entry, embedder))
    return tuple(loaded)


class Embeddings:
    """The embedding models of a server."""

    def __init__(self, run: Run, loaded: Sequence[LoadedEmbedder], limits: Limits) -> None:
        self._run = run
        self._limits = limits
        self._turns = Turns()
        self._named = {
            name: one.embedder for one in loaded for name in (one.entry.name, *one.entry.aliases)
        }
        started_s = wall_clock_us() // 1_000_000
        self.listed = tuple(_listed(one, started_s) for one in loaded)
        self._open: dict[trio.CancelScope, str] = {}  # each with its tenant
        self._stopping = False
        self._all_left = trio.Event()

    async def embed(self, command: Embed, tenant: str) -> Embedded:
        """
        The vectors of texts.

        Raises:
            LookupError: there is no embedding model of this name.
            RefusalError: the request is refused, or ended without an answer.
        """
        embedder, request = self._named[command.model], new_id()
        try:
            await self._admit(request, tenant)
            with trio.CancelScope(deadline=trio.current_time() + self._limits.request_s) as scope:
                self._open[scope] = tenant
                try:
                    return await self._embedded(embedder, command, request, tenant)
                finally:
                    del self._open[scope]
                    if self._stopping and not self._open:
                        self._all_left.set()
            if self._stopping:
                self._reject(request, tenant, "server_stopped")
                raise Stopping("the server was stopped before the vectors were complete")
            self._reject(request, tenant, "timed_out")
            raise TimedOut(self._limits.request_s)
        except trio.Cancelled:
            self._reject(request, tenant, "client")
            raise
        except RefusalError as refusal:
            refusal.request = request
            raise

    async def drain(self) -> None:
        """Refuse new requests, and let running ones finish within the limit."""
        self._stopping = True
        if not self._open:
            return
        with trio.move_on_after(self._limits.drain_s):
            await self._all_left.wait()
        for scope in self._open:
            scope.cancel()
        if self._open:
            await self._all_left.wait()

    async def _admit(self, request: str, tenant: str) -> None:
        self._run.admission.check_open(stopping=self._stopping)
        await self._run.admission.check_bugs()
        most = max(1, self._limits.queue)
        own = sum(one == tenant for one in self._open.values())
        # No tenant takes all places from the others.
        if len(self._open) >= most or own >= max(1, most // 2):
            self._reject(request, tenant, "queue_full")
            raise QueueFull(
                f"{own} requests of yours for embeddings wait already, and {len(self._open)} in "
                "all; try again in a few seconds",
                retry_after_s=RETRY_AFTER_S,
            )

    def _reject(self, request: str, tenant: str, why: str) -> None:
        self._run.admission.reject(request, tenant, why)

    async def _embedded(
        self, embedder: Embedder, command: Embed, request: str, tenant: str
    ) -> Embedded:
        texts = await self._tokenised(embedder, command, tenant)
        vectors, tokens, duration_us = [], 0, 0
        for ids in texts:
            async with self._turns.turn(tenant):
                state, rows, took_us = await self._computed(embedder, ids)
            vectors.append(unit_vector(state, command.dimensions))
            tokens, duration_us = tokens + rows, duration_us + took_us
        computed = ev.EmbeddingsComputed(
            request=request,
            tenant=tenant,
            model=embedder.facts.name,
            fingerprint=embedder.facts.fingerprint,
            inputs=len(texts),
            tokens=tokens,
            duration_us=duration_us,
        )
        # From here on the request is on record, whether its client still waits or not.
        with trio.CancelScope(shield=True):
            position = self._run.sequencer.append(computed)
            await unless_dead(self._run.writer.wait_committed(position))
        return Embedded(
            request=request,
            model=embedder.facts.name,
            fingerprint=embedder.facts.fingerprint,
            vectors=tuple(vectors),
            tokens=tokens,
        )

    async def _tokenised(
        self, embedder: Embedder, command: Embed, tenant: str
    ) -> Sequence[tuple[int, ...]]:
        """
        The token ids of each text, in a thread.

        Raises:
            InputTooLong: a text, or all of them together, are too long.
            PromptRefused: a text has no tokens, or cannot be tokenised.
            TimedOut: it took too long.
        """
        work = partial(_encoded, embedder, command)
        kind = kind_of(sum(len(one) for one in command.inputs))
        try:
            texts = await self._run.threads.run(kind, tenant, work)
        except GivenUp as given_up:
            raise TimedOut(given_up.limit_s, "prompt") from given_up
        most = embedder.facts.context_tokens
        for place, ids in enumerate(texts):
            if not ids:
                raise PromptRefused(f"input[{place}] has no tokens; leave it out")
            if len(ids) > most:
                raise InputTooLong(
                    f"input[{place}] has {len(ids)} tokens; {embedder.facts.name} takes at most "
                    f"{most} in a text, so split it"
                )
        if (total := sum(map(len, texts))) > REQUEST_TOKENS_MAX:
            raise InputTooLong(
                f"the inputs have {total} tokens together; a request may have at most "
                f"{REQUEST_TOKENS_MAX}, so send them in several"
            )
        return texts

    async def _computed(self, embedder: Embedder, ids: tuple[int, ...]) -> tuple[bytes, int, int]:
        """
        The state of a text, its tokens and the microseconds of its passes, both measured.

        Raises:
            Broken: the model failed, which is on record.
            Stopping: the engine has ended.
        """
        done, duration_us, vector = 0, 0, None
        try:
            while vector is None:
                await self._run.activity.wait_idle()
                report = await self._run.engine.embed(partial(embedder.run_pass, ids, done))
                done, duration_us = done + report.tokens, duration_us + report.duration_us
                vector = report.vector
        except BaseException as error:
            if isinstance(error, EngineGone):
                raise Stopping("the server is stopping; try again in a moment") from error
            with trio.CancelScope(shield=True), contextlib.suppress(EngineGone):
                await self._run.engine.call(lambda _: embedder.drop(), lambda _: None)
            if isinstance(error, Exception):
                raise await self._bug(error) from error
            raise
        return vector, done, duration_us

    async def _bug(self, error: Exception) -> RefusalError:
        """What a request gets whose model failed; on record by then."""
        try:
            bug_id = self._run.sequencer.bug_that_ended(error)
            await unless_dead(self._run.writer.wait_all_committed())
        except WriterDied:
            return Stopping("the server stops because its journal cannot be written")
        log.error("an embedding model failed", bug_id=bug_id, exc_info=error)
        return Broken(bug_id)


class Turns:
    """
    Who computes next, one at a time: of the tenants that wait, the one whose turn is longest ago;
    of its tasks, the first.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[trio.Event]] = {}
        self._had: dict[str, int] = {}  # when each tenant last had the turn
        self._turns = 0
        self._taken = False

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Have the turn while the context lasts."""
        if not self._taken:
            self._give(tenant)
        else:
            mine = trio.Event()
            self._waiting.setdefault(tenant, deque()).append(mine)
            try:
                await mine.wait()
            except trio.Cancelled:
                if mine.is_set():
                    self._pass_on()
                else:
                    self._leave(tenant, mine)
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _give(self, tenant: str) -> None:
        self._taken = True
        self._turns += 1
        self._had[tenant] = self._turns

    def _pass_on(self) -> None:
        self._taken = False
        if not self._waiting:
            return
        tenant = min(self._waiting, key=lambda one: self._had.get(one, 0))
        event = self._waiting[tenant][0]
        self._leave(tenant, event)
        self._give(tenant)
        event.set()

    def _leave(self, tenant: str, mine: trio.Event) -> None:
        self._waiting[tenant].remove(mine)
        if not self._waiting[tenant]:
            del self._waiting[tenant]


def unit_vector(state: bytes, dimensions: int | None = None) -> bytes:
    """
    A state, cut to its first dimensions and divided by its length.

    Args:
        state: little-endian float32.

    Returns:
        The vector, likewise. It depends on nothing else: sum and root are rounded once.
    """
    numbers = array("f", state)[:dimensions]
    length = math.sqrt(math.fsum(one * one for one in numbers)) or 1.0
    return array("f", [one / length for one in numbers]).tobytes()


def _encoded(embedder: Embedder, command: Embed) -> Sequence[tuple[int, ...]]:
    encode = embedder.tokenizer.encode
    try:
        return [one if isinstance(one, tuple) else tuple(encode(one)) for one in command.inputs]
    except Exception as error:  # a tokenizer may be broken in any way
        raise PromptRefused(f"an input cannot be tokenised: {error}") from error


def _listed(one: LoadedEmbedder, started_s: int) -> ListedModel:
    facts = one.embedder.facts
    return ListedModel(
        aliases=one.entry.aliases,
        state="loaded",
        waiting=0,
        embeds=facts,
        facts=ServerFacts(
            model=facts.name,
            fingerprint=facts.fingerprint,
            context_tokens=facts.context_tokens,
            block_tokens=facts.pass_tokens,
            decode_rows=0,
            kv_cache="mlx-lm",
            started_s=started_s,
            default_max_tokens=0,
            vocabulary_tokens=facts.vocabulary_tokens,
            dtype=facts.dtype,
        ),
    )
