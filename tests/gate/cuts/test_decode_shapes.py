"""
A decode pass has as few rows as give the bits of W rows: the self-test measures which those are.

The control decodes with the other numbers of rows, which give other bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from cairn.engine.errors import EngineFault
from cairn.engine.mlx import selftest
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.mlx.passes.decode_shapes import measured_shapes
from cairn.engine.prompt.template import Message
from cairn.engine.reports import DecodeRow, DrawSpec, PassReport
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import Talk, words
from tests.support.in_process_server import ask, generate, serving

pytestmark = pytest.mark.gate

ROWS = 8
STEPS = 12
GREEDY = DrawSpec(sampling=Sampling(temperature=0.0), seed=0, top=20)


@pytest.fixture(scope="module")
def loaded(model_directory: Path) -> LoadedModel:
    """A model with random weights."""
    return load_model(str(model_directory))


@pytest.fixture
def engine(loaded: LoadedModel) -> MlxEngine:
    """An engine over it."""
    return MlxEngine(loaded, decode_rows=ROWS)


def shapes_of(engine: MlxEngine) -> tuple[int, ...]:
    """The numbers of rows that are found to give the same bits."""
    return measured_shapes(engine, vocabulary_tokens=500, block_tokens=64)


def answers(engine: MlxEngine, rows: int, live: int) -> list[Any]:
    """What each of some sessions draws, in passes of a number of rows."""
    ids = [7 * place % 500 for place in range(150)]
    slabs = [engine.open_slab(256).slab for _ in range(live)]
    try:
        for number, slab in enumerate(slabs):
            for start in range(0, 150 - number, 64):
                engine.run_chunk(slab, ids[number:][start : start + 64], None)
        engine.decode_shapes = (rows, ROWS) if rows < ROWS else (ROWS,)
        steps = [_drawn(engine, slabs, token, rows) for token in ids[:STEPS]]
        return list(zip(*steps, strict=True))
    finally:
        for slab in slabs:
            engine.close_slab(slab)


def _drawn(engine: MlxEngine, slabs: Sequence[int], token: int, rows: int) -> list[Any]:
    passed = [DecodeRow(slab=slab, token=token, draw=GREEDY) for slab in slabs]
    reports = engine.decode([*passed, *[None] * (rows - len(passed))])
    return [one.drawn for one in reports if isinstance(one, PassReport)]


def test_the_found_numbers_of_rows_give_the_same_bits_and_others_do_not(engine: MlxEngine) -> None:
    """
    On a prompt that the search does not use, over more steps: alone and among others. What was
    left out differs, so a search that finds too much would be seen.
    """
    shapes = shapes_of(engine)
    assert ROWS == shapes[-1]
    assert set(shapes) < set(range(1, ROWS + 1)), "this BLAS hides everything"
    expected = answers(engine, ROWS, live=ROWS)
    for rows in shapes:
        assert expected[:1] == answers(engine, rows, live=1)
        assert expected[:rows] == answers(engine, rows, live=rows)
    for rows in set(range(1, ROWS)) - set(shapes):
        assert expected[:rows] != answers(engine, rows, live=rows), f"{rows} rows"


def test_the_search_leaves_the_engine_as_it_was(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slab stays open, also if the model fails, and passes have W rows until others are set."""
    shapes_of(engine)
    assert ((ROWS,), 0) == (engine.decode_shapes, engine.memory().slab_bytes)

    def fails(rows: Any) -> Any:
        raise RuntimeError("the model went wrong")

    monkeypatch.setattr(engine, "decode", fails)
    with pytest.raises(RuntimeError, match="went wrong"):
        shapes_of(engine)
    assert ((ROWS,), 0) == (engine.decode_shapes, engine.memory().slab_bytes)


@pytest.mark.long
def test_a_search_that_fails_leaves_w_rows(
    loaded: LoadedModel, engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test has shown that these work, so the model is served with them."""

    def fails(*_: Any, **named: Any) -> Any:
        raise RuntimeError("the model went wrong")

    monkeypatch.setattr(selftest, "measured_shapes", fails)
    tested = selftest.run_self_test(loaded, engine, 64)
    assert (True, (ROWS,)) == (tested.passed, tested.decode_shapes)


@pytest.mark.parametrize("shapes", [(4,), (8, 4), (0, 8), (4, 4, 8), (8, 9)])
def test_the_numbers_of_rows_ascend_to_w(engine: MlxEngine, shapes: tuple[int, ...]) -> None:
    """Nothing else is taken, from a journal either."""
    with pytest.raises(EngineFault, match="and not of 1 to 8"):
        engine.decode_shapes = shapes
    assert (ROWS,) == engine.decode_shapes


def test_one_row_needs_no_search(loaded: LoadedModel) -> None:
    """There is nothing to choose from."""
    assert (1,) == shapes_of(MlxEngine(loaded, decode_rows=1))


def test_many_rows_are_not_all_tried(loaded: LoadedModel) -> None:
    """Up to sixteen each number is, and then its multiples."""
    tried: list[int] = []
    engine = MlxEngine(loaded, decode_rows=34)
    passed = engine.decode

    def counted(rows: Any) -> Any:
        tried.append(len(rows))
        return passed(rows)

    engine.decode = counted  # type: ignore[method-assign]
    shapes_of(engine)
    assert [34, *range(1, 17), 32] == list(dict.fromkeys(tried))


@pytest.mark.long
def test_a_lone_answer_has_the_fewest_rows_also_after_a_restart(model_directory: Path) -> None:
    """The numbers are in the journal, and a start that does not test again uses them."""
    store, widths = MemoryStore(), list[set[int]]()
    talk = Talk(messages=(Message(role="user", content=words(1, 20)),))
    command = generate(talk.conversation(), sampling=GREEDY.sampling, max_tokens=8)

    async def alone() -> Any:
        async with serving(model_directory, store, decode_rows=ROWS) as server:
            device: Any = server.loaded.engine.device
            passed, seen = device.decode, set[int]()

            def watched(rows: Any) -> Any:
                seen.add(len(rows))
                return passed(rows)

            device.decode = watched
            said = await ask(server, command)
            widths.append(seen)
            assert tuple(device.decode_shapes) == server.loaded.facts.decode_shapes
            return said.tokens

    assert trio.run(alone) == trio.run(alone)
    tests = [decode(row).event for row in store.rows if row.kind == ev.SelfTestFinished.kind]
    first, again = [one for one in tests if isinstance(one, ev.SelfTestFinished)]
    assert (False, True) == (first.from_cache, again.from_cache)
    assert first.decode_shapes == again.decode_shapes
    assert [{first.decode_shapes[0]}] * 2 == widths
