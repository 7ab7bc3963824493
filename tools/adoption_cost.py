"""
What adopting a block takes, compared with loading it from the node's own disk.

``python -P -m tools.adoption_cost`` writes blocks of several sizes to two folders in a temporary
one: as a server alone does, and as a node of a fleet does. Then it reads each in turn, with the
digest, and prints the medians. The files are in the system's cache, so the disk does not count.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import mlx.core as mx

from cairn.engine.mlx.blocks import SealedBlock, digest
from cairn.engine.mlx.files.block_files import BlockFiles
from cairn.engine.mlx.files.shared_files import SharedFiles
from cairn.ops.common.output import progress

FINGERPRINT = "f" * 16
PLENTY = 1 << 40
SHAPES = {
    "Pebble, 64 tokens": (4, 2, 64, 64),
    "9 MiB": (36, 8, 64, 128),
    "Qwen3-4B, 256 tokens": (36, 8, 256, 128),
}
"""(layers, KV heads, tokens, size of a head), in 16 bits."""


def block_of(layers: int, heads: int, tokens: int, size: int) -> SealedBlock:
    """A block of random numbers."""
    shape = (heads, tokens, size)
    keys, values = (
        tuple(mx.random.normal(shape).astype(mx.float16) for _ in range(layers)) for _ in "kv"
    )
    mx.eval(keys, values)
    return SealedBlock(keys=keys, values=values)


def took_ms(read: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    read()
    return 1000 * (time.perf_counter() - began)


def medians_ms(shape: tuple[int, int, int, int], name: str, rounds: int) -> tuple[float, float]:
    """The medians of loading a block of this shape, and of adopting it."""
    block = block_of(*shape)
    found, key = digest(block), "ab" * 32
    with tempfile.TemporaryDirectory(prefix="cairn-adoption-") as folder:
        own = BlockFiles(Path(folder) / "own", FINGERPRINT, "run")
        writer = SharedFiles(Path(folder) / "n1", FINGERPRINT, "run")
        other = SharedFiles(Path(folder) / "n2", FINGERPRINT, "run")
        for files in (own, writer):
            files.write(key, block, found, (0, shape[2]), PLENTY)
        loading, adopting = [], []
        for _ in progress(range(rounds), name, rounds):
            loading.append(took_ms(lambda: own.read(key, found)))
            adopting.append(took_ms(lambda: other.read_of("n1", key, found, block.nbytes)))
    return statistics.median(loading), statistics.median(adopting)


@click.command()
@click.option("--rounds", default=40, show_default=True, help="How often each is read.")
def main(rounds: int) -> None:
    """Compare adopting a block with loading it from the node's own disk."""
    for name, shape in SHAPES.items():
        own, adopted = medians_ms(shape, name, rounds)
        times = f"own {own:7.2f} ms, adopted {adopted:7.2f} ms: {adopted / own:.2f}"
        click.echo(f"{name:22} {times}")


if __name__ == "__main__":
    main()
