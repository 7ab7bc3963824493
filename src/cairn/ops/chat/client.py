"""The client of ``ops chat``: reads a server's health, and streams answers that can be stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
import msgspec

from cairn.ops.chat.transcript import Chunk, Error, Health, KeyRequired, refusal
from cairn.ops.cli import Unreadable
from cairn.ops.common.http_client import DONE, EventReader, Exchange, http_client, os_error
from cairn.ops.common.output import printable
from cairn.ops.serve.api_keys import KEY_VARIABLE

_CONNECT_S = 5.0

_chunks = msgspec.json.Decoder(Chunk)
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError)


class TurnFailed(Exception):
    """The server's or the world's: there is no answer. In a sentence or two, for people."""


class ServerGone(TurnFailed):
    """Nobody answers, or not to the end."""


class NotCairn(Exception):
    """
    Something answers, and it is no server of Cairn's that serves us. The message says what it is.
    """


def read_url(url: str) -> str:
    """
    The address of a server. Typed without a scheme, or with ``/v1`` as other clients want it, it
    will do as well.

    Raises:
        click.BadParameter: it is none.
    """
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        _ = parts.port  # raises where it is no number
        (parts.hostname or "").encode("idna")  # and what no connection could be made to
        parts.path.encode("ascii")
    except ValueError as error:
        raise click.BadParameter(f"{url!r} is not a URL: {error}.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{url!r} is not a URL; expected one like http://127.0.0.1:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def look(url: str, key: str | None = None) -> Health | None:
    """
    What a server of Cairn's says of itself; None where nobody answers.

    Args:
        key: the user's API key.

    Raises:
        NotCairn: something else answers.
        Unreadable: the server wants an API key, or another one.
    """
    try:
        with http_client(url, key=key, timeout_s=_CONNECT_S) as client:
            response = client.get("/health")
            status, body = response.status_code, response.content
    except httpx.ProtocolError as error:
        raise NotCairn(f"it does not speak HTTP: {printable(str(error))}") from error
    except httpx.HTTPError:
        return None
    with contextlib.suppress(*_NO_JSON):
        return msgspec.json.decode(body, type=Health)
    with contextlib.suppress(*_NO_JSON):
        msgspec.json.decode(body, type=KeyRequired)
        known = "wants an API key" if key is None else "does not know this API key"
        raise Unreadable(
            f"The server at {url} {known}. Put the one that its operator gave you into "
            f"${KEY_VARIABLE}, or name it with --api-key."
        )
    refused = _error_in(body)
    said = f", {printable(refused.message)}" if refused is not None else ""
    raise NotCairn(f"GET /health gives {status}{said}")


class Stream:
    """
    A request for an answer, and its events. To be iterated once.

    Args:
        options: the options with which a command of `ops` finds this server, after a space.
        key: the user's API key.

    Attributes:
        stopped: whether ``stop`` was called.
    """

    def __init__(
        self, url: str, body: dict[str, Any], options: str = "", key: str | None = None
    ) -> None:
        self._url = url
        self._options = options
        self._client = http_client(url, key=key)
        request = self._client.build_request(
            "POST",
            "/v1/chat/completions",
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

        The server cancels the request when it sees that the connection is closed.
        """
        self._exchange.cut()

    def __iter__(self) -> Iterator[Chunk | str]:
        """
        The events as they come; a comment that only keeps the connection alive comes as text.

        Raises:
            TurnFailed: there is no answer, or no complete one.
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
                raise ServerGone(_gone_words(self._url, error)) from error

    def _events(self, response: httpx.Response) -> Iterator[Chunk | str]:
        reader = EventReader()
        for data in response.iter_raw():
            for event in reader.feed(data):
                if self.stopped or event.data == DONE:
                    return
                yield event.comment if event.data is None else self._chunk(event.data)
        if not self.stopped:
            raise ServerGone(
                f"The answer broke off: {self._url} closed the connection before its end. Look "
                "whether the server still runs."
            )

    def _chunk(self, value: bytes) -> Chunk:
        try:
            chunk = _chunks.decode(value)
        except _NO_JSON as error:
            raise TurnFailed(
                f"What {self._url} sent is no answer: {printable(str(error))}. Look whether a "
                "server of Cairn's is behind this address."
            ) from error
        if chunk.error is not None:
            raise TurnFailed(refusal(chunk.error, None, None, self._options))
        return chunk

    def _refused(self, response: httpx.Response) -> TurnFailed:
        error = _error_in(response.content) or Error(message=response.reason_phrase)
        retry_after = response.headers.get("retry-after")
        return TurnFailed(refusal(error, response.status_code, retry_after, self._options))


def _error_in(body: bytes) -> Error | None:
    try:
        return msgspec.json.decode(body, type=dict[str, Error])["error"]
    except (*_NO_JSON, KeyError):
        return None


def _gone_words(url: str, error: httpx.HTTPError) -> str:
    cause = os_error(error)
    if isinstance(cause, ConnectionRefusedError):
        return f"Nothing answers at {url} any more. Start the server again."
    what = (cause.strerror if cause is not None else None) or str(error) or type(error).__name__
    return f"The connection to {url} broke: {printable(what)}. Check whether the server still runs."
