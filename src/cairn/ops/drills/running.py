"""
Drills on a running server: damage it beside a bystander, ask, stop it, and look at everything.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import trio

from cairn.journal import events as ev
from cairn.journal.codec import Row, decode
from cairn.journal.invariants import Scope
from cairn.journal.replay import Finding, Report, replay
from cairn.journal.state import SessionId
from cairn.ops.drills.client import Answer
from cairn.ops.drills.conversation import (
    BYSTANDER,
    VICTIM,
    Body,
    Bystander,
    Reference,
    asks_the_same,
    goes_on,
    victim_first,
)
from cairn.ops.drills.damage import Damage
from cairn.ops.drills.evidence import command, logged, run_ops
from cairn.ops.drills.outcome import Check, Outcome, Scene
from cairn.ops.drills.private_server import private_server, stored_rows

DEADLINE_S = 60.0
"""
After so long, what was to happen does not happen any more.
"""


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


async def play(fault: Fault, scene: Scene) -> Outcome:
    """
    A drill from its beginning to what came of it.
    """
    seen = Seen()
    with trio.move_on_after(DEADLINE_S):
        await _act(fault, scene, seen)
    rows = stored_rows(scene.directory)
    report = replay(rows)
    kind = fault.findings[-1]
    bug = next((one for one in report.findings if one.invariant == kind and one.recorded), None)
    if bug is None:
        fact = "nothing was caught" if seen.struck_s is not None else "the damage was never done"
        return Outcome(
            checks=(Check("caught", False, fact),), bug_id=None, command="", caught_ms=None
        )
    caught_ms = None
    if seen.struck_s is not None and bug.bug_id in seen.violated_s:
        caught_ms = (seen.violated_s[bug.bug_id] - seen.struck_s) * 1000
    told = ("replay", bug.bug_id, "--data-dir", scene.directory)
    return Outcome(
        checks=(
            _caught(fault, report, bug),
            _journaled(fault, rows, report, bug),
            _counted(report, seen),
            _logged(scene, report),
            _answered(fault, report, seen),
            _confined(fault, report, seen, scene.reference),
            _replayed(bug, told),
        ),
        bug_id=bug.bug_id,
        command=command(*told),
        caught_ms=caught_ms,
    )


async def _act(fault: Fault, scene: Scene, seen: Seen) -> None:
    async with private_server(scene.directory, scene.model) as house:
        settled = {VICTIM: trio.Event(), BYSTANDER: trio.Event()}

        def watch(recorded: ev.Recorded) -> None:
            event = recorded.event
            if isinstance(event, ev.InvariantViolated):
                seen.violated_s.setdefault(event.bug_id, time.monotonic())
            elif isinstance(event, ev.SessionSettled) and event.session in settled:
                settled[event.session].set()

        house.server.observe(watch)
        client, talk = house.client, Bystander()
        seen.first = await client.ask(victim_first())
        seen.bystander.append(await client.ask(talk.first()))
        for at_rest in settled.values():
            await at_rest.wait()
        damage = Damage(house.server, VICTIM)
        await fault.damage(damage)
        begun = trio.Event()

        async def beside() -> None:
            seen.bystander.append(await client.stream(talk.beside(seen.bystander[0]), begun))

        asked = fault.asks(seen.first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            await begun.wait()
            for body in asked:
                seen.broken.append(
                    await client.stream(body, trio.Event())
                    if body.get("stream")
                    else await client.ask(body)
                )
        seen.struck_s = damage.struck_s
        # Blocks that broke are reused by nobody, so what needed them is served without.
        once_more = asks_the_same(seen.first)[0] if fault.scope == "blocks" else asked[-1]
        seen.again = await client.ask({**once_more, "stream": False})
        seen.bystander.append(await client.ask(talk.after(seen.bystander[1])))
        seen.metrics = await client.get("/metrics")


# --- what is looked at ---------------------------------------------------------------------------


def _caught(fault: Fault, report: Report, bug: Finding) -> Check:
    names = tuple(one.invariant for one in report.findings)
    held = names == fault.findings and all(one.recorded for one in report.findings)
    wanted = "" if held else f"; {' '.join(names)} where {' '.join(fault.findings)} was to break"
    return Check("caught", held, f"{bug.invariant} at row {bug.position}: {bug.message}{wanted}")


def _journaled(fault: Fault, rows: Sequence[Row], report: Report, bug: Finding) -> Check:
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


def _counted(report: Report, seen: Seen) -> Check:
    names = [one.invariant for one in report.findings]
    wrong = []
    for name in dict.fromkeys(names):
        kind = name.lower().replace("-", "")
        series = f'cairn_cache_invariant_violations_total{{kind="{kind}"}}'
        if f"{series} {float(names.count(name))}" not in seen.metrics.splitlines():
            wrong.append(name)
    fact = f"not counted: {' '.join(wrong)}" if wrong else "violations by kind, as in the journal"
    return Check("counted", not wrong, fact)


def _logged(scene: Scene, report: Report) -> Check:
    missing = [
        one.bug_id
        for one in report.findings
        if not logged(scene.directory, "invariant violated", bug_id=one.bug_id)
    ]
    return Check("logged", not missing, "an error with its bug id" if not missing else "no line")


def _answered(fault: Fault, report: Report, seen: Seen) -> Check:
    """
    The requests that broke something were told so, in the words that are promised; so is the next
    one that names a broken session, or any one where memory is in doubt.
    """
    wrong = []
    for finding, answer in zip(report.findings, seen.broken, strict=False):
        if not is_bug_answer(answer, finding.bug_id):
            wrong.append(f"the request that broke it got {_told(answer)}")
    if len(seen.broken) != len(report.findings):
        wrong.append(f"{len(seen.broken)} requests for {len(report.findings)} bugs")
    last = report.findings[-1].bug_id
    if fault.scope != "blocks" and not (seen.again is not None and is_bug_answer(seen.again, last)):
        wrong.append(f"the next one got {_told(seen.again)}")
    streamed = any(answer.status == 200 for answer in seen.broken)
    fact = "an error event in mid-stream" if streamed else "status 500 with the bug id"
    if fault.scope != "blocks":
        fact += "; the next request got the same"
    return Check("answered", not wrong, "; ".join(wrong) or fact)


def is_bug_answer(answer: Answer, bug_id: str) -> bool:
    """
    Whether an answer is the one that is promised for a bug, to the letter.
    """
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


def _told(answer: Answer | None) -> str:
    if answer is None:
        return "no answer"
    return f"{answer.status} {answer.error['message'] if answer.error else 'and an answer'}"


def _confined(fault: Fault, report: Report, seen: Seen, undisturbed: Reference) -> Check:
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


def _replayed(bug: Finding, told: Sequence[object]) -> Check:
    code, printed = run_ops(*told)
    last = printed.splitlines()[-1] if printed else "nothing"
    if bug.invariant == "CRASH":
        # What failed was code and no event, so the story is told and no check can repeat it.
        held = (code, last.split(":")[0]) == (1, "not reproduced") and "stack:" in printed
        return Check("replayed", held, "told with its stack; a crash cannot be repeated")
    held = (code, last.split(":")[0]) == (0, "reproduced")
    return Check("replayed", held, last)


def on_a_server(fault: Fault) -> Callable[[Scene], Awaitable[Outcome]]:
    """
    How a drill with this fault goes.
    """
    return partial(play, fault)
