"""An export is verified by a library call, as `ops verify` does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Clock, Ledger
from cairn.journal.replay import replay
from cairn.journal.rows.base import Base, base_of
from cairn.journal.rows.codec import GENESIS, Row
from cairn.journal.rows.export import Excerpt, to_line
from cairn.journal.rows.heads import BEGINNING, Head
from cairn.journal.rows.verification import Verification, consequences, verify_export
from tests.support.journals import BREAKABLE, broken, healthy, tampered

CUT = 8


def exported(path: Path, rows) -> Path:
    """An export of rows."""
    path.write_bytes(b"".join(map(to_line, rows)))
    return path


def test_a_healthy_export(tmp_path: Path):
    """No violations; a head that was saved earlier is found at its row."""
    rows = healthy()
    saved = Head(10, rows[9].hash)
    verification = verify_export(exported(tmp_path / "x.jsonl", rows), saved=[saved])
    assert () == verification.findings()
    assert (len(rows), head_of(rows[-1])) == (verification.rows, verification.head)
    assert (True, "present", True) == (
        verification.whole,
        verification.standing(saved),
        verification.vouched_for(saved),
    )
    assert "replaced" == verification.standing(Head(10, GENESIS))
    assert "missing" == verification.standing(Head(len(rows) + 1, GENESIS))


@pytest.mark.parametrize("invariant", BREAKABLE)
def test_a_violation_on_record(tmp_path: Path, invariant: str):
    """The violation has the bug id that the server recorded."""
    rows, bug_id = broken(invariant)
    (found,) = verify_export(exported(tmp_path / "x.jsonl", rows)).findings()
    assert (bug_id, invariant, True) == (found.bug_id, found.invariant, found.recorded)


def test_a_changed_row(tmp_path: Path):
    """It breaks the chain at its row; what follows is marked as a possible consequence."""
    first, *rest = verify_export(exported(tmp_path / "x.jsonl", tampered())).findings()
    assert ("INV-8", 4, False) == (first.invariant, first.position, first.recorded)
    assert {one.bug_id for one in rest} == consequences([first, *rest])


def test_an_export_without_private_contents(tmp_path: Path):
    """The chain is checked, and it is reported that the invariants were not."""
    rows = [attrs.evolve(row, private=None) for row in healthy()]
    verification = verify_export(exported(tmp_path / "x.jsonl", rows))
    assert () == verification.findings()
    assert not verification.whole
    assert verification.left_out


def test_a_file_that_is_no_export(tmp_path: Path):
    """The message names the line that is not a row."""
    path = tmp_path / "x.jsonl"
    path.write_text("hello\n")
    with pytest.raises(StoreError, match="line 1"):
        verify_export(path)


def test_it_needs_no_command_line():
    """The library calls load neither click nor rich."""
    code = (
        "import sys, cairn.journal.pruning, cairn.journal.stories\n"
        "import cairn.journal.rows.verification\n"
        "assert not {'click', 'rich', 'cairn.ops'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


PRUNED = ev.JournalPruned(
    cut=CUT,
    head=healthy()[CUT - 1].hash,
    rows=CUT,
    sessions=1,
    first_us=0,
    last_us=0,
    before_us=0,
    base_digest="",
)


def base_at(position: int) -> Base:
    """The base of the first rows of a healthy journal."""
    return base_of(replay(healthy(), until=position).state, healthy()[position - 1].hash)


def pruned() -> tuple[Base, list[Row]]:
    """A healthy journal without its first rows, with the event that says so."""
    base, report = base_at(CUT), replay(healthy())
    clock = Clock(new_id=lambda: "the prune", now_us=lambda: 2**60, version="0.0.test")
    ledger = Ledger(clock, state=report.state, head=report.head)
    outcome = ledger.propose([attrs.evolve(PRUNED, base_digest=base.digest)])
    return base, [*healthy()[CUT:], *outcome.rows]


def verified(rows: list[Row], **options: Any) -> Verification:
    """The verification of rows."""
    checked = Verification(may_be_excerpt=options.pop("may_be_excerpt", True), **options)
    for row in rows:
        checked.feed(row)
    return checked


def head_of(row: Row) -> Head:
    """The head when a row was the last one."""
    return Head(row.position, row.hash)


def facts(checked: Verification) -> list[tuple[int, str]]:
    """The findings: (row, message)."""
    return [(found.position, found.message) for found in checked.findings()]


def without_private(rows: list[Row]) -> list[Row]:
    """The rows without texts and token ids."""
    return [attrs.evolve(row, private=None) for row in rows]


def test_a_pruned_journal():
    """The base is checked against the event that names it; heads after that vouch for all."""
    base, rows = pruned()
    last, first, of_base = head_of(rows[-1]), head_of(rows[0]), Head(base.position, base.head)
    checked = verified(rows, base=base, saved=[last, first])
    assert ([], True, True) == (facts(checked), checked.whole, checked.vouched_for(last))
    assert checked.pruned is not None
    assert rows[-1].position == checked.pruned[0]
    for saved in (first, of_base):
        assert ("present", False) == (checked.standing(saved), checked.vouched_for(saved))
    assert ("pruned", False) == (checked.standing(BEGINNING), checked.vouched_for(BEGINNING))
    # A row after the base cannot have been pruned: it would have to be there.
    assert "missing" == checked.standing(Head(last.position + 1, last.hash))
    assert "present" == verified([], saved=[BEGINNING]).standing(BEGINNING)


@pytest.mark.parametrize("left_out", [False, True])
def test_a_base_that_is_not_the_one(left_out: bool):
    """Another base, and a base that no row names, break the chain, with or without contents."""
    base, rows = pruned()
    if left_out:
        base, rows = attrs.evolve(base, state=None), without_private(rows)
    changed = attrs.evolve(base, state_digest="0" * 64)
    for wrong, given in ((changed, rows), (base, rows[:-1])):
        first, *_ = verified(given, base=wrong).findings()
        assert ("INV-8", CUT) == (first.invariant, first.position)
    first, *_ = verified(rows[-1:]).findings()
    assert "INV-8" == first.invariant


def test_an_event_of_a_prune_that_was_changed():
    """It does not decode, so no row names the base."""
    base, rows = pruned()
    rows[-1] = attrs.evolve(rows[-1], public=b"no event")
    checked = verified(without_private(rows), base=attrs.evolve(base, state=None))
    assert checked.pruned is None
    assert (rows[-1].position, "the row was changed") in facts(checked)


def test_a_changed_row_without_private_contents():
    """The chain alone finds it."""
    rows = without_private(tampered())
    assert [(4, "the row was changed")] == facts(verified(rows))


def test_rows_of_one_session():
    """Their own hashes, their order, and that none is missing before one are checked."""
    mine = [row for row in healthy() if row.stream == "session/s1"]
    checked = verified(mine)
    assert (True, False, []) == (checked.excerpt, checked.whole, facts(checked))
    second, third = mine[1].position, mine[2].position
    words = "rows of session/s1 are missing before it"
    assert [(second, words)] == facts(verified(mine[1:]))
    assert [(third, words)] == facts(verified([mine[0], *mine[2:]]))
    assert (second, "rows are not in order") in facts(verified([mine[0], mine[2], *mine[1:]]))
    assert (1, "rows are missing before it") in facts(verified([mine[0], healthy()[0]]))
    changed = attrs.evolve(mine[1], public=mine[1].public.replace(b"openai", b"opened"))
    assert [(second, "the row was changed")] == facts(verified([mine[0], changed, *mine[2:]]))
    # A journal is no excerpt, so all that is before these rows is missing.
    assert "INV-8" == verified(mine, may_be_excerpt=False).findings()[0].invariant


def test_rows_of_one_session_of_a_pruned_journal():
    """The first line says how many rows were pruned, so those are not missing."""
    base, rows = pruned()
    mine = [row for row in rows if row.stream == "session/s1"]
    begins = Excerpt(stream="session/s1", seq=mine[0].seq - 1, base=base)
    checked = verified(mine, begins=begins)
    assert (True, []) == (checked.excerpt, facts(checked))
    fewer = attrs.evolve(begins, seq=mine[0].seq - 2)
    assert [mine[0].position] == [position for position, _ in facts(verified(mine, begins=fewer))]
    other = attrs.evolve(begins, stream="session/s2")
    assert "rows are missing before it" == facts(verified(mine, begins=other))[0][1]
