"""Logins of browsers: what their cookie opens, and from where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cairn.http.access.keys import Keys
from cairn.http.app import create_app
from cairn.http.explorer.login import COOKIE, LOGIN_S, LOGINS_MAX, Logins
from cairn.journal.tenants import LOCAL
from tests.http.fake_service import FakeService

pytestmark = pytest.mark.trio

KEYS = Keys([(LOCAL, "k" * 16), ("alice", "a" * 16), ("bob", "b" * 16)])
HERE = "http://localhost:8000"
HOST = {"host": "localhost:8000", "accept": "text/html"}
FORM = {**HOST, "content-type": "application/x-www-form-urlencoded"}
ASK = b'{"messages": [{"role": "user", "content": "Hello"}]}'


def client(service: FakeService | None = None) -> Any:
    """A browser that keeps no cookies, so that each test says what it sends."""
    return create_app(service or FakeService(), keys=KEYS).test_client(use_cookies=False)


async def cookie_of(browser: Any, key: str = "a") -> str:
    """The cookie of a login with the key of which this is the first letter."""
    response = await browser.post(
        "/explorer/login", headers={**FORM, "origin": HERE}, data=f"key={key * 16}&next=/"
    )
    assert (303, "/") == (response.status_code, response.headers["location"])
    cookie: str = response.headers["set-cookie"]
    return cookie


async def status(browser: Any, method: str, path: str, **headers: str) -> int:
    """The status of a request with these headers; ``_`` in their names is ``-``."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    data = ASK if method == "post" else None
    response = await getattr(browser, method)(path, headers={**HOST, **sent}, data=data)
    code: int = response.status_code
    return code


async def test_a_login() -> None:
    """A page without a key is the form; its cookie opens the pages and the API, until logout."""
    service = FakeService()
    browser = client(service)
    response = await browser.get("/explorer/cache?q=1", headers=HOST)
    text = await response.get_data(as_text=True)
    assert 401 == response.status_code
    assert 'value="/explorer/cache?q=1"' in text
    assert "pebble" not in text
    set_cookie = await cookie_of(browser)
    assert {"HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={LOGIN_S}"} <= set(
        set_cookie.split("; ")
    )
    assert "a" * 16 not in set_cookie
    cookie = set_cookie.split(";")[0]
    assert 200 == await status(browser, "get", "/explorer/cache", cookie=cookie)
    assert 200 == await status(browser, "post", "/v1/chat/completions", cookie=cookie, origin=HERE)
    assert ["alice"] == service.tenants
    assert 303 == await status(browser, "post", "/explorer/logout", cookie=cookie, origin=HERE)
    assert 401 == await status(browser, "get", "/explorer/cache", cookie=cookie)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("post", "/v1/chat/completions", {}),
        ("post", "/v1/chat/completions", {"origin": "http://localhost:3000"}),
        ("post", "/v1/chat/completions", {"origin": HERE, "sec_fetch_site": "same-site"}),
        ("post", "/v1/chat/completions", {"origin": "http://localhost"}),
        ("delete", "/v1/agents/notes", {"origin": "http://localhost:3000"}),
        ("post", "/v1/agents/notes/fork", {}),
        ("get", "/?texts=true", {"sec_fetch_site": "same-site"}),
        ("get", "/?texts=true", {"sec_fetch_site": "cross-site"}),
    ],
)
async def test_a_cookie_from_another_page_opens_nothing(
    method: str, path: str, headers: dict[str, str]
) -> None:
    """A page on another port of the same host makes the browser send it, and is refused."""
    service = FakeService()
    browser = client(service)
    cookie = (await cookie_of(browser)).split(";")[0]
    assert 401 == await status(browser, method, path, cookie=cookie, **headers)
    assert [] == service.commands


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://localhost", None])
@pytest.mark.parametrize("path", ["/explorer/login", "/explorer/logout"])
async def test_a_forged_form(path: str, origin: str | None) -> None:
    """A page of another server can neither log a browser in nor log it out."""
    browser = client()
    cookie = (await cookie_of(browser)).split(";")[0]
    headers = {**FORM, **({"origin": origin} if origin else {})}
    if path == "/explorer/logout":
        headers["cookie"] = cookie
    response = await browser.post(path, headers=headers, data=f"key={'b' * 16}")
    assert response.status_code in (401, 403)
    assert "set-cookie" not in response.headers
    assert 200 == await status(browser, "get", "/", cookie=cookie)


async def test_a_key_comes_before_a_cookie() -> None:
    """A request with a key is that key's, also if the key is unknown."""
    service = FakeService()
    browser = client(service)
    cookie = (await cookie_of(browser)).split(";")[0]
    path = "/v1/chat/completions"
    assert 200 == await status(
        browser, "post", path, cookie=cookie, origin=HERE, x_api_key="b" * 16
    )
    assert ["bob"] == service.tenants
    assert 401 == await status(
        browser, "post", path, cookie=cookie, origin=HERE, x_api_key="c" * 16
    )


@pytest.mark.parametrize("cookie", ["", f"{COOKIE}=", f"{COOKIE}=x", f"{COOKIE}={'a' * 16}"])
async def test_a_cookie_that_was_made_up(cookie: str) -> None:
    """It opens nothing."""
    assert 401 == await status(client(), "get", "/", cookie=cookie)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("key=wrong", 401, "unknown API key"),
        ("key=", 401, "Enter an API key."),
        ("", 401, "Enter an API key."),
        (f"key={'x' * 5000}", 413, "That did not work"),
    ],
)
async def test_a_login_that_is_refused(body: str, code: int, words: str) -> None:
    """The page says why, and does not repeat the key."""
    response = await client().post("/explorer/login", headers={**FORM, "origin": HERE}, data=body)
    text = await response.get_data(as_text=True)
    assert code == response.status_code
    assert words in text
    assert "wrong" not in text
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("/explorer/session?id=x", "/explorer/session?id=x"),
        ("//evil.example/", "/"),
        ("https://evil.example/", "/"),
        ("/explorer/\\evil", "/"),
        ("/v1/sessions", "/"),
    ],
)
async def test_where_a_login_leads(to: str, expected: str) -> None:
    """To a page of the explorer, and nowhere else."""
    response = await client().post(
        "/explorer/login", headers={**FORM, "origin": HERE}, data=f"key={'a' * 16}&next={to}"
    )
    assert expected == response.headers["location"]


def with_cookie(token: str) -> Any:
    """A request of a browser that has this cookie."""
    return SimpleNamespace(headers={}, cookies={COOKIE: token}, method="GET")


async def test_a_login_expires() -> None:
    """After half a day."""
    now = 0.0
    logins = Logins(clock=lambda: now)
    asked = with_cookie(logins.begin("alice"))
    assert "alice" == logins.tenant_of(asked)
    now = LOGIN_S - 1.0
    assert "alice" == logins.tenant_of(asked)
    now = LOGIN_S + 1.0
    assert logins.tenant_of(asked) is None


async def test_a_tenant_can_log_out_no_other() -> None:
    """A tenant has so many logins; the oldest of its own ends for another."""
    logins = Logins()
    operator = logins.begin("local")
    tokens = [logins.begin("alice") for _ in range(LOGINS_MAX + 1)]
    found = [logins.tenant_of(with_cookie(token)) for token in (operator, tokens[0], tokens[1])]
    assert ["local", None, "alice"] == found
    logins.end(with_cookie(tokens[1]))
    assert logins.tenant_of(with_cookie(tokens[1])) is None
