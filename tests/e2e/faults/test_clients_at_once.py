"""More clients than rows: waiting clients are informed, and each gets the same answer as alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import Start, servers
from tests.support.processes.subprocess_server import (
    Answer,
    Listener,
    Serving,
    ask,
    ask_with,
    eventually,
    together,
    user,
)

STORY = "The stone lies on the path, and the path goes over the hill. "


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """A server with four rows and room for four more requests in its queue."""
    with servers(tmp_path_factory.mktemp("busy"), model_directory) as start:
        yield start("--queue", 4, "--heartbeat", 0.05)


def questions(lengthy: Any) -> list[dict[str, Any]]:
    """
    Four greedy and four sampled requests, long and short, two of them equal except for the seed.
    """
    shared = f"{STORY * 10} What of it?"
    return [
        {**lengthy[0], "max_tokens": 150},
        {**lengthy[1], "max_tokens": 90},
        {"messages": [user(shared)], "temperature": 3.0, "seed": 5, "max_tokens": 80},
        {"messages": [user(shared)], "temperature": 3.0, "seed": 6, "max_tokens": 80},
        {"messages": [user(shared)], "max_tokens": 60},
        {"messages": [user("What is a cairn?")], "max_tokens": 60},
        {"messages": [user("Count the stones.")], "max_tokens": 60},
        {"messages": [user(STORY * 60)], "top_p": 0.9, "temperature": 1.0, "seed": 7},
    ]


@pytest.fixture(scope="module")
def alone(cold: Serving, lengthy: Any) -> list[Answer]:
    """The answers of a server that gets one request at a time, and reuses nothing."""
    return [ask(cold, **body, cache_prompt=False) for body in questions(lengthy)]


def test_eight_on_four_rows(busy: Serving, alone: list[Answer], lengthy: Any):
    """Tokens and log-probabilities are those of a server that gets one request at a time."""
    clients = [Listener(busy, **body) for body in questions(lengthy)]
    for client in clients:
        client.end()
    assert [True] * 8 == [client.done for client in clients]
    for expected, client in zip(alone, clients, strict=True):
        assert expected.text == client.text
        assert expected.tokens == client.tokens
        assert expected.finish_reason == client.finish_reason
    assert 1 < len({client.text for client in clients[2:5]})
    waited = [client for client in clients if ": waiting" in client.comments]
    assert len(waited) >= 3  # one may have found a row that became free


def test_the_same_requests_again(busy: Serving, alone: list[Answer], lengthy: Any):
    """The same requests again, with most of their blocks cached: the same answers."""
    answers = together([partial(ask, busy, **body) for body in questions(lengthy)])
    assert [answer.bits for answer in alone] == [answer.bits for answer in answers]
    assert any(answer.cached_tokens for answer in answers)


def test_a_full_queue(busy: Serving, lengthy: Any):
    """
    A request beyond rows and queue gets a 429 with a time to retry; the official client retries by
    itself and is answered.
    """
    before = busy.position()
    running = [
        Listener(busy, **{**lengthy[n % 2], "seed": n}, max_tokens=20_000, logprobs=False)
        for n in range(4)
    ]
    for client in running:
        client.accepted()
    queued = [Listener(busy, user("Hello"), max_tokens=2) for _ in range(4)]
    busy.queued(4)
    refused = busy.post(messages=[user("Hello")])
    assert 429 == refused.status_code
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert ("rate_limit_error", "queue_full", None) == (
        error["type"],
        error["code"],
        error["param"],
    )
    with pytest.raises(openai.RateLimitError):
        ask(busy, user("Hello"))

    def come_back() -> int:
        return ask_with(busy.client(max_retries=3), user("Hello"), max_tokens=2).completion_tokens

    def make_room() -> int:
        rejected = 3  # two above, and the first try of the client that retries
        eventually(lambda: len(busy.events(ev.RequestRejected, after=before)) >= rejected)
        for client in running:
            client.leave()
        return 0

    assert [2, 0] == together([come_back, make_room])
    assert [True] * 4 == [client.end().done for client in queued]
    rejection = busy.events(ev.RequestRejected, after=before)[0]
    assert rejection.request == refused.headers["x-request-id"]
    logged = [line for line in busy.log() if line.get("request") == rejection.request]
    assert ["request refused", "request rejected"] == sorted(line["event"] for line in logged)


@pytest.mark.long
def test_without_a_queue(start: Start, lengthy: Any):
    """
    Without a queue there is room for one request per row, also for those that arrive together.
    """
    server = start("--queue", 0)
    answers = together([partial(ask, server, user(f"Number {n}"), max_tokens=2) for n in range(4)])
    assert [2] * 4 == [answer.completion_tokens for answer in answers]
    running = [
        Listener(server, **{**lengthy[0], "seed": n}, max_tokens=20_000, logprobs=False)
        for n in range(4)
    ]
    for client in running:
        client.accepted()
    assert 429 == server.post(messages=[user("Hello")]).status_code
    for client in running:
        client.leave()
    server.wait_idle()
    assert 200 == server.post(messages=[user("Hello")], max_tokens=2).status_code
