"""
Prompts that are only prefilled: a client asks for an answer of no tokens, so that their KV exists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.actors.requests.messages import Generate
from cairn.engine.answer.grammar import Constraint
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import ask, generate, serving, wait_idle

C = 16
HELD = Constraint(schema={"type": "array", "items": {"type": "string"}})


def command(ids: tuple[int, ...], **changes: Any) -> Generate:
    """A request of a raw prompt."""
    asked = generate(Conversation(messages=()), **changes)
    return attrs.evolve(asked, conversation=None, prompt=ids)


@pytest.mark.parametrize("over", [-1, 0, 1], ids=["short of a chunk", "whole chunks", "over"])
@pytest.mark.parametrize("prewarm", [False, True], ids=["settled", "anticipated"])
def test_a_prompt_is_prefilled_without_an_answer(
    model_directory: Path, over: int, prewarm: bool
) -> None:
    """
    No token is answered, billed or shadow checked. The next request with that prompt reuses all
    but its last token and has the bits of a cold answer, and the journal verifies.
    """
    ids = tuple(range(20, 20 + 4 * C + over))
    store = MemoryStore()
    settings: dict[str, Any] = {"block_tokens": C, "shadow_share": 1.0, "prewarm": prewarm}

    async def main() -> None:
        async with serving(model_directory, store, **settings) as server:
            read = await ask(server, command(ids, max_tokens=0))
            assert ("", (), "length") == (read.text, read.tokens, read.finished.finish_reason)
            assert (0, len(ids)) == (read.finished.completion_tokens, read.finished.prompt_tokens)
            await wait_idle(server)
            warm = await ask(server, command(ids, max_tokens=8))
            assert len(ids) - 1 == warm.finished.cached_tokens
            cold = await ask(server, command(ids, max_tokens=8, cache_prompt=False))
            assert warm.tokens == cold.tokens != ()

    trio.run(main)
    found = [decode(row).event for row in store.rows]
    first, *others = [one for one in found if isinstance(one, ev.RequestFinished)]
    assert (0, 0, "length") == (first.answer_tokens, first.completion_tokens, first.finish_reason)
    emitted = {one.request for one in found if isinstance(one, ev.TokensEmitted)}
    assert emitted == {one.request for one in others}
    assert () == replay(store.read()).findings
    began = {one.request for one in found if isinstance(one, ev.ShadowStarted)}
    assert first.request not in began


@pytest.mark.parametrize("changes", [{}, {"constraint": HELD}, {"choices": 2}])
def test_a_conversation_is_prefilled_without_an_answer(
    model_directory: Path, changes: dict[str, Any]
) -> None:
    """
    The next request continues it warm, whatever constraint its answer had and however many choices.
    """
    store = MemoryStore()
    said = (Message(role="user", content="Stone on stone on stone. " * 12),)

    async def main() -> None:
        async with serving(model_directory, store, block_tokens=C) as server:
            asked = Conversation(messages=said)
            read = await ask(server, generate(asked, max_tokens=0, **changes))
            assert "" == read.text
            await wait_idle(server)
            warm = await ask(server, generate(asked, max_tokens=8))
            assert warm.finished.prompt_tokens - 1 == warm.finished.cached_tokens

    trio.run(main)
    assert () == replay(store.read()).findings
