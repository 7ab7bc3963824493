"""
The size of growing caches is known in advance: never less than they take, and hardly more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from cairn.engine.errors import EngineFault, ModelRefused
from cairn.engine.growth import STEP_TOKENS, Growth, LayerGrowth
from cairn.engine.mlx.cache import bytes_of
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.growth import measured_growth
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.schedule import passes
from tests.engine.mlx.test_memory_measured import Watched
from tests.support.models.model_families import config_of, make_family_model

HEADS, WIDTH = 2, 4
ROW = 2 * HEADS * WIDTH * 4
LONG, SHORT = 2047, 320
C = 64

LARGE: dict[str, dict[str, Any]] = {
    "llama4": {"head_dim": 128, "num_key_value_heads": 4},
    # What it keeps for each token, it keeps for groups of them; windows and open groups are beside.
    "deepseek_v41": {
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "compress_ratios": [4, 4, 128, 4],
        "kv_source_layer_ids": [0, 1, 2, 3],
        "index_source_layer_ids": [0, 1, 2, 3],
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 64,
    },
    "gemma3_text": {"head_dim": 128, "num_key_value_heads": 4},
    "nemotron_h": {},
}
"""
Families that keep much and compute little: two that are always cold, and two that a self-test, or
``--kv-cache mlx-lm``, makes so.
"""


class Gathers:
    """
    A cache unlike any of mlx-lm's: a window of five rows, a row for each group of six tokens, and
    the rows of the incomplete group.
    """

    def __init__(self) -> None:
        self.offset = 0
        self.kept: dict[str, list[mx.array]] = {"window": [], "groups": [], "open": []}

    def update(self, rows: int) -> None:
        """Add rows."""
        self.offset += rows
        sizes = (min(5, self.offset), self.offset // 6, self.offset % 6)
        for name, size in zip(self.kept, sizes, strict=True):
            self.kept[name] = [mx.zeros((1, size, WIDTH))]

    @property
    def state(self) -> list[mx.array]:
        """All arrays."""
        return [array for arrays in self.kept.values() for array in arrays]


class Keeper:
    """A model that keeps rows and computes nothing."""

    def __init__(self, made: Callable[[], Any]) -> None:
        self._made = made

    def make_cache(self) -> list[Any]:
        """The cache of its only layer."""
        return [self._made()]

    def __call__(self, ids: mx.array, cache: list[Any]) -> None:
        """Run a pass."""
        rows = ids.shape[1]
        for one in cache:
            if isinstance(one, Gathers):
                one.update(rows)
            elif isinstance(one, ArraysCache):
                one[0] = mx.zeros((1, HEADS, 3))
            else:
                if isinstance(one, ChunkedKVCache):
                    one.maybe_trim_front()
                some = mx.zeros((1, HEADS, rows, WIDTH))
                one.update_and_fetch(some, some)


def loaded_with(made: Callable[[], Any], context_tokens: int = 4096) -> LoadedModel:
    """Such a model, with the attributes that are read."""
    facts = {"name": "keeper", "config": {"model_type": "keeper"}}
    model = Keeper(made)
    fake = cast("LoadedModel", SimpleNamespace(model=model, context_tokens=context_tokens, **facts))
    cast("Any", fake).cannot_run = partial(LoadedModel.cannot_run, fake)
    return fake


def after_each_pass(
    loaded: LoadedModel, prompt: int, answer: int, chunk: int
) -> Iterator[tuple[int, int]]:
    """(tokens, bytes of the caches) after each pass over a prompt and its answer."""
    caches = loaded.model.make_cache()
    spans = [*passes(0, prompt, chunk), *((at, at + 1) for at in range(prompt, prompt + answer))]
    for start, end in spans:
        loaded.model(mx.zeros((1, end - start), mx.int32), cache=caches)
        mx.eval([one.state for one in caches])
        yield end, sum(map(bytes_of, caches))


MADE: dict[str, Callable[[], Any]] = {
    "all": KVCache,
    "a window": lambda: RotatingKVCache(max_size=100),
    "a long window": lambda: RotatingKVCache(max_size=700, keep=4),
    "a chunk": lambda: ChunkedKVCache(100),
    "a long chunk": lambda: ChunkedKVCache(700),
    "a state": lambda: ArraysCache(1),
    "groups": Gathers,
}


@pytest.mark.parametrize("chunk", [64, 96, 256, 512])
@pytest.mark.parametrize("name", MADE)
def test_no_pass_takes_more(name: str, chunk: int) -> None:
    """No pass exceeds the bound, for any prompt and any length of the answer."""
    loaded = loaded_with(MADE[name])
    growth = measured_growth(loaded, chunk)
    draw = random.Random(f"{name} {chunk}")
    for prompt, answer in ((1, 300), (chunk, 2), (draw.randrange(2, 2000), 40), (850, 60)):
        for tokens, size in after_each_pass(loaded, prompt, answer, chunk):
            assert size <= growth.bytes_at(tokens), (prompt, tokens)


@pytest.mark.parametrize(
    ("name", "chunk", "expected"),
    [
        ("all", 64, [ROW * 256, ROW * 512, ROW * 2048]),
        ("all", 96, [ROW * 512, ROW * 768, ROW * 2304]),
        ("a window", 64, [ROW * 163, ROW * 163, ROW * 163]),
        ("a chunk", 64, [ROW * 356, ROW * 356, ROW * 356]),
        ("a long chunk", 64, [ROW * 256, ROW * 512, ROW * 956]),
        ("a long chunk", 512, [ROW * 256, ROW * 512, ROW * 1212]),
        ("a state", 64, [HEADS * 3 * 4] * 3),
    ],
)
def test_what_is_known_of_mlx_lms_classes(name: str, chunk: int, expected: list[int]) -> None:
    """Rows grow in steps, up to the bound of a window or a chunk."""
    growth = measured_growth(loaded_with(MADE[name]), chunk)
    assert expected == [growth.bytes_at(tokens) for tokens in (200, 300, 2048)]


def test_what_is_found_of_another_class() -> None:
    """The bound is within 5 % of the actual size for a long prompt, within a step for a short."""
    loaded = loaded_with(Gathers)
    growth = measured_growth(loaded, 64)
    found = dict(after_each_pass(loaded, 4096, 0, 64))
    assert found[4096] <= growth.bytes_at(4096) <= 1.05 * found[4096]
    assert growth.bytes_at(64) <= found[64] + 16 * (STEP_TOKENS // 6 + 6)


def test_a_context_that_is_shorter_than_what_is_tried() -> None:
    """The measurement runs no prompt longer than the model's context."""
    for context in (5, 200, 300):
        loaded = loaded_with(Gathers, context)
        growth = measured_growth(loaded, 64)
        for tokens, size in after_each_pass(loaded, context, 0, 64):
            assert size <= growth.bytes_at(tokens)


