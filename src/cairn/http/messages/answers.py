"""
Anthropic's messages, from replies to the wire. ``request.py`` is the way in.

``MessagesAnswer`` builds a whole answer and ``MessagesStream`` a streamed one, from the same
replies. Both take each reply once and in order. Text, reasoning and each call are blocks, in the
order in which the model wrote them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from cairn.actors.requests.messages import Accepted, Finished, Reply
from cairn.engine.answer.parts import AnswerPart, Called, Calling, Said, Thought
from cairn.engine.prompt.turns import joined
from cairn.http.messages.errors import messages_error, named_header
from cairn.http.messages.objects import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    MessageDelta,
    MessageObject,
    MessageStart,
    MessageStop,
    MessagesUsage,
    Ping,
    SignatureDelta,
    Stop,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from cairn.http.wire.answers import (
    StreamedAnswer,
    WholeAnswer,
    accepted_headers,
    cairn_object,
    named_event,
)
from cairn.http.wire.parameters import ReadRequest

#: Claude Code drops a stream after five minutes without an event other than a ping, and reads this
#: one without effect. Other clients end an answer at any such event.
_RESTLESS: Final = "claude-cli"
_PINGS_BETWEEN: Final = 3

#: Clients send back reasoning only if it has a signature.
SIGNATURE = "unsigned"


class MessagesAnswer(WholeAnswer):
    """Builds an answer that is sent as a whole."""

    def __init__(self, read: ReadRequest) -> None:
        super().__init__(read)
        self._max_tokens = read.command.max_tokens

    def headers(self) -> dict[str, str]:
        """The response headers that describe the request."""
        return _headers(self._accepted)

    def body(self) -> MessageObject:
        """
        The whole answer.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        accepted, finished = self._ends()
        has_calls = any(isinstance(part, Called) for part in self._parts)
        message = _empty_message(accepted, self._ignored)
        message.content = [_block(part) for part in joined(self._parts)]
        message.stop_reason = _stop_reason(finished, has_calls, self._max_tokens)
        message.stop_sequence = finished.stop_text
        message.usage = _usage(finished)
        return message


class MessagesStream(StreamedAnswer):
    """Builds an answer that is sent as server-sent events. ``done`` gives the last one."""

    def __init__(self, read: ReadRequest) -> None:
        super().__init__(read)
        self._max_tokens = read.command.max_tokens
        self._is_restless = read.command.client == _RESTLESS
        self._pings = 0
        # The kind of the block that is open, and how many blocks there were before it.
        self._open: type[AnswerPart] | None = None
        self._blocks = 0
        # How many characters were sent of the input of a call that is still being written.
        self._sent: int | None = None
        self._has_calls = False

    def headers(self, first: Reply) -> dict[str, str]:
        """The response headers that describe the request, by its first reply."""
        return _headers(first)

    def failed(self, error: Exception) -> bytes:
        """The end of a stream that broke off, so that the client sees it is incomplete."""
        known = self._accepted.request if self._accepted is not None else None
        return event(messages_error(error, known).envelope())

    def _keep_alive(self) -> bytes:
        self._pings += 1
        if self._accepted is None or not self._is_restless or self._pings % _PINGS_BETWEEN:
            return event(Ping())
        going_on = Stop(stop_reason=None, stop_sequence=None)
        return event(Ping()) + event(MessageDelta(delta=going_on, usage=_begun(self._accepted)))

    def _start(self, accepted: Accepted) -> bytes:
        return event(MessageStart(_empty_message(accepted, self._ignored)))

    def _finish(self, finished: Finished) -> bytes:
        stop = Stop(
            stop_reason=_stop_reason(finished, self._has_calls, self._max_tokens),
            stop_sequence=finished.stop_text,
        )
        return self._close() + event(MessageDelta(delta=stop, usage=_usage(finished)))

    def _end(self, finished: Finished) -> bytes:
        return event(MessageStop())

    def _part(self, part: AnswerPart) -> bytes:
        sent, self._sent = self._sent, None
        goes_on = self._open is type(part) and (sent is not None or not isinstance(part, Called))
        begins = b"" if goes_on else self._close() + self._begin(part)
        match part:
            case Said():
                return begins + self._delta(TextDelta(part.text))
            case Thought():
                return begins + self._delta(ThinkingDelta(part.text))
            case Called():
                self._has_calls = True
                return begins + self._input(part.arguments[sent or 0 :])

    def _calling(self, calling: Calling) -> bytes:
        """More of a call. Changes how much of it was sent."""
        begins = b""
        if self._sent is None:
            self._has_calls = True
            begins, self._sent = self._close() + self._begin(calling), 0
        self._sent += len(calling.arguments)
        return begins + self._input(calling.arguments)

    def _begin(self, part: AnswerPart | Calling) -> bytes:
        block: Block
        match part:
            case Said():
                block = TextBlock("")
            case Thought():
                block = ThinkingBlock(thinking="", signature="")
            case Called() | Calling():
                block = ToolUseBlock(id=part.id, name=part.name, input={})
        self._open = Called if isinstance(part, Calling) else type(part)
        return event(BlockStart(index=self._blocks, content_block=block))

    def _input(self, piece: str) -> bytes:
        return self._delta(InputDelta(piece)) if piece else b""

    def _delta(self, delta: TextDelta | ThinkingDelta | InputDelta | SignatureDelta) -> bytes:
        return event(BlockDelta(index=self._blocks, delta=delta))

    def _close(self) -> bytes:
        """Close the block that is open, if any. Changes the state."""
        if self._open is None:
            return b""
        signed = self._delta(SignatureDelta(SIGNATURE)) if self._open is Thought else b""
        stop = event(BlockStop(self._blocks))
        self._open = None
        self._blocks += 1
        return signed + stop


