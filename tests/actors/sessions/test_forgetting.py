"""A session is closed and forgotten while the server runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cairn.actors.agents.messages import NewAgent
from cairn.actors.errors import CannotForget, NotForgotten, RefusalError, SessionBusy
from cairn.actors.journal_keys import JournalKeys, KeyFile, KeyTable
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import ForgottenSession, Keep
from cairn.actors.sessions import forgetting
from cairn.actors.snapshots import SnapshotFile
from cairn.journal import events as ev
from cairn.journal.errors import StoreFull
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database.urls import node_url
from cairn.journal.tenants import LOCAL, agent_session
from tests.support.held_engine import Hold
from tests.support.in_process_server import (
    ask,
    chat,
    generate,
    local,
    wait_idle,
)
from tests.support.processes.postgres import Postgres
from tests.support.sealed_place import LONG, OTHER, Place, forget, talked

pytestmark = pytest.mark.trio


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """An empty data directory."""
    return Place(tmp_path)


@pytest.fixture(params=["file", "table"])
def any_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty data directory, whose journal is in it or is that of a node."""
    if request.param == "file":
        return Place(tmp_path)
    postgres: Postgres = request.getfixturevalue("postgres")
    return Place(tmp_path, node_url(postgres.new_database(), "n1"))


async def test_other_nodes_with_the_text_are_named(place: Place):
    """They are asked for the session's blocks, and what they say is passed on."""
    asked: list[tuple[str, ...]] = []

    def elsewhere(keys: Collection[str]) -> list[str]:
        asked.append(tuple(keys))
        return ["on node n2"]

    async with place.serving(elsewhere=elsewhere) as server:
        done = await forget(server, await talked(server))
    assert "on node n2" in done.still_readable
    (event,) = place.events(ev.SessionForgotten)
    assert [event.blocks] == asked
    assert event.blocks


async def test_a_session_is_forgotten(place: Place):
    """
    Its key, its own blocks in memory and files, and the snapshot go, with its words; the act is on
    record. The other session goes on, and the state is that of a reader without the key.
    """
    async with place.serving() as server:
        mine, other = await talked(server), await talked(server, OTHER)
        of = server.loaded
        (place.folder / "snapshot").write_bytes(b"texts")
        done = await forget(server, mine)
        assert (mine, ()) == (done.session, done.same_text)
        state = of.sequencer.state
        assert mine not in state.sessions
        assert done.blocks > 0 < done.rows
        (event,) = place.events(ev.SessionForgotten)
        assert done.blocks == len(event.removed) == len(event.blocks)
        blocks = [state.blocks[key] for key in event.removed]
        assert not any(one.present or one.file_bytes is not None or one.ids for one in blocks)
        assert not place.has_key(mine)
        assert place.has_key(other)
        assert {False} == place.readable(mine)
        assert {True} == place.readable(other)
        look = local(server).looking(of_all=True, texts=True)
        assert "" == look.session(mine).summary.words
        assert "closed" == look.session(mine).state
        assert state == place.report().state
        more = await talked(server, OTHER)
        assert {True} == place.readable(more)
        again = await ask(server, generate(chat(LONG)))
        assert 0 == again.finished.cached_tokens
        await wait_idle(server)
    assert place.report().not_checked.forgotten == done.rows


async def test_what_another_session_has_stays(place: Place):
    """Blocks that another session names stay, and that session is named."""
    async with place.serving() as server:
        mine = await talked(server, session_name="mine")
        other = await talked(server, session_name="other")
        done = await forget(server, mine)
        assert (other,) == done.same_text
        (event,) = place.events(ev.SessionForgotten)
        assert set(event.removed) < set(event.blocks)
        again = await ask(server, generate(chat(LONG), session_name="third"))
        assert again.finished.cached_tokens > 0
        await wait_idle(server)
    place.report()


@pytest.mark.parametrize("first", [True, False])
async def test_a_short_copy_is_named(place: Place, first: bool):
    """
    Another session with the same few words, which fill no block, is named, whichever was there
    first.
    """
    secret = "My PIN is 4711."
    async with place.serving() as server:
        sessions = []
        for _ in range(2):
            sessions.append((await ask(server, generate(chat(secret)))).accepted.session)
            await wait_idle(server)
        one, other = sessions if first else reversed(sessions)
        assert (other,) == (await forget(server, one)).same_text
    place.report()


