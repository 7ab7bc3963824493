"""
Hypercorn on trio, set up for long streams.

The socket listens before anything else is done, so that a port in use is noticed before a model is
loaded, and port 0 has its number early.

This module, ``protocol.py`` and ``connection.py`` depend on private parts of Hypercorn, Quart and
quart-trio, because these do not report a client's disconnect reliably, and let one broken
connection end the server. Serving h11 directly would remove that dependency, but would lose the
rest of Hypercorn.
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
from hypercorn.events import Closed, Event, Updated
from hypercorn.trio import run as hypercorn_run
from hypercorn.trio import serve
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import EventWrapper
from quart_trio import QuartTrio

from cairn.engine.machine.descriptors import descriptors_max
from cairn.http.server.protocol import Http1, RequestRefused
from cairn.http.server.waiting import Waiting, WaitingLimits
from cairn.http.wire.errors import cause_of

#: Longer than clients keep an idle connection, so that the client closes it and no request is sent
#: on a connection that the server is closing.
KEEP_ALIVE_S = 75.0

#: How much is read ahead from a client that keeps sending while its request runs. After that the
#: client has to wait, and its disconnect is noticed only when something is sent to it.
BUFFERED_BYTES_MAX = 2**16

#: How many connections may wait to be accepted.
_BACKLOG = 1024

_log = logging.getLogger("cairn.http.hypercorn")

log = structlog.get_logger(__name__)


class ClientGone(Exception):
    """The client closed the connection while its request ran."""


class ClientStream:
    """
    A client's stream that can be read ahead, because a disconnect comes after all other data.

    Attributes:
        gone: set when no more data will come, or none can be sent.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self.gone = trio.Event()
        self._stream = stream
        self._buffered = bytearray()

    async def send_all(self, data: bytes) -> None:
        """Send."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone.set()
            raise

    async def receive_some(self, bytes_max: int) -> bytes:
        """The next data; first what was read ahead."""
        if not self._buffered:
            return await self._stream.receive_some(bytes_max)
        await trio.lowlevel.checkpoint()
        data = bytes(self._buffered[:bytes_max])
        del self._buffered[:bytes_max]
        return data

    async def wait_gone(self) -> None:
        """Read ahead until the client has gone."""
        try:
            while (room := BUFFERED_BYTES_MAX - len(self._buffered)) > 0:
                data = await self._stream.receive_some(room)
                if not data:
                    self.gone.set()
                    break
                self._buffered += data
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone.set()
        await self.gone.wait()

    async def send_eof(self) -> None:
        """Signal the end of the data."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close."""
        self.gone.set()
        await self._stream.aclose()


class Turn(EventWrapper):
    """Set when a client's next request may be read. A disconnect ends the waiting for it."""

    def __init__(self, stream: ClientStream) -> None:
        super().__init__()
        self._stream = stream

    async def wait(self) -> None:
        """
        Wait until it is set.

        Raises:
            ClientGone: the client disconnected first. ``Connection`` handles it.
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


class ServerConfig(Config):
    """Hypercorn's configuration, and what the connections of one server share."""

    waiting: Waiting


