"""
docs/journal-format.md says all that an auditor needs: its two verifiers, which use none of Cairn's
code, agree with Cairn on every history and on exports, and find what was changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import attrs
import pytest

from cairn.journal.errors import JournalError
from cairn.journal.rows.base import Base
from cairn.journal.rows.codec import GENESIS, Row, row_hash
from cairn.journal.rows.export import (
    Excerpt,
    SignedEnd,
    base_to_line,
    checkpoint_to_line,
    excerpt_to_line,
    read_base,
    read_excerpt,
    read_export,
    to_line,
)
from cairn.journal.rows.heads import Head
from cairn.journal.rows.signed_notes import Signer
from cairn.journal.rows.verification import Verification
from tests.support.journals import healthy

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "journal-format.md"
FOLDER = ROOT / "docs" / "journal-format"
HISTORIES = sorted((ROOT / "tests" / "histories").glob("*.jsonl"))
SIGNER = Signer(bytes(range(32)))

Verifier = Callable[..., tuple[int, str]]
"""Called with a path and further arguments; returns exit code and output."""


def _python() -> ModuleType:
    spec = importlib.util.spec_from_file_location("journal_format_verify", FOLDER / "verify.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PYTHON = _python()


@pytest.fixture
def python(capsys: pytest.CaptureFixture[str]) -> Verifier:
    """The verifier in Python."""

    def verify(path: Path, *more: object) -> tuple[int, str]:
        code: int = PYTHON.main(str(path), *map(str, more))
        return code, capsys.readouterr().out

    return verify


@pytest.fixture(scope="module")
def rust(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """The verifier in Rust."""
    compiler = shutil.which("rustc")
    if (
        compiler is not None
        and subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode
    ):
        compiler = None  # a manager of compilers that has none
    if compiler is None:
        pytest.skip("rustc is not installed, so the verifier in Rust is not tested")
    made = tmp_path_factory.mktemp("rust") / "verify"
    source = FOLDER / "verify.rs"
    command = [compiler, "-O", "--edition", "2021", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert (0, "") == (done.returncode, done.stderr)

    def verify(path: Path, *more: object) -> tuple[int, str]:
        ran = subprocess.run(
            [str(made), str(path), *map(str, more)], capture_output=True, text=True, check=False
        )
        return ran.returncode, ran.stdout

    return verify


def chain_of_cairn(path: Path) -> tuple[int, str]:
    """Exit code and head by Cairn, for the chain alone."""
    base = read_base(path)
    checked = Verification(
        may_be_excerpt=True,
        base=attrs.evolve(base, state=None) if base is not None else None,
        begins=read_excerpt(path),
    )
    broken = False
    for row in read_export(path):
        checked.feed(attrs.evolve(row, private=None))
        broken = broken or (row.private is not None and not _fits(row))
    findings = [found for found in checked.findings() if found.invariant == "INV-8"]
    return int(broken or any(not found.recorded for found in findings)), str(checked.head)


def _fits(row: Row) -> bool:
    checked = Verification(may_be_excerpt=False, base=None)
    with contextlib.suppress(JournalError):
        checked.feed(row)
    return not any("private" in found.message for found in checked.findings())


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_histories(python: Verifier, path: Path):
    """The verifier in Python and Cairn say the same of each."""
    code, output = python(path)
    assert chain_of_cairn(path) == (code, output.split("head: ")[1].split("\n")[0])


def test_histories_in_rust(python: Verifier, rust: Verifier):
    """Both verifiers say the same of each, word for word."""
    assert [python(path) for path in HISTORIES] == [rust(path) for path in HISTORIES]


# --- exports -------------------------------------------------------------------------------------


def export(path: Path, *lines: bytes) -> Path:
    """A file of lines."""
    path.write_bytes(b"".join(lines))
    return path


def end_of(rows: list[Row], position: int) -> bytes:
    """The last line of an export."""
    note = SIGNER.note(Head(position, rows[position - 1].hash))
    return checkpoint_to_line(SignedEnd(public_key=str(SIGNER.public), note=note))


def test_kinds_of_exports(python: Verifier, rust: Verifier, tmp_path: Path):
    """Whole, without private contents, of one session, after a prune: all pass in both."""
    rows = healthy()
    mine = [row for row in rows if row.stream == "session/s1"]
    base = Base(position=4, head=rows[3].hash, state=None, state_digest="2" * 64)
    left = [row for row in mine if row.position > 4]
    excerpt = excerpt_to_line(Excerpt(stream="session/s1", seq=len(mine) - len(left), base=base))
    for expected, lines in (
        (0, (*map(to_line, rows), end_of(rows, 31))),
        (0, tuple(to_line(attrs.evolve(row, private=None)) for row in rows)),
        (3, tuple(map(to_line, mine))),
        (3, (excerpt, *map(to_line, left))),
        (1, (excerpt, *map(to_line, [*left[:2], *left[3:]]))),
        (1, (*map(to_line, [*mine[:2], *mine[3:]]), end_of(rows, 31))),
    ):
        path = export(tmp_path / "x.jsonl", *lines)
        first = python(path)
        assert expected == first[0]
        assert first == rust(path)


def test_checkpoints(python: Verifier, tmp_path: Path):
    """A cut tail and a wrong signature are found, with the export's note and with kept ones."""
    rows = healthy()
    path = export(tmp_path / "x.jsonl", *map(to_line, rows[:-1]), end_of(rows, 31))
    assert (1, True) == _has(python(path), "the checkpoint of row 31 is not in the chain")
    path = export(tmp_path / "x.jsonl", *map(to_line, rows))
    kept = tmp_path / "kept"
    kept.write_text("".join(SIGNER.note(Head(at, rows[at - 1].hash)) for at in (3, 31)))
    assert 0 == python(path, kept, SIGNER.public)[0]
    kept.write_text(kept.read_text().replace("\n3\n", "\n4\n"))
    words = "the signature of the checkpoint of row 4 does not fit"
    assert (1, True) == _has(python(path, kept, SIGNER.public), words)
    other = Signer(bytes(32)).public
    words = "the checkpoint of row 31 is not signed by cairn-journal/"
    assert (1, True) == _has(python(path, kept, other), words)


