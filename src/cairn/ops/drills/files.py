"""A drill on damage outside Cairn: KV on disk changes, and is not used. That is not a bug."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import attrs
import trio

from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.state import SessionId, State
from cairn.ops.drills.evidence import command, logged, run_ops
from cairn.ops.drills.outcome import Check, Outcome, Scene, checked
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.conversation import VICTIM, Bystander, asks_the_same, victim_first
from cairn.ops.drills.server.private_server import private_server, stored_rows

_DISK_BYTES = 16 * 1024 * 1024

Rotting = Callable[[Path], None]


@attrs.define
class _Seen:
    struck_s: float | None = None
    rejected_s: float | None = None
    first: Answer | None = None
    again: Answer | None = None
    bystander: list[Answer] = attrs.field(factory=list)
    metrics: str = ""


def bit_flipped(path: Path) -> None:
    """One bit in the middle of a file flips."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


async def play(damage: Rotting, scene: Scene) -> Outcome:
    """
    A server stops and leaves blocks on disk, one file is damaged, and the next server gets a
    request that would reuse it.
    """
    seen = _Seen()
    await _act(damage, scene, seen)
    rows = stored_rows(scene.directory)
    events = [decode(row) for row in rows]
    found = [one for one in events if isinstance(one.event, ev.BlockFileRejected)]
    reasons = [one.event.reason for one in found if isinstance(one.event, ev.BlockFileRejected)]
    caught_ms = None
    if seen.struck_s is not None and seen.rejected_s is not None:
        caught_ms = (seen.rejected_s - seen.struck_s) * 1000
    verify = ("verify", "--data-dir", scene.directory)
    code, printed = run_ops(*verify)
    return Outcome(
        checks=(
            checked(
                "caught",
                reasons == ["digest"],
                "the file's digest differs from the block's, so the file was not used",
                f"files rejected: {' '.join(reasons) or 'none'}",
            ),
            _journaled(scene, [one.position for one in found], events),
            checked(
                "counted",
                'cairn_blocks_rejected_total{reason="digest"} 1.0' in seen.metrics.splitlines(),
                "rejected files by reason, as in the journal",
                "the metrics count no rejected file",
            ),
            checked(
                "logged",
                logged(scene.directory, "a block file was rejected", level="warning"),
                "a warning with the block's key",
                "no line",
            ),
            _answered(scene, seen),
            _confined(scene, seen, events),
            checked(
                "replayed",
                (code, "broken: 0" in printed.splitlines()) == (0, True),
                "the journal passes verification: damage outside Cairn is not a bug",
                "the journal failed verification",
            ),
        ),
        command=command(*verify),
        caught_ms=caught_ms,
    )


async def _act(damage: Rotting, scene: Scene, seen: _Seen) -> None:
    serve = partial(
        private_server,
        scene.directory,
        scene.model,
        blocks_folder=scene.directory / "blocks",
        disk_bytes=_DISK_BYTES,
    )
    bystander = Bystander()
    async with serve() as private:
        seen.first = await private.client.ask(victim_first())
        seen.bystander.append(await private.client.ask(bystander.first()))
    damage(_file(scene.directory, replay(stored_rows(scene.directory)).state))
    async with serve() as private:

        def watch(recorded: ev.Recorded) -> None:
            if isinstance(recorded.event, ev.BlockFileRejected) and seen.rejected_s is None:
                seen.rejected_s = time.monotonic()

        private.server.observe(watch)
        begun = trio.Event()

        async def beside() -> None:
            body = bystander.beside(seen.bystander[0])
            seen.bystander.append(await private.client.stream(body, begun))

        seen.struck_s = time.monotonic()  # when the file may be read again
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            await begun.wait()
            seen.again = await private.client.ask(asks_the_same(seen.first)[0])
        seen.bystander.append(await private.client.ask(bystander.after(seen.bystander[1])))
        seen.metrics = await private.client.get("/metrics")


def _file(directory: Path, state: State) -> Path:
    """The file of the first block of the victim's conversation."""
    last = state.session(SessionId(VICTIM)).last
    assert last is not None
    (path,) = (directory / "blocks").rglob(f"{last.prompt_keys[0]}.safetensors")
    return path


def _journaled(scene: Scene, rows: list[int], events: list[ev.Recorded]) -> Check:
    moved = [one.event.moved_to for one in events if isinstance(one.event, ev.BlockFileRejected)]
    exists = all(name and (scene.directory / "blocks" / name).is_file() for name in moved)
    return checked(
        "journaled",
        len(rows) == 1 and exists,
        f"row {rows[0] if rows else '-'}; the file was set aside",
        "no row, or no file was set aside",
    )


def _answered(scene: Scene, seen: _Seen) -> Check:
    answer = seen.again
    found = f"{answer.status}, {answer.cached_tokens} cached" if answer else "no answer"
    return checked(
        "answered",
        scene.baseline.is_recomputed(answer),
        "computed again, equal bit for bit",
        f"not as before: {found}",
    )


def _confined(scene: Scene, seen: _Seen, events: list[ev.Recorded]) -> Check:
    bits = [answer.bits for answer in seen.bystander]
    expected = [answer.bits for answer in scene.baseline.bystander]
    loaded = any(isinstance(one.event, ev.BlockLoaded) for one in events)
    return checked(
        "confined",
        bits == expected and loaded,
        "a bystander continued bit for bit, on blocks from files",
        "the bystander's answers differ, or none of their files was used",
    )


def in_a_file(damage: Rotting = bit_flipped) -> Callable[[Scene], Awaitable[Outcome]]:
    """Runs a drill that damages a block file between two runs of a server."""
    return partial(play, damage)
