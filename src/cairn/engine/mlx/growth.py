"""
Measures how much memory growing caches take, before any budget relies on it.

How mlx-lm's own classes grow is known: one chunk gives the size of a row, and the cache says what
bounds the number of rows. A class of the model's own is measured with two prompts, which give its
size for each token and its constant size. They end one token before a step, because a cache that
collects tokens into groups is largest there.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from cairn.engine.errors import ModelRefused
from cairn.engine.growth import STEP_TOKENS, Growth, LayerGrowth, steps
from cairn.engine.mlx.cache import HeldSlab, bytes_of, counts_tokens
from cairn.engine.mlx.model import LoadedModel
from cairn.engine.schedule import passes

_SHORT, _LONG = STEP_TOKENS - 1, 3 * STEP_TOKENS - 1
_MARGIN, _CONSTANT_MARGIN = 64, 16
"""
Margins for caches that were only measured: a step counts as 1/64 larger than measured, and 1/16 of
a step is added once, because groups of tokens need not fill it evenly.
"""


def measured_growth(loaded: LoadedModel, block_tokens: int) -> Growth:
    """
    How much memory a model's own caches take, measured by running it. Modifies nothing.

    Raises:
        ModelRefused: its code failed, or a cache cannot be measured.
    """
    try:
        return _measured(loaded, block_tokens)
    except ModelRefused:
        raise
    except Exception as fault:  # whatever a model's code may raise
        raise loaded.cannot_run(fault) from fault


def _measured(loaded: LoadedModel, block_tokens: int) -> Growth:
    lengths = [min(tokens, loaded.context_tokens) for tokens in (block_tokens, _SHORT, _LONG)]
    first = _after(loaded.model, lengths[0], block_tokens)
    for layer in first:
        if counts_tokens(layer) and layer.offset and not bytes_of(layer):
            raise ModelRefused(
                f"{loaded.name} cannot be served: the memory of its {type(layer).__name__} "
                "cannot be measured, so its context would have no limit. docs/models.md lists the "
                "families that are served; choose a model of one of them."
            )
    known = [_known(layer, block_tokens) for layer in first]
    if all(known):
        return Growth(layers=tuple(one for one in known if one is not None))
    runs = [first, *(_after(loaded.model, length, block_tokens) for length in lengths[1:])]
    tried = [[bytes_of(layer) for layer in run] for run in runs]
    return Growth(
        layers=tuple(
            one or _fitted(lengths, sizes) for one, *sizes in zip(known, *tried, strict=True)
        )
    )


def _after(model: Any, tokens: int, block_tokens: int) -> list[Any]:
    """The caches of all layers after a prompt."""
    slab = HeldSlab(id=0, capacity_tokens=tokens, caches=make_prompt_cache(model), fixed=False)
    for start, end in passes(0, tokens, block_tokens):
        model(mx.zeros((1, end - start), mx.int32), cache=slab.caches)
        slab.passed(end - start)
        mx.eval(slab.arrays())
    return slab.layers


def _known(cache: Any, block_tokens: int) -> LayerGrowth | None:
    """How a cache of one of mlx-lm's classes grows, derived after one chunk; None for others."""
    if type(cache) is ArraysCache:
        return LayerGrowth(constant_bytes=bytes_of(cache))
    if type(cache) not in (KVCache, RotatingKVCache, ChunkedKVCache) or cache.keys is None:
        return None
    row = bytes_of(cache) // cache.keys.shape[2]
    step = STEP_TOKENS * row
    # A cache adds rows in steps after the existing ones. If chunks are whole steps, or steps whole
    # chunks, it has no more rows than the tokens need.
    whole = STEP_TOKENS % block_tokens == 0 or block_tokens % STEP_TOKENS == 0
    constant = 0 if whole else step
    if type(cache) is KVCache:
        return LayerGrowth(constant_bytes=constant, step_bytes=step)
    if type(cache) is ChunkedKVCache:
        return LayerGrowth(
            constant_bytes=constant,
            step_bytes=step,
            until_tokens=cache.chunk_size,
            most_bytes=(cache.chunk_size + steps(block_tokens) * STEP_TOKENS) * row,
        )
    return LayerGrowth(  # as many rows as the prompt, and one more step in decode passes
        constant_bytes=step,
        step_bytes=step,
        until_tokens=cache.max_size,
        most_bytes=(cache.max_size - 1 + block_tokens) * row,
    )


def _fitted(lengths: list[int], sizes: list[int]) -> LayerGrowth:
    """
    How a cache grows that had these sizes after prompts of these lengths. A window longer than the
    longest prompt counts as growing without end: an overestimate, never an underestimate.
    """
    if lengths[-1] < _LONG:  # the context is too short to measure a slope
        return LayerGrowth(constant_bytes=max(sizes) + max(sizes) // 8)
    _, short, long = map(steps, lengths)
    step = max(0, sizes[2] - sizes[1]) // (long - short)
    constant = (size - steps(tokens) * step for tokens, size in zip(lengths, sizes, strict=True))
    return LayerGrowth(
        constant_bytes=max(0, *constant) + step // _CONSTANT_MARGIN,
        step_bytes=step + -(-step // _MARGIN),
    )
