"""Chats whose turns are shorter than a block: what they reuse from the second turn on."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.engine.model.builtin import builtin_directory
from cairn_bench.parts.first_token import again_row, journal_end
from cairn_bench.parts.stage import Measure, Stage, ask, checked, span
from cairn_bench.rows import Row
from cairn_bench.scenarios import Request
from cairn_bench.servers.asking import Sample
from cairn_bench.servers.processes import Running
from cairn_conform.client_texts import Message, assistant, user

_ANSWER_TOKENS = 6
LEAST_SHARE = 0.01
"""That is: anything at all."""
_SAID = (
    "Hello, my name is Jordis.",
    "What is my name?",
    "Where does the path go?",
    "And then?",
    "Thank you.",
    "Goodbye.",
)
"""With the template around it, each is about 20 tokens."""


def short_turns(stage: Stage) -> list[Row]:
    """A chat of short turns, without a system prompt, on our server."""
    return _chat(stage.ours(), "a chat of 20-token turns")


def first_chat(stage: Stage) -> list[Row]:
    """The same as the first chat with Pebble, on a server that has served nothing else."""
    with stage.apart("pebble", model=builtin_directory()) as server:
        server.wait_at_rest()
        return _chat(server, "Pebble's first chat")


def _chat(server: Running, name: str) -> list[Row]:
    start = journal_end(server)
    samples = _held(server)
    # Before answers are compared: those requests would count too.
    again = again_row(server, f"{name}: tokens prefilled again, at most in a turn", after=start)
    least = min(samples, key=lambda sample: span(sample)[0] / span(sample)[1])
    told = ", ".join(f"{cached} of {prompt}" for cached, prompt in map(span, samples))
    compared = len(checked(name, samples, server)) if span(least)[0] else 0
    return [
        Row(
            name=f"{name}: reused from turn 2 on, the least share",
            value=span(least)[0] / span(least)[1],
            goal=LEAST_SHARE,
            better="more",
            shown="share",
            of=told,
            checked=compared,
            figures={"turns": list(map(span, samples))},
        ),
        again,
    ]


def _held(server: Running) -> Sequence[Sample]:
    """The turns from the second one on."""
    messages: list[Message] = []
    samples = []
    for said in _SAID:
        messages.append(user(said))
        request = Request(
            messages=tuple(messages), warm=len(messages) > 1, answer_tokens=_ANSWER_TOKENS
        )
        samples.append(ask(server, request))
        messages.append(assistant(samples[-1].answer.text))
        server.wait_at_rest()
    return samples[1:]


SHORT_TURNS = (
    Measure("a chat of short turns", short_turns),
    Measure("Pebble's first chat", first_chat),
)
