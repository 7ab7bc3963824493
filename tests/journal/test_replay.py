"""
Replaying a journal gives the state that it was written with, and finds what was changed in it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.replay import Finding, Replay, Report, replay
from cairn.journal.rows.codec import GENESIS, Row, decode, encode, row_hash
from cairn.journal.state import State
from tests.journal.model import TAPES, Driver, Talk, played, profile, tape


def conversation(answer: tuple[int, ...] = (50, 51, 52)) -> Driver:
    """Two turns of one session, and a turn of another."""
    driver = Driver(pool_slabs=3, blocks_kept=40)
    driver.start()
    hello, more = ("user", (10, 11, 12, 13, 14)), ("user", (15, 16))
    driver.serve(Talk(tenant="t1", group=None, name=None, parts=(hello,)), answer=answer)
    parts = (hello, ("assistant", answer), more)
    driver.serve(Talk(tenant="t1", group=None, name=None, parts=parts))
    driver.serve(Talk(tenant="t1", group="g1", name=None, parts=(more,)))
    return driver


ROWS = tuple(conversation().rows)


def forged(rows: tuple[Row, ...], place: int, change: Callable[[Any], ev.Event]) -> list[Row]:
    """The rows with one event replaced, and the chain over them recomputed."""
    made, head = [], GENESIS
    for index, row in enumerate(rows):
        recorded = decode(row)
        if index == place:
            event = change(recorded.event)
            recorded = attrs.evolve(recorded, event=event, stream=event.stream)
        made.append(encode(recorded, head))
        head = made[-1].hash
    return made


def place_of(kind: type[ev.Event], number: int = 0) -> int:
    """The places of the events of a kind."""
    return [n for n, row in enumerate(ROWS) if row.kind == kind.kind][number]


def broken_chain(report: Report) -> list[int]:
    """The rows at which the chain is broken."""
    return [f.position for f in report.findings if f.invariant == "INV-8"]


# --- intact journals ------------------------------------------------------------------------------


@profile(100)
@given(TAPES)
def test_replay_gives_the_very_state(data: bytes):
    """The fold of the stored rows equals the ledger's state; the only findings are crashes."""
    driver = played(data)
    report = replay(driver.rows)

    assert driver.state == report.state
    assert (len(driver.rows), driver.ledger.head) == (report.rows, report.head)
    assert driver.bugs == [finding.bug_id for finding in report.findings]
    for finding in report.findings:
        assert ("CRASH", True, False) == (finding.invariant, finding.recorded, finding.reproduced)


@profile(15)
@given(TAPES)
def test_a_state_of_the_past(data: bytes):
    """Replay up to a position gives the state that the ledger had there."""
    driver = played(data)
    for place in range(0, len(driver.rows), 1 + len(driver.rows) // 5):
        state = driver.states[place]
        if state.position == driver.rows[place].position:
            report = replay(driver.rows, until=state.position)
            assert state == report.state
            assert place + 1 == report.rows


def test_watching():
    """A watcher receives each event and the state after it, in order."""
    seen: list[tuple[int, int]] = []

    def watch(recorded: ev.Recorded, state: State) -> None:
        seen.append((recorded.position, state.position))

    replay(ROWS, watch=watch)
    assert [(n, n) for n in range(1, len(ROWS) + 1)] == seen


def test_an_empty_journal():
    """An empty journal has no rows, no findings and an empty state."""
    report = replay([])
    assert (0, GENESIS, ()) == (report.rows, report.head, report.findings)


def test_replay_does_not_depend_on_the_process():
    """
    Strings hash differently in every process; replay makes the same decisions all the same for a
    journal in which many requests ended at once.
    """
    script = (
        "import sys, pickle\n"
        "from cairn.journal.rows.codec import Row\n"
        "from cairn.journal.replay import replay\n"
        "rows = [Row(**fields) for fields in pickle.load(sys.stdin.buffer)]\n"
        "report = replay(rows)\n"
        "print(len(report.findings), sorted(report.state.parts.items()))\n"
    )
    driver = Driver(pool_slabs=9)
    driver.start()
    one = Talk(tenant="t1", group=None, name=None, parts=(("user", (10, 11)),))
    for _ in range(8):
        driver.ask(one)
    driver.end_run("lost")
    driver.start()
    driver.ask(Talk(tenant="t1", group=None, name=None, parts=(("user", (10, 11)), ("user", (9,)))))
    stored = pickle.dumps([attrs.asdict(row) for row in driver.rows])
    shown = set()
    for seed in ("1", "2", "3"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path("src").resolve()),
        }
        command = [sys.executable, "-P", "-c", script]
        done = subprocess.run(
            command, input=stored, env=environment, capture_output=True, check=True
        )
        shown.add(done.stdout)

    assert {f"0 {sorted(driver.state.parts.items())}\n".encode()} == shown


