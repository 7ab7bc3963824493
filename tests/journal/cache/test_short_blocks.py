"""Short blocks: what an idle session holds after its last full block, for others to match."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.cache import eviction, short_blocks
from cairn.journal.cache.short_blocks import rest_to_seal, superseded
from cairn.journal.keys import block_keys, ids_of, short_block_key
from cairn.journal.ledger import Clock
from cairn.journal.pruning import PruneOptions, prepare_prune
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from cairn.journal.state import Block, SessionId
from tests.journal.model import CHUNKS, FP_A, SECRETS, Driver, rendered
from tests.journal.test_grain import broken, driver_of, partly, reused, talk
from tests.journal.test_partial import LONG, say

C = CHUNKS[FP_A]
SAID = say(*LONG[: C + 1])


def sealed(driver: Driver) -> list[ev.BlockSealed]:
    """All sealed blocks."""
    return [r.event for r in driver.recorded if isinstance(r.event, ev.BlockSealed)]


def short(driver: Driver) -> list[Block]:
    """The short blocks in memory, in the order in which they were sealed."""
    keys = dict.fromkeys(event.key for event in sealed(driver) if event.end - event.start < C)
    return [driver.state.blocks[key] for key in keys if driver.state.blocks[key].present]


@pytest.mark.parametrize("words", range(2 * C + 1))
def test_the_same_prompt_again_computes_its_last_token(words: int):
    """In another session, whatever its length."""
    driver = driver_of()
    driver.serve(say(*LONG[:words]), answer=(50,))
    driver.serve(say(*LONG[:words], name="n"), answer=(50,))
    prompt = words + 2
    due = (
        prompt - 1 if (prompt - 1) % C != 1 else prompt - 2
    )  # of a block, one token is not matched
    assert due == sum((reused(driver)[2] * C, partly(driver)[1]))
    assert () == replay(driver.rows).findings

    driver = driver_of(any_cut=False)  # the control
    driver.serve(say(*LONG[:words]), answer=(50,))
    driver.serve(say(*LONG[:words], name="n"), answer=(50,))
    assert (prompt - 1) // C * C == sum((reused(driver)[2] * C, partly(driver)[1]))
    assert [] == short(driver)


def test_what_is_in_a_short_block():
    """The tokens of the slab after its last full block; it is not part of the slab's chain."""
    driver = driver_of()
    driver.serve(say(*LONG[: C + 1]), answer=(50, 51, 52, 53))
    session = driver.state.session("s1")
    (block,) = short(driver)
    ids = (*rendered((("user", LONG[: C + 1]),)), 50, 51, 52, 53)
    at = len(ids) // C * C
    assert (session.slab_keys[-1], at) == (block.parent, block.start)
    assert 0 < block.tokens < 4
    assert ids[at:] == ids_of(block.ids)
    assert len(ids) // C == len(session.slab_keys)
    of: dict[str, Any] = {"secret": SECRETS["t1"], "fingerprint": FP_A, "tenant": "t1"}
    assert block.key == short_block_key(**of, parent=block.parent, ids=ids[at:])
    (first,) = block_keys(**of, ids=ids[:C], block_tokens=C)
    assert first == short_block_key(**of, parent=None, ids=ids[:C]) == session.slab_keys[0]


