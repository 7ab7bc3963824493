"""Loads and unloads a model, and records both in the journal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import structlog

from cairn.actors.agents.agents import StoredAgents
from cairn.actors.idle.activity import Activity
from cairn.actors.journal_keys import JournalKeys
from cairn.actors.measured import measured
from cairn.actors.models.self_tests import StoredSelfTests
from cairn.actors.models.startup import Starting
from cairn.actors.request_log import RequestLog
from cairn.actors.requests.admission import Admission
from cairn.actors.sequencer import Sequencer
from cairn.actors.sessions.gathering import Gathering
from cairn.actors.settings import BootRefused, Progress, Settings
from cairn.actors.snapshots import SnapshotFile
from cairn.actors.threads.engine import EngineThread
from cairn.actors.threads.journal_stalls import Stalls
from cairn.actors.threads.pages import PageShares
from cairn.actors.threads.prompts import PromptThreads
from cairn.actors.threads.writer import JournalWriter
from cairn.engine.model import fingerprint
from cairn.engine.reports import ModelFacts, PassShapes
from cairn.engine.row_class import RowClass
from cairn.journal import events as ev
from cairn.journal.keys import tested_fields
from cairn.journal.rows.store import Store
from cairn.journal.state import ACCEPTED_UNSTABLE, State
from cairn.journal.summaries import Summaries

if TYPE_CHECKING:
    from cairn.engine.contract import StartedEngine
    from cairn.engine.reports import SelfTestReport

log = structlog.get_logger("cairn")


SWITCHED_OFF = "--no-speculation"
"""Why there are no draft rows, if the operator wants none."""

StartEngine = Callable[[Settings, State, Progress], "StartedEngine"]
"""Loads a model, on the engine's thread. See ``start_on_mlx``."""


@attrs.frozen(kw_only=True)
class Run:
    """
    The parts of a server that last for its run, whatever models it loads.

    Attributes:
        start_engine: loads a model.
        secret: the data directory's, from which those of tenants are derived.
        threads: for what prompts need.
        pages: the tenants' shares of reading pages.
        starting: with which the start can be given up.
        boot: the id of the run.
        earlier: the ids of earlier runs in this journal.
        keys: seal private fields; None if these are plain.
        reader: opens the journal once more, read-only; None if that is not possible.
        elsewhere: see ``Settings``.
        snapshot: the file with the snapshot of the fold, if there is one.
        gathering: the decode passes that are not appended yet.
        request_log: follows requests through the journal.
        leaving: the sessions that are being forgotten, which no request may name.
    """

    sequencer: Sequencer
    writer: JournalWriter
    engine: EngineThread
    start_engine: StartEngine
    agents: StoredAgents
    summaries: Summaries
    stalls: Stalls
    admission: Admission
    activity: Activity
    threads: PromptThreads
    starting: Starting
    secret: bytes = attrs.field(repr=False)
    boot: str
    earlier: Collection[str]
    progress: Progress
    keys: JournalKeys | None = attrs.field(default=None, repr=False)
    reader: Callable[[], Store] | None = None
    elsewhere: Callable[[Collection[str]], Sequence[str]] | None = None
    snapshot: SnapshotFile | None = None
    gathering: Gathering = attrs.field(factory=Gathering)
    request_log: RequestLog = attrs.field(factory=RequestLog)
    leaving: set[str] = attrs.field(factory=set)
    pages: PageShares = attrs.field(factory=PageShares)


async def load(run: Run, settings: Settings) -> StartedEngine:
    """
    Load a model on the engine's thread, and record it.

    Returns:
        ``StartedEngine``, for ``boot.model_server``.

    Raises:
        BootRefused: the device is not stable.
        ModelRefused: the model cannot be served, or the memory for sessions holds nothing.
    """
    state, progress = run.sequencer.state, run.progress
    started = await run.engine.load(lambda: run.start_engine(settings, state, progress))
    if not settings.speculation:
        facts = attrs.evolve(started.facts, without_drafts=SWITCHED_OFF)
        started = attrs.evolve(started, facts=facts)
    run.engine.install(started.engine)
    _put_on_record(settings, run.sequencer, started)
    return started


async def unload(run: Run, reason: str) -> None:
    """
    Unload the model, and record that with the memory that is still in use. By then no server may
    serve the model, and nothing else may refer to ``StartedEngine`` or a part of it.
    """
    active_bytes = await run.engine.unload(_freed)
    model = run.sequencer.state.model
    if model is not None:
        run.sequencer.append(
            ev.ModelUnloaded(
                fingerprint=model.fingerprint, reason=reason, active_bytes=active_bytes
            )
        )


def _freed() -> int:
    from cairn.engine.mlx.start import freed_memory  # as below

    return freed_memory()


