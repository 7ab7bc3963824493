"""
Recurrent states in slabs and blocks: where they can be cut back to, what they weigh, and that no
form of them goes unseen. No model runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList

from cairn.engine.errors import CannotTrim, EngineFault
from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.mlx.cache import HeldSlab, LayerShape, SlabCache, SlabPool
from cairn.engine.mlx.files.block_files import BlockFiles
from cairn.engine.mlx.files.counted import Rejected
from cairn.engine.mlx.state import StateCache, StateShape
from cairn.journal.cache.eviction import file_bytes_at_most
from cairn.journal.state import State
from tests.support.journals import MODEL

C = 4
STATE = StateShape(arrays=(((1, 3, 8), mx.float32), ((1, 2, 4, 4), mx.float16)))
KV = LayerShape(kv_heads=2, key_dim=8, value_dim=8, dtype=mx.float32)
KEY = "ab" * 16


def pool_of(*shapes: LayerShape | StateShape, together: Sequence[int] = ()) -> SlabPool:
    """Slabs of layers that keep these."""
    return SlabPool(shapes, own_classes=True, growing=list, together=together)


def ran(slab: HeldSlab, rows: int, mark: float) -> None:
    """What a pass over so many rows leaves behind."""
    for layer in slab.layers:
        if isinstance(layer, SlabCache):
            layer.update_and_fetch(mx.full((1, 2, rows, 8), mark), mx.full((1, 2, rows, 8), -mark))
        else:
            layer[0] = mx.full((1, 7, 8), mark)[:, -3:, :]
            layer[1] = mx.full((1, 2, 4, 4), mark, mx.float16)
    slab.passed(rows)
    mx.eval(slab.arrays())


def marks(slab: HeldSlab) -> list[float]:
    """Which pass each array of the states is of."""
    found = [array for layer in slab.states for array in layer.arrays]
    return [float(mx.max(array).item()) for array in found]  # type: ignore[arg-type]


def test_a_slab_weighs_the_same_whatever_its_states_are() -> None:
    """Empty, filled, kept, cut back and emptied: two states for each layer, and the rows."""
    pool = pool_of(KV, STATE)
    slab = pool.open(8)
    due = pool.slab_bytes(8)
    weights = [slab.nbytes]
    ran(slab, C, 1.0)
    weights.append(slab.nbytes)
    slab.keep_states()
    ran(slab, 1, 2.0)
    weights.append(slab.nbytes)
    slab.trim(C)
    weights.append(slab.nbytes)
    slab.trim(0)
    weights.append(slab.nbytes)

    assert [due] * 5 == weights
    assert due == 8 * KV.token_bytes + 2 * STATE.state_bytes
    assert STATE.state_bytes == 3 * 8 * 4 + 2 * 4 * 4 * 2


def test_a_slab_is_cut_back_to_the_state_that_was_kept() -> None:
    """And to nothing, where models find no state; to no other place, which changes nothing."""
    slab = pool_of(KV, STATE).open(16)
    ran(slab, C, 1.0)
    slab.keep_states()
    ran(slab, C, 2.0)
    ran(slab, 1, 3.0)
    with pytest.raises(CannotTrim, match="no state of 8 tokens was kept"):
        slab.trim(2 * C)

    assert (((2, 0, 9),), [3.0, 3.0]) == (slab.coverage(), marks(slab))
    slab.trim(C)
    assert (((2, 0, C),), [1.0, 1.0]) == (slab.coverage(), marks(slab))
    ran(slab, 1, 4.0)
    slab.trim(C)
    assert [1.0, 1.0] == marks(slab)
    slab.trim(0)
    assert (((2, 0, 0),), [None, None]) == (slab.coverage(), slab.states[0].cache)
    ran(slab, 1, 5.0)
    with pytest.raises(CannotTrim):
        slab.trim(C)


def test_kept_states_do_not_change_with_the_state() -> None:
    """A model that changes its state in place does not change the copy."""
    slab = pool_of(STATE).open(16)
    ran(slab, C, 1.0)
    slab.keep_states()
    slab.states[0][1][0, 0, 0, 0] = 9.0
    slab.trim(C)
    ran(slab, 1, 2.0)
    slab.trim(C)

    assert [1.0, 1.0] == marks(slab)


@pytest.mark.parametrize("fault", ["a place left", "another shape", "another type", "padding"])
def test_a_pass_that_leaves_another_state_is_a_fault(fault: str) -> None:
    """What would not be counted, or is of the pass before, is no state."""
    cache = StateCache(STATE)
    cache[0] = mx.zeros((1, 4 if fault == "another shape" else 3, 8))
    if fault != "a place left":
        cache[1] = mx.zeros((1, 2, 4, 4), mx.float32 if fault == "another type" else mx.float16)
    cache.lengths = mx.array([1]) if fault == "padding" else None
    with pytest.raises(EngineFault):
        cache.passed(1)

    assert 0 == cache.tokens


def test_a_pass_that_leaves_the_state_as_it_was_is_a_fault() -> None:
    """The layer's coverage does not move, so that the old state is not taken for a new one."""
    slab = pool_of(STATE).open(16)
    ran(slab, C, 1.0)
    with pytest.raises(EngineFault):
        slab.passed(1)

    assert C == slab.end


def test_no_state_holds_on_to_what_it_was_cut_from() -> None:
    """A slice of a pass's rows would keep them all in memory, uncounted."""
    slab = pool_of(StateShape(arrays=(((1, 3, 4096), mx.float32),))).open(16)
    before = mx.get_active_memory()
    slab.states[0][0] = mx.ones((1, 200, 4096))[:, -3:, :]
    slab.passed(C)
    mx.eval(slab.arrays())

    assert mx.get_active_memory() - before < 20 * 4096 * 4


