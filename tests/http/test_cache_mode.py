"""What a client allows its request to reuse, in every protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cairn.actors.agents.messages import AgentHistory, NewAgent
from cairn.http.agents.requests import read_generate_request
from cairn.http.wire.checks import ClientError
from cairn.http.wire.parameters import Ignored
from tests.http.fake_service import FACTS
from tests.http.test_ttl import HELLO, PROTOCOLS, Body, command_of


@pytest.mark.parametrize(("read", "body"), PROTOCOLS)
def test_a_mode(read: Callable[..., Any], body: Body):
    """One of two modes; without one, everything is reused. The cold path is a separate field."""
    assert "full" == command_of(read, body).cache_mode
    assert "full" == command_of(read, {**body, "cache_mode": None}).cache_mode
    for mode in ("full", "prefix"):
        for cold in (True, False):
            asked = {**body, "cache_mode": mode, "cache_prompt": not cold}
            command = command_of(read, asked)
            assert (mode, not cold) == (command.cache_mode, command.cache_prompt)


@pytest.mark.parametrize(("read", "body"), PROTOCOLS)
@pytest.mark.parametrize("mode", ["", "Prefix", "none", "x" * 5000, True, 1, ["full"]])
def test_a_mode_that_is_none(read: Callable[..., Any], body: Body, mode: Any):
    """An unknown mode is refused by its name, with the known ones."""
    with pytest.raises(ClientError) as refused:
        command_of(read, {**body, "cache_mode": mode})
    assert "cache_mode" == refused.value.param
    assert len(refused.value.message) < 200
    allowed = "must be one of full, prefix" if isinstance(mode, str) else "a string"
    assert allowed in refused.value.message


def test_a_mode_for_an_agent():
    """A request to an agent has a mode as well."""
    held = AgentHistory(agent=NewAgent(name="notes"), created=1, head=None, turns=())
    body = json.dumps({"messages": HELLO, "cache_mode": "prefix"}).encode()
    asked = read_generate_request(body, {}, Ignored(), FACTS, held)
    assert ("prefix", "agent/notes") == (asked.command.cache_mode, asked.command.session_name)
