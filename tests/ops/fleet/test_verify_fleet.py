"""``ops verify --fleet``: a verdict for each node and for the fleet, and what it refuses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from cairn.journal import events as ev
from cairn.journal.errors import StoreLost
from cairn.journal.nodes import NodeHead
from cairn.journal.rows.database.fleet import heads_of_others, nodes_of
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import node_url
from cairn.journal.rows.store_sql import SqlStore
from tests.journal.test_fleet_audit import conflicting, quarantining, released
from tests.support.journals import Builder, healthy
from tests.support.processes.postgres import Postgres

_END_WAITING = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE wait_event_type = 'Lock' AND datname = current_database()"
)

Run = Callable[..., Result]


def seeing(*heads: tuple[str, int, str]) -> Builder:
    """A journal of a node that saw these heads, one after the other."""
    made = Builder()
    made.start()
    for head in heads:
        made.propose(ev.HeadsSeen(heads=(head,)))
    return made


@pytest.fixture
def fleet(postgres: Postgres) -> str:
    """The database of n1, which saw the head of n2, and of n2."""
    url = postgres.new_database()
    rows = healthy()
    for node, stored in (("n1", seeing(("n2", 31, rows[-1].hash)).rows), ("n2", rows)):
        migrate(node_url(url, node))
        with closing(SqlStore.open(node_url(url, node))) as store:
            store.append(stored)
    return url


def change(postgres: Postgres, url: str, statement: str) -> None:
    """Change a database of a fleet from outside."""
    with postgres.connect(url.partition("?")[0].rpartition("/")[2]) as connection:
        connection.execute(statement)


def verdicts(done: Result) -> dict[str, Any]:
    """The objects that are printed, by node; that of the fleet as ``fleet``."""
    found = map(json.loads, done.stdout.splitlines())
    return {one.get("node", "fleet"): one for one in found}


def test_all_holds(run: Run, fleet: str):
    """Each journal is sound, and what they say of each other agrees."""
    done = run("verify", "--fleet", fleet)
    assert 0 == done.exit_code, done.output
    by_node = verdicts(done)
    assert ("sound", 31, 31) == tuple(
        by_node["n2"][name] for name in ("verdict", "rows", "seen_by_others")
    )
    assert by_node["n1"]["seen_by_others"] is None
    whole = by_node["fleet"]
    assert (["n1", "n2"], "sound", 0) == (whole["fleet"], whole["verdict"], whole["broken"])
    assert {"present": 1, "pruned": 0, "accepted_as_lost": 0} == whole["named_rows"]


def test_a_journal_without_rows(run: Run, fleet: str, postgres: Postgres):
    """As a start that is refused leaves it: it counts as none, unless a node saw rows of it."""
    migrate(node_url(fleet, "n3"))
    done = run("verify", "--fleet", fleet)
    assert (0, ["n1", "n2"]) == (done.exit_code, verdicts(done)["fleet"]["fleet"])
    change(postgres, fleet, "DELETE FROM node_n2.events")
    done = run("verify", "--fleet", fleet)
    (finding,) = verdicts(done)["fleet"]["findings"]
    assert (1, True) == (done.exit_code, "whose journal is not there" in finding["message"])
    empty = postgres.new_database()
    migrate(node_url(empty, "n1"))
    refused = run("verify", "--fleet", empty)
    assert (2, True) == (refused.exit_code, "has no journal of a node" in refused.stderr)


def test_rows_that_were_cut_off(run: Run, fleet: str, postgres: Postgres):
    """The node's own journal is valid, and the other one has its head."""
    change(postgres, fleet, "DELETE FROM node_n2.events WHERE position > 25")
    assert 0 == run("verify", "--journal", fleet, "--node", "n2").exit_code
    done = run("verify", "--fleet", fleet)
    assert 1 == done.exit_code
    whole = verdicts(done)["fleet"]
    (finding,) = whole["findings"]
    assert ("INV-8", "n1 row 3") == (finding["invariant"], finding["where"])
    assert "the journal of n2 ends before it" in finding["message"]
    assert "broken" == whole["verdict"]


def test_a_changed_row(run: Run, fleet: str, postgres: Postgres):
    """A finding of one node's journal, under its name."""
    change(postgres, fleet, "UPDATE node_n2.events SET time_us = 1 WHERE position = 30")
    done = run("verify", "--fleet", fleet)
    assert 1 == done.exit_code
    by_node = verdicts(done)
    assert ("broken", "sound") == (by_node["n2"]["verdict"], by_node["n1"]["verdict"])
    assert "row 30" == by_node["n2"]["findings"][0]["where"]


