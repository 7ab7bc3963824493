"""A drill, its checks, and its outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from cairn.journal.invariants import Scope

if TYPE_CHECKING:
    from cairn.ops.drills.server.baseline import Baseline

CHECKS = {
    "caught": "an invariant's check, or the chain's, found the damage",
    "journaled": "the journal has the bug record, and what it took out of service",
    "counted": "the metrics count it",
    "logged": "the log has it, with its bug id",
    "answered": "clients got the documented answers",
    "confined": "all other requests were answered as before, bit for bit",
    "replayed": "the command for the bug id shows it from the journal",
}
"""The checks after a drill, in this order."""


@attrs.frozen
class Check:
    """
    One expected consequence of the damage.

    Attributes:
        name: one of ``CHECKS``.
        passed: None if the check does not apply; ``fact`` says why.
        fact: what was observed.
    """

    name: str
    passed: bool | None
    fact: str


def checked(name: str, passed: bool, fact: str, otherwise: str) -> Check:
    """A check that says ``fact`` if it passed, and ``otherwise`` if it failed."""
    return Check(name, passed, fact if passed else otherwise)


@attrs.frozen(kw_only=True)
class Scene:
    """
    Where a drill takes place.

    Attributes:
        directory: the private server's data directory; its journal and log stay there.
        model: the model's directory.
        baseline: the answers of an undamaged server.
    """

    directory: Path
    model: Path
    baseline: Baseline


@attrs.frozen(kw_only=True)
class Outcome:
    """
    The outcome of a drill.

    Attributes:
        bug_id: None if there is no bug record.
        command: shows the bug again from the journal; empty if nothing was caught.
        caught_ms: from the damage to the commit of the event that caught it; None if nothing did,
            or if the journal of a stopped server was damaged.
    """

    checks: tuple[Check, ...]
    bug_id: str | None = None
    command: str = ""
    caught_ms: float | None = None

    @classmethod
    def uncaught(cls, fact: str, *more: Check) -> Outcome:
        """Nothing was caught."""
        return cls(checks=(Check("caught", False, fact), *more))

    @property
    def passed(self) -> bool:
        """Whether the damage was caught, and no check failed."""
        caught = any(check.name == "caught" and check.passed for check in self.checks)
        return caught and all(check.passed is not False for check in self.checks)


@attrs.frozen(kw_only=True)
class Drill:
    """
    One way to break something on purpose.

    Attributes:
        invariant: what breaks; ``CRASH`` for a session's own code, ``WORLD`` for a cause outside
            Cairn. ``docs/bugs`` has a page of that name.
        scope: what is taken out of service, as in ``invariants.SENTENCES``.
        damage: what is damaged, in one sentence.
        play: does the damage, and checks the consequences.
    """

    name: str
    invariant: str
    scope: Scope
    damage: str
    play: Callable[[Scene], Awaitable[Outcome]]
