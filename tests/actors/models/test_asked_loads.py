"""Models that an operator has loaded and unloaded, in a server that also answers requests."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from cairn.actors.errors import ModelBusy, Stopping
from cairn.actors.models.swap import LOAD_MODEL, UNLOAD_MODEL
from cairn.actors.server import Server
from cairn.journal import events as ev
from tests.actors.models.test_swap import OPENING, Setup, engine_held, setup, to, wait_in_flight
from tests.support.in_process_server import ask

__all__ = ["setup"]
pytestmark = pytest.mark.trio


async def until(server: Server, **states: str) -> None:
    """Wait until models have these states."""
    with trio.fail_after(60):
        while not states.items() <= {one.facts.model: one.state for one in server.models}.items():
            await trio.testing.wait_all_tasks_blocked(0.01)


def acted(setup: Setup) -> list[tuple[str, str]]:
    """What the operator did, by the journal."""
    found = setup.events(ev.OperatorActed)
    return [(one.action, one.detail) for one in found if one.action.endswith("_model")]


async def test_a_model_is_loaded_without_a_request(setup: Setup) -> None:
    """By its name or an alias; once, however often it is asked for."""
    async with setup.serving() as server:
        server.load_model("one")  # it is loaded
        for name in ("other-alias", "other"):
            server.load_model(name)
        await until(server, one="not_loaded", other="loaded")
        assert [0, 0] == [one.waiting for one in server.models]
        with pytest.raises(LookupError):
            server.load_model("none")
        said = await ask(server, to("other", OPENING))
        assert "other" == said.accepted.model
        await server.drain()
        with pytest.raises(Stopping):
            server.load_model("one")
        with pytest.raises(Stopping):
            server.unload_model()
    assert ["one", "other"] == setup.swaps()
    assert [(LOAD_MODEL, "other")] == acted(setup)
    assert [] == setup.events(ev.RequestRejected)
    setup.verify()


async def test_an_unloaded_model_is_loaded_by_the_next_request(setup: Setup) -> None:
    """Its conversation continues from its files, and nothing of it was in memory in between."""
    async with setup.serving() as server:
        first = await ask(server, to("one", OPENING))
        server.unload_model()
        server.unload_model()  # asked for already
        await until(server, one="not_loaded", other="not_loaded")
        assert "one" == server.facts.model
        with pytest.raises(LookupError):
            _ = server.loaded
        server.unload_model()  # none is loaded
        again = await ask(server, to("one", OPENING, first.text, "And then?"))
    assert "continuation" == again.accepted.path
    assert again.accepted.cached_tokens > 0
    assert ["one", "one"] == setup.swaps()
    assert [(UNLOAD_MODEL, "one")] == acted(setup)
    (left,) = setup.events(ev.ModelUnloaded)
    assert "an operator unloaded it" == left.reason
    setup.verify()


async def test_a_server_without_a_model_stops(setup: Setup) -> None:
    """Nothing is left to unload."""
    async with setup.serving() as server:
        server.unload_model()
        await until(server, one="not_loaded")
    assert 1 == len(setup.events(ev.ModelUnloaded))
    assert 1 == len(setup.events(ev.ServerStopped))
    setup.verify()


async def test_a_model_at_work_is_not_unloaded(setup: Setup) -> None:
    """While a request is in flight, or waits for another model."""
    async with (
        setup.serving() as server,
        engine_held(server) as go_on,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, server, to("one", OPENING))
        await wait_in_flight(server, 1)
        with pytest.raises(ModelBusy, match="in flight"):
            server.unload_model()
        server.load_model("other")
        with pytest.raises(ModelBusy, match="wait for a model"):
            server.unload_model()
        go_on.set()
        await until(server, other="loaded")
    assert [(LOAD_MODEL, "other")] == acted(setup)
    assert 1 == len(setup.events(ev.RequestFinished))
    setup.verify()


async def test_a_load_takes_back_an_unload(setup: Setup) -> None:
    """What was asked for last is done: the model stays."""
    async with setup.serving() as server:
        server.unload_model()
        server.load_model("one")
        said = await ask(server, to("one", OPENING))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert "loaded" == server.models[0].state
        assert "one" == said.accepted.model
    assert ["one"] == setup.swaps()
    assert [(UNLOAD_MODEL, "one"), (LOAD_MODEL, "one")] == acted(setup)


async def test_why_a_model_was_not_loaded(setup: Setup) -> None:
    """The list has the reason until it is loaded; the sizes say beforehand what is wrong."""
    broken = setup.folder.parent / "broken"
    async with setup.serving() as server:
        sizes = await server.model_sizes()
        assert {"one", "other"} == set(sizes)
        one = sizes["one"]
        assert (None, True) == (one.fault, 0 < (one.weights_bytes or 0) < one.memory_bytes)
        (setup.other / "config.json").rename(broken)
        try:
            found = (await server.model_sizes())["other"]
            assert found.weights_bytes is None
            assert "config.json" in (found.fault or "")
            server.load_model("other")
            with trio.fail_after(60):
                while server.models[1].failure is None:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            assert "config.json" in server.models[1].failure
            assert "loaded" == server.models[0].state
        finally:
            broken.rename(setup.other / "config.json")
        server.load_model("other")  # without waiting for the pause
        await until(server, other="loaded")
        assert server.models[1].failure is None
    setup.verify()
