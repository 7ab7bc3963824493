"""The explorer's pages over the fake engine: what they show, and that no text of theirs can run."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import quote

import attrs
import pytest
import structlog
import trio
import trio.testing

from cairn.actors.looking import READ_TEXTS, ReplayView, RowsView, SessionFilter
from cairn.actors.models.size import ModelSize
from cairn.engine.answer.parts import Called, Said, Thought
from cairn.engine.prompt.template import Message
from cairn.http.app import create_app
from cairn.http.explorer.pages import POLICY, page
from cairn.http.health import BlocksObject, PoolObject
from cairn.http.sessions.objects import (
    BarObject,
    BugObject,
    CacheObject,
    EventObject,
    KvObject,
    RemovedBlock,
    SessionCache,
    SessionObject,
    TurnObject,
    TurnRows,
)
from cairn.http.starting import StartingServer
from cairn.journal import events as ev
from cairn.journal.invariants import SENTENCES
from cairn.journal.replay import Finding
from cairn.journal.session_check import RowFault, RowsCheck, SessionReplay
from cairn.journal.stories import RequestStory
from cairn.journal.tenants import LOCAL
from tests.http.agents.fake_agents import TURN, FakeAgents
from tests.http.explorer.attacks import ATTACKS, foreign, seen
from tests.http.fake_service import FACTS, FakeService
from tests.http.sessions.test_sessions import KEYS, LONG, PLAN, Site, site, talked
from tests.support.in_process_server import ask, chat, events_of, generate, wait_idle

pytestmark = pytest.mark.trio

HTML = {"accept": "text/html"}
PAGES = (
    *("/", "/explorer/chat", "/explorer/live", "/explorer/cache", "/explorer/bugs"),
    *("/explorer/models", "/explorer/connect", "/explorer/api"),
)
HARMLESS = "nothing that would run"


async def shown(
    here: Site, path: str, key: str | None = None, status: int = 200, **query: Any
) -> str:
    """A page, whose headers are checked."""
    async with here.client(key) as client:
        response = await client.get(path, params=query or None, headers=HTML)
    assert status == response.status_code, response.text
    assert "text/html; charset=utf-8" == response.headers["content-type"]
    assert POLICY == response.headers["content-security-policy"]
    assert "no-store" == response.headers["cache-control"]
    return response.text


async def test_the_policy_allows_nothing_inline() -> None:
    """Scripts and styles come from the server's own files alone."""
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'; script-src 'self'; style-src 'self';")


async def test_each_page() -> None:
    """It says where it is, and has neither inline script nor inline style."""
    async with site() as here:
        name = await talked(here.server, LONG)
        for path in (*PAGES, f"/explorer/session?id={name}", f"/explorer/events?id={name}"):
            text = await shown(here, path)
            parsed = seen(text)
            assert [] == list(foreign(parsed)), path
            assert "<style" not in text
            assert not re.search(r"<script(?! src=\"/explorer/assets/)", text)
            assert not [names for _, names in parsed.shapes if "style" in names]
            assert 'aria-current="page"' in text


async def test_the_list_of_sessions() -> None:
    """First words, reuse and where the KV is; searched by words, and continued on another page."""
    async with site() as here:
        for place in range(52):
            await ask(here.server, generate(chat(f"Talk {place}"), max_tokens=1))
        await talked(here.server, LONG)
        text = await shown(here, "/")
        assert "A long first message" in text
        assert "where-slab" in text
        assert "Talk 51" in text
        assert "Talk 1<" not in text
        (older,) = re.findall(r'rel="next" href="([^"]*)"', text)
        assert "Talk 1<" in await shown(here, older.replace("&amp;", "&"))
        found = await shown(here, "/", q="long first")
        assert "Talk 51" not in found
        assert "A long first message" in found
        assert "No session matches" in await shown(here, "/", q="nothing like it")
        assert "No session matches" in await shown(here, "/", state="closed")


