"""
A conversation with much to prewarm, and helpers to examine it.

The model thinks and calls a tool. Pebble's template, like Qwen3's, drops thoughts as soon as the
user speaks again. The next prompt therefore contains hardly anything of what was generated since
the last user message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.actors.requests.messages import Generate
from cairn.actors.server import Server
from cairn.engine.prompt.template import Conversation, Message, message_of
from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from cairn.journal.tenants import LOCAL
from tests.gate.conversation import words
from tests.support.in_process_server import Said, generate, serving, serving_fake

C = 64
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weigh_stone", "arguments": {"stone": "slate"}},
}


@attrs.define
class Journaled:
    """
    A journal, and servers that use it.

    Attributes:
        model: its directory; None for the fake engine.
    """

    model: Path | None = None
    store: MemoryStore = attrs.field(factory=MemoryStore)

    def serving(self, **changes: Any) -> Any:
        """A server on the journal."""
        if self.model is None:
            return serving_fake(self.store, **changes)
        return serving(self.model, self.store, **changes)

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        """The journal's events of some kinds."""
        found = (decode(row).event for row in self.store.rows)
        return [event for event in found if isinstance(event, kinds)]

    def is_valid(self) -> bool:
        """Whether the journal has no violation, recorded or not."""
        return replay(self.store.read()).findings == ()


def thinking(place: int = 1, **changes: Any) -> Generate:
    """A request after a tool's result, before which the assistant thought for some 200 tokens."""
    messages = (
        Message(role="system", content="You weigh stones. " + words(place, 10)),
        Message(role="user", content=words(place + 1, 10)),
        Message(role="assistant", content="", reasoning=words(place + 2, 40), tool_calls=(CALL,)),
        Message(role="tool", content=words(place + 3, 40), tool_call_id="call_1"),
    )
    return generate(Conversation(messages=messages), **changes)


NEW = Message(role="user", content="And the next one?")


def onward(command: Generate, said: Said, message: Message = NEW, **changes: Any) -> Generate:
    """The next turn of a conversation."""
    assert command.conversation is not None
    messages = (*command.conversation.messages, message_of(said.parts), message)
    conversation = attrs.evolve(command.conversation, messages=messages)
    return attrs.evolve(command, conversation=conversation, **changes)


def prefilled(said: Said) -> int:
    """How many tokens of the prompt were prefilled for an answer."""
    return said.finished.prompt_tokens - said.finished.cached_tokens


def new_tokens(server: Server) -> int:
    """How many tokens the new message takes, with the template's text around it."""
    alone = generate(Conversation(messages=(NEW,)))
    return len(server.loaded.preparer.prepared(alone, LOCAL).prompt_ids)


def found_wrong(server: Server, key: str) -> None:
    """Have a block in memory found damaged: when it is written, its digest is different."""
    state = server.loaded.sequencer.state
    wrong = ev.BlockSpilled(
        key=key,
        digest="0" * 16,
        bytes=1,
        disk_blocks=state.pool.disk_blocks + 1,
        disk_bytes=state.pool.disk_bytes + 1,
    )
    with pytest.raises(BugError):
        server.loaded.sequencer.append(wrong)
