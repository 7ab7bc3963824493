"""Serving: the socket, its address, and stopping."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from cairn.http.server import listen as serving
from cairn.http.server.listen import bind_socket, is_loopback, url_of
from tests.http.conftest import Serve, run_server
from tests.http.fake_service import ACCEPTED, DELTAS, FINISHED, FakeService, Hold

STREAM: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
CHAT = "/v1/chat/completions"


def test_a_connection_waits_until_it_is_served():
    """The port is held from the start, and nothing is read from a client yet."""
    with bind_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert f"http://127.0.0.1:{port}" == url_of(listener)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            accepted, address = listener.accept()
            accepted.close()
            assert client.getsockname() == address


def test_port_in_use():
    """
    A port that another server has bound is refused at once, although that accepts no connection
    yet.
    """
    with bind_socket("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        bind_socket("127.0.0.1", first.getsockname()[1])


def test_a_port_that_is_taken_between_two_steps(monkeypatch: pytest.MonkeyPatch):
    """
    Two servers may bind one port if neither listens. The error is raised here all the same, and the
    socket is closed.
    """
    made: list[socket.socket] = []
    faster: list[socket.socket] = []

    class Late(socket.socket):
        """Another server is faster."""

        def listen(self, backlog: int = 1) -> None:
            made.append(self)
            if len(made) == 1:
                faster.append(bind_socket("127.0.0.1", self.getsockname()[1]))
            super().listen(backlog)

    monkeypatch.setattr(socket, "socket", Late)
    with pytest.raises(OSError, match="in use"):
        bind_socket("127.0.0.1", 0)
    (winner,) = faster
    winner.close()
    assert [-1, -1] == [one.fileno() for one in made]


# Each machine has these; IPv6 and other loopback addresses may be absent.
EVERYWHERE = ("127.0.0.1", "localhost", "0.0.0.0")


@pytest.mark.parametrize(
    ("host", "start"),
    [
        ("0.0.0.0", "http://127.0.0.1:"),
        ("localhost", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
    ],
)
def test_url(host: str, start: str):
    """The URL can be used by clients on this machine."""
    try:
        listener = bind_socket(host, 0)
    except OSError:
        if host in EVERYWHERE:
            raise
        pytest.skip(f"no {host} on this machine")
    with listener:
        assert url_of(listener).startswith(start)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:0.0.0.0", False),
    ],
)
def test_loopback(host: str, expected: bool):
    """
    A loopback address is reached from this machine only; the address of all interfaces is not.
    """
    try:
        listener = bind_socket(host, 0)
    except OSError:
        if host in EVERYWHERE:
            raise
        pytest.skip(f"no {host} on this machine")
    with listener:
        assert expected == is_loopback(listener)


def test_name_with_two_addresses(monkeypatch: pytest.MonkeyPatch):
    """A name with an IPv4 and an IPv6 address is bound to the one that clients try first."""
    kind = socket.SOCK_STREAM
    both = [
        (socket.AF_INET6, kind, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, kind, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both)
    with bind_socket("localhost", 0) as listener:
        assert socket.AF_INET == listener.family


@pytest.mark.trio
async def test_ready_means_answering(serve: Serve, client: httpx.AsyncClient):
    """Once the address is reported, a request to it is answered."""
    url = await serve(FakeService())
    response = await client.get(url + "/health")
    assert 200 == response.status_code
    assert "server" not in response.headers


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.trio
async def test_more_than_a_thousand_requests_on_a_connection(
    serve: Serve, client: httpx.AsyncClient
):
    """A connection is not closed after a number of requests."""
    url = await serve(FakeService())
    for _ in range(1100):
        response = await client.get(url + "/v1/models")
        assert "close" != response.headers.get("connection")


@pytest.mark.trio
async def test_shutdown_lets_a_stream_end(client: httpx.AsyncClient):
    """A running stream ends normally while new connections are refused; then serving ends."""
    hold = Hold()
    service = FakeService((ACCEPTED, hold, *DELTAS, FINISHED))
    shutdown, ended = trio.Event(), trio.Event()

    async def run(task_status: trio.TaskStatus[str]) -> None:
        await run_server(service, shutdown, 30, task_status=task_status)
        ended.set()

    with trio.fail_after(25):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(run)
            async with client.stream("POST", url + CHAT, json=STREAM) as response:
                lines = response.aiter_lines()
                assert '"role":"assistant"' in await anext(lines)
                shutdown.set()
                await trio.testing.wait_all_tasks_blocked(0.05)
                async with httpx.AsyncClient() as other:
                    with pytest.raises(httpx.ConnectError):
                        await other.get(url + "/health")
                assert not ended.is_set()
                hold.released.set()
                assert "data: [DONE]" == [line async for line in lines if line][-1]
            await ended.wait()
    assert 1 == service.left


@pytest.mark.trio
@pytest.mark.parametrize("path", ["/health", "/nothing", None], ids=["page", "error", "unused"])
async def test_shutdown_does_not_wait_for_idle_connections(path: str | None):
    """An idle connection is closed at once when the server stops."""
    shutdown = trio.Event()
    with trio.fail_after(25):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(run_server, FakeService(), shutdown, 30))
            port = int(url.rsplit(":", 1)[1])
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            if path is not None:
                await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
                assert await stream.receive_some()
            await trio.testing.wait_all_tasks_blocked(0.05)
            shutdown.set()
            while await stream.receive_some():
                pass


@pytest.mark.trio
async def test_idle_connections_time_out(monkeypatch: pytest.MonkeyPatch):
    """A connection without requests is closed after a while."""
    monkeypatch.setattr(serving, "KEEP_ALIVE_S", 0.1)
    shutdown = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(run_server, FakeService(), shutdown))
            stream = await trio.open_tcp_stream("127.0.0.1", int(url.rsplit(":", 1)[1]))
            await stream.send_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while await stream.receive_some():
                pass
            shutdown.set()


@pytest.mark.trio
async def test_shutdown_cuts_what_lasts_too_long(client: httpx.AsyncClient):
    """After the grace period a stream is cut, its request is cancelled, and serving ends."""
    service = FakeService((ACCEPTED, Hold()))
    shutdown = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(run_server, service, shutdown, 0.2))
            async with client.stream("POST", url + CHAT, json=STREAM) as response:
                lines = response.aiter_lines()
                await anext(lines)
                shutdown.set()
                with pytest.raises(httpx.RemoteProtocolError):
                    [line async for line in lines]
    assert (1, 1) == (service.entered, service.left)


@pytest.mark.trio
async def test_serving_is_quiet(
    serve: Serve, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, capfd: Any
):
    """The web server itself writes nothing: no access log, no startup message."""
    caplog.set_level(logging.INFO)
    url = await serve(FakeService())
    await client.get(url + "/health")
    assert [] == [record.getMessage() for record in caplog.records if "hypercorn" in record.name]
    assert ("", "") == capfd.readouterr()
