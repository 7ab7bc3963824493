"""What a part of the bench can use: running servers, servers to start, and the model alone."""

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

from cairn_bench.rows import Row
from cairn_bench.scenarios import Drawn, Request
from cairn_bench.servers.asking import NoResult, Sample, asked, compared_with_cold
from cairn_bench.servers.processes import DidNotStart, Kind, Running, environment_with
from cairn_conform.client_texts import system, user

_BARE_S: Final = 900.0
_LEARNT_WORDS: Final = (20, 120)


@attrs.frozen(kw_only=True)
class Bare:
    """
    The times of the model alone.

    Attributes:
        block_tokens: C, as a server chooses it by default.
        decode_shapes: the numbers of rows that a decode pass may have, likewise; the last one is W.
        spans_s: for each span, the median time of the passes of the schedule.
        decodes_s: for each decode loop, the time of all its steps.
    """

    block_tokens: int
    decode_shapes: tuple[int, ...]
    spans_s: tuple[float, ...]
    decodes_s: tuple[float, ...]


Start: TypeAlias = Callable[[Kind, Path, Path], contextlib.AbstractContextManager[Running]]
"""Start a server of a kind over a model, with a folder for its data."""

Alone: TypeAlias = Callable[..., Bare]
"""See ``alone``."""


@attrs.frozen(kw_only=True)
class Stage:
    """
    What a part can use.

    Attributes:
        own: how our server is started.
        model: its directory.
        folder: for temporary files.
        salt: the beginning of the texts.
        quick: whether there is little time.
        named: returns a server of a run, which is started unless it runs already.
        peer: the name of the server to compare with; None if there is none.
        start: starts an additional server.
        alone: measures the model alone.
        quoting: gives the directory of a model whose greedy answers quote earlier ones. With random
            weights it is one of the same shape, made for that; else it is the model itself.
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
    quoting: Callable[[], Path]

    def ours(self) -> Running:
        """Our server, when it is idle."""
        server = self.named(self.own.name)
        server.wait_at_rest()
        return server

    def apart(
        self, name: str, *options: str, kind: Kind | None = None, model: Path | None = None
    ) -> contextlib.AbstractContextManager[Running]:
        """
        A server with its own data, while the context is active. The same name gives the same data.

        Args:
            options: additional options of `ops serve`.
            kind: a kind other than ours.
            model: a model other than that of the run.
        """
        kind = kind or self.own
        kind = attrs.evolve(kind, command=(*kind.command, *options))
        return self.start(kind, model or self.model, self.folder / name.replace(" ", "-"))

    def drawn(self, name: str) -> Drawn:
        """Texts under a name; the same for the same salt."""
        return Drawn(self.salt, name)

    def count(self, quick: int, usual: int) -> int:
        """The number of repeats, fewer in a quick run."""
        return quick if self.quick else usual

    def length(self, tokens: int) -> int:
        """
        The length of a long history; a quick run uses half, which takes a quarter of the time.
        """
        return self.count(tokens // 2, tokens)


@attrs.frozen
class Measure:
    """
    A step of a part: its rows are measured together, or not at all.

    Attributes:
        name: what the rows are about.
        rows: measures them.
        needs_peer: whether it needs a peer.
        in_quick: whether a quick run has it, unless its part is named.
    """

    name: str
    rows: Callable[[Stage], Sequence[Row]]
    needs_peer: bool = False
    in_quick: bool = True


@attrs.frozen
class Part:
    """
    A part of the bench, which can be selected by its name.

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
    Compare warm answers with cold ones, and leave the server idle; returns the cold ones.

    Raises:
        NoAnswer: the server did not answer.
        NoResult: one differs from the cold one.
    """
    found = compared_with_cold(what, samples, server, most=most)
    server.wait_at_rest()
    return found


def words_of(server: Running, drawn: Drawn) -> Callable[[int], int]:
    """Measure how many words make this many tokens of a prompt."""
    counts = []
    for words in _LEARNT_WORDS:
        messages = (system(drawn.text(words)), user(drawn.text(1)))
        answer = asked(server, Request(messages=messages, warm=False, answer_tokens=1))
        if answer.prompt_tokens is None:
            raise NoResult(f"{server.kind.name} does not report the length of a prompt")
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
        of: further text after the two times, with its separator.
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
    """(reused tokens, tokens of the prompt)."""
    return sample.answer.cached_tokens or 0, sample.answer.prompt_tokens or 0


def milliseconds(seconds: float) -> str:
    """For readers."""
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
    Measure the model alone, in a process with the BLAS of a kind. See ``servers/bare_model.py``.

    Args:
        spans: (reused tokens, tokens of the prompt) of each.
        decodes: (rows, tokens of history, steps) of each.
        repeats: how often each span is run.

    Raises:
        DidNotStart: it did not finish.
    """
    # Repeated measurements are taken once.
    different = sorted(set(spans))
    job = {"model": str(model), "spans": different, "decodes": decodes, "repeats": repeats}
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "cairn_bench.servers.bare_model"],
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
    """What the process wrote, in the order of the request."""
    medians = [statistics.median(times) for times in found["spans"]]
    by_span = dict(zip(different, medians, strict=True))
    return Bare(
        block_tokens=found["block_tokens"],
        decode_shapes=tuple(found["decode_shapes"]),
        spans_s=tuple(by_span[one] for one in spans),
        decodes_s=tuple(found["decodes"]),
    )
