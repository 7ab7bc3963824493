"""
Cairn's cache classes against mlx-lm's own: the same schedule gives the same bits.

Runs with the oldest and the newest mlx-lm that pyproject.toml admits (`make oldest`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import trio
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from cairn.engine.errors import EngineFault
from cairn.engine.mlx.cache import SlabCache, WindowCache
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import LoadedModel, load_model
from cairn.engine.mlx.passes.rows import row_caches
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.reports import DecodeRow, Drawn, DrawSpec, PassReport
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import passes
from tests.support.in_process_server import ask, generate, serving, wait_idle

CHUNK = 64
STEPS = 24
GREEDY = DrawSpec(sampling=Sampling(temperature=0.0), seed=0, top=4)
PROMPTS = {
    "short": "A cairn marks the path.",
    "a chunk and a tail": "Stone on stone, " * 12 + "and the wind.",
    "many chunks": "Every stone was carried up by somebody; " * 40,
}


@pytest.fixture(scope="module")
def loaded(model_directory: Path) -> LoadedModel:
    """The random model in memory."""
    return load_model(str(model_directory))


def prompt_ids(loaded: LoadedModel, text: str) -> list[int]:
    """A text's token ids."""
    return list(loaded.tokenizer.encode(text))


def over_slabs(loaded: LoadedModel, ids: list[int], rows: int) -> list[Drawn]:
    """A greedy answer on Cairn's slabs."""
    engine = MlxEngine(loaded, decode_rows=rows)
    slab = engine.open_slab(2048).slab
    report: Any = None
    for start, end in passes(0, len(ids), CHUNK):
        report = engine.run_chunk(slab, ids[start:end], GREEDY if end == len(ids) else None)
    drawn = [report.drawn]
    for _ in range(STEPS):
        row = DecodeRow(slab=slab, token=drawn[-1].token, draw=GREEDY)
        report = engine.decode([row, *[None] * (rows - 1)])[0]
        assert isinstance(report, PassReport)
        assert report.drawn is not None
        drawn.append(report.drawn)
    return drawn


def over_mlx_lm(loaded: LoadedModel, ids: list[int], rows: int) -> list[tuple[int, float]]:
    """
    The same answer on mlx-lm's own growing caches, by a loop that shares no code with the engine.
    """
    caches = make_prompt_cache(loaded.model)
    assert {type(cache) for cache in caches} == {KVCache}
    for start in range(0, len(ids), CHUNK):
        logits = loaded.model(mx.array([ids[start : start + CHUNK]]), cache=caches)
        mx.eval(logits)
    last = logits[0, -1]
    answer = []
    for _ in range(STEPS + 1):
        logprobs = last - mx.logsumexp(last)
        token: Any = mx.argmax(logprobs).item()
        logprob: Any = logprobs[token].item()
        answer.append((token, logprob))
        fed = mx.array([[token]] + [[0]] * (rows - 1))
        seats = caches if rows == 1 else row_caches([caches, *[None] * (rows - 1)])
        last = loaded.model(fed, cache=seats)[0, -1]
    return answer


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("text", PROMPTS.values(), ids=PROMPTS.keys())
def test_slabs_give_the_bits_of_mlx_lms_caches(loaded: LoadedModel, text: str, rows: int) -> None:
    """
    Greedy tokens and log-probabilities on slabs equal those on mlx-lm's KVCache, bit for bit.
    """
    ids = prompt_ids(loaded, text)

    ours = [(drawn.token, drawn.logprob) for drawn in over_slabs(loaded, ids, rows)]

    assert over_mlx_lm(loaded, ids, rows) == ours


def test_one_prompt_is_long() -> None:
    """At least three prompts are compared, of which one has 256 tokens or more."""
    assert len(PROMPTS) >= 3
    assert max(len(text.split()) for text in PROMPTS.values()) >= 256


