"""`ops export --format parquet` writes a table with a manifest, which DuckDB reads."""

import builtins
import hashlib
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cairn.journal.rows.heads import Head
from cairn.ops.common.heads import HeadFiles
from cairn.ops.serve.recorded_heads import head_keeper
from tests.support.journals import healthy

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
ROOT = Path(__file__).resolve().parents[2]
ROWS = healthy()


@pytest.fixture
def data(stored) -> Path:
    """A journal with a checkpoint."""
    folder: Path = stored(ROWS)
    with head_keeper(HeadFiles.of(folder, None), None, None) as keeper:
        keeper.committed(Head(31, ROWS[-1].hash))
    return folder


def table(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file."""
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def test_the_table_and_its_manifest(run, data: Path, tmp_path: Path):
    """All columns come back; the manifest has digest, head and checkpoint. Both for the owner."""
    path = tmp_path / "x.parquet"
    result = run("export", "--format", "parquet", "-o", path)
    assert (0, f"31 rows, head 31:{ROWS[-1].hash}\n") == (result.exit_code, result.stderr)
    found = table(path)
    assert [row.position for row in ROWS] == [row["position"] for row in found]
    for row, of_table in zip(ROWS, found, strict=True):
        assert row.public.decode() == of_table["payload"]
        assert (row.private.decode() if row.private else None) == of_table["private"]
        assert row.time_us == of_table["time"].timestamp() * 1_000_000
        for name in ("stream", "seq", "event_id", "kind", "version", "hash", "previous_hash"):
            assert getattr(row, name) == of_table[name]
    beside = tmp_path / "x.parquet.manifest.json"
    manifest = json.loads(beside.read_bytes())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == manifest["sha256"]
    assert (31, f"31:{ROWS[-1].hash}", True) == (
        manifest["rows"],
        manifest["head"],
        manifest["private"],
    )
    assert manifest["checkpoint"].split("\n")[1] == "31"
    assert {0o600} == {file.stat().st_mode & 0o777 for file in (path, beside)}


def test_a_part_of_it(run, data: Path, tmp_path: Path):
    """One session without private contents; no session, no file."""
    path = tmp_path / "x.parquet"
    options = ("--format", "parquet", "-o", path, "--no-private")
    assert 0 == run("export", *options, "--session", "s1").exit_code
    assert {"session/s1"} == {row["stream"] for row in table(path)}
    assert {None} == {row["private"] for row in table(path)}
    path.unlink()
    assert 2 == run("export", *options, "--session", "s9").exit_code
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "words"), [("seq = 'x'", "column `seq`"), ("public = x'ff'", "is not UTF-8")]
)
def test_a_row_that_fits_no_table(run, data: Path, tmp_path: Path, change: str, words: str):
    """It is named, and no file is left."""
    with closing(sqlite3.connect(data / "journal.db")) as database:
        database.execute(f"UPDATE events SET {change} WHERE position = 9")
        database.commit()
    path = tmp_path / "x.parquet"
    result = run("export", "--format", "parquet", "-o", path)
    assert 2 == result.exit_code
    assert "Row 9: " in result.stderr
    assert words in result.stderr
    assert ["data"] == [file.name for file in tmp_path.iterdir()]


def test_without_a_name(run, data: Path):
    """A table is not written to a terminal."""
    result = run("export", "--format", "parquet")
    assert (2, True) == (result.exit_code, "needs a name" in result.stderr)


def test_without_pyarrow(run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sentence names the extra."""
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="pyarrow")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    result = run("export", "--format", "parquet", "-o", tmp_path / "x.parquet")
    assert 2 == result.exit_code
    assert "needs the package pyarrow; install the extra `parquet`." in result.stderr


def test_the_example_in_duckdb(run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The query of the page runs on an export."""
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")
    assert 0 == run("export", "--format", "parquet", "-o", tmp_path / "journal.parquet").exit_code
    page = (ROOT / "docs" / "how-to" / "read-the-journal.md").read_text("utf-8")
    (query,) = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    rows = duckdb.sql(query).fetchall()
    assert [("tenant-1", "openai")] == [row[1:3] for row in rows]
