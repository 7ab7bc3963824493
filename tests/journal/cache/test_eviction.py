"""
What is evicted from memory and disk first: what was used longest ago, but never before the blocks
that are built on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from immutables import Map

from cairn.journal.cache import eviction
from cairn.journal.cache.eviction_order import Order
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import Block, Pool, Session, SessionId, Slab, State
from tests.journal.model import (
    BLOCK_BYTES,
    FILE_BYTES,
    TAPES,
    Driver,
    Talk,
    leaving,
    plain,
    played,
    profile,
    tape,
    value,
)
from tests.support.journals import MODEL


def chain(name: str, length: int, used: int) -> list[Block]:
    """
    Blocks of ten bytes, each built on the one before and sealed after it, in memory and in files.
    """
    return [
        Block(
            key=f"{name}{place}",
            parent=f"{name}{place - 1}" if place else None,
            digest="d",
            start=4 * place,
            tokens=4,
            bytes=10,
            present=True,
            file_bytes=10,
            last_used=used + place,
        )
        for place in range(length)
    ]


def state_of(*blocks: Block, pinned: tuple[str, ...] = ()) -> State:
    """
    A state with these blocks, and a budget of 80 bytes in memory and on disk.

    Args:
        pinned: the blocks that a session is using.
    """
    there = [block for block in blocks if block.present]
    filed = [block for block in blocks if block.file_bytes is not None]
    pool = Pool(
        blocks=len(there),
        block_bytes=10 * len(there),
        disk_blocks=len(filed),
        disk_bytes=10 * len(filed),
    )
    found = Map({block.key: block for block in blocks})
    pins = Map({SessionId("works"): pinned} if pinned else {})
    return State(model=MODEL, blocks=found, pins=pins, pool=pool, disk_budget=80)


def fresh(block: Block) -> Block:
    """A block in memory without a file."""
    return attrs.evolve(block, file_bytes=None)


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_the_end_of_a_chain_goes_first(what: str):
    """
    Room is made from the end of the chain that was used longest ago; its beginning stays of use.
    """
    old, new = chain("a", 6, 100), chain("b", 3, 200)
    state = state_of(*old, *new[:2], fresh(attrs.evolve(new[2], present=False)))
    if what == "memory":
        assert ("a5", "a4") == eviction.room_for_block(state, 10)
    else:
        assert ("a5", "a4") == eviction.room_for_file(state, fresh(new[2]), 10)


def test_the_front_is_of_use_as_long_as_its_end():
    """A block stays if one that is built on it was used lately, however long ago it was sealed."""
    old, new = chain("a", 4, 100), chain("b", 4, 50)
    old[3] = attrs.evolve(old[3], last_used=300)
    state = state_of(*old, *new)
    assert ("b3", "b2") == eviction.room_for_block(state, 10)
    over = attrs.evolve(state, disk_budget=20)
    assert ("b3", "b2", "b1", "b0", "a3", "a2") == eviction.files_over_budget(over)


def test_no_file_is_written_at_the_cost_of_what_it_is_built_on():
    """A chain longer than the budget keeps the files of its beginning, and no more are written."""
    whole = (longer := chain("a", 10, 100))[:9]
    state = state_of(*whole[:8], fresh(whole[8]))
    assert None is eviction.room_for_file(state, fresh(whole[8]), 10)
    state = state_of(*whole[:8], fresh(whole[8]), *map(fresh, longer[9:]))
    assert None is eviction.room_for_file(state, fresh(longer[9]), 10)


def test_what_is_older_makes_no_room_for_what_is_older_still():
    """A block that was used before all those with files does not displace any of them."""
    state = state_of(*chain("a", 8, 100))
    (old,) = chain("b", 1, 50)
    assert None is eviction.room_for_file(state, fresh(old), 10)


def test_no_file_is_removed_for_one_that_is_larger_than_the_budget():
    """Such a file does not fit, even if all others were removed."""
    (new,) = chain("b", 1, 300)
    state = state_of(*chain("a", 8, 100))
    assert tuple(f"a{place}" for place in reversed(range(8))) == eviction.room_for_file(
        state, fresh(new), 80
    )
    assert None is eviction.room_for_file(state, fresh(new), 81)


def test_what_is_to_stay_stays():
    """Neither pinned blocks nor those that the caller keeps are chosen."""
    old = chain("a", 8, 100)
    state = state_of(*old, pinned=("a7",))
    assert ("a5", "a4") == eviction.room_for_block(state, 10, {"a6"})
    (new,) = chain("b", 1, 300)
    assert ("a7", "a5") == eviction.room_for_file(state, fresh(new), 10, {"a6"})


def test_a_large_memory_frees_no_share_of_itself():
    """
    The session that seals waits for the eviction: that is sixteen more blocks, whatever the budget.
    """
    blocks = chain("a", 1000, 100)
    model = attrs.evolve(MODEL, blocks_bytes=10 * len(blocks))
    state = attrs.evolve(state_of(*blocks), model=model, disk_budget=10 * len(blocks))
    last_17 = tuple(f"a{place}" for place in range(999, 982, -1))
    assert last_17 == eviction.room_for_block(state, 10)
    (new,) = chain("b", 1, 5000)
    assert last_17 == eviction.room_for_file(state, fresh(new), 10)


def test_a_number_of_blocks_is_a_budget_too():
    """Blocks are evicted for one more than allowed, even if there is room for its bytes."""
    state = state_of(*chain("a", 4, 100))
    for most, due in ((0, ()), (5, ()), (4, ("a3",)), (3, ("a3", "a2"))):
        model = attrs.evolve(MODEL, blocks_max=most)
        limited = attrs.evolve(state, model=model)
        assert due == eviction.room_for_block(limited, 10)
        assert due == eviction.room_for_prewarm(limited, 10)
    limited = attrs.evolve(state, model=attrs.evolve(MODEL, blocks_max=4))
    assert None is eviction.room_for_block(limited, 10, {"a0", "a1", "a2", "a3"})
    blocks = chain("a", 100, 100)
    model = attrs.evolve(MODEL, blocks_bytes=10_000, blocks_max=len(blocks))
    many = eviction.room_for_block(attrs.evolve(state_of(*blocks), model=model), 10)
    assert tuple(f"a{place}" for place in range(99, 88, -1)) == many


def held(*keys: str) -> Session:
    """A session with these blocks in its slab."""
    return Session(
        id=SessionId(f"s-{keys}"),
        tenant="t",
        fingerprint="f",
        group=None,
        named=False,
        slab=Slab(id=1, capacity_tokens=64, bytes=1),
        slab_keys=keys,
    )


def with_sessions(state: State, *sessions: Session) -> State:
    """The state with these sessions."""
    return attrs.evolve(state, sessions=Map({session.id: session for session in sessions}))


def test_blocks_in_slabs_are_ready():
    """The blocks of all sessions' slabs, and no others."""
    state = with_sessions(
        state_of(*chain("a", 4, 100), *chain("b", 2, 200)),
        held("a0", "a1"),
        held("b0"),
    )
    assert {"a0", "a1", "b0"} == eviction.held_ready(state)


