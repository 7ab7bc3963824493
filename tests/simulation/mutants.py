"""
Faults in the actors that simulations must find.

``python -P -m tests.simulation.mutants`` puts each of them into a copy of the source, one at a
time, runs simulations until one fails, and prints how many seeds that took. It exits with 1 if a
mutant is not found that was found before, or if its place in the source has gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import click

import cairn

_SOURCE = Path(cairn.__file__).parent
_LONGEST_S = 3600


@attrs.frozen
class Mutant:
    """
    A fault.

    Attributes:
        fault: what it does, in words.
        file: below ``src/cairn/actors``.
        old: the text that it replaces, which occurs once.
        missed: why simulations seldom or never find it, and which test does; empty for others.
    """

    fault: str
    file: str
    old: str
    new: str
    missed: str = ""


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a reply leaves before its events are committed",
        "requests/replies.py",
        "await unless_dead(self._writer.wait_committed(item.receipt))",
        "pass",
    ),
    Mutant(
        "tokens are sent with the receipt of the piece before",
        "sessions/answer.py",
        "            self._receipt = record(tokens, text)\n",
        "            record(tokens, text)\n",
    ),
    Mutant(
        "the end of an answer is announced without its event's receipt",
        "sessions/answer.py",
        "        ticket.reply(\n            receipt,\n            Finished(",
        "        ticket.reply(\n            self._receipt,\n            Finished(",
    ),
    Mutant(
        "the writer reports all rows as committed that it was given",
        "threads/writer.py",
        "Head(last.position, last.hash), last.position\n",
        "Head(last.position, last.hash), self._submitted\n",
    ),
    Mutant(
        "the writer reports rows as committed before it stores them",
        "threads/writer.py",
        "                    self._store_rows(rows, together[0].base, token)\n",
        "                    token.run_sync_soon(self._announce, together, 0)\n"
        "                    self._store_rows(rows, together[0].base, token)\n",
    ),
    Mutant(
        "the writer drops rows for which there is no room",
        "threads/writer.py",
        "                self._closing.wait(_PROBE_S)",
        "                break",
    ),
    Mutant(
        "the writer forgets to wake those who wait for a commit",
        "threads/writer.py",
        "        self._measured(log_bytes)\n        self._moved.unpark_all()\n",
        "        self._measured(log_bytes)\n",
    ),
    Mutant(
        "a session that keeps its slab leaves those waiting that asked for it",
        "sessions/inbox.py",
        "        while self.slab_requests:\n",
        "        while False:\n",
    ),
    Mutant(
        "commands that a closed session left are never ended",
        "sessions/session.py",
        "                command.ticket.rerouted = True\n            command.done.set()",
        "                command.ticket.rerouted = True",
        missed="no request is in an inbox when a session ends: tests/actors/sessions/test_scope.py",
    ),
    Mutant(
        "an idle session does not release its slab",
        "sessions/session.py",
        "            await self.cache.release_slab(command.reason)\n",
        "            pass\n",
    ),
    Mutant(
        "a cancelled request is not recorded",
        "sessions/session.py",
        "        except Gone as gone:\n            self.cache.append(\n",
        "        except Gone as gone:\n            str(\n",
    ),
    Mutant(
        "a slab keeps the tokens that a request does not share",
        "sessions/generate.py",
        "if cache.session.cached_tokens > keep:",
        "if cache.session.cached_tokens < keep:",
    ),
    Mutant(
        "a slab that is too small is kept",
        "sessions/generate.py",
        "cache.session.slab.capacity_tokens < needed:",
        "cache.session.slab.capacity_tokens < 0:",
    ),
    Mutant(
        "a block is sealed that a pass has only begun",
        "sessions/generate.py",
        "for place in range(start // size, end // size):",
        "for place in range(start // size, end // size + 1):",
    ),
    Mutant(
        "blocks are sealed under the key of the block before",
        "sessions/generate.py",
        "key, begin = cache.request.prompt_keys[place], place * size",
        "key, begin = cache.request.prompt_keys[max(0, place - 1)], place * size",
    ),
    Mutant(
        "the sequence of a new session starts one too low",
        "sessions/claim.py",
        "cache.seq += 2 if opened is None else 3",
        "cache.seq += 2",
    ),
    Mutant(
        "a joined request decides while it still has to wait",
        "sessions/claim.py",
        "if context.sequencer.waits(cache.id):",
        "if False:",
    ),
    Mutant(
        "a request that another session is to serve is taken all the same",
        "sessions/claim.py",
        "if not self._serves(ticket) or cache.is_quarantined:",
        "if cache.is_quarantined:",
    ),
    Mutant(
        "nothing wakes a request when the one that it joined has ended",
        "sequencer.py",
        "            self._on_wait_ended()\n",
        "            pass\n",
        missed="other changes wake it a little later: tests/actors/sessions/test_joins.py",
    ),
    Mutant(
        "a block is stored without making room",
        "memory.py",
        "                    for other in leaving or ():\n"
        "                        await self._evict(other)\n            store",
        "                    leaving = ()\n            store",
    ),
    Mutant(
        "a block is loaded without making room",
        "memory.py",
        "                for other in leaving:\n"
        "                    await self._evict(other, keep)\n"
        "                if not await self._load",
        "                if not await self._load",
    ),
    Mutant(
        "a needless short block is evicted without a second look",
        "memory.py",
        "if not state.is_pinned(needless[0]) and state.blocks[needless[0]].present:",
        "if True:",
        missed="another session has to match the block while one waits for a lock: no test yet",
    ),
    Mutant(
        "a slab is opened without room for it",
        "memory.py",
        "            while not eviction.slab_fits(self._sequencer.state, size):\n"
        "                if await",
        "            while False:\n                if await",
    ),
    Mutant(
        "the engine never reports the end of an answer",
        "threads/engine.py",
        "                decoding.remove(one)\n"
        "                token.run_sync_soon(one.reports.send_nowait, None)\n"
        "        decoding[:]",
        "                decoding.remove(one)\n        decoding[:]",
    ),
    Mutant(
        "the engine forgets jobs that are no longer needed",
        "threads/engine.py",
        "            job.result = outcome.Value(None)\n"
        "            token.run_sync_soon(self._finish, job)",
        "            job.result = outcome.Value(None)",
    ),
    Mutant(
        "a task is woken before what it waits for is recorded",
        "threads/engine.py",
        "        if isinstance(job.result, outcome.Value):\n"
        "            job.result = outcome.capture(job.record, job.result.value)\n"
        "        job.done.set()",
        "        if isinstance(job.result, outcome.Value) and job.kind is not JobKind.COPY:\n"
        "            job.result = outcome.capture(job.record, job.result.value)\n"
        "        job.done.set()",
    ),
    Mutant(
        "a decode pass takes the token before the last",
        "threads/engine.py",
        "self.drawn = [one.token for one in report.all_drawn]",
        "self.drawn = self.drawn[-1:] or [one.token for one in report.all_drawn]",
    ),
    Mutant(
        "a request that has ended still counts as in flight",
        "models/model_server.py",
        "            self.activity.leave()\n",
        "            pass\n",
    ),
    Mutant(
        "a request is listed for ever",
        "models/model_server.py",
        "            del self._tickets[ticket.id]\n",
        "            pass\n",
    ),
    Mutant(
        "only one of those that wait for a change is woken",
        "idle/activity.py",
        "        self._waiting.unpark_all()",
        "        self._waiting.unpark()",
    ),
    Mutant(
        "decoded tokens stay in a slab that is settled",
        "sessions/settle.py",
        "elif session.cached_tokens > canonical:",
        "elif session.cached_tokens < canonical:",
    ),
    Mutant(
        "a shadow check keeps its slab",
        "memory.py",
        "await self._engine.call(lambda mlx: mlx.close_slab(slab), record)\n        finally:",
        "await self._engine.call(lambda mlx: None, lambda _: None)\n        finally:",
    ),
    Mutant(
        "the actor of a closed session goes on",
        "sessions/registry.py",
        "            actor.close()\n        self._sequencer.append(",
        "            pass\n        self._sequencer.append(",
    ),
    Mutant(
        "the end of a lost run is not recorded",
        "boot.py",
        "        sequencer.append(ev.ServerLost(boot=lost))\n",
        "        pass\n",
    ),
)


def place_of(mutant: Mutant) -> str | None:
    """The text of the mutant's file; None if its place is not there exactly once."""
    text = (_SOURCE / "actors" / mutant.file).read_text()
    return text if text.count(mutant.old) == 1 else None


