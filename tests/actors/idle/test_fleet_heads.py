"""A node appends the heads of the others while it runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import attrs
import pytest
import structlog
import trio

from cairn.actors.server import Server
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.nodes import NodeHead
from cairn.journal.rows.store import MemoryStore
from tests.actors.idle.test_pruning import until
from tests.support.in_process_server import ask, chat, events_of, generate, serving_fake, wait_idle

pytestmark = pytest.mark.trio

OFTEN_S = 0.001


class Others:
    """
    The journals of other nodes.

    Attributes:
        heads: what the next looks find, one after the other; the last one stays.
        since: what was seen before, at each look.
    """

    def __init__(self, *heads: Sequence[NodeHead] | StoreError) -> None:
        self.heads = list(heads)
        self.since: list[Mapping[str, tuple[int, str]]] = []

    def read(self, since: Mapping[str, tuple[int, str]]) -> Sequence[NodeHead]:
        """See ``ReadHeads``."""
        self.since.append(since)
        found = self.heads.pop(0) if len(self.heads) > 1 else self.heads[0]
        if isinstance(found, StoreError):
            raise found
        return found

    async def looked(self, times: int) -> None:
        """Wait until it was looked so many times."""
        await until(lambda: len(self.since) >= times)


def grown(node: str, position: int) -> NodeHead:
    """A node's journal that has more rows than before."""
    return NodeHead(node, position, "ab", is_news=True, is_lost=False)


def still(node: str, position: int, *, is_lost: bool = False) -> NodeHead:
    """A node's journal without news, or that has lost what was seen."""
    return NodeHead(node, position, "ab", is_news=False, is_lost=is_lost)


async def seen(store: MemoryStore, others: Others, looks: int) -> list[ev.HeadsSeen]:
    """What a server has appended after so many looks."""
    async with serving_fake(store, heads_s=OFTEN_S, read_heads=others.read) as server:
        await others.looked(looks)
        await answers(server)
    return events_of(store, ev.HeadsSeen)


async def answers(server: Server) -> None:
    """A server answers as before."""
    assert (await ask(server, generate(chat("Hello")))).text
    await wait_idle(server)


async def test_what_is_new_is_appended():
    """Heads that have grown, in one event; nothing if none has. The next look knows them."""
    both = [grown("n2", 7), still("n3", 4)]
    others = Others(both, [still("n2", 7), still("n3", 4)])
    store = MemoryStore()
    assert [ev.HeadsSeen(heads=(("n2", 7, "ab"),))] == await seen(store, others, 4)
    assert [{}, {"n2": (7, "ab")}] == others.since[:2]

    again = Others([grown("n2", 9), grown("n3", 5)], [])
    heads = (("n2", 9, "ab"), ("n3", 5, "ab"))
    assert ev.HeadsSeen(heads=heads) == (await seen(store, again, 2))[-1]
    assert {"n2": (7, "ab")} == again.since[0]  # of the run before


async def test_a_database_that_cannot_be_read():
    """It is logged, and read again the next time; the server serves."""
    others = Others(StoreError("it is down"), [grown("n2", 7)], [])
    with structlog.testing.capture_logs() as logs:
        assert 1 == len(await seen(MemoryStore(), others, 3))
    (line,) = [one for one in logs if "cannot be read" in one["event"]]
    assert ("warning", "it is down") == (line["log_level"], line["fact"])


async def test_a_journal_that_cannot_be_read():
    """It is logged once, and those of the other nodes are seen; again once it can be read."""
    odd = NodeHead.unread("n2", "no column")
    others = Others([odd, grown("n3", 4)], [odd], [grown("n2", 7)], [odd], [])
    store = MemoryStore()
    with structlog.testing.capture_logs() as logs:
        heads = await seen(store, others, 5)
    assert [(("n3", 4, "ab"),), (("n2", 7, "ab"),)] == [one.heads for one in heads]
    lines = [one for one in logs if "cannot be read" in one["event"]]
    assert [("warning", "n2", "no column")] * 2 == [
        (one["log_level"], one["node"], one["fact"]) for one in lines
    ]


async def test_a_journal_that_lost_rows():
    """It is logged once, and nothing is appended: what was seen before is on record."""
    gone = [still("n2", 5, is_lost=True)]
    others = Others([grown("n2", 7)], gone, gone, [still("n2", 8)], gone, [])
    with structlog.testing.capture_logs() as logs:
        assert 1 == len(await seen(MemoryStore(), others, 6))
    lines = [one for one in logs if "lost rows" in one["event"]]
    assert [("error", "n2", 7, 5)] * 2 == [
        (one["log_level"], one["node"], one["row"], one["ends_at"]) for one in lines
    ]


async def test_a_loss_that_was_accepted():
    """It is on record once, and the node's heads are seen again, from the acceptance on."""
    gone = attrs.evolve(still("n2", 5, is_lost=True), accepted=(4, "cd"))
    others = Others([grown("n2", 7)], [gone, grown("n3", 2)], [grown("n2", 5)], [])
    store = MemoryStore()
    with structlog.testing.capture_logs() as logs:
        heads = await seen(store, others, 4)
    assert [(("n2", 7, "ab"),), (("n3", 2, "ab"),), (("n2", 5, "ab"),)] == [
        one.heads for one in heads
    ]
    loss = ev.LossSeen(node="n2", lost="7:ab", position=4, row_hash="cd")
    assert [loss] == events_of(store, ev.LossSeen)
    assert (4, "cd") == others.since[2]["n2"]
    levels = [one["log_level"] for one in logs if "this node saw" in one["event"]]
    assert ["warning"] == levels


async def test_a_head_that_is_wrong():
    """A bug on record, which ends the task alone."""
    others = Others([grown("n2", 7)], [grown("n2", 6)])
    store = MemoryStore()
    with structlog.testing.capture_logs() as logs:
        async with serving_fake(store, heads_s=OFTEN_S, read_heads=others.read) as server:
            await until(lambda: events_of(store, ev.InvariantViolated))
            await answers(server)
            assert 2 == len(others.since)
    (violated,) = events_of(store, ev.InvariantViolated)
    assert "INV-6" == violated.invariant
    (line,) = [one for one in logs if "not seen until" in one["event"]]
    assert violated.bug_id == line["bug_id"]


async def test_a_stop_does_not_wait_for_the_database():
    """A server stops while it looks, and appends nothing after that."""
    store = MemoryStore()
    looking, answer = threading.Event(), threading.Event()

    def read(_: Mapping[str, tuple[int, str]]) -> Sequence[NodeHead]:
        looking.set()
        assert answer.wait(60)
        return [grown("n2", 7)]

    with trio.fail_after(60):
        async with serving_fake(store, heads_s=OFTEN_S, read_heads=read):
            await until(looking.is_set)
    answer.set()
    assert [] == events_of(store, ev.HeadsSeen)
    assert 1 == len(events_of(store, ev.ServerStopped))
