"""`ops verify` passes what holds, names what is broken, and claims no more than it checked."""

import gzip
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from cairn.journal.rows.base import Base
from cairn.journal.rows.codec import row_hash
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.export import Excerpt, base_to_line, excerpt_to_line, to_line
from cairn.journal.rows.store_sql import SqlStore
from tests.support.journals import BREAKABLE, Builder, broken, healthy, tampered, unrecorded


def write(path: Path, rows) -> Path:
    """An export of rows."""
    path.write_bytes(b"".join(map(to_line, rows)))
    return path


def test_all_holds(run, stored):
    """A healthy journal: exit code 0, its rows and head, and what was checked."""
    stored(healthy())
    result = run("verify")
    assert 0 == result.exit_code
    assert "rows: 31\n" in result.stdout
    assert f"head: 31:{healthy()[-1].hash}\n" in result.stdout
    assert (
        "checked: INV-1 INV-2 INV-3 INV-4 INV-5 INV-6 INV-7 INV-8 INV-9\nbroken: 0\n"
        in result.stdout
    )
    assert "" == result.stderr


def test_journal_export_and_path_agree(run, stored, tmp_path: Path):
    """The same rows give the same output, wherever they are stored."""
    folder = stored(healthy())
    export = write(tmp_path / "x.jsonl", healthy())
    outputs = {
        run("verify", "--data-dir", folder).stdout,
        run("verify", "--journal", journal_url(folder)).stdout,
        run("verify", "--journal", folder / "journal.db").stdout,
        run("verify", folder / "journal.db").stdout,
        run("verify", export).stdout,
    }
    assert 1 == len(outputs)


@pytest.mark.parametrize("invariant", BREAKABLE)
def test_a_violation_on_record(run, stored, invariant: str):
    """A line with the bug id that the journal has, and exit code 1."""
    rows, bug_id = broken(invariant)
    stored(rows)
    result = run("verify")
    assert 1 == result.exit_code
    fields = result.stdout.splitlines()[0].split("\t")
    assert [bug_id, invariant, "on record"] == [fields[0], fields[1], fields[5]]
    assert fields[2].startswith("row ")
    assert fields[3] in ("session s1", "session s2")


@pytest.mark.parametrize("invariant", [name for name in BREAKABLE if name != "CRASH"])
def test_a_violation_that_nobody_recorded(run, stored, invariant: str):
    """It is new, its bug id is the same each time, and the line says that it is not on record."""
    stored(unrecorded(invariant))
    result = run("verify")
    assert 1 == result.exit_code
    fields = result.stdout.splitlines()[0].split("\t")
    assert [invariant, "not on record"] == [fields[1], fields[5]]
    assert result.stdout == run("verify").stdout


def test_a_changed_row(run, stored):
    """A payload changed afterwards breaks the chain at its row."""
    stored(tampered())
    result = run("verify")
    assert 1 == result.exit_code
    assert "INV-8\trow 4\tserver\tthe row was changed\tnot on record" in result.stdout


def test_what_may_follow(run, tmp_path: Path):
    """After a changed row the rest is marked and counted apart; each break of the chain is one."""
    rows = healthy()
    rows[11] = attrs.evolve(rows[11], public=rows[11].public.replace(b"s1", b"s9"))
    lines = run("verify", write(tmp_path / "x.jsonl", rows)).stdout.splitlines()
    assert "\tINV-8\trow 12\t" in lines[0]
    assert lines[0].endswith("\tnot on record")
    assert "first broken: row 12" == lines[1]
    behind = [line for line in lines[2:] if "\t" in line]
    assert behind
    assert all(line.endswith("\tnot on record\tmay be a consequence") for line in behind)
    assert f"broken: 1, and {len(behind)} that may be consequences" == lines[-1]
    rows[30] = attrs.evolve(rows[30], time_us=0)
    lines = run("verify", write(tmp_path / "x.jsonl", rows)).stdout.splitlines()
    assert f"broken: 2, and {len(behind)} that may be consequences" == lines[-1]


@pytest.mark.parametrize("invariant", BREAKABLE)
def test_what_is_on_record_follows_from_nothing(run, stored, invariant: str):
    """The server found it on a fold that holds."""
    stored(broken(invariant)[0])
    stdout = run("verify").stdout
    assert "may be a consequence" not in stdout
    assert "first broken" not in stdout