# --- damaged journals -----------------------------------------------------------------------------


COLUMNS: dict[str, Any] = {
    "position": 999,
    "stream": "session/other",
    "seq": 77,
    "event_id": "another",
    "kind": "slab_released",
    "version": 2,
    "time_us": 5,
    "public": b'{"nothing":1}',
    "private": b'{"sampled":[1],"logprobs":[-1.0]}',
    "private_digest": "0" * 64,
    "previous_hash": "f" * 64,
    "hash": "e" * 64,
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_changed_column(column: str):
    """
    INV-8 finds a change of any column of a row (a changed hash also at the next row), and the
    replay continues.
    """
    assert set(COLUMNS) == {field.name for field in attrs.fields(Row) if field.eq}
    place = place_of(ev.CacheExtended, 1)
    rows = list(ROWS)
    rows[place] = attrs.evolve(rows[place], **{column: COLUMNS[column]})
    report = replay(rows)

    expected = [rows[place].position]
    if column == "hash":
        expected.append(rows[place + 1].position)
    assert expected == broken_chain(report)
    assert len(ROWS) == report.rows


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("kind", "no such kind"),
        ("version", 0),
        ("version", -1),
        ("version", 10**12),
        ("position", -4),
        ("position", 2**70),
        ("seq", -1),
        ("time_us", -1),
        ("public", b""),
        ("public", b"\xff\xfe"),
        ("public", b"[]"),
        ("public", b"{"),
        ("private", b"[]"),
        ("private", b"\x00"),
    ],
)
def test_a_column_that_makes_no_sense(column: str, value: Any):
    """Damage that leaves no event at all is a finding like any other, and not a traceback."""
    place = place_of(ev.CacheExtended, 1)
    rows = list(ROWS)
    rows[place] = attrs.evolve(rows[place], **{column: value})
    report = replay(rows)

    assert rows[place].position == broken_chain(report)[0]
    assert len(ROWS) == report.rows


def test_every_byte_counts():
    """Any single flipped bit in the payloads of a row is found."""
    place = place_of(ev.CacheExtended, 1)
    for column in ("public", "private"):
        stored = getattr(ROWS[place], column)
        for at in range(len(stored)):
            rows = list(ROWS)
            turned: Any = bytes([*stored[:at], stored[at] ^ 1, *stored[at + 1 :]])
            rows[place] = attrs.evolve(rows[place], **{column: turned})
            assert [rows[place].position] == broken_chain(replay(rows))


def test_a_removed_row():
    """A removed row is found at the next one, in the chain and in the count."""
    place = place_of(ev.CacheExtended, 1)
    rows = [*ROWS[:place], *ROWS[place + 1 :]]
    report = replay(rows)

    assert [ROWS[place + 1].position] == broken_chain(report)
    assert "INV-6" in {finding.invariant for finding in report.findings}


def test_swapped_rows():
    """Two swapped rows break the chain at both, and after them."""
    place = place_of(ev.CacheExtended, 1)
    rows = list(ROWS)
    rows[place], rows[place + 1] = rows[place + 1], rows[place]
    positions = {rows[n].position for n in (place, place + 1, place + 2)}

    assert positions == set(broken_chain(replay(rows)))


