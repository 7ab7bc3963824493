"""
The sequencer: all decisions are made here, and events get their order.

It has no task and never waits. Its methods run between two steps of trio, so that nothing comes
between a decision and its append. Events go to the writer at once; the receipt is what a caller
waits for until they are committed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.cache.eviction_order import Order
from cairn.journal.errors import BugError
from cairn.journal.ledger import Ledger, Outcome
from cairn.journal.pruning import CutState
from cairn.journal.rows.base import Base
from cairn.journal.state import Session, SessionId, State

if TYPE_CHECKING:
    from cairn.actors.threads.writer import JournalWriter


class Sequencer:
    """Decides and appends."""

    def __init__(
        self,
        ledger: Ledger,
        writer: JournalWriter,
        on_wait_ended: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            on_wait_ended: called after an append with which a request waits no longer for the one
                that it joined.
        """
        self._ledger = ledger
        self._writer = writer
        self._on_wait_ended = on_wait_ended
        self._following: set[SessionId] = set()  # sessions whose requests wait for another one
        _ = ledger.order  # computed now, before there are requests

    @property
    def state(self) -> State:
        """The fold of all that was appended, committed or not."""
        return self._ledger.state

    @property
    def head(self) -> str:
        """The hash of the last row that was appended, committed or not."""
        return self._ledger.head

    @property
    def order(self) -> Order:
        """The order in which the blocks of that leave memory, and their files the disk."""
        return self._ledger.order

    def now_us(self) -> int:
        """The time by the ledger's clock: microseconds since 1970."""
        return self._ledger.clock.now_us()

    def append(self, *events: ev.Event, expected_seq: int | None = None) -> int:
        """
        Append events, all or none.

        Args:
            expected_seq: what the owner of the stream takes the next sequence number to be.

        Returns:
            The receipt.

        Raises:
            BugError: one of them broke an invariant; that is in the journal now.
        """
        return self._submit(self._ledger.propose(events, expected_seq=expected_seq))

    def prune(self, base: Base, cut: CutState) -> int:
        """
        Append the event of a prune, with which the writer puts a base in the place of the rows up
        to it.

        Returns:
            The receipt.
        """
        outcome = self._ledger.prune(cut.pruned, cut.needed)
        _ = self._ledger.order  # computed now, while no request waits for it
        return self._writer.submit(outcome.rows, outcome.recorded, base)

    def begin(
        self,
        received: ev.RequestReceived,
        opened: ev.SessionOpened | None,
        text: Callable[[tuple[int, ...]], str],
    ) -> int:
        """
        Have a session take a request, and decide: it joins another one, or its path is selected.
        One append.

        Args:
            opened: the opening of its session, if that is new.
            text: returns the text of tokens, to show people where prompts differ.

        Returns:
            The receipt. The decision is in ``state``.

        Raises:
            BugError: an invariant broke.
        """
        first: tuple[ev.Event, ...] = (received,) if opened is None else (opened, received)
        outcome = self._ledger.propose(first)
        try:
            if outcome.bug is None:
                decided = self._decided(received.session, text)
                outcome = _joined(outcome, self._ledger.propose((decided,)))
        except BaseException:
            # What the ledger has taken in must reach the store, whatever comes after it.
            self._submit(outcome)
            raise
        return self._submit(outcome)

    def go_on(self, session: str, text: Callable[[tuple[int, ...]], str], expected_seq: int) -> int:
        """
        Decide again for a request that waits no longer for the one that it joined. As ``begin``.

        Args:
            expected_seq: as for ``append``.
        """
        return self.append(self._decided(session, text), expected_seq=expected_seq)

    def waits(self, session: str) -> bool:
        """
        Whether the request of a session waits for the one that it joined. If so, ``on_wait_ended``
        is called when it waits no longer.
        """
        held = self.session(session)
        waits = paths.waits(self._ledger.state, held)
        if waits:
            self._following.add(held.id)
        return waits

    def choose(self, ask: paths.Ask) -> SessionId | None:
        """The session that is to serve a request as things are now, or None for a new one."""
        return paths.choose_session(self._ledger.state, ask)

    def crash(self, session: str | None, error: BaseException) -> BugError:
        """
        Record that a session's own code failed, and quarantine it; or that work of no session
        failed, which takes nothing out of service.

        Raises:
            WriterDied: the server ends.
        """
        trace = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
        outcome = self._ledger.record_crash(session=session, message=message, trace=trace)
        self._writer.submit(outcome.rows, outcome.recorded)
        self._end_waits()
        assert outcome.bug is not None
        return outcome.bug

    def bug_that_ended(self, error: Exception) -> str:
        """
        The id of the bug for an error that ended work of no session. If it is none yet, it is
        recorded as a crash. Raises as ``crash``.
        """
        return error.bug_id if isinstance(error, BugError) else self.crash(None, error).bug_id

    def session(self, session: str) -> Session:
        """A session as the journal has it."""
        return self._ledger.state.session(session)

    def _decided(
        self, name: str, text: Callable[[tuple[int, ...]], str]
    ) -> ev.PrefixJoined | ev.PathSelected:
        state = self._ledger.state
        session = state.session(name)
        assert session.request is not None
        request = session.request.ask.request
        decision = paths.decide(state, session, session.request)
        if isinstance(decision, paths.Join):
            return ev.PrefixJoined(
                session=name,
                request=request,
                rules_version=paths.RULES_VERSION,
                decided_at=state.position,
                **attrs.asdict(decision),
            )
        now, was = paths.around(state, session.request, decision)
        return ev.PathSelected(
            session=name,
            request=request,
            rules_version=paths.RULES_VERSION,
            decided_at=state.position,
            diverged_text=None if now is None else text(now),
            diverged_from=None if was is None else text(was),
            **attrs.asdict(decision),
        )

    def _submit(self, outcome: Outcome) -> int:
        receipt = self._writer.submit(outcome.rows, outcome.recorded)
        self._end_waits()
        if outcome.bug is not None:
            raise outcome.bug
        return receipt

    def _end_waits(self) -> None:
        """Tell those that wait if one of them waits no longer."""
        state = self._ledger.state
        ended = [
            name
            for name in self._following
            if (held := state.sessions.get(name)) is None or not paths.waits(state, held)
        ]
        if ended:
            self._following.difference_update(ended)
            self._on_wait_ended()


def _joined(one: Outcome, other: Outcome) -> Outcome:
    return Outcome(
        rows=one.rows + other.rows, recorded=one.recorded + other.recorded, bug=other.bug
    )
