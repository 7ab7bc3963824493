"""Numbers, times and bars as pages show them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs
from markupsafe import Markup

from cairn.http.sessions.objects import BarObject, EventObject, TurnObject
from cairn.journal.agents import is_agent_name, session_of
from cairn.journal.timelines import tokens_a_second

_US = 1_000_000
_LABELS = {
    "cold_start": "new conversation",
    "fingerprint_changed": "other model",
    "messages_changed": "a message changed",
    "system_changed": "system prompt changed",
    "session_busy": "busy",
    "cache_mode_prefix": "prefix only",
}
_PERIOD_MAX = 4
"""The most kinds that are folded together if they alternate."""

_PLACEHOLDER = re.compile(r"\s*\[(an image|a document|a sound)\b[^\[\]…]*[\]…]")
"""What first words have in the place of a part that no model here reads; it may be cut."""

_MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>")
_STEPS = ((60, "s"), (60, "min"), (24, "h"))


@attrs.frozen
class Segment:
    """A part of a bar: what it is (the name of its colour), how much, and where it begins."""

    kind: str
    label: str
    amount: int
    start: int


def segments(*parts: tuple[str, str, int]) -> list[Segment]:
    """The parts of a bar that are not empty, one after the other: (kind, label, amount)."""
    found, start = [], 0
    for kind, label, amount in parts:
        if amount > 0:
            found.append(Segment(kind, label, amount, start))
            start += amount
    return found


def turn_bar(tokens: BarObject) -> list[Segment]:
    """The tokens of a turn. What was prewarmed is a part of what is reused, and shown apart."""
    ahead_slab = min(tokens.prewarmed, tokens.from_slab)
    ahead_blocks = min(tokens.prewarmed - ahead_slab, tokens.from_blocks)
    return segments(
        ("slab", "reused from the slab", tokens.from_slab - ahead_slab),
        ("blocks", "reused from blocks", tokens.from_blocks + tokens.from_partial - ahead_blocks),
        ("prewarmed", "prewarmed and reused", ahead_slab + ahead_blocks),
        ("computed", "computed", tokens.computed),
        ("generated", "generated", tokens.generated),
    )


def reused(tokens: BarObject) -> int:
    """All tokens of a prompt that were reused."""
    return tokens.from_slab + tokens.from_blocks + tokens.from_partial


def longest(turns: Sequence[TurnObject]) -> int:
    """The most tokens of a turn, to which bars are drawn; at least 1."""
    return max((one.tokens.prompt + one.tokens.generated for one in turns), default=1) or 1


def share(part: int, whole: int) -> str:
    """A share in percent; only all is 100 %."""
    return f"{100 * part // whole} %" if whole else "–"


def count(value: int) -> str:
    """A number with commas."""
    return f"{value:,}"


def plural(value: int, one: str) -> str:
    """A number and what it counts."""
    return f"{value:,} {one}" if value == 1 else f"{value:,} {one}s"


def size(value: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def duration(us: int) -> str:
    """A duration of a request."""
    if us < _US:
        return f"{us / 1000:.0f} ms"
    return f"{us / _US:.1f} s" if us < 60 * _US else span(us)


def span(us: int) -> str:
    """A time that people wait for, in its largest unit."""
    amount, unit = abs(us) // _US, "d"
    for step, name in _STEPS:
        if amount < step:
            unit = name
            break
        amount //= step
    return f"{amount} {unit}"


def ago(us: int, now_us: int) -> str:
    """How long ago a time is."""
    return "now" if now_us - us < 2 * _US else f"{span(now_us - us)} ago"


def clock(us: int) -> str:
    """A time of day, in UTC."""
    return f"{datetime.fromtimestamp(us / _US, UTC):%H:%M:%S}"


def moment(us: int) -> str:
    """A time as HTML's ``time`` has it."""
    return f"{datetime.fromtimestamp(us / _US, UTC):%Y-%m-%dT%H:%M:%SZ}"


