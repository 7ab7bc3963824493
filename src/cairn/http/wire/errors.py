"""
The one border at which an error becomes an answer.

By whose fault it is::

    ClientError            the client's: a body, a parameter or a key cannot be used; 400, 401, ...
    HTTPException          the client's: no such method or size; its own status
    RefusalError           the tree in ``actors/errors.py``; statuses in ``_REFUSALS``
    anything else          ours: 500 with a fresh id, and a traceback in the log

The envelope is OpenAI's, ``{"error": {"message", "type", "param", "code"}}``; the module
``anthropic_errors`` makes another of the same answer. Nothing of a traceback goes to a client.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

import attrs
import structlog
from werkzeug.exceptions import HTTPException

from cairn.actors.errors import (
    AgentBusy,
    AgentExists,
    Broken,
    FormatRefused,
    JournalFull,
    ModelNotLoaded,
    NoMemory,
    PromptRefused,
    PromptTooLong,
    QueueFull,
    RefusalError,
    Stopping,
    TimedOut,
    TooManyAgents,
    TooManyAnswers,
)
from cairn.http.wire.sent import Sent

T = TypeVar("T")

BODY_BYTES_MAX: Final = 32 * 1024 * 1024

log = structlog.get_logger(__name__)

#: Asking again gives the same: the official clients would otherwise try twice more.
_NO_RETRY = MappingProxyType({"x-should-retry": "false"})


class ClientError(Exception):
    """
    The client's request cannot be used. Nothing was changed by it.

    Attributes:
        message: what, where, and what to do instead.
        param: the parameter, as a path into the body.
        headers: further ones of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.headers = headers


def missing(where: str, instead: str | None = None) -> ClientError:
    """
    What to raise where a field is missing that has to be there.

    Args:
        where: it, as a path into the body.
        instead: a field that may have been sent for it.
    """
    hint = "" if instead is None else f". Did you mean `{where}` instead of `{instead[:100]}`?"
    return ClientError(
        f"Missing required field `{where}`{hint}",
        param=where,
        code="missing_required_parameter",
    )


def given(value: T | None, where: str) -> T:
    """
    The value of a field that has to be there.

    Args:
        where: it, as a path into the body.

    Raises:
        ClientError: it is missing.
    """
    if value is None:
        raise missing(where)
    return value


class ErrorObject(Sent):
    """What is wrong, and where in the body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(Sent):
    """The body of an error answer, except at the addresses of Anthropic's messages."""

    error: ErrorObject


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

    def envelope(self) -> Sent:
        """The body, in the form that OpenAI's clients read."""
        return ErrorEnvelope(
            ErrorObject(message=self.message, type=self.type, param=self.param, code=self.code)
        )


@attrs.frozen(kw_only=True)
class FormatPlaces:
    """
    Where in a body the conversation, and what an answer is held to, stand, as paths.

    Attributes:
        prompt: the conversation.
        answer: what is asked of the answer's words.
        schema: the schema of them.
        parameters: that of a tool, of its ``{place}`` and ``{name}``.
    """

    prompt: str = "messages"
    answer: str = "response_format"
    schema: str = "response_format.json_schema.schema"
    parameters: str = "tools[{place}].function.parameters"


@attrs.frozen(kw_only=True)
class _Kind:
    """
    What is the same of every refusal of a class.

    Attributes:
        of_prompt: whether ``param`` is the conversation, wherever that stands.
        headers: where the refusal has no time to come back.
    """

    status: int
    code: str
    type: str = "invalid_request_error"
    param: str | None = None
    of_prompt: bool = False
    headers: Mapping[str, str] = MappingProxyType({})


_REFUSALS: Mapping[type[RefusalError], _Kind] = {
    PromptTooLong: _Kind(status=400, code="context_length_exceeded", of_prompt=True),
    PromptRefused: _Kind(status=400, code="prompt_refused", of_prompt=True),
    TooManyAnswers: _Kind(status=400, code="invalid_value", param="n"),
    AgentBusy: _Kind(status=409, code="agent_busy"),
    AgentExists: _Kind(status=409, code="agent_exists", param="agent_id", headers=_NO_RETRY),
    TooManyAgents: _Kind(status=409, code="too_many_agents", headers=_NO_RETRY),
    QueueFull: _Kind(status=429, code="queue_full", type="rate_limit_error"),
    TimedOut: _Kind(status=504, code="timed_out", type="timeout_error", headers=_NO_RETRY),
    ModelNotLoaded: _Kind(
        status=503, code="model_not_loaded", type="overloaded_error", param="model"
    ),
    NoMemory: _Kind(status=503, code="no_memory", type="overloaded_error"),
    JournalFull: _Kind(status=503, code="journal_full", type="overloaded_error"),
    Stopping: _Kind(status=503, code="server_stopping", type="overloaded_error"),
    Broken: _Kind(
        status=500, code="kv_cache_inv_violation", type="internal_error", headers=_NO_RETRY
    ),
}
"""
All of ``RefusalError``'s tree but ``FormatRefused``, which says itself where its fault stands.
"""


