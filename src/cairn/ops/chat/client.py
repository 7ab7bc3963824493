"""The client of ``cairn chat``: checks a server's health, and streams answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import msgspec

from cairn.ops.chat.replies import Chunk, Error, Health, KeyRequired, StartingUp
from cairn.ops.chat.transcript import refusal
from cairn.ops.cli import Unreadable
from cairn.ops.common.http_client import DONE, EventReader, Exchange, http_client, os_error
from cairn.ops.common.output import printable, start_words
from cairn.ops.serve.api_keys import KEY_VARIABLE

_CONNECT_S = 5.0

_chunks = msgspec.json.Decoder(Chunk)
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError)


class TurnFailed(Exception):
    """
    There is no answer, by the server's or the world's fault. The message says why.

    Attributes:
        code: of the server's error, if it has one.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class ServerGone(TurnFailed):
    """The server does not answer, or the answer is incomplete."""


class StillStarting(Unreadable):
    """
    The server is starting.

    Attributes:
        step: what it does now, and how far it is.
    """

    def __init__(self, url: str, step: str) -> None:
        super().__init__(f"The server at {url} is starting ({step}). Try again in a moment.")
        self.step = step


class NotCairn(Exception):
    """The server is not Cairn. The message says what it answered."""


def read_url(url: str) -> str:
    """
    The address of a server. A missing scheme is added, and a trailing ``/v1`` removed.

    Raises:
        click.BadParameter: it is invalid.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        _ = parts.port  # raises if it is not a number
        (parts.hostname or "").encode("idna")  # raises for names that cannot be connected to
        parts.path.encode("ascii")
    except ValueError as error:
        raise click.BadParameter(f"{url!r} is not a URL: {error}.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{url!r} is not a URL; expected one like http://127.0.0.1:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def look(url: str, key: str | None = None) -> Health | None:
    """
    The health of a server; None if nothing answers.

    Args:
        key: the user's API key.

    Raises:
        NotCairn: the server is not Cairn.
        StillStarting: the server is starting.
        Unreadable: it requires an API key, or does not know this one.
    """
    try:
        with http_client(url, key=key, timeout_s=_CONNECT_S) as client:
            response = client.get("/health")
            status, body = response.status_code, response.content
    except httpx.ProtocolError as error:
        raise NotCairn(f"it does not speak HTTP: {printable(str(error))}") from error
    except httpx.HTTPError:
        return None
    with contextlib.suppress(*BAD_JSON):
        return msgspec.json.decode(body, type=Health)
    with contextlib.suppress(*BAD_JSON):
        start = msgspec.json.decode(body, type=StartingUp)
        raise StillStarting(url, start_words(start.step, start.done, start.total))
    with contextlib.suppress(*BAD_JSON):
        msgspec.json.decode(body, type=KeyRequired)
        known = "requires an API key" if key is None else "does not know this API key"
        raise Unreadable(
            f"The server at {url} {known}. Ask its operator for one, and set it in "
            f"${KEY_VARIABLE} or with --api-key."
        )
    refused = error_in(body)
    message = f", {printable(refused.message)}" if refused is not None else ""
    raise NotCairn(f"GET /health returns {status}{message}")


class Stream:
    """
    A request for an answer, and its events. Can be iterated once.

    Args:
        path: where the request is sent to.
        options: the options with which a command of `ops` finds this server, beginning with a
            space.
        key: the user's API key.

    Attributes:
        stopped: whether ``stop`` was called.
    """

    def __init__(
        self, url: str, path: str, body: dict[str, Any], options: str = "", key: str | None = None
    ) -> None:
        self._url = url
        self._options = options
        self._client = http_client(url, key=key)
        request = self._client.build_request(
            "POST",
            path,
            json=body,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
        )
        self._exchange = Exchange(self._client, request)

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._exchange.was_cut

    def stop(self) -> None:
        """
        End the stream at once. A signal handler may call this.

        The server cancels a request when its connection is closed.
        """
        self._exchange.cut()

    def __iter__(self) -> Iterator[Chunk | str]:
        """
        The events as they arrive. A keep-alive comment is given as text.

        Raises:
            TurnFailed: there is no answer, or it is incomplete.
        """
        if self.stopped:
            return
        try:
            with self._client, self._exchange.response() as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise self._refused(response)
                yield from self._events(response)
        except httpx.HTTPError as error:
            if not self.stopped:
                raise ServerGone(gone_words(self._url, error)) from error

    def _events(self, response: httpx.Response) -> Iterator[Chunk | str]:
        reader = EventReader()
        for data in response.iter_raw():
            for event in reader.feed(data):
                if self.stopped or event.data == DONE:
                    return
                yield event.comment if event.data is None else self._chunk(event.data)
        if not self.stopped:
            raise ServerGone(
                f"The answer is incomplete: {self._url} closed the connection. Check whether the "
                "server is still running."
            )

    def _chunk(self, value: bytes) -> Chunk:
        try:
            chunk = _chunks.decode(value)
        except BAD_JSON as error:
            raise TurnFailed(
                f"{self._url} sent an invalid answer: {printable(str(error))}. Check whether the "
                "server at this address is Cairn."
            ) from error
        if chunk.error is not None:
            raise TurnFailed(refusal(chunk.error, None, None, self._options))
        return chunk

    def _refused(self, response: httpx.Response) -> TurnFailed:
        error = error_in(response.content) or Error(message=response.reason_phrase)
        retry_after = response.headers.get("retry-after")
        words = refusal(error, response.status_code, retry_after, self._options)
        return TurnFailed(words, error.code)


def error_in(body: bytes) -> Error | None:
    """The error in the body of a response; None if there is none."""
    try:
        return msgspec.json.decode(body, type=dict[str, Error])["error"]
    except (*BAD_JSON, KeyError):
        return None


def gone_words(url: str, error: httpx.HTTPError) -> str:
    """Why a server did not answer, and what to do."""
    cause = os_error(error)
    if isinstance(cause, ConnectionRefusedError):
        return f"Nothing answers at {url} any more. Start the server again."
    what = (cause.strerror if cause is not None else None) or str(error) or type(error).__name__
    return (
        f"The connection to {url} broke: {printable(what)}. Check whether the server is still "
        "running."
    )
