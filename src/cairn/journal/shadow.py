"""
The shadow check: which answers are computed a second time, how the drawn tokens are hashed, and
what follows from a difference. Pure.

Nothing is left to chance: whether an answer is checked follows from the id of its request, so it
can be predicted, and explained afterwards.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import attrs

from cairn.journal import events as ev
from cairn.journal.keys import ids_bytes, ids_hash
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import SessionId, State

_PLACES = 1 << 64


def is_chosen(request: str, share: float) -> bool:
    """
    Whether the answer to a request is among the ``share`` that is checked. An answer that is chosen
    at one share is chosen at every larger share.

    Args:
        request: its id.
        share: from 0 (none) to 1 (all).
    """
    named = hashlib.sha256(f"cairn shadow check/{request}".encode()).digest()
    return int.from_bytes(named[:8], "big") < int(share * _PLACES)


def drawn_hash(ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """A hash of drawn tokens and their log-probabilities, exact to the last bit of both."""
    found = hashlib.sha256(len(ids).to_bytes(8, "little"))
    found.update(ids_bytes(ids))
    found.update(struct.pack(f"<{len(logprobs)}d", *logprobs))
    return found.hexdigest()[:32]


def first_difference(
    expected: Sequence[tuple[int, float]], found: Sequence[tuple[int, float]]
) -> int | None:
    """
    The index of the first (token, log-probability) that differs in any bit; None if all are the
    same.
    """
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if struct.pack("<qd", *one) != struct.pack("<qd", *other):
            return place
    return None if len(expected) == len(found) else min(len(expected), len(found))


@attrs.frozen(kw_only=True)
class Other:
    """
    A block that differs from what is on record.

    Attributes:
        place: which chunk of its sequence it is.
        expected: its digest on record.
        found: the digest that was measured.
        computed: whether computing it again gave that digest; otherwise the block in memory has it.
        known: whether the block is quarantined already.
    """

    key: str
    place: int
    expected: str
    found: str
    computed: bool
    known: bool


def others(state: State, event: ev.ShadowChecked) -> tuple[Other, ...]:
    """The blocks of a check that differ from what is on record."""
    found = []
    measured = zip(event.keys, event.digests, event.memory_digests, strict=False)
    for place, (key, digest, held) in enumerate(measured):
        block = state.blocks[key]  # the check is not legal without it
        for now, computed in ((digest, True), (held or block.digest, False)):
            if now != block.digest:
                found.append(
                    Other(
                        key=key,
                        place=place,
                        expected=block.digest,
                        found=now,
                        computed=computed,
                        known=block.bug_id is not None,
                    )
                )
    return tuple(found)


def answer_hash(state: State, event: ev.ShadowChecked) -> str | None:
    """The hash of an answer's tokens in the fold; None if the fold no longer has them."""
    session = state.sessions.get(SessionId(event.of_session))
    last = session.last if session is not None else None
    if last is None or last.request != event.request or not last.answer_ids:
        return None
    return ids_hash(last.answer_ids)


def quarantined_session(state: State, event: ev.ShadowChecked) -> str | None:
    """
    The session whose slab cannot be trusted: its answer differs, and no block of its prompt does.
    If a block does, it explains the answer: neither that block nor any that is built on it will be
    reused, not even by the session whose slab has them.
    """
    session = state.sessions.get(SessionId(event.of_session))
    if (
        event.drawn == event.drawn_expected
        or session is None
        or session.state is SessionState.QUARANTINED
    ):
        return None
    if answer_hash(state, event) not in (None, event.ids_expected):
        return None  # different tokens were compared, so nothing is known of the answer
    chunk = state.model.block_tokens if state.model is not None else 1
    accounted = any(
        other.computed and (other.place + 1) * chunk <= event.prompt_tokens
        for other in others(state, event)
    )
    return None if accounted else session.id
