"""Decoding: over HTTP compared with the model alone, and with the journal compared with none."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from cairn_bench.parts.stage import Measure, Part, Stage, ask, checked, require_hits, words_of
from cairn_bench.rows import Row
from cairn_bench.scenarios import VARIED, Drawn, Request
from cairn_bench.servers.asking import NoResult, Sample
from cairn_bench.servers.processes import Running, unrecorded
from cairn_conform.client_texts import system, user

_HISTORY = 400
_ROWS = (1, 2, 4, 8)
_LOOPS = range(3)
_ACCEPTED = "cairn_draft_tokens_accepted_total"


def decoding(stage: Stage) -> list[Row]:
    """
    One client's answers compared with mlx-lm's loop over one row.

    That loop also runs with different numbers of rows, which is how W is chosen.
    """
    server = stage.ours()
    answer_tokens = stage.count(64, 256)
    request = _request(stage.drawn("decode"), server, answer_tokens)
    accepted = server.counted(_ACCEPTED)
    samples = _warm(server, request, stage.count(3, 10))
    accepted = server.counted(_ACCEPTED) - accepted
    compared = len(checked("decoding", samples, server))
    history = samples[0].answer.prompt_tokens or 0
    steps = answer_tokens // 2
    # With one client the server attends only to its history, whatever W is: W rows with a share of
    # it each attend to the same amount. With W clients each has its own.
    decodes = [(rows, history // rows, steps) for rows in _ROWS]
    decodes += [(rows, history, steps) for rows in _ROWS]
    bare = stage.alone(stage.own, stage.model, decodes=[one for one in decodes for _ in _LOOPS])
    passes = [
        steps / statistics.median(bare.decodes_s[place : place + len(_LOOPS)])
        for place in range(0, len(bare.decodes_s), len(_LOOPS))
    ]
    for_one = dict(zip(_ROWS, passes, strict=False))
    for_all = dict(zip(_ROWS, passes[len(_ROWS) :], strict=True))
    wide = bare.decode_shapes[-1]
    if wide not in for_one:
        raise NoResult(f"the loop was not measured with {wide} rows")
    # A pass for one client has the fewest rows that give the bits of W.
    narrow = next(rows for rows in _ROWS if rows >= bare.decode_shapes[0])
    # The loop has no drafts, so tokens that were not computed one by one do not count.
    tokens = sum(sample.answer.completion_tokens or 0 for sample in (samples[0], *samples))
    ours = statistics.median(map(rate, samples)) * (1 - accepted / tokens)
    drafts = f"; {accepted} of {tokens} tokens came from drafts, and do not count"
    return [
        Row(
            name="decoding over HTTP / mlx-lm's loop alone with one row, one client",
            value=ours / for_one[1],
            goal=0.95,
            better="more",
            of=f"{ours:.1f} / {for_one[1]:.1f} tokens a second, of {for_one[narrow]:.1f} with the "
            f"rows of a pass for one client ({narrow}){drafts if accepted else ''}",
            checked=compared,
            figures={
                "ours": list(map(rate, samples)),
                "accepted": accepted,
                "for_one": for_one,
                "for_all": for_all,
            },
        ),
        Row(
            name=f"what {narrow} rows cost one client: tokens a second / with one row",
            value=for_one[narrow] / for_one[1],
            better="more",
            of=_curve(for_one),
        ),
        Row(
            name=f"what W = {wide} gives that many clients: tokens a second / with one row",
            value=wide * for_all[wide] / for_all[1],
            better="more",
            of=_curve({rows: rows * found for rows, found in for_all.items()}),
        ),
    ]


def _curve(rates: Mapping[int, float]) -> str:
    return "by rows, " + ", ".join(f"{rows}: {found:.0f}" for rows, found in rates.items())


def journal(stage: Stage) -> list[Row]:
    """One client's answers, alternating between a journal on disk and one that is never written."""
    answer_tokens = stage.count(64, 256)
    with stage.apart("null store", kind=unrecorded()) as without:
        servers = {"with": stage.ours(), "without": without}
        found: dict[str, list[Sample]] = {name: [] for name in servers}
        drawn = stage.drawn("journal")
        request = _request(drawn, servers["with"], answer_tokens)
        for place in range(stage.count(3, 10)):
            # The second finds the machine as the first one left it.
            names = ("with", "without") if place % 2 else ("without", "with")
            for name in names:
                found[name] += _warm(servers[name], request, 1)
        compared = sum(
            len(checked(f"decoding {name} the journal", samples, servers[name]))
            for name, samples in found.items()
        )
    rates = {name: list(map(rate, samples)) for name, samples in found.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return [
        Row(
            name="tokens a second with the journal / written nowhere",
            value=medians["with"] / medians["without"],
            goal=0.98,
            better="more",
            of=f"{medians['with']:.1f} / {medians['without']:.1f}",
            checked=compared,
            figures=rates,
        )
    ]


def rate(sample: Sample) -> float:
    """
    Tokens per second from the first text of an answer to its end.

    Raises:
        NoResult: the answer does not show it.
    """
    answer = sample.answer
    if answer.first_s is None or not answer.completion_tokens or answer.completion_tokens < 2:
        raise NoResult("an answer is too short to measure its speed")
    return (answer.completion_tokens - 1) / (answer.ended_s - answer.first_s)


def _request(drawn: Drawn, server: Running, answer_tokens: int) -> Request:
    words = words_of(server, drawn)(_HISTORY)
    messages = (system(drawn.text(words)), user(drawn.text(4)))
    # Many tokens of a greedy answer would come from drafts, which the loop does not have.
    return Request(messages=messages, warm=True, answer_tokens=answer_tokens, temperature=VARIED)


def _warm(server: Running, request: Request, count: int) -> Sequence[Sample]:
    """The same request this many times, after one that is not counted."""
    samples = []
    for _ in range(1 + count):
        samples.append(ask(server, request))
        server.wait_at_rest()
    require_hits("decoding", samples[1:])
    return samples[1:]


DECODE = Part(
    "decode",
    "tokens a second over HTTP beside the model alone, and what the journal costs",
    (
        Measure("decoding beside the loop alone", decoding),
        Measure("decoding with the journal and without", journal),
    ),
)
