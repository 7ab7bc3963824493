"""Connections that send invalid requests, or requests that do not end: others are not affected."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import trio
import trio.testing

from cairn.actors.requests.messages import Delta
from cairn.engine.answer.parts import Said
from cairn.http.server.listen import BUFFERED_BYTES_MAX
from cairn.http.server.protocol import Http1
from tests.http.conftest import Serve, run_server
from tests.http.fake_service import ACCEPTED, ANSWER, FINISHED, FakeService, Hold, Step

pytestmark = pytest.mark.trio

SOON_S = 30
"""How long a connection may take to end; one that is leaked stays open for more than a minute."""

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
UPGRADE = (
    "upgrade: websocket",
    "connection: upgrade",
    "sec-websocket-version: 13",
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[trio.SocketStream]:
    """A plain connection to a server."""
    async with await trio.open_tcp_stream("127.0.0.1", int(url.rsplit(":", 1)[1])) as stream:
        yield stream


def head(target: str, *headers: str, method: str = "GET") -> bytes:
    """The headers of a request."""
    return "\r\n".join(
        [f"{method} {target} HTTP/1.1", "host: localhost", *headers, "", ""]
    ).encode()


def question(*headers: str, **changes: Any) -> bytes:
    """A complete request for an answer."""
    body = json.dumps(HELLO | changes).encode()
    return head(CHAT, f"content-length: {len(body)}", *headers, method="POST") + body


async def everything(stream: trio.SocketStream) -> bytes:
    """Everything that is received until the other end closes."""
    found = b""
    while piece := await stream.receive_some():
        found += piece
    return found


def open_files() -> int:
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


async def let_go(before: int) -> None:
    """Wait until no more descriptors are open than before."""
    while open_files() > before:  # noqa: ASYNC110 - closing a descriptor sets no event
        await trio.sleep(0.01)


H2C = ("upgrade: h2c", "connection: Upgrade, HTTP2-Settings", "http2-settings: AAMAAABk")
CHUNKED = ("transfer-encoding: chunked",)
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n" + head("/health")
#: A client that knows that the server speaks HTTP/2 begins so, with a frame of settings.
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)

NO_REQUESTS = {
    "octets": b"\x00\x01\x02\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": head("/health", "host: other"),
    "a long header": head("/health", f"x-long: {'x' * 100_000}"),
    "length below zero": head(CHAT, "content-length: -1", method="POST"),
    "length no number": head(CHAT, "content-length: many", method="POST"),
    "length of thirty digits": head(CHAT, f"content-length: {10**30}", method="POST"),
    "two lengths": head(CHAT, "content-length: 3", "content-length: 4", method="POST") + b"{}{}",
    "a chunk of no size": head(CHAT, "transfer-encoding: chunked", method="POST") + b"zz\r\n",
    "another transfer": head(CHAT, "transfer-encoding: gzip, chunked", method="POST"),
    "a length beside chunks": head(CHAT, *CHUNKED, "content-length: 4", method="POST") + CHUNKS,
    "a length before chunks": head(CHAT, "content-length: 4", *CHUNKED, method="POST") + CHUNKS,
    "HTTP/2": HTTP2,
    "HTTP/2 and a host": HTTP2.replace(b"\r\n", b"\r\nhost: localhost\r\n", 1),
    "HTTP/3": head("/health").replace(b"HTTP/1.1", b"HTTP/3.0"),
}


@pytest.mark.parametrize("sent", NO_REQUESTS.values(), ids=NO_REQUESTS)
async def test_no_request(serve: Serve, client: httpx.AsyncClient, sent: bytes):
    """
    The server closes the connection, does not call the service, and answers the next connection.
    """
    service = FakeService()
    url = await serve(service)
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(sent)
            try:
                answer = await everything(stream)
            except trio.BrokenResourceError:  # closed before everything was read
                answer = b""
    if answer.startswith(b"HTTP/1.1"):
        assert answer.split()[1] in (b"400", b"431", b"501", b"505")
        assert 1 == answer.count(b"HTTP/1.1 ")
    assert [] == service.commands
    assert 200 == (await client.get(url + "/health")).status_code


async def test_failed_connection_leaves_a_line(
    serve: Serve, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    """A failure within Hypercorn is logged as one warning, and ends that connection alone."""

    async def fail(self: object, event: object) -> None:
        raise UnicodeError("no such octet")

    url = await serve(FakeService())
    with structlog.testing.capture_logs() as logs, trio.fail_after(SOON_S):
        with monkeypatch.context() as patched:
            patched.setattr(Http1, "handle", fail)
            async with connected(url) as stream:
                await stream.send_all(head("/health"))
                await everything(stream)
        await trio.testing.wait_all_tasks_blocked()
    assert [("connection failed", "warning")] == [(e["event"], e["log_level"]) for e in logs]
    assert "no such octet" in logs[0]["error"]
    assert 200 == (await client.get(url + "/health")).status_code


FRAMINGS = {
    "a length beside chunks": (NO_REQUESTS["a length beside chunks"], 400),
    "HTTP/2": (HTTP2, 505),
}


@pytest.mark.parametrize(("sent", "status"), FRAMINGS.values(), ids=FRAMINGS)
async def test_refused_framing(serve: Serve, sent: bytes, status: int):
    """
    Two ways to find the end of a body, and HTTP/2, are refused in HTTP/1.1. What follows is not
    read as a request.
    """
    url = await serve(FakeService())
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(sent)
            answer = await everything(stream)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert 1 == answer.count(b"HTTP/1.1 ")
    assert b"connection: close" in answer.lower()


async def test_chunks_without_a_length_are_read(serve: Serve):
    """The control: the same request without a length is answered, and the next one too."""
    url = await serve(FakeService())
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(head(CHAT, *CHUNKED, method="POST") + CHUNKS)
            found = b""
            while b"journal_position" not in found:
                found += await stream.receive_some()
    assert 2 == found.count(b"HTTP/1.1 ")


async def test_http2_is_not_switched_to(serve: Serve):
    """A client that asks to go on with HTTP/2 gets its answer in HTTP/1.1."""
    url = await serve(FakeService())
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(head("/health", *H2C, "connection: close"))
            answer = await everything(stream)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"journal_position" in answer


ADDRESSES = {
    "no path": ("?x", (), 200),
    "a whole address": ("http://localhost/health", (), 200),
    "an address that is none": ("http://[::1/health", (), 404),
    "a star": ("*", (), 404),
    "a word": ("health", (), 200),
    "websocket": ("/health", UPGRADE, 400),
    "websocket to another method": (CHAT, UPGRADE, 405),
    "websocket to nothing": ("/nothing", UPGRADE, 404),
    "websocket without a path": ("?x", UPGRADE, 400),
}


@pytest.mark.parametrize(("target", "headers", "status"), ADDRESSES.values(), ids=list(ADDRESSES))
async def test_odd_addresses(serve: Serve, target: str, headers: tuple[str, ...], status: int):
    """Any text in place of a path is answered; errors are envelopes."""
    url = await serve(FakeService())
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(head(target, *(headers or ["connection: close"])))
            top, _, body = (await everything(stream)).partition(b"\r\n\r\n")
    assert status == int(top.split()[1])
    if status != 200:
        assert {"error"} == json.loads(body).keys()


NO_HOSTS = [
    "localhost:x@evil.example",
    "localhost:80:80",
    "localhost..",
    "x" * 64,
    "localhost]",
    "evil.example]localhost",
    "[localhost]",
    "[127.0.0.1]",
    "[::1]evil.example",
    "[::1]:x",
    "[[::1]]",
    "[::1",
    "::1",
    ":80",
]


@pytest.mark.parametrize("host", NO_HOSTS)
async def test_no_host(serve: Serve, host: str):
    """A host that only begins or ends like one of the server's names is refused, and quoted."""
    url = await serve(FakeService())
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(
                f"GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()
            )
            top, _, body = (await everything(stream)).partition(b"\r\n\r\n")
    assert 403 == int(top.split()[1])
    assert "host_not_allowed" == json.loads(body)["error"]["code"]
    assert host[:9] in json.loads(body)["error"]["message"]


