"""The eviction order that is kept event by event equals the one found by looking at all blocks."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.cache.eviction_order import Ends, Order, Resting, is_expected, rank
from cairn.journal.ledger import Outcome
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import Session, Use
from tests.journal.cache.test_eviction import at_rest, chain, state_of
from tests.journal.model import TAPES, Driver, leaving, plain, played, profile, tape, value

Shown = list[tuple[str, int]]


def shown(ends: Ends) -> Shown:
    """Keys in their order, each with when it was last of use."""
    return [(block.key, used) for block, used in ends.in_order()]


def both(order: Order) -> tuple[Shown, Shown]:
    """The order of the blocks in memory, and that of the blocks in files."""
    return shown(order.memory), shown(order.files)


def ending(world: dict[str, dict[str, Any]], keys: list[str]) -> dict[str, int]:
    """When each of these blocks expires: the latest TTL of it and all that are built on it."""
    ends = dict.fromkeys(keys, 0)
    for key in keys:
        at: str | None = key
        while at is not None:
            if at in ends:
                ends[at] = max(ends[at], world[key]["expires_us"])
            at = world[at]["parent"]
    return ends


def rests(session: Session) -> bool:
    """Whether a session is idle, so that it may expire."""
    return session.state in (SessionState.IDLE, SessionState.COLD)


class Watched(Driver):
    """
    A history that checks the order of its ledger: after each event against a freshly built one,
    after some against the slow model.

    Attributes:
        compared: how many blocks were compared with the slow model's, in memory and in files.
        kinds: of the events that came between two checks.
        mortal: how many of the blocks had a TTL.
        ending_sessions: how many idle sessions had one.
        expected: how many of them were expected at a known position.
    """

    def play(self) -> Watched:
        """Play any history, with an order from the beginning."""
        assert both(self.ledger.order) == ([], [])
        self.compared = [0, 0]
        self.kinds: set[str] = set()
        self.mortal = self.expected = self.ending_sessions = 0
        super().play()
        return self

    def take(self, outcome: Outcome) -> None:
        """Check once more."""
        self.kinds.update(recorded.event.kind for recorded in outcome.recorded)
        kept = both(self.ledger.order)
        assert both(Order(self.state)) == kept
        lives = shown(self.ledger.order.expiry)
        assert shown(Order(self.state).expiry) == lives
        ends = [one.expires_us for one in self.state.sessions.values() if rests(one)]
        due = sorted(end for end in ends if end is not None)
        assert next(iter(due), None) == self.ledger.order.resting.first_us()
        for now_us in (0, *due):
            over = self.ledger.order.resting.ended(now_us).values()
            assert [end for end in due if end <= now_us] == sorted(
                one.expires_us for one in over if rests(one) and one.expires_us is not None
            )
        self.ending_sessions += len(due)
        if self.state.position % 7 == 0:
            blocks, order = plain(self.state)["blocks"], self.ledger.order
            for key, block in self.state.blocks.items():
                uses = blocks[key]["last_used"], blocks[key]["previous_use"]
                assert uses == order.uses(block)
                self.expected += is_expected(self.state.position, *uses)
                assert value(self.state.position, *uses) == order.rank(block)
                assert blocks[key]["expires_us"] == order.expires_us(block)
            there = [key for key, block in blocks.items() if block["present"]]
            filed = [key for key, block in blocks.items() if block["file_bytes"] is not None]
            position = self.state.position
            assert leaving(blocks, there, position) == kept[0]
            assert leaving(blocks, filed, position) == kept[1]
            assert {*there, *filed} == self.ledger.order.found
            mortal = [key for key in {*there, *filed} if blocks[key]["expires_us"] is not None]
            assert ending(blocks, mortal) == dict(lives)
            self.mortal += len(mortal)
            self.compared = [
                most + len(keys) for most, keys in zip(self.compared, (there, filed), strict=True)
            ]
        super().take(outcome)


@profile(40)
@given(TAPES)
@example(bytes(range(200)))
def test_the_order_followed_is_the_order_computed(data: bytes):
    """After every event of any history, whatever is cut off, lost or broken."""
    played(data, kind=Watched)


def test_the_histories_have_an_order_to_keep():
    """These few histories have everything that changes the order."""
    driven = [played(tape(seed, 600), kind=Watched) for seed in range(6)]
    kinds = set().union(*(one.kinds for one in driven if isinstance(one, Watched)))
    most = [one.compared for one in driven if isinstance(one, Watched)]
    assert min(map(max, zip(*most, strict=True))) > 100
    assert sum(one.mortal for one in driven if isinstance(one, Watched)) > 100
    assert sum(one.ending_sessions for one in driven if isinstance(one, Watched)) > 100
    assert sum(one.expected for one in driven if isinstance(one, Watched)) > 100
    assert kinds >= {
        "path_selected",
        "prewarm_started",
        "block_sealed",
        "block_evicted",
        "block_loaded",
        "block_spilled",
        "block_file_rejected",
        "block_file_removed",
        "server_stopped",
        "server_lost",
        "invariant_violated",
        "session_quarantined",
    }


def test_a_block_between_two_is_passed_over():
    """A block that left from the middle of a chain does not change the chain's order."""
    blocks = chain("a", 5, 100)
    for place in (1, 2):
        blocks[place] = attrs.evolve(blocks[place], present=False)
    assert [("a4", 104), ("a3", 104), ("a0", 104)] == shown(Order(state_of(*blocks)).memory)


