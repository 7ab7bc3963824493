"""
The only way to append events to the journal: they are numbered, checked, chained and applied.

``Ledger.propose`` takes events and returns rows that are ready to be stored. If an event breaks an
invariant, it is recorded without effect, followed by the violation and by the events that take the
broken scope out of service. The events proposed after it are dropped.

A ledger is used by one task of the server, and never waits. Ids and time come from outside.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import attrs

from cairn.journal import events as ev
from cairn.journal.cache.eviction_order import Order
from cairn.journal.errors import BugError
from cairn.journal.invariants import Violation, check
from cairn.journal.lifecycle import SessionState
from cairn.journal.retention import NeededIds
from cairn.journal.rows.base import pruned_at
from cairn.journal.rows.codec import GENESIS, Row, encode, has_private
from cairn.journal.rows.sealing import KeyOf, subject_of
from cairn.journal.shadow import others, quarantined_session
from cairn.journal.state import EMPTY, Session, SessionId, State, apply, lengthened


@attrs.frozen(kw_only=True)
class Clock:
    """
    What the ledger needs from outside the pure core.

    Attributes:
        new_id: a fresh unique id.
        now_us: microseconds since 1970.
        version: Cairn's version, for bug records.
        key_of: gives the key that seals the private fields of a subject; None to store them plain.
    """

    new_id: Callable[[], str]
    now_us: Callable[[], int]
    version: str
    key_of: KeyOf | None = None


@attrs.frozen(kw_only=True)
class Outcome:
    """
    The result of a proposal.

    Attributes:
        rows: to be stored, all or none.
        recorded: the events in them.
        bug: set if an invariant broke.
    """

    rows: tuple[Row, ...]
    recorded: tuple[ev.Recorded, ...]
    bug: BugError | None


class Ledger:
    """
    The state of a journal and its head, to which events can be appended.

    Attributes:
        clock: ids and time for its rows.
    """

    def __init__(self, clock: Clock, *, state: State = EMPTY, head: str = GENESIS) -> None:
        self.clock = clock
        self._state = state
        self._head = head
        self._order: Order | None = None

    @property
    def state(self) -> State:
        """The state after all events so far."""
        return self._state

    @property
    def head(self) -> str:
        """The hash of the last row."""
        return self._head

    @property
    def order(self) -> Order:
        """
        The order in which blocks are evicted. It is made on first use and updated from then on, so
        that readers of a journal do not pay for it.
        """
        if self._order is None:
            self._order = Order(self._state)
        return self._order

    def propose(self, events: Sequence[ev.Event], *, expected_seq: int | None = None) -> Outcome:
        """
        Number, check, chain and apply events. Changes the ledger.

        Args:
            expected_seq: the sequence number that the stream's owner gives to the first event; None
                to take the next. A wrong one is a violation of INV-6.

        Raises:
            ValueError: an event cannot be stored (invalid Unicode, or a number that is not finite).
                The ledger is unchanged.
        """
        before = self._state, self._head
        try:
            return self._propose(events, expected_seq)
        except BaseException:
            self._state, self._head = before
            self._order = None  # it may have followed some of them
            raise

    def _propose(self, events: Sequence[ev.Event], expected_seq: int | None) -> Outcome:
        recorded: list[ev.Recorded] = []
        rows: list[Row] = []
        seq = expected_seq
        for event in events:
            held_seq = self._state.streams.get(event.stream, 0)
            if seq is not None and seq <= held_seq:
                # Its number in the stream is taken, so it cannot even be recorded.
                broken = Violation(
                    invariant="INV-6",
                    message=f"{event.kind} with a number that is taken in {event.stream}",
                    expected=str(held_seq + 1),
                    actual=str(seq),
                )
                bug = self._violated(None, event, broken, recorded, rows)
                return Outcome(rows=tuple(rows), recorded=tuple(recorded), bug=bug)
            place = self._place(event, seq)
            seq = None if seq is None else seq + 1
            violations = check(self._state, place)
            recorded.append(place)
            rows.append(self._chained(place))
            if violations:
                self._state = lengthened(self._state, place)
                bug = self._violated(place.position, event, violations[0], recorded, rows)
                return Outcome(rows=tuple(rows), recorded=tuple(recorded), bug=bug)
            self._fold(place)
        return Outcome(rows=tuple(rows), recorded=tuple(recorded), bug=None)

    def prune(self, pruned: ev.JournalPruned, kept: NeededIds) -> Outcome:
        """
        Append the event of a prune, and forget what the base does not have: the state is then that
        of the base and the rows after it. Changes the ledger.

        Args:
            kept: the token ids that the base has.
        """
        outcome = self.propose([pruned])
        assert outcome.bug is None, outcome.bug  # no invariant is about it
        self._state = pruned_at(self._state, pruned.cut, kept)
        self._order = None
        return outcome

    def record_crash(self, *, session: str | None, message: str, trace: str) -> Outcome:
        """
        Record that a session's own code failed, and quarantine it. Changes the ledger.

        Args:
            session: None if it was work of no session, which takes nothing out of service.
        """
        broken = Violation(
            invariant="CRASH", message=message, expected="no exception", actual=message
        )
        recorded: list[ev.Recorded] = []
        rows: list[Row] = []
        bug = self._consequences(
            broken, self._state.position, session, "session", trace, recorded, rows
        )
        return Outcome(rows=tuple(rows), recorded=tuple(recorded), bug=bug)

    def _fold(self, place: ev.Recorded) -> None:
        before, self._state = self._state, apply(self._state, place)
        if self._order is not None:
            self._order.follow(before, self._state, place.event)

    def _place(self, event: ev.Event, seq: int | None) -> ev.Recorded:
        stream = event.stream
        return ev.Recorded(
            position=self._state.position + 1,
            stream=stream,
            seq=self._state.streams.get(stream, 0) + 1 if seq is None else seq,
            event_id=self.clock.new_id(),
            time_us=self.clock.now_us(),
            event=event,
        )

    def _chained(self, place: ev.Recorded) -> Row:
        key_of, event = self.clock.key_of, place.event
        sealed = key_of is not None and has_private(event)
        row = encode(place, self._head, key_of(subject_of(event)) if sealed and key_of else None)
        self._head = row.hash
        return row

    def _violated(
        self,
        at_position: int | None,
        event: ev.Event,
        broken: Violation,
        recorded: list[ev.Recorded],
        rows: list[Row],
    ) -> BugError:
        at_position = self._state.position if at_position is None else at_position
        session = getattr(event, "session", None)
        trace = "".join(traceback.format_stack(limit=12)[:-2])
        of_session = getattr(event, "of_session", None)
        return self._consequences(
            broken, at_position, session, broken.scope, trace, recorded, rows, of_session
        )

    def _consequences(
        self,
        broken: Violation,
        at_position: int,
        session: str | None,
        scope: str,
        trace: str,
        recorded: list[ev.Recorded],
        rows: list[Row],
        of_session: str | None = None,
    ) -> BugError:
        held = self._state.sessions.get(SessionId(session)) if session is not None else None
        bug_id = self.clock.new_id()
        model = self._state.model
        violated = ev.InvariantViolated(
            bug_id=bug_id,
            invariant=broken.invariant,
            at_position=at_position,
            session=held.id if held is not None else None,
            of_session=of_session,
            request=held.request.ask.request if held is not None and held.request else None,
            fingerprint=model.fingerprint if model is not None else None,
            cairn_version=self.clock.version,
            message=broken.message,
            expected=broken.expected,
            actual=broken.actual,
            trace=trace,
        )
        taken_out = self._taken_out(scope, bug_id, held, at_position, recorded)
        for event in (violated, *taken_out):
            place = self._place(event, None)
            recorded.append(place)
            rows.append(self._chained(place))
            self._fold(place)
        return BugError(bug_id, broken.invariant, broken.message)

    def _taken_out(
        self,
        scope: str,
        bug_id: str,
        held: Session | None,
        at_position: int,
        recorded: Sequence[ev.Recorded],
    ) -> tuple[ev.Event, ...]:
        """The events by which a violation takes its scope out of service."""
        if held is not None and held.state is SessionState.QUARANTINED:
            return ()
        if scope == "blocks":
            broken = next((r.event for r in recorded if r.position == at_position), None)
            if isinstance(broken, ev.ShadowChecked):
                return self._taken_out_by_check(broken, bug_id)
            if isinstance(broken, ev.RowChecked):
                return self._taken_out_by_row(broken, bug_id)
            keys = broken_keys(self._state, broken)
            whose = held.id if held is not None else None
            return (ev.BlocksQuarantined(session=whose, bug_id=bug_id, keys=keys),)
        if held is None:
            return ()
        if scope == "admission":
            return (ev.AdmissionClosed(session=held.id, bug_id=bug_id),)
        return (ev.SessionQuarantined(session=held.id, bug_id=bug_id),)

    def _taken_out_by_check(self, broken: ev.ShadowChecked, bug_id: str) -> tuple[ev.Event, ...]:
        """
        A shadow check is not a step of its session, so its blocks are quarantined on the server's
        stream. The session is quarantined only if no block explains the difference.
        """
        found: list[ev.Event] = []
        if keys := broken_keys(self._state, broken):
            found.append(ev.BlocksQuarantined(session=None, bug_id=bug_id, keys=keys))
        if (session := quarantined_session(self._state, broken)) is not None:
            found.append(ev.SessionQuarantined(session=session, bug_id=bug_id))
        return tuple(found)

    def _taken_out_by_row(self, broken: ev.RowChecked, bug_id: str) -> tuple[ev.Event, ...]:
        """
        If a row of a slab is another now, the session is quarantined, and no block: each match of a
        short block of the slab has a row checked again. A row of a partial match is in a block,
        whose digest shows that it is as it was sealed: either it was sealed wrong, or something
        before it in the slab changed. Neither is known, so both are quarantined: if only the
        session were, others would go on to copy the row.
        """
        found: list[ev.Event] = []
        if keys := broken_keys(self._state, broken):
            found.append(ev.BlocksQuarantined(session=None, bug_id=bug_id, keys=keys))
        found.append(ev.SessionQuarantined(session=broken.session, bug_id=bug_id))
        return tuple(found)


def broken_keys(state: State, event: ev.Event | None) -> tuple[str, ...]:
    """The blocks to quarantine after a violation of INV-3, with all after them in their chains."""
    if isinstance(event, ev.BlockAdopted):
        roots = {event.key}  # it may not be known yet, and would be read again
    elif isinstance(event, ev.BlockSealed | ev.BlockSpilled | ev.BlockLoaded):
        roots = {event.key} & set(state.blocks)
    elif isinstance(event, ev.BlocksRestored):
        wrong = (
            key
            for key, digest in zip(event.keys, event.digests, strict=False)
            if key in state.blocks and state.blocks[key].digest != digest
        )
        roots = set(wrong)
    elif isinstance(event, ev.RowChecked):
        request = state.session(event.session).request
        assert request is not None and request.path is not None
        partial = request.path.partial_key
        roots = {partial} if partial is not None else set()
    elif isinstance(event, ev.ShadowChecked):
        roots = {other.key for other in others(state, event) if not other.known}
    else:
        roots = set()
    quarantined = set(roots)
    for block in sorted(state.blocks.values(), key=lambda block: block.start):
        if block.parent in quarantined:
            quarantined.add(block.key)
    return tuple(sorted(quarantined))