def first_token(turn: TurnObject) -> str:
    """How long a turn took to its first token."""
    if turn.first_token_us is None:
        return "–"
    return duration(turn.first_token_us - turn.received_us)


def agent_of(name: str) -> str | None:
    """The agent that a session of this name is of; None if it is none's."""
    agent = name.removeprefix(session_of(""))
    return agent if agent != name and is_agent_name(agent) else None


def speed(turn: TurnObject) -> str:
    """Tokens a second after the first one."""
    rate = tokens_a_second(turn.tokens.generated, turn.first_token_us, turn.ended_us)
    return "–" if rate is None else f"{rate:.0f} tok/s"


def verdict(turn: TurnObject) -> tuple[str, str]:
    """A word for the path of a turn, and the name of its colour."""
    if turn.path is None:
        return ("waiting", "quiet") if turn.end is None else ("no path", "quiet")
    if turn.path == "continuation" and turn.habit is None:
        return "continued", "good"
    reason = turn.habit or turn.diverged_part or turn.reason or "new session"
    some = "warn" if reason not in ("cold_start", "cache_mode_prefix") else "quiet"
    return _label(reason), some


def decision(path: str, reason: str | None) -> str:
    """The path of a request in a few words."""
    if path == "continuation":
        return "continued"
    return _label(reason or path)


def _label(reason: str) -> str:
    """A reason, or another name of the journal, for people."""
    return _LABELS.get(reason, reason.replace("_", " "))


@attrs.frozen
class EventGroup:
    """
    Rows that follow each other, of one kind or of a few that come again and again.

    Attributes:
        kind: of the rows, with the step of a pass.
        times: how often they come.
    """

    kind: str
    rows: tuple[EventObject, ...]
    times: int

    @property
    def first(self) -> EventObject:
        """The first of them."""
        return self.rows[0]

    @property
    def last(self) -> EventObject:
        """The last of them."""
        return self.rows[-1]


def folded(rows: Sequence[EventObject]) -> Iterator[EventGroup]:
    """
    Rows, those of one kind and step together, and a few kinds that alternate together: after each
    chunk of a prefill comes the block that it fills.
    """
    kinds = [kind_of(row) for row in rows]
    at = 0
    while at < len(rows):
        found = [(_repeats(kinds, at, size), size) for size in range(1, _PERIOD_MAX + 1)]
        # The most rows; of equals, the shortest pattern.
        times, size = max(found, key=lambda one: (one[0] * one[1] if one[0] > 1 else 1, -one[1]))
        size = size if times > 1 else 1
        end = at + times * size
        yield EventGroup(", ".join(kinds[at : at + size]), tuple(rows[at:end]), times)
        at = end


def _repeats(kinds: Sequence[str], at: int, size: int) -> int:
    """How often the pattern of this size that begins at a place comes, one after the other."""
    pattern, times = kinds[at : at + size], 1
    while kinds[at + times * size : at + (times + 1) * size] == pattern:
        times += 1
    return times


def kind_of(row: EventObject) -> str:
    """What a row is, with the step of the pass if it has one."""
    step: Any = row.payload.get("step")
    return f"{row.kind} ({step})" if isinstance(step, str) else row.kind


def coded(text: str) -> Markup:
    """A sentence with what is between backticks as code. All of it is escaped."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # one without a partner is a character of the text
        pieces[-2:] = ["`".join(pieces[-2:])]
    made = Markup("<code>{}</code>")
    return Markup("").join(
        made.format(piece) if at % 2 else Markup.escape(piece) for at, piece in enumerate(pieces)
    )


def unmarked(text: str) -> str:
    """A text without the control tokens of a chat template, unless it has nothing else."""
    return _MARKER.sub("", text).strip() or text.strip()


def brief(words: str) -> str:
    """First words, in which it is said in short that an image or a document was left out."""
    return _PLACEHOLDER.sub(r" [\1 was left out]", words).strip()


def cut(text: str, most: int = 600) -> str:
    """The beginning of a text."""
    return text if len(text) <= most else f"{text[:most]}…"
