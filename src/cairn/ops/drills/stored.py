"""Drills on a journal: somebody changes what is on disk, and no server goes on on it (INV-8)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from cairn.actors.boot import BootRefused
from cairn.actors.threads.writer import WriterDied
from cairn.journal import events as ev
from cairn.journal.codec import Row
from cairn.journal.replay import replay
from cairn.ops.drills.evidence import command, logged, run_ops
from cairn.ops.drills.faults.journal import tail_rewritten
from cairn.ops.drills.outcome import Check, Outcome, Scene, looked
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.conversation import goes_on, victim_first
from cairn.ops.drills.server.private_server import private_server, stored_rows

_NOT_JOURNALED = Check("journaled", None, "nothing is added to a chain that is broken")
_NOT_COUNTED = Check("counted", None, "no server runs whose metrics could be read")

Rewriting = Callable[[Path], int]


async def play_stopped(damage: Rewriting, scene: Scene) -> Outcome:
    """A server stops in order, its journal is changed, and a server is started on it."""
    async with private_server(scene.directory, scene.model) as house:
        first = await house.client.ask(victim_first())
    row = damage(scene.directory)
    rows = stored_rows(scene.directory)
    broken = next((one for one in replay(rows).findings if not one.recorded), None)
    refusal = await _refusal(scene)
    confined = looked(
        "confined",
        stored_rows(scene.directory) == rows and first.bits == scene.reference.victim.bits,
        "the journal was left as it was found",
        "the journal was written to, or the answer before was another",
    )
    if broken is None:
        fact = "the chain holds, as if nothing had been done"
        return Outcome(
            checks=(Check("caught", False, fact), confined), bug_id=None, command="", caught_ms=None
        )
    told = ("replay", broken.bug_id, "--data-dir", scene.directory)
    code, printed = run_ops(*told)
    caught = (broken.invariant, broken.position) == ("INV-8", row)
    names = all(word in (refusal or "") for word in ("INV-8", f"row {row} ", broken.bug_id))
    return Outcome(
        checks=(
            Check(
                "caught", caught, f"{broken.invariant} at row {broken.position}: {broken.message}"
            ),
            _NOT_JOURNALED,
            _NOT_COUNTED,
            looked(
                "logged",
                logged(scene.directory, "the journal does not hold", bug_id=broken.bug_id),
                "an error with its bug id",
                "no line with its bug id",
            ),
            looked(
                "answered",
                names,
                "no server starts on it, and says why",
                f"refused with other words: {refusal}" if refusal else "a server started on it",
            ),
            confined,
            Check(
                "replayed",
                code == 0 and "\nreproduced: " in printed,
                printed.splitlines()[-1] if printed else "nothing was printed",
            ),
        ),
        bug_id=broken.bug_id,
        command=command(*told),
        caught_ms=None,
    )


async def _refusal(scene: Scene) -> str | None:
    """Why a server does not start on the journal; None where it does."""
    try:
        async with private_server(scene.directory, scene.model):
            return None
    except BootRefused as refused:
        return str(refused)


async def play_beneath(damage: Rewriting, scene: Scene) -> Outcome:
    """
    The end of the journal is written anew while a server writes it: the chain on disk is whole
    again, and what gives the forgery away is the head that the server has in mind.
    """
    answers: list[Answer] = []
    died: list[BaseException] = []
    forged: list[Row] = []
    kept, struck_s, ended_s = "", 0.0, 0.0
    try:
        with trio.move_on_after(30):
            async with private_server(scene.directory, scene.model) as house:
                settled = trio.Event()

                def watch(recorded: ev.Recorded) -> None:
                    if isinstance(recorded.event, ev.SessionSettled):
                        settled.set()

                house.server.observe(watch)
                first = await house.client.ask(victim_first())
                await settled.wait()
                kept = stored_rows(scene.directory)[-1].hash
                damage(scene.directory)
                forged = stored_rows(scene.directory)
                struck_s = time.monotonic()
                answers.append(await house.client.ask(goes_on(first)[0]))
    except* WriterDied as group:
        ended_s = time.monotonic()
        died.extend(group.exceptions)
    rows = stored_rows(scene.directory)
    fooled, _ = run_ops("verify", "--data-dir", scene.directory)
    told = ("verify", "--head", kept, "--data-dir", scene.directory)
    code, printed = run_ops(*told)
    answered = not any(answer.status == 200 for answer in answers)
    found = "saved head: not in the chain" in printed
    return Outcome(
        checks=(
            looked(
                "caught",
                bool(died),
                "the next append did not follow the head: the server stopped",
                "the server went on",
            ),
            _NOT_JOURNALED,
            _NOT_COUNTED,
            looked(
                "logged",
                logged(scene.directory, "the journal cannot be written"),
                "an error with the row that did not follow",
                "no line says why it stopped",
            ),
            looked(
                "answered",
                answered,
                "no token left",
                "a request was answered all the same",
            ),
            looked(
                "confined",
                bool(forged) and rows == forged,
                "nothing was written behind the forged rows",
                "rows were written behind the forged ones",
            ),
            looked(
                "replayed",
                (fooled, code, found) == (0, 1, True),
                "the chain alone verifies; against the saved head it does not",
                "the saved head reveals nothing",
            ),
        ),
        bug_id=None,
        command=command(*told),
        caught_ms=(ended_s - struck_s) * 1000 if died else None,
    )


def on_stopped_server(damage: Rewriting) -> Callable[[Scene], Awaitable[Outcome]]:
    """How a drill goes that changes a journal which nobody writes."""
    return partial(play_stopped, damage)


def beneath_a_server(damage: Rewriting = tail_rewritten) -> Callable[[Scene], Awaitable[Outcome]]:
    """How a drill goes that changes a journal beneath its server."""
    return partial(play_beneath, damage)
