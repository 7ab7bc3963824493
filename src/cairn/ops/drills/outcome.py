"""A drill, what is looked at, and what came of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from cairn.journal.invariants import Scope

if TYPE_CHECKING:
    from cairn.ops.drills.server.conversation import Reference

CHECKS = {
    "caught": "an invariant's check, or the chain's, found the damage",
    "journaled": "the bug record is in the journal, with what it took out of service",
    "counted": "the metrics have it",
    "logged": "the log has it, with its bug id",
    "answered": "clients were told as they must be",
    "confined": "everybody else was served as ever, bit for bit",
    "replayed": "the command for the bug id tells it from the journal",
}
"""What is looked at after a drill, in this order."""


@attrs.frozen
class Check:
    """
    One thing that was looked at.

    Attributes:
        name: one of ``CHECKS``.
        held: None where it does not apply; ``fact`` says why.
        fact: what was seen.
    """

    name: str
    held: bool | None
    fact: str


def looked(name: str, held: bool, fact: str, otherwise: str) -> Check:
    """A check that says ``fact`` where it held, and ``otherwise`` where it did not."""
    return Check(name, held, fact if held else otherwise)


@attrs.frozen(kw_only=True)
class Scene:
    """
    Where a drill takes place.

    Attributes:
        directory: of the private server; what it journals and logs stays there.
        model: the model's directory.
        reference: what is answered where nothing is damaged.
    """

    directory: Path
    model: Path
    reference: Reference


@attrs.frozen(kw_only=True)
class Outcome:
    """
    What came of a drill.

    Attributes:
        bug_id: None where the damage leads to no bug record.
        command: tells the same again from the journal.
        caught_ms: from the damage to the commit of what caught it; None where nothing did, or
            where the damage was done to a journal at rest.
    """

    checks: tuple[Check, ...]
    bug_id: str | None
    command: str
    caught_ms: float | None

    @property
    def passed(self) -> bool:
        """Whether every check held, and the damage was caught at all."""
        caught = any(check.name == "caught" and check.held for check in self.checks)
        return caught and all(check.held is not False for check in self.checks)


@attrs.frozen(kw_only=True)
class Drill:
    """
    One way to break something, on purpose.

    Attributes:
        invariant: what breaks; ``CRASH`` for a session's own code, ``WORLD`` for what is no part of
            Cairn. There is a page of that name in ``docs/bugs``.
        scope: what goes out of service, by ``invariants.SENTENCES``.
        damage: a sentence on what is damaged.
        play: damages it, and looks at what follows.
    """

    name: str
    invariant: str
    scope: Scope
    damage: str
    play: Callable[[Scene], Awaitable[Outcome]]
