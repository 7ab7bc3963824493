"""Partial matches: the first rows of a block that another session sealed, where the grain is 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.keys import ids_bytes, ids_of
from cairn.journal.pruning import PruneOptions, prepare_prune
from cairn.journal.replay import replay
from cairn.journal.retention import NeededIds
from cairn.journal.rows.base import base_of, forgotten, state_of
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from cairn.journal.state import CHILDREN, State, beginning
from tests.journal.model import CHUNKS, FP_A, FP_B, Driver, Talk, rendered
from tests.journal.test_grain import broken, driver_of, last_path, partly, reused, talk

C = CHUNKS[FP_A]
LONG = tuple(range(10, 10 + 3 * C))


def say(*words: int, **of: Any) -> Talk:
    """A conversation of one message; its prompt is a label, the words and a label."""
    return talk(("user", words), **of)


def first(driver: Driver, *words: int, **of: Any) -> tuple[str, ...]:
    """Serve a prompt, and return the keys of its blocks."""
    name = driver.serve(say(*words, **of), answer=(50,))
    last = driver.state.session(name).last
    assert last is not None
    return last.prompt_keys


def common(same: int) -> tuple[int, ...]:
    """As many tokens as LONG, of which the first ones are those of LONG."""
    return (*LONG[:same], *range(70, 70 + len(LONG) - same))


@pytest.mark.parametrize("same", range(3 * C))
def test_another_session_reuses_to_the_token(same: int):
    """All tokens before the first that differs, if at least two of them are in its block."""
    driver = driver_of()
    keys = first(driver, *LONG)
    driver.serve(say(*common(same)))
    blocks, rows = divmod(1 + same, C)
    assert (0, 0, blocks) == reused(driver)
    due = (keys[blocks], rows) if rows >= 2 else (None, 0)
    assert due == partly(driver)
    checked = [r.event.row for r in driver.recorded if isinstance(r.event, ev.RowChecked)]
    assert ([same] if rows >= 2 else []) == checked
    restored = [r.event for r in driver.recorded if isinstance(r.event, ev.BlocksRestored)]
    if rows >= 2:
        assert (blocks * C, 1 + same) == (restored[-1].start, restored[-1].end)

    driver = driver_of(any_cut=False)  # the control: with the grain C only whole blocks
    first(driver, *LONG)
    driver.serve(say(*common(same)))
    assert (0, 0, blocks) == reused(driver)
    assert (None, 0) == partly(driver)
    assert {b""} == {block.ids for block in driver.state.blocks.values()}
    assert {} == dict(driver.state.children)


def test_the_same_prompt_of_full_blocks():
    """All but its last token, whose logits are needed."""
    driver = driver_of()
    words = LONG[: 2 * C - 2]
    keys = first(driver, *words)
    driver.serve(say(*words, name="n"))
    assert 2 * C == len(rendered((("user", words),)))
    assert ((0, 0, 1), (keys[1], C - 1)) == (reused(driver), partly(driver))


def test_the_longest_beginning_is_taken():
    """Of equals, the block that was sealed or matched in part last."""
    driver = driver_of(blocks_kept=100)
    three = first(driver, *common(2), name="a")
    two = first(driver, *common(1), 90, name="b")
    driver.serve(say(*LONG[:2], 80, 81, 82, name="n1"))
    assert (three[0], 3) == partly(driver)
    driver.serve(say(LONG[0], 80, 81, 82, name="n2"))  # as many as those of a, b and n1
    latest = driver.state.session("n1").slab_keys[0]
    assert (latest, 2) == partly(driver)
    driver.serve(say(*LONG[:2], 86, 86, 86, name="n3"))
    assert 3 == partly(driver)[1]
    matched = partly(driver)[0]
    assert matched in (three[0], latest)
    driver.ask(say(LONG[0], 87, 87, 87, name="n4"))  # n3's own block was sealed after that match
    assert (driver.state.session("n3").slab_keys[0], 2) == partly(driver)
    assert two[0] in driver.state.children[beginning(FP_A, "t1")]
    driver.ask(say(LONG[0], 70, 91, 91, name="n5"))  # while these two have sealed nothing yet
    assert (two[0], 3) == partly(driver)
    driver.ask(say(LONG[0], 88, 88, 88, name="n6"))
    assert (two[0], 2) == partly(driver)


def test_only_the_latest_blocks_are_compared():
    """However many conversations have the same beginning, a decision takes no longer."""
    driver = driver_of(blocks_kept=1000, pool_slabs=200)
    keys = first(driver, 5, 6, 7, 8, name="old")
    state, name = driver.state, beginning(FP_A, "t1")
    assert (keys[0],) == state.children[name]
    for word in range(CHILDREN - 1):
        first(driver, 5, 100 + word, 101, 102, name=f"n{word}")
    assert (CHILDREN, keys[0]) == (len(driver.state.children[name]), driver.state.children[name][0])
    driver.ask(say(5, 6, 9, 9, name="x"))
    assert (keys[0], 3) == partly(driver)
    assert keys[0] == driver.state.children[name][-1]  # it is the latest again
    oldest = driver.state.children[name][0]
    first(driver, 5, 99, 99, 99, name="y")
    assert oldest not in driver.state.children[name]
    assert driver.state.blocks[oldest].usable


def test_blocks_that_are_gone_make_room_for_others():
    """Only blocks in memory or in files count among the latest."""
    driver = driver_of(blocks_kept=1000, pool_slabs=200, files_kept=0)
    keys = [first(driver, 5, word, 8, 9, name=f"n{word}")[0] for word in range(10, 13)]
    for key in keys[:2]:
        driver.evict(key)
    name = beginning(FP_A, "t1")
    assert tuple(keys) == driver.state.children[name]
    more = first(driver, 5, 20, 8, 9, name="m")
    assert (keys[2], more[0]) == driver.state.children[name]


def test_the_rows_of_the_slab_win_a_tie():
    """They need no copy; fewer of them are replaced."""
    driver = driver_of(blocks_kept=100)
    driver.serve(say(*LONG[: C + 1], name="mine"), answer=(7,))
    driver.serve(say(*common(C + 2), name="other"), answer=(7,))
    block = driver.state.session("other").slab_keys[1]
    for same, due in ((C + 1, (C + 2, None, 0)), (C + 2, (C, block, 3))):
        ids = rendered((("user", (*LONG[:same], 99, 99)),))
        mine = driver.state.session("mine")
        found = paths.reusable_prewarm(driver.state, mine, ids, driver.keys("t1", ids))
        assert due == (found.tokens, found.partial, found.rows)
        assert 1 == found.blocks


def test_matches_stay_within_the_tenant():
    """Another tenant's blocks are never compared: the first ones neither."""
    driver = driver_of(blocks_kept=100)
    first(driver, *LONG)
    driver.serve(say(*LONG, tenant="t2"))
    assert 0 == last_path(driver).reused_tokens
    assert beginning(FP_A, "t1") != beginning(FP_A, "t2") != beginning(FP_B, "t2")
    driver.serve(say(*common(2), tenant="t2"))
    key = driver.state.session("s2").slab_keys[0]
    assert (key, 3) == partly(driver)
    driver.serve(say(*common(2), name="t1-n"))
    assert partly(driver)[0] != key
    owners: dict[str, set[str]] = {}
    for recorded in driver.recorded:
        if isinstance(recorded.event, ev.BlockSealed):
            of = driver.state.session(recorded.event.session).tenant
            owners.setdefault(recorded.event.key, set()).add(of)
    for children in driver.state.children.values():
        assert 1 == len(set[str]().union(*(owners[child] for child in children)))


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({"cache_prompt": False}, 0),
        ({"cache_mode": "prefix"}, C - 1),
    ],
)
def test_cache_modes(how: dict[str, Any], rows: int):
    """Nothing is reused without the cache; in the mode ``prefix``, shared blocks in part too."""
    driver = driver_of()
    first(driver, *LONG)
    driver.serve(say(*common(C - 2)), **how)
    assert rows == partly(driver)[1] == last_path(driver).reused_tokens


