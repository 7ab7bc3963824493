"""
The shapes of what the server answers, for its description (``openapi.py``).

Answers are built as plain objects, piece by piece; these say what comes of that, and a test holds
each answer against its shape. Most are closed: nothing may stand there besides. Of what protocols
define at length, only what clients go by is told.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cairn.http.wire.answers import CairnObject


class _Closed(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Response(msgspec.Struct):
    """OpenAI's response object."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: None
    incomplete_details: dict[str, str] | None
    cairn: CairnObject | UnsetType = UNSET


class ItemPage(_Closed):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(_Closed):
    """What is kept no longer."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ModelState(_Closed):
    """Whether a model is loaded, and what is known of it."""

    state: Literal["loaded", "loading", "not_loaded"]
    waiting: int
    aliases: list[str]
    fingerprint: str | None
    context_tokens: int | None


class Model(msgspec.Struct):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    cairn: ModelState


class Models(_Closed):
    """All models that are served."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class Agent(_Closed):
    """An agent at this moment; what it was created with only where it is asked for by name."""

    object: Literal["agent"]
    agent_id: str
    model: str
    status: Literal["hot", "warm", "cold"]
    turns: int
    context_tokens: int
    context_left: int
    finish_reason: Literal["stop", "length"] | None
    max_context: int | None
    persist: bool
    forked_from: str | None
    created: str
    last_accessed: str
    system_prompt: str | UnsetType | None = UNSET
    tools: list[dict[str, Any]] | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET


class Agents(_Closed):
    """All agents of whoever asks."""

    object: Literal["list"]
    agents: list[Agent]


class DeletedAgent(_Closed):
    """An agent that is there no longer."""

    object: Literal["agent"]
    agent_id: str
    deleted: bool


class AgentMessage(msgspec.Struct):
    """What was said to an agent, or by it, as OpenAI's messages are."""

    role: str
    content: Any


class AgentTurn(_Closed):
    """What was sent to an agent, and its answer."""

    turn: int
    request: str
    created: str
    messages: list[AgentMessage]
    answer: AgentMessage
    finish_reason: str
    context_tokens: int


class AgentTurns(_Closed):
    """All that was said with an agent."""

    object: Literal["list"]
    agent_id: str
    data: list[AgentTurn]


class Health(msgspec.Struct):
    """Whether the server is well; all besides is for who has a key."""

    status: Literal["ok", "admission_closed", "journal_full"]
