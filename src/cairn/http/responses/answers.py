"""
OpenAI's responses, from replies to the wire. ``request.py`` is the way in.

Reasoning, text and each call are items of the output, in the order in which the model wrote them.
A whole answer, a streamed one and one that is looked up later have the same items with the same
ids, because the ids follow from the request's id and the item's index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
from msgspec import UNSET

from cairn.actors.requests.messages import Accepted, Finished, StoredTurn
from cairn.engine.answer.parts import AnswerPart, Called, Calling, Said, Thought
from cairn.engine.prompt.turns import joined
from cairn.http.responses.conversation import SEALED
from cairn.http.responses.errors import PLACES
from cairn.http.responses.form import PREFIX, Form, ResponsesRequest, form_of
from cairn.http.responses.objects import (
    Event,
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    OutputDetails,
    OutputItem,
    OutputText,
    ReasoningText,
    Response,
    ResponseError,
    ResponsesUsage,
    SummaryText,
)
from cairn.http.wire.answers import StreamedAnswer, WholeAnswer, cairn_object, named_event
from cairn.http.wire.errors import describe

_KINDS = {Thought: "rs", Said: "msg", Called: "fc"}


class ResponsesAnswer(WholeAnswer):
    """Builds an answer that is sent as a whole."""

    def __init__(self, read: ResponsesRequest) -> None:
        super().__init__(read)
        self._form = read.form

    def body(self) -> Response:
        """
        The whole answer.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        accepted, finished = self._ends()
        response = _response(accepted.request, accepted.created_s, self._form)
        response.output = output_items(self._parts, accepted.request, self._form, finished)
        response.cairn = cairn_object(accepted, self._ignored)
        return _ended(response, finished)


