"""Connections without a request: there is a bound to them, and clients that talk go on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial

import httpx
import pytest
import structlog
import trio
import trio.testing

from cairn.http.server.waiting import WAITING_MAX, Waiting, WaitingLimits
from tests.http.conftest import run_server
from tests.http.fake_service import ACCEPTED, ANSWER, FakeService, Hold
from tests.http.server.test_connection import SOON_S, WHOLE, connected, everything, head

ServeWith = Callable[[FakeService, WaitingLimits], Awaitable[str]]


@pytest.fixture
async def serve_with(nursery: trio.Nursery) -> AsyncIterator[ServeWith]:
    """Serves a service with limits until the test ends, and returns its address."""
    shutdown = trio.Event()

    async def start(service: FakeService, limits: WaitingLimits) -> str:
        return await nursery.start(partial(run_server, service, shutdown, 1.0, limits))

    yield start
    shutdown.set()


class Named:
    """A connection of a test."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self._name = name
        self._closed = closed

    def cut(self) -> None:
        """Note that it is closed."""
        self._closed.append(self._name)


async def ended(stream: trio.SocketStream) -> None:
    """Wait until the server closes a connection."""
    with suppress(trio.BrokenResourceError):
        assert b"" == await stream.receive_some()


async def answered(stream: trio.SocketStream) -> None:
    """Send a request, and read its whole answer, after which the connection stays open."""
    await stream.send_all(head("/health"))
    found = b""
    while b"admission_bug" not in found:
        found += await stream.receive_some()
    assert found.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("descriptors", "total", "each"),
    [(1, 1, 1), (256, 128, 96), (2048, 1024, 768), (10**6, WAITING_MAX, WAITING_MAX * 3 // 4)],
)
def test_limits_follow_the_descriptors(descriptors: int, total: int, each: int):
    """At most half of a process's descriptors are for connections that wait."""
    limits = WaitingLimits.of(descriptors)
    assert (total, each) == (limits.total, limits.each)


@pytest.mark.trio
async def test_which_is_closed():
    """
    The oldest silent connection is closed first, then the one that has rested longest; an address
    with too many loses its own; one that has a request is not closed.
    """
    closed: list[str] = []
    a, b, c, d, e, f = (Named(name, closed) for name in "abcdef")
    waiting = Waiting(WaitingLimits(total=3, each=2))
    waiting.rest(a, "1")
    waiting.arrive(b, "2")
    waiting.arrive(c, "3")
    assert [] == closed
    waiting.arrive(d, "1")
    assert ["b"] == closed  # of all that are silent, the oldest
    waiting.leave(c)
    waiting.arrive(e, "1")
    assert ["b", "d"] == closed  # of the address's own, a silent one before one that rests
    waiting.leave(e)
    waiting.rest(c, "3")
    waiting.rest(e, "2")
    waiting.rest(f, "4")
    assert ["b", "d", "a"] == closed
    assert not waiting.is_silent(f)


@pytest.mark.trio
async def test_an_unfinished_request_counts():
    """
    A connection whose request has begun and not ended may be closed, the oldest first; it is not
    silent, and it is safe once the request was read.
    """
    closed: list[str] = []
    a, b, c, d = (Named(name, closed) for name in "abcd")
    waiting = Waiting(WaitingLimits(total=2, each=2))
    waiting.arrive(a, "1")
    waiting.begin(a, "1")
    assert not waiting.is_silent(a)
    waiting.leave(a)
    waiting.rest(b, "2")
    waiting.begin(b, "2")
    waiting.arrive(c, "3")
    waiting.arrive(d, "4")
    assert ["b"] == closed


@pytest.mark.trio
async def test_the_log_is_not_flooded(autojump_clock: trio.testing.MockClock):
    """A warning a minute is enough."""
    waiting = Waiting(WaitingLimits(total=1, each=1))
    with structlog.testing.capture_logs() as logs:
        for _ in range(10):
            waiting.arrive(Named("one", []), "1")
        assert 1 == len(logs)
        await trio.sleep(61)
        waiting.arrive(Named("one", []), "1")
    assert [("warning", "1")] * 2 == [(entry["log_level"], entry["address"]) for entry in logs]


@pytest.mark.trio
async def test_health_answers_beside_many_silent_connections(
    serve_with: ServeWith, client: httpx.AsyncClient
):
    """Others are answered beside ten times as many silent connections as may wait."""
    hold = Hold()
    service = FakeService([ACCEPTED, hold, *ANSWER[1:]])
    url = await serve_with(service, WaitingLimits(total=20, each=20))
    with trio.fail_after(SOON_S):
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(connected(url))
            await running.send_all(WHOLE.replace(b"host:", b"connection: close\r\nhost:"))
            await hold.reached.wait()
            silent = [await stack.enter_async_context(connected(url)) for _ in range(200)]
            await ended(silent[0])
            assert 200 == (await client.get(url + "/health")).status_code
            hold.released.set()
            assert b'"finish_reason"' in await everything(running)
            for stream in silent[1:150]:
                await ended(stream)
            await answered(silent[-1])  # the control: the last ones may still speak


@pytest.mark.trio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_health_answers_beside_many_unfinished_bodies(
    serve_with: ServeWith, client: httpx.AsyncClient, path: str
):
    """A body of which a byte is missing costs its client nothing, so that it counts as waiting."""
    url = await serve_with(FakeService(), WaitingLimits(total=20, each=20))
    begin = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
    with trio.fail_after(SOON_S):
        async with AsyncExitStack() as stack:
            begun = []
            for _ in range(60):
                stream = await stack.enter_async_context(connected(url))
                await stream.send_all(f"{begin}expect: 100-continue\r\n\r\n".encode())
                assert b" 100 " in await stream.receive_some()  # the head was read
                begun.append(stream)
            for stream in begun[:40]:
                await ended(stream)
            assert 200 == (await client.get(url + "/health")).status_code


@pytest.mark.trio
async def test_a_silent_connection_is_closed_after_a_time(serve_with: ServeWith):
    """A connection that sends no whole head is closed; one that sent a request may rest."""
    url = await serve_with(FakeService(), WaitingLimits(total=20, each=20, silent_s=0.5))
    with trio.fail_after(SOON_S):
        async with connected(url) as talks, connected(url) as silent, connected(url) as slow:
            await answered(talks)
            await slow.send_all(b"GET /health HTTP/1.1\r\nhost: local")
            await ended(silent)
            await ended(slow)
            await answered(talks)
