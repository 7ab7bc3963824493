"""
Serves one model or several, one in memory at a time. A request for a model that is not loaded
waits until the server has swapped it in.

Rules of this module:

1. Each loaded model has its own ``ModelServer``, from when it is loaded until it leaves. No request
   is in flight when it leaves: those that came before have their answers.
2. Requests that have to wait form one queue (``queue.py``), in the order of arrival. Once a request
   waits for another model, requests for the loaded one wait too. When a model is loaded, all that
   wait for it are admitted together. So no request waits for ever, and a model is not loaded once
   for each request.
3. A model for which no request waits any more is not loaded: until the requests before are
   finished, a client that disconnects costs nothing.
4. To count tokens, only a tokenizer is loaded (``token_count.py``).
5. A model that cannot be loaded ends the requests that wait for it. That is recorded, and the model
   is not tried again for a while. The model before is loaded again.
6. An operator may have a model loaded, as if a request waited for it, or the loaded one unloaded.
   The next request loads one again.
7. If the server stops while a model is being loaded, it does not wait for the load: MLX cannot be
   interrupted, and the model is no longer needed.

Block files stay when a model leaves, and so does all that the journal records. What was in memory
is written to files first, as when the server stops.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Literal

import attrs
import structlog
import trio

from cairn.actors.clock import request_id, wall_clock_us
from cairn.actors.errors import ModelBusy, RefusalError, Stopping
from cairn.actors.models.choice import Choice, first_facts, not_loaded
from cairn.actors.models.load import Run, load, unload
from cairn.actors.models.queue import ModelQueue, Taken, Waiter, WaitingReplies, take
from cairn.actors.models.size import ModelSize, size_of
from cairn.actors.models.startup import StartGivenUp
from cairn.actors.models.token_count import TokenCounter
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.messages import (
    Generate,
    ListedModel,
    PromptTokens,
    Reply,
    ServerFacts,
    Statistics,
)
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

log = structlog.get_logger("cairn")

LOAD_MODEL = "load_model"
"""The action of an operator who had a model loaded."""

UNLOAD_MODEL = "unload_model"
"""The action of an operator who had the model unloaded."""

PAUSE_S = 30.0
"""How long a model that could not be loaded is not tried again, in seconds."""


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
            first: the model that is loaded, and the default.
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
        self._node = first.settings.node
        self._started_s = wall_clock_us() // 1_000_000
        self._facts = {
            name: first_facts(choice, self._started_s) for name, choice in self._choices.items()
        }
        self._loaded: Choice | None = first
        self._server: ModelServer | None = server
        self._facts[first.name] = self._facts_by(server)
        self._open = False  # whether requests may go in
        self._loading: Choice | None = None
        self._at_load = False  # whether the engine's thread is at nothing but to load a model
        self._queue = ModelQueue(self._limits, self._activity.changed)
        self._token_counter = TokenCounter(run.engine, self._limits, run.threads)
        self._pauses: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._unload = False  # whether an operator asked for it
        self._stopping = False
        self._ended = trio.Event()
        self._gone_characters = (0, 0)  # what encoders counted whose models have left

    @property
    def facts(self) -> ServerFacts:
        """Facts about the model that is loaded; about the default model while none is."""
        return self._facts[(self._loaded or self._default).name]

    def facts_of(self, requested_model: str) -> ServerFacts:
        """
        Facts about the model that answers a request for this name. Some are known only once that
        model has been loaded.
        """
        return self._facts[self._choice_of(requested_model).name]

    def context_of(self, requested_model: str) -> int:
        """The context of the model that answers a request for this name, in tokens."""
        return self.facts_of(requested_model).context_tokens

    @property
    def listed(self) -> tuple[ListedModel, ...]:
        """All models that a request may name."""
        return tuple(
            ListedModel(
                aliases=choice.entry.aliases,
                state=self._state_of(choice),
                waiting=len(self._queue.all_for(choice)),
                facts=self._facts[name],
                failure=self._failures.get(name),
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
        """The server's statistics at this moment."""
        run, server = self._run, self._server
        if server is not None:
            now = server.statistics()
        else:
            held = run.agents.stored_turns.text_cache.bytes
            now = statistics_of(
                run.sequencer, run.writer, run.engine, run.gathering, text_cache_bytes=held
            )
        encoded, cached = self._gone_characters
        return attrs.evolve(
            now,
            queued=now.queued + len(self._queue),
            encoded_characters=now.encoded_characters + encoded,
            cached_characters=now.cached_characters + cached,
        )

    async def tokens(self, command: Generate, tenant: str) -> PromptTokens:
        """
        The tokens of a prompt, by the tokenizer of the model that it names. As
        ``ModelServer.tokens``; no model is loaded for it.
        """
        choice = self._choice_of(command.requested_model)
        server = self._server_of(choice)
        if server is None and self._stopping and self._loading is None and choice is self._loaded:
            server = self._server  # it drains, and counts until the end
        if server is not None:
            return await server.tokens(command, tenant)
        if self._stopping:
            raise Stopping("the server is stopping; try again in a moment")
        return await self._token_counter.tokens(choice, command, tenant)

    async def close_session(self, session: str, reason: str) -> None:
        """Close a session that has nothing to do, once no model is being swapped."""
        while self._loading is not None and not self._stopping:
            await self._activity.wait_change()
        if self._server is not None:
            await self._server.sessions.close_session(session, reason)
            return
        held = self._run.sequencer.state.sessions.get(SessionId(session))
        # If the server stops while a model is unloaded, slabs exist until that is recorded. Such a
        # session stays, as one does that a server cannot close.
        if held is not None and held.slab is None:
            self._run.sequencer.append(ev.SessionClosed(session=session, reason=reason))

    async def settled_server(self) -> ModelServer | None:
        """
        The server over the model that is loaded, once none is being swapped; None if there is none.
        While a request is in flight no other one is loaded.
        """
        while self._loading is not None and not self._stopping:
            await self._activity.wait_change()
        return self._server

    def forget_texts(self, tenant: str) -> None:
        """Drop what tokenizers have cached of a tenant's texts."""
        if self._server is not None:
            self._server.preparer.encoder.forget(tenant)
        self._token_counter.forget_texts(tenant)

    def _choice_of(self, requested_model: str) -> Choice:
        return self._names.get(requested_model, self._default)

    def _state_of(self, choice: Choice) -> Literal["loaded", "loading", "not_loaded"]:
        if choice is self._loading:
            return "loading"
        return "loaded" if choice is self._loaded else "not_loaded"

    def _server_of(self, choice: Choice) -> ModelServer | None:
        """The server that takes a request for a model at once; None if it has to wait."""
        at_once = self._open and choice is self._loaded and not self._queue
        return self._server if at_once else None

    @contextlib.asynccontextmanager
    async def generate(self, command: Generate, tenant: str) -> AsyncIterator[AsyncIterator[Reply]]:
        """
        Answer a request with the model that the command names. As ``ModelServer.generate``, but
        a request that waits for its model yields ``Waiting``, and is refused, in the iteration.
        """
        choice = self._choice_of(command.requested_model)
        server = self._server_of(choice)
        if server is not None:
            async with server.generate(command, tenant) as replies:
                yield replies
            return
        context = RequestContext(request_id(self._node), tenant, self._limits)
        waiter = None
        try:
            await self._admission.check_bugs()
            # An agent that waits for its model is busy: a second request is refused now, and not
            # after it has waited too.
            self._run.agents.begin(command, context)
            try:
                waiter = self._enqueue(choice, command, context)
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

    async def _take(self, command: Generate, context: RequestContext, server: ModelServer) -> Taken:
        """Take a request that has waited. If it is refused, its agent is free."""
        try:
            return await take(command, context, server)
        except BaseException:
            self._run.agents.leave(context.request)
            raise

    def _facts_by(self, server: ModelServer) -> ServerFacts:
        """The facts of a model's server, with the start of the whole server."""
        return attrs.evolve(server.facts, started_s=self._started_s)

    # --- what an operator asks for ----------------------------------------------------------------

    def ask_load(self, name: str) -> None:
        """
        Have a model loaded in its turn, as if a request waited for it. Changes nothing if it is
        loaded, or if something waits for it already.

        Args:
            name: of it, or an alias.

        Raises:
            LookupError: there is none of this name.
            RefusalError: it cannot wait now.
        """
        choice = self._names[name]
        self._admission.check_open(stopping=self._stopping)
        if choice is self._loading or self._queue.all_for(choice):
            return
        if choice is not self._loaded or self._queue:
            # An operator does not wait for the pause of a model that could not be loaded.
            waiter = Waiter(choice, _take_nothing, _ignore, places=0)
            self._queue.join(waiter, self._facts[choice.name].decode_rows)
        elif not self._unload:
            return
        self._unload = False
        self._run.sequencer.append(ev.OperatorActed(action=LOAD_MODEL, detail=choice.name))

    def ask_unload(self) -> None:
        """
        Have the loaded model unloaded. A request that comes first is answered first. Changes
        nothing if none is loaded.

        Raises:
            RefusalError: requests are in flight or wait for a model, or the server stops.
        """
        self._admission.check_open(stopping=self._stopping)
        if self._loading is not None or self._queue or self._queue.entering:
            raise ModelBusy("requests wait for a model; try again when they are answered")
        if not self._activity.is_idle:
            raise ModelBusy("requests are in flight; try again when they are answered")
        if self._loaded is None or self._unload:
            return
        self._unload = True
        acted = ev.OperatorActed(action=UNLOAD_MODEL, detail=self._loaded.name)
        self._run.sequencer.append(acted)
        self._activity.changed()

    async def sizes(self) -> dict[str, ModelSize]:
        """What each model takes of the memory, by its name. Reads files."""
        return {
            name: await trio.to_thread.run_sync(size_of, choice)
            for name, choice in self._choices.items()
        }

    # --- the queue --------------------------------------------------------------------------------

    def _enqueue(self, choice: Choice, command: Generate, context: RequestContext) -> Waiter:
        """
        Wait for a model.

        Raises:
            RefusalError: the request cannot wait now.
        """
        self._admission.check_open(stopping=self._stopping)
        rejected = partial(self._reject, context)
        pause_s = self._pauses.get(choice.name, -math.inf) - trio.current_time()
        if pause_s > 0:
            rejected("model_not_loaded")
            raise not_loaded(choice, pause_s)
        waiter = Waiter(choice, partial(self._take, command, context), rejected, command.choices)
        self._queue.join(waiter, self._facts[choice.name].decode_rows)
        return waiter

    def _reject(self, context: RequestContext, why: str) -> None:
        """Record that a request was refused while it waited, and free its agent."""
        self._run.agents.leave(context.request)
        self._admission.reject(context.request, context.tenant, why)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve one model after the other, until ``drain`` has ended the last request."""
        try:
            with self._run.stalls.ending(self._stalled):
                async with trio.open_nursery() as nursery:
                    self._queue.begin_in(nursery)
                    opened: Callable[[], None] = task_status.started
                    while await self._serve(opened):
                        opened = _noop
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
        self._run.starting.leave_step()
        await self._ended.wait()

    async def _serve(self, opened: Callable[[], None]) -> bool:
        """
        Serve the model that is loaded, until another one is, or none. False at the end.

        Args:
            opened: called when requests may come in.
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
                unloads = target is None and not self._stopping
                self._open = False
                self._loading = target
                await server.drain()
            progress = self._stopping_progress if target is None and not unloads else no_progress
            await server.write_blocks(partial(progress, "writing blocks to files"))
            if unloads and not self._stopping:
                self._unload = False
                self._count_out(server)
                await unload(self._run, "an operator unloaded it")
                self._activity.changed()
                log.info("model unloaded", model=old.name if old is not None else "")
                return True
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
        """
        Wait until a model is to be loaded and no request is in flight; None at the end, and where
        an operator asked to unload one.
        """
        sound: Choice | None = None  # checked, and no fault was found
        while not self._stopping:
            if self._open:
                assert self._server is not None
                self._queue.admit(self._queue.first_for(self._loaded), self._server)
            if not self._queue:
                sound = None
                if self._unload and self._may_leave():
                    return None
                await self._activity.wait_change()
                continue
            target = self._queue.target
            if target is not sound:
                fault = await trio.to_thread.run_sync(entry_fault, target.entry)
                sound = target if fault is None else None
                if fault is not None:
                    self._fail(target, fault)
                continue
            if self._may_leave():
                return target
            await self._activity.wait_change()
        return None

    def _may_leave(self) -> bool:
        """Whether the loaded model may leave: no request is in flight, and it can be recorded."""
        is_busy = not self._activity.is_idle or self._queue.entering > 0
        return not is_busy and not self._run.writer.stalled

    async def _load(self, choice: Choice) -> bool:
        """
        Load a model. False if that fails, which is recorded, or if the server stops.
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
        except StartGivenUp:
            self._leave_load(choice)
            return False
        except (WriterDied, BugError):
            raise
        except Exception as error:
            # A model may be broken in any way. After this block nothing refers to it, as the
            # traceback does.
            reason = str(error) or type(error).__name__
        self._loading = None
        self._activity.changed()
        if reason is not None:
            self._server, self._loaded = None, None
            await unload(self._run, "it could not be served")
            self._fail(choice, reason)
            return False
        self._server, self._loaded = server, choice
        self._facts[choice.name] = self._facts_by(server)
        self._pauses.pop(choice.name, None)
        self._failures.pop(choice.name, None)
        self._token_counter.forget(choice)
        log.info("model loaded", model=choice.name, fingerprint=server.facts.fingerprint)
        return True

    async def _server_over(self, choice: Choice) -> ModelServer:
        """
        Load a model and make a server over it. Nothing outside this step refers to the model, so
        that it leaves memory if the step fails.
        """
        self._at_load = True
        try:
            started = await load(self._run, choice.settings)
        finally:
            self._at_load = False
        return await self._model_server(self._run, choice.settings, started)

    def _fail(self, choice: Choice, reason: str) -> None:
        """Record that a model could not be loaded, and refuse the requests that wait for it."""
        log.error("model not loaded", model=choice.name, reason=reason, pause_s=PAUSE_S)
        self._run.sequencer.append(ev.ModelLoadFailed(name=choice.name, reason=reason))
        self._failures[choice.name] = reason
        self._pauses[choice.name] = trio.current_time() + PAUSE_S
        for waiter in self._queue.all_for(choice):
            self._queue.refuse(waiter, not_loaded(choice, PAUSE_S), "model_not_loaded")

    def _leave_load(self, choice: Choice) -> None:
        """
        Record that the server stopped while a model was being loaded.
        """
        log.warning("load abandoned", model=choice.name)
        self._run.sequencer.append(
            ev.ModelLoadFailed(name=choice.name, reason="the server stopped while it was loading")
        )
        self._loading, self._server, self._loaded = None, None, None

    def _stalled(self) -> None:
        self._queue.refuse_all("journal_stalled", self._run.stalls.reason)

    def _count_out(self, server: ModelServer) -> None:
        """Add a server's totals to those of earlier servers, and forget the server."""
        then, (encoded, cached) = server.statistics(), self._gone_characters
        self._gone_characters = (
            encoded + then.encoded_characters,
            cached + then.cached_characters,
        )
        self._server, self._loaded = None, None


async def _take_nothing(_: ModelServer) -> Taken:
    """What an operator who had a model loaded gets of its server."""
    return (), _no_replies()


async def _no_replies() -> AsyncIterator[Reply]:
    none: tuple[Reply, ...] = ()
    for reply in none:
        yield reply


def _ignore(_: str) -> None:
    """An operator's wish is no request, so that its refusal is not one either."""


def _noop() -> None:
    """The first server was reported already."""
