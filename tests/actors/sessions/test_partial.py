"""Requests that reuse the first rows of a block that another session sealed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.actors.errors import Broken
from cairn.actors.requests.limits import Limits
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from tests.actors.sessions.test_grain import C, change_checked_rows, serving_any_cut
from tests.support.in_process_server import (
    ask,
    chat,
    events_of,
    generate,
    wait_idle,
    without_slabs,
)

pytestmark = pytest.mark.trio
SYSTEM = "The path goes past the old bridge and on. " * 2


def said(text: str, **of: Any) -> Any:
    """A request of one message, whose prompt begins as all of them do."""
    return generate(chat(SYSTEM + text), max_tokens=4, **of)


def common(prompt: str) -> int:
    """How many tokens of a prompt the prompt of "first" begins with."""
    return len("<user>") + len(SYSTEM) + len(prompt)


async def test_another_session_reuses_to_the_token() -> None:
    """From memory, with the whole block checked; the client learns of the exact number."""
    store = MemoryStore()
    async with serving_any_cut(store) as server:
        await ask(server, said("a" * C, session_name="first"))
        await wait_idle(server)
        second = await ask(server, said("aaa, but not more"))
        due = common("aaa")
        assert C < due < 2 * C
        assert due == second.accepted.cached_tokens == second.finished.cached_tokens
        third = await ask(server, said("aa", cache_prompt=False))
        assert 0 == third.accepted.cached_tokens
    sealed = [one.key for one in events_of(store, ev.BlockSealed) if one.session == "first"]
    path = events_of(store, ev.PathSelected)[1]
    assert (1, sealed[1], due - C) == (
        path.blocks_from_pool,
        path.partial_key,
        path.tokens_from_partial,
    )
    restored = events_of(store, ev.BlocksRestored)
    assert [(0, C, (sealed[0],)), (C, due, (sealed[1],))] == [
        (one.start, one.end, one.keys) for one in restored
    ]
    assert [due - 1] == [one.row for one in events_of(store, ev.RowChecked)]
    assert () == replay(store.read()).findings


async def test_a_block_that_changed_in_a_row_that_is_not_copied() -> None:
    """The whole block is checked: INV-3, and the next request does not match it."""
    store = MemoryStore()
    async with serving_any_cut(store) as server:
        await ask(server, said("a" * C, session_name="first"))
        await wait_idle(server)
        key = server.loaded.sequencer.session("first").slab_keys[1]
        device: Any = server.loaded.engine.device
        blocks = vars(device)["_blocks"]
        ids = blocks[key].ids
        blocks[key] = attrs.evolve(blocks[key], ids=(*ids[:-1], ids[-1] + 1))
        with pytest.raises(Broken):
            await ask(server, said("aaa, but not more"))
        again = await ask(server, said("aaa, but not more"))
        assert C == again.accepted.cached_tokens
    (found,) = replay(store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)


async def test_a_row_of_a_block_that_is_another_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Session and block are quarantined, and others are served without them."""
    store = MemoryStore()
    async with serving_any_cut(store) as server:
        await ask(server, said("a" * C, session_name="first"))
        await wait_idle(server)
        key = server.loaded.sequencer.session("first").slab_keys[1]
        change_checked_rows(server, monkeypatch)
        with pytest.raises(Broken):
            await ask(server, said("aaa, but not more"))
        monkeypatch.undo()
        again = await ask(server, said("aaa, but not more"))
        assert C == again.accepted.cached_tokens
        state = server.loaded.sequencer.state
        assert state.blocks[key].bug_id is not None
    (found,) = replay(store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)


async def test_a_prewarm_copies_what_another_session_has() -> None:
    """As far as its tokens are the same; the rest is computed."""
    store = MemoryStore()
    async with serving_any_cut(MemoryStore()) as other:
        first = await ask(other, generate(chat("Hello there."), max_tokens=8))
    async with serving_any_cut(store) as server:
        changed = first.text[:3] + "QQQ"
        await ask(
            server,
            generate(chat("Hello there.", changed, "x" * C), max_tokens=4, session_name="first"),
        )
        await wait_idle(server)
        mine = generate(chat("Hello there."), max_tokens=8, session_name="mine")
        assert first.text == (await ask(server, mine)).text
        await wait_idle(server)
    prewarm = [one for one in events_of(store, ev.PrewarmStarted) if one.session == "mine"][-1]
    prompt = len("<user>Hello there.;<assistant>")
    assert (prompt + 3, 0) == (prewarm.tokens_from_partial, prewarm.tokens_from_slab)
    mine_only = [one for one in events_of(store, ev.BlocksRestored) if one.session == "mine"]
    (restored,) = [one for one in mine_only if one.request is None]
    assert (0, prompt + 3, (prewarm.partial_key,)) == (restored.start, restored.end, restored.keys)
    assert () == replay(store.read()).findings


