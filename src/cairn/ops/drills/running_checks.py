"""The checks after a drill on a running server: one function for each of ``CHECKS``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from cairn.journal import events as ev
from cairn.journal.invariants import Scope
from cairn.journal.replay import Finding, Report, replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.state import SessionId
from cairn.ops.drills import evidence
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.outcome import Check, Outcome, Scene, checked
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.conversation import VICTIM, Body, goes_on
from cairn.ops.drills.server.private_server import stored_rows

if TYPE_CHECKING:
    from cairn.ops.drills.server.baseline import Baseline

DEADLINE_S = 60.0
"""How long the requests of a drill may take; then its checks run on what was observed so far."""


@attrs.frozen(kw_only=True)
class Fault:
    """
    Something that goes wrong in a running server.

    Attributes:
        damage: does the damage.
        asks: the requests after the damage, given the answer to the victim's first request. The
            last of them get the errors.
        findings: the invariants that break, in this order.
        metric: a line that the metrics must have, besides the violations.
    """

    damage: Callable[[Damage], Awaitable[None]]
    findings: tuple[str, ...]
    scope: Scope
    asks: Callable[[Answer], list[Body]] = goes_on
    metric: str | None = None


@attrs.define
class Seen:
    """
    What was observed from outside while the server ran.

    Attributes:
        broken: the answers of the damaged server.
        again: the answer when the last request was repeated.
        bystander: the answers to the bystander's turns.
        violated_s: when the record of a bug was committed, by bug id, on the monotonic clock.
    """

    struck_s: float | None = None
    first: Answer | None = None
    broken: list[Answer] = attrs.field(factory=list)
    again: Answer | None = None
    bystander: list[Answer] = attrs.field(factory=list)
    metrics: str = ""
    violated_s: dict[str, float] = attrs.field(factory=dict)


def outcome_of(
    fault: Fault,
    scene: Scene,
    seen: Seen,
    answered: Callable[[Fault, Report, Seen], Check] | None = None,
) -> Outcome:
    """
    Run all checks on the journal and the log that a drill's server left.

    Args:
        answered: replaces the check of the answers.
    """
    rows = stored_rows(scene.directory)
    report = replay(rows)
    kind = fault.findings[-1]
    bug = next((one for one in report.findings if one.invariant == kind and one.recorded), None)
    if bug is None:
        return Outcome.uncaught(
            "nothing was caught" if seen.struck_s is not None else "the damage was never done"
        )
    replay_it = ("replay", bug.bug_id, "--data-dir", scene.directory)
    caught_ms = None
    if seen.struck_s is not None and bug.bug_id in seen.violated_s:
        caught_ms = (seen.violated_s[bug.bug_id] - seen.struck_s) * 1000
    return Outcome(
        checks=(
            _caught(fault, report, bug),
            _journaled(fault, rows, report, bug),
            _counted(fault, report, seen),
            _logged(scene, report),
            (answered or _answered)(fault, report, seen),
            _confined(fault, report, seen, scene.baseline),
            _replayed(bug, replay_it),
        ),
        bug_id=bug.bug_id,
        command=evidence.command(*replay_it),
        caught_ms=caught_ms,
    )


def _caught(fault: Fault, report: Report, bug: Finding) -> Check:
    """Whether the expected invariants broke, and no others."""
    names = tuple(one.invariant for one in report.findings)
    passed = names == fault.findings and all(one.recorded for one in report.findings)
    wrong = "" if passed else f"; broken: {' '.join(names)}, expected: {' '.join(fault.findings)}"
    return Check("caught", passed, f"{bug.invariant} at row {bug.position}: {bug.message}{wrong}")


def _journaled(fault: Fault, rows: Sequence[Row], report: Report, bug: Finding) -> Check:
    """
    Whether the record is complete, its scope is out of service, and no token followed it.
    """
    events = [decode(row) for row in rows]
    record = next(
        one
        for one in events
        if isinstance(one.event, ev.InvariantViolated) and one.event.bug_id == bug.bug_id
    )
    event = record.event
    assert isinstance(event, ev.InvariantViolated)
    parts = (event.fingerprint, event.cairn_version, event.trace, event.expected, event.actual)
    emitted = any(
        _emits(one.event)
        and getattr(one.event, "request", None) == event.request
        and one.position > bug.position
        for one in events
    )
    out = _out_of_service(fault.scope, report, bug)
    fact = f"row {record.position}, with stack, expected and actual; {fault.scope} out of service"
    if emitted:
        fact = f"row {record.position}, but the request emitted tokens after it"
    elif not out:
        fact = f"row {record.position}, but its {fault.scope} stayed in service"
    return Check("journaled", all(parts) and out and not emitted, fact)


def _emits(event: ev.Event) -> bool:
    return isinstance(event, ev.TokensEmitted) or (
        isinstance(event, ev.CacheExtended) and event.emitted > 0
    )


def _out_of_service(scope: Scope, report: Report, bug: Finding) -> bool:
    state = report.state
    if scope == "admission":
        return state.admission_bug == bug.bug_id
    if scope == "blocks":
        return any(block.bug_id == bug.bug_id for block in state.blocks.values())
    return state.session(SessionId(VICTIM)).bug_id == bug.bug_id


def _counted(fault: Fault, report: Report, seen: Seen) -> Check:
    """Whether the metrics count as many violations of each kind as the journal has."""
    names = [one.invariant for one in report.findings]
    expected = {} if fault.metric is None else {fault.metric: fault.metric}
    for name in names:
        kind = name.lower().replace("-", "")
        series = f'cairn_cache_invariant_violations_total{{kind="{kind}"}}'
        expected[name] = f"{series} {float(names.count(name))}"
    missing = [name for name, line in expected.items() if line not in seen.metrics.splitlines()]
    fact = "violations by kind, as in the journal"
    return checked("counted", not missing, fact, f"not counted: {' '.join(missing)}")


def _logged(scene: Scene, report: Report) -> Check:
    """Whether the log has each bug with its id."""
    found = [
        evidence.logged(scene.directory, "invariant violated", bug_id=one.bug_id)
        for one in report.findings
    ]
    return checked("logged", all(found), "an error with its bug id", "no line")


def _answered(fault: Fault, report: Report, seen: Seen) -> Check:
    """
    Whether the requests that broke something got the documented error, and so did the next request
    that names a broken session, or any request if memory is quarantined.
    """
    wrong = []
    for finding, answer in zip(report.findings, seen.broken, strict=False):
        if not is_bug_answer(answer, finding.bug_id):
            wrong.append(f"the request that broke it got {_described(answer)}")
    if len(seen.broken) != len(report.findings):
        wrong.append(f"{len(seen.broken)} requests for {len(report.findings)} bugs")
    last = report.findings[-1].bug_id
    if fault.scope != "blocks" and not (seen.again is not None and is_bug_answer(seen.again, last)):
        wrong.append(f"the next one got {_described(seen.again)}")
    streamed = any(answer.status == 200 for answer in seen.broken)
    fact = "an error event in mid-stream" if streamed else "status 500 with the bug id"
    if fault.scope != "blocks":
        fact += "; the next request got the same"
    return checked("answered", not wrong, fact, "; ".join(wrong))


def is_bug_answer(answer: Answer, bug_id: str) -> bool:
    """Whether an answer is exactly the documented one for a bug."""
    error = {
        "message": f"internal cache invariant violation; bug id {bug_id}",
        "type": "internal_error",
        "param": None,
        "code": "kv_cache_inv_violation",
    }
    if answer.error != error:
        return False
    # In mid-stream the status is already sent, so only the event can report the bug.
    whole = answer.status == 500 and answer.headers.get("x-should-retry") == "false"
    return whole or (answer.status == 200 and bool(answer.tokens))


def _described(answer: Answer | None) -> str:
    if answer is None:
        return "no answer"
    return f"{answer.status} {answer.error['message'] if answer.error else 'and an answer'}"


def _confined(fault: Fault, report: Report, seen: Seen, baseline: Baseline) -> Check:
    """Whether all answers that the damage must not affect equal those of the baseline."""
    wrong = []
    if seen.first is None or seen.first.bits != baseline.victim.bits:
        wrong.append("the victim's answer before the damage")
    turns = ("before", "beside", "after")
    for turn, answer, expected in zip(turns, seen.bystander, baseline.bystander, strict=False):
        if turn == "after" and fault.scope == "admission":
            if not is_bug_answer(answer, report.findings[-1].bug_id):
                wrong.append("a request was admitted")
        elif (answer.bits, answer.error) != (expected.bits, None):
            wrong.append(f"the bystander's answer {turn} the damage")
    if len(seen.bystander) != len(turns):
        wrong.append("not every turn of the bystander was answered")
    if fault.scope == "blocks" and not baseline.is_recomputed(seen.again):
        wrong.append("the same prompt once more")
    fact = {
        "admission": "running requests finished bit for bit; no other request is admitted",
        "blocks": "a bystander continued bit for bit; the same prompt was served without the "
        "blocks",
    }.get(fault.scope, "a bystander continued bit for bit, before, beside and after")
    return checked("confined", not wrong, fact, f"differs: {', '.join(wrong)}")


def _replayed(bug: Finding, replay_it: Sequence[object]) -> Check:
    """Whether `ops replay` shows the bug, and the check fails again at its row."""
    code, printed = evidence.run_ops(*replay_it)
    last = printed.splitlines()[-1] if printed else "nothing"
    if bug.invariant == "CRASH":
        # Code failed, not an event, so no check can fail again.
        passed = (code, last.split(":")[0]) == (1, "not reproduced") and "stack:" in printed
        return Check("replayed", passed, "shown with its stack; a crash cannot be repeated")
    return Check("replayed", (code, last.split(":")[0]) == (0, "reproduced"), last)
