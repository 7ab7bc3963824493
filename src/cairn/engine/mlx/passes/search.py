"""
Which row class a loaded model has on this device.

Classes are tried from the cheapest to passes of one shape. A class is accepted if every way of
cutting a sequence gives the same bits: KV of all layers, and the drawn token with its
log-probabilities. By induction it is enough to compare single passes: if a pass on the KV of a
reference gives the rows of that reference, then so does any sequence of such passes.

What decides is a comparison of bits and never a duration, so that a machine finds the same class
each time. Only the limit of time is different: if it is exceeded, one shape is tried, and the
result says so.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from itertools import product as product_of
from typing import TYPE_CHECKING

import attrs
import numpy as np

from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.mlx.passes.decode_shapes import compared_draw
from cairn.engine.reports import Drawn
from cairn.engine.row_class import OUT_OF_TIME, RowClass

if TYPE_CHECKING:
    from cairn.engine.mlx.engine import MlxEngine

LIMIT_S = 180.0
"""How long the search may take. One shape may then take half of that once more."""

FAILED = "the model's code does not run such passes: "

_MOST_SEGMENTS = 4
"""The most rows of a pass, in segments. More make no pass cheaper on the devices measured."""
_SEED = 20261123
PRODUCT = 1_100_000
"""OpenBLAS computes smaller products in a different way."""
_LEAST = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_QUANTA = (4, 8, 12, 16, 24, 32, 48)
_AROUND = 18
"""Every number of rows is tried from the least one up to as many more."""
_RANDOM = 12
_LONG_SEGMENTS = 32
"""The position, in segments, of a few passes on many keys."""
_FAR = 1 << 30
"""More positions than any pass reaches."""


@attrs.frozen(kw_only=True)
class Found:
    """
    The result of a search.

    Attributes:
        row_class: None if passes have to be those of the canonical schedule.
        reason: why there is none, or why it is not the cheapest; empty if it is.
        late: whether that is because there was no time.
    """

    row_class: RowClass | None
    reason: str
    late: bool = False


class _OutOfTime(Exception):
    """The limit of time is exceeded."""


def candidates(block_tokens: int, *, has_low_rank: bool = False) -> Iterator[RowClass]:
    """
    The classes to try, from the cheapest. Each has passes of C tokens from every multiple of C on.

    Args:
        block_tokens: C.
        has_low_rank: whether the model has low-rank layers, which can be padded.
    """
    most = _MOST_SEGMENTS * block_tokens
    for low_rank, product in product_of((0, most) if has_low_rank else (0,), (PRODUCT, 0)):
        for least in _LEAST:
            if least <= block_tokens:
                yield RowClass(
                    segment=block_tokens,
                    quantum=1,
                    least=least,
                    most=most,
                    product=product,
                    low_rank=low_rank,
                )
    for quantum in _QUANTA:
        if quantum < block_tokens:
            # The second takes C tokens from every multiple of C on, and hardly more.
            front = quantum - math.gcd(quantum, block_tokens)
            fewest = -(-(block_tokens + front) // quantum) * quantum
            for rows in dict.fromkeys((most // quantum * quantum, fewest)):
                yield RowClass(
                    segment=block_tokens, quantum=quantum, least=quantum, most=rows, product=0
                )
    yield one_shape(block_tokens)


def one_shape(block_tokens: int) -> RowClass:
    """The class whose passes all have C rows, each at its place."""
    return RowClass(
        segment=block_tokens,
        quantum=block_tokens,
        least=block_tokens,
        most=block_tokens,
        product=0,
    )


def measured_row_class(
    engine: MlxEngine,
    *,
    vocabulary_tokens: int,
    block_tokens: int,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """
    The cheapest class whose passes agree. Leaves no slab in the engine, and its ``row_class`` as it
    was.

    Args:
        vocabulary_tokens: the tokens that may be fed.
        limit_s: the most seconds for the search.
        progress: called with (classes that were tried, all classes).
    """
    why = engine.without_cuts
    if why is not None:
        return Found(row_class=None, reason=why)
    before, positions = engine.row_class, engine.positions
    search = _Search(engine, vocabulary_tokens, block_tokens, clock)
    try:
        try:
            search.until = clock() + limit_s
            classes = list(candidates(block_tokens, has_low_rank=engine.has_low_rank))
            for tried, candidate in enumerate(classes):
                progress(tried, len(classes))
                if search.agrees(candidate):
                    return Found(row_class=candidate, reason="")
        except _OutOfTime:
            late = f"{OUT_OF_TIME} {limit_s:g} s"
            search.until = clock() + limit_s / 2
            if search.agrees(one_shape(block_tokens)):
                return Found(row_class=one_shape(block_tokens), reason=late, late=True)
    except _OutOfTime:
        reason = f"{late}, and one shape more than half of that"
        return Found(row_class=None, reason=reason, late=True)
    except Exception as error:  # a model's code may raise anything; exact passes do not need this
        return Found(row_class=None, reason=f"{FAILED}{type(error).__name__}: {error}")
    finally:
        search.close()
        engine.row_class, engine.positions = before, positions
    return Found(row_class=None, reason="even passes of one shape have different bits")


class _Search:
    """
    Compares passes with a reference: the same sequence in as few passes as the class allows.

    Attributes:
        until: when the search is out of time.
    """

    def __init__(
        self,
        engine: MlxEngine,
        vocabulary_tokens: int,
        block_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._segment = block_tokens
        self._clock = clock
        self.until = math.inf
        # One pass of the most rows, and more than a segment after it.
        self._tokens = min(
            (_MOST_SEGMENTS + 1) * block_tokens + block_tokens // 2 + 5, engine.positions
        )
        words = np.random.default_rng(_SEED).integers(
            0, vocabulary_tokens, self._tokens + 2 * block_tokens
        )
        self._words: list[int] = words.tolist()
        self._draw = compared_draw(vocabulary_tokens)
        self._reference: int | None = None
        self._reference_shapes: object = None
        self._first: dict[int, Drawn] = {}
        long = min(_LONG_SEGMENTS * block_tokens, engine.positions - 2 * block_tokens)
        self._long = long // block_tokens * block_tokens
        # Of a different size than that of the reference.
        capacity = max(2 * self._tokens, self._long + 2 * block_tokens)
        self._slab = engine.open_slab(self._whole(capacity)).slab

    def close(self) -> None:
        """Close the slabs."""
        for slab in (self._slab, self._reference):
            if slab is not None:
                self._engine.close_slab(slab)

    def agrees(self, row_class: RowClass) -> bool:
        """Whether all passes of a class that are tried agree. Sets the engine's row class."""
        self._engine.row_class = row_class
        drawn = self._refer(row_class)
        self._engine.trim(self._slab, 0)  # what another class computed
        for number, (start, end) in enumerate(self._passes(row_class)):
            # A few on rows that other tokens left, and a few at the end of the model's positions.
            self._engine.positions = end if number % 5 == 3 else _FAR
            if not self._same(start, end, drawn, stale=number % 4 == 2):
                return False
        return self._same_cut(row_class, drawn) and self._same_after_many(row_class)

    def _refer(self, row_class: RowClass) -> dict[int, Drawn]:
        """
        Compute the reference, unless that of an earlier class has the same passes. Returns what was
        drawn at the end of each of its passes.
        """
        spans: list[tuple[int, int]] = []
        while not spans or spans[-1][1] < self._tokens:
            start = spans[-1][1] if spans else 0
            spans.append((start, min(start + row_class.most_tokens(start), self._tokens)))
        shapes = [row_class.rows(start, end - start, _FAR) for start, end in spans]
        computed = (row_class.product, row_class.low_rank, shapes)
        if self._reference_shapes != computed:
            if self._reference is not None:
                self._engine.close_slab(self._reference)
                self._reference = self._reference_shapes = None
            self._engine.positions = _FAR
            self._reference = self._engine.open_slab(self._whole(self._tokens)).slab
            self._first = {end: self._run(self._reference, start, end) for start, end in spans}
            self._reference_shapes = computed
        return dict(self._first)

    def _passes(self, row_class: RowClass) -> list[tuple[int, int]]:
        """The passes to compare with the reference, as half-open ranges."""
        rnd, segment, least = random.Random(_SEED), self._segment, row_class.least
        few = {1, 2, 3, segment // 2 + 1, segment - 1, segment, segment + 1, row_class.most}
        near = range(max(1, least - 1), least + _AROUND)
        some = [round(math.exp(rnd.uniform(0, math.log(row_class.most)))) for _ in range(_RANDOM)]
        lengths = [*dict.fromkeys((*few, *near, *some))]
        rnd.shuffle(lengths)
        ends = [
            self._tokens,
            self._tokens - 2,
            *(place * segment + more for place in (1, 2, 4) for more in (-1, 0, 1)),
            3 * segment + segment // 3,
        ]
        found = [(self._tokens - 3, self._tokens - 2), (2 * segment - 3, 2 * segment)]
        for length in lengths:
            fitting = [
                (end - length, end)
                for end in ends
                if length <= end <= self._tokens and length <= row_class.most_tokens(end - length)
            ]
            found += rnd.sample(fitting, min(2 if length <= 3 * segment // 4 else 1, len(fitting)))
        return [(start, end) for start, end in found if 0 <= start < end <= self._tokens]

    def _same(self, start: int, end: int, drawn: dict[int, Drawn], *, stale: bool) -> bool:
        """
        Whether a pass on the KV of the reference gives that of the reference, and draws what the
        pass before with the same end drew. Adds what it draws to ``drawn``.

        Args:
            stale: leave rows of other tokens in the slab.
        """
        assert self._reference is not None
        self._fill(start)
        if stale:
            other = self._words[-min(self._segment, self._engine_most(start)) :]
            self._engine.run_chunk(self._slab, other, None)
            self._engine.trim(self._slab, start)
        found = self._run(self._slab, start, end)
        same = drawn.setdefault(end, found) == found
        return same and self._digest(self._slab, start, end) == self._digest(
            self._reference, start, end
        )

    def _same_cut(self, row_class: RowClass, drawn: dict[int, Drawn]) -> bool:
        """Whether the whole sequence, cut at random, gives the KV of the reference."""
        assert self._reference is not None
        rnd, start = random.Random(_SEED + 1), 0
        self._engine.positions = _FAR
        self._engine.trim(self._slab, 0)
        while start < self._tokens:
            length = rnd.randint(1, rnd.choice((2, 9, self._segment, row_class.most)))
            end = min(start + length, self._tokens, start + row_class.most_tokens(start))
            last = self._run(self._slab, start, end)
            start = end
        return last == drawn[self._tokens] and self._digest(
            self._slab, 0, self._tokens
        ) == self._digest(self._reference, 0, self._tokens)

    def _same_after_many(self, row_class: RowClass) -> bool:
        """
        Whether passes on many more keys agree. These are copies of the reference's, so that they
        cost nothing: any finite KV will do.
        """
        assert self._reference is not None
        if self._long < self._tokens:
            return True
        held = self._engine.pool.get(self._slab)
        first_segment = mlx_blocks.cut(
            self._engine.pool.get(self._reference), 0, self._segment, states=False
        )
        self._engine.trim(self._slab, 0)
        for start in range(0, self._long, self._segment):
            mlx_blocks.paste(held, [first_segment], start)
        end, seen = self._long + self._segment // 2 + 3, set[tuple[Drawn, str]]()
        for cuts in ((), (1,), (self._segment // 3,), (2, self._segment // 2)):
            edges = [self._long, *(self._long + cut for cut in cuts), end]
            self._engine.trim(self._slab, self._long)
            for first, last in pairwise(edges):
                while first < last:
                    until = min(last, first + row_class.most_tokens(first))
                    drawn = self._run(self._slab, first, until, self._long)
                    first = until
            seen.add((drawn, self._digest(self._slab, self._long, end)))
        return len(seen) == 1

    def _fill(self, start: int) -> None:
        """Let the slab end at a position, with the KV of the reference."""
        assert self._reference is not None
        held = self._engine.pool.get(self._slab)
        if held.end < start:
            reference = self._engine.pool.get(self._reference)
            missing = mlx_blocks.cut(reference, held.end, start, states=False)
            mlx_blocks.paste(held, [missing], held.end)
        else:
            self._engine.trim(self._slab, start)

    def _run(self, slab: int, start: int, end: int, zero: int = 0) -> Drawn:
        """
        Run a pass.

        Args:
            zero: the position of the first word.

        Raises:
            _OutOfTime: the limit is exceeded.
        """
        if self._clock() > self.until:
            raise _OutOfTime
        report = self._engine.run_chunk(slab, self._words[start - zero : end - zero], self._draw)
        assert report.drawn is not None
        return report.drawn

    def _digest(self, slab: int, start: int, end: int) -> str:
        held = self._engine.pool.get(slab)
        return mlx_blocks.digest(mlx_blocks.cut(held, start, end, states=False))

    def _engine_most(self, start: int) -> int:
        row_class = self._engine.row_class
        assert row_class is not None
        return row_class.most_tokens(start)

    def _whole(self, tokens: int) -> int:
        """A number of tokens, rounded up to whole segments."""
        return -(-tokens // self._segment) * self._segment
