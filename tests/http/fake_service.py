"""A scripted fake of the server: a test sets its replies in advance."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Literal

import attrs
import trio

from cairn.actors.looking import Looking
from cairn.actors.models.size import ModelSize
from cairn.actors.requests.messages import (
    Accepted,
    ContextUse,
    Delta,
    Embed,
    Embedded,
    Finished,
    Generate,
    ListedModel,
    PromptTokens,
    Reply,
    ServerFacts,
    Statistics,
    StoredTurn,
    TokenInfo,
    Waiting,
)
from cairn.actors.threads.pages import PageShares
from cairn.engine.answer.parts import AnswerPart, Said
from cairn.engine.contract import EmbedderFacts
from cairn.engine.model.embedding_files import Matryoshka
from cairn.http.service import SessionService
from cairn.journal.events import Event, Recorded
from cairn.journal.state import EMPTY
from cairn.journal.summaries import Summaries
from tests.http.agents.fake_agents import FakeAgents, FakeTenantAgents

EMBEDS = EmbedderFacts(
    name="vectors",
    fingerprint="e" * 16,
    dimensions=256,
    matryoshka=Matryoshka(),
    context_tokens=32,
    vocabulary_tokens=100,
    pass_tokens=4,
    dtype="float32",
    memory_bytes=1000,
)
FACTS = ServerFacts(
    model="cairn/small-1",
    fingerprint="f" * 16,
    context_tokens=4096,
    block_tokens=64,
    decode_rows=4,
    kv_cache="float32",
    started_s=1_700_000_000,
    default_max_tokens=512,
    vocabulary_tokens=2000,
)

STATISTICS = Statistics(
    sessions={"idle": 3, "decoding": 1},
    queued=2,
    running=1,
    slabs=4,
    slabs_total=8,
    slab_bytes=400,
    slab_bytes_total=1000,
    blocks=5,
    block_bytes=500,
    block_bytes_total=5000,
    disk_blocks=6,
    disk_bytes=600,
    disk_bytes_total=6000,
    index_blocks=9,
    kv_live_bytes=390,
    kv_expected_bytes=380,
    weights_bytes=1100,
    active_bytes=1500,
    cache_bytes=20,
    journal_position=77,
    journal_head=f"77:{'7' * 64}",
    journal_checkpoint=f"70:{'a' * 64}",
    encoded_characters=700,
    cached_characters=7000,
    text_cache_bytes=70,
    bugs=1,
    admission_bug=None,
    journal_stall=None,
)

ACCEPTED = Accepted(
    request="req-1",
    session="sess-1",
    model=FACTS.model,
    fingerprint=FACTS.fingerprint,
    path="new_session",
    reason="cold_start",
    prompt_tokens=2048,
    cached_tokens=128,
    seed=42,
    created_s=1_700_000_100,
    context_left=2048,
)

FINISHED = Finished(
    finish_reason="stop", prompt_tokens=2048, cached_tokens=128, completion_tokens=3
)


def token(token_id: int, text: str, logprob: float) -> TokenInfo:
    """A token whose likeliest alternatives are itself and an impossible one."""
    raw = text.encode()
    top = ((token_id, text, raw, logprob), (0, "<s>", b"<s>", float("-inf")))
    return TokenInfo(id=token_id, text=text, raw=raw, logprob=logprob, top=top)


DELTAS = (
    Delta(parts=(Said("Grüße"),), tokens=(token(1, "Gr", -0.25), token(2, "üße", -0.5))),
    Delta(parts=(), tokens=(token(3, "", -0.75),)),
    Delta(parts=(Said("!"),), tokens=(token(4, "!", -1.0),)),
)

ANSWER: tuple[Reply, ...] = (ACCEPTED, *DELTAS, FINISHED)

QUEUED = Waiting(queued=True, prefilled_tokens=0)
PREFILLING = Waiting(queued=False, prefilled_tokens=512)


class Hold:
    """A step of a script that sends nothing until ``release`` is called."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        self.released = trio.Event()


Step = Reply | Exception | Hold


