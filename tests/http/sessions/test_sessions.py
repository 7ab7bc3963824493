"""What a client sees of sessions, the cache and bugs, over a server whose engine is fake."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import attrs
import httpx
import pytest
import trio

from cairn.actors import looking
from cairn.actors.looking import READ_TEXTS, NothingThere
from cairn.actors.server import Server
from cairn.http.access.keys import Keys
from cairn.http.app import CairnApp, create_app
from cairn.http.server.listen import bind_socket, serve_http
from cairn.http.server.live_streams import StreamLimits
from cairn.journal import events as ev
from cairn.journal.explanations import explain
from cairn.journal.rows.store import MemoryStore
from cairn.journal.tenants import LOCAL
from tests.support.in_process_server import (
    ask,
    chat,
    events_of,
    generate,
    serving_fake,
    wait_idle,
)

pytestmark = pytest.mark.trio

KEYS = Keys([(LOCAL, "k" * 16), ("alice", "a" * 16), ("bob", "b" * 16)])
LONG = "A long first message, so that there are blocks to be reused: " + "x" * 100
PLAN = "Plan my day, please. It has many hours, so this is long: " + "y" * 100


@attrs.frozen
class Site:
    """A server, and clients that call it by HTTP."""

    server: Server
    store: MemoryStore
    url: str
    shutdown: trio.Event

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        """A client with the key of which this is the first letter."""
        headers = {"x-api-key": key * 16} if key is not None else {}
        return httpx.AsyncClient(base_url=self.url, timeout=60, headers=headers)

    async def get(self, path: str, key: str | None = None, **query: Any) -> Any:
        """The object at an address."""
        async with self.client(key) as client:
            response = await client.get(path, params=query)
        assert 200 == response.status_code, response.text
        return response.json()

    async def refused(self, path: str, key: str | None = None, **query: Any) -> tuple[int, str]:
        """The status and the message of a refusal."""
        async with self.client(key) as client:
            response = await client.get(path, params=query)
        return response.status_code, response.json()["error"]["message"]


@contextlib.asynccontextmanager
async def site(
    keys: Keys | None = None, streams: StreamLimits | None = None, *, grace_s: float = 1.0
) -> AsyncIterator[Site]:
    """A server over the fake engine, served on a free port."""
    store, shutdown = MemoryStore(), trio.Event()
    async with serving_fake(store) as server, trio.open_nursery() as nursery:
        app = create_app(server, keys=keys, streams=streams)
        url = await nursery.start(partial(served, app, shutdown, grace_s))
        yield Site(server, store, url, shutdown)
        shutdown.set()


async def served(
    app: CairnApp,
    shutdown: trio.Event,
    grace_s: float = 1.0,
    *,
    task_status: trio.TaskStatus[str],
) -> None:
    await serve_http(
        app,
        bind_socket("127.0.0.1", 0),
        shutdown=shutdown,
        on_ready=task_status.started,
        on_stop=app.streams.stop,
        grace_s=grace_s,
    )


async def talked(server: Server, *said: str, tenant: str = LOCAL, **of: Any) -> str:
    """Two turns; returns the session."""
    first = await ask(server, generate(chat(*said), **of), tenant)
    await wait_idle(server)
    more = chat(*said, first.text, "And then?")
    await ask(server, generate(more, **of), tenant)
    await wait_idle(server)
    return first.accepted.session


async def test_sessions_are_listed() -> None:
    """The most recently used first, with first words, figures, and where the KV is."""
    async with site() as here:
        one = await talked(here.server, LONG)
        two = await talked(here.server, PLAN)
        page = await here.get("/v1/sessions")
        assert [two, one] == [found["id"] for found in page["data"]]
        assert (False, None) == (page["has_more"], page["before"])
        last, first = page["data"]
        assert first["words"].startswith("A long first message")
        assert (2, "idle", LOCAL, "test") == (
            *(first["turns"], first["state"]),
            *(first["tenant"], first["protocol"]),
        )
        assert 0 < first["reused_tokens"] < first["prompt_tokens"]
        assert first["generated_tokens"] == 48
        assert first["opened_us"] < first["used_us"] < last["used_us"]
        assert "slab" == last["kv"]["where"]
        assert last["kv"]["slab_tokens"] > 0 < last["kv"]["memory_tokens"]
        assert last["context_tokens"] < last["context_max"] == 8192


async def test_the_client_of_a_session() -> None:
    """It is what the last request calls itself, in every protocol, and sessions are found by it."""
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": LONG}]}
    async with site() as here:
        await talked(here.server, PLAN)
        for address, agent in (
            ("/v1/chat/completions", "an-agent/1.0 (cli)"),
            ("/v1/messages", "Another/Python 2.0"),
            ("/v1/messages", "<b>x</b>"),
        ):
            async with here.client() as client:
                sent = await client.post(address, json=body, headers={"user-agent": agent})
            assert 200 == sent.status_code, sent.text
            await wait_idle(here.server)
        names = [one.client for one in events_of(here.store, ev.RequestReceived)]
        assert [None, None, "an-agent", "Another/Python", None] == names
        listed = [one["client"] for one in (await here.get("/v1/sessions"))["data"]]
        assert [None, "Another/Python", "an-agent", None] == listed
        for name in ("an-agent", "Another/Python"):
            found = (await here.get("/v1/sessions", client=name))["data"]
            assert [name] == [one["client"] for one in found]
        assert [] == (await here.get("/v1/sessions", client="an"))["data"]


async def test_pages_and_filters() -> None:
    """A page continues where the one before ended; filters name what is shown."""
    async with site() as here:
        names = [await talked(here.server, f"{LONG} {place}") for place in range(3)]
        await talked(here.server, PLAN, session_name="mine")
        first = await here.get("/v1/sessions", limit=2)
        assert (["mine", names[2]], True) == (
            [one["id"] for one in first["data"]],
            first["has_more"],
        )
        second = await here.get("/v1/sessions", limit=2, before=first["before"])
        assert (names[1::-1], False) == ([one["id"] for one in second["data"]], second["has_more"])

        async def found(**query: Any) -> list[str]:
            page = await here.get("/v1/sessions", **query)
            return [one["id"] for one in page["data"]]

        assert ["mine"] == await found(q="plan MY day")
        assert ["mine"] == await found(q="mine")
        assert [] == await found(q="nothing like it")
        assert 4 == len(await found(state="idle", model="fake", tenant=LOCAL))
        assert [] == await found(state="closed")
        assert [] == await found(model="other")
        assert [] == await found(tenant="alice")
        assert [] == await found(bugs="true")


async def test_a_session_has_its_turns() -> None:
    """The last one first: what it reused, by where it was, and why not more, in words."""
    async with site() as here:
        name = await talked(here.server, LONG)
        found = await here.get(f"/v1/sessions/{name}")
        assert name == found["session"]["id"]
        assert (False, None) == (found["has_more"], found["before"])
        second, first = found["turns"]
        assert (1, 2) == (first["number"], second["number"])
        assert ("new_session", "cold_start", "length") == (
            *(first["path"], first["reason"]),
            first["end"],
        )
        assert ("continuation", None, "And then?") == (
            *(second["path"], second["reason"]),
            second["words"],
        )
        assert "It is a new conversation" in first["explanation"]
        assert "It continues session" in second["explanation"]
        bar = second["tokens"]
        reused = bar["from_slab"] + bar["from_blocks"] + bar["from_partial"]
        assert 0 < reused
        assert bar["prompt"] == reused + bar["computed"]
        assert 24 == bar["generated"]
        assert second["received_us"] <= second["first_token_us"] <= second["ended_us"]
        rows = {row.position: row.kind for row in here.store.rows}
        assert ("request_received", "path_selected", "request_finished") == tuple(
            rows[at] for at in second["rows"].values()
        )
        page = await here.get(f"/v1/sessions/{name}", limit=1)
        assert ([2], True, 2) == (
            [one["number"] for one in page["turns"]],
            *(page["has_more"], page["before"]),
        )
        page = await here.get(f"/v1/sessions/{name}", limit=1, before=2)
        assert ([1], False) == ([one["number"] for one in page["turns"]], page["has_more"])


async def test_words_of_a_session_that_begins_late() -> None:
    """They are those of the conversation, and of the question."""
    async with site() as here:
        await ask(here.server, generate(chat("Once upon a time", "a", "What then?")))
        await wait_idle(here.server)
        (found,) = (await here.get("/v1/sessions"))["data"]
        assert "Once upon a time … What then?" == found["words"]
        raw = attrs.evolve(
            generate(chat("x")), conversation=None, prompt="The path", top_logprobs=None
        )
        await ask(here.server, raw)
        await ask(here.server, attrs.evolve(raw, prompt=(65, 66, 67)))
        await wait_idle(here.server)
        page = await here.get("/v1/sessions")
        assert ["", "The path"] == [one["words"] for one in page["data"][:2]]


async def test_words_of_a_client_are_not_those_of_a_conversation() -> None:
    """A first message with nothing but what the client wrote is left out, unless it is all."""
    async with site() as here:
        await ask(here.server, generate(chat("<folder>/home</folder>")))
        await ask(here.server, generate(chat("<folder>/root</folder>", "a", "Mend it")))
        await wait_idle(here.server)
        page = await here.get("/v1/sessions")
        assert ["Mend it", "<folder>/home</folder>"] == [one["words"] for one in page["data"]]


async def test_a_clock_is_shown() -> None:
    """The habit has its name, and the texts that differ are apart."""
    async with site() as here:
        await ask(here.server, generate(chat("It is 14:05. " + LONG, "a", "Hello")))
        await wait_idle(here.server)
        said = await ask(
            here.server, generate(chat("It is 14:06. " + LONG, "a", "Hello", "b", "Go on"))
        )
        (turn,) = (await here.get(f"/v1/sessions/{said.accepted.session}"))["turns"]
        assert ("clock", "14:05", "14:06", "messages_changed") == (
            *(turn["habit"], turn["was"], turn["now"]),
            turn["diverged_part"],
        )


async def test_events_are_paged() -> None:
    """All rows of the session in order, by pages from either end; texts only if asked for."""
    async with site() as here:
        name = await talked(here.server, LONG)
        await talked(here.server, PLAN)
        due = [row.position for row in here.store.rows if row.stream == f"session/{name}"]
        seen, after = [], 0
        while after is not None:
            page = await here.get(f"/v1/sessions/{name}/events", after=after, limit=7)
            seen += [one["position"] for one in page["data"]]
            assert 7 >= len(page["data"]) > 0
            after = page["after"]
        assert due == seen
        assert "private" not in page["data"][0]
        last = await here.get(f"/v1/sessions/{name}/events", before=due[-1], limit=3)
        assert (due[-4:-1], True) == (
            [one["position"] for one in last["data"]],
            last["has_more"],
        )
        found = await here.get(f"/v1/sessions/{name}/events", texts="true", limit=100)
        received = [one for one in found["data"] if one["kind"] == "request_received"]
        assert "And then?" == received[-1]["private"]["words"]
        stored = {row.position: row for row in here.store.rows}
        for one in found["data"]:
            row = stored[one["position"]]
            assert (row.hash, json.loads(row.public)) == (one["hash"], one["payload"])


async def test_events_are_followed() -> None:
    """The rows that are there, and then those of a request, with positions to go on from."""
    async with site() as here:
        name = await talked(here.server, LONG, session_name="mine")
        last = max(row.position for row in here.store.rows)
        async with (
            here.client() as client,
            client.stream(
                "GET", f"/v1/sessions/{name}/events", params={"stream": "true"}
            ) as response,
        ):
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            ids: list[int] = []
            with trio.fail_after(60):
                while not ids or ids[-1] < _last_of(here, name):
                    line = await anext(lines)
                    ids += [int(line[4:])] if line.startswith("id: ") else []
                await ask(here.server, generate(chat(LONG), session_name="mine"))
                await wait_idle(here.server)
                while ids[-1] < _last_of(here, name):
                    line = await anext(lines)
                    ids += [int(line[4:])] if line.startswith("id: ") else []
        due = [row.position for row in here.store.rows if row.stream == f"session/{name}"]
        assert due == ids
        async with (
            here.client() as client,
            client.stream(
                "GET",
                f"/v1/sessions/{name}/events",
                params={"stream": "true"},
                headers={"last-event-id": str(last)},
            ) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    assert int(line[4:]) == next(at for at in due if at > last)
                    break


def _last_of(here: Site, name: str) -> int:
    rows = [row.position for row in here.store.rows if row.stream == f"session/{name}"]
    return rows[-1]


async def test_a_stream_of_a_session_that_is_forgotten() -> None:
    """It ends, with an event that says so, after the rows that there are."""
    async with site() as here:
        name = await talked(here.server, LONG, session_name="mine")
        async with (
            here.client() as client,
            client.stream(
                "GET", f"/v1/sessions/{name}/events", params={"stream": "true"}
            ) as response,
        ):
            lines = response.aiter_lines()
            with trio.fail_after(60):
                while not (await anext(lines)).startswith("id: "):
                    pass
                assert 200 == (await client.delete(f"/v1/sessions/{name}")).status_code
                here.server.loaded.sequencer.append(forgotten(name))
                rest = [line async for line in lines]
        assert "event: gone" in rest
        assert any('"session_closed"' in line for line in rest)


async def test_a_stream_that_is_behind_a_prune(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, because there are no rows to go on with."""

    async def pruned(*_: Any, **__: Any) -> Any:
        raise NothingThere("mine")

    async with serving_fake() as server:
        await talked(server, LONG, session_name="mine")
        look = server.for_tenant(LOCAL).looking(of_all=True, texts=False)
        async with look.live("mine", 0) as rows:
            monkeypatch.setattr(looking.Looking, "events", pruned)
            assert ([], True) == (await rows.next(), rows.gone)


