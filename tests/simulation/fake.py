"""
An engine and a tokenizer for simulations. What the engine draws depends on every token that its
slab holds, so that an answer from a wrong cache is a wrong answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

import attrs

from cairn.actors.settings import Settings
from cairn.engine.contract import StartedEngine
from cairn.engine.errors import EngineFault
from cairn.engine.reports import (
    DecodeRow,
    Drawn,
    FileReport,
    LoadReport,
    PassReport,
    RejectReport,
    RowReport,
    ShareReport,
)
from cairn.engine.row_class import RowClass
from tests.simulation.turns import sleep_in_turn
from tests.support.fake_engine import FakeEngine, FakeTokenizer, started

BLOCK_TOKENS = 8
FAULT = "the simulated device failed"
_LETTERS = "abcdefghijklmnopqrstuvwx"  # without the markers of a call


def _next(ids: Sequence[int]) -> int:
    """The token after these. It depends on all of them."""
    return ord(_LETTERS[zlib.crc32(repr(list(ids)).encode()) % len(_LETTERS)])


def answer_ids(prompt: Sequence[int], tokens: int) -> list[int]:
    """The answer of so many tokens to a prompt, from its tokens alone."""
    held = list(prompt)
    for _ in range(tokens):
        held.append(_next(held))
    return held[len(prompt) :]


class SimulatedEngine(FakeEngine):
    """
    As its base. Its decode passes may have any number of rows, as those of a device with a row
    class may. Passes, copies, and reading and writing files may take up to two seconds. Passes
    and copies may fail, which changes nothing.

    Attributes:
        open_slabs: the slabs that it has open.
    """

    decode_shapes = (1, 2, 3, 4)

    def __init__(self, random: Random, slow: float, failing: float) -> None:
        """
        Args:
            slow: the share of these that take long.
            failing: the share of passes and copies that fail.
        """
        super().__init__()
        self._random, self._slow, self._failing = random, slow, failing

    def run_chunk(self, *args: Any, **options: Any) -> PassReport:
        self._fail_sometimes()
        return super().run_chunk(*args, **options)

    def share(self, *args: Any, **options: Any) -> ShareReport:
        self._fail_sometimes()
        return super().share(*args, **options)

    def _decoded(self, row: DecodeRow) -> RowReport:
        try:
            self._fail_sometimes()
        except EngineFault as fault:
            return fault
        return super()._decoded(row)

    def load(self, *args: Any) -> LoadReport | RejectReport | None:
        self._wait_sometimes()
        return super().load(*args)

    def spill(self, *args: Any) -> FileReport | None:
        self._wait_sometimes()
        return super().spill(*args)

    def _wait_sometimes(self) -> None:
        if self._random.random() < self._slow:
            sleep_in_turn(2 * self._random.random())

    def _fail_sometimes(self) -> None:
        self._wait_sometimes()
        if self._random.random() < self._failing:
            raise EngineFault(FAULT)

    @property
    def open_slabs(self) -> set[int]:
        """The ids of the slabs that are open."""
        return set(self._slabs)

    def _pass_report(self, slab: int, start: int, draws: bool) -> PassReport:
        report = super()._pass_report(slab, start, draws)
        if report.drawn is None:
            return report
        drawn = Drawn(token=_next(self._slabs[slab]), logprob=-1.0)
        return attrs.evolve(report, drawn=drawn)


class SimulatedTokenizer(FakeTokenizer):
    """As its base, without calls."""

    has_tool_calling = False
    tool_call_start = tool_call_end = ""


_ANY_CUT = RowClass(segment=BLOCK_TOKENS, quantum=1, least=1, most=4 * BLOCK_TOKENS, product=0)


@attrs.define
class Machine:
    """
    Starts the engines of a simulation.

    Attributes:
        has_class: whether any cut gives the same bits on it.
        slow, failing: see ``SimulatedEngine``.
        engine: the engine that was started last.
    """

    random: Random
    has_class: bool
    slow: float
    failing: float
    engine: SimulatedEngine | None = None

    def start(self, settings: Settings, *given: Any) -> StartedEngine:
        """In place of ``load.start_on_mlx``."""
        begun = started(settings, *given)
        self.engine = SimulatedEngine(self.random, self.slow, self.failing)
        row_class = _ANY_CUT if self.has_class else None
        self.engine.row_class = row_class
        return attrs.evolve(
            begun,
            engine=self.engine,
            tokenizer=SimulatedTokenizer(),
            facts=attrs.evolve(begun.facts, row_class=row_class),
        )