class FakeService:
    """
    A server that plays a script for each request, the same for every tenant.

    Attributes:
        scripts: played in order; the last one is repeated.
        refusal: raised on entering, if set.
        commands: those that were received.
        tenants: the tenant of each command.
        entered, left: how many requests were entered and left.
        leaves: set once a request was left.
        tokens: the length of every counted prompt.
        turns: the stored ones, by tenant and request.
        agents: the agents of all tenants.
        used: how much of the context conversations have filled, by tenant.
        aliases: of the first model.
        state: of the first model.
        others: models that are not loaded, by name.
        embeds: facts about an embedding model, if there is one.
        embedded: the requests for embeddings.
    """

    def __init__(self, *scripts: Sequence[Step], refusal: Exception | None = None) -> None:
        self.facts = FACTS
        self.aliases: tuple[str, ...] = ()
        self.state: Literal["loaded", "loading", "not_loaded"] = "loaded"
        self.others: dict[str, ServerFacts] = {}
        self.embeds: EmbedderFacts | None = None
        self.embedded: list[Embed] = []
        self.figures = STATISTICS
        self.scripts = deque(scripts or [ANSWER])
        self.refusal = refusal
        self.commands: list[Generate] = []
        self.tenants: list[str] = []
        self.observers: list[Callable[[Recorded], None]] = []
        self.entered = 0
        self.left = 0
        self.leaves = trio.Event()
        self.on_leaving: Exception | None = None
        self.tokens = 17
        self.turns: dict[tuple[str, str], StoredTurn] = {}
        self.agents = FakeAgents()
        self.loads: list[str | None] = []
        self.failures: dict[str, str] = {}
        self.sizes: dict[str, ModelSize] = {}
        self.used: dict[str, tuple[ContextUse, ...]] = {}
        self._position = 0

    def for_tenant(self, tenant: str) -> FakeTenantService:
        """The fake as one tenant sees it."""
        return FakeTenantService(self, tenant)

    @property
    def models(self) -> tuple[ListedModel, ...]:
        """The first model, and the others."""
        first = ListedModel(aliases=self.aliases, state=self.state, waiting=0, facts=self.facts)
        others = (
            ListedModel(
                aliases=(),
                state="not_loaded",
                waiting=1,
                facts=facts,
                failure=self.failures.get(name),
            )
            for name, facts in self.others.items()
        )
        embeds = self.embeds
        if embeds is None:
            return (first, *others)
        facts = attrs.evolve(FACTS, model=embeds.name, vocabulary_tokens=embeds.vocabulary_tokens)
        listed = ListedModel(
            aliases=("small",), state="loaded", waiting=0, facts=facts, embeds=embeds
        )
        return (first, *others, listed)

    def load_model(self, name: str) -> None:
        """Note it."""
        self.loads.append(name)
        if self.refusal is not None:
            raise self.refusal

    def unload_model(self) -> None:
        """Note it."""
        self.loads.append(None)
        if self.refusal is not None:
            raise self.refusal

    async def model_sizes(self) -> dict[str, ModelSize]:
        """The sizes that were set."""
        await trio.lowlevel.checkpoint()
        return self.sizes

    def statistics(self) -> Statistics:
        """The statistics that were set."""
        return self.figures

    def change(self, **figures: Any) -> None:
        """Set some of the statistics."""
        self.figures = attrs.evolve(self.figures, **figures)

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """Add an observer."""
        self.observers.append(observer)

    def commit(self, *events: Event) -> None:
        """Pass events to the observers, as if they had been committed."""
        for event in events:
            self._position += 1
            recorded = Recorded(
                position=self._position,
                stream=event.stream,
                seq=self._position,
                event_id=f"event-{self._position}",
                time_us=0,
                event=event,
            )
            for observer in self.observers:
                observer(recorded)


