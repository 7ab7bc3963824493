"""
One client's tokens a second with speculation and without, where an answer quotes its prompt and
where it quotes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from cairn.journal.events import SelfTestFinished
from cairn.journal.replay import Replay
from cairn.journal.rows.store import Store
from cairn_bench.parts.decode import rate
from cairn_bench.parts.first_token import journal_of
from cairn_bench.parts.stage import Measure, Part, Stage, ask, require_hits
from cairn_bench.rows import Row
from cairn_bench.scenarios import VARIED, Request
from cairn_bench.servers.asking import NoResult, Sample
from cairn_bench.servers.processes import Running
from cairn_conform.client_answers import difference
from cairn_conform.client_texts import assistant, system, user

_WITH, _WITHOUT = "with", "without"
_WORDS = 120
ANSWER_TOKENS = (128, 256)


@attrs.frozen(kw_only=True)
class Kind:
    """
    A kind of answer.

    Attributes:
        goal: the least ratio of tokens a second, with speculation to without.
        temperature: of the requests.
        quotes: whether it has to be one that drafts are accepted for.
    """

    name: str
    goal: float
    temperature: float
    quotes: bool


KINDS: Final = (
    Kind(name="an answer that quotes its prompt", goal=1.5, temperature=0.0, quotes=True),
    Kind(name="an answer that quotes nothing", goal=0.97, temperature=VARIED, quotes=False),
)


def speculation(stage: Stage) -> list[Row]:
    """Two servers over the model that quotes, in turn: each answer has the same bits on both."""
    model = stage.quoting()
    with (
        stage.apart("with drafts", model=model) as drafting,
        stage.apart("without drafts", "--no-speculation", model=model) as plain,
    ):
        servers = {_WITH: drafting, _WITHOUT: plain}
        return [_row(stage, kind, servers) for kind in KINDS]


def _row(stage: Stage, kind: Kind, servers: Mapping[str, Running]) -> Row:
    """
    Raises:
        NoAnswer: a server did not answer.
        NoResult: drafts changed an answer, or none was accepted where they have to be.
    """
    request = _request(stage, kind, servers[_WITHOUT])
    found: dict[str, list[Sample]] = {name: [] for name in servers}
    for server in servers.values():  # neither one's first answer counts
        ask(server, request)
        server.wait_at_rest()
    before = _drafts(servers[_WITH])
    for place in range(stage.count(3, 9)):
        # The second finds the machine as the first one left it.
        for name in (_WITH, _WITHOUT) if place % 2 else (_WITHOUT, _WITH):
            found[name].append(ask(servers[name], request))
            servers[name].wait_at_rest()
    after = _drafts(servers[_WITH])
    drafted, accepted = after[0] - before[0], after[1] - before[1]
    if kind.quotes and not accepted:
        raise NoResult(f"{kind.name}: no token of a draft was accepted{_told_why(servers[_WITH])}")
    for samples in found.values():
        require_hits(kind.name, samples)
    compared = _compared(kind, request, servers, found)
    medians = {name: statistics.median(map(rate, samples)) for name, samples in found.items()}
    tokens = sum(sample.answer.completion_tokens or 0 for sample in found[_WITH])
    return Row(
        name=f"{kind.name}: tokens a second with speculation / without",
        value=medians[_WITH] / medians[_WITHOUT],
        goal=kind.goal,
        better="more",
        of=f"{medians[_WITH]:.1f} / {medians[_WITHOUT]:.1f}; of {tokens} tokens {accepted} came "
        f"from drafts of {drafted}",
        checked=compared,
        figures={
            **{name: list(map(rate, samples)) for name, samples in found.items()},
            "tokens": tokens,
            "drafted": drafted,
            "accepted": accepted,
        },
    )


def _request(stage: Stage, kind: Kind, server: Running) -> Request:
    """
    The second turn of a conversation: its client asks for the first one's answer again.

    A model that quotes answers both the same, so the second answer is in its own prompt.
    """
    tokens = stage.count(*ANSWER_TOKENS)
    messages = (
        system(stage.drawn(kind.name).text(_WORDS)),
        user("Repeat the list, word for word."),
    )
    first = ask(server, Request(messages=messages, warm=False, answer_tokens=tokens))
    server.wait_at_rest()
    return Request(
        messages=(*messages, assistant(first.answer.text), messages[1]),
        warm=True,
        answer_tokens=tokens,
        temperature=kind.temperature,
    )


def _compared(
    kind: Kind,
    request: Request,
    servers: Mapping[str, Running],
    found: Mapping[str, Sequence[Sample]],
) -> int:
    """
    Compare warm answers of both servers, and the text of the timed ones, with a cold answer that
    had no drafts; returns how many.

    Raises:
        NoResult: one of them differs.
    """
    cold = ask(servers[_WITHOUT], request, logprobs=True, cache_prompt=False)
    if cold.answer.cached_tokens:
        raise NoResult(f"{kind.name}: without the cache tokens were reused")
    for name, server in servers.items():
        server.wait_at_rest()
        hit = ask(server, request, logprobs=True)
        server.wait_at_rest()
        require_hits(kind.name, [hit])
        if hit.answer.tokens is None or cold.answer.tokens is None:
            raise NoResult(f"{kind.name}: there are no log-probabilities to compare")
        for sample in (hit, *found[name]):
            if (differs := difference(cold.answer, sample.answer)) is not None:
                raise NoResult(
                    f"{kind.name}: a warm answer {name} speculation differs from the cold one "
                    f"without: {differs}"
                )
    return len(servers)


def _drafts(server: Running) -> tuple[int, int]:
    """The tokens of drafts so far, and how many of them were accepted."""
    return (
        server.counted("cairn_draft_tokens_total"),
        server.counted("cairn_draft_tokens_accepted_total"),
    )


def _told_why(server: Running) -> str:
    """What its self-test says about it, as a continuation of a sentence; empty if nothing."""
    try:
        with journal_of(server) as store:
            why = without_drafts(store)
    except NoResult:
        return ""
    return f": {why}" if why else ""


def without_drafts(store: Store) -> str:
    """Why the model that was loaded last has no drafts, as its self-test says; empty if it has."""
    fold, why = Replay(store.base()), ""
    for row in store.read():
        recorded = fold.feed(row)
        if recorded is not None and isinstance(recorded.event, SelfTestFinished):
            why = recorded.event.without_drafts
    return why


DRAFTS = Part(
    "speculation",
    "tokens a second with drafts of the next tokens and without",
    (Measure("answers with speculation and without", speculation),),
)
