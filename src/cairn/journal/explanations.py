"""
Explains a request in a few sentences: what was reused, what was computed and why, and what its
client can do about it. Pure: all of it follows from two of its events.

An explanation quotes the prompt, so it is as private as the events that it is made of: it belongs
in no log, metric or span.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Literal

import attrs

from cairn.journal import events as ev
from cairn.journal.losses import Cause
from cairn.journal.tenants import session_name

Habit = Literal["clock", "billing_line", "reordered_tools", "dropped_thinking", "moved_cache_hints"]
"""What a client does that changes a prompt without need."""

QUOTED = 60
"""The most characters of a text that are quoted."""

_PIECES = re.compile(r"\s+|<[^<>\s]{1,40}>|(?:(?!<[^<>\s]{1,40}>)[^\s,{}\[\]\"])+|.", re.DOTALL)
"""Words, markers such as ``<|im_end|>``, and the signs between which JSON has its texts."""

_MONTH = (
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sep(?:t(?:ember)?)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b"
)
# A month is a time beside a number only: "may" is a word as well.
_CLOCK = re.compile(
    r"\b\d{1,2}:\d{2}|\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|\b1[5-9]\d{8}(?:\d{3})?\b"
    r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"
    rf"|{_MONTH}\.?\s+\d{{1,4}}\b|\b\d{{1,2}}\.?\s+{_MONTH}",
    re.IGNORECASE,
)
_BILLING = re.compile(r"billing-header|\bcc_version=|\bcch=", re.IGNORECASE)
_HINTS = re.compile(r"cache_?control|cache_?point|cache_?hint|\bephemeral\b", re.IGNORECASE)
_THOUGHT = re.compile(r"<\|?/?think|\[/?THINK\]|channel\|>\s*(?:analysis|thought)", re.IGNORECASE)
_EMPTY_THOUGHT = re.compile(r"<\|?think\|?>\s*<\|?/think|\[THINK\]\s*\[/THINK\]", re.IGNORECASE)
_THOUGHT_ENDS = re.compile(r"\s*(?:<\|?/think|\[/THINK\])", re.IGNORECASE)
_MARKER = re.compile(r"<\|[^<>|\s]{1,40}\|>")
_CONTEXT = 40

_COMPARED = 128
"""The most pieces of a text that are compared, from the first one that differs on."""

_SAME_BEGINNING = (None, "cold_start", "shorter_history", "diverged")
"""The reasons with which all that is the same could be reused."""

_WHOLE_BLOCKS = (
    "On this machine this model reuses whole blocks of {} tokens only, and computes the rest that "
    "is the same again; `ops doctor` says why."
)
_SMALLER_LEAST = "A smaller `--min-cache-tokens` caches shorter prompts."

_PARTS = {
    "system_changed": "the system prompt",
    "tools_changed": "the list of tools",
    "tools_reordered": "the order of the tools",
    "messages_changed": "a message",
}
_ADVICE: dict[Habit, str] = {
    "clock": "A clock in {part} changes it from one request to the next: move it to the last "
    "message, or give only the day.",
    "billing_line": "A billing line of the client in {part} changes with every request: have the "
    "client leave it out.",
    "reordered_tools": "The client sent the same tools in another order: have it send them in a "
    "fixed one, because tools come first in the prompt.",
    "dropped_thinking": "The thinking of an earlier answer was dropped: have the client send it "
    "back (`reasoning_content`), or switch thinking off; some templates drop it all the same.",
    "moved_cache_hints": "A cache hint in {part} moved: have the client leave such hints out, "
    "because Cairn finds what to reuse without them.",
}


@attrs.frozen(kw_only=True)
class Explanation:
    """
    What became of a prompt, for people. Private: it quotes the prompt.

    Attributes:
        reused: how much was reused and computed, in a sentence.
        because: why, in a sentence.
        advice: what the client or the operator can do; None if there is nothing to do.
        habit: the habit of the client that was recognised, if any.
        was, now: the text that differs: of the nearest conversation, and of this prompt; None if
            nothing differs.
    """

    reused: str
    because: str
    advice: str | None
    habit: Habit | None
    was: str | None
    now: str | None

    @property
    def text(self) -> str:
        """All sentences."""
        return " ".join(filter(None, (self.reused, self.because, self.advice)))


def explain(
    received: ev.RequestReceived,
    path: ev.PathSelected,
    *,
    block_tokens: int,
    min_cache_tokens: int,
    grain: int,
    cause: Cause | None = None,
) -> Explanation:
    """
    Explain the path of a request.

    Args:
        block_tokens, min_cache_tokens, grain: of the model that served it, see
            ``events.ModelLoaded``.
        cause: what happened to blocks that are gone; None if it is not known.
    """
    change = _change(path.diverged_from, path.diverged_text)
    habit = _habit(received, path, change)
    of_rules = _Rules(received, path, block_tokens, min_cache_tokens, grain, cause, change)
    because, advice = _REASONS[path.reason](of_rules)
    if habit is not None:
        part = _PARTS.get(path.diverged_part or "", "the conversation")
        advice = _ADVICE[habit].format(part=part)
    whole_blocks = f" {_WHOLE_BLOCKS.format(block_tokens)}" if of_rules.lost_to_blocks else ""
    return Explanation(
        reused=f"{_reused(received, path)}{whole_blocks}",
        because=because,
        advice=advice,
        habit=habit,
        was=change.was if change is not None else None,
        now=change.now if change is not None else None,
    )


@attrs.frozen
class _Change:
    """
    The first difference of two texts.

    Attributes:
        before: the end of what they have in common before it; ``around_was`` and ``around_now``
            begin with it.
    """

    before: str
    was: str
    now: str
    around_was: str
    around_now: str


@attrs.frozen
class _Rules:
    """What a sentence about a reason is made of."""

    received: ev.RequestReceived
    path: ev.PathSelected
    block_tokens: int
    min_cache_tokens: int
    grain: int
    cause: Cause | None
    change: _Change | None

    @property
    def nearest(self) -> str:
        return short(self.path.nearest or self.path.session)

    @property
    def is_same_session(self) -> bool:
        """Whether the session that serves is the one that the request was compared with."""
        return self.path.nearest == self.path.session

    @property
    def too_few(self) -> str:
        """That the prompt is too short to be cached, if it is."""
        return self.not_cached if self.received.prompt_tokens < self.min_cache_tokens else ""

    @property
    def not_cached(self) -> str:
        return (
            f"; prompts of fewer than {self.min_cache_tokens} tokens are too short to be cached "
            "(`--min-cache-tokens`)"
        )

    @property
    def lost_to_blocks(self) -> bool:
        """Whether more tokens are the same than are reused, because only whole blocks are."""
        path = self.path
        if self.grain == 1 or self.too_few or path.reason not in _SAME_BEGINNING:
            return False
        if path.diverged_token is not None:
            return path.diverged_token > path.reused_tokens
        if path.reason is None:
            return self.received.base_tokens > path.reused_tokens
        return path.nearest is not None and not path.reused_tokens

    @property
    def made_up_for(self) -> bool:
        """Whether what is rendered differently was prewarmed, so that nothing was lost by it."""
        return _made_up_for(self.path)

    @property
    def place(self) -> str:
        """Where the prompts begin to differ, and what became what."""
        return f"from token {self.path.diverged_token} on{_became(self.change)}"


def short(session: str) -> str:
    """A session's name within its tenant, cut to eight characters if it is a UUID."""
    name = session_name(session)
    is_id = len(name) == 36 and name.count("-") == 4
    return name[:8] if is_id else name


