"""
Sends a row's requests and decides its verdict.

A row is a function of a ``Case``. It sends requests through it and records its findings: ``note``
for information, ``fail`` for a failure, ``untested`` for what could not be tested. A row continues
after a failure; it ends early only if the server gave no answer to continue with.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import attrs

from cairn_conform.client import Client, Left
from cairn_conform.client_answers import Answer, compared, count, difference
from cairn_conform.client_texts import Message, assistant, listed, user

T = TypeVar("T")

Verdict = Literal["passed", "failed", "skipped"]

TOKENS = 24
"""The length of most answers."""

_SHORT_WORDS = 12
_BETWEEN_S = 0.2
BEGIN_S = 30.0
_BUSY = (429, 503)
_HIT_PARTS = 4


class Ended(Exception):
    """A row cannot continue. The reason is already recorded."""


class Lost(Exception):
    """The server no longer answers."""


@attrs.frozen
class Row:
    """
    A property that a server is tested for.

    Attributes:
        asks: the question, in one sentence.
    """

    name: str
    asks: str
    play: Callable[[Case], None]


@attrs.frozen(kw_only=True)
class Result:
    """
    The result of a row.

    Attributes:
        failures: what failed.
        untested: why something was not tested.
        evidence: further information.
        requests: how many were sent.
    """

    row: Row
    verdict: Verdict
    failures: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    requests: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """All findings, the most important first."""
        return (*self.failures, *self.untested, *self.evidence)


@attrs.frozen(kw_only=True)
class Subject:
    """
    The server under test, and the settings for its requests.

    Attributes:
        fields: fields of every body: the model's name, and log-probabilities if they are reported.
        context_tokens: how long a prompt may be; None if it is not reported.
        salt: the beginning of each prompt.
        words: the length of a long prompt.
        restart: a shell command; None if there is none.
        restart_s: how long the server may take to come back.
    """

    client: Client
    fields: Mapping[str, Any]
    context_tokens: int | None
    salt: str
    words: int
    restart: str | None = None
    restart_s: float = 120.0

    def body(self, messages: Sequence[Message], **more: Any) -> dict[str, Any]:
        """A request: greedy, and short."""
        plain = {"temperature": 0, "max_tokens": TOKENS}
        return {"messages": list(messages), **self.fields, **plain, **more}

    def alive(self) -> bool:
        """Whether the server answers at all. If it is busy, try again up to the deadline."""
        hello = self.body([user(f"{self.salt} Hello.")], max_tokens=1)
        end_s = time.monotonic() + self.client.deadline_s
        while (answer := self.client.ask(hello)).status in _BUSY and time.monotonic() < end_s:
            time.sleep(_BETWEEN_S)
        return answer.complete

    def come_back(self) -> None:
        """
        Restart the server, and wait until it answers.

        Raises:
            ValueError: the command failed; the message says how.
            Lost: the server did not come back.
        """
        assert self.restart is not None
        try:
            # In a session of its own, so that our signals do not reach a server that it starts.
            # Both its outputs go to our stderr, because stdout is for the table.
            done = subprocess.run(
                self.restart,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=2,
                timeout=self.restart_s,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"did not end within {self.restart_s:g} s") from error
        if done.returncode != 0:
            raise ValueError(f"ended with {done.returncode}")
        end_s = time.monotonic() + self.restart_s
        while not self.alive():
            if time.monotonic() > end_s:
                raise Lost(f"did not answer within {self.restart_s:g} s after the restart")
            time.sleep(_BETWEEN_S)


class Case:
    """One row's requests to the server."""

    def __init__(self, subject: Subject, row: Row) -> None:
        self.subject = subject
        self._row = row
        self._began = subject.client.requests
        self._failures: list[str] = []
        self._untested: list[str] = []
        self._notes: list[str] = []
        self._answered: set[str] = set()

    # --- findings --------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Record information for the reader."""
        self._notes.append(text)

    def fail(self, text: str) -> None:
        """Record a failure."""
        self._failures.append(text)

    def untested(self, text: str) -> None:
        """Record why something could not be tested. Failures take precedence."""
        self._untested.append(text)

    def stop(self, text: str) -> Ended:
        """``untested``, if the row cannot continue. To be raised."""
        self.untested(text)
        return Ended(text)

    def result(self) -> Result:
        """The result of the row."""
        verdict: Verdict = "passed"
        if self._failures:
            verdict = "failed"
        elif self._untested:
            verdict = "skipped"
        return Result(
            row=self._row,
            verdict=verdict,
            failures=tuple(self._failures),
            untested=tuple(self._untested),
            evidence=tuple(self._notes),
            requests=self.subject.client.requests - self._began,
        )

    # --- requests --------------------------------------------------------------------------------

    def long(self, name: str = "") -> list[Message]:
        """A conversation of one long turn that was never sent before."""
        return [user(self._listed(name, self.subject.words))]

    def short(self, name: str = "") -> list[Message]:
        """The same with a few words."""
        return [user(self._listed(name, _SHORT_WORDS))]

    def onward(self, messages: Sequence[Message], answer: Answer, name: str = "") -> list[Message]:
        """The conversation with its answer, and with a further turn if that has a name."""
        more = [user(self._listed(name, self.subject.words // 4))] if name else []
        return [*messages, assistant(answer.text), *more]

    def ask(self, messages: Sequence[Message], what: str = "a request", **more: Any) -> Answer:
        """
        A complete answer.

        Args:
            what: the name of the request in a failure.

        Raises:
            Ended: there is none.
        """
        body = self.subject.body(messages, **more)
        return self._known(body, self.subject.client.ask(body), what)

    def stream(self, messages: Sequence[Message], what: str = "a stream", **more: Any) -> Answer:
        """
        A complete answer that came as a stream, with its usage if that is reported.

        Raises:
            Ended: there is none.
        """
        body = self.subject.body(messages, stream=True, **more)
        answer = self.subject.client.ask({**body, "stream_options": {"include_usage": True}})
        if answer.refused:
            answer = self.subject.client.ask(body)
        return self._known(body, answer, what)

    def warm(self, messages: Sequence[Message], **more: Any) -> Answer:
        """
        An answer to a repeated request, so that a cache has nothing to add.

        Raises:
            Ended: there is none.
        """
        self.ask(messages, **more)
        return self.spoken(self.ask(messages, **more))

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """
        The results of concurrent calls.

        Raises:
            Ended: this machine cannot start that many at once.
        """
        # Otherwise the first would have its answer before the thread of the last has begun.
        ready = threading.Barrier(len(calls), timeout=BEGIN_S)

        def made(call: Callable[[], T]) -> T:
            ready.wait()
            return call()

        what = f"{len(calls)} requests could not be sent at once from this machine"
        with ThreadPoolExecutor(len(calls)) as threads:
            try:
                made_all = [threads.submit(made, call) for call in calls]
            except RuntimeError as error:  # no thread can be started; the others wait for it
                ready.abort()
                raise self.stop(f"{what}: {error}") from error
            try:
                return [one.result() for one in made_all]
            except threading.BrokenBarrierError as error:
                raise self.stop(f"{what} within {BEGIN_S:g} s") from error

    def leave(
        self,
        messages: Sequence[Message],
        *,
        after_s: float | None = None,
        pieces: int = 1,
        **more: Any,
    ) -> Left:
        """Send a request for a long answer, and disconnect. See ``Client.leave``."""
        body = self.subject.body(messages, **{"max_tokens": 8 * TOKENS, "stream": True, **more})
        return self.subject.client.leave(body, after_s=after_s, pieces=pieces)

    def complete(self, answer: Answer, what: str) -> Answer:
        """
        The answer, if it is one.

        Raises:
            Ended: it is none. A server that is busy, or does not accept such a request, is not to
                blame.
        """
        if answer.complete:
            return answer
        if answer.status in _BUSY or answer.refused:
            raise self.stop(f"{what} was refused: {answer.outcome}")
        self.fail(f"{what} got no answer: {answer.outcome}")
        raise Ended(what)

    def refuses(self, answer: Answer) -> bool:
        """Whether the server does not accept such a request, rather than being busy."""
        return answer.refused and answer.status not in _BUSY

    def spoken(self, answer: Answer) -> Answer:
        """
        The answer, if it has any content.

        Raises:
            Ended: it does not.
        """
        if answer.empty:
            raise self.stop("the answer is empty, so there is nothing to compare")
        return answer

    # --- comparisons -----------------------------------------------------------------------------

    def same(self, was: Answer, now: Answer, what: str, *, logprobs: bool = True) -> bool:
        """Compare two answers; a difference is a failure."""
        found = difference(was, now, logprobs=logprobs)
        if found is not None:
            self.fail(f"{what}: {found}")
        return found is None

    def equals_a_miss(self, messages: Sequence[Message], answer: Answer, what: str) -> None:
        """
        Check an answer against one that bypasses the cache, if there is a way to bypass it.

        The ways are ``cache_prompt``, which Cairn and llama.cpp support, or a restart. Other
        servers accept ``cache_prompt`` and ignore it, so a server has to report that nothing was
        reused.

        Raises:
            Ended: there is no answer to compare with.
        """
        body = self.subject.body(messages)
        miss = self.subject.client.ask({**body, "cache_prompt": False})
        how = "with cache_prompt false"
        if miss.refused:
            miss, how = self.subject.client.ask(body), "asked again"
        miss = self.complete(miss, f"the same {how}")
        restarted = self.reused(miss) != 0 and self.subject.restart is not None
        if restarted:
            self.restart()
            miss, how = self.ask(messages, "the same after a restart"), "after a restart"
        self.note(f"compared with the same {how} (cached: {count(miss.cached_tokens)})")
        if not self.same(miss, answer, what):
            return
        reused = self.reused(miss)
        if restarted and self.hit(miss):
            self.untested(
                f"equal, but the answer to compare with was also a hit ({reused} cached), even "
                "after a restart; no other way to bypass this server's cache is known"
            )
        elif not restarted and reused is None:
            self.untested(
                "equal, but the answer to compare with may also have been a hit: the server does "
                "not report hits, and may not know cache_prompt; give --restart to bypass its cache"
            )
        elif not restarted and reused:
            self.untested(
                f"equal, but the answer to compare with was also a hit ({reused} cached); give"
                " --restart to bypass this server's cache"
            )

    def reused(self, answer: Answer) -> int | None:
        """
        How many tokens of its prompt an answer reports as reused; None if it is not reported.

        If a server reports it for different answers and not for this one, that means none.
        """
        if answer.cached_tokens is None and answer.prompt_tokens is not None:
            return 0 if self.subject.client.reports_cached else None
        return answer.cached_tokens

    def hit(self, answer: Answer) -> bool | None:
        """
        Whether a large part of a long prompt was reused, more than the template's beginning; None
        if it is not reported.
        """
        reused = self.reused(answer)
        # A word has at least one token.
        return None if reused is None else reused * _HIT_PARTS > self.subject.words

    def restart(self) -> None:
        """
        Restart the server.

        Raises:
            Ended: it could not be restarted.
            Lost: it did not come back.
        """
        if self.subject.restart is None:
            raise self.stop("no --restart was given")
        try:
            self.subject.come_back()
        except ValueError as error:
            raise self.stop(f"the command of --restart {error}") from error

    def compared(self, answer: Answer) -> None:
        """Note what could be compared."""
        self.note(f"compared: {compared(answer)}")

    def _known(self, body: Mapping[str, Any], answer: Answer, what: str) -> Answer:
        """``complete``; a request that was answered once must not be refused later."""
        key = json.dumps(body)
        if self.refuses(answer) and key in self._answered:
            self.fail(f"{what} was refused, and was answered before: {answer.outcome}")
            raise Ended(what)
        self.complete(answer, what)
        self._answered.add(key)
        return answer

    def _listed(self, name: str, words: int) -> str:
        return listed(self.subject.salt, f"{self._row.name} {name}".strip(), words)


def cached(answers: Sequence[Answer]) -> str:
    """The prompt tokens that each answer reports as reused."""
    numbers = [answer.cached_tokens for answer in answers]
    if all(number is None for number in numbers):
        return "cached: not reported"
    return f"cached: {', '.join(map(count, numbers))}"
