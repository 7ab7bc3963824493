"""The stories of a session's requests and of a bug, by the rows of a journal."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.replay import Finding, replay
from cairn.journal.retention import NeededIds
from cairn.journal.rows.base import base_of, forgotten
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.export import read_export
from cairn.journal.stories import (
    RequestStory,
    bug_story,
    findings_of,
    pruned_names,
    request_stories,
)
from tests.support.journals import (
    FINGERPRINT,
    Builder,
    aged,
    broken,
    conversation,
    healthy,
    in_mid_request,
    tampered,
    unrecorded,
)

KILLED = Path(__file__).parents[1] / "histories" / "killed.jsonl"


def stories(rows: list[Row], session: str = "s1") -> list[RequestStory]:
    """The stories of a session's requests."""
    mine = [row for row in rows if row.stream == f"session/{session}"]
    return request_stories(mine, replay(rows).state)


def finding(rows: list[Row], bug_id: str | None = None) -> Finding:
    """The finding with a bug id, else the only one."""
    found = replay(rows).findings
    return next(one for one in found if bug_id in (None, one.bug_id))


def test_requests():
    """What each request reused, computed and generated, and how it ended."""
    first, second = stories(healthy())
    assert first == RequestStory(
        request="r1",
        position=4,
        path="new_session",
        reason="cold_start",
        prompt=10,
        prefilled=10,
        generated=3,
        sealed_blocks=2,
        end="stop",
    )
    assert second == RequestStory(
        request="r2",
        position=18,
        path="continuation",
        prompt=18,
        from_slab=8,
        reused=8,
        prefilled=10,
        generated=2,
        sealed_blocks=2,
        end="stop",
    )


def test_a_request_in_progress():
    """It is open while the state has it, and lost when its server is."""
    made = in_mid_request()
    assert ["stop", "open"] == [one.end for one in stories(made.rows)]
    made.propose(ev.ServerLost(boot="boot-1"))
    assert ["stop", "lost"] == [one.end for one in stories(made.rows)]


def test_a_request_that_was_lost():
    """The same in a recorded history."""
    rows = list(read_export(KILLED))
    (session,) = {row.stream for row in rows} - {"server"}
    assert ["length", "lost", "stop"] == [
        one.end for one in stories(rows, session.removeprefix("session/"))
    ]


def test_a_cancelled_request():
    """Its end says at which stage."""
    made = in_mid_request()
    made.propose(ev.RequestCancelled(session="s1", request="r2", stage="decode"))
    assert "cancelled (decode)" == stories(made.rows)[-1].end


@pytest.mark.parametrize(("invariant", "end"), [("INV-4", "INV-4"), ("CRASH", "stop")])
def test_a_request_that_broke(invariant: str, end: str):
    """A violation ends a request in progress, and changes nothing about a finished one."""
    rows, _ = broken(invariant)
    assert end == stories(rows)[-1].end


def test_a_damaged_row():
    """It is skipped, because it is a finding. Its request has no path then."""
    rows = healthy()
    at = next(n for n, row in enumerate(rows) if row.kind == "path_selected")
    rows[at] = attrs.evolve(rows[at], public=b"no event")
    first, second = stories(rows)
    assert ("", "continuation") == (first.path, second.path)


def test_violations_of_a_session():
    """Its own, and unrecorded ones of no session up to its last row."""
    rows, bug_id = broken("INV-4")
    report = replay(rows)
    assert [bug_id] == [found.bug_id for found in findings_of(report, "s1", len(rows))]
    assert [] == findings_of(report, "s2", len(rows))
    changed = tampered()
    report = replay(changed)
    (one,) = report.findings
    assert [one] == findings_of(report, "s1", one.position)
    assert [] == findings_of(report, "s1", one.position - 1)


def test_a_bug_on_record():
    """The rows of its stream up to the one that broke, and the event that recorded it."""
    rows, bug_id = broken("INV-7")
    found = finding(rows, bug_id)
    story = bug_story(rows, found)
    assert rows[found.position - 1] == story.rows[-1]
    assert {"session/s1"} == {row.stream for row in story.rows}
    assert 12 == len(story.rows)
    assert story.violated is not None
    assert (bug_id, FINGERPRINT) == (story.violated.bug_id, story.fingerprint)


def test_a_bug_that_is_not_on_record():
    """The model is the one that was loaded at that row. A row of no session has all before it."""
    for rows in (unrecorded("INV-4"), tampered()):
        story = bug_story(rows, finding(rows))
        assert (None, FINGERPRINT) == (story.violated, story.fingerprint)
    assert tampered()[:4] == list(story.rows)


def test_another_bug_and_another_model():
    """Bugs of other rows, and models that are loaded later, do not belong to the story."""
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22))
    made.turn("s2", "r2", ["Other"], range(31, 41), (21, 22))
    made.crash("s1")
    first = made.bug
    made.crash("s2")
    second = made.bug
    assert first is not None
    assert second is not None
    story = bug_story(made.rows, finding(made.rows, second.bug_id))
    assert story.violated is not None
    assert second.bug_id == story.violated.bug_id
    changed = conversation().rows
    changed[1] = attrs.evolve(changed[1], public=b"no event")
    assert bug_story(changed, finding(changed)).fingerprint is None
    early = attrs.evolve(finding(made.rows, first.bug_id), bug_id="unknown", position=1)
    story = bug_story(made.rows, early)
    assert (None, None, 0) == (story.violated, story.fingerprint, len(story.rows))


def test_a_bug_after_a_base():
    """The base has the model. If it is damaged, that is a finding of its own."""
    rows, bug_id = broken("INV-7")
    cut = 10
    base = base_of(forgotten(replay(rows, until=cut).state, NeededIds()), rows[cut - 1].hash)
    found = attrs.evolve(finding(rows, bug_id), bug_id="unknown")
    assert FINGERPRINT == bug_story(rows[cut:], found, base).fingerprint
    damaged = attrs.evolve(base, state=b"{}")
    assert bug_story(rows[cut:], found, damaged).fingerprint is None
    none = base_of(replay(rows, until=1).state, rows[0].hash)
    assert bug_story(rows[cut:], found, none).fingerprint is None


def test_what_was_pruned():
    """Sessions and bugs without a row that is left, and none if no base or a damaged one is."""
    rows, bug_id = broken("INV-7")
    state = replay(rows).state
    base = base_of(forgotten(state, NeededIds()), rows[-1].hash)
    report = replay([], base=base)
    assert {"s1": "Session", bug_id: "Bug"} == pruned_names(report, base)
    assert {} == pruned_names(replay(rows), None)
    damaged = attrs.evolve(base, state=b"{}")
    assert {} == pruned_names(replay([], base=damaged), damaged)


def test_a_session_that_goes_on_after_the_cut():
    """It is not pruned, unlike one of which only the row is left that closed it."""
    rows = aged()
    cut = next(n for n, row in enumerate(rows, start=1) if row.kind == "server_stopped")
    base = base_of(replay(rows, until=cut).state, rows[cut - 1].hash)
    made = Builder()
    made.start()
    assert {"s1": "Session", "s2": "Session"} == pruned_names(replay(rows[cut:], base=base), base)
    middle = next(n for n, row in enumerate(rows, start=1) if row.kind == "session_settled")
    before = base_of(replay(rows, until=middle - 3).state, rows[middle - 4].hash)
    assert {} == pruned_names(replay(rows[middle - 3 :], base=before), before)
    assert decode(rows[middle - 1]).stream == "session/s1"
