"""How many conversations fit in a memory budget, each with its own prompt or one system prompt."""

from __future__ import annotations

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
    while not server.counted("cairn_blocks_evicted_total"):
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


CAPACITY = Part(
    "capacity",
    "how many conversations fit a budget of memory",
    (Measure("conversations that fit", sessions),),
)
