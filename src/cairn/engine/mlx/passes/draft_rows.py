"""
Whether a decode pass may have draft rows: several rows of one session, at consecutive positions.

A row of a draft must have the bits that its token has in a pass of its own. Like the numbers of
rows, that is measured on the loaded model and this device, and never assumed: an answer drawn token
by token is drawn again with drafts that are right, and with drafts that are wrong.
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

ONE_ROW = "a decode pass has one row"
DIFFERS = "a draft's rows have other bits than passes of one token"

_STEPS = 13
_TOP = 256


def measured_without_drafts(engine: MlxEngine, *, vocabulary_tokens: int, block_tokens: int) -> str:
    """
    Why a decode pass has no draft rows; empty if their bits are those of passes of one token. Uses
    the engine's ``decode_shapes``. Leaves no slab in the engine, and its ``without_drafts`` as it
    was.

    Args:
        vocabulary_tokens: the tokens that may be fed.
    """
    if engine.decode_rows == 1:
        return ONE_ROW
    if (why := engine.without_cuts) is not None:
        return why
    before = engine.without_drafts
    words = (
        np.random.default_rng(20261124)
        .integers(0, vocabulary_tokens, (2, 2 * block_tokens))
        .tolist()
    )
    # At this temperature hardly two tokens of an answer are equal, so that a row at another's place
    # differs.
    draw = DrawSpec(sampling=Sampling(temperature=100.0), seed=0, top=min(_TOP, vocabulary_tokens))
    slabs: list[int] = []
    engine.without_drafts = ""
    try:
        for ids, tokens in zip(words, (block_tokens + 5, 2 * block_tokens - 3), strict=True):
            slabs.append(engine.open_slab(2 * block_tokens + 2 * _STEPS).slab)
            for start, end in passes(0, tokens, block_tokens):
                engine.run_chunk(slabs[-1], ids[start:end], None)
        single = _drawn(engine, slabs, words[0][-2:], draw)
        right = [[one.token for one in tokens] for tokens, _ in single]
        wrong = [
            [token if place % 3 else (token + 1) % vocabulary_tokens for place, token in found]
            for found in (list(enumerate(tokens)) for tokens in right)
        ]
        same = all(
            _drawn(engine, slabs, words[0][-2:], draw, drafted, shape) == single
            for drafted in (right, wrong)
            for shape in engine.decode_shapes
            if shape > len(slabs)
        )
        alone = all(
            _drawn(engine, slabs[:1], words[0][-2:-1], draw, drafted, shape) == single[:1]
            for drafted in (right, wrong)
            for shape in engine.decode_shapes
            if shape > 1
        )
        return "" if same and alone else DIFFERS
    finally:
        engine.without_drafts = before
        for slab in slabs:
            engine.close_slab(slab)


def _drawn(
    engine: MlxEngine,
    slabs: Sequence[int],
    first: Sequence[int],
    draw: DrawSpec,
    drafts: Sequence[Sequence[int]] = (),
    shape: int | None = None,
) -> list[tuple[tuple[Drawn, ...], str]]:
    """
    The tokens that each session draws, and a digest of their KV. Cuts the slabs back.

    Args:
        first: the token to feed to each first.
        drafts: the tokens that each session's drafts have; empty for passes of one token.
        shape: the rows of each pass; the sessions share those that are left. None for W.
    """
    rows = shape or engine.decode_rows
    starts = [engine.held_tokens(slab) for slab in slabs]
    drawn: list[list[Drawn]] = [[] for _ in slabs]
    fed = list(first)
    while left := [place for place in range(len(slabs)) if len(drawn[place]) < _STEPS]:
        spare = rows - len(left)
        asked: list[DecodeRow | None] = []
        for place in left:
            have = len(drawn[place])
            # The first session takes two thirds, so that drafts of different lengths are next to
            # each other.
            most = spare if place == left[-1] else -(-2 * spare // 3)
            draft = tuple(drafts[place][have:_STEPS][:most][: _STEPS - have - 1]) if drafts else ()
            spare -= len(draft)
            asked.append(DecodeRow(slab=slabs[place], token=fed[place], draw=draw, draft=draft))
        reports = engine.decode([*asked, *[None] * spare])
        for place, report in zip(left, reports, strict=False):
            if not isinstance(report, PassReport):
                raise report or EngineFault("no report")
            drawn[place].extend(report.all_drawn)
            fed[place] = drawn[place][-1].token
    found = []
    for slab, start, tokens in zip(slabs, starts, drawn, strict=True):
        decoded = mlx_blocks.cut(engine.pool.get(slab), start, start + _STEPS, states=False)
        found.append((tuple(tokens), mlx_blocks.digest(decoded)))
        engine.trim(slab, start)
    return found