async def test_its_name_is_free_again(place: Place):
    """A new session of the same name is another one, with another key."""
    async with place.serving() as server:
        await talked(server, session_name="mine")
        assert place.has_key("mine")
        await forget(server, "mine")
        assert not place.has_key("mine")
        await talked(server, OTHER, session_name="mine")
        assert {True, False} == place.readable("mine")
        await forget(server, "mine")
        assert {False} == place.readable("mine")
    place.report()


async def test_again_there_is_nothing_to_do(place: Place):
    """A session without a key is forgotten, or has no texts."""
    async with place.serving() as server:
        mine = await talked(server)
        await forget(server, mine)
        rows = len(place.rows())
        assert ForgottenSession(session=mine) == await forget(server, mine)
        assert rows == len(place.rows())
        assert local(server).sessions(of_all=True).find("nowhere") is None


async def test_a_session_that_answers_is_refused(place: Place):
    """Neither closed nor forgotten, and its answer is complete; after that both can be done."""
    async with place.serving() as server:
        hold = Hold(server, "decode")
        command = generate(chat(LONG), session_name="mine")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, server, command)
            await hold.wait()
            with pytest.raises(SessionBusy, match="is answering a request"):
                await forget(server, "mine")
            with pytest.raises(SessionBusy):
                await local(server).sessions(of_all=False).close("mine")
            hold.go.set()
        await wait_idle(server)
        assert [] == place.events(ev.SessionForgotten)
        assert [] == place.events(ev.RequestCancelled)
        await forget(server, "mine")
    assert {False} == place.readable("mine")


async def test_a_session_is_closed(place: Place):
    """It is closed, its texts stay, and a second time nothing happens."""
    async with place.serving() as server:
        mine = await talked(server)
        sessions = local(server).sessions(of_all=False)
        await sessions.close(mine)
        await sessions.close(mine)
        assert ["a request closed it"] == [one.reason for one in place.events(ev.SessionClosed)]
        assert {True} == place.readable(mine)


async def test_no_request_may_name_it_meanwhile(place: Place, monkeypatch: pytest.MonkeyPatch):
    """A request that names it while its key is about to go is refused, and may be tried again."""
    async with place.serving() as server:
        await talked(server, session_name="mine")
        refused: list[str] = []
        remove = KeyFile.remove

        def removing(self: KeyFile, subject: str, key_ids: Any) -> int:
            trio.from_thread.run(asked)
            return remove(self, subject, key_ids)

        async def asked() -> None:
            with pytest.raises(SessionBusy, match="is being forgotten") as error:
                await ask(server, generate(chat(LONG), session_name="mine"))
            refused.append(error.value.message)

        monkeypatch.setattr(KeyFile, "remove", removing)
        await forget(server, "mine")
        assert 1 == len(refused)
        await talked(server, session_name="mine")
        assert {True, False} == place.readable("mine")


async def test_keys_that_cannot_be_removed(any_place: Place, monkeypatch: pytest.MonkeyPatch):
    """
    If only the keys are left, the session stays reserved and the same request finishes. It is on
    record once.
    """
    place = any_place
    async with place.serving() as server:
        await talked(server, session_name="mine")
        with monkeypatch.context() as patched:
            for kind in (KeyFile, KeyTable):
                patched.setattr(kind, "remove", _full)
            with pytest.raises(NotForgotten, match="its keys cannot be removed"):
                await forget(server, "mine")
        assert place.has_key("mine")
        with pytest.raises(SessionBusy):
            await ask(server, generate(chat(LONG), session_name="mine"))
        with pytest.raises(SessionBusy):
            await local(server).sessions(of_all=False).close("mine")
        await forget(server, "mine")
        assert not place.has_key("mine")
        await talked(server, OTHER, session_name="mine")
        assert 1 == len(place.events(ev.SessionForgotten))
    place.report()


async def test_a_start_removes_the_keys_and_the_old_snapshot(
    any_place: Place, monkeypatch: pytest.MonkeyPatch
):
    """A server that ends before the last step finishes at its next start."""
    place = any_place
    async with place.serving() as server:
        mine = await talked(server)
    before = SnapshotFile(place.folder / "snapshot").path.read_bytes()
    async with place.serving() as server:
        with monkeypatch.context() as patched:
            for kind in (KeyFile, KeyTable):
                patched.setattr(kind, "remove", _full)
            with pytest.raises(NotForgotten):
                await forget(server, mine)
    # As if the server had been killed before it replaced the snapshot.
    (place.folder / "snapshot").write_bytes(before)
    assert place.has_key(mine)
    seen: list[bool] = []
    remove = SnapshotFile.remove

    def removing(self: SnapshotFile) -> Any:
        seen.append(self.path.exists())
        return remove(self)

    monkeypatch.setattr(SnapshotFile, "remove", removing)
    async with place.serving():
        assert not place.has_key(mine)
        assert [True] == seen
    assert {False} == place.readable(mine)