def test_a_kept_head(run, stored, tmp_path: Path):
    """An earlier head is in a journal that grew, and not in one that was cut or written again."""
    rows = healthy()
    stored(rows)
    for saved, row in ((rows[-1].hash, 31), (rows[19].hash.upper(), 20), ("0" * 64, 0)):
        result = run("verify", "--head", f"{row}:{saved}")
        assert 0 == result.exit_code
        assert f"saved head: in the chain, at row {row}\n" in result.stdout
        assert f"or rewritten, after row {row}.\n" in result.stdout
    cut = write(tmp_path / "x.jsonl", rows[:-1])
    assert 0 == run("verify", cut).exit_code
    result = run("verify", cut, "--head", f"31:{rows[-1].hash}")
    assert 1 == result.exit_code
    assert "saved head: not in the chain: rows were removed from the end" in result.stdout
    assert "pass a checkpoint" not in result.stdout
    assert "\nbroken: 0\nnot vouched for: 1 head or checkpoint does not fit" in result.stdout


def test_a_kept_head_and_an_excerpt(run, tmp_path: Path):
    """One session's rows need not have it."""
    rows = healthy()
    excerpt = write(tmp_path / "x.jsonl", [row for row in rows if row.stream == "session/s1"])
    result = run("verify", excerpt, "--head", f"1:{rows[0].hash}")
    assert 3 == result.exit_code
    assert "saved head: not in this excerpt" in result.stdout


@pytest.mark.parametrize(
    "saved", ["", "abc", "0" * 64, f"31:{'g' * 64}", f"-1:{'0' * 64}", f"01:{'0' * 64}"]
)
def test_an_invalid_head(run, stored, saved: str):
    """A text that cannot be a position and a hash is not looked up."""
    stored(healthy())
    result = run("verify", "--head", saved)
    assert (2, "") == (result.exit_code, result.stdout)


def test_what_it_cannot_see_is_said(run, stored):
    """In the help and in every answer."""
    stored(healthy())
    assert (
        "This cannot detect rows removed from the end, or a completely rewritten chain. To"
        in run("verify").stdout
    )
    assert "The rows alone cannot show that rows were removed from the end" in " ".join(
        run("verify", "--help").stdout.split()
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, packed: bool):
    """An export through a pipe, packed or not; no temporary files remain."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    text = b"".join(map(to_line, healthy()))
    done = piped(name, gzip.compress(text) if packed else text)
    assert 0 == done.returncode
    assert b"rows: 31\n" in done.stdout
    assert [] == list(tmp_path.iterdir())


def test_standard_input_that_is_no_export(stored):
    """It is named as such; a database has to be named by its path."""
    done = piped("-", b"Dear diary\n")
    assert (2, b"") == (done.returncode, done.stdout)
    assert done.stderr.startswith(b"standard input, line 1, is not a row of an export: ")
    done = piped("-", (stored(healthy()) / "journal.db").read_bytes())
    assert (2, b"") == (done.returncode, done.stdout)
    assert b"is a database" in done.stderr


def piped(name: str, text: bytes) -> subprocess.CompletedProcess[bytes]:
    """`ops verify` with text on its standard input."""
    command = [sys.executable, "-P", "-m", "cairn.ops", "verify", name]
    return subprocess.run(command, input=text, capture_output=True, check=False)


def test_a_packed_export(run, tmp_path: Path):
    """It is unpacked; one that was cut off is refused."""
    path = tmp_path / "x.jsonl.gz"
    packed = gzip.compress(b"".join(map(to_line, healthy())))
    path.write_bytes(packed)
    result = run("verify", path)
    assert 0 == result.exit_code
    assert "rows: 31\n" in result.stdout
    path.write_bytes(packed[:-20])
    result = run("verify", path)
    assert (2, "") == (result.exit_code, result.stdout)
    assert f"{path} cannot be read" in result.stderr


@pytest.mark.parametrize("missing", [slice(9, 10), slice(0, 1), slice(0, 5)])
def test_a_missing_row(run, tmp_path: Path, missing: slice):
    """Rows taken out of an export do not make it an excerpt."""
    rows = healthy()
    del rows[missing]
    result = run("verify", write(tmp_path / "x.jsonl", rows))
    assert 1 == result.exit_code
    assert "INV-8" in result.stdout


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (slice(9, 10), "row 11\tserver\trow 10 is missing before it\t"),
        (slice(9, 12), "row 13\tserver\trows 10 to 12 are missing before it\t"),
    ],
)
@pytest.mark.parametrize("without", [False, True])
def test_missing_rows_are_named(run, tmp_path: Path, missing: slice, says: str, without: bool):
    """Row numbers have no gaps, with or without private contents."""
    rows = [attrs.evolve(row, private=None) for row in healthy()] if without else healthy()
    del rows[missing]
    assert says in run("verify", write(tmp_path / "x.jsonl", rows)).stdout


def test_contents_left_out(run, tmp_path: Path):
    """Without contents the chain is checked, nothing else is claimed, and it is no pass."""
    rows = [attrs.evolve(row, private=None) for row in broken("INV-7")[0]]
    result = run("verify", write(tmp_path / "x.jsonl", rows))
    assert 3 == result.exit_code
    assert "checked: INV-8\nnot checked: INV-1" in result.stdout
    rows[9] = attrs.evolve(rows[9], public=b"{}")
    result = run("verify", write(tmp_path / "x.jsonl", rows))
    assert 1 == result.exit_code
    assert "INV-8\trow 10" in result.stdout


def test_an_excerpt(run, tmp_path: Path):
    """Of one session's rows each hash is checked, and that none is missing between them."""
    rows = [row for row in healthy() if row.stream == "session/s1"]
    result = run("verify", write(tmp_path / "x.jsonl", rows))
    assert 3 == result.exit_code
    assert "not checked: INV-1" in result.stdout
    del rows[4]
    result = run("verify", write(tmp_path / "x.jsonl", rows))
    assert 1 == result.exit_code
    assert "rows of session/s1 are missing before it" in result.stdout