async def test_the_client_of_a_session() -> None:
    """Both pages name it, and the list can be narrowed to it and continued."""
    async with site() as here:
        for place in range(51):
            await ask(here.server, generate(chat(f"Talk {place}"), max_tokens=1, client="a/b"))
        name = await talked(here.server, LONG, client="opencode")
        text = await shown(here, "/")
        assert 'href="/?client=opencode"' in text
        found = await shown(here, "/", client="a/b")
        assert ("opencode" in text, "opencode" in found) == (True, False)
        assert 'name="client" value="a/b"' in found
        (older,) = re.findall(r'rel="next" href="([^"]*)"', found)
        assert "Talk 0<" in await shown(here, older.replace("&amp;", "&"))
        assert "No session matches" in await shown(here, "/", client="a")
        assert ">opencode</a>" in await shown(here, "/explorer/session", id=name)


async def test_no_sessions_yet() -> None:
    """The page says how to begin."""
    async with site() as here:
        assert "Start a chat" in await shown(here, "/")


async def test_a_session() -> None:
    """A bar and a sentence for each turn, and what differs as a diff."""
    async with site() as here:
        await ask(here.server, generate(chat("It is 14:05. " + LONG, "a", "Hello")))
        await wait_idle(here.server)
        said = await ask(
            here.server, generate(chat("It is 14:06. " + LONG, "a", "Hello", "b", "Go on"))
        )
        await wait_idle(here.server)
        text = await shown(here, "/explorer/session", id=said.accepted.session)
        assert "<del>14:05</del>" in text
        assert "<ins>14:06</ins>" in text
        assert '<strong class="warn">clock</strong>' in text
        assert "<code>14:05</code> became <code>14:06</code>" in text
        assert 'class="bar-computed"' in text
        assert "to first token" in text
        assert "tok/s" in text
        name = await talked(here.server, PLAN)
        text = await shown(here, "/explorer/session", id=name)
        assert '<strong class="good">continued</strong>' in text
        assert '<strong class="quiet">new conversation</strong>' in text
        assert f"ops replay {name} journal.jsonl" in text
        assert "there is no session" in await shown(here, "/explorer/session", id="x", status=404)


async def test_a_conversation_that_went_on_elsewhere() -> None:
    """Its page leads to the session that says why, and that one to it."""
    async with site(KEYS) as here:
        first = await ask(
            here.server, generate(chat("It is 14:05. " + LONG, "a", "Hello")), "alice"
        )
        await wait_idle(here.server)
        later = chat("It is 14:06. " + LONG, "a", "Hello", "b", "Go on")
        second = await ask(here.server, generate(later), "alice")
        await wait_idle(here.server)
        old, new = first.accepted.session, second.accepted.session
        for key, before in (("a", ""), ("k", "@alice/")):
            text = await shown(here, "/explorer/session", key, id=f"{before}{old}")
            assert "got a session of its own" in text
            assert f'href="/explorer/session?id={quote(before + new, safe="/")}"' in text
            text = await shown(here, "/explorer/session", key, id=f"{before}{new}")
            assert f'href="/explorer/session?id={quote(before + old, safe="/")}"' in text
            assert "The session it was compared with" in text
            assert "got a session of its own" not in text
        found = await here.get(f"/v1/sessions/{old}", "a")
        assert new == found["session"]["went_on"]
        found = await here.get(f"/v1/sessions/{new}", "a")
        assert [old] == [one["nearest"] for one in found["turns"]]


async def test_the_events_of_a_turn() -> None:
    """Rows of one kind are folded; each has its place and its hash; texts only if asked for."""
    async with site() as here:
        name = await talked(here.server, LONG, session_name="mine")
        text = await shown(here, "/explorer/session", id=name)
        (unfold, *_) = re.findall(r'data-unfold="([^"]*)"', text)
        rows = await shown(here, unfold.replace("&amp;", "&"))
        due = {row.position: row for row in here.store.rows if row.stream == f"session/{name}"}
        (first, last) = re.findall(r"after=(\d+)&amp;last=(\d+)", unfold)[0]
        for position, row in due.items():
            within = int(first) < position <= int(last)
            assert within == (f'<span class="place">{position}</span>' in rows)
            assert within == (f"{row.hash[:16]}…</code>" in rows)
        assert "cache_extended (decode)" in rows
        assert "And then?" not in rows
        assert "And then?" in await shown(here, "/explorer/events", id=name, texts="true")


