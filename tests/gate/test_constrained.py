"""
Answers under a grammar keep P1: a hit has the bits of a miss, alone or among others. Which token is
allowed next follows from the grammar and the tokens, and from no cached state.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.actors.requests.messages import Generate
from cairn.engine.answer.grammar import Constraint
from cairn.engine.answer.grammar_matcher import GrammarMatcher
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.sampling import Sampling
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import TOOLS, words
from tests.gate.test_gate import GREEDY, PENALISED, SAMPLED, rows_of_an_empty_server, same_bits
from tests.support.in_process_server import Said, ask, generate, serving

pytestmark = pytest.mark.gate

SCHEMA = {
    "type": "object",
    "properties": {
        "stone": {"type": "string", "maxLength": 40},
        "marks": {"type": "array", "items": {"enum": ["lichen", "scree", "rain"]}, "maxItems": 9},
    },
    "required": ["stone", "marks"],
}
CONSTRAINTS = (
    Constraint(schema=SCHEMA, calls=("weigh_stone",)),
    Constraint(calls=("weigh_stone",)),
    Constraint(schema={"type": "object"}),
)
SAMPLINGS = (GREEDY, SAMPLED, PENALISED, Sampling(temperature=2.0, top_k=3))


def commands(turns: int = 6) -> list[Generate]:
    """
    The requests of a conversation of some turns, each with its own constraint. The earlier answers
    are fixed, because this test does not depend on them.
    """
    messages = [Message(role="system", content="You know every stone. " + words(700, 90))]
    asked = []
    for turn in range(turns):
        messages.append(Message(role="user", content=words(turn, 12 + 9 * turn)))
        asked.append(
            generate(
                Conversation(
                    messages=tuple(messages), tools=TOOLS, template={"enable_thinking": False}
                ),
                sampling=SAMPLINGS[turn % len(SAMPLINGS)],
                seed=turn,
                max_tokens=48,
                constraint=CONSTRAINTS[turn % len(CONSTRAINTS)],
            )
        )
        messages.append(Message(role="assistant", content=words(turn + 50, 9)))
    return asked


def test_a_hit_is_a_miss(model_directory: Path) -> None:
    """
    Turn by turn on a warm server, and each turn on a cold one: the same bits. Without its
    constraint each answer differs, so the constraints had an effect.
    """
    store = MemoryStore()

    async def main() -> None:
        empty = await rows_of_an_empty_server(model_directory)
        async with serving(model_directory, store) as warm:
            for turn, command in enumerate(commands()):
                said = await ask(warm, command)
                assert (turn > 0) == (said.accepted.cached_tokens > 0)
                async with serving(model_directory, MemoryStore(empty)) as cold:
                    missed = await ask(cold, command)
                    assert 0 == missed.accepted.cached_tokens
                    same_bits(said, missed)
                    free = await ask(cold, attrs.evolve(command, constraint=None))
                    assert free.text != said.text

    trio.run(main)
    assert () == replay(store.read()).findings


@pytest.fixture(params=[4, pytest.param(8, marks=pytest.mark.long)])
def asked(request: pytest.FixtureRequest) -> list[Generate]:
    """What is asked at once."""
    return commands(request.param)


async def each_beside_others(model_directory: Path, asked: list[Generate]) -> list[Said]:
    """The answers of a server that gets all requests at once."""
    found: dict[int, Said] = {}

    async def one(server: Any, place: int) -> None:
        found[place] = await ask(server, asked[place])

    serves = serving(model_directory, decode_rows=4)
    async with serves as server, trio.open_nursery() as nursery:
        for place in range(len(asked)):
            nursery.start_soon(one, server, place)
    return [found[place] for place in range(len(asked))]


async def each_alone(model_directory: Path, asked: list[Generate]) -> list[Said]:
    """The answers of servers that get one request each."""
    empty = await rows_of_an_empty_server(model_directory)
    found = []
    for command in asked:
        async with serving(model_directory, MemoryStore(empty), decode_rows=4) as server:
            found.append(await ask(server, command))
    return found


def test_alone_is_among_others(model_directory: Path, asked: list[Generate]) -> None:
    """Answers under three grammars, on four rows, have the bits that each has alone."""
    together = trio.run(each_beside_others, model_directory, asked)
    alone = trio.run(each_alone, model_directory, asked)
    for one, other in zip(together, alone, strict=True):
        same_bits(one, other)


def test_control_a_matcher_that_saw_other_tokens_differs(
    model_directory: Path, asked: list[Generate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The control: if the allowed tokens depend on earlier requests, the same comparison finds it.
    """
    looks, allowed = itertools.count(), GrammarMatcher.allowed

    def astray(matcher: GrammarMatcher, answer: Any) -> Any:
        found = allowed(matcher, answer)
        if next(looks) % 2 and found.sum() > 1:
            found[found.nonzero()[0][::2]] = False
        return found

    monkeypatch.setattr(GrammarMatcher, "allowed", astray)
    together = trio.run(each_beside_others, model_directory, asked)
    alone = trio.run(each_alone, model_directory, asked)
    assert any(one.tokens != other.tokens for one, other in zip(together, alone, strict=True))