def test_it_is_superseded_by_a_block_with_its_tokens():
    """When the session goes on, by a longer short block or by the full one, unless it is pinned."""
    driver = driver_of(blocks_kept=100)
    driver.serve(say(name="n"), answer=(50,))
    (one,) = short(driver)
    assert 3 == len(ids_of(one.ids))
    onward = talk(("user", ()), ("assistant", (50,)), ("user", (60, 61)), name="n")
    driver.serve(onward, answer=(51,))
    assert not driver.state.blocks[one.key].present
    gone = [r.event for r in driver.recorded if isinstance(r.event, ev.BlockEvicted)]
    assert [(one.key, "superseded")] == [(event.key, event.reason) for event in gone]
    assert b"" == driver.state.blocks[one.key].ids

    driver = driver_of(blocks_kept=100)
    driver.serve(say(name="n"), answer=(50,))
    (one,) = short(driver)
    driver.ask(say(88, 88, name="other"))
    driver.serve(onward, answer=(51,))
    assert driver.state.is_pinned(one.key) == driver.state.blocks[one.key].present
    key = driver.state.session("n").slab_keys[0]
    state, session = driver.state, driver.state.session("n")
    blocks = state.blocks.set(one.key, one)
    again = attrs.evolve(state, blocks=blocks, pins=type(state.pins)())
    assert (one.key,) == superseded(again, session, key)
    for change in ({"bug_id": "b"}, {"present": False}, {"ids": b""}):
        changed = blocks.set(key, attrs.evolve(blocks[key], **change))
        assert () == superseded(attrs.evolve(again, blocks=changed), session, key)
    for other in (
        attrs.evolve(one, ids=b""),
        attrs.evolve(one, ids=b"\xff" * 12),
        attrs.evolve(one, present=False),
        attrs.evolve(one, tokens=C),
    ):
        changed = blocks.set(one.key, other)
        assert () == superseded(attrs.evolve(again, blocks=changed), session, key)
    pins = state.pins.set(session.id, (one.key,))
    assert () == superseded(attrs.evolve(again, pins=pins), session, key)


def test_what_is_not_sealed():
    """Nothing without the grain 1 or a slab, less than two tokens, or what others have already."""
    driver = driver_of(blocks_kept=100)
    driver.serve(say(*LONG[: C + 1]), answer=(50,))
    driver.evict(short(driver)[0].key) if short(driver) else None
    state, session = driver.state, driver.state.session("s1")
    driver.serve(say(*LONG[:C]), answer=(50,))
    state, session = driver.state, driver.state.session("s2")
    (block,) = (one for one in short(driver) if one.parent == session.slab_keys[-1])
    assert rest_to_seal(state, session) is None  # its own is there
    blank = attrs.evolve(state, children=type(state.children)())
    rest = (len(session.slab_keys) * C, session.canonical_tokens)
    assert rest == rest_to_seal(blank, session)
    assert state.model is not None
    for model in (
        None,
        attrs.evolve(state.model, grain=C),
        attrs.evolve(state.model, min_cache_tokens=rest[1] + 1),
    ):
        assert rest_to_seal(attrs.evolve(blank, model=model), session) is None
    enough = attrs.evolve(blank, model=attrs.evolve(state.model, min_cache_tokens=rest[1]))
    assert rest == rest_to_seal(enough, session)
    for change in (
        {"slab": None},
        {"slab_ids": ()},
        {"canonical_tokens": rest[0] + 1},
        {"canonical_tokens": rest[0]},
    ):
        assert rest_to_seal(blank, attrs.evolve(session, **change)) is None
    parent = session.slab_keys[-1]
    bad = state.blocks.set(parent, attrs.evolve(state.blocks[parent], bug_id="b"))
    assert rest_to_seal(attrs.evolve(blank, blocks=bad), session) is None
    broken_one = state.blocks.set(block.key, attrs.evolve(block, bug_id="b"))
    assert rest == rest_to_seal(attrs.evolve(state, blocks=broken_one), session)


def test_it_has_no_file():
    """It is replaced soon. Full blocks are written."""
    driver = driver_of(blocks_kept=100)
    driver.serve(say(*LONG[:C]), answer=(50,))
    written = eviction.blocks_to_write(driver.state)
    assert set(driver.state.session("s1").slab_keys) == set(written)
    assert {block.key for block in short(driver)} == {
        block.key for block in driver.state.blocks.values()
    } - set(written)


def test_prewarmed_rows_count_once():
    """They stay in the slab, and count when the session reuses them."""
    driver = driver_of()
    driver.foresees = True
    driver.serve(talk(("user", LONG[: C + 2])), answer=(90, 50, 51))
    session = driver.state.session("s1")
    assert 0 < session.prewarmed_rows
    assert [0] == [block.prewarmed for block in short(driver)]


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        (
            {"end": -1},
            ("INV-1", "a short block that is not the last"),
        ),
        ({"end": 1}, ("INV-1", "a sealed block that the slab does not have")),
        ({"start": 1}, ("INV-3", "a block sealed on another one")),
        ({"parent": "k" * 64}, ("INV-3", "a block sealed on another one")),
    ],
)
def test_another_short_block(changes: dict[str, Any], due: tuple[str, str]):
    """It is the end of the slab, after the last full block."""
    driver = driver_of()

    def damage(event: ev.Event) -> ev.Event:
        if not isinstance(event, ev.BlockSealed) or event.end - event.start == C:
            return event
        given: dict[str, Any] = {
            name: new if isinstance(new, str) else getattr(event, name) + new
            for name, new in changes.items()
        }
        return attrs.evolve(event, **given)

    driver.damage = damage
    invariant, message = broken(driver, lambda: driver.serve(SAID, answer=(50, 51, 52, 53)))
    assert (due[0], True) == (invariant, due[1] in message)