def forgotten(session: str) -> ev.SessionForgotten:
    """The event with which a session is forgotten."""
    return ev.SessionForgotten(
        of_session=session,
        tenant=LOCAL,
        rows=0,
        key_ids=(),
        blocks=(),
        removed=(),
        same_text=(),
    )


async def test_a_reader_that_is_too_slow_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the end, and can go on after the last row that it got."""
    monkeypatch.setattr(looking, "LIVE_MAX", 2)
    async with serving_fake() as server:
        name = await talked(server, LONG, session_name="mine")
        look = server.for_tenant(LOCAL).looking(of_all=True, texts=False)
        async with look.live(name, 0) as rows:
            first = await rows.next()
            await talked(server, PLAN, session_name="mine")
            found = first
            with trio.fail_after(60):
                while found:
                    last, found = found[-1]["position"], await rows.next()
        await talked(server, LONG, session_name="mine")
        async with look.live(name, last) as rows:
            more = await rows.next()
            assert more[0]["position"] > last


async def test_a_tenant_reads_one_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other pages wait, and another tenant has a share of its own."""
    async with serving_fake() as server:
        held, reading = trio.Event(), 0
        for tenant in ("alice", "bob"):
            await talked(server, LONG, tenant=tenant, session_name="notes")
        writer = server.loaded.writer
        rows = writer.rows

        async def waits(*of: Any, **named: Any) -> Any:
            nonlocal reading
            reading += 1
            await held.wait()
            return await rows(*of, **named)

        monkeypatch.setattr(writer, "rows", waits)

        async def reads(tenant: str, kind: str) -> None:
            look = server.for_tenant(tenant).looking(of_all=False, texts=False)
            name = f"@{tenant}/notes"
            if kind == "events":
                assert (await look.events(name, most=5))[0]
            elif kind == "turns":
                assert (await look.turns(name, None, 5))[0]
            else:
                assert 0 == (await look.verify(name)).passed_over

        async with trio.open_nursery() as nursery:
            for kind in ("events", "turns", "rows", "events"):
                nursery.start_soon(reads, "alice", kind)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert 1 == reading
            nursery.start_soon(reads, "bob", "turns")
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert 2 == reading
            held.set()
        assert 5 == reading


