"""Snapshots of the fold: what they hold, and what a fold that goes on from one gives."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.replay import Replay
from cairn.journal.rows import snapshots
from cairn.journal.rows.base import Base
from cairn.journal.rows.codec import Row
from cairn.journal.rows.snapshots import Folds, Place, Snapshot, pieces, snapshot_of, unusable
from cairn.journal.state import EMPTY, Block, State
from tests.journal.test_agents import created
from tests.journal.test_histories import EXPECTED, base_of_history, rows_of
from tests.journal.test_turns import finished, kept, recorded, violated
from tests.support import journals

FEW = 3
"""Entries in a piece, so that the maps of a short history take several."""


def _is_sound(rows: list[Row], base: Base | None) -> bool:
    """Whether a server would go on with these rows."""
    fold = Replay(base)
    for row in rows:
        fold.feed(row)
    return all(found.recorded for found in fold.report().findings)


SOUND = [name for name in EXPECTED if _is_sound(rows_of(name), base_of_history(name))]


def _snapshots(rows: list[Row], base: Base | None) -> Iterator[Snapshot]:
    """The snapshot after each row, except after one that a violation must follow."""
    fold, folds = Replay(base), Folds()
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        recorded = fold.feed(row)
        assert recorded is not None
        folds.see(recorded)
        if after is None or after.kind != ev.InvariantViolated.kind:
            yield folds.snapshot(fold.state, row.hash)


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of few entries."""
    monkeypatch.setattr(snapshots, "PIECE_ENTRIES", FEW)


def test_most_histories_are_sound():
    """The tests below would prove little over a handful of histories."""
    assert len(SOUND) >= 20
    assert "pruned" in SOUND


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("name", SOUND)
def test_a_decoded_snapshot_is_the_one_that_was_encoded(name: str):
    """After each row of each sound history, nothing of any fold is lost."""
    for snapshot in _snapshots(rows_of(name), base_of_history(name)):
        assert snapshot == snapshot_of(pieces(snapshot))


@pytest.mark.parametrize("name", SOUND)
def test_a_fold_goes_on_from_a_snapshot(name: str):
    """From a snapshot on, the rest of the rows gives the state and findings that all rows give."""
    rows, base = rows_of(name), base_of_history(name)
    whole, whole_folds = Replay(base), Folds()
    for row in rows:
        recorded = whole.feed(row)
        assert recorded is not None
        whole_folds.see(recorded)
    report = whole.report()
    expected = whole_folds.snapshot(report.state, report.head)
    begins_at = base.position if base is not None else 0
    for snapshot in islice(_snapshots(rows, base), 0, None, 7):
        decoded = snapshot_of(pieces(snapshot))
        fold, folds = Replay(base, decoded), Folds(decoded)
        for row in rows[decoded.place.position - begins_at :]:
            recorded = fold.feed(row)
            assert recorded is not None
            folds.see(recorded)
        ended = fold.report(whole=decoded.pruned is not None or base is None)
        assert (report.head, expected) == (ended.head, folds.snapshot(ended.state, ended.head))
        late = [one for one in report.findings if one.position > decoded.place.position]
        assert late == [one for one in ended.findings if one.position > decoded.place.position]


def test_a_fold_that_goes_on_still_finds_what_breaks():
    """A row after the snapshot that was changed is found; so is a base that was."""
    rows = journals.healthy()
    *_, last = islice(_snapshots(rows, None), len(rows) // 2)
    after = rows[last.place.position]
    fold = Replay(None, last)
    fold.feed(attrs.evolve(after, public=after.public + b" "))
    assert "INV-8" in {found.invariant for found in fold.report().findings}
    base = base_of_history("pruned")
    assert base is not None
    *_, pruned = _snapshots(rows_of("pruned"), base)
    assert () == Replay(base, pruned).report().findings
    assert base.state is not None
    changed = attrs.evolve(base, state=base.state + b" ")
    assert ["INV-8"] == [one.invariant for one in Replay(changed, pruned).report().findings]


def test_every_map_takes_as_many_pieces_as_it_needs():
    """No piece has more entries than the bound, and one of an empty map is there."""
    block = Block(key="", parent=None, digest="d", start=0, tokens=1, bytes=1, present=False)
    count = 2 * snapshots.PIECE_ENTRIES + 1
    state = EMPTY
    for number in range(count):
        key = str(number)
        state = attrs.evolve(state, blocks=state.blocks.set(key, attrs.evolve(block, key=key)))
    snapshot = Folds().snapshot(state, "h")
    labels = [piece.partition(b"\n")[0] for piece in pieces(snapshot)]
    assert 3 == labels.count(b"state.blocks")
    assert 1 == labels.count(b"state.uses")
    assert snapshot == snapshot_of(pieces(snapshot))


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(State)])
def test_a_snapshot_without_a_field_is_refused(field: str):
    """Also one whose field has a default, so that nothing is filled in."""
    found = [
        piece
        for piece in pieces(Folds().snapshot(EMPTY, "h"))
        if not piece.startswith(f"state.{field}\n".encode())
    ]
    with pytest.raises(ValueError, match=rf"state\.{field} is missing"):
        snapshot_of(found)


