"""Long prompts that nothing is known of: beside a peer, and what another client notices of one."""

from __future__ import annotations

import statistics

from cairn_bench.parts.given_up import Speaker
from cairn_bench.parts.stage import (
    Measure,
    Part,
    Stage,
    ask,
    checked,
    median_s,
    milliseconds,
    told_hit,
    words_of,
)
from cairn_bench.rows import Row
from cairn_bench.scenarios import Drawn, Request
from cairn_bench.servers.asking import NoResult, Sample
from cairn_conform.client_texts import system, user

COLD = (2000, 16_000)
QUICK_COLD = (2000, 4000)
BESIDE = 8000
SPOKEN_TOKENS = 1200
_SPOKEN_FIRST = 40
"""So many pieces show how far apart they usually are."""
_SPOKEN_HISTORY = 200
_STEPS = 16
SLOW_S = 0.020
"""The goal for a listener applies if a pass over one row takes this long."""
_HARDLY = 0.05
_WORDS = 4


def cold(stage: Stage) -> list[Row]:
    """New prompts of two lengths on either server, in turn."""
    assert stage.peer is not None
    own, peer = stage.own.name, stage.peer
    words = words_of(stage.ours(), stage.drawn("lengths"))
    rows = []
    for tokens in QUICK_COLD if stage.quick else COLD:
        found: dict[str, list[Sample]] = {own: [], peer: []}
        for place in range(stage.count(1, 3)):
            # Both get the same prompt. The second finds the machine as the first one left it.
            request = _new(stage.drawn(f"cold prompt {tokens}.{place}"), words(tokens))
            for name in (own, peer) if place % 2 else (peer, own):
                server = stage.named(name)
                server.wait_at_rest()
                found[name].append(ask(server, request))
        _require_cold(f"a cold prompt of {tokens} tokens", found[own])
        server = stage.ours()
        compared = len(checked(f"a cold prompt of {tokens} tokens", found[own], server))
        mine_s, theirs_s = median_s(found[own]), median_s(found[peer])
        rows.append(
            Row(
                name=f"first token of a cold prompt of {tokens:,} tokens / {peer}'s",
                value=mine_s / theirs_s,
                goal=1.0,
                of=f"{milliseconds(mine_s)} / {milliseconds(theirs_s)}",
                checked=compared,
                figures={
                    name: [sample.first_s for sample in samples] for name, samples in found.items()
                },
            )
        )
    return rows


def listener(stage: Stage) -> list[Row]:
    """A client receives an answer while the long prompt of another client is prefilled."""
    server, tokens = stage.ours(), stage.length(BESIDE)
    words = words_of(server, stage.drawn("lengths"))(tokens)
    pauses, usual, compared = list[float](), list[float](), 0
    for place in range(stage.count(1, 3)):
        drawn = stage.drawn(f"listener {place}")
        speaker = Speaker(server, drawn.text(_WORDS), tokens=SPOKEN_TOKENS, first=_SPOKEN_FIRST)
        speaker.wait()
        other = ask(server, _new(drawn, words))
        speaker.end()
        pauses.append(speaker.longest_s(other))
        usual.append(speaker.usual_s(other))
        server.wait_at_rest()
        _require_cold("a prompt beside a listener", [other])
        compared += len(checked("a prompt beside a listener", [other], server))
    bare = stage.alone(stage.own, stage.model, decodes=[(1, _SPOKEN_HISTORY, _STEPS)] * 3)
    pass_s = statistics.median(bare.decodes_s) / _STEPS
    pause_s, usual_s = statistics.median(pauses), statistics.median(usual)
    return [
        Row(
            name=f"a listener while {tokens:,} tokens are prefilled: longest pause / usual one",
            value=pause_s / usual_s,
            goal=1.5 if pass_s >= SLOW_S else None,
            of=f"{milliseconds(pause_s)} / {milliseconds(usual_s)}; a pass over one row takes "
            f"{milliseconds(pass_s)}, and the goal applies from {milliseconds(SLOW_S)} on",
            checked=compared,
            figures={"longest_s": pauses, "usual_s": usual, "pass_s": pass_s},
        )
    ]


def _new(drawn: Drawn, words: int) -> Request:
    messages = (system(drawn.text(words)), user(drawn.text(_WORDS)))
    return Request(messages=messages, warm=False, answer_tokens=8)


def _require_cold(what: str, samples: list[Sample]) -> None:
    """
    Raises:
        NoResult: one reused more than the words with which all texts of a run begin.
    """
    for sample in samples:
        cached, prompt = sample.answer.cached_tokens or 0, sample.answer.prompt_tokens or 0
        if cached > _HARDLY * prompt:
            raise NoResult(f"{what} was not cold: {told_hit(sample)}")


PREFILL = Part(
    "prefill",
    "cold prompts beside a peer, and what another client notices of one",
    (
        Measure("cold prompts", cold, needs_peer=True),
        Measure("an answer while a prompt is prefilled", listener),
    ),
)
