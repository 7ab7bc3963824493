"""
What the engine measures and draws: digests cover the actual bytes, and every token has its own
random key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import pytest

from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.mlx import engine as mlx_engine
from cairn.engine.mlx.blocks import SealedBlock, digest, paste
from cairn.engine.mlx.cache import HeldSlab
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.reports import DecodeRow, Drawn, DrawSpec, PassReport
from cairn.engine.sampling import Sampling, token_key
from cairn.engine.schedule import passes

CHUNK = 64
KEYS = ("first", "second")
IDS = [(7 * place) % 1500 + 3 for place in range(2 * CHUNK)]
WARM = Sampling(temperature=0.8)


@pytest.fixture(scope="module")
def loaded(model_directory: Any) -> LoadedModel:
    """The random model in memory."""
    return load_model(str(model_directory))


def sealed(engine: MlxEngine) -> tuple[str, ...]:
    """Two chunks computed and kept in the store; their digests."""
    slab = engine.open_slab(512).slab
    digests = []
    for key, (start, end) in zip(KEYS, passes(0, len(IDS), CHUNK), strict=True):
        engine.run_chunk(slab, IDS[start:end], None)
        digests.append(engine.seal(slab, key, start, end, store=True).digest)
    return tuple(digests)


def test_shared_blocks_have_the_digests_of_sealed_ones(loaded: LoadedModel) -> None:
    """A slab holds the bytes of the blocks that were copied into it, each at its position."""
    engine = MlxEngine(loaded, decode_rows=1)
    expected = sealed(engine)

    assert len(expected) == len(set(expected))
    assert expected == engine.share(engine.open_slab(512).slab, KEYS, 0).digests


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize(("row", "damaged"), [(3, 0), (CHUNK - 1, 0), (CHUNK, 1)])
def test_a_copy_that_went_wrong_has_another_digest(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    layer: int,
    row: int,
    damaged: int,
) -> None:
    """
    The contents of the slab are hashed, not those of the store. One wrong number after the copy
    changes the digest of its block and of no other.
    """
    engine = MlxEngine(loaded, decode_rows=1)
    expected = sealed(engine)

    def broken(slab: HeldSlab, blocks: Sequence[SealedBlock], start: int) -> int:
        end = paste(slab, blocks, start)
        array = getattr(slab.caches[layer], part)
        array[0, -1, row, 2] = array[0, -1, row, 2] + 1.0
        return end

    monkeypatch.setattr(mlx_blocks, "paste", broken)
    found = engine.share(engine.open_slab(512).slab, KEYS, 0).digests

    assert [damaged] == [place for place in range(len(KEYS)) if expected[place] != found[place]]


def block(*, keys: mx.array | None = None, values: mx.array | None = None) -> SealedBlock:
    """A block of two layers; the arguments are used for the second one."""
    plain = mx.arange(24, dtype=mx.float32).reshape(2, 4, 3)
    return SealedBlock(
        keys=(plain, plain if keys is None else keys),
        values=(plain + 100, plain + 200 if values is None else values),
    )


CHANGED = {
    "keys": block(keys=mx.arange(24, dtype=mx.float32).reshape(2, 4, 3) * 2),
    "values": block(values=mx.arange(24, dtype=mx.float32).reshape(2, 4, 3)),
    "shape of keys": block(keys=mx.arange(24, dtype=mx.float32).reshape(4, 2, 3)),
    "shape of values": block(values=(mx.arange(24, dtype=mx.float32) + 200).reshape(2, 2, 6)),
    "type of keys": block(keys=mx.arange(24, dtype=mx.float32).reshape(2, 4, 3).view(mx.int32)),
    "type of values": block(
        values=(mx.arange(24, dtype=mx.float32) + 200).reshape(2, 4, 3).view(mx.uint32)
    ),
    "layers in another order": attrs.evolve(block(), values=block().values[::-1]),
    "keys for values": SealedBlock(keys=block().values, values=block().keys),
    "a layer less": attrs.evolve(block(), values=block().values[:1]),
}


@pytest.mark.parametrize("other", CHANGED.values(), ids=CHANGED.keys())
def test_a_digest_is_of_keys_values_shapes_and_types(other: SealedBlock) -> None:
    """Blocks that differ in any of these have different digests, even if the bytes are equal."""
    assert digest(block()) == digest(block())
    assert digest(block()) != digest(other)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_digest_sees_the_last_bit(dtype: mx.Dtype, part: str) -> None:
    """The lowest bit of the last number counts, for every dtype of a cache."""
    plain = mx.ones((1, 2, 3), dtype)
    octets = plain.view(mx.uint8)
    octets[0, 1, -2] = octets[0, 1, -2] ^ 1
    whole = SealedBlock(keys=(plain,), values=(plain,))

    changed: dict[str, Any] = {part: (octets.view(dtype),)}
    other = attrs.evolve(whole, **changed)

    assert digest(whole) != digest(other)


Asked = tuple[int, int, int]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """(seed, choice, position) of each random key that the engine computes from now on."""
    found: list[Asked] = []

    def recording(seed: int, choice: int, position: int) -> int:
        found.append((seed, choice, position))
        return token_key(seed, choice, position)

    monkeypatch.setattr(mlx_engine, "token_key", recording)
    return found


def prefilled(engine: MlxEngine, ids: Sequence[int], draw: DrawSpec) -> tuple[int, int]:
    """A slab with the KV of a prompt, and the token drawn at its end."""
    slab = engine.open_slab(512).slab
    drawn: Drawn | None = None
    for start, end in passes(0, len(ids), CHUNK):
        report = engine.run_chunk(slab, ids[start:end], draw if end == len(ids) else None)
        drawn = report.drawn
    assert drawn is not None
    return slab, drawn.token


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 37])
def test_every_token_is_drawn_at_its_own_position(
    loaded: LoadedModel, asked: list[Asked], rows: int, tokens: int
) -> None:
    """
    The first token after a prompt of n tokens has position n, and each decode step the next one, so
    no two tokens of an answer share a random key.
    """
    engine = MlxEngine(loaded, decode_rows=rows)
    draw = DrawSpec(sampling=WARM, seed=11, choice=2)
    slab, token = prefilled(engine, IDS[:tokens], draw)
    for _ in range(5):
        row = DecodeRow(slab=slab, token=token, draw=draw)
        report = engine.decode([row, *[None] * (rows - 1)])[0]
        assert isinstance(report, PassReport)
        assert report.drawn is not None
        token = report.drawn.token

    assert [(11, 2, tokens + step) for step in range(6)] == asked


def test_each_row_draws_by_its_own_seed_and_position(
    loaded: LoadedModel, asked: list[Asked]
) -> None:
    """Sessions that decode together draw as if each were alone, whatever their rows."""
    engine = MlxEngine(loaded, decode_rows=4)
    one, other = DrawSpec(sampling=WARM, seed=1), DrawSpec(sampling=WARM, seed=2, choice=1)
    first, token = prefilled(engine, IDS[:10], one)
    second, beside = prefilled(engine, IDS[:70], other)
    asked.clear()

    engine.decode(
        [
            None,
            DecodeRow(slab=second, token=beside, draw=other),
            None,
            DecodeRow(slab=first, token=token, draw=one),
        ]
    )

    assert [(1, 0, 11), (2, 1, 71)] == sorted(asked)


def test_a_decode_step_draws_what_a_prefill_draws(loaded: LoadedModel) -> None:
    """The random key of a token does not depend on the kind of pass that draws it."""
    flat = DrawSpec(sampling=Sampling(temperature=100.0), seed=5)
    engine = MlxEngine(loaded, decode_rows=1)
    slab, token = prefilled(engine, IDS[:20], flat)
    report = engine.decode([DecodeRow(slab=slab, token=token, draw=flat)])[0]
    assert isinstance(report, PassReport)
    assert report.drawn is not None

    assert report.drawn.token == prefilled(engine, [*IDS[:20], token], flat)[1]
