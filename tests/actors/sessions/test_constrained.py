"""
An answer that its grammar can no longer constrain ends alone, with a reason, and nothing breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from cairn.actors.errors import FormatRefused
from cairn.actors.requests.messages import Generate
from cairn.engine.answer.grammar import Constraint
from cairn.engine.answer.grammar_matcher import GrammarMatcher
from cairn.engine.errors import GrammarDeadEnd
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import Said, ask, generate, serving


def command(text: str, **changes: Any) -> Generate:
    """A request of one message, with thinking switched off."""
    message = Message(role="user", content=text)
    conversation = Conversation(messages=(message,), template={"enable_thinking": False})
    return generate(conversation, **changes)


HELD = Constraint(schema={"type": "array", "items": {"type": "string"}, "minItems": 40})


@pytest.mark.parametrize("tokens", [0, 5], ids=["at the first token", "in the midst"])
def test_an_answer_whose_grammar_cannot_be_followed_further(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """
    Its client gets the reason, the journal records it, the answer next to it continues with the
    same bits, and its session serves the next request.
    """
    allowed = GrammarMatcher.allowed
    failing = False

    def until(matcher: GrammarMatcher, answer: Sequence[int]) -> Any:
        if failing and len(answer) == tokens:
            raise GrammarDeadEnd("the library takes no more")
        return allowed(matcher, answer)

    store = MemoryStore()
    beside: list[Said] = []

    async def main() -> None:
        nonlocal failing
        async with serving(model_directory, store) as server:
            alone = await ask(server, command("Alone."))

            async def other() -> None:
                beside.append(await ask(server, command("Alone.", cache_prompt=False)))

            prepared = server.loaded.preparer.constrained

            def then_fails(*arguments: Any) -> Any:
                nonlocal failing
                found = prepared(*arguments)
                failing = True
                return found

            monkeypatch.setattr(GrammarMatcher, "allowed", until)
            monkeypatch.setattr(server.loaded.preparer, "constrained", then_fails)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                with pytest.raises(FormatRefused, match="the library takes no more") as caught:
                    await ask(server, command("Held.", constraint=HELD, session_name="held"))
            assert "answer" == caught.value.about
            monkeypatch.undo()
            failing = False
            again = await ask(
                server, command("Held.", constraint=HELD, session_name="held", max_tokens=9)
            )
            assert "[" == again.text[0]
            assert alone.tokens == beside[0].tokens

    trio.run(main)

    events = [decode(row).event for row in store.rows]
    (cancelled,) = (one for one in events if isinstance(one, ev.RequestCancelled))
    assert ("held", "grammar_failed") == (cancelled.session, cancelled.stage)
    drawn = sum(
        len(one.sampled)
        for one in events
        if isinstance(one, ev.CacheExtended) and one.request == cancelled.request
    )
    assert tokens == drawn
    assert () == replay(store.read()).findings


def test_the_bytes_of_tokens_join_to_the_text(model_directory: Path) -> None:
    """This also holds if a character is several tokens, each of which has the text U+FFFD."""
    stone = Constraint(schema={"const": "\U0001faa8"}, strict=True)
    said: list[Said] = []

    async def main() -> None:
        async with serving(model_directory) as server:
            said.append(await ask(server, command("Which?", constraint=stone)))

    trio.run(main)
    tokens = said[0].tokens
    assert '"\U0001faa8"' == said[0].text
    assert "\ufffd" in {token.text for token in tokens}
    assert said[0].text.encode() == b"".join(token.raw or b"" for token in tokens)
    for token in tokens:
        known = {one[0]: one[2] for one in token.top}
        assert token.raw == known.get(token.id, token.raw)
