"""
A drill on damage that no request reads: a block changes in memory and is not reused, and the shadow
check of another answer finds it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from cairn.journal import events as ev
from cairn.journal.replay import Report
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.faults.memory import bit_flipped
from cairn.ops.drills.outcome import Check, Outcome, Scene, checked
from cairn.ops.drills.running_checks import DEADLINE_S, Fault, Seen, outcome_of
from cairn.ops.drills.server.conversation import (
    VICTIM,
    Bystander,
    asks_the_same,
    goes_on,
    victim_first,
)
from cairn.ops.drills.server.private_server import private_server

_SERIES = 'cairn_shadow_checks_total{result="differs"} 1.0'

Damaging = Callable[[Damage], Awaitable[None]]


@attrs.define
class _Watch:
    """Counts what the journal reports, so that the drill can wait for it."""

    seen: Seen
    same: int = 0
    changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __call__(self, recorded: ev.Recorded) -> None:
        """Take a committed event."""
        event = recorded.event
        if isinstance(event, ev.InvariantViolated):
            self.seen.violated_s.setdefault(event.bug_id, time.monotonic())
        elif isinstance(event, ev.ShadowEnded):
            self.same += event.result == "same"
        self.changed.unpark_all()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition is true."""
        while not is_so():
            await self.changed.park()


async def play(damage: Damaging, scene: Scene) -> Outcome:
    """
    One of the victim's blocks is damaged while the victim continues in its slab; the shadow check
    of that answer reads the block.
    """
    fault = Fault(damage=damage, findings=("INV-3",), scope="blocks", metric=_SERIES)
    seen = Seen()
    with trio.move_on_after(DEADLINE_S):
        await _act(fault, scene, seen)
    return outcome_of(fault, scene, seen, _answered)


def _answered(fault: Fault, report: Report, seen: Seen) -> Check:
    return checked(
        "answered",
        [answer.status for answer in seen.broken] == [200],
        "no request read the block, so none got an error",
        "the victim was not answered",
    )


async def _act(fault: Fault, scene: Scene, seen: Seen) -> None:
    async with private_server(scene.directory, scene.model, shadow_share=1.0) as private:
        client, bystander, watch = private.client, Bystander(), _Watch(seen)
        private.server.observe(watch)
        seen.first = await client.ask(victim_first())
        seen.bystander.append(await client.ask(bystander.first()))
        await watch.until(lambda: watch.same >= 2)
        damage = Damage(private.server, VICTIM)
        await fault.damage(damage)
        seen.struck_s = damage.struck_s
        seen.bystander.append(await client.ask(bystander.beside(seen.bystander[0])))
        seen.broken.append(await client.ask(goes_on(seen.first)[0]))
        await watch.until(lambda: bool(seen.violated_s) or watch.same >= 4)
        seen.again = await client.ask(asks_the_same(seen.first)[0])
        seen.bystander.append(await client.ask(bystander.after(seen.bystander[1])))
        seen.metrics = await client.get("/metrics")


def unseen(damage: Damaging = bit_flipped) -> Callable[[Scene], Awaitable[Outcome]]:
    """Runs a drill whose damage only the shadow check finds."""
    return partial(play, damage)
