"""The engine's memory report is within 5 % of the sizes by shape and of MLX's count."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from safetensors.numpy import load_file

from cairn.engine.growth import Growth
from cairn.engine.mlx.cache import HeldSlab, SlabPool
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.growth import measured_growth
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.reports import MemoryReport
from cairn_bench.servers.sized_model import make_sized_model
from cairn_bench.servers.sizes import Size

SIZE = Size(layers=2, hidden_size=64, intermediate_size=96, heads=2, kv_heads=2, head_dim=128)
TOKEN_BYTES = SIZE.layers * 2 * SIZE.kv_heads * SIZE.head_dim * 4
LONG = 8192
MIB = 1 << 20
C = 256
IDS = [(7 * place) % 1500 + 3 for place in range(C)]
KEYS = tuple(f"block {place}" for place in range(LONG // C))


@pytest.fixture(scope="module")
def model(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with large KV and small passes."""
    directory = tmp_path_factory.mktemp("sized") / "model"
    make_sized_model(directory, SIZE, source=model_directory)
    return directory


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    """The model in memory."""
    return load_model(str(model))


class Watched:
    """An engine, and MLX's count in this process before it."""

    def __init__(self, loaded: LoadedModel, growth: Growth | None = None) -> None:
        gc.collect()  # objects of other tests must not be freed during the measurement
        self.engine = MlxEngine(loaded, decode_rows=1, growth=growth)
        memory = self.engine.memory()
        self._others = memory.active_bytes - memory.weights_bytes

    def adds_up(self, *, slab_tokens: int | None, block_tokens: int) -> MemoryReport:
        """
        Fail if the report is more than 5 % off the sizes by shape, or off MLX's count.

        Args:
            slab_tokens: the tokens of all slabs; None if shapes do not determine their size.
        """
        memory = self.engine.memory()
        held = memory.slab_bytes + memory.block_bytes
        by_mlx = memory.active_bytes - memory.weights_bytes - self._others
        if slab_tokens is not None:
            due = (slab_tokens + block_tokens) * TOKEN_BYTES
            assert due == pytest.approx(held, rel=0.05, abs=1)
        assert held == pytest.approx(by_mlx, rel=0.05, abs=1 << 16)
        return memory

    def filled(self) -> int:
        """
        A slab of 8,192 tokens, and a block for each chunk. Only the first chunk is run; the others
        are copies of it.
        """
        slab = self.engine.open_slab(LONG).slab
        self.engine.run_chunk(slab, IDS, None)
        for key in KEYS:
            self.engine.seal(slab, key, 0, C, store=True)
        self.engine.share(slab, KEYS[1:], C)
        return slab


def test_weights_are_those_of_the_file(loaded: LoadedModel, model: Path) -> None:
    """The reported bytes are those of the tensors in the file."""
    tensors = load_file(model / "model.safetensors").values()
    expected = sum(tensor.nbytes for tensor in tensors)
    assert expected == MlxEngine(loaded, decode_rows=1).memory().weights_bytes


def test_sessions_of_8192_tokens(loaded: LoadedModel) -> None:
    """
    With one, two, four and eight full slabs, and with only the blocks after they are closed, the
    arrays and MLX's count are within 5 % of the sizes by shape.
    """
    watched = Watched(loaded)
    slabs = [watched.filled()]
    for count in (1, 2, 4, 8):
        while len(slabs) < count:
            slabs.append(watched.engine.open_slab(LONG).slab)
            watched.engine.share(slabs[-1], KEYS, 0)
        memory = watched.adds_up(slab_tokens=count * LONG, block_tokens=LONG)
        assert count * 32 * MIB == memory.slab_bytes
    for slab in slabs:
        watched.engine.close_slab(slab)
    watched.engine.give_back_memory()
    memory = watched.adds_up(slab_tokens=0, block_tokens=LONG)
    assert (0, 0) == (memory.slab_bytes, memory.cache_bytes)
    for key in KEYS:
        watched.engine.evict(key)
    watched.adds_up(slab_tokens=0, block_tokens=0)


def test_a_slab_that_is_closed_and_stays_is_seen(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The control: something still references a closed slab's arrays. The engine's own count does not
    include them; only MLX's count does.
    """
    watched, kept = Watched(loaded), []
    close = SlabPool.close

    def leaks(pool: SlabPool, slab: int) -> HeldSlab:
        kept.append(close(pool, slab))
        return kept[-1]

    monkeypatch.setattr(SlabPool, "close", leaks)
    watched.engine.close_slab(watched.filled())
    assert 0 == watched.engine.memory().slab_bytes
    with pytest.raises(AssertionError):
        watched.adds_up(slab_tokens=0, block_tokens=LONG)
    kept.clear()
    watched.adds_up(slab_tokens=0, block_tokens=LONG)


def test_a_slab_that_is_copied_is_seen(loaded: LoadedModel) -> None:
    """The control: a second reference to the arrays makes the next pass copy them."""
    watched = Watched(loaded)
    slab = watched.engine.open_slab(LONG).slab
    watched.engine.run_chunk(slab, IDS, None)
    watched.adds_up(slab_tokens=LONG, block_tokens=0)
    kept: list[Any] = [array[..., :1, :] for array in watched.engine.pool.get(slab).arrays()]
    mx.eval(kept)
    watched.engine.run_chunk(slab, IDS, None)
    with pytest.raises(AssertionError):
        watched.adds_up(slab_tokens=LONG, block_tokens=0)


def test_caches_that_grow_are_measured_too(loaded: LoadedModel) -> None:
    """The pool counts what is reserved for them; their current size is measured."""
    cold = loaded.served_cold()
    watched = Watched(cold, measured_growth(cold, C))
    slab = watched.engine.open_slab(LONG).slab
    assert 0 == watched.engine.memory().slab_bytes
    for _ in range(4):
        watched.engine.run_chunk(slab, IDS, None)
    assert (1, LONG * TOKEN_BYTES) == watched.engine.pool.measure()
    watched.adds_up(slab_tokens=4 * C, block_tokens=0)
    watched.engine.close_slab(slab)
    watched.adds_up(slab_tokens=0, block_tokens=0)