def _reused(received: ev.RequestReceived, path: ev.PathSelected) -> str:
    total, reused = received.prompt_tokens, path.reused_tokens
    if not reused:
        return f"None of the {total} prompt tokens was reused; all were computed."
    whole = reused - path.tokens_from_slab - path.tokens_from_partial
    sources = (
        (path.tokens_from_slab, "held by the session"),
        (whole, "copied from sealed blocks"),
        (path.tokens_from_partial, "copied from a part of a block"),
    )
    parts = [f"{tokens} {how}" for tokens, how in sources if tokens]
    idle = f", {path.prewarmed_tokens} of them prewarmed" if path.prewarmed_tokens else ""
    share = 100 * reused // total
    return (
        f"{reused} of {total} prompt tokens ({share} %) were reused: {' and '.join(parts)}{idle}; "
        f"{total - reused} were computed."
    )


# --- why, and what to do -------------------------------------------------------------------------

_Because = tuple[str, str | None]


def _continued(of: _Rules) -> _Because:
    session = short(of.path.session)
    if of.made_up_for:
        return (
            (
                f"It continues session {session}. {of.path.rerendered_tokens} tokens of it are "
                f"rendered differently now, from token {of.path.diverged_token} on; these were "
                "computed before, while the server was idle."
            ),
            None,
        )
    if of.path.rerendered_tokens:
        return (
            (
                f"It continues session {session}, of which {of.path.rerendered_tokens} tokens are "
                f"rendered differently now, {of.place}."
            ),
            _of_template(of),
        )
    if not of.path.reused_tokens:
        short_before = of.received.base_tokens < of.min_cache_tokens
        return (
            (
                f"It continues session {session}, of which nothing is stored that could be reused"
                f"{of.not_cached if short_before else ''}."
            ),
            _SMALLER_LEAST if short_before else None,
        )
    return f"It continues session {session}.", None


