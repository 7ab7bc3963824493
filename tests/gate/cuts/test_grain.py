"""A session continues to the token, and the bits are those of a cold answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.actors.errors import Broken
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import GENESIS, Row, decode, encode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import DIFFERS, SAME, rerun
from tests.gate.test_gate import same_bits
from tests.support.in_process_server import ask, chat, events_of, generate, serving, wait_idle

pytestmark = pytest.mark.gate
C = 64


def other_rows_checked(store: MemoryStore) -> list[Row]:
    """A journal in which the rows that were computed again had other digests, both times."""
    rows: list[Row] = []
    for row in store.read():
        recorded = decode(row)
        if isinstance(recorded.event, ev.RowChecked):
            event = attrs.evolve(recorded.event, held_digest="0", digest="0")
            recorded = attrs.evolve(recorded, event=event)
        rows.append(encode(recorded, rows[-1].hash if rows else GENESIS))
    return rows


def test_short_turns_reuse_all_that_there_is(
    model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    From the second turn on, whether the session has settled or not, at most one token that the slab
    had is computed again; with the bits of a server that reuses nothing.
    """
    store = MemoryStore()

    async def main() -> None:
        async with (
            serving(model_directory, store) as warm,
            serving(model_directory) as cold,
        ):
            said = ["Where is the old bridge?"]
            for place, pause in enumerate((True, False, True, False, False)):
                command = generate(chat(*said), max_tokens=9, session_name="s")
                answer = await ask(warm, command)
                same_bits(answer, await ask(cold, attrs.evolve(command, cache_prompt=False)))
                assert (answer.accepted.cached_tokens > 0) == (place > 0)
                if pause:
                    await wait_idle(warm)
                said += [answer.text, f"And the {place}. hill?"]

    trio.run(main)

    assert () == replay(store.read()).findings
    checked = events_of(store, ev.RowChecked)
    # How far a session has settled when the next turn comes depends on the machine.
    due = [one.tokens_from_slab - 1 for one in events_of(store, ev.PathSelected)]
    assert [row for row in due if (row + 1) % C] == [one.row for one in checked]
    assert len(checked) > 1
    assert SAME == rerun(list(store.read()), "s", None)
    capsys.readouterr()
    assert DIFFERS == rerun(other_rows_checked(store), "s", None)
    assert "digests of a row" in capsys.readouterr().out


def test_a_slab_that_changed_is_found_before_the_answer(model_directory: Path) -> None:
    """
    Bits of an early row flip between two turns. The row that the next turn computes again attends
    to it, so INV-3 finds it before a token is drawn, and the next request is served cold.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store) as server:
            first = await ask(server, generate(chat("Where is the bridge?"), session_name="s"))
            await wait_idle(server)
            slab = server.loaded.sequencer.session("s").slab
            assert slab is not None

            def flip(engine: Any) -> None:
                keys = engine.pool.get(slab.id).caches[0].keys
                keys[0, 0, 5] = -keys[0, 0, 5]

            await server.loaded.engine.call(flip, lambda done: None)
            onward = chat("Where is the bridge?", first.text, "And the lake?")
            with pytest.raises(Broken):
                await ask(server, generate(onward, session_name="s"))
            cold = await ask(server, generate(onward))
            assert "new_session" == cold.accepted.path

    trio.run(main)

    (found,) = replay(store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)
    assert "computed again is another" in found.message
    assert 1 == len(events_of(store, ev.SessionQuarantined))


def test_a_common_beginning_within_a_block(model_directory: Path) -> None:
    """A named session whose conversation begins again keeps the rows before the difference."""
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store) as warm, serving(model_directory) as cold:
            for text in ("The path goes past the mill.", "The path goes past the lake, then up."):
                command = generate(chat(text), max_tokens=6, session_name="s")
                said = await ask(warm, command)
                await wait_idle(warm)
                same_bits(said, await ask(cold, attrs.evolve(command, cache_prompt=False)))
            assert 4 < said.accepted.cached_tokens < C

    trio.run(main)

    assert () == replay(store.read()).findings
