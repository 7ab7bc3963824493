"""An export is verified by a library call, as `ops verify` does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from cairn.journal.errors import StoreError
from cairn.journal.export import to_line
from cairn.journal.verification import consequences, verify_export
from tests.support.journals import BREAKABLE, broken, healthy, tampered


def exported(path: Path, rows) -> Path:
    """An export of rows."""
    path.write_bytes(b"".join(map(to_line, rows)))
    return path


def test_a_healthy_export(tmp_path: Path):
    """No violations; a head that was saved earlier is found at its row."""
    rows = healthy()
    verification = verify_export(exported(tmp_path / "x.jsonl", rows), saved_head=rows[9].hash)
    assert () == verification.findings()
    assert (len(rows), rows[-1].hash) == (verification.rows, verification.head)
    assert (True, 10, True) == (
        verification.whole,
        verification.saved_at,
        verification.vouched_for,
    )


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
    """The line that is no row is named."""
    path = tmp_path / "x.jsonl"
    path.write_text("hello\n")
    with pytest.raises(StoreError, match="line 1"):
        verify_export(path)


def test_it_needs_no_command_line():
    """The library call loads neither click nor rich."""
    code = (
        "import sys, cairn.journal.verification\n"
        "assert not {'click', 'rich', 'cairn.ops'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