def test_a_quarantined_block_is_not_matched():
    """Nor one that is not in memory."""
    driver = driver_of()
    keys = first(driver, *LONG)
    ids = rendered((("user", common(C + 1)),))
    session, state = driver.state.session("s1"), driver.state
    session = attrs.evolve(session, slab=None, slab_keys=(), slab_ids=())
    for change in ({"bug_id": "b"}, {"present": False}, {"ids": b""}, {}):
        blocks = state.blocks.set(keys[1], attrs.evolve(state.blocks[keys[1]], **change))
        changed = attrs.evolve(state, blocks=blocks)
        found = paths.reusable_prewarm(changed, session, ids, driver.keys("t1", ids))
        assert (None if change else keys[1]) == found.partial


def test_ids_are_kept_while_a_block_can_match():
    """In memory, or in a file; and when the server starts again, of the latter only."""
    driver = driver_of()
    keys = first(driver, *LONG)
    blocks = driver.state.blocks
    assert rendered((("user", LONG),))[:C] == ids_of(blocks[keys[0]].ids)
    driver.spill(keys[0])
    driver.end_run("stopped")
    assert [True, False] == [bool(driver.state.blocks[key].ids) for key in keys[:2]]
    driver.start()
    driver.reject(keys[0], "missing")
    assert b"" == driver.state.blocks[keys[0]].ids


