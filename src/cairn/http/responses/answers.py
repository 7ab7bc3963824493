"""
OpenAI's responses: from replies to the wire. The way there is ``responses.py``.

What is thought, what is said and each call are items of the output, in the order in which the model
wrote them. An answer as a whole, one as a stream, and one that is looked up later have the same
items, with the same ids: they follow from the request's id and the place among the items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec

from cairn.actors.requests.messages import (
    Accepted,
    Delta,
    Finished,
    Reply,
    StoredTurn,
    Waiting,
)
from cairn.engine.answer.parts import AnswerPart, Called, Calling, Said, Thought
from cairn.engine.prompt.turns import joined
from cairn.http.responses.conversation import SEALED
from cairn.http.responses.errors import responses_error
from cairn.http.wire.answers import UnfinishedAnswer, WholeAnswer, accepted_headers, cairn_object
from cairn.http.wire.json import encode

PREFIX = "resp_"

#: In characters. To refer to a text takes about as much as to repeat one of this length.
_SHORT = 100

_KINDS = {Thought: "rs", Said: "msg", Called: "fc"}


@attrs.frozen(kw_only=True)
class Form:
    """
    How a client wants to be answered. It is kept with the answer: as a note of this turn's own, and
    as texts that are the same in most turns (``note`` and ``texts``; ``form_of`` reads both).

    Attributes:
        told: of the request, what a response repeats.
        model: the name of the model that answers.
        summarised: thoughts stand where their summary is looked for, as nobody here makes another.
        sealed: thoughts are given a second time, for clients that send back nothing else of them.
    """

    told: Mapping[str, Any]
    model: str = ""
    summarised: bool = False
    sealed: bool = False

    def note(self) -> str:
        """The form as text, without what ``texts`` has of it."""
        texts = self.texts()
        told = {name: value for name, value in self.told.items() if name not in texts}
        return encode({**attrs.asdict(self, recurse=False), "told": told}).decode()

    def texts(self) -> dict[str, str]:
        """What a response repeats and is long, by name: tools, instructions, formats."""
        texts = {name: encode(value).decode() for name, value in self.told.items()}
        return {name: text for name, text in texts.items() if len(text) > _SHORT}


def form_of(note: str, texts: Mapping[str, str]) -> Form:
    """
    The form of which ``Form.note`` and ``Form.texts`` made these. Notes of before there were texts
    have all of it.
    """
    form = msgspec.json.decode(note, type=Form)
    more = {name: msgspec.json.decode(text) for name, text in texts.items()}
    return attrs.evolve(form, told={**form.told, **more})


class Completion(WholeAnswer):
    """An answer that is sent as a whole."""

    def __init__(self, form: Form, *, ignored: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._form = form
        self._ignored = ignored

    def body(self) -> dict[str, Any]:
        """
        The ``response`` object.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        accepted, finished = self._ends()
        head = _head(accepted.request, accepted.created_s, accepted.model, self._form)
        output = output_items(self._parts, accepted.request, self._form, finished)
        cairn = {"cairn": cairn_object(accepted, self._ignored)}
        return {**head, **_end(finished), "output": output, **cairn}


