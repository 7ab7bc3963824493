"""
The gate for models with recurrent layers: an answer that continues from a state has the bits of a
cold one, however the state was obtained, and a wrong state is found.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import trio
from structlog.testing import capture_logs

from cairn.actors.requests.limits import Limits
from cairn.engine.mlx import selftest as mlx_selftest
from cairn.engine.mlx.state import StateCache
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.gate.test_blocks_on_disk import Setup, run, says
from tests.gate.test_gate import rows_of_an_empty_server
from tests.support.in_process_server import MIB, Said, ask, generate, serving, wait_idle
from tests.support.models.model_families import config_of, make_family_model

pytestmark = pytest.mark.gate

BESIDE_ATTENTION = "qwen3_next"


def made(family: str, model_directory: Path, tmp_path: Path) -> Path:
    """A small model of a family, with random weights."""
    return make_family_model(tmp_path / "model", model_directory, config_of(family))


def blocks_apart(setup: Setup) -> int:
    """How many blocks there are from one that carries states to the next, that one included."""
    return max(event.state_blocks for event in setup.events(ev.ModelLoaded))


def bits_of_a_state(setup: Setup) -> list[ev.BlockSealed]:
    """The blocks that were sealed with states: those that are larger than the rest."""
    every = 64 * blocks_apart(setup)
    return [event for event in setup.events(ev.BlockSealed) if event.end % every == 0]


@pytest.mark.long_but("rwkv7")
@pytest.mark.parametrize("family", [BESIDE_ATTENTION, "falcon_h1", "rwkv7"])
def test_a_conversation_an_edit_and_a_restart(
    family: str, model_directory: Path, tmp_path: Path
) -> None:
    """
    Three turns continue from the slab; one is edited, and continues from a block before it; then
    all of them again from files. Each answer has the bits of a cold server.
    """
    turns: list[Said] = []
    others: list[Said] = []

    async def main(setup: Setup) -> None:
        talk = [says(1, 30)]
        async with setup.serving() as server:
            for turn in range(3):
                turns.append(await setup.asked(server, talk))
                await wait_idle(server)
                talk.append(says(2 + turn, (25, 120, 70)[turn]))
            edited = [*talk[:4], says(9, 20)]
            others.append(await setup.asked(server, edited))
            await wait_idle(server)
        async with setup.serving() as server:
            others.append(await setup.asked(server, talk))

    setup = run(made(family, model_directory, tmp_path), tmp_path, main)
    every = 64 * blocks_apart(setup)
    assert every
    assert ["cold_start", None, None] == [said.accepted.reason for said in turns]
    # From the end of the last full chunk, whether a block carries its states or not, except where a
    # larger slab was needed.
    assert turns[1].accepted.cached_tokens >= turns[0].accepted.prompt_tokens // 64 * 64 > 0
    kept = turns[1].accepted.prompt_tokens // every * every
    assert turns[2].accepted.cached_tokens >= kept
    edit, restarted = (said.accepted for said in others)
    assert ("new_session", "diverged") == (edit.path, edit.reason)
    assert ("continuation", None) == (restarted.path, restarted.reason)
    last = turns[-1].accepted.prompt_tokens
    for accepted, common in ((edit, turns[1].accepted.prompt_tokens - 80), (restarted, last)):
        assert 0 == accepted.cached_tokens % every
        assert accepted.cached_tokens >= common // every * every
    assert restarted.cached_tokens > 0
    assert setup.events(ev.BlockLoaded)
    assert bits_of_a_state(setup)


@pytest.mark.long
def test_states_that_leave_memory(model_directory: Path, tmp_path: Path) -> None:
    """
    Conversations by turns with room for few blocks and for one slab: states are spilled and loaded
    with their blocks.
    """
    warm: list[Said] = []

    async def main(setup: Setup) -> None:
        talks: list[list[Message]] = [[], []]
        async with setup.serving(blocks_bytes=MIB, pool_slabs=1) as server:
            for turn in range(3):
                for number, talk in enumerate(talks):
                    talk.append(says(10 * turn + number, 90))
                    said = await setup.asked(server, talk, seed=turn)
                    await wait_idle(server)
                    if turn:
                        warm.append(said)

    setup = run(made(BESIDE_ATTENTION, model_directory, tmp_path), tmp_path, main)
    assert any(said.accepted.cached_tokens for said in warm)
    assert setup.events(ev.BlockEvicted)
    assert setup.events(ev.BlockLoaded)


def test_bytes_of_states_are_counted(model_directory: Path, tmp_path: Path) -> None:
    """
    The bytes in memory of an idle server follow from the model's shapes: rows, and also states.
    """
    measured: list[Any] = []

    async def main(setup: Setup) -> None:
        async with setup.serving(limits=Limits(slab_idle_s=0.0)) as server:
            await setup.asked(server, [says(1, 120)])
            await wait_idle(server)
            measured.append((server.statistics(), server.loaded.model))

    run(made(BESIDE_ATTENTION, model_directory, tmp_path), tmp_path, main)
    ((now, facts),) = measured
    rows, rule = facts.kv_token_bytes * facts.block_tokens, facts.checkpoints
    carried = now.blocks // rule.blocks
    assert now.block_bytes == now.blocks * rows + carried * facts.state_bytes
    assert now.kv_live_bytes == now.block_bytes + now.slab_bytes
    # The states at the slab's end are in a block too, or are counted once more.
    alone = now.blocks % rule.blocks != 0
    assert now.kv_expected_bytes == now.block_bytes + alone * facts.state_bytes
    assert facts.state_bytes > 0


def spoiled_cut(cache: StateCache, end: int) -> None:
    """``StateCache.cut_back`` that leaves the state unchanged."""
    cache.tokens = end


put = StateCache.put


def spoiled_put(cache: StateCache, arrays: Sequence[mx.array], end: int) -> None:
    """``StateCache.put`` of an empty state."""
    put(cache, [mx.zeros_like(array) for array in arrays], end)


@pytest.mark.parametrize("way", ["cut back", "a block"])
def test_control_a_state_that_is_not_what_it_was(
    way: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The answer that continues from it has different bits from a cold one, so the tests above prove
    something. In a block, digests would find it first, so they are disabled.
    """
    directory = made("lfm2", model_directory, tmp_path)
    answers: list[Said] = []

    async def main() -> None:
        empty = await rows_of_an_empty_server(directory)  # the self-test has passed
        if way == "cut back":
            monkeypatch.setattr(StateCache, "cut_back", spoiled_cut)
        else:
            monkeypatch.setattr(StateCache, "put", spoiled_put)
            for place in ("mlx.blocks", "mlx.files.block_files"):
                monkeypatch.setattr(f"cairn.engine.{place}.digest", lambda block: "blind")
        talk = [says(1, 60)]
        files = {"blocks_folder": tmp_path / "blocks", "disk_bytes": 64 * MIB}
        store = MemoryStore(list(empty))
        async with serving(directory, store, prewarm=False, **files) as server:
            said = await ask(server, generate(Conversation(messages=tuple(talk))))
            await wait_idle(server)
            talk += [Message(role="assistant", content=said.text), says(2, 30)]
            command = generate(Conversation(messages=tuple(talk)))
            if way == "cut back":
                answers.append(await ask(server, command))
        if way == "a block":
            async with serving(directory, store, prewarm=False, **files) as server:
                answers.append(await ask(server, command))
        async with serving(directory, MemoryStore(list(empty))) as cold:
            answers.append(await ask(cold, command))

    trio.run(main)
    warm, missed = answers
    assert warm.accepted.cached_tokens > 0 == missed.accepted.cached_tokens
    assert warm.tokens != missed.tokens


