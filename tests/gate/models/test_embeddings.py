"""The bits of a vector follow from its text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.engine.errors import EngineFault, ModelRefused
from cairn.engine.mlx.embedding import MlxEmbedder, start_embedder
from tests.gate.conversation import words
from tests.support.models.embedding_model import DIMENSIONS, change_json, make_embedding_model

Model: TypeAlias = Callable[[mx.array], mx.array]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small embedding model."""
    return make_embedding_model(tmp_path_factory.mktemp("models") / "vectors")


def started(directory: Path) -> MlxEmbedder:
    """The model, loaded."""
    return start_embedder(str(directory), name="vectors", progress=lambda *_: None)


@pytest.fixture(scope="module")
def embedder(directory: Path) -> MlxEmbedder:
    """The model, loaded once."""
    return started(directory)


def state(embedder: MlxEmbedder, ids: Sequence[int]) -> bytes:
    """The state of a text, computed in its passes."""
    done, vector = 0, None
    while vector is None:
        report = embedder.run_pass(ids, done)
        done, vector = done + report.tokens, report.vector
    assert len(ids) == done
    return vector


TEXTS = [words(n, length) for n, length in enumerate((3, 12, 40, 90, 200))]


@pytest.fixture(scope="module")
def texts(embedder: MlxEmbedder) -> list[list[int]]:
    """Texts of one pass and of several, in tokens."""
    found = [embedder.tokenizer.encode(text) for text in TEXTS]
    assert min(map(len, found)) < embedder.facts.pass_tokens < max(map(len, found)) / 2
    return found


@pytest.mark.gate
def test_alone_and_among_others(directory: Path, texts: list[list[int]]) -> None:
    """
    A text has the same bits as the only one of a server's life, after others, in any order, and
    after one that was given up in its middle.
    """
    alone = [state(started(directory), ids) for ids in texts]
    embedder = started(directory)
    for order in (range(len(texts)), reversed(range(len(texts)))):
        for place in order:
            embedder.run_pass(texts[-1], 0)  # given up
            assert alone[place] == state(embedder, texts[place]), TEXTS[place]
    assert len(texts) == len(set(alone))


def padded(model: Model, texts: list[list[int]]) -> list[bytes]:
    """What a batch of all texts gives, padded at the end to the longest of them."""
    rows = [[*ids, *[0] * (max(map(len, texts)) - len(ids))] for ids in texts]
    states = model(mx.array(rows))
    return [of(states[row, len(ids) - 1]) for row, ids in enumerate(texts)]


def at_once(model: Model, texts: list[list[int]]) -> list[bytes]:
    """What one pass over each whole text gives."""
    return [of(model(mx.array([ids]))[0, -1]) for ids in texts]


def of(array: mx.array) -> bytes:
    """The bits of a state."""
    return np.array(array, dtype="<f4").tobytes()


@pytest.mark.gate
@pytest.mark.parametrize("other", [padded, at_once])
def test_the_numbers_are_the_models(
    other: Callable[[Model, list[list[int]]], list[bytes]],
    embedder: MlxEmbedder,
    model_directory: Path,
    texts: list[list[int]],
) -> None:
    """
    They are those of mlx-lm's own passes within rounding. The control: the bits of other passes are
    different, so that equal bits above are no matter of course.
    """
    here = [state(embedder, ids) for ids in texts]
    loaded: Any = mlx_lm.load(str(model_directory))  # the same weights, with their head
    there = other(loaded[0].model, texts)
    for mine, theirs in zip(here, there, strict=True):
        np.testing.assert_allclose(
            np.frombuffer(mine, "<f4"), np.frombuffer(theirs, "<f4"), rtol=1e-3, atol=1e-3
        )
    assert here != there


@pytest.mark.model
def test_facts(embedder: MlxEmbedder) -> None:
    """What the server needs to know is measured."""
    facts = embedder.facts
    assert (DIMENSIONS, 2048, 8192) == (
        facts.dimensions,
        facts.vocabulary_tokens,
        facts.context_tokens,
    )
    # Four layers of four heads keep 32 numbers of keys and of values each.
    caches = 8192 * 4 * 4 * 32 * 2 * 4
    assert caches < facts.memory_bytes < caches + 20_000_000
    assert not facts.matryoshka.allows(64)


@pytest.mark.model
def test_passes_that_do_not_follow(embedder: MlxEmbedder) -> None:
    """A pass continues the text of the pass before, or begins one."""
    embedder.run_pass(range(200), 0)
    for ids, start in ((range(1, 201), 64), (range(200), 32), (range(200), 200)):
        with pytest.raises(EngineFault, match="no pass of 200 tokens begins at"):
            embedder.run_pass(list(ids), start)
    embedder.drop()
    with pytest.raises(EngineFault):
        embedder.run_pass(range(200), 64)


@pytest.mark.model
def test_files_decide(tmp_path: Path) -> None:
    """
    Matryoshka lengths and the fingerprint follow from the files; files of another kind of vector,
    and of no model that gives hidden states, are refused.
    """
    place = make_embedding_model(tmp_path / "vectors", seed=1)
    before = started(place).facts
    change_json(place / "config.json", matryoshka_dimensions=[64, 128], is_matryoshka=True)
    after = started(place).facts
    assert before.fingerprint != after.fingerprint
    assert [True, False] == [after.matryoshka.allows(one) for one in (64, 65)]
    change_json(place / "config.json", model_type="mamba9")
    with pytest.raises(ModelRefused, match="cannot be served as an embedding model"):
        started(place)
    (place / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with pytest.raises(ModelRefused, match="other states than that of the last token"):
        started(place)
    both = '{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}'
    (place / "1_Pooling" / "config.json").write_text(both)
    with pytest.raises(ModelRefused, match="other states than that of the last token"):
        started(place)
    (place / "1_Pooling" / "config.json").write_text("[1]")
    with pytest.raises(ModelRefused, match=r"1_Pooling/config.json is no object"):
        started(place)
    (place / "modules.json").write_text('["x"]')
    with pytest.raises(ModelRefused, match=r"modules.json is no list of modules"):
        started(place)
    (place / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    (place / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(ModelRefused, match="module Dense"):
        started(place)


@pytest.mark.model
def test_a_vector_that_is_not_finite(tmp_path: Path) -> None:
    """It is a fault and no answer."""
    place = make_embedding_model(tmp_path / "vectors")
    weights = load_file(place / "model.safetensors")
    weights["norm.weight"] *= np.float32("nan")
    save_file(weights, place / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(EngineFault, match="not finite"):
        state(started(place), [1, 2, 3])