def test_a_use_is_one_of_all_that_a_chain_is_built_on():
    """
    A use is recorded at the end that the chain had. Whatever is evicted early, the rest of the
    chain was of use then, and has the same TTL; a shorter chain that was used later goes later.
    """
    uses = Map({"a3": Use(position=500, expires_us=90), "a1": Use(position=900, expires_us=70)})
    blocks = [attrs.evolve(block, expires_us=50) for block in chain("a", 5, 100)]
    whole = attrs.evolve(state_of(*blocks), uses=uses)
    assert [104, 500, 500, 900, 900] == [used for _, used in shown(Order(whole).memory)]
    assert [50, 90, 90, 90, 90] == [due for _, due in shown(Order(whole).expiry)]
    assert [90, 90, 90, 90, 50] == [Order(whole).expires_us(block) for block in blocks]
    gone = [attrs.evolve(block, present=False, file_bytes=None) for block in blocks[3:]]
    order = Order(attrs.evolve(state_of(*blocks[:3], *gone), uses=uses))
    assert [("a2", 500), ("a1", 900), ("a0", 900)] == shown(order.memory)
    assert [("a2", 90), ("a1", 90), ("a0", 90)] == shown(order.expiry)
    short = attrs.evolve(state_of(*blocks[:2], *blocks[2:]), uses=uses.delete("a3"))
    assert [50, 50, 50, 70, 70] == [due for _, due in shown(Order(short).expiry)]


def test_the_rank_of_a_block():
    """
    After uses at 100 and 200 the next one is expected at 300, from 210 on. When it does not come
    until 325, or if there was one use only, the rank is the time since the last.
    """
    ranks = {position: rank(position, 200, 100) for position in (200, 209, 210, 299, 300, 324, 325)}
    assert ranks == {200: 0, 209: -9, 210: -90, 299: -1, 300: 0, 324: 24, 325: -125}
    assert [-9, -100, -125] == [rank(position, 200, None) for position in (209, 300, 325)]


USED = st.lists(
    st.tuples(st.integers(1, 300), st.none() | st.integers(1, 200)), min_size=1, max_size=12
)


