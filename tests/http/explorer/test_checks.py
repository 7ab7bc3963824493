"""What the buttons of a session's page find: its rows verified, its decisions made again."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.actors import looking
from cairn.actors.threads import pages
from cairn.journal.rows.codec import row_hash
from tests.http.sessions.test_sessions import KEYS, LONG, PLAN, Site, site, talked

pytestmark = pytest.mark.trio


async def pressed(
    here: Site, what: str, name: str, key: str | None = None, origin: str | None = None
) -> tuple[int, str]:
    """The status and the page after a button was pressed."""
    headers = {"accept": "text/html", "origin": origin or here.url.rstrip("/")}
    async with here.client(key) as client:
        response = await client.post(
            f"/explorer/session/{what}", data={"id": name}, headers=headers
        )
    return response.status_code, response.text


async def test_verified() -> None:
    """All rows are as they were written; what was read is said."""
    async with site() as here:
        await talked(here.server, PLAN)
        name = await talked(here.server, LONG)
        async with here.client() as client:
            page = await client.get("/explorer/session", params={"id": name})
        for what in ("verify", "replay"):
            assert f'action="/explorer/session/{what}"' in page.text
        status, text = await pressed(here, "verify", name)
        own = [row.position for row in here.store.rows if row.stream == f"session/{name}"]
        assert 200 == status
        assert f"All {len(own)} rows of this session ({own[0]} to {own[-1]})" in text
        assert "as they were written" in text


@pytest.mark.parametrize(
    ("column", "fact"),
    [
        ("public", "the row was changed"),
        ("private", "the private payload was changed"),
        ("hash", "the row was changed"),
        ("time_us", "the row was changed"),
        ("stream", "the row is another one"),
        ("rehashed", "not chained"),
        ("seq", "it is not the next row of its session"),
    ],
)
async def test_a_row_that_was_changed(column: str, fact: str) -> None:
    """In the store, though the server still has it in memory; its page names the row."""
    async with site() as here:
        name = await talked(here.server, LONG)
        own = [at for at, row in enumerate(here.store.rows) if row.stream == f"session/{name}"]
        at = next(n for n in own[1:] if here.store.rows[n].private is not None and n - 1 in own)
        row = here.store.rows[at]
        changes: Any = {
            "public": {"public": row.public.replace(b'"', b"'", 1)},
            "private": {"private": b"{}"},
            "hash": {"hash": "0" * 64},
            "time_us": {"time_us": row.time_us + 1},
            "stream": {"stream": "session/another"},
            "seq": {"seq": row.seq + 1},
            "rehashed": {"previous_hash": "1" * 64},
        }[column]
        changed = attrs.evolve(row, **changes)
        if column in ("rehashed", "seq"):
            changed = attrs.evolve(changed, hash=row_hash(changed))
        here.store.rows[at] = changed
        _, text = await pressed(here, "verify", name)
        assert "the journal is not as this server wrote it" in text
        assert fact in text
        assert f'class="number">{row.position}</td>' in text


async def test_a_row_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named; and of a long session the last rows are read."""
    async with site() as here:
        name = await talked(here.server, LONG)
        own = [row.position for row in here.store.rows if row.stream == f"session/{name}"]
        monkeypatch.setattr(looking, "CHECKED_ROWS", 5)
        _, text = await pressed(here, "verify", name)
        assert f"All 5 rows of this session ({own[-5]} to {own[-1]})" in text
        assert f"{len(own) - 5} earlier rows" in text
        del here.store.rows[own[-2] - 1]
        assert "the row is missing" in (await pressed(here, "verify", name))[1]


async def test_replayed() -> None:
    """Each decision is made again, and each check."""
    async with site() as here:
        name = await talked(here.server, LONG)
        status, text = await pressed(here, "replay", name)
        assert 200 == status
        assert "Same: 2 path decisions made again" in text
        assert "continuation" in text
        assert "cold start" in text


async def test_a_decision_that_comes_out_differently() -> None:
    """The invariant that it breaks is named, with its row."""
    async with site() as here:
        name = await talked(here.server, LONG)
        at = max(n for n, row in enumerate(here.store.rows) if row.kind == "path_selected")
        row = here.store.rows[at]
        here.store.rows[at] = attrs.evolve(
            row, public=row.public.replace(b'"continuation"', b'"new_session"')
        )
        _, text = await pressed(here, "replay", name)
        assert f"row {row.position}:" in text
        assert "INV-" in text
        assert "not on record" in text
        assert "Same:" not in text


async def test_a_replay_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of time, and of one at a time; the page says what to do in its place."""
    async with site() as here:
        name = await talked(here.server, LONG)
        monkeypatch.setattr(looking, "REPLAY_S", -1.0)
        _, text = await pressed(here, "replay", name)
        assert "could not replay up to the session's last row" in text
        assert f"ops replay {name}" in text
        monkeypatch.setattr(looking, "REPLAY_S", 10.0)
        monkeypatch.setattr(pages, "REPLAYS_MAX", 0)
        assert "another replay runs" in (await pressed(here, "replay", name))[1]
        monkeypatch.setattr(pages, "REPLAYS_MAX", 1)
        del here.store.rows[0]
        assert "were pruned" in (await pressed(here, "replay", name))[1]


async def test_who_may_press() -> None:
    """A page of this server; and a tenant of its own sessions."""
    async with site(KEYS) as here:
        await talked(here.server, LONG, tenant="alice", session_name="notes")
        for what in ("verify", "replay"):
            assert 200 == (await pressed(here, what, "notes", "a"))[0]
            assert 200 == (await pressed(here, what, "@alice/notes", "k"))[0]
            assert 404 == (await pressed(here, what, "notes", "b"))[0]
            assert 404 == (await pressed(here, what, "@alice/notes", "b"))[0]
            status, _ = await pressed(here, what, "notes", "a", origin="http://localhost:1")
            assert 403 == status
            assert LONG[:20] not in (await pressed(here, what, "@alice/notes", "k"))[1]
