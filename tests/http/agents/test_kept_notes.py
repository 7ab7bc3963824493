"""
The notes that a stored response keeps of its request: texts that come with every turn are stored
once per session, and returned with each of its responses.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.actors.server import Server
from cairn.http.app import create_app
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import serving_fake

pytestmark = pytest.mark.trio

TOOL = {
    "type": "function",
    "name": "look",
    "description": "x" * 50_000,
    "parameters": {"type": "object", "properties": {}},
}
ALWAYS: dict[str, Any] = {"tools": [TOOL], "instructions": "Be brief. " * 20, "seed": 1}


@pytest.fixture(name="store")
def store_() -> MemoryStore:
    """A journal."""
    return MemoryStore()


def setup(store: MemoryStore) -> Any:
    """A server over it."""
    return serving_fake(store)


async def say(server: Server, text: str, previous: Any = None, **fields: Any) -> Any:
    """A response, as the server returned it."""
    body = {**ALWAYS, "input": text, "max_output_tokens": 4, **fields}
    if previous is not None:
        body["previous_response_id"] = previous["id"]
    response = await create_app(server).test_client().post("/v1/responses", json=body)
    answer = await response.get_json()
    assert 200 == response.status_code, answer
    return answer


async def found(server: Server, answer: Any) -> Any:
    """A response that is looked up; None if it is not stored."""
    response = await create_app(server).test_client().get(f"/v1/responses/{answer['id']}")
    assert response.status_code in (200, 404)
    return await response.get_json() if response.status_code == 200 else None


def as_stored(answer: Any) -> Any:
    """The fields of a response that a later look-up returns: all but ``cairn``."""
    return {name: value for name, value in answer.items() if name != "cairn"}


def notes(store: MemoryStore) -> list[ev.TurnStored]:
    """The stored turns."""
    events = (decode(row).event for row in store.rows)
    return [event for event in events if isinstance(event, ev.TurnStored)]


async def test_ten_turns_with_the_same_tools(store: MemoryStore):
    """They are stored once, also across a restart, and each response returns them."""
    answer: list[Any] = [None]
    for _ in range(2):
        async with setup(store) as server:
            for _ in range(5):
                answer.append(await say(server, "And then?", answer[-1]))
            for one in answer[1:]:
                assert as_stored(one) == await found(server, one)
    sizes = [len(row.private or b"") for row in store.rows if row.kind == "turn_stored"]
    assert sizes[0] > 50_000
    assert max(sizes[1:]) < 2_000
    first, *others = notes(store)
    assert {"tools", "instructions"} == set(first.texts)
    at = next(row.position for row in store.rows if row.kind == "turn_stored")
    assert [{"tools": at, "instructions": at}] * 9 == [dict(one.texts_at) for one in others]
    assert [{}] * 9 == [dict(one.texts) for one in others]
    assert () == replay(store.read()).findings


async def test_only_changed_texts_are_stored(store: MemoryStore):
    """Only the changed text is stored; a text that returns is not stored again."""
    async with setup(store) as server:
        one, other = ({"a": letter * 200} for letter in "xy")
        answer: list[Any] = [None]
        for metadata in (one, other, one):
            answer.append(await say(server, "And then?", answer[-1], metadata=metadata))
        for response in answer[1:]:
            assert as_stored(response) == await found(server, response)
    assert [{"tools", "instructions", "metadata"}, {"metadata"}, set()] == [
        set(turn.texts) for turn in notes(store)
    ]


async def test_a_response_whose_texts_are_those_of_a_deleted_one(store: MemoryStore):
    """
    It is returned unchanged, and so is a response that continues another; also after a restart.
    """
    async with setup(store) as server:
        first = await say(server, "Hello")
        second = await say(server, "And then?", first)
        app = create_app(server)
        gone = await app.test_client().delete(f"/v1/responses/{first['id']}")
        assert 200 == gone.status_code
        assert await found(server, first) is None
        assert as_stored(second) == await found(server, second)
        third = await say(server, "Hello")
    async with setup(store) as server:
        assert await found(server, first) is None
        for answer in (second, third):
            assert as_stored(answer) == await found(server, answer)


async def test_two_that_continue_from_one(store: MemoryStore):
    """
    Each returns what its request had; a branch with a session of its own stores its texts there.
    """
    async with setup(store) as server:
        first = await say(server, "Hello")
        branches = [await say(server, text, first) for text in ("And then?", "Or else?")]
        further = [await say(server, "So?", branch) for branch in branches]
        for answer in (first, *branches, *further):
            assert as_stored(answer) == await found(server, answer)
    brought = [turn.session for turn in notes(store) if turn.texts]
    sessions = [turn.session for turn in notes(store)]
    assert 2 == len(set(sessions))
    assert sorted(set(sessions)) == sorted(brought)
    assert () == replay(store.read()).findings


async def test_a_session_that_is_opened_again(store: MemoryStore):
    """The new session stores its texts again, because the rows of the old one may be pruned."""
    async with setup(store) as server:
        first = await say(server, "Hello", session_id="talk")
        await server.loaded.sessions.close_session("talk", "-")
        second = await say(server, "And then?", first, session_id="talk")
        for answer in (first, second):
            assert as_stored(answer) == await found(server, answer)
    assert [2, 2] == [len(turn.texts) for turn in notes(store)]


async def test_texts_that_were_pruned(store: MemoryStore):
    """A response whose texts were pruned is no longer found."""
    async with setup(store) as server:
        first = await say(server, "Hello")
        second = await say(server, "And then?", first)
        at, row = next(one for one in enumerate(store.rows) if one[1].kind == "turn_stored")
        store.rows[at] = attrs.evolve(row, private=None)
        assert await found(server, second) is None


async def test_a_request_that_is_not_stored_stores_no_note(store: MemoryStore):
    """A request with ``store: false`` stores no texts, so the next request stores them."""
    async with setup(store) as server:
        await say(server, "Hello", store=False)
        answer = await say(server, "Hello")
        assert as_stored(answer) == await found(server, answer)
    assert [2] == [len(turn.texts) for turn in notes(store)]
