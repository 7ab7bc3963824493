"""Whether answers are equal to the last bit, and whether this machine could show a difference."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import combinations

from cairn_bench.parts.stage import Measure, Part, Stage, ask, require_hits
from cairn_bench.rows import Row
from cairn_bench.scenarios import Request, Talk
from cairn_bench.servers.asking import NoAnswer, NoResult, Sample
from cairn_bench.servers.processes import Running
from cairn_conform.client_answers import difference

_AT_ONCE = 4
_OTHER_CHUNK = ("--block-tokens", "16")
_ONE_ROW = ("--decode-rows", "1")


def warm(stage: Stage) -> list[Row]:
    """
    Turns of a conversation, warm and cold.

    The control uses a server that splits prompts into different passes: its bits must differ,
    otherwise the comparison proves nothing.
    """
    server = stage.ours()
    requests = _turns(stage, server, stage.count(4, 20))
    found = [ask(server, request, logprobs=True) for request in requests]
    require_hits("answers of a conversation", found)
    cold = [ask(server, request, logprobs=True, cache_prompt=False) for request in requests]
    with stage.apart("other chunks", *_OTHER_CHUNK) as other:
        control = [ask(other, request, logprobs=True) for request in requests]
    return _rows("warm answers that are the cold ones", found, cold, control, "other passes")


def among(stage: Stage) -> list[Row]:
    """
    Answers computed among others, and alone.

    The control uses a server that decodes one row at a time.
    """
    server = stage.ours()
    requests = _turns(stage, server, stage.count(4, 12))
    found = []
    for start in range(0, len(requests), _AT_ONCE):
        found += _at_once(server, requests[start : start + _AT_ONCE])
    server.wait_at_rest()
    require_hits("answers among others", found)
    for start in range(0, len(found), _AT_ONCE):
        if not _were_together(found[start : start + _AT_ONCE]):
            raise NoResult(
                "answers among others: of the answers requested at once, no two ran at the same "
                "time, so none had a neighbour"
            )
    alone = []
    for request in requests:
        alone.append(ask(server, request, logprobs=True, cache_prompt=False))
        server.wait_at_rest()
    with stage.apart("one row", *_ONE_ROW) as other:
        control = [ask(other, request, logprobs=True) for request in requests]
    return _rows("answers among others that are those alone", found, alone, control, "one row")


def _rows(
    name: str,
    found: Sequence[Sample],
    due: Sequence[Sample],
    control: Sequence[Sample],
    otherwise: str,
) -> list[Row]:
    """
    Raises:
        NoResult: there is nothing to compare, or the control is the same.
    """
    if any(sample.answer.tokens is None for sample in (*found, *due, *control)):
        raise NoResult(f"{name}: there are no log-probabilities to compare")
    same = _same(found, due)
    fails = len(due) - _same(control, due)
    if not fails:
        raise NoResult(
            f"{name}: proves nothing on this machine: {otherwise} gave the same bits too"
        )
    return [
        Row(
            name=name,
            value=same / len(due),
            goal=1.0,
            better="more",
            shown="share",
            of=f"{same} of {len(due)}; of the control ({otherwise}) {len(due) - fails}",
            checked=len(due),
            figures={"same": same, "of": len(due), "control_differs": fails},
        )
    ]


def _same(found: Sequence[Sample], due: Sequence[Sample]) -> int:
    pairs = zip(found, due, strict=True)
    return sum(difference(one.answer, other.answer) is None for one, other in pairs)


def _turns(stage: Stage, server: Running, turns: int) -> list[Request]:
    """The requests of a finished conversation, from the second one on."""
    talk = Talk(stage.drawn(f"bits of {turns} turns"), system_words=60)
    requests = []
    for _ in range(1 + turns):
        requests.append(talk.ask(10))
        talk.hear(ask(server, requests[-1]).answer.text)
        server.wait_at_rest()
    return requests[1:]


def _were_together(group: Sequence[Sample]) -> bool:
    """
    Whether each of two answers had begun before the other ended.

    A server that serves them one after the other also has both in progress at the same time, but
    begins neither before the other ends.
    """
    spans = [(one.answer.first_s or one.answer.ended_s, one.answer.ended_s) for one in group]
    return any(
        first < other_end and other_first < end
        for (first, end), (other_first, other_end) in combinations(spans, 2)
    )


def _at_once(server: Running, requests: Sequence[Request]) -> list[Sample]:
    """
    Send all of them at the same time.

    Raises:
        NoAnswer: the server did not answer one of them.
    """
    found: dict[int, Sample] = {}
    failed: list[NoAnswer] = []

    def one(place: int) -> None:
        try:
            found[place] = ask(server, requests[place], logprobs=True)
        except NoAnswer as error:
            failed.append(error)

    threads = [
        threading.Thread(target=one, args=(place,), daemon=True) for place in range(len(requests))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [found[place] for place in range(len(requests))]


BITS = Part(
    "bits",
    "whether answers are the same to the last bit, with controls that must fail",
    (
        Measure("warm answers and cold ones", warm),
        Measure("answers among others and alone", among),
    ),
)