@pytest.mark.parametrize(
    "piece",
    [
        b"",
        b"state.other\n\x00",
        b"state.position\nno number",
        b"state.blocks\n\x81\xa1a\x80",
        pickle.dumps(print),
    ],
)
def test_other_bytes_are_refused(piece: bytes):
    """Bytes that are no piece of a snapshot are a ValueError, whatever they are."""
    with pytest.raises(ValueError, match=r"state|part"):
        snapshot_of([piece])


def test_a_snapshot_is_used_only_for_the_journal_that_it_is_of():
    """The base, the position, the row's own hash and its contents have to be those of the row."""
    row = journals.healthy()[4]
    place = Place(position=row.position, head=row.hash, base_digest=None)
    assert unusable(place, None, row) is None
    assert unusable(attrs.evolve(place, base_digest="b"), "b", row) is None
    for said, due, found in (
        (place, "b", row),
        (attrs.evolve(place, base_digest="b"), None, row),
        (place, None, None),
        (attrs.evolve(place, head="0" * 64), None, row),
        (place, None, attrs.evolve(row, public=row.public + b" ")),
        (place, None, attrs.evolve(row, time_us=row.time_us + 1)),
    ):
        assert unusable(said, due, found) is not None


BESIDE: tuple[ev.Event, ...] = (
    ev.ServerStarted(boot="b1", cairn_version="0", settings={}),
    created(),
    *(kept("r1", agent="notes", texts={"system": "Be brief."}), finished("r1")),
    *(kept("r2", "r1", agent="notes", texts_at={"system": 3}), finished("r2")),
    violated(6, "r2"),
    created("other", head="r1"),
    *(kept("r3"), finished("r3")),
    ev.TurnForgotten(of_request="r3", tenant="t1"),
    *(kept("r4", session="s2", texts={"system": "Be brief."}), finished("r4")),
    kept("r5", "r1", agent="notes", texts={"system": "Be long."}),
    ev.SessionClosed(session="s2", reason="asked to"),
    ev.ServerStopped(boot="b1", reason="asked to"),
)
"""Turns and agents in each state that they can be in."""


def test_the_folds_beside_the_state_go_on_too():
    """From each row on, turns, agents and runs go on from a snapshot as from the beginning."""
    rows = [recorded(position, event) for position, event in enumerate(BESIDE, 1)]
    whole = Folds()
    taken = []
    for row in rows:
        whole.see(row)
        taken.append(whole.snapshot(attrs.evolve(EMPTY, position=row.position), "h"))
    for snapshot in taken:
        decoded = snapshot_of(pieces(snapshot))
        assert snapshot == decoded
        folds = Folds(decoded)
        for row in rows[snapshot.place.position :]:
            folds.see(row)
            assert taken[row.position - 1] == folds.snapshot(
                attrs.evolve(EMPTY, position=row.position), "h"
            )


def test_a_snapshot_stays_as_it_was():
    """Folds that go on change no snapshot that was made of them."""
    folds = Folds()
    for position, event in enumerate(BESIDE[:5], 1):
        folds.see(recorded(position, event))
    snapshot = folds.snapshot(EMPTY, "h")
    before = snapshot_of(pieces(snapshot))
    for position, event in enumerate(BESIDE[5:], 6):
        folds.see(recorded(position, event))
    assert before == snapshot
