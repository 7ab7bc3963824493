"""
The results of a long session: figures, and which goals they reach. Pure.

Drift is how much slower the turns of the last quarter are than those of the first. Each late turn
is compared with an early one of the same kind (thinking or not, alone or among others), with about
the same history and about as long an answer. The median of their ratios counts, so the figure shows
how the server aged, and not how the conversation grew.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import attrs

from cairn_bench.long.plan import AGENT, Plan
from cairn_bench.long.record import Look, Session, Turn

TURNS_AN_HOUR: Final = 60.0
ERRORS: Final = 5
CONTINUED: Final = 0.95
REUSED: Final = 0.9
DRIFT: Final = 0.05

_CHUNKS_LESS: Final = 2
_QUARTERS: Final = 4
_PAIRS: Final = 8
_HISTORY_APART: Final = 0.1
_HISTORY_APART_TOKENS: Final = 128
_ANSWER_APART: Final = 0.25
_ANSWER_APART_TOKENS: Final = 4
_HOUR_S: Final = 3600.0
_FOUR_HOURS: Final = 4.0
_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_TIERS: Final = ("slab_bytes", "block_bytes", "disk_bytes")


@attrs.frozen(kw_only=True)
class Checked:
    """
    The result of verifying the server's journal.

    Attributes:
        rows: how many were read; None if it could not be read.
        broken: how many violations there are.
        why: the first of them, or why it could not be read.
        head: of the chain.
    """

    rows: int | None
    broken: int = 0
    why: str = ""
    head: str = ""

    @property
    def holds(self) -> bool:
        """Whether all of it was read and passed verification."""
        return self.rows is not None and not self.broken


@attrs.frozen(kw_only=True)
class Drift:
    """
    How the server aged.

    Attributes:
        value: late turns are slower by this share in the median.
        first_text: the same of the times to the first token.
        pairs: the number of compared pairs.
    """

    value: float
    first_text: float
    pairs: int


@attrs.frozen(kw_only=True)
class Goal:
    """
    A goal, and this session's result.

    Attributes:
        reached: None if it was not measured.
    """

    name: str
    value: str
    goal: str
    reached: bool | None

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return {None: "not measured", True: "reached", False: "missed"}[self.reached]


def goals(session: Session, checked: Checked) -> list[Goal]:
    """
    All goals. Only a measured goal can be missed, except that an unreadable journal misses its
    goal.
    """
    turns = session.turns
    wrong = errors(turns)
    broken = violations(session)
    share = continued(turns)
    kept = reused(turns)
    cold = [turn.as_cold for turn in turns if turn.as_cold is not None]
    used = fullest(session.looks)
    aged = drift(session)
    rate = an_hour(session)
    failed = sum(wrong.values())
    return [
        Goal(
            name="turns an hour",
            value="not reported" if rate is None else f"{rate:.0f}",
            goal=f"at least {TURNS_AN_HOUR:.0f}",
            reached=None if rate is None else rate >= TURNS_AN_HOUR,
        ),
        Goal(
            name="errors",
            value=_listed(wrong),
            goal=f"fewer than {ERRORS}",
            reached=failed < ERRORS,
        ),
        Goal(
            name="violations",
            value="not reported" if broken is None else str(broken),
            goal="none",
            reached=None if broken is None else not broken,
        ),
        Goal(
            name="continuations",
            value="not reported" if share is None else f"{share:.1%}",
            goal=f"at least {CONTINUED:.0%}",
            reached=None if share is None else share >= CONTINUED,
        ),
        Goal(
            name="what was there is reused",
            value="not reported" if kept is None else f"{kept:.1%}",
            goal=f"at least {REUSED:.0%}",
            reached=None if kept is None else kept >= REUSED,
        ),
        Goal(
            name="answers that are the cold ones",
            value=f"{sum(cold)} of {len(cold)}" if cold else "none was requested cold",
            goal="all",
            reached=all(cold) if cold else None,
        ),
        Goal(
            name="KV of its budgets",
            value=", ".join(f"{_tier(name)} {of:.0%}" for name, of in used.items())
            or "not reported",
            goal="at most 100%",
            reached=all(of <= 1 for of in used.values()) if used else None,
        ),
        Goal(
            name="drift of a turn",
            value=_aged(aged),
            goal=f"less than {DRIFT:.0%}",
            reached=None if aged is None else aged.value < DRIFT,
        ),
        Goal(
            name="the journal",
            value=_verified(checked),
            goal="holds",
            reached=checked.holds,
        ),
    ]


def an_hour(session: Session) -> float | None:
    """Answered turns of both clients per hour; None if no time has passed."""
    answered = sum(turn.is_answered for turn in session.turns)
    return answered * _HOUR_S / session.seconds if session.seconds else None


def errors(turns: Sequence[Turn]) -> Mapping[str, int]:
    """How many errors of each kind."""
    return Counter(turn.outcome for turn in turns if turn.is_error)


def violations(session: Session) -> int | None:
    """The sum of the servers' counters, each from its start; None if none reported any."""
    counts = [look.violations for look in session.looks if look.violations is not None]
    # A smaller count is that of a server that was restarted since.
    grown = sum(now if now < was else now - was for was, now in pairwise(counts))
    return counts[0] + grown if counts else None


