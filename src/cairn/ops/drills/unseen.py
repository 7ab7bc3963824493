"""
A drill on damage that no request meets: a block goes bad in memory and is not shared again, and the
shadow check of another answer finds it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.ops.drills import running_checks as checks
from cairn.ops.drills.evidence import command
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.faults.memory import bit_flipped
from cairn.ops.drills.outcome import Check, Outcome, Scene, looked
from cairn.ops.drills.running import DEADLINE_S
from cairn.ops.drills.running_checks import Fault, Seen
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.conversation import (
    VICTIM,
    Bystander,
    asks_the_same,
    goes_on,
    victim_first,
)
from cairn.ops.drills.server.private_server import private_server, stored_rows

_SERIES = 'cairn_shadow_checks_total{result="differs"} 1.0'

Damaging = Callable[[Damage], Awaitable[None]]


@attrs.define
class _Heard:
    """What the journal has told so far, and who waits for more."""

    seen: Seen
    same: int = 0
    moved: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __call__(self, recorded: ev.Recorded) -> None:
        """Take in a committed event."""
        event = recorded.event
        if isinstance(event, ev.InvariantViolated):
            self.seen.violated_s.setdefault(event.bug_id, time.monotonic())
        elif isinstance(event, ev.ShadowEnded):
            self.same += event.result == "same"
        self.moved.unpark_all()

    async def until(self, there: Callable[[], bool]) -> None:
        """Wait until something is so."""
        while not there():
            await self.moved.park()


async def play(damage: Damaging, scene: Scene) -> Outcome:
    """
    A block of the victim's goes bad, its conversation goes on in its slab, and nobody waits for
    what is looked at then.
    """
    fault = Fault(damage=damage, findings=("INV-3",), scope="blocks")
    seen, onward = Seen(), list[Answer]()
    with trio.move_on_after(DEADLINE_S):
        await _act(fault, scene, seen, onward)
    rows = stored_rows(scene.directory)
    report = replay(rows)
    bug = next((one for one in report.findings if one.invariant == "INV-3" and one.recorded), None)
    if bug is None:
        fact = "nothing was caught" if seen.struck_s is not None else "the damage was never done"
        return Outcome(
            checks=(Check("caught", False, fact),), bug_id=None, command="", caught_ms=None
        )
    counted = checks.counted(report, seen)
    if counted.held and _SERIES not in seen.metrics.splitlines():
        counted = Check("counted", False, "the metrics know of no shadow check that differed")
    told = ("replay", bug.bug_id, "--data-dir", scene.directory)
    caught_ms = None
    if seen.struck_s is not None and bug.bug_id in seen.violated_s:
        caught_ms = (seen.violated_s[bug.bug_id] - seen.struck_s) * 1000
    return Outcome(
        checks=(
            checks.caught(fault, report, bug),
            checks.journaled(fault, rows, report, bug),
            counted,
            checks.logged(scene, report),
            looked(
                "answered",
                [answer.status for answer in onward] == [200],
                "no request met the block, so none heard of a bug",
                "the victim was not answered",
            ),
            checks.confined(fault, report, seen, scene.reference),
            checks.replayed(bug, told),
        ),
        bug_id=bug.bug_id,
        command=command(*told),
        caught_ms=caught_ms,
    )


async def _act(fault: Fault, scene: Scene, seen: Seen, onward: list[Answer]) -> None:
    async with private_server(scene.directory, scene.model, shadow_share=1.0) as house:
        client, talk, heard = house.client, Bystander(), _Heard(seen)
        house.server.observe(heard)
        seen.first = await client.ask(victim_first())
        seen.bystander.append(await client.ask(talk.first()))
        await heard.until(lambda: heard.same >= 2)
        damage = Damage(house.server, VICTIM)
        await fault.damage(damage)
        seen.struck_s = damage.struck_s
        seen.bystander.append(await client.ask(talk.beside(seen.bystander[0])))
        onward.append(await client.ask(goes_on(seen.first)[0]))
        await heard.until(lambda: bool(seen.violated_s) or heard.same >= 4)
        seen.again = await client.ask(asks_the_same(seen.first)[0])
        seen.bystander.append(await client.ask(talk.after(seen.bystander[1])))
        seen.metrics = await client.get("/metrics")


def unseen(damage: Damaging = bit_flipped) -> Callable[[Scene], Awaitable[Outcome]]:
    """How a drill goes whose damage only the shadow check finds."""
    return partial(play, damage)
