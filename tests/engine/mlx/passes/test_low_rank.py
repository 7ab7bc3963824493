"""The low-rank layers of an adapter have their own number of rows in a prefill pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx_lm.tuner.lora import LoRALinear

from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import load_model
from cairn.engine.mlx.passes.low_rank import PaddedLoRA, low_rank_layers, padded
from cairn.engine.row_class import RowClass
from tests.support.models.lora_adapters import make_adapter

BLOCK = 16
OPEN = RowClass(segment=BLOCK, quantum=1, least=2, most=4 * BLOCK, product=0)


@pytest.fixture
def engine(model_directory: Path, tmp_path: Path) -> MlxEngine:
    """An engine over an adapter."""
    adapter = make_adapter(model_directory, tmp_path / "adapter", seed=1, rank=8)
    return MlxEngine(load_model(str(model_directory), adapter=str(adapter)), decode_rows=2)


def test_few_rows_are_padded() -> None:
    """The result has the rows that were given, with their numbers; more rows are left alone."""
    layer: Any = LoRALinear(32, 48, r=4)
    mx.random.seed(1)
    layer.lora_b = mx.random.normal(layer.lora_b.shape)
    hidden = mx.random.normal((1, 5, 32))
    expected = layer(hidden)
    (found,) = low_rank_layers(_Model(layer))
    assert isinstance(found, PaddedLoRA)
    for rows in (0, 3, 5, 64):
        for shape in (hidden.shape, hidden.shape[1:], (1, *hidden.shape)):
            with padded([found], rows):
                computed = found(hidden.reshape(shape))
            assert computed.shape == (*shape[:-1], expected.shape[-1])
            assert mx.allclose(computed.reshape(expected.shape), expected, atol=1e-5).item()
    assert found.rows == 0


class _Model:
    """A model of one layer."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def named_modules(self) -> list[tuple[str, Any]]:
        """The layer, and the one inside it, which is no low-rank layer."""
        return [("a", self._layer), ("b", self._layer.linear)]


def test_layers_of_an_adapter_are_found(engine: MlxEngine, model_directory: Path) -> None:
    """An adapter has them, and a model without one has none."""
    assert engine.has_low_rank
    assert not MlxEngine(load_model(str(model_directory)), decode_rows=2).has_low_rank


def test_a_pass_pads_as_its_class_says(engine: MlxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prefill pass the layers have the rows of the class, and afterwards their own."""
    seen: list[int] = []
    plain = PaddedLoRA.__call__

    def watched(layer: PaddedLoRA, hidden: mx.array) -> mx.array:
        seen.append(layer.rows)
        computed: mx.array = plain(layer, hidden)
        return computed

    monkeypatch.setattr(PaddedLoRA, "__call__", watched)
    for low_rank in (0, 4 * BLOCK):
        engine.row_class = attrs.evolve(OPEN, low_rank=low_rank)
        slab = engine.open_slab(64).slab
        seen.clear()
        engine.run_chunk(slab, [1, 2, 3], None)
        assert {low_rank} == set(seen)
        engine.close_slab(slab)
    engine.row_class = None
    slab = engine.open_slab(64).slab
    seen.clear()
    engine.run_chunk(slab, [1, 2, 3], None)
    assert {0} == set(seen)
