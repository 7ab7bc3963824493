"""Path selection is total, and equals a search over every session and every block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import pytest
from hypothesis import given

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.state import OpenRequest, Session, SessionId
from tests.journal.model import (
    CHUNKS,
    FP_A,
    FP_B,
    TAPES,
    Driver,
    Talk,
    World,
    chosen,
    decided,
    joined,
    played,
    profile,
    rendered,
    stones_ahead,
    tape,
)

SYSTEM = ("system", (30, 31, 32, 33, 34))
TOOLS = ("tools", (20, 21, 22, 23, 24))
HELLO = ("user", (10, 11, 12))
SAID = ("assistant", (50, 51, 52))
MORE = ("user", (13, 14, 15, 16, 17))
OTHER = ("user", (18, 19, 18, 19))


def talk(*parts: tuple[str, tuple[int, ...]], **of: Any) -> Talk:
    """A conversation of tenant t1."""
    return Talk(**{"tenant": "t1", "group": None, "name": None, "parts": parts, **of})


def started(**kwargs: Any) -> Driver:
    """A running server, with room for four slabs that have room for another turn."""
    driver = Driver(**{"pool_slabs": 4, "blocks_kept": 40, "spare_tokens": 60, **kwargs})
    driver.start()
    return driver


def path_of(driver: Driver, name: str | None) -> ev.PathSelected:
    """The decision on the current request of a session."""
    assert name is not None
    driver.until_selected(name)
    request = driver.state.session(name).request
    assert request is not None
    assert request.path is not None
    return request.path


# --- against the model ----------------------------------------------------------------------------


def _request(driver: Driver, asked: Talk, max_tokens: int, **how: Any) -> OpenRequest:
    ids, chain = rendered(asked.parts), driver.chain(asked)
    received = ev.RequestReceived(
        session="s?",
        request="r?",
        protocol="openai",
        client=None,
        tenant=asked.tenant,
        fingerprint=driver.fingerprint,
        session_name=asked.name,
        group=asked.group,
        **{"cache_prompt": True, "cache_mode": "full", **how},
        grammar=None,
        words=None,
        waited_us=0,
        traceparent=None,
        ttl_s=None,
        base_request=None,
        base_parts=0,
        new_parts=chain,
        base_tokens=0,
        new_ids=ids,
        base_keys=0,
        new_keys=driver.keys(asked.tenant, ids),
        prompt_tokens=len(ids),
        max_tokens=max_tokens,
        sampling={},
        seed=1,
        seed_given=True,
        thoughts=0,
        requested_model="tiny",
    )
    return OpenRequest(ask=received, chain=chain, prompt_ids=ids, prompt_keys=received.new_keys)


def _asks(driver: Driver, world: World) -> Iterator[tuple[Talk, dict[str, Any]]]:
    """
    Earlier conversations, parts of them, continuations of them, and different ones; of every
    tenant.
    """
    heard = driver.talks[-6:]
    for had in heard:
        answer = had.answer or (77,)
        for parts in (
            had.parts,
            had.parts[:1],
            (*had.parts, ("assistant", answer), HELLO),
            (*had.parts, HELLO),
            (*had.parts, ("continued", answer[:1])),
            (TOOLS, *had.parts),
        ):
            for tenant, group, name in (
                (had.tenant, had.group, None),
                ("t1", None, None),
                ("t2", "g1", None),
                (had.tenant, "g2", None),
                (had.tenant, None, "s1"),
                ("t2", None, "t1-n1"),
            ):
                yield Talk(tenant=tenant, group=group, name=name, parts=parts), {}
        for mode in ("full", "prefix"):
            yield had, {"cache_prompt": False, "cache_mode": mode}
        for name in (None, had.name, "s1"):
            more = (*had.parts, ("assistant", answer), HELLO)
            yield attrs.evolve(had, name=name, parts=more), {"cache_mode": "prefix"}


@profile(60)
@given(TAPES)
def test_every_request_on_every_state_gets_the_models_decision(data: bytes):
    """
    Whatever was asked before and is asked now, there is a decision, and it equals a search over
    everything. The session that serves is an existing one, a new one or the named one.
    """
    driver = played(data)
    world = World()
    for recorded in driver.recorded:
        world.take(recorded)
    state = driver.state
    others = sorted(state.sessions)[:3]

    for asked, how in _asks(driver, world):
        ask = driver.asked(asked, **how)
        name = paths.choose_session(state, ask)
        assert chosen(world, ask) == name
        request = _request(driver, asked, 5, **how)
        for held in {name, *others} - {None}:
            assert held is not None
            found = paths.select(state, state.session(held), request)
            assert decided(world, held, request) == attrs.asdict(found)
        fresh = Session(
            id=SessionId("s?"), tenant=asked.tenant, fingerprint=FP_A, group=None, named=False
        )
        world.sessions["s?"] = {
            **dict.fromkeys(("last", "slab")),
            "id": "s?",
            "canonical_tokens": 0,
            "prewarmed_rows": 0,
        }
        found = paths.select(state, fresh, request)
        assert decided(world, "s?", request) == attrs.asdict(found)
        del world.sessions["s?"]


@profile(60)
@given(TAPES)
def test_keys_on_record_are_the_keys_of_the_tokens(data: bytes):
    """
    For any request after any others: the keys of a prompt in the fold are those computed from its
    tokens, in this tenant and under this fingerprint.
    """
    driver = played(data)
    for asked, _ in _asks(driver, World()):
        ids = rendered(asked.parts)
        for asked_ids in (ids, ids[:-1], (*ids, 99), ids[1:]):
            found = paths.keys_on_record(driver.state, driver.asked(asked), asked_ids)
            assert driver.keys(asked.tenant, asked_ids)[: len(found)] == found


@profile(100)
@given(TAPES)
def test_every_decision_of_a_history_is_the_models(data: bytes):
    """
    The model agrees on each session that took a request, each path in a history, and how many
    prewarmed blocks exist.
    """
    driver = played(data)
    world = World()
    opened: str | None = None

    for recorded in driver.recorded:
        event = recorded.event
        if isinstance(event, ev.RequestReceived):
            last = world.sessions[event.session]["last"]
            chain = (*(last["chain"] if last else ())[: event.base_parts], *event.new_parts)
            fit = chosen(world, paths.ask_of(event, chain))
            assert event.session == fit or (fit is None and opened == event.session)
        if isinstance(event, ev.PathSelected):
            held = world.sessions[event.session]["request"]
            found = decided(world, event.session, OpenRequest(**held))
            assert found == {name: getattr(event, name) for name in found}
            assert joined(world, event.session, OpenRequest(**held)) is None
        if isinstance(event, ev.PrefixJoined):
            held = world.sessions[event.session]["request"]
            whom = joined(world, event.session, OpenRequest(**held))
            assert whom == {name: getattr(event, name) for name in whom or ()}
        if isinstance(event, ev.PrewarmStarted):
            there = stones_ahead(world, event.session, event)
            assert there == (
                event.tokens_from_slab,
                event.blocks_from_slab,
                event.blocks_from_pool,
                event.partial_key,
                event.tokens_from_partial,
            )
        opened = event.session if isinstance(event, ev.SessionOpened) else opened
        world.take(recorded)


@profile(60)
@given(TAPES)
def test_a_tenant_sees_nothing_of_another(data: bytes):
    """No decision names another tenant's session, and no block is shared between tenants."""
    driver = played(data)
    owner: dict[str, str] = {}
    made: dict[str, str] = {}
    adopted: set[str] = set()  # for the tenant of the session that uses them first

    for recorded in driver.recorded:
        event = recorded.event
        if isinstance(event, ev.SessionOpened):
            owner[event.session] = event.tenant
        if isinstance(event, ev.BlockAdopted):
            adopted.add(event.key)
        if isinstance(event, ev.BlockSealed):
            tenant = owner[event.session]
            assert tenant == made.setdefault(event.key, tenant)
        if isinstance(event, ev.BlocksRestored):
            tenant = owner[event.session]
            made |= {key: tenant for key in event.keys if key in adopted and key not in made}
            assert {tenant} == {made[key] for key in event.keys}
        if isinstance(event, ev.PathSelected) and event.nearest is not None:
            assert owner[event.session] == owner[event.nearest]


