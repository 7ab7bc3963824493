"""
A seed decides all of a simulation: the order of trio's tasks, when threads run, what the disk does,
what clients ask for and when they leave, the server's settings, its stops and crashes.

``python -P -m tests.simulation.simulation --seeds 100 --first 1`` runs simulations, and prints the
seed and the fault of each that fails.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest import mock

import attrs
import click
import structlog
import trio
import trio.testing

import cairn
from cairn.actors import boot as boot_module
from cairn.actors import clock as clock_module
from cairn.actors import journal_start as journal_start_module
from cairn.actors import snapshots as snapshots_module
from cairn.actors.agents import agents as agents_module
from cairn.actors.boot import booted
from cairn.actors.models import model_server as model_server_module
from cairn.actors.models import swap as swap_module
from cairn.actors.models.model_server import ModelServer
from cairn.actors.requests import prepare as prepare_module
from cairn.actors.requests.limits import Limits
from cairn.actors.server import Server
from cairn.actors.settings import BootRefused, Settings
from cairn.actors.threads.writer import WriterDied
from cairn.engine import schedule as schedule_module
from cairn.engine.prompt.template import Message
from cairn.journal.ledger import Clock
from cairn.journal.replay import Finding, replay
from tests.simulation.clients import TENANTS, Client, World, Wrong
from tests.simulation.disk import Faults, SimulatedDisk
from tests.simulation.fake import BLOCK_TOKENS, FAULT, Machine
from tests.simulation.turns import in_turn
from tests.support.fake_engine import NO_MODEL, TOKEN_BYTES

_SECRET = b"a secret of the simulation, 32 b"
_EPOCH_US = 1_700_000_000_000_000
_LONGEST_S = 50_000.0
"""Virtual seconds after which tasks that wait count as deadlocked."""
_PATIENT_S = 3600.0
"""Virtual seconds that no request needs, whatever the disk does."""
_LONGEST_CPU_S = 30
"""Seconds of processor time after which a simulation counts as one that never ends."""


class NeverEnds(BaseException):
    """A simulation goes on and on. No session may take it for an error of its own."""


@attrs.frozen(kw_only=True)
class Ran:
    """
    A simulation.

    Attributes:
        head: the hash of the journal's last row.
        rows: how many there are.
        answers: how many answers clients have read to their end.
        refused: how many requests were refused.
        crashes: how often the machine went down.
        ended_full: how often the server ended because its disk was full.
        bugs: how many faults of the device are on record.
    """

    seed: int
    head: str
    rows: int
    answers: int
    refused: int
    crashes: int
    ended_full: int
    bugs: int


def simulate(seed: int) -> Ran:
    """
    Run one simulation.

    Raises:
        Wrong: something is not as it must be.
        Exception: the server failed.
    """
    random = Random(seed)
    clock = trio.testing.MockClock(autojump_threshold=0)
    disk = SimulatedDisk(Random(f"{seed}/disk"), _faults(random))
    machine = _machine(seed, has_class=random.random() < 0.7)
    folder = tempfile.TemporaryDirectory(prefix="cairn-simulation-")
    settings = _settings(random, Path(folder.name))
    totals = {"answers": 0, "refused": 0}
    crashes = ended_full = 0
    with folder, _outside(random, clock), in_turn(random, clock):
        for run in range(random.choice((1, 2, 3))):
            crash_after = 60 * random.random() if random.random() < 0.5 else None
            world = World(disk, is_patient=settings.limits.request_s == _PATIENT_S)
            try:
                trio.run(_life, world, f"{seed}/{run}", machine, settings, crash_after, clock=clock)
            except (BootRefused, BaseExceptionGroup) as failed:
                # A server that finds no room at its start or its end says so, and ends.
                if not (disk.was_full and _is_only(failed, BootRefused, WriterDied)):
                    raise
                ended_full += 1
            totals["answers"] += world.answers
            totals["refused"] += world.refused
            crashes += world.crashed
            _check_journal(disk)
            disk.reopen()
    return Ran(
        seed=seed,
        head=disk.head()[1],
        rows=len(disk.rows),
        crashes=crashes,
        ended_full=ended_full,
        bugs=len(disk.bugs),
        **totals,
    )


_jump = trio.testing.MockClock._autojump


def _jump_or_end(clock: trio.testing.MockClock) -> None:
    """Jump to the next deadline, because all tasks wait. Without one, they wait for ever."""
    before = clock.current_time()
    _jump(clock)
    if clock.current_time() == before:
        raise Wrong("all tasks wait, and none of them for a time")


def _is_only(error: BaseException, *kinds: type[Exception]) -> bool:
    """Whether an error, or all of a group, is of these kinds."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_only(one, *kinds) for one in error.exceptions)
    return isinstance(error, kinds)


