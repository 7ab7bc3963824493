"""
Blocks between memory and files in a running server: what is loaded before a decision, what ends the
loading, what is written when, and what happens if something fails.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
import trio.testing

from cairn.actors.errors import Broken
from cairn.actors.requests.messages import Generate
from cairn.actors.server import Server
from cairn.engine.machine.disk import disk_budget_for
from cairn.engine.mlx.blocks import SealedBlock
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from cairn.journal.runs import Runs
from tests.gate.conversation import words
from tests.support.in_process_server import MIB, Said, ask, generate, local, serving, wait_idle

pytestmark = pytest.mark.trio


@attrs.define
class Setup:
    """A journal and a folder of block files."""

    model: Path
    folder: Path
    store: MemoryStore = attrs.field(factory=MemoryStore)

    def serving(self, **changes: Any) -> Any:
        """A server over both."""
        usual = {"blocks_folder": self.folder, "disk_bytes": 64 * MIB}
        return serving(self.model, self.store, **{**usual, **changes})

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        """The journal's events of some kinds."""
        found = (decode(row).event for row in self.store.rows)
        return [event for event in found if isinstance(event, kinds)]

    def files(self) -> list[Path]:
        """All files in the folder."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def is_valid(self) -> bool:
        """Whether the journal has no violation, recorded or not."""
        return replay(self.store.read()).findings == ()


@pytest.fixture(name="setup")
def setup_(model_directory: Path, tmp_path: Path) -> Setup:
    """A new setup."""
    return Setup(model=model_directory, folder=tmp_path / "blocks")


def long_request(place: int, length: int = 60, **changes: Any) -> Generate:
    """A request with a long text. One of 60 words has four blocks."""
    message = Message(role="user", content=words(place, length))
    return generate(Conversation(messages=(message,)), **{"max_tokens": 2, **changes})


def device(server: Server) -> Any:
    """The engine of the engine's thread."""
    return server.loaded.engine.device


async def test_the_budget_follows_from_the_model(setup: Setup):
    """
    Unless the operator sets one. The files of other models are added to what this one needs, and
    the journal has the sum.
    """
    other = setup.folder / "another-model" / "ab" / "file"
    other.parent.mkdir(parents=True)
    other.write_bytes(bytes(1000))
    async with setup.serving(disk_bytes=None) as server:
        facts = server.loaded.model
        due = disk_budget_for(
            token_bytes=facts.kv_token_bytes,
            block_bytes=0,
            block_tokens=facts.block_tokens,
            context_tokens=facts.context_tokens,
            others_bytes=1000,
        )
        await ask(server, long_request(1))
        assert due == server.statistics().disk_bytes_total
    async with setup.serving(disk_bytes=None) as server:
        assert due == server.statistics().disk_bytes_total  # its own files are not added
    assert {due} == {event.budget_bytes for event in setup.events(ev.BlockFilesScanned)}


async def test_a_stop_writes_all_blocks(setup: Setup):
    """After a stop every sealed block has its file, and the next run has all of them on record."""
    async with setup.serving() as server:
        await ask(server, long_request(1))
    sealed = {event.key for event in setup.events(ev.BlockSealed)}
    assert sealed == {event.key for event in setup.events(ev.BlockSpilled)}
    assert sealed == {path.stem for path in setup.files()}
    async with setup.serving() as server:
        now = server.statistics()
    last = setup.events(ev.BlockFilesScanned)[-1]
    assert (len(sealed), sum(path.stat().st_size for path in setup.files())) == (
        last.disk_blocks,
        last.disk_bytes,
    )
    assert (0, last.disk_blocks, last.disk_bytes, 64 * MIB) == (
        now.blocks,
        now.disk_blocks,
        now.disk_bytes,
        now.disk_bytes_total,
    )
    assert setup.is_valid()


