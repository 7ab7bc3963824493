"""
The client: each request has its own connection, with a deadline over all of it.

A request is sent once and no redirect is followed. A missing response is a result too.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import httpx

from cairn.ops.common.http_client import Exchange, http_client, os_error
from cairn_conform.client_answers import Answer, Streamed, whole

_BYTES_MAX = 64 << 20
_CHAT = "/v1/chat/completions"


class _TooMuch(Exception):
    """The response is longer than any answer."""


@attrs.frozen(kw_only=True)
class Left:
    """
    A request that the client disconnected from.

    Attributes:
        after_s: when, counted from the beginning of the request.
        pieces: how many pieces of a streamed answer had come.
        ended: whether the answer was already complete.
    """

    after_s: float
    pieces: int
    ended: bool


class Client:
    """
    Sends requests to one server. Threads may share it.

    Args:
        url: ``http://HOST:PORT``, with or without ``/v1``.
        key: the API key, if the server requires one.
        deadline_s: for each request, from the connection to the last byte.

    Attributes:
        requests: how many were sent.
        reports_cached: whether any answer has reported how many tokens of its prompt were reused.
            Some servers report it only if there were any.
    """

    def __init__(self, url: str, *, key: str | None = None, deadline_s: float = 60.0) -> None:
        self._http = http_client(url, key=key, timeout_s=deadline_s)
        self._lock = threading.Lock()
        self.deadline_s = deadline_s
        self.requests = 0
        self.reports_cached = False

    def ask(self, body: Mapping[str, Any], *, heard: list[float] | None = None) -> Answer:
        """
        A chat completion, streamed or not, as the body says.

        Args:
            heard: modified: gets the time of each piece of a stream, on the clock of the answer.
        """
        answer = self.send(json.dumps(body).encode(), heard=heard)
        self.reports_cached = self.reports_cached or answer.cached_tokens is not None
        return answer

    def send(self, body: bytes, *, heard: list[float] | None = None) -> Answer:
        """
        A chat completion whose body is sent as it is.

        Args:
            heard: see ``ask``.
        """
        exchange = self._chat(body)
        reading = _Reading([] if heard is None else heard)
        fault, hung = "", False
        began_s = time.monotonic()
        try:
            with exchange.response() as response:
                reading.read(response)
        except httpx.TimeoutException:  # the socket's timeout equals the deadline
            hung = True
        except (httpx.HTTPError, _TooMuch) as error:
            fault = reading.fault(error)
        if hung := hung or exchange.was_cut:
            what = "no complete answer" if reading.status else "no answer"
            fault = f"{what} within {self.deadline_s:g} s"
        return attrs.evolve(
            reading.answer(fault),
            hung=hung,
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
        Send a request, and disconnect before the answer is complete.

        Args:
            after_s: disconnect this long after sending; None: after ``pieces`` of a stream.
            at: given a comment of the stream, whether to disconnect now, before any piece.
        """
        exchange = self._chat(json.dumps(body).encode(), deadline_s=after_s)
        stream = Streamed()
        ended = False
        began_s = time.monotonic()
        try:
            with exchange.response() as response:
                for data in response.iter_raw():
                    stream.feed(data)
                    if at is not None and stream.comment and at(stream.comment):
                        break
                    if ended := stream.done or not body.get("stream"):
                        break
                    if after_s is None and stream.pieces >= pieces:
                        break
                else:
                    ended = not exchange.was_cut
                exchange.cut()
        except httpx.RemoteProtocolError:
            ended = not exchange.was_cut
        except httpx.HTTPError:
            pass
        return Left(after_s=time.monotonic() - began_s, pieces=stream.pieces, ended=ended)

    def get(self, path: str) -> Any:
        """The JSON at a path below the server's root; None if there is none."""
        content = self.content(path)
        with contextlib.suppress(ValueError, RecursionError):
            return None if content is None else json.loads(content)
        return None

    def content(self, path: str) -> bytes | None:
        """The body at a path below the server's root; None if the status is not 200."""
        exchange = Exchange(
            self._http, self._http.build_request("GET", path), deadline_s=self.deadline_s
        )
        with contextlib.suppress(httpx.HTTPError), exchange.response() as response:
            content = b"".join(response.iter_raw())
            return content if response.status_code == httpx.codes.OK else None
        return None

    def _chat(self, body: bytes, deadline_s: float | None = None) -> Exchange:
        with self._lock:
            self.requests += 1
        request = self._http.build_request(
            "POST", _CHAT, content=body, headers={"content-type": "application/json"}
        )
        deadlines_s = [self.deadline_s] if deadline_s is None else [self.deadline_s, deadline_s]
        return Exchange(self._http, request, deadline_s=min(deadlines_s))


class _Reading:
    """
    A response while it is read.

    Attributes:
        status: 0 until there is one.
        heard_s: when pieces of a streamed answer's text came; those that came together count once.
    """

    def __init__(self, heard_s: list[float]) -> None:
        self._content = bytearray()
        self._stream: Streamed | None = None
        self._read_bytes = 0
        self._declared = ""
        self.status = 0
        self.heard_s = heard_s

    @property
    def first_s(self) -> float | None:
        """When the first of them came."""
        return self.heard_s[0] if self.heard_s else None

    def read(self, response: httpx.Response) -> None:
        """
        Read it to its end.

        Raises:
            _TooMuch: it is longer than any answer.
            httpx.HTTPError: it is not complete.
        """
        self.status = response.status_code
        self._declared = response.headers.get("content-length", "")
        if self.status == httpx.codes.OK and "event-stream" in response.headers.get(
            "content-type", ""
        ):
            self._stream = Streamed()
        for data in response.iter_raw():
            self._read_bytes += len(data)
            if self._read_bytes > _BYTES_MAX:
                raise _TooMuch
            if self._stream is None:
                self._content += data
                continue
            before = self._stream.pieces
            self._stream.feed(data)
            if self._stream.pieces > before:
                self.heard_s.append(time.monotonic())

    def answer(self, fault: str) -> Answer:
        """The answer that was read so far."""
        if self._stream is not None:
            return self._stream.answer(fault)
        if fault:
            return Answer(status=self.status, fault=fault)
        return whole(self.status, bytes(self._content))

    def fault(self, error: Exception) -> str:
        """Why there is no complete answer, in words."""
        cause = os_error(error)
        if isinstance(error, _TooMuch):
            return f"an answer of more than {_BYTES_MAX >> 20} MiB"
        if isinstance(cause, ConnectionRefusedError):
            return "the connection was refused"
        ended = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
        if self.status and ended:
            count = f" after {self._read_bytes} of {self._declared} bytes" if self._declared else ""
            return f"the answer was cut off{count}"
        if isinstance(cause, ConnectionResetError) or "disconnected without" in str(error):
            return "the connection was closed without an answer"
        if cause is not None:
            return f"the connection broke: {cause.strerror or cause}"
        return f"not HTTP: {error}"
