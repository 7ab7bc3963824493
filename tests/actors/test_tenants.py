"""Tenants share no session and no block, and cannot find out what the others have."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import cairn
from cairn.actors.errors import Broken, QueueFull, TimedOut
from cairn.actors.models import model_server
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate, Waiting
from cairn.actors.requests.replies import Replies
from cairn.actors.requests.ticket import Ticket
from cairn.actors.server import Server
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from cairn.journal.summaries import Summaries
from tests.gate.conversation import words
from tests.support.in_process_server import Said, ask, events_of, generate, serving

pytestmark = pytest.mark.trio

STORY = words(200)


def command(*more: str, **changes: Any) -> Generate:
    """A request: the story, and the messages after it."""
    roles = ("assistant", "user")
    said = [Message(role=roles[at % 2], content=text) for at, text in enumerate(more)]
    talk = Conversation(messages=(Message(role="user", content=STORY), *said))
    return generate(talk, **{"max_tokens": 4, **changes})


async def ask_as(server: Server, tenant: str, *more: str, **changes: Any) -> Said:
    """Send a request as a tenant."""
    return await ask(server, command(*more, **changes), tenant)


def path(said: Said) -> tuple[str, str | None]:
    """The path of an answer."""
    return said.accepted.path, said.accepted.reason


async def test_a_tenant_is_never_left_out() -> None:
    """
    No function and no class of the product has a default for the tenant: a call that forgets the
    tenant would be answered from a different tenant's data.
    """
    assert {"tenant of f", "tenant of g", "tenant of C"} == tenants_with_a_default(
        ast.parse(
            "def f(a, tenant='local'): ...\n"
            "def g(*, tenant=None, b): ...\n"
            "def h(tenant, b=1, *, c): ...\n"
            "class C:\n    tenant: str = 'local'\n"
            "class D:\n    tenant: str\n"
        )
    )
    source = Path(cairn.__file__).parent
    found = {
        f"{path.relative_to(source)}: {one}"
        for path in source.rglob("*.py")
        for one in tenants_with_a_default(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert set() == found


def tenants_with_a_default(tree: ast.AST) -> set[str]:
    """The functions and classes whose tenant has a default."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            positional = [*given.posonlyargs, *given.args]
            defaults = positional[len(positional) - len(given.defaults) :]
            defaults += [
                one
                for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
                if default is not None
            ]
            found |= {f"tenant of {node.name}" for one in defaults if one.arg == "tenant"}
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"tenant of {node.name}"
                for one in node.body
                if isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and one.target.id == "tenant"
                and one.value is not None
            }
    return found


def assert_apart(store: MemoryStore) -> None:
    """
    Verify the journal, and that requests of two tenants share no block key and no conversation
    part.
    """
    assert () == replay(store.read()).findings
    named: dict[str, str] = {}
    for request in events_of(store, ev.RequestReceived):
        for name in (
            *request.new_keys,
            *(name for _, *names in request.new_parts for name in names),
        ):
            assert request.tenant == named.setdefault(name, request.tenant)


async def test_words_of_another_tenant_are_unknown(model_directory: Any) -> None:
    """
    What one tenant said is not found for a different one, by block or by conversation: the same
    words start cold. Within a tenant they are found: the control.
    """
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        first = await ask_as(server, "alice")
        assert ("new_session", "cold_start") == path(first)
        theirs = await ask_as(server, "bob")
        assert ("new_session", "cold_start", 0) == (*path(theirs), theirs.accepted.cached_tokens)
        open_one = await ask_as(server, "local")
        assert (*path(open_one), open_one.accepted.cached_tokens) == (
            "new_session",
            "cold_start",
            0,
        )
        turn = await ask_as(server, "bob", first.text, "And then?")
        assert ("continuation", None) == path(turn)
        assert theirs.accepted.session == turn.accepted.session
        mine = await ask_as(server, "alice", first.text, "And then?")
        assert ("continuation", None) == path(mine)
        assert mine.accepted.cached_tokens > 0
        again = await ask_as(server, "alice")
        assert again.accepted.cached_tokens > 0
        assert first.tokens == theirs.tokens == open_one.tokens == again.tokens

    assert_apart(store)


async def test_each_tenant_has_a_session_of_a_name(model_directory: Any) -> None:
    """
    Two tenants that use the same session name have a session each. For the second one the name is
    as new as any unused name, and the first one's session continues unchanged.
    """
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        first = await ask_as(server, "alice", session_name="mine")
        theirs = await ask_as(server, "bob", session_name="mine")
        fresh = await ask_as(server, "bob", session_name="new")
        for said in (theirs, fresh):
            assert ("new_session", "cold_start") == path(said)
        assert 0 == theirs.accepted.cached_tokens
        assert ["mine", "mine", "new"] == [said.accepted.session for said in (first, theirs, fresh)]
        next_turn = await ask_as(server, "alice", first.text, "And then?", session_name="mine")
        assert ("continuation", None) == path(next_turn)

    opened = events_of(store, ev.SessionOpened)
    assert [
        ("@alice/mine", "alice", True),
        ("@bob/mine", "bob", True),
        ("@bob/new", "bob", True),
    ] == [(one.session, one.tenant, one.named) for one in opened]
    assert_apart(store)