class Chunks:
    """An answer that is sent as server-sent events. The last one is sent by ``done``."""

    def __init__(self, form: Form, *, ignored: tuple[str, ...] = ()) -> None:
        self._form = form
        self._ignored = ignored
        self._accepted: Accepted | None = None
        self._finished: Finished | None = None
        self._head: dict[str, Any] = {}
        self._sent = 0
        self._open: AnswerPart | None = None  # the item that grows, as far as it has come
        self._argued: int | None = None  # characters of the arguments, where that is a call
        self._output: list[dict[str, Any]] = []

    def take(self, reply: Reply) -> bytes:
        """What to send for a reply; may be nothing."""
        if self._accepted is None and isinstance(reply, Delta | Finished):
            raise UnfinishedAnswer("the replies began without being accepted")
        match reply:
            case Waiting():
                # Clients that watch for events, and not for bytes, hear nothing of a comment.
                return b": waiting\n\n" if self._accepted is None else self._state("in_progress")
            case Accepted():
                self._accepted = reply
                self._head = {
                    **_head(reply.request, reply.created_s, reply.model, self._form),
                    "cairn": cairn_object(reply, self._ignored),
                }
                return self._state("created") + self._state("in_progress")
            case Delta():
                told = b"".join(map(self._part, reply.parts))
                return told if reply.calling is None else told + self._calling(reply.calling)
            case Finished():
                self._finished = reply
                return self._close(reply)

    def headers(self, first: Reply) -> dict[str, str]:
        """What is known of the request with its first reply, for the response's headers."""
        return accepted_headers(first)

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: it is not complete.
        """
        if self._finished is None:
            raise UnfinishedAnswer("the replies ended before the answer did")
        end = _end(self._finished)
        return self._state(end["status"], **end)

    def failed(self, error: Exception) -> bytes:
        """
        The end of a stream that broke off. Without it the client would take the rest for complete.
        """
        told = responses_error(error)
        if self._accepted is None:
            known = {"code": told.code, "message": told.message, "param": told.param}
            return self._event("error", **known)
        fault = {"code": told.code, "message": told.message}
        return self._state("failed", status="failed", error=fault)

    def _state(self, name: str, **fields: Any) -> bytes:
        """An event with the response as it is now."""
        now = {**self._head, "output": list(self._output), **fields}
        return self._event(f"response.{name}", response=now)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(value))

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
                told = {"content_index": 0, "delta": text, "logprobs": []}
                return begins + self._of_item("output_text.delta", part, **told)
            case Thought(text):
                where, name = self._thoughts
                return begins + self._of_item(f"{name}.delta", part, **{where: 0}, delta=text)
            case Called():
                return begins + self._arguments(part, part.arguments[sent or 0 :])

    def _calling(self, calling: Calling) -> bytes:
        """More of a call. Changes what was sent of it."""
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
        """How the place of a thought's text is called, and its events."""
        if self._form.summarised:
            return "summary_index", "reasoning_summary_text"
        return "content_index", "reasoning_text"

    def _begin(self, part: AnswerPart) -> bytes:
        """An item begins, and its one part with it."""
        item = _item(_emptied(part), *self._place, self._form, "in_progress")
        match part:
            case Said():
                item["content"] = []
            case Thought():
                item |= {"summary": [], "content": []}
                item.pop("encrypted_content", None)
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        return added + self._inner("added", _emptied(part))

    def _close(self, finished: Finished | None = None) -> bytes:
        """
        The item that is open is done, if one is. Changes the state.

        Args:
            finished: where nothing follows.
        """
        part, self._open = self._open, None
        if part is None:
            return b""
        match part:
            case Said(text):
                told = {"content_index": 0, "text": text, "logprobs": []}
                done = self._of_item("output_text.done", part, **told)
            case Thought(text):
                where, name = self._thoughts
                done = self._of_item(f"{name}.done", part, **{where: 0}, text=text)
            case Called():
                told = {"name": part.name, "arguments": part.arguments}
                done = self._of_item("function_call_arguments.done", part, **told)
        done += self._inner("done", part)
        item = _item(part, *self._place, self._form, _status(part, finished))
        whole = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return done + whole

    def _inner(self, step: str, part: AnswerPart) -> bytes:
        """The one part of an item begins or is done; a call has none."""
        match part:
            case Said():
                inner = _words(part)
                return self._of_item(f"content_part.{step}", part, content_index=0, part=inner)
            case Thought():
                where, _ = self._thoughts
                name = "reasoning_summary_part" if self._form.summarised else "content_part"
                inner = _thoughts(part, self._form)
                return self._of_item(f"{name}.{step}", part, **{where: 0}, part=inner)
            case Called():
                return b""

    def _of_item(self, name: str, of: AnswerPart, /, **fields: Any) -> bytes:
        index = len(self._output)
        place = {"item_id": _id(of, *self._place), "output_index": index}
        return self._event(f"response.{name}", **place, **fields)

    @property
    def _place(self) -> tuple[str, int]:
        assert self._accepted is not None
        return self._accepted.request, len(self._output)


def kept_body(turn: StoredTurn, model: str) -> dict[str, Any]:
    """
    The ``response`` object of an answer that was kept.

    Args:
        model: the name of the one that is served now, for answers that were kept before the form
            said which one it was.
    """
    form = form_of(turn.note, turn.texts)
    head = _head(turn.request, turn.created_s, form.model or model, form)
    output = output_items(turn.parts, turn.request, form, turn.finished)
    return {**head, **_end(turn.finished), "output": output}


def output_items(
    parts: Sequence[AnswerPart], request: str, form: Form, finished: Finished
) -> list[dict[str, Any]]:
    """The items of a whole answer."""
    whole = joined(parts)
    return [
        _item(part, request, n, form, _status(part, finished if part is whole[-1] else None))
        for n, part in enumerate(whole)
    ]


def _head(request: str, created_s: int, model: str, form: Form) -> dict[str, Any]:
    return {
        "id": f"{PREFIX}{request}",
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "background": False,
        "truncation": "disabled",
        **form.told,
        "usage": None,
    }


def _end(finished: Finished) -> dict[str, Any]:
    is_cut = finished.finish_reason == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": finished.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finished.cached_tokens},
            "output_tokens": finished.completion_tokens,
            # Which tokens were thoughts is not counted; clients do not read a usage without it.
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        },
    }


def _status(part: AnswerPart, finished: Finished | None) -> str:
    """
    Args:
        finished: where it is the last item.
    """
    if isinstance(part, Called):
        return "completed" if part.cut is None else "incomplete"
    is_cut = finished is not None and finished.finish_reason == "length"
    return "incomplete" if is_cut else "completed"


def _id(part: AnswerPart, request: str, index: int) -> str:
    return f"{_KINDS[type(part)]}_{request}_{index}"


def _item(part: AnswerPart, request: str, index: int, form: Form, status: str) -> dict[str, Any]:
    head: dict[str, Any] = {"id": _id(part, request, index), "status": status}
    match part:
        case Said():
            return {**head, "type": "message", "role": "assistant", "content": [_words(part)]}
        case Thought(text):
            inner = [_thoughts(part, form)]
            item = {**head, "type": "reasoning", "summary": inner if form.summarised else []}
            if not form.summarised:
                item["content"] = inner
            if form.sealed:
                item["encrypted_content"] = f"{SEALED}{text}"
            return item
        case Called():
            return {
                **head,
                "type": "function_call",
                "call_id": part.id,
                "name": part.name,
                "arguments": part.arguments,
            }


def _words(part: Said) -> dict[str, Any]:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _thoughts(part: Thought, form: Form) -> dict[str, Any]:
    return {
        "type": "summary_text" if form.summarised else "reasoning_text",
        "text": part.text,
    }


def _emptied(part: AnswerPart) -> AnswerPart:
    """A part of which nothing was written yet."""
    match part:
        case Called():
            return attrs.evolve(part, arguments="")
        case _:
            return attrs.evolve(part, text="")
