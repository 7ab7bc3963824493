"""
Agents: conversations whose history the server stores, each under a name that its tenant chose.

Which agents there are, and the rows of their turns, is a fold of the journal
(``journal/agents.py``); their texts are read from these rows on demand and cached as those of all
stored turns. This module adds only which agents are busy: an agent does one thing at a time, and
another request is refused meanwhile. So a turn is always built on the one before it, and two
requests at the same time lose none.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import attrs
import msgspec
import structlog
import trio

from cairn.actors.agents.messages import AgentFacts, AgentHistory, NewAgent
from cairn.actors.agents.stored_turns import StoredTurns, stopping
from cairn.actors.clock import wall_clock_us
from cairn.actors.errors import (
    AgentBusy,
    AgentExists,
    AgentReleased,
    CannotHandOver,
    JournalUnread,
    NotReleasedYet,
    TooManyAgents,
)
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.messages import Generate, StoredTurn
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter, WriterDied
from cairn.journal import events as ev
from cairn.journal.agents import Agent, Agents, session_of
from cairn.journal.errors import DamagedRow, StoreError
from cairn.journal.handover import NoSuchAgent, NotReleased
from cairn.journal.rows.codec import decode
from cairn.journal.state import release_name
from cairn.journal.tenants import agent_of, agent_session, session_id

if TYPE_CHECKING:
    from cairn.actors.agents.handover import FleetJournals

T = TypeVar("T")

log = structlog.get_logger("cairn")

AGENTS_MAX = 1000
"""How many agents a tenant may have, with those that were released, whose histories are here."""

_REST_S = 0.02

_Key = tuple[str, str]  # (tenant, name)


@attrs.frozen
class _Created:
    """The key of an agent's creation in the text cache."""

    row: int


# What an agent is doing, as the end of a sentence.
_CREATED = "being created"
_RELEASED = "being handed over"
_DELETED = "being deleted"
_ANSWERING = "answering another request"


