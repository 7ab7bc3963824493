"""Biases and penalties change logits by their definitions, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import load_model
from cairn.engine.mlx.sampling import adjusted
from cairn.engine.reports import DecodeRow, Drawn, DrawSpec, PassReport
from cairn.engine.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
PROMPT = (3, 9, 9, 4, 30)
# More than the 20 tokens of mlx-lm's default context.
ANSWER = (7, 3, *range(40, 70), 7, 12, 7)
ALL = Sampling(
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    logit_bias=((9, -100.0), (11, 2.5)),
)


def by_hand(
    row: np.ndarray, sampling: Sampling, prompt: tuple[int, ...], answer: tuple[int, ...]
) -> np.ndarray:
    """The definitions, applied token by token."""
    counted = Counter(answer)
    expected = row.astype(np.float32).copy()
    for token, bias in sampling.logit_bias:
        expected[token] += np.float32(bias)
    for token in {*prompt, *answer}:
        factor = np.float32(sampling.repetition_penalty)
        expected[token] = (
            expected[token] * factor if expected[token] < 0 else expected[token] / factor
        )
    for token, count in counted.items():
        expected[token] -= np.float32(sampling.presence_penalty)
        for _ in range(count):
            expected[token] -= np.float32(sampling.frequency_penalty)
    return expected


@pytest.mark.parametrize("answer", [(), ANSWER], ids=["first token", "later token"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.7),
        Sampling(repetition_penalty=0.6),
        Sampling(presence_penalty=1.5),
        Sampling(frequency_penalty=0.3),
        Sampling(logit_bias=((5, 100.0), (3, -100.0))),
        ALL,
    ],
    ids=str,
)
def test_the_logits_are_what_the_definitions_say(
    sampling: Sampling, answer: tuple[int, ...]
) -> None:
    """
    The repetition penalty counts prompt and answer, presence and frequency only the answer, all
    from the beginning. The model's own row does not change.
    """
    row = np.random.default_rng(5).normal(0, 4, 128).astype(np.float32)
    logits = mx.array(row)
    draw = DrawSpec.first(sampling, seed=0, prompt_ids=PROMPT).after(*answer)

    expected = by_hand(row, sampling, PROMPT, answer)
    np.testing.assert_allclose(expected, np.array(adjusted(logits, draw)), rtol=1e-6, atol=1e-5)
    assert row.tolist() == logits.tolist()


def test_what_counts_nothing_carries_nothing() -> None:
    """
    A request without penalties hands the engine no tokens, so its passes do no more than before.
    """
    plain = DrawSpec.first(Sampling(logit_bias=((1, 1.0),)), seed=1, prompt_ids=PROMPT)

    assert plain.after(4) is plain
    assert (frozenset(), ()) == (plain.prompt, plain.answer)


def answer_of(engine: MlxEngine, prompt: list[int], sampling: Sampling, tokens: int) -> list[Drawn]:
    """The tokens of an answer, by passes of the engine."""
    draw = DrawSpec.first(sampling, seed=3, prompt_ids=prompt, top=3)
    slab = engine.open_slab(256).slab
    drawn = [engine.run_chunk(slab, prompt, draw).drawn]
    while len(drawn) < tokens:
        assert drawn[-1] is not None
        token = drawn[-1].token
        draw = draw.after(token)
        row = DecodeRow(slab=slab, token=token, draw=draw)
        report = engine.decode([row, *[None] * (engine.decode_rows - 1)])[0]
        assert isinstance(report, PassReport)
        drawn.append(report.drawn)
    engine.close_slab(slab)
    return [one for one in drawn if one is not None]


def test_penalties_change_the_choice_and_not_what_is_reported(model_directory: Path) -> None:
    """
    If the likeliest first token is banned, a different one is drawn, but the reported
    log-probabilities are still the model's own.
    """
    engine = MlxEngine(load_model(str(model_directory)), decode_rows=4)
    prompt = list(range(20, 50))
    (plain,) = answer_of(engine, prompt, GREEDY, 1)

    banned = Sampling(temperature=0.0, logit_bias=((plain.token, -100.0),))
    (other,) = answer_of(engine, prompt, banned, 1)

    assert plain.top == other.top
    assert plain.top[1] == (other.token, other.logprob)


def test_no_token_comes_twice_where_that_costs_too_much(model_directory: Path) -> None:
    """With the largest penalty, no token of the answer occurs twice."""
    engine = MlxEngine(load_model(str(model_directory)), decode_rows=4)
    prompt = list(range(20, 50))
    strong = Sampling(temperature=0.0, repetition_penalty=100.0, presence_penalty=2.0)

    plain = [one.token for one in answer_of(engine, prompt, GREEDY, 60)]
    spoken = [one.token for one in answer_of(engine, prompt, strong, 60)]

    assert len(plain) > len(set(plain)), "nothing is repeated here, so nothing is shown"
    assert len(spoken) == len(set(spoken))
    assert set(spoken).isdisjoint(prompt)
