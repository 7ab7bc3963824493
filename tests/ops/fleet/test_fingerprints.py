"""``ops doctor`` names the fields in which the fingerprints of a fleet's nodes differ."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.keys import fingerprint_of
from cairn.journal.rows.base import base_of
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import fleet_url, node_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.journal.state import EMPTY
from cairn.ops.doctor import check_bits, check_fleet, check_journal
from cairn.ops.fleet.fingerprints import Difference, differences
from tests.support.journals import FIELDS, MODEL, Builder, model_loaded
from tests.support.processes.postgres import Postgres


def loaded(name: str = "tiny", **fields: Any) -> ev.ModelLoaded:
    """A model with other fields than the builder's."""
    whole = {key: value for key, value in {**FIELDS, **fields}.items() if value is not ...}
    return attrs.evolve(model_loaded(), name=name, fields=whole, fingerprint=fingerprint_of(whole))


def of(**nodes: ev.ModelLoaded) -> list[Difference]:
    """The differences of nodes with one model each."""
    return differences({node: {model.name: model} for node, model in nodes.items()})


def test_nodes_that_agree():
    """The same fields, under whatever names; a node that has loaded nothing differs in nothing."""
    assert [] == of(n1=loaded(), n2=loaded("another"), n3=loaded())
    assert [] == differences({"n1": {"tiny": loaded()}, "n2": {}})
    assert [] == differences({})


@pytest.mark.parametrize(
    ("first", "second", "shown", "advice"),
    [
        ({"weights": "a"}, {"weights": "b"}, "weights: n1 a, n2 b", "the same model directory"),
        ({"mlx": "0.32.1"}, {"mlx": "0.32.2"}, "mlx: n1 0.32.1, n2 0.32.2", "same versions"),
        ({"block_tokens": 64}, {"block_tokens": 32}, "block_tokens: n1 64, n2 32", "same options"),
        (
            {"environment": {"OMP_NUM_THREADS": "1"}},
            {"environment": {}},
            "environment.OMP_NUM_THREADS: n1 1, n2 none",
            "same variables",
        ),
        ({"adapter": "a"}, {}, "adapter: n1 a, n2 none", "the same model directory"),
        ({"kv_windows": [1]}, {"kv_windows": [2]}, "kv_windows: n1 [1], n2 [2]", "same options"),
        (
            {"processor": "flags " + "sse " * 30 + "avx512f"},
            {"processor": "flags " + "sse " * 30 + "avx2"},
            "processor: n1 … avx512f, n2 … avx2",
            "machines of one kind",
        ),
        ({"context_tokens": 1}, {"context_tokens": 2}, "context_tokens: n1 1, n2 2", "--pool-mb"),
        ({"row_class": [1]}, {"row_class": [2]}, "row_class: n1 [1], n2 [2]", "--test-again"),
    ],
)
def test_a_field_that_differs(
    first: Mapping[str, Any], second: Mapping[str, Any], shown: str, advice: str
):
    """It is named with the value of each node, and what to do."""
    (found,) = of(n1=loaded(**first), n2=loaded(**second))
    assert shown == str(found)
    assert advice in found.advice


def test_several_models():
    """Models are compared by their names where a node has several."""
    both = {"a": loaded("a"), "b": loaded("b", mlx="1")}
    assert [] == differences({"n1": both, "n2": {"a": loaded("a")}})
    (found,) = differences({"n1": both, "n2": {"b": loaded("b", mlx="2")}})
    assert "b mlx: n1 1, n2 2" == str(found)


# --- from journals --------------------------------------------------------------------------------


def journal(url: str, node: str, *models: ev.ModelLoaded) -> None:
    """Add to the journal of a node a run that loads these models."""
    made = Builder()
    made.start()
    made.stop()
    made.propose(ev.ServerStarted(boot="boot-2", cairn_version="0", settings={}))
    for model in models:
        made.propose(model)
        made.propose(
            ev.ModelUnloaded(fingerprint=model.fingerprint, reason="another", active_bytes=0)
        )
    assert made.bug is None
    migrate(node_url(url, node))
    with closing(SqlStore.open(node_url(url, node))) as store:
        store.append(made.rows)


