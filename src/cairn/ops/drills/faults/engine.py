"""Damage to passes of the model: their layers, their tokens, and whether they run at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cairn.ops.drills.faults.damage import Damage, Method, wrap


async def layer_short(damage: Damage) -> None:
    """One layer has one token fewer than the others."""

    def shorten(slab: Any) -> None:
        slab.caches[2].offset -= 1

    _after_each_pass(damage, shorten)


async def window_moved(damage: Damage) -> None:
    """One layer loses its first token."""

    def forget(slab: Any) -> None:
        slab.caches[1].start = 1

    _after_each_pass(damage, forget)


async def pass_raises(damage: Damage) -> None:
    """The device fails in a pass."""

    def fail(slab: Any) -> None:
        raise RuntimeError("the device gave up")

    _after_each_pass(damage, fail)


async def tokens_shifted(damage: Damage) -> None:
    """A pass runs on tokens shifted by one."""

    def around(run: Method) -> Method:
        def run_chunk(slab: int, ids: Any, wanted: Any, **more: Any) -> Any:
            if slab != damage.slab:
                return run(slab, ids, wanted, **more)
            damage.strike()
            return run(slab, [*ids[1:], ids[0]], wanted, **more)

        return run_chunk

    wrap(damage.engine, "run_chunk", around)


async def rows_not_finite(damage: Damage) -> None:
    """Numbers after the end of a slab, which attention masks, are not finite."""
    engine = damage.engine

    def around(run: Method) -> Method:
        def run_chunk(slab: int, ids: Any, wanted: Any, **more: Any) -> Any:
            if slab == damage.slab:
                layer = engine.pool.get(slab).caches[0]
                damage.strike()
                layer.values[..., layer.offset + len(ids) :, :] = math.nan
            return run(slab, ids, wanted, **more)

        return run_chunk

    wrap(engine, "run_chunk", around)


def _after_each_pass(damage: Damage, harm: Callable[[Any], None]) -> None:
    """Damage the victim's slab after the model has run, before anything is measured."""
    engine = damage.engine

    def around(run: Method) -> Method:
        def run_chunk(slab: int, ids: Any, wanted: Any, **more: Any) -> Any:
            if slab != damage.slab:
                return run(slab, ids, wanted, **more)
            plain = engine._model

            def model(*args: Any, **kwargs: Any) -> Any:
                logits = plain(*args, **kwargs)
                damage.strike()
                harm(engine.pool.get(slab))
                return logits

            engine._model = model
            try:
                return run(slab, ids, wanted, **more)
            finally:
                engine._model = plain

        return run_chunk

    wrap(engine, "run_chunk", around)
