"""
Answers as a client sees them, and the differences between them. Pure functions of bytes.

A body may be anything at all. What cannot be read is None, which means "not reported", or a fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from cairn.ops.common.http_client import DONE, EventReader

_SHOWN_CHARACTERS = 120


@attrs.frozen
class Token:
    """
    A token of an answer, as far as the server reports it.

    Attributes:
        identity: its id, text and bytes, each None if it is not reported.
        logprob: as written in the answer; None if it is not reported.
    """

    identity: tuple[Any, Any, Any]
    logprob: float | None

    @property
    def name(self) -> str:
        """Its name in messages: its text, else its id."""
        number, text, _ = self.identity
        return repr(text) if text is not None else f"id {number}"


@attrs.frozen(kw_only=True)
class Answer:
    """
    The result of a request.

    Attributes:
        status: the HTTP status; 0 without a response.
        fault: why this is no complete answer, in words; empty if it is one, or a refusal.
        hung: whether the fault is that it did not end in time.
        tokens: None if log-probabilities are not reported.
        enveloped: whether an error is OpenAI's ``{"error": {"message": ...}}``.
        streamed: whether it came as events.
        done: whether the stream came to its own end.
        path: what the server reports about its use of the cached prompt; None if it reports
            nothing. Cairn reports it in fields of its own.
        began_s: on the client's clock, as are the next two.
        first_s: when the first text came; None if there was none, or no stream.
    """

    status: int
    fault: str = ""
    hung: bool = False
    text: str = ""
    reasoning: str = ""
    tokens: tuple[Token, ...] | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    enveloped: bool = False
    streamed: bool = False
    done: bool = False
    path: str | None = None
    began_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether it is a complete answer."""
        return self.status == 200 and not self.fault

    @property
    def refused(self) -> bool:
        """Whether the server says that the request is at fault."""
        return 400 <= self.status < 500 and not self.fault

    @property
    def empty(self) -> bool:
        """Whether it is empty, so that there is nothing to compare."""
        return not (self.text or self.reasoning or self.tokens)

    @property
    def outcome(self) -> str:
        """The result in words, if it is not an answer."""
        error = f": {shown(self.error)}" if self.error else ""
        return self.fault or f"status {self.status}{error}"


def whole(status: int, body: bytes) -> Answer:
    """A response without streaming."""
    value = _json(body)
    if status != 200:
        message, enveloped = _error(value)
        return Answer(
            status=status, error=message or body.decode(errors="replace"), enveloped=enveloped
        )
    choice = _first(_get(value, "choices"))
    message = _get(choice, "message")
    if not isinstance(message, Mapping):
        start = shown(body.decode(errors="replace"))
        return Answer(status=status, fault=f"a body that is not a completion: {start}")
    return Answer(
        status=status,
        text=_text(message, "content"),
        reasoning=_text(message, "reasoning_content") or _text(message, "reasoning"),
        tokens=_tokens(choice),
        finish_reason=_string(_get(choice, "finish_reason")),
        path=_path(value),
        **_usage(_get(value, "usage")),
    )


class Streamed:
    """
    A response of server-sent events, assembled as it comes.

    Attributes:
        done: whether it came to its own end.
        pieces: how many events have contained a part of the answer.
        comment: the last comment, by which a server shows that it is working.
    """

    def __init__(self) -> None:
        self._events = EventReader()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tokens: list[Token] | None = None
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._path: str | None = None
        self._fault = ""
        self._error = ""
        self.done = False
        self.pieces = 0
        self.comment = ""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        for event in self._events.feed(data):
            if event.data is None:
                self.comment = event.comment
            else:
                self._take(event.data)

    def answer(self, fault: str = "") -> Answer:
        """
        The result so far.

        Args:
            fault: why nothing more came, unless the stream ended by itself.
        """
        tokens = None if self._tokens is None else tuple(self._tokens)
        return Answer(
            status=200,
            fault=self._fault or fault,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tokens=tokens,
            finish_reason=self._finish_reason,
            error=self._error,
            streamed=True,
            done=self.done,
            path=self._path,
            **self._usage,
        )

    def _take(self, data: bytes) -> None:
        if data == DONE:
            self.done = True
            return
        value = _json(data)
        if not isinstance(value, Mapping):
            self._fault = (
                f"an event that is not a JSON object: {shown(data.decode(errors='replace'))}"
            )
            return
        if value.get("error") is not None:
            self._error, _ = _error(value)
            self._fault = f"an error in mid-stream: {shown(self._error)}"
            return
        if value.get("usage") is not None:
            self._usage = _usage(value["usage"])
        self._path = _path(value) or self._path
        choice = _first(_get(value, "choices"))
        delta = _get(choice, "delta")
        text = _text(delta, "content")
        reasoning = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        tokens = _tokens(choice)
        self._text.append(text)
        self._reasoning.append(reasoning)
        if tokens is not None:
            self._tokens = [*(self._tokens or ()), *tokens]
        if text or reasoning or tokens:
            self.pieces += 1
        self._finish_reason = _string(_get(choice, "finish_reason")) or self._finish_reason


