"""Sessions that continue to the token, and prefill passes of several blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest

from cairn.actors.boot import booted
from cairn.actors.errors import Broken
from cairn.actors.server import Server
from cairn.engine.row_class import RowClass
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from tests.support.fake_engine import NO_MODEL, started
from tests.support.in_process_server import (
    SECRET,
    ask,
    chat,
    events_of,
    generate,
    settings,
    wait_idle,
)

pytestmark = pytest.mark.trio
C = 64
ANY_CUT = RowClass(segment=C, quantum=1, least=1, most=4 * C, product=0)


@asynccontextmanager
async def serving_any_cut(store: MemoryStore, **changes: Any) -> AsyncIterator[Server]:
    """A server over the fake engine, with a row class."""

    def start(*given: Any) -> Any:
        begun = started(*given)
        engine: Any = begun.engine
        engine.row_class = ANY_CUT
        return attrs.evolve(begun, facts=attrs.evolve(begun.facts, row_class=ANY_CUT))

    async with booted(settings(NO_MODEL, **changes), store, SECRET, start_engine=start) as server:
        yield server


def prefills(store: MemoryStore, session: str) -> list[tuple[int, int]]:
    """The ranges of a session's prefill passes."""
    passes = events_of(store, ev.CacheExtended)
    return [
        (one.start, one.end) for one in passes if one.step == "prefill" and one.session == session
    ]


async def test_a_request_that_is_alone_has_long_passes() -> None:
    """Four blocks at a time. Each block is sealed, and the next turn computes what is new."""
    store = MemoryStore()
    async with serving_any_cut(store) as server:
        long = "x" * (5 * C)
        first = await ask(server, generate(chat(long), max_tokens=8))
        await wait_idle(server)
        prompt = first.finished.prompt_tokens
        assert [(0, 4 * C), (4 * C, prompt)] == prefills(store, first.accepted.session)
        sealed = events_of(store, ev.BlockSealed)
        assert prompt // C == len([one for one in sealed if one.end - one.start == C])
        second = await ask(server, generate(chat(long, first.text, "And?"), max_tokens=8))
        assert prompt < second.accepted.cached_tokens
        assert 0 < second.accepted.cached_tokens % C
        (checked,) = events_of(store, ev.RowChecked)
        assert second.accepted.cached_tokens - 1 == checked.row
    assert () == replay(store.read()).findings


async def test_others_wait_for_one_block() -> None:
    """While another request is in flight, no pass is longer than a block."""
    store = MemoryStore()
    async with serving_any_cut(store) as server:
        with server.loaded.activity.preparing():
            said = await ask(server, generate(chat("x" * (3 * C)), max_tokens=4))
        passes = prefills(store, said.accepted.session)
        assert [(0, C), (C, 2 * C), (2 * C, 3 * C)] == passes[:3]


def change_checked_rows(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each row that is computed again come out differently."""
    device: Any = server.loaded.engine.device
    run = device.run_chunk

    def changed(*given: Any, **named: Any) -> Any:
        report = run(*given, **named)
        again = report.again and (report.again[0], "0" * 32)
        return attrs.evolve(report, again=again)

    monkeypatch.setattr(device, "run_chunk", changed)


async def test_a_row_that_changed_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug has an id, the session is quarantined, and others are served."""
    store = MemoryStore()
    async with serving_any_cut(store) as server:
        first = await ask(server, generate(chat("Hello there."), max_tokens=4))
        await wait_idle(server)
        change_checked_rows(server, monkeypatch)
        onward = generate(chat("Hello there.", first.text, "And?"), max_tokens=4)
        with pytest.raises(Broken):
            await ask(server, onward)
        monkeypatch.undo()
        again = await ask(server, onward)
        assert ("new_session", "quarantined") == (again.accepted.path, again.accepted.reason)
    (found,) = replay(store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)