def test_all_reasons_are_given():
    """The histories above give every reason there is, so that none is untested."""
    unseen = {None, *paths.Reason.__args__}  # type: ignore[attr-defined]  # a Literal has them
    for seed in range(40):
        for recorded in played(tape(seed, 600)).recorded:
            if isinstance(recorded.event, ev.PathSelected):
                unseen.discard(recorded.event.reason)
        if not unseen:
            break
    assert set() == unseen


# --- each path, with its reason -------------------------------------------------------------------

PARTS = (SYSTEM, HELLO)
FOLLOWED = (*PARTS, SAID, MORE)


def _cold(driver: Driver) -> str | None:
    return driver.ask(talk(*PARTS))


def _continued(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*FOLLOWED))


def _begun(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*PARTS, ("continued", (50,))))


def _completed(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, ("continued", (50,))))
    return driver.ask(talk(*FOLLOWED))


def _completed_alone(driver: Driver) -> str | None:
    driver.serve(talk(("continued", (50,))))
    return driver.ask(talk(SAID, MORE))


def _reworded(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*PARTS, ("assistant", (50, 55)), MORE))


def _sent_again(driver: Driver) -> str | None:
    name = driver.ask(talk(*PARTS))
    assert name is not None
    for _ in range(4):
        driver.step(name)
    driver.cancelled.add(name)
    driver.finish(name)
    return driver.ask(talk(*PARTS))


