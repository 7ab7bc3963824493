"""Run all rows, one after the other, as long as the server answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cairn_conform.case import Case, Ended, Lost, Result, Row, Subject
from cairn_conform.rows_of_cache import CACHE_ROWS, HARD_ROWS
from cairn_conform.rows_of_protocol import HOSTILE_ROWS, PROTOCOL_ROWS

ROWS = {row.name: row for row in (*CACHE_ROWS, *PROTOCOL_ROWS, *HARD_ROWS, *HOSTILE_ROWS)}
"""By name, in the order in which they run: rows that may harm a server come last."""


def played(
    subject: Subject, rows: Sequence[Row], begun: Callable[[Row], None]
) -> tuple[list[Result], str | None]:
    """
    The result of each row, and why the server was lost on the way, if it was.

    Args:
        begun: called with each row before it runs.
    """
    results: list[Result] = []
    lost: str | None = None
    for row in rows:
        begun(row)
        case = Case(subject, row)
        if lost is not None:
            case.untested(lost)
        else:
            lost = _play(case, row)
        results.append(case.result())
    return results, lost


def _play(case: Case, row: Row) -> str | None:
    """
    Run a row; returns why the server was lost in it, or None. A server that can be restarted is not
    lost.
    """
    try:
        row.play(case)
    except Ended:
        pass
    except Lost as error:
        case.untested(f"the server {error}")
        return f"the server {error} (in the row {row.name})"
    if case.subject.alive():
        return None
    gone = f"the server stopped answering (in the row {row.name})"
    case.fail("after it, the server stopped answering")
    if case.subject.restart is None:
        return gone
    try:
        case.subject.come_back()
    except (Lost, ValueError) as error:
        return f"{gone}; the restart: {error}"
    return None