def test_a_prewarm_evicts_no_ready_session():
    """
    A prewarm evicts blocks that are in no slab. If all are in slabs, only a request can evict them.
    """
    full = state_of(*chain("a", 6, 100), *chain("b", 2, 200))
    ready = held(*(f"a{place}" for place in range(6)))
    assert ("b1", "b0") == eviction.room_for_prewarm(with_sessions(full, ready), 10)
    both = with_sessions(full, ready, held("b0", "b1"))
    assert eviction.room_for_prewarm(both, 10) is None
    assert ("a5", "a4") == eviction.room_for_block(both, 10)


def test_a_prewarm_fits_where_there_is_room():
    """If there is room, nothing is evicted; a block that is larger than the memory is refused."""
    state = with_sessions(state_of(*chain("a", 6, 100)), held("a0"))
    assert () == eviction.room_for_prewarm(state, 20)
    assert eviction.room_for_prewarm(state, 90) is None


def test_which_sessions_have_expired():
    """Ends of chains first; neither pinned blocks nor those that an unexpired block is built on."""
    short, long = chain("a", 4, 100), chain("b", 2, 200)
    blocks = [attrs.evolve(block, expires_us=10) for block in short]
    blocks += [attrs.evolve(long[0], expires_us=5), attrs.evolve(long[1], expires_us=20)]
    blocks += chain("c", 2, 0)
    state = state_of(*blocks, pinned=("a3",))
    order = Order(state)
    assert () == eviction.expired(state, order, 9, 10)
    assert ("a2", "a1", "a0") == eviction.expired(state, order, 10, 10)
    assert ("a2", "a1") == eviction.expired(state, order, 10, 2)
    assert ("a2", "a1", "a0", "b1", "b0") == eviction.expired(state, order, 20, 10)
    assert ("a0", "b1") == eviction.expired(state, order, 20, 2, {"a2", "a1"})