def _sent_again_and_more(driver: Driver) -> str | None:
    _sent_again(driver)
    driver.cancelled.add("s1")
    driver.finish("s1")
    return driver.ask(talk(*PARTS, MORE))


def _shorter(driver: Driver) -> str | None:
    driver.serve(talk(*FOLLOWED, SAID, OTHER))
    return driver.ask(talk(*FOLLOWED))


def _same_again(driver: Driver) -> str | None:
    driver.serve(talk(*FOLLOWED))
    return driver.ask(talk(*FOLLOWED))


def _same_first_words(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*PARTS))


def _first_words_of_a_longer_one(driver: Driver) -> str | None:
    driver.serve(talk(*FOLLOWED))
    return driver.ask(talk(*PARTS))


def _same_first_words_by_name(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, name="n"))
    return driver.ask(talk(*PARTS, name="n"))


def _edited(driver: Driver) -> str | None:
    driver.serve(talk(*FOLLOWED))
    return driver.ask(talk(SYSTEM, HELLO, SAID, OTHER))


def _two_users(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*PARTS, MORE))


def _other_system(driver: Driver) -> str | None:
    driver.serve(talk(TOOLS, *FOLLOWED))
    return driver.ask(talk(TOOLS, ("system", (35,)), *FOLLOWED[1:]))


def _system_gone(driver: Driver) -> str | None:
    driver.serve(talk(*FOLLOWED, name="n"))
    return driver.ask(talk(*FOLLOWED[1:], name="n"))


def _other_tools(driver: Driver) -> str | None:
    driver.serve(talk(TOOLS, *FOLLOWED, name="n"))
    return driver.ask(talk(("tools", (25,)), *FOLLOWED, name="n"))


def _tools_gone(driver: Driver) -> str | None:
    driver.serve(talk(TOOLS, *FOLLOWED, name="n"))
    return driver.ask(talk(*FOLLOWED, name="n"))


def _tools_new(driver: Driver) -> str | None:
    driver.serve(talk(*FOLLOWED, name="n"))
    return driver.ask(talk(TOOLS, *FOLLOWED, name="n"))


