"""Blocks of other nodes: when they are adopted, what follows from it, and what may not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.cache import adoption
from cairn.journal.cache.adoption import NO_RATES, RETRY_AFTER, WINDOW_TOKENS, Rates
from cairn.journal.cache.eviction import blocks_to_write
from cairn.journal.invariants.blocks import adopted
from cairn.journal.invariants.decisions import declined
from cairn.journal.invariants.sentences import Violation
from cairn.journal.state import EMPTY, Block, State, apply
from tests.journal.model import (
    BLOCK_BYTES,
    CHUNKS,
    FP_A,
    Driver,
    Talk,
    played,
    rendered,
    tape,
)

C = CHUNKS[FP_A]
FAST = Rates(prefill_tokens=100, prefill_us=1000, adopted_tokens=10, adopted_us=100)
SLOW = attrs.evolve(FAST, adopted_us=101)


# --- rates ----------------------------------------------------------------------------------------


def test_what_is_not_measured_pays():
    """The first block is read, and before the first prefill nothing is known to be faster."""
    assert adoption.pays(NO_RATES)
    assert adoption.pays(attrs.evolve(SLOW, prefill_tokens=0))
    assert adoption.pays(attrs.evolve(SLOW, adopted_tokens=0))
    assert adoption.pays(FAST)
    assert not adoption.pays(SLOW)


def test_it_is_measured_again_after_a_while():
    """Then what was measured last counts alone, for better or worse."""
    rates = SLOW
    for _ in range(RETRY_AFTER):
        assert not adoption.may_adopt(rates)
        rates = adoption.with_request(rates)
    assert adoption.may_adopt(rates)
    faster, slower = (adoption.with_adopted(rates, 10, took) for took in (50, 500))
    assert (10, 50, 0) == (faster.adopted_tokens, faster.adopted_us, faster.declined)
    assert adoption.may_adopt(faster)
    assert (10, 500, 0) == (slower.adopted_tokens, slower.adopted_us, slower.declined)
    assert not adoption.may_adopt(slower)
    assert FAST == adoption.with_request(FAST)


def test_what_was_measured_long_ago_counts_less():
    """A machine that gets slower is noticed."""
    rates = adoption.with_prefill(NO_RATES, WINDOW_TOKENS, 1000)
    assert (WINDOW_TOKENS, 1000) == (rates.prefill_tokens, rates.prefill_us)
    rates = adoption.with_prefill(rates, 2, 3000)
    assert (WINDOW_TOKENS // 2 + 1, 2000) == (rates.prefill_tokens, rates.prefill_us)
    rates = adoption.with_adopted(FAST, WINDOW_TOKENS, 100)
    assert (WINDOW_TOKENS // 2 + 5, 100) == (rates.adopted_tokens, rates.adopted_us)


# --- rows of other nodes --------------------------------------------------------------------------

KEYS = ("k0", "k1", "k2")
SECOND = ev.BlockSealed(
    session="s",
    key="k1",
    parent="k0",
    digest="d",
    start=4,
    end=8,
    bytes=40,
    resealed=False,
    stored=True,
    memory_blocks=1,
    memory_bytes=40,
)


def test_a_row_that_fits_a_prompt():
    """It seals the block on the one before it in the prompt, or on none, with its tokens."""
    first = attrs.evolve(SECOND, key="k0", parent=None, start=0, end=4)
    assert adoption.is_of_prompt(first, KEYS, 0, 4, 40)
    assert adoption.is_of_prompt(SECOND, KEYS, 1, 4, 40)


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "k0"},
        {"parent": None},
        {"parent": "k2"},
        {"start": 5, "end": 9},
        {"start": 5},
        {"end": 9},
        {"bytes": 41},
    ],
)
def test_a_row_that_does_not_fit_a_prompt(changes: dict[str, Any]):
    """It was changed, or another program wrote it."""
    assert not adoption.is_of_prompt(attrs.evolve(SECOND, **changes), KEYS, 1, 4, 40)


# --- the fold -------------------------------------------------------------------------------------


def node(**options: Any) -> Driver:
    """A node that runs."""
    driver = Driver(b"", shares=True, **options)
    driver.start()
    return driver


TALK = Talk(tenant="t1", group=None, name=None, parts=(("user", tuple(range(10, 30))),))


def with_blocks(blocks: int = 3) -> tuple[Driver, tuple[str, ...]]:
    """A node that has adopted the first blocks of a prompt, and the keys of all."""
    driver = node()
    ids = rendered(TALK.parts)
    keys, rows = driver.keys("t1", ids), driver.cold(ids)
    for place in range(blocks):
        driver.adopt(keys, place, rows)
    return driver, keys


def test_an_adopted_block_is_reused():
    """It counts in memory, is matched by the next prompt, and is never written by this node."""
    driver, keys = with_blocks()
    state = driver.state
    assert (3, 3 * BLOCK_BYTES, 3 * C) == (
        state.pool.blocks,
        state.pool.block_bytes,
        state.pool.block_tokens,
    )
    assert ["n2"] * 3 == [state.blocks[key].node for key in keys[:3]]
    assert () == blocks_to_write(state)
    session = driver.ask(TALK)
    assert session is not None
    path = driver.state.session(session).request.path  # type: ignore[union-attr]
    assert path is not None
    assert 3 <= path.blocks_from_pool
    driver.finish(session)
    assert "n2" == driver.state.blocks[keys[0]].node


def test_histories_adopt_and_decline():
    """The histories of other tests have all of it."""
    kinds: dict[str, int] = {}
    for seed in range(24):
        for one in played(tape(seed, 400)).recorded:
            kinds[one.event.kind] = kinds.get(one.event.kind, 0) + 1
            if isinstance(one.event, ev.BlockFileRejected) and one.event.node:
                kinds["rejected"] = kinds.get("rejected", 0) + 1
    assert kinds["block_adopted"] > 20
    assert kinds["adoption_declined"] > 0
    assert kinds["rejected"] > 0


def test_an_adopted_block_leaves_memory():
    """It has no file, so it is as if it had never been there, and may be adopted again."""
    driver, keys = with_blocks()
    driver.evict(keys[2])
    block = driver.state.blocks[keys[2]]
    assert not block.present
    assert not block.loadable
    driver.adopt(keys, 2, driver.cold(rendered(TALK.parts)))
    assert driver.state.blocks[keys[2]].usable


def test_requests_count_while_adopting_takes_longer():
    """Each of them once, whether other nodes would have had something or not."""
    driver, _ = with_blocks()
    counts = []
    for took in (0, 10**9):
        prefill = {"prefill_tokens": C, "prefill_us": 1}
        state = attrs.evolve(
            driver.state, rates=Rates(**prefill, adopted_tokens=C, adopted_us=took)
        )
        asking = Driver(b"", shares=True)
        asking.start()
        asking.ask(TALK)
        (opened, received) = (
            one
            for one in asking.recorded
            if one.event.kind in ("session_opened", "request_received")
        )
        state = apply_to(apply_to(state, opened.event), received.event)
        counts.append(state.rates.declined)
    assert [0, 1] == counts


def test_rates_end_with_the_model():
    """Another model has others."""
    driver, _ = with_blocks()
    assert driver.state.rates != NO_RATES
    driver.end_run("stopped")
    assert NO_RATES == driver.state.rates


# --- what other nodes may have --------------------------------------------------------------------


def chain_of(state: State, keys: tuple[str, ...], **changes: Any) -> tuple[str, ...]:
    """The blocks of the prompt that other nodes are asked for."""
    driver = node()
    ask = driver.asked(TALK, **changes)
    return paths.chain_to_adopt(state, None, ask, keys, rendered(TALK.parts), 40)


def test_the_blocks_that_others_are_asked_for():
    """Those after the ones that are here, up to one that is quarantined; none without a cache."""
    driver, keys = with_blocks(2)
    whole = keys[: (len(rendered(TALK.parts)) - 1) // C]
    assert whole[2:] == chain_of(driver.state, keys)
    assert whole == chain_of(node().state, keys)
    assert () == chain_of(driver.state, keys, cache_prompt=False)
    assert () == chain_of(EMPTY, keys)
    assert () == chain_of(node(min_cache_tokens=1000).state, keys)
    assert () == chain_of(node(reusable=False).state, keys)
    broken = but(driver.state, keys[1], present=False, bug_id="bug")
    assert () == chain_of(broken, keys)


def test_what_can_be_continued_from():
    """Up to the first block that no node has; blocks that are here need none."""
    driver, keys = with_blocks(2)
    chain = chain_of(driver.state, keys)
    assert chain == paths.adoptable(driver.state, keys, chain, keys)
    assert chain[:1] == paths.adoptable(driver.state, keys, chain, chain[:1])
    assert () == paths.adoptable(driver.state, keys, chain, chain[1:])
    assert () == paths.adoptable(driver.state, keys, (), keys)
    gone = but(driver.state, keys[0], present=False)
    chain = chain_of(gone, keys)
    assert keys[:2] == paths.adoptable(gone, keys, chain, keys[:1])


# --- invariants -----------------------------------------------------------------------------------


def but(state: State, key: str, **changes: Any) -> State:
    """A state with another block."""
    block: Block = attrs.evolve(state.blocks[key], **changes)
    return attrs.evolve(state, blocks=state.blocks.set(key, block))


def found(check: Callable[..., Any], state: State, event: ev.Event) -> list[str]:
    """The invariants that an event breaks."""
    violations: list[Violation] = list(check(state, event))
    return [one.invariant for one in violations]


@pytest.fixture
def after() -> tuple[State, ev.BlockAdopted, tuple[str, ...]]:
    """The state of a node before it adopts a third block, that event, and the keys."""
    driver, keys = with_blocks()
    *_, last = driver.recorded
    assert isinstance(last.event, ev.BlockAdopted)
    return driver.states[-2], last.event, keys


@pytest.mark.parametrize(
    ("invariant", "changes"),
    [
        ("INV-3", {"end": 1 + 3 * C}),
        ("INV-3", {"parent": None}),
        ("INV-3", {"parent": "a key that no block has"}),
        ("INV-3", {"start": C, "end": 2 * C}),
        ("INV-5", {"memory_blocks": 4}),
        ("INV-5", {"memory_bytes": 1}),
    ],
)
def test_a_block_that_does_not_fit(after: Any, invariant: str, changes: dict[str, Any]):
    """A part of it is wrong."""
    state, event, _ = after
    assert [] == found(adopted, state, event)
    assert invariant in found(adopted, state, attrs.evolve(event, **changes))


def test_a_block_that_is_known(after: Any):
    """It must be the same one, and gone; one that is quarantined, or built on such, is not read."""
    state, event, keys = after
    known = apply_to(state, event)
    gone = but(known, event.key, present=False)
    gone = attrs.evolve(gone, pool=state.pool)
    assert [] == found(adopted, gone, event)
    assert ["INV-5"] == found(adopted, known, event)
    assert "INV-3" == found(adopted, known, attrs.evolve(event, digest="other"))[0]
    assert ["INV-3"] == found(adopted, gone, attrs.evolve(event, digest="other"))
    assert "INV-3" == found(adopted, gone, attrs.evolve(event, bytes=1))[0]
    assert ["INV-3"] == found(adopted, but(gone, event.key, bug_id="bug"), event)
    assert ["INV-3"] == found(adopted, but(state, keys[1], bug_id="bug"), event)
    assert "INV-3" in found(adopted, attrs.evolve(state, model=None), event)


def apply_to(state: State, event: ev.Event) -> State:
    """The state after an event."""
    place = ev.Recorded(
        position=state.position + 1,
        stream=event.stream,
        seq=state.streams.get(event.stream, 0) + 1,
        event_id="id",
        time_us=state.time_us,
        event=event,
    )
    return apply(state, place)


def test_a_second_digest_quarantines_the_block():
    """As any violation of INV-3 does, with what is built on it."""
    driver, keys = with_blocks()
    last = driver.recorded[-2].event
    assert isinstance(last, ev.BlockAdopted)
    outcome = driver.ledger.propose([attrs.evolve(last, digest="other", node="n3")])
    assert outcome.bug is not None
    assert "INV-3" == outcome.bug.invariant
    assert f"second digest, in row {last.position} of n3" in str(outcome.bug)
    quarantined = {key for key in keys if driver.state.blocks.get(key) is not None}
    broken = {key for key in quarantined if driver.state.blocks[key].bug_id is not None}
    assert {*keys[1:3]} == broken


def test_a_block_that_is_not_known_yet_is_quarantined():
    """Otherwise each request would read it again. It is neither asked for nor written."""
    driver, keys = with_blocks(2)
    last = driver.recorded[-1].event
    assert isinstance(last, ev.BlockAdopted)
    wrong = attrs.evolve(last, key=keys[2], parent=keys[1], start=2 * C, end=3 * C + 1)
    outcome = driver.ledger.propose([wrong])
    assert outcome.bug is not None
    assert "INV-3" == outcome.bug.invariant
    assert outcome.bug.bug_id == driver.state.blocks[keys[2]].bug_id
    assert () == chain_of(driver.state, keys)
    assert () == blocks_to_write(driver.state)
    assert 2 == driver.state.pool.blocks


def test_adopting_without_a_model():
    """It is no step of a server that has none."""
    driver, _ = with_blocks()
    event = driver.recorded[-1].event
    outcome = Driver(b"").ledger.propose([event])
    assert outcome.bug is not None
    assert "INV-6" == outcome.bug.invariant


def test_what_is_declined():
    """Only by what was measured, and if that is slower."""
    rates = attrs.asdict(SLOW)
    del rates["declined"]
    event = ev.AdoptionDeclined(key="k", blocks=1, **rates)
    state = attrs.evolve(node().state, rates=SLOW)
    assert [] == found(declined, state, event)
    assert ["INV-4"] == found(declined, state, attrs.evolve(event, blocks=0))
    assert ["INV-4"] == found(declined, state, attrs.evolve(event, prefill_us=1))
    fast = attrs.evolve(event, adopted_us=FAST.adopted_us)
    assert ["INV-4"] == found(declined, attrs.evolve(state, rates=FAST), fast)
    assert SLOW == apply_to(state, event).rates
