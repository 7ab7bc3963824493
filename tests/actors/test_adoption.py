"""A server that adopts blocks of other nodes, whose journals a test plays."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import pytest
import structlog

from cairn.actors.errors import Broken
from cairn.actors.other_blocks import OtherBlocks
from cairn.actors.server import Server
from cairn.engine.mlx.blocks import SealedBlock, digest
from cairn.engine.mlx.files.shared_files import SharedFiles
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.cache import adoption
from cairn.journal.errors import StoreError
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode, encode
from cairn.journal.rows.database.other_nodes import SealedRow
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import words
from tests.support.in_process_server import MIB, ask, generate, serving, wait_idle

pytestmark = pytest.mark.trio

LONG = generate(Conversation(messages=(Message(role="user", content=words(1, 60)),)), max_tokens=2)


@attrs.define
class Journals:
    """What other nodes have sealed, by their journals. Stands in for ``OtherNodes``."""

    stores: dict[str, MemoryStore] = attrs.field(factory=dict)
    more: dict[str, list[SealedRow]] = attrs.field(factory=dict)
    fails: bool = False
    looks: int = 0
    skipped: dict[str, str] = attrs.field(factory=dict)

    def sealed(
        self, keys: Sequence[str], above: Sequence[str] = ()
    ) -> Mapping[str, Sequence[SealedRow]]:
        """See ``OtherNodes.sealed``."""
        self.looks += bool(keys)
        if self.fails:
            raise StoreError("the database is away")
        found: dict[str, list[SealedRow]] = {}
        for node, store in self.stores.items():
            for row in store.rows:
                event = decode(row).event
                if isinstance(event, ev.BlockSealed) and event.key in keys:
                    sealed = SealedRow(
                        node=node, position=row.position, row_hash=row.hash, event=event
                    )
                    found.setdefault(event.key, []).append(sealed)
        for key in found:
            found[key] += self.more.get(key, [])
        return found


@attrs.define
class Fleet:
    """Two nodes, each with a journal, over one folder. The first has served a long prompt."""

    model: Path
    folder: Path
    journals: Journals = attrs.field(factory=Journals)
    store: MemoryStore = attrs.field(factory=MemoryStore)

    def node(self, name: str, store: MemoryStore, **changes: Any) -> Any:
        """A node that runs while the context is open."""
        usual = {
            "blocks_folder": self.folder / name,
            "disk_bytes": 64 * MIB,
            "node": name,
            "other_nodes": self.journals,
        }
        return serving(self.model, store, **{**usual, **changes})

    async def seal_on(self, name: str) -> None:
        """A node serves the prompt by itself, and stops."""
        store = MemoryStore()
        async with self.node(name, store, other_nodes=Journals()) as server:
            await ask(server, LONG)
            await wait_idle(server)
        self.journals.stores[name] = store

    def events(self, kind: type[Any]) -> list[Any]:
        """The events of the second node's journal of one kind."""
        found = (decode(row).event for row in self.store.rows)
        return [event for event in found if isinstance(event, kind)]


@pytest.fixture
async def fleet(model_directory: Path, tmp_path: Path) -> Fleet:
    """A fleet whose first node has served the prompt."""
    made = Fleet(model=model_directory, folder=tmp_path)
    await made.seal_on("n1")
    return made


async def test_nodes_that_are_skipped_are_named():
    """Once each, and again when they are read again."""
    journals = Journals(skipped={"n2": "its schema is 0002, and not 0001"})
    blocks = OtherBlocks(cast(Any, journals))
    with structlog.testing.capture_logs() as logged:
        for _ in range(2):
            await blocks.sealed(["k"], [])
        assert [("n2", journals.skipped["n2"])] == [(one["node"], one["fact"]) for one in logged]
        journals.skipped = {}
        await blocks.sealed(["k"], [])
    assert "the blocks of a node are used again" == logged[-1]["event"]


def device(server: Server) -> Any:
    """The engine of the engine's thread."""
    return server.loaded.engine.device