async def test_a_stop_writes_chains_from_their_beginning(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
):
    """The last conversation is written first, and of each conversation its first block."""
    async with setup.serving() as server:
        monkeypatch.setattr(type(server.loaded.memory), "write_through", _not_now)
        await ask(server, long_request(1))
        await ask(server, long_request(2))
        blocks = server.loaded.sequencer.state.blocks
    starts = [blocks[event.key].start for event in setup.events(ev.BlockSpilled)]
    assert [0, 64, 128, 192] * 2 == starts
    order = [event.key for event in setup.events(ev.BlockSpilled)]
    sealed = [event.key for event in setup.events(ev.BlockSealed)]
    assert sealed[4:] + sealed[:4] == order


async def test_blocks_are_written_in_idle_time(setup: Setup):
    """A server that is killed has written what its last conversation sealed, without a stop."""
    async with setup.serving() as server:
        await ask(server, long_request(1))
        sealed = {event.key for event in setup.events(ev.BlockSealed)}
        with trio.fail_after(60):
            while sealed != {path.stem for path in setup.files()}:
                await trio.testing.wait_all_tasks_blocked()
        assert [] == setup.events(ev.ServerStopped)


async def test_a_client_that_disconnects_stops_the_loading(setup: Setup):
    """
    When a client disconnects while its blocks are loaded, no more are loaded, and no session
    remains.
    """
    async with setup.serving() as server:
        await ask(server, long_request(1))
    reached, go = threading.Event(), threading.Event()
    async with setup.serving() as server:
        engine = device(server)
        load, loaded = engine.load, []

        def slow(key: str, digest: str) -> Any:
            loaded.append(key)
            if len(loaded) == 2:
                reached.set()
                go.wait(60)
            return load(key, digest)

        engine.load = slow
        taken = len(setup.events(ev.RequestReceived))
        with trio.fail_after(60):
            async with local(server).generate(long_request(1)):
                await trio.to_thread.run_sync(reached.wait)
            go.set()
            while not server.loaded.activity.is_idle:
                await trio.testing.wait_all_tasks_blocked()
            await server.loaded.writer.wait_committed(server.loaded.sequencer.state.position)
            assert 2 == len(loaded) == len(setup.events(ev.BlockLoaded))
            assert taken == len(setup.events(ev.RequestReceived))
            again = await ask(server, long_request(1))
        assert len(loaded) * 64 == again.accepted.cached_tokens > 128
    assert (499, "client_gone") == (
        setup.events(ev.RequestRejected)[0].status,
        setup.events(ev.RequestRejected)[0].code,
    )
    assert setup.is_valid()


async def test_others_decode_while_blocks_are_loaded(setup: Setup):
    """Between two loads of blocks there is a decode pass of the answers in progress."""
    async with setup.serving() as server:
        await ask(server, long_request(1))
    async with setup.serving() as server:
        engine = device(server)
        load, passes, order = engine.load, engine.decode, []

        def loading(key: str, digest: str) -> Any:
            order.append("load")
            return load(key, digest)

        def decoding(rows: Any) -> Any:
            order.append("decode")
            return passes(rows)

        engine.load, engine.decode = loading, decoding
        warm: list[Said] = []
        async with local(server).generate(long_request(9, 10, max_tokens=2000)) as replies:
            with trio.fail_after(60):
                while not order:
                    await anext(aiter(replies))
                warm.append(await ask(server, long_request(1)))
    first, last = order.index("load"), len(order) - order[::-1].index("load")
    between = order[first:last]
    assert between.count("load") == warm[0].accepted.cached_tokens // 64 == 4
    assert "loadload" not in "".join(between)


async def test_the_cold_path_loads_nothing(setup: Setup):
    """``cache_prompt: false`` neither uses blocks nor has them loaded."""
    async with setup.serving() as server:
        await ask(server, long_request(1))
    async with setup.serving() as server:
        said = await ask(server, long_request(1, cache_prompt=False))
    assert 0 == said.accepted.cached_tokens
    assert [] == setup.events(ev.BlockLoaded)


