"""The invariants as sentences, and what a broken one is."""

from __future__ import annotations

from typing import Literal

import attrs

Scope = Literal["session", "blocks", "admission", "server"]

SENTENCES: dict[str, tuple[str, Scope]] = {
    "INV-1": (
        (
            "after every mutation each layer's measured coverage ends at the session's token "
            "count, and the passes that were run are those of the canonical schedule over its "
            "tokens"
        ),
        "session",
    ),
    "INV-2": (
        "the start of the cached window is what the policy gives, and it never moves back",
        "session",
    ),
    "INV-3": (
        (
            "a block key has one digest as long as the journal has the block, and a row or an "
            "answer that is computed once more is the same"
        ),
        "blocks",
    ),
    "INV-4": (
        "the decision recorded is what the rules give on the state that replay has reached",
        "session",
    ),
    "INV-5": (
        (
            "slabs, blocks, files and bytes acquired less those released equal what is measured, "
            "no block leaves memory that a session works with, and the budgets are kept"
        ),
        "admission",
    ),
    "INV-6": (
        (
            "a session follows its table of legal steps, one command at a time, without gaps in "
            "its sequence"
        ),
        "session",
    ),
    "INV-7": (
        "a token emitted is explained: the pass that made it is committed with it, or before",
        "session",
    ),
    "INV-8": ("the hash chain holds", "server"),
    "INV-9": (
        (
            "what people read is what was computed: a stored turn is that of its request, a "
            "model is the one that its fingerprint names, and an agent that was handed over is not "
            "served"
        ),
        "session",
    ),
}
"""
Each invariant: what holds, and what a violation takes out of service in addition to the request.
"""


@attrs.frozen(kw_only=True)
class Violation:
    """
    A broken invariant.

    Attributes:
        expected: what the state implies.
        actual: what the event says.
    """

    invariant: str
    message: str
    expected: str
    actual: str

    @property
    def scope(self) -> Scope:
        """What the violation takes out of service."""
        return SENTENCES[self.invariant][1]


def broken(invariant: str, message: str, expected: object, actual: object) -> Violation:
    return Violation(
        invariant=invariant, message=message, expected=str(expected), actual=str(actual)
    )
