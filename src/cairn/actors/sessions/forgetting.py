"""
Closes and forgets sessions while the server runs: what `ops forget` does, with the same evidence.

1. A session that answers is refused, not waited for. What it does in idle time is broken off.
2. While a session is forgotten, no request may name it: a new session of its name would be sealed
   with the key that is about to go. After that its name is free, and gets another key.
3. The steps are those of `ops forget`, in the same order: it is closed; its own blocks go, from
   memory and disk; the snapshot goes; ``session_forgotten`` is appended; its keys go. Until that
   row nothing is forgotten, and after it the keys go, at the next start if need be. So the same
   request finishes what a crash, a full disk or a stop cut short.
4. The journal is read on a thread and a connection of its own, once for the session and once for
   the others. What is appended meanwhile counts, up to ``session_forgotten`` itself.
5. Nothing with a text of the session is appended after that row: by then it is closed, its agent is
   held, and no answer of it is being checked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import attrs
import structlog
import trio

from cairn.actors.agents.stored_turns import stopping
from cairn.actors.errors import CannotForget, NotForgotten, SessionBusy, Stopping
from cairn.actors.requests.messages import ForgottenSession
from cairn.actors.threads.writer import WriterDied
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.forgetting import (
    OF_OTHERS,
    OF_THE_SERVER,
    Traces,
    agent_with,
    lost_with,
    needing,
)
from cairn.journal.rows.base import histories_of, state_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.sealing import SERVER, subject_of
from cairn.journal.rows.store import Store
from cairn.journal.state import SessionId
from cairn.journal.tenants import agent_of, session_id, session_name, session_tenant

if TYPE_CHECKING:
    from cairn.actors.models.load import Run
    from cairn.actors.models.swap import Models

log = structlog.get_logger("cairn")

FORGET = "forget"
"""The action of an operator who has a session of another tenant forgotten."""

_SERVERS = "server"
"""The stream of rows of no session."""

_ROWS_A_LOOK = 200
_REST_S = 0.02
"""How long the reading rests after so many rows while requests are in flight."""


class Forgetting:
    """Closes and forgets sessions, these one at a time. ``Run.leaving`` has those under way."""

    def __init__(self, run: Run, models: Models) -> None:
        self._run = run
        self._models = models
        self._one = trio.Lock()
        self._closed = False
        self._unfinished: set[str] = set()  # on record, and their keys are left

    def close(self) -> None:
        """End what is only reading. Called when the server stops."""
        self._closed = True

    def knows(self, session: str) -> bool:
        """Whether the journal, or its keys, have a session of this id."""
        run = self._run
        keys = run.keys.subjects() if run.keys is not None else set()
        return (
            SessionId(session) in run.sequencer.state.sessions  # perhaps not committed yet
            or run.summaries.session(session) is not None
            or session in keys - {SERVER}
        )

    async def close_session(self, session: str, reason: str) -> None:
        """
        Close a session. Does nothing if it is closed.

        Raises:
            RefusalError: it is answering, or that cannot be recorded now.
        """
        run, name = self._run, session_name(session)
        if session in run.leaving:
            raise SessionBusy(name, "is being forgotten")
        await self._close(session, reason)

    async def forget(
        self, session: str, *, with_agent: bool, by_operator: bool = False
    ) -> ForgottenSession:
        """
        Make the texts of a session unreadable, in all copies of the journal. Does nothing if it has
        no keys: it was forgotten, or has no texts.

        Args:
            with_agent: if it is an agent's session, delete the agent too.
            by_operator: whether an operator asks for it, of another tenant's session.

        Raises:
            RefusalError: it cannot be forgotten now, or not at all. The message says what to do.
        """
        async with self._one:
            run, name = self._run, session_name(session)
            if run.keys is None or run.reader is None:
                raise CannotForget("this server's journal is not sealed, so no text is forgotten")
            try:
                stored = await trio.to_thread.run_sync(run.keys.ids_of, session)
                if not stored:
                    return ForgottenSession(session=session)
                with self._held(session):
                    return await self._forget(session, stored, by_operator, with_agent)
            except WriterDied as died:
                raise stopping() from died
            except StoreError as error:
                raise NotForgotten(name, str(error).rstrip(".")) from error

    async def _forget(
        self, session: str, stored: tuple[str, ...], by_operator: bool, with_agent: bool
    ) -> ForgottenSession:
        run, later = self._run, _Later(session)
        assert run.keys is not None
        with run.writer.submitted_to(later.see):
            await run.writer.wait_all_committed()
            traces = await self._read(partial(_own_rows, session))
            if traces.forgotten.issuperset(stored):
                await self._remove_keys(session, {*traces.forgotten, *stored})
                return ForgottenSession(session=session, rows=traces.rows)
            self._require_possible(session, traces, with_agent=with_agent)
            traces.see_state(run.sequencer.state)
            if by_operator:
                run.sequencer.append(ev.OperatorActed(action=FORGET, detail=f"session {session}"))
            await self._close(session, "forgotten", with_agent=with_agent)
            later.add_own(traces)  # the last ones: it is closed
            await self._read(partial(other_rows, traces))
            traces.see_state(run.sequencer.state)
            later.add_others(traces)
            with run.activity.preparing():
                await self._remove_blocks(session, traces, later)
                later.add_own(traces)
                later.add_others(traces)
                # No await from here to the append, so that nothing comes between.
                forgotten = traces.event(run.sequencer.state, stored)
                with trio.CancelScope(shield=True):
                    receipt = run.sequencer.append(forgotten)
                    self._unfinished.add(session)
                    await run.writer.wait_committed(receipt)
                    self._models.forget_texts(session_tenant(session))
                    await self._remove_keys(session, {*forgotten.key_ids, *stored})
        elsewhere: Sequence[str] = ()
        if run.elsewhere is not None:
            elsewhere = await trio.to_thread.run_sync(run.elsewhere, forgotten.blocks)
        log.info("session forgotten", rows=forgotten.rows, blocks=len(forgotten.removed))
        return ForgottenSession(
            session=session,
            rows=forgotten.rows,
            blocks=len(forgotten.removed),
            same_text=forgotten.same_text,
            still_readable=traces.still_readable(run.sequencer.state, run.keys.left_in, elsewhere),
        )

    async def _remove_blocks(self, session: str, traces: Traces, later: _Later) -> None:
        """Remove the blocks that only this session has, its KV in files, and the snapshot."""
        run, name = self._run, session_name(session)
        server = await self._models.settled_server()
        if server is None:
            raise NotForgotten(name, "no model is loaded, so its blocks cannot be removed")
        if server.shadow is not None:
            await server.shadow.forget(session)

        def still_own(key: str) -> bool:
            later.add_others(traces)
            return not traces.is_shared(key)

        left = await server.memory.forget(traces.removed(run.sequencer.state), still_own)
        if left is None and run.snapshot is not None:
            left = await trio.to_thread.run_sync(run.snapshot.remove)
        if left is not None:
            raise NotForgotten(name, left)

    def _require_possible(self, session: str, traces: Traces, *, with_agent: bool) -> None:
        """
        Refuse what would break an agent, or would not make the texts unreadable.

        Raises:
            RefusalError: with what the caller can do.
        """
        run, name = self._run, session_name(session)
        self._require_idle(session)
        agents = run.agents.agents
        agent = agent_with(agents, session)
        if agent is not None and not with_agent:
            raise CannotForget(
                f"session {name!r} is that of agent {agent.name!r}; send agent=true to delete the "
                f"agent too{lost_with(agent)}"
            )
        if needed := needing(agents, session):
            names = ", ".join(one.name for one in needed)
            raise CannotForget(
                f"the history of these agents begins with turns of session {name!r}: {names}; "
                "delete them first"
            )
        if traces.plain:
            raise CannotForget(
                f"{traces.plain} rows of session {name!r} are not sealed, so that texts would stay "
                "readable; `ops journal prune` removes old rows"
            )

    def _require_idle(self, session: str) -> None:
        """
        Raises:
            SessionBusy: a request is in progress in it.
        """
        held = self._run.sequencer.state.sessions.get(SessionId(session))
        if held is not None and held.request is not None:
            raise SessionBusy(session_name(session), "is answering a request")

    async def _close(self, session: str, reason: str, *, with_agent: bool = False) -> None:
        """
        Close a session, and delete its agent.

        Raises:
            RefusalError: it is answering, or that cannot be recorded now.
        """
        run, name = self._run, session_name(session)
        self._require_idle(session)
        agent = agent_with(run.agents.agents, session)
        if agent is not None and with_agent:
            await run.agents.commit(ev.AgentDeleted(agent=agent.name, tenant=agent.tenant))
        with run.activity.preparing():
            await self._models.close_session(session, reason)
            if SessionId(session) in run.sequencer.state.sessions:
                self._require_idle(session)
                raise SessionBusy(name, "is at work, so it was not closed")
        try:
            await run.writer.wait_all_committed()
        except WriterDied as died:
            raise stopping() from died

    async def _remove_keys(self, session: str, key_ids: Collection[str]) -> None:
        """The last step. If it fails, the name of the session stays reserved."""
        keys = self._run.keys
        assert keys is not None
        self._unfinished.add(session)
        try:
            await trio.to_thread.run_sync(keys.remove, session, key_ids)
        except StoreError as error:
            raise NotForgotten(
                session_name(session),
                f"its keys cannot be removed ({str(error).rstrip('.')})",
                hint="send the same request again, or start the server again",
            ) from error
        self._unfinished.discard(session)

    @contextlib.contextmanager
    def _held(self, session: str) -> Iterator[None]:
        """
        Let no request name a session, and no agent of its name be used, while the context lasts;
        a session longer, if only its keys are left.
        """
        run, agent = self._run, agent_of(session)
        with contextlib.ExitStack() as held:
            if agent is not None:
                held.enter_context(run.agents.forgetting(agent, session_tenant(session)))
            run.leaving.add(session)
            try:
                yield
            finally:
                if session not in self._unfinished:
                    run.leaving.discard(session)

    async def _read(self, look: Callable[[Store, Callable[[], None]], Traces]) -> Traces:
        """Read the journal on a thread of its own."""
        run = self._run
        reader = run.reader
        assert reader is not None

        def read() -> Traces:
            store = reader()
            try:
                return look(store, self._rest)
            finally:
                store.close()

        return await trio.to_thread.run_sync(read)

    def _rest(self) -> None:
        """
        Called every so many rows by the thread that reads.

        Raises:
            Stopping: the server stops.
        """
        if self._closed:
            raise Stopping("the server stops, and nothing was forgotten yet")
        if not self._run.activity.is_idle:
            time.sleep(_REST_S)


@attrs.frozen
class TenantSessions:
    """The sessions that one reader may close and have forgotten: its tenant's own, or all."""

    _forgetting: Forgetting
    _tenant: str
    _of_all: bool

    def find(self, name: str) -> str | None:
        """The id of the session that the reader calls by a name; None if there is none."""
        names = [session_id(self._tenant, name), *([name] if self._of_all else [])]
        return next((one for one in names if self._forgetting.knows(one)), None)

    async def close(self, session: str) -> None:
        """
        Close a session that ``find`` gave. Does nothing if it is closed.

        Raises:
            RefusalError: it is answering, or that cannot be recorded now.
        """
        reason = "a request closed it" if self._is_own(session) else "the operator closed it"
        await self._forgetting.close_session(session, reason)

    async def forget(self, session: str, *, with_agent: bool) -> ForgottenSession:
        """
        Have a session that ``find`` gave forgotten. That of another tenant is journaled as an act
        of the operator, besides ``session_forgotten``.

        Args:
            with_agent: if it is an agent's session, delete the agent too.

        Raises:
            RefusalError: it cannot be forgotten now, or not at all. The message says what to do.
        """
        return await self._forgetting.forget(
            session, with_agent=with_agent, by_operator=not self._is_own(session)
        )

    def _is_own(self, session: str) -> bool:
        return session_tenant(session) == self._tenant


