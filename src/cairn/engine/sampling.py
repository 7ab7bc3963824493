"""
Sampling parameters, and the random key of each token. Pure; ``mlx.sampling`` draws the tokens.

Sampling is counter-based: the key of a token depends only on (seed, choice, position). The same
token is therefore drawn regardless of how many others are drawn before it or in other rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import attrs

COLDEST = 1e-5
"""Below this temperature drawing is greedy: its inverse would overflow."""

BIASES_MAX = 1024
"""The most tokens that a request may bias."""


def _biases(
    given: Iterable[Iterable[float]] | Mapping[int, float],
) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    return tuple(sorted((int(token), float(bias)) for token, bias in pairs))


@attrs.frozen(kw_only=True)
class Sampling:
    """
    Sampling parameters. A temperature of 0, or one below ``COLDEST``, is greedy and needs no
    randomness.

    Attributes:
        repetition_penalty: divides the positive logits of all tokens of prompt and answer, and
            multiplies the negative ones; 1 is off.
        presence_penalty: subtracted from the logits of all tokens of the answer.
        frequency_penalty: subtracted from the logit of a token for each time that it occurs in the
            answer.
        logit_bias: (token, what to add to its logit), by token.
        repetition_guard: whether an answer ends when it repeats itself. Changes no logits.

    Raises:
        ValueError: a parameter is out of its range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_biases)
    repetition_guard: bool = False

    def __attrs_post_init__(self) -> None:
        _between("temperature", self.temperature, 0, 100)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        _between("min_p", self.min_p, 0, 1)
        # Outside these ranges a logit may overflow float32.
        _between("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _between("presence_penalty", self.presence_penalty, -2, 2)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        if len(self.logit_bias) > BIASES_MAX:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} tokens; at most {BIASES_MAX}")
        for token, bias in self.logit_bias:
            if token < 0:
                raise ValueError(f"logit_bias names token {token}; ids begin at 0")
            _between(f"logit_bias of token {token}", bias, -100, 100)

    @property
    def counts_tokens(self) -> bool:
        """Whether a draw depends on the tokens before it, and not on their logits alone."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn from modified logits."""
        return self.counts_tokens or bool(self.logit_bias)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, not {value}")


def seed_of_choice(seed: int, choice: int) -> int:
    """
    The seed of one of several answers to a request. A request for a single answer with this seed
    gets the same answer.

    Args:
        seed: the request's, 64 bits with or without a sign.
        choice: the index of the answer, from 0.
    """
    found = seed + choice
    return found if found < 2**64 else found - 2**64


def token_key(seed: int, choice: int, position: int) -> int:
    """
    The 64-bit random key of the token at ``position``.

    Args:
        seed: the request's, any integer.
        choice: the index of the answer, from 0.
        position: the index of the token in prompt and answer, from 0.
    """
    text = f"cairn token/{seed}/{choice}/{position}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
