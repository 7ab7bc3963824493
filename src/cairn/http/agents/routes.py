"""The routes of agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from quart import Quart, Response

from cairn.http.adapter import json_response
from cairn.http.agents import requests as agents
from cairn.http.chat_completions.request import ChatRequest
from cairn.http.models import named_model
from cairn.http.service import Service
from cairn.http.wire.parameters import Ignored


def add_agent_routes(
    app: Quart,
    service: Callable[[], Service],
    ignored: Ignored,
    *,
    body_of: Callable[[], Awaitable[tuple[bytes, Mapping[str, str]]]],
    check_model: Callable[[str], None],
    answered: Callable[[ChatRequest], Awaitable[Response]],
) -> None:
    """
    Add the routes of agents.

    Args:
        service: the server as the caller sees it.
        body_of: reads the body of the current request, with its headers.
        check_model: refuses names of models that are not served.
        answered: serves a request and returns its answer.
    """

    @app.post(agents.ADDRESS)
    async def create_agent() -> Response:
        body, _ = await body_of()
        new, passed_over = agents.read_new_agent(body, ignored, service().facts.node)
        check_model(new.model)
        made = await service().agents.create(new)
        return json_response(agents.agent_object(made, service().facts_of(made.model), passed_over))

    @app.get(agents.ADDRESS)
    async def list_agents() -> Response:
        return json_response(agents.agent_list(service()))

    @app.get(f"{agents.ADDRESS}/<name>")
    async def agent(name: str) -> Response:
        return json_response(await agents.look_up(name, service()))

    @app.get(f"{agents.ADDRESS}/<name>/turns")
    async def agent_turns(name: str) -> Response:
        return json_response(await agents.look_up_turns(name, service()))

    @app.delete(f"{agents.ADDRESS}/<name>")
    async def delete_agent(name: str) -> Response:
        return json_response(await agents.delete(name, service()))

    @app.post(f"{agents.ADDRESS}/<name>/fork")
    async def fork_agent(name: str) -> Response:
        body, _ = await body_of()
        new = agents.read_fork(body, service().facts.node)
        made = await agents.fork(name, new, service())
        return json_response(agents.agent_object(made, service().facts_of(made.model)))

    @app.post(f"{agents.ADDRESS}/<name>/release")
    async def release_agent(name: str) -> Response:
        body, _ = await body_of()
        return json_response(await agents.release(name, body, service()))

    @app.post(f"{agents.ADDRESS}/<name>/adopt")
    async def adopt_agent(name: str) -> Response:
        body, _ = await body_of()
        made = await agents.adopt(name, body, service())
        return json_response(agents.agent_object(made, service().facts_of(made.model)))

    @app.post(f"{agents.ADDRESS}/<name>/generate")
    async def generate_with_agent(name: str) -> Response:
        body, headers = await body_of()
        held = await agents.look_up_history(name, service())
        facts = service().facts_of(named_model(body, service().models) or held.agent.model)
        asked = agents.read_generate_request(body, headers, ignored, facts, held)
        check_model(asked.command.requested_model)
        return await answered(asked)
