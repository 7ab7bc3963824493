"""
What people are shown of sessions: a fold of its own, because no decision reads it.

It knows which rows each session has, so that a page of it is read by position: the journal has no
index by stream. Of a turn it has counts alone. Its names and texts are read from the rows that it
names, when a page is shown. Only the first words of a conversation are held, so that it can be
searched for.

Rules of this module:

1. An event costs the same however many sessions, turns and rows there are.
2. A session that did not change since the last snapshot is not copied again for the next one.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from cairn.journal import events as ev
from cairn.journal.losses import Losses

_ELEMENT = re.compile(r"\s*<([A-Za-z][\w-]{0,60})>.*?</\1>\s*", re.DOTALL)

WORDS_MAX = 80
"""The most characters of the first words."""

REMOVED_MAX = 200
"""How many of the last removals of blocks are held."""

COLUMNS = (
    *("received", "selected", "ended"),
    *("received_us", "first_us", "ended_us"),
    *("prompt", "from_slab", "from_blocks", "from_partial", "prewarmed"),
    *("computed", "generated"),
    *("evicted", "expired", "lost"),
)
"""
The counts of a turn: its rows (0: none yet), its times in microseconds since 1970, and tokens.
"""
_PLACE = {name: place for place, name in enumerate(COLUMNS)}


@attrs.frozen(kw_only=True)
class TurnCounts:
    """
    The counts of a turn.

    Attributes:
        received, selected, ended: the rows of the request, of its path, and of its end; 0 if there
            is none.
        received_us, first_us, ended_us: when it was received, when its first token was drawn, and
            when it ended; 0 if not yet.
        from_slab, from_blocks, from_partial: reused tokens: of the session's slab, of whole blocks
            of the pool, and of the first rows of one.
        prewarmed: how many of the reused tokens were prewarmed.
        computed: tokens of the prompt that were computed.
        generated: tokens of the answer.
        evicted, expired, lost: if blocks that it could have reused were gone: the last rows that
            took blocks away since then, see ``losses.Losses``; 0 if there is none.
    """

    received: int
    selected: int
    ended: int
    received_us: int
    first_us: int
    ended_us: int
    prompt: int
    from_slab: int
    from_blocks: int
    from_partial: int
    prewarmed: int
    computed: int
    generated: int
    evicted: int
    expired: int
    lost: int

    @property
    def reused(self) -> int:
        """All reused tokens."""
        return self.from_slab + self.from_blocks + self.from_partial

    @property
    def losses(self) -> Losses:
        """The rows that took blocks away."""
        return Losses(evicted=self.evicted, expired=self.expired, lost=self.lost)


@attrs.frozen(kw_only=True)
class Summary:
    """
    A session, as it was at some row.

    Attributes:
        protocol, model: of its last request; empty before the first.
        client: the program that sent that request, by its own word; None if it gave no name.
        block_tokens, min_cache_tokens, grain: of that model, see ``events.ModelLoaded``.
        words: the first words of the conversation; private.
        opened_us, used_us: when it was opened, and when its last request came.
        used: the row of its last request, or that in which it was opened.
        prompt, reused, generated: tokens of all turns.
        context: tokens of its last prompt and answer.
        went_on: the last new session for which this one was the nearest: in which its conversation
            went on.
        closed: why it was closed; None while it is open.
        forgotten: whether its texts were made unreadable.
        bugs: the violations that name it.
        rows: the positions of its rows, packed.
        turns: the counts of its turns, packed: ``COLUMNS`` for each.
    """

    id: str
    tenant: str
    group: str | None
    named: bool
    protocol: str = ""
    model: str = ""
    client: str | None = None
    block_tokens: int = 0
    min_cache_tokens: int = 0
    grain: int = 1
    words: str = ""
    opened_us: int
    used_us: int
    used: int
    prompt: int = 0
    reused: int = 0
    generated: int = 0
    context: int = 0
    went_on: str | None = None
    closed: str | None = None
    forgotten: bool = False
    bugs: tuple[str, ...] = ()
    rows: bytes = b""
    turns: bytes = b""


@attrs.frozen(kw_only=True)
class Removed:
    """A block that left memory (``block_evicted``) or the disk (``block_file_removed``)."""

    row: int
    time_us: int
    kind: str
    reason: str
    bytes: int


@attrs.frozen(kw_only=True)
class SummariesContents:
    """
    All that the fold holds at one row.

    Attributes:
        sessions: by their ids, the one that was used longest ago first.
        loaded: name, C, least prompt and grain of the loaded model.
        removed: the last removals of blocks.
        open: sessions with a request in progress.
        faults: bug id to when it was recorded.
        losses: the last rows that took blocks away.
    """

    sessions: dict[str, Summary] = attrs.field(factory=dict)
    loaded: tuple[str, int, int, int] = ("", 0, 0, 1)
    removed: tuple[Removed, ...] = ()
    open: frozenset[str] = frozenset()
    faults: dict[str, int] = attrs.field(factory=dict)
    losses: Losses = attrs.field(factory=Losses)


class _Session:
    """A session that may change."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.rows = array("q", summary.rows)
        self.turns = array("q", summary.turns)
        self._frozen: Summary | None = summary

    def add(self, row: int) -> None:
        self.rows.append(row)
        self._frozen = None

    def change(self, **changes: Any) -> None:
        self.summary = attrs.evolve(self.summary, **changes)
        self._frozen = None

    def begin_turn(self, recorded: ev.Recorded, prompt: int) -> None:
        self.turns.extend([0] * len(COLUMNS))
        self.put(received=recorded.position, received_us=recorded.time_us, prompt=prompt)

    def put(self, **counts: int) -> None:
        """Set counts of the last turn."""
        first = len(self.turns) - len(COLUMNS)
        for name, value in counts.items():
            self.turns[first + _PLACE[name]] = value

    def last(self, name: str) -> int:
        """A figure of the last turn."""
        return self.turns[len(self.turns) - len(COLUMNS) + _PLACE[name]]

    def received(self, before: int) -> int:
        """The row of the last turn's request, or of one so many turns before; 0 without one."""
        first = len(self.turns) - (1 + before) * len(COLUMNS)
        return self.turns[first + _PLACE["received"]] if first >= 0 else 0

    def frozen(self) -> Summary:
        if self._frozen is None:
            self._frozen = attrs.evolve(
                self.summary, rows=self.rows.tobytes(), turns=self.turns.tobytes()
            )
        return self._frozen


