"""
How a token is drawn: parameters, and the random key of a token. Pure; ``mlx_sampling`` draws.

Sampling is counter-based: the key of a token follows from (seed, choice, position) and from
nothing else, so the same token is drawn however many others are drawn before or beside it.
"""

from __future__ import annotations

import hashlib

import attrs

COLDEST = 1e-5
"""
Below this temperature the likeliest token is as good as certain, and its inverse overflows.
"""


@attrs.frozen(kw_only=True)
class Sampling:
    """
    Sampling parameters. A temperature of 0, or one below ``COLDEST``, is greedy and needs no
    randomness.

    Raises:
        ValueError: a parameter is out of its range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, not {self.min_p}")


def token_key(seed: int, choice: int, position: int) -> int:
    """
    The 64-bit random key of the token at ``position`` of the sequence.

    Args:
        seed: of the request, any integer.
        choice: which of several answers, from 0.
        position: of the token in prompt and answer, from 0.
    """
    text = f"cairn token/{seed}/{choice}/{position}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
