"""
Cairn's own protocol for agents, from the wire to commands and back. A request to an agent, and its
answer, have the form of OpenAI's chat completions.

Clients send only new messages; the server keeps the history. Fields that would change the
conversation (tools, a session) belong to the agent, and are refused in a request.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime

import attrs
import msgspec
from msgspec import UNSET

from cairn.actors.agents.messages import AgentFacts, AgentHistory, NewAgent
from cairn.actors.errors import AgentReleased
from cairn.actors.requests.messages import Keep, ServerFacts, StoredTurn
from cairn.engine.prompt.template import Message, message_of
from cairn.http.agents.objects import (
    AgentList,
    AgentMessage,
    AgentObject,
    AgentTurn,
    AgentTurns,
    DeletedAgent,
    ReleasedAgent,
)
from cairn.http.chat_completions.conversation import read_tools
from cairn.http.chat_completions.objects import FunctionCall, ToolCall
from cairn.http.chat_completions.request import ChatRequest, RequestBody, chat_request
from cairn.http.service import Service
from cairn.http.wire import parameters
from cairn.http.wire.checks import MESSAGES_MAX, ClientError, JsonObject, check_count
from cairn.http.wire.json import decode_object, encode, to_struct
from cairn.http.wire.parameters import INT64_MAX, Ignored, integer
from cairn.journal.agents import NAME_MAX, is_agent_name, session_of
from cairn.journal.nodes import node_named, on_node

ADDRESS = "/v1/agents"
PROTOCOL = "cairn.agents"

_NOT_HERE = {
    "session_id": "an agent has its own session; leave it out",
    "tools": "set them when you create the agent; for other tools, create another agent",
    "system_prompt": "set it when you create the agent",
}
"""The fields that only the agent itself has, and what to do instead."""


_ALIASES = {"id": "agent_id", "name": "agent_id", "system": "system_prompt"}
"""Other names for the fields of a new agent."""


class NewAgentBody(msgspec.Struct):
    agent_id: str | None = None
    model: str | None = None
    system_prompt: str | None = None
    tools: list[JsonObject] | None = None
    max_context: int | None = None
    persist: bool | None = None


class ForkBody(msgspec.Struct):
    agent_id: str | None = None
    turn: int | None = None


class ReleaseBody(msgspec.Struct):
    to: str


class AdoptBody(msgspec.Struct):
    source: str


GenerateRequest = msgspec.defstruct(
    "GenerateRequest",
    [
        (field.name, field.type)
        if field.default is msgspec.NODEFAULT
        else (field.name, field.type, field.default)
        for field in msgspec.structs.fields(RequestBody)
        if field.name not in {*_NOT_HERE, "n", "prompt_cache_key"}
    ],
    module=__name__,
)
"""
A request to an agent, for the OpenAPI document: a chat completion without the agent's own fields.
"""


@attrs.frozen(kw_only=True)
class Fork:
    """
    How to fork an agent: the new name, and the turn after which to fork; None for the last one.
    """

    name: str
    turn: int | None


# --- from the wire -------------------------------------------------------------------------------


def read_new_agent(
    body: bytes, ignored: Ignored, node: str | None = None
) -> tuple[NewAgent, tuple[str, ...]]:
    """
    The agent that a body describes, and the fields that are ignored.

    Args:
        node: with whose name that of the agent begins; None if the server is in no fleet.

    Raises:
        ClientError: the body cannot be used.
    """
    fields = decode_object(body)
    wire = to_struct(fields, NewAgentBody)
    new = NewAgent(
        name=_name(wire.agent_id, node),
        model=parameters.model_name(wire.model),
        # A template would render an empty one too.
        system=wire.system_prompt or None,
        tools=read_tools(wire.tools or ()),
        max_context=integer("max_context", wire.max_context, 2, INT64_MAX),
        persist=wire.persist is not False,
    )
    aliases = {name: one for name, one in _ALIASES.items() if fields.get(one) is None}
    known = NewAgentBody.__struct_fields__
    return new, ignored.report(parameters.unknown(fields, known), known, aliases)


def read_fork(body: bytes, node: str | None = None) -> Fork:
    """
    The fork that a body describes. It may be empty.

    Args:
        node: as for ``read_new_agent``.

    Raises:
        ClientError: the body cannot be used.
    """
    fields = decode_object(body or b"{}")
    wire = to_struct(fields, ForkBody)
    known = ForkBody.__struct_fields__
    if others := parameters.unknown(fields, known):
        # Whatever it means, forking after the last turn may not be what the client wants.
        other = min(others)[:100]
        raise ClientError(
            f"unknown field {other}: a fork accepts only {' and '.join(known)}. Nothing was forked",
            param=other,
        )
    return Fork(name=_name(wire.agent_id, node), turn=integer("turn", wire.turn, 0, INT64_MAX))


def read_handover(body: bytes, kind: type[ReleaseBody] | type[AdoptBody]) -> tuple[str, str]:
    """
    The name that a body gives an agent on another node, and that node.

    Raises:
        ClientError: the body cannot be used.
    """
    field, fields = msgspec.structs.fields(kind)[0].name, decode_object(body)
    wire = to_struct(fields, kind)
    if others := parameters.unknown(fields, (field,)):
        other = min(others)[:100]
        raise ClientError(f"unknown field {other}: only {field} is accepted here", param=other)
    name = wire.to if isinstance(wire, ReleaseBody) else wire.source
    node = node_named(name)
    if node is None or not is_agent_name(name):
        raise ClientError(
            f"{field} must be the id of an agent on another node, which begins with that node's "
            "name, like n2.notes",
            param=field,
        )
    return name, node


def read_generate_request(
    body: bytes,
    headers: Mapping[str, str],
    ignored: Ignored,
    facts: ServerFacts,
    held: AgentHistory,
) -> ChatRequest:
    """
    A request to an agent, as a chat completion that begins with the agent's history.

    Args:
        headers: looked up by names in lower case.
        facts: of the server, which has defaults for what a client does not say.
        held: the agent.

    Raises:
        ClientError: they cannot be used.
    """
    fields = decode_object(body)
    for name, hint in _NOT_HERE.items():
        if fields.get(name) is not None:
            raise ClientError(
                f"{name} cannot be set here: {hint}", param=name, code="unsupported_value"
            )
    agent = held.agent
    if agent.tools:
        fields["tools"] = [dict(tool) for tool in agent.tools]
    asked = chat_request(fields, headers, ignored, facts)
    command = asked.command
    if command.choices > 1:
        raise ClientError(
            "n is not supported for agents; leave it out, or fork the agent",
            param="n",
            code="unsupported_value",
        )
    assert command.conversation is not None
    if command.conversation.continued:
        raise ClientError(
            "an agent's answer is stored as a message of its own, so it cannot continue one; end "
            "with a user message, without continue_final_message and prefix",
            param="messages",
            code="unsupported_value",
        )
    new = command.conversation.messages
    messages = (*held.messages, *new)
    check_count(messages, "messages", MESSAGES_MAX)
    command = attrs.evolve(
        command,
        protocol=PROTOCOL,
        conversation=attrs.evolve(command.conversation, messages=messages),
        session_name=session_of(agent.name),
        group=None,
        requested_model=command.requested_model or agent.model,
        keep=Keep(previous=held.head, asked=new, note="", agent=agent.name, created=held.created),
        context_max=agent.max_context,
    )
    # The session is the agent's, so it does not have to be found within a group.
    names = ("prompt_cache_key",) if fields.get("prompt_cache_key") is not None else ()
    reported = sorted({*asked.ignored, *ignored.report(names, names)})
    return attrs.evolve(asked, command=command, ignored=tuple(reported))


def _name(wire: str | None, node: str | None) -> str:
    if wire is None:
        return on_node(node, f"agent-{uuid.uuid4().hex[:12]}")
    name = on_node(node, wire)
    if not (is_agent_name(wire) and is_agent_name(name)):
        raise ClientError(
            f"agent_id must be 1 to {NAME_MAX - len(on_node(node, ''))} letters (a to z), digits, "
            "or any of . _ - and begin with a letter or a digit",
            param="agent_id",
        )
    return name


# --- answers -------------------------------------------------------------------------------------


async def look_up_history(name: str, service: Service) -> AgentHistory:
    """
    An agent with its history.

    Raises:
        ClientError: there is no such agent.
        RefusalError: the journal cannot be read now.
    """
    held = await service.agents.history(name)
    if held is None:
        raise not_found(name, service)
    return held


async def look_up(name: str, service: Service) -> AgentObject:
    """An agent with its system prompt and tools. Raises as ``look_up_history``."""
    new = await service.agents.created(name)
    facts = service.agents.one(name)
    if new is None or facts is None:
        raise not_found(name, service)
    found = agent_object(facts, service.facts_of(facts.model))
    found.system_prompt = new.system
    found.tools = [dict(tool) for tool in new.tools]
    return found


async def look_up_turns(name: str, service: Service) -> AgentTurns:
    """The history, turn by turn. Raises as ``look_up_history``."""
    held = await look_up_history(name, service)
    data = [_turn_object(number, turn) for number, turn in enumerate(held.turns, 1)]
    return AgentTurns(agent_id=name, data=data)


async def look_up_last_turns(
    name: str, service: Service, before: int | None, most: int
) -> list[AgentTurn]:
    """
    Some turns, see ``AgentService.last_turns``. Raises as ``look_up_history``.
    """
    found = await service.agents.last_turns(name, before, most)
    if found is None:
        raise not_found(name, service)
    return [_turn_object(number, turn) for number, turn in found]


async def delete(name: str, service: Service) -> DeletedAgent:
    """
    Delete an agent. Of one that was released, what is still here is deleted.

    Raises:
        ClientError: there is no such agent.
        RefusalError: it cannot be deleted now, or all that is here of it was.
    """
    if not await service.agents.delete(name):
        raise not_found(name, service)
    try:
        service.agents.require_here(name)
    except AgentReleased as released:
        return DeletedAgent(agent_id=name, released_to=released.to)
    return DeletedAgent(agent_id=name)


async def release(name: str, body: bytes, service: Service) -> ReleasedAgent:
    """
    Hand an agent over to another node. Does nothing if it was released to this name before.

    Raises:
        ClientError: there is no such agent, or the body cannot be used.
        RefusalError: it cannot be released now.
    """
    to, node = read_handover(body, ReleaseBody)
    try:
        found = await service.agents.release(name, to, node)
    except AgentReleased as error:
        if error.to != to:
            raise
        found = True
    if not found:
        raise not_found(name, service)
    return ReleasedAgent(agent_id=name, released_to=to)


async def adopt(name: str, body: bytes, service: Service) -> AgentFacts:
    """
    Adopt an agent that another node released. Does nothing if that was done.

    Raises:
        ClientError: the tenant has no such agent there, or a name cannot be used.
        RefusalError: it cannot be adopted now.
    """
    of, node = read_handover(body, AdoptBody)
    own = service.facts.node
    if own is not None and (name != on_node(own, name) or not is_agent_name(name)):
        raise ClientError(f"an agent of this node has an id like {on_node(own, 'notes')}")
    found = await service.agents.adopt(name, of, node)
    if found is None:
        raise ClientError(
            f"agent {of!r} not found on {node}: it was never created, was deleted or forgotten, or "
            "ended with its server (persist: false)",
            code="agent_not_found",
            status=404,
            param="source",
        )
    return found


async def fork(name: str, new: Fork, service: Service) -> AgentFacts:
    """
    Fork an agent.

    Raises:
        ClientError: there is no such agent, or it has no such turn.
        RefusalError: it cannot be forked now.
    """
    try:
        found = await service.agents.fork(name, new.name, new.turn)
    except IndexError as error:
        held = service.agents.one(name)
        turns = held.turns if held is not None else 0
        raise ClientError(
            f"turn is {new.turn}, but the agent has {turns} turns; send 0 to {turns}, or leave "
            "it out to fork after the last turn",
            param="turn",
        ) from error
    if found is None:
        raise not_found(name, service)
    return found


def not_found(name: str, service: Service) -> ClientError:
    """
    The error for an agent that does not exist.

    Raises:
        AgentReleased: another node has it now.
    """
    service.agents.require_here(name)
    node = service.facts.node
    of_node = "" if node is None or node_named(name) else f" (ids here are like {node}.NAME)"
    return ClientError(
        f"agent {name[:NAME_MAX]!r} not found{of_node}: it was never created, was deleted, or "
        "ended with its server (persist: false); GET /v1/agents lists the agents",
        code="agent_not_found",
        status=404,
    )


def agent_list(service: Service) -> AgentList:
    """All agents."""
    agents = [agent_object(one, service.facts_of(one.model)) for one in service.agents.all()]
    return AgentList(agents=agents)


def agent_object(
    agent: AgentFacts, facts: ServerFacts, ignored: tuple[str, ...] = ()
) -> AgentObject:
    """
    An agent, as lists have it.

    Args:
        ignored: the fields that were sent and are not acted on.
    """
    return AgentObject(
        agent_id=agent.name,
        model=agent.model or facts.model,
        status=agent.status,
        turns=agent.turns,
        context_tokens=agent.context_tokens,
        context_left=agent.context_left,
        finish_reason=agent.finish_reason,
        max_context=agent.max_context,
        persist=agent.persist,
        forked_from=agent.forked_from,
        adopted_from=agent.adopted_from,
        created=_time(agent.created_s),
        last_accessed=_time(agent.used_us // 1_000_000),
        ignored=list(ignored) or UNSET,
    )


def _turn_object(number: int, turn: StoredTurn) -> AgentTurn:
    return AgentTurn(
        turn=number,
        request=turn.request,
        created=_time(turn.created_s),
        messages=[_message_object(message) for message in turn.asked],
        answer=_message_object(message_of(turn.parts)),
        finish_reason=turn.finished.finish_reason,
        context_tokens=turn.finished.prompt_tokens + turn.finished.completion_tokens,
    )


def _message_object(message: Message) -> AgentMessage:
    return AgentMessage(
        role=message.role,
        content=message.content,
        reasoning_content=message.reasoning or UNSET,
        tool_calls=[_call_object(call) for call in message.tool_calls] or UNSET,
        tool_call_id=message.tool_call_id or UNSET,
        name=message.name or UNSET,
    )


def _call_object(call: JsonObject) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = encode(arguments).decode()
    return ToolCall(
        id=call["id"], function=FunctionCall(name=function["name"], arguments=arguments)
    )


def _time(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