def test_the_last_run_counts(postgres: Postgres):
    """What a node loaded before its last start does not; one that has loaded nothing is named."""
    url = postgres.new_database()
    assert "no node has a journal" in check_fleet(url).fact
    journal(url, "n1", loaded(mlx="2"))
    journal(url, "n2", loaded(mlx="2"))
    journal(url, "n3")
    migrate(node_url(url, "n5"))  # as a start that is refused leaves it
    found = check_fleet(node_url(url, "n1"))
    assert (
        "ok",
        "running: none; not running: n1, n2, n3; the same fingerprint; no model loaded yet: n3",
    ) == (found.status, found.fact)


def test_the_nodes_that_run(postgres: Postgres):
    """Only their fingerprints must be the same; one that is stopped and differs is a warning."""
    url = postgres.new_database()
    for node, mlx in (("n1", "2"), ("n2", "2"), ("n3", "3")):
        journal(url, node, loaded(mlx=mlx))
    with ExitStack() as servers:
        for node in ("n1", "n2"):
            servers.enter_context(closing(SqlStore.open(node_url(url, node))))
        found = check_fleet(url)
        assert "warn" == found.status
        assert found.fact.startswith("running: n1, n2; not running: n3; ")
        assert "of nodes that do not run differ" in found.fact
        assert "mlx: n1 2, n2 2, n3 3" in found.fact
        servers.enter_context(closing(SqlStore.open(node_url(url, "n3"))))
        found = check_fleet(url)
        assert "fail" == found.status
        assert found.fact.startswith("running: n1, n2, n3; fingerprints differ")
        assert "mlx: n1 2, n2 2, n3 3" in found.fact
        assert "install the same versions" in found.advice


def test_a_database_of_nodes(postgres: Postgres):
    """Without --node, the checks of a single journal name the nodes."""
    url = postgres.new_database()
    assert check_journal(url).fact.startswith("none yet")
    for node in ("n1", "n2"):
        journal(url, node, loaded(mlx="2"))
    assert "of n1, n2; add --node NAME to check one" == check_journal(url).fact
    assert "of each node; add --node NAME to see one" == check_bits(url).fact


def test_a_journal_that_was_pruned(postgres: Postgres):
    """Its base has the model that was loaded before; a damaged one has none."""
    url = postgres.new_database()
    journal(url, "n1", loaded(mlx="2"))
    journal(url, "n2")
    with (
        postgres.connect(url.partition("?")[0].rpartition("/")[2]) as connection,
        closing(SqlStore.open(node_url(url, "n2"), read_only=True)) as store,
    ):
        position, head = store.head()
        state = attrs.evolve(EMPTY, position=position, model=MODEL)
        base = base_of(state, head, loaded(mlx="3"))
        connection.execute("INSERT INTO node_n2.bases VALUES (%s, %s, %s, %s)", attrs.astuple(base))
        connection.execute("DELETE FROM node_n2.events")
        assert "mlx: n1 2, n2 3" in check_fleet(url).fact
        connection.execute("UPDATE node_n2.bases SET state = 'x'")
        assert "no model loaded yet: n2" in check_fleet(url).fact
        connection.execute("UPDATE node_n2.cairn_schema SET version_num = '9999'")
        found = check_fleet(url)
        assert ("fail", True) == (found.status, "newer Cairn" in found.fact)


def test_the_database_of_a_node():
    """The URL of a node's journal without its schema; another one as it is."""
    plain = "postgresql://cairn@db/cairn?host=%2Ftmp"
    assert plain == fleet_url(node_url(plain, "n1"))
    more = f"{plain}&options=-cstatement_timeout%3D9"
    assert "-cstatement_timeout=9" in fleet_url(node_url(more, "n1")).replace("%3D", "=")
    assert "search_path" not in fleet_url(node_url(more, "n1"))
    assert plain == fleet_url(plain)
