"""Matching a long prompt against a large index, compared with one pass of a chunk."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import attrs
from immutables import Map

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.keys import block_keys
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import (
    EMPTY,
    Block,
    Model,
    OpenRequest,
    Session,
    SessionId,
    State,
    Turn,
)
from cairn.journal.token_ids import shared
from cairn_bench.parts.stage import Measure, Part, Stage, milliseconds
from cairn_bench.parts.turns import Conversation
from cairn_bench.rows import Row
from cairn_bench.servers.asking import NoResult

PROMPT_TOKENS: Final = 100_000
_NEW_TOKENS: Final = 100
BLOCKS: Final = 1_000_000
BLOCKS_OF_TURNS: Final = 100_000
SHORT_TOKENS: Final = 8_000
_TURNS: Final = 15
_TURN_GOAL: Final = 0.2
SECRET: Final = b"a secret of the bench, 32 bytes!"
_FINGERPRINT: Final = "f"
_TENANT: Final = "local"
_REPEATS: Final = 40
_VOCABULARY: Final = 4000
_AT: Final = 448
_STEPS: Final = ("keys", "choice", "loads", "path")


@attrs.frozen(kw_only=True)
class Index:
    """
    A fold with many blocks, and a request that continues its one conversation.

    Attributes:
        due: how many blocks of the prompt are available.
    """

    state: State
    session: Session
    ids: tuple[int, ...]
    chain: tuple[tuple[str, str, str], ...]
    due: int


def matching(stage: Stage) -> list[Row]:
    """
    What the server does between the token ids of a prompt and the decision: keys, the choice of a
    session, which blocks to load, and the path.
    """
    bare = stage.alone(stage.own, stage.model, spans=[(_AT, _AT + 64)], repeats=9)
    index = made_index(PROMPT_TOKENS, BLOCKS, bare.block_tokens)
    took = {step: statistics.median(times) for step, times in timed(index, _REPEATS).items()}
    whole = sum(took.values())
    steps = ", ".join(f"{step} {milliseconds(seconds)}" for step, seconds in took.items())
    return [
        Row(
            name=f"matching {PROMPT_TOKENS:,} tokens against {BLOCKS:,} blocks / a chunk's pass",
            value=whole / bare.spans_s[0],
            goal=0.01,
            shown="share",
            of=f"{milliseconds(whole)} / {milliseconds(bare.spans_s[0])}: {steps}",
            figures={"pass_s": bare.spans_s[0], **took},
        )
    ]


_CHAIN = (("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"))


def made_index(prompt_tokens: int, blocks: int, chunk: int) -> Index:
    """A fold with a served conversation that continues now, among this many blocks of others."""
    drawn = random.Random(0)
    # A tuple that is not the previous object, as a tokenizer gives it.
    ids = shared(drawn.choices(range(_VOCABULARY), k=prompt_tokens))
    held = ids[: prompt_tokens - _NEW_TOKENS]
    keys = keys_of(held, chunk)
    names = [*keys, *(f"{drawn.getrandbits(256):064x}" for _ in range(blocks - len(keys)))]
    known = Map(
        {
            name: Block(
                key=name,
                parent=keys[place - 1] if 0 < place < len(keys) else None,
                digest="d",
                start=place * chunk if place < len(keys) else 0,
                tokens=chunk,
                bytes=1,
                present=True,
            )
            for place, name in enumerate(names)
        }
    )
    chain = tuple((label, name, f"{name} alone") for label, name in _CHAIN)
    last = Turn(
        request="r1",
        fingerprint=_FINGERPRINT,
        chain=chain[:2],
        prompt_ids=held,
        prompt_keys=keys,
        answered=True,
        answer_ids=(),
    )
    session = Session(
        id=SessionId("s1"),
        tenant=_TENANT,
        fingerprint=_FINGERPRINT,
        group=None,
        named=False,
        state=SessionState.IDLE,
        last=last,
    )
    model = Model(
        name="m",
        fingerprint=_FINGERPRINT,
        layers=1,
        block_tokens=chunk,
        decode_rows=1,
        context_tokens=2 * prompt_tokens,
        reusable=True,
        pool_slabs=1,
        pool_bytes=1,
        blocks_bytes=blocks,  # of which the fold says that none are taken
        blocks_max=0,
        kv_sinks=0,
        kv_window=0,
        kv_rows=0,
        min_cache_tokens=0,
        state_blocks=0,
        grain=chunk,
    )
    state = attrs.evolve(
        EMPTY,
        model=model,
        sessions=Map({session.id: session}),
        tips=Map({last.tip: (session.id,)}),
        parts=Map({name: (session.id,) for _, name, _ in last.chain}),
        ends=Map({last.end: (session.id,)}),
        blocks=known,
        disk_budget=1,
    )
    return Index(state=state, session=session, ids=ids, chain=chain, due=len(keys))


def timed(index: Index, repeats: int) -> dict[str, list[float]]:
    """
    The seconds of each step, repeated.

    Raises:
        NoResult: the decision does not find the whole prompt.
    """
    took: dict[str, list[float]] = {step: [] for step in _STEPS}
    for _ in range(repeats):
        marks, chosen, decision = _matched(index)
        for step, (began_s, ended_s) in zip(_STEPS, pairwise(marks), strict=True):
            took[step].append(ended_s - began_s)
        if chosen != index.session.id or decision.path != "continuation":
            raise NoResult(f"matching: {decision.path}, {decision.reason}, and not a continuation")
        if decision.blocks_from_slab + decision.blocks_from_pool != index.due:
            raise NoResult(
                f"matching: {decision.blocks_from_pool} blocks of {index.due} were found"
            )
    return took


def _matched(index: Index) -> tuple[list[float], SessionId | None, paths.Decision]:
    """Match once: the clock between the steps, the chosen session, and the decision."""
    state, session, ids = index.state, index.session, index.ids
    assert state.model is not None
    answer_tokens = 1
    ask = paths.Ask(
        tenant=_TENANT,
        fingerprint=_FINGERPRINT,
        chain=index.chain,
        session_name=None,
        group=None,
        cache_prompt=True,
        cache_mode="full",
    )
    marks = [time.perf_counter()]
    keys = keys_of(ids, state.model.block_tokens, paths.keys_on_record(state, ask, ids))
    marks.append(time.perf_counter())
    chosen = paths.choose_session(state, ask)
    marks.append(time.perf_counter())
    paths.chain_to_load(state, session, ask, keys, tuple(ids), len(ids) + answer_tokens)
    marks.append(time.perf_counter())
    event = received(index, keys, answer_tokens)
    request = OpenRequest(ask=event, chain=index.chain, prompt_ids=ids, prompt_keys=keys)
    began_s = time.perf_counter()
    decision = paths.select(state, session, request)
    marks.append(marks[-1] + time.perf_counter() - began_s)
    return marks, chosen, decision


def keys_of(ids: Sequence[int], chunk: int, known: tuple[str, ...] = ()) -> tuple[str, ...]:
    return block_keys(
        secret=SECRET,
        fingerprint=_FINGERPRINT,
        tenant=_TENANT,
        ids=ids,
        block_tokens=chunk,
        known=known,
    )


def received(index: Index, keys: Sequence[str], answer_tokens: int) -> ev.RequestReceived:
    """The event that records the request."""
    last = index.session.last
    assert last is not None
    return ev.RequestReceived(
        session=index.session.id,
        request="r2",
        protocol="bench",
        tenant=_TENANT,
        fingerprint=_FINGERPRINT,
        session_name=None,
        group=None,
        cache_prompt=True,
        base_request=last.request,
        base_parts=len(last.chain),
        new_parts=index.chain[len(last.chain) :],
        base_tokens=len(last.prompt_ids),
        new_ids=index.ids[len(last.prompt_ids) :],
        base_keys=len(last.prompt_keys),
        new_keys=tuple(keys[len(last.prompt_keys) :]),
        prompt_tokens=len(index.ids),
        max_tokens=answer_tokens,
        sampling={},
        seed=0,
        seed_given=True,
        requested_model="m",
        grammar=None,
        words=None,
        waited_us=0,
        traceparent=None,
        client=None,
        thoughts=0,
        cache_mode="full",
        ttl_s=None,
    )


def turns(stage: Stage) -> list[Row]:
    """
    The cost of a turn's events on the decision thread, for a long and a short conversation: all
    other requests wait meanwhile.
    """
    bare = stage.alone(stage.own, stage.model, spans=[(_AT, _AT + 64)], repeats=9)
    short_s, long_s = (
        took_by_turn(tokens, BLOCKS_OF_TURNS, bare.block_tokens)
        for tokens in (SHORT_TOKENS, PROMPT_TOKENS)
    )
    return [
        Row(
            name=f"the events of a turn on {PROMPT_TOKENS:,} tokens / a chunk's pass",
            value=long_s / bare.spans_s[0],
            goal=_TURN_GOAL,
            shown="share",
            of=f"{milliseconds(long_s)} / {milliseconds(bare.spans_s[0])}; "
            f"on {SHORT_TOKENS:,} tokens {milliseconds(short_s)}",
            figures={"pass_s": bare.spans_s[0], "long_s": long_s, "short_s": short_s},
        )
    ]


def took_by_turn(tokens: int, blocks: int, chunk: int) -> float:
    """The median of the seconds that the events of a turn of such a conversation take."""
    index = made_index(tokens, blocks, chunk)
    talk = Conversation(index.state, index.session, SECRET)
    return statistics.median(sum(talk.turn().values()) for _ in range(_TURNS))


MATCHING = Part(
    "matching",
    "a long prompt against a large index, and the events of a turn of a long conversation",
    (Measure("matching a long prompt", matching), Measure("the events of a turn", turns)),
)