def continued(turns: Sequence[Turn]) -> float | None:
    """
    Of the turns that continue a conversation, the share that the server continued too.

    None if there was no such turn, or the server reports no paths.
    """
    due = [turn for turn in turns if turn.continues and turn.is_answered]
    if not any(turn.path is not None for turn in due):
        return None
    return sum(turn.path == "continuation" for turn in due) / len(due)


def reused(turns: Sequence[Turn]) -> float | None:
    """
    Of the previous turns' prompts, in each conversation, the share that the next turn reused.

    Two chunks less are enough, because only whole ones are reused. None if no server reported it. A
    path shows that a conversation was found again, but not how much of it was there.
    """
    before: dict[tuple[str, int], int] = {}
    due: list[tuple[int, int]] = []
    chunk = math.gcd(*(turn.cached_tokens or 0 for turn in turns))
    for turn in turns:
        if not turn.is_answered or turn.prompt_tokens is None:
            continue
        there = before.get((turn.client, turn.conversation), 0) - _CHUNKS_LESS * chunk
        if turn.continues and turn.cached_tokens is not None and there > 0:
            due.append((min(turn.cached_tokens, there), there))
        before[turn.client, turn.conversation] = turn.prompt_tokens
    total = sum(there for _, there in due)
    return sum(cached for cached, _ in due) / total if total else None


def fullest(looks: Sequence[Look]) -> Mapping[str, float]:
    """The peak usage of each tier as a share of its budget, if both are reported."""
    found: dict[str, float] = {}
    for look in looks:
        for name in _TIERS:
            held, budget = getattr(look, name), getattr(look, f"{name}_max")
            if held is not None and budget:
                found[name] = max(found.get(name, 0.0), held / budget)
    return found


def drift(session: Session) -> Drift | None:
    """How the server aged; None if too few turns are comparable."""
    length_s = session.seconds / _QUARTERS
    timed = [turn for turn in session.turns if turn.client == AGENT and turn.is_answered]
    early = [turn for turn in timed if turn.at_s < length_s]
    late = [turn for turn in timed if turn.at_s >= session.seconds - length_s]
    pairs = [(old, turn) for turn in late if (old := _like(turn, early)) is not None]
    if len(pairs) < _PAIRS:
        return None
    return Drift(
        value=_slower([(old.total_s, new.total_s) for old, new in pairs]),
        first_text=_slower([(old.first_s, new.first_s) for old, new in pairs]),
        pairs=len(pairs),
    )


def _like(turn: Turn, early: Sequence[Turn]) -> Turn | None:
    """The most similar early turn; None if none is similar enough."""
    history, answer = turn.prompt_tokens or 0, turn.completion_tokens or 0
    apart = max(_HISTORY_APART_TOKENS, _HISTORY_APART * history)
    answer_apart = max(_ANSWER_APART_TOKENS, _ANSWER_APART * answer)

    def distance(old: Turn) -> float:
        histories = abs((old.prompt_tokens or 0) - history) / apart
        answers = abs((old.completion_tokens or 0) - answer) / answer_apart
        return max(histories, answers)

    alike = [
        (distance(old), old.at_s, old)
        for old in early
        if (old.thinking, old.among, old.continues) == (turn.thinking, turn.among, turn.continues)
    ]
    nearest = min(alike, key=lambda one: one[:2], default=None)
    return None if nearest is None or nearest[0] > 1 else nearest[2]


