"""What live pages are sent."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.http.explorer import feed
from cairn.http.explorer.feed import Feed
from tests.http.fake_service import FACTS, FakeService
from tests.http.sessions.test_sessions import KEYS, LONG, PLAN, site, talked
from tests.support.in_process_server import ask, chat, generate, wait_idle

pytestmark = pytest.mark.trio


async def test_requests_come_and_go() -> None:
    """A frame for what changed; tokens are counted by what was computed."""
    async with (
        site() as here,
        here.client() as client,
        client.stream("GET", "/explorer/live/stream") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()

        async def frame() -> dict[str, Any]:
            with trio.fail_after(30):
                while True:
                    line = await anext(lines)
                    if line.startswith("data: "):
                        found: dict[str, Any] = json.loads(line[6:])
                        return found

        assert (await frame())["ended"] == []
        said = await ask(here.server, generate(chat(LONG), client="an-agent"))
        await wait_idle(here.server)
        last = await frame()
        while not last["ended"] or last["flights"]:
            last = await frame()
        (ended,) = last["ended"]
        assert said.accepted.session == ended["session"]
        assert ("length", 24, 0) == (ended["end"], ended["generated"], ended["reused"])
        assert ended["words"].startswith("A long first")
        assert ended["prompt"] == ended["computed"] == last["tokens"]["prefill"]
        assert 24 == last["tokens"]["decode"]
        assert 0 == last["running"]
        assert ("an-agent", "new_session", "cold_start") == (
            *(ended["client"], ended["path"]),
            ended["reason"],
        )
        page = await client.get("/explorer/live", headers={"accept": "text/html"})
        assert "length · an-agent · new conversation · 0 reused of" in page.text


async def test_a_tenant_sees_its_own_alone() -> None:
    """Neither requests nor figures of others; the operator sees requests without their words."""
    async with site(KEYS) as here:
        seen = Feed(here.server)
        await talked(here.server, LONG, tenant="alice", session_name="notes")
        before = seen.frame("alice", of_all=False)
        await talked(here.server, PLAN, tenant="bob")
        assert before == seen.frame("alice", of_all=False)
        assert {"notes"} == {one["session"] for one in before["ended"]}
        assert "running" not in before
        everything = seen.frame("local", of_all=True)
        assert 4 == len(everything["ended"])
        assert {""} == {one["words"] for one in everything["ended"]}
        assert "@alice/notes" in {one["session"] for one in everything["ended"]}
        assert {
            "changes": 0,
            "models": before["models"],
            "tokens": dict.fromkeys(feed.PASSES, 0),
            "flights": [],
            "ended": [],
        } == (seen.frame("carol", of_all=False))


async def test_a_frame_is_made_once_for_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of one tenant share it; one is made again only if something changed."""
    monkeypatch.setattr(feed, "TICK_S", 0.001)
    async with site() as here:
        seen, made = Feed(here.server), []
        whole = seen.frame

        def frame(tenant: str, *, of_all: bool) -> dict[str, Any]:
            made.append(tenant)
            return whole(tenant, of_all=of_all)

        monkeypatch.setattr(seen, "frame", frame)
        streams = [seen.stream("local", of_all=True) for _ in range(10)]
        for one in streams:
            assert b": connected\n\n" == await anext(one)
            assert (await anext(one)).startswith(b"event: frame\n")
        assert 1 == len(made)
        await talked(here.server, LONG)
        for one in streams:
            assert (await anext(one)).startswith(b"event: frame\n")
            await one.aclose()  # type: ignore[attr-defined]
        assert 2 == len(made)


async def test_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a tenant without requests hears of it."""
    monkeypatch.setattr(feed, "TICK_S", 0.001)
    service = FakeService()
    stream = Feed(service).stream("carol", of_all=False)
    assert b": connected\n\n" == await anext(stream)
    assert b"large" not in await anext(stream)
    service.others = {"large": attrs.evolve(FACTS, model="large")}
    assert b'"large":"not_loaded"' in await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_session_that_breaks_has_no_request_left() -> None:
    """Its request has ended, by the invariant."""
    async with site() as here:
        seen = Feed(here.server)
        await talked(here.server, LONG, session_name="mine")
        here.server.loaded.sequencer.crash("mine", ZeroDivisionError("no"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert [] == seen.frame("local", of_all=True)["flights"]
