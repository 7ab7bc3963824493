"""A journal's disk that is slow, full, torn by a crash, or lies about what it has written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

import attrs

from cairn.journal import events as ev
from cairn.journal.errors import HeadMoved, StoreFull
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from tests.simulation.turns import sleep_in_turn


@attrs.frozen(kw_only=True)
class Faults:
    """
    What a disk does, as shares of its commits.

    Attributes:
        slow: take up to two seconds.
        full: have no room, for as long as ``full_tries`` tries.
        lies: how many of the last commits a crash may lose, though they were reported as done.
    """

    slow: float = 0.0
    full: float = 0.0
    full_tries: int = 3
    lies: int = 0


class SimulatedDisk(MemoryStore):
    """
    Rows, and what of them is public. After a crash it takes no row until it is opened again.

    Attributes:
        emitted: the ids of the tokens that committed rows release, by request.
        accepted: the requests whose decision is committed.
        finished: the requests whose end is committed.
        bugs: the ids of the bugs that are committed.
    """

    def __init__(self, random: Random, faults: Faults) -> None:
        super().__init__()
        self._random, self._faults = random, faults
        self._full_tries = 0
        self._was_full = False
        self._commits: list[int] = []
        self._in_hand: Sequence[Row] = ()
        self._is_down = False
        self._learn_from(())

    @property
    def was_full(self) -> bool:
        """Whether there was no room at some try since it was opened."""
        return self._was_full

    def append(self, rows: Sequence[Row]) -> None:
        """See ``Store.append``."""
        if self._is_down:
            return
        if self._full_tries:
            self._full_tries -= 1
            self._was_full = True
            raise StoreFull("no room")
        if self._random.random() < self._faults.full:
            self._full_tries = self._random.randrange(self._faults.full_tries)
            self._was_full = True
            raise StoreFull("no room")
        if self._random.random() < self._faults.slow:
            self._in_hand = rows
            sleep_in_turn(2 * self._random.random())
            self._in_hand = ()
            if self._is_down:
                return
        self._write(rows)

    def crash(self) -> None:
        """
        Keep what is on the disk: all commits but the last few, if it lies; and perhaps the commit
        that it was at.
        """
        self._is_down = True
        if self._in_hand and self._random.random() < 0.5:
            self._write(self._in_hand)
        lost = self._random.randrange(min(self._faults.lies, len(self._commits)) + 1)
        if lost:
            del self.rows[self._commits[-lost] :]
        self._in_hand = ()

    def reopen(self) -> None:
        """Take rows again."""
        self._is_down = self._was_full = False
        self._full_tries = 0
        self._commits = []
        self._learn_from(self.rows)

    def _write(self, rows: Sequence[Row]) -> None:
        if (rows[0].position - 1, rows[0].previous_hash) != self.head():
            raise HeadMoved(f"row {rows[0].position} does not follow row {self.head()[0]}")
        self._commits.append(len(self.rows))
        self.rows.extend(rows)
        self._learn(rows)

    def _learn_from(self, rows: Sequence[Row]) -> None:
        self.emitted: defaultdict[str, list[int]] = defaultdict(list)
        self._sampled: defaultdict[str, list[int]] = defaultdict(list)
        self.accepted: set[str] = set()
        self.finished: set[str] = set()
        self.bugs: set[str] = set()
        self._learn(rows)

    def _learn(self, rows: Sequence[Row]) -> None:
        for row in rows:
            event = decode(row).event
            match event:
                case ev.CacheExtended(request=str(request)):
                    self._sampled[request] += event.sampled
                    first = len(self.emitted[request])
                    self.emitted[request] += self._sampled[request][first:][: event.emitted]
                case ev.TokensEmitted():
                    self.emitted[event.request] += event.ids
                case ev.PathSelected():
                    self.accepted.add(event.request)
                case ev.RequestFinished():
                    self.finished.add(event.request)
                case ev.InvariantViolated():
                    self.bugs.add(event.bug_id)
                case _:
                    pass
