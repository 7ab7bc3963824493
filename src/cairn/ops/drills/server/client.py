"""A client of the private server: plain HTTP over the loopback, as anybody's would be."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import attrs
import trio

T = TypeVar("T")

_BUG_ID = re.compile(r"bug id ([0-9a-f-]{36})")
_TIMEOUT_S = 60


@attrs.frozen(kw_only=True)
class Answer:
    """
    A response, whole or as it streamed.

    Attributes:
        status: 0 where the connection was cut before there was one.
        tokens: (bytes, log-probability) of each token.
        error: the ``error`` object, if one came.
        cached_tokens: how much of the prompt was reused; None where that was not said.
    """

    status: int
    headers: Mapping[str, str]
    text: str = ""
    tokens: tuple[tuple[bytes, float], ...] = ()
    error: Mapping[str, Any] | None = None
    cached_tokens: int | None = None

    @property
    def bits(self) -> tuple[Any, ...]:
        """What must be the same however the answer came about."""
        return self.status, self.text, self.tokens

    @property
    def bug_id(self) -> str | None:
        """The bug that the error names."""
        found = _BUG_ID.search(str((self.error or {}).get("message", "")))
        return found[1] if found else None


class Client:
    """Asks one server, each time on a connection of its own."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """A chat completion, whatever comes of it."""
        return await self._in_thread(lambda: self._ask(body))

    async def stream(self, body: Mapping[str, Any], begun: trio.Event) -> Answer:
        """
        A chat completion as a stream. ``begun`` is set at its first token, or where none comes.
        """
        try:
            return await self._in_thread(
                lambda: self._stream({**body, "stream": True}, begun),
            )
        finally:
            begun.set()

    async def get(self, path: str) -> str:
        """The body at an address."""
        return await self._in_thread(lambda: self._get(path))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        # Abandoned where the drill is called off: the server's end then ends the connection.
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)

    def _connection(self) -> http.client.HTTPConnection:
        assert self._address.hostname is not None
        return http.client.HTTPConnection(
            self._address.hostname, self._address.port, timeout=_TIMEOUT_S
        )

    def _post(self, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        connection = self._connection()
        content = json.dumps(body)
        headers = {"content-type": "application/json", "connection": "close"}
        connection.request("POST", "/v1/chat/completions", content, headers)
        return connection.getresponse()

    def _get(self, path: str) -> str:
        connection = self._connection()
        connection.request("GET", path, headers={"connection": "close"})
        with connection.getresponse() as response:
            return response.read().decode()

    def _ask(self, body: Mapping[str, Any]) -> Answer:
        try:
            with self._post(body) as response:
                return _whole(response.status, _headers(response), json.loads(response.read()))
        except (OSError, http.client.HTTPException):
            return Answer(status=0, headers={})

    def _stream(self, body: Mapping[str, Any], begun: trio.Event) -> Answer:
        with self._post(body) as response:
            headers = _headers(response)
            if response.status != 200:
                return _whole(response.status, headers, json.loads(response.read()))
            chunks = []
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunks.append(json.loads(line.removeprefix(b"data: ")))
                if _tokens(chunks[-1]):
                    trio.from_thread.run_sync(begun.set)
        return Answer(
            status=response.status,
            headers=headers,
            text="".join(_text(chunk, "delta") for chunk in chunks),
            tokens=tuple(token for chunk in chunks for token in _tokens(chunk)),
            error=next((chunk["error"] for chunk in chunks if "error" in chunk), None),
        )


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def _whole(status: int, headers: Mapping[str, str], body: Mapping[str, Any]) -> Answer:
    usage = body.get("usage", {})
    return Answer(
        status=status,
        headers=headers,
        text=_text(body, "message"),
        tokens=_tokens(body),
        error=body.get("error"),
        cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens"),
    )


def _text(body: Mapping[str, Any], part: str) -> str:
    return "".join(choice[part].get("content") or "" for choice in body.get("choices", ()))


def _tokens(body: Mapping[str, Any]) -> tuple[tuple[bytes, float], ...]:
    return tuple(
        (bytes(token["bytes"]), token["logprob"])
        for choice in body.get("choices", ())
        if choice.get("logprobs")
        for token in choice["logprobs"]["content"]
    )
