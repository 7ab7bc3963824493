"""Send a request to a server: one timed answer, and the checks that make it count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from os.path import commonprefix
from typing import Any, Final

import attrs

from cairn_bench.scenarios import Request
from cairn_bench.servers.processes import Running
from cairn_conform.client_answers import Answer, count, difference

_CHECKED: Final = 3
"""This many warm answers of a run are requested again, with and without the cache."""

_CHUNKS_LESS: Final = 2
_SEED: Final = 1


class NoAnswer(Exception):
    """
    A server gave no complete answer.

    Args:
        server: its name.
        why: what it did.
    """

    def __init__(self, server: str, why: str) -> None:
        self.server = server
        super().__init__(f"{server}: {why}")


class NoResult(Exception):
    """A run without a result: the cache was not hit, or a warm answer differs from the cold one."""


@attrs.frozen(kw_only=True)
class Sample:
    """A request of a run, and its answer."""

    request: Request
    answer: Answer

    @property
    def first_s(self) -> float:
        """From the connection to the first text, or to the end of an answer without text."""
        return (self.answer.first_s or self.answer.ended_s) - self.answer.began_s

    @property
    def total_s(self) -> float:
        """From the connection to the end of the answer."""
        return self.answer.ended_s - self.answer.began_s


def unhit(samples: Sequence[Sample], block_tokens: int | None = None) -> list[tuple[Sample, float]]:
    """
    The warm samples that reused too little of what an earlier one had sent, each with how many
    tokens were reusable.

    Whole chunks are reused at least, and where texts diverge is not known to the token, so two
    chunks less are enough.

    Args:
        samples: of one server, in the order of the requests.
        block_tokens: C; if it is not reported, the greatest common divisor of all reused counts. If
            all hits reuse the same number of tokens, that is too large, and samples without reuse
            are missed.
    """
    reused = (sample.answer.cached_tokens or 0 for sample in samples)
    chunk = block_tokens or math.gcd(*reused)
    found = []
    for place, sample in enumerate(samples):
        if sample.request.warm:
            there = max((_in_common(one, sample) for one in samples[:place]), default=0.0)
            if (sample.answer.cached_tokens or 0) < there - _CHUNKS_LESS * chunk:
                found.append((sample, there))
    return found


def _in_common(earlier: Sample, later: Sample) -> float:
    """
    The length in tokens of the common beginning of two prompts, as far as their texts show it.
    """
    alike = total = 0
    first, second = earlier.request.messages, later.request.messages
    same = True
    for one, other in zip_longest(first, second[: len(first)]):
        text = one["content"]
        total += len(text)
        if same and one == other:
            alike += len(text)
        elif same:
            same = False
            if other is not None and one["role"] == other["role"]:
                both = [text, other["content"]]
                alike += len(commonprefix(both))  # noqa: RUF071  # texts, and no paths
    return (earlier.answer.prompt_tokens or 0) * alike / total if total else 0.0


def compared_with_cold(
    what: str, warm: Sequence[Sample], server: Running, *, most: int = _CHECKED
) -> list[Sample]:
    """
    Request some of the warm answers again, with and without the cache, and compare them: the timed
    answer by its text, the others to the last bit.

    Args:
        what: the name of the answers in a failure.
        most: how many to check.

    Returns:
        The cold answers, one for each that was checked.

    Raises:
        NoAnswer: the server did not answer.
        NoResult: one of them differs.
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
                raise NoResult(f"{what}: a warm answer differs from the cold one: {found}")
    if not reused:
        raise NoResult(f"{what}: none of the compared answers was a hit")
    return cold


def spread(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    """Some of them, from the first to the last; the last if one is enough."""
    last = len(samples) - 1
    if most == 1:
        return samples[last:]
    places = {round(last * place / (most - 1)) for place in range(most)}
    return [samples[place] for place in sorted(places)]


def asked(server: Running, request: Request, **more: Any) -> Answer:
    """
    A complete answer, streamed.

    Args:
        more: additional fields of the body.

    Raises:
        NoAnswer: there is none.
    """
    answer = server.client.ask(body_of(request, **more))
    if not answer.complete or not answer.done:
        why = answer.outcome if not answer.complete else "the stream ended without [DONE]"
        raise NoAnswer(server.kind.name, why)
    return answer


def body_of(request: Request, **more: Any) -> dict[str, Any]:
    """The body of the request."""
    # No model is named: mlx-lm's server would look for a different one of that name.
    body: dict[str, Any] = {
        "messages": list(request.messages),
        "max_tokens": request.answer_tokens,
        "temperature": request.temperature,
        "seed": _SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    if request.thinking:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body
