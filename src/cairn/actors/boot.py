"""
Starts and stops a server over a store and its models. All parts are wired here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import structlog
import trio

import cairn
from cairn.actors.agents.agents import StoredAgents
from cairn.actors.agents.stored_turns import StoredTurns
from cairn.actors.clock import new_id, wall_clock_us
from cairn.actors.errors import CannotRecord
from cairn.actors.idle.activity import Activity
from cairn.actors.idle.expiry import Expiry
from cairn.actors.idle.fleet_heads import FleetHeads
from cairn.actors.idle.pruning import Pruning
from cairn.actors.idle.shadow_check import ShadowCheck
from cairn.actors.journal_start import read_journal as read_journal
from cairn.actors.journal_start import start_journal
from cairn.actors.memory import Memory
from cairn.actors.models.choice import Choice
from cairn.actors.models.embeddings import (
    Embeddings,
    LoadedEmbedder,
    StartEmbedder,
    embedder_on_mlx,
    load_embedders,
)
from cairn.actors.models.load import Run, StartEngine, load, start_on_mlx
from cairn.actors.models.model_server import ModelServer
from cairn.actors.models.startup import StartGivenUp as StartGivenUp
from cairn.actors.models.startup import Starting as Starting
from cairn.actors.models.swap import Models
from cairn.actors.other_blocks import OtherBlocks
from cairn.actors.requests.admission import Admission
from cairn.actors.requests.messages import ServerFacts
from cairn.actors.requests.prepare import Preparer
from cairn.actors.sequencer import Sequencer
from cairn.actors.server import Server
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.next_prompt import NextPrompt
from cairn.actors.sessions.registry import Sessions
from cairn.actors.sessions.session import SessionActor
from cairn.actors.settings import BootRefused as BootRefused
from cairn.actors.settings import JournalBroken as JournalBroken
from cairn.actors.settings import Progress, no_progress
from cairn.actors.settings import Settings as Settings
from cairn.actors.snapshots import SnapshotFile, Snapshots
from cairn.actors.threads.engine import EngineGone, EngineThread
from cairn.actors.threads.heads import HeadKeeper
from cairn.actors.threads.journal_stalls import Stalls
from cairn.actors.threads.prompts import LIMIT_S, PromptThreads
from cairn.actors.threads.writer import JournalWriter
from cairn.engine.contract import StartedEngine
from cairn.engine.machine.disk import disk_budget_for, other_files_bytes
from cairn.engine.model.models_file import ModelEntry, ModelMetadata
from cairn.engine.prompt import template as prompts
from cairn.engine.prompt.infill import Infill
from cairn.engine.reports import ModelFacts
from cairn.journal import events as ev
from cairn.journal.events import StallReason
from cairn.journal.rows.store import Store
from cairn.journal.runs import SHARED, Runs
from cairn.journal.state import State

log = structlog.get_logger("cairn")


_UNRECORDED: Mapping[StallReason, str] = {
    "disk_full": "The journal's disk is full, so nothing could be recorded. Free some space, or "
    "choose another place with --data-dir.",
    "connection_lost": "The connection to the journal's database is lost, so nothing could be "
    "recorded. Check that the database server runs.",
    "no_descriptors": "The server may open no more files, so nothing could be recorded. Raise its "
    "limit (`ulimit -n`).",
    "locked": "Another program has locked the journal, so nothing could be recorded. End it, or "
    "choose another journal with --journal.",
}


@contextlib.asynccontextmanager
async def booted(
    settings: Settings,
    store: Store,
    secret: bytes,
    progress: Progress = no_progress,
    starting: Starting | None = None,
    start_engine: StartEngine = start_on_mlx,
    heads: HeadKeeper | None = None,
) -> AsyncIterator[Server]:
    """
    Run a server over a store. Leaving the context drains the server and records the stop.

    Args:
        starting: with which the start can be given up.
        start_engine: loads a model, on the engine's thread.
        heads: keeps the head of the journal outside of it.

    Raises:
        BootRefused: the journal violates an invariant, or the device is not stable.
        ModelRefused: the model cannot be served.
        StartGivenUp: the start was given up.
    """
    starting = starting or Starting()
    async with _run(settings, store, secret, progress, starting, start_engine, heads) as run:
        first = await _first(run, settings, starting)
        only = _only(settings, first)
        async with _serving(run, [only], only, first) as server:
            yield server


@contextlib.asynccontextmanager
async def booted_models(
    choices: Sequence[Choice],
    default: str,
    store: Store,
    secret: bytes,
    progress: Progress = no_progress,
    starting: Starting | None = None,
    start_engine: StartEngine = start_on_mlx,
    heads: HeadKeeper | None = None,
    embedding_models: Sequence[ModelEntry] = (),
    start_embedder: StartEmbedder = embedder_on_mlx,
) -> AsyncIterator[Server]:
    """
    Run a server over several models, as ``booted``. The embedding models are loaded first, then the
    default model.

    Args:
        choices: their settings differ only in those that can be set for each model.
        default: the name of one of them.
        embedding_models: stay loaded beside the model that answers.
        start_embedder: loads one of them, on the engine's thread.
    """
    settings = next(choice for choice in choices if choice.name == default).settings
    starting = starting or Starting()
    async with _run(settings, store, secret, progress, starting, start_engine, heads) as run:
        async with _recording_failure(run, starting):
            with starting.lasts(run.engine.abandon):
                embedders = await load_embedders(run, embedding_models, start_embedder)
        beside = sum(one.embedder.facts.memory_bytes for one in embedders)
        choices = [
            attrs.evolve(one, settings=attrs.evolve(one.settings, beside_bytes=beside))
            for one in choices
        ]
        chosen = next(choice for choice in choices if choice.name == default)
        first = await _first(run, chosen.settings, starting)
        async with _serving(run, choices, chosen, first, embedders) as server:
            yield server


@contextlib.asynccontextmanager
async def _serving(
    run: Run,
    choices: Sequence[Choice],
    loaded: Choice,
    over_it: ModelServer,
    embedders: Sequence[LoadedEmbedder] = (),
) -> AsyncIterator[Server]:
    """Run a server while the context lasts; leaving it drains the server."""
    embeddings = Embeddings(run, embedders, loaded.settings.limits)
    server = Server(run, Models(run, choices, loaded, over_it, model_server), embeddings)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        yield server
        await server.drain()


async def model_server(run: Run, settings: Settings, started: StartedEngine) -> ModelServer:
    """
    A server over the model that was loaded, with the block files that are there.

    Args:
        started: what ``load`` returned.
    """
    facts, tokenizer = started.facts, started.tokenizer
    sequencer, engine, activity = run.sequencer, run.engine, run.activity
    limits = settings.limits
    preparer, switches = await _read_tokenizer(run, settings, started)
    actors: dict[str, SessionActor] = {}  # of sessions; memory finds the owners of slabs there
    memory = Memory(sequencer, engine, facts, actors, settings.node)
    other_blocks = OtherBlocks(settings.other_nodes)
    context = SessionContext(
        sequencer=sequencer,
        engine=engine,
        memory=memory,
        facts=facts,
        tokenizer=tokenizer,
        detokenizer=tokenizer.detokenizer,
        secret=run.secret,
        activity=activity,
        patience_s=limits.patience_s,
        next_prompt=NextPrompt(preparer.encoder, run.threads) if settings.prewarm else None,
        slab_idle_s=limits.slab_idle_s,
        ttl_s=limits.ttl_s,
        other_blocks=other_blocks,
        turns=run.agents.agents.turns,
        gathering=run.gathering,
    )
    sessions = Sessions(context, limits, actors)
    shadow = None
    share = _shadow_share(settings, started)
    if share > 0:
        shadow = ShadowCheck(
            sequencer=sequencer,
            engine=engine,
            memory=memory,
            facts=facts,
            secret=run.secret,
            share=share,
            activity=activity,
            report_quarantine=sessions.report_quarantine,
            matcher=preparer.matcher,
        )
    server = ModelServer(
        facts=_facts_of(run, settings, started, switches, preparer.infill),
        sequencer=sequencer,
        writer=run.writer,
        engine=engine,
        memory=memory,
        sessions=sessions,
        preparer=preparer,
        expiry=Expiry(
            sequencer=sequencer, memory=memory, activity=activity, close=sessions.close_expired
        ),
        shadow=shadow,
        activity=activity,
        admission=run.admission,
        agents=run.agents,
        stalls=run.stalls,
        gathering=run.gathering,
        summaries=run.summaries,
        limits=limits,
        model=facts,
        leaving=run.leaving,
    )
    if settings.blocks_folder is not None:
        folder, budget = settings.blocks_folder, settings.disk_bytes
        if budget is None:
            budget = await _disk_budget(folder, facts)
        shared = settings.other_nodes is not None
        await server.find_blocks(folder, budget, run.boot, run.earlier, shared=shared)
        await other_blocks.index()
    return server


async def _disk_budget(folder: Path, facts: ModelFacts) -> int:
    """The budget of block files, if the operator sets none. In a thread, because it lists files."""
    others = await trio.to_thread.run_sync(other_files_bytes, folder, facts.fingerprint)
    return disk_budget_for(
        token_bytes=facts.kv_token_bytes,
        block_bytes=facts.state_bytes,
        block_tokens=facts.block_tokens,
        context_tokens=facts.context_tokens,
        others_bytes=others,
    )


async def _read_tokenizer(
    run: Run, settings: Settings, started: StartedEngine
) -> tuple[Preparer, frozenset[str]]:
    """
    What prepares requests, and the settings of thinking that the template supports. In a thread,
    because tokenizer and template are the model's, and may take any time.

    Raises:
        BootRefused: one of the two did not end.
        StartGivenUp: the start was given up meanwhile.
    """
    doing = ["the tokenizer", "tokenizer.json"]

    def read() -> tuple[Preparer, frozenset[str]]:
        preparer = Preparer(
            sequencer=run.sequencer,
            facts=started.facts,
            tokenizer=started.tokenizer,
            secret=run.secret,
            max_tokens=settings.limits.max_tokens,
            threads=run.threads,
            special_tokens=settings.special_tokens,
        )
        named = started.directory / "chat_template.jinja"
        doing[:] = "the chat template", named.name if named.exists() else "tokenizer_config.json"
        return preparer, prompts.switches(started.tokenizer, started.facts.template)

    with trio.CancelScope() as scope, run.starting.lasts(scope.cancel):
        with trio.move_on_after(LIMIT_S):
            return await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        what, file = doing
        raise BootRefused(
            f"{what} of {started.directory / file} did not end within {LIMIT_S:g} seconds for a "
            "word, so no prompt could be prepared. Serve another model."
        )
    raise StartGivenUp


def _facts_of(
    run: Run,
    settings: Settings,
    started: StartedEngine,
    switches: frozenset[str],
    infill: Infill | None,
) -> ServerFacts:
    """The facts that a server reports about itself."""
    model, facts = run.sequencer.state.model, started.facts
    return ServerFacts(
        model=facts.name,
        fingerprint=facts.fingerprint,
        context_tokens=facts.context_tokens,
        block_tokens=facts.block_tokens,
        decode_rows=facts.decode_rows,
        decode_shapes=tuple(started.engine.decode_shapes),
        row_class=started.engine.row_class,
        row_class_reason=facts.row_class_reason,
        without_drafts=facts.without_drafts,
        kv_cache=settings.kv_cache,
        started_s=wall_clock_us() // 1_000_000,
        default_max_tokens=settings.limits.max_tokens,
        vocabulary_tokens=facts.vocabulary_tokens,
        defaults=facts.defaults,
        template=facts.template,
        switches=switches,
        infill=infill,
        dtype=facts.dtype,
        policy=facts.policy,
        min_cache_tokens=model.min_cache_tokens if model is not None else 0,
        model_context_tokens=facts.model_context_tokens,
        shadow_share=_shadow_share(settings, started),
        node=settings.node,
    )


def _shadow_share(settings: Settings, started: StartedEngine) -> float:
    """
    The share of answers that are checked: by default none where the self-test failed, because
    differences are expected there.
    """
    unstable = started.self_test is not None and not started.self_test.passed
    return 0.0 if unstable and settings.shadow_by_default else settings.shadow_share


def _only(settings: Settings, server: ModelServer) -> Choice:
    """The one model of a server, once it is loaded."""
    facts = server.facts
    metadata = ModelMetadata(
        defaults=facts.defaults,
        template=facts.template,
        switches=facts.switches,
        infill=facts.infill,
        vocabulary_tokens=facts.vocabulary_tokens,
        context_tokens=facts.context_tokens,
    )
    entry = ModelEntry(name=facts.model, directory=settings.model, adapter=settings.adapter)
    return Choice(entry=entry, settings=settings, metadata=metadata)


@contextlib.asynccontextmanager
async def _run(
    settings: Settings,
    store: Store,
    secret: bytes,
    progress: Progress,
    starting: Starting,
    start_engine: StartEngine,
    heads: HeadKeeper | None,
) -> AsyncIterator[Run]:
    """
    A run of the server: checks the journal, and records the start and in the end the stop.
    """
    counts = settings.keys.counts if settings.keys is not None else None
    file = SnapshotFile(settings.snapshot, counts) if settings.snapshot is not None else None
    usable = None if settings.fold_all else file
    # It raises StartGivenUp within a moment, so it is not left to itself if this is cancelled.
    try:
        read = await trio.to_thread.run_sync(
            partial(start_journal, store, usable, progress, starting.check, settings.keys)
        )
    except JournalBroken:
        if file is not None:
            file.remove()  # otherwise the next start could pass over what this one found
        raise
    ledger, folds, agents = read.ledger, read.folds, read.folds.agents
    _require_same_place(folds.runs, ledger.state, settings)
    earlier = frozenset(folds.runs.boots)
    async with trio.open_nursery() as nursery:
        writer, engine = JournalWriter(store, heads), EngineThread()
        # From the run's first row on, which may report that the run before was lost.
        writer.observe(folds.see)
        await nursery.start(writer.run)
        await nursery.start(engine.run)
        sequencer = Sequencer(ledger, writer, lambda: activity.changed())
        snapshots = None
        if file is not None:
            snapshots = Snapshots(
                file, folds, lambda: (sequencer.state, sequencer.head), read.snapshot
            )
            writer.observe(snapshots.see)
            nursery.start_soon(snapshots.run)

        stalls = Stalls(sequencer, writer)

        def upkeep_allowed() -> bool:
            state = sequencer.state
            return not (writer.stalled or state.admission_bug is not None or state.requests)

        activity = Activity(upkeep_allowed)
        pruning = None
        if settings.keep_s is not None and settings.reader is not None:
            pruning = Pruning(
                keep_s=settings.keep_s,
                reader=settings.reader,
                sequencer=sequencer,
                writer=writer,
                activity=activity,
                agents=agents,
            )
            nursery.start_soon(pruning.run)
        fleet_heads = None
        if settings.read_heads is not None and settings.heads_s > 0:
            fleet_heads = FleetHeads(
                every_s=settings.heads_s,
                read=settings.read_heads,
                sequencer=sequencer,
                writer=writer,
            )
        run = Run(
            sequencer=sequencer,
            writer=writer,
            engine=engine,
            start_engine=start_engine,
            agents=StoredAgents(
                agents=agents,
                stored_turns=StoredTurns(agents.turns, writer, sequencer),
                writer=writer,
                sequencer=sequencer,
                fleet=settings.fleet,
            ),
            summaries=folds.summaries,
            stalls=stalls,
            admission=Admission(sequencer, writer, stalls),
            activity=activity,
            threads=PromptThreads(),
            starting=starting,
            secret=secret,
            boot=new_id(),
            earlier=earlier,
            progress=progress,
            keys=settings.keys,
            reader=settings.reader,
            elsewhere=settings.elsewhere,
            snapshot=file,
        )
        try:
            starting.check()
            _begin(run, settings, heads.accepted if heads is not None else None)
            writer.observe(run.request_log)
            writer.observe(run.agents.see)
            if fleet_heads is not None:
                nursery.start_soon(fleet_heads.run)
            yield run
            if pruning is not None:
                pruning.close()
            if fleet_heads is not None:
                fleet_heads.close()
            stopped = ev.ServerStopped(boot=run.boot, reason="asked to")
            with contextlib.suppress(CannotRecord):  # the writer reports it at its own end
                await writer.wait_committed(sequencer.append(stopped))
                if snapshots is not None:
                    await snapshots.write_last()
        finally:
            if pruning is not None:
                pruning.close()
            if snapshots is not None:
                snapshots.close()
            engine.close()
            writer.close()


def _begin(run: Run, settings: Settings, accepted: ev.LossAccepted | None) -> None:
    """
    Record the start.

    Args:
        accepted: the loss of rows that the operator has accepted.
    """
    sequencer = run.sequencer
    lost = sequencer.state.boot
    if lost is not None:
        log.warning(
            "the last server ended without shutting down (killed, or a crash)",
            open_requests=len(sequencer.state.requests),
        )
        for request, session in sequencer.state.requests.items():
            log.warning("request lost", request=request, session=session)
        sequencer.append(ev.ServerLost(boot=lost))
    place = {SHARED: settings.other_nodes is not None} if settings.node is not None else {}
    sequencer.append(
        ev.ServerStarted(
            boot=run.boot, cairn_version=cairn.__version__, settings={**settings.on_record, **place}
        )
    )
    if accepted is not None and not _is_on_record(accepted, sequencer.state):
        log.warning(
            "the journal lacks rows that it had; the operator accepted it", fact=accepted.fact
        )
        sequencer.append(accepted)


def _require_same_place(runs: Runs, state: State, settings: Settings) -> None:
    """
    Refuse to leave block files where forgetting would not reach them.

    Raises:
        BootRefused: the last run of the node kept its block files elsewhere, and has some.
    """
    shares = settings.other_nodes is not None
    if runs.shared is None or runs.shared == shares or not state.pool.disk_blocks:
        return
    where = ("its data directory", "a folder that other nodes see")[runs.shared]
    before = ("without --blocks", "with its --blocks DIR")[runs.shared]
    raise BootRefused(
        f"node {settings.node} has {state.pool.disk_blocks} block files in {where}, which "
        f"forgetting would not reach any more. Start it once {before} and with "
        "--disk-mb 0, which removes them, stop it, and start it like this again."
    )


def _is_on_record(accepted: ev.LossAccepted, state: State) -> bool:
    """Whether an earlier start recorded the same: the option may be given at each."""
    return bool(accepted.heads) and all(head in state.lost for head in accepted.heads)


async def _first(run: Run, settings: Settings, starting: Starting) -> ModelServer:
    """The server over the first model of a run."""
    sequencer, writer = run.sequencer, run.writer
    async with _recording_failure(run, starting):
        # There is no cache yet that an abandoned thread could change.
        with starting.lasts(run.engine.abandon):
            started = await load(run, settings)
        await writer.wait_committed(sequencer.state.position)
        return await model_server(run, settings, started)


@contextlib.asynccontextmanager
async def _recording_failure(run: Run, starting: Starting) -> AsyncIterator[None]:
    """Load what a run serves; if that fails, record its stop."""
    try:
        yield
    except CannotRecord as stalled:
        raise BootRefused(_UNRECORDED[stalled.reason]) from stalled
    except Exception as error:
        if starting.given_up and isinstance(error, EngineGone | StartGivenUp):
            await _stopped(run, "asked to, before it served anything")
            raise StartGivenUp from error
        await _stopped(run, f"the model was not served: {error}")
        raise


async def _stopped(run: Run, reason: str) -> None:
    """Record the stop of a run that served no request."""
    with contextlib.suppress(CannotRecord):  # the reason why it served nothing matters more
        await run.writer.wait_committed(
            run.sequencer.append(ev.ServerStopped(boot=run.boot, reason=reason))
        )
