"""
The HTTP client of the commands, and the reader of server-sent events. Each request has its own
connection, which another thread, a deadline or a signal handler can cut.

No proxies, no redirects, no retries.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import httpx

DONE = b"[DONE]"
"""The data of the event that ends a stream."""


def http_client(
    url: str, *, key: str | None = None, timeout_s: float | None = None
) -> httpx.Client:
    """
    A client of one server. Threads may share it.

    Args:
        url: ``http://HOST:PORT``; a trailing ``/v1`` is removed.
        key: the API key, if the server requires one.
        timeout_s: for connecting and for each read and write; None for no limit.
    """
    return httpx.Client(**options(url, key=key, timeout_s=timeout_s))


def options(url: str, *, key: str | None = None, timeout_s: float | None = None) -> dict[str, Any]:
    """The arguments of ``http_client``, for an ``httpx.AsyncClient`` as well."""
    headers = {"accept-encoding": "identity", "connection": "close"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return {
        "base_url": url.rstrip("/").removesuffix("/v1"),
        "headers": headers,
        "timeout": timeout_s,
        "trust_env": False,
        # Loading the certificates takes 0.2 s.
        "verify": url.startswith("https:"),
    }


class Exchange:
    """
    A request and its response, which can be cut at any moment, even before the response.

    Args:
        deadline_s: when it is cut, counted from ``response``; None for never.

    Attributes:
        was_cut: by ``cut`` or by the deadline. What is read after that ends, or raises.
    """

    def __init__(
        self, client: httpx.Client, request: httpx.Request, *, deadline_s: float | None = None
    ) -> None:
        self._client = client
        self._request = request
        self._deadline_s = deadline_s
        self._socket: socket.socket | None = None
        self.was_cut = False
        request.extensions = {**request.extensions, "trace": self._trace}

    @contextlib.contextmanager
    def response(self) -> Iterator[httpx.Response]:
        """
        Send the request. Yields the response before its body is read.

        Raises:
            httpx.HTTPError: there is no response, or it is incomplete.
        """
        timer = None
        if self._deadline_s is not None:
            timer = threading.Timer(self._deadline_s, self.cut)
            timer.daemon = True
            timer.start()
        try:
            response = self._client.send(self._request, stream=True)
            with contextlib.closing(response):
                yield response
        finally:
            if timer is not None:
                timer.cancel()

    def cut(self) -> None:
        """Shut the connection down. A thread that reads from it sees its end at once."""
        self.was_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _trace(self, name: str, info: Mapping[str, Any]) -> None:
        if name in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.was_cut:
                self.cut()


@attrs.frozen
class Event:
    """
    A line of an event stream.

    Attributes:
        data: of an event; None for a comment.
        comment: a keep-alive of the server; empty for an event.
    """

    data: bytes | None = None
    comment: str = ""


class EventReader:
    """
    Splits an event stream into events as its bytes arrive.

    The data of an event must be one line, as in all servers of these protocols; other fields are
    ignored.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events and comments that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.strip(b"\r").partition(b":")
            if not name and value:
                yield Event(comment=value.strip().decode(errors="replace"))
            elif name == b"data":
                yield Event(data=value.strip())


def os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error that an error of httpx was raised from, if any."""
    while error is not None and not isinstance(error, OSError):
        # httpcore's pool raises `from None`, which keeps the context.
        error = error.__cause__ or error.__context__
    return error
