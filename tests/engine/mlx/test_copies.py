"""Blocks in a slab are hashed in place, and no more memory is copied than necessary."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.mlx.cache import LayerShape, SlabPool
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import load_model
from cairn.engine.mlx.state import StateShape
from cairn_bench.servers.sized_model import make_sized_model
from cairn_bench.servers.sizes import Size

C = 64
MIB = 1 << 20
SIZE = Size(layers=2, hidden_size=64, intermediate_size=96, heads=2, kv_heads=2, head_dim=128)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("start", [0, C])
def test_rows_in_a_slab_have_the_digest_of_their_copy(
    dtype: mx.Dtype, heads: int, start: int
) -> None:
    """At any position, with any number of heads; a single different bit changes the digest."""
    shape = LayerShape(kv_heads=heads, key_dim=16, value_dim=8, dtype=dtype)
    state = StateShape(arrays=(((1, 3, 8), mx.float32),))
    slab = SlabPool((shape, state), own_classes=True, growing=list).open(3 * C)
    layer = slab.attending[0]
    layer.keys = mx.random.normal(layer.keys.shape, key=mx.random.key(1)).astype(dtype)
    layer.values = mx.random.normal(layer.values.shape, key=mx.random.key(2)).astype(dtype)
    mx.eval(layer.keys, layer.values)
    block = mlx_blocks.cut(slab, start, start + C)
    there = mlx_blocks.pasted(slab, block, start)

    assert mlx_blocks.digest(block) == mlx_blocks.digest(there)
    layer.keys[0, -1, start + C - 1, -1] = layer.keys[0, -1, start + C - 1, -1] + 1
    other = mlx_blocks.pasted(slab, block, start)
    assert mlx_blocks.digest(block) != mlx_blocks.digest(other)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_digest_of_a_part_covers_the_whole_block(dtype: mx.Dtype) -> None:
    """Of the first rows what the slab has, of the others what the block has."""
    shape = LayerShape(kv_heads=2, key_dim=16, value_dim=8, dtype=dtype)
    pool = SlabPool((shape, shape), own_classes=True, growing=list)
    slab, rows = pool.open(3 * C), 5
    for place, layer in enumerate(slab.attending):
        key = mx.random.key(place)
        layer.keys = mx.random.normal(layer.keys.shape, key=key).astype(dtype)
        layer.values = mx.random.normal(layer.values.shape, key=key).astype(dtype)
    block = mlx_blocks.cut(slab, C, 2 * C)
    other = pool.open(3 * C)
    for layer in other.attending:
        layer.offset = C
    assert C + rows == mlx_blocks.paste(other, [mlx_blocks.first_rows(block, rows)], C)

    def found() -> str:
        return mlx_blocks.digest(mlx_blocks.pasted_in_part(other, block, C, rows))

    assert mlx_blocks.digest(block) == found()
    keys = other.attending[1].keys
    keys[0, 0, C + rows] = 1  # the first row that was not copied
    assert mlx_blocks.digest(block) == found()
    keys[0, -1, C + rows - 1, -1] = 1  # the last one that was
    assert mlx_blocks.digest(block) != found()
    changed = block.values[0]
    changed[0, C - 1, 0] = 1
    keys[0, -1, C + rows - 1, -1] = block.keys[1][-1, rows - 1, -1]
    sealed = mlx_blocks.cut(slab, C, 2 * C)
    assert mlx_blocks.digest(sealed) != found()


def test_a_copy_takes_no_memory_besides(model_directory: Path, tmp_path: Path) -> None:
    """
    While 15 MiB are copied and hashed, the process takes less than 1 MiB more: nothing is
    concatenated first, cut out again, or copied with the whole slab.
    """
    directory = tmp_path / "model"
    make_sized_model(directory, SIZE, source=model_directory)
    engine = MlxEngine(load_model(str(directory)), decode_rows=1)
    slab = engine.open_slab(4096).slab
    engine.run_chunk(slab, [(7 * place) % 1500 + 3 for place in range(C)], None)
    keys = [f"block {place}" for place in range(60)]
    for key in keys:
        engine.seal(slab, key, 0, C, store=True)
    _, size = engine.blocks.measure()
    # The whole process is measured, so objects of other tests must not be freed in the meantime.
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        report = engine.share(slab, keys, C)
        peak, after = mx.get_peak_memory(), mx.get_active_memory()
    finally:
        gc.enable()

    assert 15 * MIB == size
    assert 1 == len(set(report.digests))
    assert peak - before < MIB
    assert abs(after - before) < MIB
