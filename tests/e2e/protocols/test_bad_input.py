"""
Bad input to a running server: it is refused clearly, changes nothing, and the next request is
served.
"""

from __future__ import annotations

import gzip
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.http.wire.checks import BODY_BYTES_MAX
from tests.e2e.conftest import servers
from tests.http.wire.bad_bodies import BAD, ODD, say, streamed
from tests.support.processes.subprocess_server import DEADLINE_S, Serving, ask, eventually, user

RAISES = """
{%- for message in messages -%}
    {%- if message.content == 'raise' -%}{{ raise_exception('not this word') }}
    {%- elif message.content == 'add' -%}{{ message.content + 1 }}
    {%- elif message.content == 'divide' -%}{{ 1 // 0 }}
    {%- elif message.content == 'missing' -%}{{ message.a.b.c }}
    {%- endif -%}
{%- endfor -%}
"""


@pytest.fixture(scope="module")
def raising(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """The model with a template that fails at some words."""
    model = tmp_path_factory.mktemp("models") / "raising"
    shutil.copytree(model_directory, model)
    file = model / "chat_template.jinja"
    file.write_text(RAISES + file.read_text(encoding="utf-8"), encoding="utf-8")
    return model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, raising: Path) -> Iterator[Serving]:
    """
    A server with a short context. Before and after the tests it gives the same answer, bit for bit,
    and holds no more files.
    """
    with servers(tmp_path_factory.mktemp("small"), raising) as start:
        # No idle session gives up its slab by itself: `unchanged` would take that for a change.
        server = start("--pool-mb", 1, "--max-tokens", 8, "--slab-idle", 86_400)
        before = ask(server, user("What is Cairn?"), cache_prompt=False)
        server.settled()
        files = server.open_files()
        yield server
        after = ask(server, user("What is Cairn?"), cache_prompt=False)
        assert before.bits == after.bits
        assert 24 == before.completion_tokens
        eventually(lambda: server.open_files() <= files)


@pytest.fixture
def unchanged(small: Serving) -> Iterator[Serving]:
    """The server; at the end of the test, its journal must not have grown."""
    health = small.settled()
    yield small
    assert health == small.health()


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    """The status, code and parameter of a refusal."""
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_bodies(unchanged: Serving, stream: bool):
    """Each is refused as the table says, and none of them changes the server."""
    position = unchanged.position()
    for bad in BAD:
        response = unchanged.send(streamed(bad.body) if stream else bad.body)
        bad.check(response.status_code, response.json())
        assert position == unchanged.position(), bad.name


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_odd_bodies(small: Serving, stream: bool):
    """Bodies that only look wrong are served."""
    for name, body in ODD.items():
        response = small.send(streamed(body) if stream else body)
        assert 200 == response.status_code, (name, response.text)
        assert ("data: [DONE]" in response.text) == stream


TEMPLATE = {
    "raise": "not this word",
    "add": "concatenate str",
    "divide": "division",
    "missing": "'a'",
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("word", TEMPLATE)
def test_template_that_raises(unchanged: Serving, word: str, stream: bool):
    """An error in the model's template is a 400 with the template's own message."""
    response = unchanged.post(messages=[user(word)], stream=stream)
    assert (400, "prompt_refused", "messages") == refusal(response)
    assert TEMPLATE[word] in response.json()["error"]["message"]


def stones(server: Serving, tokens: int) -> list[dict[str, str]]:
    """A conversation whose prompt has this many tokens."""
    ten = ask(server, user("stone " * 10), max_tokens=1).prompt_tokens
    return [user("stone " * (10 + tokens - ten))]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompt_longer_than_the_context(small: Serving, stream: bool):
    """
    One token too many is refused with both numbers; without it, there is an answer of one token.
    """
    context = small.health()["context_tokens"]
    long, longest = stones(small, context), stones(small, context - 1)
    before = small.settled()
    response = small.post(messages=long, max_tokens=1, stream=stream)
    assert (400, "context_length_exceeded", "messages") == refusal(response)
    message = response.json()["error"]["message"]
    assert f"{context} tokens > {context - 1} maximum" in message
    assert before == small.health()
    answer = ask(small, *longest)
    assert (context - 1, 1, "length") == (
        answer.prompt_tokens,
        answer.completion_tokens,
        answer.finish_reason,
    )


def test_answer_longer_than_the_context(small: Serving, lengthy: Any):
    """A `max_tokens` that is too large is no error: the answer ends with the context."""
    context = small.health()["context_tokens"]
    endless = {"logit_bias": lengthy[0]["logit_bias"]}
    for field in ("max_tokens", "max_completion_tokens"):
        answer = ask(small, *stones(small, context - 10), **endless, **{field: 2**63 - 1})
        assert (context - 10, 10, "length") == (
            answer.prompt_tokens,
            answer.completion_tokens,
            answer.finish_reason,
        )


def test_unknown_parameter_is_logged_once(small: Serving):
    """It is ignored, named in each answer, and logged once."""
    for name in ("frobnicate", "frobnicate", "user"):
        answer = small.post(messages=[user("Hello")], **{name: 1}).json()
        assert [name] == answer["cairn"]["ignored"]
    ignored = [line["parameter"] for line in small.log() if line["event"] == "parameter ignored"]
    assert 1 == ignored.count("frobnicate") == ignored.count("user")


def pieces() -> Iterator[bytes]:
    """A body over the limit, without an announced length."""
    for _ in range(BODY_BYTES_MAX // 2**20 + 1):
        yield b" " * 2**20


def test_large_bodies(unchanged: Serving):
    """A body over the limit is a 413, by its announced length or while it arrives."""
    for body in (b" " * (BODY_BYTES_MAX + 1), pieces()):
        try:
            response = httpx.post(f"{unchanged.url}/v1/chat/completions", content=body)
        except httpx.WriteError:  # the connection was closed before everything was sent
            continue
        assert (413, "request_too_large", None) == refusal(response)


@pytest.mark.parametrize("length", [-1, 1], ids=["less", "more"])
def test_length_that_is_wrong(unchanged: Serving, length: int):
    """A body that is shorter or longer than announced is a 400."""
    body = say()
    length += len(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}"
    with socket.create_connection(unchanged.address, DEADLINE_S) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "\xff;;charset=x"]
)
def test_other_content_types(small: Serving, kind: str):
    """The content type of a body has no effect."""
    response = small.send(say(), content_type=kind)
    assert 200 == response.status_code


def test_another_encoding(unchanged: Serving):
    """A compressed body is refused."""
    response = unchanged.send(gzip.compress(say()), content_encoding="gzip")
    assert (415, "unsupported_encoding", None) == refusal(response)
