"""
When a session drafts tokens of its answer. Pure, over counts that the journal has, so that each
replay finds the same.
"""

from __future__ import annotations

DRAFT_TOKENS_MAX = 8
"""The most tokens of a draft."""

TRIED = 48
"""How many draft tokens a session may have for nothing."""

FOR_EACH = 6
"""How many more it may have for each that was accepted."""


def pays(drafted: int, accepted: int) -> bool:
    """
    Whether a session goes on to draft. A row of a draft costs a small part of a pass, so drafts pay
    where one in ``FOR_EACH`` is accepted.

    Args:
        drafted: how many tokens it drafted so far.
        accepted: how many of them were accepted.
    """
    return drafted <= TRIED + FOR_EACH * accepted


def of_next_request(count: int) -> int:
    """
    A session's count of draft tokens when a request begins: half of what it was, so that a session
    that did not quote earlier may try again.
    """
    return count // 2
