"""
Checks the rows of one session by themselves, and the requests of one session by a replay of all
rows up to its last. Pure.

The first reads as many rows as the session has, the second as many as the journal has: what a page
can show of a long journal is the first, and `ops verify` and `ops replay` do both without a limit.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.replay import Finding, Replay
from cairn.journal.rows.codec import Row, chain_fault, decode
from cairn.journal.stories import RequestStory, findings_of, request_stories


@attrs.frozen(kw_only=True)
class RowFault:
    """
    A row that is not as it was written.

    Attributes:
        expected, actual: hashes, numbers or names; no text of a conversation.
    """

    position: int
    fact: str
    expected: str
    actual: str


class RowsCheck:
    """
    Checks rows of a session in order: ``feed`` it each with the one before it in the journal.

    Attributes:
        rows: how many were checked.
        first, last: the positions of the first and the last one; 0 if there is none.
        unlinked: how many could not be compared with the row before, because that was pruned.
        faults: what is wrong.
    """

    def __init__(self, stream: str) -> None:
        self.rows = self.first = self.last = self.unlinked = 0
        self.faults: list[RowFault] = []
        self._stream = stream
        self._seq: int | None = None

    def feed(self, position: int, row: Row | None, before: Row | None) -> None:
        """
        Check a row.

        Args:
            position: where the session has a row.
            row: what is there; None for nothing.
            before: the row of the position before; None if it was pruned.
        """
        self.rows += 1
        self.first, self.last = self.first or position, position
        if row is None:
            self._fault(position, "the row is missing", "a row", "none")
            self._seq = None
            return
        if row.stream != self._stream or row.position != position:
            found = f"row {row.position} of {row.stream}"
            self._fault(position, "the row is another one", self._stream, found)
        if self._seq is not None and row.seq != self._seq + 1:
            fact = "it is not the next row of its session"
            self._fault(position, fact, str(self._seq + 1), str(row.seq))
        self._seq = row.seq
        if before is None:
            self.unlinked += position > 1
        linked = before.hash if before is not None else row.previous_hash
        if (fault := chain_fault(row, linked)) is not None:
            self._fault(position, *fault)
            return
        try:
            decode(row)
        except (DamagedRow, UnknownEvent) as error:
            self._fault(position, "it is no event", row.kind, str(error)[:200])

    def _fault(self, position: int, fact: str, expected: str, actual: str) -> None:
        found = RowFault(position=position, fact=fact, expected=expected, actual=actual)
        self.faults.append(found)


@attrs.frozen(kw_only=True)
class SessionReplay:
    """
    What a replay found of a session.

    Attributes:
        rows: how many rows of the journal were read.
        stories: what became of each request, by the session's rows.
        findings: the violations that concern the session.
    """

    rows: int
    stories: tuple[RequestStory, ...]
    findings: tuple[Finding, ...]

    @property
    def decisions(self) -> int:
        """How many path decisions were made again, each checked by an invariant."""
        return sum(1 for one in self.stories if one.path)


class SessionReplaying:
    """Replays a journal from its first row, for one session: ``feed`` it all rows in order."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._fold = Replay()
        self._own: list[Row] = []

    def feed(self, rows: Iterable[Row]) -> None:
        """
        Read the next rows.

        Raises:
            DamagedRow, UnknownEvent: see ``Replay.feed``.
        """
        for row in rows:
            self._fold.feed(row)
            if row.stream == f"session/{self._session}":
                self._own.append(row)

    def result(self) -> SessionReplay:
        """What was found, once the session's last row was read."""
        report = self._fold.report(whole=False)
        last = self._own[-1].position if self._own else 0
        return SessionReplay(
            rows=report.rows,
            stories=tuple(request_stories(self._own, report.state)),
            findings=tuple(findings_of(report, self._session, last)),
        )
