"""Which turns are stored, according to the journal's events."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cairn.journal import events as ev
from cairn.journal.turns import Place, Turns


def kept(
    request: str,
    previous: str | None = None,
    tenant: str = "t1",
    agent: str | None = None,
    *,
    session: str = "s1",
    texts: Mapping[str, str] = MappingProxyType({}),
    texts_at: Mapping[str, int] = MappingProxyType({}),
) -> ev.TurnStored:
    """A turn that is to be stored."""
    return ev.TurnStored(
        session=session,
        request=request,
        tenant=tenant,
        agent=agent,
        previous=previous,
        created_s=1,
        question="[]",
        answer="[]",
        note="",
        texts=texts,
        texts_at=texts_at,
    )


def finished(request: str) -> ev.RequestFinished:
    """The end of its request."""
    return ev.RequestFinished(
        session="s1",
        request=request,
        finish_reason="stop",
        prompt_tokens=1,
        cached_tokens=0,
        answer_tokens=1,
        completion_tokens=1,
    )


def violated(position: int, request: str | None) -> ev.InvariantViolated:
    """
    The report that the event at a row broke an invariant, with the request that was open then.
    """
    return ev.InvariantViolated(
        bug_id="b",
        invariant="INV-1",
        at_position=position,
        session="s1",
        of_session=None,
        request=request,
        fingerprint="f",
        cairn_version="0",
        message="",
        expected="",
        actual="",
        trace="",
    )


def recorded(position: int, event: ev.Event) -> ev.Recorded:
    """An event at a position, a second after the one before."""
    return ev.Recorded(
        position=position,
        stream=event.stream,
        seq=position,
        event_id=str(position),
        time_us=position * 1_000_000,
        event=event,
    )


def seen(*events: ev.Event) -> Turns:
    """The fold of events whose positions start at 1."""
    turns = Turns()
    for position, event in enumerate(events, 1):
        turns.see(recorded(position, event))
    return turns


def test_a_turn_is_there_once_its_request_has_finished():
    """Before that it is not found; afterwards both of its rows are known."""
    assert seen(kept("r1")).place("r1", "t1") is None
    turns = seen(finished("r0"), kept("r1"), finished("r1"))
    due = Place(
        tenant="t1",
        session="s1",
        previous=None,
        stored=2,
        finished=3,
        tokens=2,
        finish_reason="stop",
    )
    assert due == turns.place("r1", "t1")
    assert (1, None) == (len(turns), turns.place("r0", "t1"))


def test_a_request_that_does_not_finish_leaves_nothing():
    """If it is cancelled, or lost with the server, its turn is never found."""
    cancelled = ev.RequestCancelled(session="s1", request="r1", stage="decode")
    for end in (cancelled, ev.ServerLost(boot="b")):
        assert 0 == len(seen(kept("r1"), end, finished("r1")))


def test_an_end_that_broke_an_invariant_keeps_nothing():
    """
    The violation follows it. A violation of another row takes nothing back, and neither does one of
    another session that was recorded when that row was the last.
    """
    for row, request, left in ((2, "r1", 0), (1, "r1", 1), (2, "r2", 1), (2, None, 1)):
        turns = seen(kept("r1"), finished("r1"), violated(row, request))
        assert left == len(turns)


def test_a_turn_of_an_agent_is_not_found_by_its_request():
    """It is not found by its request, and is in no history; it is found as the agent's."""
    turns = seen(
        *(kept("r1", agent="notes"), finished("r1")),
        *(kept("r2", "r1"), finished("r2")),
        *(kept("r3", "r1", agent="notes"), finished("r3")),
    )
    assert (None, None) == (turns.place("r1", "t1"), turns.history("r2", "t1"))
    assert ["r3", "r1"] == [request for request, _ in turns.back_from("r3")]
    turns.drop({"r3", "r4"})
    assert turns.held("r1") is not None
    assert turns.held("r3") is None


