"""Damage to memory: bits of a block, and wrong counts of slabs and references."""

from __future__ import annotations

from typing import Any

from cairn.ops.drills.faults.damage import Damage, Method, wrap


async def bit_flipped(damage: Damage) -> None:
    """One bit of a sealed block flips: the sign of one number of the keys of its first layer."""
    session = damage.session
    assert session is not None
    key = session.slab_keys[0]

    def flip(engine: Any) -> None:
        damage.strike()
        _flip_sign(engine.blocks.get(key).keys[0], (0, 3, 1))

    await damage.server.loaded.engine.call(flip, lambda done: None)


async def block_recomputed(damage: Damage) -> None:
    """KV differs in one bit when it is computed again."""
    engine = damage.engine

    def around(seal: Method) -> Method:
        def sealed(slab: int, key: str, start: int, end: int, *, store: bool) -> Any:
            if damage.struck_s is None and engine.blocks._blocks.get(key) is not None:
                damage.strike()
                _flip_sign(engine.pool.get(slab).caches[0].keys, (0, 0, start, 1))
            return seal(slab, key, start, end, store=store)

        return sealed

    wrap(engine, "seal", around)


async def row_flipped(damage: Damage) -> None:
    """One bit of the last row that a continuation reuses flips in the slab."""
    engine = damage.engine

    def around(run: Method) -> Method:
        def run_chunk(slab: int, ids: Any, wanted: Any, **more: Any) -> Any:
            if slab == damage.slab and more.get("again") is not None:
                layer = engine.pool.get(slab).caches[0]
                damage.strike()
                _flip_sign(layer.keys, (0, 0, layer.offset - 1, 1))
            return run(slab, ids, wanted, **more)

        return run_chunk

    wrap(engine, "run_chunk", around)


async def slab_leaked(damage: Damage) -> None:
    """The pool keeps a released slab."""
    pool = damage.engine.pool

    def around(close: Method) -> Method:
        def closed(slab: int) -> Any:
            leaks = slab == damage.slab and damage.struck_s is None
            held = close(slab)
            if leaks:
                damage.strike()
                pool._held[slab] = held
            return held

        return closed

    wrap(pool, "close", around)


async def slab_freed_twice(damage: Damage) -> None:
    """The reference to a slab is released twice."""

    def around(close_slab: Method) -> Method:
        def closed(slab: int) -> Any:
            mine = slab == damage.slab
            report = close_slab(slab)
            if mine:
                damage.strike()
                report = close_slab(slab)
            return report

        return closed

    wrap(damage.engine, "close_slab", around)


def _flip_sign(array: Any, place: tuple[int, ...]) -> None:
    """Flip one bit of an array, in place. Runs on the engine thread."""
    array[place] = -array[place]
