"""The TTL that a client sets for its conversation, in every protocol."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from cairn.actors.requests.messages import Generate
from cairn.engine.ttl import seconds_of
from cairn.http.chat_completions.request import read_chat_request
from cairn.http.completions.request import read_text_request
from cairn.http.messages.request import read_messages_request
from cairn.http.responses.request import read_responses_request
from cairn.http.wire.checks import ClientError
from cairn.http.wire.parameters import Ignored
from tests.http.fake_service import FACTS

Body = dict[str, Any]
HELLO = [{"role": "user", "content": "Hello"}]


def command_of(read: Callable[..., Any], body: Mapping[str, Any]) -> Generate:
    """The command of a body."""
    command: Generate = read(json.dumps(body).encode(), {}, Ignored(), FACTS).command
    return command


PROTOCOLS = [
    (read_chat_request, {"messages": HELLO}),
    (read_text_request, {"prompt": "Hello"}),
    (read_responses_request, {"input": "Hello"}),
    (read_messages_request, {"messages": HELLO, "max_tokens": 4}),
]


@pytest.mark.parametrize(("read", "body"), PROTOCOLS)
def test_a_ttl_in_seconds_or_in_words(read: Callable[..., Any], body: Body):
    """Seconds, as a number or a text, and the usual units; without one, the server decides."""
    lives = {0: 0, 90: 90, "90": 90, "5m": 300, "1h": 3600, "24h": 86_400, "7d": 604_800}
    for written, seconds in lives.items():
        assert seconds == command_of(read, {**body, "ttl": written}).ttl_s
    assert None is command_of(read, body).ttl_s
    assert None is command_of(read, {**body, "ttl": None}).ttl_s


@pytest.mark.parametrize(("read", "body"), PROTOCOLS)
@pytest.mark.parametrize("ttl", [-1, "soon", "1.5h", "", "20y", "4000d", 10**12, True, 1.5, [5]])
def test_an_invalid_ttl(read: Callable[..., Any], body: Body, ttl: Any):
    """An invalid duration, or one longer than ten years, is refused by its name."""
    with pytest.raises(ClientError, match="ttl") as refused:
        command_of(read, {**body, "ttl": ttl})
    assert "ttl" == refused.value.param


def test_the_longest_ttl_is_reported():
    """The error names the maximum, also for an unknown unit."""
    with pytest.raises(ValueError, match="ten years"):
        seconds_of("11y")
