"""
The one border at which an error becomes an answer.

By whose fault it is::

    ClientError            the client's: a body or a parameter cannot be used; 400
    HTTPException          the client's: no such page, method or size; its own status
    messages.RefusalError  the tree in ``messages.py``; statuses in ``describe``
    anything else          ours: 500 with a fresh id, and a traceback in the log

The envelope is OpenAI's, ``{"error": {"message", "type", "param", "code"}}``. Nothing of a
traceback goes to a client.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import structlog
from werkzeug.exceptions import HTTPException

from cairn.actors.messages import (
    Broken,
    JournalFull,
    NoMemory,
    PromptRefused,
    PromptTooLong,
    QueueFull,
    RefusalError,
    Stopping,
)

log = structlog.get_logger(__name__)

#: Asking again gives the same: the official clients would otherwise try twice more.
_NO_RETRY = MappingProxyType({"x-should-retry": "false"})


class ClientError(Exception):
    """
    The client's request cannot be used. Nothing was changed by it.

    Attributes:
        message: what, where, and what to do instead.
        param: the parameter, as a path into the body.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


@attrs.frozen(kw_only=True)
class ErrorAnswer:
    """
    What a client is told of an error.

    Attributes:
        ids: the request's, the session's and the bug's, as far as it has them, for the log.
    """

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)
    ids: Mapping[str, str] = attrs.field(factory=dict)

    def envelope(self) -> dict[str, Any]:
        """
        The body, as OpenAI's clients read it.
        """
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def describe(error: BaseException) -> ErrorAnswer:
    """
    What to tell the client. Writes to the log where the error is not foreseen.
    """
    error = cause_of(error)
    match error:
        case ClientError():
            return ErrorAnswer(
                status=error.status,
                message=error.message,
                type="invalid_request_error",
                code=error.code,
                param=error.param,
            )
        case RefusalError():
            named = ("request", "session", "bug_id")
            ids = {name: value for name in named if (value := getattr(error, name, None))}
            answer = _refusal(error)
            headers = {**answer.headers, **request_header(error.request)}
            return attrs.evolve(answer, ids=ids, headers=headers)
        case HTTPException():
            return _http(error)
        case _:
            return _unforeseen(error)


def cause_of(error: BaseException) -> BaseException:
    """
    The error itself, where a nursery on the way has wrapped it in a group of one.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _refusal(error: RefusalError) -> ErrorAnswer:
    message = error.message
    match error:
        case PromptTooLong():
            return ErrorAnswer(
                status=400,
                message=message,
                type="invalid_request_error",
                code="context_length_exceeded",
                param="messages",
            )
        case PromptRefused():
            return ErrorAnswer(
                status=400,
                message=message,
                type="invalid_request_error",
                code="prompt_refused",
                param="messages",
            )
        case QueueFull():
            return ErrorAnswer(
                status=429,
                message=message,
                type="rate_limit_error",
                code="queue_full",
                headers=_retry_after(error.retry_after_s),
            )
        case NoMemory():
            return ErrorAnswer(
                status=503,
                message=message,
                type="overloaded_error",
                code="no_memory",
                headers=_retry_after(error.retry_after_s),
            )
        case JournalFull():
            return ErrorAnswer(
                status=503,
                message=message,
                type="overloaded_error",
                code="journal_full",
                headers=_retry_after(error.retry_after_s),
            )
        case Stopping():
            return ErrorAnswer(
                status=503,
                message=message,
                type="overloaded_error",
                code="server_stopping",
                headers=_retry_after(error.retry_after_s),
            )
        case Broken():
            return ErrorAnswer(
                status=500,
                message=message,
                type="internal_error",
                code="kv_cache_inv_violation",
                headers=_NO_RETRY,
            )
        case _:  # a refusal that was added to the tree and not to this border
            return _unforeseen(error)


def request_header(request: str | None) -> dict[str, str]:
    """
    The header by which a client can name its request to the operator.
    """
    return {} if request is None else {"x-request-id": request}


def _http(error: HTTPException) -> ErrorAnswer:
    status = error.code or 500
    match status:
        case 404:
            code, message = "not_found", "there is nothing at this address; GET / lists what is"
        case 405:
            code, message = "method_not_allowed", f"this address takes {_methods(error)}"
        case 408:
            code, message = "request_timeout", "the body did not arrive in time; send it again"
        case 413:
            code, message = "request_too_large", "the body is larger than this server takes"
        case _:
            code, message = "http_error", error.description or error.name
    kept = {"allow", "retry-after"}
    headers = {key: value for key, value in error.get_headers() if key.lower() in kept}
    return ErrorAnswer(
        status=status,
        message=message,
        type="invalid_request_error" if status < 500 else "internal_error",
        code=code,
        headers=headers,
    )


def _methods(error: HTTPException) -> str:
    methods = getattr(error, "valid_methods", None)
    return ", ".join(sorted(methods)) if methods else "another method"


def _unforeseen(error: BaseException) -> ErrorAnswer:
    error_id = str(uuid.uuid4())
    log.error("unforeseen error", error_id=error_id, exc_info=error)
    return ErrorAnswer(
        status=500,
        message=f"internal error; error id {error_id} stands in the server's log",
        type="internal_error",
        code="internal_error",
        headers=_NO_RETRY,
    )


def _retry_after(seconds: int) -> dict[str, str]:
    return {"retry-after": str(max(1, seconds))}