def _of_template(of: _Rules) -> str | None:
    """Whose doing it is that tokens are rendered differently, if it is not dropped thinking."""
    lost = _lost_thought(of.change)
    if lost == "empty":
        return (
            "The model's chat template begins an answer with an empty thinking block and leaves it "
            "out of earlier ones. The client can do nothing about it; the server computes such "
            "tokens in advance where it is idle between two turns."
        )
    if lost == "whole" and of.received.thoughts:
        return (
            "The client sent thinking back, and the model's chat template leaves out that of "
            "earlier answers. The server computes such tokens in advance where it is idle between "
            "two turns."
        )
    if lost is None and of.change is not None:
        return (
            "An earlier answer comes back differently if the client changed it, or if the model's "
            "chat template writes it otherwise than the model did."
        )
    return None


def _cold_start(of: _Rules) -> _Because:
    if of.received.session_name is not None:
        return f"Session {short(of.path.session)} is new.", None
    if of.path.nearest is not None:
        rest = "what is stored of them is reused"
        if not of.path.reused_tokens:
            rest = f"nothing of them is stored that could be reused{of.too_few}"
        because = f"Session {of.nearest} began with the same words, and {rest}."
        return f"It is a new conversation. {because}", None
    if of.path.reused_tokens:
        return (
            (
                "It is a new conversation. Others began with the same words, and what is stored of "
                "these is reused; none is continued, because its messages are others, or it has a "
                "session id or a group of its own."
            ),
            None,
        )
    return "It is a new conversation: no stored one begins like it or has its messages.", None


def _shorter_history(of: _Rules) -> _Because:
    if of.is_same_session:  # the client named it
        rest = "" if of.path.reused_tokens else of.too_few
        words = "or its last request once more, and the session goes on from here"
        return f"It is the beginning of what session {of.nearest} has, {words}{rest}.", None
    return (
        (
            f"It is the beginning of session {of.nearest}, or its last request once more, so it "
            f"has a session of its own{'' if of.path.reused_tokens else of.too_few}."
        ),
        None,
    )


