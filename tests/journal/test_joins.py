"""
Joins: a request waits for the blocks that another one computes, and decides again when these are
sealed or will not be. Its rules equal a search over every session, and no wait makes a circle.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import attrs
import pytest
from hypothesis import given

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.cache.checkpoints import Checkpoints
from cairn.journal.state import EMPTY, OpenRequest, Session, apply
from cairn.journal.stories import request_stories
from tests.journal.model import (
    TAPES,
    Driver,
    Part,
    Talk,
    Violated,
    World,
    played,
    profile,
    still_waits,
    tape,
)

SYSTEM = ("system", tuple(range(100, 119)))
"""With the words of a user it fills four blocks of four tokens and more."""


def talk(*words: int, system: Part = SYSTEM, **of: Any) -> Talk:
    """A conversation under the common prompt."""
    parts = (system, ("user", words or (10, 11)))
    return Talk(**{"tenant": "t1", "group": None, "name": None, "parts": parts, **of})


def started(**kwargs: Any) -> Driver:
    """A running server with room for many."""
    driver = Driver(**{"pool_slabs": 8, "blocks_kept": 60, "spare_tokens": 60, **kwargs})
    driver.start()
    return driver


def asked(driver: Driver, *words: int, **of: Any) -> str:
    """A session that has taken a request under the common prompt."""
    how = {name: of.pop(name) for name in ("cache_prompt", "cache_mode") if name in of}
    session = driver.ask(talk(*words, **of), **how)
    assert session is not None
    return session


def request_of(driver: Driver, session: str) -> OpenRequest:
    """The request that a session serves."""
    request = driver.state.session(session).request
    assert request is not None
    return request


def waits(driver: Driver, session: str) -> bool:
    """Whether a session's request waits for another one."""
    return paths.waits(driver.state, driver.state.session(session))


def joined(driver: Driver, session: str) -> ev.PrefixJoined:
    """Whom a session's request has joined."""
    found = request_of(driver, session).joined
    assert found is not None
    return found


def decisions(driver: Driver, session: str) -> list[ev.Event]:
    """All decisions on the requests of a session."""
    kinds = ev.PrefixJoined | ev.PathSelected
    events = [one.event for one in driver.recorded]
    return [one for one in events if isinstance(one, kinds) and one.session == session]


# --- against the model, on any history ------------------------------------------------------------


def _check(driver: Driver) -> int:
    """Check each row of a history; return how many requests joined another."""
    state, world, joins, at = EMPTY, World(), 0, dict[str, int]()
    for recorded in driver.recorded:
        event = recorded.event
        if isinstance(event, ev.PathSelected):
            at[event.request] = recorded.position
        if isinstance(event, ev.PrefixJoined):
            joins += 1
            # The order of the journal: whom it waits for has its path, and it has none.
            assert at[event.leader] < recorded.position
            assert event.request not in at
            assert event.reused_blocks < event.blocks
        state = apply(state, recorded)
        world.take(recorded)
        for name, session in state.sessions.items():
            waiting = paths.waits(state, session)
            assert waiting == still_waits(world, name)
            assert not (waiting and paths.followers(state, _name_of(session)))
    return joins


def _name_of(session: Session) -> str:
    assert session.request is not None
    return session.request.ask.request


@profile(100)
@given(TAPES)
def test_no_wait_makes_a_circle(data: bytes):
    """
    On every state of a history, a request that waits waits for one that does not, and the model
    agrees on which ones wait.
    """
    _check(played(data))


def test_histories_have_joins():
    """The histories above have joins, so that the property is not empty."""
    joins = accumulate(_check(played(tape(seed, 600))) for seed in range(40))
    assert any(count > 10 for count in joins)


# --- each rule ------------------------------------------------------------------------------------


def test_it_waits_until_the_common_blocks_are_sealed():
    """It waits for the first five blocks, not for the leader's own, and then reuses all of them."""
    driver = started()
    leader, other = asked(driver, 1, 2, 3, 4, 5, 6), asked(driver, 7, 8, 9)
    event = joined(driver, other)
    assert (event.blocks, event.reused_blocks) == (5, 0)
    assert event.leader == request_of(driver, leader).ask.request
    assert paths.followers(driver.state, event.leader) == 1

    sealed = 0
    while sealed < 5:
        assert waits(driver, other)
        driver.step(leader)
        sealed = len(driver.state.session(leader).slab_keys)
    assert not waits(driver, other)
    assert request_of(driver, leader).sampled == ()  # its own blocks are still to come
    assert driver.evictable() == []

    driver.step(other)
    path = request_of(driver, other).path
    assert path is not None
    assert (path.blocks_from_pool, path.reason) == (5, "cold_start")
    assert paths.followers(driver.state, event.leader) == 0
    driver.finish(other)
    driver.finish(leader)


