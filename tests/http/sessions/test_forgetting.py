"""Closing and forgetting a session, by the API and on its page."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from cairn.actors.journal_keys import KeyFile
from cairn.http.access.keys import Keys
from cairn.http.app import create_app
from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.journal.tenants import LOCAL
from tests.http.sessions.test_sessions import KEYS, LONG, PLAN, Site, served, talked
from tests.support.held_engine import Hold
from tests.support.in_process_server import ask, chat, generate, serving_fake, wait_idle

pytestmark = pytest.mark.trio

BROWSER = {"accept": "text/html", "sec-fetch-site": "same-origin"}


@contextlib.asynccontextmanager
async def site(folder: Path, keys: Keys | None = None) -> AsyncIterator[Site]:
    """A server over the fake engine with a sealed journal, served on a free port."""
    url = journal_url(folder)
    migrate(url)
    with closing(KeyFile.open(folder / "keys.db")) as sealed:
        store: Any = SqlStore.open(url, keys=sealed)

        def reader() -> SqlStore:
            return SqlStore.open(url, read_only=True, keys=sealed)

        shutdown = trio.Event()
        async with (
            serving_fake(store, keys=sealed, reader=reader) as server,
            trio.open_nursery() as nursery,
        ):
            at = await nursery.start(partial(served, create_app(server, keys=keys), shutdown))
            yield Site(server, store, at, shutdown)
            shutdown.set()
        store.close()


async def sent(
    here: Site, method: str, path: str, key: str | None = None, **of: Any
) -> httpx.Response:
    """The response to a request."""
    async with here.client(key) as client:
        return await client.request(method, path, **of)


def acts(folder: Path) -> list[ev.SessionForgotten]:
    """The sessions that were forgotten."""
    with closing(SqlStore.open(journal_url(folder), read_only=True)) as store:
        found = [decode(row).event for row in store.read()]
    return [one for one in found if isinstance(one, ev.SessionForgotten)]


async def test_a_session_is_forgotten(tmp_path: Path):
    """The answer says what was done; nothing of its texts is shown after that."""
    async with site(tmp_path) as here:
        name, other = await talked(here.server, LONG), await talked(here.server, PLAN)
        response = await sent(here, "POST", f"/v1/sessions/{name}/forget")
        assert 200 == response.status_code, response.text
        done = response.json()
        assert (name, "cairn.session.forgotten", True, []) == (
            *(done["id"], done["object"], done["forgotten"], done["same_text"]),
        )
        assert done["rows"] > 0
        assert "with a backup of keys.db" in done["still_readable"]
        found = await here.get(f"/v1/sessions/{name}")
        assert ("", "closed", "forgotten") == (
            *(found["session"]["words"], found["session"]["state"], found["session"]["closed"]),
        )
        assert 2 == len(found["turns"])
        assert not any(turn.get("words") for turn in found["turns"])
        events = await here.get(f"/v1/sessions/{name}/events", texts="true", limit=100)
        assert not any(row["private"] for row in events["data"])
        page = await sent(here, "GET", f"/explorer/session?id={name}", headers=BROWSER)
        assert 200 == page.status_code
        assert "This session was forgotten" in page.text
        assert "/explorer/session/forget?" not in page.text
        live = await sent(here, "GET", "/explorer/live", headers=BROWSER)
        for shown in (page.text, live.text):
            assert "A long first message" not in shown
        assert "Plan my day" in live.text
        kept = await here.get(f"/v1/sessions/{other}/events", texts="true", limit=100)
        assert any(row["private"] for row in kept["data"])
        again = (await sent(here, "POST", f"/v1/sessions/{name}/forget")).json()
        assert (0, 0) == (again["rows"], again["blocks_removed"])
    assert 1 == len(acts(tmp_path))


async def test_a_session_is_closed(tmp_path: Path):
    """It is closed, and its texts are still there."""
    async with site(tmp_path) as here:
        name = await talked(here.server, LONG)
        response = await sent(here, "DELETE", f"/v1/sessions/{name}")
        assert {"id": name, "object": "cairn.session.closed", "closed": True} == response.json()
        assert 200 == (await sent(here, "DELETE", f"/v1/sessions/{name}")).status_code
        found = await here.get(f"/v1/sessions/{name}")
        assert ("closed", "a request closed it") == (
            *(found["session"]["state"], found["session"]["closed"]),
        )
        assert found["session"]["words"].startswith("A long first message")
    assert [] == acts(tmp_path)


async def test_refusals(tmp_path: Path):
    """What is not there, what is at work, and a parameter that means nothing."""
    async with site(tmp_path) as here:
        for method, path in (("POST", "/v1/sessions/x/forget"), ("DELETE", "/v1/sessions/x")):
            response = await sent(here, method, path)
            assert 404 == response.status_code
            assert "session_not_found" == response.json()["error"]["code"]
        hold = Hold(here.server, "decode")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, here.server, generate(chat(LONG), session_name="mine"))
            await hold.wait()
            for method, path in (
                ("POST", "/v1/sessions/mine/forget"),
                ("DELETE", "/v1/sessions/mine"),
            ):
                response = await sent(here, method, path)
                assert (409, "1") == (response.status_code, response.headers["retry-after"])
                assert "session_busy" == response.json()["error"]["code"]
                assert "'mine' is answering a request" in response.json()["error"]["message"]
            hold.go.set()
        await wait_idle(here.server)
        wrong = await sent(here, "POST", "/v1/sessions/mine/forget?agent=maybe")
        assert (400, "agent") == (wrong.status_code, wrong.json()["error"]["param"])
    assert [] == acts(tmp_path)


async def test_a_tenant_forgets_its_own_alone(tmp_path: Path):
    """Another tenant's session is not there; the operator's key reaches all."""
    async with site(tmp_path, KEYS) as here:
        for tenant in ("alice", "bob"):
            await talked_as(here, tenant)
        for name in ("@bob/mine", "nothing"):
            response = await sent(here, "POST", f"/v1/sessions/{name}/forget", "a")
            assert 404 == response.status_code
        assert 401 == (await sent(here, "POST", "/v1/sessions/mine/forget")).status_code
        done = await sent(here, "POST", "/v1/sessions/mine/forget", "a")
        assert "mine" == done.json()["id"]
        done = await sent(here, "POST", "/v1/sessions/@bob/mine/forget", "k")
        assert "@bob/mine" == done.json()["id"]
    assert ["@alice/mine", "@bob/mine"] == [one.of_session for one in acts(tmp_path)]


async def talked_as(here: Site, tenant: str) -> None:
    """A conversation of a tenant."""
    await ask(here.server, generate(chat(LONG), session_name="mine"), tenant)
    await wait_idle(here.server)


async def test_pages_of_other_ports_cannot(tmp_path: Path):
    """A browser's page on another port of this host may neither close nor forget a session."""
    async with site(tmp_path) as here:
        name = await talked(here.server, LONG)
        other = {"origin": "http://127.0.0.1:1"}
        for method, path in (
            ("POST", f"/v1/sessions/{name}/forget"),
            ("DELETE", f"/v1/sessions/{name}"),
            ("POST", "/explorer/session/forget"),
            ("POST", "/explorer/session/close"),
        ):
            form = {"id": name, "sure": "yes"} if "explorer" in path else None
            response = await sent(here, method, path, headers=other, data=form)
            assert 403 == response.status_code, path
            assert "origin_not_allowed" == response.json()["error"]["code"]
        own = {"origin": here.url, "sec-fetch-site": "same-origin"}
        response = await sent(here, "POST", f"/v1/sessions/{name}/forget", headers=own)
        assert 200 == response.status_code
    assert 1 == len(acts(tmp_path))