def test_serving_on_mlx_lms_classes(model_directory: Path) -> None:
    """
    ``--kv-cache mlx-lm`` serves a conversation on mlx-lm's own classes, with the same tokens, but a
    different fingerprint. It reuses whole blocks, because these classes have no row class.
    """
    talks: dict[str, list[Any]] = {"slab": [], "mlx-lm": []}
    fingerprints = set()

    async def talk(kv_cache: Any) -> None:
        messages: list[Message] = []
        async with serving(model_directory, kv_cache=kv_cache) as server:
            fingerprints.add(server.facts.fingerprint)
            for turn in range(3):
                messages.append(Message(role="user", content=f"{turn} " + "stone on stone " * 20))
                said = await ask(server, generate(Conversation(messages=tuple(messages))))
                await wait_idle(server)  # what it settles while idle is reused too
                messages.append(Message(role="assistant", content=said.text))
                ids = [token.id for token in said.tokens]
                talks[kv_cache].append((ids, said.accepted.cached_tokens))

    trio.run(talk, "slab")
    trio.run(talk, "mlx-lm")

    (slab, slab_reused), (own, own_reused) = (zip(*talks[kind], strict=True) for kind in talks)
    assert slab == own
    assert slab_reused[-1] >= own_reused[-1] > 0
    assert len(fingerprints) == 2


def test_a_slab_does_not_grow() -> None:
    """Rows that do not fit into a slab are refused, and the slab does not change."""
    zeros: Callable[..., mx.array] = mx.zeros
    cache = SlabCache(zeros((1, 2, 8, 4)), zeros((1, 2, 8, 4)))
    cache.update_and_fetch(zeros((1, 2, 6, 4)), zeros((1, 2, 6, 4)))

    with pytest.raises(EngineFault):
        cache.update_and_fetch(zeros((1, 2, 3, 4)), zeros((1, 2, 3, 4)))

    assert cache.offset == 6
    assert cache.keys.shape == (1, 2, 8, 4)


def test_a_window_gives_what_mlx_lms_gives() -> None:
    """
    With chunks, single tokens and a trim, a window shows the same keys as mlx-lm's, in the same
    order, and has the same masks.
    """
    window, capacity = 10, 64
    rows = mx.random.normal((1, 2, capacity, 4))
    zeros = mx.zeros((1, 2, capacity, 4))
    ours = WindowCache(zeros, mx.zeros_like(zeros), window)

    def extended(cache: Any, start: int, end: int) -> tuple[Any, Any, Any]:
        mask = cache.make_mask(end - start, window_size=window)
        keys, values = cache.update_and_fetch(rows[..., start:end, :], -rows[..., start:end, :])
        return mask, keys, values

    for cuts in ([0, 8, 16, 24, 32, 35], [0, 8, 13, 14, 15, 16], [0, 8, 16, 24, 32, 33, 34, 35]):
        # As in a session whose next prompt diverges at this position.
        ours.trim(max(0, ours.offset - 8))
        theirs = RotatingKVCache(max_size=window)
        for start, end in pairwise(cuts):
            if start < ours.offset:
                extended(theirs, start, end)
                continue
            mask, keys, values = extended(theirs, start, end)
            own_mask, own_keys, own_values = extended(ours, start, end)
            if end - start > 1:
                assert mx.array_equal(keys, own_keys)
                assert mx.array_equal(values, own_values)
                assert type(mask) is type(own_mask)
                assert mask == own_mask if isinstance(mask, str) else mx.array_equal(mask, own_mask)
            else:  # by then mlx-lm's keys are in a ring buffer
                assert own_mask is None
                first = max(0, end - window)
                assert mx.array_equal(own_keys, rows[..., first:end, :])
                assert sorted(keys.flatten().tolist()) == sorted(own_keys.flatten().tolist())


def test_a_mask_over_more_than_the_window_is_a_fault() -> None:
    """
    A model whose layers contradict each other is refused, because what it attends to would depend
    on how its prompt was divided.
    """
    cache = WindowCache(mx.zeros((1, 2, 16, 4)), mx.zeros((1, 2, 16, 4)), 10)

    with pytest.raises(EngineFault, match="a mask over 11 tokens for a window of 10"):
        cache.make_mask(8, window_size=11)