def test_a_story_names_each_leader():
    """The story of a request has those that it waited for."""
    driver = started()
    leader, other = asked(driver, 1), asked(driver, 2)
    event = joined(driver, other)
    driver.finish(leader)
    driver.finish(other)
    mine = [row for row in driver.rows if row.stream == f"session/{other}"]
    (story,) = request_stories(mine, driver.state)
    assert (event.leader,) == story.joined
    assert story.from_pool == event.blocks * 4


@pytest.mark.parametrize("end", ["cancelled", "crashed", "quarantined blocks"])
def test_when_the_leader_ends_the_first_to_go_on_leads(end: str):
    """Two that waited share what the leader left, and one of them computes the rest for both."""
    driver = started()
    leader, one, two = asked(driver, 1), asked(driver, 2, 3), asked(driver, 2, 3)
    while len(driver.state.session(leader).slab_keys) < 2:
        driver.step(leader)
    if end == "cancelled":
        driver.cancelled.add(leader)
        driver.step(leader)
    elif end == "crashed":
        driver.crash(leader)
    else:
        keys = driver.state.session(leader).slab_keys
        driver.propose(ev.BlocksQuarantined(session=None, bug_id="bug", keys=keys))
    assert not waits(driver, one)
    assert not waits(driver, two)

    driver.step(two)
    path = request_of(driver, two).path
    assert path is not None
    assert path.blocks_from_pool == (0 if end == "quarantined blocks" else 2)
    driver.step(one)
    if end == "quarantined blocks":  # no session seals on a quarantined block
        assert request_of(driver, one).path is not None
        return
    event = joined(driver, one)
    assert event.leader == request_of(driver, two).ask.request
    assert (event.blocks, event.reused_blocks) == (5, 2)
    driver.finish(one)
    assert [type(each) for each in decisions(driver, one)] == [
        ev.PrefixJoined,
        ev.PrefixJoined,
        ev.PathSelected,
    ]


def test_the_one_that_gives_the_most_leads():
    """Of several leaders the one with the longest common beginning, at a tie the earlier one."""
    driver = started()
    asked(driver, 1)
    near = asked(driver, 2, 2, 2, 2, 2, 2, 2, system=("system", (1, 2)))
    asked(driver, 2, 2, 2, 2, 2, 2, 2, system=("system", (1, 2)))
    third = asked(driver, 2, 2, 2, 2, 2, 2, 3, system=("system", (1, 2)))
    assert joined(driver, third).leader == request_of(driver, near).ask.request


NO_JOIN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "another tenant": ({}, {}, {"tenant": "t2"}),
    "nothing may be reused": ({}, {}, {"cache_prompt": False}),
    "the leader is too short to be cached": ({"min_cache_tokens": 500}, {}, {}),
    "nothing is reusable": ({"reusable": False}, {}, {}),
    "no block in common": ({}, {"system": ("system", (9,) * 19)}, {}),
}


@pytest.mark.parametrize("case", NO_JOIN)
def test_a_request_that_does_not_join(case: str):
    """Its path is selected at once."""
    server, leads, follows = NO_JOIN[case]
    driver = started(**server)
    asked(driver, 1, **leads)
    other = asked(driver, 2, **follows)
    assert request_of(driver, other).path is not None


def test_more_requests_that_join():
    """
    One that continues no session joins, and so does one after a leader that may reuse nothing
    itself, because that seals its blocks all the same.
    """
    driver = started()
    asked(driver, 1, cache_prompt=False)
    assert joined(driver, asked(driver, 2, cache_mode="prefix")).blocks == 5


def test_a_session_with_a_slab_waits_only_for_one_that_has_its_own():
    """Otherwise the leader might wait for the slab of the one that waits for it."""
    driver = started()
    for name in ("one", "two"):
        driver.serve(talk(1, system=("system", (7,) * 4), name=name))
    fresh = asked(driver, 2)
    held = asked(driver, 3, name="one")
    assert driver.state.session(held).slab is not None
    assert request_of(driver, held).path is not None
    while driver.state.session(fresh).slab is None:
        driver.step(fresh)
    assert joined(driver, asked(driver, 4, name="two")).leader in (
        request_of(driver, fresh).ask.request,
        request_of(driver, held).ask.request,
    )


def test_a_continuation_joins_no_leader_that_gives_less_than_its_slab():
    """What its own slab has is not waited for."""
    driver = started()
    mine = talk(1, name="mine")
    driver.serve(mine)
    driver.end_run("stopped")
    driver.start()
    driver.serve(mine)
    for key in driver.evictable():
        driver.evict(key)
    asked(driver, 2)
    driver.step(driver.state.requests[next(iter(driver.state.requests))])
    assert request_of(driver, asked(driver, 1, name="mine")).path is not None


