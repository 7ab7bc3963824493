"""
The policy ``sink_window``: sessions that run far past their window keep P1, in bounded memory.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.requests.limits import Limits
from cairn.engine.errors import ModelRefused
from cairn.engine.mlx.cache import SinkCache
from cairn.engine.mlx.selftest import rounds_products
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.cache.windows import SinkWindow
from cairn.journal.invariants import check
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from cairn.journal.state import State, apply
from cairn.ops.journal.replay_engine import SAME, rerun
from tests.support.in_process_server import (
    MIB,
    Said,
    ask,
    generate,
    serving,
    wait_idle,
    without_slabs,
)
from tests.support.models.model_families import config_of, make_family_model

pytestmark = pytest.mark.gate

E = TypeVar("E")

SINKS, WINDOW = 4, 256
NAMES = ("one", "another")
ROWS = SinkWindow.of(SINKS, WINDOW, 64).rows


def turn(place: int, messages: tuple[Message, ...] = ()) -> Conversation:
    """One more turn of a conversation that no other place has."""
    said = f"{place} {len(messages)} " + "stone on stone, " * 30
    return Conversation(messages=(*messages, Message(role="user", content=said)))


@attrs.frozen
class Conversed:
    """
    Two conversations and their journal.

    Attributes:
        heard: (the most tokens, what was asked, the answer).
    """

    heard: list[tuple[int, Conversation, Said]]
    rows: list[Row]

    def events(self, kind: type[E]) -> list[E]:
        """The events of a kind."""
        found = [decode(row).event for row in self.rows]
        return [event for event in found if isinstance(event, kind)]


@pytest.fixture(scope="module")
def conversed(model_directory: Path) -> Conversed:
    """
    Two conversations in parallel run to more than twice their window, one of them with an answer
    after which the slab cannot be cut back. Each answer is shadow checked.
    """
    store, heard = MemoryStore(), list[tuple[int, Conversation, Said]]()

    async def main() -> None:
        settings = {"window": (SINKS, WINDOW), "shadow_share": 1.0}
        async with serving(model_directory, store, **settings) as server:
            left, checked = 9, trio.Event()

            def watch(recorded: ev.Recorded) -> None:
                nonlocal left
                event = recorded.event
                ended = isinstance(event, ev.ShadowEnded) and event.result != "interrupted"
                if ended or isinstance(event, ev.ShadowSkipped):
                    left -= 1
                    if not left:
                        checked.set()

            server.observe(watch)

            async def talk(place: int) -> None:
                conversation = turn(place)
                for number in range(4 + place):
                    tokens = 200 if (place, number) == (1, 3) else 24
                    command = generate(conversation, max_tokens=tokens, session_name=NAMES[place])
                    said = await ask(server, command)
                    heard.append((tokens, conversation, said))
                    answer = Message(role="assistant", content=said.text)
                    conversation = turn(place, (*conversation.messages, answer))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(talk, 0)
                nursery.start_soon(talk, 1)
            await wait_idle(server)
            with trio.fail_after(300):
                await checked.wait()

    trio.run(main)
    return Conversed(heard, store.rows)


def test_a_hit_past_the_window_is_a_miss(conversed: Conversed, model_directory: Path) -> None:
    """The last answers have the bits of a cold server that serves no other request."""
    last = [one for one in conversed.heard if one[2].finished.prompt_tokens > 2 * WINDOW]
    empty = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, empty, window=(SINKS, WINDOW)):
            pass  # spares the cold servers the self-test
        for tokens, conversation, said in last:
            known = MemoryStore(list(empty.rows))
            async with serving(model_directory, known, window=(SINKS, WINDOW)) as cold:
                missed = await ask(cold, generate(conversation, max_tokens=tokens))
            assert 0 == missed.accepted.cached_tokens
            assert missed.tokens == said.tokens

    trio.run(main)

    assert 3 == len(last)
    assert all(said.accepted.cached_tokens > WINDOW for *_, said in last)


def test_slabs_hold_what_the_policy_gives(conversed: Conversed) -> None:
    """
    The journal verifies; slabs are no larger than the policy allows, the window moves, and what
    cannot be cut back is removed and copied in again.
    """
    (loaded,) = conversed.events(ev.ModelLoaded)
    slabs = conversed.events(ev.SlabAcquired)
    token_bytes = 4 * 2 * 4 * 32 * 4  # layers, keys and values, heads, their width, float32

    assert () == replay(conversed.rows).findings
    assert (SINKS, WINDOW, ROWS) == (loaded.kv_sinks, loaded.kv_window, loaded.kv_rows)
    assert f"sink_window {SINKS}+{WINDOW}" == loaded.fields["kv_policy"]
    assert {ROWS * token_bytes} == {slab.bytes for slab in slabs if slab.capacity_tokens > ROWS}
    assert max(event.coverage[0][1] for event in conversed.events(ev.CacheExtended)) > WINDOW
    assert any(
        "the window has moved on" in trim.reason for trim in conversed.events(ev.CacheTrimmed)
    )


def test_a_window_that_moves_otherwise_is_found(conversed: Conversed) -> None:
    """
    A pass that drops more or fewer tokens than the policy says breaks INV-2, and so does a trim to
    a point at which tokens of the window are missing.
    """
    state, broken = State(), Counter[str]()
    for row in conversed.rows:
        recorded = decode(row)
        event = recorded.event
        moved: list[ev.Event] = []
        if isinstance(event, ev.CacheExtended | ev.BlocksRestored) and event.coverage[0][1]:
            layers, start, end = event.coverage[0]
            moved = [attrs.evolve(event, coverage=((layers, start + by, end),)) for by in (-1, 1)]
        if isinstance(event, ev.CacheTrimmed) and event.coverage[0][1] > event.end - WINDOW > 0:
            layers, start, _ = event.coverage[0]
            end = start // 64 * 64
            moved = [attrs.evolve(event, end=end, coverage=((layers, start, end),))]
        for other in moved:
            found = check(state, attrs.evolve(recorded, event=other))
            assert "INV-2" in {violation.invariant for violation in found}
            broken[event.kind] += 1
        state = apply(state, recorded)

    assert {"cache_extended", "blocks_restored", "cache_trimmed"} == set(broken)


def test_a_shadow_check_gives_the_same(conversed: Conversed) -> None:
    """
    The shadow checks found the same, and so does a replay on the model, for blocks, trims and
    coverage.
    """
    ended = [event.result for event in conversed.events(ev.ShadowEnded)]

    assert {"same"} == set(ended) - {"interrupted"}
    assert SAME == rerun(conversed.rows, NAMES[1], None)


def test_within_the_window_nothing_changes(model_directory: Path) -> None:
    """
    A conversation that does not reach its window has the answer of one without a window, under a
    different fingerprint. The log-probabilities are equal up to rounding: without a window passes
    have the shapes of a row class.
    """
    if rounds_products():
        pytest.skip("this device rounds the factors of products; MLX_ENABLE_TF32=0 to run it")
    answers, names = [], set()

    async def main() -> None:
        for window in (None, (SINKS, WINDOW)):
            async with serving(model_directory, window=window) as server:
                said = await ask(server, generate(turn(0), max_tokens=24))
                answers.append(said.tokens)
                names.add(server.facts.fingerprint)
                assert said.finished.prompt_tokens + 24 <= SINKS + WINDOW

    trio.run(main)

    plain, windowed = answers
    assert [one.id for one in plain] == [one.id for one in windowed]
    assert [one.logprob for one in plain] == pytest.approx([o.logprob for o in windowed], abs=1e-4)
    assert 2 == len(names)


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("gpt_oss", {}, "some of its layers have windows of their own"),
        ("mamba2", {}, "keep more than keys and values"),
        ("llama", {"kv_cache": "mlx-lm"}, "do not support attention sinks"),
        ("llama", {"window": (4, 255)}, "A window of 255 tokens is too short for blocks of 64"),
    ],
)
def test_unsupported_settings_are_refused(
    family: str, settings: dict[str, Any], why: str, model_directory: Path, tmp_path: Path
) -> None:
    """The server does not start, and says why and what to do."""
    directory = make_family_model(tmp_path / "model", model_directory, config_of(family))

    async def main() -> None:
        async with serving(directory, **{"window": (4, 256), "pool_bytes": 64 * MIB, **settings}):
            pass

    with pytest.raises(BaseExceptionGroup) as refused:
        trio.run(main)

    (error,) = refused.value.exceptions
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, ModelRefused)
    assert why in str(error)
    assert " Use " in str(error)


@attrs.frozen
class Turn:
    """
    A turn of a conversation whose history grows.

    Attributes:
        missed_tokens: of its prompt that were computed.
        copied_tokens: of blocks, for it and ahead of the next one.
        block_bytes, live_bytes: in memory, when it rests.
    """

    missed_tokens: int
    copied_tokens: int
    block_bytes: int
    live_bytes: int


@pytest.mark.long
def test_a_turn_costs_no_more_for_a_longer_history(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    While the history grows, what is computed, copied and held when idle for a conversation is
    bounded by sinks, window and a quarter of it, and its answers have the bits of a cold server. If
    copying loses the sinks, the answers differ, so the comparison would show it.
    """
    turns, store, empty = list[Turn](), MemoryStore(), MemoryStore()
    settings = {"window": (SINKS, WINDOW), "limits": Limits(slab_idle_s=0.0)}
    resume = SinkCache.resume

    def without_sinks(cache: SinkCache, place: int) -> None:
        cache.keys[..., :SINKS, :] = 0
        resume(cache, place)

    async def main() -> None:
        async with serving(model_directory, empty, window=(SINKS, WINDOW)):
            pass  # spares the cold server the self-test
        conversation, shared = turn(0), 0
        async with serving(model_directory, store, **settings) as server:
            for number in range(8):
                said = await ask(server, generate(conversation, session_name="one"))
                await without_slabs(server)
                copies = Conversed([], store.rows).events(ev.BlocksRestored)
                held = server.statistics()
                turns.append(
                    Turn(
                        said.finished.prompt_tokens - said.accepted.cached_tokens,
                        64 * sum(len(copy.keys) for copy in copies[shared:]),
                        held.block_bytes,
                        held.kv_live_bytes,
                    )
                )
                shared = len(copies)
                if number < 7:
                    answer = Message(role="assistant", content=said.text)
                    conversation = turn(0, (*conversation.messages, answer))
            again = await ask(server, generate(conversation, session_name="another"))
            monkeypatch.setattr(SinkCache, "resume", without_sinks)
            damaged = await ask(server, generate(conversation, session_name="a third"))
            monkeypatch.undo()
        async with serving(model_directory, empty, window=(SINKS, WINDOW)) as cold:
            missed = await ask(cold, generate(conversation))
        assert 0 == missed.accepted.cached_tokens
        assert missed.tokens == said.tokens == again.tokens
        assert 4 * WINDOW < again.accepted.cached_tokens == damaged.accepted.cached_tokens
        assert missed.tokens != damaged.tokens

    trio.run(main)

    token_bytes = 4 * 2 * 4 * 32 * 4
    at_most = 64 + ROWS  # the block that holds the sinks is whole
    late = turns[4:]
    assert () == replay(store.rows).findings
    assert max(one.missed_tokens for one in turns) < WINDOW
    assert max(one.block_bytes for one in late) <= at_most * token_bytes
    assert max(one.live_bytes for one in late) <= 2 * at_most * token_bytes
    # For the request, and where more was prewarmed than the slab could be cut back to.
    assert max(one.copied_tokens for one in late) <= 2 * at_most
    left = Conversed([], store.rows).events(ev.BlockEvicted)
    assert {"window"} == {block.reason for block in left}