def _evicted(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    driver.release("s1")
    for key in driver.evictable():
        driver.evict(key)
    return driver.ask(talk(*FOLLOWED))


def _evicted_but_for(driver: Driver, left: int) -> str | None:
    """Of the three blocks of a prompt, the last ones are evicted."""
    long = (SYSTEM, ("user", tuple(range(50, 56))))
    driver.serve(talk(*long))
    driver.release("s1")
    last = driver.state.session(SessionId("s1")).last
    assert last is not None
    assert 3 == len(last.prompt_keys)
    gone = [key for key in driver.evictable() if key not in last.prompt_keys]
    for key in (*gone, *reversed(last.prompt_keys[left:])):
        driver.evict(key)
    return driver.ask(talk(*long, SAID, MORE))


def _expired(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    driver.release("s1")
    for key in driver.evictable():
        driver.evict(key, "expired")
    return driver.ask(talk(*FOLLOWED))


def _expired_and_closed(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    driver.release("s1")
    driver.propose(ev.SessionClosed(session="s1", reason="expired"))
    for key in driver.evictable():
        driver.evict(key, "expired")
    return driver.ask(talk(*FOLLOWED))


def _expired_beside_another(driver: Driver) -> str | None:
    driver.serve(talk(SYSTEM, OTHER))
    driver.serve(talk(*PARTS))
    driver.release("s2")
    driver.propose(ev.SessionClosed(session="s2", reason="expired"))
    mine = set(driver.keys("t1", rendered(PARTS))) - set(
        driver.keys("t1", rendered((SYSTEM, OTHER)))
    )
    for key in driver.evictable():
        if key in mine:
            driver.evict(key, "expired")
    return driver.ask(talk(*FOLLOWED))


def _clock(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(("system", (39, *SYSTEM[1][1:])), *FOLLOWED[1:]))


def _clock_among_others(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    driver.serve(talk(SYSTEM, OTHER))
    return driver.ask(talk(("system", (30, 39, *SYSTEM[1][2:])), *FOLLOWED[1:]))


def _clock_and_same_tools(driver: Driver) -> str | None:
    driver.serve(talk(TOOLS, *PARTS))
    driver.serve(talk(TOOLS, SYSTEM, OTHER))
    return driver.ask(talk(TOOLS, ("system", (39, 31)), *FOLLOWED[1:]))


def _clock_in_the_first_message(driver: Driver) -> str | None:
    driver.serve(talk(*FOLLOWED[1:]))
    return driver.ask(talk(OTHER, *FOLLOWED[2:], SAID, HELLO))


def _one_message_in_common(driver: Driver) -> str | None:
    driver.serve(talk(SYSTEM, OTHER, SAID, HELLO))
    return driver.ask(talk(("system", (39,)), MORE, ("assistant", (51,)), HELLO))


def _the_longer_of_two(driver: Driver) -> str | None:
    driver.serve(talk(("system", (38,)), *FOLLOWED[1:]))
    driver.serve(talk(("system", (37,)), OTHER, *FOLLOWED[2:]))
    return driver.ask(talk(("system", (39,)), *FOLLOWED[1:]))


def _a_clock_of_another_group(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, group="g1"))
    return driver.ask(talk(("system", (39,)), *FOLLOWED[1:], group="g2"))


def _reordered(driver: Driver) -> str | None:
    driver.serve(talk(TOOLS, *PARTS))
    return driver.ask(talk(("tools", tuple(reversed(TOOLS[1]))), *FOLLOWED))


def _busy(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    driver.ask(talk(*FOLLOWED))
    return driver.ask(talk(*FOLLOWED))


def _quarantined(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    driver.crash("s1")
    return driver.ask(talk(*FOLLOWED))


def _other_model(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    driver.end_run("stopped")
    driver.start(FP_B)
    return driver.ask(talk(*FOLLOWED))


def _disabled(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*FOLLOWED), cache_prompt=False)


def _prefix(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*FOLLOWED), cache_mode="prefix")


def _prefix_of_a_name(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, name="n"))
    return driver.ask(talk(*FOLLOWED, name="n"), cache_mode="prefix")


def _prefix_of_nothing(driver: Driver) -> str | None:
    return driver.ask(talk(*PARTS), cache_mode="prefix")


def _disabled_prefix(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*FOLLOWED), cache_prompt=False, cache_mode="prefix")


def _after_a_restart(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    driver.end_run("lost")
    driver.start()
    return driver.ask(talk(*FOLLOWED))


def _other_tenant(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*FOLLOWED, tenant="t2"))


def _other_group(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, group="g1"))
    return driver.ask(talk(*FOLLOWED, group="g2"))


def _same_group(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, group="g1"))
    return driver.ask(talk(*FOLLOWED, group="g1"))


def _no_group(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, group="g1"))
    return driver.ask(talk(*FOLLOWED))


def _new_name(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*FOLLOWED, name="n"))


def _same_name(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, name="n"))
    return driver.ask(talk(*FOLLOWED, name="n"))


def _name_only(driver: Driver) -> str | None:
    driver.serve(talk(*PARTS, name="n"))
    return driver.ask(talk(*FOLLOWED))


