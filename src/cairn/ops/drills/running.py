"""
Drills on a running server: damage it beside a bystander, ask, stop it, and look at everything.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.ops.drills import running_checks as checks
from cairn.ops.drills.evidence import command
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.outcome import Check, Outcome, Scene
from cairn.ops.drills.running_checks import Fault, Seen
from cairn.ops.drills.server.conversation import (
    BYSTANDER,
    VICTIM,
    Bystander,
    asks_the_same,
    victim_first,
)
from cairn.ops.drills.server.private_server import private_server, stored_rows

DEADLINE_S = 60.0
"""After so long, what was to happen does not happen any more."""


async def play(fault: Fault, scene: Scene) -> Outcome:
    """A drill from its beginning to what came of it."""
    seen = Seen()
    with trio.move_on_after(DEADLINE_S):
        await _act(fault, scene, seen)
    rows = stored_rows(scene.directory)
    report = replay(rows)
    kind = fault.findings[-1]
    bug = next((one for one in report.findings if one.invariant == kind and one.recorded), None)
    if bug is None:
        fact = "nothing was caught" if seen.struck_s is not None else "the damage was never done"
        return Outcome(
            checks=(Check("caught", False, fact),), bug_id=None, command="", caught_ms=None
        )
    caught_ms = None
    if seen.struck_s is not None and bug.bug_id in seen.violated_s:
        caught_ms = (seen.violated_s[bug.bug_id] - seen.struck_s) * 1000
    told = ("replay", bug.bug_id, "--data-dir", scene.directory)
    return Outcome(
        checks=(
            checks.caught(fault, report, bug),
            checks.journaled(fault, rows, report, bug),
            checks.counted(report, seen),
            checks.logged(scene, report),
            checks.answered(fault, report, seen),
            checks.confined(fault, report, seen, scene.reference),
            checks.replayed(bug, told),
        ),
        bug_id=bug.bug_id,
        command=command(*told),
        caught_ms=caught_ms,
    )


async def _act(fault: Fault, scene: Scene, seen: Seen) -> None:
    async with private_server(scene.directory, scene.model) as house:
        settled = {VICTIM: trio.Event(), BYSTANDER: trio.Event()}

        def watch(recorded: ev.Recorded) -> None:
            event = recorded.event
            if isinstance(event, ev.InvariantViolated):
                seen.violated_s.setdefault(event.bug_id, time.monotonic())
            elif isinstance(event, ev.SessionSettled) and event.session in settled:
                settled[event.session].set()

        house.server.observe(watch)
        client, talk = house.client, Bystander()
        seen.first = await client.ask(victim_first())
        seen.bystander.append(await client.ask(talk.first()))
        for at_rest in settled.values():
            await at_rest.wait()
        damage = Damage(house.server, VICTIM)
        await fault.damage(damage)
        begun = trio.Event()

        async def beside() -> None:
            seen.bystander.append(await client.stream(talk.beside(seen.bystander[0]), begun))

        asked = fault.asks(seen.first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            await begun.wait()
            for body in asked:
                seen.broken.append(
                    await client.stream(body, trio.Event())
                    if body.get("stream")
                    else await client.ask(body)
                )
        seen.struck_s = damage.struck_s
        # Blocks that broke are reused by nobody, so what needed them is served without.
        once_more = asks_the_same(seen.first)[0] if fault.scope == "blocks" else asked[-1]
        seen.again = await client.ask({**once_more, "stream": False})
        seen.bystander.append(await client.ask(talk.after(seen.bystander[1])))
        seen.metrics = await client.get("/metrics")


def on_a_server(fault: Fault) -> Callable[[Scene], Awaitable[Outcome]]:
    """How a drill with this fault goes."""
    return partial(play, fault)
