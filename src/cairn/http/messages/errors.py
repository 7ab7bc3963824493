"""
Errors in the form that Anthropic's clients read. ``wire/errors.py`` describes the error; this
module gives it Anthropic's status, type and envelope, ``{"type": "error", "error": {"type",
"message"}, "request_id"}``.

These clients retry 429 and 529, so a server that is full, stopping or out of memory answers with
one of the two. Every answer has an id: that of the request, or a new one that the log entry has
too.
"""

from __future__ import annotations

import uuid
from types import MappingProxyType

import attrs

from cairn.http.messages.objects import MessagesErrorEnvelope, MessagesErrorObject
from cairn.http.wire.errors import ErrorAnswer, FormatPlaces, describe, request_header

ADDRESS = "/v1/messages"

_OVERLOADED = 529

#: By name, because the index among the functions means nothing to a client that also sent tools of
#: another kind.
_PLACES = FormatPlaces(
    answer="output_config.format",
    schema="output_config.format.schema",
    parameters="tools.{name}.input_schema",
)

TYPES = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
        _OVERLOADED: "overloaded_error",
    }
)
"""By the status; others are ``invalid_request_error`` below 500, and ``api_error`` from there."""


@attrs.frozen(kw_only=True)
class MessagesError(ErrorAnswer):
    """The answer to an error at an address of Anthropic's messages."""

    def envelope(self) -> MessagesErrorEnvelope:
        """The body, in the form that Anthropic's clients read."""
        return MessagesErrorEnvelope(
            error=MessagesErrorObject(
                type=self.type, message=self.message, param=self.param, code=self.code
            ),
            request_id=self.ids["request"],
        )


def is_ours(path: str) -> bool:
    """Whether an address belongs to Anthropic's messages."""
    return path == ADDRESS or path.startswith(f"{ADDRESS}/")


def messages_error(error: BaseException, request: str | None = None) -> MessagesError:
    """
    The answer to an error. Logs unexpected errors.

    Args:
        request: the request's id, if it is already known.
    """
    answer = describe(error, _PLACES)
    status = _OVERLOADED if answer.type == "overloaded_error" else answer.status
    other = "api_error" if status >= 500 else "invalid_request_error"
    named = answer.ids.get("request") or request or str(uuid.uuid4())
    return MessagesError(
        status=status,
        message=answer.message,
        type=TYPES.get(status, other),
        code=answer.code,
        param=answer.param,
        headers={**answer.headers, **named_header(named)},
        ids={**answer.ids, "request": named},
    )


def named_header(request: str) -> dict[str, str]:
    """The headers with the request's id, under Cairn's name and under Anthropic's."""
    return {**request_header(request), "request-id": request}