async def test_blocks_in_the_slab_are_not_loaded(setup: Setup):
    """A session whose slab holds its blocks continues without reading their files."""
    async with setup.serving(blocks_bytes=MIB, pool_slabs=2) as server:
        first = await ask(server, long_request(1))
        await wait_idle(server)
        await ask(server, long_request(2))  # evicts the blocks from memory
        conversation = long_request(1).conversation
        assert conversation is not None
        more = (
            *conversation.messages,
            Message(role="assistant", content=first.text),
            Message(role="user", content="Go on."),
        )
        again = await ask(server, generate(Conversation(messages=more), max_tokens=2))
    assert again.accepted.session == first.accepted.session
    assert again.accepted.cached_tokens >= first.accepted.prompt_tokens // 64 * 64
    assert setup.events(ev.BlockEvicted)
    assert [] == setup.events(ev.BlockLoaded)


async def test_files_stay_within_their_budget(setup: Setup):
    """The least recently used files are removed; the last conversation is kept as a whole."""
    async with setup.serving(disk_bytes=3 * MIB) as server:
        for place in range(4):
            await ask(server, long_request(place))
            await wait_idle(server)
    assert setup.events(ev.BlockFileRemoved)
    assert max(event.disk_bytes for event in setup.events(ev.BlockSpilled)) <= 3 * MIB
    assert sum(path.stat().st_size for path in setup.files()) <= 3 * MIB
    async with setup.serving(disk_bytes=3 * MIB) as server:
        last = await ask(server, long_request(3))
        assert last.accepted.cached_tokens >= last.accepted.prompt_tokens // 64 * 64 - 64
    async with setup.serving(disk_bytes=MIB) as server:
        assert 0 < server.statistics().disk_bytes <= MIB
    assert setup.is_valid()


async def test_no_budget_means_no_files(setup: Setup):
    """With a budget of 0 the files of earlier runs are removed, and none is written."""
    async with setup.serving() as server:
        await ask(server, long_request(1))
    assert setup.files()
    async with setup.serving(disk_bytes=0) as server:
        assert 0 == server.statistics().disk_blocks
        said = await ask(server, long_request(1))
        assert 0 == said.accepted.cached_tokens
    assert [] == setup.files()
    assert setup.is_valid()


async def test_a_full_disk(setup: Setup, monkeypatch: pytest.MonkeyPatch):
    """
    A block that cannot be written is on record and served from memory. No partial file is left, and
    requests are answered. Once there is room again, blocks are written.
    """

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with setup.serving(blocks_bytes=MIB, pool_slabs=1) as server:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            one = await ask(server, long_request(1))
            await ask(server, long_request(2))
            again = await ask(server, long_request(1))
            # The disk is still full: blocks are written in idle time, and one write may be in
            # progress.
            with trio.fail_after(60):
                while setup.files():
                    await trio.testing.wait_all_tasks_blocked()
            assert [] == setup.events(ev.BlockSpilled)
            reasons = {event.reason for event in setup.events(ev.BlockSpillFailed)}
            assert {os.strerror(errno.ENOSPC)} == reasons
        assert one.tokens == again.tokens
        await ask(server, long_request(3))
    assert setup.events(ev.BlockSpilled)
    assert setup.is_valid()


def flip_in_memory(engine: Any, key: str) -> str:
    """Flip one bit of a block in memory. For the engine's thread."""
    block = engine.blocks.get(key)
    array = block.keys[0]
    bits = array.view(mx.uint32)
    bits[0, 3, 1] = bits[0, 3, 1] ^ 1
    mx.eval(bits)
    object.__setattr__(block, "keys", (bits.view(array.dtype), *block.keys[1:]))
    return key


