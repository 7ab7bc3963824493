"""What is looked at after a drill on a running server: one function for each of ``CHECKS``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs

from cairn.journal import events as ev
from cairn.journal.codec import Row, decode
from cairn.journal.invariants import Scope
from cairn.journal.replay import Finding, Report
from cairn.journal.state import SessionId
from cairn.ops.drills import evidence
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.outcome import Check, Scene
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.conversation import VICTIM, Body, Reference, goes_on


@attrs.frozen(kw_only=True)
class Fault:
    """
    Something that goes wrong in a running server.

    Attributes:
        damage: does it.
        asks: what is asked then, by the answer to the victim's first request. The answers to the
            last of them tell of the bugs.
        findings: the invariants that break, in this order.
    """

    damage: Callable[[Damage], Awaitable[None]]
    findings: tuple[str, ...]
    scope: Scope
    asks: Callable[[Answer], list[Body]] = goes_on


@attrs.define
class Seen:
    """
    What was seen from outside while the server ran.

    Attributes:
        broken: answers to what was asked of the damaged server.
        again: the answer when the last of it was asked once more.
        bystander: answers to the bystander's turns.
        violated_s: by bug id, when its record was committed, by the monotonic clock.
    """

    struck_s: float | None = None
    first: Answer | None = None
    broken: list[Answer] = attrs.field(factory=list)
    again: Answer | None = None
    bystander: list[Answer] = attrs.field(factory=list)
    metrics: str = ""
    violated_s: dict[str, float] = attrs.field(factory=dict)


def caught(fault: Fault, report: Report, bug: Finding) -> Check:
    """The invariants that were to break did, and no other."""
    names = tuple(one.invariant for one in report.findings)
    held = names == fault.findings and all(one.recorded for one in report.findings)
    wanted = "" if held else f"; {' '.join(names)} where {' '.join(fault.findings)} was to break"
    return Check("caught", held, f"{bug.invariant} at row {bug.position}: {bug.message}{wanted}")


def journaled(fault: Fault, rows: Sequence[Row], report: Report, bug: Finding) -> Check:
    """
    The record says all that it must, its scope is out of service, and nothing more was emitted.
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
    went_on = [
        one
        for one in events
        if isinstance(one.event, ev.TokensEmitted)
        and one.event.request == event.request
        and one.position > bug.position
    ]
    out = _out_of_service(fault.scope, report, bug)
    held = all(parts) and out and not went_on
    fact = f"row {record.position}, with stack, expected and actual; {fault.scope} out of service"
    if went_on:
        fact = f"row {record.position}, but the request emitted tokens after it"
    elif not out:
        fact = f"row {record.position}, but its {fault.scope} stayed in service"
    return Check("journaled", held, fact)


def _out_of_service(scope: Scope, report: Report, bug: Finding) -> bool:
    state = report.state
    if scope == "admission":
        return state.admission_bug == bug.bug_id
    if scope == "blocks":
        return any(block.bug_id == bug.bug_id for block in state.blocks.values())
    return state.session(SessionId(VICTIM)).bug_id == bug.bug_id


def counted(report: Report, seen: Seen) -> Check:
    """The metrics have as many violations of each kind as the journal."""
    names = [one.invariant for one in report.findings]
    wrong = []
    for name in dict.fromkeys(names):
        kind = name.lower().replace("-", "")
        series = f'cairn_cache_invariant_violations_total{{kind="{kind}"}}'
        if f"{series} {float(names.count(name))}" not in seen.metrics.splitlines():
            wrong.append(name)
    fact = f"not counted: {' '.join(wrong)}" if wrong else "violations by kind, as in the journal"
    return Check("counted", not wrong, fact)


def logged(scene: Scene, report: Report) -> Check:
    """The log has each bug under its id."""
    missing = [
        one.bug_id
        for one in report.findings
        if not evidence.logged(scene.directory, "invariant violated", bug_id=one.bug_id)
    ]
    return Check("logged", not missing, "an error with its bug id" if not missing else "no line")


def answered(fault: Fault, report: Report, seen: Seen) -> Check:
    """
    The requests that broke something were told so, in the words that are promised; so is the next
    one that names a broken session, or any one where memory is in doubt.
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
    return Check("answered", not wrong, "; ".join(wrong) or fact)


def is_bug_answer(answer: Answer, bug_id: str) -> bool:
    """Whether an answer is the one that is promised for a bug, to the letter."""
    error = {
        "message": f"internal cache invariant violation; bug id {bug_id}",
        "type": "internal_error",
        "param": None,
        "code": "kv_cache_inv_violation",
    }
    if answer.error != error:
        return False
    # In mid-stream the status is long sent, and only the event can tell.
    whole = answer.status == 500 and answer.headers.get("x-should-retry") == "false"
    return whole or (answer.status == 200 and bool(answer.tokens))


def _described(answer: Answer | None) -> str:
    if answer is None:
        return "no answer"
    return f"{answer.status} {answer.error['message'] if answer.error else 'and an answer'}"


def confined(fault: Fault, report: Report, seen: Seen, undisturbed: Reference) -> Check:
    """The bystander's bits are those of the reference, and so is what ran."""
    wrong = []
    if seen.first is None or seen.first.bits != undisturbed.victim.bits:
        wrong.append("the victim's answer before the damage")
    turns = ("before", "beside", "after")
    for turn, answer, expected in zip(turns, seen.bystander, undisturbed.bystander, strict=False):
        if turn == "after" and fault.scope == "admission":
            if not is_bug_answer(answer, report.findings[-1].bug_id):
                wrong.append("somebody was admitted")
        elif (answer.bits, answer.error) != (expected.bits, None):
            wrong.append(f"the bystander's answer {turn} the damage")
    if len(seen.bystander) != len(turns):
        wrong.append("not every turn of the bystander was answered")
    if fault.scope == "blocks" and not _served_without(seen.again, undisturbed):
        wrong.append("the same prompt once more")
    fact = {
        "admission": "what ran came to its end bit for bit; nobody else is admitted",
        "blocks": "a bystander went on bit for bit; the same prompt was served without the blocks",
    }.get(fault.scope, "a bystander went on bit for bit, before, beside and after")
    return Check("confined", not wrong, f"differs: {', '.join(wrong)}" if wrong else fact)


def _served_without(again: Answer | None, undisturbed: Reference) -> bool:
    return again is not None and (again.bits, again.cached_tokens) == (undisturbed.victim.bits, 0)


def replayed(bug: Finding, told: Sequence[object]) -> Check:
    """`ops replay` tells the bug, and the check breaks again at its row."""
    code, printed = evidence.run_ops(*told)
    last = printed.splitlines()[-1] if printed else "nothing"
    if bug.invariant == "CRASH":
        # What failed was code and no event, so the story is told and no check can repeat it.
        held = (code, last.split(":")[0]) == (1, "not reproduced") and "stack:" in printed
        return Check("replayed", held, "told with its stack; a crash cannot be repeated")
    held = (code, last.split(":")[0]) == (0, "reproduced")
    return Check("replayed", held, last)
