"""
The model that `ops bench` measures with: of the size that was asked for, and it speaks on and on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from cairn_bench.servers.sized_model import make_sized_model
from cairn_bench.servers.sizes import Size

SMALL = Size(layers=2, hidden_size=64, intermediate_size=96, heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def made(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one, with the tokenizer and the template of the tests' random model."""
    directory = tmp_path_factory.mktemp("sized") / "model"
    make_sized_model(directory, SMALL, source=model_directory)
    return directory


def test_it_has_its_size(made: Path):
    """mlx-lm loads it, with as many layers and heads as were asked for, in float32."""
    model, tokenizer = load(str(made))
    assert (2, 64, 4, 2, 16) == (
        len(model.layers),
        model.args.hidden_size,
        model.args.num_attention_heads,
        model.args.num_key_value_heads,
        model.args.head_dim,
    )
    assert {"float32"} == {str(one.dtype) for one in load_file(made / "model.safetensors").values()}
    assert "Hello" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )


def test_a_seed_gives_the_same_weights(made: Path, model_directory: Path, tmp_path: Path):
    """The same seed makes the same bytes, another one others."""
    make_sized_model(tmp_path / "same", SMALL, source=model_directory)
    make_sized_model(tmp_path / "other", SMALL, seed=1, source=model_directory)
    weights = (made / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "same" / "model.safetensors").read_bytes()
    assert weights != (tmp_path / "other" / "model.safetensors").read_bytes()


def test_it_says_plain_words_and_does_not_stop(made: Path):
    """Greedily, each token is of letters, and not one of them for ever; none ends the answer."""
    model, _ = load(str(made))
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    ids = tokenizer.encode("Where do we start?").ids
    said = []
    for _ in range(40):
        ids.append(int(np.argmax(np.array(model(mx.array([ids]))[0, -1]))))
        said.append(tokenizer.decode(ids[-1:]))
    assert [] == [text for text in said if not (text.isascii() and text.strip().isalpha())]
    assert 8 < len(set(said))


def test_a_greedy_answer_quotes_an_earlier_one(model_directory: Path, tmp_path: Path):
    """
    Of a model that quotes, the next token follows from the last one, and the scores from all; of
    another, so does the token.
    """
    kept = {}
    for quoting in (True, False):
        make_sized_model(tmp_path / str(quoting), SMALL, source=model_directory, quoting=quoting)
        model, _ = load(str(tmp_path / str(quoting)))
        found = [next_scores(model, [*before, 5]) for before in ([1, 2, 3], [9, 8], [7] * 9)]
        kept[quoting] = len({int(np.argmax(scores)) for scores in found})
        assert 3 == len({scores.tobytes() for scores in found})
    assert 1 == kept[True] < kept[False]


def next_scores(model: Any, ids: list[int]) -> Any:
    """The scores of the token after some."""
    return np.array(model(mx.array([ids]))[0, -1])
