"""What a part of the bench has at hand: servers that run, servers to start, and the model alone."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from cairn_bench.asking import NoResult, Sample, asked, compared_with_cold
from cairn_bench.rows import Row
from cairn_bench.scenarios import Drawn, Request
from cairn_bench.servers import DidNotStart, Kind, Running, environment_with
from cairn_conform.client_texts import system, user

_BARE_S: Final = 900.0
_LEARNT_WORDS: Final = (20, 120)


@attrs.frozen(kw_only=True)
class Bare:
    """
    What the model alone took.

    Attributes:
        block_tokens: C, as a server has it that is not asked for another.
        decode_rows: W, likewise.
        spans_s: for each span, the median time of the passes that the schedule asks for.
        decodes_s: for each decode loop, the time of all its steps.
    """

    block_tokens: int
    decode_rows: int
    spans_s: tuple[float, ...]
    decodes_s: tuple[float, ...]


Start: TypeAlias = Callable[[Kind, Path, Path], contextlib.AbstractContextManager[Running]]
"""Start a server of a kind over a model, with a folder for its data."""

Alone: TypeAlias = Callable[..., Bare]
"""See ``alone``."""


@attrs.frozen(kw_only=True)
class Stage:
    """
    What a part has at hand.

    Attributes:
        own: how our server is started.
        model: its directory.
        folder: for what is to be gone afterwards.
        salt: what the texts begin with.
        quick: whether there is little time.
        named: gives a server of a run, which is started where it does not run.
        peer: the name of the one that ours is compared with; None where there is none.
        start: starts a further server.
        alone: measures the model alone.
    """

    own: Kind
    model: Path
    folder: Path
    salt: str
    quick: bool
    named: Callable[[str], Running]
    peer: str | None
    start: Start
    alone: Alone

    def ours(self) -> Running:
        """Our server, at rest."""
        server = self.named(self.own.name)
        server.wait_at_rest()
        return server

    def apart(
        self, name: str, *options: str, kind: Kind | None = None
    ) -> contextlib.AbstractContextManager[Running]:
        """
        A server with data of its own, while the context lasts. Under the same name the data are the
        same.

        Args:
            options: of `ops serve`, besides.
            kind: another one than ours.
        """
        kind = kind or self.own
        kind = attrs.evolve(kind, command=(*kind.command, *options))
        return self.start(kind, self.model, self.folder / name.replace(" ", "-"))

    def drawn(self, name: str) -> Drawn:
        """Texts under a name; the same for the same salt."""
        return Drawn(self.salt, name)

    def count(self, quick: int, usual: int) -> int:
        """How often, by how much time there is."""
        return quick if self.quick else usual

    def length(self, tokens: int) -> int:
        """How long a long history is, by how much time there is: half of it takes a quarter."""
        return self.count(tokens // 2, tokens)


@attrs.frozen
class Measure:
    """
    A step of a part: rows that are had together, or not at all.

    Attributes:
        name: what they are about.
        rows: measures them.
        needs_peer: whether there are none without a peer.
    """

    name: str
    rows: Callable[[Stage], Sequence[Row]]
    needs_peer: bool = False


@attrs.frozen
class Part:
    """
    Some of the bench, which can be asked for by its name.

    Attributes:
        told: what it is about, in a few words.
        measures: in their order.
    """

    name: str
    told: str
    measures: tuple[Measure, ...]


# --- asking --------------------------------------------------------------------------------------


def ask(server: Running, request: Request, **more: Any) -> Sample:
    """
    A request and its answer.

    Raises:
        NoAnswer: there is none.
    """
    return Sample(request=request, answer=asked(server, request, **more))


def require_hits(what: str, samples: Sequence[Sample], least: float = 0.0) -> None:
    """
    Raises:
        NoResult: one of them reused no more than this share of its prompt.
    """
    for sample in samples:
        cached, prompt = sample.answer.cached_tokens, sample.answer.prompt_tokens
        if cached is None or not prompt or cached <= least * prompt:
            raise NoResult(f"{what}: the cache was not hit: {told_hit(sample)}")


def told_hit(sample: Sample) -> str:
    """How much of a prompt was reused, in words."""
    return f"{sample.answer.cached_tokens} of {sample.answer.prompt_tokens} tokens were reused"


def checked(
    what: str, samples: Sequence[Sample], server: Running, *, most: int = 1
) -> list[Sample]:
    """
    Compare warm answers with cold ones, and leave the server at rest; the cold ones.

    Raises:
        NoAnswer: the server did not answer.
        NoResult: one is not the cold one.
    """
    found = compared_with_cold(what, samples, server, most=most)
    server.wait_at_rest()
    return found


def words_of(server: Running, drawn: Drawn) -> Callable[[int], int]:
    """Learn how many words make so many tokens of a prompt."""
    counts = []
    for words in _LEARNT_WORDS:
        messages = (system(drawn.text(words)), user(drawn.text(1)))
        answer = asked(server, Request(messages=messages, warm=False, answer_tokens=1))
        if answer.prompt_tokens is None:
            raise NoResult(f"{server.kind.name} does not tell how long a prompt is")
        counts.append(answer.prompt_tokens)
    a_word = (counts[1] - counts[0]) / (_LEARNT_WORDS[1] - _LEARNT_WORDS[0])
    rest = counts[0] - _LEARNT_WORDS[0] * a_word
    return lambda tokens: max(1, round((tokens - rest) / a_word))


def median_s(samples: Sequence[Sample]) -> float:
    """The median time to the first token."""
    return statistics.median(sample.first_s for sample in samples)


def beside_cold(
    name: str, warm: Sequence[Sample], cold: Sequence[Sample], *, goal: float, of: str, **more: Any
) -> Row:
    """
    The first token of warm answers, and that of cold ones to compare.

    Args:
        of: what else is told, behind the two times and with what parts it from them.
        more: further figures.
    """
    return Row(
        name=f"{name} / cold",
        value=median_s(warm) / median_s(cold),
        goal=goal,
        of=f"{milliseconds(median_s(warm))} / {milliseconds(median_s(cold))}{of}",
        checked=len(cold),
        figures={
            "first_s": [sample.first_s for sample in warm],
            "cold_s": [sample.first_s for sample in cold],
            **more,
        },
    )


def span(sample: Sample) -> tuple[int, int]:
    """(tokens that were reused, tokens of the prompt)."""
    return sample.answer.cached_tokens or 0, sample.answer.prompt_tokens or 0


def milliseconds(seconds: float) -> str:
    """For people."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# --- the model alone -----------------------------------------------------------------------------


