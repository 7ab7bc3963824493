"""
From the text of an answer to its parts, piece by piece: words, thoughts and tool calls. The
adapters of all protocols get these parts.

Rules of this module:

1. How the text is divided into pieces makes no difference. Text that may be the beginning of a
marker waits until that is certain, and so does white space, because the white space around a marker
belongs to it.
2. Nothing is lost: text that began like a call and is not one is read again after its first marker,
as if the marker were a word. A marker that is only mentioned removes nothing.
3. A constrained call is certain as soon as its function is named, so its arguments are reported as
they come. If the answer ends within it, it remains a call that was cut off.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cairn.engine.answer.markers import CALLING, PLAIN, SAYING, THINKING, Edge, Markers
from cairn.engine.answer.text import unfinished
from cairn.engine.answer.tool_calls import Call, NoCall, is_json, read_calls
from cairn.journal.calls import REJECTED_MAX
from cairn.journal.events import CallFault

#: The templates of some families only take ids with exactly this many letters and digits.
_ID_LENGTH = 9


@attrs.frozen
class Said:
    """Words of the answer."""

    text: str


@attrs.frozen
class Thought:
    """Text of the thoughts before the answer's words."""

    text: str


@attrs.frozen(kw_only=True)
class Called:
    """
    A complete call of a tool.

    Attributes:
        index: the index of the call in the answer, from 0.
        arguments: a JSON object, as text.
        cut: if the answer ended within the call, what the model wrote of it. The arguments are
            incomplete then.
    """

    index: int
    id: str
    name: str
    arguments: str
    cut: str | None = None


@attrs.frozen(kw_only=True)
class Calling:
    """
    More of a constrained call. The complete call follows as ``Called``.

    Attributes:
        arguments: those since the last ``Calling``; may be empty.
    """

    index: int
    id: str
    name: str
    arguments: str


AnswerPart = Said | Thought | Called


@attrs.frozen(kw_only=True)
class Rejected:
    """
    Text that began like a call and is not one.

    Attributes:
        text: as the model wrote it, with its markers, and without any call that begins within it.
        detail: what is wrong with it; may contain words of the answer.
    """

    reason: CallFault
    text: str
    detail: str


