"""Which blocks leave the state at a prune, and that nothing else changes."""

from __future__ import annotations

import attrs
import pytest
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.cache.eviction_order import Order
from cairn.journal.cache.gone_blocks import without_gone
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import (
    EMPTY,
    Block,
    OpenPrewarm,
    Session,
    SessionId,
    State,
    Turn,
    Use,
    apply,
    beginning,
)
from tests.journal.test_turns import recorded
from tests.support.journals import CHUNK, MODEL

#: A tree: r - a - b - c, and from a also d - e; x - y is another one.
PARENTS = {"r": None, "a": "r", "b": "a", "c": "b", "d": "a", "e": "d", "x": None, "y": "x"}
ROOT = beginning("f", "t")


def block(key: str, *, there: bool = False, bug_id: str | None = None) -> Block:
    """A block of the tree."""
    chain, at = 0, PARENTS[key]
    while at is not None:
        chain, at = chain + 1, PARENTS[at]
    return Block(
        key=key,
        parent=PARENTS[key],
        digest="d",
        start=chain * CHUNK,
        tokens=CHUNK,
        bytes=1,
        present=there,
        bug_id=bug_id,
        last_used=1,
    )


def state(there: str = "", bugs: str = "", session: Session | None = None) -> State:
    """The tree, with these blocks in memory and these in quarantine."""
    blocks = {key: block(key, there=key in there) for key in PARENTS}
    blocks |= {key: attrs.evolve(blocks[key], bug_id="bug") for key in bugs}
    return attrs.evolve(
        EMPTY,
        position=100,
        model=MODEL,
        blocks=Map(blocks),
        sessions=Map({session.id: session}) if session is not None else Map(),
        uses=Map(
            {
                "c": Use(position=50, previous=40, expires_us=9),
                "e": Use(position=60, previous=10, expires_us=5),
                "b": Use(position=45, previous=None, expires_us=None),
                "y": Use(position=70),
                "never sealed": Use(position=80),
            }
        ),
        children=Map(
            {ROOT: ("r", "x"), "r": ("a",), "a": ("b", "d"), "b": ("c",), "d": ("e",), "x": ("y",)}
        ),
    )


def left(of: State) -> str:
    """The keys of the blocks that stay."""
    return "".join(sorted(without_gone(of).blocks))


@pytest.mark.parametrize(
    ("there", "bugs", "stay"),
    [
        ("", "", ""),
        ("r", "", "r"),
        ("c", "", "abcr"),
        ("ra", "e", "ader"),
        ("ry", "", "rxy"),
        ("rabcdexy", "", "abcderxy"),
    ],
)
def test_what_is_gone_goes(there: str, bugs: str, stay: str):
    """What is in memory or quarantined stays, with all that it is built on."""
    assert stay == left(state(there, bugs))


TURN = Turn(
    request="r1",
    fingerprint="f",
    chain=(("user", "h", "alone"),),
    prompt_ids=(),
    prompt_keys=("r", "a", "d"),
    answered=True,
    answer_ids=(),
)
PREWARM = OpenPrewarm(
    ids=(), keys=("r", "a", "b"), tokens_from_slab=0, blocks_from_slab=0, blocks_from_pool=0
)


@pytest.mark.parametrize(
    ("changes", "stay"),
    [
        ({}, ""),
        ({"last": TURN}, "adr"),
        ({"slab_keys": ("x",)}, "x"),
        ({"prewarm": PREWARM}, "abr"),
    ],
)
def test_what_an_open_session_has_stays(changes: dict[str, object], stay: str):
    """Its next request may be compared with them."""
    session = Session(
        id=SessionId("s"),
        tenant="t",
        fingerprint="f",
        group=None,
        named=False,
        state=SessionState.IDLE,
        **changes,  # type: ignore[arg-type]
    )
    assert stay == left(state(session=session))
    pinned = attrs.evolve(state(), pins=Map({session.id: ("x", "y")}))
    assert "xy" == left(pinned)


def test_uses_move_to_the_block_that_stays():
    """The later one with the later expiry; those of what is gone as a whole go."""
    found = without_gone(state("ra"))
    assert {"a": Use(position=60, previous=10, expires_us=9)} == dict(found.uses)
    assert {ROOT: ("r",), "r": ("a",)} == dict(found.children)
    waits = attrs.evolve(state("ra"), pins=Map({SessionId("s"): ("never sealed",)}))
    assert 80 == without_gone(waits).uses["never sealed"].position
    plain = attrs.evolve(state("ra"), uses=Map({"d": Use(position=3), "e": Use(position=2)}))
    assert {"a": Use(position=3)} == dict(without_gone(plain).uses)


@pytest.mark.parametrize("there", ["r", "ra", "rab", "rabcx", "rabcdexy"])
def test_the_order_of_eviction_stays(there: str):
    """Of the blocks that stay, each has the rank and the expiry that it had."""
    before = state(there)
    order, after = Order(before), apply(before, recorded(101, PRUNED))
    due = [
        (stays.key, order.uses(stays), order.expires_us(stays))
        for stays, _ in order.memory.in_order()
    ]
    assert len(there) == len(due)
    order.follow(before, after, PRUNED)
    for one in (order, Order(after)):
        assert due == [
            (stays.key, one.uses(stays), one.expires_us(stays))
            for stays, _ in one.memory.in_order()
        ]
        # One that comes again has no use from before.
        for key in PARENTS.keys() - set(after.blocks):
            assert ((1, None), None) == (one.uses(block(key)), one.expires_us(block(key)))


PRUNED = ev.JournalPruned(
    cut=1, head="h", rows=1, sessions=1, first_us=1, last_us=1, before_us=2, base_digest="b"
)


def test_only_a_prune_removes_blocks():
    """The event does it, so every fold of the journal has the same blocks."""
    before = state("ra")
    assert "ar" == "".join(sorted(apply(before, recorded(101, PRUNED)).blocks))
    stopped = ev.ServerStopped(boot="b", reason="asked to")
    assert len(PARENTS) == len(apply(before, recorded(101, stopped)).blocks)