async def test_a_long_chat_is_shown_in_pages() -> None:
    """The last turns, with a way to the earlier ones and back; a message goes to the end."""
    service = FakeService()
    turns = [attrs.evolve(TURN, request=f"req-{at}") for at in range(1, 121)]
    service.agents.have("notes", *turns)
    client = create_app(service).test_client()

    async def page_of(query: str) -> str:
        response = await client.get(f"/explorer/chat?agent=notes{query}", headers=HTML)
        assert 200 == response.status_code
        return await response.get_data(as_text=True)

    last, middle, first = (
        await page_of(""),
        await page_of("&before=71"),
        await page_of("&before=21"),
    )
    for text, numbers in ((last, (71, 120)), (middle, (21, 70)), (first, (1, 20))):
        found = [int(at) for at in re.findall(r'<article class="exchange" data-turn="(\d+)"', text)]
        assert list(range(numbers[0], numbers[1] + 1)) == found
        assert 'data-turns="120"' in text
    assert 404 == (await client.get("/explorer/chat?agent=none", headers=HTML)).status_code
    assert "&amp;before=71" in last
    assert "&amp;before=21" in middle
    assert "Earlier turns" not in first
    assert "Latest turns" not in last
    assert "Latest turns" in first
    assert ("data-again" in last, "data-again" in first) == (True, False)


async def test_pages_of_events() -> None:
    """A long list continues on another page."""
    async with site() as here:
        name = await talked(here.server, LONG, session_name="mine")
        for _ in range(6):
            await talked(here.server, LONG, session_name="mine")
        path, places = f"/explorer/events?id={name}", []
        while path:
            text = await shown(here, path)
            places += [int(at) for at in re.findall(r'"place">(\d+)</span>', text)]
            path = next(iter(re.findall(r'rel="next" href="([^"]*)"', text)), "")
            path = path.replace("&amp;", "&")
        due = [row.position for row in here.store.rows if row.stream == f"session/{name}"]
        assert due == places


