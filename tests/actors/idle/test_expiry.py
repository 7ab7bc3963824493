"""
What has not been used for longer than its TTL is removed while the server is idle, and the journal
says so. A use renews the TTL, which outlasts a restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from cairn.actors import clock, memory
from cairn.actors.clock import wall_clock_us
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate
from cairn.actors.server import Server
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.replay import replay
from tests.gate.conversation import words
from tests.support.in_process_server import MIB, ask, generate, turn_clock, wait_idle
from tests.support.prewarm_conversation import Journaled, onward

pytestmark = pytest.mark.trio

HOUR_S = 3600


@pytest.fixture(name="filed")
def filed_(model_directory: Path) -> Journaled:
    """A setup whose blocks can be written to files."""
    return Journaled(model=model_directory)


def files(folder: Path) -> list[Path]:
    """The block files below a folder."""
    return list(folder.rglob("*.safetensors"))


def question(place: int = 1, **changes: Any) -> Generate:
    """A conversation's first request, several chunks long."""
    message = Message(role="user", content=words(place, 60))
    return generate(Conversation(messages=(message,)), max_tokens=4, **changes)


async def later(server: Server, seconds: float) -> None:
    """Let time pass without a request."""
    await done(server)
    turn_clock(server, seconds)
    server.loaded.activity.changed()
    await done(server)


async def done(server: Server) -> None:
    """Wait until no session and no task has anything left to do."""
    await wait_idle(server)
    with trio.fail_after(120):
        while server.loaded.activity.at_work:
            await trio.testing.wait_all_tasks_blocked()
    await trio.testing.wait_all_tasks_blocked(0.05)
    await server.loaded.writer.wait_committed(server.loaded.sequencer.state.position)


