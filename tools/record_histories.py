"""
Record the histories that the tests replay: a journal of each drill, and of healthy conversations of
each kind.

``python -P tools/record_histories.py`` records all of them again into ``tests/histories``; names as
arguments select some. It runs each on a private server, which takes a few minutes in all.
``expected.json`` next to them says which invariants break in each, at which row, and whether that
is on record and breaks again. Review its diff before you commit.

A history whose hash is in ``SHA256SUMS`` is that of a released version. It never changes and is not
recorded again: it shows that journals of that version are still read in the same way. The others
are recorded again whenever a format changes. ``--release`` lists all of them as released.

``every-kind`` is no conversation: the driver of the tests plays it, which knows all kinds of
events.

Ids and times are those of the recording. Directories of this machine are removed, and the hash
chain is computed again over the result. A drill that changes stored rows runs on the history
``stopped``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import trio
from tokenizers import Tokenizer

from cairn.engine import schedule
from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.rows.base import Base, base_of, loaded_of, state_of
from cairn.journal.rows.codec import GENESIS, Row, decode, encode
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.export import base_to_line, read_export, to_line
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.faults.engine import pass_raises
from cairn.ops.drills.faults.journal import row_changed, row_removed, tail_rewritten
from cairn.ops.drills.outcome import Scene
from cairn.ops.drills.server.baseline import Baseline, record_baseline
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.conversation import Message, onward, user
from cairn.ops.drills.server.private_server import PrivateServer, private_server, stored_rows
from cairn.ops.drills.table import DRILLS
from cairn.ops.journal.prune import prune

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))

from cairn_pebble.sequences import TURN_END
from tests.journal.model import AGENT, NOTES, played
from tests.support.held_engine import hold_prewarm
from tests.support.journals import handed_over
from tests.support.models.random_model import make_random_model

HISTORIES = Path("tests/histories")
EXPECTED = "expected.json"
RELEASED = "SHA256SUMS"
EVERY_KIND = "every-kind"
_TAPE = 28  # the seed of a tape on which the driver plays most kinds of events
_BLOCK_BYTES = 16 * 4096  # C tokens of the random model
_FILE = re.compile(r'File "[^"]*?/(?:(?:site-packages|src|lib/python[\d.]+)/|(?=tools/))([^"]*)"')
_TOKEN = re.compile(r'"content":"[^"]')

GUIDE = {
    "role": "system",
    "content": "You are a guide in the hills. Name what can be seen from each cairn on the way, "
    "and say how long the next leg takes on foot. Answer in short sentences.",
}
WAY = [GUIDE, user("Where do we start?")]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


# --- conversations -------------------------------------------------------------------------------


@attrs.frozen
class Talk:
    """A client of a private server that waits after each request until all sessions are idle."""

    private: PrivateServer

    async def ask(self, messages: Sequence[Message], **more: Any) -> Answer:
        """Ask greedily for a few tokens."""
        answer = await self.private.client.ask(
            {"messages": list(messages), "temperature": 0, "seed": 1, "max_tokens": 6, **more}
        )
        await self.wait_idle()
        return answer

    async def wait_idle(self) -> None:
        """Wait until no session is working, and all events are committed."""
        idle = {str(state) for state in (SessionState.IDLE, SessionState.QUARANTINED)}
        server = self.private.server
        while not set(server.statistics().sessions) <= idle:  # noqa: ASYNC110
            await trio.sleep(0.01)  # there is no event for all sessions being idle
        await server.loaded.writer.wait_committed(server.loaded.sequencer.state.position)

    async def leave(self, messages: Sequence[Message], begun: Callable[[], None]) -> None:
        """Stream a long answer, and disconnect after its first token and ``begun``."""
        body = {"messages": list(messages), "temperature": 0, "seed": 1, "max_tokens": 400}
        async with self.private.client.streaming(body) as response:
            async for line in response.aiter_lines():
                if _TOKEN.search(line):
                    break
            begun()
        await self.wait_idle()


@contextlib.asynccontextmanager
async def talking(directory: Path, model: Path, **changes: Any) -> AsyncIterator[Talk]:
    """A private server and a client for it."""
    async with private_server(directory, model, **changes) as private:
        yield Talk(private)


def token_of(model: Path, text: str) -> int:
    """The id of a token by its text."""
    found = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(text)
    assert found is not None
    return found


async def continuation(directory: Path, model: Path) -> None:
    """A conversation starts cold and continues twice."""
    async with talking(directory, model) as talk:
        first = await talk.ask(WAY)
        second = onward(WAY, first, "And then?")
        third = onward(second, await talk.ask(second), "How long does that take?")
        await talk.ask(third)


async def diverged(directory: Path, model: Path) -> None:
    """The client edits a message that was already answered, and then the system prompt."""
    async with talking(directory, model) as talk:
        first = await talk.ask(WAY)
        await talk.ask(onward(WAY, first, "And from the first cairn, in rain?"))
        await talk.ask(onward(WAY, first, "And from the second cairn, in snow?"))
        other = {**GUIDE, "content": GUIDE["content"].replace("hills", "Alps")}
        await talk.ask([other, *WAY[1:]])


async def shorter(directory: Path, model: Path) -> None:
    """The client returns to an earlier turn, repeats it, and repeats it without the cache."""
    async with talking(directory, model) as talk:
        second = onward(WAY, await talk.ask(WAY), "And then?")
        await talk.ask(onward(second, await talk.ask(second), "And after that?"))
        await talk.ask(second)
        await talk.ask(second, cache_prompt=False)


async def shared(directory: Path, model: Path) -> None:
    """Two conversations share the blocks of their system prompt."""
    async with talking(directory, model) as talk:
        await talk.ask(WAY)
        await talk.ask([GUIDE, user("Which of the streams can be crossed after rain?")])


async def copied_in_parts(directory: Path, model: Path) -> None:
    """
    A second session asks what a first one did, whose window has moved: sinks and window are copied
    block by block.
    """
    at_once, schedule.COPIED_AT_ONCE_BYTES = schedule.COPIED_AT_ONCE_BYTES, 1
    try:
        async with talking(directory, model, window=(4, 64)) as talk:
            asked = [GUIDE, user("Where do we start? " * 16)]
            await talk.ask(asked)
            await talk.ask(asked, session_id="other")
    finally:
        schedule.COPIED_AT_ONCE_BYTES = at_once


async def evicted(directory: Path, model: Path) -> None:
    """Sessions evict each other's blocks and slabs, and the first one returns."""
    async with talking(directory, model, blocks_bytes=7 * _BLOCK_BYTES, pool_slabs=1) as talk:
        first = await talk.ask(WAY)
        for place in range(2):
            text = f"{place}: tell me of the weather on the pass, and of the shelters. " * 3
            await talk.ask([user(text)])
        await talk.ask(onward(WAY, first, "And then?"))


