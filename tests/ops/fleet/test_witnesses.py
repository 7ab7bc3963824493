"""A start of a node compares its journal with what the other nodes saw of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from cairn.journal import events as ev
from cairn.journal.rows.codec import Row
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import node_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.cli import Unreadable
from cairn.ops.common.heads import HeadFiles
from cairn.ops.serve.recorded_heads import require_known_head
from tests.support.journals import Builder, healthy
from tests.support.processes.postgres import Postgres

ROWS = healthy()
HEAD = f"31:{ROWS[-1].hash}"


class Fleet:
    """n2, whose rows were written, and n1, which saw some of them; n2 starts on another machine."""

    def __init__(self, database: str, home: Path) -> None:
        self.database = database
        self.url = node_url(database, "n2")
        self.files = HeadFiles.of(home, self.url)

    def write(self, node: str, rows: Sequence[Row]) -> None:
        """Add rows to a journal, which is made if it is not there."""
        url = node_url(self.database, node)
        migrate(url)
        with closing(SqlStore.open(url)) as store:
            store.append(rows)

    def accepted(self, *, accept: bool = False) -> ev.LossAccepted | None:
        """What a start of n2 finds, or refuses for."""
        return require_known_head(self.files, self.url, accept=accept)


@pytest.fixture
def fleet(postgres: Postgres, tmp_path: Path) -> Fleet:
    """Nothing is there yet."""
    return Fleet(postgres.new_database(), tmp_path)


def seeing(*events: ev.Event) -> list[Row]:
    """A journal of a node that saw something."""
    made = Builder()
    made.start()
    made.propose(*events)
    return made.rows


def seen(*positions: int) -> list[ev.Event]:
    """That a node saw the heads of n2 at these rows, and one of another node."""
    heads = [ev.HeadsSeen(heads=(("n2", at, ROWS[at - 1].hash),)) for at in positions]
    return [ev.HeadsSeen(heads=(("n3", 40, "ab" * 32),)), *heads]


def test_what_others_saw_is_there(fleet: Fleet):
    """A first start, and one of a journal that has it."""
    assert fleet.accepted() is None
    fleet.write("n1", seeing(*seen(20, 31)))
    fleet.write("n3", ROWS)
    fleet.write("n2", ROWS)
    assert fleet.accepted() is None
    assert fleet.accepted(accept=True) is None


@pytest.mark.parametrize("left", [25, 0, None])
def test_what_others_saw_is_lost(fleet: Fleet, left: int | None):
    """Rows were cut off, all are gone, or the schema is: refused, until an operator accepts it."""
    fleet.write("n1", seeing(*seen(20, 31)))
    if left is not None:
        fleet.write("n2", ROWS[:left])
    words = f"does not contain what node n1 saw of it: it ends at row {left or 0}, and had row 31"
    with pytest.raises(Unreadable, match=words) as refused:
        fleet.accepted()
    assert "--accept-lost-rows" in str(refused.value)
    accepted = fleet.accepted(accept=True)
    assert accepted is not None
    assert (HEAD,) == accepted.heads


def restarted(accepted: ev.LossAccepted) -> list[Row]:
    """The journal of n2 that begins again."""
    made = Builder()
    made.start()
    made.propose(accepted)
    return made.rows


def test_after_it_was_accepted(fleet: Fleet):
    """It is not asked again, also before the other node has seen that; a later cut is found."""
    fleet.write("n1", seeing(*seen(20, 31)))
    accepted = fleet.accepted(accept=True)
    assert accepted is not None
    rows = restarted(accepted)
    fleet.write("n2", rows)
    assert fleet.accepted() is None
    assert fleet.accepted(accept=True) is None
    at, row_hash = rows[-1].position, rows[-1].hash
    loss = ev.LossSeen(node="n2", lost=HEAD, position=at, row_hash=row_hash)
    later = ev.HeadsSeen(heads=(("n2", at + 3, "cd" * 32),))
    known = seeing(*seen(20, 31))
    fleet.write("n1", seeing(*seen(20, 31), loss, later)[len(known) :])
    with pytest.raises(Unreadable, match=f"ends at row {at}, and had row {at + 3}"):
        fleet.accepted()


def test_a_node_that_cannot_be_read(
    fleet: Fleet, postgres: Postgres, capsys: pytest.CaptureFixture[str]
):
    """The others count, and a warning names it."""
    fleet.write("n1", seeing(*seen(31)))
    name = fleet.database.partition("?")[0].rpartition("/")[2]
    with postgres.connect(name) as connection:
        connection.execute("CREATE SCHEMA node_n0")
        connection.execute("CREATE TABLE node_n0.events (position int)")
    with pytest.raises(Unreadable, match="node n1 saw"):
        fleet.accepted()
    assert "Warning: What node n0 saw of this journal cannot be read" in capsys.readouterr().err
