"""
``ops replay --engine``: run a session's passes on the model again and compare what comes out.

Every pass that the journal has of the session is run, on the model that ran it: the same rows, the
same tokens. Blocks that were shared are computed from their tokens, so that a hit is compared with
a miss. Tokens, log-probabilities, digests, coverage and the bytes of slabs and blocks must be those
of the journal, and so must the text that the tokens of each answer make.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import attrs
import click

from cairn.engine.answer.grammar import CannotConstrain
from cairn.engine.answer.grammar_matcher import compiler_for
from cairn.engine.answer.markers import markers_of
from cairn.engine.answer.text import AnswerText
from cairn.engine.errors import EngineFault, GrammarDeadEnd, ModelRefused
from cairn.engine.mlx.dtype import widened_on_record
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.start import start_engine
from cairn.engine.model.builtin import still_at
from cairn.engine.reports import (
    DecodeRow,
    DrawSpec,
    GrammarMatcher,
    ModelFacts,
    PassReport,
    SealReport,
)
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.base import Base, loaded_of
from cairn.journal.codec import Row
from cairn.journal.errors import StoreError
from cairn.journal.keys import ids_hash
from cairn.journal.replay import replay
from cairn.journal.state import Session, SessionId
from cairn.ops.common.output import progress

SAME = 0
NOTHING = 1
DIFFERS = 3
OTHER_FINGERPRINT = 4

_RUN = (ev.CacheExtended, ev.BlocksRestored)
_ENDS = (ev.ModelUnloaded, ev.ServerStopped, ev.ServerLost)


@attrs.frozen
class _Step:
    """An event of the session, with the session as it was after it."""

    recorded: ev.Recorded
    session: Session | None


@attrs.frozen
class _Part:
    """
    What happened while one model was loaded, in all runs of the server: events of the session, and
    those that took its slab.
    """

    model: ev.ModelLoaded
    steps: list[_Step] = attrs.field(factory=list)

    @property
    def runs(self) -> bool:
        """Whether the session was served by it."""
        return any(isinstance(step.recorded.event, _RUN) for step in self.steps)


class _Differs(Exception):
    """The engine gives something else than the journal has."""

    def __init__(self, what: str, journal: object, engine: object) -> None:
        super().__init__(f"{what}: the journal has {journal}, the engine gives {engine}")


def rerun(
    rows: Sequence[Row],
    session_id: str,
    model: str | None,
    adapter: str | None = None,
    base: Base | None = None,
) -> int:
    """
    Run a session again. Prints what came of it.

    Args:
        rows: the whole journal, or what is left of it.
        model: the model's directory, where it is no longer the one on record.
        adapter: that of the adapter over it, likewise.
        base: what stands in the place of the rows that were pruned.

    Returns:
        0 where all is the same, 1 where nothing could be run, 3 where an event differs, 4 for
        another fingerprint.

    Raises:
        StoreError: a model on record cannot be loaded.
    """
    before = loaded_of(base) if base is not None else None
    loaded: list[ev.ModelLoaded] = [before] if before is not None else []
    parts: dict[str, _Part] = {}

    def watch(recorded: ev.Recorded, state: Any) -> None:
        event = recorded.event
        if isinstance(event, ev.ModelLoaded):
            loaded.append(event)
        mine = getattr(event, "session", None) == session_id
        if loaded and (mine or isinstance(event, _ENDS)):
            part = parts.setdefault(loaded[-1].fingerprint, _Part(loaded[-1]))
            part.steps.append(_Step(recorded, state.sessions.get(SessionId(session_id))))

    replay(rows, base=base, watch=watch)
    used = [part for part in parts.values() if part.runs]
    if not used:
        # Said before a model is loaded, which may take a while.
        return _nothing(session_id)
    if len(used) > 1 and (model is not None or adapter is not None):
        click.echo(
            f"The session was served under {len(used)} fingerprints, and --model and --adapter "
            "name the place of one. Leave them out to have each model where it was."
        )
        return OTHER_FINGERPRINT
    passes = 0
    for part in used:
        found = _rerun(part, model, adapter)
        if isinstance(found, int):
            return found
        passes += found.passes
        if found.passes:
            click.echo(
                f"same: {found.passes} passes, {found.tokens} tokens drawn, {found.blocks} blocks "
                f"under fingerprint {part.model.fingerprint}"
            )
    return SAME if passes else _nothing(session_id)


def _rerun(part: _Part, model: str | None, adapter: str | None) -> _Again | int:
    """
    Run again what one model did. Prints what differs.

    Returns:
        What was run; the exit code where it is not the same.
    """
    started = _start(part.model, model, adapter)
    if started.facts.fingerprint != part.model.fingerprint:
        _tell_difference(part.model.fields, started.facts.fields)
        return OTHER_FINGERPRINT
    again = _Again(
        started.engine,
        started.facts.block_tokens,
        _Text(started.loaded.tokenizer.detokenizer, started.facts.eos_ids),
        _Matchers(started.loaded.tokenizer, started.facts),
    )
    for step in progress(part.steps, "passes", len(part.steps)):
        try:
            again.run(step)
        except (_Differs, EngineFault, GrammarDeadEnd) as difference:
            event = step.recorded.event
            click.echo(f"differs at event {step.recorded.position} ({event.kind})")
            click.echo(f"  {difference}")
            return DIFFERS
    return again


def _nothing(session_id: str) -> int:
    click.echo(f"nothing of session {session_id} could be run again: the journal has no pass of it")
    return NOTHING


def _start(recorded: ev.ModelLoaded, model: str | None, adapter: str | None) -> Any:
    where, over = model or still_at(recorded.directory), adapter or recorded.adapter or None
    if model is None and not Path(where).is_dir():
        raise StoreError(
            f"The model {recorded.name} is not at {where} any more. Name its place with --model."
        )
    if over is not None and not Path(over).is_dir():
        raise StoreError(f"There is no adapter at {over}. Name its place with --adapter.")
    try:
        return start_engine(
            where,
            name=recorded.name,
            block_tokens=recorded.block_tokens,
            decode_rows=recorded.decode_rows,
            kv_cache=recorded.fields["kv_cache"],
            pool_bytes=recorded.pool_bytes,
            blocks_bytes=0,  # blocks are computed again and not kept
            already_tested=lambda fingerprint: True,  # what is run again is the test
            progress=lambda what, done, total: None,
            adapter=over,
            dtype=widened_on_record(recorded.fields["dtypes"]),
            accept_tight=True,  # it was loaded once
            window=(recorded.kv_sinks, recorded.kv_window) if recorded.kv_window else None,
            reuse=recorded.reusable,
            state_blocks=recorded.state_blocks or None,
            context_tokens=recorded.context_tokens,  # the pool did not always bound it
        )
    except ModelRefused as error:
        raise StoreError(str(error)) from error


def _tell_difference(journal: Any, here: Any) -> None:
    click.echo("The journal's fingerprint is not this machine's; the bits may differ:")
    for name in sorted({*journal, *here}):
        if journal.get(name) != here.get(name):
            click.echo(f"  {name}: {journal.get(name)} on record, {here.get(name)} here")


class _Text:
    """The text of the answer in hand: what its tokens make, and what the journal has of it."""

    def __init__(self, detokenizer: Any, ends: Collection[int]) -> None:
        self._detokenizer = detokenizer
        self._ends = ends
        self.begin(goes_on=False)

    def begin(self, *, goes_on: bool) -> None:
        """
        Another answer begins.

        Args:
            goes_on: whether it stands right behind a raw prompt.
        """
        self._goes_on = goes_on
        self._tokens: list[int] = []
        self._said = ""
        self._text = AnswerText(self._detokenizer, goes_on=goes_on)
        self._certain = ""
        self._over = False

    def drawn(self, tokens: Sequence[int]) -> None:
        """Tokens were drawn. Those past an end token are none of the answer's."""
        for token in tokens:
            self._tokens.append(token)
            self._over = self._over or token in self._ends
            if not self._over:
                self._certain += self._text.add(token).text

    def emitted(self, text: str) -> None:
        """
        Text was released.

        Raises:
            _Differs: it is not a beginning of what the tokens make.
        """
        self._said += text
        # The last piece of an answer may hold what is no whole character.
        if not self._certain.startswith(self._said):
            whole = self._whole(self._tokens)
            if self._goes_on and not whole.startswith(self._said):
                # Journals of before have the answers to raw prompts without a space in front.
                self._goes_on = False
                whole = self._whole(self._tokens)
            if not whole.startswith(self._said):
                raise self._other(whole)

    def rejected(self, text: str) -> None:
        """
        A call was none.

        Raises:
            _Differs: the answer does not have its text.
        """
        if text not in self._said:
            raise _Differs(
                "the text of a rejected call",
                f"{len(text)} characters",
                "none of the answer's",
            )

    def finished(self, event: ev.RequestFinished) -> None:
        """
        The answer is complete.

        Raises:
            _Differs: its text is another one.
        """
        tokens = self._tokens[: event.answer_tokens]
        whole = self._whole(tokens)
        # Stop texts are not journaled: one cut the answer where no end token and no length did.
        cut = event.finish_reason == "stop" and not (tokens and tokens[-1] in self._ends)
        if self._said != whole and not (cut and whole.startswith(self._said)):
            raise self._other(whole)

    def _whole(self, tokens: Sequence[int]) -> str:
        text = AnswerText(self._detokenizer, goes_on=self._goes_on)
        made = ""
        for token in tokens:
            if token in self._ends:
                break
            made += text.add(token).text
        return made + text.finish().text

    def _other(self, whole: str) -> _Differs:
        """Told without the words, which are the client's."""
        pairs = zip(self._said, whole, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return _Differs(
            f"the text, the same for {same} characters",
            f"{len(self._said)} characters",
            f"{len(whole)}",
        )


class _Matchers:
    """What holds answers to the grammars that are on record, each made once."""

    def __init__(self, tokenizer: Any, facts: ModelFacts) -> None:
        self._compiler = compiler_for(tokenizer, markers_of(tokenizer), facts)
        self._made: tuple[str, GrammarMatcher] | None = None

    def matcher(self, ask: ev.RequestReceived) -> GrammarMatcher | None:
        """
        That of a request, if it has one.

        Raises:
            _Differs: no answer can be held to it.
        """
        if ask.grammar is None:
            return None
        if self._made is None or self._made[0] != ask.request:
            try:
                self._made = ask.request, self._compiler.compile_text(ask.grammar)
            except CannotConstrain as error:
                raise _Differs("the grammar", "an answer", f"none: {error.fact}") from error
        return self._made[1]


class _Again:
    """The session's passes on an engine of our own."""

    def __init__(
        self, engine: MlxEngine, block_tokens: int, text: _Text, matchers: _Matchers
    ) -> None:
        self.passes = self.tokens = self.blocks = 0
        self._engine = engine
        self._chunk = block_tokens
        self._text = text
        self._matchers = matchers
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
                slab = self._engine.open_slab(event.capacity_tokens)
                self._slab = slab.slab
                _same("tokens of the slab", event.capacity_tokens, slab.capacity_tokens)
                if event.bytes:  # once nobody counted caches that grow
                    _same("bytes of the slab", event.bytes, slab.bytes)
            case ev.SlabReleased() | ev.ModelUnloaded() | ev.ServerStopped() | ev.ServerLost():
                self._close()
            case ev.CacheTrimmed():
                trimmed = self._engine.trim(self._held, event.end)
                _same("coverage", event.coverage, trimmed.coverage)
            case ev.BlocksRestored():
                assert session is not None
                self._share(event, session)
            case ev.BlockSealed():
                self.blocks += 1
                block = self._seal(event.start, event.end)
                _same("digest", event.digest, block.digest)
                _same("bytes of the block", event.bytes, block.bytes)
            case ev.CacheExtended() if event.step == "decode":
                assert session is not None
                self._decode(event, session)
            case ev.CacheExtended():
                assert session is not None
                draw = self._draw_spec(session) if event.sampled else None
                ids = _sequence(session)[event.start : event.end]
                report = self._pass(ids, draw)
                _same_pass(event, report, report.drawn.token if report.drawn else None)
                self._text.drawn(event.sampled)
            case ev.RequestReceived():
                assert session is not None
                assert session.request is not None
                self._text.begin(goes_on=session.request.chain[0][0] == "prompt")
            case ev.TokensEmitted():
                self._text.emitted(event.text)
            case ev.CallRejected():
                self._text.rejected(event.text)
            case ev.RequestFinished():
                self._text.finished(event)
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

    def _pass(self, ids: Sequence[int], draw: DrawSpec | None) -> PassReport:
        self.passes += 1
        self.tokens += draw is not None
        return self._engine.run_chunk(self._held, ids, draw)

    def _seal(self, start: int, end: int) -> SealReport:
        return self._engine.seal(self._held, "again", start, end, store=False)

    def _draw_spec(self, session: Session, before: Sequence[int] = ()) -> DrawSpec:
        """What the request wants, once the tokens ``before`` are there."""
        assert session.request is not None
        ask, prompt = session.request.ask, session.request.prompt_ids
        draw = DrawSpec.first(
            Sampling(**ask.sampling),
            seed=ask.seed,
            prompt_ids=prompt,
            matcher=self._matchers.matcher(ask),
        )
        return draw.after(*before[len(prompt) :])

    def _share(self, event: ev.BlocksRestored, session: Session) -> None:
        """The journal copied sealed blocks; here their tokens are run."""
        sequence, digests = _sequence(session), dict(zip(event.keys, event.digests, strict=True))
        for start in range(event.start, event.end, self._chunk):
            self._pass(sequence[start : start + self._chunk], None)
            digest = digests.get(session.slab_keys[start // self._chunk])
            if digest is not None:
                self.blocks += 1
                _same("digest", digest, self._seal(start, start + self._chunk).digest)
        if session.window_start and event.end == _shared_end(session, self._chunk):
            # Passes let go later than a copy that leaves out what none attends to. Those over the
            # blocks of a part that is not the last attend to what lies before them.
            self._engine.let_go(self._held, session.window_start)

    def _decode(self, event: ev.CacheExtended, session: Session) -> None:
        sequence = _sequence(session)
        draw = self._draw_spec(session, sequence[: event.start])
        dummies = [None] * (self._engine.decode_rows - 1)
        fed = []
        for place, start in enumerate(range(event.start, event.end)):
            self.passes, self.tokens = self.passes + 1, self.tokens + 1
            fed.append(sequence[start])
            draw = draw.after(sequence[start])
            row = DecodeRow(slab=self._held, token=sequence[start], draw=draw)
            report = self._engine.decode([row, *dummies])[0]
            if not isinstance(report, PassReport):
                raise report or EngineFault("no report")
            assert report.drawn is not None
            _same(f"token {place} of it", event.sampled[place], report.drawn.token)
            _same("its log-probability", event.logprobs[place], report.drawn.logprob)
            if start + 1 == event.end:
                _same("tokens that ran", event.input_hash, ids_hash(fed))
                _same("coverage", event.coverage, report.coverage)
        self._text.drawn(event.sampled)


def _shared_end(session: Session, block_tokens: int) -> int:
    """Where all that was decided to be shared ends, in tokens."""
    decided = session.prewarm
    if decided is not None:
        return (decided.blocks_from_slab + decided.blocks_from_pool) * block_tokens
    assert session.request is not None and session.request.path is not None
    return session.request.path.reused_tokens


def _sequence(session: Session) -> tuple[int, ...]:
    return sum(session.work_ids, ())


def _same_pass(event: ev.CacheExtended, report: PassReport, token: int | None) -> None:
    _same("tokens that ran", event.input_hash, ids_hash(report.ran))
    _same("coverage", event.coverage, report.coverage)
    if report.drawn is not None:
        _same("the token drawn", event.sampled[0], token)
        _same("its log-probability", event.logprobs[0], report.drawn.logprob)


def _same(what: str, journal: object, engine: object) -> None:
    if journal != engine:
        raise _Differs(what, journal, engine)
