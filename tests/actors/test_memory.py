"""
Slabs and blocks: budgets hold however many sessions compete, idle sessions give up slabs, pinned
blocks stay, and the engine keeps nothing that the journal refused. The engine runs no model, on the
real engine thread; ``Books`` takes the place of the sequencer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import cast

import attrs
import pytest
import trio
import trio.testing
from immutables import Map

from cairn.actors.memory import Memory
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.engine import EngineThread
from cairn.engine.errors import EngineFault
from cairn.engine.reports import EvictReport, MemoryReport, SealReport, SlabReport
from cairn.journal import events as ev
from cairn.journal.cache.eviction_order import Order
from cairn.journal.errors import BugError
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import Block, Model, Pool, Session, SessionId, Slab, State
from tests.support.fake_engine import FACTS, FakeEngine

TOKEN_BYTES = 10
SIZE = 512
CHUNK = 64
BLOCK_BYTES = CHUNK * TOKEN_BYTES


class ScriptedEngine(FakeEngine):
    """
    Slabs and blocks that are numbers only.

    Attributes:
        slabs: id to tokens of capacity.
        blocks: key to bytes.
        most: the most (slabs, bytes of slabs, bytes of blocks) that there ever were.
        fault: what the next call raises before it does anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slabs: dict[int, int] = {}
        self.blocks: dict[str, int] = {}
        self.most = (0, 0, 0)
        self.opened = 0
        self.fault: Exception | None = None

    def open_slab(self, capacity_tokens: int) -> SlabReport:
        """Open a slab."""
        self._fail()
        self.opened += 1
        self.slabs[self.opened] = capacity_tokens
        return self._slab_report(self.opened, capacity_tokens)

    def close_slab(self, slab: int) -> SlabReport:
        """Close a slab."""
        return self._slab_report(slab, self.slabs.pop(slab))

    def memory(self) -> MemoryReport:
        """Not used here."""
        return MemoryReport()

    def seal(self, slab: int, key: str, start: int, end: int, *, store: bool) -> SealReport:
        """Add a block, if it is to be stored."""
        self._fail()
        size = (end - start) * TOKEN_BYTES
        if store:
            self.blocks.setdefault(key, size)
        self._measure()
        return SealReport(
            digest=key,
            bytes=size,
            stored=store,
            memory_blocks=len(self.blocks),
            memory_bytes=sum(self.blocks.values()),
        )

    def evict(self, key: str) -> EvictReport:
        """Remove a block."""
        return EvictReport(
            key=key,
            bytes=self.blocks.pop(key),
            memory_blocks=len(self.blocks),
            memory_bytes=sum(self.blocks.values()),
        )

    def _fail(self) -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    def _slab_report(self, slab: int, capacity_tokens: int) -> SlabReport:
        slabs, size = self._measure()
        return SlabReport(
            slab=slab,
            capacity_tokens=capacity_tokens,
            bytes=capacity_tokens * TOKEN_BYTES,
            pool_slabs=slabs,
            pool_bytes=size,
        )

    def _measure(self) -> tuple[int, int]:
        found = len(self.slabs), sum(self.slabs.values()) * TOKEN_BYTES
        totals = (*found, sum(self.blocks.values()))
        self.most = cast(
            "tuple[int, int, int]", tuple(map(max, zip(self.most, totals, strict=True)))
        )
        return found


