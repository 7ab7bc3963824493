"""
Each invariant can fail: the real thing is damaged in a running server, the checks catch it before
anything of it is emitted, replay finds the same at the same row, and nobody else notices.

A damage is done to arrays, slabs, reports and orders, never by writing a wrong event.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
import trio.testing

from cairn.actors.answer import Answer
from cairn.actors.messages import Broken, Generate
from cairn.actors.sequencer import Sequencer
from cairn.actors.server import Server
from cairn.actors.session import SessionActor
from cairn.engine.mlx_cache import SlabPool
from cairn.engine.mlx_engine import MlxEngine
from cairn.engine.prompt import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.store import MemoryStore
from tests.running import Said, ask, generate, serving

VICTIM = "the victim"
LONG = "Stone on stone on stone, and then the wind that takes none of them. " * 6


def command(text: str, **changes: Any) -> Generate:
    """
    A request of one message.
    """
    return generate(Conversation(messages=(Message(role="user", content=text),)), **changes)


VICTIMS = command("Victim. " + LONG, session_name=VICTIM)
BYSTANDERS = command("Bystander. " + LONG, session_name="bystander", max_tokens=40)


class Damages:
    """
    Damages, one method each. Each changes how the victim's things behave from now on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
        self.patch = monkeypatch
        self.server = server

    def _slab_of_victim(self) -> int | None:
        session = self.server._sequencer.state.sessions.get(VICTIM)  # type: ignore[call-overload]
        return session.slab.id if session is not None and session.slab is not None else None

    def _after_chunk(self, damage: Callable[[Any], None]) -> None:
        """
        Have the victim's slab damaged after the model's pass and before it is measured.
        """
        engine = self.server._engine._device
        run, plain = engine.run_chunk, engine._model
        damages = self

        def run_chunk(slab: int, ids: Any, wanted: Any) -> Any:
            if slab != damages._slab_of_victim():
                return run(slab, ids, wanted)

            def model(*args: Any, **kwargs: Any) -> Any:
                logits = plain(*args, **kwargs)
                damage(engine.pool.get(slab))
                return logits

            engine._model = model
            try:
                return run(slab, ids, wanted)
            finally:
                engine._model = plain

        self.patch.setattr(engine, "run_chunk", run_chunk)

    def layer_one_short(self) -> None:
        """
        INV-1: one layer holds a token less than the others.
        """

        def damage(slab: Any) -> None:
            slab.caches[2].offset -= 1

        self._after_chunk(damage)

    def tokens_shifted(self) -> None:
        """
        INV-1: the pass runs over the tokens one place on.
        """
        engine = self.server._engine._device
        run = engine.run_chunk

        def run_chunk(slab: int, ids: Any, wanted: Any) -> Any:
            mine = slab == self._slab_of_victim()
            return run(slab, [*ids[1:], ids[0]] if mine else ids, wanted)

        self.patch.setattr(engine, "run_chunk", run_chunk)

    def window_moved(self) -> None:
        """
        INV-2: a layer forgets its first token.
        """

        def damage(slab: Any) -> None:
            slab.caches[1].start = 1

        self._after_chunk(damage)

    def other_decision(self) -> None:
        """
        INV-4: the session acts on a decision that the rules do not give.
        """
        selected = Sequencer._selected

        def other(this: Sequencer, received: ev.RequestReceived, around: Any) -> Any:
            event = selected(this, received, around)
            if received.session != VICTIM:
                return event
            return attrs.evolve(event, path="continuation", reason=None)

        self.patch.setattr(Sequencer, "_selected", other)

    def slab_never_released(self) -> None:
        """
        INV-5: the pool keeps a slab that was given back.
        """
        held = SlabPool.measure

        def measure(this: SlabPool) -> tuple[int, int]:
            slabs, size = held(this)
            return (slabs + 1, size) if self._victim_acts() else (slabs, size)

        self.patch.setattr(SlabPool, "measure", measure)

    def _victim_acts(self) -> bool:
        session = self.server._sequencer.state.sessions.get(VICTIM)  # type: ignore[call-overload]
        return session is not None and session.slab is None and session.request is not None

    def out_of_order(self) -> None:
        """
        INV-6: the victim counts its events wrongly.
        """
        append = SessionActor._append

        def skipping(this: SessionActor, *events: ev.Event) -> int:
            if this.id == VICTIM and isinstance(events[0], ev.CacheExtended):
                this._seq += 1
            return append(this, *events)

        self.patch.setattr(SessionActor, "_append", skipping)

    def finished_twice(self) -> None:
        """
        INV-6: the victim ends its request twice.
        """
        finish = Answer.finish

        def twice(this: Any) -> None:
            finish(this)
            if this._path.session == VICTIM:
                this._append(
                    ev.RequestCancelled(session=VICTIM, request=this._ticket.id, stage="decode")
                )

        self.patch.setattr(Answer, "finish", twice)

    def emitted_before_made(self) -> None:
        """
        INV-7: a token leaves that no pass has made.
        """
        release = Answer._release

        def early(this: Any, text: str, tokens: int) -> None:
            if this._path.session == VICTIM:
                for place, drawn in enumerate(this._waiting):
                    this._waiting[place] = attrs.evolve(drawn, token=drawn.token + 1)
            release(this, text, tokens)

        self.patch.setattr(Answer, "_release", early)

    def pass_raises(self) -> None:
        """
        CRASH: the victim's pass fails.
        """

        def damage(slab: Any) -> None:
            raise RuntimeError("the device gave up")

        self._after_chunk(damage)


