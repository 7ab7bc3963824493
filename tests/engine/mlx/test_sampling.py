"""The random key of a token depends on seed, choice and position, and on nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.engine.sampling import seed_of_choice, token_key

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
