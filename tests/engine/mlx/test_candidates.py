"""
`top_p`, `min_p` and `top_k` follow their definitions, and nothing is compiled for their values.
"""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from cairn.engine.mlx.sampling import candidates, draw_token, log_probabilities
from cairn.engine.sampling import Sampling

ROWS = [np.random.default_rng(seed).normal(size=400) * spread for seed, spread in enumerate((1, 4))]
CHOSEN = [
    Sampling(),
    Sampling(top_p=0.9),
    Sampling(top_p=0.3137),
    Sampling(top_p=1e-6),
    Sampling(min_p=0.0517),
    Sampling(min_p=1.0),
    Sampling(top_k=1),
    Sampling(top_k=37),
    Sampling(top_k=400),
    Sampling(top_p=0.87, min_p=0.021, top_k=11),
]


def by_hand(row: np.ndarray, sampling: Sampling) -> set[int]:
    """The tokens that the definitions keep, computed one by one from the likeliest on."""
    order = [int(token) for token in np.argsort(-row)]
    odds = np.exp(row.astype(np.float64))
    kept, mass = [], 0.0
    for token in order:
        if sampling.top_p < 1.0 and mass >= sampling.top_p * odds.sum():
            break
        kept.append(token)
        mass += odds[token]
    kept = [token for token in kept if odds[token] >= sampling.min_p * odds[order[0]]]
    return set(kept[: sampling.top_k] if sampling.top_k > 0 else kept)


@pytest.mark.parametrize("sampling", CHOSEN, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=["flat", "steep"])
def test_what_may_be_drawn(row: np.ndarray, sampling: Sampling) -> None:
    """
    The tokens that the definitions keep have unchanged log-probabilities; no other can be drawn.
    """
    logprobs = log_probabilities(mx.array(row.astype(np.float32)))
    before, kept = np.array(logprobs), np.array(candidates(logprobs, sampling))

    expected = by_hand(before, sampling)
    assert expected == set(np.flatnonzero(kept > -math.inf).tolist())
    assert all(before[token] == kept[token] for token in expected)
    assert np.array_equal(before, np.array(logprobs))  # the row itself did not change


def test_equals_at_the_edge_of_top_p_stay_together() -> None:
    """If tokens at the limit are equally likely, all of them are kept."""
    logprobs = log_probabilities(mx.array([2.0, 1.0, 1.0, 1.0, -3.0]))
    kept = np.array(candidates(logprobs, Sampling(top_p=0.5)))

    assert [0, 1, 2, 3] == np.flatnonzero(kept > -math.inf).tolist()


@pytest.mark.parametrize("sampling", CHOSEN, ids=str)
def test_nothing_is_compiled_for_what_a_request_chooses(tmp_path: Path, sampling: Sampling) -> None:
    """A draw uses no compiled functions: on a CPU each value would run a C++ compiler."""
    logprobs = log_probabilities(mx.array(ROWS[0].astype(np.float32)))
    mx.eval(logprobs)
    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), draw_token(logprobs, sampling, 7))

    steps = graph.read_text()
    assert "label" in steps
    assert "Compiled" not in steps