# --- files --------------------------------------------------------------------------------------


def to_load(state: State, driver: Driver, *words: int) -> tuple[str, ...]:
    """What a new session would load for a prompt."""
    ids, ask = rendered((("user", words),)), driver.asked(say(*words))
    return paths.chain_to_load(state, None, ask, driver.keys("t1", ids), ids, len(ids))


def in_file(state: State, *keys: str) -> State:
    """The state with these blocks in files alone."""
    blocks = state.blocks
    for key in keys:
        blocks = blocks.set(key, attrs.evolve(blocks[key], present=False, file_bytes=9))
    return attrs.evolve(state, blocks=blocks)


def test_a_file_is_read_for_a_part_of_its_block():
    """If that spares a quarter of a block more than what is in memory."""
    driver = driver_of(blocks_kept=100)
    assert 1 == C // paths.LOAD_PARTIAL
    keys = first(driver, *LONG)
    other = first(driver, *common(C), name="o")  # has one token less of the second block
    state = driver.state
    assert keys[0] == other[0]
    assert () == to_load(state, driver, *common(C + 1))
    one, two = in_file(state, keys[1]), in_file(state, keys[1], other[1])
    assert (keys[0], keys[1]) == to_load(two, driver, *common(C + 1))
    assert () == to_load(two, driver, *common(C - 1))  # a single token of the second block
    assert (keys[0], keys[1]) == to_load(one, driver, *common(C + 1))
    assert () == to_load(one, driver, *common(C))  # as many as the block in memory has
    assert (keys[0],) == to_load(in_file(state, keys[0]), driver, *common(C - 2))
    assert () == to_load(attrs.evolve(two, disk_budget=0), driver, *common(C + 1))


def test_a_file_is_not_read_for_a_few_rows(monkeypatch: pytest.MonkeyPatch):
    """What counts is how many more they are than those of a block in memory."""
    driver = driver_of(blocks_kept=100)
    keys = first(driver, *LONG)
    first(driver, *common(C + 1), name="o")
    state = in_file(driver.state, keys[1])
    assert keys[:2] == to_load(state, driver, *common(C + 2))
    monkeypatch.setattr(paths, "LOAD_PARTIAL", 2)
    assert () == to_load(state, driver, *common(C + 2))


def test_rows_of_the_slab_spare_a_file():
    """What the session has itself is not read."""
    driver = driver_of(blocks_kept=100)
    keys = first(driver, *LONG[: C - 2], name="n")
    session = driver.state.session("n")
    state = in_file(driver.state, keys[0])
    ids = rendered((("user", LONG[: C - 2]),))
    for name, due in (("n", ()), (None, keys[:1])):
        ask = attrs.evolve(driver.asked(say(*LONG[: C - 2])), session_name=name)
        mine = session if name else None
        found = paths.chain_to_load(state, mine, ask, driver.keys("t1", ids), ids, len(ids))
        assert due == found


# --- what is found -------------------------------------------------------------------------------


def changed(kind: type[ev.Event], **changes: Any) -> Callable[[ev.Event], ev.Event]:
    """Changes the events of a kind that concern a partial match."""

    def damage(event: ev.Event) -> ev.Event:
        if not isinstance(event, kind):
            return event
        if isinstance(event, ev.BlocksRestored) and event.end % C == 0:
            return event
        given = {name: new(event) if callable(new) else new for name, new in changes.items()}
        return attrs.evolve(event, **given)

    return damage


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_key": "k" * 64},
        {"partial_key": None, "tokens_from_partial": 0, "reused_tokens": C},
        {"tokens_from_partial": 1, "reused_tokens": C + 1},
        {"tokens_from_partial": 3, "reused_tokens": C + 3},
        {"reused_tokens": C},
    ],
)
def test_another_match_than_the_rules_give(changes: dict[str, Any]):
    """INV-4."""
    driver = driver_of()
    first(driver, *LONG)
    driver.damage = changed(ev.PathSelected, **changes)
    found = broken(driver, lambda: driver.serve(say(*common(C + 1))))
    assert ("INV-4", "another decision") == found


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({"end": lambda e: e.end + 1}, ("INV-1", "a layer's KV does not end where it should")),
        (
            {"end": lambda e: e.end - 1, "coverage": ((3, 0, C + 1),)},
            ("INV-4", "other rows were restored than decided"),
        ),
        ({"start": lambda e: e.start - 1}, ("INV-1", "blocks left a gap")),
        ({"keys": ("k" * 64,)}, ("INV-4", "other rows were restored than decided")),
        ({"digests": ("0",)}, ("INV-3", "does not have its digest")),
        ({"digests": ()}, ("INV-3", "the number of digests is not the number of blocks")),
    ],
)
def test_other_rows_than_decided(changes: dict[str, Any], due: tuple[str, str]):
    """The restored rows are those of the decision; the whole block has its digest."""
    driver = driver_of()
    keys = first(driver, *LONG)
    driver.damage = changed(ev.BlocksRestored, **changes)
    invariant, message = broken(driver, lambda: driver.serve(say(*common(C + 1), name="n")))
    assert (due[0], True) == (invariant, due[1] in message)
    wrong = {key for key in keys if driver.state.blocks[key].bug_id is not None}
    assert (set(keys[1:]) if changes.get("digests") else set()) == wrong


