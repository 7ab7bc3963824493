"""
The gate for histories that are copied into a slab in parts: whatever runs between two parts,
answers have the bits of a cold one, and the journal can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.server import Server
from cairn.engine import schedule
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import SAME, rerun
from tests.gate.conversation import words
from tests.gate.test_gate import same_bits
from tests.support.held_engine import hold_in_copy
from tests.support.in_process_server import Said, ask, generate, serving, wait_idle
from tests.support.models.model_families import config_of, make_family_model

pytestmark = pytest.mark.gate

C = 64
WORDS = 300
WINDOW: dict[str, Any] = {"window": (4, 256)}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys and values": ("llama", {}),
    "a window of its own": ("gpt_oss", {}),
    "states beside attention": ("qwen3_next", {}),
    "states alone": ("rwkv7", {}),
    "sinks and a window": ("llama", WINDOW),
}


@pytest.fixture(name="a_block_a_part", autouse=True)
def a_block_a_part_(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models have histories of few bytes: no part is larger than it must be."""
    monkeypatch.setattr(schedule, "COPIED_AT_ONCE_BYTES", 1)


@attrs.define
class Case:
    """
    A model, its settings, and the journal of a server that ran its self-test and served no request.
    """

    model: Path
    settings: dict[str, Any]
    empty: list[Row] = attrs.field(factory=list)
    store: MemoryStore = attrs.field(factory=MemoryStore)

    @classmethod
    async def of(cls, kind: str, model_directory: Path, folder: Path) -> Case:
        """A case of one of the kinds above."""
        family, settings = KINDS[kind]
        model = make_family_model(folder / "model", model_directory, config_of(family))
        case = cls(model, settings)
        async with case.cold(case.store):
            pass
        case.empty = list(case.store.rows)
        return case

    def cold(self, store: MemoryStore | None = None) -> Any:
        """A cold server."""
        store = MemoryStore(list(self.empty)) if store is None else store
        return serving(self.model, store, **self.settings)

    def serving(self) -> Any:
        """A server over the journal."""
        return serving(self.model, self.store, **self.settings)

    async def is_the_cold_one(self, said: Said, talk: Sequence[Message]) -> None:
        """Assert that an answer has the bits of a cold server's."""
        async with self.cold() as cold:
            missed = await ask(cold, request_of(talk))
        assert 0 == missed.accepted.cached_tokens
        same_bits(said, missed)

    def events(self, kind: type[ev.Event]) -> list[Any]:
        """The journal's events of a kind."""
        found = (decode(row).event for row in self.store.rows)
        return [event for event in found if isinstance(event, kind)]

    def holds(self, session: str) -> bool:
        """Whether the journal has no violation, and a session can be replayed on the model."""
        return () == replay(self.store.rows).findings and SAME == rerun(
            self.store.rows, session, None
        )


def request_of(talk: Sequence[Message], **changes: Any) -> Any:
    """A conversation's request."""
    return generate(Conversation(messages=tuple(talk)), session_name="one", **changes)


def says(place: int, count: int) -> Message:
    """A user's message."""
    return Message(role="user", content=words(place, count))


async def paused(server: Server) -> list[Message]:
    """A conversation whose slab was released after its first answer, and the next message."""
    talk = [says(1, WORDS)]
    first = await ask(server, request_of(talk))
    await wait_idle(server)
    await server.loaded.sessions.actors["one"].give_up_slab("room for another session")
    return [*talk, Message(role="assistant", content=first.text), says(2, 8)]


@pytest.mark.long_but("states alone")
@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_without_its_slab(kind: str, model_directory: Path, tmp_path: Path) -> None:
    """Its history is copied in consecutive parts, each up to a point from which it can continue."""
    cases: list[Case] = []

    async def main() -> None:
        case = await Case.of(kind, model_directory, tmp_path)
        cases.append(case)
        async with case.serving() as server:
            talk = await paused(server)
            second = await ask(server, request_of(talk))
            await wait_idle(server)
        assert second.accepted.cached_tokens > 8 * C
        await case.is_the_cold_one(second, talk)

    trio.run(main)
    (case,) = cases
    (chosen,) = [one for one in case.events(ev.PathSelected) if one.blocks_from_pool]
    parts = [one for one in case.events(ev.BlocksRestored) if one.request == chosen.request]
    every = 64 * max(1, *(event.state_blocks for event in case.events(ev.ModelLoaded)))
    assert len(parts) > 1
    assert [0, *(part.end for part in parts[:-1])] == [part.start for part in parts]
    assert chosen.reused_tokens == parts[-1].end
    whole = parts[: len(parts) - (chosen.partial_key is not None)]
    assert {0} == {part.end % every for part in whole}
    assert max(len(part.keys) for part in parts) == every // 64
    assert case.holds("one")


@pytest.mark.long_but("sinks and a window")
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves_between_two_parts(
    kind: str, model_directory: Path, tmp_path: Path
) -> None:
    """
    No further part is copied. The session becomes idle with what it has, or with nothing if a
    window has its first blocks alone. The same request continues from there, with the cold bits.
    """
    cases: list[Case] = []
    held: list[int] = []

    async def main() -> None:
        case = await Case.of(kind, model_directory, tmp_path)
        cases.append(case)
        async with case.serving() as server:
            talk = await paused(server)
            between = hold_in_copy(server)
            async with trio.open_nursery() as nursery:
                leaving = trio.CancelScope()

                async def leave() -> None:
                    with leaving:
                        await ask(server, request_of(talk))

                nursery.start_soon(leave)
                await between.wait()
                leaving.cancel()
                await trio.testing.wait_all_tasks_blocked(0.05)
                between.go.set()
            await wait_idle(server)
            held.append(server.loaded.sequencer.session("one").cached_tokens)
            second = await ask(server, request_of(talk))
            await wait_idle(server)
        await case.is_the_cold_one(second, talk)

    trio.run(main)
    (case,) = cases
    (left,) = case.events(ev.RequestCancelled)
    parts = [one for one in case.events(ev.BlocksRestored) if one.request == left.request]
    assert ("prefill", 2) == (left.stage, len(parts))
    assert [0 if "sinks" in kind else parts[-1].end] == held
    assert case.holds("one")