class Books:
    """
    The journal's state as the sessions of a test write it, without its checks.

    Attributes:
        evicted: keys, in the order in which they left.
    """

    def __init__(self, *, slabs: int = 3, tokens: int = 3 * SIZE, blocks: int = 4) -> None:
        self.evicted: list[str] = []
        self.state = State(
            model=Model(
                name="none",
                fingerprint="f",
                layers=1,
                block_tokens=CHUNK,
                decode_rows=1,
                context_tokens=4096,
                reusable=True,
                pool_slabs=slabs,
                pool_bytes=tokens * TOKEN_BYTES,
                blocks_bytes=blocks * BLOCK_BYTES,
                blocks_max=0,
                kv_sinks=0,
                kv_window=0,
                kv_rows=0,
                min_cache_tokens=0,
                state_blocks=0,
                grain=CHUNK,
            )
        )

    def append(self, *events: ev.Event, expected_seq: int | None = None) -> int:
        """Take in what ``Memory`` itself appends: a block was evicted."""
        for event in events:
            assert isinstance(event, ev.BlockEvicted)
            self.evicted.append(event.key)
            self.put(attrs.evolve(self.state.blocks[event.key], present=False))
            assert (event.memory_blocks, event.memory_bytes) == self.blocks
        return 0

    def now_us(self) -> int:
        """A time after which the TTLs of these tests have expired."""
        return 1_000_000

    @property
    def order(self) -> Order:
        """The order of eviction, computed again each time."""
        return Order(self.state)

    @property
    def blocks(self) -> tuple[int, int]:
        """(blocks in memory, their bytes)."""
        return self.state.pool.blocks, self.state.pool.block_bytes

    def session(self, name: str, state: SessionState, used: int = 0) -> None:
        """Put a session into a state."""
        known = self.state.sessions.get(SessionId(name)) or Session(
            id=SessionId(name), tenant="t", fingerprint="f", group=None, named=True
        )
        self._session(attrs.evolve(known, state=state, last_used=used or known.last_used))

    def holders(self) -> set[str]:
        """The sessions that hold a slab."""
        return {name for name, session in self.state.sessions.items() if session.slab is not None}

    def holds(self, name: str, *keys: str) -> None:
        """The blocks that a session's slab holds."""
        self._session(attrs.evolve(self.state.session(name), slab_keys=keys))

    def acquired(self, name: str) -> Callable[[SlabReport], None]:
        """Records that a session has a slab."""

        def record(report: SlabReport) -> None:
            slab = Slab(id=report.slab, capacity_tokens=report.capacity_tokens, bytes=report.bytes)
            self._session(attrs.evolve(self.state.session(name), slab=slab))
            self._slabs(report)

        return record

    def released(self, name: str) -> Callable[[SlabReport], None]:
        """Records that a session released its slab."""

        def record(report: SlabReport) -> None:
            self._session(attrs.evolve(self.state.session(name), slab=None))
            self._slabs(report)

        return record

    def sealed(self, key: str, *, pins: int = 0, used: int = 0) -> Callable[[SealReport], None]:
        """Records that a block exists."""

        def record(report: SealReport) -> None:
            self.put(
                Block(
                    key=key,
                    parent=None,
                    digest=report.digest,
                    start=0,
                    tokens=CHUNK,
                    bytes=report.bytes,
                    present=report.stored,
                    last_used=used,
                )
            )
            if pins:
                worker = SessionId("works")
                held = (*self.state.pins.get(worker, ()), *(key,) * pins)
                self.state = attrs.evolve(self.state, pins=self.state.pins.set(worker, held))
            assert (report.memory_blocks, report.memory_bytes) == self.blocks

        return record

    def _session(self, session: Session) -> None:
        sessions = self.state.sessions.set(session.id, session)
        self.state = attrs.evolve(self.state, sessions=sessions)

    def _slabs(self, report: SlabReport) -> None:
        pool = attrs.evolve(self.state.pool, slabs=report.pool_slabs, slab_bytes=report.pool_bytes)
        self.state = attrs.evolve(self.state, pool=pool)

    def put(self, block: Block) -> None:
        """Put a block into the state."""
        blocks: Map[str, Block] = self.state.blocks.set(block.key, block)
        there = [one.bytes for one in blocks.values() if one.present]
        pool = attrs.evolve(self.state.pool, blocks=len(there), block_bytes=sum(there))
        self.state = attrs.evolve(self.state, blocks=blocks, pool=pool)


@attrs.frozen(kw_only=True)
class Setup:
    """
    Memory and what it works on.

    Attributes:
        gave_up: the sessions that were asked for their slab, in order.
    """

    memory: Memory
    thread: EngineThread
    engine: ScriptedEngine
    books: Books
    gave_up: list[str]

    async def open(self, name: str, tokens: int = SIZE) -> bool:
        """A session with a request asks for a slab."""
        self.books.session(name, SessionState.RESTORING)
        return await self.memory.open_slab(tokens, self.books.acquired(name))

    async def seal(
        self, key: str, *, pins: int = 0, used: int = 0, prewarmed: bool = False
    ) -> None:
        """Seal a block."""
        record = self.books.sealed(key, pins=pins, used=used)
        await self.memory.seal(1, key, 0, CHUNK, record, prewarmed=prewarmed)

    def agree(self) -> bool:
        """Whether engine and journal have the same slabs and blocks."""
        sessions = self.books.state.sessions.values()
        held = {one.slab.id: one.slab.capacity_tokens for one in sessions if one.slab is not None}
        known = {one.key: one.bytes for one in self.books.state.blocks.values() if one.present}
        size = sum(held.values()) * TOKEN_BYTES
        return (held, known) == (self.engine.slabs, self.engine.blocks) and Pool(
            slabs=len(held),
            slab_bytes=size,
            blocks=len(known),
            block_bytes=sum(known.values()),
        ) == self.books.state.pool