def test_a_row_twice():
    """A duplicated row is found at its second place."""
    place = place_of(ev.TokensEmitted)
    rows = [*ROWS[: place + 1], *ROWS[place:]]

    assert [ROWS[place].position] == broken_chain(replay(rows))


def test_a_head_cut_off():
    """A journal that does not begin at row 1 is found at its first row."""
    assert [2] == broken_chain(replay(ROWS[1:]))


def test_a_rewritten_tail():
    """
    An attacker who can write to the database can recompute the chain from some row on. The chain
    then holds; only a head that was saved elsewhere shows the change. The same applies to removed
    last rows.
    """
    rows = forged(ROWS, 0, lambda event: attrs.evolve(event, cairn_version="0.0.0"))
    kept = ROWS[-1].hash
    report = replay(rows)

    assert [] == broken_chain(report)
    assert () == report.findings
    assert kept != report.head
    assert len(ROWS) == report.rows
    assert kept == replay(ROWS).head

    shortened = replay(ROWS[:-3])
    assert () == shortened.findings
    assert kept != shortened.head


def test_a_half_written_tail():
    """A chain that is recomputed, but not up to the end, is broken where that stops."""
    rows = forged(ROWS, 0, lambda event: attrs.evolve(event, cairn_version="0.0.0"))
    place = len(ROWS) - 4

    assert [ROWS[place].position] == broken_chain(replay([*rows[:place], *ROWS[place:]]))


def test_a_forgotten_payload_keeps_the_chain():
    """With the private part forgotten, the chain holds, but the event cannot be decoded."""
    place = place_of(ev.TokensEmitted)
    reader = Replay()
    for row in ROWS[:place]:
        reader.feed(row)
    before = reader.state
    with pytest.raises(DamagedRow) as caught:
        reader.feed(attrs.evolve(ROWS[place], private=None))

    assert ROWS[place].position == caught.value.position
    assert [] == broken_chain(reader.report())
    assert before == reader.state


def test_a_journal_of_a_newer_cairn():
    """A row of a later version whose chain holds is an error for the operator, not a finding."""
    recorded = decode(ROWS[0])
    newer = attrs.evolve(encode(recorded, GENESIS), version=9)
    with pytest.raises(UnknownEvent):
        replay([attrs.evolve(newer, hash=row_hash(newer))])


# --- unrecorded violations ------------------------------------------------------------------------


FORGERIES: dict[str, tuple[int, Callable[[Any], ev.Event]]] = {
    "INV-1": (
        place_of(ev.CacheExtended, 1),
        lambda e: attrs.evolve(e, coverage=((3, 0, e.end - 1),)),
    ),
    "INV-2": (
        place_of(ev.CacheExtended, 1),
        lambda e: attrs.evolve(e, coverage=((3, 1, e.end),)),
    ),
    "INV-3": (place_of(ev.BlockSealed), lambda e: attrs.evolve(e, key="k" * 64)),
    "INV-4": (
        place_of(ev.PathSelected, 1),
        lambda e: attrs.evolve(e, path="new_session", reason="cold_start"),
    ),
    "INV-5": (place_of(ev.SlabAcquired), lambda e: attrs.evolve(e, pool_bytes=0)),
    "INV-6": (
        place_of(ev.CacheTrimmed),
        lambda e: ev.SessionClosed(session=e.session, reason="-"),
    ),
    "INV-7": (place_of(ev.TokensEmitted), lambda e: attrs.evolve(e, ids=(99,))),
}


