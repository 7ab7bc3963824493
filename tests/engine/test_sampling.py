"""
The random key of a token depends on seed, choice and position, and on nothing else; the ranges of
sampling parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.engine.sampling import BIASES_MAX, Sampling, seed_of_choice, token_key

PINNED = {
    (0, 0, 0): 13718486745225445693,
    (0, 0, 1): 1013868630624855308,
    (0, 1, 0): 465648388277670984,
    (1, 0, 0): 11585973579841722462,
    (7, 2, 1234): 5114075353901300782,
    (-1, 0, 0): 6938274995047710919,
    (2**63 - 1, 0, 5): 6000286928789319409,
}
"""Pinned: different values would give different answers for the seeds of old journals."""


@pytest.mark.parametrize(("asked", "expected"), PINNED.items(), ids=str)
def test_keys_are_pinned(asked: tuple[int, int, int], expected: int) -> None:
    """A key is the same in every version and on every machine."""
    assert expected == token_key(*asked)


def test_no_key_comes_twice() -> None:
    """Keys differ for all tokens of an answer, for all choices and for different seeds."""
    asked = [
        (seed, choice, position)
        for seed in (0, 1, 12, 2**63 - 1)
        for choice in range(4)
        for position in range(512)
    ]

    assert len(asked) == len({token_key(*one) for one in asked})


@given(
    one=st.tuples(st.integers(), st.integers(min_value=0), st.integers(min_value=0)),
    other=st.tuples(st.integers(), st.integers(min_value=0), st.integers(min_value=0)),
)
def test_a_key_has_64_bits_and_is_unique(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    """
    Two tokens share a key only if seed, choice and position are equal, even if their digits join.
    """
    assert 0 <= token_key(*one) < 2**64
    assert (one == other) == (token_key(*one) == token_key(*other))


def test_seeds_that_follow_stay_seeds() -> None:
    """Seeds wrap around after the largest, and the reported seed can be used in a request."""
    assert [5, -3, 2**64 - 1, 0] == [
        seed_of_choice(5, 0),
        seed_of_choice(-5, 2),
        seed_of_choice(2**64 - 2, 1),
        seed_of_choice(2**64 - 1, 1),
    ]


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"temperature": -0.1}, "temperature must be between 0 and 100, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be between"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"min_p": 1.1}, "min_p must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be"),
        ({"presence_penalty": 2.1}, "presence_penalty must be"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names token -1; ids begin at 0"),
        ({"logit_bias": {7: 100.5}}, "logit_bias of token 7 must be between -100 and 100"),
        ({"logit_bias": dict.fromkeys(range(BIASES_MAX + 1), 1.0)}, "at most 1024"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_parameter_out_of_its_range(parameters: dict[str, Any], fault: str) -> None:
    """The message names the parameter and its range."""
    with pytest.raises(ValueError, match=fault):
        Sampling(**parameters)


def test_what_a_draw_depends_on() -> None:
    """Penalties depend on earlier tokens; a bias changes logits without that."""
    for penalised in (
        Sampling(repetition_penalty=1.5),
        Sampling(presence_penalty=1.5),
        Sampling(frequency_penalty=1.5),
    ):
        assert penalised.counts_tokens
        assert penalised.changes_logits
    biased = Sampling(logit_bias=[(9, 1), (3, -2)])
    assert ((3, -2.0), (9, 1.0)) == biased.logit_bias
    assert (False, True) == (biased.counts_tokens, biased.changes_logits)
    assert not Sampling(temperature=0.3, top_k=4).changes_logits
