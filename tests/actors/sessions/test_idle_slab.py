"""
An idle session gives up its slab after a while if its full blocks are in memory: memory holds a
conversation once, and the next turn continues from the blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate
from cairn.actors.server import Server
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import words
from tests.support.fake_engine import TOKEN_BYTES
from tests.support.in_process_server import (
    MIB,
    Said,
    ask,
    generate,
    serving,
    wait_idle,
    without_slabs,
)
from tests.support.prewarm_conversation import Journaled, onward

pytestmark = pytest.mark.trio

C = 64
BLOCK = C * TOKEN_BYTES
AT_REST = "idle, and its blocks are in memory"


def question(place: int = 1, count: int = 60) -> Generate:
    """A conversation's first request, several chunks long."""
    return generate(Conversation(messages=(Message(role="user", content=words(place, count)),)))


def limits(seconds: float) -> Limits:
    """Limits that keep the slabs of idle sessions for so long."""
    return Limits(slab_idle_s=seconds)


async def unmoved(server: Server) -> None:
    """Wait until all sessions are idle and none of their tasks has anything left to do."""
    await wait_idle(server)
    with trio.fail_after(120):
        while server.loaded.activity.at_work:
            await trio.testing.wait_all_tasks_blocked()
    await trio.testing.wait_all_tasks_blocked(0.05)


def slab_of(server: Server, said: Said) -> int | None:
    """The slab that the session of an answer holds."""
    slab = server.loaded.sequencer.session(said.accepted.session).slab
    return None if slab is None else slab.id


async def test_an_idle_conversation_is_in_memory_once(setup: Journaled) -> None:
    """
    With an idle limit of 0 the slab is released when the session becomes idle, and the freed memory
    is returned. The blocks remain: no more bytes than the tokens take.
    """
    async with setup.serving(limits=limits(0)) as server:
        said = await ask(server, question())
        await without_slabs(server)
        now = server.statistics()
        assert 1 == server.loaded.engine.device.gave_back
        assert slab_of(server, said) is None

    chunks = now.blocks
    assert chunks >= said.finished.prompt_tokens // C > 2
    assert chunks * BLOCK == now.block_bytes == now.kv_live_bytes == now.kv_expected_bytes
    (released,) = setup.events(ev.SlabReleased)
    assert AT_REST == released.reason
    assert setup.is_valid()


async def test_before_the_limit_memory_has_it_twice(setup: Journaled) -> None:
    """
    The control: with a longer idle limit slab and blocks both exist, and the statistics show it.
    """
    async with setup.serving(limits=limits(60)) as server:
        await ask(server, question())
        await unmoved(server)
        now = server.statistics()
        assert 0 == server.loaded.engine.device.gave_back

    assert 1 == now.slabs
    assert now.slab_bytes + now.block_bytes == now.kv_live_bytes
    assert now.kv_expected_bytes == now.blocks * BLOCK < now.kv_live_bytes / 1.05
    assert [] == setup.events(ev.SlabReleased)
    assert setup.is_valid()


@pytest.mark.parametrize(("seconds", "keeps"), [(60, True), (0, False)])
async def test_the_next_turn_continues_from_the_blocks(
    setup: Journaled, seconds: float, keeps: bool
) -> None:
    """It reuses as many tokens as from a kept slab, on the same path; they are copied."""
    async with setup.serving(limits=limits(seconds)) as server:
        first = await ask(server, question())
        await (unmoved if keeps else without_slabs)(server)
        second = await ask(server, onward(question(), first))
        assert first.accepted.session == second.accepted.session

    chosen = setup.events(ev.PathSelected)[1]
    there = second.finished.cached_tokens // C
    assert there >= first.finished.prompt_tokens // C
    assert ("continuation", None) == (chosen.path, chosen.reason)
    assert (there, 0) == (chosen.blocks_from_slab, chosen.blocks_from_pool)[:: 1 if keeps else -1]
    assert setup.is_valid()


async def test_the_slab_is_released_after_the_limit(
    setup: Journaled, mock_clock: trio.testing.MockClock
) -> None:
    """
    The slab exists until the limit and is gone after it. A request before that uses it, and the
    time starts again when the session is idle again.
    """
    async with setup.serving(limits=limits(60)) as server:
        asked = question()
        said = await ask(server, asked)
        await unmoved(server)
        held = slab_of(server, said)
        assert held is not None
        for _ in range(2):
            mock_clock.jump(59.9)
            await unmoved(server)
            assert slab_of(server, said) == held
            asked = onward(asked, said)
            said = await ask(server, asked)
            await unmoved(server)
        assert slab_of(server, said) == held
        mock_clock.jump(60.1)
        await without_slabs(server)

    assert all(event.blocks_from_slab for event in setup.events(ev.PathSelected)[1:])
    assert [AT_REST] == [event.reason for event in setup.events(ev.SlabReleased)]
    assert setup.is_valid()


async def test_no_request_waits_while_memory_is_returned(
    setup: Journaled, mock_clock: trio.testing.MockClock
) -> None:
    """
    A slab that is given up while a request is in flight leaves its memory to other sessions, and
    the session's own next turn is served meanwhile. The memory is returned when the server is idle.
    """
    async with setup.serving(limits=limits(60)) as server:
        first = await ask(server, question())
        await unmoved(server)
        with server.loaded.activity.preparing():
            mock_clock.jump(60.1)
            with trio.fail_after(60):
                while slab_of(server, first) is not None:
                    await trio.testing.wait_all_tasks_blocked()
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert 0 == server.loaded.engine.device.gave_back
            second = await ask(server, onward(question(), first))
            assert first.accepted.session == second.accepted.session
        await unmoved(server)
        assert 0 == server.loaded.engine.device.gave_back
        with server.loaded.activity.preparing():
            mock_clock.jump(60.1)
            with trio.fail_after(60):
                while slab_of(server, first) is not None:
                    await trio.testing.wait_all_tasks_blocked()
        await without_slabs(server)
        assert 1 == server.loaded.engine.device.gave_back
    assert setup.is_valid()


