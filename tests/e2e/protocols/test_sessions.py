"""Session names and groups: which session a request is assigned to."""

from __future__ import annotations

from functools import partial
from typing import Any

from cairn.journal import events as ev
from tests.support.processes.subprocess_server import (
    Answer,
    Listener,
    Serving,
    ask,
    assistant,
    together,
    user,
)

STORY = "The stone lies on the path, and the path goes over the hill. "


def ask_in(server: Serving, group: str, *talk: dict[str, str], **body: Any) -> Answer:
    """Send a request with the header that some clients send."""
    headers = {"x-session-id": group}
    return ask(server, *talk, **body, extra_headers=headers)


def test_a_name_is_a_session(shared: Serving):
    """A request with a session name goes to that session; one without never does."""
    talk = [user(f"By name: {STORY * 6}")]
    first = ask(shared, *talk, session_id="named/1")
    assert ("named/1", "new_session", "cold_start") == (first.session, first.path, first.reason)
    talk += [assistant(first.text), user("And then?")]
    nameless = ask(shared, *talk)
    assert "named/1" != nameless.session
    second = ask(shared, *talk, session_id="named/1")
    assert ("named/1", "continuation", None) == (second.session, second.path, second.reason)
    assert nameless.bits == second.bits
    other = ask(shared, *talk, session_id="named/2")
    assert ("named/2", "new_session", "cold_start") == (other.session, other.path, other.reason)
    assert other.cached_tokens >= 64  # blocks are shared across sessions


def test_another_conversation_under_the_same_name(shared: Serving, cold: Serving):
    """Its path is that of a new session, and it keeps the id."""
    ask(shared, user(f"Before: {STORY * 6}"), session_id="named/3")
    talk = [user(f"After: {STORY * 6}")]
    answer = ask(shared, *talk, session_id="named/3")
    assert ("named/3", "new_session", "diverged") == (answer.session, answer.path, answer.reason)
    assert ask(cold, *talk, cache_prompt=False).bits == answer.bits
    longer = [*talk, assistant(answer.text), user("And then?")]
    assert "continuation" == ask(shared, *longer, session_id="named/3").path
    shorter = ask(shared, *talk, session_id="named/3")
    assert ("named/3", "shorter_history") == (shorter.session, shorter.reason)


def test_one_after_the_other(shared: Serving, lengthy: Any):
    """Requests that name one session do not overlap; each finds what the previous one left."""
    body = {"session_id": "named/4", "max_tokens": 60}
    asked = [{**lengthy[0], **body}, {**lengthy[1], **body}, {**lengthy[0], **body}]
    answers = together([partial(ask, shared, **each) for each in asked])
    assert {"named/4"} == {answer.session for answer in answers}
    assert answers[0].bits == answers[2].bits
    shared.wait_idle()
    kinds = [
        place.event.kind
        for place in shared.recorded()
        if place.stream == "session/named/4"
        and isinstance(place.event, ev.RequestReceived | ev.RequestFinished)
    ]
    assert ["request_received", "request_finished"] * 3 == kinds


def test_a_client_that_leaves_the_queue(shared: Serving, lengthy: Any):
    """
    A client that disconnects while it waits for a named session does not hold up the next ones.
    """
    running = Listener(shared, **lengthy[0], session_id="named/5", max_tokens=250).decoding()
    leaving = Listener(shared, user("Never mind."), session_id="named/5")
    shared.queued(1)
    patient = Listener(shared, user("Hello"), session_id="named/5", max_tokens=2)
    shared.queued(2)
    leaving.leave()
    assert running.end().done
    assert patient.end().done
    assert "named/5" == patient.chunks[0]["cairn"]["session"]


def test_names_in_any_script(shared: Serving):
    """The id is returned as it was sent."""
    assert "Pfad 你好/7" == ask(shared, user("Hello"), session_id="Pfad 你好/7").session


def test_a_title_request_in_the_same_group(shared: Serving):
    """A group is not a session: other requests of a client in it do not affect the conversation."""
    system = {"role": "system", "content": "You keep the path."}
    talk = [system, user(f"In a group: {STORY * 6}")]
    main = [ask_in(shared, "group-1", *talk)]
    for turn in range(2):
        title = ask_in(
            shared,
            "group-1",
            {"role": "system", "content": "Write a title of three words."},
            user(f"{talk[1]['content']} {turn}"),
            max_tokens=4,
        )
        assert main[0].session != title.session
        talk += [assistant(main[-1].text), user(f"Turn {turn}")]
        main.append(ask_in(shared, "group-1", *talk))
    assert 1 == len({answer.session for answer in main})
    assert ["continuation"] * 2 == [answer.path for answer in main[1:]]
    assert main[-1].cached_tokens >= main[0].prompt_tokens - 64


def test_the_longest_chain_in_the_group(shared: Serving):
    """
    Of two conversations with the same beginning, the longer one continues; another group has its
    own.
    """
    opening = [user(f"Two ways: {STORY * 6}")]
    short = ask_in(shared, "group-2", *opening)
    forked = [*opening, assistant("No."), user("Why?")]
    other = ask_in(shared, "group-2", *forked, cache_prompt=False)
    assert short.session != other.session
    longer = [*forked, assistant(other.text), user("Because?")]
    went_on = ask_in(shared, "group-2", *longer)
    assert ("continuation", other.session) == (went_on.path, went_on.session)
    onward = [*longer, assistant(went_on.text), user("Onward.")]
    elsewhere = ask_in(shared, "group-3", *onward)
    assert "new_session" == elsewhere.path
    assert elsewhere.session not in (short.session, other.session)
    again = ask_in(shared, "group-2", *onward)
    assert ("continuation", other.session) == (again.path, again.session)
    assert elsewhere.bits == again.bits