def test_what_cannot_be_measured_is_refused() -> None:
    """A cache whose size cannot be measured and code that fails are refused by family name."""

    class Hides(Gathers):
        def update(self, rows: int) -> None:
            self.offset += rows

    class Fails(Gathers):
        def update(self, rows: int) -> None:
            raise IndexError("no such group")

    with pytest.raises(
        ModelRefused, match=r"keeper cannot be served: .* its Hides cannot be measured"
    ):
        measured_growth(loaded_with(Hides), 64)
    with pytest.raises(ModelRefused, match=r"model_type keeper.*no such group"):
        measured_growth(loaded_with(Fails), 64)


@pytest.mark.parametrize("chunk", [64, 96])
def test_the_longest_context_within_a_budget(chunk: int) -> None:
    """The context fits, and one more chunk would not; if everything fits, there is no limit."""
    growth = Growth(
        layers=(
            LayerGrowth(constant_bytes=70, step_bytes=300),
            LayerGrowth(step_bytes=9, until_tokens=700, most_bytes=50),
        )
    )
    for size in range(0, 20_000, 111):
        found = growth.context_within(size, 5000, chunk)
        assert found in {5000, found // chunk * chunk}
        assert found == 0 or growth.bytes_at(-(-found // chunk) * chunk) <= size
        assert found == 5000 or growth.bytes_at(found + chunk) > size
    assert 5000 == growth.context_within(1 << 40, 5000, chunk)


@pytest.fixture(scope="module", params=LARGE)
def cold(
    request: pytest.FixtureRequest, model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    """A family on mlx-lm's own caches."""
    config = config_of(request.param)
    for own in (config, config.get("text_config", {})):
        own.update(LARGE[request.param])
    directory = tmp_path_factory.mktemp(request.param) / "model"
    return load_model(str(make_family_model(directory, model_directory, config))).served_cold()


def filled(engine: MlxEngine, tokens: int) -> int:
    """A slab with this many tokens."""
    slab = engine.open_slab(tokens).slab
    run(engine, slab, tokens)
    return slab


def run(engine: MlxEngine, slab: int, tokens: int) -> None:
    """Fill a slab."""
    ids = [(7 * place) % 1500 + 3 for place in range(C)]
    for start, end in passes(0, tokens, C):
        engine.run_chunk(slab, ids[: end - start], None)


@pytest.mark.long_but("llama4", "nemotron_h", "gemma3_text")
def test_a_familys_bytes_are_those_that_mlx_counts(cold: LoadedModel) -> None:
    """
    For a full slab, the reserved bytes, the sizes of its arrays and MLX's count are within 5 % of
    each other. Closing it releases all of them.
    """
    growth = measured_growth(cold, C)
    watched = Watched(cold, growth)
    sizes = (LONG, SHORT)
    slabs = [filled(watched.engine, tokens) for tokens in sizes]
    due = sum(growth.bytes_at(tokens) for tokens in sizes)
    watched.engine.give_back_memory()

    memory = watched.adds_up(slab_tokens=None, block_tokens=0)

    assert (2, due) == watched.engine.pool.measure()
    long = watched.engine.pool.get(slabs[0])
    assert long.live_bytes <= growth.bytes_at(LONG) <= 1.05 * long.live_bytes
    assert long.live_bytes < memory.slab_bytes <= due
    del long
    for slab, tokens in zip(slabs, sizes, strict=True):
        assert growth.bytes_at(tokens) == watched.engine.close_slab(slab).bytes
    assert 0 == watched.adds_up(slab_tokens=0, block_tokens=0).slab_bytes


@pytest.mark.long_but("nemotron_h")
@pytest.mark.parametrize("cold", ["deepseek_v41", "nemotron_h"], indirect=True)
def test_control_slices_that_hold_what_they_were_cut_from(
    cold: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: if arrays are slices of larger ones, MLX's count differs from the report."""
    monkeypatch.setattr("cairn.engine.mlx.cache.HeldSlab.compact", lambda slab: None)
    watched = Watched(cold, measured_growth(cold, C))
    filled(watched.engine, SHORT)
    with pytest.raises(AssertionError):
        watched.adds_up(slab_tokens=None, block_tokens=0)


@pytest.mark.long_but("llama4", "nemotron_h", "gemma3_text")
def test_caches_that_outgrow_what_was_reserved(cold: LoadedModel) -> None:
    """
    The pass in which it happens raises, and the slab is larger when it is closed than when it was
    opened, which INV-5 detects.
    """
    right = measured_growth(cold, C)
    short = Growth(
        layers=tuple(
            attrs.evolve(
                one,
                constant_bytes=one.constant_bytes // 2,
                step_bytes=one.step_bytes // 2,
                most_bytes=one.most_bytes // 2,
            )
            for one in right.layers
        )
    )
    engine = MlxEngine(cold, decode_rows=1, growth=short)
    slab = engine.open_slab(SHORT)
    assert short.bytes_at(SHORT) == slab.bytes
    with pytest.raises(EngineFault, match=r"the caches of \d+ tokens take \d+ bytes, but only \d+"):
        run(engine, slab.slab, SHORT)
    assert slab.bytes < engine.close_slab(slab.slab).bytes


@pytest.mark.long_but("llama4", "nemotron_h", "gemma3_text")
def test_caches_that_were_not_measured_are_not_served(cold: LoadedModel) -> None:
    """An engine on growing caches requires their measured size."""
    with pytest.raises(ValueError, match="was not measured"):
        MlxEngine(cold, decode_rows=1)
