"""Pages from other origins: only those that the operator names may read an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.http.access.cors import read_origin
from cairn.http.access.keys import Keys
from cairn.http.app import create_app
from tests.http.fake_service import FakeService

CHAT = "/v1/chat/completions"
KEY = "a key of alice's"
PAGE = "https://chat.example"
ASK = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})


async def response(method: str, headers: dict[str, str], **options: Any) -> tuple[int, Any, int]:
    """The status and headers of an answer, and how many requests reached the service."""
    service = FakeService()
    client = create_app(service, **options).test_client()
    data: dict[str, Any] = {"data": ASK} if method == "POST" else {}
    found = await client.open(CHAT, method=method, headers=headers, **data)
    return found.status_code, found.headers, len(service.commands)


def cors_headers(headers: Any) -> set[str]:
    """The headers that tell a browser what a page may do."""
    return {
        name.lower() for name, _ in headers.items() if name.lower().startswith("access-control")
    }


PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}


@pytest.mark.trio
async def test_off_by_default():
    """A page from another origin may neither call nor read; one from the same host may not read."""
    status, headers, asked = await response("OPTIONS", PREFLIGHT)
    assert (403, set(), 0) == (status, cors_headers(headers), asked)
    same = {"origin": "http://localhost:3000", "host": "localhost:8000"}
    status, headers, asked = await response("POST", same)
    assert (200, set(), 1) == (status, cors_headers(headers), asked)
    assert "vary" not in headers


@pytest.mark.trio
@pytest.mark.parametrize("cors", [[PAGE], ["http://localhost:3000", PAGE]])
async def test_an_origin_that_was_named(cors: list[str]):
    """Its preflight is answered without a key; the page can read answers and refusals."""
    options = {"cors": cors, "keys": Keys([("alice", KEY)])}
    status, headers, asked = await response("OPTIONS", PREFLIGHT, **options)
    assert (204, 0) == (status, asked)
    assert PAGE == headers["access-control-allow-origin"]
    assert "POST" in headers["access-control-allow-methods"]
    assert PREFLIGHT["access-control-request-headers"] == headers["access-control-allow-headers"]
    for key, expected in ((KEY, 200), ("none", 401)):
        status, headers, asked = await response(
            "POST", {"origin": PAGE, "x-api-key": key}, **options
        )
        assert (expected, PAGE) == (status, headers["access-control-allow-origin"])
        seen = headers["access-control-expose-headers"].split(", ")
        assert {"x-cairn-session", "x-request-id", "request-id"} <= set(seen)
        assert "Origin" == headers["vary"]
        assert (1 if key == KEY else 0) == asked


@pytest.mark.trio
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://chat.example:444", "http://chat.example", "null"]
)
async def test_other_origins_stay_out(origin: str):
    """An origin that differs in scheme, name or port is refused as before."""
    for method in ("POST", "OPTIONS"):
        status, headers, asked = await response(
            method, {**PREFLIGHT, "origin": origin}, cors=[PAGE]
        )
        assert (403, set(), 0) == (status, cors_headers(headers), asked)
        assert "Origin" == headers["vary"]


@pytest.mark.trio
async def test_any_origin():
    """With the star, every page that has a key may call and read."""
    options = {"cors": ["*"], "keys": Keys([("alice", KEY)])}
    for key, expected in ((KEY, 200), ("none", 401)):
        status, headers, _ = await response("POST", {"origin": "null", "x-api-key": key}, **options)
        assert (expected, "*") == (status, headers["access-control-allow-origin"])


@pytest.mark.trio
async def test_only_a_preflight_needs_no_key():
    """Without a key, only a browser's preflight is answered."""
    status, _, _ = await response(
        "OPTIONS", {"origin": PAGE}, cors=[PAGE], keys=Keys([("alice", KEY)])
    )
    assert 401 == status


@pytest.mark.trio
async def test_headers_without_end_are_not_sent_back():
    """The headers that a page requests are repeated to it, up to a length."""
    wanted = {**PREFLIGHT, "access-control-request-headers": "x-a, " * 1000}
    status, headers, _ = await response("OPTIONS", wanted, cors=[PAGE])
    assert 204 == status
    assert "access-control-allow-headers" not in headers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*", "*"),
        ("https://chat.example", "https://chat.example"),
        ("HTTPS://Chat.Example/", "https://chat.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://localhost:80", "http://localhost"),
        ("https://chat.example:443/", "https://chat.example"),
        ("https://chat.example:80", "https://chat.example:80"),
        ("http://[::1]:3000", "http://[::1]:3000"),
    ],
)
def test_origins_are_read_as_browsers_write_them(text: str, expected: str):
    """In lower case, without the default port, and without a slash at the end."""
    assert expected == read_origin(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "chat.example",
        "localhost:3000",
        "ftp://chat.example",
        "https://chat.example/path",
        "https://chat.example?x",
        "https://me@chat.example",
        "https://*.example:x",
        "https://größe.example",
        "https://",
        "http://[::1",
    ],
)
def test_what_is_no_origin_is_refused(text: str):
    """The message shows a valid origin."""
    with pytest.raises(
        ValueError, match=r"is not an origin; pass one such as https://chat\.example"
    ):
        read_origin(text)