def test_a_model_whose_states_do_not_come_back_is_served_cold(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The self-test finds it, on record and in the log. Then nothing is reused, and answers are right.
    """
    monkeypatch.setattr(StateCache, "cut_back", spoiled_cut)
    store = MemoryStore()
    said: list[Said] = []

    async def main() -> None:
        empty = await rows_of_an_empty_server(directory)
        setup = Setup(model=directory, folder=tmp_path / "blocks", empty=empty, store=store)
        async with setup.serving() as server:
            talk = [says(1, 60)]
            said.append(await setup.asked(server, talk))
            talk.append(says(2, 30))
            said.append(await setup.asked(server, talk))

    directory = made("lfm2", model_directory, tmp_path)
    with capture_logs() as lines:
        trio.run(main)

    assert "going on from a state did not give the bits of a cold answer" in cold_for(lines)[0]
    events = [decode(row).event for row in store.rows]
    tests = [event for event in events if isinstance(event, ev.SelfTestFinished)]
    (loaded,) = [event for event in events if isinstance(event, ev.ModelLoaded)]
    assert [False, True] == [event.passed for event in tests]
    assert not tests[0].findings["warm_equals_cold"]
    assert (False, 0) == (loaded.reusable, loaded.state_blocks)
    assert "kv_states" not in loaded.fields
    assert [0, 0] == [one.accepted.cached_tokens for one in said]
    assert () == replay(store.read()).findings


def cold_for(lines: Sequence[MutableMapping[str, Any]]) -> tuple[str, MutableMapping[str, Any]]:
    """Why nothing is reused, in words, and the log line that says so."""
    line = next(line for line in lines if line["event"].startswith("nothing is reused"))
    return line["event"], line


@pytest.mark.parametrize(
    ("check", "raises"),
    [("slab_size", False), ("slab_size", True), ("naive_differs", True)],
)
def test_why_nothing_is_reused(
    check: str,
    raises: bool,
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    The log names the finding, and the exception with its stack, even if that is no fault of the
    model's or came in a check that need not pass. It gives no other reason.
    """
    store, before = MemoryStore(), getattr(mlx_selftest.SelfTest, check)

    def fails(test: mlx_selftest.SelfTest) -> bool:
        if test.loaded.is_simple:  # served cold
            return bool(before(test))
        if raises:
            raise MemoryError("no room for a slab")
        return False

    monkeypatch.setattr(mlx_selftest.SelfTest, check, fails)

    async def main() -> None:
        async with serving(made("lfm2", model_directory, tmp_path), store):
            pass

    with capture_logs() as lines:
        trio.run(main)

    banner, line = cold_for(lines)
    assert "did not give the bits of a cold answer" not in banner
    events = [decode(row).event for row in store.rows]
    found, *_ = [event for event in events if isinstance(event, ev.SelfTestFinished)]
    assert (False, True) == (found.passed, found.findings["warm_equals_cold"])
    assert [name for name, held in found.findings.items() if not held] == line["failed"]
    assert line["failed"][0].startswith(check)
    if raises:
        assert "nothing is reused: the self-test broke off" == banner
        assert "MemoryError: no room for a slab" == line["fault"]
        assert "in fails" in line["exception"]
    else:
        assert "nothing is reused: a larger slab did not give the same bits" == banner
        assert "fault" not in line


def test_one_row_and_no_window(model_directory: Path, tmp_path: Path) -> None:
    """Rows are not independent over states; which blocks carry states is in the fingerprint."""
    loaded: list[ev.ModelLoaded] = []

    async def main() -> None:
        store = MemoryStore()
        async with serving(made("lfm2", model_directory, tmp_path), store, decode_rows=4):
            pass
        events = [decode(row).event for row in store.rows]
        loaded.extend(event for event in events if isinstance(event, ev.ModelLoaded))

    trio.run(main)
    (one,) = loaded
    assert (1, True) == (one.decode_rows, one.reusable)
    assert one.state_blocks == one.fields["kv_states"]["blocks"] > 0
    assert 4 == one.layers
