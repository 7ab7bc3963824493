"""
Which numbers of rows a decode pass may have.

The bits of a row depend on the number of rows in its pass, because a kernel cuts matrices into
tiles by their shape; but for most layers many numbers give the same bits
(docs/why-the-same-bits.md). Which ones is measured on the loaded model and this device, and never
derived from the shapes of its weights: a pass of W sessions is compared with passes of fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cairn.engine.errors import EngineFault
from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.reports import DecodeRow, Drawn, DrawSpec, PassReport
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import passes

if TYPE_CHECKING:
    from cairn.engine.mlx.engine import MlxEngine

_STEPS = 8
_EACH = 16
"""Up to here every number of rows is tried, and then its multiples. Also the most sessions."""

_Row = tuple[tuple[Drawn, ...], str]
"""What a session's row gave: the drawn tokens with log-probabilities, and a digest of its KV."""


def compared_draw(vocabulary_tokens: int) -> DrawSpec:
    """A greedy draw whose log-probabilities show what only the last layer changes."""
    return DrawSpec(sampling=Sampling(temperature=0.0), seed=0, top=min(256, vocabulary_tokens))


def measured_shapes(
    engine: MlxEngine, *, vocabulary_tokens: int, block_tokens: int
) -> tuple[int, ...]:
    """
    The numbers of rows in which each session's row has the bits that it has among W sessions;
    ascending, the last one W. Leaves no slab in the engine, and its ``decode_shapes`` as they were.

    Args:
        vocabulary_tokens: the tokens that may be fed.
    """
    width, before = engine.decode_rows, engine.decode_shapes
    if width == 1:
        return (1,)
    sessions = min(width, _EACH)
    words = (
        np.random.default_rng(20261123)
        .integers(0, vocabulary_tokens, (sessions + 1, 3 * block_tokens))
        .tolist()
    )
    fed = [words[-1][place : place + _STEPS] for place in range(sessions)]
    draw = compared_draw(vocabulary_tokens)
    slabs: list[int] = []
    try:
        for number in range(sessions):
            # Different places of different blocks, but no longer than the self-test's prompt.
            tokens = block_tokens // 2 + number * (block_tokens // 3 + 1) % (2 * block_tokens)
            slabs.append(engine.open_slab(tokens + _STEPS).slab)
            for start, end in passes(0, tokens, block_tokens):
                engine.run_chunk(slabs[-1], words[number][start:end], None)
        among_all = _rows(engine, slabs, fed, draw, width)
        found = []
        for count in range(1, width):
            if count > _EACH and count % _EACH:
                continue  # each count costs some passes
            engine.decode_shapes = (count, width)
            # With as many sessions as there are rows, and with one beside dummies.
            if all(
                _rows(engine, slabs[:live], fed, draw, count) == among_all[:live]
                for live in {min(count, sessions), 1}
            ):
                found.append(count)
        return (*found, width)
    finally:
        engine.decode_shapes = before
        for slab in slabs:
            engine.close_slab(slab)


def _rows(
    engine: MlxEngine,
    slabs: Sequence[int],
    fed: Sequence[Sequence[int]],
    draw: DrawSpec,
    count: int,
) -> list[_Row]:
    """
    Decode a few tokens of some sessions in passes of ``count`` rows, and cut their slabs back.

    Args:
        fed: the tokens to feed to each; not those that are drawn, which would be equal too often.
    """
    drawn: list[list[Drawn]] = [[] for _ in slabs]
    starts = [engine.held_tokens(slab) for slab in slabs]
    for step in range(_STEPS):
        rows = [
            DecodeRow(slab=slab, token=fed[place][step], draw=draw)
            for place, slab in enumerate(slabs)
        ]
        reports = engine.decode([*rows, *[None] * (count - len(rows))])
        for place, report in enumerate(reports[: len(rows)]):
            if not isinstance(report, PassReport):
                raise report or EngineFault("no report")
            assert report.drawn is not None
            drawn[place].append(report.drawn)
    found = []
    for place, (slab, start) in enumerate(zip(slabs, starts, strict=True)):
        decoded = mlx_blocks.cut(engine.pool.get(slab), start, start + _STEPS, states=False)
        found.append((tuple(drawn[place]), mlx_blocks.digest(decoded)))
        engine.trim(slab, start)
    return found