def test_no_short_block_of_a_request_or_a_prewarm():
    """Only a session that is about to be idle seals one: INV-1."""
    driver = driver_of()
    driver.ask(say(*LONG[:C]), answer=(50, 51))
    while driver.state.session("s1").cached_tokens < C + 2:
        driver.step("s1")
    session = driver.state.session("s1")
    pool = driver.state.pool
    event = ev.BlockSealed(
        session="s1",
        key="k" * 64,
        parent=session.slab_keys[-1],
        digest="0",
        start=C,
        end=session.cached_tokens,
        bytes=10,
        resealed=False,
        stored=True,
        memory_blocks=pool.blocks + 1,
        memory_bytes=pool.block_bytes + 10,
    )
    assert "INV-1" == broken(driver, lambda: driver.propose(event))[0]


def test_the_rows_are_matched_after_the_slab_is_released():
    """A session that gave up its slab continues to the token, from its own short block."""
    driver = driver_of(blocks_kept=100)
    answer = (50, 51, 52, 53, 54)
    driver.serve(say(*LONG[:C], name="n"), answer=answer)
    session = driver.state.session("n")
    (block,) = short(driver)
    driver.release("n")
    driver.serve(
        talk(("user", LONG[:C]), ("assistant", answer), ("user", (60,)), name="n"), answer=(5,)
    )
    assert (0, 0, len(session.slab_keys)) == reused(driver)
    assert (block.key, session.canonical_tokens % C) == partly(driver)
    assert paths.RULES_VERSION == 1


def test_a_prune_within_a_run_knows_how_long_it_is():
    """Its ids are pruned with its conversation, and its tokens still count until it is evicted."""
    driver = driver_of(blocks_kept=100)
    driver.serve(SAID, answer=(50, 51, 52, 53))
    (block,) = short(driver)
    if driver.state.session("s1").slab is not None:
        driver.release("s1")
    driver.propose(ev.SessionClosed(session="s1", reason="expired"))
    cut_us = driver.recorded[-1].time_us + 1
    driver.serve(say(97, 96, 95), answer=(60,))
    driver.evict(block.key)
    count = itertools.count()
    clock = Clock(new_id=lambda: f"p{next(count)}", now_us=lambda: 10**12, version="test")
    store = MemoryStore(list(driver.rows))
    prepared = prepare_prune(store, PruneOptions(before_us=cut_us), clock)
    assert prepared.removed > 0
    assert sum(one.tokens for one in driver.state.blocks.values() if one.present) == (
        driver.state.pool.block_tokens
    )


def test_a_block_that_was_matched_is_superseded_when_the_session_is_idle():
    """
    While the session works with it, it stays. Then it is needless if another one begins with its
    tokens; a full block, or one that alone has its tokens, is not.
    """
    driver = driver_of(blocks_kept=100)
    driver.serve(SAID, answer=(50, 51, 52, 53))
    (first,) = short(driver)
    full = sealed(driver)[0].key
    session = driver.state.session("s1")
    needless = short_blocks.is_superseded
    assert not needless(driver.state, session, first.key)
    driver.serve(say(*LONG[: C + 1], name="n"), answer=(50, 51, 52, 53, 54, 55, 56))
    state = driver.state
    blocks = state.blocks.set(first.key, attrs.evolve(first, present=True))
    state = attrs.evolve(state, blocks=blocks)
    assert needless(state, session, first.key)
    assert not needless(state, session, full)
    pinned = attrs.evolve(state, pins=state.pins.set(SessionId("works"), (first.key,)))
    assert not needless(pinned, session, first.key)
    gone = attrs.evolve(
        state, blocks=state.blocks.set(first.key, attrs.evolve(first, present=False))
    )
    assert not needless(gone, session, first.key)