def test_leases(run: Run, fleet: str, postgres: Postgres):
    """A second lease, with which another writer could commit."""
    change(postgres, fleet, "INSERT INTO node_n2.lease VALUES ('node_n9', 1, 'me')")
    done = run("verify", "--fleet", fleet)
    assert 1 == done.exit_code
    messages = [finding["message"] for finding in verdicts(done)["fleet"]["findings"]]
    assert ["a lease of another journal", "leases that overlap"] == messages


def test_a_journal_that_cannot_be_read(run: Run, fleet: str, postgres: Postgres):
    """The others are verified all the same."""
    change(postgres, fleet, "UPDATE node_n2.cairn_schema SET version_num = '9999'")
    done = run("verify", "--fleet", fleet)
    assert 2 == done.exit_code
    by_node = verdicts(done)
    assert ("cannot be read", "sound") == (by_node["n2"]["verdict"], by_node["n1"]["verdict"])
    assert "newer Cairn" in by_node["n2"]["fault"]
    assert [] == by_node["fleet"]["findings"]


def test_for_people(run: Run, fleet: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch):
    """On a terminal, a line for each finding and each node, and a verdict."""
    monkeypatch.setattr("cairn.ops.fleet.verify.is_piped", lambda: False)
    lines = run("verify", "--fleet", fleet).stdout.splitlines()
    assert lines[0].startswith("n1: sound; 3 rows, head 3:")
    assert lines[1].endswith("lease 1, others saw row 31")
    assert "rows that nodes name of each other: 1 present, 0 pruned, 0 accepted as lost" in lines
    assert "fleet of 2 nodes: sound" == lines[-1]
    change(postgres, fleet, "DELETE FROM node_n2.events WHERE position = 20 OR position > 25")
    change(postgres, fleet, "UPDATE node_n1.cairn_schema SET version_num = '9999'")
    done = run("verify", "--fleet", fleet)
    lines = done.stdout.splitlines()
    assert 1 == done.exit_code
    assert lines[0].startswith("n1: cannot be read: ")
    assert "INV-8" in lines[1]
    assert "  for more: ops verify --node n2 --journal URL" in lines
    assert "fleet of 2 nodes: broken" == lines[-1]


def test_digests_that_differ(run: Run, postgres: Postgres, monkeypatch: pytest.MonkeyPatch):
    """They are broken; on record, once a node quarantined the block, whose journal says so."""
    url, rows = postgres.new_database(), healthy()
    other, key = conflicting(rows)
    for node, stored in (("n1", rows), ("n2", quarantining(other, keys=[key]))):
        migrate(node_url(url, node))
        with closing(SqlStore.open(node_url(url, node))) as store:
            store.append(stored)
    whole = verdicts(run("verify", "--fleet", url))["fleet"]
    assert (0, 1) == (whole["broken"], whole["on_record"])
    assert [("INV-3", True)] == [(one["invariant"], one["recorded"]) for one in whole["findings"]]
    monkeypatch.setattr("cairn.ops.fleet.verify.is_piped", lambda: False)
    assert "some with two digests, all of them quarantined" in run("verify", "--fleet", url).stdout
    change(postgres, url, "DELETE FROM node_n2.events WHERE position = 32")
    done = run("verify", "--fleet", url)
    assert "some with two digests\n" in done.stdout
    assert 1 == done.exit_code


def test_what_is_refused(run: Run, fleet: str, postgres: Postgres, tmp_path: Path):
    """A database without nodes, one that is none of a fleet, and options of a single journal."""
    for arguments, words in (
        (("--fleet", postgres.new_database()), "has no journal of a node"),
        (("--fleet", "sqlite:////tmp/x.db"), "share a PostgreSQL database"),
        (("--fleet", "/tmp/x.db"), "is not a database URL"),
        (("--fleet", fleet, "--journal", fleet), "Omit the options of a single one"),
        (("--fleet", fleet, "--node", "n1"), "needs the PostgreSQL database"),
    ):
        refused = run("verify", *arguments)
        assert (2, True) == (refused.exit_code, words in refused.stderr), refused.output


# --- what a node sees of others -------------------------------------------------------------------


