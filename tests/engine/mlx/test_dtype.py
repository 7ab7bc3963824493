"""The dtype that a model is served in: the fastest one that fits, with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from cairn.engine.errors import ModelRefused
from cairn.engine.mlx import dtype as mlx_dtype
from cairn.engine.mlx import selftest
from cairn.engine.mlx import start as mlx_start
from cairn.engine.mlx.dtype import (
    CannotWiden,
    DtypeSetting,
    float32_bytes,
    own_dtypes,
    settle_dtype,
    widened_on_record,
)
from cairn.engine.mlx.passes.search import Found
from cairn.engine.reports import PassShapes
from cairn_bench.servers.sized_model import make_sized_model
from cairn_bench.servers.sizes import Size
from tests.support.models.dtype_models import FOUR_BITS, HALF, make_model

MIB = 1 << 20
KINDS = [HALF, FOUR_BITS]
SMALL = Size(layers=1, intermediate_size=256)
OWN = {HALF: "bfloat16", FOUR_BITS: "4-bit and float16"}


@pytest.fixture(scope="module")
def made(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """
    A model's directory for each kind of weights. MLX's kernels for 4 bits are slow on a CPU, so
    that model has one layer.
    """
    folder = tmp_path_factory.mktemp("dtypes")
    small = folder / "small"
    make_sized_model(small, SMALL, source=model_directory)
    sources = {HALF: model_directory, FOUR_BITS: small}
    return {kind: make_model(sources[kind], folder / kind, kind) for kind in KINDS}


@pytest.fixture
def load(made: dict[str, Path]) -> Callable[[str], Any]:
    """Loads one without changes."""

    def load(kind: str) -> Any:
        found: Any = mlx_lm.load(str(made[kind]), lazy=True)
        return found[0]

    return load


def settled(model: Any, asked: DtypeSetting = "auto", **here: Any) -> str:
    """The choice, by default on a CPU with a real BLAS and enough memory."""
    usual: dict[str, Any] = {"on_cpu": True, "real_blas": True, "fault": lambda size: None}
    return settle_dtype(model, asked, **{**usual, **here})


def size_of(model: Any) -> int:
    """The bytes of a model's weights."""
    found: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ["auto", "float32"])
def test_a_cpu_has_float32(load: Callable[[str], Any], kind: str, asked: DtypeSetting) -> None:
    """
    The weights have the same values in float32, and take as much memory as was computed before.
    """
    model, own = load(kind), load(kind)
    expected_bytes = float32_bytes(model)

    dtype = settled(model, asked)

    assert dtype.startswith(f"float32, converted from {OWN[kind]}, ")
    assert ["float32"] == own_dtypes(model)
    assert expected_bytes == size_of(model) > 2 * size_of(own) * 0.9
    layer, before = model.layers[0].mlp.up_proj, own.layers[0].mlp.up_proj
    values = before.weight
    if kind == FOUR_BITS:
        values = mx.dequantize(before.weight, before.scales, before.biases, 32, 4)
    assert mx.array_equal(values.astype(mx.float32), layer.weight)


@pytest.mark.parametrize(
    ("kind", "here", "why"),
    [
        (HALF, {"on_cpu": False}, "as the model has it"),
        (FOUR_BITS, {"on_cpu": False}, "as the model has it"),
        (HALF, {"real_blas": False}, "no real BLAS.*ops doctor"),
        (HALF, {"fault": lambda size: f"{size} are too many"}, r"does not fit: \d+ are too many"),
        (FOUR_BITS, {"fault": lambda size: "too many"}, "does not fit: too many"),
    ],
    ids=["half, GPU", "4-bit, GPU", "half, no BLAS", "half, no room", "4-bit, no room"],
)
def test_where_float32_is_not_the_faster_one(
    load: Callable[[str], Any], kind: str, here: dict[str, Any], why: str
) -> None:
    """
    On a GPU, without a real BLAS or without enough memory, the weights are not converted; the
    message says why.
    """
    model = load(kind)
    before = size_of(model)

    assert re.search(f"^{OWN[kind]}, .*{why}", settled(model, **here))
    assert before == size_of(model)


