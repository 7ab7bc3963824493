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

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart_trio import QuartTrio

#: Longer than clients keep an idle connection, so that it is they who close it and no request
#: meets a connection that is closing.
KEEP_ALIVE_S = 75.0

_log = logging.getLogger("cairn.http.hypercorn")


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
