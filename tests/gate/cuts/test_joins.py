"""
The gate for requests that start together: one of them computes their common prefix, and each answer
has the bits that it has alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from cairn.actors.requests.messages import Generate
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import words
from tests.gate.test_gate import same_bits
from tests.support.in_process_server import Said, ask, generate, serving

pytestmark = [pytest.mark.gate, pytest.mark.trio]

AT_ONCE = 12


def sharing(place: int, system: str = "") -> Generate:
    """A request under the prompt that all of them have."""
    messages = (
        Message(role="system", content=system or words(1, 150)),
        Message(role="user", content=f"Stone {place}: which is it?"),
    )
    return generate(Conversation(messages=messages), max_tokens=8)


async def _all_at_once(model: Path, store: MemoryStore, **how: Any) -> dict[int, Said]:
    said: dict[int, Said] = {}

    async def one(place: int) -> None:
        said[place] = await ask(server, sharing(place))

    async with serving(model, store, **how) as server, trio.open_nursery() as nursery:
        for place in range(AT_ONCE):
            nursery.start_soon(one, place)
    return said


@pytest.mark.long_but("whole")
@pytest.mark.parametrize("window", [None, (4, 256)], ids=["whole", "sink_window"])
async def test_twelve_at_once_have_the_bits_of_one_alone(
    model_directory: Path, window: tuple[int, int] | None
):
    """
    The prefix is computed once, and eleven reuse it, also where it is longer than an attention
    window; a control has other bits.
    """
    store = MemoryStore()
    how: dict[str, Any] = {"window": window}
    said = await _all_at_once(model_directory, store, **how)
    events = [decode(row).event for row in store.rows]
    assert sum(isinstance(event, ev.PrefixJoined) for event in events) > 0
    cached = sorted(one.finished.cached_tokens for one in said.values())
    assert cached[0] == 0
    assert 2 * 256 < cached[1] == cached[-1]
    for place, found in said.items():
        async with serving(model_directory, **how) as server:
            alone = await ask(server, sharing(place))
        assert alone.finished.cached_tokens == 0
        same_bits(alone, found)
    async with serving(model_directory, **how) as server:
        control = await ask(server, sharing(0, words(2, 150)))
    with pytest.raises(AssertionError):
        same_bits(control, said[0])
    assert replay(store.read()).findings == ()