@click.command()
@click.option("--seeds", default=200, show_default=True, help="How many seeds each gets at most.")
@click.option("--only", default="", help="Only those whose fault contains this text.")
def main(seeds: int, only: str) -> None:
    """Look for each mutant by simulations."""
    unfound, tried = [], 0
    for mutant in MUTANTS:
        if only not in mutant.fault:
            continue
        found, tried = _seeds_taken(mutant, seeds), tried + 1
        if not isinstance(found, tuple):
            unfound.append(mutant)
        click.echo(
            f"{found[0]:>4}  {mutant.fault}: {found[1]}"
            if isinstance(found, tuple)
            else f"   -  {mutant.fault}: {found}" + (mutant.missed and f" ({mutant.missed})")
        )
    click.echo(f"{tried - len(unfound)} of {tried} found")
    gone = any(place_of(mutant) is None for mutant in unfound)
    raise SystemExit(1 if gone or any(not mutant.missed for mutant in unfound) else 0)


def _seeds_taken(mutant: Mutant, seeds: int) -> tuple[int, str] | str:
    """How many seeds it took and what they found, or why there is no such number."""
    text = place_of(mutant)
    if text is None:
        return f"its place in {mutant.file} has gone"
    with tempfile.TemporaryDirectory(prefix="cairn-mutant-") as folder:
        copy = Path(folder) / "cairn"
        shutil.copytree(_SOURCE, copy)
        (copy / "actors" / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        run = [sys.executable, "-P", "-m", "tests.simulation.simulation"]
        done = subprocess.run(
            [*run, "--seeds", str(seeds), "--until-failed"],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    if done.returncode == 0:
        return f"not found by {seeds} seeds"
    return _counted(done.stdout), _fault_of(done.stdout + done.stderr)


def _counted(output: str) -> int:
    """The last seed that was begun."""
    lines = output.splitlines()
    begun = [line.split()[1].rstrip(":") for line in lines if line.startswith("seed ")]
    return int(begun[-1]) if begun else 0


def _fault_of(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("seed ") and ": " in line]
    return lines[-1].partition(": ")[2][:100] if lines else output.strip().splitlines()[-1][:100]


if __name__ == "__main__":
    main()
