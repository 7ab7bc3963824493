"""The conversations and models of a server, over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from cairn.ops.chat.client import BAD_JSON, ServerGone, TurnFailed, error_in, gone_words
from cairn.ops.chat.replies import (
    Agent,
    AgentList,
    Error,
    ModelList,
    ServedModel,
    StoredTurn,
    StoredTurns,
)
from cairn.ops.chat.server import Server
from cairn.ops.chat.transcript import refusal
from cairn.ops.common.http_client import Exchange, http_client
from cairn.ops.common.output import printable

Answer = TypeVar("Answer")

NOT_FOUND = "agent_not_found"
"""The code of the error about an agent that does not exist."""

BUSY = "agent_busy"
"""The code of the error about an agent that answers another request."""

_ADDRESS = "/v1/agents"
_TIMEOUT_S = 30.0


def path_of(agent: str) -> str:
    """Where an agent is."""
    return f"{_ADDRESS}/{quote(agent, safe='')}"


class CallStopped(TurnFailed):
    """The user stopped a call."""


class Agents:
    """The stored conversations of a server. Each method raises TurnFailed if it cannot answer."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._exchange: Exchange | None = None
        self._is_cut = False

    @contextlib.contextmanager
    def cuttable(self) -> Iterator[Callable[[], None]]:
        """
        Gives a function, which a signal handler may call: while the context lasts, the current call
        and further ones raise CallStopped.
        """

        def cut() -> None:
            self._is_cut = True
            if self._exchange is not None:
                self._exchange.cut()

        try:
            yield cut
        finally:
            self._is_cut = False

    def create(self, name: str, system: str | None, *, persist: bool) -> str:
        """Create an agent. Returns its name: one on a node of a fleet begins with the node's."""
        body: dict[str, Any] = {"agent_id": name, "persist": persist}
        if system is not None:
            body["system_prompt"] = system
        return self._call("POST", _ADDRESS, Agent, body).agent_id

    def fork(self, name: str, new: str, turn: int) -> str:
        """Create an agent from the first turns of another. Returns its name, as ``create``."""
        body = {"agent_id": new, "turn": turn}
        return self._call("POST", f"{path_of(name)}/fork", Agent, body).agent_id

    def delete(self, name: str) -> None:
        """Delete an agent."""
        self._call("DELETE", path_of(name), dict[str, Any])

    def all(self) -> list[Agent]:
        """All agents, the last used one first."""
        return list(self._call("GET", _ADDRESS, AgentList).agents)

    def find(self, name: str) -> Agent:
        """An agent with its system prompt and tools."""
        return self._call("GET", path_of(name), Agent)

    def turns(self, name: str) -> tuple[StoredTurn, ...]:
        """The history of an agent."""
        return self._call("GET", f"{path_of(name)}/turns", StoredTurns).data

    def models(self) -> tuple[ServedModel, ...]:
        """The served models that answer."""
        found = self._call("GET", "/v1/models", ModelList).data
        return tuple(one for one in found if one.cairn.kind != "embedding")

    def _call(
        self,
        method: str,
        path: str,
        form: type[Answer],
        body: Mapping[str, Any] | None = None,
    ) -> Answer:
        server = self._server
        if self._is_cut:
            raise CallStopped("Stopped.")
        client = http_client(server.url, key=server.key, timeout_s=_TIMEOUT_S)
        exchange = self._exchange = Exchange(client, client.build_request(method, path, json=body))
        try:
            with client, exchange.response() as response:
                response.read()
        except httpx.HTTPError as error:
            if exchange.was_cut:
                raise CallStopped("Stopped.") from error
            raise ServerGone(gone_words(server.url, error)) from error
        if response.status_code != httpx.codes.OK:
            refused = error_in(response.content) or Error(message=response.reason_phrase)
            retry_after = response.headers.get("retry-after")
            words = refusal(refused, response.status_code, retry_after, server.options)
            raise TurnFailed(words, refused.code)
        try:
            return msgspec.json.decode(response.content, type=form)
        except BAD_JSON as error:
            raise TurnFailed(
                f"{server.url} sent an invalid answer: {printable(str(error))}. Check whether the "
                "server at this address is Cairn."
            ) from error
