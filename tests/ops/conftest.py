"""Journals on disk, and the command line in this process."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cairn.journal.rows.codec import Row
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.cli import ops


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `ops` with arguments; the default data directory is an empty one."""
    monkeypatch.setenv("CAIRN_DATA_DIR", str(tmp_path / "data"))

    def invoke(*arguments: object) -> Result:
        result = CliRunner().invoke(ops, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[Sequence[Row]], Path]:
    """Puts rows into the journal of the default data directory."""

    def store(rows: Sequence[Row]) -> Path:
        folder = tmp_path / "data"
        migrate(journal_url(folder))
        opened = SqlStore.open(journal_url(folder))
        opened.append(rows)
        opened.close()
        return folder

    return store
