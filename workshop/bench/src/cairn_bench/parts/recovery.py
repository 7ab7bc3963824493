"""What is left after an early end, of a server or of a prefill."""

from __future__ import annotations

import re
import statistics

from cairn_bench.parts.stage import (
    Measure,
    Part,
    Stage,
    ask,
    beside_cold,
    checked,
    require_hits,
    told_hit,
    words_of,
)
from cairn_bench.rows import Row
from cairn_bench.scenarios import Request, Talk
from cairn_bench.servers.asking import NoResult, Sample, body_of
from cairn_bench.servers.processes import Running
from cairn_conform.client_texts import system, user

HISTORY = 7600
_MOSTLY = 0.75
CUT_TOKENS = 2600
_CUT_AT = 0.9
_CUT_TRIES = 4
# The shortest interval, because a comment between two passes would come too late otherwise.
_HEARTBEAT = ("--heartbeat", "0.05")


def restart(stage: Stage) -> list[Row]:
    """A long conversation that continues after the server was restarted."""
    words, history = words_of(stage.ours(), stage.drawn("lengths")), stage.length(HISTORY)
    with stage.apart("restart") as server:
        talk = Talk(stage.drawn("restart"), system_words=words(history))
        talk.hear(ask(server, talk.ask(8, answer_tokens=8)).answer.text)
        server.wait_at_rest()
    samples: list[Sample] = []
    cold: list[Sample] = []
    rounds = stage.count(1, 5)
    while len(samples) < rounds:
        with stage.apart("restart") as server:
            samples.append(ask(server, talk.ask(8, answer_tokens=8)))
            talk.hear(samples[-1].answer.text)
            server.wait_at_rest()
            require_hits("after a restart", samples[-1:], _MOSTLY)
            loaded = server.counted("cairn_blocks_loaded_total")
            if not loaded:
                raise NoResult("after a restart: nothing was read from the disk")
            if len(samples) == rounds:
                cold = checked("after a restart", samples[-1:], server)
    tokens = samples[-1].answer.prompt_tokens
    return [
        beside_cold(
            f"first token after a restart, from disk, at {history} tokens",
            samples,
            cold,
            goal=0.1,
            of=f", {loaded} blocks read, a prompt of {tokens} tokens",
            blocks=loaded,
        )
    ]


def cut_off(stage: Stage) -> list[Row]:
    """Clients that disconnect when nine tenths of their prompt are prefilled, and ask again."""
    again, left_at, told, compared = [], [], [], 0
    words = words_of(stage.ours(), stage.drawn("lengths"))(CUT_TOKENS)
    with stage.apart("cut off", *_HEARTBEAT) as server:
        for place in range(stage.count(1, 6)):
            left, request = _left(stage, server, place, words)
            sample = ask(server, request)
            require_hits("after a prefill that was cut off", [sample])
            cold = checked("after a prefill that was cut off", [sample], server)
            compared += len(cold)
            prompt = sample.answer.prompt_tokens or 0
            again.append(1 - (sample.answer.cached_tokens or 0) / prompt)
            left_at.append(left)
            told.append(told_hit(sample))
    return [
        Row(
            name="prefilled again of a prompt that was cut off at 90 %",
            value=max(again),
            goal=0.15,
            shown="share",
            of=f"{told[-1]}, left at {statistics.mean(left_at):.0%}",
            checked=compared,
            figures={"again": again, "left_at": left_at, "told": told},
        )
    ]


def _left(stage: Stage, server: Running, place: int, words: int) -> tuple[float, Request]:
    """
    Disconnect during prefill; returns how far it had come, and the request.

    Raises:
        NoResult: it was never interrupted there.
    """
    for attempt in range(_CUT_TRIES):
        drawn = stage.drawn(f"cut off {place}.{attempt}")
        messages = (system(drawn.text(words)), user(drawn.text(4)))
        request = Request(messages=messages, warm=True)
        told: list[float] = []

        def is_time(comment: str, told: list[float] = told) -> bool:
            done = prefilled(comment)
            if done is not None and done >= _CUT_AT:
                told.append(done)
            return bool(told)

        left = server.client.leave(body_of(request), pieces=1, at=is_time)
        server.wait_at_rest()
        if told and not left.pieces:
            return told[0], request
    raise NoResult(
        f"no prefill was seen at {_CUT_AT:.0%} in {_CUT_TRIES} tries: the answer came before"
    )


def prefilled(comment: str) -> float | None:
    """How far a prefill has come, from a comment of the stream; None if it has no progress."""
    found = re.fullmatch(r"prefill (\d+)/(\d+)", comment)
    return int(found[1]) / int(found[2]) if found and int(found[2]) else None


RECOVERY = Part(
    "recovery",
    "a session after a restart, a prefill that was cut off",
    (
        Measure("a session after a restart", restart),
        Measure("a prefill that was cut off", cut_off),
    ),
)