class ResponsesStream(StreamedAnswer):
    """Builds an answer that is sent as server-sent events. ``done`` gives the last one."""

    def __init__(self, read: ResponsesRequest) -> None:
        super().__init__(read)
        self._form = read.form
        self._response: Response | None = None
        self._events = 0
        # The item that is being written, as far as it has come.
        self._open: AnswerPart | None = None
        # How many characters of its arguments were sent, if it is a call that comes in pieces.
        self._argued: int | None = None

    def failed(self, error: Exception) -> bytes:
        """The end of a stream that broke off, so that the client sees it is incomplete."""
        answer = describe(error, PLACES)
        if self._response is None:
            return self._event(
                "error", code=answer.code, message=answer.message, param=answer.param
            )
        self._response.status = "failed"
        self._response.error = ResponseError(code=answer.code, message=answer.message)
        return self._state("failed")

    def _keep_alive(self) -> bytes:
        # A client that watches for events rather than bytes does not notice a comment.
        return b": waiting\n\n" if self._response is None else self._state("in_progress")

    def _start(self, accepted: Accepted) -> bytes:
        self._response = _response(accepted.request, accepted.created_s, self._form)
        self._response.cairn = cairn_object(accepted, self._ignored)
        return self._state("created") + self._state("in_progress")

    def _finish(self, finished: Finished) -> bytes:
        return self._close(finished)

    def _end(self, finished: Finished) -> bytes:
        assert self._response is not None
        return self._state(_ended(self._response, finished).status)

    def _state(self, name: str) -> bytes:
        """An event with the response as it is now."""
        assert self._response is not None
        return self._event(f"response.{name}", response=self._response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = Event(type=kind, sequence_number=self._events, **fields)
        self._events += 1
        return named_event(kind, event)

    def _part(self, part: AnswerPart) -> bytes:
        begins = b""
        sent, self._argued = self._argued, None
        goes_on = type(self._open) is type(part) and (
            sent is not None or not isinstance(part, Called)
        )
        if not goes_on:
            begins = self._close() + self._begin(part)
        match self._open, part:
            case (Said(before), Said(text)) if goes_on:
                self._open = Said(before + text)
            case (Thought(before), Thought(text)) if goes_on:
                self._open = Thought(before + text)
            case _:
                self._open = part
        match part:
            case Said(text):
                fields: dict[str, Any] = {"content_index": 0, "delta": text, "logprobs": []}
                return begins + self._of_item("output_text.delta", part, **fields)
            case Thought(text):
                where, name = self._thoughts
                return begins + self._of_item(f"{name}.delta", part, **{where: 0}, delta=text)
            case Called():
                return begins + self._arguments(part, part.arguments[sent or 0 :])

    def _calling(self, calling: Calling) -> bytes:
        """More of a call. Changes how much of it was sent."""
        begins, fresh = b"", Called(**attrs.asdict(calling))
        if self._argued is None:
            begins, self._argued = self._close() + self._begin(fresh), 0
            self._open = fresh
        else:
            assert isinstance(self._open, Called)
            grown = self._open.arguments + calling.arguments
            self._open = attrs.evolve(fresh, arguments=grown)
        self._argued += len(calling.arguments)
        return begins + self._arguments(fresh, calling.arguments)

    def _arguments(self, call: Called, piece: str) -> bytes:
        if not piece:
            return b""
        return self._of_item("function_call_arguments.delta", call, delta=piece)

    @property
    def _thoughts(self) -> tuple[str, str]:
        """The name of the field with the index of a reasoning text, and of its events."""
        if self._form.summarised:
            return "summary_index", "reasoning_summary_text"
        return "content_index", "reasoning_text"

    def _begin(self, part: AnswerPart) -> bytes:
        """An item begins, and its one part with it."""
        item = _item(_emptied(part), *self._place, self._form, "in_progress")
        match part:
            case Said():
                item.content = []
            case Thought():
                item.summary, item.content, item.encrypted_content = [], [], UNSET
            case _:
                pass
        index = len(self._output)
        added = self._event("response.output_item.added", output_index=index, item=item)
        return added + self._inner("added", _emptied(part))

    def _close(self, finished: Finished | None = None) -> bytes:
        """
        Complete the item that is open, if any. Changes the state.

        Args:
            finished: the last reply, if nothing follows the item.
        """
        part, self._open = self._open, None
        if part is None:
            return b""
        match part:
            case Said(text):
                fields: dict[str, Any] = {"content_index": 0, "text": text, "logprobs": []}
                done = self._of_item("output_text.done", part, **fields)
            case Thought(text):
                where, name = self._thoughts
                done = self._of_item(f"{name}.done", part, **{where: 0}, text=text)
            case Called():
                fields = {"name": part.name, "arguments": part.arguments}
                done = self._of_item("function_call_arguments.done", part, **fields)
        done += self._inner("done", part)
        item = _item(part, *self._place, self._form, _status(part, finished))
        index = len(self._output)
        whole = self._event("response.output_item.done", output_index=index, item=item)
        self._output.append(item)
        return done + whole

    def _inner(self, step: str, part: AnswerPart) -> bytes:
        """The one part of an item begins or is complete; a call has no parts."""
        match part:
            case Said():
                inner = OutputText(text=part.text)
                return self._of_item(f"content_part.{step}", part, content_index=0, part=inner)
            case Thought():
                where, _ = self._thoughts
                name = "reasoning_summary_part" if self._form.summarised else "content_part"
                kind = SummaryText if self._form.summarised else ReasoningText
                fields: dict[str, Any] = {where: 0, "part": kind(part.text)}
                return self._of_item(f"{name}.{step}", part, **fields)
            case Called():
                return b""

    def _of_item(self, name: str, of: AnswerPart, /, **fields: Any) -> bytes:
        index = len(self._output)
        place = {"item_id": _id(of, *self._place), "output_index": index}
        return self._event(f"response.{name}", **place, **fields)

    @property
    def _output(self) -> list[OutputItem]:
        assert self._response is not None
        return self._response.output

    @property
    def _place(self) -> tuple[str, int]:
        assert self._accepted is not None
        return self._accepted.request, len(self._output)


def stored_response(turn: StoredTurn) -> Response:
    """The response of a turn that the journal keeps."""
    form = form_of(turn.note, turn.texts)
    response = _response(turn.request, turn.created_s, form)
    response.output = output_items(turn.parts, turn.request, form, turn.finished)
    return _ended(response, turn.finished)


def output_items(
    parts: Sequence[AnswerPart], request: str, form: Form, finished: Finished
) -> list[OutputItem]:
    """The items of a whole answer."""
    whole = joined(parts)
    return [
        _item(part, request, n, form, _status(part, finished if part is whole[-1] else None))
        for n, part in enumerate(whole)
    ]


def _response(request: str, created_s: int, form: Form) -> Response:
    """The response at its start, without output."""
    return Response(
        id=f"{PREFIX}{request}",
        created_at=created_s,
        model=form.model,
        output=[],
        **msgspec.structs.asdict(form.echo),
    )


def _ended(response: Response, finished: Finished) -> Response:
    """The response with its end. Changes it."""
    is_cut = finished.is_cut
    response.status = "incomplete" if is_cut else "completed"
    response.incomplete_details = IncompleteDetails("max_output_tokens") if is_cut else None
    response.usage = usage_of(finished)
    return response


def usage_of(finished: Finished) -> ResponsesUsage:
    """The token counts of a request."""
    return ResponsesUsage(
        input_tokens=finished.prompt_tokens,
        input_tokens_details=InputDetails(finished.cached_tokens),
        output_tokens=finished.completion_tokens,
        output_tokens_details=OutputDetails(),
        total_tokens=finished.prompt_tokens + finished.completion_tokens,
    )


def _status(part: AnswerPart, finished: Finished | None) -> ItemStatus:
    """
    Args:
        finished: the last reply, if the part is the last one.
    """
    if isinstance(part, Called):
        return "completed" if part.cut is None else "incomplete"
    is_cut = finished is not None and finished.is_cut
    return "incomplete" if is_cut else "completed"


def _id(part: AnswerPart, request: str, index: int) -> str:
    return f"{_KINDS[type(part)]}_{request}_{index}"


def _item(part: AnswerPart, request: str, index: int, form: Form, status: ItemStatus) -> OutputItem:
    name = _id(part, request, index)
    match part:
        case Said(text):
            content = [OutputText(text=text)]
            return OutputItem(
                id=name, status=status, type="message", role="assistant", content=[*content]
            )
        case Thought(text):
            return OutputItem(
                id=name,
                status=status,
                type="reasoning",
                summary=[SummaryText(text)] if form.summarised else [],
                content=UNSET if form.summarised else [ReasoningText(text)],
                encrypted_content=f"{SEALED}{text}" if form.sealed else UNSET,
            )
        case Called():
            return OutputItem(
                id=name,
                status=status,
                type="function_call",
                call_id=part.id,
                name=part.name,
                arguments=part.arguments,
            )


def _emptied(part: AnswerPart) -> AnswerPart:
    """The part before any of it was written."""
    match part:
        case Called():
            return attrs.evolve(part, arguments="")
        case _:
            return attrs.evolve(part, text="")
