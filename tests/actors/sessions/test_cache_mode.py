"""``cache_mode``: a request that continues no session and reuses shared blocks alone."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.actors.requests.messages import Generate
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from tests.gate.conversation import words
from tests.support.in_process_server import Said, ask, generate, wait_idle
from tests.support.prewarm_conversation import Journaled, onward

pytestmark = pytest.mark.trio

C = 64


def first(**changes: Any) -> Generate:
    """A conversation's first request, several chunks long."""
    message = Message(role="user", content=words(1, 60))
    return generate(Conversation(messages=(message,)), max_tokens=4, **changes)


def path_of(said: Said) -> tuple[str, str | None]:
    """Path and reason of an answer."""
    return said.accepted.path, said.accepted.reason


async def test_a_new_session_is_built_on_shared_blocks(setup: Journaled) -> None:
    """
    It continues no existing session and reuses all full chunks as copies. What it computes is kept:
    the next turn continues from it.
    """
    async with setup.serving() as server:
        said = await ask(server, first())
        await wait_idle(server)
        second = onward(first(), said)
        apart = await ask(server, attrs.evolve(second, cache_mode="prefix"))
        await wait_idle(server)
        assert ("new_session", "cache_mode_prefix") == path_of(apart)
        assert apart.accepted.session != said.accepted.session
        third = await ask(server, onward(second, apart))
        assert ("continuation", None) == path_of(third)
        assert apart.accepted.session == third.accepted.session
    assert ["full", "prefix", "full"] == [
        one.cache_mode for one in setup.events(ev.RequestReceived)
    ]
    path = setup.events(ev.PathSelected)[1]
    assert 0 == path.blocks_from_slab
    assert path.blocks_from_pool >= said.finished.prompt_tokens // C
    assert path.blocks_from_pool * C == apart.finished.cached_tokens > 0
    assert said.accepted.session == path.nearest
    assert setup.is_valid()


async def test_a_named_session_serves_it_without_reusing_its_slab(setup: Journaled) -> None:
    """
    A name is strict: its session serves the request without reusing its slab. Later requests
    continue the session as before.
    """
    async with setup.serving() as server:
        mine = first(session_name="mine")
        said = await ask(server, mine)
        await wait_idle(server)
        second = onward(mine, said)
        apart = await ask(server, attrs.evolve(second, cache_mode="prefix"))
        await wait_idle(server)
        assert ("new_session", "cache_mode_prefix") == path_of(apart)
        assert "mine" == apart.accepted.session
        third = await ask(server, onward(second, apart))
        assert ("mine", "continuation") == (third.accepted.session, third.accepted.path)
    path = setup.events(ev.PathSelected)[1]
    assert 0 == path.blocks_from_slab
    assert 0 < path.blocks_from_pool
    (shared,) = (one for one in setup.events(ev.BlocksRestored) if one.request == path.request)
    assert (0, path.reused_tokens) == (shared.start, shared.end)
    assert setup.is_valid()


async def test_cache_prompt_false_overrides_the_mode(setup: Journaled) -> None:
    """With ``cache_prompt`` false nothing is reused, whatever mode is given."""
    async with setup.serving() as server:
        await ask(server, first())
        await wait_idle(server)
        for mode in ("full", "prefix"):
            said = await ask(server, first(cache_prompt=False, cache_mode=mode))
            assert ("new_session", "cache_disabled") == path_of(said)
            assert 0 == said.finished.cached_tokens
    assert setup.is_valid()
