"""
Drills on a running server: damage it, send requests beside a bystander, stop it, and check.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from cairn.journal import events as ev
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.outcome import Outcome, Scene
from cairn.ops.drills.running_checks import DEADLINE_S, Fault, Seen, outcome_of
from cairn.ops.drills.server.conversation import (
    BYSTANDER,
    VICTIM,
    Bystander,
    asks_the_same,
    victim_first,
)
from cairn.ops.drills.server.private_server import private_server


async def play(fault: Fault, scene: Scene) -> Outcome:
    """Run a drill with a fault."""
    seen = Seen()
    with trio.move_on_after(DEADLINE_S):
        await _act(fault, scene, seen)
    return outcome_of(fault, scene, seen)


async def _act(fault: Fault, scene: Scene, seen: Seen) -> None:
    async with private_server(scene.directory, scene.model) as private:
        settled = {VICTIM: trio.Event(), BYSTANDER: trio.Event()}

        def watch(recorded: ev.Recorded) -> None:
            event = recorded.event
            if isinstance(event, ev.InvariantViolated):
                seen.violated_s.setdefault(event.bug_id, time.monotonic())
            elif isinstance(event, ev.SessionSettled) and event.session in settled:
                settled[event.session].set()

        private.server.observe(watch)
        client, bystander = private.client, Bystander()
        seen.first = await client.ask(victim_first())
        seen.bystander.append(await client.ask(bystander.first()))
        for session in settled.values():
            await session.wait()
        damage = Damage(private.server, VICTIM)
        await fault.damage(damage)
        begun = trio.Event()

        async def beside() -> None:
            body = bystander.beside(seen.bystander[0])
            seen.bystander.append(await client.stream(body, begun))

        bodies = fault.asks(seen.first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            await begun.wait()
            for body in bodies:
                seen.broken.append(
                    await client.stream(body, trio.Event())
                    if body.get("stream")
                    else await client.ask(body)
                )
        seen.struck_s = damage.struck_s
        # Broken blocks are never reused, so the request that needed them is served without them.
        again = asks_the_same(seen.first)[0] if fault.scope == "blocks" else bodies[-1]
        seen.again = await client.ask({**again, "stream": False})
        seen.bystander.append(await client.ask(bystander.after(seen.bystander[1])))
        seen.metrics = await client.get("/metrics")


def on_a_server(fault: Fault) -> Callable[[Scene], Awaitable[Outcome]]:
    """Runs a drill with this fault."""
    return partial(play, fault)
