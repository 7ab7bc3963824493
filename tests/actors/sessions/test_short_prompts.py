"""
Prompts below the operator's minimum leave nothing for other requests: no block is sealed, and the
next turn gets the reason why it reuses nothing.
"""

from __future__ import annotations

import pytest

from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from tests.gate.conversation import words
from tests.support.in_process_server import Said, ask, generate, wait_idle
from tests.support.prewarm_conversation import Journaled, onward

pytestmark = pytest.mark.trio

C = 64


def path_of(said: Said) -> tuple[str, str | None]:
    """Path and reason of an answer."""
    return said.accepted.path, said.accepted.reason


@pytest.mark.parametrize("prewarm", [True, False])
async def test_a_short_conversation_is_not_in_the_prefix_cache(
    setup: Journaled, prewarm: bool
) -> None:
    """
    While it is too short, each turn starts cold. Once it is long enough, all of it is kept. The
    journal of these answers verifies.
    """
    least = 10 * C
    message = Message(role="user", content=words(1, 60))
    first = generate(Conversation(messages=(message,)), max_tokens=4)
    async with setup.serving(min_cache_tokens=least, prewarm=prewarm) as server:
        assert least == server.facts.min_cache_tokens
        said = await ask(server, first)
        assert C < said.finished.prompt_tokens < least
        await wait_idle(server)
        assert [] == setup.events(ev.BlockSealed)

        second = onward(first, said)
        said = await ask(server, second)
        assert ("new_session", "too_short") == path_of(said)
        assert 0 == said.finished.cached_tokens
        await wait_idle(server)
        assert [] == setup.events(ev.BlockSealed)

        third = onward(second, said, Message(role="user", content=words(2, 160)))
        said = await ask(server, third)
        assert said.finished.prompt_tokens > least
        await wait_idle(server)
        sealed = setup.events(ev.BlockSealed)
        assert [C * place for place in range(len(sealed))] == [block.start for block in sealed]

        said = await ask(server, onward(third, said))
        assert ("continuation", None) == path_of(said)
        assert said.finished.cached_tokens > least - C
    assert setup.is_valid()


async def test_short_prompts_reuse_existing_blocks(setup: Journaled) -> None:
    """Blocks of a long prompt are reused by any prompt with the same beginning."""
    system = Message(role="system", content=words(1, 100))
    long = generate(
        Conversation(messages=(system, Message(role="user", content=words(2, 100)))), max_tokens=4
    )
    short = generate(
        Conversation(messages=(system, Message(role="user", content="What is it?"))), max_tokens=4
    )
    async with setup.serving(min_cache_tokens=20 * C) as server:
        said = await ask(server, long)
        assert said.finished.prompt_tokens > 20 * C
        await wait_idle(server)
        said = await ask(server, short)
        assert C < said.finished.prompt_tokens < 20 * C
        assert said.finished.cached_tokens > 0
    assert setup.is_valid()
