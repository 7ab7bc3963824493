"""
Replays a journal: checks chain and invariants and folds the events, with the code that ran when it
was written.

A recorded violation must come out again at the same row. A violation that is not on record is new,
and gets a bug id that follows from the row. The fold then continues without the session that it
concerns.

If the first rows were pruned, the replay begins at their base.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping

import attrs

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.invariants import Violation
from cairn.journal.rows.base import Base, base_fault, state_of
from cairn.journal.rows.codec import GENESIS, Row, chain_fault, decode, misplaced, shown
from cairn.journal.rows.snapshots import Snapshot
from cairn.journal.state import EMPTY, State, apply, lengthened
from cairn.journal.unread import FORGOTTEN, NotChecked, Unread, completed

_NAMESPACE = uuid.UUID("6f0a2f0e-6a5c-5c0f-9d52-2b7f1c0b1a11")


@attrs.frozen(kw_only=True)
class Finding:
    """
    A broken invariant in a journal.

    Attributes:
        position: the row that broke it.
        session: the session whose event it was.
        of_session: the session whose answer a shadow check was of, which is not an event of that
            session.
        recorded: whether the journal already has it as a violation.
        reproduced: whether the check failed again on replay; false for a recorded violation that
            does not come out again, and for a crash, which no check can repeat.
        place: the part of the database that it is in, if that is not a row.
    """

    bug_id: str
    invariant: str
    position: int
    session: str | None
    message: str
    expected: str
    actual: str
    recorded: bool
    reproduced: bool
    of_session: str | None = None
    place: str | None = None

    @property
    def concerns(self) -> str | None:
        """The session to look at."""
        return self.session or self.of_session

    @property
    def where(self) -> str:
        """The row, or the part of the database."""
        return self.place or f"row {self.position}"


@attrs.frozen(kw_only=True)
class Report:
    """
    The result of a replay.

    Attributes:
        rows: how many were read.
        head: hash of the last one.
        state: the fold up to it.
        not_checked: the rows that could not be checked, because texts are not there to read.
    """

    rows: int
    head: str
    state: State
    findings: tuple[Finding, ...]
    not_checked: NotChecked = attrs.field(factory=NotChecked)


class Replay:
    """A fold that checks as it goes. ``feed`` it rows, then call ``report``."""

    def __init__(self, base: Base | None = None, begins: Snapshot | None = None) -> None:
        """
        Args:
            base: of the journal.
            begins: a snapshot of this journal, to go on from there: only the rows after it are
                read, and of the base only the digest is checked.
        """
        self._rows = 0
        self._has_begun = False
        self._base = base
        self._begins = begins
        self._pruned: tuple[int, ev.JournalPruned] | None = None
        if begins is not None:
            self.state, self._head = begins.state, begins.place.head
            self._pruned = begins.pruned
        else:
            self.state = EMPTY if base is None else _begun(base)
            self._head = GENESIS if base is None else base.head
        self._findings: list[Finding] = []
        self._broken: tuple[ev.Recorded, Violation] | None = None
        self._passed_over: set[str] = set()
        self._unread = Unread(self.state)
        # The last row, if it could not be checked, and the state before it.
        self._unsure: tuple[State, ev.Recorded] | None = None

    def feed(self, row: Row) -> ev.Recorded | None:
        """
        Apply the next row. Return its event, or None if the row was damaged and cannot be decoded,
        which is then a finding.

        Raises:
            DamagedRow: a row of an unbroken chain cannot be decoded.
            UnknownEvent: the journal was written by a newer Cairn.
        """
        self._rows += 1
        after = self._base.position if self._base is not None else 0
        if (fault := misplaced(row, after)) is not None:
            # It is no part of the chain, so what follows is read as if it were not there.
            self._found(row.position, None, _violation("INV-8", *fault), shown(row.hash))
            return None
        fault = chain_fault(row, self._head, self.state.position)
        at = row.position if type(row.position) is int else self.state.position
        is_first = not self._has_begun and self._base is None and self._begins is None
        if is_first and at > 1:
            fault = "the rows before it are gone, and no base is in their place", "row 1", "none"
        self._has_begun = True
        self._head = shown(row.hash)
        if fault is not None:
            self._found(at, None, _violation("INV-8", *fault), self._head)
        try:
            recorded = decode(row)
        except (DamagedRow, UnknownEvent):
            if fault is None:
                raise
            self.state = attrs.evolve(self.state, position=at)
            return None
        recorded = completed(self.state, recorded)
        self._fold(recorded, row)
        return recorded

    @property
    def forgotten(self) -> Mapping[str, frozenset[str]]:
        """The ids of the keys that are to be removed, by their sessions and by the rows so far."""
        return self._unread.forgotten

    def report(self, *, whole: bool = True) -> Report:
        """
        The result so far.

        Args:
            whole: whether all rows were read, so that the one that names the base was among them.
        """
        self._unrecorded()
        findings = (*self._of_base(), *self._findings) if whole else tuple(self._findings)
        return Report(
            rows=self._rows,
            head=self._head,
            state=self.state,
            findings=findings,
            not_checked=self._unread.not_checked(),
        )

    def _of_base(self) -> tuple[Finding, ...]:
        """Check that the base is the one that the journal names."""
        at, pruned = self._pruned or (0, None)
        fault = base_fault(self._base, pruned, decoded=self._begins is None)
        if fault is None:
            return ()
        position = self._base.position if self._base is not None else at
        return (_news(position, None, _violation("INV-8", *fault), self._head),)

    def _fold(self, recorded: ev.Recorded, row: Row) -> None:
        event = recorded.event
        if isinstance(event, ev.JournalPruned):
            self._pruned = recorded.position, event
        if isinstance(event, ev.InvariantViolated):
            self._on_record(event)
        else:
            self._unrecorded()
        session = getattr(event, "session", None)
        if session in self._passed_over:
            self.state = lengthened(self.state, recorded)
            return
        before, self._unsure = self.state, None
        try:
            violations, whole = self._unread.violations(self.state, recorded, row.private)
            if not violations:
                self.state = apply(self.state, recorded)
                self._unsure = None if whole else (before, recorded)
        except (AssertionError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            # Values that no server writes: a number beyond all bounds, a hash that is none.
            violations = [_violation("INV-6", "an event that does not fit", "one", repr(error))]
        if violations:
            self.state = lengthened(self.state, recorded)
            self._broken = (recorded, violations[0])
            self._broken_hash = row.hash

    def _on_record(self, event: ev.InvariantViolated) -> None:
        """
        Add a recorded violation, and compare it with the one that the row before has just given.
        """
        self._take_back(event)
        broken, self._broken = self._broken, None
        same = broken is not None and (
            broken[0].position == event.at_position and broken[1].invariant == event.invariant
        )
        if broken is not None and not same:
            self._broken = broken
            self._unrecorded()
        # What comes out again is shown as it comes out: the words on record could be changed.
        shown = broken[1] if same and broken and event.expected != FORGOTTEN else event
        self._findings.append(
            Finding(
                bug_id=event.bug_id,
                invariant=event.invariant,
                position=event.at_position,
                session=event.session,
                message=shown.message,
                expected=shown.expected,
                actual=shown.actual,
                recorded=True,
                reproduced=same,
                of_session=_checked_session(broken[0].event) if same and broken else None,
            )
        )

    def _take_back(self, event: ev.InvariantViolated) -> None:
        """
        The row before was applied without being checked, and broke an invariant, so that it has no
        effect. INV-6 is checked of every row, and a crash is of no row.
        """
        unsure = self._unsure
        if (
            unsure is not None
            and unsure[1].position == event.at_position
            and event.invariant not in ("INV-6", "CRASH")
        ):
            self.state = lengthened(*unsure)

    def _unrecorded(self) -> None:
        """
        Add a violation that is not on record, because a different row or the end of the journal
        followed.
        """
        if self._broken is None:
            return
        (recorded, violation), self._broken = self._broken, None
        session = getattr(recorded.event, "session", None)
        if session is not None:
            self._passed_over.add(session)
        of_session = _checked_session(recorded.event)
        self._found(recorded.position, session, violation, self._broken_hash, of_session)

    def _found(
        self,
        position: int,
        session: str | None,
        violation: Violation,
        row_hash: str,
        of_session: str | None = None,
    ) -> None:
        found = _news(position, session, violation, row_hash)
        self._findings.append(attrs.evolve(found, of_session=of_session))


def _checked_session(event: ev.Event) -> str | None:
    return event.of_session if isinstance(event, ev.ShadowChecked) else None


def _begun(base: Base) -> State:
    """The state to continue from. Of a damaged base, only the position is used."""
    try:
        return state_of(base)
    except ValueError:
        return attrs.evolve(EMPTY, position=base.position)


def _news(position: int, session: str | None, violation: Violation, row_hash: str) -> Finding:
    """A finding that is not on record."""
    name = f"{row_hash}/{position}/{violation.invariant}"
    return Finding(
        bug_id=str(uuid.uuid5(_NAMESPACE, name)),
        invariant=violation.invariant,
        position=position,
        session=session,
        message=violation.message,
        expected=violation.expected,
        actual=violation.actual,
        recorded=False,
        reproduced=True,
    )


def _violation(invariant: str, message: str, expected: str, actual: str) -> Violation:
    return Violation(invariant=invariant, message=message, expected=expected, actual=actual)


def replay(
    rows: Iterable[Row],
    *,
    base: Base | None = None,
    until: int | None = None,
    watch: Callable[[ev.Recorded, State], None] | None = None,
) -> Report:
    """
    Read a journal and check all of it.

    Args:
        base: what replaces the rows before these.
        until: stop after this position; None for all.
        watch: called with each event and the state after it.
    """
    fold = Replay(base)
    for row in rows:
        if until is not None and row.position > until:
            break
        recorded = fold.feed(row)
        if watch is not None and recorded is not None:
            watch(recorded, fold.state)
    return fold.report(whole=until is None)