PATHS: dict[str, tuple[Callable[[Driver], str | None], str, str | None, dict[str, Any]]] = {
    # how it comes about: (steps, session, reason, other fields of the event)
    "first request": (_cold, "s1", "cold_start", {"nearest": None, "reused_tokens": 0}),
    "the next turn": (_continued, "s1", None, {"blocks_from_slab": 3, "rerendered_tokens": 0}),
    "an answer that was begun": (_begun, "s1", None, {"blocks_from_slab": 3}),
    "the turn after it": (_completed, "s1", None, {"nearest": "s1"}),
    "the turn after an answer to nothing": (_completed_alone, "s2", "cold_start", {}),
    "another answer than was given": (
        _reworded,
        "s1",
        None,
        {"rerendered_tokens": 2, "diverged_token": 12},
    ),
    "cut off and sent again": (_sent_again, "s1", None, {"blocks_from_slab": 2}),
    "cut off, then with more": (_sent_again_and_more, "s1", None, {"nearest": "s1"}),
    "fewer messages": (_shorter, "s2", "shorter_history", {"blocks_from_pool": 5}),
    "the same once more": (_same_again, "s2", "shorter_history", {"blocks_from_pool": 5}),
    "a new chat with the first words of another": (
        _same_first_words,
        "s2",
        "cold_start",
        {"blocks_from_pool": 2, "nearest": "s1", "diverged_token": None},
    ),
    "a new chat with the first words of a longer one": (
        _first_words_of_a_longer_one,
        "s2",
        "cold_start",
        {"blocks_from_pool": 2, "nearest": "s1"},
    ),
    "the first words again in a named session": (
        _same_first_words_by_name,
        "n",
        "shorter_history",
        {"nearest": "n"},
    ),
    "a message edited": (
        _edited,
        "s2",
        "diverged",
        {"diverged_part": "messages_changed", "diverged_token": 15, "nearest": "s1"},
    ),
    "two messages in a row": (
        _two_users,
        "s2",
        "diverged",
        {"diverged_part": "messages_changed", "diverged_token": 10},
    ),
    "another system prompt": (
        _other_system,
        "s2",
        "diverged",
        {"diverged_part": "system_changed", "diverged_token": 7, "blocks_from_pool": 1},
    ),
    "no system prompt any more": (
        _system_gone,
        "n",
        "diverged",
        {"diverged_part": "system_changed", "diverged_token": 0},
    ),
    "other tools": (
        _other_tools,
        "n",
        "diverged",
        {"diverged_part": "tools_changed", "diverged_token": 1},
    ),
    "no tools any more": (_tools_gone, "n", "diverged", {"diverged_part": "tools_changed"}),
    "tools for the first time": (_tools_new, "n", "diverged", {"diverged_part": "tools_changed"}),
    "nothing is left": (_evicted, "s1", "evicted", {"reused_tokens": 0, "nearest": "s1"}),
    "more is gone than left": (
        partial(_evicted_but_for, left=1),
        "s1",
        "evicted",
        {"reused_tokens": 4},
    ),
    "less is gone than left": (
        partial(_evicted_but_for, left=2),
        "s1",
        None,
        {"reused_tokens": 8},
    ),
    "all of it expired": (_expired, "s1", "expired", {"reused_tokens": 0, "nearest": "s1"}),
    "all of it expired, and its session was closed": (
        _expired_and_closed,
        "s2",
        "expired",
        {"reused_tokens": 0, "nearest": None},
    ),
    "it expired, and another has the same system prompt": (
        _expired_beside_another,
        "s3",
        "expired",
        {"nearest": "s1", "diverged_part": None, "blocks_from_pool": 1},
    ),
    "a clock in the system prompt": (
        _clock,
        "s2",
        "diverged",
        {"diverged_part": "system_changed", "diverged_token": 1, "nearest": "s1"},
    ),
    "a clock, and another with the system prompt of before": (
        _clock_among_others,
        "s3",
        "diverged",
        {"diverged_part": "system_changed", "diverged_token": 2, "nearest": "s1"},
    ),
    "a clock, and another with the same tools": (
        _clock_and_same_tools,
        "s3",
        "diverged",
        {"diverged_part": "system_changed", "nearest": "s1"},
    ),
    "a clock in the first message": (
        _clock_in_the_first_message,
        "s2",
        "diverged",
        {"diverged_part": "messages_changed", "diverged_token": 1, "nearest": "s1"},
    ),
    "one message in common, which says little": (
        _one_message_in_common,
        "s2",
        "cold_start",
        {"nearest": None},
    ),
    "the same messages, and fewer of them": (
        _the_longer_of_two,
        "s3",
        "diverged",
        {"nearest": "s1"},
    ),
    "a clock, in another group": (
        _a_clock_of_another_group,
        "s2",
        "cold_start",
        {"nearest": None},
    ),
    "the same tools in another order": (
        _reordered,
        "s2",
        "diverged",
        {"diverged_part": "tools_reordered", "diverged_token": 1, "nearest": "s1"},
    ),
    "after a restart": (_after_a_restart, "s1", "evicted", {"nearest": "s1"}),
    "the session works": (_busy, "s2", "session_busy", {"nearest": "s1", "blocks_from_pool": 5}),
    "the session broke": (_quarantined, "s2", "quarantined", {"nearest": "s1"}),
    "another model": (_other_model, "s2", "fingerprint_changed", {"nearest": "s1"}),
    "no cache wanted": (_disabled, "s2", "cache_disabled", {"reused_tokens": 0}),
    "shared blocks alone": (
        _prefix,
        "s2",
        "cache_mode_prefix",
        {"blocks_from_slab": 0, "blocks_from_pool": 3, "nearest": "s1"},
    ),
    "shared blocks alone, by a name": (
        _prefix_of_a_name,
        "n",
        "cache_mode_prefix",
        {"blocks_from_slab": 0, "blocks_from_pool": 3, "rerendered_tokens": 0},
    ),
    "shared blocks alone, of which there are none": (
        _prefix_of_nothing,
        "s1",
        "cache_mode_prefix",
        {"reused_tokens": 0, "nearest": None},
    ),
    "no cache, and shared blocks alone": (
        _disabled_prefix,
        "s2",
        "cache_disabled",
        {"reused_tokens": 0},
    ),
    "another tenant": (_other_tenant, "s2", "cold_start", {"nearest": None, "reused_tokens": 0}),
    "another group": (_other_group, "s2", "cold_start", {"nearest": None, "blocks_from_pool": 3}),
    "the same group": (_same_group, "s1", None, {}),
    "no group, where there was one": (_no_group, "s1", None, {}),
    "a new name": (_new_name, "n", "cold_start", {"nearest": None, "blocks_from_pool": 3}),
    "the same name": (_same_name, "n", None, {"blocks_from_slab": 3}),
    "the name left out": (_name_only, "s1", "cold_start", {"nearest": None, "blocks_from_pool": 3}),
}


