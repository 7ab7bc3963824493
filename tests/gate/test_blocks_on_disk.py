"""
The gate for block files: an answer that reuses blocks from files has the bits of a cold one, with
budgets that evict and load repeatedly, after a restart, and with damaged files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.actors.server import Server
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import words
from tests.gate.test_gate import rows_of_an_empty_server, same_bits
from tests.support.in_process_server import MIB, Said, ask, generate, serving

pytestmark = pytest.mark.gate

SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=200, min_p=0.001)


@attrs.define
class Setup:
    """A journal, a folder of block files, and a cold server to compare with."""

    model: Path
    folder: Path
    empty: list[Any]
    store: MemoryStore = attrs.field(factory=MemoryStore)

    def serving(self, **changes: Any) -> Any:
        """A server over the journal and the folder."""
        usual = {"blocks_folder": self.folder, "disk_bytes": 64 * MIB}
        return serving(self.model, self.store, **{**usual, **changes})

    async def asked(self, server: Server, talk: list[Message], **changes: Any) -> Said:
        """Ask, compare the answer with a cold one, and add it to the talk."""
        command = generate(
            Conversation(messages=tuple(talk)), sampling=SAMPLED, max_tokens=12, **changes
        )
        said = await ask(server, command)
        async with serving(self.model, MemoryStore(self.empty)) as cold:
            missed = await ask(cold, command)
        assert missed.accepted.cached_tokens == 0
        same_bits(said, missed)
        talk.append(Message(role="assistant", content=said.text))
        return said

    def events(self, kind: type[ev.Event]) -> list[Any]:
        """The journal's events of a kind."""
        found = (decode(row).event for row in self.store.rows)
        return [event for event in found if isinstance(event, kind)]

    def files(self) -> list[Path]:
        """The block files, the oldest first."""
        order = [event.key for event in self.events(ev.BlockSpilled)]
        return sorted(self.folder.rglob("*.safetensors"), key=lambda path: order.index(path.stem))


def run(model_directory: Path, folder: Path, main: Callable[[Setup], Any]) -> Setup:
    """Run a test over a setup, and verify its journal."""
    made: list[Setup] = []

    async def all_of_it() -> None:
        empty = await rows_of_an_empty_server(model_directory)
        made.append(Setup(model=model_directory, folder=folder / "blocks", empty=empty))
        await main(made[0])

    trio.run(all_of_it)
    assert () == replay(made[0].store.read()).findings
    return made[0]


def says(place: int, length: int = 40) -> Message:
    """A user's message."""
    return Message(role="user", content=words(place, length))


@pytest.mark.long
def test_to_and_fro(model_directory: Path, tmp_path: Path) -> None:
    """
    Three conversations by turns with room for four blocks: blocks that one of them evicts are
    loaded again for the next, and the bits are the same.
    """
    warm: list[Said] = []

    async def main(setup: Setup) -> None:
        talks: list[list[Message]] = [[], [], []]
        async with setup.serving(blocks_bytes=MIB, pool_slabs=1) as server:
            for turn in range(3):
                for number, talk in enumerate(talks):
                    talk.append(says(10 * turn + number, 24))
                    said = await setup.asked(server, talk, seed=turn)
                    if turn:
                        warm.append(said)

    setup = run(model_directory, tmp_path, main)
    assert len(setup.events(ev.BlockEvicted)) >= 6
    assert len(setup.events(ev.BlockLoaded)) >= 6
    assert {("continuation", None)} == {(s.accepted.path, s.accepted.reason) for s in warm}
    assert all(said.accepted.cached_tokens >= 64 for said in warm)
    assert [256] * 3 == [said.accepted.cached_tokens for said in warm[3:]]  # all four blocks
    assert max(event.memory_bytes for event in setup.events(ev.BlockLoaded)) <= MIB