@attrs.frozen
class Owner:
    """A session that gives up its slab."""

    name: str
    give_up: Callable[[str, str], Awaitable[None]]

    async def give_up_slab(self, reason: str) -> None:
        """Release it at once."""
        await self.give_up(self.name, reason)


@attrs.frozen
class Owners(Mapping[str, Owner]):
    """All sessions that there may be."""

    give_up: Callable[[str, str], Awaitable[None]]

    def __getitem__(self, name: str) -> Owner:
        return Owner(name, self.give_up)

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


@contextlib.asynccontextmanager
async def setup(**budgets: int) -> AsyncIterator[Setup]:
    """Memory over a running engine thread."""
    books, scripted, thread = Books(**budgets), ScriptedEngine(), EngineThread()
    gave_up: list[str] = []

    async def give_up(name: str, _reason: str) -> None:
        gave_up.append(name)
        slab = books.state.session(name).slab
        assert slab is not None
        await thread.call(lambda mlx: mlx.close_slab(slab.id), books.released(name))

    facts = attrs.evolve(FACTS, kv_token_bytes=TOKEN_BYTES)
    memory = Memory(cast("Sequencer", books), thread, facts, Owners(give_up))
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        thread.install(scripted)
        try:
            yield Setup(memory=memory, thread=thread, engine=scripted, books=books, gave_up=gave_up)
        finally:
            thread.close()


def bug() -> BugError:
    """The error that the sequencer raises if an invariant breaks."""
    return BugError("bug-1", "INV-5", "memory does not add up")


# --- slabs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget",
    [{"slabs": 3, "tokens": 100 * SIZE}, {"slabs": 100, "tokens": 3 * SIZE}],
    ids=["slabs", "bytes"],
)
def test_many_sessions_ask_for_slabs_at_once(budget: dict[str, int]) -> None:
    """
    However many sessions ask, no more slabs are open than the budget allows. Each session is served
    once one of the others is idle.
    """
    served: list[str] = []

    async def main() -> None:
        async with setup(**budget) as home, trio.open_nursery() as nursery:

            async def ask(name: str) -> None:
                while not await home.open(name):
                    await trio.lowlevel.checkpoint()
                served.append(name)
                home.books.session(name, SessionState.IDLE, used=len(served))

            for index in range(20):
                nursery.start_soon(ask, f"s{index}")
            while len(served) < 20:
                await trio.lowlevel.checkpoint()

            assert home.engine.most == (3, 3 * SIZE * TOKEN_BYTES, 0)
            assert home.engine.opened == 20
            assert len(home.gave_up) == 17
            assert home.agree()

    trio.run(main)

    assert len(set(served)) == 20


def test_no_slab_can_be_released() -> None:
    """
    If all sessions have a request, a session that asks gets ``False``, and no slab is opened or
    closed.
    """

    async def main() -> None:
        async with setup() as home:
            for name in "abc":
                assert await home.open(name)
            assert not await home.open("d")

            assert home.books.holders() == set("abc")
            assert home.gave_up == []
            assert home.agree()

    trio.run(main)


def test_the_least_recently_used_idle_session_gives_up_its_slab() -> None:
    """Idle sessions give up their slabs, the least recently used first."""

    async def main() -> None:
        async with setup() as home:
            for name, used in (("a", 30), ("b", 10), ("c", 20)):
                await home.open(name)
                home.books.session(name, SessionState.IDLE, used=used)
            for name in "def":
                assert await home.open(name)

            assert home.gave_up == ["b", "c", "a"]
            assert home.books.holders() == set("def")
            assert home.agree()

    trio.run(main)


def test_a_settling_session_gives_up_its_slab_last() -> None:
    """
    A settling session gives up its slab only if no session is idle, even if it was used less
    recently than the idle ones.
    """

    async def main() -> None:
        async with setup() as home:
            for name, state, used in (
                ("later", SessionState.SETTLING, 6),
                ("settles", SessionState.SETTLING, 5),
                ("rests", SessionState.IDLE, 9),
            ):
                await home.open(name)
                home.books.session(name, state, used=used)
            for name in "de":
                assert await home.open(name)

            assert home.gave_up == ["rests", "settles"]
            assert home.books.holders() == {"later", "d", "e"}

    trio.run(main)


