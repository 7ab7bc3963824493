"""
The client: plain HTTP, a connection for each request, and a deadline over all of it.

It asks once, follows nothing, and takes what comes: that there was no answer is an answer too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from cairn_conform.client_answers import Answer, Streamed, whole

_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 16
_CHAT = "/v1/chat/completions"


class _TooMuch(Exception):
    """More came than any answer is long."""


@attrs.frozen(kw_only=True)
class Left:
    """
    A request from which the client went away.

    Attributes:
        after_s: when, counted from the beginning.
        pieces: how many pieces of a streamed answer had come.
        ended: whether there was nothing left to be cut off.
    """

    after_s: float
    pieces: int
    ended: bool


class Client:
    """
    Asks one server. Threads may share it.

    Args:
        url: ``http://HOST:PORT``, with or without ``/v1``.
        key: for ``Authorization``, where the server wants one.
        deadline_s: for each request, from the connection to the last byte.

    Attributes:
        requests: how many were made.
        tells_cached: whether an answer has told how many tokens of its prompt were reused. Some
            servers tell it only where there were any.
    """

    def __init__(self, url: str, *, key: str | None = None, deadline_s: float = 60.0) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._connector = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host = parts.hostname or ""
        # Given none, http.client takes the end of an IPv6 address for one.
        self._port = parts.port or (443 if secure else 80)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"connection": "close"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._lock = threading.Lock()
        self.deadline_s = deadline_s
        self.requests = 0
        self.tells_cached = False

    def ask(self, body: Mapping[str, Any], *, heard: list[float] | None = None) -> Answer:
        """
        A chat completion, whole or as a stream, as the body says.

        Args:
            heard: is added to as pieces of a stream come: when, on the clock of the answer.
        """
        answer = self.send(json.dumps(body).encode(), heard=heard)
        self.tells_cached = self.tells_cached or answer.cached_tokens is not None
        return answer

    def send(self, body: bytes, *, heard: list[float] | None = None) -> Answer:
        """
        A chat completion whose body goes out as it is.

        Args:
            heard: see ``ask``.
        """
        self._counted()
        began_s = time.monotonic()
        reading = _Reading([] if heard is None else heard)
        with self._connected() as connection:
            try:
                connection.open()
                reading.read(connection.posted(f"{self._root}{_CHAT}", body, self._headers))
                fault = self._late(reading) if connection.late else reading.fault
            except TimeoutError:
                # The socket has the same deadline, and may be first.
                connection.late = True
                fault = self._late(reading)
            except (OSError, http.client.HTTPException, _TooMuch) as error:
                fault = self._late(reading) if connection.late else _words(error)
        return attrs.evolve(
            reading.answer(fault),
            hung=connection.late,
            began_s=began_s,
            first_s=reading.first_s,
            ended_s=time.monotonic(),
        )

    def leave(
        self,
        body: Mapping[str, Any],
        *,
        after_s: float | None = None,
        pieces: int = 1,
        at: Callable[[str], bool] | None = None,
    ) -> Left:
        """
        Ask, and go away before the answer is complete.

        Args:
            after_s: so long after the request was sent; None for as soon as there are ``pieces`` of
                a stream.
            at: given a comment of the stream, whether to go now, before any piece.
        """
        self._counted()
        stream = Streamed()
        ended = False
        began_s = time.monotonic()
        with self._connected() as connection, contextlib.suppress(OSError):
            connection.open()
            connection.post(f"{self._root}{_CHAT}", json.dumps(body).encode(), self._headers)
            until_s = None if after_s is None else began_s + after_s
            while not ended and (until_s is not None or stream.pieces < pieces):
                data = connection.received(until_s)
                if data is None:
                    break
                # The frames of a chunked body are no events, and pass by.
                stream.feed(data)
                if at is not None and stream.comment and at(stream.comment):
                    break
                ended = not data or stream.done or not body.get("stream")
        return Left(after_s=time.monotonic() - began_s, pieces=stream.pieces, ended=ended)

    def get(self, path: str) -> Any:
        """The JSON at an address below the server's root; None where there is none."""
        content = self.content(path)
        with contextlib.suppress(ValueError, RecursionError):
            return None if content is None else json.loads(content)
        return None

    def content(self, path: str) -> bytes | None:
        """What stands at an address below the server's root; None where nothing does."""
        with (
            self._connected() as connection,
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.open()
            with connection.got(f"{self._root}{path}", self._headers) as response:
                content = response.read(_BYTES_MAX)
                return content if response.status == 200 else None
        return None

    def _counted(self) -> None:
        with self._lock:
            self.requests += 1

    @contextlib.contextmanager
    def _connected(self) -> Iterator[_Connection]:
        connection = _Connection(
            self._connector(self._host, self._port, timeout=self.deadline_s), self.deadline_s
        )
        try:
            yield connection
        finally:
            connection.close()

    def _late(self, reading: _Reading) -> str:
        what = "no end of the answer" if reading.status else "no answer"
        return f"{what} within {self.deadline_s:g} s"


class _Connection:
    """A connection that is cut when its deadline is over."""

    def __init__(self, connection: http.client.HTTPConnection, deadline_s: float) -> None:
        self._connection = connection
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(deadline_s, self._cut)
        self._timer.daemon = True
        self.late = False

    def open(self) -> None:
        """Connect, and start the clock."""
        self._timer.start()
        self._connection.connect()
        # http.client lets go of its own once a response says that it ends with the connection.
        self._socket = self._connection.sock

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a request."""
        headers = {**headers, "content-type": "application/json"}
        # A server may answer, and close, before it has read all of a body.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.request("POST", path, body, headers)

    def posted(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Send a request; the beginning of its response."""
        self.post(path, body, headers)
        return self._connection.getresponse()

    def got(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """The beginning of the response to a GET."""
        self._connection.request("GET", path, headers=dict(headers))
        return self._connection.getresponse()

    def received(self, until_s: float | None) -> bytes | None:
        """
        The next bytes as they come over the wire; none at the end; None where it is time to go.
        """
        assert self._socket is not None
        if until_s is not None:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                return None
        return self._socket.recv(_READ_BYTES)

    def close(self) -> None:
        """Close it, whatever is on its way."""
        self._timer.cancel()
        self._shut()
        self._connection.close()
        if self._socket is not None:
            self._socket.close()

    def _cut(self) -> None:
        self.late = True
        self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _Reading:
    """
    A response as it is read.

    Attributes:
        status: 0 as long as nothing came.
        heard_s: when pieces of a streamed answer's text came; those that came together count once.
        fault: why it is not complete; empty where it is.
    """

    def __init__(self, heard_s: list[float]) -> None:
        self._content = bytearray()
        self._stream: Streamed | None = None
        self.status = 0
        self.heard_s = heard_s
        self.fault = ""

    @property
    def first_s(self) -> float | None:
        """When the first of them came."""
        return self.heard_s[0] if self.heard_s else None

    def read(self, response: http.client.HTTPResponse) -> None:
        """
        Read it to its end.

        Raises:
            _TooMuch: it has none.
        """
        self.status = response.status
        kind = response.getheader("content-type") or ""
        if response.status == 200 and "event-stream" in kind:
            self._stream = Streamed()
        declared = response.length
        read = 0
        while declared is None or read < declared:
            data = response.read1(_READ_BYTES)
            if not data:
                break
            read += len(data)
            if read > _BYTES_MAX:
                raise _TooMuch
            self._take(data)
        if declared is not None and read < declared:
            self.fault = f"the answer was cut off after {read} of {declared} bytes"

    def answer(self, fault: str) -> Answer:
        """What it comes to."""
        if self._stream is not None:
            return self._stream.answer(fault)
        if fault:
            return Answer(status=self.status, fault=fault)
        return whole(self.status, bytes(self._content))

    def _take(self, data: bytes) -> None:
        if self._stream is None:
            self._content += data
            return
        before = self._stream.pieces
        self._stream.feed(data)
        if self._stream.pieces > before:
            self.heard_s.append(time.monotonic())


def _words(error: Exception) -> str:
    match error:
        case _TooMuch():
            return f"an answer of more than {_BYTES_MAX >> 20} MiB"
        case ConnectionRefusedError():
            return "the connection was refused"
        case http.client.RemoteDisconnected() | ConnectionResetError():
            return "the connection was closed without an answer"
        case http.client.IncompleteRead():
            return "the answer was cut off"
        case OSError():
            return f"the connection broke: {error.strerror or error}"
        case _:
            return f"no HTTP: {type(error).__name__} {error}".strip()
