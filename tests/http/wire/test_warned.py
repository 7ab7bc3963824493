"""Which fields had no effect is said in a header and, once a conversation, in the log."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import structlog

from cairn.http.app import create_app
from cairn.http.wire.warned import HEADER, Conversations, warning_of
from tests.http.fake_service import ACCEPTED, ANSWER, FINISHED, QUEUED, FakeService

HELLO = [{"role": "user", "content": "Hello"}]
EVENT = "fields without effect"


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "more"),
    [("chat/completions", {}), ("messages", {"max_tokens": 9}), ("responses", {"input": "a"})],
)
async def test_each_answer_has_the_header(path: str, more: dict[str, Any], stream: bool):
    """Of every protocol, whole or as a stream, also of one that waits; the log has one line."""
    service = FakeService((QUEUED, *ANSWER))
    client = create_app(service).test_client()
    asked = {**({"messages": HELLO} if path != "responses" else {}), **more, "stream": stream}
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            body = json.dumps({**asked, "colour": "red", "shape": 1})
            response = await client.post(f"/v1/{path}", data=body, headers={"user-agent": "x/1"})
            await response.get_data()
            assert "ignored: colour, shape" == response.headers[HEADER]
        response = await client.post(f"/v1/{path}", data=json.dumps(asked))
        await response.get_data()
        assert HEADER not in response.headers
    (line,) = [line for line in logs if line["event"] == EVENT]
    expected = {"session": "sess-1", "request": "req-1", "client": "x"}
    assert {**expected, "fields": ["colour", "shape"]} == {
        name: line[name] for name in (*expected, "fields")
    }


@pytest.mark.trio
async def test_only_the_first_of_several_answers_is_logged():
    """Each has a session of its own, but they are one request."""
    other = attrs.evolve(ACCEPTED, session="sess-2", choice=1)
    service = FakeService((ACCEPTED, other, FINISHED, attrs.evolve(FINISHED, choice=1)))
    body = json.dumps({"messages": HELLO, "n": 2, "colour": "red"})
    with structlog.testing.capture_logs() as logs:
        await create_app(service).test_client().post("/v1/chat/completions", data=body)
    assert 1 == sum(line["event"] == EVENT for line in logs)


def test_a_conversation_is_logged_again_for_new_fields():
    """Only those are named. Of too many conversations, the oldest are forgotten."""
    conversations = Conversations(2)
    with structlog.testing.capture_logs() as logs:
        conversations.add(ACCEPTED, ("a",), None)
        conversations.add(ACCEPTED, ("a", "b"), None)
        for number in range(2):
            conversations.add(attrs.evolve(ACCEPTED, session=f"s{number}"), ("a",), None)
        conversations.add(ACCEPTED, ("a",), None)
    assert [["a"], ["b"], ["a"], ["a"], ["a"]] == [line["fields"] for line in logs]


@pytest.mark.parametrize("name", ["a\r\nset-cookie: x", "größe", "a,b", 'a"b'])
def test_any_name_is_safe_in_a_header(name: str):
    """A client cannot add headers by a field's name."""
    (value,) = warning_of([name]).values()
    assert value.isascii()
    assert value.isprintable()
    assert "," not in value
    assert '"' not in value


def test_a_long_warning_is_cut():
    """Its end shows that there is more."""
    (value,) = warning_of(["x" * 100] * 64).values()
    assert 1004 == len(value)
    assert value.endswith(" ...")