async def test_a_bug() -> None:
    """What was expected and found, the events before, what it means, and how to see it again."""
    async with site() as here:
        assert "No bugs." in await shown(here, "/explorer/bugs")
        await talked(here.server, LONG, session_name="one")
        here.server.loaded.sequencer.crash("one", ZeroDivisionError("no"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        text = await shown(here, "/explorer/bugs")
        (bug,) = events_of(here.store, ev.InvariantViolated)
        assert f"ops replay {bug.bug_id}" in text
        assert "ZeroDivisionError: no" in text
        assert "docs/bugs/CRASH.md" in text
        assert "events before" in text
        assert f'href="/explorer/bugs#{bug.bug_id}"' in await shown(here, "/")


async def test_the_cache_by_session() -> None:
    """What is shared is a part of the bar of its own."""
    async with site() as here:
        first = await ask(here.server, generate(chat(LONG)))
        for words in ("One", "Another"):
            await wait_idle(here.server)
            await ask(here.server, generate(chat(LONG, first.text, words)))
        await wait_idle(here.server)
        text = await shown(here, "/explorer/cache")
        assert 'class="bar-shared"' in text.split("By session")[1].split("</p>", 1)[1]
        assert "Nothing was evicted" in text


async def test_a_tenant_sees_its_own_alone() -> None:
    """No page shows another tenant's session, its name, its texts, or figures of all."""
    async with site(KEYS) as here:
        await talked(here.server, LONG, tenant="alice", session_name="notes")
        bobs = await talked(here.server, PLAN, tenant="bob", session_name="bobs-plan")
        for path in PAGES:
            text = await shown(here, path, "a")
            for secret in ("Plan my day", bobs):
                assert secret not in text, path
        for path in ("/", "/explorer/cache", "/explorer/live"):
            assert "A long first" in await shown(here, path, "a") or path == "/explorer/live"
            assert "Plan my day" in await shown(here, path, "b") or path == "/explorer/live"
        for name in (bobs, f"@bob/{bobs}"):
            for path in ("/explorer/session", "/explorer/events"):
                await shown(here, path, "a", 404, id=name, texts="true")
        assert "in the queue" not in await shown(here, "/explorer/live", "a")
        assert "Removed" not in await shown(here, "/explorer/cache", "a")


async def test_the_operator_sees_texts_only_if_asked() -> None:
    """That is journaled before."""
    async with site(KEYS) as here:
        await talked(here.server, "It is 14:05. " + LONG, tenant="alice", session_name="notes")
        await ask(
            here.server, generate(chat("It is 14:06. " + LONG), session_name="notes"), "alice"
        )
        await wait_idle(here.server)
        session = "/explorer/session?id=@alice/notes"
        for path in (*PAGES, session):
            text = await shown(here, path, "k")
            for secret in ("It is 14", "14:0", "A long first", "And then"):
                assert secret not in text, path
        assert [] == events_of(here.store, ev.OperatorActed)
        assert "<del>14:05</del>" in await shown(here, f"{session}&texts=true", "k")
        assert [READ_TEXTS] == [one.action for one in events_of(here.store, ev.OperatorActed)]


@pytest.mark.parametrize("page", ["cache", "session/verify", "session/replay"])
async def test_texts_on_other_pages_are_journaled_too(page: str) -> None:
    """Each page that shows the first words of another tenant's session."""
    async with site(KEYS) as here:
        await talked(here.server, LONG, tenant="alice", session_name="notes")
        path, params = f"{here.url}/explorer/{page}", {"texts": "true"}
        async with here.client("k") as client:
            if page == "cache":
                answer = await client.get(path, params=params)
            else:
                form = {"id": "@alice/notes"}
                answer = await client.post(
                    path, params=params, data=form, headers={"origin": here.url}
                )
        assert 200 == answer.status_code
        assert "A long first" in answer.text
        assert [READ_TEXTS] == [one.action for one in events_of(here.store, ev.OperatorActed)]


async def hostile(attack: str) -> list[str]:
    """All pages that show texts, with this one wherever a client or a model may put it."""
    pages = []
    async with site() as here:
        attacked = f"{attack} is 14:05{attack}. " + LONG
        await ask(here.server, generate(chat(attacked, attack, "Hello"), session_name=attack))
        await wait_idle(here.server)
        more = chat(attacked.replace("14:05", f"14:06{attack}"), attack, "Hello", attack, attack)
        await ask(
            here.server,
            generate(more, group=attack, requested_model=attack, protocol=attack, client=attack),
        )
        await wait_idle(here.server)
        here.server.loaded.sequencer.crash(attack, ValueError(attack))
        await trio.testing.wait_all_tasks_blocked(0.05)
        listed = [one["id"] for one in (await here.get("/v1/sessions"))["data"]]
        assert attack in listed
        for path in ("/", "/explorer/cache", "/explorer/bugs", "/explorer/live"):
            pages.append(await shown(here, path))
        pages.append(await shown(here, "/", q=attack, model=attack, state=attack, client=attack))
        for name in listed:
            for path in ("/explorer/session", "/explorer/events"):
                pages.append(await shown(here, path, id=name, texts="true"))
        pages.append(await shown(here, "/explorer/session", id=f"no{attack}", status=404))
    return [*pages, *await hostile_chat(attack), *await hostile_objects(attack)]


async def hostile_chat(attack: str) -> list[str]:
    """The chat, and the pages about models, with the text wherever a client may put it."""
    service = FakeService()
    service.facts = attrs.evolve(FACTS, model=attack, fingerprint=attack)
    service.aliases = (attack,)
    service.others = {attack: attrs.evolve(FACTS, model=attack)}
    service.failures = {attack: attack}
    service.sizes = {attack: ModelSize(weights_bytes=1, memory_bytes=1, fault=attack)}
    call = Called(index=0, id=attack, name=attack, arguments=attack)
    turn = attrs.evolve(
        TURN,
        asked=(
            Message(role=attack, content=attack, name=attack),
            Message(role="tool", content=attack, tool_call_id=attack),
        ),
        parts=(Thought(attack), Said(attack), call),
    )
    service.agents.have("notes", turn, system=attack)
    client = create_app(service).test_client()
    pages = []
    for path in (
        "chat",
        "chat?agent=notes",
        "models",
        "connect",
        "live",
        f"login?next=/explorer/{quote(attack)}",
    ):
        response = await client.get(f"/explorer/{path}", headers=HTML)
        assert 200 == response.status_code
        pages.append(await response.get_data(as_text=True))
    return pages


def hostile_checks(attack: str) -> list[tuple[RowsView | None, ReplayView | None]]:
    """What a check of a session's rows and a replay find, where every text is this one."""
    check = RowsCheck("session/x")
    check.faults.append(RowFault(position=1, fact=attack, expected=attack, actual=attack))
    finding = Finding(
        **dict.fromkeys(("bug_id", "invariant", "session", "message"), attack),
        **dict.fromkeys(("expected", "actual"), attack),
        position=1,
        recorded=True,
        reproduced=False,
    )
    story = RequestStory(request=attack, position=1, path=attack, reason=attack, end=attack)
    replay = SessionReplay(rows=1, stories=(story,), findings=(finding,))
    return [
        (RowsView(check=check, passed_over=1), None),
        (None, ReplayView(found=replay, read=1, last=1, why="")),
        (None, ReplayView(found=None, read=1, last=2, why=attack)),
    ]


async def hostile_objects(attack: str) -> list[str]:
    """The pages of objects in which every text is this one, be it one that a server would write."""
    kv = KvObject(where=attack, slab_tokens=1, memory_tokens=1, disk_tokens=1)  # type: ignore[arg-type]
    texts: dict[str, Any] = dict.fromkeys(
        (
            "id",
            "tenant",
            "group",
            "model",
            "protocol",
            "client",
            "words",
            "state",
            "closed",
            "went_on",
        ),
        attack,
    )
    counts = ("turns", "prompt_tokens", "reused_tokens", "generated_tokens", "context_tokens")
    times = ("context_max", "opened_us", "used_us", "expires_us", "position")
    numbers: dict[str, Any] = dict.fromkeys((*counts, *times), 7)
    session = SessionObject(
        **texts, **numbers, named=True, forgotten=True, kv=kv, bugs=[attack], quarantined_by=attack
    )
    turn_texts: dict[str, Any] = dict.fromkeys(
        ("request", "words", "path", "reason", "diverged_part", "explanation", "habit", "nearest"),
        attack,
    )
    tokens = ("prompt", "from_slab", "from_blocks", "from_partial", "prewarmed", "computed")
    turn = TurnObject(
        **turn_texts,
        was=attack,
        now=attack,
        end=attack,
        damaged=attack,
        number=1,
        received_us=1,
        first_token_us=2,
        ended_us=3,
        tokens=BarObject(**dict.fromkeys((*tokens, "generated"), 3)),
        gone_row=7,
        rows=TurnRows(received=1, selected=2, ended=3),
    )
    row = EventObject(
        position=1,
        seq=1,
        version=1,
        time_us=1,
        kind=attack,
        event_id=attack,
        previous_hash=attack,
        hash=attack,
        payload={attack: attack, "step": attack},
        private={attack: [attack]},
    )
    bug_texts: dict[str, Any] = dict.fromkeys(
        ("id", "invariant", "message", "session", "request", "expected", "actual"), attack
    )
    bug = BugObject(
        **bug_texts, replay=attack, meaning=attack, position=1, at_position=1, time_us=1
    )
    cache = CacheObject(
        sessions=[SessionCache(attack, 3, 3, 3, 1)],
        pool=PoolObject(1, 1, 1, 1),
        blocks=BlocksObject(1, 1, 1, 1, 1, 1),
        removed=[RemovedBlock(1, 1, attack, attack, 1)],
    )
    shared: dict[str, Any] = {
        "facts": attrs.evolve(FACTS, model=attack),
        **dict.fromkeys(("base", "model_state", "state", "tenant", "tool"), attack),
        **dict.fromkeys(("of_all", "with_keys", "others", "logged_in", "texts"), True),
        "path": "/explorer/session",
        "bug_count": 1,
    }
    agents = FakeAgents()
    agents.have("notes", TURN)
    chats: dict[str, Any] = {"turns": [], "tokens": {}, "system": attack, "agent": None}
    chats |= {"before": None, "is_last": True}
    which = SessionFilter(text=attack, state=attack, model=attack, client=attack)
    listed: dict[str, Any] = {"states": [attack], "models": [attack, attack]}
    pages = (
        page("sessions.html", **shared, **listed, sessions=[session], before=1, which=which),
        page(
            "session.html",
            **shared,
            session=session,
            turns=[turn],
            total=1,
            before=1,
            agent=attack,
            may_see_texts=False,
        ),
        *(
            page("check.html", **shared, session=session, rows=rows, replay=replay)
            for rows, replay in hostile_checks(attack)
        ),
        page("events.html", **shared, session=session, rows=[row, row], after=1, last=1),
        page("bugs.html", **shared, bugs=[(bug, [row])], before=1, sentences=SENTENCES),
        page("cache.html", **shared, cache=cache, words={attack: attack}, totals=True),
        page(
            "chat.html",
            **shared,
            **chats,
            agents=[agents.facts((LOCAL, "notes"))],
            words={"notes": attack},
        ),
        page("error.html", path="/", message=attack, code=attack, starting=False),
        page("login.html", message=attack, to="/"),
    )
    return [await one.get_data(as_text=True) for one in pages]


SOME_ATTACKS = [
    pytest.param(attack, marks=[pytest.mark.long] * (place % 3 > 0))
    for place, attack in enumerate(ATTACKS)
]
"""A third of them, and the others in `make long`."""


@pytest.fixture(scope="module")
def shapes() -> set[Any]:
    """The elements that the pages have with a harmless text."""
    found: set[Any] = set()
    for text in trio.run(hostile, HARMLESS):
        found |= seen(text).shapes
    return found


@pytest.mark.parametrize("attack", SOME_ATTACKS)
async def test_no_text_can_run(attack: str, shapes: set[Any]) -> None:
    """
    Wherever it is shown, it adds no element and no attribute to the page, leads nowhere else, and
    is shown as it is.
    """
    pages = [seen(text) for text in await hostile(attack)]
    for one in pages:
        assert one.shapes <= shapes
        assert [] == list(foreign(one))
    texts = [" ".join(one.texts) for one in pages]
    plain = " ".join(attack.split())[:40]
    assert len([text for text in texts if plain in " ".join(text.split())]) >= 9


async def test_a_server_that_starts() -> None:
    """The page says so, and comes back by itself."""
    client = create_app(StartingServer()).test_client()
    for path in PAGES:
        response = await client.get(path, headers=HTML)
        text = await response.get_data(as_text=True)
        assert 503 == response.status_code
        assert "The server is starting" in text
        assert 'http-equiv="refresh"' in text
        assert POLICY == response.headers["content-security-policy"]


async def test_a_page_that_waits_for_the_start_fills_no_log() -> None:
    """It asks again every two seconds; what is refused meanwhile is logged for debugging alone."""
    client = create_app(StartingServer()).test_client()
    with structlog.testing.capture_logs() as logs:
        await client.get("/", headers=HTML)
    assert ["debug"] == [one["log_level"] for one in logs]


async def test_what_is_no_browser_is_sent_json() -> None:
    """An error is an envelope unless HTML is asked for."""
    client = create_app(FakeService()).test_client()
    response = await client.get("/explorer/session?id=x")
    assert "session_not_found" == (await response.get_json())["error"]["code"]
    for path in ("/explorer/nothing", "/v1/chat/completions"):
        assert "error" in await (await client.get(path)).get_json()
    posted = await client.post("/explorer/nothing", headers=HTML)
    assert "error" in await posted.get_json()


async def test_an_address_without_a_page() -> None:
    """A browser is shown a page with the navigation, and no command for what its links do."""
    client = create_app(FakeService()).test_client()
    for path, status, words in (
        ("/explorer/nothing", 404, "nothing found at &#39;/explorer/nothing&#39;"),
        ("/v1/chat/completions", 405, "POST"),
        ("/explorer/session?id=none", 404, "there is no session &#39;none&#39;"),
    ):
        response = await client.get(path, headers=HTML)
        text = await response.get_data(as_text=True)
        assert status == response.status_code
        assert words in text
        assert "GET /" not in text
        assert '<a href="/explorer/live">Live</a>' in text


async def test_a_short_id() -> None:
    """The beginning of an id leads to the session, as lists show it, if it is of one alone."""
    async with site() as here:
        name = await talked(here.server, LONG)
        await talked(here.server, PLAN, session_name=f"{name[:8]}x")
        assert name in await shown(here, "/explorer/session", id=name[:8])
        await shown(here, "/explorer/session", id=name[:7], status=404)
        await shown(here, "/explorer/session", id=f"{name[:8]}y", status=404)


async def test_files() -> None:
    """They may be kept for as long as their addresses stay, which follow their contents."""
    client = create_app(FakeService()).test_client()
    text = await (await client.get("/explorer/models", headers=HTML)).get_data(as_text=True)
    for address in re.findall(r'(?:href|src)="(/explorer/assets/[^"]*)"', text):
        response = await client.get(address)
        assert 200 == response.status_code
        assert "immutable" in response.headers["cache-control"]
    assert 404 == (await client.get("/explorer/assets/routes.py")).status_code
    icon = await client.get("/favicon.ico")
    assert "image/svg+xml; charset=utf-8" == icon.content_type


async def test_the_state_of_the_server() -> None:
    """A server that admits no requests says why on each page."""
    service = FakeService()
    client = create_app(service).test_client()
    for changes, words in (
        ({"admission_bug": "<bug>"}, "admission is closed; bug id &lt;bug&gt;"),
        ({"admission_bug": None, "journal_stall": "disk_full"}, "the journal&#39;s disk is full"),
        (
            {"journal_stall": None, "degraded": {"expiry": "<bug>"}},
            "degraded: what expires is not removed (bug id &lt;bug&gt;)",
        ),
        (
            {"degraded": {"block_files": "/shared/n1: gone"}},
            "degraded: blocks cannot be written to /shared/n1: gone",
        ),
    ):
        service.change(**changes)
        text = await (await client.get("/explorer/models", headers=HTML)).get_data(as_text=True)
        assert words in text


async def test_a_model_that_is_not_loaded() -> None:
    """Each page says so beside its name, and the dot is not green."""
    service = FakeService()
    client = create_app(service).test_client()
    states: dict[Literal["loaded", "not_loaded"], tuple[str, str]]
    states = {"not_loaded": ("idle", "· not loaded"), "loaded": ("good", "tokens<")}
    for state, (dot, words) in states.items():
        service.state = state
        text = await (await client.get("/explorer/cache", headers=HTML)).get_data(as_text=True)
        assert f'<span class="dot {dot}"></span>' in text
        assert words in text


async def test_the_page_that_asks_names_the_conversation() -> None:
    """By its first words and its id; by the id alone to an operator who may not read the words."""
    async with site(KEYS) as here:
        name = await talked(here.server, LONG, tenant="alice")
        for what in ("close", "forget"):
            page_of = f"/explorer/session/{what}"
            own = await shown(here, page_of, "a", id=name)
            assert "“A long first message" in own
            assert f"<code>{name}</code>" in own
            assert "A long first" not in await shown(here, page_of, "k", id=f"@alice/{name}")


async def test_settings_of_clients() -> None:
    """They are those of a server with keys, or without."""
    for keys, has, lacks in (
        (None, "No key is needed", ("import os", "CAIRN_API_KEY")),
        (KEYS, "Send your API key", ("No key is needed",)),
    ):
        async with site(keys) as here:
            text = await shown(here, "/explorer/connect", "k" if keys else None)
            assert has in text
            for words in (f"OLLAMA_HOST={here.url}", f"OPENAI_API_BASE_URL={here.url}/v1"):
                assert words in text
            for words in lacks:
                assert words not in text
