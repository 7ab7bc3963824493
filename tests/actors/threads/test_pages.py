"""Shares of reading pages: one page at a time for each tenant, and a rest after it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from cairn.actors.threads.pages import REPLAYS_MAX, REST_MAX_S, PageShares

pytestmark = pytest.mark.trio


async def read(shares: PageShares, tenant: str, takes_s: float, began: list[float]) -> None:
    """Read a page that takes a time."""
    async with shares.one_of(tenant):
        began.append(trio.current_time())
        await trio.sleep(takes_s)


async def test_pages_of_a_tenant_take_half_of_the_time(autojump_clock: object) -> None:
    """The next one begins after a rest as long as the page took; another tenant is not delayed."""
    shares, start = PageShares(), trio.current_time()
    alices, bobs = list[float](), list[float]()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(read, shares, "alice", 0.25, alices)
        nursery.start_soon(read, shares, "bob", 0.25, bobs)
    assert [0.0, 0.5, 1.0] == [round(at - start, 3) for at in alices]
    assert [0.0] == [at - start for at in bobs]


async def test_a_rest_is_bounded(autojump_clock: object) -> None:
    """It is short after a page that took long. A client that left does not end it."""
    shares, start = PageShares(), trio.current_time()
    began = list[float]()
    await read(shares, "alice", 60, began)
    with trio.move_on_after(REST_MAX_S + 0.5):
        await read(shares, "alice", 60, began)
    await read(shares, "alice", 0, began)
    assert [0.0, 60 + REST_MAX_S, 60 + REST_MAX_S + 1] == [at - start for at in began]


async def test_a_single_page_is_not_delayed(autojump_clock: object) -> None:
    """A page after a rest that is over begins at once."""
    shares, began = PageShares(), list[float]()
    await read(shares, "alice", 0.5, began)
    await trio.sleep(0.5)
    now = trio.current_time()
    await read(shares, "alice", 0.5, began)
    assert now == began[-1]


async def test_each_tenant_has_a_replay() -> None:
    """One tenant cannot take those of all; there is a limit for all together."""
    shares = PageShares()
    assert shares.begin_replay("alice")
    assert not shares.begin_replay("alice")
    assert shares.begin_replay("bob")
    for number in range(REPLAYS_MAX - 2):
        assert shares.begin_replay(f"t{number}")
    assert not shares.begin_replay("carol")
    shares.end_replay("alice")
    assert shares.begin_replay("carol")
