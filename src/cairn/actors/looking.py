"""
What people look at: sessions, their turns and events, the cache and the bugs.

Pages come from folds of the journal and from rows that these name. None changes anything, and none
reads all rows but a replay, which is bounded in time. A page of another tenant has no texts, unless
its reader asks for them: that is journaled first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import msgspec
import trio

from cairn.actors.agents.stored_turns import stopping
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.pages import PageShares
from cairn.actors.threads.writer import JournalWriter, WriterDied
from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.explanations import Explanation, explain
from cairn.journal.rows.codec import Row, decode
from cairn.journal.session_check import RowsCheck, SessionReplay, SessionReplaying
from cairn.journal.state import Fault, Session, SessionId, State
from cairn.journal.summaries import Removed, Summaries, Summary, TurnCounts
from cairn.journal.tenants import session_tenant

READ_TEXTS = "read_texts"
"""The action of an operator who reads the texts of another tenant."""

LIVE_MAX = 1000
"""The most events that wait for a reader of live ones; one that is slower is cut off."""

PAGE_MAX = 100
"""The most rows that are read at a time."""

CHECKED_ROWS = 5000
"""The most rows of a session that are verified: its last ones."""

REPLAY_S = 10.0
"""How long a page replays, in seconds. Half of that is left to the server's other threads."""

REPLAY_ROWS = 200
"""How many rows are replayed at a time; between them others have their turn."""

Where = Literal["slab", "memory", "disk", "nowhere"]


@attrs.frozen(kw_only=True)
class SessionFilter:
    """
    Which sessions to show.

    Attributes:
        text: in their first words, in any case of letters; or anywhere in their ids.
        state: a ``SessionState``, or ``closed``; None for any.
        model, client, of_tenant: None for any.
        with_bugs: only those that a violation names.
        before: only those whose last request came before this row.
    """

    text: str = ""
    state: str | None = None
    model: str | None = None
    client: str | None = None
    of_tenant: str | None = None
    with_bugs: bool = False
    before: int | None = None


@attrs.frozen(kw_only=True)
class SessionView:
    """
    A session as a page shows it.

    Attributes:
        state: a ``SessionState``, or ``closed``.
        turns: how many it has.
        went_on: the session in which its conversation went on last, in place of this one.
        where: where most of its KV is that could be used now.
        slab_tokens, memory_tokens, disk_tokens: how many of its tokens are in its slab, in sealed
            blocks in memory, and in files alone. A block that is in memory and in a file counts as
            in memory.
        context_tokens: the longest sequence of its model, if that is loaded.
        expires_us: None for never, and for a session that is closed.
    """

    summary: Summary
    state: str
    turns: int
    went_on: str | None
    where: Where
    slab_tokens: int
    memory_tokens: int
    disk_tokens: int
    context_tokens: int | None
    expires_us: int | None
    bug_id: str | None


@attrs.frozen(kw_only=True)
class TurnView:
    """
    A turn as a page shows it.

    Attributes:
        number: its place among the turns of its session, from 1.
        words: the first words of what was asked; None if the reader may not see texts.
        end: a finish reason, ``cancelled (STAGE)``, an invariant, or ``lost``; None while it goes
            on.
        explanation: None before the path is selected. Without texts if the reader may not see them.
        nearest: the session that it was compared with, if that is another one and still there.
        damaged: why its rows cannot be read, if so.
    """

    number: int
    counts: TurnCounts
    request: str | None = None
    words: str | None = None
    path: ev.Path | None = None
    reason: str | None = None
    diverged_part: str | None = None
    end: str | None = None
    explanation: Explanation | None = None
    nearest: str | None = None
    damaged: str | None = None


@attrs.frozen(kw_only=True)
class SharedTokens:
    """
    What one session has in the cache.

    Attributes:
        memory_bytes, disk_bytes: of its blocks.
        shared_bytes: of those in memory that another one of these sessions has, too.
    """

    session: str
    slab_bytes: int
    memory_bytes: int
    disk_bytes: int
    shared_bytes: int


