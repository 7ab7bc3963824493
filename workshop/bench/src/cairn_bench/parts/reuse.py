"""
Workloads with common prompt beginnings: how many requests are hits, and how much sooner their
answers begin than without the cache.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import attrs

from cairn_bench.parts.short_turns import SHORT_TURNS
from cairn_bench.parts.stage import (
    Measure,
    Part,
    Stage,
    ask,
    checked,
    median_s,
    milliseconds,
    span,
    words_of,
)
from cairn_bench.rows import Row
from cairn_bench.scenarios import Drawn, Request
from cairn_bench.servers.asking import NoResult, Sample, unhit
from cairn_bench.servers.processes import Running
from cairn_conform.client_texts import system, user

_CHAT_TOKENS = 200
_DOCUMENT_TOKENS = 500
_INSTRUCTION_TOKENS = (50, 400)
_DOCUMENTS = 5
_SHARED = 0.8
_QUESTION_WORDS = 5
_SMALLER_CHUNKS = (32, 16)

Words: TypeAlias = Callable[[int], int]


@attrs.frozen(kw_only=True)
class Work:
    """
    A workload.

    Attributes:
        play: makes this many requests; ``warm`` are those that could be hits.
        hit_goal: the goal for the share of hits, of all requests but the first with each beginning.
        speed_goal: the goal for how many times sooner a hit begins to answer than a miss.
        of_all: whether requests that share nothing count too.
        in_quick: see ``Measure``.
    """

    name: str
    play: Callable[[Drawn, Words, int], Iterator[Request]]
    hit_goal: float | None
    speed_goal: float | None = None
    of_all: bool = False
    in_quick: bool = True


def _asked(beginning: str, question: str, *, warm: bool) -> Request:
    messages = (system(beginning), user(question))
    return Request(messages=messages, warm=warm, answer_tokens=4)


def _chat(drawn: Drawn, words: Words, count: int) -> Iterator[Request]:
    """New chats under one system prompt."""
    prompt = drawn.text(words(_CHAT_TOKENS))
    for place in range(count):
        yield _asked(prompt, drawn.text(_QUESTION_WORDS), warm=place > 0)


def _batch(tokens: int) -> Callable[[Drawn, Words, int], Iterator[Request]]:
    """Short inputs after an instruction of the given length."""

    def play(drawn: Drawn, words: Words, count: int) -> Iterator[Request]:
        instruction = _plain(drawn, words(tokens))
        for place in range(count):
            yield _asked(instruction, drawn.text(_QUESTION_WORDS), warm=place > 0)

    return play


def _plain(drawn: Drawn, words: int) -> str:
    """
    A text without the sentence around it, because that alone is longer than some instructions.
    """
    text = drawn.text(max(words, 1) + 20)
    return " ".join(text.split()[: max(words, 1) + 4])


def _documents(*, in_order: bool) -> Callable[[Drawn, Words, int], Iterator[Request]]:
    """Questions about two of several documents, in a fixed or a random order."""

    def play(drawn: Drawn, words: Words, count: int) -> Iterator[Request]:
        texts = [drawn.text(words(_DOCUMENT_TOKENS)) for _ in range(_DOCUMENTS)]
        begun: set[int] = set()
        for _ in range(count):
            chosen = drawn.chances.sample(range(_DOCUMENTS), 2)
            if in_order:
                chosen.sort()
            both = "\n\n".join(texts[one] for one in chosen)
            yield _asked(both, drawn.text(_QUESTION_WORDS), warm=chosen[0] in begun)
            begun.add(chosen[0])

    return play


def _mixed(drawn: Drawn, words: Words, count: int) -> Iterator[Request]:
    """
    After the first request with a common beginning, four of five have it too; the others share
    nothing.
    """
    prompt = drawn.text(words(_CHAT_TOKENS))
    alone = round((count - 1) * (1 - _SHARED))
    kinds = [False] * alone + [True] * (count - alone)
    drawn.chances.shuffle(kinds)
    begun = False
    for shares in kinds:
        beginning = prompt if shares else drawn.text(words(_CHAT_TOKENS))
        yield _asked(beginning, drawn.text(_QUESTION_WORDS), warm=shares and begun)
        begun = begun or shares


_SHORT, _LONG = _INSTRUCTION_TOKENS
WORK = (
    Work(name=f"chat, a system prompt of {_CHAT_TOKENS}", play=_chat, hit_goal=0.98, speed_goal=10),
    Work(
        name="documents, two in a fixed order",
        play=_documents(in_order=True),
        hit_goal=0.9,
        speed_goal=10,
    ),
    Work(
        name="documents, two in any order",
        play=_documents(in_order=False),
        hit_goal=None,
        in_quick=False,
    ),
    Work(name=f"batch, an instruction of {_LONG}", play=_batch(_LONG), hit_goal=1.0, speed_goal=5),
    Work(name="mixed, four of five begin alike", play=_mixed, hit_goal=0.8, of_all=True),
)
SHORT_BATCH = Work(name=f"batch, an instruction of {_SHORT}", play=_batch(_SHORT), hit_goal=None)


def work(stage: Stage, kind: Work) -> list[Row]:
    """One workload on our server: how many requests were hits, and how they compare with misses."""
    server = stage.ours()
    words = words_of(server, stage.drawn("lengths"))
    samples = _held(server, kind, stage.drawn(kind.name), words, stage.count(21, 101))
    chunk = server.block_tokens()
    hits = _hits(samples, chunk)
    if not hits:
        raise NoResult(f"{kind.name}: nothing was reused, so there is no hit to measure")
    cold = checked(kind.name, hits, server, most=stage.count(5, 20))
    rows = [_hit_row(kind, samples, chunk, len(cold))]
    if kind.speed_goal is None:
        return rows
    warm_s, cold_s = median_s(hits), median_s(cold)
    middle = sorted(hits, key=lambda sample: sample.first_s)[len(hits) // 2]
    cached, prompt = span(middle)
    bare = stage.alone(stage.own, stage.model, spans=[(cached, prompt), (0, prompt)])
    limit = bare.spans_s[1] / bare.spans_s[0]
    rows.append(
        Row(
            name=f"{kind.name}: first token cold / warm",
            value=cold_s / warm_s,
            goal=kind.speed_goal,
            better="more",
            of=f"{milliseconds(cold_s)} / {milliseconds(warm_s)}; {cached} of {prompt} tokens "
            f"reused, where the passes alone give {limit:.3g}",
            checked=len(cold),
            figures={"cold_s": cold_s, "warm_s": warm_s, "limit": limit, "span": (cached, prompt)},
        )
    )
    return rows


def short_batch(stage: Stage) -> list[Row]:
    """
    A short instruction, with several block sizes. With a grain of C, a part that does not fill a
    block is not reused.
    """
    rows = []
    server = stage.ours()
    words = words_of(server, stage.drawn("lengths"))
    count = stage.count(8, 40)
    with contextlib.ExitStack() as ending:
        asked_of = {"as served": server}
        # A server with other chunks has to test itself first.
        for chunk in _SMALLER_CHUNKS[-1:] if stage.quick else _SMALLER_CHUNKS:
            other = stage.apart(f"chunks of {chunk}", "--block-tokens", str(chunk))
            asked_of[f"C = {chunk}"] = ending.enter_context(other)
        for name, one in asked_of.items():
            samples = _held(one, SHORT_BATCH, stage.drawn("short"), words, count)
            chunk_tokens = one.block_tokens()
            hits = _hits(samples, chunk_tokens)
            title = f"{SHORT_BATCH.name}, {name}"
            compared = len(checked(title, hits, one)) if hits else 0
            # The promise is about the served size; the others show why it is kept or not.
            goal = 1.0 if one is server else None
            kind = attrs.evolve(SHORT_BATCH, name=title, hit_goal=goal)
            rows.append(_hit_row(kind, samples, chunk_tokens, compared))
    if not any(row.value for row in rows):
        raise NoResult(f"{SHORT_BATCH.name}: nothing was reused with any size of chunks")
    return rows


def _held(server: Running, kind: Work, drawn: Drawn, words: Words, count: int) -> Sequence[Sample]:
    """Send all requests, one after the other, each when the server is idle."""
    samples = []
    for request in kind.play(drawn, words, count):
        samples.append(ask(server, request))
        server.wait_at_rest()
    return samples


def _hits(samples: Sequence[Sample], block_tokens: int | None) -> list[Sample]:
    """The requests that could reuse a beginning, and did so fully, as ``unhit`` has it."""
    missed = [sample for sample, _ in unhit(samples, block_tokens)]
    return [
        sample
        for sample in samples
        if sample.request.warm and sample.answer.cached_tokens and sample not in missed
    ]


def _hit_row(kind: Work, samples: Sequence[Sample], block_tokens: int | None, compared: int) -> Row:
    """
    The share of hits, of the requests whose beginning was available, or of all but the first with a
    common beginning.
    """
    warm = sum(sample.request.warm for sample in samples)
    counted = len(samples) - 1 if kind.of_all else warm
    hits = _hits(samples, block_tokens)
    prompts = sum(span(sample)[1] for sample in samples)
    tokens = sum(span(sample)[0] for sample in hits)
    return Row(
        name=f"{kind.name}: requests that are hits",
        value=len(hits) / counted if counted else 0.0,
        goal=kind.hit_goal,
        better="more",
        shown="share",
        of=f"{len(hits)} of {counted}; {tokens / prompts:.0%} of all tokens"
        + (f", {statistics.median(span(one)[0] for one in hits):g} a hit" if hits else ""),
        checked=compared,
        figures={"hits": len(hits), "of": counted, "tokens": tokens, "prompts": prompts},
    )


def _measure(kind: Work) -> Measure:
    return Measure(kind.name, lambda stage: work(stage, kind), in_quick=kind.in_quick)


REUSE = Part(
    "reuse",
    "how many requests are hits, and how much sooner they begin to answer",
    (*map(_measure, WORK), Measure(SHORT_BATCH.name, short_batch), *SHORT_TURNS),
)