# --- pages ----------------------------------------------------------------------------------------


async def post(here: Site, path: str, form: Mapping[str, str]) -> httpx.Response:
    """Send a form, as a browser does it from the server's own page."""
    return await sent(here, "POST", path, headers={**BROWSER, "origin": here.url}, data=form)


async def test_a_page_asks_twice(tmp_path: Path):
    """Its button leads to a page that says what will be done; only its ticked form does it."""
    async with site(tmp_path) as here:
        name, _ = await talked(here.server, LONG), await talked(here.server, LONG + "!")
        page = (await sent(here, "GET", f"/explorer/session?id={name}", headers=BROWSER)).text
        for what in ("close", "forget"):
            assert f'href="/explorer/session/{what}?id={name}"' in page
            asked = await sent(here, "GET", f"/explorer/session/{what}?id={name}", headers=BROWSER)
            assert 200 == asked.status_code
            assert f'<form method="post" action="/explorer/session/{what}">' in asked.text
            refused = await post(here, f"/explorer/session/{what}", {"id": name})
            assert 400 == refused.status_code
            assert "tick the box" in refused.text
        assert "cannot be read again" in asked.text
        assert [] == acts(tmp_path)
        sure = {"id": name, "sure": "yes"}
        closed = await post(here, "/explorer/session/close", sure)
        assert (303, f"/explorer/session?id={name}") == (
            *(closed.status_code, closed.headers["location"]),
        )
        page = (await sent(here, "GET", f"/explorer/session?id={name}", headers=BROWSER)).text
        assert "/explorer/session/close?" not in page
        done = await post(here, "/explorer/session/forget", sure)
        assert 200 == done.status_code
        assert "cannot be read any more" in done.text
        assert "have the same beginning" in done.text
        assert "default-src" in done.headers["content-security-policy"]
        nowhere = await post(here, "/explorer/session/forget", {"id": "x", "sure": "yes"})
        assert 404 == nowhere.status_code
    assert 1 == len(acts(tmp_path))


