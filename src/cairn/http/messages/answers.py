"""
Anthropic's messages: from replies to the wire. The way there is ``anthropic.py``.

An answer as a whole and an answer as a stream are built from the same replies by ``Completion`` and
``Chunks``; both take each reply once and in order. What is said, what is thought and each call are
blocks, in the order in which the model wrote them.

A thought has a ``signature``, since clients send back no other. It signs nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cairn.actors.requests.messages import Accepted, Delta, Finished, Reply, Waiting
from cairn.engine.answer.parts import AnswerPart, Called, Calling, Said, Thought
from cairn.engine.prompt.turns import joined
from cairn.http.messages.errors import messages_error, named_header
from cairn.http.wire.answers import UnfinishedAnswer, WholeAnswer, accepted_headers, cairn_object
from cairn.http.wire.json import encode

SIGNATURE = "unsigned"

_StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class Completion(WholeAnswer):
    """An answer that is sent as a whole."""

    def __init__(self, *, max_tokens: int | None, ignored: tuple[str, ...] = ()) -> None:
        """
        Args:
            max_tokens: the longest answer that the client wanted.
            ignored: what it sent and is not acted on.
        """
        super().__init__()
        self._max_tokens = max_tokens
        self._ignored = ignored

    def headers(self) -> dict[str, str]:
        """What is known of the request, for the response's headers."""
        return _headers(self._accepted)

    def body(self) -> dict[str, Any]:
        """
        The ``message`` object.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        accepted, finished = self._ends()
        has_calls = any(isinstance(part, Called) for part in self._parts)
        return {
            **_head(accepted),
            "content": [_block(part) for part in joined(self._parts)],
            **_stop(finished, has_calls, self._max_tokens),
            "usage": _usage(finished),
            "cairn": cairn_object(accepted, self._ignored),
        }


class Chunks:
    """An answer that is sent as server-sent events. The last one is sent by ``done``."""

    def __init__(self, *, max_tokens: int | None, ignored: tuple[str, ...] = ()) -> None:
        """Args: see ``Completion``."""
        self._max_tokens = max_tokens
        self._ignored = ignored
        self._accepted: Accepted | None = None
        # The block that is open, by its kind; and how many there were before it.
        self._open: type[AnswerPart] | None = None
        self._blocks = 0
        # Of the call that still grows, how many characters of its input were sent.
        self._sent: int | None = None
        self._has_calls = False
        self._is_finished = False

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""
        if self._accepted is None and isinstance(reply, Delta | Finished):
            raise UnfinishedAnswer("the replies began without being accepted")
        match reply:
            case Waiting():
                return event({"type": "ping"})
            case Accepted():
                self._accepted = reply
                return event({"type": "message_start", "message": self._start(reply)})
            case Delta():
                told = b"".join(map(self._part, reply.parts))
                return told if reply.calling is None else told + self._calling(reply.calling)
            case Finished():
                self._is_finished = True
                end = {
                    "type": "message_delta",
                    "delta": _stop(reply, self._has_calls, self._max_tokens),
                    "usage": _usage(reply),
                }
                return self._close() + event(end)

    def headers(self, first: Reply) -> dict[str, str]:
        """What is known of the request with its first reply, for the response's headers."""
        return _headers(first)

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: it is not complete.
        """
        if not self._is_finished:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return event({"type": "message_stop"})

    def failed(self, error: Exception) -> bytes:
        """
        The end of a stream that broke off. Without it the client would take the rest for complete.
        """
        known = self._accepted.request if self._accepted is not None else None
        return event(messages_error(error, known).envelope())

    def _start(self, accepted: Accepted) -> dict[str, Any]:
        # What of the prompt becomes blocks is known once it is read: the end has it.
        usage = _tokens(accepted.prompt_tokens, accepted.cached_tokens, sealed=0, answer=0)
        return {
            **_head(accepted),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            "cairn": cairn_object(accepted, self._ignored),
        }

    def _part(self, part: AnswerPart) -> bytes:
        sent, self._sent = self._sent, None
        goes_on = self._open is type(part) and (sent is not None or not isinstance(part, Called))
        begins = b"" if goes_on else self._close() + self._begin(part)
        match part:
            case Said():
                delta = {"type": "text_delta", "text": part.text}
            case Thought():
                delta = {"type": "thinking_delta", "thinking": part.text}
            case Called():
                self._has_calls = True
                rest = part.arguments[sent or 0 :]
                if not rest:
                    return begins
                delta = {"type": "input_json_delta", "partial_json": rest}
        return begins + self._delta(delta)

    def _calling(self, calling: Calling) -> bytes:
        """More of a call. Changes what was sent of it."""
        begins = b""
        if self._sent is None:
            self._has_calls = True
            begins, self._sent = self._close() + self._begin(calling), 0
        self._sent += len(calling.arguments)
        if not calling.arguments:
            return begins
        delta = {"type": "input_json_delta", "partial_json": calling.arguments}
        return begins + self._delta(delta)

    def _begin(self, part: AnswerPart | Calling) -> bytes:
        self._open = Called if isinstance(part, Calling) else type(part)
        block = _EMPTY[self._open]
        if isinstance(part, Called | Calling):
            block = {**block, "id": part.id, "name": part.name}
        start = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        return event(start)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        """Close the block that is open, if one is. Changes the state."""
        if self._open is None:
            return b""
        signed = b""
        if self._open is Thought:
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        stop = event({"type": "content_block_stop", "index": self._blocks})
        self._open = None
        self._blocks += 1
        return signed + stop


_EMPTY: dict[type[AnswerPart], dict[str, Any]] = {
    Said: {"type": "text", "text": ""},
    Thought: {"type": "thinking", "thinking": "", "signature": ""},
    Called: {"type": "tool_use", "input": {}},
}


def event(value: dict[str, Any]) -> bytes:
    """A value as a server-sent event of its own type."""
    return b"event: %s\ndata: %s\n\n" % (value["type"].encode(), encode(value))


def counted(tokens: int) -> dict[str, int]:
    """The tokens of a prompt, as the address that counts them has it."""
    return {"input_tokens": tokens}


def _headers(accepted: Reply | None) -> dict[str, str]:
    if not isinstance(accepted, Accepted):
        return {}
    return {**accepted_headers(accepted), **named_header(accepted.request)}


def _head(accepted: Accepted) -> dict[str, Any]:
    return {
        "id": f"msg_{accepted.request}",
        "type": "message",
        "role": "assistant",
        "model": accepted.model,
    }


def _block(part: AnswerPart) -> dict[str, Any]:
    match part:
        case Said():
            return {"type": "text", "text": part.text}
        case Thought():
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
        case Called():
            # Half an object is none.
            arguments = msgspec.Raw(b"{}" if part.cut is not None else part.arguments.encode())
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}


def _stop(finished: Finished, has_calls: bool, max_tokens: int | None) -> dict[str, Any]:
    return {
        "stop_reason": _stop_reason(finished, has_calls, max_tokens),
        "stop_sequence": finished.stop_text,
    }


def _stop_reason(finished: Finished, has_calls: bool, max_tokens: int | None) -> _StopReason:
    if finished.finish_reason == "length":
        is_full = max_tokens is not None and finished.completion_tokens < max_tokens
        return "model_context_window_exceeded" if is_full else "max_tokens"
    # An answer in the midst of a call says only half of what shall be done.
    if has_calls and not finished.ended_in_call:
        return "tool_use"
    return "end_turn" if finished.stop_text is None else "stop_sequence"


def _usage(finished: Finished) -> dict[str, int]:
    return _tokens(
        finished.prompt_tokens,
        finished.cached_tokens,
        sealed=finished.sealed_tokens,
        answer=finished.completion_tokens,
    )


def _tokens(prompt: int, cached: int, *, sealed: int, answer: int) -> dict[str, int]:
    """The usage. The three that are of the prompt add up to it."""
    return {
        "input_tokens": prompt - cached - sealed,
        "cache_creation_input_tokens": sealed,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }
