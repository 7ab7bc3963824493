"""Little room: slabs and blocks are taken from other sessions, and no answer changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import Start, servers
from tests.support.processes.subprocess_server import (
    Answer,
    Listener,
    Serving,
    ask,
    ask_with,
    assistant,
    together,
    user,
)

STORY = "The stone lies on the path, and the path goes over the hill. "


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """A server with one slab."""
    with servers(tmp_path_factory.mktemp("narrow"), model_directory) as start:
        yield start("--pool-slabs", 1)


def long_enough(name: object) -> dict[str, str]:
    """A message that fills some blocks, and shares none with other names."""
    return user(f"{name}: {STORY * 12}")


def in_turn(server: Serving, cold: Serving, count: int, turns: int) -> list[Answer]:
    """Conversations that take turns; each answer is that of a cold server."""
    talks = [[long_enough(number)] for number in range(count)]
    answers = []
    for _ in range(turns):
        for talk in talks:
            answer = ask(server, *talk)
            assert ask(cold, *talk, cache_prompt=False).bits == answer.bits
            talk += [assistant(answer.text), user("And then?")]
            answers.append(answer)
    return answers


def assert_no_memory(response: Any) -> None:
    """Assert a refusal after which an official client retries."""
    assert 503 == response.status_code
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert ("overloaded_error", "no_memory") == (error["type"], error["code"])
    assert "slab" in error["message"]


@pytest.mark.long
def test_one_slab_for_three_conversations(narrow: Serving, cold: Serving):
    """Each takes the slab of an idle session, and continues from its sealed blocks."""
    before = narrow.position()
    answers = in_turn(narrow, cold, count=3, turns=2)
    assert {"new_session": 3, "continuation": 3} == Counter(answer.path for answer in answers)
    assert all(answer.cached_tokens >= 128 for answer in answers[3:])
    assert 1 == narrow.wait_idle()["pool"]["slabs"]
    assert len(narrow.events(ev.SlabReleased, after=before)) >= 5


@pytest.mark.long
def test_a_session_that_settles_gives_up_its_slab(narrow: Serving, lengthy: tuple[Any, Any]):
    """
    A request right after another session's answer is served, although that session still settles.
    """
    before = narrow.position()
    client = narrow.client()
    for seed in range(3):
        ask_with(client, **{**lengthy[0], "seed": seed, "max_tokens": 200})
        answer = ask_with(client, user(f"Number {seed}"), max_tokens=2)
        assert 2 == answer.completion_tokens
    narrow.wait_idle()
    assert [] == narrow.events(ev.RequestCancelled, after=before)


def test_every_slab_in_use(narrow: Serving, cold: Serving, lengthy: tuple[Any, Any]):
    """
    Requests that find no slab wait for one; the running one is not affected.
    """
    before = narrow.position()
    running = Listener(narrow, **lengthy[0], max_tokens=250).decoding()
    ask_it = partial(ask_with, narrow.client(), user("Hello"), max_tokens=4)
    assert [4, 4] == [one.completion_tokens for one in together([ask_it, ask_it])]
    running.end()
    alone = ask(cold, **lengthy[0], max_tokens=250, cache_prompt=False)
    assert (alone.text, alone.tokens) == (running.text, running.tokens)
    assert 4 == ask(narrow, user("Hello"), max_tokens=4).completion_tokens
    narrow.wait_idle()
    assert [] == narrow.events(ev.RequestCancelled, after=before)


def test_blocks_are_evicted(start: Start, cold: Serving):
    """
    Four blocks for three conversations, and no files: they evict each other's blocks, and the
    reason says so.
    """
    server = start("--pool-slabs", 1, "--blocks-mb", 1, "--disk-mb", 0)
    answers = in_turn(server, cold, count=3, turns=2)
    assert 6 == len(answers)
    assert "evicted" in {answer.reason for answer in answers[3:]}
    evicted = server.events(ev.BlockEvicted)
    assert evicted
    assert max(event.memory_bytes for event in evicted) <= 1024 * 1024
    health = server.wait_idle()
    assert health["blocks"]["bytes"] <= health["blocks"]["bytes_total"] == 1024 * 1024
    assert 0 == health["blocks"]["disk_count"]


@pytest.mark.long
def test_evicted_blocks_are_loaded_from_files(start: Start, cold: Serving):
    """
    With files, every conversation continues from blocks, although memory has room for only one.
    """
    server = start("--pool-slabs", 1, "--blocks-mb", 1)
    answers = in_turn(server, cold, count=3, turns=2)
    assert {("continuation", None)} == {(a.path, a.reason) for a in answers[3:]}
    assert all(answer.cached_tokens >= 128 for answer in answers[3:])
    assert server.events(ev.BlockLoaded)
    health = server.wait_idle()
    assert health["blocks"]["bytes"] <= 1024 * 1024
    assert health["blocks"]["disk_count"] > health["blocks"]["count"]


@pytest.mark.long
def test_blocks_are_evicted_while_others_need_them(start: Start):
    """A block that is being evicted is not shared, and a shared block is not evicted."""
    server = start("--blocks-mb", 1, "--pool-slabs", 8)

    def conversation(number: int) -> None:
        client = server.client()
        for turn in range(6):
            ask_with(client, long_enough((number + 3 * turn) % 6), max_tokens=1)

    together([partial(conversation, number) for number in range(6)])
    server.wait_idle()
    assert server.events(ev.BlockEvicted)
    assert server.events(ev.BlocksRestored)
    assert [] == server.events(ev.InvariantViolated)


def test_one_slab_and_a_conversation_that_outgrows_it(narrow: Serving):
    """
    Two requests need the slab at once, and the one that holds it needs a larger one: both are
    answered.
    """
    client = narrow.client()

    def outcome(*talk: dict[str, str], **body: Any) -> str:
        return ask_with(client, *talk, **{"max_tokens": 2, **body}).finish_reason

    for number in range(6):
        talk = [user(f"Number {number}")]
        answer = ask_with(client, *talk, max_tokens=2)
        talk += [assistant(answer.text), user("More.")]
        narrow.wait_idle()
        ends = together(
            [
                partial(outcome, *talk, max_tokens=600, stop=[" "]),
                partial(outcome, user(f"Another {number}")),
            ]
        )
        assert set(ends) <= {"stop", "length"}


@pytest.mark.long
def test_a_pool_for_one_short_prompt(start: Start):
    """
    The context is what the pool can hold, and the startup banner says so. A longer prompt is
    refused with all numbers and the option, and an answer ends when the pool is full.
    """
    server = start("--pool-mb", 1)
    context = server.health()["context_tokens"]
    assert context < 1024
    bound = f"  context      {context} tokens (of the model's 65536; --pool-mb limits it)"
    assert bound in server.greeting()
    refused = server.post(messages=[user(STORY * 200)])
    assert 400 == refused.status_code
    error = refused.json()["error"]
    assert "context_length_exceeded" == error["code"]
    assert f"{context} tokens" in error["message"]
    own = "the model itself takes 65536, which the server's --pool-mb bounds)"
    assert error["message"].endswith(own)
    assert 4 == ask(server, user("Hello"), max_tokens=4).completion_tokens
    for tokens in (64, 100_000):
        body = {"messages": [user("Hello")], "temperature": 3.0, "max_tokens": tokens}
        assert server.post(**body).json()["usage"]["total_tokens"] <= context