def test_no_moment_is_before_the_last_row():
    """A clock that was set back counts as the time of the last row."""
    state = attrs.evolve(state_of(), time_us=100)
    assert 100 == eviction.moment_us(state, 7)
    assert 101 == eviction.moment_us(state, 101)


def test_which_sessions_are_over():
    """
    Idle sessions whose TTL is over, the least recently used first; and when the next one expires.
    """
    lives: list[tuple[str, SessionState, int | None]] = [
        ("young", SessionState.IDLE, 10),
        ("works", SessionState.DECODING, 5),
        ("broken", SessionState.QUARANTINED, 5),
        ("for ever", SessionState.IDLE, None),
        ("later", SessionState.IDLE, 30),
        ("old", SessionState.COLD, 20),
    ]
    sessions = [
        attrs.evolve(at_rest(name, 10 - place), state=life, expires_us=due)
        for place, (name, life, due) in enumerate(lives)
    ]
    (block,) = chain("a", 1, 0)
    state = with_sessions(state_of(attrs.evolve(block, expires_us=15)), *sessions)
    assert ["old", "young"] == [one.id for one in eviction.sessions_over(Order(state), 20)]
    assert 10 == eviction.next_expiry(Order(state))
    assert 15 == eviction.next_expiry(Order(with_sessions(state, *sessions[1:])))
    assert None is eviction.next_expiry(Order(state_of(block)))


# --- over any history ----------------------------------------------------------------------------


Blocks = dict[str, dict[str, Any]]


