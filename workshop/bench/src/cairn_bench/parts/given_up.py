"""
A conversation that continues after a long pause.

Its slab was given up, and its history is copied from blocks. Measures what that costs its client,
and other clients in the middle of an answer.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

from cairn_bench.parts.stage import (
    Measure,
    Stage,
    ask,
    beside_cold,
    checked,
    median_s,
    milliseconds,
    require_hits,
    words_of,
)
from cairn_bench.rows import Row
from cairn_bench.scenarios import VARIED, Request, Talk
from cairn_bench.servers.asking import NoAnswer, NoResult, Sample, asked, body_of
from cairn_bench.servers.processes import NeverAtRest, Running
from cairn_conform.client_texts import system, user

HISTORY = 7600
_MOSTLY = 0.75
_WORDS = 8
# Long enough for a turn that finds its slab, and soon over.
_REST = ("--slab-idle", "3")
SPOKEN_TOKENS = 600
_SPOKEN_FIRST = 3
_LOOK_S = 0.01
WAIT_S = 120.0


def after_a_rest(stage: Stage) -> list[Row]:
    """A long conversation whose turns alternately find their slab and do not."""
    samples: dict[bool, list[Sample]] = {True: [], False: []}
    history = stage.length(HISTORY)
    with stage.apart("given up", *_REST) as server:
        talk = _begun(stage, server, "given up")
        for _ in range(stage.count(2, 9)):
            for holds in (True, False):
                if not holds:
                    _wait_given_up(server)
                elif not _slabs(server):
                    raise NoResult("a slab was given up before its next turn")
                samples[holds].append(ask(server, talk.ask(_WORDS, answer_tokens=8)))
                talk.hear(samples[holds][-1].answer.text)
                server.wait_at_rest()
        warm = samples[False]
        require_hits("after a slab was given up", warm, _MOSTLY)
        require_hits("with its slab", samples[True], _MOSTLY)
        cold = checked("after a slab was given up", warm, server)
    held = samples[True]
    return [
        beside_cold(
            f"first token after the slab was given up, at {history} tokens",
            warm,
            cold,
            goal=0.1,
            of=f"; with its slab {milliseconds(median_s(held))}",
            with_slab_s=[sample.first_s for sample in held],
        )
    ]


def beside_others(stage: Stage) -> list[Row]:
    """
    One client is in the middle of an answer while a long history is copied for another client, and
    then while a prompt of that length is prefilled.
    """
    copied, prefilled, compared = list[float](), list[float](), 0
    with stage.apart("beside others", *_REST) as server:
        history = stage.length(HISTORY)
        words = words_of(server, stage.drawn("lengths"))(history)
        talk = _begun(stage, server, "beside others")
        for place in range(stage.count(1, 9)):
            _wait_given_up(server)
            drawn = stage.drawn(f"beside others {place}")
            speaker = Speaker(server, drawn.text(_WORDS), tokens=SPOKEN_TOKENS)
            speaker.wait()
            warm = ask(server, talk.ask(_WORDS, answer_tokens=8))
            cold = Request(messages=(system(drawn.text(words)), user(drawn.text(4))), warm=False)
            other = asked(server, cold)
            speaker.end()
            copied.append(speaker.longest_s(warm))
            prefilled.append(speaker.longest_s(Sample(request=cold, answer=other)))
            talk.hear(warm.answer.text)
            server.wait_at_rest()
            require_hits("beside others", [warm], _MOSTLY)
            compared += len(checked("beside others", [warm], server))
    value, of = statistics.median(copied), statistics.median(prefilled)
    return [
        Row(
            name="longest pause in an answer while another's history is copied / prefilled",
            value=value / of,
            goal=1.2,
            of=f"{milliseconds(value)} / {milliseconds(of)}, {history} tokens",
            checked=compared,
            figures={"copied_s": copied, "prefilled_s": prefilled},
        )
    ]


class Speaker:
    """
    Reads a long answer in its own thread, piece by piece.

    Args:
        text: what the client says.
        tokens: the length of the answer.
        first: it has begun when so many pieces came.
    """

    def __init__(
        self, server: Running, text: str, *, tokens: int, first: int = _SPOKEN_FIRST
    ) -> None:
        self._heard_s: list[float] = []
        self._first = first
        # Several tokens of a greedy answer would come at once, from drafts.
        self._request = Request(
            messages=(user(text),), warm=False, answer_tokens=tokens, temperature=VARIED
        )
        self._server = server
        self._fault = ""
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """
        Wait until the answer has begun, or has ended.

        Raises:
            NoAnswer: it does not begin.
        """
        end_s = time.monotonic() + WAIT_S
        while len(self._heard_s) < self._first and self._thread.is_alive():
            if time.monotonic() > end_s:
                raise NoAnswer(self._server.kind.name, "it did not start to answer")
            time.sleep(_LOOK_S)

    def end(self) -> None:
        """
        Read it to its end.

        Raises:
            NoAnswer: it has none.
        """
        self._thread.join()
        if self._fault:
            raise NoAnswer(self._server.kind.name, self._fault)

    def longest_s(self, other: Sample) -> float:
        """
        The longest pause in it until a second answer had its first token.

        Raises:
            NoResult: it had ended before.
        """
        began_s, until_s = other.answer.began_s, other.answer.began_s + other.first_s
        return longest_s(self._heard_s, began_s, until_s)

    def usual_s(self, other: Sample) -> float:
        """
        The median distance between two pieces before a second answer was requested.

        Raises:
            NoResult: too few had come.
        """
        before = [heard_s for heard_s in self._heard_s if heard_s < other.answer.began_s]
        if len(before) < self._first:
            raise NoResult("the other answer had hardly begun")
        return statistics.median(later - one for one, later in pairwise(before))

    def _hear(self) -> None:
        answer = self._server.client.ask(body_of(self._request), heard=self._heard_s)
        if not answer.complete:
            self._fault = answer.outcome


def longest_s(heard_s: Sequence[float], began_s: float, until_s: float) -> float:
    """
    The longest pause between two pieces of an answer that overlaps a period.

    Raises:
        NoResult: the answer did not last for all of that period.
    """
    if not heard_s or heard_s[0] > began_s or heard_s[-1] < until_s:
        raise NoResult("the other answer ended too early")
    ends = pairwise(heard_s)
    return max(later - one for one, later in ends if later > began_s and one < until_s)


def _begun(stage: Stage, server: Running, name: str) -> Talk:
    """An idle conversation of some length."""
    words = words_of(server, stage.drawn("lengths"))
    talk = Talk(stage.drawn(name), system_words=words(stage.length(HISTORY)))
    talk.hear(ask(server, talk.ask(_WORDS, answer_tokens=8)).answer.text)
    server.wait_at_rest()
    return talk


def _slabs(server: Running) -> int:
    """
    How many slabs are held.

    Raises:
        NoResult: the server does not report it.
    """
    health = server.client.get("/health")
    slabs = health.get("pool", {}).get("slabs") if isinstance(health, dict) else None
    if not isinstance(slabs, int):
        raise NoResult("the server does not report how many slabs are in use")
    return slabs


def _wait_given_up(server: Running) -> None:
    """
    Wait until no session holds a slab.

    Raises:
        NeverAtRest: a session keeps its slab.
    """
    end_s = time.monotonic() + WAIT_S
    while _slabs(server):
        if time.monotonic() > end_s:
            raise NeverAtRest(f"{server.kind.name} did not release a slab within {WAIT_S:g} s")
        time.sleep(_LOOK_S)


GIVEN_UP = (
    Measure("a continuation whose slab was given up", after_a_rest),
    Measure("an answer while another's history is copied", beside_others),
)