@attrs.frozen(kw_only=True)
class Released:
    """
    What a piece of text released, in order. The text of a rejected call is among the parts.

    Attributes:
        calling: what has arrived of a call that is still open, after the parts.
    """

    parts: tuple[AnswerPart, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    calling: Calling | None = None


@attrs.frozen(kw_only=True)
class AnswerForm:
    """
    What is known about an answer in advance; by default it is all text.

    Attributes:
        begins: the state in which the answer begins.
        tools: the available tools; without them what looks like a call is text.
        may_think: whether thoughts may open it, if it does not begin in them.
        held: whether its calls are constrained by a grammar. A marker in a string of the arguments
            then does not end the call, because the arguments before it are not complete JSON.
    """

    markers: Markers = PLAIN
    begins: str = SAYING
    tools: tuple[Mapping[str, Any], ...] = ()
    may_think: bool = False
    held: bool = False


class AnswerParts:
    """Takes one answer apart, in order."""

    def __init__(self, form: AnswerForm, *, name: str) -> None:
        """
        Args:
            name: a unique name of the answer, from which the ids of calls are derived.
        """
        self._form = form
        self._name = name
        self._table = form.markers.table(calls=bool(form.tools))
        self._state = form.begins
        self._text = ""
        self._segment = _Segment(fresh=form.begins != SAYING)
        self._last: dict[type[Said | Thought], _Segment] = {}
        # The text in a state of the format's own, until a marker shows that the model keeps to the
        # format.
        self._unmarked: list[str] | None = []
        self._call: _OpenCall | None = None
        self._calls = 0
        self._rejections = 0
        self._ids: set[str] = set()
        self._parts: list[AnswerPart] = []
        self._rejected: list[Rejected] = []

    def add(self, text: str) -> Released:
        """Take in text. Changes the state."""
        self._text += text
        self._scan()
        certain = len(self._text) - unfinished(self._text, (edge.marker for edge in self._edges))
        self._pass(self._text[:certain])
        self._text = self._text[certain:]
        return self._released()

    def finish(self, *, complete: bool) -> Released:
        """
        End the answer: release what waits. Changes the state.

        Args:
            complete: whether the model ended it. A call that was cut off is not a call, even if its
                parser would accept the half.
        """
        self._pass_remaining()
        while self._call is not None:
            self._end_call(None, complete=complete)
            self._scan()
            self._pass_remaining()
        if self._unmarked and self._state not in (SAYING, THINKING):
            self._state = SAYING
            self._emit("".join(self._unmarked))
        self._emit(self._segment.take_space())
        return self._released()

    @property
    def _edges(self) -> tuple[Edge, ...]:
        return self._table.get(self._state, ())

    def _released(self) -> Released:
        parts, self._parts = tuple(self._parts), []
        rejected, self._rejected = tuple(self._rejected), []
        return Released(parts=parts, rejected=rejected, calling=self._calling())

    def _scan(self) -> None:
        """Go through all markers in the text."""
        while (found := _first(self._text, self._edges)) is not None:
            place, edge = found
            self._pass(self._text[:place])
            self._text = self._text[place + len(edge.marker) :]
            self._cross(edge)

    def _pass_remaining(self) -> None:
        """Release the rest: no more text comes, so what began like a marker is not one."""
        text, self._text = self._text, ""
        self._pass(text)

    def _pass(self, text: str) -> None:
        """Handle text without a marker."""
        if self._call is not None:
            self._grow(self._call, text)
        elif self._state in (SAYING, THINKING):
            self._emit(self._segment.take(text, holds=bool(self._edges)))
        elif self._unmarked is not None:
            self._unmarked.append(text)

    def _cross(self, edge: Edge) -> None:
        """Handle a marker."""
        self._unmarked = None
        if self._call is not None and self._form.held and not is_json("".join(self._call.words)):
            self._grow(self._call, edge.marker)
        elif self._call is not None:
            self._end_call(edge, complete=True)
        elif edge.to == CALLING:
            self._call = _OpenCall(state=self._state, marker=edge.marker)
            self._state = CALLING
        elif edge.shown or (edge.opens and self._segment.has_words):
            # Thoughts come before words. After words, the marker is only mentioned.
            self._state = SAYING
            self._pass(edge.marker)
        else:
            self._leave(before_call=False)
            self._state, self._segment = edge.to, _Segment(fresh=True)

    def _leave(self, *, before_call: bool) -> None:
        """Release the white space before a marker, without the newlines that belong to it."""
        space = self._segment.take_space()
        if self._segment.has_words:
            # Templates put at most one newline between words and a call. Around thoughts they strip
            # all of them.
            one = before_call and self._state == SAYING
            self._emit(space.removesuffix("\n") if one else space.rstrip("\n"))

    def _grow(self, call: _OpenCall, text: str) -> None:
        """Add text to the open call."""
        call.words.append(text)
        if not self._form.held:
            return
        if call.named is not None:
            call.named.take(text)
        elif (named := _named("".join(call.words))) is not None:
            call.named = named
            # From here on it is certainly a call.
            self._state = call.says
            self._leave(before_call=True)
            self._state = CALLING

    def _calling(self) -> Calling | None:
        """What has arrived of the open call since the last time. Changes the state."""
        named = self._call.named if self._call is not None else None
        if named is None:
            return None
        came = named.fresh()
        if came is None:
            return None
        return Calling(index=self._calls, id=self._id(None), name=named.name, arguments=came)

    def _end_named(self, call: _OpenCall, named: _Named, *, complete: bool) -> None:
        """End a call whose function is named."""
        cut = None
        if not (complete and named.is_whole):
            cut = call.marker + "".join(call.words)
            detail = "the answer was cut off in it"
            self._rejected.append(Rejected(reason="truncated", text=cut, detail=detail))
        self._add(named.name, named.arguments, self._id(None), cut)
        self._state, self._segment = SAYING, _Segment(fresh=True)

    def _end_call(self, edge: Edge | None, *, complete: bool) -> None:
        """End a call: at the marker after it, or with the answer."""
        call, self._call = self._call, None
        assert call is not None
        if call.named is not None:
            self._end_named(call, call.named, complete=complete)
            return
        words = "".join(call.words)
        self._state = call.says
        try:
            calls = self._read(words, complete, ended=edge is not None)
        except NoCall as error:
            self._reject(call, words + (edge.marker if edge is not None else ""), error)
            return
        self._leave(before_call=True)
        for one in calls:
            self._add(one.name, one.arguments, self._id(one.id), None)
        self._state, self._segment = SAYING, _Segment(fresh=True)

    def _reject(self, call: _OpenCall, rest: str, error: NoCall) -> None:
        """Read the text of a call again, as if its marker were a word."""
        self._rejections += 1
        if self._rejections == REJECTED_MAX:
            self._table = self._form.markers.table(calls=False)
        mine, _, _ = rest.partition(call.marker)
        text = call.marker + mine
        self._rejected.append(Rejected(reason=error.reason, text=text, detail=error.detail))
        self._pass(call.marker)
        self._text = rest + self._text

    def _read(self, words: str, complete: bool, *, ended: bool) -> tuple[Call, ...]:
        """
        Args:
            complete: False if the answer was cut off in it.
            ended: whether a marker followed it.
        """
        if not complete:
            raise NoCall("truncated", "the answer was cut off in it")
        markers = self._form.markers
        assert markers.calling is not None
        assert markers.parse is not None
        if not ended and markers.calling[1] and not is_json(words):
            # Parsers of other formats turn an incomplete call into one with fewer arguments.
            raise NoCall("truncated", "the answer ended in it, without the marker after a call")
        return read_calls(markers.parse, words, self._form.tools)

    def _id(self, given: str | None) -> str:
        """
        The id of the next call.

        Args:
            given: the id that the model gave it, if any.
        """
        if given is not None and given not in self._ids:
            return given
        return hashlib.sha256(f"{self._name}/{self._calls}".encode()).hexdigest()[:_ID_LENGTH]

    def _add(self, name: str, arguments: str, call_id: str, cut: str | None) -> None:
        self._parts.append(
            Called(index=self._calls, id=call_id, name=name, arguments=arguments, cut=cut)
        )
        self._calls += 1
        self._ids.add(call_id)

    def _emit(self, text: str) -> None:
        """Add text to the part that it belongs to."""
        if not text:
            return
        kind = Thought if self._state == THINKING else Said
        if text.strip():
            if self._last.get(kind, self._segment) is not self._segment:
                # Clients join parts of one kind, so keep the text before and after a marker apart.
                text = (self._segment.dropped or "\n") + text
            self._last[kind] = self._segment
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        else:
            self._parts.append(kind(text))


class _Segment:
    """
    Text between two markers, without the newlines that templates put around it.

    Attributes:
        has_words: whether it has had more than white space so far.
        dropped: the newlines that were dropped from its beginning.
    """

    def __init__(self, *, fresh: bool) -> None:
        """
        Args:
            fresh: whether it follows a marker.
        """
        self._fresh = fresh
        # White space at its end so far, which may belong to a marker.
        self._space = ""
        self.has_words = False
        self.dropped = ""

    def take(self, text: str, *, holds: bool) -> str:
        """
        Add text, and return what certainly belongs to the segment. Changes the state.

        Args:
            holds: whether a marker may follow.
        """
        if self._fresh:
            words = text.lstrip("\n")
            self.dropped += text[: len(text) - len(words)]
            text, self._fresh = words, not words
        text = self._space + text
        words = text.rstrip() if holds else text
        self._space = text[len(words) :]
        self.has_words = self.has_words or bool(words.strip())
        return words

    def take_space(self) -> str:
        """The white space that waits at the end. Changes the state."""
        space, self._space = self._space, ""
        return space


@attrs.define(kw_only=True)
class _OpenCall:
    """
    A call that is not complete.

    Attributes:
        state: the state in which it began.
        marker: the marker that began it.
        words: the text since then.
        named: its name and arguments so far, if its function is named; else None.
    """

    state: str
    marker: str
    words: list[str] = attrs.field(factory=list)
    named: _Named | None = None

    @property
    def says(self) -> str:
        """
        The state in which its text is shown if it is rejected. A format may begin calls in a state
        whose text is not shown.
        """
        return self.state if self.state in (SAYING, THINKING) else SAYING


class _Named:
    """
    A constrained call whose function is named. Its arguments are JSON, so counting brackets finds
    their end.

    Attributes:
        is_whole: whether the arguments are complete.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_whole = False
        self._came: list[str] = []
        self._reported: int | None = None  # in pieces; None before the first report
        self._depth = 0
        self._in_text = self._escaped = False

    @property
    def arguments(self) -> str:
        """The arguments so far."""
        return "".join(self._came)

    def take(self, text: str) -> None:
        """Add text. Text after the end of the arguments is ignored. Changes the state."""
        if self.is_whole:
            return
        for place, character in enumerate(text):
            self._follow(character)
            if self.is_whole:
                text = text[: place + 1]
                break
        self._came.append(text)

    def fresh(self) -> str | None:
        """The arguments since the last call; None if nothing was added. Changes the state."""
        since, self._reported = self._reported, len(self._came)
        if since is not None and since == len(self._came):
            return None
        return "".join(self._came[since or 0 :])

    def _follow(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_text:
            self._escaped = character == "\\"
            self._in_text = character != '"'
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_whole = self._depth == 0


#: How a call begins after its marker, in the only format that calls are constrained to.
_NAME = re.compile(r'\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (?=\{)')


def _named(words: str) -> _Named | None:
    """The call that the words begin; None if its function is not named yet."""
    found = _NAME.match(words)
    if found is None:
        return None
    named = _Named(json.loads(found[1]))
    named.take(words[found.end() :])
    return named


def _first(text: str, edges: Sequence[Edge]) -> tuple[int, Edge] | None:
    """
    The marker that ends first, and of several that end there the longest. This is the marker that
    would be found if the text came one character at a time.
    """
    found = [
        (place + len(edge.marker), place, edge)
        for edge in edges
        if (place := text.find(edge.marker)) >= 0
    ]
    if not found:
        return None
    _, place, edge = min(found, key=lambda one: one[:2])
    return place, edge