def test_a_block_that_is_not_stored_ends_the_wait():
    """Without room for blocks nothing comes: it goes on, and computes what is missing."""
    driver = started(blocks_kept=2)
    leader, other = asked(driver, 1), asked(driver, 2)
    while waits(driver, other):
        driver.step(leader)
    assert len(driver.state.session(leader).slab_keys) == 3  # the third one had no room
    driver.step(other)
    path = request_of(driver, other).path
    assert path is not None
    assert path.blocks_from_pool == 2
    driver.finish(other)


def test_it_waits_for_a_block_with_states():
    """If layers have states, it waits up to the last block that carries them."""
    driver = started(state_blocks=2)
    asked(driver, 1)
    other = asked(driver, 2, system=("system", tuple(range(100, 119))))
    assert Checkpoints(block_tokens=4, blocks=2).last(5) == 4
    assert joined(driver, other).blocks == 4


def test_one_that_waits_can_be_cancelled():
    """It ends, and its session is idle; the leader does not notice."""
    driver = started()
    leader, other = asked(driver, 1), asked(driver, 2)
    driver.cancelled.add(other)
    driver.finish(other)
    assert driver.state.session(other).state == "idle"
    assert not waits(driver, other)
    driver.finish(leader)


def test_nothing_waits_without_a_request():
    """Nor does a request that joined none."""
    driver = started()
    session = asked(driver, 1)
    assert not waits(driver, session)
    driver.finish(session)
    assert not waits(driver, session)


# --- what the journal refuses ---------------------------------------------------------------------


def _changed(**fields: Any) -> Any:
    def change(event: ev.Event) -> ev.Event:
        return attrs.evolve(event, **fields) if isinstance(event, ev.PrefixJoined) else event

    return change


WRONG: dict[str, tuple[Any, str]] = {
    "another leader": (_changed(leader="r9"), "another decision"),
    "fewer blocks": (_changed(blocks=4), "another decision"),
    "other reuse": (_changed(reused_blocks=1), "another decision"),
    "other rules": (_changed(rules_version=9), "unknown rules"),
    "decided earlier": (_changed(decided_at=1), "decided on another state"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_join_violates_inv_4(case: str):
    """A replay decides again: what is recorded must be what the rules give."""
    driver = started()
    asked(driver, 1)
    driver.damage, words = WRONG[case]
    with pytest.raises(Violated, match=f"INV-4 broken.*{words}"):
        asked(driver, 2)


def test_a_path_instead_of_a_join_violates_inv_4():
    """A request that is to wait may not go on."""
    driver = started()
    asked(driver, 1)

    def selects(event: ev.Event) -> ev.Event:
        return driver.selected(event.session) if isinstance(event, ev.PrefixJoined) else event

    driver.damage = selects
    with pytest.raises(Violated, match="another decision"):
        asked(driver, 2)


def test_a_decision_during_a_wait_violates_inv_4():
    """Neither a path nor another join comes before the wait is over."""
    driver = started()
    asked(driver, 1)
    other = asked(driver, 2)
    with pytest.raises(Violated, match="decided during a wait"):
        driver.propose(driver.decided(other))


def test_a_join_after_the_path_is_illegal():
    """The path is selected once, and last."""
    driver = started()
    leader = asked(driver, 1)
    other = asked(driver, 2)
    event = joined(driver, other)
    late = attrs.evolve(event, session=leader, request=request_of(driver, leader).ask.request)
    with pytest.raises(Violated, match=r"INV-6 broken.*a prefix was joined after"):
        driver.propose(late)


@pytest.mark.parametrize(("kept", "joins"), [(2, True), (9, False)])
def test_a_leader_that_is_far_behind_is_not_joined(kept: int, joins: bool):
    """
    A request whose first blocks are in the pool waits for one that computes all of them again only
    if it would not have the others sooner itself.
    """
    driver = started(blocks_kept=100, spare_tokens=100)
    words = tuple(range(100, 148))
    driver.serve(talk(1, system=("system", words[: 4 * kept])))
    whole = ("system", words)
    leader = request_of(driver, asked(driver, 1, system=whole, cache_prompt=False))
    follower = request_of(driver, asked(driver, 2, system=whole))
    assert leader.path is not None
    assert leader.path.blocks_from_pool == 0
    if joins:
        assert follower.joined is not None
        assert follower.joined.reused_blocks == kept
    else:
        assert follower.path is not None
        assert follower.path.blocks_from_pool == kept
