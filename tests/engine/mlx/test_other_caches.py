"""
Models with recurrent states on mlx-lm's own caches, which cannot be trimmed, are served cold, and
P1 holds for them too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import Said, ask, generate, serving
from tests.support.models.model_families import config_of, make_family_model


@pytest.fixture(params=["mamba", "lfm2"], ids=["recurrent only", "recurrent beside attention"])
def family_directory(request: pytest.FixtureRequest, model_directory: Path, tmp_path: Path) -> Path:
    """A small model of the family with random weights, and the tokenizer of the random model."""
    return make_family_model(tmp_path / "model", model_directory, config_of(request.param))


@pytest.mark.long_but("recurrent only")
@pytest.mark.gate
def test_served_cold_with_the_same_bits(family_directory: Path) -> None:
    """
    A conversation is served turn by turn without reuse. Each answer has the same bits as that of a
    fresh server, and the journal is valid.
    """
    store = MemoryStore()
    talk: list[tuple[Conversation, Said]] = []

    async def main() -> None:
        messages: list[Message] = []
        async with serving(family_directory, store, kv_cache="mlx-lm") as server:
            for turn in range(3):
                messages.append(Message(role="user", content=f"{turn} " + "stone on stone " * 15))
                conversation = Conversation(messages=tuple(messages))
                said = await ask(server, generate(conversation, max_tokens=12))
                messages.append(Message(role="assistant", content=said.text))
                talk.append((conversation, said))
        for conversation, said in talk:
            async with serving(family_directory, kv_cache="mlx-lm") as cold:
                missed = await ask(cold, generate(conversation, max_tokens=12))
            assert missed.tokens == said.tokens

    trio.run(main)

    assert [("new_session", 0), ("continuation", 0), ("continuation", 0)] == [
        (said.accepted.path, said.accepted.cached_tokens) for _, said in talk
    ]
    assert talk[-1][1].finished.prompt_tokens > 100
    kinds = [row.kind for row in store.rows]
    assert kinds.count("slab_acquired") == kinds.count("slab_released") == 3
    assert replay(store.read()).findings == ()


@pytest.mark.long
@pytest.mark.gate
def test_the_shadow_check_of_an_answer_without_blocks(family_directory: Path) -> None:
    """If nothing is sealed, the tokens and log-probabilities of an answer are compared."""
    store = MemoryStore()

    async def main() -> None:
        async with serving(family_directory, store, kv_cache="mlx-lm", shadow_share=1.0) as server:
            checked = trio.Event()

            def watch(recorded: ev.Recorded) -> None:
                if isinstance(recorded.event, ev.ShadowEnded | ev.ShadowSkipped):
                    checked.set()

            server.observe(watch)
            messages = (Message(role="user", content="stone on stone " * 30),)
            await ask(server, generate(Conversation(messages=messages), max_tokens=12))
            with trio.fail_after(120):
                await checked.wait()

    trio.run(main)

    events = [decode(row).event for row in store.rows]
    (found,) = [event for event in events if isinstance(event, ev.ShadowChecked)]
    (ended,) = [event for event in events if isinstance(event, ev.ShadowEnded)]
    assert ("same", (), 12) == (ended.result, found.keys, found.answer_tokens)
    assert () == replay(store.read()).findings