CAUGHT = {
    "layer_one_short": ("INV-1", "session"),
    "tokens_shifted": ("INV-1", "session"),
    "window_moved": ("INV-2", "session"),
    "other_decision": ("INV-4", "session"),
    "slab_never_released": ("INV-5", "admission"),
    "out_of_order": ("INV-6", "session"),
    "finished_twice": ("INV-6", "session"),
    "emitted_before_made": ("INV-7", "session"),
    "pass_raises": ("CRASH", "session"),
}


@pytest.fixture(scope="module")
def undisturbed(model_directory: Path) -> tuple[Said, Said]:
    """
    The bystander's two answers on a server where nothing is damaged.
    """
    answers: list[Said] = []

    async def main() -> None:
        async with serving(model_directory) as server:
            answers.append(await ask(server, BYSTANDERS))
            answers.append(await ask(server, second_turn(answers[0])))

    trio.run(main)
    return answers[0], answers[1]


def second_turn(said: Said) -> Generate:
    """
    The bystander goes on.
    """
    assert BYSTANDERS.conversation is not None
    messages = (
        *BYSTANDERS.conversation.messages,
        Message(role="assistant", content=said.text),
        Message(role="user", content="And then?"),
    )
    return generate(Conversation(messages=messages), session_name="bystander")


