"""The JSON objects of Cairn's agents, as they are sent."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from cairn.http.chat_completions.objects import ToolCall
from cairn.http.wire.checks import JsonObject
from cairn.http.wire.sent import Sent
from cairn.journal.events import FinishReason


class AgentObject(Sent, kw_only=True):
    """An agent. Its system prompt and tools are sent only when it is looked up by name."""

    object: Literal["agent"] = "agent"
    agent_id: str
    model: str
    status: Literal["hot", "warm", "cold"]
    turns: int
    context_tokens: int
    context_left: int
    finish_reason: FinishReason | None
    max_context: int | None
    persist: bool
    forked_from: str | None
    adopted_from: str | None
    created: str
    last_accessed: str
    system_prompt: str | UnsetType | None = UNSET
    tools: list[JsonObject] | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET


class AgentList(Sent, kw_only=True):
    """All agents of the caller's tenant."""

    object: Literal["list"] = "list"
    agents: list[AgentObject]


class ReleasedAgent(Sent, kw_only=True):
    """The name of an agent that was handed over, and its name on the other node."""

    object: Literal["agent"] = "agent"
    agent_id: str
    released_to: str


class DeletedAgent(Sent, kw_only=True):
    """
    The name of an agent that was deleted; if another node has it now, its name there, where it is
    not deleted.
    """

    object: Literal["agent"] = "agent"
    agent_id: str
    deleted: Literal[True] = True
    released_to: str | UnsetType = UNSET


class AgentMessage(Sent, kw_only=True):
    """A stored message, in the form of chat completions."""

    role: str
    content: str
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class AgentTurn(Sent):
    """The messages that were sent to an agent, and its answer."""

    turn: int
    request: str
    created: str
    messages: list[AgentMessage]
    answer: AgentMessage
    finish_reason: FinishReason
    context_tokens: int


class AgentTurns(Sent, kw_only=True):
    """The history of an agent."""

    object: Literal["list"] = "list"
    agent_id: str
    data: list[AgentTurn]