@attrs.define(kw_only=True, eq=False)
class StoredAgents:
    """
    The agents of a run of the server, whatever models it loads. ``agents`` must see each committed
    event, and so must ``see``.

    Attributes:
        fleet: the journals of the other nodes; None if the server is alone.
    """

    agents: Agents
    stored_turns: StoredTurns
    writer: JournalWriter
    sequencer: Sequencer
    fleet: FleetJournals | None = None
    _busy: dict[_Key, str] = attrs.field(factory=dict, init=False)
    _requests: dict[str, _Key] = attrs.field(factory=dict, init=False)
    # Each reading of another journal takes a connection to the database and a thread.
    _readers: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(1), init=False
    )

    # --- which agents are busy --------------------------------------------------------------------

    def begin(self, command: Generate, context: RequestContext) -> None:
        """
        Mark the agent of a request as busy, if the request has one. It may be marked already for
        this request, which waited for its model.

        Raises:
            AgentBusy: the agent is busy with something else, or its history is no longer the one
                from which the request continues.
        """
        keep = command.keep
        if keep is None or keep.agent is None:
            return
        key = context.tenant, keep.agent
        if self._requests.get(context.request) == key:
            return
        agent = self.agents.find(keep.agent, context.tenant)
        is_another = agent is not None and keep.created not in (None, agent.created)
        if agent is None or is_another or agent.head != keep.previous:
            raise AgentBusy(keep.agent, "has answered another request meanwhile")
        self._mark(key, _ANSWERING)
        self._requests[context.request] = key

    def leave(self, request: str) -> None:
        """A request has ended without a turn, or its turn is committed: free its agent."""
        key = self._requests.pop(request, None)
        if key is not None:
            del self._busy[key]

    @contextlib.contextmanager
    def ending(self, agent: Agent, what: str) -> Iterator[None]:
        """
        Mark an agent as busy with its end while the context lasts.

        Args:
            what: it is doing, as the end of a sentence.

        Raises:
            AgentBusy: the agent is busy.
        """
        key = agent.tenant, agent.name
        self._mark(key, what)
        try:
            yield
        finally:
            del self._busy[key]

    @contextlib.contextmanager
    def forgetting(self, name: str, tenant: str) -> Iterator[None]:
        """
        Let no agent of a name be used, created or forked while the context lasts.

        Raises:
            AgentBusy: there is one that is busy.
        """
        key = tenant, name
        self._mark(key, _DELETED)
        try:
            yield
        finally:
            del self._busy[key]

    @contextlib.contextmanager
    def creating(self, name: str, tenant: str) -> Iterator[None]:
        """
        Reserve the name of a new agent while the context lasts.

        Raises:
            AgentExists: the tenant has an agent of this name.
            AgentReleased: the tenant had one, which another node has now.
            TooManyAgents: the tenant has as many as it may have.
        """
        key = tenant, name
        self.require_here(name, tenant)
        if self.agents.find(name, tenant) is not None:
            raise AgentExists(name)
        if len(self.agents.of(tenant, released=True)) >= AGENTS_MAX:
            raise TooManyAgents(AGENTS_MAX)
        if key in self._busy:
            raise AgentExists(name)
        self._busy[key] = _CREATED
        try:
            yield
        finally:
            del self._busy[key]

    def require_here(self, name: str, tenant: str) -> None:
        """
        Raises:
            AgentReleased: an agent of this name was released, and that is committed.
        """
        to = self.sequencer.state.released.get(agent_session(tenant, name))
        if to is not None and self.agents.find(name, tenant) is None:
            raise AgentReleased(name, to)

    def exists(self, agent: Agent) -> bool:
        """Whether an agent still exists, and is not being deleted."""
        return self._is_current(agent) and self._busy.get((agent.tenant, agent.name)) != _DELETED

    def _is_current(self, agent: Agent) -> bool:
        """Whether its name is still that of the same agent."""
        now = self.agents.find(agent.name, agent.tenant)
        return now is not None and now.created == agent.created

    def _mark(self, key: _Key, what: str) -> None:
        busy = self._busy.get(key)
        if busy is not None:
            raise AgentBusy(key[1], f"is {busy}")
        self._busy[key] = what

    # --- what is stored ---------------------------------------------------------------------------

    def see(self, recorded: ev.Recorded) -> None:
        """
        Take in the next committed event, after ``agents`` has. An agent is free only once its turn
        is committed, because the next request is built on it. Texts that were deleted leave the
        cache.
        """
        match recorded.event:
            case ev.RequestFinished(request=request):
                self.leave(request)
            case ev.AgentDeleted():
                self.stored_turns.drop_deleted()
                held = {_Created(agent.created) for agent in self.agents.of(None)}
                self.stored_turns.text_cache.forget(
                    lambda key, _: isinstance(key, _Created) and key not in held
                )
            case ev.TurnForgotten() | ev.JournalPruned() | ev.SessionForgotten():
                self.stored_turns.drop_deleted()
            case _:
                pass

    async def settle(self) -> None:
        """Wait until all that was appended is committed, so that the fold has it."""
        try:
            await self.writer.wait_all_committed()
        except WriterDied as died:
            raise stopping() from died

    async def commit(self, *events: ev.Event) -> None:
        """Commit events together, so that the fold has them."""
        if self.writer.stalled:
            await self.settle()
        try:
            await self.writer.wait_committed(self.sequencer.append(*events))
        except WriterDied as died:
            raise stopping() from died

    async def read_others(self, what: str, read: Callable[..., T], *args: object) -> T:
        """
        Read journals of other nodes in a thread, one at a time. Leaving early gives the reading up.

        Args:
            what: is read, as the beginning of a sentence.

        Raises:
            JournalUnread: it cannot be read. Why may name addresses, so only the log has it.
        """
        try:
            return await trio.to_thread.run_sync(
                read, *args, abandon_on_cancel=True, limiter=self._readers
            )
        except StoreError as error:
            log.warning("journals of other nodes cannot be read", what=what, fact=str(error))
            raise JournalUnread(
                f"{what} cannot be read now, or is not sound; the log of this server says why"
            ) from error

    def rest(self) -> None:
        """Called every so many rows by a thread that reads, so that it slows no request down."""
        if self.sequencer.state.requests:
            time.sleep(_REST_S)

    async def created(self, agent: Agent) -> NewAgent | None:
        """An agent as it was created; None if its text was pruned."""
        key = _Created(agent.created)
        new: NewAgent | None = self.stored_turns.text_cache.find(key)
        if new is None:
            new = await self._read_created(agent)
        if new is not None and self._is_current(agent):
            self.stored_turns.text_cache.use([(key, new)])
        return new

    async def _read_created(self, agent: Agent) -> NewAgent | None:
        try:
            (row,) = await self.writer.rows([agent.created])
        except WriterDied as died:
            raise stopping() from died
        if row is None:
            return None
        try:
            recorded = decode(row)
            if recorded.unread is not None:
                return None
            event = recorded.event
            assert isinstance(event, ev.AgentCreated | ev.SessionAdopted)
            tools = msgspec.json.decode(event.tools, type=tuple[dict[str, object], ...])
        except (DamagedRow, msgspec.MsgspecError) as error:
            log.warning("an agent cannot be read", row=agent.created, fact=str(error))
            return None
        return NewAgent(
            name=agent.name,
            model=event.model,
            system=event.system,
            tools=tools,
            max_context=event.max_context,
            persist=agent.persist,
        )


