"""Forgetting a session: what is found of it, and the state that follows."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.forgetting import Found, find
from cairn.journal.invariants import check
from cairn.journal.invariants.records import session_forgotten
from cairn.journal.ledger import Clock, Ledger
from cairn.journal.replay import replay
from cairn.journal.retention import keys_in
from cairn.journal.rows.base import histories_of
from cairn.journal.rows.codec import Row, decode, opened
from cairn.journal.rows.sealing import subject_of
from cairn.journal.rows.store import MemoryStore
from cairn.journal.state import Fault, State
from cairn.journal.turns import Turns
from tests.support.journals import NOTES, Builder, conversation, healthy, speaking, stored, tampered

from .model import played, tape
from .test_pruning import prepared
from .test_unread import key_of, news, sealed, subjects_of, unread


def found_in(rows: Sequence[Row], session: str) -> Found:
    """What is found of a session."""
    return find(session, rows, rows, None)


def ledger_of(rows: Sequence[Row]) -> Ledger:
    """A ledger at the end of a journal."""
    report = replay(rows)
    count = iter(range(10**6))
    clock = Clock(new_id=lambda: f"f{next(count)}", now_us=lambda: 10**15, version="test")
    return Ledger(attrs.evolve(clock, key_of=key_of), state=report.state, head=report.head)


def forgotten(rows: Sequence[Row], session: str) -> tuple[Ledger, list[Row]]:
    """A server's ledger after a session was forgotten, and all rows."""
    ledger = ledger_of(rows)
    state = ledger.state
    more: list[ev.Event] = [ev.ServerLost(boot=state.boot)] if state.boot is not None else []
    if session in state.sessions:
        more.append(ev.SessionClosed(session=session, reason="forgotten"))
    event = found_in(rows, session).event([key_of(session).id])
    outcome = ledger.propose([*more, event])
    assert outcome.bug is None
    return ledger, [*rows, *outcome.rows]


@pytest.mark.long_but("1", "2", "5")
@pytest.mark.parametrize("seed", [1, 2, 3, 5, 7, 11, 13])
def test_the_state_is_that_of_a_reader_without_the_key(seed: int):
    """
    The state of the server that forgot a session is, to the last field, that of the rows read
    without its key; and nothing of its rows is called wrong.
    """
    rows = sealed(played(tape(seed, 600)).rows)
    tried = 0
    for session in subjects_of(rows)[:6]:
        ledger, longer = forgotten(rows, session)
        report = replay(unread(longer, [session]))
        assert ledger.state == report.state
        assert news(replay(rows)) == news(report)
        assert report.not_checked.forgotten > 0
        assert 0 == report.not_checked.no_key
        # The control: with its key, or before, it can be read.
        assert not replay(unread(longer, [])).not_checked
        tried += 1
    assert tried


def test_what_is_found():
    """Rows, keys and blocks of a session; of its blocks those that no other session names."""
    rows = sealed(conversation().rows)
    for session in subjects_of(rows):
        found = found_in(rows, session)
        mine = [row for row in rows if row.private is not None and key_of(session).id in str(found)]
        assert found.rows == sum(
            decode(row).event.__class__ is not ev.ModelLoaded
            and getattr(decode(row).event, "session", None) == session
            for row in mine
        )
        assert (key_of(session).id,) == found.key_ids
        assert 0 == found.plain
        assert set(found.removed) <= set(found.blocks)
        others = set[str]()
        for row in rows:
            event = decode(row).event
            if getattr(event, "session", None) not in (None, session):
                others |= set(getattr(event, "new_keys", ()))
                others |= {event.key} if isinstance(event, ev.BlockSealed) else set()
        assert set(found.removed) == set(found.blocks) - others
        assert bool(found.same_text) == bool(set(found.blocks) & others)


def test_a_session_that_was_forgotten_keeps_nothing():
    """
    The blocks of two sessions go with the second one that is forgotten; but not if a session that
    got the name of the first has them by then.
    """
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello", "Hi", "Who?"], range(11, 21), (21, 22))
    made.turn("s2", "r2", ["Hello", "Hi", "What?"], (*range(11, 19), 90, 91), (61, 62))
    both = found_in(made.rows, "s1")
    assert both.same_text == ("s2",)
    assert set(both.removed) < set(both.blocks)
    made.stop()
    made.propose(ev.SessionClosed(session="s2", reason="forgotten"))
    made.propose(found_in(made.rows, "s2").event(()))
    alone = found_in(made.rows, "s1")
    assert ((), alone.blocks) == (alone.same_text, alone.removed)
    assert alone.event(()).same_text == ()
    made.start()
    made.turn("s2", "r3", ["Hello", "Hi", "Whose?"], (*range(11, 19), 92, 93), (61, 62))
    assert made.bug is None
    again = found_in(made.rows, "s1")
    assert (both.same_text, both.removed) == (again.same_text, again.removed)


def test_a_session_that_quotes_it_is_named():
    """
    A decision has a few words of the session that it was compared with, also if no block is of
    both.
    """
    rows = played(tape(1, 600)).rows
    events = [decode(row).event for row in rows]
    alone = 0
    for path in events:
        if not isinstance(path, ev.PathSelected) or path.diverged_from is None:
            continue
        if path.nearest is None or path.nearest == path.session:
            continue
        found = found_in(rows, path.nearest)
        assert path.session in found.same_text
        named = (keys_in(one) for one in events if getattr(one, "session", None) == path.session)
        alone += not set(found.blocks).intersection(*[set().union(*named)])
    assert alone