async def windowed(directory: Path, model: Path) -> None:
    """A conversation outgrows its window, so its slab cannot be trimmed after the first answer."""
    async with talking(directory, model, window=(4, 64)) as talk:
        first = [GUIDE, user("Where do we start? " * 8)]
        second = onward(first, await talk.ask(first, max_tokens=24), "And then?")
        await talk.ask(onward(second, await talk.ask(second), "How long does that take?"))


async def cancelled(directory: Path, model: Path) -> None:
    """A client disconnects while its answer streams, and then asks again."""
    async with talking(directory, model) as talk:
        await talk.leave(WAY, lambda: None)
        await talk.ask(WAY)


async def killed(directory: Path, model: Path) -> None:
    """The server dies during an answer. The next run records that; the conversation continues."""
    before = directory.with_name(f"{directory.name}-before")
    at_death: list[Row] = []
    async with talking(before, model) as talk:
        first = await talk.ask(WAY)
        again = onward(WAY, first, "And then?")
        await talk.leave(again, lambda: at_death.extend(stored_rows(before)))
    # If a server is killed, its journal is what was committed at that moment: here the first tokens
    # of the second answer. The answer is so short that it may have ended before the client left.
    asked = max(place for place, row in enumerate(at_death) if row.kind == "path_selected")
    emitted = (place for place, row in enumerate(at_death) if row.kind == "tokens_emitted")
    del at_death[next(place for place in emitted if place > asked) + 1 :]
    store_rows(directory, at_death)
    shutil.copy(before / "secret", directory / "secret")
    async with talking(directory, model) as talk:
        await talk.ask(again)


async def stopped(directory: Path, model: Path) -> None:
    """The server stops and starts again, and the conversation continues."""
    async with talking(directory, model) as talk:
        first = await talk.ask(WAY)
    async with talking(directory, model) as talk:
        await talk.ask(onward(WAY, first, "And then?"))


async def quarantined(directory: Path, model: Path) -> None:
    """A session crashes. Its conversation continues in a new one, also after a restart."""
    async with talking(directory, model) as talk:
        first = await talk.ask(WAY)
        (session,) = talk.private.server.loaded.sequencer.state.sessions
        await pass_raises(Damage(talk.private.server, session))
        again = onward(WAY, first, "And then?")
        await talk.ask(again)
        await talk.ask(again)
    async with talking(directory, model) as talk:
        await talk.ask(onward(again, first, "And from there?"))