async def test_turns_are_explained_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """To decode and explain a page of them would delay all tenants."""
    threads = set[int]()

    def watched(*of: Any, **named: Any) -> Any:
        threads.add(threading.get_ident())
        return explain(*of, **named)

    monkeypatch.setattr(looking, "explain", watched)
    async with serving_fake() as server:
        name = await talked(server, LONG)
        look = server.for_tenant(LOCAL).looking(of_all=True, texts=False)
        assert 2 == (await look.turns(name, None, 5))[1]
    assert threads
    assert threading.get_ident() not in threads


async def test_the_cache_by_session() -> None:
    """What each session has, and what is shared, with the totals and the last removals."""
    async with site() as here:
        first = await ask(here.server, generate(chat(LONG)))
        await wait_idle(here.server)
        await ask(here.server, generate(chat(LONG, first.text, "One")))
        await wait_idle(here.server)
        await ask(here.server, generate(chat(LONG, first.text, "Another")))
        await wait_idle(here.server)
        found = await here.get("/v1/cache")
        assert 2 == len(found["sessions"])
        assert found["pool"]["slabs"] == 2
        assert found["blocks"]["count"] > 0
        assert [] == found["removed"]
        one, other = found["sessions"]
        assert one["slab_bytes"] > 0 < one["memory_bytes"]
        assert one["shared_bytes"] == other["shared_bytes"] > 0 == one["disk_bytes"]
        assert 1 == len((await here.get("/v1/cache", limit=1))["sessions"])


