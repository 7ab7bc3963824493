"""
Layers that attend to a window are served like any other: warm, several at once, with the same bits,
far past the window.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cairn.engine.prompt.template import Conversation, Message
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import Said, ask, generate, serving
from tests.support.models.model_families import WINDOW, config_of, make_family_model

pytestmark = pytest.mark.gate


def turn(place: int, messages: tuple[Message, ...] = ()) -> Conversation:
    """One more turn of a conversation that no other place has."""
    said = f"{place} {len(messages)} " + "stone on stone " * (12 + 3 * place)
    return Conversation(messages=(*messages, Message(role="user", content=said)))


def test_sessions_that_run_past_the_window(model_directory: Path, tmp_path: Path) -> None:
    """
    Two conversations of three turns each, in parallel, reuse what they computed, and their last
    answers have the bits of a cold server that serves no other request.
    """
    directory = make_family_model(tmp_path / "model", model_directory, config_of("gpt_oss"))
    store, heard = MemoryStore(), list[tuple[Conversation, Said]]()
    tested: list[Row] = []

    async def main() -> None:
        empty = MemoryStore()
        async with serving(directory, empty, decode_rows=4):
            pass  # spares the cold servers the self-test
        tested.extend(empty.rows)
        async with serving(directory, store, decode_rows=4) as warm:

            async def talk(place: int) -> None:
                conversation = turn(place)
                for _ in range(3):
                    said = await ask(warm, generate(conversation, max_tokens=32))
                    heard.append((conversation, said))
                    answer = Message(role="assistant", content=said.text)
                    conversation = turn(place, (*conversation.messages, answer))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(talk, 0)
                nursery.start_soon(talk, 1)
        for conversation, said in heard[-2:]:
            async with serving(directory, MemoryStore(tested), decode_rows=4) as cold:
                missed = await ask(cold, generate(conversation, max_tokens=32))
            assert missed.accepted.cached_tokens == 0
            assert missed.tokens == said.tokens

    trio.run(main)

    last = heard[-1][1]
    assert last.finished.prompt_tokens > 2 * WINDOW
    assert last.accepted.cached_tokens > WINDOW
    assert replay(store.read()).findings == ()