def difference(was: Answer, now: Answer, *, logprobs: bool = True) -> str | None:
    """
    The difference between two answers that should be equal, in words; None if they are.

    Args:
        logprobs: whether log-probabilities count too, to the last reported bit.
    """
    if was.tokens is not None and now.tokens is not None:
        pairs = list(zip(was.tokens, now.tokens, strict=False))
        for place, (old, new) in enumerate(pairs, start=1):
            if old.identity != new.identity:
                return (
                    f"token {place} of {len(now.tokens)} is {_with(new)} and was {_with(old)}"
                    f"{_before(pairs[: place - 1])}"
                )
        if len(was.tokens) != len(now.tokens):
            return f"{len(now.tokens)} tokens, and it was {len(was.tokens)}"
        if logprobs and (found := _logprobs_differ(pairs)):
            return f"the same tokens, but {found}"
    for name, old_text, new_text in (
        ("text", was.text, now.text),
        ("reasoning", was.reasoning, now.reasoning),
    ):
        if old_text != new_text:
            at = _common(old_text, new_text)
            return (
                f"the {name} differs from character {at + 1}: {shown(new_text[at:], 40)}, "
                f"and it was {shown(old_text[at:], 40)}"
            )
    if was.finish_reason != now.finish_reason:
        return f"finish_reason is {now.finish_reason}, and was {was.finish_reason}"
    return None


def compared(answer: Answer) -> str:
    """What could be compared, in words."""
    if answer.tokens is None:
        length = len(answer.text) + len(answer.reasoning)
        return f"texts of {length} characters (log-probabilities: not reported)"
    return f"{len(answer.tokens)} tokens and their log-probabilities"


def count(value: int | None) -> str:
    """A number that may be missing."""
    return "not reported" if value is None else str(value)


def shown(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """A text in quotes, cut if it is long."""
    return repr(text if len(text) <= characters else f"{text[:characters]}…")


def _with(token: Token) -> str:
    return token.name if token.logprob is None else f"{token.name} ({token.logprob:.6f})"


def _before(pairs: list[tuple[Token, Token]]) -> str:
    found = _logprobs_differ(pairs)
    return f"; before it {found}" if found else ""


def _logprobs_differ(pairs: list[tuple[Token, Token]]) -> str | None:
    # Compare them as written: those are the bits that a client sees, and NaN equals itself.
    apart = [
        (place, old.logprob, new.logprob)
        for place, (old, new) in enumerate(pairs, start=1)
        if repr(old.logprob) != repr(new.logprob)
    ]
    if not apart:
        return None
    numbers = [abs(a - b) for _, a, b in apart if a is not None and b is not None]
    by = f" by at most {max(numbers):.2g}" if numbers else ""
    return (
        f"{len(apart)} of {len(pairs)} log-probabilities differ{by}, the first at token "
        f"{apart[0][0]} ({apart[0][2]}, and it was {apart[0][1]})"
    )


def _common(one: str, other: str) -> int:
    """The length of the common beginning of two texts, in characters."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


# --- reading any JSON ----------------------------------------------------------------------------


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _text(value: Any, name: str) -> str:
    return _string(_get(value, name)) or ""


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _tokens(choice: Any) -> tuple[Token, ...] | None:
    content = _get(_get(choice, "logprobs"), "content")
    if not isinstance(content, list):
        return None
    return tuple(map(_token, content))


def _token(entry: Any) -> Token:
    data = _get(entry, "bytes")
    identity = (
        _integer(_get(entry, "id")),
        _string(_get(entry, "token")),
        tuple(data) if isinstance(data, list) else None,
    )
    return Token(identity, _number(_get(entry, "logprob")))


def _usage(usage: Any) -> dict[str, Any]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    found = {name: _integer(_get(usage, name)) for name in names}
    details = _get(usage, "prompt_tokens_details")
    return {**found, "cached_tokens": _integer(_get(details, "cached_tokens"))}


def _path(value: Any) -> str | None:
    return _string(_get(_get(value, "cairn"), "path"))


def _error(value: Any) -> tuple[str, bool]:
    """The message of an error, and whether it is in OpenAI's envelope."""
    error = _get(value, "error")
    message = _string(_get(error, "message"))
    if message is not None:
        return message, True
    if error is None:
        return "", False
    return (error if isinstance(error, str) else json.dumps(error)), False
