"""
The shadow check: while the server is idle, a sample of answers is computed once more, cold.

The ids of requests decide which answers are chosen (``cairn.journal.shadow``). A chosen answer is
read from the journal's committed events. The check computes it as a request without any reuse
would: passes over the prompt, decode passes of W rows over the tokens that were drawn, and the
settling passes over the answer. With the grain C the passes are those of the canonical schedule.
With the grain 1 they are cut elsewhere than those that gave the answer (``schedule.other_passes``),
so that the check also finds a row class that is wrong. It must find the tokens, log-probabilities
and block digests that are on record, and blocks in memory must still have their digests.

Rules of this module:

1. Requests go first. A check begins when no request is in flight and no session is at work. If a
   request comes, the check ends after the running pass, closes its slab, and starts again later.
2. It changes no block and no path. Its slab counts like any other. Without a free one it takes that
   of an idle session that has all of it in blocks; without such a session it waits.
3. It compares nothing that an invariant compares: it records what it found, and the ledger says
   whether that breaks INV-3, and quarantines in the same append.
4. Answers that wait are in memory only, and bounded. When the model is unloaded, because another
   one is loaded or the server stops, they are recorded as skipped.
5. A check that fails does not stop the next one. Only a slab that could not be closed does, or an
   error outside of a check. That is a bug on record.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import attrs
import structlog

from cairn.actors.idle.activity import Activity
from cairn.actors.measured import measured
from cairn.actors.memory import Memory
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.engine import EngineGone, EngineThread
from cairn.actors.threads.writer import WriterDied
from cairn.engine.contract import Engine
from cairn.engine.errors import CannotTrim, EngineFault, GrammarDeadEnd, NotFinite
from cairn.engine.reports import (
    DecodeRow,
    DrawSpec,
    GrammarMatcher,
    ModelFacts,
    PassReport,
    SlabReport,
)
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import other_passes, passes
from cairn.journal import events as ev
from cairn.journal.errors import BugError
from cairn.journal.keys import block_keys, ids_hash
from cairn.journal.shadow import drawn_hash, first_difference, is_chosen
from cairn.journal.state import SessionId
from cairn.journal.tenants import tenant_secret

log = structlog.get_logger("cairn")

T = TypeVar("T")

WAITING_MAX = 16
"""How many answers may wait for their check; the oldest is skipped for a new one."""

TRIES = 3
"""How often a check is started that requests end. Other ends are not counted."""


@attrs.define(kw_only=True, eq=False)
class _Answer:
    """
    An answer as the journal has it.

    Attributes:
        position: of the row of its request.
        sampled, logprobs: as they were drawn; once it is complete, those that belong to it.
        passes: the prefill passes that ran for it.
        tries: how often requests ended its check.
    """

    ask: ev.RequestReceived
    position: int
    sampled: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    passes: set[tuple[int, int]] = attrs.field(factory=set)
    prompt_ids: tuple[int, ...] = ()
    prompt_keys: tuple[str, ...] = ()
    tries: int = 0


@attrs.define(kw_only=True, eq=False)
class _Found:
    """
    What was measured so far.

    Attributes:
        cuts: where prefill passes ended.
        blocks: (key, digest as computed, digest in memory) of each.
    """

    cuts: list[int] = attrs.field(factory=list)
    blocks: list[tuple[str, str, str]] = attrs.field(factory=list)
    drawn: list[tuple[int, float]] = attrs.field(factory=list)
    duration_us: int = 0

    def add(self, report: PassReport) -> None:
        """Take in a pass."""
        self.duration_us += report.duration_us
        if report.drawn is not None:
            self.drawn.append((report.drawn.token, report.drawn.logprob))


class _Interrupted(Exception):
    """The server is not idle any more."""


class ShadowCheck:
    """
    Chooses answers and checks them one by one. Called with each committed event.

    Attributes:
        bug_id: of the bug after which none is checked; None while there is none.
    """

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
        report_quarantine: Callable[[str], None],
        matcher: Callable[[str], Awaitable[GrammarMatcher]],
    ) -> None:
        """
        Args:
            secret: of the data directory; the tenants' secrets are derived from it.
            share: of the answers, 0 to 1.
            report_quarantine: reports to a session that it is quarantined.
            matcher: makes the matcher of a grammar.
        """
        self._sequencer = sequencer
        self._engine = engine
        self._memory = memory
        self._facts = facts
        self._secret = secret
        self._share = share
        self._activity = activity
        self._report_quarantine = report_quarantine
        self._matcher = matcher
        self._open: dict[str, _Answer] = {}  # by session, which serves one request at a time
        self._waiting: deque[_Answer] = deque()
        self._skipped: deque[tuple[_Answer, ev.ShadowSkip]] = deque()  # not recorded yet
        self._closed = False
        self._checking: _Answer | None = None
        self.bug_id: str | None = None

    # --- for other tasks --------------------------------------------------------------------------

    def __call__(self, recorded: ev.Recorded) -> None:
        """
        Take in a committed event. Appends none itself, because the writer is still passing on what
        it has committed.
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
                if event.step == "prefill":
                    answer.passes.add((event.start, event.end))
            case ev.RequestFinished() if answer := self._answer_of(event.session, event.request):
                del self._open[event.session]
                self._finished(answer, event)
                self._activity.changed()
            case ev.RequestCancelled() | ev.SessionQuarantined() | ev.SessionClosed():
                self._open.pop(event.session, None)
            case ev.InvariantViolated():
                # The row that broke the invariant comes before this one, and was taken in.
                for session, answer in list(self._open.items()):
                    if session == event.session or answer.position == event.at_position:
                        del self._open[session]
            case ev.JournalStalled():
                self._activity.changed()  # there is room again
            case _:
                pass

    @property
    def has_work(self) -> bool:
        """Whether a check runs, or could begin once the server is idle."""
        return self._memory.has_spare_slab or (not self._closed and self._next() is not None)

    def close(self) -> None:
        """End after the running pass. Answers that wait are skipped."""
        self._closed = True
        self._activity.changed()

    async def forget(self, session: str) -> None:
        """
        Drop the answers of a closed session, after the check of one that runs. The caller keeps the
        server from being idle, which ends that check.
        """
        self._drop(session)
        self._activity.changed()
        while self._checking is not None and self._checking.ask.session == session:
            await self._activity.wait_change()
        self._drop(session)

    def _drop(self, session: str) -> None:
        dropped = [one for one in self._waiting if one.ask.session == session]
        self._skipped.extend((one, "session_changed") for one in dropped)
        self._waiting = deque(one for one in self._waiting if one.ask.session != session)
        self._skip_all()

    # --- the task ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Check the chosen answers, until ``close``."""
        try:
            await self._run()
        except (EngineGone, WriterDied):
            pass  # what ended them stops the server and is logged
        except Exception as error:
            # Not even a skipped answer can be recorded. The server continues without checks.
            self._closed = True
            with contextlib.suppress(WriterDied):  # as above
                self.bug_id = self._sequencer.bug_that_ended(error)
                log.exception("no more shadow checks", bug_id=self.bug_id)

    async def _run(self) -> None:
        while not self._closed:
            self._skip_all()
            answer = self._next() if self._activity.upkeep_may_begin else None
            if answer is None:
                await self._activity.wait_change()
                continue
            self._waiting.remove(answer)
            self._checking = answer
            try:
                await self._check_or_skip(answer)
            finally:
                self._checking = None
                self._activity.changed()
        # No other model can compute them again.
        self._skipped.extend((answer, "model_unloaded") for answer in self._waiting)
        self._waiting.clear()
        self._skip_all()

    def _answer_of(self, session: str, request: str | None) -> _Answer | None:
        answer = self._open.get(session)
        return answer if answer is not None and answer.ask.request == request else None

    def _finished(self, answer: _Answer, event: ev.RequestFinished) -> None:
        """A chosen answer is complete and waits for its check."""
        session = self._sequencer.state.sessions.get(SessionId(event.session))
        turn = session.last if session is not None else None
        if turn is None or turn.request != event.request:
            self._skipped.append((answer, "session_changed"))
            return
        if not turn.answered:
            return  # this row broke an invariant, and the client got the bug id
        if not event.answer_tokens:
            return  # there is nothing to compare
        answer.prompt_ids, answer.prompt_keys = turn.prompt_ids, turn.prompt_keys
        del answer.sampled[event.answer_tokens :], answer.logprobs[event.answer_tokens :]
        self._waiting.append(answer)
        self._keep_the_youngest()

    def _next(self) -> _Answer | None:
        """
        The oldest answer for which there is room. The others wait until a session is closed or
        releases its slab.
        """
        if self._sequencer.state.shadow is not None:
            return self._waiting[0] if self._waiting else None  # it is skipped anyway
        return next(
            (one for one in self._waiting if self._memory.can_spare_slab(self._capacity(one))), None
        )

    def _capacity(self, answer: _Answer) -> int:
        return self._facts.capacity_for(len(answer.prompt_ids) + len(answer.sampled))

    def _keep_the_youngest(self) -> None:
        while len(self._waiting) > WAITING_MAX:
            self._skipped.append((self._waiting.popleft(), "queue_full"))

    async def _check_or_skip(self, answer: _Answer) -> None:
        """Check an answer. A failure ends this check only."""
        if self._sequencer.state.shadow is not None:
            # A slab could not be closed, and that is known.
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

        def still_needed() -> bool:
            return self._activity.upkeep_may_continue and self._activity.arrivals == arrivals

        def began(report: SlabReport) -> None:
            self._sequencer.append(
                measured(
                    ev.ShadowStarted,
                    report,
                    of_session=answer.ask.session,
                    request=answer.ask.request,
                )
            )
            slabs.append(report.slab)

        capacity = self._capacity(answer)
        has_room = await self._memory.open_spare_slab(capacity, began, still_needed)
        if has_room is False:
            # Another session took the room, and is at work.
            self._waiting.appendleft(answer)
            self._keep_the_youngest()
            if not self._closed:
                await self._activity.wait_change()
            return
        result: ev.ShadowResult = "interrupted"
        if has_room:
            result = "failed"
            try:
                result = await self._result(answer, slabs[0], still_needed)
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
        self, answer: _Answer, slab: int, still_needed: Callable[[], bool]
    ) -> ev.ShadowResult:
        found = _Found()
        try:
            try:
                await self._compute(answer, slab, found, still_needed)
            except (NotFinite, GrammarDeadEnd) as fault:
                # A token was drawn for the answer. The rest is not computed.
                log.error("a shadow check drew no token", fact=str(fault))
            return self._compared(answer, found)
        except _Interrupted:
            return "interrupted"
        except (EngineGone, WriterDied):
            raise
        except Exception:
            log.exception("a shadow check failed", request=answer.ask.request)
            return "failed"

    def _compared(self, answer: _Answer, found: _Found) -> ev.ShadowResult:
        """Record what was found; the ledger says whether that is right."""
        due = list(zip(answer.sampled, answer.logprobs, strict=True))
        keys, digests, held = zip(*found.blocks, strict=True) if found.blocks else ((), (), ())
        session = answer.ask.session
        try:
            self._sequencer.append(
                ev.ShadowChecked(
                    of_session=session,
                    request=answer.ask.request,
                    prompt_tokens=len(answer.prompt_ids),
                    cuts=tuple(found.cuts),
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
                self._report_quarantine(session)
            return "differs"
        return "same"

    async def _give_back(self, answer: _Answer, slab: int, result: ev.ShadowResult) -> None:
        def ended(report: SlabReport) -> None:
            self._sequencer.append(
                measured(
                    ev.ShadowEnded,
                    report,
                    of_session=answer.ask.session,
                    request=answer.ask.request,
                    result=result,
                )
            )

        try:
            await self._memory.close_spare_slab(slab, ended)
        except (EngineGone, WriterDied):
            raise
        except Exception as fault:
            # Wrong totals are on record, or the pool's next measurement will not add up.
            self.bug_id = self._sequencer.bug_that_ended(fault)
            log.error(
                "slab of a shadow check not released; no more shadow checks",
                slab=slab,
                fact=str(fault),
                bug_id=self.bug_id,
            )

    def _skip_all(self) -> None:
        """Record the answers that were skipped while an event was passed on."""
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
        self, answer: _Answer, slab: int, found: _Found, still_needed: Callable[[], bool]
    ) -> None:
        """
        Compute an answer again in an empty slab.

        Args:
            found: what was measured is added to it.

        Raises:
            _Interrupted: the server is not idle any more.
            NotFinite: a token has no log-probability.
            GrammarDeadEnd: the grammar allows no next token.
        """

        async def one(run: Callable[[Engine], T]) -> T:
            done = await self._engine.settle(run, lambda report: (report,), still_needed)
            if done is None:
                raise _Interrupted
            return done[0]

        async def over(ids: Sequence[int], start: int, draws: DrawSpec | None) -> None:
            """The passes over the tokens of ``ids`` from ``start`` on, and the blocks they fill."""
            for begin, end in self._passes(answer, start, len(ids)):
                full = [
                    (place, keys[place])
                    for place in range(begin - begin % block_tokens, end, block_tokens)
                    if place + block_tokens <= end and place in keys
                ]
                job = partial(
                    _pass,
                    slab=slab,
                    ids=ids[begin:end],
                    draw=draws if end == len(ids) else None,
                    full=full,
                    block_tokens=block_tokens,
                )
                report, blocks = await one(job)
                found.add(report)
                found.cuts.append(end)
                found.blocks += blocks

        ask, prompt, block_tokens = answer.ask, answer.prompt_ids, self._facts.block_tokens
        sequence = prompt + tuple(answer.sampled)
        keys = self._keys(answer, sequence)
        draws = DrawSpec.first(
            Sampling(**ask.sampling),
            seed=ask.seed,
            prompt_ids=prompt,
            matcher=await self._matcher(ask.grammar) if ask.grammar is not None else None,
        )
        await over(prompt, 0, draws)
        for token in answer.sampled[:-1]:
            draws = draws.after(token)
            row = DecodeRow(slab=slab, token=token, draw=draws)
            found.add(await one(partial(_decode, row=row)))
        # As settling did: after the prompt, or with the grain C from its begun block on.
        end = max((start + block_tokens for start in keys), default=0)
        canonical = len(prompt) - len(prompt) % self._facts.grain
        # If a window has moved on, these blocks are not computed again.
        if end > canonical and await one(partial(_trim, slab=slab, end=canonical)):
            await over(sequence[:end], canonical, None)

    def _passes(self, answer: _Answer, start: int, tokens: int) -> Iterator[tuple[int, int]]:
        """The passes of a check, as half-open ranges. A request waits for one of them at most."""
        row_class, block_tokens = self._facts.row_class, self._facts.block_tokens
        if row_class is None:
            return passes(start, tokens, block_tokens)
        return other_passes(
            start,
            tokens,
            block_tokens,
            name=answer.ask.request,
            most=row_class.most_tokens,
            recorded=answer.passes,
        )

    def _keys(self, answer: _Answer, sequence: Sequence[int]) -> dict[int, str]:
        """
        The recorded blocks of a sequence by their first token, up to the first that is not on
        record.
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


def _pass(
    engine: Engine,
    *,
    slab: int,
    ids: Sequence[int],
    draw: DrawSpec | None,
    full: Sequence[tuple[int, str]],
    block_tokens: int,
) -> tuple[PassReport, list[tuple[str, str, str]]]:
    """
    A prefill pass. Returns its report and, of each block that it fills, the key, the digest as
    computed, and the digest in memory.

    Args:
        full: the first token and the key of each of these blocks.
    """
    report = engine.run_chunk(slab, ids, draw)
    blocks = []
    for start, key in full:
        sealed = engine.seal(slab, key, start, start + block_tokens, store=False)
        blocks.append((key, sealed.digest, engine.digest_of(key)))
    return report, blocks


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
