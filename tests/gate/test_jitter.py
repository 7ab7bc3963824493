"""
The gate over a random history: cuts, orders, evictions, files, restarts, kills and clients that
leave, in whatever order a seed gives; each answer has the bits of a cold one.

`make long` sends a hundred requests, and `make jitter` takes another seed and more of them
(CAIRN_JITTER_SEED, CAIRN_JITTER_REQUESTS). With
CAIRN_JITTER_SHRINK=1 a history that fails is cut short as long as it does.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio

from cairn.actors.sequencer import Sequencer
from cairn.engine import schedule
from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.mlx.blocks import SealedBlock, paste
from cairn.engine.mlx.cache import HeldSlab
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.reports import SlabReport, TrimReport
from cairn.journal import events as ev
from cairn.journal.rows.codec import Row
from tests.gate.jitter import (
    BLOCK_BYTES,
    ROUND,
    Act,
    Asked,
    C,
    Heard,
    Rest,
    Setup,
    Together,
    Truth,
    Window,
    begun,
    difference,
    lived,
    written,
    wrong,
)
from tests.support.in_process_server import serving
from tests.support.models.model_families import config_of, make_family_model

pytestmark = [pytest.mark.gate, pytest.mark.slow, pytest.mark.timeout(1800)]

SEED = int(os.environ.get("CAIRN_JITTER_SEED", "11"))
REQUESTS = int(os.environ.get("CAIRN_JITTER_REQUESTS", "100"))
FEW = 25
"""How many requests `make test` sends."""
SENT = [(number, min(ROUND, REQUESTS - number * ROUND)) for number in range(-(-REQUESTS // ROUND))]
"""The rounds, each with its number of requests."""
HAPPENS = (
    *("block_evicted", "block_spilled", "block_loaded", "block_file_removed", "blocks_restored"),
    *("server_lost", "server_stopped", "session_closed", "request_rejected", "cache_trimmed"),
    *("cancelled in prefill", "cancelled in decode"),
    *("slab: room for another session", "slab: too small for the prompt and its answer"),
    "slab: idle, and its blocks are in memory",
    *("continuation", "cold_start", "shorter_history", "diverged", "evicted", "session_busy"),
    *("cache_disabled", "prewarm_finished", "shadow: same", "closed: its TTL has expired"),
)
"""What must have happened, or the histories prove nothing; see ``Setup.happened``."""
MOVES = ("block_evicted", "block_spilled", "block_loaded", "blocks_restored", "continuation")
"""What must have happened under a window and over states."""
HISTORIES_MAX = 4
"""The most short histories in which ``MOVES`` must have happened."""
WINDOW = (4, 256)
STATE_BLOCK_BYTES = {"qwen3_next": 64 * 1024, "rwkv7": 8 * 1024}
"""A chunk's KV in models with states, with its share of a state: next to attention, and alone."""
MAY_HAPPEN = ("prewarm_abandoned", "tokens used ahead", "block_file_rejected")


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy into slabs block by block, so that much may run in between."""
    monkeypatch.setattr(schedule, "COPIED_AT_ONCE_BYTES", 1)


@pytest.fixture(scope="module")
def empty(model_directory: Path) -> list[Row]:
    """The journal of a server without requests: it spares the others their self-test."""
    return begun(model_directory)


@pytest.fixture(scope="module")
def in_all() -> Counter[str]:
    """What happened in all histories so far."""
    return Counter()


@pytest.fixture(scope="module")
def short(model_directory: Path, empty: list[Row]) -> list[Act]:
    """A history for the controls."""
    return written(model_directory, empty, SEED, 25)


def shortest(acts: Sequence[Act], fails: Callable[[Sequence[Act]], bool]) -> Sequence[Act]:
    """The shortest beginning of a failing history that still fails."""
    few, many = 0, len(acts)
    while few + 1 < many:
        middle = (few + many) // 2
        few, many = (few, middle) if fails(acts[:middle]) else (middle, many)
    return acts[:many]


@pytest.mark.parametrize(
    ("number", "requests"),
    [
        *([] if "CAIRN_JITTER_REQUESTS" in os.environ else [(0, FEW)]),
        *(pytest.param(*one, marks=pytest.mark.long) for one in SENT),
    ],
)
def test_whatever_happens_a_hit_is_a_miss(
    model_directory: Path,
    empty: list[Row],
    in_all: Counter[str],
    tmp_path: Path,
    number: int,
    requests: int,
) -> None:
    """
    Requests in random order, alone and at once, on a server with two slabs, a few blocks and a few
    files, which is stopped, killed and started again. Each answer is the cold one, a client that
    disconnects has received its beginning, the journal verifies, and in a hundred requests or more
    all of these events did happen.
    """
    seed = SEED + number
    print(f"\njitter: SEED={seed} REQUESTS={requests}")
    acts = written(model_directory, empty, seed, requests)

    setup = lived(model_directory, empty, tmp_path / "blocks", acts, seed)

    happened = setup.happened()
    in_all.update(happened)
    reused = happened["reused tokens"] / happened["prompt tokens"]
    print(f"jitter: {len(setup.heard)} requests in all, {reused:.0%} of the tokens reused")
    print(", ".join(f"{name} {happened[name]}" for name in (*HAPPENS, *MAY_HAPPEN)))
    found = wrong(setup)
    if found and os.environ.get("CAIRN_JITTER_SHRINK") == "1":
        tries = itertools.count()

        def fails(some: Sequence[Act]) -> bool:
            again = lived(model_directory, empty, tmp_path / f"try-{next(tries)}", some, seed)
            return bool(wrong(again))

        less = shortest(acts, fails)
        print(f"jitter: it fails after {len(less)} of {len(acts)} acts, with {less[-1]}")
    assert [] == found
    if requests == FEW:
        assert set() == {name for name in ("continuation", "cache_trimmed") if not happened[name]}
        assert happened["reused tokens"] > 0
    elif (number, requests) == SENT[-1] and REQUESTS >= 100:
        assert set() == {name for name in HAPPENS if not in_all[name]}
        assert in_all["reused tokens"] > 0.1 * in_all["prompt tokens"]


def assert_a_hit_is_a_miss(
    model: Path,
    folder: Path,
    requests: int,
    *,
    window: Window = None,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """
    Random histories, until blocks were moved in every way in one or another: a short one misses
    some by chance. All answers are right, and each journal verifies.
    """
    happened = Counter[str]()
    empty = begun(model, window=window)
    for seed in range(SEED, SEED + HISTORIES_MAX):
        print(f"\njitter: SEED={seed} REQUESTS={requests}")
        acts = written(model, empty, seed, requests, window)
        setup = lived(model, empty, folder / f"blocks-{seed}", acts, seed, window, block_bytes)
        happened.update(setup.happened())
        print(", ".join(f"{name} {happened[name]}" for name in (*HAPPENS, *MAY_HAPPEN)))
        assert [] == wrong(setup)
        if all(happened[name] for name in MOVES):
            break
    assert set() == {name for name in MOVES if not happened[name]}
    assert happened["reused tokens"] > 0


@pytest.mark.long
def test_under_a_window_a_hit_is_a_miss(model_directory: Path, tmp_path: Path) -> None:
    """
    The same if a token attends to the first few and the last few alone, and windows move on within
    answers.
    """
    assert_a_hit_is_a_miss(model_directory, tmp_path, max(50, REQUESTS // 10), window=WINDOW)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_next", "rwkv7"])
def test_over_states_a_hit_is_a_miss(model_directory: Path, tmp_path: Path, family: str) -> None:
    """
    The same if layers have a state, next to layers that attend and alone: an answer continues only
    from where a slab or a block has the state.
    """
    model = make_family_model(tmp_path / "model", model_directory, config_of(family))
    requests = max(35, REQUESTS // 15)
    assert_a_hit_is_a_miss(model, tmp_path, requests, block_bytes=STATE_BLOCK_BYTES[family])


def requests_of(acts: Sequence[Act]) -> list[Asked]:
    """All requests of a history, in order."""
    return [asked for act in acts if not isinstance(act, Rest) for asked in act.asked]


def differing(model: Path, decode_rows: int, requests: Sequence[Asked]) -> int:
    """How many requests have other answers with half the block size and other decode passes."""
    differs = 0

    async def main() -> None:
        nonlocal differs
        serves = serving(model, decode_rows=decode_rows, prewarm=False, block_tokens=C // 2)
        async with serves as other:
            truth = Truth(other)
            for asked in requests:
                said = await truth.of(asked.command)
                heard = Heard(
                    parts=list(said.parts), tokens=list(said.tokens), finished=said.finished
                )
                differs += difference(asked, heard) is not None

    trio.run(main)
    return differs


def test_control_other_shapes_give_other_bits(model_directory: Path, short: list[Act]) -> None:
    """
    The control: the same requests on a server with other shapes have different answers. So the
    comparison can find a difference under this BLAS.
    """
    requests = requests_of(short)[:10]
    # Which numbers of rows give other bits than four depends on the kernels: with AVX-512, blocks
    # of 32 tokens give the bits of blocks of 64, and so may one number of decode rows or another.
    found = (differing(model_directory, rows, requests) for rows in (1, 16))
    assert any(differs > len(requests) // 2 for differs in found), "this BLAS hides everything"


def swapped(slab: HeldSlab, blocks: Sequence[SealedBlock], start: int) -> int:
    """``mlx_blocks.paste`` that swaps two tokens in one layer."""
    end = paste(slab, blocks, start)
    keys = slab.caches[1].keys
    keys[..., start : start + 2, :] = keys[..., start : start + 2, :][..., ::-1, :]
    mx.eval(keys)
    return end


@pytest.mark.long
def test_a_block_that_is_copied_wrong_is_found(
    model_directory: Path,
    empty: list[Row],
    tmp_path: Path,
    short: list[Act],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    If a block in the slab differs from the one in memory, INV-3 breaks, and no client receives a
    wrong token.
    """
    monkeypatch.setattr(mlx_blocks, "paste", swapped)

    setup = lived(model_directory, empty, tmp_path / "blocks", short, SEED)

    assert {"INV-3"} == {found.invariant for found in setup.findings()}
    assert any(heard.broken for _, heard in setup.heard)
    assert [] == setup.differences()


