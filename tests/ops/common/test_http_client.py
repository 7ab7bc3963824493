"""
The HTTP client of the commands: requests that can be cancelled, and the reader of event streams.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from cairn.ops.common.http_client import Event, EventReader, Exchange, http_client, os_error

DEADLINE_S = 30.0
EVENTS = (
    b': waiting\r\n\r\nevent: delta\r\ndata: {"a": "\xc3\xa9"}\r\n\r\n'
    b"data:{}\n\nid: 7\n: prefill 1/2\n\ndata: [DONE]\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"


def test_an_event_stream_may_be_cut_anywhere():
    """However the bytes arrive, the events and comments are the same; other fields are skipped."""
    for cut in range(len(EVENTS)):
        reader = EventReader()
        found = [*reader.feed(EVENTS[:cut]), *reader.feed(EVENTS[cut:])]
        assert [
            Event(comment="waiting"),
            Event(data=b'{"a": "\xc3\xa9"}'),
            Event(data=b"{}"),
            Event(comment="prefill 1/2"),
            Event(data=b"[DONE]"),
        ] == found


@contextlib.contextmanager
def scripted(*parts: bytes, ends: bool = False) -> Iterator[str]:
    """A server that sends these parts to one client, and then waits or closes; gives its URL."""
    over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(BrokenPipeError):  # the client may be gone
            connection.recv(1 << 16)
            for part in parts:
                connection.sendall(part)
            if not ends:
                over.wait(DEADLINE_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join(DEADLINE_S)


def exchange_with(url: str, deadline_s: float | None = None) -> Exchange:
    """A request to a server, not sent yet."""
    client = http_client(url, timeout_s=DEADLINE_S)
    return Exchange(client, client.build_request("GET", "/"), deadline_s=deadline_s)


def by_deadline(url: str) -> Exchange:
    """A request that its deadline cancels."""
    return exchange_with(url, deadline_s=0.2)


def by_another_thread(url: str) -> Exchange:
    """A request that another thread cancels."""
    exchange = exchange_with(url)
    threading.Timer(0.2, exchange.cut).start()
    return exchange


def before_it_is_sent(url: str) -> Exchange:
    """A request that is cancelled before there is a connection."""
    exchange = exchange_with(url)
    exchange.cut()
    return exchange


@pytest.mark.parametrize("sent", [(), (HEAD, b"half")], ids=["no response", "half a body"])
@pytest.mark.parametrize("made", [by_deadline, by_another_thread, before_it_is_sent])
def test_a_request_can_be_cut_at_any_moment(
    made: Callable[[str], Exchange], sent: tuple[bytes, ...]
):
    """Before its response comes, and during it: the reading thread continues at once."""
    began_s = time.monotonic()
    with scripted(*sent) as url:
        exchange = made(url)
        with pytest.raises(httpx.TransportError), exchange.response() as response:
            response.read()
    assert exchange.was_cut
    assert time.monotonic() - began_s < DEADLINE_S / 2


def test_a_response_that_ends_too_soon():
    """It raises, and nothing was cancelled."""
    with scripted(HEAD, b"half", ends=True) as url:
        exchange = exchange_with(url)
        with (
            pytest.raises(httpx.RemoteProtocolError) as caught,
            exchange.response() as response,
        ):
            response.read()
    assert not exchange.was_cut
    assert os_error(caught.value) is None


def test_the_operating_systems_error():
    """What httpx raises leads to the error of the socket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    exchange = exchange_with(f"http://127.0.0.1:{port}")
    with pytest.raises(httpx.ConnectError) as caught, exchange.response():
        pass
    assert isinstance(os_error(caught.value), ConnectionRefusedError)


@pytest.mark.parametrize(
    ("url", "sent_to"),
    [
        ("http://[::1]:8000", "http://[::1]:8000/v1/models"),
        ("http://[::1]/", "http://[::1]/v1/models"),
        ("https://host/cairn/v1", "https://host/cairn/v1/models"),
    ],
)
def test_an_address_with_or_without_v1(url: str, sent_to: str):
    """Paths are below the server's root."""
    request = http_client(url, key="secret").build_request("GET", "/v1/models")
    assert sent_to == str(request.url)
    assert "Bearer secret" == request.headers["authorization"]
