"""
Clients that disconnect: wherever their request is, it ends, this is journaled, and the next is
served.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import servers
from tests.support.processes.subprocess_server import (
    Listener,
    Serving,
    ask,
    assistant,
    eventually,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """A server that answers one request at a time, and often sends keep-alives."""
    with servers(tmp_path_factory.mktemp("single"), model_directory) as start:
        # No idle session gives up its slab by itself: one test compares the server's health.
        server = start("--decode-rows", 1, "--heartbeat", 0.05, "--slab-idle", 86_400)
        ask(server, user("Hello"), max_tokens=2)  # each test finds an idle session, also the first
        yield server


def assert_served(server: Serving) -> None:
    """Assert that the server becomes idle, and that the next request is answered."""
    health = server.wait_idle()
    assert {"queued": 0, "running": 0} == health["queue"]
    assert {"idle"} == set(health["sessions"])
    assert 2 == ask(server, user("Hello"), max_tokens=2).completion_tokens


def running(server: Serving) -> None:
    """Wait until a session runs a request."""
    eventually(lambda: server.health()["queue"]["running"] == 1)


def test_in_the_queue(single: Serving, lengthy: Any):
    """It is rejected as 499; the running request is not affected."""
    before = single.position()
    first = Listener(single, **lengthy[0], max_tokens=250).decoding()
    second = Listener(single, user("Hello"))
    single.queued(1)
    second.leave()
    single.queued(0)
    assert not first.ended.is_set()
    (event,) = eventually(lambda: single.events(ev.RequestRejected, after=before))
    assert (499, "client_gone") == (event.status, event.code)
    assert 250 == len(first.end().tokens)
    assert_served(single)


def read(comment: str) -> int:
    """How much of the prompt was prefilled, from a comment such as `: prefill 128/2048`."""
    found = re.match(r": prefill (\d+)/\d+", comment)
    return int(found[1]) if found else 0


def test_in_prefill(single: Serving):
    """The sealed blocks of its prompt stay: if sent again, the prompt starts from there."""
    before = single.position()
    talk = [user(f"In prefill: {PATH * 150}")]
    client = Listener(single, *talk, max_tokens=2)
    client.until(lambda it: any(read(comment) >= 128 for comment in it.comments))
    client.leave()
    single.wait_idle()
    (event,) = single.events(ev.RequestCancelled, after=before)
    assert (client.request, "prefill") == (event.request, event.stage)
    # Not a short block of the session before.
    sealed = len(single.events(ev.BlockSealed, after=before, session=event.session))
    again = ask(single, *talk, max_tokens=2)
    assert ask(single, *talk, max_tokens=2, cache_prompt=False).bits == again.bits
    assert ("continuation", None) == (again.path, again.reason)
    assert sealed * 64 == again.cached_tokens
    assert again.cached_tokens < again.prompt_tokens - 64
    assert_served(single)


def test_in_decoding(single: Serving, lengthy: Any):
    """The answer ends, and the conversation continues with the part that the client has."""
    before = single.position()
    client = Listener(single, **lengthy[1], max_tokens=250).decoding()
    client.leave()
    single.wait_idle()
    (event,) = single.events(ev.RequestCancelled, after=before)
    assert (client.request, "decode") == (event.request, event.stage)
    talk = [*lengthy[1]["messages"], assistant(client.text), user("And then?")]
    answer = ask(single, *talk)
    assert ("continuation", event.session) == (answer.path, answer.session)
    assert_served(single)


@pytest.mark.parametrize("stream", [True, False])
def test_before_anything_is_read(single: Serving, lengthy: Any, stream: bool):
    """A client that never reads its response, streamed or whole, counts as disconnected."""
    before = single.position()
    # Long enough to be cut off, and not sent before.
    asked = {**lengthy[0], "seed": 1000 + stream, "max_tokens": 20_000}
    client = Listener(single, **asked, stream=stream, logprobs=False)
    running(single)
    client.leave()
    single.settled()
    cancelled = single.events(ev.RequestCancelled, after=before)
    assert 1 == len(cancelled)
    assert cancelled[0].stage in ("prefill", "decode")
    assert [] == single.events(ev.RequestFinished, after=before)
    assert_served(single)


def test_in_the_middle_of_the_body(single: Serving):
    """A request that never arrived completely changes nothing."""
    before = single.settled()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
    with socket.create_connection(single.address) as connection:
        connection.sendall(head + b'{"messages": [')
    assert before == single.wait_idle()
    assert_served(single)


def test_again_and_again(single: Serving, lengthy: Any):
    """Only idle sessions hold slabs, however many clients have disconnected."""
    before = single.position()
    for seed in range(2000, 2008):
        Listener(single, **{**lengthy[0], "seed": seed}, max_tokens=250).accepted().leave()
    health = single.settled()
    assert health["pool"]["slabs"] <= health["sessions"]["idle"]
    cancelled = single.events(ev.RequestCancelled, after=before)
    finished = single.events(ev.RequestFinished, after=before)
    assert 8 == len(cancelled) + len(finished)
    assert_served(single)