def test_rows_before_all_blocks_are_there():
    """A partial match comes after the blocks: INV-4."""
    driver = driver_of()
    first(driver, *LONG)
    driver.share = lambda *_: None  # type: ignore[method-assign]  # the fault
    invariant, message = broken(driver, lambda: driver.serve(say(*common(C + 1))))
    assert ("INV-4", "other rows were restored than decided") == (invariant, message)


def test_rows_that_were_not_copied():
    """The first pass begins where the decision says: INV-4."""
    driver = driver_of()
    first(driver, *LONG)
    driver.share_part = lambda *_: None  # type: ignore[method-assign]  # the fault
    driver.check_row = lambda *_: None  # type: ignore[method-assign]  # there is no such row
    found = broken(driver, lambda: driver.serve(say(*common(C + 1))))
    assert ("INV-4", "other reuse than decided") == found


def test_a_row_that_is_another_now():
    """
    INV-3. The session is quarantined, and so is the block that the row came from, with those built
    on it: its digest shows only that it is as it was sealed.
    """
    driver = driver_of(blocks_kept=100)
    keys = first(driver, *LONG)
    driver.damage = changed(ev.RowChecked, digest="0" * 16)
    found = broken(driver, lambda: driver.serve(say(*common(C + 1))))
    assert ("INV-3", f"row {C + 1} of block {keys[1]} computed again is another") == found
    assert "quarantined" == driver.state.session("s2").state
    assert [True, False, False] == [driver.state.blocks[key].usable for key in keys[:3]]
    driver.damage = lambda event: event
    driver.serve(say(*common(C + 1), name="n"))
    assert ((0, 0, 1), (None, 0)) == (reused(driver), partly(driver))
    findings = replay(driver.rows).findings
    assert [("INV-3", True, True)] == [(f.invariant, f.recorded, f.reproduced) for f in findings]


def test_the_block_is_pinned_and_counts_as_used():
    """As the blocks before it, which its chain includes."""
    driver = driver_of()
    keys = first(driver, *LONG)
    driver.ask(say(*common(C + 1)))
    assert (keys[0], keys[1]) == driver.state.pins[driver.state.session("s2").id]
    assert driver.state.position == driver.state.uses[keys[1]].position
    assert keys[1] not in driver.evictable()
    pool = driver.state.pool
    gone = ev.BlockEvicted(
        key=keys[1],
        bytes=10,
        memory_blocks=pool.blocks - 1,
        memory_bytes=pool.block_bytes - 10,
        reason="space",
    )
    assert "a pinned block evicted" == broken(driver, lambda: driver.propose(gone))[1]


# --- prewarm -------------------------------------------------------------------------------------


def settling(driver: Driver) -> tuple[int, ...]:
    """A session at the end of its answer; another one has the beginning of its next prompt."""
    words = LONG[:C]
    onward = (("user", words), ("assistant", (50, 51, 52, 53)), ("user", (60, 61)))
    driver.serve(talk(*onward, name="o"), answer=(50,))
    driver.ask(talk(("user", words), name="n"), answer=(50, 51, 52, 53))
    while driver.state.session("n").state != "settling":
        driver.step("n")
    return rendered(onward)[: 2 * C + 3]


def begun(driver: Driver, ids: tuple[int, ...], **changes: Any) -> ev.PrewarmStarted:
    """The start of a prewarm of these tokens."""
    held = driver.state.session("n")
    assert held.last is not None
    base = paths.common_length(held.last.sequence, ids)
    keys = driver.keys("t1", ids)
    base_keys = min(base, len(held.last.prompt_ids)) // C
    reuse = paths.reusable_prewarm(driver.state, held, ids, keys)
    event = ev.PrewarmStarted(
        session="n",
        next_role="user",
        rules_version=paths.RULES_VERSION,
        tokens=len(ids),
        base_tokens=base,
        new_ids=ids[base:],
        base_keys=base_keys,
        new_keys=keys[base_keys:],
        tokens_from_slab=reuse.tokens,
        blocks_from_slab=reuse.blocks,
        blocks_from_pool=reuse.shared,
        partial_key=reuse.partial,
        tokens_from_partial=reuse.rows,
    )
    return attrs.evolve(event, **changes)