@pytest.mark.parametrize("arguments", [(), ("--journal", "odd://x"), ("--data-dir", "nowhere")])
def test_no_journal(run, arguments):
    """What cannot be read: exit code 2, one sentence on stderr, nothing on stdout."""
    result = run("verify", *arguments)
    assert (2, "", 1) == (result.exit_code, result.stdout, result.stderr.count("\n"))


def test_no_export(run, tmp_path: Path):
    """The message about a file that is not an export names the line."""
    path = tmp_path / "x.jsonl"
    path.write_text("Dear diary\n")
    result = run("verify", path)
    assert 2 == result.exit_code
    assert "line 1" in result.stderr


@pytest.mark.parametrize("begins", ["", "excerpt"])
@pytest.mark.parametrize("command", ["verify", "sessions", "agents"])
def test_an_export_without_a_row(run, tmp_path: Path, command: str, begins: str):
    """
    The command that was to write it has failed: it is refused, and nothing is reported as valid.
    """
    path = tmp_path / "x.jsonl"
    base = Base(position=2, head="0" * 64, state=None, state_digest="0" * 64)
    line = excerpt_to_line(Excerpt(stream="session/s1", seq=1, base=base))
    path.write_bytes(line if begins else b"")
    result = run(command, path)
    assert (2, "") == (result.exit_code, result.stdout)
    assert (
        f"There are no rows in {path}. Check whether `ops export` reported an error"
        in result.stderr
    )


def test_standard_input_without_a_row():
    """It has a name, too."""
    done = piped("-", b"")
    assert (2, b"") == (done.returncode, done.stdout)
    assert done.stderr.startswith(b"There are no rows in standard input. ")


def test_a_base_without_a_row(run, tmp_path: Path):
    """No row names it, and that is a finding."""
    path = tmp_path / "x.jsonl"
    base = Base(position=2, head="0" * 64, state=None, state_digest="0" * 64)
    path.write_bytes(base_to_line(base))
    result = run("verify", path)
    assert (1, True) == (result.exit_code, "broken: 1\n" in result.stdout)


def test_a_newer_cairn(run, tmp_path: Path):
    """Rows that this version does not know are not taken for broken."""
    row = attrs.evolve(healthy()[0], kind="server_dreamed")
    row = attrs.evolve(row, hash=row_hash(row))
    result = run("verify", write(tmp_path / "x.jsonl", [row]))
    assert (2, "") == (result.exit_code, result.stdout)
    assert "newer" in result.stderr


def test_beside_a_writer(run, stored):
    """A journal is verified while a server writes to it."""
    folder = stored(healthy()[:12])
    writer = SqlStore.open(journal_url(folder))
    writer.append(healthy()[12:20])
    assert "rows: 20\n" in run("verify").stdout
    writer.append(healthy()[20:])
    writer.close()
    assert "rows: 31\n" in run("verify").stdout


def test_nothing_heavy_is_loaded(stored):
    """`ops verify` works without MLX and without the web framework."""
    folder = stored(healthy())
    code = (
        "import sys\n"
        "from cairn.ops.cli import ops\n"
        "try:\n"
        f"    ops(['verify', '--data-dir', {str(folder)!r}])\n"
        "except SystemExit as ended:\n"
        "    assert ended.code == 0, ended.code\n"
        "heavy = {'mlx', 'mlx_lm', 'quart', 'quart_trio', 'trio', 'hypercorn', 'alembic'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("broken: 0\n[]\n")


def test_exit_codes_of_the_process(stored, tmp_path: Path):
    """The codes are those of the process too."""
    folder = stored(unrecorded("INV-1"))
    for expected, where in ((1, folder), (2, tmp_path / "none")):
        command = [sys.executable, "-P", "-m", "cairn.ops", "verify", "--data-dir", str(where)]
        assert expected == subprocess.run(command, capture_output=True, check=False).returncode


def test_an_empty_journal(run, stored):
    """An empty journal holds."""
    stored(Builder().rows)
    result = run("verify")
    assert 0 == result.exit_code
    assert f"rows: 0\nhead: 0:{'0' * 64}\n" in result.stdout
