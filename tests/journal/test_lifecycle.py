"""The table of legal steps is complete, and no other step happens."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.lifecycle import STEPS, SessionState, next_state, trigger
from cairn.journal.state import Session
from tests.journal.model import FP_A, Driver, Talk, plain, played, tape

SAMPLES: dict[str, ev.Event] = {
    trigger(event): event
    for event in (
        ev.RequestReceived(
            session="s1",
            request="r9",
            protocol="openai",
            client="an-agent",
            tenant="t1",
            fingerprint=FP_A,
            session_name=None,
            group=None,
            cache_prompt=True,
            base_request=None,
            base_parts=0,
            new_parts=(("user", "x", "y"),),
            base_tokens=0,
            new_ids=(1,),
            base_keys=0,
            new_keys=(),
            prompt_tokens=1,
            max_tokens=1,
            sampling={},
            seed=0,
            seed_given=False,
            requested_model="tiny",
            thoughts=0,
            grammar=None,
            words=None,
            waited_us=0,
            traceparent=None,
            cache_mode="full",
            ttl_s=None,
        ),
        ev.PrefixJoined(
            session="s1",
            request="r1",
            rules_version=1,
            decided_at=0,
            leader="r2",
            blocks=2,
            reused_blocks=1,
        ),
        ev.PathSelected(
            session="s1",
            request="r1",
            rules_version=1,
            decided_at=0,
            path="continuation",
            reason=None,
            tokens_from_slab=0,
            blocks_from_slab=0,
            blocks_from_pool=0,
            partial_key=None,
            tokens_from_partial=0,
            reused_tokens=0,
            prewarmed_tokens=0,
            rerendered_tokens=0,
            nearest=None,
            diverged_part=None,
            diverged_token=None,
            diverged_text=None,
            diverged_from=None,
        ),
        ev.SlabAcquired(
            session="s1", slab=1, capacity_tokens=1, bytes=1, pool_slabs=1, pool_bytes=1
        ),
        ev.SlabReleased(session="s1", slab=1, bytes=1, pool_slabs=0, pool_bytes=0, reason="-"),
        ev.BlocksRestored(
            session="s1",
            request="r1",
            start=0,
            end=0,
            keys=(),
            digests=(),
            coverage=(),
            duration_us=0,
        ),
        *(
            ev.CacheExtended(
                session="s1",
                request="r1",
                step=step,
                start=0,
                end=0,
                input_hash="-",
                coverage=(),
                sampled=(),
                logprobs=(),
                duration_us=0,
            )
            for step in ("prefill", "decode", "settle")
        ),
        ev.CacheTrimmed(session="s1", cached_tokens=0, end=0, coverage=(), reason="-"),
        ev.RowChecked(session="s1", request="r1", row=0, held_digest="d", digest="d"),
        ev.BlockSealed(
            session="s1",
            key="k",
            parent=None,
            digest="d",
            start=0,
            end=0,
            bytes=1,
            resealed=False,
            stored=True,
            memory_blocks=1,
            memory_bytes=1,
        ),
        ev.TokensEmitted(session="s1", request="r1", first=0, emitted=0, ids=(), text=""),
        ev.CallRejected(session="s1", request="r1", reason="truncated", text="-", detail="-"),
        ev.TurnStored(
            session="s1",
            request="r1",
            tenant="t1",
            previous=None,
            created_s=0,
            question="[]",
            answer="[]",
            note="",
            texts={},
            texts_at={},
            agent=None,
        ),
        ev.RequestFinished(
            session="s1",
            request="r1",
            finish_reason="stop",
            prompt_tokens=0,
            cached_tokens=0,
            answer_tokens=0,
            completion_tokens=0,
        ),
        ev.RequestCancelled(session="s1", request="r1", stage="decode"),
        ev.PrewarmStarted(
            session="s1",
            next_role="user",
            rules_version=1,
            tokens=0,
            base_tokens=0,
            new_ids=(),
            base_keys=0,
            new_keys=(),
            tokens_from_slab=0,
            blocks_from_slab=0,
            blocks_from_pool=0,
            partial_key=None,
            tokens_from_partial=0,
        ),
        ev.PrewarmFinished(session="s1", tokens=0, computed_tokens=0),
        ev.PrewarmAbandoned(session="s1", reason="request", computed_tokens=0),
        ev.SessionSettled(session="s1", canonical_tokens=0, complete=True),
        ev.SessionClosed(session="s1", reason="-"),
        ev.InvariantViolated(
            bug_id="b",
            invariant="INV-1",
            at_position=1,
            session="s1",
            of_session=None,
            request=None,
            fingerprint=None,
            cairn_version="0",
            message="-",
            expected="-",
            actual="-",
            trace="-",
        ),
        ev.SessionQuarantined(session="s1", bug_id="b"),
        ev.BlocksQuarantined(session="s1", bug_id="b", keys=()),
        ev.AdmissionClosed(session="s1", bug_id="b"),
    )
}
OPEN = ev.SessionOpened(session="s1", tenant="t1", fingerprint=FP_A, group=None, named=False)


def at(session_state: SessionState) -> Driver:
    """A history in which session s1 has reached a state."""
    driver = Driver()
    driver.start()
    if session_state is SessionState.COLD:
        driver.propose(OPEN)
        return driver
    driver.ask(Talk(tenant="t1", group=None, name=None, parts=(("user", tuple(range(10, 20))),)))
    while driver.state.session("s1").state is not session_state:
        if session_state is SessionState.QUARANTINED:
            driver.crash("s1")
        else:
            driver.step("s1")
    return driver


LIVING = [
    session_state for session_state in SessionState if session_state is not SessionState.CLOSED
]


def test_the_table_is_closed():
    """It has a row for every state, leads to no others, and has only events that exist."""
    assert set(SessionState) == set(STEPS)
    assert set(SessionState) >= {after for steps in STEPS.values() for after in steps.values()}
    assert set(SAMPLES) >= {name for steps in STEPS.values() for name in steps}


def test_every_state_can_be_reached_and_left():
    """Each state can be reached from cold; each but the last has a step out of it."""
    reached = {SessionState.COLD}
    while (
        more := {after for session_state in reached for after in STEPS[session_state].values()}
        - reached
    ):
        reached |= more

    assert set(SessionState) == reached
    assert {} == STEPS[SessionState.CLOSED]
    for session_state in LIVING:
        assert {session_state} != set(STEPS[session_state].values()) | {session_state}


def test_a_violation_is_legal_in_every_state():
    """Whatever a session's state, a violation can be recorded and can quarantine the session."""
    for session_state in LIVING:
        after = next_state(session_state, "invariant_violated")
        assert after is not None
        if session_state is not SessionState.QUARANTINED:
            for consequence in ("session_quarantined", "blocks_quarantined", "admission_closed"):
                assert None is not next_state(after, consequence)


