"""One log line for each request, however it ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from cairn.actors.errors import Broken
from cairn.actors.requests.messages import Accepted
from cairn.engine.prompt.template import Conversation, Message
from tests.support.in_process_server import ask, generate, local, serving

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
