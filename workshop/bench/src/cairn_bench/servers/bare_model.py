"""
The model alone, for measuring: the passes of the schedule and a decode loop, without a server, a
journal or a session.

``python -P -m cairn_bench.servers.bare_model`` reads a job from stdin and writes its measurements
to stdout, both as JSON. It runs as its own process, because the BLAS is chosen before a process
starts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from cairn.engine.mlx.start import Started, start_engine
from cairn.engine.reports import DrawSpec
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import slab_capacity

_FILL_ROWS = 512
_FIRST_STEPS = 4
_TOKEN = 1
_GREEDY = DrawSpec(sampling=Sampling(temperature=0.0), seed=0)


def measured(job: Mapping[str, Any]) -> dict[str, Any]:
    """
    Measure what a job requests.

    Args:
        job: ``model``, a directory; ``spans``, pairs (reused tokens, tokens of the prompt);
            ``repeats``, how often each is run; ``decodes``, triples (rows, tokens of history,
            steps). May have ``block_tokens``, a C that differs from the server's choice, and
            ``plain``, pairs like those of ``spans``.

    Returns:
        ``block_tokens`` and ``decode_shapes`` as the server would choose them; ``spans``, the
        seconds of each repeat of each span; ``plain``, likewise for one pass over mlx-lm's own
        caches that starts exactly at the first missing token; ``decodes``, the seconds of each.

    Raises:
        ModelRefused: the model cannot be served.
    """
    started = start_engine(
        job["model"],
        name=None,
        block_tokens=job.get("block_tokens"),
        decode_rows=None,
        kv_cache="slab",
        pool_bytes=None,
        blocks_bytes=None,
        tested_shapes=lambda _: None,
        progress=lambda *_: None,
    )
    return {
        "block_tokens": started.facts.block_tokens,
        "decode_shapes": list(started.engine.decode_shapes),
        "spans": [
            _span_s(started, reused, tokens, job["repeats"]) for reused, tokens in job["spans"]
        ],
        "plain": [
            _plain_s(started.loaded.model, reused, tokens, job["repeats"])
            for reused, tokens in job.get("plain", ())
        ],
        "decodes": [
            _decode_s(started.loaded.model, rows, history, steps)
            for rows, history, steps in job["decodes"]
        ],
    }


def _span_s(started: Started, reused: int, tokens: int, repeats: int) -> list[float]:
    """
    The time of the passes that extend a slab from ``[0, reused)`` to ``[0, tokens)`` and give the
    next token.

    The first run is not counted.
    """
    facts, engine = started.facts, started.engine
    capacity = slab_capacity(tokens + 1, facts.block_tokens, facts.context_tokens)
    slab = engine.pool.open(capacity)
    for cache in slab.attending:
        # The contents of the rows do not affect the time, but zeros never written share one page.
        cache.keys = mx.random.normal(cache.keys.shape).astype(cache.keys.dtype)
        cache.values = mx.random.normal(cache.values.shape).astype(cache.values.dtype)
    mx.eval(slab.arrays())
    found = []
    for _ in range(repeats + 1):
        for cache in slab.attending:
            cache.offset = reused
        began_s, start = time.perf_counter(), reused
        while start < tokens:
            end = facts.pass_end(start, tokens, alone=True, again=False)
            engine.run_chunk(slab.id, [_TOKEN] * (end - start), _GREEDY if end == tokens else None)
            start = end
        found.append(time.perf_counter() - began_s)
    engine.pool.close(slab.id)
    return found[1:]


def _plain_s(model: Any, reused: int, tokens: int, repeats: int) -> list[float]:
    """
    The time of one pass from ``[0, reused)`` to ``[0, tokens)`` over mlx-lm's own caches, with the
    next token.

    The first run is not counted.
    """
    caches = _filled(model, 1, reused)
    found = []
    for _ in range(repeats + 1):
        for cache in caches:
            cache.trim(cache.offset - reused)
        began_s = time.perf_counter()
        logits = model(mx.full((1, tokens - reused), _TOKEN), cache=caches)
        mx.eval(mx.argmax(logits[0, -1]), [cache.state for cache in caches])
        found.append(time.perf_counter() - began_s)
        del logits
    return found[1:]


def _filled(model: Any, rows: int, history: int) -> list[Any]:
    """mlx-lm's caches with the given number of tokens in each row."""
    caches: list[Any] = make_prompt_cache(model)
    for start in range(0, history, _FILL_ROWS):
        filled = min(_FILL_ROWS, history - start)
        model(mx.full((rows, filled), _TOKEN), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def _decode_s(model: Any, rows: int, history: int, steps: int) -> float:
    """
    The time of this many steps of mlx-lm's loop.

    It decodes greedily, with the given rows per pass, over its own caches; the next pass is
    enqueued before the last one's tokens are read.
    """
    caches = _filled(model, rows, history)

    def stepped(tokens: mx.array) -> mx.array:
        logits = model(tokens[:, None], cache=caches)[:, -1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        following = mx.argmax(logprobs, axis=-1)
        mx.async_eval(following, logprobs)  # type: ignore[no-untyped-call]  # no types in MLX
        return following

    tokens = stepped(mx.full((rows,), _TOKEN))
    for _ in range(_FIRST_STEPS):
        tokens = stepped(tokens)
    mx.eval(tokens)
    began_s = time.perf_counter()
    for _ in range(steps):
        following = stepped(tokens)
        tokens.tolist()  # a loop has to know them to write them down
        tokens = following
    mx.eval(tokens)
    return time.perf_counter() - began_s


def main() -> int:
    """From one job to its answer."""
    json.dump(measured(json.load(sys.stdin)), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