@attrs.frozen(kw_only=True)
class CacheView:
    """
    The cache by session, of the sessions that were used last, and the last removals of blocks.

    Attributes:
        removed: None if the reader may not see what all tenants have a part in.
    """

    sessions: tuple[SharedTokens, ...]
    removed: tuple[Removed, ...] | None


@attrs.frozen(kw_only=True)
class BugView:
    """
    A violation on record.

    Attributes:
        session: the session that broke, or whose answer a shadow check found to differ; None if it
            was neither.
        expected, actual: None if the reader may not see texts.
    """

    bug_id: str
    fault: Fault
    session: str | None
    time_us: int | None
    expected: str | None
    actual: str | None


@attrs.frozen(kw_only=True)
class RowsView:
    """
    What a check of a session's rows found.

    Attributes:
        passed_over: how many earlier rows of the session were not checked.
    """

    check: RowsCheck
    passed_over: int


@attrs.frozen(kw_only=True)
class ReplayView:
    """
    What a replay found of a session. Texts of findings are left out unless the reader sees texts.

    Attributes:
        found: None if the replay did not come to the session's last row.
        read, last: how many rows were read, and that row.
        why: why it did not come there; empty if it did.
    """

    found: SessionReplay | None
    read: int
    last: int
    why: str


class NothingThere(LookupError):
    """There is no such session, or the reader may not know of it."""


