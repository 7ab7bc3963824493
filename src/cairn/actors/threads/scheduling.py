"""
Which job the engine runs next. Pure: no clock, no thread, no model.

``requests/admission.py`` lists all places where a request can wait; this is one of them.

Rules of this module:

1. A job that has begun runs to its end; the choice is made between two jobs.
2. Short jobs go first (slabs, blocks, trims): sessions wait for them between two passes.
3. One decode pass serves all answers that decode, up to the number of rows. Those that had no row
   in the last pass come first in the next one. Only rows that no answer needs go to drafts.
4. Between two decode passes at most one prefill pass runs, or one part of a copy into a slab, or
   one block is loaded from its file, which counts as a part of a copy.
   Sessions have their prefill passes in turn, because each asks for one at a time and jobs of a
   kind run in the order in which they were asked for. Those that wait for blocks of another
   request have joined it, ask for none, and lend it their turns (``prefill_in_turn``).
5. Copies go before prefill passes, because a copy takes a fraction of the passes that it spares.
   After ``COPIES_PER_PREFILL`` parts a prefill pass that waits has its turn, so that the first
   token of one request does not wait for the whole history of another.
6. A pass over a text to embed runs when nothing of 2 to 5 waits, so it is never ahead of a pass of
   an answer; an answer that arrives during one waits for this one pass.
7. Work in idle time (settling, files, shadow checks) runs when nothing else waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

import attrs

T = TypeVar("T")

COPIES_PER_PREFILL = 8
"""How many parts of copies run before a prefill pass that waits."""


class JobKind(Enum):
    """The kinds of jobs. See the rules of this module."""

    CALL = "call"
    DECODE = "decode"
    COPY = "copy"
    PREFILL = "prefill"
    EMBED = "embed"
    IDLE = "idle"


@attrs.frozen(kw_only=True)
class Waiting:
    """
    What the engine could run now.

    Attributes:
        calls, copies, prefills, embeds, idle: jobs of each kind.
        decoding: answers that decode.
        decoded_last: whether the last pass was a decode pass.
        copies_since_prefill: parts of copies that ran since the last prefill pass.
    """

    calls: int = 0
    copies: int = 0
    prefills: int = 0
    embeds: int = 0
    idle: int = 0
    decoding: int = 0
    decoded_last: bool = False
    copies_since_prefill: int = 0


def next_job(waiting: Waiting) -> JobKind | None:
    """The kind of which the first job is to run next; None if nothing waits."""
    if waiting.calls:
        return JobKind.CALL
    prompt_job = _prompt_job(waiting)
    if waiting.decoding and not (waiting.decoded_last and prompt_job is not None):
        return JobKind.DECODE
    if prompt_job is not None:
        return prompt_job
    if waiting.embeds:
        return JobKind.EMBED
    return JobKind.IDLE if waiting.idle else None


def _prompt_job(waiting: Waiting) -> JobKind | None:
    """What is next on the way to a first token: a part of a copy, or a prefill pass."""
    has_turn = not waiting.prefills or waiting.copies_since_prefill < COPIES_PER_PREFILL
    if waiting.copies and has_turn:
        return JobKind.COPY
    return JobKind.PREFILL if waiting.prefills else None


def prefill_in_turn(passes: Sequence[tuple[int, int]]) -> int:
    """
    The index of the prefill pass that is to run next: the first one, or one that so many requests
    wait for that these would have had their turns before it.

    Args:
        passes: in the order in which they were asked for, for each: how many requests have joined
            the one that it is of, and how often another one went before it, as below.

    Returns:
        The index; those before it have been passed over once more.
    """
    most = max(joined for joined, _ in passes)
    place = next(place for place, (joined, _) in enumerate(passes) if joined == most)
    return place if passes[0][1] < most else 0


def rows_in_turn(answers: Sequence[T], rows: int) -> tuple[Sequence[T], Sequence[T]]:
    """
    The answers that have a row in the next decode pass, and those that wait for one.

    Args:
        answers: in their order; after the pass those that waited go before those that had a row.
    """
    return answers[:rows], answers[rows:]


def drafts_in_turn(drafts: Sequence[tuple[T, ...]], rows: int) -> list[tuple[T, ...]]:
    """
    What of each answer's draft has rows in a decode pass: each answer has one row, and the rows
    that are left go to the drafts in turn, one at a time.

    Args:
        drafts: of the answers in the pass.
        rows: the most rows of the pass, at least as many as answers.
    """
    left, lengths = rows - len(drafts), [0] * len(drafts)
    while left > 0 and any(map(int.__lt__, lengths, map(len, drafts))):
        for place, draft in enumerate(drafts):
            if left > 0 and lengths[place] < len(draft):
                lengths[place] += 1
                left -= 1
    return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]


def rows_needed(answers: int, shapes: Sequence[int]) -> int:
    """
    The fewest rows that a decode pass over some answers may have.

    Args:
        answers: their rows, those of drafts included; at most the largest of the shapes.
        shapes: the numbers of rows that a pass may have, ascending.
    """
    return next(rows for rows in shapes if rows >= answers)