class Connection(TCPServer):
    """
    A client's connection. Invalid data ends only this connection, and it ends as soon as the client
    closes it.
    """

    config: ServerConfig
    stream: Any  # Hypercorn declares a TLS stream, but serves a plain one as well

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stream = ClientStream(self.stream)
        self._all = trio.CancelScope()  # of `run`
        self._address = ""

    async def run(self) -> None:
        """
        Serve the connection until it ends.

        Data that is not HTTP may raise anywhere in Hypercorn, and its nursery would then end the
        server.
        """
        waiting = self.config.waiting
        try:
            async with trio.open_nursery() as nursery:
                self._all = nursery.cancel_scope
                self._address = _address_of(self.stream.socket)
                waiting.arrive(self, self._address)
                nursery.start_soon(self._close_when_cut)
                nursery.start_soon(self._cut_when_silent)
                await super().run()
                nursery.cancel_scope.cancel()
        except* Exception as failed:
            log.warning("connection failed", error=repr(cause_of(failed)))
        finally:
            waiting.leave(self)

    def cut(self) -> None:
        """Close the connection at once."""
        self._all.cancel()

    async def protocol_send(self, event: Event) -> None:
        """Send, unless the connection is being closed at this moment."""
        if isinstance(event, Updated):
            waiting = self.config.waiting
            (waiting.rest if event.idle else waiting.begin)(self, self._address)
        try:
            await super().protocol_send(event)
        except trio.BusyResourceError:  # the client has disconnected, and `_close` is sending
            self.stream.gone.set()
            await self.protocol.handle(Closed())

    async def _cut_when_silent(self) -> None:
        waiting = self.config.waiting
        await trio.sleep(waiting.limits.silent_s)
        if waiting.is_silent(self):
            self.cut()

    async def _close_when_cut(self) -> None:
        # Hypercorn shields its sends: one client that stops reading would keep a stopping server
        # from ever ending.
        try:
            await trio.sleep_forever()
        finally:
            self.stream.socket.close()

    async def _read_data(self) -> None:
        # Bytes after a request (the next one, a stray line), or an upgrade header (Java's client
        # sends one with every request), make Hypercorn stop reading until the request is answered.
        # It would miss a disconnect, and wait forever if the answer then fails.
        assert isinstance(self.protocol.protocol, Http1)
        self.protocol.protocol.can_read = Turn(self.stream)
        self.protocol.protocol.tell_when_read(partial(self.config.waiting.leave, self))
        try:
            await super()._read_data()
        except (ClientGone, RequestRefused):
            await self.protocol.handle(Closed())
        # Hypercorn would wait for the idle timeout: a client that reconnects for each request would
        # use up all descriptors.
        self.cut()


# The one place from which `serve` takes the class of its connections.
assert hypercorn_run.TCPServer is TCPServer, (  # type: ignore[attr-defined]
    "This version of Hypercorn creates its connections in another place; see its trio/run.py."
)
hypercorn_run.TCPServer = Connection  # type: ignore[assignment, attr-defined]


def _address_of(client: trio.socket.SocketType) -> str:
    """The address of a client, without its port; empty if it has gone."""
    try:
        return str(client.getpeername()[0])
    except OSError:
        return ""


def bind_socket(host: str, port: int) -> socket.socket:
    """
    A socket that listens at the address. Connections wait until ``serve_http`` accepts them.

    Args:
        port: 0 for any free one.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # `localhost` has two addresses, and clients try IPv4 first.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # With SO_REUSEADDR, two servers can bind one port as long as neither of them listens.
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL at which a bound socket is reached from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether a bound socket can be reached from this machine only."""
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
    on_stop: Callable[[], None],
    grace_s: float = 40.0,
    limits: WaitingLimits | None = None,
) -> None:
    """
    Serve until ``shutdown`` is set and the open streams have ended.

    Args:
        listener: from ``bind_socket``; it cannot be used again.
        on_ready: called with the server's URL once it answers requests.
        on_stop: called when ``shutdown`` is set; has to end the streams that have no end.
        grace_s: how long streams may continue after ``shutdown`` before they are cut. Longer than
            the service's own limit, so that its last message to each client is still sent.
        limits: of connections that wait; by default those that fit this process's descriptors.
    """
    url = url_of(listener)
    config = _config(listener, grace_s, limits or WaitingLimits.of(descriptors_max()))

    async def stop() -> None:
        await shutdown.wait()
        on_stop()

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, app, config, shutdown_trigger=stop))
        on_ready(url)


def _config(listener: socket.socket, grace_s: float, limits: WaitingLimits) -> Config:
    config = ServerConfig()
    config.waiting = Waiting(limits)
    # Hypercorn creates its own socket object; two objects would close the descriptor twice.
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = _BACKLOG
    config.graceful_timeout = grace_s
    config.keep_alive_timeout = KEEP_ALIVE_S
    # A client may use one connection for as many requests as it likes.
    config.keep_alive_max_requests = 2**62
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.accesslog = None
    # `ops serve` prints its own startup message.
    _log.setLevel(logging.WARNING)
    config.errorlog = _log
    return config
