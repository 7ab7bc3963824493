"""
Whether blocks of other nodes are adopted: only while reading one is as fast as computing it.

What was measured is in the journal, so the decision is too. While reading is slower, requests are
computed without a look into the journals of others, and after so many of them one block is read
again, because a network may get faster. What the look takes is not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from cairn.journal.events import BlockSealed

RETRY_AFTER: Final = 32
"""After how many requests a block is read to measure again."""

WINDOW_TOKENS: Final = 65_536
"""What was measured before about so many tokens counts half."""


@attrs.frozen(kw_only=True)
class Rates:
    """
    What computing and adopting took since the model was loaded.

    Attributes:
        prefill_tokens: tokens of prefill passes over at least one block.
        prefill_us: what these passes took.
        adopted_tokens: tokens of adopted blocks.
        adopted_us: what reading and hashing these took.
        declined: how many requests came since adopting takes longer, or was measured again.
    """

    prefill_tokens: int = 0
    prefill_us: int = 0
    adopted_tokens: int = 0
    adopted_us: int = 0
    declined: int = 0


NO_RATES: Final = Rates()
"""Nothing was measured."""


def with_prefill(rates: Rates, tokens: int, duration_us: int) -> Rates:
    """The rates after a prefill pass."""
    tokens, duration_us = _added(rates.prefill_tokens, rates.prefill_us, tokens, duration_us)
    return attrs.evolve(rates, prefill_tokens=tokens, prefill_us=duration_us)


def with_adopted(rates: Rates, tokens: int, duration_us: int) -> Rates:
    """The rates after a block was adopted. One that was read to measure again counts alone."""
    if pays(rates):
        before = (rates.adopted_tokens, rates.adopted_us)
        tokens, duration_us = _added(*before, tokens, duration_us)
    return attrs.evolve(rates, adopted_tokens=tokens, adopted_us=duration_us, declined=0)


def with_request(rates: Rates) -> Rates:
    """The rates after a request. It counts while adopting takes longer than computing."""
    return rates if pays(rates) else attrs.evolve(rates, declined=rates.declined + 1)


def pays(rates: Rates) -> bool:
    """Whether adopting takes no longer than computing, or one of the two was never measured."""
    if not (rates.prefill_tokens and rates.adopted_tokens):
        return True
    return rates.adopted_us * rates.prefill_tokens <= rates.prefill_us * rates.adopted_tokens


def may_adopt(rates: Rates) -> bool:
    """Whether a block is adopted now."""
    return pays(rates) or rates.declined >= RETRY_AFTER


def is_of_prompt(
    event: BlockSealed, keys: Sequence[str], place: int, block_tokens: int, size: int
) -> bool:
    """
    Whether a row of another node says of a block what its place in a prompt says.

    Args:
        keys: of the prompt's full blocks.
        place: of the block among them.
        size: of a block there, in bytes.
    """
    parent = keys[place - 1] if place else None
    start = place * block_tokens
    due = (keys[place], parent, start, start + block_tokens, size)
    return due == (event.key, event.parent, event.start, event.end, event.bytes)


def _added(tokens: int, duration_us: int, more_tokens: int, more_us: int) -> tuple[int, int]:
    tokens, duration_us = tokens + more_tokens, duration_us + more_us
    return (tokens // 2, duration_us // 2) if tokens > WINDOW_TOKENS else (tokens, duration_us)
