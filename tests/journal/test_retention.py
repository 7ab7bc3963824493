"""A journal that was cut reads as if it had not been: same fold, same decisions, same head."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any, get_args, get_type_hints

import attrs
import pytest
from hypothesis import given

from cairn.journal import events as ev
from cairn.journal.errors import UnknownEvent
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import Report, replay
from cairn.journal.retention import NAMING, NeededIds, Survey
from cairn.journal.rows import base
from cairn.journal.rows.base import (
    VERSION,
    Base,
    base_of,
    forgotten,
    forgotten_faults,
    forgotten_ids,
    forgotten_turns,
    state_of,
    with_ids,
)
from cairn.journal.rows.codec import Row, decode
from cairn.journal.state import EMPTY, Session, State
from cairn.journal.tenants import agent_of
from tests.journal.model import FP_A, TAPES, Driver, Talk, Violated, played, profile, tape

LONG_AGO = 0
FAR = 2**60

NAME_OF_FIELDS = "601a537ca4102f2f"
"""A digest of the fields in version 10 of what a base holds."""


def states_of(rows: list[Row]) -> list[State]:
    """The state before the first row and after each."""
    states = [EMPTY]
    replay(rows, watch=lambda _, state: states.append(state))
    return states


def surveyed(rows: list[Row], before_us: int = FAR) -> Survey:
    """A survey of all rows."""
    survey = Survey(before_us)
    replay(rows, watch=survey.feed)
    return survey


def brute(rows: list[Row], states: list[State], before_us: int) -> int:
    """The highest cut, found by trying the rule as written on every row."""
    lives: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    closed: list[list[int]] = []
    reported: list[tuple[int, int]] = []
    agents: list[list[int]] = []
    for recorded, before, after in zip(map(decode, rows), states, states[1:], strict=False):
        event, position = recorded.event, recorded.position
        if isinstance(event, ev.InvariantViolated):
            reported.append((event.at_position, position))
        # Open sessions are those in the state: an event that broke an invariant opens none.
        for session in sorted(set(after.sessions) - set(before.sessions)):
            latest[session] = []
            (lives if agent_of(session) is None else agents).append(latest[session])
        named = getattr(event, "session", None)
        if named is not None and named in latest:
            latest[named].append(position)
        for session in set(before.sessions) - set(after.sessions):
            closed.append(latest.pop(session))
    for cut in range(len(rows), 0, -1):
        whole = all(
            life in closed and all(position <= cut for position in life[:-1])
            for life in lives
            if life[0] <= cut
        )
        older = all(row.time_us < before_us for row in rows[:cut])
        some = any(life[0] <= cut for life in lives)
        some = some or any(life in closed and life[-2:][0] <= cut for life in agents)
        some = some or served(states, cut)
        some = some or "agent_deleted" in {row.kind for row in rows[:cut]}
        stories = not any(broken <= cut < row for broken, row in reported)
        rest = all(rests(one) for one in states[cut].sessions.values() if agent_of(one.id))
        if whole and older and some and stories and rest and not states[cut].requests:
            return cut
    return 0


def rests(session: Session) -> bool:
    """Whether the session of an agent may be cut."""
    return session.state in (SessionState.COLD, SessionState.IDLE) and session.slab is None


def served(states: list[State], cut: int) -> bool:
    """Whether an agent was at work in the first rows, and rested after that."""
    names = {name for state in states[: cut + 1] for name in state.sessions if agent_of(name)}
    for name in names:
        busy = False
        for position, state in enumerate(states):
            session = state.sessions.get(name)
            is_busy = session is not None and not rests(session)
            if is_busy and position <= cut:
                busy = True
            if busy and not is_busy:
                return True
    return False


def pruned(rows: list[Row], states: list[State], cut: int) -> tuple[Base, list[Row]]:
    """What a cut leaves, without the event that names the base."""
    rest = rows[cut:]
    return base_of(forgotten(states[cut], kept_for(rest)), rows[cut - 1].hash), rest


def kept_for(rest: list[Row]) -> NeededIds:
    """The token ids that these rows after a cut need."""
    kept = NeededIds()
    for row in rest:
        if row.kind in NAMING:
            kept.see(decode(row).event)
    return kept


def contents_of(state: State) -> bytes:
    """What a base of this state holds."""
    contents = base_of(state, "h" * 64).state
    assert contents is not None
    return contents


def holding(contents: bytes, position: int = 0) -> Base:
    """A base with these contents."""
    digest = hashlib.sha256(contents).hexdigest()
    return Base(position=position, head="h" * 64, state=contents, state_digest=digest)


def assert_reads_on(whole: Report, part: Report, cut: int, rest: list[Row]) -> None:
    """
    Reading from the base gives the same result as reading from the beginning, except for the token
    ids of blocks that no conversation has any more, and for stored turns before it.
    """
    faults = forgotten_faults(whole.state.faults, cut)
    blocks = forgotten_ids(whole.state.blocks, kept_for(rest).blocks)
    turns = forgotten_turns(whole.state.turns, cut)
    expected = attrs.evolve(
        whole.state, faults=faults, blocks=blocks, turns=turns, turns_pruned=part.state.turns_pruned
    )
    assert expected == part.state
    assert part.state.turns_pruned or turns == whole.state.turns
    assert whole.head == part.head
    assert [f for f in whole.findings if f.position > cut] == list(part.findings)


def retired(data: bytes) -> list[Row]:
    """
    A history in which the server was lost, followed by a second run with conversations that diverge
    from those of the first. All sessions are closed except one of the second run.
    """
    driver = played(data)
    if driver.state.boot is not None:
        driver.end_run("lost")
    first = sorted(driver.state.sessions)
    close(driver, *first[::3])
    driver.start()
    for number, known in enumerate(driver.talks[:3]):
        parts = (*known.parts[:-1], ("user", (70 + number, 71, 72, 73)))
        driver.serve(attrs.evolve(known, name=None, parts=parts, answer=None))
    driver.serve(talk(70, 70, 70))
    without_effect(driver)
    driver.end_run("stopped")
    latest = max(driver.state.sessions.values(), key=lambda session: session.last_used)
    close(driver, *sorted(set(driver.state.sessions) - {latest.id}))
    return driver.rows


def without_effect(driver: Driver) -> None:
    """Events of sessions that break an invariant, so that their only effect is a violation."""
    opened = ev.SessionOpened(
        session="missing", tenant="t1", fingerprint=FP_A, group=None, named=False
    )
    refused(driver, opened, expected_seq=3)
    refused(driver, ev.SessionClosed(session="missing", reason="retention"))
    refused(driver, attrs.evolve(opened, session=sorted(driver.state.sessions)[-1]))
    busy = driver.ask(talk(80, 81, 82))
    if busy is not None:
        refused(driver, ev.SessionClosed(session=busy, reason="retention"))


def refused(driver: Driver, event: ev.Event, expected_seq: int | None = None) -> None:
    """Propose an event that breaks an invariant."""
    outcome = driver.ledger.propose([event], expected_seq=expected_seq)
    assert outcome.bug is not None
    with contextlib.suppress(Violated):
        driver.take(outcome)


def close(driver: Driver, *sessions: str) -> None:
    """Close sessions, as retention does."""
    for session in sessions:
        outcome = driver.ledger.propose([ev.SessionClosed(session=session, reason="retention")])
        assert outcome.bug is None
        driver.take(outcome)


# --- encoding of the state ------------------------------------------------------------------------


@profile(12)
@given(TAPES)
def test_a_state_comes_back(data: bytes):
    """Every state of a history survives encoding; continuing from it gives the same end."""
    rows = played(data).rows
    states = states_of(rows)
    for state in states:
        assert state == state_of(base_of(state, "h" * 64))
    for cut in range(1, len(rows), 1 + len(rows) // 9):
        base = base_of(states[cut], rows[cut - 1].hash)
        part = replay(rows[cut:], base=base, until=rows[-1].position)
        assert (states[-1], rows[-1].hash) == (part.state, part.head)


def test_a_state_has_one_form():
    """Equal states give equal bytes in every process: maps, which have no order, are sorted."""
    encoded = contents_of(played(tape(3, 400)).state)
    for name in ("blocks", "parts", "streams"):
        keys = list(json.loads(encoded)["state"][name])
        assert len(keys) > 5
        assert sorted(keys) == keys


@pytest.mark.parametrize("change", ["position", "head", "state", "state_digest"])
def test_a_base_that_was_changed(change: str):
    """Every part of a base is covered by its digest, or else contradicts the rest."""
    base = base_of(played(tape(3, 400)).state, "h" * 64)
    values: dict[str, Any] = {
        "position": base.position + 1,
        "head": "0" * 64,
        "state": contents_of(attrs.evolve(EMPTY, position=base.position)),
        "state_digest": "0" * 64,
    }
    changed = attrs.evolve(base, **{change: values[change]})
    if change == "state":
        with pytest.raises(ValueError, match="was changed"):
            state_of(changed)
    else:
        assert base.digest != changed.digest


@pytest.mark.parametrize("encoded", [b"", b"{}x", b"[]", b'{"position":"1"}', b"\xff"])
def test_bytes_that_are_no_state(encoded: bytes):
    """Bytes that are not a state are refused, and the error says so."""
    with pytest.raises(ValueError, match="cannot be decoded"):
        state_of(holding(encoded))


def test_a_base_of_a_newer_version():
    """
    A base of a newer version is refused as such: nothing was changed, and a newer Cairn reads it.
    """
    contents = json.loads(contents_of(EMPTY))
    newer = holding(json.dumps({**contents, "version": VERSION + 1, "more": 1}).encode())
    with pytest.raises(UnknownEvent, match=rf"of version {VERSION + 1}, .* use the version that"):
        state_of(newer)


def test_a_base_of_an_older_version_is_brought_up(monkeypatch: pytest.MonkeyPatch):
    """Older contents go through each step up to the current version; a missing step is an error."""
    contents = json.loads(contents_of(EMPTY))
    del contents["state"]["disk_budget"]
    encoded = json.dumps({**contents, "version": VERSION}).encode()
    monkeypatch.setattr(base, "VERSION", VERSION + 1)
    with pytest.raises(ValueError, match="cannot be decoded"):
        state_of(holding(encoded))

    def with_a_budget(contents: dict[str, Any]) -> dict[str, Any]:
        state = {**contents["state"], "disk_budget": 7}
        return {**contents, "version": VERSION + 1, "state": state}

    monkeypatch.setattr(base, "UPCASTS", {VERSION: with_a_budget})
    assert attrs.evolve(EMPTY, disk_budget=7) == state_of(holding(encoded))


def test_a_base_without_a_version():
    """A base without a version is refused."""
    contents = json.loads(contents_of(EMPTY))
    del contents["version"]
    with pytest.raises(ValueError, match="cannot be decoded"):
        state_of(holding(json.dumps(contents).encode()))


def fields_within(kind: Any, found: dict[str, list[str]]) -> dict[str, list[str]]:
    """The fields of all classes that a value of this type may hold, by class."""
    for part in get_args(kind):
        fields_within(part, found)
    if attrs.has(kind) and kind.__name__ not in found:
        hints = get_type_hints(kind)
        fields = attrs.fields(kind)
        found[kind.__name__] = [f"{field.name}: {field.type}" for field in fields]
        for field in fields:
            fields_within(hints[field.name], found)
    return found


def test_what_a_base_keeps_has_a_version():
    """
    A change of the fields that a base holds, including those of its events, must raise its version
    and add a step that reads the version before. The digest of the fields above then changes, too.
    """
    found = fields_within(base._Snapshot, {})
    assert {"State", "ModelLoaded", "PathSelected", "Shadow"} < set(found)
    named = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    assert (VERSION, NAME_OF_FIELDS) == (1, named)
    assert list(range(1, VERSION)) == list(base.UPCASTS)


def test_a_base_with_other_fields():
    """
    An extra field, or a missing one that has a default, is not ignored at any depth: code that does
    not know a field does not know what follows from it.
    """
    contents = json.loads(contents_of(EMPTY))
    for place in (contents, contents["state"], contents["state"]["pool"]):
        place["more"] = None
        with pytest.raises(ValueError, match="other fields"):
            state_of(holding(json.dumps(contents).encode()))
        del place["more"]
    del contents["state"]["disk_budget"]
    with pytest.raises(ValueError, match="other fields"):
        state_of(holding(json.dumps(contents).encode()))


# --- where to cut ---------------------------------------------------------------------------------


@profile(16)
@given(TAPES)
def test_the_highest_cut(data: bytes):
    """The plan is the highest row at which the rule holds, for any date."""
    rows = retired(data)
    states = states_of(rows)
    for place in range(0, len(rows), 1 + len(rows) // 8):
        before_us = rows[place].time_us
        assert brute(rows, states, before_us) == surveyed(rows, before_us).plan().cut
    assert brute(rows, states, FAR) == surveyed(rows).plan().cut


@profile(40)
@given(TAPES)
def test_a_cut_journal_reads_on(data: bytes):
    """After any cut, fold, head and findings are those of the whole journal."""
    rows = retired(data)
    states = states_of(rows)
    whole = replay(rows)
    for place in range(0, len(rows), 1 + len(rows) // 5):
        cut = surveyed(rows, rows[place].time_us).plan().cut
        if cut:
            base, rest = pruned(rows, states, cut)
            part = replay(rest, base=base, until=len(rows))
            assert_reads_on(whole, part, cut, rest)


@pytest.mark.slow
@pytest.mark.parametrize("least", [2, pytest.param(8, marks=pytest.mark.long)])
def test_cuts_are_found(least: int):
    """The histories above can be cut deep, so the tests that use them test something."""
    cuts = set()
    for seed in range(8):
        rows = retired(tape(seed, 600))
        for row in rows[::20]:
            cuts.add(surveyed(rows, row.time_us).plan().cut)
            if least <= sum(cut > 20 for cut in cuts):
                return
    raise AssertionError(sorted(cuts))


def talk(*words: int) -> Talk:
    """A conversation of one message."""
    return Talk(tenant="t1", group=None, name=None, parts=(("user", words),))


def overlapping() -> Driver:
    """Two idle sessions in a run that ended."""
    driver = Driver(pool_slabs=3, blocks_kept=40)
    driver.start()
    driver.serve(talk(10, 11, 12, 13, 14))
    driver.serve(talk(20, 21, 22, 23, 24))
    driver.end_run("stopped")
    return driver


def test_a_closing_row_may_stay():
    """A session can go although its closing row is young, because it is whole without that row."""
    driver = overlapping()
    first, second = driver.ledger.state.sessions
    end = driver.rows[-1].position
    survey = surveyed(driver.rows, driver.rows[-1].time_us + 1)
    assert (0, 2) == (survey.plan().sessions, sum(1 for _ in driver.state.sessions))
    spans = survey.closable(driver.state, idle=True, quarantined=False)
    assert {first, second} == {span.session for span in spans}
    assert (end, 2) == (survey.plan(spans).cut, survey.plan(spans).sessions)

    close(driver, first, second)
    plan = surveyed(driver.rows, driver.rows[-1].time_us).plan()
    assert end + 1 == plan.cut  # the last row is not older than itself
    early = surveyed(driver.rows, driver.rows[end].time_us).plan()
    assert (end, 2, None) == (early.cut, early.sessions, early.held_by)
    base, rest = pruned(driver.rows, states_of(driver.rows), early.cut)
    part = replay(rest, base=base, until=len(driver.rows))
    assert_reads_on(replay(driver.rows), part, early.cut, rest)
    assert {} == dict(part.state.sessions.items())


def test_the_session_that_limits_the_cut():
    """The plan names the session that limits the cut, and how far the cut could go without it."""
    driver = overlapping()
    found = surveyed(driver.rows).closable(driver.state, idle=True, quarantined=False)
    spans = {span.session: span for span in found}
    (name, other) = sorted(spans, key=lambda name: spans[name].first)
    close(driver, name)
    plan = surveyed(driver.rows).plan()
    assert plan.held_by is not None
    assert (other, spans[other].first - 1) == (plan.held_by.session, plan.cut)
    assert 1 == plan.sessions
    assert len(driver.rows) == plan.limit


def test_nothing_is_old_enough():
    """Before the first row there is nothing to cut, and no session limits the cut."""
    driver = overlapping()
    plan = surveyed(driver.rows, LONG_AGO).plan()
    assert (0, 0, 0, None) == (plan.cut, plan.sessions, plan.limit, plan.held_by)


def test_an_old_row_after_a_young_one():
    """If the clock was set back, no row after the first young one counts as old."""
    driver = overlapping()
    rows = [attrs.evolve(row, time_us=5 if n != 7 else 50) for n, row in enumerate(driver.rows)]
    survey = Survey(50)
    for row, state in zip(rows, states_of(driver.rows)[1:], strict=True):
        survey.feed(decode(row), state)
    assert 7 == survey.limit


def test_a_request_that_was_open_when_the_server_died():
    """Its session lasts until the loss was found: the base has no open request."""
    driver = Driver(pool_slabs=3)
    driver.start()
    driver.ask(talk(10, 11, 12, 13, 14))
    driver.end_run("lost")
    lost = driver.rows[-1].position
    (name,) = driver.state.sessions
    close(driver, name)
    assert "server_lost" == driver.rows[lost - 1].kind
    before_us = driver.rows[lost - 1].time_us
    assert 0 == surveyed(driver.rows, before_us).plan().cut
    assert lost == surveyed(driver.rows, before_us + 1).plan().cut


def test_events_that_had_no_effect():
    """A session that was refused does not limit the cut, and cannot be closed."""
    driver = overlapping()
    opened = ev.SessionOpened(
        session="missing", tenant="t1", fingerprint=FP_A, group=None, named=False
    )
    refused(driver, opened, expected_seq=3)
    first, _ = driver.state.sessions
    refused(driver, attrs.evolve(opened, session=first))
    survey = surveyed(driver.rows)
    assert (2, 0) == survey.sessions
    spans = survey.closable(driver.state, idle=True, quarantined=True)
    assert set(driver.state.sessions) == {span.session for span in spans}
    assert len(driver.rows) == survey.plan(spans).cut


def test_a_violation_after_the_cut_keeps_its_contents():
    """The texts of the violations up to the cut are forgotten, and only those."""
    driver = overlapping()
    first, second = driver.state.sessions
    for name in (first, second):
        refused(
            driver,
            ev.SessionOpened(session=name, tenant="t1", fingerprint=FP_A, group=None, named=False),
        )
    old, young = sorted(driver.state.faults.values(), key=lambda fault: fault.position)
    assert old.event.actual
    assert young.event.actual

    forgot = forgotten_faults(driver.state.faults, old.position)

    event = forgot[old.event.bug_id].event
    assert ("", "", "") == (event.expected, event.actual, event.trace)
    assert young == forgot[young.event.bug_id]


def test_a_violation_goes_with_the_row_that_broke():
    """A cut between the two would leave a violation that nothing in the journal explains."""
    driver = overlapping()
    close(driver, *driver.ledger.state.sessions)
    end = driver.rows[-1].position
    refused(driver, ev.SessionClosed(session="missing", reason="retention"))
    broke, reported = driver.rows[-2:]
    assert ("session_closed", "invariant_violated") == (broke.kind, reported.kind)
    assert end == surveyed(driver.rows, reported.time_us).plan().cut
    assert end + 2 == surveyed(driver.rows, reported.time_us + 1).plan().cut


def test_the_bug_of_a_shadow_check_goes_with_the_answer():
    """
    A failed shadow check names a session in a row that is not the session's own. As long as that
    bug is in the journal, the rows of the session stay.
    """
    driver = Driver()
    driver.start()
    driver.serve(Talk(tenant="t1", group=None, name="n", parts=(("user", tuple(range(20))),)))
    request = driver.state.session("n").last
    assert request is not None
    driver.release("n")
    while driver.state.shadow is None:
        driver.begin_check("n")
    close(driver, "n")
    differs = ev.ShadowChecked(
        of_session="n",
        request=request.request,
        prompt_tokens=20,
        cuts=(20,),
        answer_tokens=1,
        keys=(),
        digests=(),
        memory_digests=(),
        ids_expected="i",
        drawn_expected="d",
        drawn="e",
        first_difference=0,
        duration_us=1,
    )
    refused(driver, differs)
    reported = driver.rows[-1]
    assert "invariant_violated" == reported.kind
    assert 0 == surveyed(driver.rows, reported.time_us).plan().cut
    assert reported.position == surveyed(driver.rows, reported.time_us + 1).plan().cut


def test_what_a_base_forgets_of_an_open_request():
    """A cut leaves no request open; if one were, its texts would be forgotten, too."""
    driver = overlapping()
    driver.start()
    name = driver.ask(talk(30, 31, 32, 33, 34))
    assert name is not None
    while b'"step":"prefill"' not in driver.rows[-1].public:
        driver.step(name)
    state = driver.state
    request = state.session(name).request
    assert request is not None
    assert request.path is not None
    request = attrs.evolve(
        request,
        ask=attrs.evolve(request.ask, grammar="of a secret"),
        path=attrs.evolve(request.path, diverged_text="a secret"),
    )
    session = attrs.evolve(state.session(name), request=request)
    state = attrs.evolve(state, sessions=state.sessions.set(session.id, session))
    assert name in with_ids(state)
    assert set() == with_ids(forgotten(state, NeededIds()))
    assert 2 == contents_of(state).count(b"a secret")
    assert b"a secret" not in contents_of(forgotten(state, NeededIds()))


def test_what_a_base_forgets():
    """
    A base has no token ids and no text of a violation, except those of a conversation that a later
    decision was compared with.
    """
    driver = overlapping()
    first, second = driver.ledger.state.sessions
    state = forgotten(driver.state, NeededIds({first}))
    turns = [state.session(name).last for name in (first, second)]
    assert [True, False] == [bool(turn and turn.sequence) for turn in turns]

    driver.take(driver.ledger.record_crash(session=first, message="-", trace="a secret"))
    assert b"a secret" in contents_of(driver.state)
    assert b"a secret" not in contents_of(forgotten(driver.state, NeededIds()))


def test_a_later_decision_needs_what_it_compared():
    """
    A prompt that was compared with an idle session of the base gets the same decision after the
    cut. It would get a different one if those token ids were forgotten; that is why they are kept.
    """
    driver = overlapping()
    cut = driver.rows[-1].position
    driver.start()
    driver.serve(
        Talk(
            tenant="t1",
            group=None,
            name=None,
            parts=(("user", (10, 11, 12, 13, 14)), ("user", (7, 8))),
        )
    )
    states = states_of(driver.rows)
    base, rest = pruned(driver.rows, states, cut)
    part = replay(rest, base=base, until=len(driver.rows))
    assert () == part.findings
    blank = base_of(forgotten(states[cut], NeededIds()), base.head)
    part = replay(rest, base=blank, until=len(driver.rows))
    assert {"INV-4"} == {finding.invariant for finding in part.findings}


# --- base and journal -----------------------------------------------------------------------------


def cut_journal() -> tuple[Base, list[Row]]:
    """A journal that was cut, with the event that says so."""
    driver = overlapping()
    cut = driver.rows[-1].position
    close(driver, *driver.ledger.state.sessions)
    base, _ = pruned(driver.rows, states_of(driver.rows), cut)
    driver.take(driver.ledger.propose([pruning(base)]))
    driver.start()
    driver.serve(talk(30, 31, 32, 33, 34))
    return base, driver.rows[cut:]


def pruning(base: Base) -> ev.JournalPruned:
    """The event that names a base."""
    return ev.JournalPruned(
        cut=base.position,
        head=base.head,
        rows=base.position,
        sessions=2,
        first_us=1,
        last_us=2,
        before_us=3,
        base_digest=base.digest,
    )


def reported(report: Report) -> list[tuple[str, int, str]]:
    """A finding, shortened for comparison."""
    return [(f.invariant, f.position, f.message) for f in report.findings]


def test_a_base_and_its_event():
    """A base and its event match, and the journal has no findings."""
    base, rows = cut_journal()
    report = replay(rows, base=base)
    assert () == report.findings
    assert len(rows) == report.rows
    assert [] == reported(replay([], base=None))


@pytest.mark.parametrize("change", ["state", "head", "digest", "position"])
def test_a_base_changed_by_hand(change: str):
    """Any change of a base is found, at the row of the base."""
    base, rows = cut_journal()
    if change == "state":
        other = base_of(attrs.evolve(state_of(base), admission_bug="x"), base.head)
    elif change == "head":
        other = attrs.evolve(base, head="0" * 64)
    elif change == "digest":
        other = attrs.evolve(base, state=b"{}")
    else:
        other = attrs.evolve(base, position=base.position - 1)
    found = reported(replay(rows, base=other))
    assert ("INV-8", other.position, "the base was changed") == found[0]


def test_a_base_that_no_row_names():
    """A base without its event is found."""
    base, rows = cut_journal()
    place = next(n for n, row in enumerate(rows) if row.kind == ev.JournalPruned.kind)
    report = replay(rows[:place], base=base)
    assert [("INV-8", base.position, "no row says that the journal was pruned")] == reported(report)


def test_a_base_that_is_gone():
    """Rows that begin above row 1 without a base in place of the missing rows are found."""
    base, rows = cut_journal()
    found = reported(replay(rows))
    assert "INV-8" == found[0][0]
    assert "the base that the journal stood on is gone" == found[0][2]
    words = "the rows before it are gone, and no base is in their place"
    assert ("INV-8", base.position + 1, words) in found


def test_a_cut_of_a_cut():
    """The base moves on; the last event that names one counts."""
    base, rows = cut_journal()
    states = [state_of(base)]
    replay(rows, base=base, watch=lambda _, state: states.append(state))
    second = base_of(states[2], rows[1].hash)
    assert base.position + 2 == second.position
    report = replay(rows[2:], base=second)
    assert [("INV-8", second.position, "the base was changed")] == reported(report)


def test_part_of_a_cut_journal():
    """A replay that stops before the event does not report it as missing."""
    base, rows = cut_journal()
    assert [] == reported(replay(rows, base=base, until=base.position + 1))


def test_a_base_without_its_state():
    """An export may leave the state out: the base is still the one that the journal names."""
    whole, _ = cut_journal()
    without = attrs.evolve(whole, state=None)
    assert base.base_fault(without, pruning(whole)) is None
    with pytest.raises(ValueError, match="the state was left out"):
        state_of(without)