async def _life(
    world: World, seed: str, machine: Machine, settings: Settings, crash_after: float | None
) -> None:
    """One run of the server: its start, its clients, and its stop or crash."""
    random = Random(seed)
    done = trio.Event()
    with trio.fail_after(_LONGEST_S):
        async with (
            booted(settings, world.disk, _SECRET, start_engine=machine.start) as server,
            trio.open_nursery() as nursery,
        ):
            if crash_after is not None:
                nursery.start_soon(_crash, world, crash_after, done)
            nursery.start_soon(_clients, server, world, random, seed, done)
            await done.wait()
            if not world.crashed:
                await _check_quiet(server, machine, settings)
            nursery.cancel_scope.cancel()


async def _clients(
    server: Server, world: World, random: Random, seed: str, done: trio.Event
) -> None:
    together: dict[str, list[tuple[Message, ...]]] = {tenant: [] for tenant in TENANTS}
    are_shared, pauses = random.random() < 0.5, random.choice((0.02, 1))
    async with trio.open_nursery() as nursery:
        for place in range(random.choice((1, 2, 4, 8))):
            own = Random(f"{seed}/{place}")
            tenant = own.choice(TENANTS)
            histories = together[tenant] if are_shared else []
            client = Client(server, world, own, f"client{place}", tenant, pauses, histories)
            nursery.start_soon(client.run, random.choice((1, 3, 6)))
    done.set()


async def _crash(world: World, after: float, done: trio.Event) -> None:
    """Take the machine down. What the process does from then on leaves no trace."""
    await trio.sleep(after)
    world.crashed = True
    world.disk.crash()
    done.set()


async def _check_quiet(server: Server, machine: Machine, settings: Settings) -> None:
    """When all clients have gone, all work ends, and every slab is a session's."""
    loaded = server.loaded
    with trio.move_on_after(_LONGEST_S / 2) as waited:
        await _quiet(loaded)
        await trio.sleep(2 * settings.limits.slab_idle_s + 1)
        await _quiet(loaded)
    if waited.cancelled_caught:
        raise Wrong(f"work goes on without a request: {server.statistics()}")
    state = loaded.sequencer.state
    assert machine.engine is not None
    owned = {held.slab.id for held in state.sessions.values() if held.slab is not None}
    if machine.engine.open_slabs != owned:
        raise Wrong(f"slabs {machine.engine.open_slabs} are open, and sessions have {owned}")
    if state.requests or state.pins:
        raise Wrong(f"requests {dict(state.requests)} or pins {dict(state.pins)} are left")


async def _quiet(loaded: ModelServer) -> None:
    """Wait until there is no request, no work and no shadow check."""
    activity = loaded.activity
    while activity.at_work or activity.in_flight or loaded.sequencer.state.shadow is not None:
        await activity.wait_change()


def _check_journal(disk: SimulatedDisk) -> None:
    """Every invariant holds, and no violation is on record."""
    found = [one for one in replay(disk.read()).findings if not _is_of_device(one)]
    if found:
        raise Wrong(f"{found[0].invariant} at row {found[0].position}: {found[0].message}")


def _is_of_device(found: Finding) -> bool:
    """Whether a finding is only that a fault of the simulated device is on record."""
    return found.recorded and found.invariant == "CRASH" and FAULT in found.message


# --- what a seed draws ----------------------------------------------------------------------------


def _faults(random: Random) -> Faults:
    if random.random() < 0.4:
        return Faults()
    return Faults(
        slow=random.choice((0.0, 0.05, 0.3)),
        full=random.choice((0.0, 0.0, 0.01, 0.05)),
        full_tries=random.choice((1, 5, 20)),
        lies=random.choice((0, 0, 3)),
    )


def _machine(seed: int, *, has_class: bool) -> Machine:
    own = Random(f"{seed}/device")
    return Machine(
        random=own,
        has_class=has_class,
        slow=own.choice((0, 0.05, 0.3)),
        failing=own.choice((0, 0, 0, 0.003, 0.02)),
    )