def alone(
    kind: Kind,
    model: Path,
    *,
    spans: Sequence[tuple[int, int]] = (),
    decodes: Sequence[tuple[int, int, int]] = (),
    repeats: int = 3,
) -> Bare:
    """
    Measure the model with nothing around it, in a process with the BLAS of a kind. See
    ``cairn_bench.bare_model``.

    Args:
        spans: (tokens that are reused, tokens of the prompt) of each.
        decodes: (rows, tokens of history, steps) of each.
        repeats: how often each span is run.

    Raises:
        DidNotStart: it did not come to an end.
    """
    # What is asked for twice is measured once.
    different = sorted(set(spans))
    job = {"model": str(model), "spans": different, "decodes": decodes, "repeats": repeats}
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "cairn_bench.bare_model"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=environment_with(kind.environment),
            timeout=_BARE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DidNotStart(f"the model alone cannot be measured: {error}") from error
    if process.returncode:
        words = " / ".join(process.stderr.splitlines()[-5:])
        raise DidNotStart(f"the model alone ended with {process.returncode}: {words}")
    return bare_of(json.loads(process.stdout), spans, different)


def bare_of(
    found: Mapping[str, Any],
    spans: Sequence[tuple[int, int]],
    different: Sequence[tuple[int, int]],
) -> Bare:
    """What the process wrote, in the order in which it was asked for."""
    medians = [statistics.median(times) for times in found["spans"]]
    by_span = dict(zip(different, medians, strict=True))
    return Bare(
        block_tokens=found["block_tokens"],
        decode_rows=found["decode_rows"],
        spans_s=tuple(by_span[one] for one in spans),
        decodes_s=tuple(found["decodes"]),
    )