def test_a_prewarm_that_is_not_rendered():
    """It is abandoned without a start; after a start, that is no reason, and others need one."""
    driver = at(SessionState.SETTLING)
    unrendered = ev.PrewarmAbandoned(session="s1", reason="render_failed", computed_tokens=0)
    driver.propose(unrendered)
    outcome = driver.ledger.propose([attrs.evolve(unrendered, reason="request")])
    assert outcome.bug is not None
    assert "a prewarm ended that had not started" == outcome.bug.message


def test_a_quarantined_session_can_only_be_closed():
    """A quarantined session can only be closed."""
    assert {SessionState.QUARANTINED, SessionState.CLOSED} == set(
        STEPS[SessionState.QUARANTINED].values()
    )
    assert None is next_state(SessionState.QUARANTINED, "request_received")


def test_all_events_of_a_session_are_in_the_table():
    """Each event with a session, except its opening, is a trigger; no other event is."""
    of_sessions = {
        event.kind for event in ev.ALL_EVENTS if "session" in {f.name for f in attrs.fields(event)}
    }
    triggers = {name.partition("/")[0] for name in SAMPLES}
    assert of_sessions - {"session_opened"} == triggers
    used = {name.partition("/")[0] for steps in STEPS.values() for name in steps}
    assert used == triggers


REFUSED = [
    (session_state, name)
    for session_state in LIVING
    for name in SAMPLES
    if name not in STEPS[session_state]
]


@pytest.mark.parametrize(("session_state", "name"), REFUSED)
def test_a_step_that_is_not_in_the_table(session_state: SessionState, name: str):
    """
    Such a step is recorded as a violation of INV-6 without effect. The session is quarantined,
    unless it was already.
    """
    driver = at(session_state)
    before = driver.state
    held: Session = before.session("s1")
    event: Any = SAMPLES[name]
    outcome = driver.ledger.propose([event])
    after = driver.state.session("s1")

    assert outcome.bug is not None
    assert "INV-6" == outcome.bug.invariant
    assert f"{name} is not a legal step of a {session_state} session" == outcome.bug.message
    assert SessionState.QUARANTINED is after.state
    kv = ("slab", "cached_tokens", "canonical_tokens", "slab_keys")
    assert [getattr(held, field) for field in kv] == [getattr(after, field) for field in kv]
    if session_state is SessionState.QUARANTINED:
        assert held == after
    assert before.pool == driver.state.pool
    assert set(before.blocks) == set(driver.state.blocks)


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_follows_a_closing(name: str):
    """On a session that is closed, or never existed, every event is a violation of INV-6."""
    driver = at(SessionState.COLD)
    driver.propose(ev.SessionClosed(session="s1", reason="-"))
    before = plain(driver.state)
    outcome = driver.ledger.propose([SAMPLES[name]])

    assert outcome.bug is not None
    assert "INV-6" == outcome.bug.invariant
    after = plain(driver.state)
    for field in ("sessions", "requests", "blocks", "pool", "tips", "parts"):
        assert before[field] == after[field]


def test_a_closed_session_may_be_opened_again():
    """Its name is free, and its stream continues."""
    driver = at(SessionState.COLD)
    driver.propose(ev.SessionClosed(session="s1", reason="-"))
    driver.propose(OPEN)

    assert SessionState.COLD is driver.state.session("s1").state
    assert 3 == driver.state.streams["session/s1"]


@pytest.mark.slow
def test_every_step_of_the_table_is_taken():
    """Every step in the table is taken by some history, except those that only a fault takes."""
    faults = ("invariant_violated", "quarantined", "admission_closed", "session_closed")
    missing = {
        (str(session_state), name)
        for session_state, steps in STEPS.items()
        for name in steps
        if not name.endswith(faults)
    }
    for seed in range(60):
        session_state: dict[str, SessionState] = {}
        for recorded, state in zip(*_history(seed), strict=True):
            session = getattr(recorded.event, "session", None)
            if session in session_state:
                missing.discard((session_state[session], trigger(recorded.event)))
            session_state = {name: held.state for name, held in state.sessions.items()}
        if not missing:
            break
    assert set() == missing


def _history(seed: int) -> tuple[list[ev.Recorded], list[Any]]:
    driver = played(tape(seed, 600))
    return driver.recorded, driver.states