async def test_closed_connections_are_freed(serve: Serve):
    """After a client closes its connection, the server soon frees what it held for it."""
    url = await serve(FakeService())
    before = open_files()
    for _ in range(20):
        async with connected(url) as stream:
            await stream.send_all(head("/health"))
            found = b""
            while b"admission_bug" not in found:
                found += await stream.receive_some()
            await trio.testing.wait_all_tasks_blocked()
    with trio.fail_after(SOON_S):
        await let_go(before)


WHOLE, STREAM = question(), question(stream=True)

#: A request, and bytes that make Hypercorn stop reading until the request is answered.
READ_LATER = {
    "whole, then another": WHOLE + WHOLE,
    "whole, then a line": WHOLE + b"\r\n",
    "whole, to be HTTP/2": question(*H2C),
    "stream, then another": STREAM + STREAM,
    "stream, then a line": STREAM + b"\r\n",
    "stream, to be HTTP/2": question(*H2C, stream=True),
    "stream, then all that is read ahead": STREAM + bytes(BUFFERED_BYTES_MAX - 1),
}


@pytest.mark.parametrize("sent", READ_LATER.values(), ids=READ_LATER)
async def test_closed_midway_with_more_to_read(serve: Serve, sent: bytes):
    """A close after bytes that are not yet read is noticed, and the request is cancelled."""
    hold = Hold()
    service = FakeService([ACCEPTED, hold])
    url = await serve(service)
    before = open_files()
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(sent)
            await hold.reached.wait()
            await trio.testing.wait_all_tasks_blocked()
        await service.leaves.wait()
        await let_go(before)
    assert (1, 1) == (service.entered, service.left)