def describe(error: BaseException, places: FormatPlaces = FormatPlaces()) -> ErrorAnswer:
    """
    What to tell the client. Writes to the log where the error is not foreseen.

    Args:
        places: in the bodies of its protocol.
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
                headers=error.headers,
            )
        case RefusalError():
            named = ("request", "session", "bug_id")
            ids = {name: value for name in named if (value := getattr(error, name, None))}
            answer = _refusal(error, places)
            headers = {**answer.headers, **request_header(error.request)}
            return attrs.evolve(answer, ids=ids, headers=headers)
        case HTTPException():
            return _http(error)
        case _:
            return _unforeseen(error)


def cause_of(error: BaseException) -> BaseException:
    """The error itself, where a nursery on the way has wrapped it in a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _refusal(error: RefusalError, places: FormatPlaces) -> ErrorAnswer:
    if isinstance(error, FormatRefused):
        return _format(error, places)
    told = _REFUSALS.get(type(error))
    if told is None:  # a refusal that was added to the tree and not to this border
        return _unforeseen(error)
    retry_after_s = getattr(error, "retry_after_s", None)
    return ErrorAnswer(
        status=told.status,
        message=error.message,
        type=told.type,
        code=told.code,
        param=places.prompt if told.of_prompt else told.param,
        headers=told.headers if retry_after_s is None else _retry_after(retry_after_s),
    )


def _format(error: FormatRefused, places: FormatPlaces) -> ErrorAnswer:
    where, hint = places.answer, f"leave out {places.answer} and tool_choice"
    match error.about:
        case "schema" if error.tool is not None:
            place, name = error.tool
            where = places.parameters.format(place=place, name=name[:200])
            hint = "change the schema"
        case "schema":
            where, hint = places.schema, "change the schema"
        case "calls":
            where, hint = "tool_choice", "send auto, or leave it out"
        case "calls_beside":
            hint = f"send {places.answer} without tools, or tools without it"
    return ErrorAnswer(
        status=400,
        message=f"{where}: an answer cannot be constrained to this: {error.fact}; {hint}",
        type="invalid_request_error",
        code="format_refused",
        param=where,
    )


def request_header(request: str | None) -> dict[str, str]:
    """The header by which a client can name its request to the operator."""
    return {} if request is None else {"x-request-id": request}


def _http(error: HTTPException) -> ErrorAnswer:
    status = error.code or 500
    match status:
        case 405:
            *others, last = _methods(error) or ["another method"]
            allowed = f"{', '.join(others)} and {last}" if others else last
            code, message = "method_not_allowed", f"this address accepts only {allowed}"
        case 408:
            code, message = "request_timeout", "the body did not arrive in time; send it again"
        case 413:
            most = BODY_BYTES_MAX // (1024 * 1024)
            code, message = (
                "request_too_large",
                f"the body is larger than {most} MiB; send a smaller one",
            )
        case _:
            code, message = "http_error", error.description or error.name
    kept = {"retry-after"}
    headers = {key: value for key, value in error.get_headers() if key.lower() in kept}
    if methods := _methods(error):
        headers["allow"] = ", ".join(methods)
    return ErrorAnswer(
        status=status,
        message=message,
        type="invalid_request_error" if status < 500 else "internal_error",
        code=code,
        headers=headers,
    )


def _methods(error: HTTPException) -> list[str]:
    """What an address takes, first those that do something there."""
    methods = getattr(error, "valid_methods", None) or ()
    return sorted(methods, key=lambda name: (name in ("HEAD", "OPTIONS"), name))


def _unforeseen(error: BaseException) -> ErrorAnswer:
    error_id = str(uuid.uuid4())
    log.error("unexpected error", error_id=error_id, exc_info=error)
    return ErrorAnswer(
        status=500,
        message=f"internal error; the server's log has the details under error id {error_id}",
        type="internal_error",
        code="internal_error",
        headers=_NO_RETRY,
    )


def _retry_after(seconds: int) -> dict[str, str]:
    return {"retry-after": str(max(1, seconds))}
