"""
OpenAI's chat completions: from replies to the wire. The way there is ``openai.py``.

An answer as a whole and an answer as a stream are built from the same replies by ``Completion``
and ``Chunks``; both take each reply once and in order.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from cairn.actors.messages import Accepted, Delta, Finished, Reply, ServerFacts, TokenInfo, Waiting

from .wire import encode

DONE = b"data: [DONE]\n\n"

#: What OpenAI gives for "very unlikely"; JSON has no infinity.
_LOGPROB_MIN = -9999.0


class UnfinishedAnswer(Exception):
    """
    The replies ended before ``Finished``, or began without ``Accepted``. Ours, never a client's.
    """


class Completion:
    """
    An answer that is sent as a whole.
    """

    def __init__(
        self, facts: ServerFacts, *, logprobs: bool, ignored: tuple[str, ...] = ()
    ) -> None:
        self._facts = facts
        self._ignored = ignored
        self._logprobs = logprobs
        self._texts: list[str] = []
        self._tokens: list[TokenInfo] = []
        self._accepted: Accepted | None = None
        self._finished: Finished | None = None

    def take(self, reply: Reply) -> None:
        """
        Add a reply.
        """
        match reply:
            case Accepted():
                self._accepted = reply
            case Delta():
                self._texts.append(reply.text)
                if self._logprobs:
                    self._tokens.extend(reply.tokens)
            case Finished():
                self._finished = reply
            case Waiting():
                pass

    def headers(self) -> dict[str, str]:
        """
        What is known of the request, for the response's headers.
        """
        return accepted_headers(self._accepted)

    def body(self) -> dict[str, Any]:
        """
        The ``chat.completion`` object.

        Raises:
            UnfinishedAnswer: the replies were not complete.
        """
        accepted, finished = self._accepted, self._finished
        if accepted is None or finished is None:
            raise UnfinishedAnswer("the replies ended before the answer did")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(self._texts), "refusal": None},
            "logprobs": _logprobs(self._tokens) if self._logprobs else None,
            "finish_reason": finished.finish_reason,
        }
        return {
            **_head("chat.completion", accepted, self._facts),
            "choices": [choice],
            "usage": _usage(finished),
            "cairn": _cairn(accepted, self._ignored),
        }


class Chunks:
    """
    An answer that is sent as server-sent events. The last one is sent by ``done``.
    """

    def __init__(
        self,
        facts: ServerFacts,
        *,
        logprobs: bool,
        include_usage: bool,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self._facts = facts
        self._ignored = ignored
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._accepted: Accepted | None = None
        self._head: dict[str, Any] = {}
        self._is_finished = False

    def take(self, reply: Reply) -> bytes:
        """
        What to send for a reply; may be nothing.
        """
        match reply:
            case Waiting():
                return self._comment(reply)
            case Accepted():
                self._accepted = reply
                self._head = _head("chat.completion.chunk", reply, self._facts)
                role = {"role": "assistant", "content": ""}
                return self._chunk(role, cairn=_cairn(reply, self._ignored))
            case Delta():
                # What a stop text or half a character holds back comes with a later token.
                if not reply.text and not (self._logprobs and reply.tokens):
                    return b""
                return self._chunk({"content": reply.text}, tokens=reply.tokens)
            case Finished():
                self._is_finished = True
                last = self._chunk({}, finish_reason=reply.finish_reason)
                return last + self._usage_chunk(reply)

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: it is not complete.
        """
        if not self._is_finished:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return DONE

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        tokens: tuple[TokenInfo, ...] = (),
        finish_reason: str | None = None,
        cairn: dict[str, Any] | None = None,
    ) -> bytes:
        if self._accepted is None:
            raise UnfinishedAnswer("the replies began without being accepted")
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(tokens) if self._logprobs and tokens else None,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        if cairn is not None:
            chunk["cairn"] = cairn
        return event(chunk)

    def _usage_chunk(self, finished: Finished) -> bytes:
        if not self._include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": _usage(finished)})

    def _comment(self, waiting: Waiting) -> bytes:
        if waiting.queued:
            return b": waiting\n\n"
        if self._accepted is None:
            return b": prefill %d\n\n" % waiting.prefilled_tokens
        return b": prefill %d/%d\n\n" % (waiting.prefilled_tokens, self._accepted.prompt_tokens)


def event(value: dict[str, Any]) -> bytes:
    """
    A value as a server-sent event.
    """
    return b"data: " + encode(value) + b"\n\n"


def accepted_headers(accepted: Reply | None) -> dict[str, str]:
    """
    What is known of a request, for the headers of its response; nothing before it is accepted.
    """
    if not isinstance(accepted, Accepted):
        return {}
    return {
        "x-request-id": accepted.request,
        # A session has the name that its client gave it, in any script.
        "x-cairn-session": quote(accepted.session, safe="/:@+=,"),
        "x-cairn-path": accepted.path,
    }


def model_object(facts: ServerFacts) -> dict[str, Any]:
    """
    The model, as the list of models has it.
    """
    return {
        "id": facts.model,
        "object": "model",
        "created": facts.started_s,
        "owned_by": "cairn",
    }


def _head(kind: str, accepted: Accepted, facts: ServerFacts) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{accepted.request}",
        "object": kind,
        "created": accepted.created_s,
        "model": facts.model,
        "system_fingerprint": facts.fingerprint,
    }


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def _cairn(accepted: Accepted, ignored: tuple[str, ...]) -> dict[str, Any]:
    told = {
        "session": accepted.session,
        "path": accepted.path,
        "reason": accepted.reason,
        "reused_tokens": accepted.cached_tokens,
        "seed": accepted.seed,
    }
    return {**told, "ignored": list(ignored)} if ignored else told


def _logprobs(tokens: list[TokenInfo] | tuple[TokenInfo, ...]) -> dict[str, Any]:
    content = [
        {
            **_token(token.text, token.raw, token.logprob),
            "top_logprobs": [_token(text, raw, value) for _, text, raw, value in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(raw), "logprob": max(logprob, _LOGPROB_MIN)}