@pytest.mark.parametrize("case", PATHS)
def test_each_path_leaves_its_event(case: str):
    """The session, the path, its reason and its figures are what the case says."""
    steps, session, reason, says = PATHS[case]
    driver = started()
    event = path_of(driver, steps(driver))

    assert (session, reason) == (event.session, event.reason)
    assert ("continuation" if reason is None else "new_session") == event.path
    assert says == {name: getattr(event, name) for name in says}
    assert (event.blocks_from_slab + event.blocks_from_pool) * CHUNKS[FP_A] == event.reused_tokens
    driver.finish(event.session)


@pytest.mark.parametrize(("least", "reason"), [(13, "too_short"), (10, None), (0, None)])
def test_a_conversation_without_sealed_blocks(least: int, reason: str | None):
    """
    It is computed from the beginning, with the reason, if its prompt was shorter than the minimum.
    """
    driver = started(min_cache_tokens=least)
    driver.serve(talk(*PARTS), answer=(50,))
    path = path_of(driver, driver.ask(talk(*PARTS, ("assistant", (50,)), MORE)))
    assert (reason, reason is None) == (path.reason, path.reused_tokens > 0)
    assert "s1" == path.nearest == path.session


def test_what_people_are_shown_of_a_difference():
    """The tokens around the first one that differs, of the prompt and of the nearest session."""
    driver = started()
    name = _clock(driver)
    path = path_of(driver, name)
    request = driver.state.session(path.session).request
    assert request is not None
    decision = paths.Decision(
        **{f.name: getattr(path, f.name) for f in attrs.fields(paths.Decision)}
    )
    last = driver.state.session("s1").last
    assert last is not None
    assert (request.prompt_ids, last.sequence) == paths.around(driver.state, request, decision)
    far = attrs.evolve(decision, diverged_token=26)
    start = rendered(FOLLOWED)[2:]
    assert (start, last.sequence[2:]) == paths.around(driver.state, request, far)
    same = attrs.evolve(decision, diverged_token=None)
    assert (None, None) == paths.around(driver.state, request, same)


# --- which session --------------------------------------------------------------------------------


def test_the_longest_chain_goes_on():
    """If this conversation continues two others, the longer one is continued."""
    driver = started()
    driver.serve(talk(*PARTS))
    driver.serve(talk(*FOLLOWED, group="g1"), cache_prompt=False)

    longer = talk(*FOLLOWED, SAID, OTHER)
    assert "s2" == paths.choose_session(driver.state, driver.asked(longer))
    assert "s1" == paths.choose_session(driver.state, driver.asked(talk(*FOLLOWED)))