class _Later:
    """What was appended since, as far as it counts for a session."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._own: list[tuple[Row, ev.Recorded]] = []
        self._others: list[ev.Event] = []

    def see(self, row: Row, recorded: ev.Recorded) -> None:
        """Take in a row."""
        event = recorded.event
        is_private = row.private is not None and subject_of(event) == self._session
        if is_private or getattr(event, "session", None) == self._session:
            self._own.append((row, recorded))
        elif event.kind in OF_OTHERS:
            self._others.append(event)

    def add_own(self, traces: Traces) -> None:
        """Hand over the rows of the session itself."""
        for row, recorded in self._own:
            traces.see_own(row, recorded)
        self._own.clear()

    def add_others(self, traces: Traces) -> None:
        """Hand over the rows of other sessions."""
        for event in self._others:
            traces.see_other(event)
        self._others.clear()


def _own_rows(session: str, store: Store, rest: Callable[[], None]) -> Traces:
    """What the journal has of a session itself."""
    traces, base = Traces(session), store.base()
    if base is not None:
        traces.see_base(state_of(base))
    for row in map(store.opened, histories_of(base).rows):
        traces.see_own(row, decode(row))
    for stream in (f"session/{session}", _SERVERS):
        for row in _watched(store.read(stream=stream), rest):
            if stream != _SERVERS or row.private is not None or row.kind in OF_THE_SERVER:
                traces.see_own(row, decode(row))
    return traces


def other_rows(traces: Traces, store: Store, rest: Callable[[], None]) -> Traces:
    """Adds which other sessions have its blocks."""
    base = store.base()
    if base is not None:
        traces.see_state(state_of(base))
    kept = map(store.opened, histories_of(base).rows)
    for row in _watched(chain(kept, store.read()), rest):
        if row.kind in OF_OTHERS:
            traces.see_other(decode(row).event)
    return traces


def _watched(rows: Iterable[Row], rest: Callable[[], None]) -> Iterator[Row]:
    for place, row in enumerate(rows):
        if place % _ROWS_A_LOOK == 0:
            rest()
        yield row
