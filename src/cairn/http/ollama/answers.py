"""
Ollama's chat and generate, from replies to the wire. ``request.py`` is the way in.

An answer is one object, or a stream of lines of which the last one says how it ended. A call is a
line of its own once it is complete. One that was cut off is left out, because its arguments are not
JSON; the answer's end says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from cairn.actors.requests.messages import Accepted, Finished, Reply
from cairn.engine.answer.parts import AnswerPart, Called, Calling, Said, Thought
from cairn.http.ollama.errors import ollama_error
from cairn.http.ollama.models import at
from cairn.http.ollama.objects import (
    OllamaCall,
    OllamaChat,
    OllamaFunction,
    OllamaMessage,
    OllamaText,
    Piece,
)
from cairn.http.wire.answers import StreamedAnswer, WholeAnswer, accepted_headers, cairn_object
from cairn.http.wire.json import encode

LINES = "application/x-ndjson"
"""The content type of a stream."""


class ChatAnswer(WholeAnswer):
    """Builds an answer to a conversation that is sent as a whole."""

    def body(self) -> OllamaChat:
        """
        The whole answer.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        ends = self._ends()
        return chat_piece(self._parts, **ended(*ends, self._ignored))


class TextAnswer(WholeAnswer):
    """Builds an answer to a prompt that is sent as a whole."""

    def body(self) -> OllamaText:
        """As that of ``ChatAnswer``."""
        ends = self._ends()
        return text_piece(self._parts, **ended(*ends, self._ignored))


class _Stream(StreamedAnswer):
    """Builds an answer that is sent as lines. ``done`` gives the last one."""

    def headers(self, first: Reply) -> dict[str, str]:
        """The response headers that describe the request, by its first reply."""
        return {"content-type": LINES, **accepted_headers(first)}

    def failed(self, error: Exception) -> bytes:
        """The end of a stream that broke off, so that the client sees it is incomplete."""
        return _line(ollama_error(error).envelope())

    def _keep_alive(self) -> bytes:
        # Before there is a model to name, white space at the beginning of the first line.
        return b" " if self._accepted is None else self._more(())

    def _start(self, accepted: Accepted) -> bytes:
        return b""

    def _part(self, part: AnswerPart) -> bytes:
        is_cut = isinstance(part, Called) and part.cut is not None
        return b"" if is_cut else self._more((part,))

    def _calling(self, calling: Calling) -> bytes:
        return b""

    def _finish(self, finished: Finished) -> bytes:
        return b""

    def _end(self, finished: Finished) -> bytes:
        assert self._accepted is not None
        return _line(self._piece((), **ended(self._accepted, finished, self._ignored)))

    def _more(self, parts: Sequence[AnswerPart]) -> bytes:
        assert self._accepted is not None
        return _line(self._piece(parts, **_begun(self._accepted), done=False))

    @abstractmethod
    def _piece(self, parts: Sequence[AnswerPart], **fields: Any) -> Piece: ...


class ChatStream(_Stream):
    """Builds a streamed answer to a conversation."""

    def _piece(self, parts: Sequence[AnswerPart], **fields: Any) -> OllamaChat:
        return chat_piece(parts, **fields)


class TextStream(_Stream):
    """Builds a streamed answer to a prompt."""

    def _piece(self, parts: Sequence[AnswerPart], **fields: Any) -> OllamaText:
        return text_piece(parts, **fields)


def chat_piece(parts: Sequence[AnswerPart], **fields: Any) -> OllamaChat:
    """An answer to a conversation, or a line of it."""
    calls = [
        OllamaCall(
            id=part.id,
            function=OllamaFunction(
                index=part.index,
                name=part.name,
                arguments=msgspec.Raw(part.arguments.encode()),
            ),
        )
        for part in parts
        if isinstance(part, Called) and part.cut is None
    ]
    message = OllamaMessage(
        content=_said(parts), thinking=_thought(parts) or UNSET, tool_calls=calls or UNSET
    )
    return OllamaChat(message=message, **fields)


def text_piece(parts: Sequence[AnswerPart], **fields: Any) -> OllamaText:
    """An answer to a prompt, or a line of it."""
    return OllamaText(response=_said(parts), thinking=_thought(parts) or UNSET, **fields)


def ended(accepted: Accepted, finished: Finished, ignored: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a complete answer, without its text."""
    fields: dict[str, Any] = {
        **_begun(accepted),
        "done": True,
        "done_reason": "length" if finished.is_cut else "stop",
        "prompt_eval_count": finished.prompt_tokens,
        "eval_count": finished.completion_tokens,
        "cairn": cairn_object(accepted, ignored),
    }
    if (turn := finished.turn) is not None:
        first_us = turn.first_us or turn.ended_us
        fields |= {
            "total_duration": _nanoseconds(turn.received_us, turn.ended_us),
            # Neither the queue nor the loading of a model is a part of the total.
            "load_duration": 0,
            "prompt_eval_duration": _nanoseconds(turn.received_us, first_us),
            "eval_duration": _nanoseconds(first_us, turn.ended_us),
        }
    return fields


def _begun(accepted: Accepted) -> dict[str, Any]:
    return {"model": accepted.model, "created_at": at(accepted.created_s)}


def _nanoseconds(first_us: int, last_us: int) -> int:
    # The clock may have been set back.
    return max(0, last_us - first_us) * 1000


def _said(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Said))


def _thought(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thought))


def _line(value: msgspec.Struct) -> bytes:
    return encode(value) + b"\n"
