"""
``ops replay --engine``: runs a session's passes on the model again and compares the results.

Every pass of the session in the journal is run on the model that ran it, with the same rows and
tokens. Restored blocks are computed from their tokens, so a cache hit is compared with a miss.
Tokens, log-probabilities, digests, coverage, the bytes of slabs and blocks, and the text of each
answer must equal those in the journal.

With a row class, the session is then run once more with other prefill passes than those in the
journal. If only that differs, the row class is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
    PassShapes,
    SealReport,
)
from cairn.engine.row_class import RowClass
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import other_passes
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.keys import ids_hash, ids_of
from cairn.journal.replay import replay
from cairn.journal.rows.base import Base, loaded_of
from cairn.journal.rows.codec import Row
from cairn.journal.state import Session, SessionId, State, continues_text
from cairn.ops.common.output import progress

SAME = 0
NOTHING = 1
DIFFERS = 3
OTHER_FINGERPRINT = 4
OTHER_CUTS = 5

_RUN = (ev.CacheExtended, ev.BlocksRestored)
_ENDS = (ev.ModelUnloaded, ev.ServerStopped, ev.ServerLost)


@attrs.frozen
class _Step:
    """
    An event of the session, with the session as it was after it.

    Attributes:
        ids: if a block was copied in part: the token ids of all of it, as far as they are known.
    """

    recorded: ev.Recorded
    session: Session | None
    ids: Sequence[int] = ()


@attrs.frozen
class _Part:
    """
    What happened while one model was loaded, in all runs of the server: the session's events, and
    those that released its slab.
    """

    model: ev.ModelLoaded
    steps: list[_Step] = attrs.field(factory=list)

    @property
    def runs(self) -> bool:
        """Whether it computed anything for the session."""
        return any(isinstance(step.recorded.event, _RUN) for step in self.steps)


class _Differs(Exception):
    """The engine's result is not the one in the journal."""

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
    Run a session again. Prints the result.

    Args:
        rows: the whole journal, or what is left of it.
        model: the model's directory, if it is no longer the one on record.
        adapter: the adapter's directory, likewise.
        base: what replaces the rows that were pruned.

    Returns:
        0 if everything is the same, 1 if nothing could be run, 3 if an event differs, 4 for another
        fingerprint, 5 if an event differs only if passes are cut elsewhere.

    Raises:
        StoreError: a model on record cannot be loaded.
    """
    before = loaded_of(base) if base is not None else None
    loaded: list[ev.ModelLoaded] = [before] if before is not None else []
    parts: dict[str, _Part] = {}

    def watch(recorded: ev.Recorded, state: State) -> None:
        event = recorded.event
        if isinstance(event, ev.ModelLoaded):
            loaded.append(event)
        mine = getattr(event, "session", None) == session_id
        if mine and recorded.unread is not None:
            raise StoreError(
                f"The texts of session {session_id} cannot be read, because it was forgotten or "
                "its keys are not here, so it cannot be run again."
            )
        if loaded and (mine or isinstance(event, _ENDS)):
            part = parts.setdefault(loaded[-1].fingerprint, _Part(loaded[-1]))
            ids = _ids_in_part(event, state)
            part.steps.append(_Step(recorded, state.sessions.get(SessionId(session_id)), ids))

    replay(rows, base=base, watch=watch)
    used = [part for part in parts.values() if part.runs]
    if not used:
        # Reported before a model is loaded, which may take a while.
        return _nothing(session_id)
    if len(used) > 1 and (model is not None or adapter is not None):
        click.echo(
            f"The session was served under {len(used)} fingerprints, but --model and --adapter "
            "name one model. Leave them out to use each model from where it was."
        )
        return OTHER_FINGERPRINT
    passes = 0
    for part in used:
        found = _rerun(part, model, adapter)
        if isinstance(found, int):
            return found
        again, *others = found
        passes += again.passes
        if again.passes:
            elsewhere = f", and {others[0].passes} passes cut elsewhere" if others else ""
            click.echo(
                f"same: {again.passes} passes, {again.tokens} tokens drawn, {again.blocks} blocks"
                f"{elsewhere} under fingerprint {part.model.fingerprint}"
            )
    return SAME if passes else _nothing(session_id)


def _ids_in_part(event: ev.Event, state: State) -> tuple[int, ...]:
    """The token ids of a block that an event says was copied in part, as far as known."""
    if not isinstance(event, ev.BlocksRestored) or state.model is None:
        return ()
    known = [state.blocks[key] for key in event.keys[-1:] if key in state.blocks]
    return ids_of(known[0].ids) if known and event.end % state.model.block_tokens else ()


def _rerun(part: _Part, model: str | None, adapter: str | None) -> list[_Again] | int:
    """
    Run again what one model computed: with the passes on record, and with a row class once more
    with others. Prints what differs.

    Returns:
        What was run, or an exit code if it differs.
    """
    started = _start(part.model, model, adapter)
    if started.facts.fingerprint != part.model.fingerprint:
        _show_difference(part.model.fields, started.facts.fields)
        return OTHER_FINGERPRINT
    found: list[_Again] = []
    ways = (_Again, _CutElsewhere) if started.engine.row_class is not None else (_Again,)
    for way in ways:
        again = way(
            started.engine,
            started.facts.block_tokens,
            _Text(started.loaded.tokenizer.detokenizer, started.facts.eos_ids),
            _Matchers(started.loaded.tokenizer, started.facts),
        )
        for step in progress(part.steps, again.name, len(part.steps)):
            try:
                again.run(step)
            except (_Differs, EngineFault, GrammarDeadEnd) as difference:
                event, position = step.recorded.event, step.recorded.position
                click.echo(f"differs at event {position} ({event.kind}){again.differs}")
                click.echo(f"  {difference}")
                return again.exit_code
        again.close()
        found.append(again)
    return found


def _nothing(session_id: str) -> int:
    click.echo(f"nothing to run again: the journal has no pass of session {session_id}")
    return NOTHING


def _start(
    recorded: ev.ModelLoaded,
    model: str | None,
    adapter: str | None,
) -> Any:
    row_class = RowClass.of(recorded.fields["row_class"])
    where, over = model or still_at(recorded.directory), adapter or recorded.adapter or None
    if model is None and not Path(where).is_dir():
        raise StoreError(
            f"The model {recorded.name} is no longer at {where}. Pass its directory with --model."
        )
    if over is not None and not Path(over).is_dir():
        raise StoreError(f"There is no adapter at {over}. Pass its directory with --adapter.")
    try:
        return start_engine(
            where,
            name=recorded.name,
            block_tokens=recorded.block_tokens,
            decode_rows=recorded.decode_rows,
            kv_cache=recorded.fields["kv_cache"],
            pool_bytes=recorded.pool_bytes,
            blocks_bytes=0,  # blocks are computed again and not stored
            # What is run again is the test. Its prefill passes have the shapes of that time.
            tested_shapes=lambda fingerprint: PassShapes(row_class=row_class),
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


def _show_difference(journal: Any, here: Any) -> None:
    click.echo(
        "The fingerprint in the journal is not the one of this machine; the bits may differ:"
    )
    for name in sorted({*journal, *here}):
        if journal.get(name) != here.get(name):
            click.echo(f"  {name}: {journal.get(name)} on record, {here.get(name)} here")


class _Text:
    """The text of the current answer: what its tokens make, and what the journal has of it."""

    def __init__(self, detokenizer: Any, ends: Collection[int]) -> None:
        self._detokenizer = detokenizer
        self._ends = ends
        self.begin(goes_on=False)

    def begin(self, *, goes_on: bool) -> None:
        """
        Begin another answer.

        Args:
            goes_on: whether it directly continues the text of its prompt.
        """
        self._goes_on = goes_on
        self._tokens: list[int] = []
        self._said = ""
        self._text = AnswerText(self._detokenizer, goes_on=goes_on)
        self._certain = ""
        self._over = False

    def drawn(self, tokens: Sequence[int]) -> None:
        """Add drawn tokens. Those after an end token do not belong to the answer."""
        for token in tokens:
            self._tokens.append(token)
            self._over = self._over or token in self._ends
            if not self._over:
                self._certain += self._text.add(token).text

    def emitted(self, text: str) -> None:
        """
        Add text that was sent.

        Raises:
            _Differs: the text of the tokens does not begin with it.
        """
        self._said += text
        # The last piece of an answer may end in an incomplete character.
        if not self._certain.startswith(self._said):
            whole = self._whole(self._tokens)
            if not whole.startswith(self._said):
                raise self._other(whole)

    def rejected(self, text: str) -> None:
        """
        Check a rejected call.

        Raises:
            _Differs: the answer does not contain its text.
        """
        if text not in self._said:
            raise _Differs(
                "the text of a rejected call",
                f"{len(text)} characters",
                "an answer without them",
            )

    def finished(self, event: ev.RequestFinished) -> None:
        """
        Check the complete answer.

        Raises:
            _Differs: its text is different.
        """
        tokens = self._tokens[: event.answer_tokens]
        whole = self._whole(tokens)
        # Stop texts are not journaled: one cut the answer if no end token and no length did.
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
        """The difference in numbers, because the text is private."""
        pairs = zip(self._said, whole, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return _Differs(
            f"the text, the same for {same} characters",
            f"{len(self._said)} characters",
            f"{len(whole)}",
        )


class _Matchers:
    """The matchers for the grammars on record; each is compiled once."""

    def __init__(self, tokenizer: Any, facts: ModelFacts) -> None:
        self._compiler = compiler_for(tokenizer, markers_of(tokenizer), facts)
        self._made: tuple[str, GrammarMatcher] | None = None

    def matcher(self, ask: ev.RequestReceived) -> GrammarMatcher | None:
        """
        The matcher for a request, or None if it has no grammar.

        Raises:
            _Differs: the grammar cannot be compiled.
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
    """
    The session's passes, on an engine of its own.

    Attributes:
        name: of the passes, for the progress bar.
        differs: what to print of a difference, after the event.
        exit_code: if there is one.
    """

    name = "passes"
    differs = ""
    exit_code = DIFFERS

    def __init__(
        self, engine: MlxEngine, block_tokens: int, text: _Text, matchers: _Matchers
    ) -> None:
        self.passes = self.tokens = self.blocks = 0
        self._engine = engine
        self._chunk = block_tokens
        self._text = text
        self._matchers = matchers
        self._slab: int | None = None
        self._row: ev.RowChecked | None = None  # the next pass computes it again

    def run(self, step: _Step) -> None:
        """
        Carry out an event, and compare.

        Raises:
            _Differs: the result is different.
        """
        event, session = step.recorded.event, step.session
        match event:
            case ev.SlabAcquired():
                slab = self._engine.open_slab(event.capacity_tokens)
                self._slab = slab.slab
                _same("tokens of the slab", event.capacity_tokens, slab.capacity_tokens)
                _same("bytes of the slab", event.bytes, slab.bytes)
            case ev.SlabReleased() | ev.ModelUnloaded() | ev.ServerStopped() | ev.ServerLost():
                self.close()
            case ev.CacheTrimmed():
                trimmed = self._engine.trim(self._held, event.end)
                _same("coverage", event.coverage, trimmed.coverage)
            case ev.BlocksRestored() if event.end % self._chunk:
                assert session is not None
                self._share_in_part(event, session, step.ids)
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
            case ev.RowChecked():
                self._row = event
            case ev.CacheExtended():
                assert session is not None
                draw = self._draw_spec(session) if event.sampled else None
                sequence, row, self._row = _sequence(session), self._row, None
                again = sequence[row.row] if row is not None else None
                report = self._pass(sequence[event.start : event.end], draw, again)
                if row is not None:
                    found = report.again
                    _same("digests of a row", (row.held_digest, row.digest), found)
                _same_pass(event, report, report.drawn.token if report.drawn else None)
                self._text.drawn(event.sampled)
            case ev.RequestReceived():
                assert session is not None
                assert session.request is not None
                self._text.begin(goes_on=continues_text(session.request.chain))
            case ev.TokensEmitted():
                self._text.emitted(event.text)
            case ev.CallRejected():
                self._text.rejected(event.text)
            case ev.RequestFinished():
                self._text.finished(event)
            case _:
                pass  # changes no cache

    @property
    def _held(self) -> int:
        assert self._slab is not None
        return self._slab

    def close(self) -> None:
        """Release the slab."""
        if self._slab is not None:
            self._engine.close_slab(self._slab)
        self._slab = self._row = None

    def _pass(
        self, ids: Sequence[int], draw: DrawSpec | None, again: int | None = None
    ) -> PassReport:
        self.passes += 1
        self.tokens += draw is not None
        return self._engine.run_chunk(self._held, ids, draw, again=again)

    def _seal(self, start: int, end: int) -> SealReport:
        return self._engine.seal(self._held, "again", start, end, store=False)

    def _draw_spec(self, session: Session, before: Sequence[int] = ()) -> DrawSpec:
        """The draw of a request after the tokens ``before``."""
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
        """Compute the tokens of the blocks that the server copied."""
        sequence, digests = _sequence(session), dict(zip(event.keys, event.digests, strict=True))
        for start in range(event.start, event.end, self._chunk):
            self._pass(sequence[start : start + self._chunk], None)
            digest = digests.get(session.slab_keys[start // self._chunk])
            if digest is not None:
                self.blocks += 1
                _same("digest", digest, self._seal(start, start + self._chunk).digest)
        if session.window_start and event.end == _shared_end(session, self._chunk):
            # A copy leaves out tokens that nothing attends to; passes drop them later. Passes over
            # the blocks of any part but the last attend to the tokens before them.
            self._engine.let_go(self._held, session.window_start)

    def _share_in_part(
        self, event: ev.BlocksRestored, session: Session, ids: Sequence[int]
    ) -> None:
        """
        Compute the tokens of the block whose first rows the server copied. Of a block whose
        conversation was pruned only these are known.
        """
        self._pass(ids or _sequence(session)[event.start : event.end], None)
        if len(ids) == self._chunk:
            self.blocks += 1
            found = self._seal(event.start, event.start + len(ids)).digest
            _same("digest", event.digests[-1], found)
        trimmed = self._engine.trim(self._held, event.end)
        _same("coverage", event.coverage, trimmed.coverage)

    def _decode(self, event: ev.CacheExtended, session: Session) -> None:
        sequence = _sequence(session)
        draw = self._draw_spec(session, sequence[: event.start])
        dummies = [None] * (self._engine.decode_rows - 1)
        # The fold does not have the tokens of an event that broke an invariant.
        fed = (sequence[event.start], *event.sampled[:-1])
        for place, token in enumerate(fed):
            self.passes, self.tokens = self.passes + 1, self.tokens + 1
            draw = draw.after(token)
            row = DecodeRow(slab=self._held, token=token, draw=draw)
            report = self._engine.decode([row, *dummies])[0]
            if not isinstance(report, PassReport):
                raise report or EngineFault("no report")
            assert report.drawn is not None
            _same(f"token {place} of it", event.sampled[place], report.drawn.token)
            _same("its log-probability", event.logprobs[place], report.drawn.logprob)
            if place + 1 == len(fed):
                _same("tokens that ran", event.input_hash, ids_hash(fed))
                _same("coverage", event.coverage, report.coverage)
        self._text.drawn(event.sampled)
        self._text.emitted(event.text)


class _CutElsewhere(_Again):
    """
    As ``_Again``, with prefill passes that are cut elsewhere: those that a shadow check of the same
    request runs. They begin before the first new token, so that rows of earlier passes are computed
    again and compared too.

    Events of prefill passes are collected until one draws a token or another step follows.
    """

    name = "passes cut elsewhere"
    differs = (
        ", but only if its passes are cut elsewhere: the passes on record are the same, and the "
        "row class is wrong on this machine"
    )
    exit_code = OTHER_CUTS

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._collected: list[ev.CacheExtended] = []
        self._sealed: list[ev.BlockSealed] = []
        self._session: Session | None = None

    def run(self, step: _Step) -> None:
        match event := step.recorded.event:
            case ev.RowChecked():
                pass  # it is computed again anyway
            case ev.CacheExtended() if event.step != "decode":
                self._collected.append(event)
                self._session = step.session
                if event.sampled:
                    self._compute()
            case ev.BlockSealed() if self._collected:
                self._sealed.append(event)
            case _:
                self._compute()
                super().run(step)

    def close(self) -> None:
        self._compute()
        super().close()

    def _compute(self) -> None:
        """Run the passes that are due, and compare what they give."""
        if not self._collected:
            return
        assert self._session is not None
        passes, sequence = self._collected, _sequence(self._session)
        start, last = passes[0].start, passes[-1]
        if last.step == "prefill":
            # Those of a check, which begins with the first token.
            spans = [one for one in self._others(0, last.end) if one[1] > start]
        else:
            spans = list(self._others(start, last.end))
        begin = spans[0][0]
        held = self._seal(begin, start).digest if begin < start else None
        self._engine.trim(self._held, begin)
        for first, end in spans:
            draw = self._draw_spec(self._session) if end == last.end and last.sampled else None
            report = self._pass(sequence[first:end], draw)
        for event in passes:
            _same("tokens that ran", event.input_hash, ids_hash(sequence[event.start : event.end]))
        if held is not None:
            _same("digest of rows of earlier passes", held, self._seal(begin, start).digest)
        _same("coverage", last.coverage, report.coverage)
        if report.drawn is not None:
            _same("the token drawn", last.sampled[0], report.drawn.token)
            _same("its log-probability", last.logprobs[0], report.drawn.logprob)
        self._text.drawn(last.sampled)
        for block in self._sealed:
            self.blocks += 1
            _same("digest", block.digest, self._seal(block.start, block.end).digest)
        self._collected, self._sealed = [], []

    def _others(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        row_class, session = self._engine.row_class, self._session
        assert row_class is not None
        assert session is not None
        of = self._collected[0].request if self._collected else None
        if of is None and session.last is not None:
            of = session.last.request
        return other_passes(
            start,
            end,
            self._chunk,
            name=of or session.id,
            most=row_class.most_tokens,
            recorded={(event.start, event.end) for event in self._collected},
        )

    def _share(self, event: ev.BlocksRestored, session: Session) -> None:
        self._session = session
        sequence, digests = _sequence(session), dict(zip(event.keys, event.digests, strict=True))
        for start, end in self._others(event.start, event.end):
            self._pass(sequence[start:end], None)
        for start in range(event.start, event.end, self._chunk):
            digest = digests.get(session.slab_keys[start // self._chunk])
            if digest is not None:
                self.blocks += 1
                _same("digest", digest, self._seal(start, start + self._chunk).digest)


def _shared_end(session: Session, block_tokens: int) -> int:
    """The end of the decided reuse, in tokens."""
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