@attrs.frozen
class TenantAgents:
    """The agents of one tenant, as ``AgentService`` says."""

    _stored: StoredAgents
    _tenant: str
    # The context of the model that answers a request for this name, in tokens.
    _context_of: Callable[[str], int]
    # Closes a session that has nothing to do; takes the reason.
    _close_session: Callable[[str, str], Awaitable[None]]

    def all(self) -> tuple[AgentFacts, ...]:
        """See ``AgentService.all``."""
        return tuple(map(self._facts, self._stored.agents.of(self._tenant)))

    def require_here(self, name: str) -> None:
        """See ``AgentService.require_here``."""
        self._stored.require_here(name, self._tenant)

    def one(self, name: str) -> AgentFacts | None:
        """See ``AgentService.one``."""
        found = self._find(name)
        return self._facts(found) if found is not None else None

    async def created(self, name: str) -> NewAgent | None:
        """See ``AgentService.created``. None also if its text was pruned."""
        agent = self._find(name)
        return await self._stored.created(agent) if agent is not None else None

    async def history(self, name: str) -> AgentHistory | None:
        """See ``AgentService.history``. None also if a text of it was pruned."""
        stored, agent = self._stored, self._find(name)
        if agent is None:
            return None
        places = stored.agents.history(agent)
        new = await stored.created(agent)
        turns = await stored.stored_turns.read(places)
        if new is None or turns is None or len(turns) != agent.turns:
            return None
        return AgentHistory(agent=new, created=agent.created, head=agent.head, turns=turns)

    async def last_turns(
        self, name: str, before: int | None, most: int
    ) -> tuple[tuple[int, StoredTurn], ...] | None:
        """See ``AgentService.last_turns``. None also if a text of one was pruned."""
        agent = self._find(name)
        if agent is None:
            return None
        numbered = list(enumerate(self._stored.agents.history(agent), 1))
        chosen = numbered[: None if before is None else max(0, before - 1)][-most:]
        turns = await self._stored.stored_turns.read([place for _, place in chosen])
        if turns is None:
            return None
        return tuple((number, turn) for (number, _), turn in zip(chosen, turns, strict=True))

    async def create(self, new: NewAgent) -> AgentFacts:
        """See ``AgentService.create``."""
        made = await self._create(new)
        assert made is not None
        return made

    async def fork(self, name: str, new_name: str, turn: int | None) -> AgentFacts | None:
        """See ``AgentService.fork``."""
        stored, before = self._stored, self._find(name)
        new = await stored.created(before) if before is not None else None
        # Meanwhile the agent may have answered another request, which does no harm, or have been
        # deleted, which does.
        agent = self._find(name)
        if before is None or agent is None or new is None or not stored.exists(before):
            return None
        head = stored.agents.head_after(agent, agent.turns if turn is None else turn)
        return await self._create(attrs.evolve(new, name=new_name), origin=agent, head=head)

    async def delete(self, name: str) -> bool:
        """See ``AgentService.delete``."""
        agent = self._stored.agents.find(name, self._tenant, released=True)
        if agent is None:
            return False
        with self._stored.ending(agent, _DELETED):
            await self._stored.commit(ev.AgentDeleted(agent=name, tenant=self._tenant))
            await self._close_session(agent.session, "its agent was deleted")
        return True

    async def release(self, name: str, to: str, node: str) -> bool:
        """See ``AgentService.release``."""
        stored, agent = self._stored, self._find(name)
        if agent is None:
            stored.require_here(name, self._tenant)
            return False
        fleet = self._fleet()
        await self._require_other(fleet, node)
        if not agent.persist:
            raise CannotHandOver(f"agent {name!r} ends with its server (persist: false)")
        agent = self._find(name)  # a thread was waited for
        if agent is None:
            return False
        with stored.ending(agent, _RELEASED):
            await stored.commit(
                ev.SessionReleased(agent=name, tenant=self._tenant, to=to, to_node=node)
            )
            await self._close_session(agent.session, "its agent was handed over")
        return True

    async def adopt(self, name: str, of: str, node: str) -> AgentFacts | None:
        """See ``AgentService.adopt``."""
        stored, tenant, fleet = self._stored, self._tenant, self._fleet()
        await self._require_other(fleet, node)
        if (known := self._find(name)) is not None and known.adopted_from == of:
            return self._facts(known)
        with stored.creating(name, tenant):
            try:
                found = await stored.read_others(
                    f"the journal of {node}", fleet.released, node, of, tenant, stored.rest
                )
            except NoSuchAgent:
                return None
            except NotReleased as error:
                raise NotReleasedYet(of, node, tenant) from error
            if found.event.to_node != fleet.node:
                raise AgentReleased(of, found.event.to)
            session = session_id(tenant, session_of(name))
            await self._close_session(session, "its agent is adopted")
            adopted, *turns = found.adoption(name, lambda: str(uuid.uuid4()))
            assert isinstance(adopted, ev.SessionAdopted)
            state = stored.sequencer.state
            before = state.adopted.get(release_name(adopted))
            if before is None:
                await stored.commit(adopted, *turns)
            elif before not in state.agents:
                raise CannotHandOver(f"agent {of!r} was adopted before, and deleted since")
            elif before != session:
                raise CannotHandOver(
                    f"agent {of!r} was adopted before: it is {agent_of(before)!r} here"
                )
            else:  # by a request that was cancelled while the journal was stalled
                await stored.settle()
        return self.one(name)

    def _fleet(self) -> FleetJournals:
        if self._stored.fleet is None:
            raise CannotHandOver("this server is in no fleet, so it has no node to hand over to")
        return self._stored.fleet

    async def _require_other(self, fleet: FleetJournals, node: str) -> None:
        """
        Raises:
            CannotHandOver: there is no other node of this name.
            JournalUnread: that cannot be known now.
        """
        other = node != fleet.node
        if not other or not await self._stored.read_others("the database", fleet.has, node):
            raise CannotHandOver(f"there is no other node {node!r} in this fleet")

    async def _create(
        self, new: NewAgent, *, origin: Agent | None = None, head: str | None = None
    ) -> AgentFacts | None:
        """Record a new agent; None if the one that it is forked from was deleted meanwhile."""
        stored, tenant = self._stored, self._tenant
        with stored.creating(new.name, tenant):
            # An earlier agent of this name may have left its session: one that did not persist, or
            # that was deleted while its session was quarantined.
            session = session_id(tenant, session_of(new.name))
            await self._close_session(session, "its agent is created again")
            # That waits for a model that is being loaded. If the original was deleted meanwhile,
            # its turns are too, and the fork would have no history.
            if origin is not None and not stored.exists(origin):
                return None
            await stored.commit(
                ev.AgentCreated(
                    agent=new.name,
                    tenant=tenant,
                    model=new.model,
                    max_context=new.max_context,
                    persist=new.persist,
                    created_s=wall_clock_us() // 1_000_000,
                    forked_from=origin.name if origin is not None else None,
                    head=head,
                    system=new.system,
                    tools=msgspec.json.encode(new.tools).decode(),
                )
            )
        return self.one(new.name)

    def _facts(self, agent: Agent) -> AgentFacts:
        agents = self._stored.agents
        tokens = agents.tokens(agent)
        return AgentFacts(
            name=agent.name,
            model=agent.model,
            max_context=agent.max_context,
            persist=agent.persist,
            status=agents.status(agent, self._stored.sequencer.state),
            turns=agent.turns,
            context_tokens=tokens,
            context_left=max(0, agent.context(self._context_of(agent.model)) - tokens),
            finish_reason=agents.finish_reason(agent),
            created_s=agent.created_s,
            used_us=agent.used_us,
            forked_from=agent.forked_from,
            adopted_from=agent.adopted_from,
        )

    def _find(self, name: str) -> Agent | None:
        return self._stored.agents.find(name, self._tenant)
