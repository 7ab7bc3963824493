"""
Serves one model or several, one in memory at a time. A request for a model that is not loaded
waits until the server has swapped it in.

Rules of this module:

1. Each loaded model has its own ``ModelServer``, from when it is loaded until it leaves. No request
   is in flight when it leaves: those that came before have their answers.
2. Who has to wait waits in one line (``queue.py``), in the order of coming. Once somebody
   waits for another model, who comes for the loaded one waits too. When a model is loaded, all who
   wait for it then go in together. So nobody is passed over for ever, and a model is not loaded for
   each of them anew.
3. A model that nobody waits for any more is not loaded: as long as answers of the one before are
   under way, a client that goes away costs nothing.
4. Nothing is loaded for a count of tokens but a tokenizer (``token_count.py``).
5. A model that cannot be loaded ends the requests that wait for it, goes on record, and is not
   tried again for a while. The one before is loaded again.
6. A model that is being loaded when the server stops is not waited for: MLX cannot be interrupted,
   and nobody wants it any more.

Block files stay where they are when a model leaves, and so does all that the journal tells. What
was in memory goes: before that it is written, as when the server stops.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import attrs
import structlog
import trio

from cairn.actors.clock import new_id, wall_clock_us
from cairn.actors.errors import JournalFull, RefusalError, Stopping
from cairn.actors.models.choice import Choice, first_facts, not_loaded
from cairn.actors.models.load import Run, load, unload
from cairn.actors.models.queue import (
    ModelQueue,
    Waiter,
    WaitingReplies,
    leave_all,
    take,
)
from cairn.actors.models.token_count import TokenCounter
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.messages import (
    Generate,
    ListedModel,
    Reply,
    ServerFacts,
    Statistics,
)
from cairn.actors.requests.ticket import Ticket
from cairn.actors.settings import Settings, no_progress
from cairn.actors.statistics import statistics_of
from cairn.actors.threads.engine import EngineGone
from cairn.actors.threads.writer import WriterDied
from cairn.engine.model.models_file import entry_fault
from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.state import SessionId

if TYPE_CHECKING:
    from cairn.actors.models.model_server import ModelServer
    from cairn.engine.contract import StartedEngine

T = TypeVar("T")

log = structlog.get_logger("cairn")

PAUSE_S = 30.0
"""How long a model that could not be loaded is not tried again."""


class Models:
    """The models of a server, and which of them is in memory."""

    def __init__(
        self,
        run: Run,
        choices: Iterable[Choice],
        first: Choice,
        server: ModelServer,
        model_server: Callable[[Run, Settings, StartedEngine], Awaitable[ModelServer]],
    ) -> None:
        """
        Args:
            first: the one that is loaded; it answers who names none of them.
            server: over it.
            model_server: makes the server over a model that was loaded.
        """
        self._stopping_progress = run.progress
        self._run = attrs.evolve(run, progress=no_progress)
        self._activity = run.activity
        self._admission = run.admission
        self._model_server = model_server
        self._choices = {choice.name: choice for choice in choices}
        self._names = {
            name: choice
            for choice in self._choices.values()
            for name in (choice.name, *choice.entry.aliases)
        }
        self._default = first
        self._limits = first.settings.limits
        self._started_s = wall_clock_us() // 1_000_000
        self._facts = {
            name: first_facts(choice, self._started_s) for name, choice in self._choices.items()
        }
        self._loaded: Choice | None = first
        self._server: ModelServer | None = server
        self._facts[first.name] = self._told_by(server)
        self._open = False  # whether requests may go in
        self._loading: Choice | None = None
        self._at_load = False  # whether the engine's thread is at nothing but to load a model
        self._queue = ModelQueue(self._limits, self._activity.changed)
        self._token_counter = TokenCounter(run.engine, self._limits)
        self._pauses: dict[str, float] = {}
        self._stopping = False
        self._ended = trio.Event()
        self._took_over()
        self._gone_characters = (0, 0)  # what encoders counted whose models have left

    @property
    def facts(self) -> ServerFacts:
        """Of the model that is loaded; of the first one, while none is."""
        return self._facts[(self._loaded or self._default).name]

    def facts_of(self, requested_model: str) -> ServerFacts:
        """
        Of the model that would answer who asks for this one. What only a loaded model tells is told
        of one that was loaded.
        """
        return self._facts[self._choice_of(requested_model).name]

    @property
    def listed(self) -> tuple[ListedModel, ...]:
        """All models that may be asked for."""
        return tuple(
            ListedModel(
                aliases=choice.entry.aliases,
                state=self._state_of(choice),
                waiting=len(self._queue.all_for(choice)),
                facts=self._facts[name],
            )
            for name, choice in self._choices.items()
        )

    @property
    def loaded(self) -> ModelServer:
        """See ``Server.loaded``."""
        if self._server is None:
            raise LookupError("no model is loaded")
        return self._server

    def statistics(self) -> Statistics:
        """The server at this moment."""
        run, server = self._run, self._server
        if server is not None:
            now = server.statistics()
        else:
            held = run.agents.kept.text_cache.bytes
            now = statistics_of(run.sequencer, run.writer, run.engine, text_cache_bytes=held)
        encoded, cached = self._gone_characters
        return attrs.evolve(
            now,
            queued=now.queued + len(self._queue),
            encoded_characters=now.encoded_characters + encoded,
            cached_characters=now.cached_characters + cached,
        )

    async def count(self, command: Generate, tenant: str) -> int:
        """
        The tokens of a prompt, by the tokenizer of the model that it asks for. As
        ``ModelServer.count``; no model is loaded for it.
        """
        choice = self._choice_of(command.requested_model)
        server = self._server_of(choice)
        if server is None and self._stopping and self._loading is None and choice is self._loaded:
            server = self._server  # which drains, and counts on until the end
        if server is not None:
            return await server.count(command, tenant)
        if self._stopping:
            raise Stopping("the server is stopping; try again in a moment")
        return await self._token_counter.count(choice, command, tenant)

    def _choice_of(self, requested_model: str) -> Choice:
        return self._names.get(requested_model, self._default)

    def _state_of(self, choice: Choice) -> Literal["loaded", "loading", "not_loaded"]:
        if choice is self._loading:
            return "loading"
        return "loaded" if choice is self._loaded else "not_loaded"

    def _server_of(self, choice: Choice) -> ModelServer | None:
        """The server that takes a request for a model at once; None where it has to wait."""
        at_once = self._open and choice is self._loaded and not self._queue
        return self._server if at_once else None

    @contextlib.asynccontextmanager
    async def generate(self, command: Generate, tenant: str) -> AsyncIterator[AsyncIterator[Reply]]:
        """
        Ask for an answer, of the model that the command asks for. As ``ModelServer.generate``, but
        a request that waits for its model yields ``Waiting``, and is refused, in the iteration.
        """
        choice = self._choice_of(command.requested_model)
        server = self._server_of(choice)
        if server is not None:
            async with server.generate(command, tenant) as replies:
                yield replies
            return
        context = RequestContext(new_id(), tenant, self._limits)
        waiter = None
        try:
            await self._admission.check_bugs()
            # An agent that waits for its model is at work: who comes second hears it now, and not
            # when it has waited too.
            self._run.agents.begin(command, context)
            try:
                waiter = self._enqueue(
                    choice,
                    partial(self._take, command, context),
                    leave_all,
                    partial(self._reject, context),
                    command.choices,
                )
            except RefusalError:
                self._run.agents.leave(context.request)
                raise
            yield WaitingReplies(waiter, context, self._queue.timed_out)
        except RefusalError as refusal:
            context.name(refusal, command)
            raise
        finally:
            if waiter is not None:
                self._queue.leave(waiter)

    async def _take(
        self, command: Generate, context: RequestContext, server: ModelServer
    ) -> tuple[Sequence[Ticket], AsyncIterator[Reply]]:
        """Take a request that has waited. Where it is not taken, its agent is free."""
        try:
            return await take(command, context, server)
        except BaseException:
            self._run.agents.leave(context.request)
            raise

    def _told_by(self, server: ModelServer) -> ServerFacts:
        """What the server over a model tells, which is younger than this one."""
        return attrs.evolve(server.facts, started_s=self._started_s)

    # --- the line ---------------------------------------------------------------------------------

    def _enqueue(
        self,
        choice: Choice,
        work: Callable[[ModelServer], Awaitable[T]],
        undo: Callable[[T], None],
        rejected: Callable[[str], None],
        places: int,
    ) -> Waiter[T]:
        """
        Wait for a model.

        Raises:
            RefusalError: that cannot be now.
        """
        self._admission.check_open(stopping=self._stopping)
        pause_s = self._pauses.get(choice.name, -math.inf) - trio.current_time()
        if pause_s > 0:
            rejected("model_not_loaded")
            raise not_loaded(choice, pause_s)
        waiter = Waiter(choice, work, undo, rejected, places)
        self._queue.join(waiter, self._facts[choice.name].decode_rows)
        return waiter

    def _reject(self, context: RequestContext, why: str) -> None:
        """Record that a request was refused while it waited, and free its agent."""
        self._run.agents.leave(context.request)
        self._admission.reject(context.request, context.tenant, why)

    # --- life ---------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, one model after the other, until ``drain`` has ended the last request."""
        try:
            with self._run.stalls.heard_by(self._stalled):
                async with trio.open_nursery() as nursery:
                    self._queue.begin_in(nursery)
                    opened: Callable[[], None] = task_status.started
                    while await self._serve(opened):
                        opened = _told_already
        finally:
            self._ended.set()

    async def drain(self) -> None:
        """
        Refuse new requests, end those that wait for a model, and let running requests finish, as
        ``ModelServer.drain``. On return all of it is in the journal, and the blocks in memory are
        in files. A load that is in progress is abandoned.
        """
        self._stopping = True
        self._queue.refuse_all(
            "server_stopped",
            lambda: Stopping("the server was stopped before the answer was complete"),
        )
        if self._at_load:
            self._run.engine.abandon()
        await self._ended.wait()

    async def _serve(self, opened: Callable[[], None]) -> bool:
        """
        Serve the model that is loaded, until another one is, or none. False at the end.

        Args:
            opened: is called when requests may go in.
        """
        server, old = self._server, self._loaded
        if server is None:
            target = await self._next()
        else:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                self._open = True
                opened()
                self._queue.admit(self._queue.all_for(self._loaded), server)
                target = await self._next()
                self._open = False
                self._loading = target
                await server.drain()
            progress = no_progress if target is not None else self._stopping_progress
            await server.write_blocks(partial(progress, "writing blocks to files"))
        if target is None or self._stopping:
            self._loading = None
            return False
        self._loading = target
        if server is not None:
            self._count_out(server)
            await unload(self._run, f"{target.name} was asked for")
        del server  # it knows the tokenizer
        if not await self._load(target) and old is not None:
            await self._load(old)
        return True

    async def _next(self) -> Choice | None:
        """Wait until a model is to be loaded, and nobody is in the way; None at the end."""
        sound: Choice | None = None  # looked at, and no fault was found
        while not self._stopping:
            if self._open:
                assert self._server is not None
                self._queue.admit(self._queue.first_for(self._loaded), self._server)
            if not self._queue:
                sound = None
                await self._activity.wait_change()
                continue
            target = self._queue.target
            if target is not sound:
                fault = await trio.to_thread.run_sync(entry_fault, target.entry)
                sound = target if fault is None else None
                if fault is not None:
                    self._fail(target, fault)
                continue
            busy = not self._activity.is_idle
            if not busy and not self._queue.entering and not self._run.writer.stalled:
                return target
            await self._activity.wait_change()
        return None

    async def _load(self, choice: Choice) -> bool:
        """
        Load a model; false where that fails, which is on record then, or where the server stops.
        """
        if self._stopping:
            return False
        self._loading = choice
        reason = None
        try:
            server = await self._server_over(choice)
        except EngineGone:
            if not self._run.engine.abandoned:
                raise
            self._leave_load(choice)
            return False
        except (WriterDied, BugError):
            raise
        except Exception as error:
            # A model may be broken in any way. Behind this block nothing holds it, as a traceback
            # does.
            reason = str(error) or type(error).__name__
        self._loading = None
        self._activity.changed()
        if reason is not None:
            self._server, self._loaded = None, None
            await unload(self._run, "it could not be served")
            self._fail(choice, reason)
            return False
        self._server, self._loaded = server, choice
        self._took_over()
        self._facts[choice.name] = self._told_by(server)
        self._pauses.pop(choice.name, None)
        self._token_counter.forget(choice)
        log.info("model loaded", model=choice.name, fingerprint=server.facts.fingerprint)
        return True

    async def _server_over(self, choice: Choice) -> ModelServer:
        """
        Load a model, and give a server over it. A step of its own, in which alone the model is
        held, so that it leaves memory when it fails.
        """
        self._at_load = True
        try:
            started = await load(self._run, choice.settings)
        finally:
            self._at_load = False
        return await self._model_server(self._run, choice.settings, started)

    def _fail(self, choice: Choice, reason: str) -> None:
        """A model could not be loaded: put it on record, and tell who waits for it."""
        log.error("model not loaded", model=choice.name, reason=reason, pause_s=PAUSE_S)
        self._run.sequencer.append(ev.ModelLoadFailed(name=choice.name, reason=reason))
        self._pauses[choice.name] = trio.current_time() + PAUSE_S
        for waiter in self._queue.all_for(choice):
            self._queue.refuse(waiter, not_loaded(choice, PAUSE_S), "model_not_loaded")

    def _leave_load(self, choice: Choice) -> None:
        """
        The server stops while a model is being loaded: put on record that nothing comes of it.
        """
        log.warning("load abandoned", model=choice.name)
        self._run.sequencer.append(
            ev.ModelLoadFailed(name=choice.name, reason="the server stopped while it was loading")
        )
        self._loading, self._server, self._loaded = None, None, None

    def _stalled(self) -> None:
        self._queue.refuse_all("journal_full", JournalFull)

    def _took_over(self) -> None:
        """
        Agents ask here, and not the server over the model that is loaded, which took them over.
        """
        self._run.agents.context_of = lambda asked: self.facts_of(asked).context_tokens
        self._run.agents.close = self._close_session

    async def _close_session(self, session: str, reason: str) -> None:
        """End a session that nobody is at work in, when no model is about to leave or to come."""
        while self._loading is not None and not self._stopping:
            await self._activity.wait_change()
        if self._server is not None:
            await self._server.close_session(session, reason)
            return
        held = self._run.sequencer.state.sessions.get(SessionId(session))
        # Where the server stops while a model leaves, slabs are there as long as that is not on
        # record. Such a session stays, as one does that a server cannot close.
        if held is not None and held.slab is None:
            self._run.sequencer.append(ev.SessionClosed(session=session, reason=reason))

    def _count_out(self, server: ModelServer) -> None:
        """Keep what goes with a server, and forget the server."""
        then, (encoded, cached) = server.statistics(), self._gone_characters
        self._gone_characters = (
            encoded + then.encoded_characters,
            cached + then.cached_characters,
        )
        self._server, self._loaded = None, None


def _told_already() -> None:
    """Whoever waits until there is a server hears of the first."""
