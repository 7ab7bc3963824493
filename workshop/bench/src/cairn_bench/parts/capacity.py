"""
How many conversations fit in a memory budget, each with its own prompt or one system prompt; and
what conversations in turn reuse of memory that is too small for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cairn_bench.parts.stage import Measure, Part, Stage, ask, checked, require_hits, span, words_of
from cairn_bench.rows import Row
from cairn_bench.scenarios import Drawn, Request
from cairn_bench.servers.asking import NoResult, Sample
from cairn_bench.servers.processes import Running
from cairn_conform.client_texts import Message, assistant, system, user

_MIB = 24
_OPTIONS = ("--blocks-mb", str(_MIB), "--disk-mb", "0", "--pool-slabs", "1")
PROMPT_TOKENS = 420
_QUESTION_WORDS = 16
MOST = 400
_EVICTED = "cairn_blocks_evicted_total"

_CONVERSATIONS, _ROOM = 6, 5
_IN_TURN = f"{_CONVERSATIONS} conversations in turn"
TURN_TOKENS = 640
_ANSWER_TOKENS = 4
_MOSTLY = 0.75


def sessions(stage: Stage) -> list[Row]:
    """
    Conversations are opened until the first block is evicted.

    Then the least recently used conversation continues, and has lost something; the last one
    continues, and has not.
    """
    found = {}
    # Measured elsewhere: here its requests would be the first to be evicted.
    words = words_of(stage.ours(), stage.drawn("lengths"))(PROMPT_TOKENS)
    for name in ("each for itself", "under one system prompt"):
        with stage.apart(f"capacity {name}", *_OPTIONS) as server:
            found[name] = _filled(server, stage.drawn(name), words, shared=name.startswith("under"))
    apart, together = found.values()
    return [
        Row(
            name=f"conversations that fit {_MIB} MiB of blocks, under one system prompt / without",
            value=together / apart,
            better="more",
            of=f"{together} / {apart} conversations, a prompt of {PROMPT_TOKENS} tokens",
            checked=2,
            figures=found,
        )
    ]


def _filled(server: Running, drawn: Drawn, words: int, *, shared: bool) -> int:
    """
    How many conversations were open when the first block was evicted.

    Raises:
        NoResult: none was evicted, or nothing evicted was missing.
    """
    prompt = drawn.text(words)
    talks: list[tuple[Sample, tuple[Message, ...]]] = []
    while not server.counted(_EVICTED):
        if len(talks) == MOST:
            raise NoResult(f"{MOST} conversations were opened, and no block was evicted")
        messages = (
            system(prompt if shared else drawn.text(words)),
            user(drawn.text(_QUESTION_WORDS)),
        )
        first = ask(server, Request(messages=messages, warm=False, answer_tokens=4))
        talks.append((first, (*messages, assistant(first.answer.text), user("And then?"))))
        server.wait_at_rest()
    # The first ones lost the block; the last one's blocks are complete, so it is tried first.
    last = ask(server, Request(messages=talks[-1][1], warm=True, answer_tokens=4))
    require_hits("the conversation that was opened last", [last])
    checked("the conversation that was opened last", [last], server)
    oldest = ask(server, Request(messages=talks[0][1], warm=True, answer_tokens=4))
    if _computed(oldest) <= _computed(last):
        raise NoResult("a block was evicted, but the least recently used conversation lost nothing")
    return len(talks) - 1


def _computed(sample: Sample) -> int:
    """
    How many tokens of a prompt were not reused.

    Conversations differ in length, but one that has lost nothing computes less than a chunk in
    addition to what is new.
    """
    cached, prompt = span(sample)
    return prompt - cached


# --- conversations in turn -----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Turns:
    """
    What conversations in turn found.

    Attributes:
        samples: their requests, without the first one of each.
        evicted: how many blocks left meanwhile.
    """

    samples: tuple[Sample, ...]
    evicted: int

    @property
    def reused_tokens(self) -> int:
        """Of all prompts."""
        return sum(span(sample)[0] for sample in self.samples)

    @property
    def told(self) -> str:
        """For readers."""
        prompts = sum(span(sample)[1] for sample in self.samples)
        return f"{self.reused_tokens / prompts:.0%} of all tokens, {self.evicted} blocks evicted"


def in_turn(stage: Stage) -> list[Row]:
    """
    Six conversations in turn, over memory for the blocks of five of them, and of six.

    There is one slab, so that only blocks in memory are reused.
    """
    words = words_of(stage.ours(), stage.drawn("lengths"))(TURN_TOKENS)
    found, compared = dict[int, Turns](), 0
    blocks = _blocks_of_one(stage, words)
    for room in (_CONVERSATIONS, _ROOM):
        options = ("--blocks-max", str(room * blocks), "--disk-mb", "0", "--pool-slabs", "1")
        with stage.apart(f"in turn, room for {room}", *options) as server:
            found[room] = _in_turn(stage, server, words)
            if room == _CONVERSATIONS:
                require_hits(_IN_TURN, found[room].samples, _MOSTLY)
            compared += len(checked(_IN_TURN, found[room].samples[-1:], server))
    return [_in_turn_row(found, blocks, compared)]


def _in_turn_row(found: Mapping[int, Turns], blocks: int, compared: int) -> Row:
    """
    Raises:
        NoResult: memory for five had room for six.
    """
    less, enough = found[_ROOM], found[_CONVERSATIONS]
    if not less.evicted:
        raise NoResult(f"{_IN_TURN}: no block was evicted from memory for {_ROOM}")
    return Row(
        name=f"{_CONVERSATIONS} conversations in turn: reused with room for {_ROOM} / for "
        f"{_CONVERSATIONS}",
        value=less.reused_tokens / enough.reused_tokens,
        goal=0.6,
        better="more",
        shown="share",
        of=f"{less.told} / {enough.told}; {blocks} blocks each",
        checked=compared,
        figures={
            str(room): {"reused": turns.reused_tokens, "evicted": turns.evicted}
            for room, turns in found.items()
        },
    )


def _blocks_of_one(stage: Stage, words: int) -> int:
    """
    How many blocks a conversation has: those that its prompt and answer fill, and the one of the
    turn before that differs.

    Raises:
        NoResult: the server does not report it.
    """
    server = stage.ours()
    sample = ask(server, _turn(stage.drawn("a conversation of six"), words, 0))
    chunk, prompt = server.block_tokens(), sample.answer.prompt_tokens
    if not chunk or not prompt:
        raise NoResult(f"{_IN_TURN}: the server does not report the lengths of blocks and prompts")
    return (prompt + _ANSWER_TOKENS) // chunk + 1


def _in_turn(stage: Stage, server: Running, words: int) -> Turns:
    samples = []
    evicted = 0
    for place in range(1 + stage.count(5, 11)):
        for number in range(_CONVERSATIONS):
            request = _turn(stage.drawn(f"conversation {number}"), words, place)
            sample = ask(server, request)
            server.wait_at_rest()
            if place:
                samples.append(sample)
        evicted = server.counted(_EVICTED)
    return Turns(samples=tuple(samples), evicted=evicted)


def _turn(drawn: Drawn, words: int, place: int) -> Request:
    """
    A turn that takes the one before it back, so that the conversation does not grow.

    Args:
        drawn: for the conversation; draws its first text.
    """
    question = f"Question {place}: what comes next?"
    return Request(
        messages=(system(drawn.text(words)), user(question)),
        warm=place > 0,
        answer_tokens=_ANSWER_TOKENS,
    )


CAPACITY = Part(
    "capacity",
    "how many conversations fit a budget of memory, and what more of them reuse in turn",
    (
        Measure("conversations that fit", sessions, in_quick=False),
        Measure("conversations in turn", in_turn, in_quick=False),
    ),
)
