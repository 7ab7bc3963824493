"""
From a store and a model to a running server, and back: the one place where everything is wired.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import structlog
import trio

import cairn
from cairn.actors.engine import EngineThread
from cairn.actors.messages import JournalFull
from cairn.actors.outside import new_id, outside
from cairn.actors.sequencer import Sequencer
from cairn.actors.server import Limits, Server
from cairn.actors.writer import JournalWriter
from cairn.engine.reports import ModelFacts
from cairn.journal import events as ev
from cairn.journal.ledger import Ledger
from cairn.journal.replay import Replay
from cairn.journal.runs import Runs
from cairn.journal.state import State
from cairn.journal.store import Store

log = structlog.get_logger("cairn")


_NO_ROOM = (
    "There is no room on the journal's disk, so nothing could be put on record. Free some space, "
    "or name another place with --data-dir."
)


class BootRefused(Exception):
    """
    The server does not start; the message says what, where and what to do. The operator's.
    """


@attrs.frozen(kw_only=True)
class Settings:
    """
    What an operator chose.

    Attributes:
        model: a model directory or a hub's name.
        model_name: what clients see, by default the directory's name.
        adapter: the directory of an adapter over the model.
        chunk_tokens: C, or None for the device's.
        decode_rows: W, or None for the device's.
        kv_cache: Cairn's cache classes or mlx-lm's.
        pool_slabs: how many slabs there may be.
        pool_bytes: the budget of slabs, or None for what goes with the model's size.
        blocks_bytes: the budget of sealed blocks in memory, likewise.
        blocks_folder: where block files lie, or None to have none.
        disk_bytes: the budget of block files; with 0 those that are there are removed.
        accept_unstable: serve even if the self-test fails.
        accept_tight: load a model even where it may not fit in memory.
        on_record: what of this goes into the journal.
    """

    model: str
    model_name: str | None = None
    adapter: str | None = None
    chunk_tokens: int | None = None
    decode_rows: int | None = None
    kv_cache: Literal["slab", "mlx-lm"] = "slab"
    pool_slabs: int = 16
    pool_bytes: int | None = None
    blocks_bytes: int | None = None
    blocks_folder: Path | None = None
    disk_bytes: int = 0
    accept_unstable: bool = False
    accept_tight: bool = False
    limits: Limits = attrs.field(factory=Limits)
    on_record: Mapping[str, Any] = attrs.field(factory=dict)


Progress = Callable[[str, int, int], None]


def _no_progress(what: str, done: int, total: int) -> None:
    """
    Nobody watches.
    """


def read_journal(
    store: Store,
    progress: Progress = _no_progress,
    watch: Callable[[ev.Recorded], None] | None = None,
) -> Replay:
    """
    Fold and check a journal as it is.

    Args:
        watch: told of each event.

    Raises:
        BootRefused: it does not hold, so nothing may be built on it.
    """
    fold, total = Replay(store.base()), store.head()[0]
    for row in store.read():
        recorded = fold.feed(row)
        if watch is not None and recorded is not None:
            watch(recorded)
        if row.position % 1000 == 0 or row.position == total:
            progress("reading the journal", row.position, total)
    news = [found for found in fold.report().findings if not found.recorded]
    if news:
        first = news[0]
        log.error(
            "the journal does not hold",
            bug_id=first.bug_id,
            invariant=first.invariant,
            row=first.position,
            fact=first.message,
        )
        raise BootRefused(
            f"the journal does not hold: {first.invariant} at row {first.position} "
            f"({first.message}), bug id {first.bug_id}. Nothing was changed. See it with "
            "`ops verify` and `ops replay`; to go on without it, keep the file for the record and "
            "start with another --data-dir."
        )
    return fold


@contextlib.asynccontextmanager
async def booted(
    settings: Settings, store: Store, secret: bytes, progress: Progress = _no_progress
) -> AsyncIterator[Server]:
    """
    A running server over a store. When the context is left, it has drained and the journal says
    that it stopped.

    Raises:
        BootRefused: the journal does not hold, or the device is not stable.
        ModelRefused: the model cannot be served.
    """
    runs = Runs()
    fold = read_journal(store, progress, runs.see)
    ledger = Ledger(outside(), state=fold.state, head=fold.report().head)
    async with trio.open_nursery() as nursery:
        writer, engine = JournalWriter(store), EngineThread()
        await nursery.start(writer.run)
        await nursery.start(engine.run)
        sequencer = Sequencer(ledger, writer)
        boot = new_id()
        try:
            server = await _wired(settings, sequencer, writer, engine, secret, boot, runs, progress)
            async with trio.open_nursery() as serving:
                await serving.start(server.run)
                yield server
                await server.drain()
            await server.write_blocks(partial(progress, "writing blocks to files"))
            stopped = ev.ServerStopped(boot=boot, reason="asked to")
            with contextlib.suppress(JournalFull):  # the writer's own end tells of it
                await writer.wait_committed(sequencer.append(stopped))
        finally:
            engine.close()
            writer.close()


async def _wired(
    settings: Settings,
    sequencer: Sequencer,
    writer: JournalWriter,
    engine: EngineThread,
    secret: bytes,
    boot: str,
    runs: Runs,
    progress: Progress,
) -> Server:
    lost = sequencer.state.boot
    if lost is not None:
        log.warning("the last run did not stop", open_requests=len(sequencer.state.requests))
        for request, session in sequencer.state.requests.items():
            log.warning("request lost", request=request, session=session)
        sequencer.append(ev.ServerLost(boot=lost))
    sequencer.append(
        ev.ServerStarted(boot=boot, cairn_version=cairn.__version__, settings=settings.on_record)
    )
    try:
        started = await engine.load(lambda: _start(settings, sequencer.state, progress))
        engine.install(started.engine)
        _put_on_record(settings, sequencer, started)
        await writer.wait_committed(sequencer.state.position)
    except JournalFull as full:
        raise BootRefused(_NO_ROOM) from full
    except Exception as error:
        reason = f"the model was not served: {error}"
        with contextlib.suppress(JournalFull):  # why it is not served comes first
            await writer.wait_committed(
                sequencer.append(ev.ServerStopped(boot=boot, reason=reason))
            )
        raise
    server = Server(
        sequencer=sequencer,
        writer=writer,
        engine=engine,
        facts=started.facts,
        tokenizer=started.loaded.tokenizer,
        secret=secret,
        limits=settings.limits,
        kv_cache=settings.kv_cache,
    )
    if settings.blocks_folder is not None:
        folder, budget = settings.blocks_folder, settings.disk_bytes
        await server.find_blocks(folder, budget, boot, runs.boots)
    return server


def _start(settings: Settings, state: State, progress: Progress) -> Any:
    # MLX comes in here, on the engine's thread, and nowhere before.
    from cairn.engine.mlx_start import start_engine

    def remembered(fingerprint: str) -> bool:
        found = state.self_tests.get(fingerprint)
        return found is not None and found.passed

    return start_engine(
        settings.model,
        name=settings.model_name,
        chunk_tokens=settings.chunk_tokens,
        decode_rows=settings.decode_rows,
        kv_cache=settings.kv_cache,
        pool_bytes=settings.pool_bytes,
        blocks_bytes=settings.blocks_bytes,
        remembered=remembered,
        progress=progress,
        adapter=settings.adapter,
        accept_tight=settings.accept_tight,
    )


def _put_on_record(settings: Settings, sequencer: Sequencer, started: Any) -> None:
    """
    Journal the model and its self-test.

    Raises:
        BootRefused: the pool holds nothing, or the self-test failed and the operator did not accept
            that.
    """
    facts: ModelFacts = started.facts
    if facts.context_tokens < 2:  # a prompt and an answer, of a token each
        raise BootRefused(
            f"the memory for sessions ({started.held.pool_bytes} bytes) does not hold the KV of "
            f"one chunk of {facts.chunk_tokens} tokens ({facts.kv_token_bytes} bytes each), so "
            "nothing could be served. Start with a larger --pool-mb or a smaller --chunk-tokens."
        )
    if started.tight is not None:
        log.warning("memory is tight", fact=started.tight)
        sequencer.append(ev.OperatorActed(action="accept_tight_memory", detail=started.tight))
    known = sequencer.state.self_tests.get(facts.fingerprint)
    tested = started.tested
    if started.narrowed is not None:
        other, failed_test = started.narrowed
        sequencer.append(_self_test(other, failed_test))
        log.warning(
            "one row a decode pass", failed=[n for n, ok in failed_test.findings.items() if not ok]
        )
    if tested is not None:
        sequencer.append(_self_test(facts.fingerprint, tested))
    elif known is not None:
        sequencer.append(attrs.evolve(known, duration_us=0, remembered=True))
    if tested is not None and not tested.passed:
        failed = ", ".join(name for name, held in tested.findings.items() if not held)
        if not settings.accept_unstable:
            raise BootRefused(
                f"the self-test failed on this device ({failed}), so a cache hit might not give "
                "the bits of a miss. Start with --accept-unstable to serve all the same."
            )
        sequencer.append(ev.OperatorActed(action="accept_unstable", detail=failed))
    sequencer.append(
        ev.ModelLoaded(
            name=facts.name,
            directory=str(started.loaded.directory.resolve()),
            adapter=str(started.loaded.adapter.resolve()) if started.loaded.adapter else "",
            fingerprint=facts.fingerprint,
            fields=facts.fields,
            layers=facts.layers,
            chunk_tokens=facts.chunk_tokens,
            decode_rows=facts.decode_rows,
            context_tokens=facts.context_tokens,
            reusable=facts.reusable,
            pool_slabs=settings.pool_slabs,
            pool_bytes=started.held.pool_bytes,
            blocks_bytes=started.held.blocks_bytes,
        )
    )


def _self_test(fingerprint: str, tested: Any) -> ev.SelfTestFinished:
    return ev.SelfTestFinished(
        fingerprint=fingerprint,
        findings=tested.findings,
        passed=tested.passed,
        error_max=tested.error_max,
        duration_us=tested.duration_us,
        remembered=False,
    )