class Summaries:
    """The summaries of a journal's sessions: call ``see`` with each of its events."""

    def __init__(self, begins: SummariesContents = SummariesContents()) -> None:
        """
        Args:
            begins: what an earlier fold held, to go on from there.
        """
        self._sessions = {name: _Session(one) for name, one in begins.sessions.items()}
        self._loaded = begins.loaded
        self._removed = deque(begins.removed, maxlen=REMOVED_MAX)
        self._open = set(begins.open)
        self._faults = dict(begins.faults)
        self._losses = begins.losses

    def __len__(self) -> int:
        return len(self._sessions)

    def contents(self) -> SummariesContents:
        """A copy of all that it holds now."""
        return SummariesContents(
            sessions={name: one.frozen() for name, one in self._sessions.items()},
            loaded=self._loaded,
            removed=tuple(self._removed),
            open=frozenset(self._open),
            faults=dict(self._faults),
            losses=self._losses,
        )

    # --- looking -------------------------------------------------------------------------------

    def latest_first(self) -> Iterator[Summary]:
        """All sessions, the most recently used first, without their rows and turns."""
        return (one.summary for one in reversed(self._sessions.values()))

    def session(self, name: str) -> Summary | None:
        """A session, without its rows and turns; None if there is none."""
        found = self._sessions.get(name)
        return found.summary if found is not None else None

    def turn_count(self, name: str) -> int:
        """How many turns a session has."""
        return len(self._sessions[name].turns) // len(COLUMNS)

    def turns(self, name: str, first: int, last: int) -> tuple[TurnCounts, ...]:
        """The turns ``[first, last)`` of a session, counted from 0."""
        width, counts = len(COLUMNS), self._sessions[name].turns
        spans = range(first * width, min(last * width, len(counts)), width)
        return tuple(
            TurnCounts(**dict(zip(COLUMNS, counts[at : at + width], strict=True))) for at in spans
        )

    def turn_ended_at(self, name: str, position: int) -> TurnCounts | None:
        """The turn of a session that a row ended; None if there is none."""
        count = self.turn_count(name) if name in self._sessions else 0
        # The last one, but for those that began within the same commit.
        for index in range(count - 1, -1, -1):
            (turn,) = self.turns(name, index, index + 1)
            if turn.ended == position:
                return turn
            if turn.ended and turn.ended < position:
                break
        return None

    def row_count(self, name: str) -> int:
        """How many rows a session has."""
        return len(self._sessions[name].rows)

    def rows_after(self, name: str, position: int, most: int) -> Sequence[int]:
        """The positions of a session's first rows after a position, at most ``most``."""
        rows = self._sessions[name].rows
        first = bisect_right(rows, position)
        return rows[first : first + most]

    def rows_before(self, name: str, position: int, most: int) -> Sequence[int]:
        """The positions of a session's last rows before a position, at most ``most``."""
        rows = self._sessions[name].rows
        last = bisect_left(rows, position)
        return rows[max(0, last - most) : last]

    @property
    def removed(self) -> tuple[Removed, ...]:
        """The last removals of blocks, the last one first."""
        return tuple(reversed(self._removed))

    def fault_time_us(self, bug_id: str) -> int | None:
        """When a violation was recorded."""
        return self._faults.get(bug_id)

    # --- the fold ------------------------------------------------------------------------------

    def see(self, recorded: ev.Recorded) -> None:
        """Apply the next event."""
        event = recorded.event
        self._losses = self._losses.after(recorded.position, event)
        match event:
            case ev.SessionOpened():
                self._opened(recorded, event)
            case ev.RequestReceived(session=session) if session not in self._sessions:
                self._opened(recorded, event)  # its first rows were pruned
            case ev.ModelLoaded():
                least, grain = event.min_cache_tokens, event.grain
                self._loaded = event.name, event.block_tokens, least, grain
            case ev.ServerLost() | ev.ServerStopped():
                for name in sorted(self._open):
                    self._end(name, recorded)
            case ev.BlockEvicted() | ev.BlockFileRemoved():
                self._remove(recorded, event)
            case ev.JournalPruned(cut=cut):
                self._prune(cut)
            case ev.InvariantViolated():
                self._faults[event.bug_id] = recorded.time_us
            case ev.SessionForgotten(of_session=session) if session in self._sessions:
                self._sessions[session].change(words="", forgotten=True)
            case _:
                pass
        found = self._sessions.get(getattr(event, "session", None) or "")
        if found is not None:
            found.add(recorded.position)
            self._of_session(found, recorded)

    def _opened(self, recorded: ev.Recorded, event: ev.SessionOpened | ev.RequestReceived) -> None:
        if isinstance(event, ev.SessionOpened):
            named = event.named
        else:
            named = event.session_name is not None
        summary = Summary(
            id=event.session,
            tenant=event.tenant,
            group=event.group,
            named=named,
            opened_us=recorded.time_us,
            used_us=recorded.time_us,
            used=recorded.position,
        )
        # A name may be used again after its session was closed.
        self._sessions.pop(event.session, None)
        self._sessions[event.session] = _Session(summary)

    def _of_session(self, session: _Session, recorded: ev.Recorded) -> None:
        event, name = recorded.event, session.summary.id
        if isinstance(event, ev.RequestReceived):
            self._received(session, recorded, event)
            return
        if isinstance(event, ev.SessionClosed):
            session.change(closed=event.reason)
        if isinstance(event, ev.InvariantViolated):
            session.change(bugs=(*session.summary.bugs, event.bug_id))
        if name not in self._open:
            return
        match event:
            case ev.PathSelected():
                whole = event.reused_tokens - event.tokens_from_slab - event.tokens_from_partial
                session.put(
                    selected=recorded.position,
                    from_slab=event.tokens_from_slab,
                    from_blocks=whole,
                    from_partial=event.tokens_from_partial,
                    prewarmed=event.prewarmed_tokens,
                )
                session.change(reused=session.summary.reused + event.reused_tokens)
                nearest = self._sessions.get(event.nearest or "")
                if event.reason in ("evicted", "expired"):
                    since = nearest.received(nearest is session) if nearest is not None else 0
                    session.put(**attrs.asdict(self._losses.since(since)))
                if nearest is not None and nearest is not session:
                    nearest.change(went_on=name)
            case ev.CacheExtended():
                if event.step == "prefill":
                    computed = session.last("computed") + event.end - event.start
                    session.put(computed=computed)
                if event.sampled:
                    session.put(generated=session.last("generated") + len(event.sampled))
                    if not session.last("first_us"):
                        session.put(first_us=recorded.time_us)
            case ev.RequestFinished():
                session.put(generated=event.completion_tokens)
                session.change(context=event.prompt_tokens + event.answer_tokens)
                self._end(name, recorded)
            case ev.RequestCancelled() | ev.InvariantViolated() | ev.SessionQuarantined():
                self._end(name, recorded)
            case _:
                pass

    def _received(
        self, session: _Session, recorded: ev.Recorded, event: ev.RequestReceived
    ) -> None:
        session.begin_turn(recorded, event.prompt_tokens)
        was = session.summary
        session.change(
            protocol=event.protocol,
            client=event.client,
            model=self._loaded[0],
            block_tokens=self._loaded[1],
            min_cache_tokens=self._loaded[2],
            grain=self._loaded[3],
            words=was.words or event.words or "",
            used=recorded.position,
            used_us=recorded.time_us,
            prompt=was.prompt + event.prompt_tokens,
            context=event.prompt_tokens,
        )
        self._open.add(was.id)
        self._sessions[was.id] = self._sessions.pop(was.id)  # it is the last one now

    def _end(self, name: str, recorded: ev.Recorded) -> None:
        """The request that a session has in progress ended."""
        session = self._sessions[name]
        session.put(ended=recorded.position, ended_us=recorded.time_us)
        session.change(generated=session.summary.generated + session.last("generated"))
        self._open.discard(name)

    def _remove(self, recorded: ev.Recorded, event: ev.BlockEvicted | ev.BlockFileRemoved) -> None:
        found = Removed(
            row=recorded.position,
            time_us=recorded.time_us,
            kind=event.kind,
            reason=event.reason,
            bytes=event.bytes,
        )
        self._removed.append(found)

    def _prune(self, cut: int) -> None:
        """Forget the sessions that were removed, each as a whole, and what was removed then."""
        for name, session in list(self._sessions.items()):
            if session.rows[0] <= cut:
                del self._sessions[name]
                self._open.discard(name)
        left = [one for one in self._removed if one.row > cut]
        self._removed = deque(left, maxlen=REMOVED_MAX)


def first_words(text: str, most: int = WORDS_MAX) -> str:
    """
    The first words of a text, on one line, as the journal has them. What a client puts before the
    words of a person, in elements such as ``<system-reminder>``, is left out, unless it is all.

    Args:
        most: how many characters they may have.
    """
    begin = 0 if is_of_client(text) else _after_elements(text)
    words = " ".join(text[begin : begin + 8 * most].split())
    return words if len(words) <= most else f"{words[: most - 1]}…"


def is_of_client(text: str) -> bool:
    """Whether a message of a user has nothing but elements that a client wrote."""
    return 0 < len(text) == _after_elements(text)


def _after_elements(text: str) -> int:
    """Where the elements end with which a text begins."""
    end = 0
    while (found := _ELEMENT.match(text, end)) is not None:
        end = found.end()
    return end