def test_several_slabs_are_released_for_a_large_one() -> None:
    """As many slabs are released as a larger one needs, and no more."""

    async def main() -> None:
        async with setup(slabs=10, tokens=5 * SIZE) as home:
            for used, name in enumerate("abcde", start=1):
                await home.open(name)
                home.books.session(name, SessionState.IDLE, used=used)
            assert await home.open("large", 3 * SIZE)

            assert home.gave_up == ["a", "b", "c"]
            assert home.books.holders() == {"d", "e", "large"}
            assert home.engine.most[1] == 5 * SIZE * TOKEN_BYTES

    trio.run(main)


@pytest.mark.parametrize("error", [bug(), ValueError("no event")], ids=["bug", "other"])
def test_a_slab_that_the_journal_refused_is_closed(error: Exception) -> None:
    """
    If the measurement cannot be recorded, the engine closes the slab again, and the next session is
    served.
    """

    def refused(report: SlabReport) -> None:
        raise error

    async def main() -> None:
        async with setup() as home:
            await home.open("a")
            with pytest.raises(type(error)) as caught:
                await home.memory.open_slab(SIZE, refused)
            assert caught.value is error
            assert home.engine.opened == 2
            assert list(home.engine.slabs) == [1]
            assert home.agree()
            assert await home.open("b")
            assert home.agree()

    trio.run(main)


def test_a_request_goes_before_a_spare_slab() -> None:
    """There was room at the check; a request has taken it by the time the slab is opened."""

    async def main() -> None:
        spared: list[bool | None] = []
        async with setup(slabs=1) as home:

            async def spare() -> None:
                opened = await home.memory.open_spare_slab(SIZE, lambda _: None, lambda: True)
                spared.append(opened)

            go = threading.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(home.thread.call, lambda _: go.wait(60), lambda _: None)
                nursery.start_soon(home.open, "asks")
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(spare)
                await trio.testing.wait_all_tasks_blocked()
                go.set()
            assert ([False], {"asks"}) == (spared, home.books.holders())
            assert home.agree()

    trio.run(main)


def test_a_slab_that_the_engine_refused() -> None:
    """If no slab was opened, none is closed, and the engine's error is raised."""

    async def main() -> None:
        async with setup() as home:
            await home.open("a")
            home.engine.fault = EngineFault("no memory")
            with pytest.raises(EngineFault, match="no memory"):
                await home.open("b")
            assert home.books.holders() == {"a"}
            assert home.agree()
            assert await home.open("b")

    trio.run(main)


# --- blocks ----------------------------------------------------------------------------------


def test_a_full_store_evicts_the_least_recently_used() -> None:
    """Blocks are evicted in the order of their last use until the new one fits."""

    async def main() -> None:
        async with setup(blocks=4) as home:
            for key, used in (("a", 4), ("b", 1), ("c", 3), ("d", 2)):
                await home.seal(key, used=used)
            assert home.books.evicted == []
            await home.seal("e", used=5)

            assert home.books.evicted == ["b", "d"]  # a tenth of the store is freed with it
            assert set(home.engine.blocks) == {"a", "c", "e"}
            assert home.agree()

    trio.run(main)


def test_prewarmed_blocks_evict_no_block_that_a_slab_holds() -> None:
    """
    A prewarmed block evicts only blocks that no slab holds. If slabs hold all of them, it is not
    stored and nothing is evicted; a request's block is stored anyway.
    """

    async def main() -> None:
        async with setup(blocks=4) as home:
            for key, used in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
                await home.seal(key, used=used)
            await home.open("ready")
            home.books.holds("ready", "a", "b")
            await home.seal("e", used=5, prewarmed=True)
            assert home.books.evicted == ["c", "d"]

            await home.seal("f", used=6)
            home.books.holds("ready", "a", "b", "e", "f")
            await home.seal("g", used=7, prewarmed=True)
            assert home.books.evicted == ["c", "d"]
            assert set(home.engine.blocks) == {"a", "b", "e", "f"}
            await home.seal("h", used=8)
            assert home.books.evicted == ["c", "d", "a", "b"]

    trio.run(main)


def test_pinned_blocks_stay() -> None:
    """A pinned block is never evicted, even if it is the least recently used one."""

    async def main() -> None:
        async with setup(blocks=4) as home:
            for key, pins, used in (("a", 1, 1), ("b", 0, 3), ("c", 2, 2), ("d", 0, 4)):
                await home.seal(key, pins=pins, used=used)
            for used, key in enumerate("efgh", start=5):
                await home.seal(key, used=used)

            assert not {"a", "c"} & set(home.books.evicted)
            assert {"a", "c", "h"} <= set(home.engine.blocks)
            assert home.engine.most[2] <= 4 * BLOCK_BYTES
            assert home.agree()

    trio.run(main)


