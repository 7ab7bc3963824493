"""
Limits of the memory for blocks, on a real server with the fake engine. Six conversations that take
turns over memory for five reuse most of what memory for six would reuse.
"""

from __future__ import annotations

import pytest

from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.fake_engine import FACTS, TOKEN_BYTES
from tests.support.in_process_server import ask, generate, serving_fake, wait_idle

pytestmark = pytest.mark.trio

BLOCKS = 10
"""Of a conversation, rounded up: with those of the answer."""
ROUNDS = 6


async def reused_tokens(conversations: int, rounds: int = ROUNDS) -> int:
    """What is reused from the pool by six conversations, over memory for so many."""
    size = FACTS.block_tokens * TOKEN_BYTES
    found = 0
    async with serving_fake(
        blocks_bytes=conversations * BLOCKS * size, pool_slabs=1, disk_bytes=0
    ) as server:
        for _ in range(rounds):
            for name in "abcdef":
                words = f"{name} " * ((BLOCKS * FACTS.block_tokens - 80) // 2)
                said = await ask(
                    server,
                    generate(
                        Conversation(messages=(Message(role="user", content=words),)),
                        session_name=name,
                        max_tokens=4,
                    ),
                )
                found += said.accepted.cached_tokens
                await wait_idle(server)
    return found


async def test_the_number_of_blocks_is_limited():
    """There are never more than allowed, however many would fit by their bytes."""
    store = MemoryStore()
    async with serving_fake(store, blocks_bytes=1 << 30, blocks_max=7, pool_slabs=1) as server:
        for name in "abc":
            words = Message(role="user", content=f"{name} " * (2 * FACTS.block_tokens))
            await ask(server, generate(Conversation(messages=(words,)), max_tokens=4))
            await wait_idle(server)
    events = [decode(row).event for row in store.rows]
    counts = [event.memory_blocks for event in events if isinstance(event, ev.BlockSealed)]
    assert 7 == max(counts)
    assert any(isinstance(event, ev.BlockEvicted) for event in events)


async def test_six_in_turn_over_memory_for_five():
    """At least 60 % of what memory for six reuses; slabs are of no use to the next of six."""
    five, six = await reused_tokens(5), await reused_tokens(6)
    assert six > 0
    assert five >= 0.6 * six
