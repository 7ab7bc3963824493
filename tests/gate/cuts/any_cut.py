"""
Cuts one sequence into passes at random, under the BLAS and its kernels that the environment names.

``python -P -m tests.gate.cuts.any_cut MODEL [controls [ADAPTER]]`` prints JSON: the row class that
the search finds, whether cuts give the same bits with it, and whether they do in the controls. It
runs as its own process, because kernels are chosen before a process starts.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import load_model
from cairn.engine.mlx.passes import segments
from cairn.engine.mlx.passes.search import Found, measured_row_class
from cairn.engine.reports import Drawn, DrawSpec
from cairn.engine.row_class import RowClass
from cairn.engine.sampling import Sampling

BLOCK_TOKENS = 64
TOKENS = 3 * BLOCK_TOKENS + 20
LAST = "single rows at the end"
KINDS = ("all at once", "blocks", "small", "any", LAST)
DRAW = DrawSpec(sampling=Sampling(temperature=0.0), seed=0, top=64)

Bits = tuple[str, Drawn]


def searched(engine: MlxEngine) -> Found:
    """What the search finds."""
    return measured_row_class(engine, vocabulary_tokens=500, block_tokens=BLOCK_TOKENS)


def cuts(kind: str, most: int) -> Iterator[int]:
    """The sizes of passes, without end."""
    rnd = random.Random(kind)
    done = 0
    while True:
        tail = done + BLOCK_TOKENS >= TOKENS
        sizes = {
            "all at once": most,
            "blocks": BLOCK_TOKENS,
            "small": rnd.randint(1, 20),
            "any": rnd.randint(1, 2 * BLOCK_TOKENS),
            LAST: 1 if tail else BLOCK_TOKENS,
        }
        done += sizes[kind]
        yield sizes[kind]


def bits(engine: MlxEngine, kind: str) -> Bits:
    """A digest of the sequence's KV, and what its last row draws, over passes of some kind."""
    ids = [random.Random(7 * place).randrange(500) for place in range(TOKENS)]
    row_class = engine.row_class
    slab = engine.open_slab(TOKENS + BLOCK_TOKENS * len(kind)).slab
    start = 0
    for size in cuts(kind, row_class.most if row_class else TOKENS):
        most = row_class.most_tokens(start) if row_class else TOKENS
        end = min(start + min(size, most), TOKENS)
        drawn = engine.run_chunk(slab, ids[start:end], DRAW).drawn
        start = end
        if end == TOKENS:
            break
    assert drawn is not None
    held = engine.pool.get(slab)
    kv = mlx_blocks.digest(mlx_blocks.cut(held, 0, TOKENS, states=False))
    engine.close_slab(slab)
    return kv, drawn


def agree(
    engine: MlxEngine, row_class: RowClass | None, kinds: Sequence[str] = ("all at once", LAST)
) -> bool:
    """Whether cuts give the same bits under a class, or without one."""
    engine.row_class = row_class
    first = bits(engine, kinds[0])
    return all(bits(engine, kind) == first for kind in kinds[1:])


def of_another_quantum(found: RowClass) -> RowClass:
    """The class with 8 in place of 12, or with half of another quantum."""
    quantum = 8 if found.quantum == 12 else found.quantum // 2
    most = 2 * BLOCK_TOKENS // quantum * quantum
    return attrs.evolve(found, quantum=quantum, least=quantum, most=most)


def fewest_rows(engine: MlxEngine, found: RowClass) -> int:
    """
    The fewest rows of a pass with which cuts agree, counted down from those of the class. The
    search tries only a few numbers, so these may be fewer. With one row less, cuts differ.
    """
    least = found.least
    while least > 1 and agree(engine, attrs.evolve(found, least=least - 1), KINDS):
        least -= 1
    return least


def with_keys_of_the_pass(engine: MlxEngine, row_class: RowClass) -> bool:
    """Whether cuts agree if keys end with the pass and not with the segment."""
    until = segments.keys_until
    segments.keys_until = lambda position, end, segment: min(end, until(position, end, segment))
    try:
        return agree(engine, row_class, KINDS)
    finally:
        segments.keys_until = until


def over_an_adapter(model: str, adapter: str, of_base: RowClass) -> dict[str, Any]:
    """Whether cuts agree over an adapter, under the class of its base and under its own."""
    engine = MlxEngine(load_model(model, adapter=adapter), decode_rows=2)
    own = searched(engine).row_class
    return {
        "adapter": own.fields if own is not None else (),
        "adapter under its own class": own is not None and agree(engine, own, KINDS),
        "adapter under its base's class": agree(engine, of_base, KINDS),
    }


def main(model: str, *, controls: bool, adapter: str | None = None) -> dict[str, Any]:
    """What is found about a model under these kernels, and whether cuts then agree."""
    engine = MlxEngine(load_model(model), decode_rows=2)
    found = searched(engine)
    row_class = found.row_class
    assert row_class is not None, found.reason
    told = {
        "found": row_class.fields,
        "same": agree(engine, row_class, KINDS),
        "without a class": agree(engine, None),
    }
    if controls:
        told["keys of the pass"] = with_keys_of_the_pass(engine, row_class)
        if row_class.quantum == 1:
            told["fewest rows"] = fewest_rows(engine, row_class)
        else:
            told["another quantum"] = agree(engine, of_another_quantum(row_class), KINDS)
    if adapter is not None:
        told |= over_an_adapter(model, adapter, row_class)
    return told


if __name__ == "__main__":
    _, *given = sys.argv
    result = main(given[0], controls=given[1:2] == ["controls"], adapter="".join(given[2:]) or None)
    print(json.dumps(result))