@pytest.mark.parametrize("sent", READ_LATER.values(), ids=READ_LATER)
async def test_shutdown_after_a_close_midway(sent: bytes):
    """A server that stops does not wait for a client that disconnected after such bytes."""
    hold = Hold()
    service = FakeService([ACCEPTED, hold])
    shutdown = trio.Event()
    with trio.fail_after(SOON_S):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(run_server, service, shutdown, 600))
            async with connected(url) as stream:
                await stream.send_all(sent)
                await hold.reached.wait()
            shutdown.set()
    assert 1 == service.left


async def test_closed_after_more_than_is_read_ahead(serve: Serve):
    """Such a close is noticed when the server sends something."""
    megabyte = Delta(parts=(Said("x" * 2**20),))
    service = FakeService([ACCEPTED, *[megabyte] * 64, FINISHED])
    url = await serve(service)
    before = open_files()
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(STREAM + bytes(2 * BUFFERED_BYTES_MAX))
            assert await stream.receive_some(100)
            await trio.testing.wait_all_tasks_blocked(0.05)
        await service.leaves.wait()
        await let_go(before)


AT_ONCE = {
    "once": head("/health"),
    "twice": head("/health") * 2,
    "three times": head("/health") * 3,
    "HTTP/2": HTTP2,
    "to be HTTP/2": head("/health", *H2C),
}


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("sent", AT_ONCE.values(), ids=AT_ONCE)
async def test_asked_and_closed(serve: Serve, sent: bytes, waits: bool):
    """A client that disconnects without waiting for its answers leaves no open descriptors."""
    url = await serve(FakeService())
    before = open_files()
    with trio.fail_after(SOON_S):
        for _ in range(20):
            async with connected(url) as stream:
                await stream.send_all(sent)
                if waits:
                    await trio.testing.wait_all_tasks_blocked(0.005)
        await let_go(before)


