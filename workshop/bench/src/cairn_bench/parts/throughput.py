"""Concurrent conversations: tokens per second, ours and the peer's."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence

import attrs

from cairn_bench.parts.stage import Measure, Part, Stage, ask, checked, require_hits
from cairn_bench.rows import Row
from cairn_bench.scenarios import Talk
from cairn_bench.servers.asking import NoAnswer, Sample
from cairn_bench.servers.processes import Running

_CONVERSATIONS = 8
_ANSWER_TOKENS = 48


@attrs.frozen(kw_only=True)
class Crowd:
    """
    The results of concurrent conversations.

    Attributes:
        rate: answer tokens per second, from the first request to the end of the last answer.
        warm: the turns after the first one of each.
    """

    rate: float
    warm: tuple[Sample, ...]


def together(stage: Stage) -> list[Row]:
    """
    The same number of concurrent conversations on either server, in turn.

    Afterwards answers that were computed among others are computed again, alone.
    """
    assert stage.peer is not None
    own, peer = stage.own.name, stage.peer
    rates: dict[str, list[float]] = {own: [], peer: []}
    compared = 0
    for place in range(stage.count(2, 6)):
        names = (own, peer) if place % 2 else (peer, own)
        for name in names:
            server = stage.named(name)
            server.wait_at_rest()
            crowd = _held(stage, server, f"together {place}")
            rates[name].append(crowd.rate)
            server.wait_at_rest()
            if name == own:
                require_hits("conversations at once", crowd.warm)
                compared += len(checked("conversations at once", crowd.warm, server, most=3))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return [
        Row(
            name=f"{_CONVERSATIONS} conversations at once: tokens a second / {peer}'s",
            value=medians[own] / medians[peer],
            goal=2.0,
            better="more",
            of=f"{medians[own]:.1f} / {medians[peer]:.1f}",
            checked=compared,
            figures=rates,
        )
    ]


def _held(stage: Stage, server: Running, name: str) -> Crowd:
    """
    Hold concurrent conversations, each in its own thread.

    Raises:
        NoAnswer: the server did not answer one of them, or does not report how long an answer is.
    """
    turns = stage.count(2, 8)
    talks = [
        Talk(stage.drawn(f"{name}, {place}"), system_words=30) for place in range(_CONVERSATIONS)
    ]
    found: list[list[Sample]] = [[] for _ in talks]
    failed: list[NoAnswer] = []

    def speak(talk: Talk, into: list[Sample]) -> None:
        try:
            for _ in range(turns):
                into.append(ask(server, talk.ask(8, answer_tokens=_ANSWER_TOKENS)))
                talk.hear(into[-1].answer.text)
        except NoAnswer as error:
            failed.append(error)

    threads = [
        threading.Thread(target=speak, args=pair, daemon=True)
        for pair in zip(talks, found, strict=True)
    ]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began_s
    if failed:
        raise failed[0]
    return Crowd(
        rate=_tokens(found, server.kind.name) / took_s,
        warm=tuple(sample for samples in found for sample in samples[1:]),
    )


def _tokens(found: Sequence[Sequence[Sample]], name: str) -> int:
    """
    Raises:
        NoAnswer: the server does not report how many there were.
    """
    counts = [sample.answer.completion_tokens for samples in found for sample in samples]
    if None in counts:
        raise NoAnswer(name, "it does not report the length of its answers")
    return sum(count or 0 for count in counts)


THROUGHPUT = Part(
    "throughput",
    "eight conversations at once",
    (Measure("conversations at once", together, needs_peer=True),),
)
