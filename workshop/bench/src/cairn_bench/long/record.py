"""
``long.jsonl``: the record of a long session so far, with a line for each turn and each look.

A line is written when its turn is over, so a run that was killed is recorded up to its last turn
and resumes from there. A line that was cut off does not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import attrs

from cairn_bench.long.plan import Plan

ANSWERED: Final = "answered"
LEFT: Final = "left"


@attrs.frozen(kw_only=True)
class Begun:
    """
    The first line: the session's settings.

    Attributes:
        model: its name.
    """

    kind: ClassVar[str] = "begun"
    plan: Plan
    model: str


@attrs.frozen(kw_only=True)
class Turn:
    """
    A turn of a client.

    Attributes:
        at_s: when it began, on the clock of the session.
        continues: whether it is not the first of its conversation.
        among: whether the other client spoke at the same time.
        path: as the server reports it; None if it does not.
        outcome: answered, left, or the kind of error.
        why: the error in words.
        first_s, total_s: to the first of the text, and to the end; None if there was none.
        text: the answer, which the next turn sends back.
        as_cold: whether the same request bypassing the cache had the same answer; None if that was
            not tried.
    """

    kind: ClassVar[str] = "turn"
    at_s: float
    client: str
    conversation: int
    turn: int
    continues: bool
    thinking: bool
    among: bool
    path: str | None
    outcome: str
    why: str = ""
    first_s: float | None = None
    total_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    as_cold: bool | None = None

    @property
    def is_answered(self) -> bool:
        """Whether it has a whole answer."""
        return self.outcome == ANSWERED

    @property
    def is_error(self) -> bool:
        """Whether an answer was expected."""
        return self.outcome not in (ANSWERED, LEFT)

    @property
    def tokens(self) -> int:
        """The conversation's length with the answer."""
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)


@attrs.frozen(kw_only=True)
class Look:
    """
    The server's state at one time. None means that a value could not be read.

    Attributes:
        violations: counted since its start.
        slab_bytes, block_bytes, disk_bytes: KV in slabs, in sealed blocks, and in files.
        slab_bytes_max, block_bytes_max, disk_bytes_max: their budgets.
        evicted, spilled, loaded, dropped: blocks, counted since its start.
        rss_bytes: the resident memory of its process.
        journal_bytes: the size of the journal's files.
        load: of the machine, over the last minute.
    """

    kind: ClassVar[str] = "look"
    at_s: float
    violations: int | None = None
    slab_bytes: int | None = None
    slab_bytes_max: int | None = None
    block_bytes: int | None = None
    block_bytes_max: int | None = None
    disk_bytes: int | None = None
    disk_bytes_max: int | None = None
    evicted: int | None = None
    spilled: int | None = None
    loaded: int | None = None
    dropped: int | None = None
    journal_rows: int | None = None
    journal_bytes: int | None = None
    rss_bytes: int | None = None
    load: float | None = None


@attrs.frozen(kw_only=True)
class WentOn:
    """From here on a new process held the session, with a restarted server."""

    kind: ClassVar[str] = "went_on"
    at_s: float


@attrs.frozen(kw_only=True)
class Ended:
    """
    The last line of a process that ended by itself.

    Attributes:
        why: it was over, a signal came, or the server stopped answering.
    """

    kind: ClassVar[str] = "ended"
    at_s: float
    why: str


Line: TypeAlias = Begun | Turn | Look | WentOn | Ended
_KINDS: Final[tuple[type[Line], ...]] = (Begun, Turn, Look, WentOn, Ended)


class NoRecord(Exception):
    """A file is not a record of a long session; the message says where and why."""


@attrs.frozen(kw_only=True)
class Session:
    """All that was recorded."""

    begun: Begun
    lines: tuple[Line, ...] = ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of both clients."""
        return tuple(line for line in self.lines if isinstance(line, Turn))

    @property
    def looks(self) -> tuple[Look, ...]:
        """The looks at the server."""
        return tuple(line for line in self.lines if isinstance(line, Look))

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return max((line.at_s for line in self.lines if not isinstance(line, Begun)), default=0.0)

    @property
    def resumed(self) -> int:
        """How many times a new process resumed it."""
        return sum(isinstance(line, WentOn) for line in self.lines)

    @property
    def end(self) -> Ended | None:
        """How the last process ended; None if it was killed."""
        last = self.lines[-1] if self.lines else None
        return last if isinstance(last, Ended) else None


class Record:
    """
    A record that is being written.

    Args:
        session: the contents of the file so far.
    """

    def __init__(self, path: Path, session: Session) -> None:
        self.path = path
        self._begun = session.begun
        self._lines = list(session.lines)

    @classmethod
    def new(cls, path: Path, begun: Begun) -> Record:
        """Create a file with its first line. It must not exist."""
        with path.open("x", encoding="utf-8") as file:
            file.write(_written(begun))
        return cls(path, Session(begun=begun))

    @classmethod
    def again(cls, path: Path) -> Record:
        """
        Resume a file. A last line that was cut off is removed.

        Raises:
            NoRecord: it is not a record.
        """
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        session = read(whole, str(path))
        if whole != data:
            with path.open("r+b") as file:
                file.truncate(len(whole))
        return cls(path, session)

    @property
    def session(self) -> Session:
        """All of it so far."""
        return Session(begun=self._begun, lines=tuple(self._lines))

    def add(self, line: Line) -> None:
        """Write one more line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_written(line))
        self._lines.append(line)


def read(data: bytes, name: str) -> Session:
    """
    The session in a record's complete lines.

    Raises:
        NoRecord: one of them is invalid.
    """
    found = list(_lines(data, name))
    if not found or not isinstance(found[0], Begun):
        raise NoRecord(
            f"{name} is not a record of a long session: its first line does not name one"
        )
    return Session(begun=found[0], lines=tuple(found[1:]))


def _lines(data: bytes, name: str) -> Iterator[Line]:
    for place, text in enumerate(data.splitlines(), start=1):
        try:
            value = json.loads(text)
            named = value.pop("kind")
            kind = next(kind for kind in _KINDS if kind.kind == named)
            if kind is Begun:
                value["plan"] = Plan(**value["plan"])
            yield kind(**value)
        except (ValueError, TypeError, KeyError, AttributeError, StopIteration) as error:
            raise NoRecord(
                f"{name} is not a record of a long session: line {place} is invalid"
            ) from error


def _written(line: Line) -> str:
    value: dict[str, Any] = {"kind": line.kind, **attrs.asdict(line)}
    return json.dumps(value) + "\n"
