"""
``ops replay --engine``: run a session's passes on the model again and compare what comes out.

Every pass that the journal has of the session is run: the same rows, the same tokens. Blocks that
were shared are computed from their tokens, so that a hit is compared with a miss. Tokens,
log-probabilities, digests and coverage must be those of the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from cairn.engine.mlx_engine import MlxEngine
from cairn.engine.mlx_model import ModelRefused
from cairn.engine.mlx_start import start_engine
from cairn.engine.reports import DecodeRow, EngineFault, PassReport, Wanted
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.journal.keys import ids_hash
from cairn.journal.replay import replay
from cairn.journal.state import Session, SessionId
from cairn.ops.output import progress

SAME = 0
DIFFERS = 3
OTHER_FINGERPRINT = 4


@attrs.frozen
class _Step:
    """
    An event of the session, with the session as it was after it.
    """

    recorded: ev.Recorded
    session: Session | None


class _Differs(Exception):
    """
    The engine gives something else than the journal has.
    """

    def __init__(self, what: str, journal: object, engine: object) -> None:
        super().__init__(f"{what}: the journal has {journal}, the engine gives {engine}")


def rerun(rows: Sequence[Row], session_id: str, model: str | None) -> int:
    """
    Run a session again. Prints what came of it.

    Args:
        rows: the whole journal.
        model: the model's directory, where it is no longer the one on record.

    Returns:
        0 where all is the same, 3 where an event differs, 4 for another fingerprint.

    Raises:
        StoreError: the model on record cannot be loaded.
    """
    steps: list[_Step] = []
    models: list[ev.ModelLoaded] = []
    used: dict[str, ev.ModelLoaded] = {}

    def watch(recorded: ev.Recorded, state: Any) -> None:
        event = recorded.event
        if isinstance(event, ev.ModelLoaded):
            models.append(event)
        mine = getattr(event, "session", None) == session_id
        if mine and models:
            used[models[-1].fingerprint] = models[-1]
        if mine or isinstance(event, ev.ServerStopped | ev.ServerLost):
            steps.append(_Step(recorded, state.sessions.get(SessionId(session_id))))

    replay(rows, watch=watch)
    if len(used) != 1:
        click.echo(f"The session was served under {len(used)} fingerprints; one can be run.")
        return OTHER_FINGERPRINT
    recorded_model = next(iter(used.values()))
    started = _start(recorded_model, model)
    if started.facts.fingerprint != recorded_model.fingerprint:
        _tell_difference(recorded_model.fields, started.facts.fields)
        return OTHER_FINGERPRINT
    again = _Again(started.engine, started.facts.chunk_tokens)
    for step in progress(steps, "passes", len(steps)):
        try:
            again.run(step)
        except (_Differs, EngineFault) as difference:
            event = step.recorded.event
            click.echo(f"differs at event {step.recorded.position} ({event.kind})")
            click.echo(f"  {difference}")
            return DIFFERS
    click.echo(
        f"same: {again.passes} passes, {again.tokens} tokens drawn, {again.blocks} blocks "
        f"under fingerprint {recorded_model.fingerprint}"
    )
    return SAME


def _start(recorded: ev.ModelLoaded, model: str | None) -> Any:
    where = model or recorded.directory
    if model is None and not Path(where).is_dir():
        raise StoreError(
            f"The model {recorded.name} is not at {where} any more. Name its place with --model."
        )
    try:
        return start_engine(
            where,
            name=recorded.name,
            chunk_tokens=recorded.chunk_tokens,
            decode_rows=recorded.decode_rows,
            kv_cache=recorded.fields["kv_cache"],
            pool_bytes=recorded.pool_bytes,
            remembered=lambda fingerprint: True,  # what is run again is the test
            progress=lambda what, done, total: None,
        )
    except ModelRefused as error:
        raise StoreError(str(error)) from error


def _tell_difference(journal: Any, here: Any) -> None:
    click.echo("The journal's fingerprint is not this machine's; the bits may differ:")
    for name in sorted({*journal, *here}):
        if journal.get(name) != here.get(name):
            click.echo(f"  {name}: {journal.get(name)} on record, {here.get(name)} here")


class _Again:
    """
    The session's passes on an engine of our own.
    """

    def __init__(self, engine: MlxEngine, chunk_tokens: int) -> None:
        self.passes = self.tokens = self.blocks = 0
        self._engine = engine
        self._chunk = chunk_tokens
        self._slab: int | None = None

    def run(self, step: _Step) -> None:
        """
        Do what an event says, and compare.

        Raises:
            _Differs: something else came out.
        """
        event, session = step.recorded.event, step.session
        match event:
            case ev.SlabAcquired():
                self._slab = self._engine.open_slab(event.capacity_tokens).slab
            case ev.SlabReleased() | ev.ServerStopped() | ev.ServerLost():
                self._close()
            case ev.CacheTrimmed():
                trimmed = self._engine.trim(self._held, event.end)
                _same("coverage", event.coverage, trimmed.coverage)
            case ev.BlocksShared():
                assert session is not None
                self._share(event, session)
            case ev.BlockSealed():
                self.blocks += 1
                _same("digest", event.digest, self._digest(event.start, event.end))
            case ev.CacheExtended() if event.step == "decode":
                assert session is not None
                self._decode(event, session)
            case ev.CacheExtended():
                assert session is not None
                wanted = _wanted(session) if event.sampled else None
                ids = _sequence(session)[event.start : event.end]
                report = self._pass(ids, wanted)
                _same_pass(event, report, report.drawn.token if report.drawn else None)
            case _:
                pass  # it changes no cache

    @property
    def _held(self) -> int:
        assert self._slab is not None
        return self._slab

    def _close(self) -> None:
        if self._slab is not None:
            self._engine.close_slab(self._slab)
        self._slab = None

    def _pass(self, ids: Sequence[int], wanted: Wanted | None) -> PassReport:
        self.passes += 1
        self.tokens += wanted is not None
        return self._engine.run_chunk(self._held, ids, wanted)

    def _digest(self, start: int, end: int) -> str:
        return self._engine.seal(self._held, "again", start, end, store=False).digest

    def _share(self, event: ev.BlocksShared, session: Session) -> None:
        """
        The journal copied sealed blocks; here their tokens are run.
        """
        sequence = _sequence(session)
        for place, digest in enumerate(event.digests):
            start = event.start + place * self._chunk
            self._pass(sequence[start : start + self._chunk], None)
            self.blocks += 1
            _same("digest", digest, self._digest(start, start + self._chunk))

    def _decode(self, event: ev.CacheExtended, session: Session) -> None:
        wanted = _wanted(session)
        sequence = _sequence(session)
        dummies = [None] * (self._engine.decode_rows - 1)
        fed = []
        for place, start in enumerate(range(event.start, event.end)):
            self.passes, self.tokens = self.passes + 1, self.tokens + 1
            fed.append(sequence[start])
            row = DecodeRow(slab=self._held, token=sequence[start], wanted=wanted)
            report = self._engine.decode([row, *dummies])[0]
            if not isinstance(report, PassReport):
                raise report or EngineFault("no report")
            assert report.drawn is not None
            _same(f"token {place} of it", event.sampled[place], report.drawn.token)
            _same("its log-probability", event.logprobs[place], report.drawn.logprob)
            if start + 1 == event.end:
                _same("tokens that ran", event.ran_hash, ids_hash(fed))
                _same("coverage", event.coverage, report.coverage)


def _wanted(session: Session) -> Wanted:
    assert session.request is not None
    ask = session.request.ask
    return Wanted(sampling=Sampling(**ask.sampling), seed=ask.seed)


def _sequence(session: Session) -> tuple[int, ...]:
    if session.request is not None:
        return session.request.sequence
    return session.last.sequence if session.last is not None else ()


def _same_pass(event: ev.CacheExtended, report: PassReport, token: int | None) -> None:
    _same("tokens that ran", event.ran_hash, ids_hash(report.ran))
    _same("coverage", event.coverage, report.coverage)
    if report.drawn is not None:
        _same("the token drawn", event.sampled[0], token)
        _same("its log-probability", event.logprobs[0], report.drawn.logprob)


def _same(what: str, journal: object, engine: object) -> None:
    if journal != engine:
        raise _Differs(what, journal, engine)