def test_a_head_in_rust(rust: Verifier, tmp_path: Path):
    """It is in the chain, or not."""
    rows = healthy()
    path = export(tmp_path / "x.jsonl", *map(to_line, rows))
    assert 0 == rust(path, f"20:{rows[19].hash}")[0]
    assert 1 == rust(path, f"32:{rows[19].hash}")[0]


def _has(result: tuple[int, str], words: str) -> tuple[int, bool]:
    return result[0], words in result[1]


def flipped(content: bytes, at: int, bit: int) -> bytes:
    """The content with one bit flipped."""
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit(python: Verifier, rust: Verifier, tmp_path: Path, seed: int):
    """Wherever a bit is flipped in an export, both find it, or cannot read the file."""
    rows = healthy()
    content = b"".join([*map(to_line, rows), end_of(rows, 31)])
    last = content.rindex(b'{"checkpoint"')
    choice = random.Random(seed)
    path = tmp_path / "x.jsonl"
    for _ in range(60):
        at = choice.randrange(last)
        path.write_bytes(flipped(content, at, choice.randrange(8)))
        assert 0 != python(path)[0], at
        assert 0 != rust(path)[0], at


def test_a_damaged_base(python: Verifier, rust: Verifier, tmp_path: Path):
    """Position, head, digest and state of a base are bound to the row that names it."""
    content = (ROOT / "tests" / "histories" / "pruned.jsonl").read_bytes()
    first, rest = content.split(b"\n", 1)
    path = tmp_path / "x.jsonl"
    for old, new in (
        (b'"position":', b'"position":1'),
        (b'"state":{', b'"state":{ '),
        (b'"state_digest":"', b'"state_digest":"f'),
    ):
        assert old in first
        path.write_bytes(first.replace(old, new, 1) + b"\n" + rest)
        assert (1, 1) == (python(path)[0], rust(path)[0])
    path.write_bytes(rest)
    assert (1, 1) == (python(path)[0], rust(path)[0])


def test_a_key_that_is_there_twice(python: Verifier, rust: Verifier, tmp_path: Path):
    """Neither reads such a line."""
    line = to_line(healthy()[0]).replace(b'"payload":', b'"payload":{},"payload":')
    path = export(tmp_path / "x.jsonl", line)
    assert (2, 2) == (python(path)[0], rust(path)[0])


# --- the vectors of the page ---------------------------------------------------------------------


def example() -> list[Row]:
    """The rows of the example: of the format alone, no server writes such events."""
    rows: list[Row] = []
    payloads = ((b'{"note":"first"}', None), (b'{"tokens":2}', '{"text":"Grüße"}'.encode()))
    for position, (public, private) in enumerate(payloads, start=1):
        row = Row(
            position=position,
            stream="server" if private is None else "session/s1",
            seq=1,
            event_id=f"00000000-0000-4000-8000-00000000000{position}",
            kind="example",
            version=1,
            time_us=1_767_225_600_000_000 + position,
            public=public,
            private=private,
            private_digest=PYTHON.sha256(private) if private is not None else "",
            previous_hash=rows[-1].hash if rows else GENESIS,
            hash="",
        )
        rows.append(attrs.evolve(row, hash=row_hash(row)))
    return rows


def test_the_example_of_the_page(python: Verifier, rust: Verifier):
    """The file is what this code makes, both verifiers pass it, and the page has its values."""
    rows = example()
    content = b"".join([*map(to_line, rows), end_of(rows, 2)])
    assert content == (FOLDER / "example.jsonl").read_bytes()
    assert (0, 0) == (python(FOLDER / "example.jsonl")[0], rust(FOLDER / "example.jsonl")[0])
    base = Base(position=7, head="ab" * 32, state=b"{}", state_digest=PYTHON.sha256(b"{}"))
    assert b'"state":{}' in base_to_line(base)
    page = PAGE.read_text(encoding="utf-8")
    for value in (
        *(row.hash for row in rows),
        rows[1].private_digest,
        base.digest,
        str(SIGNER.public),
        SIGNER.note(Head(2, rows[1].hash)),
        SIGNER.seed.hex(),
    ):
        assert value in page, value
