"""
Hypercorn on trio, set up for long streams.

The socket is bound before anything else is done, so that a port in use is known before a model is
loaded, and port 0 has a number by the time that somebody asks for it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial

import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.trio import run as hypercorn_run
from hypercorn.trio import serve
from hypercorn.trio.tcp_server import TCPServer
from quart_trio import QuartTrio

#: Longer than clients keep an idle connection, so that it is they who close it and no request
#: meets a connection that is closing.
KEEP_ALIVE_S = 75.0

_log = logging.getLogger("cairn.http.hypercorn")

log = structlog.get_logger(__name__)


class Connection(TCPServer):
    """
    A client's connection. Whatever comes over it, it ends alone, and as soon as its client has
    closed it.
    """

    async def run(self) -> None:
        """
        Serve the connection to its end.

        What is no HTTP at all may fail anywhere in Hypercorn (one octet in an HTTP/2 path does),
        and its nursery would end the server with it.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cut)
                await super().run()
                nursery.cancel_scope.cancel()
        except* Exception as failed:
            log.warning("connection failed", error=repr(_first(failed)))

    async def protocol_send(self, event: Event) -> None:
        """
        Send, where nobody closes the connection at this moment.
        """
        try:
            await super().protocol_send(event)
        except trio.BusyResourceError:  # the other end has gone, and `_close` says goodbye
            await self.protocol.handle(Closed())

    async def _cut(self) -> None:
        # Hypercorn shields what it sends: one client that reads nothing more would keep a server
        # that stops from ever ending.
        try:
            await trio.sleep_forever()
        finally:
            getattr(self.stream, "transport_stream", self.stream).socket.close()

    async def _read_data(self) -> None:
        # Hypercorn would hold the socket until the time of an idle connection is over: who connects
        # anew for each request would soon have used up the process's descriptors.
        await super()._read_data()
        await self.idle_task.stop()


# The one place from which `serve` takes the class of its connections.
hypercorn_run.TCPServer = Connection  # type: ignore[attr-defined]


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
    """
    The address at which a bound socket is reached from this machine.
    """
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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


def _first(failed: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