def _slower(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    return statistics.median(new / old for old, new in pairs if old and new) - 1


# --- for people and programs ---------------------------------------------------------------------


def told(session: Session) -> list[str]:
    """Further facts, apart from the goals, a sentence each."""
    turns = session.turns
    answered = [turn for turn in turns if turn.is_answered]
    due_s = session.begun.plan.seconds
    end = "it was killed" if session.end is None else session.end.why
    conversations = len({(turn.client, turn.conversation) for turn in turns})
    lines = [
        f"{session.seconds / _HOUR_S:.2f} of {due_s / _HOUR_S:.2f} hours ({end}"
        + (f"; resumed {session.resumed} times" if session.resumed else "")
        + f"): {len(turns)} turns, {len(answered)} answered, "
        f"{sum(turn.outcome == 'left' for turn in turns)} left by the client, in {conversations} "
        f"conversations of up to {max((turn.tokens for turn in turns), default=0)} tokens",
    ]
    times = [turn.total_s for turn in answered if turn.client == AGENT and turn.total_s]
    firsts = [turn.first_s for turn in answered if turn.client == AGENT and turn.first_s]
    if times and firsts:
        lines.append(
            f"a turn of the first client: {statistics.median(times) * 1000:.0f} ms in the median, "
            f"{max(times) * 1000:.0f} ms at most; to its first token "
            f"{statistics.median(firsts) * 1000:.0f} ms"
        )
    prompts = sum(turn.prompt_tokens or 0 for turn in answered)
    if prompts:
        reused = sum(turn.cached_tokens or 0 for turn in answered) / prompts
        lines.append(f"{reused:.1%} of all prompts' tokens were reused")
    lines += _memory(session.looks)
    lines.append(_four_hours(session))
    return lines


def _memory(looks: Sequence[Look]) -> list[str]:
    lines = []
    for name in _TIERS:
        held = [value for look in looks if (value := getattr(look, name)) is not None]
        if held:
            lines.append(
                f"KV in {_tier(name)}: {_mib(min(held))} to {_mib(max(held))} MiB, "
                f"{_mib(held[-1])} at the end"
            )
    last = next((look for look in reversed(looks) if look.evicted is not None), None)
    if last is not None:
        lines.append(
            f"blocks since its server's start: {last.evicted} left memory, {last.spilled} were "
            f"written to files, {last.loaded} read from them, {last.dropped} files were dropped"
        )
    resident = [look.rss_bytes for look in looks if look.rss_bytes is not None]
    if resident:
        quarter = resident[len(resident) // _QUARTERS]
        lines.append(
            f"memory of the process: {_mib(resident[0])} MiB at first, {_mib(quarter)} after the "
            f"first quarter, {_mib(resident[-1])} at the end"
        )
    return lines


def _four_hours(session: Session) -> str:
    """An estimate for four hours, from the time of this session's turns."""
    looks, turns = session.looks, len(session.turns)
    firsts = sum(turn.client == AGENT for turn in session.turns)
    if not firsts or not looks:
        return "What 4 hours would need is unknown, because nothing was measured."
    plan = Plan.of(_FOUR_HOURS, "")
    due = plan.seconds / plan.every_s * turns / firsts
    grown = (looks[-1].journal_bytes or 0) - (looks[0].journal_bytes or 0)
    files = looks[-1].disk_bytes_max
    words = (
        f"4 hours (`ops bench --long {_FOUR_HOURS:g} -o DIR`) would be {due:.0f} turns, one of the "
        f"first client every {plan.every_s:g} s; by the {grown / turns / _KIB:.0f} KiB a turn of "
        f"this session a journal of {_mib(grown / turns * due)} MiB"
    )
    if files:
        words += f"; {_mib(files)} MiB for block files at most"
    return words + "; and a machine that does nothing else for as long."


def as_json(about: Mapping[str, Any], session: Session, checked: Checked) -> dict[str, Any]:
    """
    All of it, for programs; the turns are in the record.

    Args:
        about: what was measured, and on what.
    """
    aged = drift(session)
    return {
        **about,
        "plan": attrs.asdict(session.begun.plan),
        "hours": session.seconds / _HOUR_S,
        "ended": None if session.end is None else session.end.why,
        "resumed": session.resumed,
        "turns": len(session.turns),
        "turns_an_hour": an_hour(session),
        "errors": dict(errors(session.turns)),
        "violations": violations(session),
        "continued": continued(session.turns),
        "reused": reused(session.turns),
        "as_cold": [turn.as_cold for turn in session.turns if turn.as_cold is not None],
        "kv_of_budget": dict(fullest(session.looks)),
        "drift": None if aged is None else attrs.asdict(aged),
        "journal": attrs.asdict(checked),
        "goals": [
            {**attrs.asdict(goal), "verdict": goal.verdict} for goal in goals(session, checked)
        ],
        "told": told(session),
        "looks": [attrs.asdict(look) for look in session.looks],
    }


def _listed(wrong: Mapping[str, int]) -> str:
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(wrong.items()))
    return kinds or "0"


def _aged(aged: Drift | None) -> str:
    if aged is None:
        return "too few turns are alike"
    return f"{aged.value:+.1%} over {aged.pairs} pairs (first token {aged.first_text:+.1%})"


def _verified(checked: Checked) -> str:
    if checked.rows is None:
        return f"could not be verified: {checked.why}"
    if checked.broken:
        return f"{checked.broken} broken of {checked.rows} rows, first: {checked.why}"
    return f"{checked.rows} rows verified, head {checked.head[:24]}"


def _tier(name: str) -> str:
    return {"slab_bytes": "slabs", "block_bytes": "blocks", "disk_bytes": "files"}[name]


def _mib(value: float) -> str:
    return f"{value / _MIB:.1f}"
