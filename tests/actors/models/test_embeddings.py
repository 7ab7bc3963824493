"""Embeddings: what is computed when, what is on record, and who waits for whom."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.boot import booted_models
from cairn.actors.errors import (
    Broken,
    InputTooLong,
    PromptRefused,
    QueueFull,
    RefusalError,
    Stopping,
    TimedOut,
)
from cairn.actors.models.choice import Choice
from cairn.actors.models.embeddings import REQUEST_TOKENS_MAX, Turns, unit_vector
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Embed
from cairn.actors.server import Server
from cairn.engine.errors import ModelRefused
from cairn.engine.model.models_file import ModelEntry, ModelMetadata
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from cairn.journal.tenants import LOCAL
from tests.support.fake_engine import NO_MODEL, FakeEmbedder, started
from tests.support.in_process_server import SECRET, ask, generate, local, settings

pytestmark = pytest.mark.trio

HELLO = Conversation(messages=(Message(role="user", content="Hello"),))
ENTRY = ModelEntry(name="vectors", directory="none", embeddings=True, aliases=("small",))


@attrs.define
class Setup:
    """A journal, and a server over the fake engine and an embedding model."""

    embedder: FakeEmbedder = attrs.field(factory=FakeEmbedder)
    store: MemoryStore = attrs.field(factory=MemoryStore)

    @contextlib.asynccontextmanager
    async def serving(self, **limits: Any) -> AsyncIterator[Server]:
        """The server, while the context is open."""
        metadata = ModelMetadata(
            defaults=Sampling(),
            template={},
            switches=frozenset(),
            vocabulary_tokens=128,
            context_tokens=8192,
        )
        of_it = settings(NO_MODEL, limits=Limits(**limits))
        entry = ModelEntry(name="one", directory=str(NO_MODEL))
        async with booted_models(
            [Choice(entry=entry, settings=of_it, metadata=metadata)],
            "one",
            self.store,
            SECRET,
            start_engine=started,
            embedding_models=[ENTRY],
            start_embedder=lambda *_: self.embedder,
        ) as server:
            yield server

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        """The events of some kinds. The journal must verify, but for what it reports itself."""
        assert not [one for one in replay(self.store.read()).findings if not one.recorded]
        found = (decode(row).event for row in self.store.rows)
        return [event for event in found if isinstance(event, kinds)]

    def ended(self) -> list[str]:
        """How requests for embeddings ended, in order."""
        found = self.events(ev.EmbeddingsComputed, ev.RequestRejected)
        return [getattr(one, "code", "computed") for one in found]

    async def hold(self) -> None:
        """Wait until a pass is held."""
        assert await trio.to_thread.run_sync(self.embedder.held.wait, 60)


@pytest.fixture
def setup() -> Setup:
    """A new setup."""
    return Setup()


def texts(*inputs: Any, **changes: Any) -> Embed:
    """A request for the vectors of texts."""
    return Embed(**{"model": "vectors", "inputs": inputs, **changes})


async def refused(server: Server, command: Embed, tenant: str = LOCAL) -> RefusalError:
    """The refusal of a request."""
    with pytest.raises(RefusalError) as caught:
        await server.for_tenant(tenant).embed(command)
    return caught.value


async def test_vectors_and_their_record(setup: Setup) -> None:
    """
    Of texts and of token ids, by name and alias, with length 1; on record before the answer, with
    counts and without texts.
    """
    async with setup.serving() as server:
        found = await local(server).embed(texts("ab", (97, 98), "abcdefghi", model="small"))
        on_record = setup.events(ev.EmbeddingsComputed)
    first, second, long = (array("f", one) for one in found.vectors)
    assert first == second == array("f", unit_vector(array("f", (97, 98, 2)).tobytes()))
    assert math.isclose(1.0, sum(one * one for one in long), rel_tol=1e-6)
    assert [97, 97, 97, 101, 105] == setup.embedder.passes
    (event,) = on_record
    assert (3, 13, "vectors") == (event.inputs, event.tokens, event.model)
    assert (found.request, found.fingerprint) == (event.request, event.fingerprint)
    assert event.fingerprint == setup.embedder.facts.fingerprint
    assert "abcdefghi" not in str(setup.store.rows)


async def test_a_vector_that_is_cut_has_length_1_again() -> None:
    """The first numbers, divided by their own length."""
    state = array("f", (3, 4, 12)).tobytes()
    assert array("f", (0.6, 0.8)).tobytes() == unit_vector(state, 2)
    assert array("f", (3 / 13, 4 / 13, 12 / 13)).tobytes() == unit_vector(state)


async def test_an_answer_is_not_delayed(setup: Setup) -> None:
    """
    An answer that comes while a long text is embedded waits for one pass, and the text for the
    answer.
    """
    setup.embedder.go.clear()
    ran = setup.embedder.passes
    async with setup.serving() as server, trio.open_nursery() as nursery:
        device: Any = server.loaded.engine.device
        decode = device.decode

        def decoded(rows: Any) -> Any:
            ran.append(-1)
            return decode(rows)

        device.decode = decoded
        nursery.start_soon(local(server).embed, texts("abcdefghijklmnop"))
        await setup.hold()
        nursery.start_soon(ask, server, generate(HELLO, max_tokens=40))
        while server.loaded.activity.is_idle:
            await trio.testing.wait_all_tasks_blocked()
        setup.embedder.go.set()
    assert [97] == ran[:1]
    assert {-1} == set(ran[1:-3])
    assert [101, 105, 109] == ran[-3:]


async def test_tenants_take_turns() -> None:
    """A tenant with many texts, or many requests, does not hold up another one."""
    turns, had = Turns(), []

    async def take(name: str) -> None:
        for _ in range(3):
            async with turns.turn(name[0]):
                had.append(name)

    async with trio.open_nursery() as nursery, turns.turn("a"):
        for name in ("a1", "a2", "b1"):
            nursery.start_soon(take, name)
            await trio.testing.wait_all_tasks_blocked()
    assert ["b1", "a1", "b1", "a2", "b1", "a1", "a2", "a1", "a2"] == had


async def test_turns_of_tasks_that_leave() -> None:
    """A task that leaves while it waits, or just as its turn comes, leaves the turn to the next."""
    turns, had = Turns(), []

    async def take(name: str, tenant: str, scope: trio.CancelScope) -> None:
        with scope:
            async with turns.turn(tenant):
                had.append(name)

    async with trio.open_nursery() as nursery:
        scopes = {name: trio.CancelScope() for name in ("a1", "a2", "a3", "b1", "b2")}
        async with turns.turn("a"):
            for name, scope in scopes.items():
                nursery.start_soon(take, name, name[0], scope)
                await trio.testing.wait_all_tasks_blocked()
            scopes["a2"].cancel()
            scopes["b2"].cancel()
            await trio.testing.wait_all_tasks_blocked()
            scopes["b1"].cancel()  # it has not left yet when its turn comes
    assert ["a1", "a3"] == had


async def test_a_client_that_leaves(setup: Setup) -> None:
    """No further pass is computed, and the next request is served from its beginning."""
    setup.embedder.go.clear()
    async with setup.serving() as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(local(server).embed, texts("abcdefgh"))
            await setup.hold()
            nursery.cancel_scope.cancel()
            setup.embedder.go.set()
        await local(server).embed(texts("z"))
    assert [ord("a"), ord("z")] == setup.embedder.passes
    assert ["client_gone", "computed"] == setup.ended()


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        (
            texts("ok", "a" * 33),
            InputTooLong,
            r"input\[1\] has 33 tokens; vectors takes",
        ),
        (texts(*["a" * 32] * (REQUEST_TOKENS_MAX // 32 + 1)), InputTooLong, "together"),
        (texts(""), PromptRefused, "no tokens"),
    ],
)
async def test_texts_that_cannot_be_embedded(
    setup: Setup, command: Embed, kind: type[RefusalError], words: str
) -> None:
    """Nothing of the request is computed, and nothing is on record."""
    async with setup.serving() as server:
        refusal = await refused(server, command)
    assert kind is type(refusal)
    with pytest.raises(kind, match=words):
        raise refusal
    assert ([], []) == (setup.embedder.passes, setup.ended())


async def test_a_full_queue(setup: Setup) -> None:
    """A request beyond the queue is refused at once."""
    setup.embedder.go.clear()
    async with setup.serving(queue=1) as server, trio.open_nursery() as nursery:
        nursery.start_soon(local(server).embed, texts("abcdefgh"))
        await setup.hold()
        full = await refused(server, texts("z"), "alice")
        assert isinstance(full, QueueFull)
        assert 5 == full.retry_after_s
        setup.embedder.go.set()
    assert ["queue_full", "computed"] == setup.ended()


async def test_a_tenant_takes_half_of_the_queue(setup: Setup) -> None:
    """The other half is for the others."""
    setup.embedder.go.clear()
    async with setup.serving(queue=4) as server, trio.open_nursery() as nursery:
        for place in range(2):
            nursery.start_soon(server.for_tenant("alice").embed, texts(f"{place}"))
        await setup.hold()
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(await refused(server, texts("z"), "alice"), QueueFull)
        nursery.start_soon(server.for_tenant("bob").embed, texts("b"))
        await trio.testing.wait_all_tasks_blocked()
        setup.embedder.go.set()
    assert ["queue_full", *["computed"] * 3] == setup.ended()


async def test_a_request_that_takes_too_long(setup: Setup) -> None:
    """It ends, also while it waits for answers."""
    async with setup.serving(request_s=0.01) as server:
        with server.loaded.activity.preparing():
            assert TimedOut is type(await refused(server, texts("abc")))
    assert ["timed_out"] == setup.ended()


async def test_a_stop(setup: Setup) -> None:
    """A request that takes longer than the server drains ends, as does one that comes then."""
    setup.embedder.go.clear()
    ends: list[RefusalError] = []

    async def embedded(server: Server) -> None:
        ends.append(await refused(server, texts("abcdefgh")))

    async with trio.open_nursery() as nursery, setup.serving(drain_s=0.0) as server:
        nursery.start_soon(embedded, server)
        await setup.hold()
        nursery.start_soon(server.drain)
        await trio.testing.wait_all_tasks_blocked()
        await embedded(server)
        setup.embedder.go.set()
    assert [Stopping, Stopping] == list(map(type, ends))
    assert ["server_stopping"] == setup.ended()


async def test_a_model_that_fails(setup: Setup) -> None:
    """It is a bug with an id, on record, and the next request is served."""
    setup.embedder.fails = ValueError("no such kernel")
    async with setup.serving() as server:
        broken = await refused(server, texts("abc"))
        setup.embedder.fails = None
        await local(server).embed(texts("z"))
    assert isinstance(broken, Broken)
    assert broken.request is not None
    (bug,) = setup.events(ev.InvariantViolated)
    assert (broken.bug_id, "CRASH") == (bug.bug_id, bug.invariant)
    assert "no such kernel" in bug.message
    assert ["computed"] == setup.ended()


async def test_a_model_that_cannot_be_loaded(setup: Setup) -> None:
    """The server does not start, and its journal says why."""

    def fail(*_: Any) -> FakeEmbedder:
        raise ModelRefused("it has no weights")

    async def start() -> None:
        async with booted_models(
            [
                Choice(
                    entry=ModelEntry(name="one", directory=str(NO_MODEL)),
                    settings=settings(NO_MODEL),
                    metadata=ModelMetadata(
                        defaults=Sampling(),
                        template={},
                        switches=frozenset(),
                        vocabulary_tokens=128,
                        context_tokens=8192,
                    ),
                )
            ],
            "one",
            setup.store,
            SECRET,
            start_engine=started,
            embedding_models=[ENTRY],
            start_embedder=fail,
        ):
            raise AssertionError("it started")

    with pytest.RaisesGroup(ModelRefused, flatten_subgroups=True):
        await start()
    (stopped,) = setup.events(ev.ServerStopped)
    assert "it has no weights" in stopped.reason


async def test_listed_beside_the_models_that_answer(setup: Setup) -> None:
    """It is loaded as long as the server runs, and its memory is left to it."""
    async with setup.serving() as server:
        answers, embeds = server.models
        assert answers.embeds is None
        assert embeds.embeds == setup.embedder.facts
        assert ("vectors", ("small",), "loaded") == (
            embeds.facts.model,
            embeds.aliases,
            embeds.state,
        )