@pytest.mark.parametrize("damage", CAUGHT)
def test_caught_online_and_in_replay(
    model_directory: Path,
    undisturbed: tuple[Said, Said],
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    """
    The request ends with a bug id and nothing wrong is emitted; the violation is in the journal and
    comes out again on replay; the scope is out of service, and a bystander's bits are the same.
    """
    invariant, scope = CAUGHT[damage]
    store = MemoryStore()
    bugs: list[str] = []
    bystander: list[Said] = []

    async def victim(server: Server) -> None:
        with pytest.raises(Broken) as caught:
            await ask(server, VICTIMS)
        bugs.append(caught.value.bug_id)

    async def main() -> None:
        async with serving(model_directory, store) as server:
            with monkeypatch.context() as patch:
                getattr(Damages(patch, server), damage)()
                async with trio.open_nursery() as nursery:

                    async def beside() -> None:
                        bystander.append(await ask(server, BYSTANDERS))

                    nursery.start_soon(beside)
                    while not server.statistics().slabs:
                        await trio.testing.wait_all_tasks_blocked()
                    if damage == "finished_twice":
                        # The answer was complete; what came after it broke the session.
                        await ask(server, VICTIMS)
                    else:
                        await victim(server)
            while not server._sequencer.state.faults:
                await trio.testing.wait_all_tasks_blocked()
            # Whoever names the victim hears of the bug; with memory in doubt, everybody does.
            bugs.clear()
            await victim(server)
            if scope == "session":
                bystander.append(await ask(server, second_turn(bystander[0])))
            assert server.statistics().bugs == 1

    trio.run(main)

    found = replay(store.read()).findings
    assert [(bugs[0], invariant, True)] == [(f.bug_id, f.invariant, f.recorded) for f in found]
    # What a session's own code did wrong is on record; no check can repeat it.
    assert found[0].reproduced == (invariant != "CRASH")
    for answer, expected in zip(bystander, undisturbed, strict=False):
        assert expected.tokens == answer.tokens
        assert expected.text == answer.text


def flip_one_bit(engine: MlxEngine) -> None:
    """
    Flip one bit of the first block's keys. For the engine's thread.
    """
    block = next(iter(engine.blocks._blocks.values()))
    array = block.keys[0]
    bits = array.view(mx.uint32)
    bits[0, 3, 1] = bits[0, 3, 1] ^ 1
    mx.eval(bits)
    object.__setattr__(block, "keys", (bits.view(array.dtype), *block.keys[1:]))


def test_a_flipped_bit_in_a_shared_block(model_directory: Path) -> None:
    """
    INV-3: a block that changed in memory is found when it is shared, before any token comes of it;
    it and what was built on it are reused no more, and the same prompt is then served cold.
    """
    store = MemoryStore()
    answers: list[Said] = []

    async def main() -> None:
        async with serving(model_directory, store) as server:
            answers.append(await ask(server, command(LONG)))
            await server._engine.call(flip_one_bit, lambda done: None)
            with pytest.raises(Broken) as caught:
                await ask(server, command(LONG))
            assert caught.value.bug_id in server._sequencer.state.faults
            again = await ask(server, command(LONG))
            assert again.accepted.cached_tokens == 0
            answers.append(again)

    trio.run(main)

    assert answers[0].tokens == answers[1].tokens
    found = replay(store.read()).findings
    assert [("INV-3", True, True)] == [(f.invariant, f.recorded, f.reproduced) for f in found]


def test_a_second_digest_under_one_key(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    INV-3: KV that comes out otherwise when it is computed again is found when it is sealed again.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store) as server:
            await ask(server, command(LONG))
            engine = server._engine._device
            seal = MlxEngine.seal

            def sealed(this: MlxEngine, slab: int, *args: Any, **kwargs: Any) -> Any:
                cache = this.pool.get(slab).caches[0]
                cache.keys[0, 0, 5, 5] = cache.keys[0, 0, 5, 5] + 1e-6
                return seal(this, slab, *args, **kwargs)

            monkeypatch.setattr(type(engine), "seal", sealed)
            with pytest.raises(Broken):
                await ask(server, command(LONG, cache_prompt=False))
            monkeypatch.undo()
            assert (await ask(server, command("Somebody else. " + LONG))).text

    trio.run(main)

    found = replay(store.read()).findings
    assert [("INV-3", True, True)] == [(f.invariant, f.recorded, f.reproduced) for f in found]


def test_a_slab_released_twice(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    INV-5: a slab that is given back twice ends the session that does it; and since memory does not
    add up any more, nobody is admitted after it.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store) as server:
            await ask(server, VICTIMS)
            actor = server._actors[VICTIM]
            slab = actor._slab_id
            await server._engine.call(lambda mlx: mlx.close_slab(slab), lambda report: None)
            with pytest.raises(Broken):
                await ask(server, attrs.evolve(VICTIMS, max_tokens=2000))
            with pytest.raises(Broken) as caught:
                await ask(server, BYSTANDERS)
            assert caught.value.bug_id == server.statistics().admission_bug

    trio.run(main)

    assert ["CRASH", "INV-5"] == [found.invariant for found in replay(store.read()).findings]