async def prewarmed(directory: Path, model: Path) -> None:
    """
    The next prompt is prewarmed and uses that. The request after it comes while the prewarm runs,
    which is then abandoned.
    """
    async with talking(directory, model) as talk:
        second = onward(WAY, await talk.ask(WAY, max_tokens=24), "And then?")
        gate = hold_prewarm(talk.private.server)
        client, greedily = talk.private.client, {"temperature": 0, "seed": 1}
        # More than two blocks are left to compute, so that it does not finish by itself.
        endless = {"max_tokens": 40, "logit_bias": {str(token_of(model, TURN_END)): -100}}
        answer = await client.ask({"messages": second, **greedily, **endless})
        await gate.wait()
        (actor,) = talk.private.server.loaded.sessions.actors.values()
        async with trio.open_nursery() as nursery:
            third = onward(second, answer, "How long does that take?")
            nursery.start_soon(client.ask, {"messages": third, **greedily, "max_tokens": 6})
            while not actor.inbox.requests_waiting:  # noqa: ASYNC110
                await trio.sleep(0.01)  # there is no event for a waiting command
            gate.go.set()
        await talk.wait_idle()


async def call_rejected(directory: Path, model: Path) -> None:
    """An answer ends inside a tool call."""
    only = {str(token_of(model, "<tool_call>")): 100}
    async with talking(directory, model) as talk:
        await talk.ask(WAY, tools=[WEATHER], max_tokens=3, logit_bias=only)


async def pruned(directory: Path, model: Path) -> None:
    """
    A conversation is pruned in the middle of a run. A later one was compared with it, so its token
    ids stay in the base.
    """
    async with talking(directory, model) as talk:
        await talk.ask(WAY)
        between = datetime.now(UTC)
        await talk.ask([GUIDE, user("Which of the streams can be crossed after rain?")])
    words = (
        "--before",
        between.isoformat(),
        "--recent",
        "--close-idle",
        "--data-dir",
        str(directory),
    )
    prune.main(words, standalone_mode=False)
    async with talking(directory, model) as talk:
        await talk.ask(WAY)


HEALTHY = {
    "continuation": continuation,
    "diverged": diverged,
    "shorter-history": shorter,
    "shared-blocks": shared,
    "copied-in-parts": copied_in_parts,
    "evicted": evicted,
    "windowed": windowed,
    "cancelled": cancelled,
    "killed": killed,
    "stopped": stopped,
    "quarantined": quarantined,
    "prewarmed": prewarmed,
    "call-rejected": call_rejected,
    "pruned": pruned,
}
REWRITTEN = {
    "row-changed": row_changed,
    "row-removed": row_removed,
    "tail-rewritten": tail_rewritten,
}
"""Drills on stored rows: run on a recorded history, so that a diff shows what was changed."""
_WHOLE = "stopped"


# --- recording -----------------------------------------------------------------------------------


def without_machine(rows: Sequence[Row], base: Base | None) -> tuple[list[Row], Base | None]:
    """Rows and base without directories of this machine, chained again."""
    found: list[Row] = []
    directory = "models/random"
    if base is not None:
        loaded = loaded_of(base)
        loaded = attrs.evolve(loaded, directory=directory) if loaded is not None else None
        base = base_of(state_of(base), base.head, loaded)
    begins = base.head if base is not None else GENESIS
    for row in rows:
        recorded = decode(row)
        event = recorded.event
        if isinstance(event, ev.ModelLoaded):
            event = attrs.evolve(event, directory=directory)
        elif isinstance(event, ev.JournalPruned) and base is not None:
            event = attrs.evolve(event, base_digest=base.digest)
        elif isinstance(event, ev.InvariantViolated):
            event = attrs.evolve(event, trace=_FILE.sub(r'File "\1"', event.trace))
        recorded = attrs.evolve(recorded, event=event)
        found.append(encode(recorded, found[-1].hash if found else begins))
    return found, base


def stored_base(directory: Path) -> Base | None:
    """The base of a journal that no server has open."""
    store = SqlStore.open(journal_url(directory), read_only=True)
    with contextlib.closing(store):
        return store.base()


def store_rows(directory: Path, rows: Sequence[Row]) -> None:
    """Make a journal of rows."""
    migrate(journal_url(directory))
    store = SqlStore.open(journal_url(directory))
    with contextlib.closing(store):
        store.append(rows)


