"""What the server answers, as far as the chat reads it."""

from __future__ import annotations

from typing import Literal

import msgspec


class Delta(msgspec.Struct):
    """New parts of an answer."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """The one choice of a chunk."""

    delta: Delta
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """The numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int


class Timings(msgspec.Struct):
    """How fast the answer was, in tokens per second; 0 if it is too short to say."""

    predicted_per_second: float = 0.0


class Cairn(msgspec.Struct):
    """What the server reports about the path."""

    path: str
    reused_tokens: int
    reason: str | None = None
    explanation: str | None = None


class Error(msgspec.Struct):
    """What the server reports about an error."""

    message: str
    code: str | None = None


class Chunk(msgspec.Struct):
    """An event of a stream."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None
    cairn: Cairn | None = None
    error: Error | None = None


class Health(msgspec.Struct):
    """A server's health. Only Cairn has these fields."""

    model: str
    fingerprint: str
    journal_position: int
    context_tokens: int = 0


class StartingUp(msgspec.Struct):
    """The health of a server that starts."""

    status: Literal["starting"]
    step: str
    done: int = 0
    total: int = 0


class KeyRequired(msgspec.Struct):
    """The health of a server with API keys, for a request without one."""

    status: str
    api_key: Literal["required"]


class Agent(msgspec.Struct):
    """A conversation that the server stores; its system prompt and tools only if looked up."""

    agent_id: str
    model: str
    turns: int
    created: str
    last_accessed: str
    forked_from: str | None = None
    system_prompt: str | None = None
    tools: tuple[msgspec.Raw, ...] = ()


class AgentList(msgspec.Struct):
    """All agents."""

    agents: tuple[Agent, ...]


class StoredMessage(msgspec.Struct):
    """A message of a stored turn."""

    role: str
    content: str = ""
    reasoning_content: str = ""


class StoredTurn(msgspec.Struct):
    """What was sent to an agent, and its answer."""

    messages: tuple[StoredMessage, ...]
    answer: StoredMessage


class StoredTurns(msgspec.Struct):
    """The history of an agent, the oldest turn first."""

    data: tuple[StoredTurn, ...]


class ModelState(msgspec.Struct):
    """Whether a model is loaded, and what it is for."""

    state: str
    kind: str = "chat"
    aliases: tuple[str, ...] = ()
    context_tokens: int | None = None


class ServedModel(msgspec.Struct):
    """A model that the server can use."""

    id: str
    cairn: ModelState


class ModelList(msgspec.Struct):
    """The served models."""

    data: tuple[ServedModel, ...]