async def test_a_session_id_serves_its_tenant_alone(model_directory: Any) -> None:
    """
    The id of an unnamed session continues it for its own tenant. For a different tenant it is a
    name like any other.
    """
    store = MemoryStore()
    async with serving(model_directory, store) as server:
        first = await ask_as(server, "alice")
        session_id = first.accepted.session
        assert "alice" not in session_id
        theirs = await ask_as(server, "bob", first.text, "And then?", session_name=session_id)
        assert ("new_session", "cold_start", 0) == (*path(theirs), theirs.accepted.cached_tokens)
        stolen = await ask_as(server, "bob", session_name=f"@alice/{session_id}")
        assert ("new_session", "cold_start") == path(stolen)
        mine = await ask_as(server, "alice", first.text, "And then?", session_name=session_id)
        assert ("continuation", session_id) == (mine.accepted.path, mine.accepted.session)

    assert_apart(store)


async def test_a_bug_of_one_tenant_is_not_reported_to_another(
    model_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    While a tenant's session is quarantined, a different tenant's session of the same name serves.
    """
    store = MemoryStore()
    async with serving(model_directory, store) as server:

        def fails(*args: object, **named: object) -> None:
            raise RuntimeError("the device gave up")

        with monkeypatch.context() as broken:
            broken.setattr(server.loaded.engine.device, "run_chunk", fails)
            with pytest.raises(Broken):
                await ask_as(server, "alice", session_name="mine")
        with pytest.raises(Broken) as caught:
            await ask_as(server, "alice", session_name="mine")
        assert "@alice/mine" == caught.value.session
        assert "new_session" == (await ask_as(server, "bob", session_name="mine")).accepted.path


async def test_a_session_of_another_tenant_is_refused(
    model_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    If an id in a journal does not contain its tenant, its session serves no other tenant. The
    request ends, and does not look for another session for ever.
    """
    async with serving(model_directory) as server:
        with monkeypatch.context() as before:
            before.setattr(model_server, "session_id", lambda tenant, name: name)
            await ask_as(server, "local", session_name="@alice/mine")
        with trio.fail_after(60), pytest.raises(LookupError, match="belongs to the tenant local"):
            await ask_as(server, "alice", session_name="mine")


async def test_a_rejected_request_has_its_tenant(model_directory: Any) -> None:
    """The journal records the tenant of a refused request."""
    store = MemoryStore()
    async with serving(model_directory, store, limits=Limits(queue=0), decode_rows=1) as server:
        alice = server.for_tenant("alice")
        async with alice.generate(command(max_tokens=400)) as replies:
            await anext(aiter(replies))
            with pytest.raises(QueueFull):
                await ask_as(server, "bob")
        await server.loaded.activity.wait_idle()

    (rejected,) = events_of(store, ev.RequestRejected)
    assert ("bob", 429) == (rejected.tenant, rejected.status)


class NoWriter:
    """A writer whose rows are committed at once."""

    async def wait_committed(self, receipt: int) -> None:
        """See ``JournalWriter.wait_committed``."""
        await trio.lowlevel.checkpoint()


async def test_a_request_times_out(autojump_clock: trio.testing.MockClock) -> None:
    """
    A waiting client gets a keep-alive at each beat until the request times out. Then it ends, and
    its session gets the reason.
    """
    ticket = Ticket("r1", None, 0, arrived=0.0)  # type: ignore[arg-type]  # none of it is read here
    deadline = trio.current_time() + 25.0
    replies = Replies(
        [ticket],
        NoWriter(),  # type: ignore[arg-type]
        RequestContext("r1", "local", Limits(heartbeat_s=10.0, request_s=25.0)),
        Summaries().turn_ended_at,
    )
    beats = [await anext(replies), await anext(replies)]
    assert [Waiting(queued=True, prefilled_tokens=0)] * 2 == beats
    with pytest.raises(TimedOut, match="after 25 seconds"):
        await anext(replies)
    assert deadline == trio.current_time()
    assert "timed_out" == ticket.gone
    assert [] == [reply async for reply in replies]


async def test_a_steady_answer_times_out_too(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Steady replies do not extend the limit. Before the limit, all of them are sent."""
    ticket = Ticket("r1", None, 0, arrived=0.0)  # type: ignore[arg-type]
    beat = Waiting(queued=False, prefilled_tokens=1)
    replies = Replies(
        [ticket],
        NoWriter(),  # type: ignore[arg-type]
        RequestContext("r1", "local", Limits(heartbeat_s=10.0, request_s=5.0)),
        Summaries().turn_ended_at,
    )
    received: list[Any] = []

    async def listen() -> None:
        for _ in range(20):
            ticket.reply(1, beat)
            received.append(await anext(replies))
            await trio.sleep(1)

    with pytest.raises(TimedOut):
        await listen()
    assert [beat] * 5 == received
