"""Live streams: there is a bound to them, for each tenant and over all."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import httpx
import pytest
import trio

from cairn.http.server.live_streams import STREAMS_MAX, LiveStreams, StreamLimits
from cairn.http.wire.checks import ClientError
from tests.http.sessions.test_sessions import KEYS, LONG, Site, site, talked

LIVE = "/explorer/live/stream"
EVENTS = "/v1/sessions/notes/events?stream=true"


@pytest.mark.parametrize(
    ("descriptors", "total", "each"),
    [(1, 1, 1), (256, 64, 16), (10**6, STREAMS_MAX, STREAMS_MAX // 4)],
)
def test_limits_follow_the_descriptors(descriptors: int, total: int, each: int) -> None:
    """At most a quarter of a process's descriptors are for live streams."""
    limits = StreamLimits.of(descriptors)
    assert (total, each) == (limits.total, limits.each)


def test_which_are_refused() -> None:
    """A tenant that has too many, and any if there are too many; one that ends makes room."""
    streams = LiveStreams(StreamLimits(total=3, each=2))
    with ExitStack() as bobs:
        for _ in range(2):
            bobs.enter_context(streams.one_of("bob"))
        with pytest.raises(ClientError, match="this key has 2 live streams"):
            bobs.enter_context(streams.one_of("bob"))
        with streams.one_of("alice"):
            with pytest.raises(ClientError, match="the server has 3 live streams") as refused:
                bobs.enter_context(streams.one_of("carol"))
            assert (429, "15") == (refused.value.status, refused.value.headers["retry-after"])
        with streams.one_of("carol"):
            pass
    with streams.one_of("bob"), streams.one_of("bob"), streams.one_of("alice"):
        pass


async def followed(here: Site, path: str, key: str, open_: AsyncExitStack) -> Any:
    """The answer at an address, and how to leave it."""
    client = await open_.enter_async_context(here.client(key))
    left = AsyncExitStack()
    return await left.enter_async_context(client.stream("GET", path)), left


async def refusal(here: Site, path: str, key: str) -> httpx.Response:
    """The answer at an address, which is whole if it is a refusal."""
    async with here.client(key) as client, client.stream("GET", path) as response:
        if response.status_code != 200:
            await response.aread()
        return response


@pytest.mark.trio
@pytest.mark.parametrize("path", [LIVE, EVENTS])
async def test_streams_of_a_tenant_end_somewhere(path: str) -> None:
    """
    Both kinds count. One too many is refused with the time for trying again, another tenant has its
    own, and a client that leaves makes room.
    """
    async with site(KEYS, StreamLimits(total=8, each=2)) as here, AsyncExitStack() as open_:
        for tenant in ("alice", "bob"):
            await talked(here.server, LONG, tenant=tenant, session_name="notes")
        first, left = await followed(here, path, "a", open_)
        second, others = await followed(here, EVENTS, "a", open_)
        open_.push_async_callback(others.aclose)
        assert [200, 200] == [first.status_code, second.status_code]
        for each in (LIVE, EVENTS):
            refused = await refusal(here, each, "a")
            assert (429, "15", "close") == (
                *(refused.status_code, refused.headers["retry-after"]),
                refused.headers["connection"],
            )
            error = refused.json()["error"]
            assert ("too_many_streams", "rate_limit_error") == (error["code"], error["type"])
            assert "this key has 2 live streams open" in error["message"]
        of_bob, bobs = await followed(here, path, "b", open_)
        open_.push_async_callback(bobs.aclose)
        assert 200 == of_bob.status_code
        await left.aclose()
        with trio.fail_after(60):
            while True:
                again, mine = await followed(here, path, "a", open_)
                open_.push_async_callback(mine.aclose)
                if again.status_code == 200:
                    break
                await trio.lowlevel.checkpoint()


@pytest.mark.trio
@pytest.mark.parametrize("path", [LIVE, EVENTS])
async def test_a_stop_ends_streams(path: str) -> None:
    """A server that stops ends its live streams at once, whole; its grace is for answers."""
    async with site(grace_s=math.inf) as here:
        await talked(here.server, LONG, session_name="notes")
        async with here.client() as client, client.stream("GET", path) as response:
            lines = response.aiter_lines()
            assert ": connected" == await anext(lines)
            here.shutdown.set()
            with trio.fail_after(60):
                assert all(["gone" not in line async for line in lines])


@pytest.mark.trio
async def test_a_stream_that_comes_late_ends() -> None:
    """One that is opened while the server stops has nothing in it."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"piece"

    streams = LiveStreams(StreamLimits(total=1, each=1))
    assert [b"piece"] == [one async for one in streams.until_stopped(pieces())]
    streams.stop()
    assert [] == [one async for one in streams.until_stopped(pieces())]