@attrs.frozen(kw_only=True)
class Looking:
    """
    What one reader may look at.

    Attributes:
        tenant: of the reader.
        of_all: whether the reader may see the sessions of all tenants.
        texts: whether the reader asked for texts of other tenants.
    """

    tenant: str
    of_all: bool
    texts: bool = False
    _summaries: Summaries
    _sequencer: Sequencer
    _writer: JournalWriter
    _pages: PageShares

    # --- sessions ------------------------------------------------------------------------------

    def sessions(self, which: SessionFilter, most: int) -> tuple[list[SessionView], bool]:
        """
        Sessions, the most recently used first, and whether there are more.

        Args:
            most: how many to give at most.
        """
        found: list[SessionView] = []
        for summary in self._summaries.latest_first():
            if self._may_see(summary.tenant) and self._matches(summary, which):
                if len(found) == most:
                    return found, True
                found.append(self._view(summary))
        return found, False

    def session(self, name: str) -> SessionView:
        """
        One session.

        Raises:
            NothingThere: there is none.
        """
        return self._view(self._found(name))

    async def turns(self, name: str, before: int | None, most: int) -> tuple[list[TurnView], int]:
        """
        Turns of a session, the last one first, and how many there are.

        Args:
            before: only those with a smaller number; None for all.
            most: how many to give at most.

        Raises:
            NothingThere: there is no such session.
            RefusalError: the journal cannot be read now.
        """
        summary = self._found(name)
        await self.note_texts(summary)
        count = self._summaries.turn_count(name)
        last = count if before is None else max(0, min(count, before - 1))
        first = max(0, last - most)
        counts = self._summaries.turns(name, first, last)
        places = [at for one in counts for at in (one.received, one.selected, one.ended)]
        async with self._pages.one_of(self.tenant):
            rows = await self._rows(places)
            texts = self.sees_texts(summary)
            # Decoding and comparing texts take long, so others have their turn.
            shown = await trio.to_thread.run_sync(_turns, summary, first, counts, rows, texts)
        named = [attrs.evolve(one, nearest=self._other(summary, one.nearest)) for one in shown]
        return named[::-1], count

    # --- events --------------------------------------------------------------------------------

    async def events(
        self, name: str, *, after: int = 0, before: int | None = None, most: int
    ) -> tuple[list[dict[str, Any]], bool]:
        """
        Rows of a session as objects, in order, and whether there are more.

        Args:
            after: only those after this row.
            before: the last ones before this row, in the place of the first ones after one.

        Raises:
            NothingThere: there is no such session.
            RefusalError: the journal cannot be read now.
        """
        summary = self._found(name)
        if self.texts:
            await self.note_texts(summary)
        if before is None:
            places = self._summaries.rows_after(name, after, most + 1)
            more, places = len(places) > most, places[:most]
        else:
            places = self._summaries.rows_before(name, before, most + 1)
            more, places = len(places) > most, places[-most:]
        if not places:
            return [], more
        async with self._pages.one_of(self.tenant):
            rows = await self._rows(places)
        return [row_object(row, texts=self.texts) for row in rows if row is not None], more

    @contextlib.asynccontextmanager
    async def live(self, name: str, after: int) -> AsyncIterator[LiveRows]:
        """
        The rows of a session after one, and then those that are committed, while the context lasts.
        They end if the session is forgotten or pruned.

        Raises:
            NothingThere: there is no such session.
            RefusalError: the journal cannot be read now.
        """
        summary = self._found(name)
        if self.texts:
            await self.note_texts(summary)
        put, get = trio.open_memory_channel[int](LIVE_MAX)

        rows = LiveRows(self, name, after, get)

        def see(recorded: ev.Recorded) -> None:
            match recorded.event:
                case ev.SessionForgotten(of_session=session):
                    rows.gone = rows.gone or session == name
                case ev.JournalPruned():
                    rows.gone = rows.gone or self._summaries.session(name) is None
                case _:
                    pass
            if rows.gone:
                put.close()
            elif recorded.stream == f"session/{name}":
                try:
                    put.send_nowait(recorded.position)
                except trio.WouldBlock:
                    put.close()  # its reader is too slow, and may come again
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    pass  # it was closed, or its reader has left

        with self._writer.followed(), self._writer.observed_by(see), put, get:
            yield rows

    # --- checks --------------------------------------------------------------------------------

    async def verify(self, name: str) -> RowsView:
        """
        Check that a session's rows are as they were written, and chained to those before them.
        Reads them from the store.

        Raises:
            NothingThere: there is no such session.
            RefusalError: the journal cannot be read now.
        """
        self._found(name)
        count = self._summaries.row_count(name)
        places = self._summaries.rows_before(name, sys.maxsize, CHECKED_ROWS)
        check = RowsCheck(f"session/{name}")
        for start in range(0, len(places), PAGE_MAX):
            part = places[start : start + PAGE_MAX]
            wanted = sorted({at for place in part for at in (place - 1, place) if at})
            async with self._pages.one_of(self.tenant):
                found = dict(zip(wanted, await self._stored(wanted), strict=True))
                await trio.to_thread.run_sync(_feed, check, part, found)
        return RowsView(check=check, passed_over=count - len(places))

    async def replay(self, name: str) -> ReplayView:
        """
        Replay the journal up to a session's last row, as far as the time allows: each check and
        each path decision is made again. One replay of a tenant runs at a time.

        Raises:
            NothingThere: there is no such session.
            RefusalError: the journal cannot be read now.
        """
        self._found(name)
        rows = self._summaries.rows_before(name, sys.maxsize, 1)
        last, read, replaying = rows[-1], 0, SessionReplaying(name)
        if not self._pages.begin_replay(self.tenant):
            why = "another replay runs; try again in a moment"
            return ReplayView(found=None, read=0, last=last, why=why)
        try:
            until = trio.current_time() + REPLAY_S
            while read < last:
                if trio.current_time() >= until:
                    why = f"it was stopped after {REPLAY_S:.0f} seconds"
                    return ReplayView(found=None, read=read, last=last, why=why)
                places = range(read + 1, min(read + REPLAY_ROWS, last) + 1)
                found = [one for one in await self._stored(places) if one is not None]
                if len(found) < len(places):
                    why = "its first rows were pruned, and their base is read by the commands alone"
                    return ReplayView(found=None, read=0, last=last, why=why)
                began = trio.current_time()
                await trio.to_thread.run_sync(replaying.feed, found)
                await trio.sleep(trio.current_time() - began)
                read = places[-1]
        except (DamagedRow, UnknownEvent) as error:
            return ReplayView(found=None, read=read, last=last, why=str(error))
        finally:
            self._pages.end_replay(self.tenant)
        return ReplayView(found=replaying.result(), read=read, last=last, why="")

    # --- the cache and the bugs ----------------------------------------------------------------

    def cache(self, most: int) -> CacheView:
        """
        What is in the cache, by session.

        Args:
            most: of how many sessions at most: the ones that were used last.
        """
        state = self._sequencer.state
        sessions: list[Session] = []
        for summary in self._summaries.latest_first():
            if len(sessions) == most:
                break
            held = state.sessions.get(SessionId(summary.id))
            if held is not None and self._may_see(summary.tenant):
                sessions.append(held)
        holders: dict[str, int] = {}
        for held in sessions:
            for key in _keys_of(held):
                holders[key] = holders.get(key, 0) + 1
        return CacheView(
            sessions=tuple(_shared(state, held, holders) for held in sessions),
            removed=self._summaries.removed if self.of_all else None,
        )

    async def bugs(self, before: int | None, most: int) -> tuple[list[BugView], bool]:
        """
        Violations, the last one first, and whether there are more.

        Args:
            before: only those that were recorded before this row.
            most: how many to give at most.
        """
        faults = sorted(
            self._sequencer.state.faults.items(), key=lambda one: one[1].position, reverse=True
        )
        found: list[BugView] = []
        read: list[str] = []
        for bug_id, fault in faults:
            session = fault.event.session or fault.event.of_session
            tenant = self._tenant_of(session)
            if (before is not None and fault.position >= before) or not self._may_see(tenant):
                continue
            if len(found) == most:
                await self._note_texts(read)
                return found, True
            shown = tenant is None or tenant == self.tenant or self.texts
            if session is not None and tenant != self.tenant and shown and session not in read:
                read.append(session)
            found.append(
                BugView(
                    bug_id=bug_id,
                    fault=fault,
                    session=session,
                    time_us=self._summaries.fault_time_us(bug_id),
                    expected=fault.event.expected if shown else None,
                    actual=fault.event.actual if shown else None,
                )
            )
        await self._note_texts(read)
        return found, False

    # --- who may see what ----------------------------------------------------------------------

    def sees_texts(self, summary: Summary) -> bool:
        """Whether the reader is shown the texts of a session."""
        return summary.tenant == self.tenant or (self.of_all and self.texts)

    async def note_texts(self, *summaries: Summary) -> None:
        """
        Journal that texts of other tenants' sessions are read, before they are.

        Raises:
            RefusalError: that cannot be recorded now.
        """
        await self._note_texts(
            [one.id for one in summaries if one.tenant != self.tenant and self.sees_texts(one)]
        )

    async def _note_texts(self, read: Sequence[str]) -> None:
        """
        As ``note_texts``.

        Args:
            read: sessions of other tenants.
        """
        if not read:
            return
        if self._writer.stalled:
            await self._writer.wait_all_committed()
        acted = ev.OperatorActed(action=READ_TEXTS, detail=f"sessions {', '.join(read)}")
        try:
            await self._writer.wait_committed(self._sequencer.append(acted))
        except WriterDied as died:
            raise stopping() from died

    def _may_see(self, tenant: str | None) -> bool:
        return self.of_all or tenant == self.tenant

    def _tenant_of(self, session: str | None) -> str | None:
        """The tenant of a session, also of one whose rows were pruned; None for no session."""
        if session is None:
            return None
        found = self._summaries.session(session)
        return found.tenant if found is not None else session_tenant(session)

    def _found(self, name: str) -> Summary:
        found = self._summaries.session(name)
        if found is None or not self._may_see(found.tenant):
            raise NothingThere(name)
        return found

    # --- views ---------------------------------------------------------------------------------

    def _matches(self, summary: Summary, which: SessionFilter) -> bool:
        if which.before is not None and summary.used >= which.before:
            return False
        if which.of_tenant is not None and summary.tenant != which.of_tenant:
            return False
        if which.model is not None and summary.model != which.model:
            return False
        if which.client is not None and summary.client != which.client:
            return False
        if which.with_bugs and not summary.bugs:
            return False
        if which.state is not None and self._state_of(summary)[0] != which.state:
            return False
        if not which.text:
            return True
        words = summary.words if self.sees_texts(summary) else ""
        return which.text.casefold() in words.casefold() or which.text in summary.id

    def _state_of(self, summary: Summary) -> tuple[str, Session | None]:
        held = self._sequencer.state.sessions.get(SessionId(summary.id))
        if held is None or summary.closed is not None:
            return "closed", None
        return str(held.state), held

    def _view(self, summary: Summary) -> SessionView:
        name, held = self._state_of(summary)
        state = self._sequencer.state
        slab, memory, disk = _tokens_of(state, held) if held is not None else (0, 0, 0)
        most = max((slab, 3, "slab"), (memory, 2, "memory"), (disk, 1, "disk"))
        where: Any = most[2] if most[0] else "nowhere"
        model = state.model if held is not None else None
        same = model is not None and held is not None and model.fingerprint == held.fingerprint
        if not self.sees_texts(summary):
            summary = attrs.evolve(summary, words="")
        return SessionView(
            summary=summary,
            state=name,
            turns=self._summaries.turn_count(summary.id),
            went_on=self._other(summary, summary.went_on),
            where=where,
            slab_tokens=slab,
            memory_tokens=memory,
            disk_tokens=disk,
            context_tokens=model.context_tokens if model is not None and same else None,
            expires_us=held.expires_us if held is not None else None,
            bug_id=held.bug_id if held is not None else None,
        )

    def _other(self, summary: Summary, name: str | None) -> str | None:
        """Another session that a row of this one names, if it is still there to be looked at."""
        if name is None or name == summary.id:
            return None
        found = self._summaries.session(name)
        return name if found is not None and found.tenant == summary.tenant else None

    async def _stored(self, positions: Sequence[int]) -> list[Row | None]:
        """As ``_rows``, from the store alone; all positions are above 0."""
        try:
            return await self._writer.rows(positions, stored=True)
        except WriterDied as died:
            raise stopping() from died

    async def _rows(self, positions: Sequence[int]) -> list[Row | None]:
        """The rows at these positions; None for 0, and for one that was pruned."""
        there = [at for at in positions if at]
        if not there:
            return [None] * len(positions)
        try:
            found = iter(await self._writer.rows(there))
        except WriterDied as died:
            raise stopping() from died
        return [next(found) if at else None for at in positions]


