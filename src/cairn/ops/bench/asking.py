"""
Asking a server: one answer, timed, and what makes it one that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from cairn.ops.bench.scenarios import Request
from cairn.ops.bench.servers import Running
from cairn.ops.outside.answers import Answer, count, difference

_CHECKED: Final = 3
"""So many warm answers of a run are asked for again, with and without the cache."""

_SEED: Final = 1


class NoAnswer(Exception):
    """
    A server gave no whole answer.

    Args:
        server: its name.
        why: what it did.
    """

    def __init__(self, server: str, why: str) -> None:
        self.server = server
        super().__init__(f"{server}: {why}")


class NoResult(Exception):
    """
    A run that shows nothing: the cache was not hit, or a warm answer is not the cold one.
    """


@attrs.frozen(kw_only=True)
class Sample:
    """
    A request of a run, and what came of it.
    """

    request: Request
    answer: Answer

    @property
    def first_s(self) -> float:
        """
        From the connection to the first text, or to the end of an answer without any.
        """
        return (self.answer.first_s or self.answer.ended_s) - self.answer.began_s

    @property
    def total_s(self) -> float:
        """
        From the connection to the end of the answer.
        """
        return self.answer.ended_s - self.answer.began_s


def compared_with_cold(
    what: str, warm: Sequence[Sample], server: Running, *, most: int = _CHECKED
) -> list[Sample]:
    """
    Ask for some of the warm answers again, with and without the cache, and compare them: the timed
    one by its text, the others to the last bit.

    Args:
        what: how to call them, where one is wrong.
        most: how many to look at.

    Returns:
        The cold ones, one for each that was looked at.

    Raises:
        NoAnswer: the server did not answer.
        NoResult: one of them is not the same.
    """
    checked = spread(warm, most)
    reused = 0
    cold = []
    for sample in checked:
        hit = asked(server, sample.request, logprobs=True)
        server.wait_at_rest()  # how soon the cold one begins is a figure of some rows
        miss = asked(server, sample.request, logprobs=True, cache_prompt=False)
        if hit.tokens is None or miss.tokens is None:
            raise NoResult(f"{what}: there are no log-probabilities to compare")
        if miss.cached_tokens != 0:
            raise NoResult(
                f"{what}: without the cache {count(miss.cached_tokens)} tokens were reused"
            )
        reused += hit.cached_tokens or 0
        cold.append(Sample(request=sample.request, answer=miss))
        for told in (hit, sample.answer):
            if (found := difference(miss, told)) is not None:
                raise NoResult(f"{what}: a warm answer is not the cold one: {found}")
    if not reused:
        raise NoResult(f"{what}: no hit was among the answers that were compared")
    return cold


def spread(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    """
    Some of them, from the first to the last; the last, where one is enough.
    """
    last = len(samples) - 1
    if most == 1:
        return samples[last:]
    places = {round(last * place / (most - 1)) for place in range(most)}
    return [samples[place] for place in sorted(places)]


def asked(server: Running, request: Request, **more: Any) -> Answer:
    """
    A complete answer, greedy and as a stream.

    Args:
        more: fields of the body besides.

    Raises:
        NoAnswer: there is none.
    """
    answer = server.client.ask(body_of(request, **more))
    if not answer.complete or not answer.done:
        why = answer.outcome if not answer.complete else "the stream ended without [DONE]"
        raise NoAnswer(server.kind.name, why)
    return answer


def body_of(request: Request, **more: Any) -> dict[str, Any]:
    """
    What is sent.
    """
    # No model is named: mlx-lm's server would look for another one of that name.
    body: dict[str, Any] = {
        "messages": list(request.messages),
        "max_tokens": request.answer_tokens,
        "temperature": 0,
        "seed": _SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    if request.thinking:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body