def test_the_last_used_of_equals_goes_on():
    """Of two sessions with the same conversation, the most recently used one is continued."""
    driver = started()
    driver.serve(talk(*PARTS), cache_prompt=False)
    driver.serve(talk(*PARTS), cache_prompt=False)
    assert "s2" == paths.choose_session(driver.state, driver.asked(talk(*FOLLOWED)))

    driver.ask(talk(*FOLLOWED))
    assert "s1" == paths.choose_session(driver.state, driver.asked(talk(*FOLLOWED)))


def test_a_settling_session_is_there_for_its_next_request():
    """A request neither waits for settling nor uses another session because of it."""
    driver = started()
    driver.serve(talk(*PARTS))
    driver.ask(talk(*FOLLOWED), answer=tuple(range(50, 70)), room=30)
    while str(driver.state.session("s1").state) != "settling":
        driver.step("s1")
    driver.ask(talk(*FOLLOWED, ("assistant", tuple(range(50, 70))), HELLO))

    assert "continuation" == path_of(driver, "s1").path
    settled = [r.event for r in driver.recorded if isinstance(r.event, ev.SessionSettled)]
    assert [True, False] == [event.complete for event in settled]


def test_a_name_is_found_only_within_its_tenant():
    """A tenant that gives the name of another tenant's session does not get that session."""
    driver = started()
    driver.serve(talk(*PARTS, name="n"))

    assert "n" == paths.choose_session(driver.state, driver.asked(talk(OTHER, name="n")))
    foreign = driver.asked(talk(*FOLLOWED, name="n", tenant="t2"))
    assert None is paths.choose_session(driver.state, foreign)


def test_a_chain_is_compared_only_within_its_tenant():
    """Another tenant's conversation is not found by its chain, even if the chain were the same."""
    driver = started()
    driver.serve(talk(*PARTS))
    ask = driver.asked(talk(*FOLLOWED))

    assert "s1" == paths.choose_session(driver.state, ask)
    assert None is paths.choose_session(driver.state, attrs.evolve(ask, tenant="t2"))
    request = _request(driver, talk(*FOLLOWED), 4)
    foreign = attrs.evolve(request, ask=attrs.evolve(request.ask, tenant="t2"))
    fresh = Session(id=SessionId("x"), tenant="t2", fingerprint=FP_A, group=None, named=False)
    decision = paths.select(driver.state, fresh, foreign)
    assert ("cold_start", None) == (decision.reason, decision.nearest)


def test_a_closed_session_is_forgotten_wherever_it_was_known():
    """
    A session that was named, had one conversation and then another, and was closed, is not found by
    any of its former parts: decisions on them do not consider it.
    """
    for name in ("n", None):
        driver = started()
        driver.serve(talk(HELLO, name=name))
        driver.serve(talk(OTHER, name=name or "s1"))
        closing = name or "s1"
        driver.release(closing)
        driver.propose(ev.SessionClosed(session=closing, reason="forgotten"))

        event = path_of(driver, driver.ask(talk(HELLO, SAID, MORE)))
        assert ("cold_start", None) == (event.reason, event.nearest)


def test_the_nearest_conversation_is_one_that_may_be_seen():
    """
    A named session with the same words, one of another group, or one that was closed since, does
    not hide the conversation that this request diverged from.
    """

    def named(driver: Driver) -> None:
        driver.serve(talk(*FOLLOWED, name="n"))

    def grouped(driver: Driver) -> None:
        driver.serve(talk(*FOLLOWED, group="g2"), cache_prompt=False)

    def closed(driver: Driver) -> None:
        driver.serve(talk(*FOLLOWED, group="g1"), cache_prompt=False)
        driver.release("s2")
        driver.propose(ev.SessionClosed(session="s2", reason="forgotten"))

    for hide in (named, grouped, closed):
        driver = started()
        driver.serve(talk(*FOLLOWED, group="g1"))
        hide(driver)
        event = path_of(driver, driver.ask(talk(*FOLLOWED[:3], OTHER, group="g1")))

        assert ("diverged", "s1") == (event.reason, event.nearest)


# --- what is reused -------------------------------------------------------------------------------


def test_what_a_conversation_had_is_known():
    """
    Known keys are those of the prompt's common part with the conversation that shares its first
    parts, or that it names; none of another tenant's, even if the request gives its name.
    """
    driver = started()
    driver.serve(talk(*PARTS))
    driver.serve(talk(*PARTS, name="n"))
    for asked in (talk(*FOLLOWED), talk(*PARTS[:-1], OTHER), talk(*FOLLOWED, name="n")):
        ids = rendered(asked.parts)
        common = paths.common_length(rendered(PARTS), ids) // 4
        found = paths.keys_on_record(driver.state, driver.asked(asked), ids)
        assert driver.keys("t1", ids)[:common] == found != ()

    for asked in (talk(*FOLLOWED, tenant="t2", name="n"), talk(*FOLLOWED, name="other")):
        ids = rendered(asked.parts)
        assert () == paths.keys_on_record(driver.state, driver.asked(asked), ids)