@attrs.frozen
class FakeTenantService:
    """The fake as one tenant sees it."""

    _server: FakeService
    _tenant: str

    @property
    def facts(self) -> ServerFacts:
        """The facts that were set."""
        return self._server.facts

    @property
    def models(self) -> tuple[ListedModel, ...]:
        """The model that is loaded, and the others."""
        return self._server.models

    @property
    def agents(self) -> FakeTenantAgents:
        """The tenant's agents."""
        return self._server.agents.for_tenant(self._tenant)

    def looking(self, *, of_all: bool, texts: bool) -> Looking:
        """There is nothing to look at."""
        empty: Any = SimpleNamespace(state=EMPTY, stalled=False)
        return Looking(
            tenant=self._tenant,
            of_all=of_all,
            texts=texts,
            summaries=Summaries(),
            sequencer=empty,
            writer=empty,
            pages=PageShares(),
        )

    def sessions(self, *, of_all: bool) -> SessionService:
        """No test of these pages closes or forgets a session."""
        raise NotImplementedError

    def facts_of(self, requested_model: str) -> ServerFacts:
        """The facts of the model with this name, or of the first model."""
        return self._server.others.get(requested_model, self.facts)

    def contexts(self, most: int) -> tuple[ContextUse, ...]:
        """The tenant's contexts, of those that were set."""
        return self._server.used.get(self._tenant, ())[:most]

    @asynccontextmanager
    async def generate(self, command: Generate) -> AsyncIterator[AsyncIterator[Reply]]:
        """Play the next script, within a nursery as the real one does."""
        server = self._server
        self._note(command)
        script = server.scripts.popleft() if len(server.scripts) > 1 else server.scripts[0]
        server.entered += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                yield self._stored(command, _replies(script))
                nursery.cancel_scope.cancel()
            if server.on_leaving is not None:
                raise server.on_leaving
        finally:
            server.left += 1
            server.leaves.set()

    async def _stored(
        self, command: Generate, replies: AsyncIterator[Reply]
    ) -> AsyncIterator[Reply]:
        """The replies. The turn of an agent is stored before the last one."""
        parts: list[AnswerPart] = []
        async for reply in replies:
            keep = command.keep
            if isinstance(reply, Delta):
                parts += reply.parts
            elif isinstance(reply, Finished) and keep is not None and keep.agent is not None:
                self._server.agents.store(self._tenant, keep, tuple(parts), reply)
            yield reply

    async def embed(self, command: Embed) -> Embedded:
        """For each input a vector of its place and 0.5."""
        server = self._server
        server.embedded.append(command)
        server.tenants.append(self._tenant)
        await trio.lowlevel.checkpoint()
        if server.refusal is not None:
            raise server.refusal
        return Embedded(
            request="req-1",
            model=command.model,
            fingerprint="e" * 16,
            vectors=tuple(array("f", (n, 0.5)).tobytes() for n in range(len(command.inputs))),
            tokens=7,
        )

    async def count(self, command: Generate) -> int:
        """The token count that was set."""
        self._note(command)
        await trio.lowlevel.checkpoint()
        return self._server.tokens

    async def tokens(self, command: Generate) -> PromptTokens:
        """A token for each character, or the characters of token ids."""
        self._note(command)
        await trio.lowlevel.checkpoint()
        if isinstance(command.prompt, tuple):
            return PromptTokens(ids=command.prompt, text="".join(map(chr, command.prompt)))
        asked = command.conversation
        words = command.prompt if asked is None else "".join(m.content for m in asked.messages)
        return PromptTokens(ids=tuple(map(ord, words or "")))

    async def turn(self, request: str) -> StoredTurn | None:
        """The turn that was set, if it is the tenant's."""
        await trio.lowlevel.checkpoint()
        if self._server.refusal is not None:
            raise self._server.refusal
        return self._server.turns.get((self._tenant, request))

    async def history(self, request: str) -> tuple[StoredTurn, ...] | None:
        """The turns that were set, the oldest first."""
        found: list[StoredTurn] = []
        named: str | None = request
        while named is not None:
            turn = await self.turn(named)
            if turn is None:
                return None
            found.insert(0, turn)
            named = turn.previous
        return tuple(found)

    async def forget(self, request: str) -> bool:
        """Delete the turn."""
        await trio.lowlevel.checkpoint()
        return self._server.turns.pop((self._tenant, request), None) is not None

    def _note(self, command: Generate) -> None:
        self._server.commands.append(command)
        self._server.tenants.append(self._tenant)
        if self._server.refusal is not None:
            raise self._server.refusal


async def _replies(script: Sequence[Step]) -> AsyncIterator[Reply]:
    for step in script:
        await trio.lowlevel.checkpoint()
        if isinstance(step, Exception):
            raise step
        if isinstance(step, Hold):
            step.reached.set()
            await step.released.wait()
            continue
        yield step
