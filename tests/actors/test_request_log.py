"""One log line for each request, however it ended."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from cairn.actors.errors import Broken
from cairn.actors.requests.messages import Accepted, Finished
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.held_engine import Hold
from tests.support.in_process_server import ask, generate, local, serving, serving_fake

HELLO = Conversation(messages=(Message(role="user", content="Hello. " * 60),))
# Another conversation with the same beginning: its session restores blocks from the prefix cache.
HELLO_AGAIN = Conversation(messages=(Message(role="user", content="Hello. " * 60 + "Again."),))


def test_each_request_is_one_line(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An answer, a cancelled request and one that met a bug are each one line with their ids and
    numbers. The bug is a line of its own with its id.
    """

    async def main() -> None:
        async with serving(model_directory) as server:
            await ask(server, generate(HELLO))
            async with local(server).generate(generate(HELLO, max_tokens=500)) as replies:
                async for reply in replies:
                    if isinstance(reply, Accepted):
                        break

            def broken(*args: object, **named: object) -> None:
                raise RuntimeError("the device gave up")

            monkeypatch.setattr(server.loaded.engine.device, "share", broken)
            with pytest.raises(Broken):
                await ask(server, generate(HELLO_AGAIN))

    with capture_logs() as lines:
        trio.run(main)

    requests = [line for line in lines if line["event"] == "request"]
    bugs = [line for line in lines if line["event"] == "invariant violated"]
    assert len(requests) == 3
    assert len(bugs) == 1
    answered = requests[0]
    assert ("new_session", "cold_start", 0) == (
        answered["path"],
        answered["reason"],
        answered["reused_tokens"],
    )
    assert answered["prompt_tokens"] == answered["prefilled_tokens"]
    assert answered["ended"] == "length"
    assert answered["generated_tokens"] == 24
    broken = [line for line in requests if line["ended"] == "bug"]
    assert [bugs[0]["bug_id"]] == [line["bug_id"] for line in broken]
    assert bugs[0]["request"] == broken[0]["request"]
    assert any(line["ended"].startswith("cancelled") for line in requests)


def test_an_answer_has_the_times_of_its_line() -> None:
    """The times that come with an answer, each request's own, are those that the log has."""

    async def main() -> list[Finished]:
        async with serving_fake() as server:
            return [
                (await ask(server, generate(asked, max_tokens=tokens))).finished
                for asked, tokens in ((HELLO, 9), (HELLO, 5), (HELLO_AGAIN, 7))
            ]

    with capture_logs() as lines:
        finished = trio.run(main)

    requests = [line for line in lines if line["event"] == "request"]
    for line, end in zip(requests, finished, strict=True):
        turn = end.turn
        assert turn is not None
        assert (line["prompt_tokens"], line["reused_tokens"]) == (turn.prompt, turn.reused)
        assert line["generated_tokens"] == end.completion_tokens == turn.generated
        assert line["total_ms"] == (turn.ended_us - turn.received_us) // 1000
        assert line["first_token_ms"] == (turn.first_us - turn.received_us) // 1000


def test_several_answers_have_their_own_times() -> None:
    """Each answer of a request is a request of its own, with its own turn."""

    async def main() -> list[Finished]:
        async with serving_fake() as server:
            command = attrs.evolve(generate(HELLO, max_tokens=6), choices=3)
            async with local(server).generate(command) as replies:
                return [reply async for reply in replies if isinstance(reply, Finished)]

    turns = [end.turn for end in trio.run(main)]
    assert 3 == len({turn.received for turn in turns if turn is not None})


def test_a_request_is_recorded_with_its_wait_and_its_caller() -> None:
    """How long it waited from its arrival on, and the span that the client called from."""
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    store, clock = MemoryStore(), MockClock(rate=1.0)

    async def main() -> None:
        async with serving_fake(store, decode_rows=1) as server, trio.open_nursery() as nursery:
            hold = Hold(server, "run_chunk")
            command = attrs.evolve(generate(HELLO), traceparent=caller)
            nursery.start_soon(ask, server, command)
            await hold.wait()
            nursery.start_soon(ask, server, generate(HELLO_AGAIN))
            while not server.statistics().queued:
                await trio.lowlevel.checkpoint()
            clock.jump(500)
            hold.go.set()

    trio.run(main, clock=clock)
    first, second = (
        one.event for one in map(decode, store.read()) if isinstance(one.event, ev.RequestReceived)
    )
    assert (caller, None) == (first.traceparent, second.traceparent)
    assert second.waited_us >= 500_000_000 > first.waited_us
