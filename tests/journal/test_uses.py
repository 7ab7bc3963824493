"""Which two uses of a block are on record: those of two requests, however many events each had."""

from __future__ import annotations

from cairn.journal import events as ev
from cairn.journal.cache.eviction_order import Order
from cairn.journal.state import Session
from tests.journal.cache.eviction_patterns import Memory, chain, turn
from tests.journal.model import Driver, Talk

ROOM = 100


def session_of(memory: Memory, name: str) -> Session:
    """The session of a conversation."""
    return memory.state.session(name)


def uses_of(memory: Memory, name: str, blocks: int) -> list[tuple[int, int | None]]:
    """The last two uses of each block of a conversation."""
    order = Order(memory.state)
    return [order.uses(memory.state.blocks[key]) for key in chain(name, blocks)]


def test_a_first_request_has_no_use_before():
    """Its blocks were used once, when they were sealed."""
    memory = Memory(ROOM).play([turn("a", 3)])
    assert [None, None, None] == [previous for _, previous in uses_of(memory, "a", 3)]
    assert session_of(memory, "a").previous_use is None


def test_the_next_request_is_the_second_use():
    """
    The interval is that between two requests of the session. It applies to what the second one adds
    too, because that is used with the rest of the conversation.
    """
    memory = Memory(ROOM).play([turn("a", 3)])
    first = session_of(memory, "a").last_used
    memory.play([turn("b", 3), turn("a", 5)])
    assert first == session_of(memory, "a").previous_use
    assert {first} == {previous for _, previous in uses_of(memory, "a", 5)}
    second = session_of(memory, "a").last_used
    memory.play([turn("a", 5)])
    assert {second} == {previous for _, previous in uses_of(memory, "a", 5)}


def test_another_session_uses_the_same_blocks():
    """A session without an earlier request continues the record of the chain."""
    shared = turn("a", 3)
    memory = Memory(ROOM).play([shared])
    (sealed, _) = uses_of(memory, "a", 3)[-1]
    memory.play([("other", shared[1])])
    (used, previous) = uses_of(memory, "a", 3)[-1]
    assert sealed == previous
    memory.play([("a third", shared[1])])
    assert used == uses_of(memory, "a", 3)[0][1]


def test_a_block_that_is_sealed_again_was_used_before():
    """What was evicted is still on record, so the interval is known at the second time."""
    memory = Memory(20).play([turn("a", 10)])
    (sealed, _) = uses_of(memory, "a", 10)[-1]
    memory.play([turn("b", 20)])
    assert not any(memory.state.blocks[key].present for key in chain("a", 10))
    memory.play([("another", chain("a", 10))])
    assert sealed == uses_of(memory, "a", 10)[-1][1]


def test_a_prewarm_is_no_second_use():
    """It belongs to the request that it follows: the conversation was used once."""
    driver = Driver(blocks_kept=40)
    driver.foresees = True
    driver.start()
    driver.serve(Talk(tenant="t1", group=None, name=None, parts=(("user", tuple(range(40))),)))
    started = [one.event for one in driver.recorded if isinstance(one.event, ev.PrewarmStarted)]
    assert any(event.blocks_from_slab for event in started)
    order = Order(driver.state)
    assert {None} == {order.uses(block)[1] for block in driver.state.blocks.values()}
