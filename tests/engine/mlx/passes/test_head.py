"""The head runs over the rows that a draw needs, and over no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn
import pytest
from mlx_lm.models.llama import Model, ModelArgs

from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.mlx.passes.head import heads, over
from cairn.engine.mlx.passes.search import one_shape
from cairn.engine.reports import DrawSpec
from cairn.engine.row_class import RowClass
from cairn.engine.sampling import Sampling
from tests.support.models.model_families import config_of, make_family_model

nn: Any = mlx.nn  # its types do not know its layers
BLOCK = 16
GREEDY = DrawSpec(sampling=Sampling(temperature=0.0), seed=0, top=8)
PLACED = RowClass(segment=BLOCK, quantum=4, least=8, most=4 * BLOCK, product=0)
OPEN = attrs.evolve(PLACED, quantum=1, least=2)
IDS = list(range(7, 7 + 3 * BLOCK))


@pytest.fixture(params=["tied", "untied"])
def loaded(request: pytest.FixtureRequest, model_directory: Path, tmp_path: Path) -> LoadedModel:
    """A model with each kind of head."""
    model = model_directory
    if request.param == "untied":
        model = make_family_model(tmp_path / "model", model_directory, config_of("llama"))
    return load_model(str(model))


@pytest.fixture
def shapes(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the logits of all passes."""
    found: list[tuple[int, ...]] = []
    kind = type(loaded.model)
    plain = kind.__call__

    def watched(*given: Any, **named: Any) -> mx.array:
        logits: mx.array = plain(*given, **named)
        found.append(logits.shape)
        return logits

    monkeypatch.setattr(kind, "__call__", watched)
    return found


@pytest.mark.parametrize("row_class", [OPEN, PLACED, one_shape(BLOCK), None])
def test_a_draw_needs_few_rows(
    loaded: LoadedModel, shapes: list[tuple[int, ...]], row_class: RowClass | None
) -> None:
    """As many as the class asks for; and what is drawn is the token of the last row."""
    engine = MlxEngine(loaded, decode_rows=2)
    engine.row_class = row_class
    for length in (1, 3, 7, BLOCK):
        slab = engine.open_slab(64).slab
        drawn = engine.run_chunk(slab, IDS[:length], GREEDY).drawn
        whole = nn.log_softmax(loaded.model(mx.array([IDS[:length]]))[0, -1])
        assert drawn is not None
        assert abs(whole[drawn.token].item() - drawn.logprob) < 1e-3
        assert whole.max().item() == pytest.approx(drawn.logprob, abs=1e-3)
        engine.close_slab(slab)
        expected = row_class.least if row_class is not None else length
        assert expected == shapes[-2][1]


def test_a_layer_is_narrowed_once_and_only_while_it_is_asked() -> None:
    """Also of a model with both kinds of layers, and one that several engines share."""
    model = Model(_args())
    model.update_modules({"lm_head": nn.QuantizedLinear(64, 96, bias=False)})
    found = heads(model)
    assert 2 == len(found)
    kinds = [type(layer) for layer in found]
    assert kinds == [type(layer) for layer in heads(model)]
    assert isinstance(model.lm_head, nn.QuantizedLinear)
    hidden = mx.random.normal((1, 9, 64))
    expected = model.lm_head(hidden)
    with over(found, slice(4, 6)):
        assert mx.allclose(expected[:, 4:6], model.lm_head(hidden))
        assert (1, 2, 96) == model.model.embed_tokens.as_linear(hidden).shape
    assert (1, 9, 96) == model.lm_head(hidden).shape


def _args() -> Any:
    return ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=96,
        tie_word_embeddings=False,
    )