class LiveRows:
    """
    The rows of a session, as they are committed.

    Attributes:
        gone: whether the session was forgotten, or its rows were pruned.
    """

    def __init__(
        self, looking: Looking, name: str, after: int, committed: trio.MemoryReceiveChannel[int]
    ) -> None:
        """
        Args:
            after: the row after which they begin.
            committed: the positions of rows that were committed since.
        """
        self._looking = looking
        self._name = name
        self._last = after
        self._committed = committed
        self._behind = True
        self.gone = False

    async def next(self) -> list[dict[str, Any]]:
        """
        The next rows, at least one. None are left if the session is ``gone``, or if the reader was
        too slow: it may begin again after the last one. A cancelled call loses nothing.
        """
        if not self._behind:
            try:
                while await self._committed.receive() <= self._last:
                    pass
            except trio.EndOfChannel:
                return []
        # All that is there, in one look-up: several rows come with each commit.
        try:
            found, self._behind = await self._looking.events(
                self._name, after=self._last, most=PAGE_MAX
            )
        except NothingThere:
            self.gone = True
            return []
        self._last = found[-1]["position"] if found else self._last
        return found or await self.next()


def _feed(check: RowsCheck, places: Sequence[int], rows: Mapping[int, Row | None]) -> None:
    for at in places:
        check.feed(at, rows[at], rows.get(at - 1))