async def test_a_failure_of_expiry_does_not_stop_the_server(
    setup: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Requests are served as before, but nothing more is removed. That is a bug on record, which the
    statistics show until the next start.
    """

    async def fails(*_: Any) -> int:
        raise ArithmeticError("while lives are ended")

    async with setup.serving() as server:
        assert {} == server.statistics().degraded
        await ask(server, question())
        monkeypatch.setattr(server.loaded.memory, "remove_expired", fails)
        with capture_logs() as lines:
            await later(server, 25 * HOUR_S)
        (bug,) = setup.events(ev.InvariantViolated)
        assert ("CRASH", None, "ArithmeticError: while lives are ended") == (
            *(bug.invariant, bug.session),
            bug.message,
        )
        assert "remove_expired" in bug.trace
        assert {"expiry": bug.bug_id} == server.statistics().degraded
        (line,) = [one for one in lines if one["event"].startswith("expiry failed; what exp")]
        assert bug.bug_id == line["bug_id"]
        turn_clock(server, 0)
        assert (await ask(server, question(2))).finished.completion_tokens
    (finding,) = replay(setup.store.read()).findings
    assert (bug.bug_id, True) == (finding.bug_id, finding.recorded)
    async with setup.serving() as server:
        assert ({}, 1) == (server.statistics().degraded, server.statistics().bugs)


async def test_a_broken_invariant_of_expiry_is_one_bug(
    setup: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on record already, and has that id."""

    async def fails(*_: Any) -> int:
        raise BugError("bug-1", "INV-5", "it does not add up")

    async with setup.serving() as server:
        await ask(server, question())
        monkeypatch.setattr(server.loaded.memory, "remove_expired", fails)
        with capture_logs():
            await later(server, 25 * HOUR_S)
        assert {"expiry": "bug-1"} == server.statistics().degraded
        assert [] == setup.events(ev.InvariantViolated)


async def test_everything_expires_after_a_day(filed: Journaled, tmp_path: Path) -> None:
    """
    Everything is kept for a day after its last use. Then the session is closed, and its blocks
    leave memory and disk, the ends of the chain first.
    """
    async with filed.serving(blocks_folder=tmp_path, disk_bytes=64 * MIB) as server:
        await ask(server, question())
        await later(server, 23 * HOUR_S)
        held = server.statistics()
        # The short block that ends the conversation has no file.
        assert held.blocks - 1 == held.disk_blocks > 2
        assert [] == filed.events(ev.SessionClosed)

        await later(server, 25 * HOUR_S)
        gone = server.statistics()
        assert (0, 0, 0) == (gone.blocks, gone.disk_blocks, gone.slabs)
        assert {} == gone.sessions
        assert [] == files(tmp_path)
        turn_clock(server, 0)  # Otherwise later requests would expire at once, too.
        again = await ask(server, question())
        assert (0, "expired") == (again.finished.cached_tokens, again.accepted.reason)
    assert ["its TTL has expired"] == [event.reason for event in filed.events(ev.SessionClosed)]
    for kind in (ev.BlockEvicted, ev.BlockFileRemoved):
        found = filed.events(kind)
        assert {"expired"} == {event.reason for event in found}
        starts = {event.key: event.start for event in filed.events(ev.BlockSealed)}
        order = [starts[event.key] for event in found]
        assert sorted(order, reverse=True) == order
        assert (held.blocks if kind is ev.BlockEvicted else held.disk_blocks) == len(order)
    assert filed.is_valid()


async def test_a_ttl_of_zero_is_never_written(filed: Journaled, tmp_path: Path) -> None:
    """
    With a TTL of 0 no file is written, and blocks leave memory when the server is idle. The blocks
    of a different conversation stay.
    """
    async with filed.serving(blocks_folder=tmp_path, disk_bytes=64 * MIB) as server:
        await ask(server, question(1))
        await done(server)
        before = server.statistics()
        # The short block that ends the conversation has no file.
        assert before.blocks - 1 == before.disk_blocks > 0
        await ask(server, question(5, ttl_s=0))
        await done(server)
        await later(server, 0)
        assert before.blocks == server.statistics().blocks
        assert before.disk_blocks == server.statistics().disk_blocks
        assert 1 == sum(server.statistics().sessions.values())
    spilled = [event.key for event in filed.events(ev.BlockSpilled)]
    evicted = [event.key for event in filed.events(ev.BlockEvicted)]
    assert evicted
    assert not set(evicted) & set(spilled)
    assert filed.is_valid()


async def test_a_ttl_of_zero_after_the_clock_was_set_back(
    filed: Journaled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    With rows in the journal from an hour later, a TTL of 0 still ends with its answer: no file is
    written, the session is closed and its blocks leave memory.
    """
    ahead_us = wall_clock_us() + 1_000_000 * HOUR_S
    with monkeypatch.context() as patch:
        patch.setattr(clock, "wall_clock_us", lambda: ahead_us)
        async with filed.serving():
            pass
    async with filed.serving(blocks_folder=tmp_path, disk_bytes=64 * MIB) as server:
        assert server.loaded.sequencer.state.time_us > wall_clock_us() + 1_000_000 * HOUR_S // 2
        await ask(server, question(5, ttl_s=0))
        await done(server)
        await later(server, 0)
        assert {} == server.statistics().sessions
        assert 0 == server.statistics().blocks
    assert [] == filed.events(ev.BlockSpilled)
    assert [] == files(tmp_path)
    assert filed.events(ev.BlockSealed)
    assert filed.is_valid()


async def test_a_file_that_cannot_be_removed_delays_no_other(
    filed: Journaled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the disk does not remove stay on record; files that expire later are removed."""
    from cairn.engine.mlx.files.block_files import BlockFiles  # the other tests need no MLX

    monkeypatch.setattr(memory, "BATCH", 2)
    async with filed.serving(blocks_folder=tmp_path, disk_bytes=64 * MIB) as server:
        await ask(server, question(1))
        await done(server)
        held = {path.stem for path in files(tmp_path)}
        await ask(server, question(5))
        await done(server)
        assert len(held) > 2
        assert held < {path.stem for path in files(tmp_path)}
        drop = BlockFiles.drop

        def refuse(self: BlockFiles, key: str) -> int:
            if key in held:
                raise PermissionError(1, "not permitted")
            return drop(self, key)

        with monkeypatch.context() as patched:
            patched.setattr(BlockFiles, "drop", refuse)
            await later(server, 25 * HOUR_S)
            for _ in range(len(held)):  # a few at a time
                await later(server, 25 * HOUR_S)
            assert held == {path.stem for path in files(tmp_path)}
        for _ in range(len(held)):
            await later(server, 25 * HOUR_S)
        assert [] == files(tmp_path)
    assert filed.is_valid()


async def test_a_use_renews_the_ttl(setup: Journaled) -> None:
    """Each use of a block sets its TTL; the longer of two TTLs counts."""
    async with setup.serving(limits=Limits(ttl_s=60)) as server:
        first = question()
        said = await ask(server, first)
        await done(server)
        blocks, order = server.loaded.sequencer.state.blocks, server.loaded.sequencer.order
        dues = {key: order.expires_us(block) or 0 for key, block in blocks.items()}
        said = await ask(server, onward(first, said, ttl_s=HOUR_S))
        assert said.finished.cached_tokens > 0
        await later(server, 120)
        blocks = server.loaded.sequencer.state.blocks
        used = said.finished.cached_tokens // 64
        renewed = [key for key, due in dues.items() if (order.expires_us(blocks[key]) or 0) > due]
        assert used <= len(renewed)
        assert {True} == {blocks[key].present for key in renewed}
        (session,) = server.loaded.sequencer.state.sessions.values()
        assert HOUR_S == session.ttl_s
        await later(server, 2 * HOUR_S)
        assert 0 == server.statistics().blocks
    assert setup.is_valid()


async def test_a_hint_of_the_client_may_lengthen_the_ttl(setup: Journaled) -> None:
    """
    Without a TTL of its own, a request gets the server's, or the client's hint if that is longer.
    """
    async with setup.serving(limits=Limits(ttl_s=600)) as server:
        await ask(server, question(1, least_ttl_s=300))
        await ask(server, question(2, least_ttl_s=HOUR_S))
        await ask(server, question(3, least_ttl_s=HOUR_S, ttl_s=5))
        await done(server)
    assert [600, HOUR_S, 5] == [event.ttl_s for event in setup.events(ev.RequestReceived)]


async def test_a_ttl_outlasts_a_restart(filed: Journaled, tmp_path: Path) -> None:
    """Files of an earlier run are removed when they expire, and sessions with them."""
    on_disk: dict[str, Any] = {"blocks_folder": tmp_path, "disk_bytes": 64 * MIB}
    async with filed.serving(**on_disk) as server:
        await ask(server, question())
    async with filed.serving(**on_disk) as server:
        assert server.statistics().disk_blocks > 0
        await later(server, 25 * HOUR_S)
        assert 0 == server.statistics().disk_blocks
        assert {} == server.statistics().sessions
    assert {"expired"} == {event.reason for event in filed.events(ev.BlockFileRemoved)}
    assert filed.is_valid()


async def test_nothing_is_removed_while_a_request_is_in_flight(setup: Journaled) -> None:
    """However long ago it expired."""
    async with setup.serving(limits=Limits(ttl_s=60)) as server:
        await ask(server, question())
        await done(server)
        with server.loaded.activity.preparing():
            turn_clock(server, HOUR_S)
            server.loaded.activity.changed()
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert server.statistics().blocks > 0
            assert 0 == await server.loaded.memory.remove_expired(lambda: False)
        await done(server)
        assert 0 == server.statistics().blocks
    assert setup.is_valid()


async def test_two_tasks_ask_for_the_slab_and_one_closes_the_session(
    setup: Journaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The first task closes the session with its slab; the second one is notified that it is gone.
    """
    async with setup.serving() as server:
        said = await ask(server, question())
        await done(server)
        session, sessions = said.accepted.session, server.loaded.sessions
        cache = sessions.actors[session].cache
        released = cache.release_slab

        async def released_and_closed(reason: str) -> None:
            await released(reason)
            sessions.actors.pop(session).close()
            closed = ev.SessionClosed(session=session, reason="its TTL has expired")
            server.loaded.sequencer.append(closed)

        monkeypatch.setattr(cache, "release_slab", released_and_closed)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sessions.give_up_slab, session, "its TTL has expired")
                nursery.start_soon(sessions.give_up_slab, session, "room for another session")
        await done(server)

    assert [] == setup.events(ev.InvariantViolated)
    assert 1 == len(setup.events(ev.SlabReleased))
    assert setup.is_valid()
