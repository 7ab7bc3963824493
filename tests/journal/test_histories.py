"""
Recorded histories are read in the same way as when they were journaled.

``tools/record_histories.py`` records them. From 0.1.0 on a history is not recorded again because a
test fails: the change would break journals of users, so it must raise a version and add an upcast.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cairn.journal import events as ev
from cairn.journal.invariants import SENTENCES
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.rows.base import Base, loaded_of, state_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.export import read_base, read_export
from cairn.journal.rows.heads import Head
from cairn.journal.rows.verification import Verification
from cairn.ops.drills.table import DRILLS

HISTORIES = Path(__file__).resolve().parents[1] / "histories"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads(
    (HISTORIES / "expected.json").read_text("utf-8")
)
BYTES_MAX = 160_000
EVERY_KIND = "every-kind"
EVERY_KIND_BYTES_MAX = 450_000

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
    "prewarmed": {
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
What each healthy conversation is kept for: events in it, with their paths and reasons.
"""


def rows_of(name: str) -> list[Row]:
    """The rows of a history."""
    return list(read_export(HISTORIES / f"{name}.jsonl"))


def base_of_history(name: str) -> Base | None:
    """The base before the rows of a history, if it was pruned."""
    return read_base(HISTORIES / f"{name}.jsonl")


def test_every_history_has_an_expectation():
    """Files and expectations have the same names: all drills and all healthy conversations."""
    files = {path.stem for path in HISTORIES.glob("*.jsonl")}
    assert files == set(EXPECTED)
    assert files == {*DRILLS, *HEALTHY, EVERY_KIND}


def changed(folder: Path) -> list[str]:
    """The histories of released versions that are missing or have other bytes."""
    lines = (folder / "SHA256SUMS").read_text("utf-8").splitlines()
    return [
        name
        for digest, name in map(str.split, lines)
        if not (folder / name).exists()
        or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]


def test_histories_of_released_versions_do_not_change():
    """A later version reads the same bytes. None is listed before the first release."""
    assert [] == changed(HISTORIES)


def test_control_a_changed_history_is_found(tmp_path: Path):
    """The control: one that is the same, one with another byte, and one that is gone."""
    digest = hashlib.sha256(b"a row").hexdigest()
    names = ("same.jsonl", "other.jsonl", "gone.jsonl")
    (tmp_path / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name in names))
    (tmp_path / "same.jsonl").write_bytes(b"a row")
    (tmp_path / "other.jsonl").write_bytes(b"a Row")
    assert ["other.jsonl", "gone.jsonl"] == changed(tmp_path)


def test_every_kind_of_event_is_in_a_history():
    """A later version that no longer reads one of them fails here."""
    seen = {row.kind for name in EXPECTED for row in rows_of(name)}
    # The servers of these histories seal no texts, so they forget none.
    assert {kind.kind for kind in ev.ALL_EVENTS} - seen == {"session_forgotten"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_history_replays_as_expected(name: str):
    """The same invariants break at the same rows, on record or not, reproduced or not."""
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
    Replay finds what a drill damaged. Two exceptions: a forged end is found only by a saved head,
    and a damaged file is not a bug but an event.
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
    """No check has become one that always holds."""
    broken = {one["invariant"] for found in EXPECTED.values() for one in found}
    assert {*SENTENCES, "CRASH"} == broken


@pytest.mark.parametrize("name", HEALTHY)
def test_a_history_has_the_events_that_it_was_recorded_for(name: str):
    """The events that a history is named after are in it."""
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


def test_a_recorded_base_is_read():
    """Every field of a base is read, because the rows that it replaces are gone."""
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
    # A history of a later version gets a name of its own, next to this one.
    assert 1 == json.loads(base.state or b"{}")["version"]


def test_a_forged_end_is_found_by_a_saved_head():
    """
    The chain of a rewritten end holds, and only its last rows differ. It does not contain a head
    that was saved at its old end; it contains one from before the first row that differs.
    """
    before, forged = rows_of("stopped"), rows_of("tail-rewritten")
    first = next(place for place, row in enumerate(forged) if row != before[place])
    assert 0 < first < len(before) == len(forged)
    earlier, last = (Head(before[at].position, before[at].hash) for at in (first - 1, -1))
    checked = Verification(may_be_excerpt=True, saved=(earlier, last))
    for row in forged:
        checked.feed(row)
    assert [] == list(checked.findings())
    assert ("present", "replaced") == (checked.standing(earlier), checked.standing(last))


@pytest.mark.parametrize("path", sorted(HISTORIES.iterdir()), ids=lambda path: path.name)
def test_a_history_is_small_and_has_no_local_path(path: Path):
    """It has few rows, and no directory of the machine that recorded it."""
    text = path.read_text("utf-8")
    assert len(text) < (EVERY_KIND_BYTES_MAX if path.stem == EVERY_KIND else BYTES_MAX)
    assert [] == [word for word in ("/work", "/root", "/home", "/tmp", "/Users") if word in text]
