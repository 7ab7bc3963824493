"""A client of the private server, over HTTP on the loopback."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import attrs
import httpx
import trio

from cairn.ops.common.http_client import DONE, EventReader, options

_CHAT = "/v1/chat/completions"
_BUG_ID = re.compile(r"bug id ([0-9a-f-]{36})")
_TIMEOUT_S = 60


@attrs.frozen(kw_only=True)
class Answer:
    """
    A response, streamed or not.

    Attributes:
        status: 0 if the connection broke before there was a response.
        tokens: (bytes, log-probability) of each token.
        error: the ``error`` object, if there is one.
        cached_tokens: prompt tokens served from the cache; None if not reported.
    """

    status: int
    headers: Mapping[str, str]
    text: str = ""
    tokens: tuple[tuple[bytes, float], ...] = ()
    error: Mapping[str, Any] | None = None
    cached_tokens: int | None = None

    @property
    def bits(self) -> tuple[Any, ...]:
        """What must be equal whichever path the server took."""
        return self.status, self.text, self.tokens

    @property
    def bug_id(self) -> str | None:
        """The bug id that the error names."""
        found = _BUG_ID.search(str((self.error or {}).get("message", "")))
        return found[1] if found else None


class Client:
    """Sends requests to one server, each on its own connection."""

    def __init__(self, url: str) -> None:
        self._options = options(url, timeout_s=_TIMEOUT_S)

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """A chat completion. Its status is 0 if the connection broke first."""
        try:
            async with httpx.AsyncClient(**self._options) as client:
                response = await client.post(_CHAT, json=body)
        except httpx.TransportError:
            return Answer(status=0, headers={})
        return _whole(response)

    async def stream(self, body: Mapping[str, Any], begun: trio.Event) -> Answer:
        """A chat completion as a stream. ``begun`` is set at its first token, or at its end."""
        reader, chunks = EventReader(), []
        try:
            async with self.streaming(body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    return _whole(response)
                async for data in response.aiter_raw():
                    for event in reader.feed(data):
                        if event.data is not None and event.data != DONE:
                            chunks.append(json.loads(event.data))
                            if _tokens(chunks[-1]):
                                begun.set()
        finally:
            begun.set()
        return Answer(
            status=response.status_code,
            headers=response.headers,
            text="".join(_text(chunk, "delta") for chunk in chunks),
            tokens=tuple(token for chunk in chunks for token in _tokens(chunk)),
            error=next((chunk["error"] for chunk in chunks if "error" in chunk), None),
        )

    @contextlib.asynccontextmanager
    async def streaming(self, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """The response to a streaming request, not yet read; closed when the context ends."""
        async with (
            httpx.AsyncClient(**self._options) as client,
            client.stream("POST", _CHAT, json={**body, "stream": True}) as response,
        ):
            yield response

    async def get(self, path: str) -> str:
        """The body at a path."""
        async with httpx.AsyncClient(**self._options) as client:
            return (await client.get(path)).text


def _whole(response: httpx.Response) -> Answer:
    body = response.json()
    usage = body.get("usage", {})
    return Answer(
        status=response.status_code,
        headers=response.headers,
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