def sealed(slab: HeldSlab, end: int, *, states: bool) -> mlx_blocks.SealedBlock:
    """The block that ends there."""
    return mlx_blocks.cut(slab, end - C, end, states=states)


@pytest.mark.parametrize("shapes", [(KV, STATE), (STATE,), (STATE, KV, STATE)], ids=len)
def test_blocks_bring_a_slab_to_where_it_was(shapes: tuple[LayerShape | StateShape, ...]) -> None:
    """Rows and states are those that were sealed; the slab can be cut back to them later."""
    pool = pool_of(*shapes)
    slab = pool.open(16)
    ran(slab, C, 1.0)
    first = sealed(slab, C, states=False)
    ran(slab, C, 2.0)
    second = sealed(slab, 2 * C, states=True)
    other = pool.open(16)
    end = mlx_blocks.paste(other, [first, second], 0)

    assert (2 * C, [2.0] * len(marks(slab))) == (end, marks(other))
    assert slab.coverage() == other.coverage() == ((len(shapes), 0, 2 * C),)
    for block, start in ((first, 0), (second, C)):
        assert mlx_blocks.digest(block) == mlx_blocks.digest(mlx_blocks.pasted(other, block, start))
    ran(other, 1, 3.0)
    other.trim(2 * C)
    assert [2.0] * len(marks(slab)) == marks(other)


def test_nothing_is_gone_on_from_without_a_state() -> None:
    """Blocks that end where none is carried are not copied in, nor some beside other tokens."""
    pool = pool_of(KV, STATE)
    slab = pool.open(16)
    ran(slab, C, 1.0)
    without, carries = (sealed(slab, C, states=states) for states in (False, True))
    other = pool.open(16)
    with pytest.raises(EngineFault, match="the last block has 0 states"):
        mlx_blocks.paste(other, [without], 0)
    with pytest.raises(EngineFault, match="other tokens"):
        mlx_blocks.paste(other, [carries], C)

    assert ((2, 0, 0),) == other.coverage()
    ran(slab, 1, 2.0)
    with pytest.raises(EngineFault, match="the state covers 5 tokens, but the block ends at 4"):
        sealed(slab, C, states=True)


def test_a_digest_sees_the_states() -> None:
    """The lowest bit of a state counts, and whether there is one."""
    slab = pool_of(KV, STATE).open(16)
    ran(slab, C, 1.0)
    block = sealed(slab, C, states=True)
    octets = mx.array(block.states[1]).view(mx.uint8)
    octets[0, 1, 3, -2] = octets[0, 1, 3, -2] ^ 1
    changed = attrs.evolve(block, states=(block.states[0], octets.view(mx.float16)))
    none = attrs.evolve(block, states=())
    other = attrs.evolve(none, state_tokens=C + 1)

    assert 4 == len({mlx_blocks.digest(one) for one in (block, changed, none, other)})


@pytest.mark.parametrize("shapes", [(KV, STATE), (STATE,)], ids=["beside others", "alone"])
@pytest.mark.parametrize("states", [True, False])
def test_a_file_has_the_states(
    shapes: tuple[LayerShape | StateShape, ...], states: bool, tmp_path: Path
) -> None:
    """What is written comes back, also of a block in which there is no array at all."""
    slab = pool_of(*shapes).open(16)
    ran(slab, C, 1.0)
    block = sealed(slab, C, states=states)
    digest = mlx_blocks.digest(block)
    files = BlockFiles(tmp_path / "blocks", "0123456789abcdef", "5f0c0000-run")
    files.write(KEY, block, digest, (0, C), 1 << 30)
    found, _ = files.read(KEY, digest)

    assert (C, block.nbytes) == (found.tokens, found.nbytes)
    assert [one.shape for one in block.states] == [one.shape for one in found.states]
    with pytest.raises(Rejected):
        files.read(KEY, mlx_blocks.digest(attrs.evolve(block, state_tokens=C + 1)))


@pytest.mark.parametrize("layers", [1, 128])
def test_a_file_is_no_larger_than_reported_before(layers: int, tmp_path: Path) -> None:
    """However many layers have as many arrays as any has, each with a long entry in the header."""
    shape = (1, 1024, 16, 16)
    block = mlx_blocks.SealedBlock(
        keys=(),
        values=(),
        states=tuple(mx.zeros(shape, mx.bfloat16) for _ in range(4 * layers)),
        state_tokens=C,
    )
    files = BlockFiles(tmp_path / "blocks", "0123456789abcdef", "5f0c0000-" * 4)
    size = files.write(KEY, block, mlx_blocks.digest(block), (0, 1 << 20), 1 << 40)
    state = State(model=attrs.evolve(MODEL, layers=layers))

    assert block.nbytes < size <= file_bytes_at_most(state, block.nbytes)


def test_layers_that_keep_several_things_have_them_in_a_list() -> None:
    """The model gets what it expects; what is counted and cut back is each of them."""
    pool = pool_of(STATE, KV, KV, STATE, together=(2, 0, 1))
    slab = pool.open(16)

    assert [CacheList, SlabCache, CacheList] == [type(cache) for cache in slab.caches]
    assert [StateCache, SlabCache, SlabCache, StateCache] == [type(one) for one in slab.layers]
    ran(slab, C, 1.0)
    assert ((4, 0, C),) == slab.coverage()
    assert pool.slab_bytes(16) == slab.nbytes == slab.live_bytes