@profile(300)
@given(USED, st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_ranks_change_with_the_position(used: list[tuple[int, int | None]], steps: list[int]):
    """
    At every later position the order is that of the ranks there, however many blocks have begun or
    ceased to be expected since they were last used.
    """
    blocks = {
        f"b{place}": attrs.evolve(
            chain(f"b{place}", 1, 0)[0],
            key=f"b{place}",
            last_used=200 + last,
            previous_use=200 + last - interval if interval is not None else None,
        )
        for place, (last, interval) in enumerate(used)
    }
    ends = Ends(lambda block: block.present)
    position = 500
    ends.reach(position)
    ends.follow(Map(blocks), blocks)
    for step in steps:
        position += step
        ends.reach(position)
        ranks = {
            key: value(position, block.last_used, block.previous_use)
            for key, block in blocks.items()
        }
        assert shown(ends) == sorted(ranks.items(), key=lambda one: (one[1], one[0]))


def test_a_block_that_is_due_goes_last():
    """
    Four conversations took turns, each after 40 positions. The one that is due stays longest, the
    one that was just used is still young, and one that was used once goes by that.
    """
    last_used = {"due": 60, "third": 70, "second": 80, "young": 98, "once": 85}
    blocks = [
        attrs.evolve(
            chain(name, 1, 0)[0],
            last_used=last,
            previous_use=last - 40 if name != "once" else None,
        )
        for name, last in last_used.items()
    ]
    order = Order(attrs.evolve(state_of(*blocks), position=100))
    names = [key.removesuffix("0") for key, _ in shown(order.memory)]
    assert ["second", "once", "third", "young", "due"] == names


def test_looking_changes_nothing():
    """Reading part of an order does not change it."""
    order = Order(state_of(*chain("a", 4, 100), *chain("b", 3, 50)))
    looking = order.memory.in_order()
    halves = [next(looking)[0].key for _ in range(4)]
    assert ["b2", "b1", "b0", "a3"] == halves
    assert [*halves, "a2", "a1", "a0"] == [key for key, _ in shown(order.memory)]


def test_a_block_used_many_times_has_one_entry():
    """Former ends do not accumulate: the order is as large as the number of blocks."""
    blocks = {block.key: block for block in chain("a", 3, 0)}
    ends = Ends(lambda block: block.present)
    ends.follow(Map(blocks), blocks)
    for used in range(10, 5000):
        blocks["a2"] = attrs.evolve(blocks["a2"], last_used=used)
        ends.used(Map(blocks), ["a0", "a1", "a2"])
    assert [("a2", 4999), ("a1", 4999), ("a0", 4999)] == shown(ends)
    assert len(ends._heaps[0]) < 100


def test_a_model_that_leaves_takes_the_blocks_in_memory_along():
    """Blocks with files keep their order."""
    full = state_of(*chain("a", 2, 100))
    gone = Map({key: attrs.evolve(block, present=False) for key, block in full.blocks.items()})
    order = Order(full)
    order.follow(
        full,
        attrs.evolve(full, blocks=gone),
        ev.ModelUnloaded(fingerprint="f", reason="-", active_bytes=0),
    )
    assert ([], [("a1", 101), ("a0", 101)]) == both(order)


def test_an_event_that_cannot_be_stored_leaves_the_order():
    """Its effect is taken back, in the order as in the fold."""
    driver = next(one for seed in range(20) if (one := played(tape(seed, 600))).files)
    state, before = driver.state, both(driver.ledger.order)
    block = state.blocks[min(driver.files)]
    dropped = ev.BlockFileRemoved(
        key=block.key,
        bytes=block.file_bytes or 0,
        disk_blocks=state.pool.disk_blocks - 1,
        disk_bytes=state.pool.disk_bytes - (block.file_bytes or 0),
        reason="space",
    )
    with pytest.raises(ValueError, match="surrogates"):
        driver.ledger.propose([dropped, ev.OperatorActed(action="\ud800", detail="")])
    assert state is driver.state
    assert before == both(driver.ledger.order)


def test_a_block_that_comes_again_is_one():
    """A block that is evicted and sealed again is placed by its last use."""
    blocks = {block.key: block for block in (*chain("a", 2, 10), *chain("b", 1, 50))}
    ends = Ends(lambda block: block.present)
    ends.follow(Map(blocks), blocks)
    for present, used in ((False, 11), (True, 99)):
        blocks["a1"] = attrs.evolve(blocks["a1"], present=present, last_used=used)
        ends.follow(Map(blocks), ["a1"])
        keys = [key for key, _ in shown(ends)]
        assert keys == (["b0", "a1", "a0"] if present else ["a0", "b0"])


def test_sessions_that_are_often_used() -> None:
    """Their earlier ends are dropped, however long another session has yet to live."""
    first, other = (
        attrs.evolve(at_rest(name, place), expires_us=1 + place)
        for place, name in enumerate(("first", "other"))
    )
    sessions = Map({one.id: one for one in (first, other)})
    resting = Resting(sessions)
    for end in range(100, 400):
        sessions = sessions.set(other.id, attrs.evolve(other, expires_us=end))
        resting.follow(sessions, other.id)
    assert 1 == resting.first_us()
    assert len(vars(resting)["_heap"]) < 100
    assert {first.id, other.id} == resting.ended(399).keys()
    resting.follow(sessions.delete(first.id), first.id)
    assert 399 == resting.first_us()
    resting.follow(sessions.delete(first.id).delete(other.id), other.id)
    assert resting.first_us() is None