async def test_the_same_prompt_again_computes_its_last_token() -> None:
    """In another session, once the first one is idle. Its next turn replaces the short block."""
    store = MemoryStore()
    async with serving_any_cut(store) as server:
        first = await ask(server, said("Hello.", session_name="first"))
        await wait_idle(server)
        again = await ask(server, said("Hello.", session_name="again"))
        assert again.finished.prompt_tokens - 1 == again.accepted.cached_tokens
        await wait_idle(server)
        onward = chat(SYSTEM + "Hello.", first.text, "a" * C)
        await ask(server, generate(onward, max_tokens=4, session_name="first"))
        await wait_idle(server)
        short = [one for one in events_of(store, ev.BlockSealed) if one.end - one.start < C]
        state = server.loaded.sequencer.state
        gone = [one.key for one in events_of(store, ev.BlockEvicted) if one.reason == "superseded"]
        assert short[0].key in gone
        assert not state.blocks[short[0].key].present
        device: Any = server.loaded.engine.device
        assert "" == device.digest_of(short[0].key)
    assert () == replay(store.read()).findings


async def test_a_short_block_has_no_file(tmp_path: Path) -> None:
    """Neither in idle time nor at the end."""
    store = MemoryStore()
    async with serving_any_cut(store, blocks_folder=tmp_path, disk_bytes=1 << 30) as server:
        await ask(server, said("Hello.", session_name="first"))
        await wait_idle(server)
    short = {one.key for one in events_of(store, ev.BlockSealed) if one.end - one.start < C}
    written = {one.key for one in events_of(store, ev.BlockSpilled)}
    assert short
    assert written
    assert not short & written


@pytest.mark.parametrize("tokens", [20, 150], ids=["short block", "full block"])
async def test_a_quarantined_block_is_not_sealed_again(tokens: int) -> None:
    """A wrong digest is one bug, and other sessions with the tokens stay in service."""
    store = MemoryStore()
    wrong: list[str] = []
    async with serving_any_cut(store, prewarm=False) as server:
        device: Any = server.loaded.engine.device
        plain = device.seal

        def seal(slab: int, key: str, start: int, end: int, *, store: bool) -> Any:
            report = plain(slab, key, start, end, store=store)
            if wrong or (end - start < C) != (tokens < C):
                return report
            wrong.append(key)
            return attrs.evolve(report, digest="0" * 32)

        device.seal = seal
        for place in range(4):
            with contextlib.suppress(Broken):
                await ask(
                    server, generate(chat("s" * tokens), max_tokens=3, session_name=f"n{place}")
                )
            with trio.move_on_after(1):
                while server.loaded.activity.at_work:  # noqa: ASYNC110  # another thread works
                    await trio.sleep(0.01)
        assert wrong
        assert 1 == len(server.loaded.sequencer.state.faults)


async def test_no_block_is_evicted_for_a_short_one() -> None:
    """With room for full blocks alone, what an idle session has after them is not stored."""
    store = MemoryStore()
    async with serving_any_cut(store, prewarm=False, blocks_max=2) as server:
        await ask(server, generate(chat("a" * (2 * C)), max_tokens=2))
        await wait_idle(server)
        assert 2 == server.statistics().blocks
    assert [] == events_of(store, ev.BlockEvicted)
    assert {C} == {one.end - one.start for one in events_of(store, ev.BlockSealed)}


async def test_a_short_block_that_was_matched_leaves_with_the_next() -> None:
    """A chat without a slab between its turns keeps the last of its short blocks alone."""
    store = MemoryStore()
    async with serving_any_cut(store, prewarm=False, limits=Limits(slab_idle_s=0)) as server:
        said_so_far = ["a" * 100]
        for turn in range(4):
            answer = await ask(server, generate(chat(*said_so_far), max_tokens=6))
            await without_slabs(server)
            said_so_far += [answer.text, f"{turn} and then, on the path to the pass?"]
        blocks = [one for one in server.loaded.sequencer.state.blocks.values() if one.present]
    short = [one for one in blocks if one.tokens < C]
    needless = [
        one
        for one in short
        for other in blocks
        if other.parent == one.parent and other.key != one.key and other.ids.startswith(one.ids)
    ]
    assert [] == needless
    assert () == replay(store.read()).findings