async def test_bugs_are_listed() -> None:
    """The last one first, with what was expected, and how to see it again."""
    async with site() as here:
        names = [await talked(here.server, LONG, session_name=name) for name in ("one", "two")]
        for name in names:
            here.server.loaded.sequencer.crash(name, ZeroDivisionError("no"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        page = await here.get("/v1/bugs", limit=1)
        (bug,) = page["data"]
        assert ("CRASH", "two", "ZeroDivisionError: no") == (
            *(bug["invariant"], bug["session"]),
            bug["message"],
        )
        assert f"ops replay {bug['id']}" == bug["replay"]
        assert "docs/bugs/CRASH.md" == bug["meaning"]
        assert bug["at_position"] < bug["position"]
        assert bug["time_us"] > 0
        assert page["has_more"]
        (other,) = (await here.get("/v1/bugs", before=page["before"]))["data"]
        assert "one" == other["session"]
        found = await here.get("/v1/sessions", bugs="true")
        assert [[bug["id"]], [other["id"]]] == [one["bugs"] for one in found["data"]]
        assert ["quarantined"] * 2 == [one["state"] for one in found["data"]]


@pytest.mark.parametrize("name", ["@alice/notes", "@alice/gone"])
async def test_a_shadow_check_that_differs_is_of_its_session(name: str) -> None:
    """
    Its tenant sees it, and no other. The operator sees what was expected only if asked, which is
    journaled; also of a session whose rows were pruned.
    """
    async with site(KEYS) as here:
        await talked(here.server, LONG, tenant="alice", session_name="notes")
        found = ev.InvariantViolated(
            bug_id="bug-1",
            invariant="INV-3",
            at_position=3,
            session=None,
            of_session=name,
            request=None,
            fingerprint=None,
            cairn_version="0",
            message="an answer computed again differs",
            expected="tokens 1 2 3",
            actual="tokens 1 2 4",
            trace="",
        )
        here.server.loaded.sequencer.append(found)
        await wait_idle(here.server)
        (bug,) = (await here.get("/v1/bugs", "k"))["data"]
        assert name == bug["session"]
        assert not {"expected", "actual"} & set(bug)
        assert [] == _acts(here)
        (bug,) = (await here.get("/v1/bugs", "k", texts="true"))["data"]
        assert ("tokens 1 2 3", "tokens 1 2 4") == (bug["expected"], bug["actual"])
        assert [f"sessions {name}"] == _acts(here)
        (bug,) = (await here.get("/v1/bugs", "a"))["data"]
        assert (name.removeprefix("@alice/"), "tokens 1 2 3") == (bug["session"], bug["expected"])
        assert [] == (await here.get("/v1/bugs", "b"))["data"]
        async with here.client("k") as client:
            page = await client.get("/explorer/bugs", headers={"accept": "text/html"})
        assert 200 == page.status_code
        assert "tokens 1 2" not in page.text


async def test_a_tenant_sees_its_own_alone() -> None:
    """No address names another tenant's session, and none shows figures of all."""
    async with site(KEYS) as here:
        alices = await talked(here.server, LONG, tenant="alice", session_name="notes")
        bobs = await talked(here.server, PLAN, tenant="bob")
        assert "notes" == alices
        page = await here.get("/v1/sessions", "a")
        assert [("notes", "alice")] == [(one["id"], one["tenant"]) for one in page["data"]]
        assert page["data"][0]["words"].startswith("A long first message")
        assert 2 == len((await here.get("/v1/sessions/notes", "a"))["turns"])
        cache = await here.get("/v1/cache", "a")
        assert ["notes"] == [one["session"] for one in cache["sessions"]]
        assert not {"pool", "blocks", "removed"} & set(cache)
        for name in (bobs, f"@bob/{bobs}", "@alice/notes"):
            for path in (f"/v1/sessions/{name}", f"/v1/sessions/{name}/events"):
                status, words = await here.refused(path, "a", texts="true")
                assert 404 == status
                assert "there is no session" in words
        here.server.loaded.sequencer.crash(f"@bob/{bobs}", ZeroDivisionError("no"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert [] == (await here.get("/v1/bugs", "a"))["data"]
        assert [bobs] == [one["session"] for one in (await here.get("/v1/bugs", "b"))["data"]]
        assert [] == _acts(here)


async def test_the_operator_sees_all_without_texts_unless_asked() -> None:
    """That texts of another tenant were asked for is in the journal before they are sent."""
    async with site(KEYS) as here:
        await talked(here.server, "It is 14:05. " + LONG, tenant="alice", session_name="notes")
        await ask(
            here.server,
            generate(chat("It is 14:06. " + LONG), session_name="notes"),
            "alice",
        )
        await wait_idle(here.server)
        own = await talked(here.server, PLAN)
        page = await here.get("/v1/sessions", "k")
        assert [own, "@alice/notes"] == [one["id"] for one in page["data"]]
        assert page["data"][0]["words"].startswith("Plan my day")
        assert "words" not in page["data"][1]
        assert [] == (await here.get("/v1/sessions", "k", q="long first"))["data"]
        plain = await here.get("/v1/sessions/@alice/notes", "k")
        events = await here.get("/v1/sessions/@alice/notes/events", "k")
        for found in (page, plain, events, await here.get("/v1/cache", "k")):
            for text in ("14:0", "A long first", "And then"):
                assert text not in json.dumps(found)
        assert "differs from that of session notes" in plain["turns"][0]["explanation"]
        assert [] == _acts(here)

        asked = await here.get("/v1/sessions/@alice/notes", "k", texts="true")
        assert "`14:05` became `14:06`" in asked["turns"][0]["explanation"]
        assert ["sessions @alice/notes"] == _acts(here)
        listed = await here.get("/v1/sessions", "k", texts="true", q="14:05")
        assert ["@alice/notes"] == [one["id"] for one in listed["data"]]
        found = await here.get("/v1/sessions/@alice/notes/events", "k", texts="true")
        assert "14:05" in json.dumps(found)
        assert 3 == len(_acts(here))
        await here.get(f"/v1/sessions/{own}", "k", texts="true")
        assert 3 == len(_acts(here))  # its own texts are not another tenant's


def _acts(here: Site) -> list[str]:
    acts = events_of(here.store, ev.OperatorActed)
    assert {READ_TEXTS} >= {one.action for one in acts}
    return [one.detail for one in acts]


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("/v1/sessions", {"limit": 0}, "limit must be between 1 and 100"),
        ("/v1/sessions", {"limit": 101}, "limit must be between 1 and 100"),
        ("/v1/sessions", {"limit": "x"}, "limit must be a number"),
        ("/v1/sessions", {"before": "-1"}, "before must be a number"),
        ("/v1/sessions", {"before": "9" * 19}, "before must be a number"),
        ("/v1/sessions", {"bugs": "perhaps"}, "bugs must be true or false"),
        ("/v1/sessions/x/events", {"texts": "2"}, "texts must be true or false"),
        ("/v1/cache", {"limit": "٣"}, "limit must be a number"),
    ],
)
async def test_parameters_that_cannot_be_used(path: str, query: dict[str, Any], words: str) -> None:
    """The message names the parameter."""
    async with site() as here:
        status, message = await here.refused(path, **query)
        assert 400 == status
        assert words in message


async def test_a_name_that_ends_like_an_address() -> None:
    """A client may choose any name, and its session is found."""
    async with site() as here:
        await talked(here.server, LONG, session_name="my/events")
        found = await here.get("/v1/sessions/my/events")
        assert "my/events" == found["session"]["id"]
        assert (await here.get("/v1/sessions/my/events/events"))["data"]
