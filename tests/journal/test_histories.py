"""
Recorded histories, replayed for ever: what was journaled once is read in the same way today.

``tools/record_histories.py`` records them. One that is here is not recorded anew because a test
fails: either the change breaks journals that people have, or it raises a version, and the code of
the version before stays.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.journal.base import Base, loaded_of, state_of
from cairn.journal.codec import Row, decode
from cairn.journal.export import read_base, read_export
from cairn.journal.invariants import SENTENCES
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.ops.drills import DRILLS
from cairn.ops.journal.verify import Verification

HISTORIES = Path(__file__).resolve().parents[1] / "histories"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads(
    (HISTORIES / "expected.json").read_text("utf-8")
)
BYTES_MAX = 150_000

HEALTHY: dict[str, set[tuple[str | None, ...]]] = {
    "continuation": {("path_selected", "continuation", None)},
    "diverged": {("path_selected", "new_session", "diverged")},
    "shorter-history": {
        ("path_selected", "new_session", "shorter_history"),
        ("path_selected", "new_session", "cache_disabled"),
    },
    "shared-blocks": {("blocks_restored",)},
    "copied-in-parts": {("blocks_restored",)},
    "evicted": {
        ("block_evicted",),
        ("slab_released", "room for another session"),
        ("path_selected", "new_session", "evicted"),
    },
    "windowed": {
        ("cache_trimmed", "the window has moved on from what is canonical"),
        ("path_selected", "continuation", None),
    },
    "cancelled": {("request_cancelled", "decode")},
    "killed": {("server_lost",)},
    "stopped": {("server_stopped", "asked to")},
    "anticipated": {
        ("prewarm_started",),
        ("prewarm_finished",),
        ("prewarm_abandoned", "request"),
    },
    "call-rejected": {("call_rejected", "truncated")},
    "pruned": {
        ("journal_pruned",),
        ("session_closed", "retention"),
        ("path_selected", "new_session", "diverged"),
    },
    "quarantined": {
        ("session_quarantined",),
        ("path_selected", "new_session", "quarantined"),
    },
}
"""
What each healthy conversation is kept for: events that are in it, with their ways and reasons.
"""


def rows_of(name: str) -> list[Row]:
    """The rows of a history."""
    return list(read_export(HISTORIES / f"{name}.jsonl"))


def base_of_history(name: str) -> Base | None:
    """What the rows of a history stand on, where it was pruned."""
    return read_base(HISTORIES / f"{name}.jsonl")


def test_each_history_is_expected_to_come_to_something():
    """Files and expectations are for the same names: all drills, and all healthy conversations."""
    files = {path.stem for path in HISTORIES.glob("*.jsonl")}
    assert files == set(EXPECTED)
    assert files == {*DRILLS, *HEALTHY}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_history_is_read_as_ever(name: str):
    """The same invariants break at the same rows, on record or not, and again or not."""
    found = [
        {
            "invariant": one.invariant,
            "row": one.position,
            "recorded": one.recorded,
            "reproduced": one.reproduced,
        }
        for one in replay(rows_of(name), base=base_of_history(name)).findings
    ]
    assert EXPECTED[name] == found


@pytest.mark.parametrize("name", DRILLS)
def test_the_history_of_a_drill_breaks_its_invariant(name: str):
    """
    What a drill damaged is found in its journal; but a forged end by a head that was kept, and a
    damaged file is no bug, and on record by an event of its own.
    """
    broken = {one["invariant"] for one in EXPECTED[name]}
    if name == "tail-rewritten":
        assert set() == broken
    elif DRILLS[name].invariant == "WORLD":
        assert set() == broken
        assert "block_file_rejected" in {row.kind for row in rows_of(name)}
    else:
        assert DRILLS[name].invariant in broken


def test_each_invariant_breaks_in_a_history():
    """None of the checks has become one that holds whatever happens."""
    broken = {one["invariant"] for found in EXPECTED.values() for one in found}
    assert {*SENTENCES, "CRASH"} == broken


@pytest.mark.parametrize("name", HEALTHY)
def test_a_conversation_has_what_it_is_kept_for(name: str):
    """The way that a history is named after is really in it."""
    seen: set[tuple[str | None, ...]] = set()
    for row in rows_of(name):
        event: Any = decode(row).event
        seen.add((row.kind,))
        for field in ("stage", "reason"):
            if hasattr(event, field) and not hasattr(event, "path"):
                seen.add((row.kind, getattr(event, field)))
        if hasattr(event, "path"):
            seen.add((row.kind, event.path, event.reason))
    assert HEALTHY[name] <= seen


def test_a_base_is_read_as_ever():
    """
    What a base kept is understood to the last field, whatever versions came after it: the rows that
    it stands for are gone, so nothing else could tell.
    """
    base = base_of_history("pruned")
    assert base is not None
    state, loaded = state_of(base), loaded_of(base)
    (session,) = state.sessions.values()
    assert loaded is not None
    assert state.model is not None
    assert loaded.fingerprint == state.model.fingerprint == session.fingerprint
    assert (SessionState.IDLE, True) == (session.state, session.slab is not None)
    assert session.last is not None
    assert 64 == len(session.last.prompt_ids)
    assert state.pool.blocks == sum(block.present for block in state.blocks.values()) > 0
    # What is recorded of a later version has a name of its own, beside this one.
    assert 1 == json.loads(base.state or b"{}")["version"]


def test_a_forged_end_is_found_by_the_head_that_was_kept():
    """
    The chain of a rewritten end holds, and only its last rows are others; a head from before it is
    not in it, while one from before the first of them is.
    """
    before, forged = rows_of("stopped"), rows_of("tail-rewritten")
    first = next(place for place, row in enumerate(forged) if row != before[place])
    assert 0 < first < len(before) == len(forged)
    for kept, place in ((before[first - 1].hash, first), (before[-1].hash, None)):
        checked = Verification(may_be_excerpt=True, kept=kept)
        for row in forged:
            checked.feed(row)
        assert [] == list(checked.findings())
        assert place == checked.kept_at


@pytest.mark.parametrize("path", sorted(HISTORIES.iterdir()), ids=lambda path: path.name)
def test_a_history_is_small_and_knows_no_machine(path: Path):
    """No directory of the machine that recorded it, and few enough rows to be kept."""
    text = path.read_text("utf-8")
    assert len(text) < BYTES_MAX
    assert [] == [word for word in ("/work", "/root", "/home", "/tmp", "/Users") if word in text]
