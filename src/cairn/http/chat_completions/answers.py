"""
OpenAI's chat completions, from replies to the wire. ``request.py`` is the way in.

``ChatAnswer`` builds a whole answer and ``ChatStream`` a streamed one from the same replies. Both
take each reply once and in order.

To add a field: declare it in ``objects.py`` (in ``ChatChunk`` too if it is streamed), set it here,
and describe it in docs/reference/chat-completions.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from cairn.actors.requests.messages import (
    Accepted,
    Delta,
    Finished,
    Reply,
    TokenInfo,
    Waiting,
)
from cairn.engine.answer.parts import AnswerPart, Called, Calling, Said, Thought
from cairn.http.chat_completions.choices import (
    LOGPROB_MIN,
    Choice,
    StreamedChoices,
    WholeChoices,
)
from cairn.http.chat_completions.objects import (
    Alternative,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    FunctionCall,
    FunctionDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from cairn.http.chat_completions.request import ChatRequest

_PREFIX = "chatcmpl-"


class ChatAnswer(WholeChoices):
    """Builds an answer that is sent as a whole."""

    _prefix, _whole = _PREFIX, ChatCompletion

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=_message(choice.parts),
            logprobs=_logprobs(choice.tokens) if self._logprobs else None,
            finish_reason=_finish_reason(choice.end(), choice.has_calls),
        )


class ChatStream(StreamedChoices):
    """Builds an answer that is sent as server-sent events. ``done`` gives the last one."""

    _prefix, _chunk = _PREFIX, ChatChunk

    def __init__(self, read: ChatRequest) -> None:
        super().__init__(read)
        self._with_calls: set[int] = set()
        # By choice, of the call that is open: how many characters of its arguments were sent.
        self._sent: dict[int, int] = {}

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""
        self._add(reply, keep=False)
        match reply:
            case Waiting():
                return self._comment(reply)
            case Accepted():
                delta = ChatDelta(role="assistant", content="")
                return self._piece(reply.choice, delta, accepted=reply)
            case Delta():
                return self._delta(reply)
            case Finished():
                reason = _finish_reason(reply, reply.choice in self._with_calls)
                return self._piece(reply.choice, ChatDelta(), finish_reason=reason)

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
            # The text of these tokens is still held back: it may be part of a stop text, of a
            # character or of a marker.
            deltas = [ChatDelta(content="")]
        tokens = [reply.tokens] + [()] * len(deltas)
        return b"".join(
            self._piece(reply.choice, delta, tokens=known)
            for delta, known in zip(deltas, tokens, strict=False)
        )

    def _calling(self, choice: int, calling: Calling) -> list[ChatDelta]:
        """More of a call. Changes how much of it was sent."""
        sent = self._sent.get(choice)
        self._sent[choice] = (sent or 0) + len(calling.arguments)
        return _call_deltas(calling, calling.arguments, begins=sent is None)

    def _piece(
        self,
        index: int,
        delta: ChatDelta,
        *,
        tokens: tuple[TokenInfo, ...] = (),
        finish_reason: ChatFinishReason | None = None,
        accepted: Accepted | None = None,
    ) -> bytes:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=_logprobs(tokens) if self._logprobs and tokens else None,
            finish_reason=finish_reason,
        )
        return self._event(choice, accepted, ends=finish_reason is not None)


def _message(parts: list[AnswerPart]) -> AssistantMessage:
    said = "".join(part.text for part in parts if isinstance(part, Said))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    calls = [part for part in parts if isinstance(part, Called)]
    return AssistantMessage(
        content=None if calls and not said else said,
        reasoning_content=thought or UNSET,
        reasoning=thought or UNSET,
        tool_calls=[
            ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in calls
        ]
        or UNSET,
    )


def _deltas(part: AnswerPart, sent: int | None) -> list[ChatDelta]:
    """
    Args:
        sent: for a call, how many characters of its arguments were sent; None if not even its name.
    """
    match part:
        case Said():
            return [ChatDelta(content=part.text)]
        case Thought():
            return [ChatDelta(reasoning_content=part.text, reasoning=part.text)]
        case Called():
            return _call_deltas(part, part.arguments[sent or 0 :], begins=sent is None)


def _call_deltas(call: Called | Calling, arguments: str, *, begins: bool) -> list[ChatDelta]:
    # Clients take the id and the name from the first piece of a call, and add up the arguments.
    pieces = []
    if begins:
        function = FunctionDelta(name=call.name)
        pieces.append(
            ToolCallDelta(index=call.index, id=call.id, type="function", function=function)
        )
    if arguments:
        pieces.append(ToolCallDelta(index=call.index, function=FunctionDelta(arguments=arguments)))
    return [ChatDelta(tool_calls=[piece]) for piece in pieces]


def _finish_reason(finished: Finished, has_calls: bool) -> ChatFinishReason:
    # An answer that was cut off after a complete call is still cut off, and an answer that ends
    # inside a call contains only half of what to do.
    if finished.is_cut:
        return "length"
    return "tool_calls" if has_calls and not finished.ended_in_call else "stop"


def _logprobs(tokens: Sequence[TokenInfo]) -> ChatLogprobs:
    content = [
        TokenLogprob(
            token=token.text,
            bytes=_bytes(token.raw),
            logprob=max(token.logprob, LOGPROB_MIN),
            top_logprobs=[
                Alternative(token=text, bytes=_bytes(raw), logprob=max(value, LOGPROB_MIN))
                for _, text, raw, value in token.top
            ],
        )
        for token in tokens
    ]
    return ChatLogprobs(content=content)


def _bytes(raw: bytes | None) -> list[int] | None:
    return None if raw is None else list(raw)