def _full(self: JournalKeys, subject: str, key_ids: Any) -> int:
    raise StoreFull("The disk is full.")


async def test_plain_texts_are_refused(place: Place):
    """Rows that are not sealed would stay readable, so nothing is changed."""
    async with place.serving(keys=None) as server:
        mine = await talked(server)
        with pytest.raises(CannotForget, match="not sealed"):
            await local(server).sessions(of_all=False).forget(mine, with_agent=False)
    async with place.serving() as server:
        await ask(server, generate(chat(LONG, "a", "b"), session_name=mine))
        await wait_idle(server)
        with pytest.raises(CannotForget, match="are not sealed"):
            await forget(server, mine)
        assert mine in server.loaded.sequencer.state.sessions


async def test_an_agent_is_deleted_or_keeps_its_session(place: Place):
    """The session of an agent is forgotten with its agent; not one from which others go on."""
    async with place.serving() as server:
        agents = local(server).agents
        await agents.create(NewAgent(name="notes", system="Be brief. " * 9))
        session = agent_session(LOCAL, "notes")
        asked = chat(LONG)
        keep = Keep(previous=None, asked=asked.messages, note="", agent="notes")
        await ask(server, generate(asked, keep=keep, session_name="agent/notes"))
        await wait_idle(server)
        with pytest.raises(CannotForget, match="agent=true"):
            await forget(server, session)
        await agents.fork("notes", "copy", None)
        with pytest.raises(CannotForget, match="copy"):
            await forget(server, session, with_agent=True)
        assert await agents.delete("copy")
        await forget(server, session, with_agent=True)
        assert agents.one("notes") is None
        assert {False} == place.readable(session)
        made = await agents.create(NewAgent(name="notes"))
        assert "notes" == made.name
        created = await agents.created("notes")
        assert created is not None
        assert created.system is None
    place.report()


async def test_a_tenant_forgets_its_own(place: Place):
    """Another tenant's session is found by the operator alone, and that is journaled."""
    async with place.serving() as server:
        said = await ask(server, generate(chat(LONG), session_name="mine"), "alice")
        await wait_idle(server)
        assert "mine" == said.accepted.session
        assert server.for_tenant("bob").sessions(of_all=False).find("@alice/mine") is None
        assert local(server).sessions(of_all=False).find("@alice/mine") is None
        operator = local(server).sessions(of_all=True)
        found = operator.find("@alice/mine")
        assert "@alice/mine" == found
        assert found is not None
        await operator.forget(found, with_agent=False)
        acted = [(one.action, one.detail) for one in place.events(ev.OperatorActed)]
        assert (forgetting.FORGET, "session @alice/mine") in acted


async def test_an_answer_that_waits_for_its_check(place: Place):
    """It is not checked any more, and none of its texts is recorded after it was forgotten."""
    limits = Limits(slab_idle_s=0.0)
    async with place.serving(shadow_share=1.0, limits=limits) as server:
        said = await ask(server, generate(chat(LONG), session_name="mine"))
        assert said.text
        while True:
            try:
                await forget(server, "mine")
            except RefusalError:
                await trio.testing.wait_all_tasks_blocked()
                continue
            break
        await wait_idle(server)
        shadow = server.loaded.shadow
        assert shadow is not None
        assert not shadow.has_work
        last = max(row.position for row in place.rows() if row.kind == "session_forgotten")
        later = [decode(row) for row in place.rows() if row.position > last]
        assert not any(isinstance(one.event, ev.ShadowChecked) for one in later)
        assert not place.has_key("mine")
    place.report()


async def test_what_is_sealed_again_meanwhile_stays(place: Place, monkeypatch: pytest.MonkeyPatch):
    """A session that begins alike while the journal is read keeps its blocks, and is named."""
    async with place.serving() as server:
        await talked(server, session_name="mine")
        look = forgetting.other_rows

        def looking(*args: Any) -> Any:
            found = look(*args)
            trio.from_thread.run(talked_other)
            return found

        async def talked_other() -> None:
            await talked(server, session_name="other")

        monkeypatch.setattr(forgetting, "other_rows", looking)
        done = await forget(server, "mine")
        assert ("other",) == done.same_text
        again = await ask(server, generate(chat(LONG), session_name="third"))
        assert again.finished.cached_tokens > 0
        await wait_idle(server)
    place.report()
