"""
Requests that start together share: what one computes, the others wait for and adopt, whatever
becomes of it. The engine runs no model, and counts its passes.
"""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from tests.gate.conversation import words
from tests.support.held_engine import Hold
from tests.support.in_process_server import Said, ask, generate, wait_idle
from tests.support.prewarm_conversation import Journaled

pytestmark = pytest.mark.trio

C = 64
SYSTEM = words(1, 400)


def sharing(place: int, **changes: object) -> Generate:
    """A request under the prompt that all of them have."""
    messages = (
        Message(role="system", content=SYSTEM),
        Message(role="user", content=f"Stone {place:03}."),
    )
    return generate(Conversation(messages=messages), **{"max_tokens": 4, **changes})


@pytest.mark.parametrize("count", [4, 12, 100])
async def test_at_once(setup: Journaled, count: int) -> None:
    said: list[Said] = []

    async def one(place: int) -> None:
        said.append(await ask(server, sharing(place)))

    async with setup.serving(limits=Limits(queue=count), prewarm=False) as server:
        async with trio.open_nursery() as nursery:
            for place in range(count):
                nursery.start_soon(one, place)
    prompt = said[0].finished.prompt_tokens
    passes = [e for e in setup.events(ev.CacheExtended) if e.step == "prefill"]
    computed = sum(e.end - e.start for e in passes)
    print(count, prompt, computed, len(setup.events(ev.PrefixJoined)))
    assert setup.is_valid()
