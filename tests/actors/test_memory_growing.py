"""
A server over a model whose caches grow: the pool accounts for their size, and they never exceed it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.errors import Broken, PromptTooLong
from cairn.actors.requests.messages import Statistics
from cairn.engine.errors import ModelRefused
from cairn.engine.growth import Growth, LayerGrowth
from cairn.engine.mlx import start as mlx_start
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.reports import MemoryReport, SelfTestReport
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import DIFFERS, SAME, rerun
from tests.ops.journal.test_replay_engine import forged
from tests.support.in_process_server import MIB, ask, generate, serving, wait_idle
from tests.support.models.model_families import config_of, make_family_model

ROW = 2 * 4 * 128 * 4  # of a layer: keys and values, four heads, floats
BOUNDED = 3 * 356 * ROW  # three layers keep a chunk of 100 tokens, and one more step
STEP = 256 * ROW


@pytest.fixture(scope="module")
def directory(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama 4, whose caches are served unchanged."""
    config = config_of("llama4")
    config["text_config"] |= {"head_dim": 128, "num_key_value_heads": 4}
    return make_family_model(tmp_path_factory.mktemp("cold") / "model", model_directory, config)


def says(words: int) -> Conversation:
    """A conversation of a number of words."""
    return Conversation(messages=(Message(role="user", content="stone " * words),))


def events_of(store: MemoryStore) -> list[ev.Event]:
    """The journal's events."""
    return [decode(row).event for row in store.rows]


def test_a_small_pool_bounds_the_context(directory: Path) -> None:
    """
    The model takes 4,096 tokens, and 8 MiB hold three steps. A longer prompt is refused with that
    number, and a shorter one is answered within the budget. The bytes held meanwhile equal the
    expected ones to 5 %, and never exceed the reserved ones.
    """
    store = MemoryStore()
    seen: list[Statistics] = []
    measured: list[int] = []
    growths: list[Any] = []

    async def main() -> None:
        async with serving(directory, store, pool_bytes=8 * MIB) as server:
            growths.append(server.loaded.model.growth)
            device: Any = server.loaded.engine.device
            memory = device.memory

            def noted() -> MemoryReport:
                report: MemoryReport = memory()
                measured.append(report.slab_bytes)
                return report

            def watch(recorded: ev.Recorded) -> None:
                if isinstance(recorded.event, ev.CacheExtended):
                    seen.append(server.statistics())

            device.memory = noted
            server.observe(watch)
            with pytest.raises(PromptTooLong, match=r"> 767 maximum .*--pool-mb bounds"):
                await ask(server, generate(says(900)))
            await ask(server, generate(says(200), max_tokens=120))
            await wait_idle(server)
            now = server.statistics()
            assert (0, 0, 0) == (now.slab_bytes, now.kv_live_bytes, now.kv_expected_bytes)

    trio.run(main)

    (loaded,) = [event for event in events_of(store) if isinstance(event, ev.ModelLoaded)]
    assert (False, 768) == (loaded.reusable, loaded.context_tokens)
    (slab,) = [event for event in events_of(store) if isinstance(event, ev.SlabAcquired)]
    assert BOUNDED + -(-slab.capacity_tokens // 256) * STEP == slab.bytes == slab.pool_bytes
    assert slab.bytes <= 8 * MIB
    # A value is read some passes after its event, or after the slab was released.
    assert all(now.kv_expected_bytes <= slab.bytes for now in seen)
    assert {now.kv_live_bytes for now in seen} <= set(measured)
    passes = [event for event in events_of(store) if isinstance(event, ev.CacheExtended)]
    live, due = max(measured), max(growths[0].bytes_at(one.end) for one in passes)
    assert live == pytest.approx(due, rel=0.05) == pytest.approx(slab.bytes, rel=0.05)
    assert live <= slab.bytes
    # Each decode pass is measured too: the prompt was within the first step.
    assert 120 == sum(len(one.sampled) for one in passes) < len(measured)
    assert BOUNDED + STEP in measured
    assert BOUNDED + 2 * STEP == live
    assert () == replay(store.read()).findings


def test_a_pool_that_holds_no_block_is_refused(directory: Path) -> None:
    """The error names the bytes that a block takes, and the server does not start."""

    async def main() -> None:
        async with serving(directory, pool_bytes=MIB):
            pass

    with pytest.raises(ExceptionGroup) as caught:
        trio.run(main)
    assert caught.group_contains(
        ModelRefused, match=rf"\({4 * STEP} bytes in mlx-lm's own caches\)"
    )


def test_a_pool_that_is_large_enough_changes_no_fingerprint(directory: Path) -> None:
    """The pool is part of the fingerprint only if it bounds the context."""

    def fingerprint(pool: int) -> str:
        store = MemoryStore()

        async def main() -> None:
            async with serving(directory, store, pool_bytes=pool):
                pass

        trio.run(main)
        (loaded,) = [event for event in events_of(store) if isinstance(event, ev.ModelLoaded)]
        assert (loaded.context_tokens < 4096) == (pool == 8 * MIB)
        return loaded.fingerprint

    assert fingerprint(64 * MIB) == fingerprint(512 * MIB) != fingerprint(8 * MIB)


def test_caches_larger_than_expected_are_a_bug(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    INV-5: the answer ends with a bug, and the sum at release differs from the one at acquisition,
    so admission is closed.
    """
    store = MemoryStore()

    short = Growth(layers=(LayerGrowth(constant_bytes=STEP),))
    passed = SelfTestReport(findings={"nothing": True}, error_max=0.0, duration_us=0)
    monkeypatch.setattr(mlx_start, "measured_growth", lambda *_: short)
    monkeypatch.setattr(mlx_start, "run_self_test", lambda *_: passed)

    async def main() -> None:
        async with serving(directory, store) as server:
            with pytest.raises(Broken):
                await ask(server, generate(says(300)))
            with trio.fail_after(30):
                while server.statistics().admission_bug is None:
                    await trio.testing.wait_all_tasks_blocked(0.01)

    trio.run(main)

    found = replay(store.read()).findings
    assert ["CRASH", "INV-5"] == [one.invariant for one in found]
    assert "were reserved for" in found[0].message
    assert "a slab of another size" == found[1].message


@pytest.fixture(scope="module")
def rows(directory: Path) -> list[Row]:
    """The journal of an answer."""
    store = MemoryStore()

    async def main() -> None:
        async with serving(directory, store) as server:
            await ask(server, generate(says(200), session_name="it"))

    trio.run(main)
    return store.rows


def test_a_replay_has_slabs_of_the_same_size(rows: list[Row]) -> None:
    """Caches that grow are counted alike in the journal and in the replay."""
    assert SAME == rerun(rows, "it", None)


def test_a_slab_of_a_different_size_is_reported(rows: list[Row]) -> None:
    """The control: the counted bytes are compared."""

    def other(event: ev.Event) -> ev.Event:
        return attrs.evolve(event, bytes=7) if isinstance(event, ev.SlabAcquired) else event

    assert DIFFERS == rerun(forged(rows, other), "it", None)