def test_blocks_of_a_long_answer_are_written(model_directory: Path, tmp_path: Path) -> None:
    """
    The window moved on within the answer, so the slab was emptied after it. Still, the blocks from
    which the next request continues have files when the session is idle.
    """
    store, rows = MemoryStore(), list[Row]()

    async def main() -> None:
        window = {"window": (SINKS, WINDOW), "prewarm": False}
        files = {"blocks_folder": tmp_path / "blocks", "disk_bytes": 64 * MIB}
        asked = generate(Conversation(messages=()), max_tokens=200)
        command = attrs.evolve(asked, conversation=None, prompt=tuple(range(300, 700)))
        async with serving(model_directory, store, **window, **files) as server:
            await ask(server, command)
            with trio.fail_after(120):
                while server.loaded.activity.at_work:
                    await trio.testing.wait_all_tasks_blocked()
            await wait_idle(server)
            rows.extend(store.rows)

    trio.run(main)
    events = [decode(row).event for row in rows]
    trimmed = [event.reason for event in events if isinstance(event, ev.CacheTrimmed)]
    assert ["the window has moved on from what is canonical"] == trimmed
    sealed = [event.key for event in events if isinstance(event, ev.BlockSealed)]
    assert 6 == len(sealed)
    assert sealed == [event.key for event in events if isinstance(event, ev.BlockSpilled)]
