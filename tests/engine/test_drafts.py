"""Prompt lookup: which tokens are drafted."""

from __future__ import annotations

import pytest

from cairn.engine import drafts
from cairn.engine.drafts import Drafter
from cairn.journal.speculation import DRAFT_TOKENS_MAX, FOR_EACH, TRIED

END = 0


def drafter(*ids: int, drafted: int = 0, accepted: int = 0) -> Drafter:
    """A drafter over a prompt."""
    return Drafter(ids, ends={END}, drafted=drafted, accepted=accepted)


def test_what_followed_the_last_tokens_is_drafted() -> None:
    """In the prompt, and in the answer; the prompt's last tokens count."""
    one = drafter(1, 2, 3, 4, 5, 9, 2, 3)
    assert () == one.draft(4)
    one.take([4])
    assert (5, 9, 2, 3) == one.draft(4)
    one.take([6, 7, 8, 5])
    assert () == one.draft(4)
    one.take([6, 7, 8])
    assert (5,) == one.draft(1)


def test_the_most_telling_and_latest_place_is_taken() -> None:
    """Six equal tokens go before three, and a later place before an earlier one."""
    long = (1, 2, 3, 4, 5, 6)
    assert (7,) == drafter(*long, 7, 9, 4, 5, 6, 8, 9, *long).draft(1)
    assert (8,) == drafter(4, 5, 6, 7, 9, 4, 5, 6, 8, 9, 4, 5, 6).draft(1)
    answered = drafter(4, 5, 6, 7, 9)
    answered.take([4, 5, 6, 8, 4, 5, 6])
    assert (8,) == answered.draft(1)


def test_what_repeats_goes_on_repeating() -> None:
    """A draft is not cut short where the tokens end."""
    assert (1, 2, 1, 2, 1) == drafter(1, 2, 1, 2, 1, 2).draft(5)
    assert (7,) * 4 == drafter(7, 7, 7, 7).draft(4)


def test_no_more_than_asked_for() -> None:
    """Nor more than the bound, nor the end of an answer, nor what comes after it."""
    assert () == drafter(7, 7, 7, 7).draft(0) == drafter(7, 7, 7, 7).draft(-1)
    assert DRAFT_TOKENS_MAX == len(drafter(7, 7, 7, 7).draft(100))
    assert (4,) == drafter(1, 2, 3, 4, END, 1, 2, 3).draft(4)
    assert () == drafter(1, 2, 3).draft(4) == drafter().draft(4)


def test_a_session_without_luck_drafts_no_more() -> None:
    """Its counts decide, with those of its earlier answers."""
    one = drafter(7, 7, 7, 7, drafted=TRIED - 2)
    assert one.draft(3)
    one.take([8], drafted=3)
    assert (TRIED + 1, 0) == (one.drafted, one.accepted)
    one.take([7, 7, 7, 7])
    assert () == one.draft(3)
    one.take([7], accepted=1)
    assert one.draft(3)
    assert drafter(7, 7, 7, 7, drafted=TRIED + FOR_EACH, accepted=1).draft(3)


def test_a_long_prompt_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its end on; each draft takes a bounded part."""
    monkeypatch.setattr(drafts, "INDEXED_AT_ONCE", 4)
    one = drafter(1, 2, 3, 9, *range(20, 30), 1, 2, 3)
    found = [one.draft(1) for _ in range(4)]
    assert [(), (), (), (9,)] == found