async def test_a_block_that_changed_in_memory_is_not_written(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
):
    """
    INV-3: the change is found when the block is to be written, and it is never written. The block
    and those built on it are not reused any more, and a request that only needed the room is
    answered.
    """
    written: list[str] = []
    async with setup.serving(blocks_bytes=MIB, pool_slabs=1) as server:
        with monkeypatch.context() as patch:
            patch.setattr(type(server.loaded.memory), "write_through", _not_now)
            first = await ask(server, long_request(1))
            key = setup.events(ev.BlockSealed)[0].key
            await server.loaded.engine.call(lambda mlx: flip_in_memory(mlx, key), str)
            files = device(server).files
            write = files.write

            def writing(key: str, *rest: Any) -> Any:
                written.append(key)
                return write(key, *rest)

            patch.setattr(files, "write", writing)
            await ask(server, long_request(2, cache_prompt=False))  # matches no part of a block
        assert server.loaded.sequencer.state.blocks[key].bug_id is not None
        assert key not in written
        again = await ask(server, long_request(1))
        assert again.accepted.cached_tokens < 10  # as the other request begins
        assert first.tokens == again.tokens
    (found,) = replay(setup.store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)
    (out,) = setup.events(ev.BlocksQuarantined)
    assert None is out.session
    assert key in out.keys


async def _not_now(*args: Any) -> bool:
    return False


async def test_a_wrong_digest_is_never_used(setup: Setup, monkeypatch: pytest.MonkeyPatch):
    """
    INV-3: if reading a file returned different KV, the journal would reject it. The request ends
    with a bug id, memory does not keep the block, and the next request is served cold.
    """
    async with setup.serving() as server:
        first = await ask(server, long_request(1))
    async with setup.serving() as server:
        files = device(server).files
        read = files.read

        def careless(key: str, digest_due: str) -> tuple[SealedBlock, str]:
            block, found = read(key, digest_due)
            return block, found[::-1]

        monkeypatch.setattr(files, "read", careless)
        with pytest.raises(Broken) as caught:
            await ask(server, long_request(1))
        assert caught.value.bug_id in server.loaded.sequencer.state.faults
        assert (0, 0) == device(server).blocks.measure()
        again = await ask(server, long_request(1))
        assert 0 == again.accepted.cached_tokens
        assert first.tokens == again.tokens
    (found,) = replay(setup.store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)


@pytest.mark.long
async def test_many_conversations_over_little_memory(setup: Setup):
    """
    Eight conversations evict each other's blocks, load and seal at the same time. The budgets hold,
    and every answer equals the first one, also from files after a restart.
    """
    answers: dict[int, list[Said]] = {}

    async def talk(server: Server, number: int) -> None:
        for turn in range(3):
            place = (number + turn) % 4
            answers.setdefault(place, []).append(await ask(server, long_request(place, 40)))

    async with setup.serving(blocks_bytes=MIB, disk_bytes=4 * MIB, pool_slabs=6) as server:
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(talk, server, number)
        sealed = {event.key: event.bytes for event in setup.events(ev.BlockSealed)}
        assert server.statistics().block_bytes <= MIB < sum(sealed.values())
    # Whether anything was evicted or loaded so far depends on the order of requests: memory may
    # have had many blocks in use and kept no others. From empty memory something must be loaded.
    before = len(setup.events(ev.BlockLoaded))
    async with setup.serving() as server:
        for place, said in answers.items():
            said.append(await ask(server, long_request(place, 40)))
    assert before < len(setup.events(ev.BlockLoaded))
    for said in answers.values():
        assert 1 == len({one.tokens for one in said})
    assert setup.is_valid()


async def test_a_chain_keeps_its_beginning_on_disk(setup: Setup):
    """A conversation longer than the budget is loaded up to its first missing block, not beyond."""
    async with setup.serving(disk_bytes=MIB) as server:
        await ask(server, long_request(1, 110))
        blocks = server.loaded.sequencer.state.blocks
    starts = sorted(blocks[path.stem].start for path in setup.files())
    assert 2 <= len(starts) < len(blocks)
    assert [64 * place for place in range(len(starts))] == starts
    async with setup.serving(disk_bytes=MIB) as server:
        again = await ask(server, long_request(1, 110))
    assert 64 * len(starts) == again.accepted.cached_tokens


