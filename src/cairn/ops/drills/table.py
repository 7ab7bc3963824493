"""
All drills. A new one is a row here, and a page of ``docs/bugs`` names it.

Damage from outside Cairn, such as a changed block file, is not a bug: the outcome of such a drill
has no bug id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cairn.journal.invariants import SENTENCES, Scope
from cairn.ops.drills.faults import (
    engine as engine_faults,
)
from cairn.ops.drills.faults import (
    journal as journal_faults,
)
from cairn.ops.drills.faults import (
    memory as memory_faults,
)
from cairn.ops.drills.faults import (
    session as session_faults,
)
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.files import in_a_file
from cairn.ops.drills.outcome import Drill
from cairn.ops.drills.running import on_a_server
from cairn.ops.drills.running_checks import Fault
from cairn.ops.drills.server import conversation as talk
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.stored import beneath_a_server, on_stopped_server
from cairn.ops.drills.unseen import unseen


def _running(
    name: str,
    invariant: str,
    sentence: str,
    damage: Callable[[Damage], Awaitable[None]],
    asks: Callable[[Answer], list[talk.Body]] = talk.goes_on,
    *,
    before: tuple[str, ...] = (),
    scope: Scope | None = None,
) -> Drill:
    """
    Args:
        before: what breaks first.
        scope: if it is not that of the invariant.
    """
    scope = scope or ("session" if invariant == "CRASH" else SENTENCES[invariant][1])
    fault = Fault(damage=damage, asks=asks, findings=(*before, invariant), scope=scope)
    return Drill(
        name=name, invariant=invariant, scope=scope, damage=sentence, play=on_a_server(fault)
    )


def _stored(
    name: str, sentence: str, damage: Callable[..., int], *, beneath: bool = False
) -> Drill:
    return Drill(
        name=name,
        invariant="INV-8",
        scope="server",
        damage=sentence,
        play=beneath_a_server(damage) if beneath else on_stopped_server(damage),
    )


_ALL = (
    _running(
        "layer-short",
        "INV-1",
        "One layer has one token fewer than the others after a pass.",
        engine_faults.layer_short,
    ),
    _running(
        "tokens-shifted",
        "INV-1",
        "A pass runs on the prompt's tokens shifted by one.",
        engine_faults.tokens_shifted,
    ),
    _running(
        "window-moved",
        "INV-2",
        "One layer loses the first token of its window.",
        engine_faults.window_moved,
    ),
    _running(
        "bit-flipped",
        "INV-3",
        "One bit of a sealed block flips in memory.",
        memory_faults.bit_flipped,
        talk.asks_the_same,
    ),
    _running(
        "block-recomputed",
        "INV-3",
        "KV differs in one bit when it is computed again.",
        memory_faults.block_recomputed,
        talk.asks_the_same_cold,
    ),
    _running(
        "row-flipped",
        "INV-3",
        "One bit of the last row that a continuation reuses flips in the slab.",
        memory_faults.row_flipped,
        scope="session",
    ),
    Drill(
        name="block-unseen",
        invariant="INV-3",
        scope="blocks",
        damage="One bit of a sealed block flips in memory, and no request reads it.",
        play=unseen(),
    ),
    _running(
        "stale-decision",
        "INV-4",
        "A path is decided on a state that does not know what is in the session's slab.",
        session_faults.stale_decision,
    ),
    _running(
        "slab-leaked",
        "INV-5",
        "The pool keeps a released slab.",
        memory_faults.slab_leaked,
        talk.needs_a_larger_slab,
    ),
    _running(
        "slab-freed-twice",
        "INV-5",
        "The reference to a slab is released twice.",
        memory_faults.slab_freed_twice,
        talk.then_a_newcomer,
        before=("CRASH",),
    ),
    _running(
        "event-out-of-order",
        "INV-6",
        "A session reports a pass after reporting its result.",
        session_faults.event_out_of_order,
    ),
    _running(
        "sequence-gap",
        "INV-6",
        "A session skips a number in its own events.",
        session_faults.sequence_gap,
    ),
    _running(
        "emission-early",
        "INV-7",
        "Tokens are sent before the pass that made them is recorded.",
        session_faults.emission_early,
    ),
    _running(
        "answer-rewritten",
        "INV-9",
        "A session stores another answer than it released.",
        session_faults.answer_rewritten,
    ),
    Drill(
        name="file-flipped",
        invariant="WORLD",
        scope="blocks",
        damage="One bit of a sealed block's file flips on disk.",
        play=in_a_file(),
    ),
    _stored(
        "row-changed", "A number in a row of the database is changed.", journal_faults.row_changed
    ),
    _stored("row-removed", "A row is removed from the database.", journal_faults.row_removed),
    _stored(
        "tail-rewritten",
        "The last rows of the database are rewritten, with a valid chain.",
        journal_faults.tail_rewritten,
        beneath=True,
    ),
    _running(
        "pass-raises",
        "CRASH",
        "The device fails in a pass.",
        engine_faults.pass_raises,
    ),
    _running(
        "rows-not-finite",
        "CRASH",
        "Numbers after the end of a slab, which attention masks, are not finite.",
        engine_faults.rows_not_finite,
    ),
    _running(
        "session-dies",
        "CRASH",
        "A session's own code fails while it streams an answer.",
        session_faults.session_dies,
        talk.streams,
    ),
)

DRILLS = {drill.name: drill for drill in _ALL}
"""By name, in the order in which `ops drill all` runs them."""