def _turns(
    summary: Summary,
    first: int,
    counts: Sequence[TurnCounts],
    rows: Sequence[Row | None],
    texts: bool,
) -> list[TurnView]:
    """
    Turns of a session, in order. Pure, so it may run on any thread.

    Args:
        first: how many turns come before them.
        rows: of each turn the one of its request, of its path and of its end.
        texts: whether the reader sees them.
    """
    return [
        _turn(summary, first + at + 1, one, rows[3 * at : 3 * at + 3], texts)
        for at, one in enumerate(counts)
    ]


def _turn(
    summary: Summary, number: int, counts: TurnCounts, rows: Sequence[Row | None], texts: bool
) -> TurnView:
    """As ``_turns``, of one; ``nearest`` is as its row has it."""
    view = TurnView(number=number, counts=counts)
    try:
        received, selected, ended = (decode(row).event if row is not None else None for row in rows)
    except DamagedRow as error:
        return attrs.evolve(view, damaged=str(error))
    if isinstance(received, ev.RequestReceived):
        words = received.words if texts else None
        view = attrs.evolve(view, request=received.request, words=words)
    if isinstance(received, ev.RequestReceived) and isinstance(selected, ev.PathSelected):
        if not texts:
            selected = attrs.evolve(selected, diverged_text=None, diverged_from=None)
        view = attrs.evolve(
            view,
            path=selected.path,
            reason=selected.reason,
            nearest=selected.nearest,
            diverged_part=selected.diverged_part,
            explanation=explain(
                received,
                selected,
                block_tokens=summary.block_tokens,
                min_cache_tokens=summary.min_cache_tokens,
                grain=summary.grain,
                cause=counts.losses.cause,
            ),
        )
    return attrs.evolve(view, end=_end(ended))


