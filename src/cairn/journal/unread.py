"""
Rows whose private payload cannot be read, because its session was forgotten or its key is not at
hand: what takes the place of their texts and token ids, and what can still be checked.

A fold needs lengths more than contents. An unread row gets placeholders of the right lengths: texts
are empty, and token ids are negative, so that they match no real one, nor each other in two rows.

What depends on them is not checked, and counted. That is

1. each unread row, and each row with private fields of a session that has one, beyond INV-6;
2. a decision that compared a prompt with an unread session (``nearest``), or with the token ids of
   a block that such a session sealed (``partial_key``).

All else is: a decision names the session and the block that gave it, and placeholders, which match
nothing, lose every comparison that it does not name.

What seals the rows is checked without keys: a key is of one session alone, its session is forgotten
with it and no other, and after the first sealed row no private payload is plain.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cairn.journal import events as ev
from cairn.journal.invariants import Violation, check, check_step
from cairn.journal.invariants.sentences import broken
from cairn.journal.keys import ID_BYTES, IdBytes
from cairn.journal.rows.sealing import key_id, subject_of
from cairn.journal.state import EMPTY, SessionId, State

FORGOTTEN = "(cannot be read: the session was forgotten, or its key is not here)"
"""Shown in place of a text."""

_IDS = 1 << 31
_SPREAD = 0x9E3779B1 % _IDS  # odd, so that two rows never have the same id in the same place
_MOST = 1 << 22
"""More tokens than any prompt has; a row that says so was not written by a server."""

_PRIVATE = frozenset(
    kind
    for kind in ev.ALL_EVENTS
    if any(field.metadata.get("private") for field in attrs.fields(kind))
)


def placeholders(position: int, start: int, end: int) -> tuple[int, ...]:
    """
    What takes the place of the token ids ``[start, end)`` of a sequence.

    Args:
        position: of the row that has them.
    """
    end = min(end, start + _MOST)
    begins = position * _SPREAD + start
    return tuple(-1 - (begins + place) % _IDS for place in range(end - start))


def is_placeholder(ids: IdBytes) -> bool:
    """Whether the token ids of a block are placeholders, all or the last of them."""
    return bool(ids) and bool(ids[-1] & 0x80 or ids[ID_BYTES - 1] & 0x80)


def filled(event: ev.Event, position: int) -> ev.Event:
    """An event whose private fields are empty, with placeholders as far as it tells how many."""
    match event:
        case ev.RequestReceived():
            ids = placeholders(position, event.base_tokens, event.prompt_tokens)
            return attrs.evolve(event, new_ids=ids)
        case ev.PrewarmStarted():
            ids = placeholders(position, event.base_tokens, event.tokens)
            return attrs.evolve(event, new_ids=ids)
        case ev.CacheExtended(step="decode"):
            return _drawn(event, position, event.end - event.start)
        case ev.TokensEmitted():
            ids = placeholders(position, event.first, event.first + event.emitted)
            return attrs.evolve(event, ids=ids)
        case ev.InvariantViolated():
            return attrs.evolve(event, expected=FORGOTTEN, actual=FORGOTTEN)
        case _:
            return event


def completed(state: State, recorded: ev.Recorded) -> ev.Recorded:
    """
    An unread event with what follows from the state before it: whether a pass was the last one of
    its prompt, which draws a token, and which tokens were emitted.
    """
    if recorded.unread is None:
        return recorded
    event = recorded.event
    held = state.sessions.get(SessionId(getattr(event, "session", None) or ""))
    request = held.request if held is not None else None
    if request is None:
        return recorded
    if isinstance(event, ev.CacheExtended) and event.step == "prefill":
        drawn = 1 if event.end == request.ask.prompt_tokens else 0
        return attrs.evolve(recorded, event=_drawn(event, recorded.position, drawn))
    if isinstance(event, ev.TokensEmitted):
        ids = request.sampled[event.first : event.first + event.emitted]
        return attrs.evolve(recorded, event=attrs.evolve(event, ids=ids))
    return recorded


def _drawn(event: ev.CacheExtended, position: int, drawn: int) -> ev.CacheExtended:
    # The last token that is drawn is the one after the last that has KV.
    ids = placeholders(position, event.end - drawn + 1, event.end + 1)
    return attrs.evolve(event, sampled=ids, logprobs=(0.0,) * len(ids))


@attrs.frozen(kw_only=True)
class NotChecked:
    """
    The rows that a replay could not check.

    Attributes:
        forgotten: unread, of sessions that were forgotten.
        no_key: unread, of others: their key is not at hand.
        named: that can be read, and depend on those.
    """

    forgotten: int = 0
    no_key: int = 0
    named: int = 0

    def __bool__(self) -> bool:
        return bool(self.forgotten or self.no_key or self.named)


class Unread:
    """What a replay knows of sealed and unread rows: ``violations`` for each row, in order."""

    def __init__(self, begins: State) -> None:
        """
        Args:
            begins: the state before the first row. Sessions in it may have placeholders.
        """
        self._sessions = {str(name) for name, held in begins.sessions.items() if _unread(held.last)}
        self._rows: dict[str, int] = {}
        self._subjects: dict[str, str] = {}
        self._forgotten: dict[str, set[str]] = {}
        self._has_all = begins is EMPTY  # else rows that name other keys are gone
        self._named = 0

    def violations(
        self, state: State, recorded: ev.Recorded, private: bytes | None
    ) -> tuple[list[Violation], bool]:
        """
        The violations of a row on ``state``, and whether it could be checked as a whole.

        Args:
            private: its private payload as it is stored.
        """
        event = recorded.event
        if (fault := self._sealing_fault(state, event, private)) is not None:
            return [fault], True
        session = getattr(event, "session", None)
        if recorded.unread is not None:
            self._rows[recorded.unread] = self._rows.get(recorded.unread, 0) + 1
            if session is not None:
                self._sessions.add(session)
            return check_step(state, recorded), False
        if isinstance(event, ev.SessionForgotten):
            self._forgotten.setdefault(event.of_session, set()).update(event.key_ids)
        if isinstance(event, ev.SessionOpened | ev.SessionClosed):
            self._sessions.discard(event.session)  # the id may come again
        elif self._depends(state, event, session):
            self._named += 1
            return check_step(state, recorded), False
        return check(state, recorded), True

    @property
    def forgotten(self) -> Mapping[str, frozenset[str]]:
        """The ids of the keys of forgotten sessions, by session."""
        return {session: frozenset(ids) for session, ids in self._forgotten.items()}

    def not_checked(self) -> NotChecked:
        """What could not be checked so far."""
        keys = set().union(*self._forgotten.values())
        gone = sum(rows for key, rows in self._rows.items() if key in keys)
        return NotChecked(forgotten=gone, no_key=sum(self._rows.values()) - gone, named=self._named)

    def _sealing_fault(
        self, state: State, event: ev.Event, private: bytes | None
    ) -> Violation | None:
        """What is wrong with how a row is sealed, or with the keys that it names."""
        if (named := key_id(private)) is not None:
            subject = subject_of(event)
            if (whose := self._subjects.setdefault(named, subject)) != subject:
                return broken("INV-9", "a row has the key of another session", subject, whose)
        elif private is not None and self._subjects:
            fact = "a private payload is plain, and those before it are sealed"
            return broken("INV-8", fact, "sealed", "plain")
        if not isinstance(event, ev.SessionForgotten):
            return None
        of = event.of_session
        was = f"session/{of}" in state.streams or of in self._subjects.values()
        if self._has_all and not was:
            return broken("INV-9", "a session was forgotten that never was", "a session", of)
        for key in event.key_ids:
            if (whose := self._subjects.setdefault(key, of)) != of:
                return broken("INV-9", "a session was forgotten with the key of another", of, whose)
        return None

    def _depends(self, state: State, event: ev.Event, session: str | None) -> bool:
        """Whether a row that can be read is checked against what cannot."""
        if session in self._sessions and type(event) in _PRIVATE:
            return True
        if isinstance(event, ev.PathSelected) and event.nearest in self._sessions:
            return True
        if not isinstance(event, ev.PathSelected | ev.PrewarmStarted) or event.partial_key is None:
            return False
        block = state.blocks.get(event.partial_key)
        return block is not None and is_placeholder(block.ids)


def _unread(last: object) -> bool:
    ids: tuple[int, ...] = getattr(last, "prompt_ids", ())
    return any(one < 0 for one in (*ids[:1], *ids[-1:]))