def test_the_rows_of_an_agent_in_a_base():
    """They are sealed there, count as its own, and cannot be read without its key."""
    store = MemoryStore(sealed(speaking().rows))
    prepared(store).commit(store)
    base = store.base()
    kept = histories_of(base).rows
    assert {"agent_created", "turn_stored"} < {row.kind for row in kept}
    private = [row for row in kept if row.private is not None]
    assert all(decode(row).unread is not None for row in private)
    key = key_of(NOTES)
    assert all(decode(opened(row, {key.id: key})).unread is None for row in private)
    after = [row for row in store.read() if row.private is not None]
    after = [row for row in after if subject_of(decode(row).event) == NOTES]
    found = find(NOTES, list(store.read()), list(store.read()), base)
    assert ((key.id,), len(private) + len(after)) == (found.key_ids, found.rows)
    assert found.agent is not None


def test_rows_that_are_not_sealed_are_counted():
    """Without keys the texts of a session would stay."""
    found = found_in(healthy(), "s1")
    assert (0, ()) == (found.rows, found.key_ids)
    assert found.plain > 0


def test_agents_are_found():
    """The agent of a session, and those whose history begins with its turns."""
    rows = stored()
    sessions = {
        decode(row).stream.removeprefix("session/") for row in rows if row.stream != "server"
    }
    of_agents = [name for name in sessions if "agent/" in name]
    assert of_agents
    agents = [found_in(rows, name).agent for name in sessions]
    assert {one.session for one in agents if one is not None} <= set(of_agents)


def test_a_broken_journal_is_refused():
    """Nothing is forgotten in a journal that does not hold."""
    with pytest.raises(StoreError, match="Nothing was forgotten"):
        found_in(tampered(), "s1")


def test_a_row_that_cannot_be_read_is_refused():
    """Bytes in the place of an event are a finding, and not an event of another session."""
    rows = list(healthy())
    rows[4] = attrs.evolve(rows[4], public=b"?")
    with pytest.raises(StoreError, match="the row was changed"):
        found_in(rows, "s1")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "session": ({"of_session": "s7"}, "a session was forgotten that never was"),
    "same text": ({"same_text": ("s7",)}, "a session was forgotten that never was"),
    "tenant": ({"tenant": "other"}, "another tenant's session was forgotten"),
    "block": ({"blocks": ("k",)}, "blocks of a forgotten session that never were"),
    "removed": ({"blocks": ()}, "blocks were removed of others"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_the_journal(name: str):
    """INV-9: an event that names what the journal does not have."""
    changes, message = WRONG[name]
    rows = sealed(healthy())
    state = replay(rows).state
    session = next(iter(state.sessions))
    state = attrs.evolve(state, sessions=state.sessions.delete(session))
    event = found_in(rows, session).event(())
    assert event.removed
    assert [] == list(session_forgotten(state, event))
    found = [one.message for one in session_forgotten(state, attrs.evolve(event, **changes))]
    assert message in found
    agent = attrs.evolve(event, of_session="agent/none", same_text=())
    assert [] == list(session_forgotten(state, agent))


def test_an_open_session_is_not_forgotten():
    """INV-6: it must be closed first."""
    rows = sealed(healthy())
    ledger = ledger_of(rows)
    session = next(iter(ledger.state.sessions))
    event = found_in(rows, session).event(())
    recorded = ev.Recorded(
        position=ledger.state.position + 1,
        stream="server",
        seq=ledger.state.streams["server"] + 1,
        event_id="x",
        time_us=0,
        event=event,
    )
    (violation,) = check(ledger.state, recorded)
    assert ("INV-6", "a session was forgotten that is open") == (
        violation.invariant,
        violation.message,
    )


def test_stored_turns_are_looked_up_no_more():
    """The turns of a forgotten session are gone, and those of others stay."""
    turns = Turns()
    sessions = dict[str, str]()
    for row in stored():
        recorded = decode(row)
        turns.see(recorded)
        if isinstance(recorded.event, ev.TurnStored):
            sessions[recorded.event.request] = recorded.event.session
    held = {request for request in sessions if turns.held(request) is not None}
    session = sessions[min(held)]
    event = found_in(stored(), session).event(())
    turns.see(attrs.evolve(decode(stored()[-1]), event=event))
    left = {request for request in sessions if turns.held(request) is not None}
    assert left == {request for request in held if sessions[request] != session}
    assert left != held


def test_where_it_can_still_be_read():
    """A base has token ids of it, other sessions its words, and bugs what they quote."""
    store = MemoryStore(sealed(speaking().rows))
    (keys, backup) = found_in(store.rows, NOTES).traces.still_readable(State(), "a backup")
    assert "--with-keys" in keys
    assert "backup" in backup
    prepared(store).commit(store)
    rows = list(store.read())
    traces = find(NOTES, rows, rows, store.base()).traces
    assert "in the base of a prune" in traces.still_readable(State(), "a backup")[2]
    fault = Fault(event=violated("another"), position=1)
    of_others = attrs.evolve(State(), faults=Map({"b": fault}))
    quoted = traces.still_readable(of_others, "a backup")[-1]
    assert "bugs of the server or of other sessions" in quoted
    own = attrs.evolve(State(), faults=Map({"b": attrs.evolve(fault, event=violated(NOTES))}))
    assert traces.still_readable(State(), "a backup") == traces.still_readable(own, "a backup")


def violated(session: str) -> ev.InvariantViolated:
    """A violation in a session."""
    return ev.InvariantViolated(
        bug_id="b",
        invariant="INV-1",
        at_position=1,
        session=session,
        of_session=None,
        request=None,
        fingerprint=None,
        cairn_version="test",
        message="-",
        expected="-",
        actual="-",
        trace="",
    )