async def test_the_older_conversation_is_evicted_from_its_end(setup: Setup):
    """
    If two conversations do not fit, the older one keeps its first blocks, which can still be
    reused.
    """
    async with setup.serving(disk_bytes=2 * MIB) as server:
        await ask(server, long_request(1))
        await wait_idle(server)
        await ask(server, long_request(2))
        with trio.fail_after(600):
            while not setup.events(ev.BlockFileRemoved) or server.loaded.sequencer.state.requests:
                await trio.testing.wait_all_tasks_blocked()
    async with setup.serving(disk_bytes=2 * MIB) as server:
        first = await ask(server, long_request(1))
    assert first.accepted.cached_tokens >= 64


@pytest.mark.parametrize("budget", [0, 64 * MIB])
async def test_foreign_files_stay(setup: Setup, budget: int, capsys: pytest.CaptureFixture[str]):
    """
    A foreign file is logged once and not touched, whatever the budget. All else works as before.
    """
    async with setup.serving() as server:
        await ask(server, long_request(1))
    fingerprint = server.loaded.model.fingerprint
    mine = setup.folder / fingerprint / "ab" / f"ab{'0' * 62}.safetensors"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("weights")
    (setup.folder / "notes.txt").write_text("mine")
    capsys.readouterr()
    async with setup.serving(disk_bytes=budget) as server:
        await ask(server, long_request(1))
    assert ("weights", "mine") == (mine.read_text(), (setup.folder / "notes.txt").read_text())
    assert "has files that this journal does not know" in capsys.readouterr().out
    assert setup.is_valid()


async def test_another_journals_files_stay(setup: Setup):
    """Two journals over one folder: neither removes the files of the other, and both verify."""
    other = attrs.evolve(setup, store=MemoryStore())
    async with setup.serving() as server:
        await ask(server, long_request(1))
    written = {path: path.read_bytes() for path in setup.files()}
    async with other.serving() as server:
        await ask(server, long_request(1))
        await ask(server, long_request(2))
    assert written == {path: path.read_bytes() for path in written}
    async with setup.serving() as server:
        again = await ask(server, long_request(1))
    assert [] == setup.events(ev.BlockFileRejected)
    assert 0 < again.accepted.cached_tokens
    assert setup.is_valid()
    assert other.is_valid()


async def test_a_file_without_a_row_is_removed(setup: Setup):
    """A file of a lost run of this journal, whose row was lost with the run, is removed."""
    async with setup.serving() as server:
        await ask(server, long_request(1))
    rows = list(setup.store.rows)
    spilled = [n for n, row in enumerate(rows) if row.kind == ev.BlockSpilled.kind]
    setup.store = MemoryStore(rows[: spilled[-1]])
    async with setup.serving():
        pass
    assert 1 == setup.events(ev.BlockFilesScanned)[-1].removed_files
    assert len(spilled) - 1 == len(setup.files())
    assert setup.is_valid()


@pytest.mark.parametrize(
    "event",
    [
        ev.ServerStarted(boot="one", cairn_version="1", settings={}),
        ev.ServerStopped(boot="one", reason="asked"),
        ev.ServerLost(boot="one"),
    ],
)
async def test_a_pruned_run_still_belongs_to_the_journal(event: ev.Event):
    """A run whose start was pruned still belongs to this journal."""
    runs = Runs()
    runs.see(ev.Recorded(position=9, stream="server", seq=9, event_id="id", time_us=0, event=event))
    assert {"one"} == runs.boots


async def test_without_a_budget_files_set_aside_are_removed(setup: Setup):
    """With a budget of 0, files that were set aside are removed too."""
    async with setup.serving() as server:
        await ask(server, long_request(1))
    setup.files()[0].write_bytes(b"damaged")
    async with setup.serving():
        pass
    assert [".rejected"] == [path.suffix for path in setup.files() if path.stem != path.name[:64]]
    async with setup.serving(disk_bytes=0):
        pass
    assert [] == setup.files()