@pytest.mark.parametrize("tokens", range(1, 14))
def test_the_last_prompt_token_is_always_run(tokens: int):
    """At most floor((n - 1) / C) blocks are reused, even if all chunks of the prompt are stored."""
    driver = started()
    same = talk(("user", tuple(range(100, 100 + tokens))))
    driver.serve(same)
    event = path_of(driver, driver.ask(same))

    prompt = tokens + 2
    assert (prompt - 1) // CHUNKS[FP_A] == event.blocks_from_slab + event.blocks_from_pool
    assert event.reused_tokens < prompt


def test_a_slab_that_is_too_small_is_exchanged():
    """If a slab has no room for prompt and answer, its blocks are copied from the store instead."""
    driver = started()
    driver.serve(talk(*PARTS))
    event = path_of(driver, driver.ask(talk(*FOLLOWED), room=400))

    assert (0, 3) == (event.blocks_from_slab, event.blocks_from_pool)
    driver.finish("s1")
    assert 400 < driver.slabs["s1"].capacity_tokens


def test_nothing_is_reused_beyond_a_gap():
    """A block is reused only with all blocks before it."""
    driver = started()
    driver.serve(talk(*FOLLOWED))
    driver.release("s1")
    first = next(iter(driver.store))
    driver.evict(first)
    event = path_of(driver, driver.ask(talk(*FOLLOWED[:3], OTHER)))

    assert 0 == event.reused_tokens


@pytest.mark.parametrize(("mode", "reused"), [("full", (3, 0)), ("prefix", (0, 3))])
def test_a_request_that_continues_none_has_its_blocks_loaded(
    mode: ev.CacheMode, reused: tuple[int, int]
):
    """
    In mode ``full``, blocks that are in the slab of the named session are reused there and not
    loaded. In mode ``prefix``, nothing of the slab is reused, so all of them are loaded.
    """
    driver = started()
    driver.serve(talk(*PARTS, name="n"))
    for key in tuple(driver.store):
        driver.spill(key)
        driver.evict(key)
    path = path_of(driver, driver.ask(talk(*FOLLOWED, name="n"), cache_mode=mode))

    assert reused == (path.blocks_from_slab, path.blocks_from_pool)
    loaded = [one for one in driver.recorded if isinstance(one.event, ev.BlockLoaded)]
    assert path.blocks_from_pool == len(loaded)
    driver.finish("n")


def test_a_model_whose_cache_cannot_be_cut_reuses_nothing():
    """If blocks cannot be sealed, each request runs from its first token."""
    driver = started(reusable=False)
    driver.serve(talk(*PARTS))
    event = path_of(driver, driver.ask(talk(*FOLLOWED)))

    assert ("continuation", 0) == (event.path, event.reused_tokens)
    driver.finish("s1")


@pytest.mark.parametrize(
    ("one", "other"),
    [((), ()), ((1,), ()), ((1, 2, 3), (1, 2, 3)), ((1, 2, 3), (1, 2)), ((1, 2, 3), (4, 2, 3))],
)
def test_common_length(one: tuple[int, ...], other: tuple[int, ...]):
    """
    The length of the common beginning of two sequences equals that of an element-by-element
    comparison.
    """
    walked = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    expected = min(len(one), len(other)) if walked is None else walked

    assert expected == paths.common_length(one, other)
    assert expected == paths.common_length(other, one)


class Watched(tuple[int, ...]):
    """Counts how many of its elements are read."""

    looked = 0

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        self.looked += len(found)
        return found


def test_common_length_looks_at_little():
    """Wherever two sequences part, each is read at most three times over."""
    for place in range(0, 1000, 13):
        one = Watched(range(1000))
        other = (*range(place), -1, *range(place + 1, 1000))
        assert place == paths.common_length(one, other)
        assert one.looked <= 3000


def test_common_length_wherever_they_part():
    """Every index at which two long sequences part is found."""
    one = tuple(range(100))
    for place in range(100):
        assert place == paths.common_length(one, (*one[:place], -1, *one[place + 1 :]))