def moments(data: bytes) -> Iterator[tuple[State, Blocks]]:
    """
    Some states of the history on a tape that have a model and a block, each with all of its blocks
    as the slow fold shows them.
    """
    states = [state for state in played(data).states if state.model is not None and state.blocks]
    for state in states[:: 1 + len(states) // 10]:
        yield state, plain(state)["blocks"]


def counting(
    order: Sequence[str], size_of: Mapping[str, int], over: int, count: int, ample: tuple[int, int]
) -> tuple[str, ...] | None:
    """As ``freeing``, where a number of blocks must go too."""
    chosen: list[str] = []
    for key in order:
        if sum(size_of[one] for one in chosen) < ample[0] or len(chosen) < ample[1]:
            chosen.append(key)
    freed = sum(size_of[one] for one in chosen)
    return tuple(chosen) if freed >= over and len(chosen) >= count else None


def freeing(
    order: Sequence[str], size_of: Mapping[str, int], wanted: int, ample: int
) -> tuple[str, ...] | None:
    """
    As many from the front as free the ample amount; None if all of them do not free what is needed.
    """
    chosen: list[str] = []
    for key in order:
        if sum(size_of[one] for one in chosen) < ample:
            chosen.append(key)
    return tuple(chosen) if sum(size_of[key] for key in chosen) >= wanted else None


def in_doubt(state: State, keys: Collection[str]) -> State:
    """The state with some of its blocks quarantined."""
    doubted = {key: attrs.evolve(state.blocks[key], bug_id="a bug") for key in keys}
    return attrs.evolve(state, blocks=state.blocks.update(doubted))


def room_due(
    state: State, blocks: Blocks, order: Sequence[str], size: int, keep: Collection[str]
) -> tuple[str, ...] | None:
    """What must leave memory for a block of ``size`` bytes, of blocks in this order."""
    assert state.model is not None
    budget = state.model.blocks_bytes
    sizes = {key: blocks[key]["bytes"] for key in order}
    over = sum(sizes.values()) + size - budget
    if size > budget:
        return None
    loose = [key for key in order if key not in keep and not blocks[key]["pins"]]
    most = state.model.blocks_max
    count = len(order) + 1 - most if most else 0
    ample = (
        over + min(16 * size, budget // 10) if over > 0 else 0,
        count + min(16, most // 10) if count > 0 else 0,
    )
    return counting(loose, sizes, over, count, ample)


def files_due(
    blocks: Blocks, budget: int, size: int, order: Sequence[tuple[str, int]], worth: int
) -> tuple[str, ...] | None:
    """
    The blocks whose files must go for a file of ``size`` bytes, of a block that is worth so much.
    """
    sizes = {key: block["file_bytes"] or 0 for key, block in blocks.items()}
    over = sum(sizes.values()) + size - budget
    if over <= 0:
        return ()
    before = [key for key, of_other in order if of_other < worth]
    if size > budget:
        return None
    return freeing(before, sizes, over, over + min(16 * size, budget // 10))


def worth_of(state: State, block: dict[str, Any]) -> int:
    """How valuable a block is by its own uses."""
    return value(state.position, block["last_used"], block["previous_use"])


@profile(60)
@given(TAPES)
@example(bytes(range(200)))
def test_what_leaves_memory_is_what_the_model_says(data: bytes):
    """
    The same blocks in the same order, short ones before all others, whatever is pinned or held
    ready, and not one too many.
    """
    for state, blocks in moments(data):
        assert state.model is not None
        there = [key for key, block in blocks.items() if block["present"]]
        held = [key for session in state.sessions.values() for key in session.slab_keys]
        full = state.model.block_tokens
        short = [key for key in there if blocks[key]["tokens"] < full]
        short.sort(key=lambda key: (worth_of(state, blocks[key]), key))
        others = (key for key, _ in leaving(blocks, there, state.position))
        order = [*short, *(key for key in others if key not in short)]
        budget = state.model.blocks_bytes
        exactly = budget - state.pool.block_bytes + 5 * BLOCK_BYTES - budget // 10  # five are ample
        for size in (1, BLOCK_BYTES, 3 * BLOCK_BYTES, exactly, budget, budget + 1):
            for keep in ((), there[::2]):
                due = room_due(state, blocks, order, size, keep)
                assert due == eviction.room_for_block(state, size, keep)
            due = room_due(state, blocks, order, size, held)
            assert due == eviction.room_for_prewarm(state, size)
            for most in (1, len(there), len(there) + 1, 20, 10_000):
                model = attrs.evolve(state.model, blocks_max=most)
                fewer = attrs.evolve(state, model=model)
                due = room_due(fewer, blocks, order, size, there[::2])
                assert due == eviction.room_for_block(fewer, size, there[::2])


@profile(60)
@given(TAPES)
@example(bytes(range(200)))
def test_whose_file_is_removed_is_what_the_model_says(data: bytes):
    """
    The same files in the same order: those of blocks that were last of use before the new one,
    until it fits; and if the budget has become smaller, until the files fit it.
    """
    for state, blocks in moments(data):
        filed = [key for key, block in blocks.items() if block["file_bytes"] is not None]
        sizes = {key: blocks[key]["file_bytes"] for key in filed}
        budgets = {state.disk_budget, sum(sizes.values()), sum(sizes.values()) // 2, 0}
        order = [key for key, _ in leaving(blocks, filed, state.position)]
        for budget in budgets:
            due = freeing(order, sizes, 0, sum(sizes.values()) - budget)
            assert due == eviction.files_over_budget(attrs.evolve(state, disk_budget=budget))
        for key in [key for key in blocks if key not in filed][:4]:
            new, both = state.blocks[key], leaving(blocks, [*filed, key], state.position)
            for budget in budgets:
                less = attrs.evolve(state, disk_budget=budget)
                for keep in ((), filed[::2]):
                    loose = [(other, used) for other, used in both if other not in keep]
                    due = files_due(blocks, budget, FILE_BYTES, loose, worth_of(state, blocks[key]))
                    assert due == eviction.room_for_file(less, new, FILE_BYTES, keep)


@profile(60)
@given(TAPES)
@example(bytes(range(200)))
def test_what_is_written_is_what_the_model_says(data: bytes):
    """
    All usable full blocks without a file but adopted ones, the last used first, but each after the
    blocks that it is built on: a block is worth as much as the most valuable block that is built on
    it.
    """
    for whole, _ in moments(data):
        state = in_doubt(whole, list(whole.blocks)[::5])
        blocks = plain(state)["blocks"]
        due = {
            key
            for key, block in blocks.items()
            if block["present"] and block["bug_id"] is None and block["file_bytes"] is None
            if block["node"] is None
            if state.model is None or block["tokens"] == state.model.block_tokens
        }
        chosen = eviction.blocks_to_write(state)

        worth = {key: worth_of(state, blocks[key]) for key in due}
        for key in sorted(due, key=lambda key: -blocks[key]["start"]):
            parent = blocks[key]["parent"]
            if parent in due:
                worth[parent] = max(worth[parent], worth[key])
        assert len(due) == len(chosen)
        assert due == set(chosen)
        assert sorted(worth.values(), reverse=True) == [worth[key] for key in chosen]
        for key in due:
            parent = blocks[key]["parent"]
            assert parent not in due or chosen.index(parent) < chosen.index(key)


def test_the_histories_have_something_to_choose():
    """For each question, at least one of these histories has an answer of several blocks."""
    most = [0, 0, 0, 0]
    for seed in range(8):
        for state, _ in moments(tape(seed, 600)):
            assert state.model is not None
            news = [block for block in state.blocks.values() if block.file_bytes is None]
            newest = max(news, key=lambda block: block.last_used, default=None)
            answers = (
                eviction.room_for_block(state, state.model.blocks_bytes // 2),
                eviction.room_for_file(state, newest, 3 * FILE_BYTES) if newest else (),
                eviction.files_over_budget(attrs.evolve(state, disk_budget=2 * FILE_BYTES)),
                eviction.blocks_to_write(state),
            )
            most = [
                max(known, len(found or ())) for known, found in zip(most, answers, strict=True)
            ]
    assert min(most) >= 3, most


# --- slabs ---------------------------------------------------------------------------------------


def at_rest(name: str, used: int, *keys: str, size: int = 30) -> Session:
    """An idle session whose slab holds these blocks."""
    return Session(
        id=SessionId(name),
        tenant="t",
        fingerprint="f",
        group=None,
        named=True,
        state=SessionState.IDLE,
        slab=Slab(id=used, capacity_tokens=size, bytes=size),
        slab_keys=keys,
        last_used=used,
    )


def test_a_slab_that_comes():
    """
    A slab becomes free with a request in progress whose session has one; not with a request that is
    waiting for a slab itself, nor with a session that has none. A quarantined session releases its
    slab as long as its actor runs.
    """
    works, waits = at_rest("works", 1), attrs.evolve(at_rest("waits", 2), slab=None)
    broken = attrs.evolve(at_rest("broken", 3), state=SessionState.QUARANTINED)
    released = attrs.evolve(broken, slab=None)

    def comes(*in_hand: Session, beside: Session = waits, at_work: tuple[str, ...] = ()) -> bool:
        return eviction.slab_will_come(
            State(
                sessions=Map({one.id: one for one in (works, waits, beside)}),
                requests=Map({f"r-{one.id}": one.id for one in in_hand}),
            ),
            at_work,
        )

    assert comes(works, waits)
    assert comes(works)
    assert not comes(waits)
    assert not comes()
    assert comes(waits, beside=broken, at_work=("broken", "works"))
    assert not comes(waits, beside=broken, at_work=("works",))
    assert not comes(waits, beside=released, at_work=("broken", "works"))


def test_a_slab_that_can_never_fit():
    """It is larger than the pool, the pool has none, or no model is loaded."""
    state = State(model=attrs.evolve(MODEL, pool_slabs=1, pool_bytes=60))
    assert eviction.slab_can_fit(state, 60)
    assert not eviction.slab_can_fit(state, 61)
    assert not eviction.slab_can_fit(State(), 1)
    assert not eviction.slab_can_fit(
        State(model=attrs.evolve(MODEL, pool_slabs=0, pool_bytes=60)), 1
    )


def test_the_slab_that_can_be_spared():
    """
    The slab of the least recently used idle session whose KV is in blocks in memory too, and only
    if it alone makes enough room: a prewarm must not cost a request a pass, nor two sessions their
    slabs.
    """
    blocks = chain("a", 3, 100)
    only_in_a_file = attrs.evolve(blocks[1], present=False)
    in_doubt = attrs.evolve(blocks[1], bug_id="bug")
    old, young = at_rest("old", 1, "a0", "a1"), at_rest("young", 2, "a0")
    model = attrs.evolve(MODEL, pool_slabs=2, pool_bytes=60)

    def spared(size: int, *sessions: Session, block: Block = blocks[1]) -> str | None:
        state = attrs.evolve(
            state_of(blocks[0], block, blocks[2]),
            model=model,
            sessions=Map({one.id: one for one in sessions}),
            pool=Pool(slabs=2, slab_bytes=60),
        )
        found = eviction.slab_to_spare(state, size)
        return found.id if found is not None else None

    assert "old" == spared(30, old, young)
    assert None is spared(31, old, young)
    assert "young" == spared(30, old, young, block=only_in_a_file)
    assert "young" == spared(30, old, young, block=in_doubt)
    assert "young" == spared(30, attrs.evolve(old, state=SessionState.SETTLING), young)
    assert None is spared(30, attrs.evolve(young, state=SessionState.DECODING))


def test_without_a_model_there_are_no_slabs():
    """No slab fits, and none is spared."""
    assert not eviction.slab_fits(State(), 1)
    assert eviction.slab_to_spare(State(), 1) is None


def test_whether_a_slab_fits():
    """There is a slab left, and enough bytes for it."""
    model = attrs.evolve(MODEL, pool_slabs=2, pool_bytes=100)
    for slabs, taken, expected in ((0, 0, True), (1, 50, True), (1, 51, False), (2, 0, False)):
        state = State(model=model, pool=Pool(slabs=slabs, slab_bytes=taken))
        assert expected is eviction.slab_fits(state, 50)


def test_which_slab_is_released():
    """That of the least recently used session that is idle; None if all of them are working."""
    older, newer = at_rest("older", 1), at_rest("newer", 2)
    working = attrs.evolve(at_rest("working", 0), state=SessionState.DECODING)
    state = with_sessions(State(model=MODEL), newer, working, older)
    assert older == eviction.slab_to_release(state)
    assert eviction.slab_to_release(with_sessions(State(model=MODEL), working)) is None


def test_which_session_is_closed_where_there_are_too_many():
    """The least recently used one that is idle and has no slab. A quarantined one stays."""
    slabless = [attrs.evolve(at_rest(name, used), slab=None) for name, used in (("a", 2), ("b", 1))]
    broken = attrs.evolve(slabless[0], id=SessionId("q"), state=SessionState.QUARANTINED)
    state = with_sessions(State(model=MODEL), *slabless, attrs.evolve(broken, last_used=0))
    assert eviction.session_to_forget(state, 3) is None
    assert slabless[1] == eviction.session_to_forget(state, 2)


def test_without_a_window_none_are_released():
    """Blocks of a conversation are released only if no window reaches back to them."""
    state = with_sessions(state_of(*chain("a", 2, 1)), held("a0", "a1"))
    (session,) = state.sessions.values()
    assert () == eviction.release_idle(state, session)
    assert not eviction.is_out_of_windows(state, "a0")


def test_which_settling_slab_is_released():
    """That of the least recently used session that settles; None if no session does."""
    older, newer = (
        attrs.evolve(at_rest(name, used), state=SessionState.SETTLING)
        for name, used in (("older", 1), ("newer", 2))
    )
    idle, slabless = at_rest("idle", 0), attrs.evolve(older, id=SessionId("none"), slab=None)
    state = with_sessions(State(model=MODEL), newer, idle, slabless, older)
    assert older == eviction.settling_slab_to_release(state)
    assert eviction.settling_slab_to_release(with_sessions(State(model=MODEL), idle)) is None


def test_the_chain_of_a_session():
    """The blocks in its slab; without those, the blocks of its last prompt; none without one."""
    driver = Driver(blocks_kept=40)
    driver.start()
    driver.serve(Talk(tenant="t1", group=None, name=None, parts=(("user", tuple(range(14))),)))
    session = driver.state.session("s1")
    assert session.last is not None
    prompt = session.last.prompt_keys
    assert session.slab_keys == eviction.chain_of(session)
    assert prompt == eviction.chain_of(attrs.evolve(session, slab_keys=()))
    assert () == eviction.chain_of(attrs.evolve(session, slab_keys=(), last=None))


def test_the_most_that_a_file_takes():
    """More than the block, and more for each layer; without a model no layer is counted."""
    one = eviction.file_bytes_at_most(State(model=MODEL), 1000)
    three = eviction.file_bytes_at_most(State(model=attrs.evolve(MODEL, layers=3)), 1000)
    none = eviction.file_bytes_at_most(State(), 1000)
    assert 1000 < none < one
    assert three - one == 2 * (one - none)
