"""A client that asks for it gets its path explained, and nothing of that reaches the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from structlog.testing import capture_logs

from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import Said, ask, events_of, generate, serving_fake, wait_idle

pytestmark = pytest.mark.trio

HELP = "You are of help, in every way that there is. "
TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": "x"}}
OTHER: Mapping[str, Any] = {"type": "function", "function": {"name": "y"}}


def conversation(system: str, *said: str, tools: tuple[Any, ...] = ()) -> Conversation:
    """A conversation with a system prompt, which its user begins."""
    roles = ("user", "assistant")
    messages = [Message(role="system", content=system)]
    messages += [Message(role=roles[n % 2], content=text) for n, text in enumerate(said)]
    return Conversation(messages=tuple(messages), tools=tools)


async def two(
    one: Conversation, other: Conversation, store: MemoryStore | None = None, **of: Any
) -> Said:
    """The answer to a second request, which comes when all is settled after the first."""
    async with serving_fake(store) as server:
        await ask(server, generate(one))
        await wait_idle(server)
        return await ask(server, generate(other, **{"explain": True, **of}))


async def test_a_clock_in_the_system_prompt() -> None:
    """
    The conversation that was meant is found, and the sentence says what became what. The journal
    has both texts as private fields, and the log has neither.
    """
    store = MemoryStore()
    with capture_logs() as logged:
        said = await two(
            conversation("It is 14:05. " + HELP, "Hello there!"),
            conversation("It is 14:06. " + HELP, "Hello there!", "abc", "And now?"),
            store,
        )
    text = said.accepted.explanation
    assert text is not None
    assert "The system prompt differs from that of session" in text
    assert "`14:05` became `14:06`. A clock in the system prompt" in text
    path = events_of(store, ev.PathSelected)[-1]
    assert ("diverged", "system_changed", 18) == (
        path.reason,
        path.diverged_part,
        path.diverged_token,
    )
    assert "14:06" in path.diverged_text
    assert "14:05" in path.diverged_from
    assert not [line for line in logged if "14:0" in str(line) or "differs" in str(line)]


async def test_tools_in_another_order() -> None:
    """It is said that they are the same."""
    said = await two(
        conversation(HELP, "Hello there!", tools=(TOOL, OTHER)),
        conversation(HELP, "Hello there!", "abc", "And now?", tools=(OTHER, TOOL)),
    )
    assert "sent the same tools in another order" in str(said.accepted.explanation)


async def test_who_does_not_ask_gets_none() -> None:
    """An explanation quotes the prompt, so it is only sent where a client wants it."""
    said = await two(conversation(HELP, "Hello!"), conversation(HELP, "Hi!"), explain=False)
    assert None is said.accepted.explanation
    assert "differs" not in repr(attrs.evolve(said.accepted, explanation="it differs"))