def _settings(random: Random, folder: Path) -> Settings:
    slabs = random.choice((1, 2, 4, 8))
    blocks = random.choice((0, 3, 10, 1000))
    return Settings(
        model=str(NO_MODEL),
        block_tokens=BLOCK_TOKENS,
        pool_slabs=slabs,
        pool_bytes=slabs * random.choice((400, 1000)) * TOKEN_BYTES,
        blocks_bytes=blocks * BLOCK_TOKENS * TOKEN_BYTES,
        blocks_folder=random.choice((None, Path("blocks"))),
        snapshot=random.choice((None, folder / "snapshot")),
        disk_bytes=random.choice((5, 1000)) * BLOCK_TOKENS * TOKEN_BYTES,
        prewarm=random.random() < 0.7,
        shadow_share=random.choice((0.0, 0.0, 0.5)),
        min_cache_tokens=random.choice((0, 0, 30)),
        limits=Limits(
            queue=random.choice((2, 16)),
            sessions=random.choice((3, 1000)),
            max_tokens=16,
            heartbeat_s=random.choice((1.0, 10.0)),
            drain_s=random.choice((0.5, 30.0)),
            slab_idle_s=random.choice((0.5, 60.0)),
            patience_s=random.choice((1.0, 120.0)),
            ttl_s=random.choice((10, 86_400)),
            request_s=random.choice((5.0, _PATIENT_S)),
        ),
    )


@contextlib.contextmanager
def _outside(random: Random, clock: trio.testing.MockClock) -> Iterator[None]:
    """Ids and time from the seed, and no log."""

    def new_id() -> str:
        return str(uuid.UUID(int=random.getrandbits(128), version=4))

    def now_us() -> int:
        return _EPOCH_US + round(clock.current_time() * 1e6)

    def ledger_clock() -> Clock:
        return Clock(new_id=new_id, now_us=now_us, version=cairn.__version__)

    changed = (
        (journal_start_module, "clock", ledger_clock),
        (boot_module, "new_id", new_id),
        (boot_module, "wall_clock_us", now_us),
        (agents_module, "wall_clock_us", now_us),
        (clock_module, "new_id", new_id),
        (swap_module, "wall_clock_us", now_us),
        (model_server_module, "new_id", new_id),
        (model_server_module, "wall_clock_us", now_us),
        (snapshots_module, "ROWS_MIN", 200),
        (trio.testing.MockClock, "_autojump", _jump_or_end),
        (schedule_module, "SMALLEST_SLAB", random.choice((64, 64, 512))),
        (prepare_module, "secrets", SimpleNamespace(randbits=random.getrandbits)),
    )
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    try:
        with contextlib.ExitStack() as patches:
            for module, name, value in changed:
                patches.enter_context(mock.patch.object(module, name, value))
            yield
    finally:
        structlog.configure(**before)


@click.command()
@click.option("--first", default=1, show_default=True, help="The first seed.")
@click.option("--seeds", default=100, show_default=True, help="How many seeds to run.")
@click.option("--until-failed", is_flag=True, help="End with the first seed that fails.")
def main(first: int, seeds: int, until_failed: bool) -> None:
    """Run simulations. Exits with 1 if one of them fails."""
    signal.signal(signal.SIGPROF, _end)
    answers = refused = crashes = bugs = rows = 0
    failed = []
    for seed in range(first, first + seeds):
        if until_failed:
            click.echo(f"seed {seed}")
        signal.setitimer(signal.ITIMER_PROF, _LONGEST_CPU_S, _LONGEST_CPU_S)
        try:
            ran = simulate(seed)
        except BaseException as error:
            fault = _first(error)
            if isinstance(fault, KeyboardInterrupt):
                raise
            failed.append(seed)
            click.echo(f"seed {seed}: {type(fault).__name__}: {fault}".splitlines()[0])
            if until_failed:
                break
            continue
        answers += ran.answers
        refused += ran.refused
        crashes += ran.crashes
        bugs += ran.bugs
        rows += ran.rows
    click.echo(
        f"{seeds} seeds: {answers} answers, {refused} refused, {crashes} crashes, {bugs} bugs, "
        f"{rows} rows; failed: {failed or 'none'}"
    )
    raise SystemExit(1 if failed else 0)


def _end(*_: object) -> None:
    raise NeverEnds(f"it has taken {_LONGEST_CPU_S} seconds of processor time")


def _first(error: BaseException) -> BaseException:
    """The first of the faults."""
    while isinstance(error, (BaseExceptionGroup, trio.TrioInternalError)):
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if inner is None:
            break
        error = inner
    return error


if __name__ == "__main__":
    main()