def test_another_tenants_turn_is_none():
    """It is not found, and is in no history."""
    turns = seen(kept("r1", tenant="t2"), finished("r1"), kept("r2", "r1"), finished("r2"))
    assert turns.place("r1", "t1") is None
    assert turns.place("r1", "t2") is not None
    assert turns.history("r2", "t1") is None


def test_a_history_starts_at_its_beginning():
    """Each turn names the one before it; two may continue from the same one."""
    turns = seen(
        *(kept("r1"), finished("r1")),
        *(kept("r2", "r1"), finished("r2")),
        *(kept("r3", "r2"), finished("r3")),
        *(kept("r4", "r1"), finished("r4")),
    )
    for request, rows in (("r1", [1]), ("r3", [1, 3, 5]), ("r4", [1, 7])):
        history = turns.history(request, "t1")
        assert history is not None
        assert rows == [place.stored for place in history]


def test_a_forgotten_turn_is_no_part_of_a_history():
    """Neither it nor what continues from it is found any more; earlier turns are."""
    gone = ev.TurnForgotten(of_request="r2", tenant="t1")
    turns = seen(
        *(kept("r1"), finished("r1")),
        *(kept("r2", "r1"), finished("r2")),
        *(kept("r3", "r2"), finished("r3")),
        gone,
        gone,
    )
    assert turns.place("r2", "t1") is None
    assert turns.history("r3", "t1") is None
    assert turns.history("r1", "t1") is not None


BRIEF, TOOLS = {"instructions": "Be brief."}, {"tools": "[1]"}


def test_texts_that_a_session_has():
    """
    By name and word for word, in the row of the turn that brought them, whatever became of that
    turn. Each session has its own.
    """
    turns = seen(
        *(kept("r1", texts={**BRIEF, **TOOLS}), finished("r1")),
        *(kept("r2", "r1", texts={"instructions": "Be long."}), finished("r2")),
        ev.TurnForgotten(of_request="r1", tenant="t1"),
        kept("r3", session="s2", texts=TOOLS),
        ev.RequestCancelled(session="s2", request="r3", stage="decode"),
    )
    both = {**BRIEF, **TOOLS}
    assert {"instructions": 1, "tools": 1} == turns.noted("s1", both)
    assert {"instructions": 3} == turns.noted("s1", {"instructions": "Be long."})
    assert {"tools": 6} == turns.noted("s2", both)
    assert {} == turns.noted("s3", both)
    for strange in ({"tools": "Be brief."}, {"instructions": "Be brief"}, {}):
        assert {} == turns.noted("s1", strange)


def test_texts_end_with_their_session():
    """A session that is opened under the same name later has rows that are pruned separately."""
    closed = ev.SessionClosed(session="s1", reason="-")
    turns = seen(kept("r1", texts=TOOLS), kept("r2", session="s2", texts=TOOLS), closed)
    assert {} == turns.noted("s1", TOOLS)
    assert {"tools": 2} == turns.noted("s2", TOOLS)


def test_where_the_texts_of_a_note_stand():
    """
    The place of a turn has the rows of earlier texts, and none for those that it brought itself.
    """
    turns = seen(
        *(kept("r1", texts=TOOLS), finished("r1")),
        *(kept("r2", "r1", texts=BRIEF, texts_at={"tools": 1}), finished("r2")),
    )
    first, second = turns.place("r1", "t1"), turns.place("r2", "t1")
    assert first is not None
    assert second is not None
    assert ((), (("tools", 1),)) == (first.texts_at, second.texts_at)


def test_turns_end_with_their_rows():
    """After a prune, a turn whose rows were removed is not stored any more; later ones are."""
    pruned = ev.JournalPruned(
        cut=2, head="h", rows=2, sessions=1, first_us=1, last_us=2, before_us=3, base_digest="b"
    )
    turns = seen(kept("r1"), finished("r1"), kept("r2"), finished("r2"), pruned)
    assert turns.place("r1", "t1") is None
    assert turns.place("r2", "t1") is not None