def _diverged(of: _Rules) -> _Because:
    part = _PARTS.get(of.path.diverged_part or "", "the prompt")
    advice = None
    if of.path.diverged_part == "messages_changed":
        advice = "That is usual after an edit; otherwise have the client send history unchanged."
    elif of.path.diverged_part is not None:
        advice = "What changes from request to request belongs in the last message."
    whose = f"{part} differs from that of session {of.nearest}"
    return f"{whose[0].upper()}{whose[1:]} {of.place}.", advice


def _evicted(of: _Rules) -> _Because:
    evicted = "were evicted to make room"
    lost = "were lost with the server's memory when it restarted or loaded another model"
    room = "Give the server more room: `--blocks-mb`, `--disk-mb` or `--pool-mb`."
    files = "Files (`--disk-mb`) outlast a restart."
    match of.cause:
        case "evicted":
            how, advice = evicted, room
        case "lost":
            how, advice = lost, files
        case None:
            how, advice = f"{evicted}, or {lost}", f"{room} {files}"
    return f"It continues session {of.nearest}, whose blocks {how}.", advice


def _expired(of: _Rules) -> _Because:
    return (
        "The blocks of this conversation expired: it was not used for its TTL.",
        "Set a longer `--ttl`, or `ttl` in the request.",
    )


def _too_short(of: _Rules) -> _Because:
    return (
        (
            f"The last prompt of session {of.nearest} was too short to be cached: it had fewer "
            f"than {of.min_cache_tokens} tokens."
        ),
        _SMALLER_LEAST,
    )


def _session_busy(of: _Rules) -> _Because:
    return (
        f"It continues session {of.nearest}, which was busy with another request.",
        "Have the client wait for an answer before it continues the conversation.",
    )


def _quarantined(of: _Rules) -> _Because:
    return (
        f"It continues session {of.nearest}, which a bug has taken out of service.",
        "`ops sessions` shows the bug's id, and `ops replay` what happened.",
    )


def _fingerprint_changed(of: _Rules) -> _Because:
    served = "another model, or another version or setting of it, served"
    if of.is_same_session:  # the client named it
        begins = f"Session {of.nearest} is the one that {served} before"
        ends = ", and the session starts again with this model"
    else:
        begins, ends = f"It continues session {of.nearest}, which {served}", ""
    return (
        f"{begins}: its cache may have other bits, so none of it is used{ends}.",
        "Name the same model in all requests of a conversation.",
    )


def _cache_disabled(of: _Rules) -> _Because:
    return (
        "The request disabled the cache (`cache_prompt: false`).",
        "Leave `cache_prompt` out to reuse what is there.",
    )


def _cache_mode_prefix(of: _Rules) -> _Because:
    return (
        'The request continues no session (`cache_mode: "prefix"`), and reuses sealed blocks only.',
        "Leave `cache_mode` out if it is a conversation's next turn.",
    )


_REASONS: dict[str | None, Callable[[_Rules], _Because]] = {
    None: _continued,
    "cold_start": _cold_start,
    "shorter_history": _shorter_history,
    "diverged": _diverged,
    "evicted": _evicted,
    "expired": _expired,
    "too_short": _too_short,
    "session_busy": _session_busy,
    "quarantined": _quarantined,
    "fingerprint_changed": _fingerprint_changed,
    "cache_disabled": _cache_disabled,
    "cache_mode_prefix": _cache_mode_prefix,
}


# --- what differs --------------------------------------------------------------------------------


def _change(was: str | None, now: str | None) -> _Change | None:
    """The first words that differ of two texts that begin alike; None if there are none."""
    if was is None or now is None:
        return None
    one, other = _PIECES.findall(was), _PIECES.findall(now)
    same = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        same += 1
    if same == len(one) == len(other):
        return None
    gone_pieces, new_pieces = _first_difference(
        one[same : same + _COMPARED], other[same : same + _COMPARED]
    )
    before = "".join(one[:same])[-_CONTEXT:]
    gone, new = "".join(gone_pieces), "".join(new_pieces)
    while gone and new and gone[-1] == new[-1] in ".;:!?)":
        gone, new = gone[:-1], new[:-1]
    return _Change(
        before=before,
        was=gone,
        now=new,
        around_was=before + "".join(one[same:])[:_CONTEXT],
        around_now=before + "".join(other[same:])[:_CONTEXT],
    )


