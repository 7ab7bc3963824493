"""Where an answer that repeats itself ends, and the invariant that it ends there alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.journal import events as ev
from cairn.journal.invariants import answers
from cairn.journal.repetition import PERIOD_MAX, TIMES, TOKENS_MIN, repeats_at

START = (900, 901, 902)


@pytest.mark.parametrize("period", [1, 2, 7, 8, 9, PERIOD_MAX])
def test_a_piece_that_comes_again_and_again(period: int) -> None:
    """It takes ``TOKENS_MIN`` tokens and ``TIMES`` pieces, whichever is more."""
    needed = max(TOKENS_MIN, TIMES * period)
    tokens = [*START, *(place % period for place in range(needed))]
    assert len(tokens) == repeats_at(tokens)
    assert repeats_at(tokens[:-1]) is None
    assert len(tokens) == repeats_at([*tokens, 7, 7])


def test_longer_pieces_are_not_found() -> None:
    """A page that is the same twice is no repetition, nor is one with a number that counts."""
    assert repeats_at(list(range(PERIOD_MAX + 1)) * 6) is None
    assert repeats_at([token for line in range(100) for token in (1, 2, 3, 100 + line)]) is None


@given(st.lists(st.integers(0, 3), max_size=80))
def test_as_its_definition_says(tokens: list[int]) -> None:
    """The first place before which a piece comes often enough."""

    def repeats(upto: int) -> bool:
        for period in range(1, PERIOD_MAX + 1):
            length = max(TOKENS_MIN, TIMES * period)
            last = tokens[upto - length : upto] if length <= upto else []
            if last and all(a == b for a, b in zip(last, last[period:], strict=False)):
                return True
        return False

    expected = next((at for at in range(1, len(tokens) + 1) if repeats(at)), None)
    assert expected == repeats_at(tokens)


NONE = "an answer ended as a repetition that is none"
LOOP = (*START, *[5] * TOKENS_MIN)


@pytest.mark.parametrize(
    ("sampled", "answer", "reason", "guarded", "messages"),
    [
        (LOOP, len(LOOP), "repetition", True, []),
        (LOOP, len(LOOP), "stop", True, []),
        (LOOP, len(LOOP), "stop", False, []),
        ((-1,) * len(LOOP), len(LOOP), "repetition", True, []),
        (LOOP, len(LOOP), "repetition", False, [NONE]),
        (
            LOOP[:-1],
            len(LOOP) - 1,
            "repetition",
            True,
            [NONE],
        ),
        ((*LOOP, 9), len(LOOP) + 1, "stop", True, ["an answer that went on after a repetition"]),
    ],
)
def test_the_end_of_an_answer(
    sampled: tuple[int, ...], answer: int, reason: Any, guarded: bool, messages: list[str]
) -> None:
    """It is a repetition where its tokens repeat themselves, and its request has a guard."""
    ask = SimpleNamespace(max_tokens=1000, sampling={"repetition_guard": guarded})
    request = SimpleNamespace(
        ask=ask,
        sampled=sampled,
        emitted=answer,
        prompt_ids=(1, 2),
        path=SimpleNamespace(reused_tokens=0),
    )
    state: Any = SimpleNamespace(session=lambda _: SimpleNamespace(request=request))
    event = ev.RequestFinished(
        session="s",
        request="r",
        finish_reason=reason,
        prompt_tokens=2,
        cached_tokens=0,
        answer_tokens=answer,
        completion_tokens=answer,
    )
    assert messages == [one.message for one in answers.finished(state, event)]
