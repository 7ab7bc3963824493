"""
Threads for what a prompt needs before it has a place: template, tokenizer and grammar.

1. Short prompts, long prompts and grammars each have threads of their own, so that none waits for
   one of another kind.
2. A tenant has one thread of a kind at a time. What it sends meanwhile waits in its order of
   arrival, and tenants get a thread in theirs: many long prompts of one tenant delay no other.
3. After a limit the work is given up. Python cannot stop a thread, so it runs on: it keeps its
   tenant's share until it ends, and its place too if too many run on already.

docs/design/20261125-preparing-prompts.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeVar

import structlog
import trio

T = TypeVar("T")

Kind = Literal["short", "long", "grammar"]

LONG_CHARACTERS: Final = 2**17
"""From how many characters on a prompt is long: a tenth of a second of tokenising."""

THREADS: Final[Mapping[Kind, int]] = {"short": 2, "long": 2, "grammar": 2}
"""How many run at a time, by kind."""

GIVEN_UP_MAX: Final = 4
"""How many threads may run on, after they were given up, without their places."""

LIMIT_S: Final = 60.0
"""How long one prompt or grammar may take once it has a thread, in seconds."""

log = structlog.get_logger("cairn")


class GivenUp(Exception):
    """
    The work took too long.

    Attributes:
        limit_s: the limit, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"it took longer than {limit_s:g} seconds")
        self.limit_s = limit_s


class PromptThreads:
    """
    Runs work on prompts in threads.

    Attributes:
        given_up: how many threads run on that were given up.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """
        Args:
            limit_s: how long one work may take once it has a thread, in seconds.
        """
        self.given_up = 0
        self._limit_s = limit_s
        self._lanes = {kind: _Lane(threads) for kind, threads in THREADS.items()}
        self._placeless = 0

    async def run(self, kind: Kind, tenant: str, work: Callable[[], T]) -> T:
        """
        Run work in a thread, when it is the tenant's turn. May be cancelled; then, as after the
        limit, the thread runs on and its result is dropped.

        Raises:
            GivenUp: it took longer than the limit.
        """
        with trio.CancelScope() as limit:
            place = _Place(self, kind, tenant, self._lanes[kind], limit)
            try:
                return await trio.to_thread.run_sync(
                    work,
                    limiter=place,  # type: ignore[arg-type]  # trio takes any with its two methods
                    abandon_on_cancel=True,
                )
            finally:
                place.leave()
        raise GivenUp(self._limit_s)

    @property
    def limit_s(self) -> float:
        """How long one work may take, in seconds."""
        return self._limit_s

    def take_over(self, kind: Kind, tenant: str, *, is_late: bool) -> bool:
        """
        Note that a thread runs on. True if it does so without its place.

        Args:
            is_late: whether it took longer than the limit, and not its client left.
        """
        self.given_up += 1
        if is_late:
            log.warning(
                "a prompt's thread was given up", kind=kind, tenant=tenant, running_on=self.given_up
            )
        if self._placeless == GIVEN_UP_MAX:
            return False
        self._placeless += 1
        return True

    def ended(self, *, placeless: bool) -> None:
        """Note that a thread that ran on has ended."""
        self.given_up -= 1
        self._placeless -= placeless


def kind_of(characters: int) -> Kind:
    """The kind of a prompt."""
    return "long" if characters >= LONG_CHARACTERS else "short"


class _Lane:
    """The threads of one kind."""

    def __init__(self, threads: int) -> None:
        self.places = trio.CapacityLimiter(threads)
        self._shares: dict[str, trio.CapacityLimiter] = {}

    def share(self, tenant: str) -> trio.CapacityLimiter:
        """The tenant's share."""
        return self._shares.setdefault(tenant, trio.CapacityLimiter(1))

    def forget_unused(self, tenant: str) -> None:
        """Drop a share that no work has or waits for."""
        share = self._shares.get(tenant)
        now = share.statistics() if share is not None else None
        if now is not None and now.borrowed_tokens == now.tasks_waiting == 0:
            del self._shares[tenant]


class _Place:
    """
    The place of one work, which trio takes as the limiter of its thread: the tenant's share, then
    one of the threads. trio releases it when the thread has ended, also if that was given up.
    """

    def __init__(
        self, threads: PromptThreads, kind: Kind, tenant: str, lane: _Lane, limit: trio.CancelScope
    ) -> None:
        self._threads = threads
        self._kind = kind
        self._tenant = tenant
        self._lane = lane
        self._limit = limit
        self._runs = False
        self._runs_on = False
        self._placeless = False

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for a thread; from then on the limit counts."""
        share = self._lane.share(self._tenant)
        try:
            await share.acquire_on_behalf_of(borrower)
            try:
                await self._lane.places.acquire_on_behalf_of(borrower)
            except BaseException:
                share.release_on_behalf_of(borrower)
                raise
        except BaseException:
            self._lane.forget_unused(self._tenant)
            raise
        self._borrower = borrower
        self._runs = True
        self._limit.deadline = trio.current_time() + self._threads.limit_s

    def release_on_behalf_of(self, borrower: object) -> None:
        """The thread has ended."""
        self._runs = False
        if not self._placeless:
            self._lane.places.release_on_behalf_of(borrower)
        self._lane.share(self._tenant).release_on_behalf_of(borrower)
        self._lane.forget_unused(self._tenant)
        if self._runs_on:
            self._threads.ended(placeless=self._placeless)

    def leave(self) -> None:
        """Nothing waits for the work any more. A thread that has not ended is given up."""
        if self._runs:
            self._runs_on = True
            is_late = trio.current_time() >= self._limit.deadline
            self._placeless = self._threads.take_over(self._kind, self._tenant, is_late=is_late)
            if self._placeless:
                self._lane.places.release_on_behalf_of(self._borrower)