def test_a_prewarm_matches_in_part():
    """By the same rules, and its passes come after that."""
    driver = driver_of(blocks_kept=100)
    ids = settling(driver)
    event = begun(driver, ids[:-1])
    assert event.partial_key in driver.state.session("o").slab_keys
    assert 2 == event.tokens_from_partial
    driver.propose(event)
    held = driver.state.session("n")
    assert event.partial_key in driver.state.pins[held.id]
    driver.trim("n", event.tokens_from_slab, "not anticipated")
    keys = driver.keys("t1", ids)[event.blocks_from_slab :][: event.blocks_from_pool]
    driver.share("n", None, keys)
    found = broken(driver, lambda: driver.settle_to("n", ids, len(ids) - 1, keys))
    assert ("INV-4", "other reuse than decided") == found


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_prewarm_that_matches_otherwise(rows: int):
    """INV-4."""
    driver = driver_of(blocks_kept=100)
    ids = settling(driver)
    found = broken(
        driver, lambda: driver.propose(begun(driver, ids[:-1], tokens_from_partial=rows))
    )
    assert ("INV-4", "other reuse for a prewarm than the rules give") == found


# --- over a prune --------------------------------------------------------------------------------


def test_a_base_keeps_the_ids_that_later_rows_have():
    """
    All ids of a block that a later row names, of others as many as a later row matched, else none:
    their conversations were pruned. Such a block matches whole only.
    """
    driver = driver_of(blocks_kept=100)
    mine, theirs = first(driver, *LONG), first(driver, 5, *LONG, name="o")
    kept = NeededIds()
    cut, state = len(driver.rows), driver.state
    driver.serve(say(*common(C + 1), name="n"))
    driver.serve(say(5, *LONG[: 2 * C], 99, name="m"))
    for row in driver.rows[cut:]:
        kept.see(decode(row).event)
    after = state_of(base_of(forgotten(state, kept), "h"))
    assert after.children == state.children
    tokens = {key: len(ids_of(after.blocks[key].ids)) for key in (*mine, *theirs)}
    whole = dict.fromkeys((mine[0], theirs[0], theirs[1]), C)
    due = {**dict.fromkeys((*mine, *theirs), 0), **whole, mine[1]: 2, theirs[2]: 2}
    assert due == tokens
    assert after.blocks[mine[1]].ids == ids_bytes(rendered((("user", LONG),))[C : C + 2])

    ids = rendered((("user", common(C + 1)),))
    session = attrs.evolve(state.session("s1"), slab=None, slab_keys=(), slab_ids=())
    blank = forgotten(state, NeededIds())
    for held, rows in ((state, 2), (after, 2), (blank, 0)):
        found = paths.reusable_prewarm(held, session, ids, driver.keys("t1", ids))
        assert (1, rows) == (found.shared, found.rows)


def test_decisions_after_a_prune_are_the_same():
    """A prune keeps what they matched, and nothing of other conversations that went."""
    driver = driver_of(blocks_kept=100)
    mine, gone = first(driver, *LONG), first(driver, 5, *LONG, name="o")
    for name in ("s1", "o"):
        driver.release(name)
        driver.propose(ev.SessionClosed(session=name, reason="forgotten"))
    before_us = driver.recorded[-1].time_us + 1
    driver.serve(say(*common(C + 1), name="n"))
    matched = partly(driver)
    assert (mine[1], 2) == matched
    store = MemoryStore(driver.rows)
    prepared = prepare_prune(store, PruneOptions(before_us=before_us), driver.ledger.clock)
    assert prepared.base is not None
    prepared.commit(store)
    report = replay(store.read(), base=store.base())
    assert () == report.findings
    blocks = report.state.blocks
    assert (2, b"") == (len(ids_of(blocks[mine[1]].ids)), blocks[gone[0]].ids)
    assert C == len(ids_of(blocks[mine[0]].ids))

    nothing = base_of(forgotten(state_of(prepared.base), NeededIds()), prepared.base.head)
    found = [finding.invariant for finding in replay(store.read(), base=nothing).findings]
    assert ["INV-4"] == [invariant for invariant in found if invariant != "INV-8"]