def every_kind() -> list[Row]:
    """
    What the driver of the tests plays, and at its end each event that follows from nothing and lets
    nothing follow. It has the kinds that no conversation above has.
    """
    driver = played(random.Random(_TAPE).randbytes(1300))
    for note in NOTES:
        driver.propose(note)
    if "@t1/agent/notes" not in driver.state.agents:
        driver.propose(AGENT)
    driver.propose(ev.AgentDeleted(agent="notes", tenant="t1"))
    of_request, turn = min(driver.state.turns.items())
    driver.propose(ev.TurnForgotten(of_request=of_request, tenant=turn.tenant))
    for event in handed_over():
        driver.propose(event)
    driver.propose(ev.HeadsSeen(heads=(("n9", 7, "ab"),)))
    driver.propose(ev.LossSeen(node="n9", lost="7:ab", position=5, row_hash="cd"))
    driver.drop(min(driver.files))
    for session in sorted(driver.work):
        driver.finish(session)
    driver.end_run("unloaded")
    rows: list[Row] = []
    for made in driver.recorded:
        rows.append(encode(made, rows[-1].hash if rows else GENESIS))
    return rows


async def recorded(
    name: str, into: Path, scratch: Path, model: Path, baseline: Baseline
) -> tuple[list[Row], Base | None]:
    """The rows of one history, and the base before them."""
    directory = scratch / name
    if name == EVERY_KIND:
        return every_kind(), None
    if name in REWRITTEN:
        store_rows(directory, list(read_export(into / f"{_WHOLE}.jsonl")))
        REWRITTEN[name](directory)
        return stored_rows(directory), None
    if name in HEALTHY:
        await HEALTHY[name](directory, model)
    else:
        await DRILLS[name].play(Scene(directory=directory, model=model, baseline=baseline))
    return without_machine(stored_rows(directory), stored_base(directory))


def expectation(rows: Sequence[Row], base: Base | None) -> list[Mapping[str, Any]]:
    """What replay finds in a history."""
    return [
        {
            "invariant": found.invariant,
            "row": found.position,
            "recorded": found.recorded,
            "reproduced": found.reproduced,
        }
        for found in replay(rows, base=base).findings
    ]


async def record(names: Sequence[str], into: Path, scratch: Path, model: Path) -> None:
    """Record histories, and write what replay finds in them."""
    baseline = await record_baseline(scratch / "baseline", model)
    path = into / EXPECTED
    expected = json.loads(path.read_text("utf-8")) if path.exists() else {}
    expected = {name: found for name, found in expected.items() if name in known()}
    for name in names:
        rows, base = await recorded(name, into, scratch, model, baseline)
        begins = base_to_line(base) if base is not None else b""
        (into / f"{name}.jsonl").write_bytes(begins + b"".join(map(to_line, rows)))
        expected[name] = expectation(rows, base)
        print(f"{name}: {len(rows)} rows, {[found['invariant'] for found in expected[name]]}")
    path.write_text(f"{json.dumps(dict(sorted(expected.items())), indent=2)}\n", "utf-8")


def known() -> list[str]:
    """The names of all histories."""
    return [*HEALTHY, EVERY_KIND, *DRILLS]


def released(folder: Path) -> set[str]:
    """The names of the histories of released versions."""
    sums = folder / RELEASED
    lines = sums.read_text("utf-8").splitlines() if sums.exists() else []
    return {Path(line.split()[1]).stem for line in lines}


def release(folder: Path) -> None:
    """List all histories as those of a released version, in the format of ``sha256sum``."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.glob("*.jsonl"))
    ]
    (folder / RELEASED).write_text("".join(lines), "utf-8")


def main() -> None:
    """Record the histories that are named, or all that are of no released version."""
    parser = argparse.ArgumentParser(description="Record histories of drills and conversations.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known())}")
    parser.add_argument("-o", "--output", type=Path, default=HISTORIES, metavar="DIR")
    parser.add_argument("--release", action="store_true", help="record none; list all as released")
    asked = parser.parse_args()
    fixed = released(asked.output)
    if unknown := set(asked.names) - set(known()):
        parser.error(f"no such history: {', '.join(sorted(unknown))}")
    if kept := set(asked.names) & fixed:
        parser.error(
            f"of a released version: {', '.join(sorted(kept))}. If a format has changed, raise the "
            "version of the event, add an upcast, and record a history under another name"
        )
    asked.output.mkdir(parents=True, exist_ok=True)
    if asked.release:
        release(asked.output)
        return
    for path in asked.output.glob("*.jsonl"):
        if path.stem not in known() and path.stem not in fixed:
            path.unlink()
    names = asked.names or [name for name in known() if name not in fixed]
    with tempfile.TemporaryDirectory(prefix="cairn-histories-") as directory:
        scratch = Path(directory)
        model = make_random_model(scratch / "models" / "random")  # its answers do not end
        trio.run(record, names, asked.output, scratch, model)


if __name__ == "__main__":
    main()