def test_heads_of_others(fleet: str, postgres: Postgres):
    """
    Those that have grown, but not by heads that they saw themselves, and those that lost what was
    seen. Schemas of no node, and without a journal, are none.
    """
    rows = healthy()
    change(postgres, fleet, "CREATE SCHEMA node_n3")
    change(postgres, fleet, "CREATE SCHEMA nodexn4")
    change(postgres, fleet, "CREATE TABLE nodexn4.events (position int)")
    assert ["n1", "n2"] == nodes_of(fleet)
    head = rows[-1].hash
    for since, is_news, is_lost in (
        ({}, True, False),
        ({"n2": (30, rows[29].hash)}, True, False),
        ({"n2": (31, head)}, False, False),
        ({"n2": (31, "ab" * 32)}, False, True),
        ({"n2": (30, "ab" * 32)}, False, True),
        ({"n2": (32, "ab" * 32)}, False, True),
    ):
        assert [NodeHead("n2", 31, head, is_news, is_lost)] == heads_of_others(
            node_url(fleet, "n1"), "n1", since
        )
    for position, lost in ((32, "damaged"), (33, f"32:{'ab' * 32}"), (34, f"9:{'ab' * 32}")):
        public = "[]" if lost == "damaged" else json.dumps({"heads": [lost]})
        change(
            postgres,
            fleet,
            "INSERT INTO node_n2.events SELECT "
            f"{position}, stream, {position}, '{position}', 'loss_accepted', version, time_us, "
            f"'{public}', private, private_digest, hash, 'hash {position}' "
            "FROM node_n2.events WHERE position = 31",
        )
    for lost, accepted in (("ab", (33, "hash 33")), ("cd", None)):
        since = {"n2": (32, lost * 32)}
        (of_n2,) = heads_of_others(fleet, "n1", since)
        assert (True, False, accepted) == (of_n2.is_lost, of_n2.is_news, of_n2.accepted)
    (of_n1,) = heads_of_others(fleet, "n2", {"n1": (2, seeing().rows[1].hash)})
    assert (3, False, False) == (of_n1.position, of_n1.is_news, of_n1.is_lost)
    (of_n1,) = heads_of_others(fleet, "n2", {})
    assert of_n1.is_news


def test_a_head_that_cannot_be_read(fleet: str, postgres: Postgres):
    """A journal that is not Cairn's, is newer or is locked is named, and the others are read."""
    change(postgres, fleet, "CREATE SCHEMA node_n0")
    change(postgres, fleet, "CREATE TABLE node_n0.events (position int)")
    migrate(node_url(fleet, "n4"))
    with closing(SqlStore.open(node_url(fleet, "n4"))) as store:
        store.append(healthy())
    migrate(node_url(fleet, "n5"))  # it has no row
    change(postgres, fleet, "UPDATE node_n4.cairn_schema SET version_num = '9999'")
    name = fleet.partition("?")[0].rpartition("/")[2]
    with postgres.connect(name) as connection, connection.transaction():
        connection.execute("LOCK TABLE node_n1.events IN ACCESS EXCLUSIVE MODE")
        found = {head.node: head for head in heads_of_others(fleet, "n3", {})}
    assert {"n0", "n1", "n2", "n4"} == {*found}
    words = {"n0": "column", "n1": "lock timeout", "n4": "it has schema 9999"}
    for node, word in words.items():
        assert word in str(found[node].fault)
        assert (False, False) == (found[node].is_news, found[node].is_lost)
    assert (None, 31, True) == (found["n2"].fault, found["n2"].position, found["n2"].is_news)


def test_a_connection_that_is_lost_while_heads_are_read(
    fleet: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    """It is an error of the whole look, and no journal's."""
    for name in ("LOOK_MS", "LOOK_LOCK_MS"):
        monkeypatch.setattr(f"cairn.journal.rows.database.postgres.{name}", 60_000)
    name = fleet.partition("?")[0].rpartition("/")[2]
    ended: list[bool] = []

    def end_waiting() -> None:
        with postgres.connect(name) as other:
            for _ in range(600):
                ended.extend(end for (end,) in other.execute(_END_WAITING).fetchall())
                if ended:
                    return
                time.sleep(0.1)

    with postgres.connect(name) as connection, connection.transaction():
        connection.execute("LOCK TABLE node_n1.events IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=end_waiting)
        thread.start()
        with pytest.raises(StoreLost):
            heads_of_others(fleet, "n3", {})
        thread.join(60)
    assert [True] == ended


def test_a_handover_that_was_cut_short(
    run: Run, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    """No violation: the agent is named, with the command that finishes it."""
    url, rows = postgres.new_database(), released()
    migrate(node_url(url, "n1"))
    with closing(SqlStore.open(node_url(url, "n1"))) as store:
        store.append(rows)
    done = run("verify", "--fleet", url)
    (one,) = verdicts(done)["fleet"]["not_adopted"]
    assert (0, rows[-1].position, "n2") == (done.exit_code, one["row"], one["to_node"])
    monkeypatch.setattr("cairn.ops.fleet.verify.is_piped", lambda: False)
    lines = run("verify", "--fleet", url).stdout.splitlines()
    assert "agents released, and adopted by no node: 1" == lines[-3]
    assert lines[-2].endswith("To finish: ops agents move n1.notes --to n2")
    assert "fleet of 1 node: sound" == lines[-1]