def _first_difference(
    one: Sequence[str], other: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """
    What comes in each before the first pieces that both have; their first ones differ. Where one
    only lacks the beginning of the other, that is what differs, if it is shorter.
    """
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    end, last = len(one), len(other)
    # As `get_opcodes` does, but without comparing what comes after it: that takes far longer.
    while (found := matcher.find_longest_match(0, end, 0, last)).size:
        end, last = found.a, found.b
    gone, new = _left_out(one, other), _left_out(other, one)
    choices = ((end, last), (gone, 0), (0, new))
    end, last = min((each for each in choices if any(each)), key=sum)
    return one[:end], other[:last]


def _left_out(one: Sequence[str], other: Sequence[str]) -> int:
    """How many pieces the other text lacks if it goes on as this one does after them, or 0."""
    for at in range(1, len(one)):
        both = min(len(one) - at, len(other))
        if both and one[at : at + both] == other[:both]:
            return at
    return 0


def _became(change: _Change | None) -> str:
    if change is None:
        return ""
    was, now = _quoted(change.was), _quoted(change.now)
    if not was.strip("` "):
        return f": {now} was added"
    if not now.strip("` "):
        return f": {was} was removed"
    return f": {was} became {now}"


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    text = _MARKER.sub("", text).strip() or text  # a person wrote the rest
    text = text.replace("`", "'")  # they enclose it
    return f"`{text if len(text) <= QUOTED else text[:QUOTED] + '…'}`"


def _lost_thought(change: _Change | None) -> Literal["empty", "whole"] | None:
    """
    Whether what differs first is that the thinking of an answer is gone: an empty block of it, or
    one with words. A marker that is there before and after says nothing.
    """
    if change is None:
        return None
    start = len(change.before)
    if any(one.end() > start for one in _EMPTY_THOUGHT.finditer(change.around_was)):
        return "empty"
    markers = [one for one in _THOUGHT.finditer(change.around_was) if one.end() > start]
    if markers and markers[0].start() < start + max(1, len(change.was)):
        return "whole"
    opened = _THOUGHT.search(change.before)
    ends_now = _THOUGHT_ENDS.match(change.around_now, start)
    return "whole" if opened and ends_now else None


def _habit(
    received: ev.RequestReceived, path: ev.PathSelected, change: _Change | None
) -> Habit | None:
    """The habit of a client that made the difference, if one is known to."""
    if path.diverged_part == "tools_reordered":
        return "reordered_tools"
    if change is None:
        return None
    around = (change.around_was, change.around_now)
    if path.reason is None:
        # A client that sends thinking back has not dropped it: its model's template has.
        lost = not received.thoughts and _lost_thought(change) == "whole"
        return "dropped_thinking" if lost and not _made_up_for(path) else None
    if any(map(_BILLING.search, around)):
        return "billing_line"
    if any(_HINTS.search(text) for text in (change.was, change.now)):
        return "moved_cache_hints"
    if _is_time(change, change.was, change.around_was) and _is_time(
        change, change.now, change.around_now
    ):
        return "clock"
    return None


def _made_up_for(path: ev.PathSelected) -> bool:
    return path.diverged_token is not None and path.reused_tokens > path.diverged_token


def _is_time(change: _Change, changed: str, around: str) -> bool:
    """Whether what differs is short, and a time or part of one."""
    begins = len(change.before)
    ends = begins + len(changed)
    times = _CLOCK.finditer(around)
    return len(changed) <= QUOTED and any(
        one.start() < ends and one.end() > begins for one in times
    )