def row_object(row: Row, *, texts: bool) -> dict[str, Any]:
    """A row as an object of JSON."""
    shown: dict[str, Any] = {
        "position": row.position,
        "seq": row.seq,
        "kind": row.kind,
        "version": row.version,
        "time_us": row.time_us,
        "event_id": row.event_id,
        "previous_hash": row.previous_hash,
        "hash": row.hash,
        "payload": msgspec.Raw(row.public),
    }
    if texts:
        shown["private"] = None if row.plain is None else msgspec.Raw(row.plain)
    return shown


def _end(event: ev.Event | None) -> str | None:
    match event:
        case ev.RequestFinished():
            return event.finish_reason
        case ev.RequestCancelled():
            return f"cancelled ({event.stage})"
        case ev.InvariantViolated():
            return event.invariant
        case None:
            return None
        case _:
            return "lost"


def _keys_of(held: Session) -> tuple[str, ...]:
    last = held.last
    keys = last.prompt_keys if last is not None else ()
    return held.slab_keys if len(held.slab_keys) > len(keys) else keys


def _tokens_of(state: State, held: Session) -> tuple[int, int, int]:
    """How many tokens of a session are in its slab, in memory, and on disk alone."""
    memory = disk = 0
    for key in _keys_of(held):
        block = state.blocks.get(key)
        if block is not None and block.usable:
            memory += block.tokens
        elif block is not None and block.loadable:
            disk += block.tokens
    return held.cached_tokens if held.slab is not None else 0, memory, disk


def _shared(state: State, held: Session, holders: Mapping[str, int]) -> SharedTokens:
    memory = disk = shared = 0
    for key in _keys_of(held):
        block = state.blocks.get(key)
        if block is None:
            continue
        if block.present:
            memory += block.bytes
            shared += block.bytes if holders[key] > 1 else 0
        if block.file_bytes is not None:
            disk += block.file_bytes
    return SharedTokens(
        session=held.id,
        slab_bytes=held.slab.bytes if held.slab is not None else 0,
        memory_bytes=memory,
        disk_bytes=disk,
        shared_bytes=shared,
    )
