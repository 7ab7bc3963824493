"""
The shadow check: a sample of answers is computed once more, cold, when nobody wants anything.

Which answers are chosen follows from the ids of their requests (``cairn.journal.shadow``). What is
on record of a chosen one is taken from the journal's committed events. The check computes the same
tokens from nothing, along the way of a request that finds nothing: the passes of the canonical
schedule over the prompt, decode passes of W rows over the tokens that were drawn, and the settling
passes over the answer. What it must find are the tokens, the log-probabilities and the digests of
blocks that are on record, and blocks in memory that still have theirs.

Rules of this module:

1. A request goes first. A check begins when no request is open or waits and no session has anything
   to do. When one comes the check ends after the pass in hand, gives its slab back, and begins anew
   later.
2. It changes no block and no path. Its slab is counted as any other is. Where none is free it has
   that of one session at rest which loses nothing by it but a copy of its blocks; where there is
   no such session either, it waits.
3. It compares nothing itself that an invariant compares: it puts down what it found, and the ledger
   says whether that breaks INV-3, and what goes out of service in the same append.
4. What waits is in memory only, and bounded. Where the model leaves, since another one is loaded or
   the server stops, each that waits is put down as skipped.
5. Whatever goes wrong with one check, the next one is begun; only a slab that could not be given
   back ends them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import attrs
import structlog
import trio

from cairn.actors.idle.activity import Activity
from cairn.actors.memory import Memory
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.engine import EngineGone, EngineThread
from cairn.actors.threads.writer import WriterDied
from cairn.engine.contract import Engine
from cairn.engine.reports import (
    CannotTrim,
    DecodeRow,
    DrawSpec,
    EngineFault,
    GrammarDeadEnd,
    GrammarMatcher,
    ModelFacts,
    NotFinite,
    PassReport,
    SlabReport,
)
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import passes
from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.keys import block_keys, ids_hash
from cairn.journal.shadow import drawn_hash, first_difference, is_chosen
from cairn.journal.state import SessionId
from cairn.journal.tenants import tenant_secret

log = structlog.get_logger("cairn")

T = TypeVar("T")

WAITING_MAX = 16
"""So many answers may wait for their check; the oldest makes room."""

TRIES = 3
"""So often a check is begun that requests end. What else ends one is not counted."""


@attrs.define(kw_only=True, eq=False)
class _Answer:
    """
    An answer as the journal has it.

    Attributes:
        position: of the row by which its request came.
        sampled, logprobs: as they were drawn; once it is finished, those that belong to it.
        tries: how often requests ended its check.
    """

    ask: ev.RequestReceived
    position: int
    sampled: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    prompt_ids: tuple[int, ...] = ()
    prompt_keys: tuple[str, ...] = ()
    tries: int = 0


@attrs.define(kw_only=True, eq=False)
class _Found:
    """What was measured so far. ``blocks`` are (key, digest as computed, digest in memory)."""

    blocks: list[tuple[str, str, str]] = attrs.field(factory=list)
    drawn: list[tuple[int, float]] = attrs.field(factory=list)
    duration_us: int = 0

    def add(self, report: PassReport) -> None:
        """Take in a pass."""
        self.duration_us += report.duration_us
        if report.drawn is not None:
            self.drawn.append((report.drawn.token, report.drawn.logprob))


class _Disturbed(Exception):
    """Somebody wants something, or nothing may be done any more."""


class ShadowCheck:
    """Chooses answers, and checks them one after the other. Called with each committed event."""

    def __init__(
        self,
        *,
        sequencer: Sequencer,
        engine: EngineThread,
        memory: Memory,
        facts: ModelFacts,
        secret: bytes,
        share: float,
        activity: Activity,
        taken_out: Callable[[str], None],
        matcher: Callable[[str], Awaitable[GrammarMatcher]],
    ) -> None:
        """
        Args:
            secret: the data directory's, from which those of tenants follow.
            share: of the answers, 0 to 1.
            taken_out: tells a session that it is out of service.
            guide: makes what holds an answer to a grammar.
        """
        self._sequencer = sequencer
        self._engine = engine
        self._memory = memory
        self._facts = facts
        self._secret = secret
        self._share = share
        self._activity = activity
        self._taken_out = taken_out
        self._matcher = matcher
        self._open: dict[str, _Answer] = {}  # by session, which has one request in hand at a time
        self._waiting: deque[_Answer] = deque()
        self._skipped: deque[tuple[_Answer, ev.ShadowSkip]] = deque()  # not yet put down
        self._held: trio.Event | None = None  # while a slab is held; set when it is given back
        self._closed = False

    # --- for other tasks --------------------------------------------------------------------------

    def __call__(self, recorded: ev.Recorded) -> None:
        """
        Take in a committed event. Puts nothing down itself: the writer is in the middle of telling
        what it has committed.
        """
        if self._closed:
            return
        event = recorded.event
        match event:
            case ev.RequestReceived():
                self._open.pop(event.session, None)
                if is_chosen(event.request, self._share):
                    self._open[event.session] = _Answer(ask=event, position=recorded.position)
            case ev.CacheExtended() if answer := self._answer_of(event.session, event.request):
                answer.sampled.extend(event.sampled)
                answer.logprobs.extend(event.logprobs)
            case ev.RequestFinished() if answer := self._answer_of(event.session, event.request):
                del self._open[event.session]
                self._finished(answer, event)
                self._activity.changed()
            case ev.RequestCancelled() | ev.SessionQuarantined() | ev.SessionClosed():
                self._open.pop(event.session, None)
            case ev.InvariantViolated():
                # The row that broke stands before it, and was taken in as if it had not.
                for session, answer in list(self._open.items()):
                    if session == event.session or answer.position == event.at_position:
                        del self._open[session]
            case ev.JournalStalled():
                self._activity.changed()  # there is room again
            case _:
                pass

    async def give_way(self) -> bool:
        """
        Wait until the check in hand has given its slab back; false where it holds none. For a
        request, which the check sees and ends by itself.
        """
        held = self._held
        if held is None:
            return False
        await held.wait()
        return True

    def close(self) -> None:
        """End when the pass in hand is done. What waits is skipped."""
        self._closed = True
        self._activity.changed()

    # --- the task ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Check what is chosen, until ``close``."""
        try:
            while not self._closed:
                self._skip_all()
                answer = self._next() if self._activity.upkeep_may_begin else None
                if answer is None:
                    await self._activity.wait_change()
                    continue
                self._waiting.remove(answer)
                await self._check_or_skip(answer)
            # No other model can compute them again.
            self._skipped.extend((answer, "model_unloaded") for answer in self._waiting)
            self._waiting.clear()
            self._skip_all()
        except (EngineGone, WriterDied):
            pass  # what ended them stops the server, and says so
        except Exception:
            # Not even that an answer is skipped can be put down. The server goes on without.
            self._closed = True
            log.exception("no more shadow checks")

    def _answer_of(self, session: str, request: str | None) -> _Answer | None:
        answer = self._open.get(session)
        return answer if answer is not None and answer.ask.request == request else None

    def _finished(self, answer: _Answer, event: ev.RequestFinished) -> None:
        """A chosen answer is complete: it waits for its check."""
        session = self._sequencer.state.sessions.get(SessionId(event.session))
        turn = session.last if session is not None else None
        if turn is None or turn.request != event.request:
            self._skipped.append((answer, "session_changed"))
            return
        if not turn.answered:
            return  # this very row broke an invariant, and the client heard of the bug
        if not event.answer_tokens:
            return  # there is nothing to compare
        answer.prompt_ids, answer.prompt_keys = turn.prompt_ids, turn.prompt_keys
        del answer.sampled[event.answer_tokens :], answer.logprobs[event.answer_tokens :]
        self._waiting.append(answer)
        self._keep_the_youngest()

    def _next(self) -> _Answer | None:
        """
        The answer that has waited longest of those for which there is room. The others wait until a
        session has ended, or has given its slab up.
        """
        if self._sequencer.state.shadow is not None:
            return self._waiting[0] if self._waiting else None  # it is skipped, room or not
        return next(
            (one for one in self._waiting if self._memory.can_spare_slab(self._capacity(one))), None
        )

    def _capacity(self, answer: _Answer) -> int:
        return self._facts.capacity_for(len(answer.prompt_ids) + len(answer.sampled))

    def _keep_the_youngest(self) -> None:
        while len(self._waiting) > WAITING_MAX:
            self._skipped.append((self._waiting.popleft(), "queue_full"))

    async def _check_or_skip(self, answer: _Answer) -> None:
        """A check is nobody's answer: what goes wrong with it ends it, and nothing else."""
        if self._sequencer.state.shadow is not None:
            # A slab was not given back. What another one would bring to light is known.
            self._skip(answer, "failed")
            return
        try:
            await self._check(answer)
        except (EngineGone, WriterDied):
            raise
        except Exception:
            log.exception("a shadow check failed", request=answer.ask.request)
            self._skip(answer, "failed")

    async def _check(self, answer: _Answer) -> None:
        # A request that is answered before it is seen ends a check too.
        arrivals = self._activity.arrivals
        slabs: list[int] = []

        def wanted() -> bool:
            return self._activity.upkeep_may_continue and self._activity.arrivals == arrivals

        def began(report: SlabReport) -> None:
            self._sequencer.append(
                ev.ShadowStarted(
                    of_session=answer.ask.session,
                    request=answer.ask.request,
                    slab=report.slab,
                    capacity_tokens=report.capacity_tokens,
                    bytes=report.bytes,
                    pool_slabs=report.pool_slabs,
                    pool_bytes=report.pool_bytes,
                )
            )
            self._held = trio.Event()
            slabs.append(report.slab)

        capacity = self._capacity(answer)
        has_room = await self._memory.open_spare_slab(capacity, began, wanted)
        if has_room is False:
            # Somebody was faster, and has something to do now.
            self._waiting.appendleft(answer)
            self._keep_the_youngest()
            if not self._closed:
                await self._activity.wait_change()
            return
        result: ev.ShadowResult = "interrupted"
        if has_room:
            result = "failed"
            try:
                result = await self._result(answer, slabs[0], wanted)
            finally:
                await self._give_back(answer, slabs[0], result)
        if result == "failed":
            self._skip(answer, "failed")
        elif result == "interrupted":
            answer.tries += self._activity.arrivals != arrivals
            if answer.tries >= TRIES:
                self._skip(answer, "interrupted")
            else:
                self._waiting.appendleft(answer)
                self._keep_the_youngest()

    async def _result(
        self, answer: _Answer, slab: int, wanted: Callable[[], bool]
    ) -> ev.ShadowResult:
        found = _Found()
        try:
            try:
                await self._compute(answer, slab, found, wanted)
            except (NotFinite, GrammarDeadEnd) as fault:
                # There was a token when the answer was given. What follows is not computed.
                log.error("a shadow check drew no token", fact=str(fault))
            return self._compared(answer, found)
        except _Disturbed:
            return "interrupted"
        except (EngineGone, WriterDied):
            raise
        except Exception:
            log.exception("a shadow check failed", request=answer.ask.request)
            return "failed"

    def _compared(self, answer: _Answer, found: _Found) -> ev.ShadowResult:
        """Put down what was found, and hear whether it is what it should be."""
        due = list(zip(answer.sampled, answer.logprobs, strict=True))
        keys, digests, held = zip(*found.blocks, strict=True) if found.blocks else ((), (), ())
        session = answer.ask.session
        try:
            self._sequencer.append(
                ev.ShadowChecked(
                    of_session=session,
                    request=answer.ask.request,
                    prompt_tokens=len(answer.prompt_ids),
                    answer_tokens=len(found.drawn),
                    keys=keys,
                    digests=digests,
                    memory_digests=held,
                    ids_expected=ids_hash(answer.sampled),
                    drawn_expected=drawn_hash(answer.sampled, answer.logprobs),
                    drawn=drawn_hash(
                        [token for token, _ in found.drawn],
                        [logprob for _, logprob in found.drawn],
                    ),
                    first_difference=first_difference(due, found.drawn),
                    duration_us=found.duration_us,
                )
            )
        except BugError as bug:
            if bug.invariant != "INV-3":
                return "failed"  # the check itself is wrong, and that is on record
            known = self._sequencer.state.sessions.get(SessionId(session))
            if known is not None and known.bug_id == bug.bug_id:
                self._taken_out(session)
            return "differs"
        return "same"

    async def _give_back(self, answer: _Answer, slab: int, result: ev.ShadowResult) -> None:
        def ended(report: SlabReport) -> None:
            self._sequencer.append(
                ev.ShadowEnded(
                    of_session=answer.ask.session,
                    request=answer.ask.request,
                    slab=report.slab,
                    bytes=report.bytes,
                    pool_slabs=report.pool_slabs,
                    pool_bytes=report.pool_bytes,
                    result=result,
                )
            )

        try:
            await self._engine.call(lambda mlx: mlx.close_slab(slab), ended)
        except (EngineGone, WriterDied):
            raise
        except Exception as fault:
            # A wrong sum is on record, or the pool's next measure will not add up.
            log.error(
                "slab of a shadow check not released; no more shadow checks",
                slab=slab,
                fact=str(fault),
            )
        finally:
            assert self._held is not None
            self._held.set()
            self._held = None

    def _skip_all(self) -> None:
        """Put down what was skipped where nothing could be put down."""
        while self._skipped:
            self._skip(*self._skipped.popleft())

    def _skip(self, answer: _Answer, reason: ev.ShadowSkip) -> None:
        self._sequencer.append(
            ev.ShadowSkipped(
                of_session=answer.ask.session, request=answer.ask.request, reason=reason
            )
        )

    # --- the passes -------------------------------------------------------------------------------

    async def _compute(
        self, answer: _Answer, slab: int, found: _Found, wanted: Callable[[], bool]
    ) -> None:
        """
        Compute an answer again in an empty slab.

        Args:
            found: what was measured is added to it.

        Raises:
            _Disturbed: it is not wanted any more.
            NotFinite: a token has no log-probability.
            GrammarDeadEnd: no token may come next.
        """

        async def one(run: Callable[[Engine], T]) -> T:
            done = await self._engine.settle(run, lambda report: (report,), wanted)
            if done is None:
                raise _Disturbed
            return done[0]

        async def chunk_pass(ids: Sequence[int], draws: DrawSpec | None, key: str | None) -> None:
            report, digests = await one(partial(_chunk, slab=slab, ids=ids, draw=draws, key=key))
            found.add(report)
            if key is not None:
                found.blocks.append((key, *digests))

        ask, prompt, chunk = answer.ask, answer.prompt_ids, self._facts.block_tokens
        sequence = prompt + tuple(answer.sampled)
        keys = self._keys(answer, sequence)
        draws = DrawSpec.first(
            Sampling(**ask.sampling),
            seed=ask.seed,
            prompt_ids=prompt,
            matcher=await self._matcher(ask.grammar) if ask.grammar is not None else None,
        )
        for start, end in passes(0, len(prompt), chunk):
            last = draws if end == len(prompt) else None
            # The tail's chunk may have a block too, but of the settling pass.
            key = keys.get(start) if end - start == chunk else None
            await chunk_pass(prompt[start:end], last, key)
        for token in answer.sampled[:-1]:
            draws = draws.after(token)
            row = DecodeRow(slab=slab, token=token, draw=draws)
            found.add(await one(partial(_decode, row=row)))
        settled = [start for start in sorted(keys) if start + chunk > len(prompt)]
        if settled and not await one(partial(_trim, slab=slab, end=settled[0])):
            settled = []  # a window has moved on, and these chunks are not computed again
        for start in settled:
            await chunk_pass(sequence[start : start + chunk], None, keys[start])

    def _keys(self, answer: _Answer, sequence: Sequence[int]) -> dict[int, str]:
        """
        The blocks on record that a sequence makes, by their first token, as far as they follow each
        other.
        """
        facts, found = self._facts, dict[int, str]()
        if not facts.reusable:
            return found
        keys = block_keys(
            secret=tenant_secret(self._secret, answer.ask.tenant),
            fingerprint=facts.fingerprint,
            tenant=answer.ask.tenant,
            ids=sequence,
            block_tokens=facts.block_tokens,
            known=answer.prompt_keys,
        )
        for place, key in enumerate(keys):
            if key not in self._sequencer.state.blocks:
                break
            found[place * facts.block_tokens] = key
        return found


# --- on the engine's thread ----------------------------------------------------------------------


def _chunk(
    engine: Engine, *, slab: int, ids: Sequence[int], draw: DrawSpec | None, key: str | None
) -> tuple[PassReport, tuple[str, str]]:
    report = engine.run_chunk(slab, ids, draw)
    if key is None:
        return report, ("", "")
    sealed = engine.seal(slab, key, report.start, report.end, store=False)
    return report, (sealed.digest, engine.digest_of(key))


def _decode(engine: Engine, *, row: DecodeRow) -> PassReport:
    report = engine.decode([row, *[None] * (engine.decode_rows - 1)])[0]
    if not isinstance(report, PassReport):
        raise report or EngineFault("a decode pass gave no report")
    return report


def _trim(engine: Engine, *, slab: int, end: int) -> bool:
    try:
        engine.trim(slab, end)
    except CannotTrim:
        return False
    return True
