"""What is in flight and at work, and which tasks a change wakes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from cairn.actors.idle.activity import Activity


def test_a_request_is_in_flight_from_its_preparation_to_its_last_answer() -> None:
    """Between preparation and tickets there is no moment at which the server looks idle."""
    activity, seen = Activity(), list[bool]()
    with activity.preparing(2):
        seen.append(activity.is_idle)
        activity.arrive(2)
    seen.append(activity.is_idle)
    activity.leave()
    seen.append(activity.is_idle)
    activity.leave()
    assert [False, False, False] == seen
    assert activity.is_idle
    assert 2 == activity.arrivals


def test_a_request_that_was_refused_in_preparation_never_arrived() -> None:
    """It is no longer in flight, whatever ended it."""
    activity = Activity()
    with pytest.raises(ValueError, match="refused"), activity.preparing():
        raise ValueError("refused")
    assert (True, 0) == (activity.is_idle, activity.arrivals)


def test_upkeep_begins_only_when_no_session_is_at_work() -> None:
    """It may continue while one is: a check may have asked that session for its slab."""
    activity = Activity()
    with activity.session_at_work():
        assert (False, True) == (activity.upkeep_may_begin, activity.upkeep_may_continue)
    assert (True, True) == (activity.upkeep_may_begin, activity.upkeep_may_continue)


@pytest.mark.parametrize("reason", ["in flight", "draining", "not allowed"])
def test_upkeep_ends(reason: str) -> None:
    """A request, a stop of the server, or a full journal ends it."""
    activity = Activity(lambda: reason != "not allowed")
    if reason == "in flight":
        activity.arrive(1)
    activity.draining = reason == "draining"
    assert (False, False) == (activity.upkeep_may_begin, activity.upkeep_may_continue)


@pytest.mark.trio
async def test_waiting_for_idle_lasts_until_the_last_answer_has_left() -> None:
    """A change that leaves a request in flight is not the end of the wait."""
    activity = Activity()
    activity.arrive(2)
    async with trio.open_nursery() as nursery:
        woken = await _waiting(nursery, activity.wait_idle)
        for left in (False, True):
            activity.leave()
            await trio.testing.wait_all_tasks_blocked()
            assert woken.is_set() is left
    await activity.wait_idle()


@pytest.mark.trio
async def test_every_report_wakes_the_tasks_that_wait_for_a_change() -> None:
    """
    The end of a request or an answer, a session that has finished its work, and a plain report.
    """
    activity = Activity()

    def work() -> None:
        with activity.session_at_work():
            pass

    def prepare() -> None:
        with activity.preparing():
            pass

    activity.arrive(1)
    for report in (work, prepare, activity.leave, activity.changed):
        async with trio.open_nursery() as nursery:
            woken = await _waiting(nursery, activity.wait_change)
            assert not woken.is_set()
            report()
            with trio.fail_after(60):
                await woken.wait()


@pytest.mark.trio
async def test_a_change_since_the_last_look_is_not_missed() -> None:
    """A task that has worked since it looked finds at once that something changed."""
    activity = Activity()
    seen = activity.changes
    activity.changed()
    with trio.fail_after(60):
        await activity.wait_change(seen)
    async with trio.open_nursery() as nursery:
        woken = await _waiting(nursery, lambda: activity.wait_change(activity.changes))
        assert not woken.is_set()
        activity.changed()


async def _waiting(nursery: trio.Nursery, wait: Callable[[], Awaitable[None]]) -> trio.Event:
    """A task that waits; the event is set when it continues."""
    woken = trio.Event()

    async def run() -> None:
        await wait()
        woken.set()

    nursery.start_soon(run)
    await trio.testing.wait_all_tasks_blocked()
    return woken
