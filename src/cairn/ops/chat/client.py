"""
The client of ``ops chat``: a server looked at, and a stream of an answer that can be stopped.

By the standard library, which asks no proxy, tries nothing twice, and shows each line when it is
there. The official clients do all of that otherwise.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec

from cairn.ops.chat.transcript import Chunk, Error, Health, KeyWanted, refusal
from cairn.ops.cli import Unreadable
from cairn.ops.common.output import printable
from cairn.ops.serve.api_keys import KEY_VARIABLE

_CONNECT_S = 5.0
_DONE = b"[DONE]"

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
        raise click.BadParameter(f"{url!r} is no address: {error}.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{url!r} is no address; one is http://127.0.0.1:8000.")
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
    connection, path = _connection(url)
    try:
        connection.request("GET", f"{path}/health", headers=_key_header(key))
        response = connection.getresponse()
        status, body = response.status, response.read()
    except http.client.HTTPException as error:
        raise NotCairn(f"it does not speak HTTP: {printable(str(error))}") from error
    except OSError:
        return None
    finally:
        connection.close()
    with contextlib.suppress(*_NO_JSON):
        return msgspec.json.decode(body, type=Health)
    with contextlib.suppress(*_NO_JSON):
        msgspec.json.decode(body, type=KeyWanted)
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
    A request for an answer, and the events of it: once.

    Args:
        options: what a command of `ops` needs to look at this server, with a space before it.
        key: the user's API key.

    Attributes:
        stopped: whether ``stop`` was called.
    """

    def __init__(
        self, url: str, body: dict[str, Any], options: str = "", key: str | None = None
    ) -> None:
        self._url = url
        self._key = key
        self._body = json.dumps(body).encode()
        self._options = options
        self._socket: socket.socket | None = None
        self.stopped = False

    def stop(self) -> None:
        """
        End the stream where it stands, from a signal's handler as well: who waits for the next
        event sees the end. The server cancels the request when it sees the connection go.
        """
        self.stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[Chunk | str]:
        """
        The events as they come, and as text what only keeps the connection alive.

        Raises:
            TurnFailed: there is no answer, or no complete one.
        """
        connection, path = _connection(self._url)
        try:
            connection.connect()
            self._socket = connection.sock
            self._socket.settimeout(None)
            if self.stopped:
                return
            headers = {"content-type": "application/json", **_key_header(self._key)}
            connection.request("POST", f"{path}/v1/chat/completions", self._body, headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise self._refused(response)
            yield from self._events(response)
        except (OSError, http.client.HTTPException) as error:
            if self.stopped:
                return
            raise ServerGone(_gone_words(self._url, error)) from error
        finally:
            connection.close()

    def _events(self, response: http.client.HTTPResponse) -> Iterator[Chunk | str]:
        for line in response:
            if self.stopped:
                return
            kind, _, value = line.strip().partition(b":")
            value = value.strip()
            if line.startswith(b":"):
                yield value.decode(errors="replace")
            elif kind == b"data" and value == _DONE:
                return
            elif kind == b"data":
                yield self._chunk(value)
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

    def _refused(self, response: http.client.HTTPResponse) -> TurnFailed:
        error = _error_in(response.read()) or Error(message=response.reason)
        retry_after = response.headers["retry-after"]
        return TurnFailed(refusal(error, response.status, retry_after, self._options))


def _key_header(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=_CONNECT_S), parts.path


def _error_in(body: bytes) -> Error | None:
    try:
        return msgspec.json.decode(body, type=dict[str, Error])["error"]
    except (*_NO_JSON, KeyError):
        return None


def _gone_words(url: str, error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"Nobody answers at {url} any more. Start the server again."
    what = error.strerror if isinstance(error, OSError) else None
    return (
        f"The connection to {url} broke: {printable(what or str(error) or type(error).__name__)}. "
        "Look whether the server still runs."
    )