def start_on_mlx(settings: Settings, state: State, progress: Progress) -> StartedEngine:
    """
    Load a model with MLX, and test it on this device unless the journal or a file has a passed
    test. Stores the result of a test in a file.

    Raises:
        ModelRefused: the model cannot be served.
    """
    # MLX comes in here, on the engine's thread, and nowhere before.
    from cairn.engine.mlx.start import start_engine

    stored = StoredSelfTests(settings.self_tests) if settings.self_tests is not None else None
    known: ev.SelfTestFinished | None = None

    def tested_shapes(fields: Mapping[str, Any]) -> PassShapes | None:
        nonlocal known
        known = None
        if settings.test_again:
            return None
        found = state.self_tests.get(fingerprint.base_of(fields))
        if found is None or not found.passed:
            found = stored.read(fields) if stored is not None else None
        if found is None:
            return None
        known = found
        return PassShapes(
            decode=found.decode_shapes,
            row_class=RowClass.of(found.row_class),
            row_class_reason=found.row_class_reason,
            without_drafts=found.without_drafts,
        )

    started = start_engine(
        settings.model,
        name=settings.model_name,
        block_tokens=settings.block_tokens,
        decode_rows=settings.decode_rows,
        kv_cache=settings.kv_cache,
        pool_bytes=settings.pool_bytes,
        blocks_bytes=settings.blocks_bytes,
        tested_shapes=tested_shapes,
        progress=progress,
        adapter=settings.adapter,
        dtype=settings.dtype,
        accept_tight=settings.accept_tight,
        window=settings.window,
        beside_bytes=settings.beside_bytes,
    )
    if stored is not None:
        for facts, tested in _tests(started):
            if tested.passed and tested.row_class_late:
                continue  # another start may have the time to find a cheaper class
            stored.write(tested_fields(facts.fields), _self_test(facts, tested))
    return attrs.evolve(started, known=known)


def _tests(started: StartedEngine) -> Iterator[tuple[ModelFacts, SelfTestReport]]:
    """The self-tests that ran, in order, with the facts of what they tested."""
    if started.narrowed is not None:
        yield started.narrowed
    if started.self_test is not None:
        yield started.facts, started.self_test


def _put_on_record(settings: Settings, sequencer: Sequencer, started: StartedEngine) -> None:
    """
    Journal the model and its self-test.

    Raises:
        BootRefused: the self-test failed and the operator did not accept that.
    """
    facts = started.facts
    if started.tight is not None:
        log.warning("memory is tight", fact=started.tight)
        sequencer.append(ev.OperatorActed(action="accept_tight_memory", detail=started.tight))
    if facts.growth is not None and facts.model_context_tokens:
        log.warning(
            "the memory for sessions bounds the context",
            tokens=facts.context_tokens,
            of_the_model=facts.model_context_tokens,
            hint="a larger --pool-mb",
        )
    tested = started.self_test
    for of, result in _tests(started):
        sequencer.append(_self_test(of, result))
    if started.known is not None:
        sequencer.append(attrs.evolve(started.known, duration_us=0, from_cache=True))
    if started.narrowed is not None:
        _warn_of_less(started.narrowed[1], cold=not facts.reusable)
    if tested is not None and not tested.passed:
        failed = ", ".join(name for name, held in tested.findings.items() if not held)
        if not settings.accept_unstable:
            raise BootRefused(
                f"the self-test failed on this device ({failed}), so a cache hit might not give "
                "the bits of a miss, or its numbers are wrong. docs/models.md has the families "
                "that are served. Start with --accept-unstable to serve it anyway."
            )
        if settings.shadow_share and not settings.shadow_by_default:
            raise BootRefused(
                f"the self-test failed on this device ({failed}). With --accept-unstable "
                "it is served anyway, and --shadow-check would quarantine sessions for the "
                "differences. Start without one of the two."
            )
        sequencer.append(ev.OperatorActed(action=ACCEPTED_UNSTABLE, detail=failed))
    sequencer.append(
        measured(
            ev.ModelLoaded,
            facts,
            directory=str(started.directory.resolve()),
            adapter=str(started.adapter.resolve()) if started.adapter else "",
            pool_slabs=settings.pool_slabs,
            pool_bytes=started.budgets.pool_bytes,
            blocks_bytes=started.budgets.blocks_bytes,
            blocks_max=settings.blocks_max or 0,
            min_cache_tokens=settings.min_cache_tokens,
            kv_sinks=facts.policy.sinks if facts.policy else 0,
            kv_window=facts.policy.window if facts.policy else 0,
            kv_rows=facts.policy.rows if facts.policy else 0,
            state_blocks=facts.checkpoints.blocks if facts.checkpoints else 0,
            grain=facts.grain,
        )
    )


_WHY_COLD = {
    "warm_equals_cold": "going on from a state did not give the bits of a cold answer",
    "slab_size_does_not_matter": "a larger slab did not give the same bits",
    "numbers_are_right": "the numbers over states that can be cut back are not mlx-lm's",
}
"""Why a model with states is served cold, by the finding that says so."""


def _warn_of_less(tested: SelfTestReport, *, cold: bool) -> None:
    """
    Log that a model is served with fewer features than were tried, and why.

    Args:
        tested: the self-test that failed.
        cold: whether nothing is reused, and not only W is 1.
    """
    failed = [name for name, held in tested.findings.items() if not held]
    what, more = "one row a decode pass", {}
    if cold:
        why = _WHY_COLD.get(failed[0], "the self-test failed")
        what = f"nothing is reused: {why if tested.fault is None else 'the self-test broke off'}"
    if tested.fault is not None:
        more = {"fault": tested.fault.text, "exception": tested.fault.traceback}
    log.warning(what, failed=failed, **more)


def _self_test(facts: ModelFacts, tested: SelfTestReport) -> ev.SelfTestFinished:
    return measured(
        ev.SelfTestFinished,
        tested,
        fingerprint=facts.fingerprint,
        base_fingerprint=facts.base_fingerprint,
        passed=tested.passed,
        row_class=tested.row_class.fields if tested.row_class is not None else (),
        from_cache=False,
    )
