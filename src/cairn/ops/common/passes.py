"""What the self-test found about the passes of a model, for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.engine.row_class import OUT_OF_TIME, RowClass

TEST_AGAIN = (
    "the machine was too busy at the self-test; once it is idle, stop the server and start it with "
    "--test-again: `ops serve --test-again`"
)
"""What to do if the search for a row class ran out of time."""


def prefill_text(row_class: RowClass | None, reason: str) -> str:
    """
    How much is reused, and in which prefill passes.

    Args:
        reason: why there is no row class, or not the cheapest; empty if it is.
    """
    why = f" ({reason})" if reason else ""
    if row_class is None:
        return f"reuse in whole blocks{why}"
    rows = f"{row_class.least} to {row_class.most} rows"
    if row_class.least == row_class.most:
        rows = f"{row_class.most} rows"
    elif row_class.quantum > 1:
        rows = f"{rows} in steps of {row_class.quantum}"
    if row_class.low_rank:
        rows = f"{rows}, an adapter's layers over {row_class.low_rank}"
    return f"reuse to the token with passes of {rows}{why}"


def was_busy(reason: str) -> bool:
    """Whether the search ran out of time, so that reuse is less, or dearer, than it could be."""
    return reason.startswith(OUT_OF_TIME)


def decode_text(shapes: Sequence[int]) -> str:
    """
    How many rows a decode pass has, if that depends on the number of answers; empty otherwise.
    """
    return f" in passes of {' or '.join(map(str, shapes))} rows" if len(shapes) > 1 else ""


def drafts_text(why_not: str) -> str:
    """Whether drafts of the next tokens are checked, and why not."""
    return f"off: {why_not}" if why_not else "drafts from prompt and answer, with the same bits"