def test_four_bits_are_slow_with_any_blas(load: Callable[[str], Any]) -> None:
    """Quantised weights are unpacked even if float32 has only the reference BLAS."""
    assert settled(load(FOUR_BITS), real_blas=False).startswith("float32, converted from 4-bit")


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_own_dtype_can_be_asked_for(load: Callable[[str], Any], kind: str) -> None:
    """``model`` changes nothing."""
    model = load(kind)
    before = size_of(model)

    assert f"{OWN[kind]}, as requested" == settled(model, "model")
    assert before == size_of(model)


def test_what_cannot_be_unpacked_stays_or_is_refused(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Weights in a format that mlx-lm does not unpack are not converted, and the message says why. If
    float32 was requested, that is an error.
    """

    def fails(model: Any) -> Any:
        raise ValueError("no such\nmode")

    monkeypatch.setattr(mlx_dtype, "dequantize_model", fails)

    assert settled(load(FOUR_BITS)).endswith("because it cannot be unpacked: no such mode")
    with pytest.raises(CannotWiden, match="no such mode"):
        settled(load(FOUR_BITS), "float32")


def start(where: Path, dtype: DtypeSetting, **more: Any) -> mlx_start.Started:
    """A start of the engine."""
    asked: dict[str, Any] = {
        "name": None,
        "block_tokens": 8,
        "decode_rows": 2,
        "kv_cache": "slab",
        "pool_bytes": 16 * MIB,
        "blocks_bytes": MIB,
        "tested_shapes": lambda fingerprint: None,
        "progress": lambda what, done, total: None,
    }
    return mlx_start.start_engine(str(where), dtype=dtype, **{**asked, **more})


def _not_searched(*given: Any, **named: Any) -> Found:
    return Found(row_class=None, reason="not searched")


@pytest.mark.long_but("bfloat16")
@pytest.mark.gate
@pytest.mark.parametrize("kind", KINDS)
def test_float32_reaches_the_blas(
    made: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The self-test passes in either dtype. The naive schedule differs only in float32, which shows
    that matrix products use the BLAS. The fingerprints differ, and each gives the setting that
    leads to its dtypes.
    """
    wide = start(made[kind], "auto")
    if kind == FOUR_BITS:  # it would take a minute
        monkeypatch.setattr(selftest, "measured_row_class", _not_searched)
    own = start(made[kind], "model")

    found = [one.self_test for one in (wide, own) if one.self_test is not None]
    assert [True, True] == [tested.passed for tested in found]
    assert [True, False] == [tested.findings["naive_differs"] for tested in found]
    assert wide.facts.fingerprint != own.facts.fingerprint
    recorded: list[tuple[mlx_start.Started, DtypeSetting]] = [(wide, "float32"), (own, "model")]
    for started, asked in recorded:
        assert asked == widened_on_record(started.facts.fields["dtypes"])
        again = start(made[kind], asked, tested_shapes=lambda fingerprint: PassShapes())
        assert started.facts.base_fingerprint == again.facts.base_fingerprint


def test_room_is_that_of_float32(
    made: dict[str, Path], model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    If the weights fit in their own dtype but not in float32, a request for float32 is refused with
    the figures, and ``auto`` keeps the own dtype.
    """
    wide = sum(path.stat().st_size for path in model_directory.glob("*.safetensors"))
    monkeypatch.setattr(mlx_start, "machine_memory", lambda: wide + 16 * MIB)

    with pytest.raises(ModelRefused, match=r"does not fit in memory: its weights take [\d.]+ MiB"):
        start(made[HALF], "float32")
    started = start(made[HALF], "auto", tested_shapes=lambda fingerprint: PassShapes())
    assert "float32 does not fit" in started.facts.dtype
    assert started.tight is None
