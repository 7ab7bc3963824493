"""Every exception becomes one HTTP error, whatever its class."""

from __future__ import annotations

import uuid

from werkzeug.exceptions import ImATeapot

from cairn.actors.errors import RefusalError
from cairn.http.wire.errors import describe


class NewRefusal(RefusalError):
    """A refusal that the table of answers does not have."""


def test_a_refusal_that_is_not_in_the_table_is_an_internal_error():
    """It is a 500 with an error id in the message, and keeps its request id."""
    error = NewRefusal("it is new")
    error.request = "req-7"
    answer = describe(error)
    assert (500, "internal_error", "internal_error") == (answer.status, answer.type, answer.code)
    assert "it is new" not in answer.message
    uuid.UUID(answer.message.rpartition(" ")[2])
    assert "req-7" == answer.headers["x-request-id"]
    assert "req-7" == answer.ids["request"]


def test_other_errors_of_http_keep_their_status():
    """Their code is the generic one, and their message is the library's."""
    answer = describe(ImATeapot())
    assert (418, "invalid_request_error", "http_error") == (
        answer.status,
        answer.type,
        answer.code,
    )
    assert answer.message


def test_a_group_of_one_is_the_error_within():
    """An error that a nursery wrapped is treated like the error itself."""
    group = ExceptionGroup("nursery", [ExceptionGroup("inner", [ImATeapot()])])
    assert 418 == describe(group).status
