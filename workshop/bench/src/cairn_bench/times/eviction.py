"""
Measure how long it takes to find the blocks to evict from full memory, or to drop from a full disk.

The fold has the requested number of blocks: conversations that share their first blocks, followed
by blocks of their own. Memory and disk are full, and one more block is to come in. Run it with
``python -P -m cairn_bench.times.eviction --blocks 100000``.

Milliseconds are processor time. *Ever sealed* are blocks of which only the digests are remembered.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable

import attrs
from immutables import Map

from cairn.journal.cache import eviction
from cairn.journal.cache.eviction_order import Order
from cairn.journal.state import Block, Model, Pool, State

SIZE = 100


def chains(blocks: int, depth: int, common: int) -> list[Block]:
    """Blocks in conversations of ``depth`` blocks, of which the first ``common`` are shared."""
    found: list[Block] = []
    before: str | None = None
    for place in range(common):
        found.append(block(f"c{place}", before, place, len(found)))
        before = f"c{place}"
    number = 0
    while len(found) < blocks:
        parent = before
        for place in range(common, min(depth, common + blocks - len(found))):
            found.append(block(f"{number}/{place}", parent, place, len(found)))
            parent = f"{number}/{place}"
        number += 1
    return found


def block(key: str, parent: str | None, place: int, used: int) -> Block:
    """A block in memory and in a file. Every second one was used twice."""
    return Block(
        key=key,
        parent=parent,
        digest="d",
        start=64 * place,
        tokens=64,
        bytes=SIZE,
        present=True,
        file_bytes=SIZE,
        last_used=used,
        previous_use=used // 2 if used % 2 else None,
    )


def full(blocks: list[Block], ever: int) -> State:
    """A fold with these blocks in memory and on disk, and ``ever`` earlier ones."""
    gone = (
        attrs.evolve(block(f"g{n}", None, 0, 0), present=False, file_bytes=None)
        for n in range(ever)
    )
    size = SIZE * len(blocks)
    model = Model(
        name="none",
        fingerprint="f",
        layers=1,
        block_tokens=64,
        decode_rows=1,
        context_tokens=1_000_000,
        reusable=True,
        pool_slabs=1,
        pool_bytes=1,
        blocks_bytes=size,
        blocks_max=0,
        kv_sinks=0,
        kv_window=0,
        kv_rows=0,
        min_cache_tokens=0,
        state_blocks=0,
        grain=64,
    )
    pool = Pool(blocks=len(blocks), block_bytes=size, disk_blocks=len(blocks), disk_bytes=size)
    found = Map({one.key: one for one in (*blocks, *gone)})
    position = len(blocks)
    return State(position=position, model=model, blocks=found, pool=pool, disk_budget=size)


def timed(name: str, step: Callable[[], object], times: int) -> None:
    """Repeat a step; print the median and the longest time."""
    took: list[float] = []
    for _ in range(times):
        start = time.process_time()
        step()
        took.append(1000 * (time.process_time() - start))
    print(f"{name:<52}{statistics.median(took):>10.2f}{max(took):>10.2f}")


def main() -> int:
    """Print the time of each query."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--blocks", type=int, default=100_000, help="in memory, and in files")
    parser.add_argument(
        "--ever", type=int, default=0, help="number of other blocks that were sealed once"
    )
    parser.add_argument("--depth", type=int, default=128, help="blocks of a conversation")
    parser.add_argument("--common", type=int, default=32, help="of which all have the first ones")
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    blocks = chains(asked.blocks, asked.depth, asked.common)
    state = full(blocks, asked.ever)
    print(f"{len(blocks):,} blocks, {asked.ever:,} ever sealed besides")
    print(f"\n{'CPU ms':<52}{'median':>10}{'longest':>10}")
    new = attrs.evolve(block("new", "c0", 1, len(blocks)), file_bytes=None)
    old = attrs.evolve(block("old", None, 0, 0), file_bytes=None)
    order = Order(state)
    timed("make the order", lambda: Order(state), asked.times)
    timed(
        "choose the block to evict",
        lambda: eviction.room_for_block(state, SIZE, order=order),
        asked.times,
    )
    timed("the whole order", lambda: deque(order.memory.in_order(), maxlen=0), asked.times)
    timed(
        "choose the file to remove",
        lambda: eviction.room_for_file(state, new, SIZE, order=order),
        asked.times,
    )
    timed(
        "the same, if none is older than the block",
        lambda: eviction.room_for_file(state, old, SIZE, order=order),
        asked.times,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
