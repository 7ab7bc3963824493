"""Drills on a journal that is changed on disk: no server continues it (INV-8)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from cairn.actors.boot import BootRefused
from cairn.actors.threads.writer import WriterDied
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row
from cairn.journal.rows.heads import Head
from cairn.ops.drills.evidence import command, logged, run_ops
from cairn.ops.drills.faults.journal import tail_rewritten
from cairn.ops.drills.outcome import Check, Outcome, Scene, checked
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.conversation import goes_on, victim_first
from cairn.ops.drills.server.private_server import private_server, stored_rows

_NOT_JOURNALED = Check("journaled", None, "nothing is appended to a broken chain")
_NOT_COUNTED = Check("counted", None, "no server is running, so there are no metrics")

Rewriting = Callable[[Path], int]


async def play_stopped(damage: Rewriting, scene: Scene) -> Outcome:
    """A server stops in order, its journal is changed, and another server is started on it."""
    async with private_server(scene.directory, scene.model) as private:
        first = await private.client.ask(victim_first())
    row = damage(scene.directory)
    rows = stored_rows(scene.directory)
    broken = next((one for one in replay(rows).findings if not one.recorded), None)
    refusal = await refusal_on_start(scene)
    confined = checked(
        "confined",
        stored_rows(scene.directory) == rows and first.bits == scene.baseline.victim.bits,
        "the journal was not changed",
        "the journal was written to, or the answer before differs",
    )
    if broken is None:
        return Outcome.uncaught("the chain passes verification, as before", confined)
    replay_it = ("replay", broken.bug_id, "--data-dir", scene.directory)
    code, printed = run_ops(*replay_it)
    caught = (broken.invariant, broken.position) == ("INV-8", row)
    names = all(word in (refusal or "") for word in ("INV-8", f"row {row} ", broken.bug_id))
    return Outcome(
        checks=(
            Check(
                "caught", caught, f"{broken.invariant} at row {broken.position}: {broken.message}"
            ),
            _NOT_JOURNALED,
            _NOT_COUNTED,
            checked(
                "logged",
                logged(scene.directory, "the journal failed verification", bug_id=broken.bug_id),
                "an error with its bug id",
                "no line with its bug id",
            ),
            checked(
                "answered",
                names,
                "a server refuses to start on it, and says why",
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
        command=command(*replay_it),
    )


async def refusal_on_start(scene: Scene) -> str | None:
    """Why a server does not start on the journal; None if it does."""
    try:
        async with private_server(scene.directory, scene.model):
            return None
    except BootRefused as refused:
        return str(refused)


async def play_beneath(damage: Rewriting, scene: Scene) -> Outcome:
    """
    The end of the journal is rewritten while a server runs. The chain on disk is intact again, and
    only the head that the server remembers reveals the change.
    """
    answers: list[Answer] = []
    died: list[BaseException] = []
    forged: list[Row] = []
    saved_head, struck_s, ended_s = "", 0.0, 0.0
    try:
        with trio.move_on_after(30):
            async with private_server(scene.directory, scene.model) as private:
                settled = trio.Event()

                def watch(recorded: ev.Recorded) -> None:
                    if isinstance(recorded.event, ev.SessionSettled):
                        settled.set()

                private.server.observe(watch)
                first = await private.client.ask(victim_first())
                await settled.wait()
                last = stored_rows(scene.directory)[-1]
                saved_head = str(Head(last.position, last.hash))
                damage(scene.directory)
                forged = stored_rows(scene.directory)
                struck_s = time.monotonic()
                answers.append(await private.client.ask(goes_on(first)[0]))
    except* WriterDied as group:
        ended_s = time.monotonic()
        died.extend(group.exceptions)
    rows = stored_rows(scene.directory)
    fooled, _ = run_ops("verify", "--data-dir", scene.directory)
    verify = ("verify", "--head", saved_head, "--data-dir", scene.directory)
    code, printed = run_ops(*verify)
    answered = not any(answer.status == 200 for answer in answers)
    found = "saved head: not in the chain" in printed
    return Outcome(
        checks=(
            checked(
                "caught",
                bool(died),
                "the next append did not follow the head, and the server stopped",
                "the server continued",
            ),
            _NOT_JOURNALED,
            _NOT_COUNTED,
            checked(
                "logged",
                logged(scene.directory, "the journal cannot be written"),
                "an error with the row that did not follow",
                "no line says why it stopped",
            ),
            checked(
                "answered",
                answered,
                "no token was sent",
                "a request was answered anyway",
            ),
            checked(
                "confined",
                bool(forged) and rows == forged,
                "nothing was appended to the rewritten rows",
                "rows were appended to the rewritten ones",
            ),
            checked(
                "replayed",
                (fooled, code, found) == (0, 1, True),
                "the chain alone passes verification; compared with the saved head it fails",
                "the saved head does not reveal the change",
            ),
        ),
        command=command(*verify),
        caught_ms=(ended_s - struck_s) * 1000 if died else None,
    )


def on_stopped_server(damage: Rewriting) -> Callable[[Scene], Awaitable[Outcome]]:
    """Runs a drill that changes a journal while no server writes it."""
    return partial(play_stopped, damage)


def beneath_a_server(damage: Rewriting = tail_rewritten) -> Callable[[Scene], Awaitable[Outcome]]:
    """Runs a drill that changes a journal while its server runs."""
    return partial(play_beneath, damage)