async def test_a_session_that_needs_the_slab_gets_it_at_once(setup: Journaled) -> None:
    """A different session that finds no slab does not wait for the end of the idle limit."""
    async with setup.serving(limits=limits(3600), pool_slabs=1) as server:
        first = await ask(server, question())
        await unmoved(server)
        second = await ask(server, question(7))
        await unmoved(server)
        assert slab_of(server, first) is None
        assert slab_of(server, second) is not None

    assert ["room for another session"] == [e.reason for e in setup.events(ev.SlabReleased)]
    assert setup.is_valid()


@pytest.mark.parametrize("blocks", [3, 100])
async def test_tokens_without_a_block_stay_in_the_slab(setup: Journaled, blocks: int) -> None:
    """
    If memory for blocks does not hold a whole conversation, its slab is the only place of the rest,
    and is kept.
    """
    async with setup.serving(limits=limits(0), blocks_bytes=blocks * BLOCK) as server:
        said = await ask(server, question())
        await unmoved(server)
        if blocks == 3:
            session = server.loaded.sequencer.session(said.accepted.session)
            assert session.slab is not None
            known = server.loaded.sequencer.state.blocks
            assert 3 == sum(known[key].present for key in session.slab_keys)
            now = server.statistics()
            assert session.cached_tokens * TOKEN_BYTES == now.kv_expected_bytes > now.block_bytes
        else:
            await without_slabs(server)
    assert setup.is_valid()


async def test_the_slab_stays_if_a_block_is_evicted_meanwhile(
    setup: Journaled, mock_clock: trio.testing.MockClock
) -> None:
    """
    The session checks again after the wait: by then a different conversation has evicted a block.
    """
    async with setup.serving(limits=limits(60), blocks_bytes=8 * BLOCK) as server:
        first = await ask(server, question())
        await unmoved(server)
        mock_clock.jump(30)
        await ask(server, question(7, count=90))
        await unmoved(server)
        assert setup.events(ev.BlockEvicted)
        # the first one has been idle for longer than the limit, the second one has not
        mock_clock.jump(31)
        await unmoved(server)
        assert slab_of(server, first) is not None
    assert [] == setup.events(ev.SlabReleased)
    assert setup.is_valid()


async def test_a_slab_that_cannot_be_released_ends_one_session(
    setup: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The failure is a bug of that session alone, which is quarantined. Other sessions are served,
    from its blocks too, and the totals are right.
    """
    async with setup.serving(limits=limits(0)) as server:

        def fails() -> None:
            raise RuntimeError("the device gave up")

        with monkeypatch.context() as patch:
            patch.setattr(server.loaded.engine.device, "give_back_memory", fails)
            said = await ask(server, question())
            with trio.fail_after(120):
                while server.loaded.sequencer.session(said.accepted.session).bug_id is None:
                    await trio.testing.wait_all_tasks_blocked()
        session = server.loaded.sequencer.session(said.accepted.session)
        assert (SessionState.QUARANTINED, None) == (session.state, session.slab)
        other = await ask(server, question())
        assert said.text == other.text
        await without_slabs(server)


# --- with a model --------------------------------------------------------------------------------


def story(place: int) -> Generate:
    """A question to the random model."""
    return generate(Conversation(messages=(Message(role="user", content=words(place, 80)),)))


@pytest.mark.long
async def test_an_answer_from_blocks_has_the_same_bits(model_directory: Path) -> None:
    """
    An answer from blocks, after the slab was given up, has the tokens and log-probabilities of one
    that reused nothing, and a shadow check of it passes.
    """
    store = MemoryStore()
    settings: dict[str, Any] = {"block_tokens": 16, "shadow_share": 1.0}
    async with serving(model_directory, store, limits=limits(0), **settings) as server:
        first = await ask(server, story(1))
        await without_slabs(server)
        asked = onward(story(1), first)
        warm = await ask(server, asked)
        await without_slabs(server)
        cold = await ask(server, onward(story(1), first, cache_prompt=False))
        await without_slabs(server)
        with trio.fail_after(120):
            while server.loaded.shadow is not None and server.loaded.shadow.has_work:
                await trio.testing.wait_all_tasks_blocked()

    assert warm.finished.cached_tokens > 64
    assert 0 == cold.finished.cached_tokens
    assert (cold.text, cold.tokens) == (warm.text, warm.tokens)
    found = replay(store.read())
    assert () == found.findings
    ended = [e for e in (decode(row).event for row in store.rows) if isinstance(e, ev.ShadowEnded)]
    assert {"same"} <= {event.result for event in ended} <= {"same", "interrupted"}


async def test_files_are_written_before_the_slab_is_released(
    model_directory: Path, tmp_path: Path
) -> None:
    """
    A session is not idle before its blocks are in files: giving up the slab interrupts no write.
    """
    store = MemoryStore()
    settings: dict[str, Any] = {"blocks_folder": tmp_path / "blocks", "disk_bytes": 64 * MIB}
    async with serving(model_directory, store, limits=limits(0), **settings) as server:
        await ask(server, story(1))
        await without_slabs(server)
        now = server.statistics()
        assert now.blocks == now.disk_blocks + 1 > 3  # its short block has no file

    found = [decode(row).event for row in store.rows]
    kinds = [type(event) for event in found]
    spilled = [place for place, kind in enumerate(kinds) if kind is ev.BlockSpilled]
    assert spilled[-1] < kinds.index(ev.SlabReleased)