async def test_files_that_cannot_be_removed(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The server starts, logs it once, and reports the files that exist."""
    async with setup.serving() as server:
        await ask(server, long_request(1))
    files = setup.files()

    def failing(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        async with setup.serving(disk_bytes=0) as server:
            assert len(files) == server.statistics().disk_blocks
    assert files == setup.files()
    assert 1 == capsys.readouterr().out.count("a block file could not be removed")
    assert [] == setup.events(ev.BlockFileRemoved)
    assert setup.is_valid()


@pytest.mark.parametrize("where", ["save_safetensors", "digest"])
async def test_mlx_fails_while_writing(setup: Setup, monkeypatch: pytest.MonkeyPatch, where: str):
    """
    An error that is not an ``OSError`` is recorded once for each block and ends nothing: requests
    are answered, and the server stops normally.
    """

    def failing(*of: Any, **named: Any) -> None:
        raise RuntimeError("[metal] it failed")

    async with setup.serving(blocks_bytes=MIB, pool_slabs=1) as server:
        monkeypatch.setattr(type(server.loaded.memory), "write_through", _not_now)
        await ask(server, long_request(1))
        if where == "digest":
            monkeypatch.setattr(type(device(server)), "spill", _digest_fails(device(server)))
        else:
            monkeypatch.setattr(mx, where, failing)
        said = await ask(server, long_request(2))
        again = await ask(server, long_request(2))
        assert said.tokens == again.tokens
    failed = [event.key for event in setup.events(ev.BlockSpillFailed)]
    assert failed
    assert len(set(failed)) == len(failed)
    assert [] == setup.events(ev.InvariantViolated)
    assert isinstance(decode(setup.store.rows[-1]).event, ev.ServerStopped)
    assert setup.is_valid()


def _digest_fails(engine: Any) -> Any:
    """A spill whose digest cannot be taken."""
    plain = type(engine).spill

    def failing(block: Any) -> str:
        raise RuntimeError("[metal] it failed")

    def spill(self: Any, *of: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cairn.engine.mlx.blocks.digest", failing)
            return plain(self, *of)

    return spill


async def test_a_failed_write_is_recorded_once(setup: Setup, monkeypatch: pytest.MonkeyPatch):
    """A block that is tried repeatedly on a full disk has one row until it is written."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with setup.serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            await ask(server, long_request(1))
            keys = [event.key for event in setup.events(ev.BlockSealed)]
            for _ in range(3):
                for key in keys:
                    await server.loaded.memory.write_through(key, lambda: True)
        failed = [event.key for event in setup.events(ev.BlockSpillFailed)]
        assert sorted(keys) == sorted(failed)
    assert set(keys) == {event.key for event in setup.events(ev.BlockSpilled)}


async def test_one_damaged_block_stops_no_other(setup: Setup, monkeypatch: pytest.MonkeyPatch):
    """The stop writes all blocks except the one that changed and those built on it."""
    async with setup.serving() as server:
        monkeypatch.setattr(type(server.loaded.memory), "write_through", _not_now)
        await ask(server, long_request(1))
        await ask(server, long_request(2))
        sealed = [event.key for event in setup.events(ev.BlockSealed)]
        blocks = server.loaded.sequencer.state.blocks
        rotten = await server.loaded.engine.call(lambda mlx: flip_in_memory(mlx, sealed[5]), str)
        built = {key for key in sealed[4:] if blocks[key].start >= blocks[rotten].start}
    assert set(sealed) - built == {path.stem for path in setup.files()}
    (out,) = setup.events(ev.BlocksQuarantined)
    assert built == set(out.keys)


async def test_a_folder_in_the_place_of_a_file_stops_no_other(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
):
    """A folder at the path of a block's file prevents the write of that block alone."""
    async with setup.serving() as server:
        monkeypatch.setattr(type(server.loaded.memory), "write_through", _not_now)
        await ask(server, long_request(1))
        sealed = [event.key for event in setup.events(ev.BlockSealed)]
        fingerprint = server.loaded.model.fingerprint
        path = setup.folder / fingerprint / sealed[0][:2] / f"{sealed[0]}.safetensors"
        path.mkdir(parents=True)
    assert set(sealed[1:]) == {path.stem for path in setup.files()}
    assert [sealed[0]] == [event.key for event in setup.events(ev.BlockSpillFailed)]
