"""
The gate: a cache hit gives the bits of a miss, alone or among others (P1).

It runs under a BLAS whose results depend on shape, and its control shows that they do: naive reuse
of the KV that decoding left gives different bits. If the control does not differ, the gate proves
nothing. It is never relaxed at run time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.actors.requests.messages import Generate
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import load_model
from cairn.engine.prompt.template import Message
from cairn.engine.reports import DecodeRow, DrawSpec, PassReport
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import passes
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from tests.gate.conversation import Talk, thirty_steps, words
from tests.support.in_process_server import Said, ask, generate, serving

pytestmark = pytest.mark.gate

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=200, min_p=0.001)
PENALISED = attrs.evolve(
    SAMPLED,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias=((100, 4.0), (200, -100.0)),
)


def same_bits(one: Said, other: Said) -> None:
    """Tokens, log-probabilities, likeliest alternatives and text are equal, bit for bit."""
    assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
    assert one.tokens == other.tokens
    assert one.text == other.text
    assert one.finished.finish_reason == other.finished.finish_reason


async def rows_of_an_empty_server(model_directory: Path) -> list[Row]:
    """The journal of a server without requests: it spares the cold servers their self-test."""
    store = MemoryStore()
    async with serving(model_directory, store):
        pass
    return store.rows


@pytest.mark.long_but("sampled and penalised")
@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "sampled and penalised"])
def test_a_hit_is_a_miss(model_directory: Path, sampling: Sampling) -> None:
    """
    Thirty requests that take every branch give the same bits on one warm server as on cold ones,
    and the warm server reused something where it should.
    """
    warm_store = MemoryStore()

    async def main() -> None:
        empty = await rows_of_an_empty_server(model_directory)
        talk = Talk()
        async with serving(model_directory, warm_store) as warm:
            for place, step in enumerate(thirty_steps()):
                asked = step(talk)
                command = generate(
                    asked.conversation, sampling=sampling, seed=place, **asked.settings
                )
                said = await ask(warm, command)
                path = (said.accepted.path, said.accepted.reason)
                assert asked.path == path, f"request {place}"
                # Two conversations under one name may have their first few tokens in common.
                reused = said.accepted.cached_tokens
                assert 0 < reused if asked.warm else reused < 8, f"request {place}"
                async with serving(model_directory, MemoryStore(empty)) as cold:
                    missed = await ask(cold, command)
                assert missed.accepted.cached_tokens == 0
                same_bits(said, missed)
                talk.hear(said)

    trio.run(main)

    report = replay(warm_store.read())
    assert report.findings == ()
    decided = [row for row in warm_store.rows if row.kind == ev.PathSelected.kind]
    assert len(decided) == 30
    rerendered = [decode(row).event.rerendered_tokens for row in decided]  # type: ignore[attr-defined]
    assert any(rerendered), "the template never dropped any thinking"


def test_alone_is_among_others(model_directory: Path) -> None:
    """Eight conversations at once, on four rows, give the bits that each gives alone."""

    def commands(place: int) -> Generate:
        sampling = (GREEDY, SAMPLED, PENALISED)[place % 3]
        talk = Talk(messages=(Message(role="user", content=words(place, 10 + 8 * place)),))
        return generate(talk.conversation(), sampling=sampling, seed=place, max_tokens=40)

    together: dict[int, Said] = {}
    largest = 0

    async def one(server: Any, place: int) -> None:
        nonlocal largest
        together[place] = await ask(server, commands(place))
        largest = max(largest, server.statistics().running)

    async def main() -> None:
        serves = serving(model_directory, decode_rows=4)
        async with serves as server, trio.open_nursery() as nursery:
            for place in range(8):
                nursery.start_soon(one, server, place)
        empty = await rows_of_an_empty_server(model_directory)
        for place in range(8):
            async with serving(model_directory, MemoryStore(empty), decode_rows=4) as server:
                same_bits(together[place], await ask(server, commands(place)))

    trio.run(main)

    assert largest > 1, "no two requests were decoded together"


def test_control_the_naive_way_differs(model_directory: Path) -> None:
    """
    The control: twelve turns, each on the KV that decoding left, have different bits from a fresh
    prefill on most turns. The canonical schedule gives the same bits on all.
    """
    loaded = load_model(str(model_directory))
    engine = MlxEngine(loaded, decode_rows=4)
    draw = DrawSpec(sampling=GREEDY, seed=0, top=5)
    tokenizer = loaded.tokenizer
    naive, canonical = engine.open_slab(4096).slab, engine.open_slab(4096).slab
    history: list[int] = []
    naive_differs = canonical_differs = 0

    def prefill(slab: int, ids: list[int], start: int) -> PassReport:
        report = None
        for begin, end in passes(start, len(ids), 64):
            report = engine.run_chunk(slab, ids[begin:end], draw if end == len(ids) else None)
        assert report is not None
        return report

    for turn in range(12):
        prompt = history + tokenizer.encode(words(turn, 12 + turn))
        fresh = engine.open_slab(4096).slab
        missed = prefill(fresh, prompt, 0)
        engine.close_slab(fresh)
        held = engine.pool.get(naive).caches[0].offset
        naive_report = engine.run_chunk(naive, prompt[held:], draw)
        engine.trim(canonical, engine.pool.get(canonical).caches[0].offset // 64 * 64)
        sealed = len(history) // 64 * 64
        engine.trim(canonical, min(sealed, engine.pool.get(canonical).caches[0].offset))
        hit = prefill(canonical, prompt, engine.pool.get(canonical).caches[0].offset)
        naive_differs += naive_report.drawn != missed.drawn
        canonical_differs += hit.drawn != missed.drawn
        answer = [missed.drawn.token]  # type: ignore[union-attr]
        for _ in range(10):
            row = DecodeRow(slab=naive, token=answer[-1], draw=draw)
            report = engine.decode([row, None, None, None])[0]
            answer.append(report.drawn.token)  # type: ignore[union-attr]
        history = prompt + answer[:-1]

    assert canonical_differs == 0
    assert naive_differs >= 6, "this BLAS hides everything: no test of the gate proves anything"