def event(value: Event) -> bytes:
    """A server-sent event, named by its type."""
    return named_event(str(value.__struct_config__.tag), value)


def _headers(accepted: Reply | None) -> dict[str, str]:
    if not isinstance(accepted, Accepted):
        return {}
    return {**accepted_headers(accepted), **named_header(accepted.request)}


def _empty_message(accepted: Accepted, ignored: tuple[str, ...]) -> MessageObject:
    return MessageObject(
        id=f"msg_{accepted.request}",
        model=accepted.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=_begun(accepted),
        cairn=cairn_object(accepted, ignored),
    )


def _block(part: AnswerPart) -> Block:
    match part:
        case Said():
            return TextBlock(part.text)
        case Thought():
            return ThinkingBlock(thinking=part.text, signature=SIGNATURE)
        case Called():
            # The arguments of a call that was cut off are not valid JSON.
            arguments = msgspec.Raw(b"{}" if part.cut is not None else part.arguments.encode())
            return ToolUseBlock(id=part.id, name=part.name, input=arguments)


def _stop_reason(finished: Finished, has_calls: bool, max_tokens: int | None) -> StopReason:
    if finished.is_cut:
        # The protocol has no reason for a repetition.
        is_short = max_tokens is not None and finished.completion_tokens < max_tokens
        is_full = is_short and finished.finish_reason == "length"
        return "model_context_window_exceeded" if is_full else "max_tokens"
    # An answer that ends inside a call contains only half of what to do.
    if has_calls and not finished.ended_in_call:
        return "tool_use"
    return "end_turn" if finished.stop_text is None else "stop_sequence"


def _begun(accepted: Accepted) -> MessagesUsage:
    """The token counts before the answer."""
    # How much of the prompt becomes blocks is known only once it was prefilled.
    return _tokens(accepted.prompt_tokens, accepted.cached_tokens, sealed=0, answer=0)


def _usage(finished: Finished) -> MessagesUsage:
    return _tokens(
        finished.prompt_tokens,
        finished.cached_tokens,
        sealed=finished.sealed_tokens,
        answer=finished.completion_tokens,
    )


def _tokens(prompt: int, cached: int, *, sealed: int, answer: int) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=prompt - cached - sealed,
        cache_creation_input_tokens=sealed,
        cache_read_input_tokens=cached,
        output_tokens=answer,
    )
