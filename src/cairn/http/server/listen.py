"""
Hypercorn on trio, set up for long streams.

The socket is bound before anything else is done, so that a port in use is known before a model is
loaded, and port 0 has a number by the time that somebody asks for it.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio import run as hypercorn_run
from hypercorn.trio import serve
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import EventWrapper
from quart_trio import QuartTrio

from cairn.http.wire.errors import cause_of

#: Longer than clients keep an idle connection, so that it is they who close it and no request
#: meets a connection that is closing.
KEEP_ALIVE_S = 75.0

#: So much is read ahead of a client that sends on while its request runs. Beyond it the client is
#: left waiting, and its close is seen when something is sent to it.
AHEAD_BYTES_MAX = 2**16

_log = logging.getLogger("cairn.http.hypercorn")

log = structlog.get_logger(__name__)


class ClientGone(Exception):
    """The client closed the connection while its request ran."""


class ClientStream:
    """
    A client's stream, which can be read ahead: a close lies behind whatever else was sent.

    Attributes:
        gone: set where nothing more will come, or nothing can be sent any more.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self.gone = trio.Event()
        self._stream = stream
        self._ahead = bytearray()

    async def send_all(self, data: bytes) -> None:
        """Send."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone.set()
            raise

    async def receive_some(self, bytes_max: int) -> bytes:
        """What comes next; first what was read ahead."""
        if not self._ahead:
            return await self._stream.receive_some(bytes_max)
        await trio.lowlevel.checkpoint()
        data = bytes(self._ahead[:bytes_max])
        del self._ahead[:bytes_max]
        return data

    async def wait_gone(self) -> None:
        """Read ahead until the client has gone."""
        try:
            while (room := AHEAD_BYTES_MAX - len(self._ahead)) > 0:
                data = await self._stream.receive_some(room)
                if not data:
                    self.gone.set()
                    break
                self._ahead += data
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone.set()
        await self.gone.wait()

    async def send_eof(self) -> None:
        """Say that nothing more will be sent."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close."""
        self.gone.set()
        await self._stream.aclose()


class Turn(EventWrapper):
    """
    Set where a client's next request may be read. Who waits for it learns of a client that goes.
    """

    def __init__(self, stream: ClientStream) -> None:
        super().__init__()
        self._stream = stream

    async def wait(self) -> None:
        """
        Wait until it is set.

        Raises:
            ClientGone: the client went first. ``Connection`` handles it.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_gone, nursery.cancel_scope)
            await super().wait()
            nursery.cancel_scope.cancel()
        if not self.is_set():
            raise ClientGone

    async def _end_when_gone(self, waiting: trio.CancelScope) -> None:
        await self._stream.wait_gone()
        waiting.cancel()


class Connection(TCPServer):
    """
    A client's connection. Whatever comes over it, it ends alone, and as soon as its client has
    closed it.
    """

    stream: Any  # Hypercorn has it as TLS's, and serves a plain one as well

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stream = ClientStream(self.stream)
        self._all = trio.CancelScope()  # of `run`

    async def run(self) -> None:
        """
        Serve the connection to its end.

        What is no HTTP at all may fail anywhere in Hypercorn (one octet in an HTTP/2 path does),
        and its nursery would end the server with it.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._all = nursery.cancel_scope
                nursery.start_soon(self._cut)
                await super().run()
                nursery.cancel_scope.cancel()
        except* Exception as failed:
            log.warning("connection failed", error=repr(cause_of(failed)))

    async def protocol_send(self, event: Event) -> None:
        """Send, where nobody closes the connection at this moment."""
        try:
            await super().protocol_send(event)
        except trio.BusyResourceError:  # the other end has gone, and `_close` says goodbye
            self.stream.gone.set()
            await self.protocol.handle(Closed())

    async def _cut(self) -> None:
        # Hypercorn shields what it sends: one client that reads nothing more would keep a server
        # that stops from ever ending.
        try:
            await trio.sleep_forever()
        finally:
            self.stream.socket.close()

    async def _read_data(self) -> None:
        # Bytes behind a request (the next one, a stray line), or a wish to change the protocol
        # (Java's client has it in every request), make Hypercorn read nothing until the request is
        # answered. It would not see the client go, and wait for ever where the answer then fails.
        if isinstance(self.protocol.protocol, H11Protocol):
            self.protocol.protocol.can_read = Turn(self.stream)
        try:
            await super()._read_data()
        except ClientGone:
            await self.protocol.handle(Closed())
        # Hypercorn would wait until the time of an idle connection is over, and without end for the
        # last piece of an answer over HTTP/2: who connects anew for each request would soon have
        # used up the process's descriptors.
        self._all.cancel()


# The one place from which `serve` takes the class of its connections.
assert hypercorn_run.TCPServer is TCPServer, (  # type: ignore[attr-defined]
    "Hypercorn makes its connections elsewhere than this code was written for; see its trio/run.py."
)
hypercorn_run.TCPServer = Connection  # type: ignore[assignment, attr-defined]


def bind_socket(host: str, port: int) -> socket.socket:
    """
    A socket bound to the address, not listening yet: until the server is ready, a connection is
    refused.

    Args:
        port: 0 for any free one.

    Raises:
        OSError: the address is in use or is none of this machine's.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # `localhost` has two addresses, and the older one is where clients look.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """The address at which a bound socket is reached from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether a bound socket is reached from this machine alone."""
    named: str = listener.getsockname()[0]
    address = ipaddress.ip_address(named.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


async def serve_http(
    app: QuartTrio,
    listener: socket.socket,
    *,
    shutdown: trio.Event,
    on_ready: Callable[[str], None],
    grace_s: float = 40.0,
) -> None:
    """
    Serve until ``shutdown`` is set and the open streams have ended.

    Args:
        listener: from ``bind_socket``; it is used up.
        on_ready: called with the server's address once requests are answered.
        grace_s: how long streams may run on after ``shutdown``; then they are cut. Longer than the
            service's own limit, so that its last word to each client is still sent.
    """
    url = url_of(listener)
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(serve, app, _config(listener, grace_s), shutdown_trigger=shutdown.wait)
        )
        on_ready(url)


def _config(listener: socket.socket, grace_s: float) -> Config:
    config = Config()
    # Hypercorn makes a socket object of its own: two that own one descriptor would close it twice.
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = 1024
    config.graceful_timeout = grace_s
    config.keep_alive_timeout = KEEP_ALIVE_S
    # On HTTP/2 a connection that has had its number of requests takes its running streams down.
    config.keep_alive_max_requests = 2**62
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.accesslog = None
    # What it has to say in normal times ("Running on ...") is said by `ops serve`.
    _log.setLevel(logging.WARNING)
    config.errorlog = _log
    return config