async def test_a_browser_that_does_not_say_which_page_sends(tmp_path: Path):
    """Over plain HTTP browsers send no Sec-Fetch-Site: the origin alone decides then."""
    async with site(tmp_path) as here:
        name = await talked(here.server, LONG)
        sure, html = {"id": name, "sure": "yes"}, {"accept": "text/html"}
        for origin in (None, "null", "http://evil.example", "http://127.0.0.1:1"):
            headers = html if origin is None else {**html, "origin": origin}
            response = await sent(
                here, "POST", "/explorer/session/forget", headers=headers, data=sure
            )
            assert 403 == response.status_code, origin
        assert [] == acts(tmp_path)
        own = {**html, "origin": here.url}
        done = await sent(here, "POST", "/explorer/session/forget", headers=own, data=sure)
        assert 200 == done.status_code
    assert 1 == len(acts(tmp_path))


async def test_a_body_that_is_too_long(tmp_path: Path):
    """A form of these pages is small."""
    async with site(tmp_path) as here:
        name = await talked(here.server, LONG)
        form = {"id": name, "sure": "yes", "more": "x" * 5000}
        assert 413 == (await post(here, "/explorer/session/forget", form)).status_code
    assert [] == acts(tmp_path)


async def test_the_operator_forgets_another_tenants(tmp_path: Path):
    """A page of another tenant's session names it as the operator does."""
    async with site(tmp_path, KEYS) as here:
        await talked_as(here, "alice")
        headers = {**BROWSER, "origin": here.url}
        asked = await sent(
            here, "GET", "/explorer/session/forget?id=@alice/mine", "k", headers=BROWSER
        )
        assert "@alice/mine" in asked.text
        done = await sent(
            here,
            "POST",
            "/explorer/session/forget",
            "k",
            headers=headers,
            data={"id": "@alice/mine", "sure": "yes"},
        )
        assert 200 == done.status_code
        assert LOCAL not in [one.tenant for one in acts(tmp_path)]
    assert ["@alice/mine"] == [one.of_session for one in acts(tmp_path)]
