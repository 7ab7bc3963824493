"""A journal is pruned between two runs of the server, and conversations continue."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime

from cairn.actors.clock import clock
from cairn.journal import events as ev
from cairn.journal.pruning import PruneOptions, prepare_prune
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import (
    Serving,
    ask,
    assert_valid,
    assistant,
    eventually,
    run_ops,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "


def test_a_pruned_journal_still_serves(start: Start, cold: Serving):
    """
    A server is killed, the older of its two conversations is pruned in the middle of that run, and
    the next server continues the other one; its passes still replay to the same bits.
    """
    server = start()
    old = ask(server, user(PATH * 12))
    server.wait_idle()
    talk = [user(f"Another one. {PATH * 12}")]
    first = ask(server, *talk)
    server.kill()
    times = {
        place.event.session: datetime.fromtimestamp(place.time_us / 1e6, UTC)
        for place in server.recorded()
        if isinstance(place.event, ev.SessionOpened)
    }
    assert [old.session, first.session] == list(times)

    where = ("--data-dir", server.data_dir)
    before = times[first.session].isoformat()
    code, out, err = run_ops(
        "journal", "prune", *where, "--before", before, "--recent", "--close-idle"
    )
    assert 0 == code, err
    assert "1 session closed" in out
    assert "1 session removed" in out
    assert_valid(server.data_dir)
    code, _, err = run_ops("replay", old.session, *where)
    assert 2 == code
    assert "was pruned" in err
    code, out, err = run_ops("replay", first.session, *where, "--engine")
    assert 0 == code, out + err

    again = start(data_dir=server.data_dir)
    talk += [assistant(first.text), user("And then?")]
    answer = ask(again, *talk)
    assert ask(cold, *talk, cache_prompt=False).bits == answer.bits
    assert first.session == answer.session
    # Whether its blocks were written to files before the kill is chance.
    assert ("evicted" if answer.cached_tokens == 0 else None) == answer.reason
    code, _, err = run_ops("journal", "prune", *where, "--before", "30d")
    assert 2 == code
    assert "A server (process " in err


def test_a_prune_that_was_killed_after_its_cut(start: Start):
    """The next server removes the rows that the base has replaced, and no command sees them."""
    server = start()
    ask(server, user(PATH * 12))
    server.wait_idle()
    assert 0 == server.stop()
    url = journal_url(server.data_dir)
    with closing(SqlStore.open(url)) as store:
        options = PruneOptions(before_us=2**60, close_idle=True)
        prune = prepare_prune(store, options, clock())
        assert prune.base is not None
        prune.commit(store)
        assert 1 == next(store.read(0)).position
    assert_valid(server.data_dir)
    again = start(data_dir=server.data_dir)
    ask(again, user("Another one"))
    with closing(SqlStore.open(url, read_only=True)) as store:
        due = prune.base.position + 1
        eventually(lambda: next(store.read(0)).position == due)
    again.kill()
    assert_valid(server.data_dir)