def test_after_a_restart(model_directory: Path, tmp_path: Path) -> None:
    """
    A conversation continues from files: in the same session, as a continuation, with all of its
    full chunks reused. A request for the cold path stays cold.
    """
    answers: list[Said] = []
    loaded: list[ev.BlockLoaded] = []

    async def main(setup: Setup) -> None:
        talk = [says(1, 60)]
        async with setup.serving() as server:
            answers.append(await setup.asked(server, talk))
            assert server.statistics().disk_bytes_total == 64 * MIB
        assert [] == setup.events(ev.BlockLoaded)
        async with setup.serving() as server:
            statistics = server.statistics()
            assert (0, len(setup.files())) == (statistics.blocks, statistics.disk_blocks)
            answers.append(await setup.asked(server, [*talk, says(2)]))
        loaded.extend(setup.events(ev.BlockLoaded))
        async with setup.serving() as server:
            cold = await setup.asked(server, [*talk, says(2)], cache_prompt=False)
            assert (0, "cache_disabled") == (cold.accepted.cached_tokens, cold.accepted.reason)
        assert loaded == setup.events(ev.BlockLoaded)

    setup = run(model_directory, tmp_path, main)
    first, second = (said.accepted for said in answers)
    assert (first.session, "continuation", None) == (second.session, second.path, second.reason)
    assert second.cached_tokens >= first.prompt_tokens // 64 * 64 > 0
    assert second.cached_tokens // 64 == len(loaded)
    for path in [setup.folder, *setup.folder.rglob("*")]:
        assert (0o700 if path.is_dir() else 0o600) == path.stat().st_mode & 0o777


def flip_a_bit(files: Sequence[Path]) -> None:
    """The last byte is KV of the last array."""
    whole = bytearray(files[3].read_bytes())
    whole[-1] ^= 1
    files[3].write_bytes(whole)


def flip_the_head(files: Sequence[Path]) -> None:
    """Damage the header, which says where the arrays are."""
    whole = bytearray(files[3].read_bytes())
    whole[9] ^= 4
    files[3].write_bytes(whole)


def cut_off(files: Sequence[Path]) -> None:
    """Truncate a file."""
    files[3].write_bytes(files[3].read_bytes()[:-100])


def remove(files: Sequence[Path]) -> None:
    """Remove a file."""
    files[3].unlink()


def put_another(files: Sequence[Path]) -> None:
    """Replace a file by the intact file of a different block."""
    files[3].write_bytes(files[2].read_bytes())


def put_another_under_its_name(files: Sequence[Path]) -> None:
    """Replace the KV with that of a different block, under the name of this one."""
    other = files[2].read_bytes().replace(files[2].stem.encode(), files[3].stem.encode())
    files[3].write_bytes(other)


DAMAGES: dict[Callable[[Sequence[Path]], None], str] = {
    flip_a_bit: "digest",
    flip_the_head: "unreadable",
    cut_off: "unreadable",
    remove: "missing",
    put_another: "foreign",
    put_another_under_its_name: "digest",
}


@pytest.mark.long_but(
    "flip_a_bit-while it runs",
    "flip_the_head-while it runs",
    "cut_off-while it runs",
    "remove-while it runs",
    "put_another-while it runs",
    "put_another_under_its_name-while it runs",
)
@pytest.mark.parametrize("running", [False, True], ids=["between two runs", "while it runs"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file(
    model_directory: Path,
    tmp_path: Path,
    damage: Callable[[Sequence[Path]], None],
    running: bool,
) -> None:
    """
    The file is set aside, which is on record; the reused chain ends before it, and the answer is
    the cold one. The chunk is computed, sealed with its first digest, and written again.
    """
    reason = DAMAGES[damage]
    answers: list[Said] = []

    async def main(setup: Setup) -> None:
        talk = [says(1, 60)]
        async with setup.serving() as server:
            await setup.asked(server, talk)
        if not running:
            damage(setup.files())
        async with setup.serving() as server:
            if running:
                damage(setup.files())
            answers.append(await setup.asked(server, [*talk, says(2)]))
        aside = [path.name for path in setup.folder.rglob("*.rejected")]
        assert (reason != "missing") == bool(aside)
        async with setup.serving() as server:
            answers.append(await setup.asked(server, [*talk, says(2)]))

    setup = run(model_directory, tmp_path, main)
    (rejected,) = setup.events(ev.BlockFileRejected)
    assert (reason, setup.events(ev.BlockSpilled)[3].key) == (rejected.reason, rejected.key)
    if rejected.moved_to is not None:
        assert (setup.folder / rejected.moved_to).is_file()
    assert 192 == answers[0].accepted.cached_tokens
    assert answers[1].accepted.cached_tokens > 192
    assert rejected.key in {event.key for event in setup.events(ev.BlockSpilled)[4:]}