@pytest.mark.long
def test_control_without_digests_a_wrong_copy_reaches_clients(
    model_directory: Path,
    empty: list[Row],
    tmp_path: Path,
    short: list[Act],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    The control: without digests, of blocks and of the row that is computed again, and without
    shadow checks, all of which would find the copy, the journal verifies, and answers are wrong.
    """
    monkeypatch.setattr(mlx_blocks, "paste", swapped)
    monkeypatch.setattr(mlx_blocks, "digest", lambda block: "blind")
    monkeypatch.setattr(mlx_blocks, "octets_digest", lambda octets: "blind")
    check_share(monkeypatch, 0.0)

    setup = lived(model_directory, empty, tmp_path / "blocks", short, SEED)

    assert () == setup.findings()
    assert [] != setup.differences()


def check_share(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Set the share of answers that each run of the server checks, in place of a random one."""
    settings = Setup.random_settings
    monkeypatch.setattr(
        Setup,
        "random_settings",
        lambda setup, is_last: {**settings(setup, is_last), "shadow_share": share},
    )


def forgotten(engine: MlxEngine, slab: int, end: int) -> TrimReport:
    """``MlxEngine.trim`` that reports a trim and does none."""
    held = engine.pool.get(slab)
    return TrimReport(cached_tokens=held.end, coverage=((len(held.caches), 0, end),))


@pytest.mark.long
def test_decoded_rows_that_stay_are_found(
    model_directory: Path,
    empty: list[Row],
    tmp_path: Path,
    short: list[Act],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    If decoded tokens are not trimmed, INV-1 breaks, or the engine has no room for the tokens after
    them, and no client receives a wrong token.
    """
    monkeypatch.setattr(MlxEngine, "trim", forgotten)

    setup = lived(model_directory, empty, tmp_path / "blocks", short, SEED)

    found = {found.invariant for found in setup.findings()}
    assert "INV-1" in found
    assert found <= {"INV-1", "CRASH"}
    assert setup.happened()["session_quarantined"] > 3
    assert [] == setup.differences()


@pytest.mark.long
def test_slabs_that_do_not_add_up_are_found(
    model_directory: Path,
    empty: list[Row],
    tmp_path: Path,
    short: list[Act],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    INV-5 breaks and closes admission. The history ends there, even if answers wait for a check,
    because the server never becomes idle again.
    """
    close_slab = MlxEngine.close_slab

    def miscounted(engine: MlxEngine, slab: int) -> SlabReport:
        report = close_slab(engine, slab)
        return attrs.evolve(report, bytes=report.bytes + 1)

    monkeypatch.setattr(MlxEngine, "close_slab", miscounted)
    check_share(monkeypatch, 1.0)

    setup = lived(model_directory, empty, tmp_path / "blocks", short, SEED)

    found = {found.invariant for found in setup.findings()}
    assert {"INV-5"} == found - {"CRASH"}
    assert any("INV-5: a slab of another size" in what for what in wrong(setup))
    assert any(heard.broken for _, heard in setup.heard)
    assert [] == setup.differences()


@pytest.mark.long
def test_without_checks_it_comes_to_rest(
    model_directory: Path,
    empty: list[Row],
    tmp_path: Path,
    short: list[Act],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once checks have ended for good, no task waits for further ones."""
    append = Sequencer.append

    def refuses(sequencer: Sequencer, *events: ev.Event, **given: Any) -> int:
        if isinstance(events[0], ev.ShadowStarted | ev.ShadowSkipped):
            raise RuntimeError("not even a skipped check can be recorded")
        return append(sequencer, *events, **given)

    check_share(monkeypatch, 1.0)
    monkeypatch.setattr(Sequencer, "append", refuses)
    at_once = next(act for act in short if isinstance(act, Together) and len(act.asked) > 2)

    setup = lived(model_directory, empty, tmp_path / "blocks", [at_once], SEED)

    # What ended the checks, and nothing else.
    (ended,) = wrong(setup)
    assert "CRASH: RuntimeError: not even a skipped check can be recorded" in ended
    assert 0 == setup.happened()["shadow_skipped"]