def test_a_block_pinned_meanwhile_is_not_removed() -> None:
    """An expired block is pinned by a decision before the removal reaches it."""

    async def main() -> None:
        async with setup() as home:
            books = home.books
            await home.seal("over", used=1)
            books.put(attrs.evolve(books.state.blocks["over"], expires_us=1))
            async with trio.open_nursery() as nursery, home.memory.eviction_lock:
                nursery.start_soon(home.memory.remove_expired, lambda: True)
                await trio.testing.wait_all_tasks_blocked()
                pins = books.state.pins.set(SessionId("works"), ("over",))
                books.state = attrs.evolve(books.state, pins=pins)
            assert [] == books.evicted
            assert home.agree()

            books.state = attrs.evolve(books.state, pins=Map())
            assert 1 == await home.memory.remove_expired(lambda: True)
            assert ["over"] == books.evicted

    trio.run(main)


def test_a_store_of_pinned_blocks() -> None:
    """If no block can be evicted, the new one is hashed and not stored."""
    reports: list[SealReport] = []

    async def main() -> None:
        async with setup(blocks=2) as home:
            for key in "ab":
                await home.seal(key, pins=1)
            await home.memory.seal(1, "c", 0, CHUNK, reports.append)

            assert home.books.evicted == []
            assert set(home.engine.blocks) == {"a", "b"}

    trio.run(main)

    assert [(False, "c", 2)] == [(one.stored, one.digest, one.memory_blocks) for one in reports]


def test_an_existing_block_needs_no_room() -> None:
    """Sealing an existing block again in a full store evicts nothing."""

    async def main() -> None:
        async with setup(blocks=2) as home:
            for key in "ab":
                await home.seal(key)
            await home.seal("a")

            assert home.books.evicted == []
            assert home.agree()

    trio.run(main)


def test_many_sessions_seal_at_once() -> None:
    """
    However many sessions seal at once, the store never exceeds its budget, and no block is evicted
    twice.
    """

    async def main() -> None:
        async with setup(blocks=4) as home:
            async with trio.open_nursery() as nursery:
                for index in range(30):
                    nursery.start_soon(lambda used: home.seal(f"b{used}", used=used), index)

            assert home.engine.most[2] == 4 * BLOCK_BYTES
            assert len(home.books.evicted) == len(set(home.books.evicted))
            assert len(home.books.evicted) + len(home.engine.blocks) == 30
            assert home.agree()

    trio.run(main)


@pytest.mark.parametrize("error", [bug(), ValueError("no event")], ids=["bug", "other"])
@pytest.mark.parametrize("full", [False, True])
def test_a_block_that_the_journal_refused_is_not_stored(error: Exception, full: bool) -> None:
    """
    If the measurement cannot be recorded, the store does not keep the block; the evictions for it
    are on record.
    """

    def refused(report: SealReport) -> None:
        raise error

    async def main() -> None:
        async with setup(blocks=2) as home:
            for used, key in enumerate("ab" if full else "a", start=1):
                await home.seal(key, used=used)
            with pytest.raises(type(error)) as caught:
                await home.memory.seal(1, "c", 0, CHUNK, refused)
            assert caught.value is error
            assert "c" not in home.engine.blocks
            assert home.agree()
            await home.seal("c", used=9)
            assert "c" in home.engine.blocks
            assert home.agree()

    trio.run(main)


def test_a_refusal_removes_no_earlier_block() -> None:
    """
    A block that is on record stays in the store, even if sealing it again was refused. A block that
    was never stored is not evicted.
    """

    def refused(report: SealReport) -> None:
        raise bug()

    async def main() -> None:
        async with setup(blocks=2) as home:
            for key in "ab":
                await home.seal(key, pins=1)
            for key in "ac":
                with pytest.raises(BugError):
                    await home.memory.seal(1, key, 0, CHUNK, refused)
            assert set(home.engine.blocks) == {"a", "b"}
            assert home.books.evicted == []
            assert home.agree()

    trio.run(main)


def test_a_block_that_the_engine_refused() -> None:
    """If nothing was sealed, nothing is evicted, and the engine's error is raised."""

    async def main() -> None:
        async with setup() as home:
            await home.seal("a")
            home.engine.fault = EngineFault("slab 1 is not held")
            with pytest.raises(EngineFault, match="not held"):
                await home.seal("b")
            assert set(home.engine.blocks) == {"a"}
            assert home.agree()

    trio.run(main)
