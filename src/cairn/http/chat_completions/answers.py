"""
OpenAI's chat completions: from replies to the wire. The way there is ``openai.py``.

An answer as a whole and an answer as a stream are built from the same replies by ``Completion``
and ``Chunks``; both take each reply once and in order.

Thoughts go under both names that are in use, ``reasoning_content`` and ``reasoning``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from cairn.actors.requests.messages import Accepted, Delta, Finished, Reply, TokenInfo, Waiting
from cairn.engine.answer.parts import AnswerPart, Called, Calling, Said, Thought
from cairn.http.chat_completions.choices import LOGPROB_MIN, Choice, Choices, StreamedChoices
from cairn.http.wire.errors import FormatPlaces


class Completion:
    """An answer that is sent as a whole."""

    def __init__(
        self,
        *,
        logprobs: bool,
        choices: int = 1,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self._ignored = ignored
        self._logprobs = logprobs
        self._choices = Choices(choices)

    def take(self, reply: Reply) -> None:
        """Add a reply."""
        self._choices.take(reply)

    def headers(self) -> dict[str, str]:
        """What is known of the request, for the response's headers."""
        return self._choices.headers()

    def body(self) -> dict[str, Any]:
        """
        The ``chat.completion`` object.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        usage = self._choices.usage()
        return {
            **_head("chat.completion", self._choices.accepted()),
            "choices": [self._choice(*found) for found in enumerate(self._choices.all)],
            "usage": usage,
            "cairn": self._choices.cairn(self._ignored),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(choice.parts),
            "logprobs": _logprobs(choice.tokens) if self._logprobs else None,
            "finish_reason": _finish_reason(choice.end(), choice.has_calls),
        }


class Chunks(StreamedChoices):
    """An answer that is sent as server-sent events. The last one is sent by ``done``."""

    def __init__(
        self,
        *,
        logprobs: bool,
        include_usage: bool,
        choices: int = 1,
        ignored: tuple[str, ...] = (),
    ) -> None:
        head = partial(_head, "chat.completion.chunk")
        super().__init__(
            choices,
            head,
            include_usage=include_usage,
            ignored=ignored,
            places=FormatPlaces(),
        )
        self._logprobs = logprobs
        self._with_calls: set[int] = set()
        # Of the call that is open, by the answer: how many characters of its arguments were sent.
        self._sent: dict[int, int] = {}

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""
        self._choices.take(reply, keep=False)
        match reply:
            case Waiting():
                return self._choices.comment(reply)
            case Accepted():
                said = {"role": "assistant", "content": ""}
                return self._chunk(reply.choice, said, cairn=self._told(reply))
            case Delta():
                return self._delta(reply)
            case Finished():
                reason = _finish_reason(reply, reply.choice in self._with_calls)
                return self._ended(self._chunk(reply.choice, {}, finish_reason=reason))

    def _delta(self, reply: Delta) -> bytes:
        if any(isinstance(part, Called) for part in reply.parts):
            self._with_calls.add(reply.choice)
        deltas = [
            delta
            for part in reply.parts
            for delta in _deltas(part, self._sent.pop(reply.choice, None))
        ]
        if reply.calling is not None:
            deltas += self._calling(reply.choice, reply.calling)
        if not deltas and self._logprobs and reply.tokens:
            # What holds their text back (a stop text, half a character, a marker) is not known yet.
            deltas = [{"content": ""}]
        tokens = [reply.tokens] + [()] * len(deltas)
        return b"".join(
            self._chunk(reply.choice, delta, tokens=known)
            for delta, known in zip(deltas, tokens, strict=False)
        )

    def _calling(self, choice: int, calling: Calling) -> list[dict[str, Any]]:
        """More of a call. Changes what was sent of it."""
        sent = self._sent.get(choice)
        self._sent[choice] = (sent or 0) + len(calling.arguments)
        return _call_deltas(calling, calling.arguments, begins=sent is None)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        tokens: tuple[TokenInfo, ...] = (),
        finish_reason: str | None = None,
        cairn: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(tokens) if self._logprobs and tokens else None,
            "finish_reason": finish_reason,
        }
        return self._event(choice, cairn)


def _head(kind: str, accepted: Accepted) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{accepted.request}",
        "object": kind,
        "created": accepted.created_s,
        "model": accepted.model,
        "system_fingerprint": accepted.fingerprint,
    }


def _message(parts: list[AnswerPart]) -> dict[str, Any]:
    said = "".join(part.text for part in parts if isinstance(part, Said))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    calls = [part for part in parts if isinstance(part, Called)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not said else said,
        "refusal": None,
    }
    if thought:
        message |= _reasoning(thought)
    if calls:
        message["tool_calls"] = [_call(call, call.arguments) for call in calls]
    return message


def _deltas(part: AnswerPart, sent: int | None) -> list[dict[str, Any]]:
    """
    Args:
        sent: of a call, the characters of its arguments that were sent; None for not even its name.
    """
    match part:
        case Said():
            return [{"content": part.text}]
        case Thought():
            return [_reasoning(part.text)]
        case Called():
            return _call_deltas(part, part.arguments[sent or 0 :], begins=sent is None)


def _call_deltas(call: Called | Calling, arguments: str, *, begins: bool) -> list[dict[str, Any]]:
    """Clients take id and name from the first piece of a call, and add up arguments."""
    head = {"index": call.index, **_call(call, "")}
    rest = {"index": call.index, "function": {"arguments": arguments}}
    pieces = ([head] if begins else []) + ([rest] if arguments else [])
    return [{"tool_calls": [piece]} for piece in pieces]


def _call(call: Called | Calling, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text}


def _finish_reason(finished: Finished, has_calls: bool) -> str:
    # An answer that was cut off behind a call was cut off all the same; and one in the midst of a
    # call says only half of what shall be done.
    is_call = has_calls and finished.finish_reason == "stop" and not finished.ended_in_call
    return "tool_calls" if is_call else finished.finish_reason


def _logprobs(tokens: list[TokenInfo] | tuple[TokenInfo, ...]) -> dict[str, Any]:
    content = [
        {
            **_token(token.text, token.raw, token.logprob),
            "top_logprobs": [_token(text, raw, value) for _, text, raw, value in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, raw: bytes | None, logprob: float) -> dict[str, Any]:
    known = None if raw is None else list(raw)
    return {"token": text, "bytes": known, "logprob": max(logprob, LOGPROB_MIN)}
