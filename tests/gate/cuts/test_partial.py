"""The first rows of another session's block, and the bits of a cold answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.engine.reports import DrawSpec
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import GENESIS, Row, decode, encode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import DIFFERS, SAME, rerun
from tests.gate.test_gate import same_bits
from tests.support.in_process_server import ask, chat, events_of, generate, serving, wait_idle

pytestmark = pytest.mark.gate
C = 64
GREEDY = DrawSpec(sampling=Sampling(temperature=0.0), seed=0)
SYSTEM = (
    "You are a helpful assistant. Answer in short sentences. The path goes past the old bridge. "
    "The lake lies behind the forest. The road to the pass starts at the station. "
)


def other_digests(store: MemoryStore) -> list[Row]:
    """A journal in which the block that was matched in part had another digest, each time."""
    rows: list[Row] = []
    key = next(one.partial_key for one in events_of(store, ev.PathSelected) if one.partial_key)
    for row in store.read():
        recorded = decode(row)
        event = recorded.event
        if isinstance(event, ev.BlockSealed) and event.key == key:
            event = attrs.evolve(event, digest="0")
        if isinstance(event, ev.BlocksRestored) and key in event.keys:
            found = zip(event.keys, event.digests, strict=True)
            event = attrs.evolve(
                event, digests=tuple("0" if one == key else digest for one, digest in found)
            )
        recorded = attrs.evolve(recorded, event=event)
        rows.append(encode(recorded, rows[-1].hash if rows else GENESIS))
    return rows


def test_the_answer_has_the_bits_of_a_cold_one(
    model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Two sessions with a common beginning that ends within a block: the second reuses to the token
    at which they differ, computes the last of these again, and answers as a cold server does.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store) as warm, serving(model_directory) as cold:
            first = generate(chat(SYSTEM + "What begins at the station?" * 3), max_tokens=5)
            await ask(warm, first)
            await wait_idle(warm)
            for place, text in enumerate(("Where is the mill?", "Where is the old mill, then?")):
                command = generate(chat(SYSTEM + text), max_tokens=9, session_name=f"s{place}")
                said = await ask(warm, command)
                same_bits(said, await ask(cold, attrs.evolve(command, cache_prompt=False)))
                await wait_idle(warm)

    trio.run(main)

    assert () == replay(store.read()).findings
    _, *paths = events_of(store, ev.PathSelected)
    assert [True, True] == [one.tokens_from_partial > 1 for one in paths]
    assert [one.reused_tokens - 1 for one in paths] == [
        one.row for one in events_of(store, ev.RowChecked)
    ]
    for name in ("s0", "s1"):
        assert SAME == rerun(list(store.read()), name, None)
    capsys.readouterr()
    assert DIFFERS == rerun(other_digests(store), "s0", None)
    assert "digest" in capsys.readouterr().out


def test_rows_of_other_tokens_give_other_bits(model_directory: Path) -> None:
    """
    The rest of a prompt is computed on the first rows of a block. As many as agree give the bits of
    a cold pass, token and block; three more, of other tokens, do not.
    """
    same = 41
    theirs = [5 * place % 97 + 3 for place in range(C)]
    mine = [*theirs[:same], *(7 * place % 89 + 101 for place in range(C + 5 - same))]
    found: list[dict[int, tuple[Any, ...]]] = []

    def compare(engine: Any) -> None:
        slab = engine.open_slab(512).slab
        engine.run_chunk(slab, theirs, None)
        engine.seal(slab, "theirs", 0, C, store=True)
        engine.close_slab(slab)
        bits = {}
        for rows in (0, same - 20, same, same + 3):
            slab = engine.open_slab(512).slab
            again = None
            if rows:
                engine.share(slab, ["theirs"], 0, rows=rows)
                again = mine[rows - 1]
            if rows < C:
                engine.run_chunk(slab, mine[rows:C], None, again=again)
            drawn = engine.run_chunk(slab, mine[C:], GREEDY).drawn
            block = engine.seal(slab, "mine", 0, C, store=False).digest
            bits[rows] = (drawn.token, drawn.logprob, block)
            engine.close_slab(slab)
        engine.evict("theirs")
        found.append(bits)

    async def main() -> None:
        async with serving(model_directory) as server:
            await server.loaded.engine.call(compare, lambda done: None)

    trio.run(main)
    (bits,) = found
    assert bits[0] == bits[same - 20] == bits[same]
    assert bits[0] != bits[same + 3]
    assert bits[0][1] != bits[same + 3][1]