@pytest.mark.parametrize("invariant", FORGERIES)
def test_an_unrecorded_violation(invariant: str):
    """
    A writer without checks left a violation, with a chain that holds. Replay finds it, always with
    the same bug id, and continues without the session.
    """
    place, change = FORGERIES[invariant]
    rows = forged(ROWS, place, change)
    first, again = replay(rows), replay(rows)

    finding = first.findings[0]
    assert first.findings == again.findings
    assert (invariant, rows[place].position) == (finding.invariant, finding.position)
    assert (False, True) == (finding.recorded, finding.reproduced)
    assert len(rows) == first.rows
    assert [finding] == [other for other in first.findings if other.session == finding.session]
    assert [finding] == list(replay(rows[: place + 1]).findings)


def test_two_forgeries_have_two_bug_ids():
    """The bug id of an unrecorded violation follows from its row."""
    ids = {replay(forged(ROWS, *FORGERIES[name])).findings[0].bug_id for name in FORGERIES}

    assert len(FORGERIES) == len(ids)


def test_a_forged_record_of_a_violation():
    """A recorded violation that replay cannot confirm is reported as not reproduced."""
    driver = conversation()
    before = len(driver.rows)
    driver.take(
        driver.ledger.propose(
            [
                ev.InvariantViolated(
                    bug_id="made up",
                    invariant="INV-1",
                    at_position=before,
                    session=None,
                    of_session=None,
                    request=None,
                    fingerprint=None,
                    cairn_version="0",
                    message="nothing broke",
                    expected="-",
                    actual="-",
                    trace="-",
                )
            ]
        )
    )
    (finding,) = replay(driver.rows).findings

    assert ("made up", True, False) == (finding.bug_id, finding.recorded, finding.reproduced)


def test_a_violation_recorded_as_another():
    """If the record names a different invariant than the one that breaks, both are reported."""
    driver = conversation()
    recorded = driver.recorded[place_of(ev.CacheTrimmed)]
    rows = forged(ROWS, place_of(ev.CacheTrimmed), FORGERIES["INV-6"][1])[: recorded.position]
    violated = ev.Recorded(
        position=recorded.position + 1,
        stream="session/s1",
        seq=recorded.seq + 1,
        event_id="-",
        time_us=0,
        event=ev.InvariantViolated(
            bug_id="another",
            invariant="INV-7",
            at_position=recorded.position,
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
    )
    findings = replay([*rows, encode(violated, rows[-1].hash)]).findings

    def shown(finding: Finding) -> tuple[str, bool, bool]:
        return finding.invariant, finding.recorded, finding.reproduced

    assert {("INV-6", False, True), ("INV-7", True, False)} == {shown(f) for f in findings}


@profile(20)
@given(TAPES)
def test_any_row_out_of_its_place_is_found(data: bytes):
    """In any history, a row in a stream that is not its event's is a violation of INV-6."""
    driver = played(data)
    for place in range(0, len(driver.rows), 17):
        recorded = driver.recorded[place]
        moved = attrs.evolve(recorded, stream="session/elsewhere", seq=1)
        head = driver.rows[place].previous_hash
        report = replay([*driver.rows[:place], encode(moved, head)])
        assert ("INV-6", recorded.position) == (
            report.findings[-1].invariant,
            report.findings[-1].position,
        )


def test_tapes_are_the_same_everywhere():
    """The histories do not differ from run to run: this one always has the same head."""
    assert played(tape(1, 300)).ledger.head == played(tape(1, 300)).ledger.head


def test_an_event_that_does_not_fit():
    """
    An event that passes all checks but cannot be folded is a finding, and not an error of replay.
    """
    place = place_of(ev.TokensEmitted)
    unknown = ev.BlocksQuarantined(session=None, bug_id="b", keys=("never sealed",))
    rows = list(ROWS[:place])
    recorded = decode(ROWS[place])
    seq = 1 + sum(row.stream == "server" for row in rows)
    forged_row = encode(
        attrs.evolve(recorded, event=unknown, stream="server", seq=seq), rows[-1].hash
    )
    (found,) = replay([*rows, forged_row]).findings
    assert ("INV-6", recorded.position) == (found.invariant, found.position)
    assert "an event that does not fit" == found.message