async def test_blocks_are_adopted(fleet: Fleet):
    """All full blocks of the prompt, and they are not adopted again."""
    async with fleet.node("n2", fleet.store) as server:
        first = await ask(server, LONG)
        assert 0 < len(fleet.events(ev.BlockAdopted))
        assert 64 * len(fleet.events(ev.BlockAdopted)) == first.accepted.cached_tokens
        await wait_idle(server)
        again = await ask(server, LONG)
        assert again.accepted.cached_tokens >= first.accepted.cached_tokens
    assert len({one.key for one in fleet.events(ev.BlockAdopted)}) == len(
        fleet.events(ev.BlockAdopted)
    )
    assert () == replay(fleet.store.read()).findings


async def test_the_first_node_that_has_the_file(fleet: Fleet):
    """If one of them has removed its file, the next one is read."""
    await fleet.seal_on("n3")
    for path in (fleet.folder / "n1").rglob("*.safetensors"):
        path.unlink()
    async with fleet.node("n2", fleet.store) as server:
        await ask(server, LONG)
    assert {"n3"} == {one.node for one in fleet.events(ev.BlockAdopted)}


async def test_the_folder_is_gone(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """While it is, log and health name it; the first block that is written ends that."""
    shared, away = tmp_path / "shared", tmp_path / "away"
    shared.mkdir()
    alone = Fleet(model=model_directory, folder=shared)
    async with alone.node("n1", alone.store) as server:
        shared.rename(away)
        await ask(server, LONG)
        await wait_idle(server)
        keys = [one.key for one in alone.events(ev.BlockSealed)]
        await server.loaded.memory.write_through(keys[0], lambda: True)
        due = f"{shared / 'n1'}: {os.strerror(errno.ENOENT)}"
        assert {"block_files": due} == server.statistics().degraded
        assert f"folder={shared / 'n1'}" in capsys.readouterr().out
        await wait_idle(server)
        assert alone.events(ev.BlockSpillFailed)
        away.rename(shared)
        await server.loaded.memory.write_through(keys[0], lambda: True)
        assert {} == server.statistics().degraded
    assert () == replay(alone.store.read()).findings


async def test_reading_that_is_slower_than_computing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    """
    After the first block the rest is computed, and the journal says what was measured. The requests
    that follow do not look into other journals, until one is due to measure again.
    """
    monkeypatch.setattr(adoption, "RETRY_AFTER", 3)
    async with fleet.node("n2", fleet.store) as server:
        await ask(server, attrs.evolve(LONG, conversation=other_words()))
        engine = device(server)
        reads = engine.adopt
        engine.adopt = lambda *of: attrs.evolve(reads(*of), duration_us=10**9)
        answer = await ask(server, LONG)
        assert 64 == answer.accepted.cached_tokens
        (one,) = fleet.events(ev.AdoptionDeclined)
        assert 10**9 == one.adopted_us
        assert one.prefill_tokens > 0
        looks = fleet.journals.looks
        for words_from in range(3, 3 + adoption.RETRY_AFTER - 1):
            await ask(server, attrs.evolve(LONG, conversation=other_words(words_from)))
        assert looks == fleet.journals.looks
        await ask(server, attrs.evolve(LONG, conversation=other_words(2 + adoption.RETRY_AFTER)))
        assert looks + 1 == fleet.journals.looks
    assert 1 == len(fleet.events(ev.BlockAdopted))
    assert 1 == len(fleet.events(ev.AdoptionDeclined))
    assert () == replay(fleet.store.read()).findings


def other_words(seed: int = 2) -> Conversation:
    """A prompt that shares nothing with the other one."""
    return Conversation(messages=(Message(role="user", content=words(seed, 60)),))


async def test_two_digests_on_record(fleet: Fleet):
    """
    Two nodes recorded different ones, and each has a file with its own: INV-3. The block is
    quarantined, and the next request is served without it.
    """
    (first, *_) = [
        decode(row) for row in fleet.journals.stores["n1"].rows if row.kind == ev.BlockSealed.kind
    ]
    async with fleet.node("n2", fleet.store) as server:
        fingerprint = server.loaded.model.fingerprint
        sealed = first.event
        assert isinstance(sealed, ev.BlockSealed)
        own = SharedFiles(fleet.folder / "n1", fingerprint, "run")
        read = own.read_of("n1", sealed.key, sealed.digest, sealed.bytes)
        assert read is not None
        wrong = SealedBlock(keys=tuple(one + 1 for one in read[0].keys), values=read[0].values)
        mx.eval(wrong.keys)
        other = attrs.evolve(sealed, digest=digest(wrong))
        written = SharedFiles(fleet.folder / "n3", fingerprint, "run")
        written.write(sealed.key, wrong, other.digest, (0, 64), 64 * MIB)
        fleet.journals.more[sealed.key] = [
            SealedRow(node="n3", position=5, row_hash="a" * 64, event=other)
        ]
        with pytest.raises(Broken):
            await ask(server, LONG)
        again = await ask(server, LONG)
        assert 0 == again.accepted.cached_tokens
    (violated,) = fleet.events(ev.InvariantViolated)
    assert "INV-3" == violated.invariant
    assert "second digest, in row 5 of n3" in violated.message
    (quarantined,) = fleet.events(ev.BlocksQuarantined)
    assert sealed.key in quarantined.keys


@pytest.mark.parametrize("changes", [{"start": 65, "end": 129}, {"parent": None}, {"bytes": 1}])
async def test_a_row_that_says_what_cannot_be(fleet: Fleet, changes: dict[str, Any]):
    """
    A miss, and a warning: what comes before it is adopted, no request fails, and no file is
    set aside.
    """
    rows = fleet.journals.stores["n1"].rows
    places = [place for place, row in enumerate(rows) if row.kind == ev.BlockSealed.kind]
    recorded = decode(rows[places[1]])
    wrong = attrs.evolve(recorded, event=attrs.evolve(recorded.event, **changes))
    fleet.journals.stores["n1"] = MemoryStore(
        [*rows[: places[1]], encode(wrong, rows[places[1]].previous_hash), *rows[places[1] + 1 :]]
    )
    async with fleet.node("n2", fleet.store) as server:
        with structlog.testing.capture_logs() as logged:
            first = await ask(server, LONG)
        assert 64 == first.accepted.cached_tokens
        warned = [one for one in logged if "what cannot be" in one["event"]]
        assert [("n1", wrong.position)] == [(one["node"], one["position"]) for one in warned]
    assert not fleet.events(ev.InvariantViolated)
    assert not fleet.events(ev.BlockFileRejected)
    assert () == replay(fleet.store.read()).findings


async def test_journals_that_cannot_be_read(fleet: Fleet):
    """The prompt is computed. Later they are read again."""
    fleet.journals.fails = True
    async with fleet.node("n2", fleet.store) as server:
        answer = await ask(server, LONG)
        assert 0 == answer.accepted.cached_tokens
        assert not fleet.events(ev.BlockAdopted)
    fleet.journals.fails = False
    async with fleet.node("n2", fleet.store, disk_bytes=0) as server:
        await ask(server, LONG)
    assert fleet.events(ev.BlockAdopted)


async def test_no_block_leaves_for_a_file_that_is_gone(fleet: Fleet):
    """Memory is full, and the node has removed its files: nothing is evicted for them."""
    for path in (fleet.folder / "n1").rglob("*.safetensors"):
        path.unlink()
    other = generate(Conversation(messages=(Message(role="user", content=words(2, 60)),)))
    async with fleet.node("n2", fleet.store, blocks_max=1, prewarm=False) as server:
        await ask(server, attrs.evolve(other, max_tokens=2))
        await wait_idle(server)
        before = len(fleet.events(ev.BlockEvicted))
        assert 1 == server.loaded.sequencer.state.pool.blocks
        await server.loaded.memory.adopt(
            *offers(fleet, server), keep=(), ttl_s=None, still_needed=lambda: True
        )
        assert before == len(fleet.events(ev.BlockEvicted))
    assert not fleet.events(ev.BlockAdopted)


def offers(fleet: Fleet, server: Server) -> tuple[Sequence[str], Mapping[str, Sequence[SealedRow]]]:
    """The blocks of the prompt that the first node sealed, and its rows."""
    rows = map(decode, fleet.journals.stores["n1"].rows)
    keys = [row.event.key for row in rows if isinstance(row.event, ev.BlockSealed)]
    return keys, fleet.journals.sealed(keys)
