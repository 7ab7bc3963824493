"""
Drafts of the next tokens change no bit: answers with speculation are those without it.

The controls accept drafts unchecked, and let a draft's row attend to one row too many.
CAIRN_SPECULATION_ANSWERS sets how many answers are compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from cairn.actors.requests.messages import Generate
from cairn.engine.answer.grammar import Constraint
from cairn.engine.mlx import engine as mlx_engine
from cairn.engine.mlx.cache import SlabCache
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.mlx.passes.draft_rows import DIFFERS, ONE_ROW, measured_without_drafts
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.rows.codec import Row
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import words
from tests.support.in_process_server import Said, ask, chat, events_of, generate, serving

pytestmark = [pytest.mark.gate, pytest.mark.timeout(1800)]

ANSWERS = int(os.environ.get("CAIRN_SPECULATION_ANSWERS", "0"))
ROWS = 4
AT_ONCE = 3
"""How many answers decode at once, so that rows of drafts are next to those of others."""

FEW = tuple((token, 30.0) for token in (70, 71, 72, 73))
"""Biases that leave four tokens to draw from, so that drafts are accepted now and then."""
HELD = Constraint(
    schema={"type": "array", "items": {"enum": ["lichen", "liche"]}, "minItems": 12, "maxItems": 30}
)
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, logit_bias=FEW),
    Sampling(temperature=0.7, top_k=2),
    Sampling(temperature=0.0, repetition_penalty=1.05),
    Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.2, logit_bias=FEW),
    Sampling(temperature=0.8, top_p=0.9, min_p=0.01, logit_bias=FEW),
)


def commands(count: int) -> list[Generate]:
    """Requests of many kinds, and their seeds."""
    found = []
    for number in range(count):
        text = words(number % 7, 20 + 3 * (number % 5))
        more: dict[str, Any] = {"max_tokens": 5 + 17 * (number % 4), "top_logprobs": number % 6}
        if number % 5 == 3:
            more["stop"] = ("e", "th")
        if number % 5 == 1:
            more["constraint"] = HELD
            more["max_tokens"] = 60
        found.append(
            generate(
                chat(f"{text} {text}"),
                sampling=SAMPLINGS[number % len(SAMPLINGS)],
                seed=number,
                **more,
            )
        )
    return found


def answers(
    model: Path, rows: Sequence[Row], asked: Sequence[Generate], **changes: Any
) -> tuple[list[Any], MemoryStore]:
    """What the clients get, and the journal."""
    store, said = MemoryStore(list(rows)), dict[int, Said]()

    async def main() -> None:
        async with serving(model, store, decode_rows=ROWS, prewarm=False, **changes) as server:

            async def one(place: int) -> None:
                said[place] = await ask(server, asked[place])

            for first in range(0, len(asked), AT_ONCE):
                async with trio.open_nursery() as nursery:
                    for place in range(first, min(first + AT_ONCE, len(asked))):
                        nursery.start_soon(one, place)

    trio.run(main)
    bits = [
        (said[place].tokens, said[place].text, said[place].finished.finish_reason)
        for place in range(len(asked))
    ]
    return bits, store


@pytest.fixture(scope="module")
def tested(model_directory: Path) -> list[Row]:
    """The journal of a start: it spares the others their self-test."""
    return list(answers(model_directory, (), ())[1].rows)


@pytest.fixture(scope="module", params=[ANSWERS or 15, pytest.param(30, marks=pytest.mark.long)])
def count(request: pytest.FixtureRequest) -> int:
    """How many answers are compared."""
    many: int = request.param
    return many


@pytest.fixture(scope="module")
def plain(model_directory: Path, tested: list[Row], count: int) -> list[Any]:
    """The answers without speculation."""
    found, store = answers(model_directory, tested, commands(count), speculation=False)
    assert {0} == {event.drafted for event in events_of(store, ev.CacheExtended)}
    return found


def test_speculation_changes_no_bit(
    model_directory: Path, tested: list[Row], plain: list[Any], count: int
) -> None:
    """Tokens, log-probabilities, texts and ends of answers are equal; drafts of all kinds ran."""
    found, store = answers(model_directory, tested, commands(count))
    assert plain == found
    passes = [one for one in events_of(store, ev.CacheExtended) if one.step == "decode"]
    drafted = sum(one.drafted for one in passes)
    accepted = sum(one.accepted for one in passes)
    assert 0 < accepted < drafted, "no draft was right, or none was wrong"
    held = {one.request for one in events_of(store, ev.RequestReceived) if one.grammar}
    accepted = sum(one.accepted for one in passes if one.request in held)
    drafted = sum(one.drafted for one in passes if one.request in held)
    assert 0 < accepted < drafted, "the same under a grammar"


def _unchecked(one: Any) -> list[Any]:
    return [mlx_engine._read(pending, one.top) for pending in one.pending]


def _one_row_too_far(self: SlabCache, keys: Any, values: Any) -> list[Any]:
    SlabCache.update_and_fetch(self, keys, values)
    end = self.offset
    ends = (min(last + 2, end) for last in range(end - keys.shape[2], end))
    return [(self.keys[..., :stop, :], self.values[..., :stop, :]) for stop in ends]


BREAKS = {
    "unchecked": (mlx_engine, "_accepted", _unchecked),
    "one row too far": (SlabCache, "update_and_fetch_each", _one_row_too_far),
}


@pytest.mark.parametrize("broken", list(BREAKS))
def test_the_control_differs(
    model_directory: Path,
    tested: list[Row],
    plain: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    """Drafts that are accepted unchecked, and rows that attend too far, change answers."""
    monkeypatch.setattr(*BREAKS[broken])
    try:
        found, _ = answers(model_directory, tested, commands(min(len(plain), 12)))
    except ExceptionGroup:
        found = []  # the journal saw it, and the client got a bug id
    assert plain[:12] != found


# --- the self-test -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(model_directory: Path) -> LoadedModel:
    """A model with random weights."""
    return load_model(str(model_directory))


def without_drafts(engine: MlxEngine) -> str:
    """Why it has no draft rows."""
    return measured_without_drafts(engine, vocabulary_tokens=500, block_tokens=64)


def test_drafts_run_where_their_bits_agree(loaded: LoadedModel) -> None:
    """The engine is left as it was."""
    engine = MlxEngine(loaded, decode_rows=ROWS)
    why = engine.without_drafts
    assert "" == without_drafts(engine)
    assert (why, 0) == (engine.without_drafts, engine.memory().slab_bytes)


@pytest.mark.parametrize("broken", list(BREAKS))
def test_the_search_sees_rows_with_other_bits(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """And says so."""
    monkeypatch.setattr(*BREAKS[broken])
    assert without_drafts(MlxEngine(loaded, decode_rows=ROWS)) == DIFFERS


def test_a_pass_of_one_row_has_no_drafts(loaded: LoadedModel) -> None:
    """There is no row for them."""
    assert without_drafts(MlxEngine(loaded, decode_rows=1)) == ONE_ROW