async def test_next_request_comes_early(serve: Serve):
    """A request that is sent while another one runs is read completely, and answered next."""
    hold = Hold()
    service = FakeService([ACCEPTED, hold, *ANSWER[1:]], ANSWER)
    url = await serve(service)
    long = "".join(f"{number} " for number in range(100_000))
    messages = [{"role": "user", "content": long}]
    async with trio.open_nursery() as nursery:
        with trio.fail_after(SOON_S):
            async with connected(url) as stream:
                nursery.start_soon(stream.send_all, WHOLE + question(messages=messages))
                await hold.reached.wait()
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert 1 == service.entered
                hold.released.set()
                found = b""
                while 2 > found.count(b'"finish_reason"'):
                    found += await stream.receive_some()
    assert [200, 200] == [int(part[:4]) for part in found.split(b"HTTP/1.1")[1:]]
    conversation = service.commands[1].conversation
    assert conversation is not None
    assert long == conversation.messages[0].content


async def test_shutdown_with_a_request_that_waits_its_turn():
    """The running request is answered, the next one is not started, and the server ends."""
    hold = Hold()
    service = FakeService([ACCEPTED, hold, *ANSWER[1:]])
    shutdown = trio.Event()
    with trio.fail_after(SOON_S):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(run_server, service, shutdown, 600))
            async with connected(url) as stream:
                await stream.send_all(WHOLE + WHOLE)
                await hold.reached.wait()
                shutdown.set()
                await trio.testing.wait_all_tasks_blocked(0.05)
                hold.released.set()
                found = await everything(stream)
    assert 1 == found.count(b'"finish_reason"')
    assert 1 == service.entered


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
async def test_compressed_body(serve: Serve, client: httpx.AsyncClient, coding: str):
    """A compressed body is a 415, and the message names the encoding."""
    service = FakeService()
    url = await serve(service)
    response = await client.post(url + CHAT, json=HELLO, headers={"content-encoding": coding})
    error = response.json()["error"]
    assert (415, "unsupported_encoding") == (response.status_code, error["code"])
    assert coding in error["message"]
    assert [] == service.commands
    plain = await client.post(url + CHAT, json=HELLO, headers={"content-encoding": "identity"})
    assert 200 == plain.status_code


async def test_shutdown_cuts_clients_that_do_not_read():
    """A client that stops reading its stream does not keep the server from ending."""
    megabyte = Delta(parts=(Said("x" * 2**20),))
    script: list[Step] = [ACCEPTED, *[megabyte] * 64, FINISHED]
    service = FakeService(script)
    shutdown = trio.Event()
    with trio.fail_after(SOON_S):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(run_server, service, shutdown, 0.2))
            async with connected(url) as stream:
                await stream.send_all(STREAM)
                assert await stream.receive_some(100)
                await trio.testing.wait_all_tasks_blocked(0.05)
                shutdown.set()
                await service.leaves.wait()
    assert 1 == service.left


UNREAD = {
    "encoding": (head(CHAT, "content-encoding: gzip", "content-length: 9", method="POST"), 415),
    "origin": (head(CHAT, "origin: http://x.example", "content-length: 9", method="POST"), 403),
    "address": (head("/nowhere", "transfer-encoding: chunked", method="POST"), 404),
    "method": (head(CHAT, "content-length: 9", method="PUT"), 405),
}


@pytest.mark.parametrize(("sent", "status"), UNREAD.values(), ids=UNREAD)
async def test_refused_before_its_body_is_read(serve: Serve, sent: bytes, status: int):
    """
    The answer says that the connection closes, and it does: the client's next request uses another
    one.
    """
    url = await serve(FakeService())
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            await stream.send_all(sent)
            answer = await everything(stream)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nconnection: close\r\n" in answer.lower()


async def test_refused_after_its_body_is_read(serve: Serve):
    """The control: a connection whose body was read stays open, and takes the next request."""
    url = await serve(FakeService())
    sent = head(CHAT, "content-length: 2", method="POST") + b"[]"
    with trio.fail_after(SOON_S):
        async with connected(url) as stream:
            for _ in range(2):
                await stream.send_all(sent)
                answer = b""
                while b'"code":' not in answer:
                    answer += await stream.receive_some()
                assert answer.startswith(b"HTTP/1.1 400 ")
                assert b"connection: close" not in answer.lower()
