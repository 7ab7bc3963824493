"""The summaries of sessions agree with the journal, whatever row a fold of them begins at."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given

from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.summaries import (
    REMOVED_MAX,
    WORDS_MAX,
    Summaries,
    Summary,
    first_words,
)
from tests.journal.model import TAPES, Driver, played, profile
from tests.journal.test_paths import FOLLOWED, PARTS, PATHS, path_of, started, talk
from tests.support.journals import Builder, healthy


def folded(recorded: Any, begins: Summaries | None = None) -> Summaries:
    """The fold of events."""
    found = Summaries() if begins is None else begins
    for one in recorded:
        found.see(one)
    return found


def events_of(built: Builder) -> list[ev.Recorded]:
    """The events of a journal."""
    return [decode(row) for row in built.rows]


@profile(40)
@given(TAPES)
def test_the_figures_are_those_of_the_rows(data: bytes) -> None:
    """Each session has its rows, and each turn its counts, by looking at all rows."""
    driver = played(data)
    found = folded(driver.recorded)
    opened: dict[str, int] = {}
    for one in driver.recorded:
        if isinstance(one.event, ev.SessionOpened):
            opened[one.event.session] = one.position
    assert set(opened) == {one.id for one in found.latest_first()}
    for name, first in opened.items():
        mine = [
            one
            for one in driver.recorded
            if one.stream == f"session/{name}" and one.position >= first
        ]
        assert [one.position for one in mine] == list(found.rows_after(name, 0, len(mine) + 1))
        assert len(mine) == found.row_count(name)
        _check_turns(found, name, mine)
    uses = [one.used for one in found.latest_first()]
    assert sorted(uses, reverse=True) == uses


def _check_turns(found: Summaries, name: str, mine: list[ev.Recorded]) -> None:
    places = [at for at, one in enumerate(mine) if isinstance(one.event, ev.RequestReceived)]
    turns = found.turns(name, 0, 1 << 30)
    assert len(places) == len(turns) == found.turn_count(name)
    for counts, start, end in zip(turns, places, [*places[1:], len(mine)], strict=True):
        rows = mine[start:end]
        received = rows[0].event
        assert isinstance(received, ev.RequestReceived)
        assert (rows[0].position, rows[0].time_us) == (counts.received, counts.received_us)
        assert received.prompt_tokens == counts.prompt
        paths = [one.event for one in rows if isinstance(one.event, ev.PathSelected)]
        assert (paths[0].reused_tokens if paths else 0) == counts.reused
        ends = [one for one in rows if isinstance(one.event, ev.RequestFinished)]
        if ends:
            assert (ends[0].position, ends[0].time_us) == (counts.ended, counts.ended_us)
            finished = ends[0].event
            assert isinstance(finished, ev.RequestFinished)
            assert finished.completion_tokens == counts.generated
            passes = [one.event for one in rows if isinstance(one.event, ev.CacheExtended)]
            prefills = [one for one in passes if one.step == "prefill"]
            assert sum(one.end - one.start for one in prefills) == counts.computed


@profile(30)
@given(TAPES)
def test_a_fold_goes_on_from_what_it_held(data: bytes) -> None:
    """From any row on, a fold of the rest holds what a fold of the whole does."""
    driver = played(data)
    whole = folded(driver.recorded)
    for cut in (0, len(driver.recorded) // 3, len(driver.recorded) - 1):
        first = folded(driver.recorded[:cut])
        held = first.contents()
        rest = folded(driver.recorded[cut:], Summaries(held))
        assert whole.contents() == rest.contents()
        assert held == first.contents()  # what was taken is not changed by what comes later
        folded(driver.recorded[cut:], first)
        assert whole.contents() == first.contents()


def only(found: Summaries) -> Summary:
    """The one session."""
    (one,) = found.latest_first()
    return one


def test_a_session_and_its_turns() -> None:
    """What it is, how much it reused, and when."""
    built = Builder()
    built.start()
    built.turn("one", "r1", ["Hello there"], range(1, 9), (20, 21))
    built.turn("one", "r2", ["Hello there", "a", "And now?"], range(1, 13), (20, 21, 22))
    found = folded(events_of(built))
    session = only(found)
    assert ("one", "tenant-1", "openai", "tiny") == (
        *(session.id, session.tenant),
        *(session.protocol, session.model),
    )
    assert ("Hello there", 20, 8, 5, 15) == (
        *(session.words, session.prompt, session.reused),
        *(session.generated, session.context),
    )
    assert session == found.session("one")
    first, second = found.turns("one", 0, 2)
    assert (second,) == found.turns("one", 1, 9)
    assert (8, 0, 8, 2) == (first.prompt, first.reused, first.computed, first.generated)
    assert (12, 8, 4, 3) == (second.prompt, second.reused, second.computed, second.generated)
    assert second.received_us < second.first_us < second.ended_us
    rows = list(found.rows_after("one", 0, 100))
    assert rows[3:5] == list(found.rows_after("one", rows[2], 2))
    assert rows[2:4] == list(found.rows_before("one", rows[4], 2))
    assert rows[:1] == list(found.rows_before("one", rows[1], 2))
    assert 2 == found.turn_count("one")


def test_a_turn_is_found_by_the_row_that_ended_it() -> None:
    """Also if the next turn of its session has begun; no other row finds one."""
    rows = [decode(row) for row in healthy()]
    ends = [one.position for one in rows if isinstance(one.event, ev.RequestFinished)]
    begins = [one.position for one in rows if isinstance(one.event, ev.RequestReceived)]
    assert len(ends) == len(begins) == 2
    for last in (begins[-1], rows[-1].position):
        found = folded(rows[:last])
        (session,) = (one.id for one in found.latest_first())
        turn = found.turn_ended_at(session, ends[0])
        assert turn is not None
        assert (begins[0], ends[0]) == (turn.received, turn.ended)
        assert [None] * 2 == [found.turn_ended_at(session, at) for at in (ends[0] - 1, ends[0] + 1)]
        assert found.turn_ended_at("another", ends[0]) is None


def test_a_closed_session_stays_until_a_prune() -> None:
    """A prune of its rows removes it, and a later one with its name is new."""
    driver = started()
    driver.serve(talk(*PARTS, name="n"))
    driver.serve(talk(*PARTS))
    driver.release("n")
    driver.propose(ev.SessionClosed(session="n", reason="forgotten"))
    found = folded(driver.recorded)
    assert ["forgotten"] == [one.closed for one in found.latest_first() if one.id == "n"]
    last = driver.recorded[-1].position
    driver.serve(talk(*FOLLOWED, name="n"))
    again = folded(driver.recorded)
    assert [None, None] == [one.closed for one in again.latest_first()]
    assert again.rows_after("n", 0, 1)[0] > last
    assert 2 == len(again)

    pruned = ev.JournalPruned(
        cut=last,
        head="h",
        rows=last,
        sessions=1,
        first_us=1,
        last_us=2,
        before_us=3,
        base_digest="d",
    )
    again.see(recorded_of(driver, pruned))
    assert ["n"] == [one.id for one in again.latest_first()]
    assert None is again.session("s1")


def test_a_session_that_was_forgotten() -> None:
    """Its first words are gone; the numbers stay, and so do other sessions."""
    driver = started()
    driver.serve(talk(*PARTS, name="n"))
    driver.serve(talk(*PARTS))
    found = folded(driver.recorded)
    words = {one.id: one.words for one in found.latest_first()}
    forgotten = ev.SessionForgotten(
        of_session="n", tenant="t", rows=1, key_ids=(), blocks=(), removed=(), same_text=()
    )
    found.see(recorded_of(driver, forgotten))
    found.see(recorded_of(driver, attrs.evolve(forgotten, of_session="none")))
    assert {**words, "n": ""} == {one.id: one.words for one in found.latest_first()}


def recorded_of(driver: Driver, event: ev.Event) -> ev.Recorded:
    """An event as if it were the next row."""
    last = driver.recorded[-1]
    return attrs.evolve(last, position=last.position + 1, stream=event.stream, event=event)


def test_a_session_whose_first_rows_were_pruned() -> None:
    """It is known from its next request on."""
    for name in (None, "n"):
        driver = started()
        driver.serve(talk(*PARTS, name=name))
        driver.serve(talk(*FOLLOWED, name=name))
        requests = [
            place
            for place, one in enumerate(driver.recorded)
            if isinstance(one.event, ev.RequestReceived)
        ]
        session = only(folded(driver.recorded[requests[1] :]))
        assert (name or "s1", name is not None) == (session.id, session.named)
        assert 19 < session.prompt


@pytest.mark.parametrize("end", ["lost", "stopped", "crash", "cancelled"])
def test_a_turn_that_ended_otherwise(end: str) -> None:
    """Its end is on record: at the server's end, at the bug, or where its client left."""
    driver = started()
    name = driver.ask(talk(*PARTS))
    assert name is not None
    driver.until_selected(name)
    assert 0 == folded(driver.recorded).turns(name, 0, 1)[0].ended
    if end == "crash":
        driver.crash(name)
    elif end == "cancelled":
        driver.cancelled.add(name)
        driver.finish(name)
    else:
        driver.end_run("lost" if end == "lost" else "stopped")
    found = folded(driver.recorded)
    ended = found.turns(name, 0, 1)[0].ended
    kinds = {one.position: one.event.kind for one in driver.recorded}
    assert {
        "lost": "server_lost",
        "stopped": "server_stopped",
        "crash": "invariant_violated",
        "cancelled": "request_cancelled",
    }[end] == kinds[ended]
    session = found.session(name)
    assert session is not None
    assert (1 if end == "crash" else 0) == len(session.bugs)
    for bug in session.bugs:
        assert found.fault_time_us(bug) is not None
    assert None is found.fault_time_us("unknown")


def test_removed_blocks() -> None:
    """The last ones are held, with why they went."""
    driver = started()
    driver.serve(talk(*PARTS))
    driver.release("s1")
    for key in driver.evictable():
        driver.evict(key, "expired")
    found = folded(driver.recorded)
    assert {("block_evicted", "expired")} == {(one.kind, one.reason) for one in found.removed}
    rows = [one.row for one in found.removed]
    assert sorted(rows, reverse=True) == rows
    evicted = next(one for one in driver.recorded if isinstance(one.event, ev.BlockEvicted))
    for at in range(REMOVED_MAX + 5):
        found.see(attrs.evolve(evicted, position=1000 + at))
    assert REMOVED_MAX == len(found.removed)
    assert 1000 + REMOVED_MAX + 4 == found.removed[0].row
    pruned = ev.JournalPruned(
        cut=1000 + REMOVED_MAX + 3,
        head="h",
        rows=1,
        sessions=0,
        first_us=1,
        last_us=2,
        before_us=3,
        base_digest="d",
    )
    found.see(recorded_of(driver, pruned))
    assert [1000 + REMOVED_MAX + 4] == [one.row for one in found.removed]


@pytest.mark.parametrize(
    ("case", "named", "cause"),
    [
        ("nothing is left", "evicted", "evicted"),
        ("after a restart", "lost", "lost"),
        ("all of it expired", "expired", None),
        ("all of it expired, and its session was closed", "expired", None),
        ("the session works", None, None),
    ],
)
def test_what_took_blocks_away(case: str, named: str | None, cause: str | None) -> None:
    """A turn whose blocks are gone has the last row that took blocks away since."""
    driver = started()
    path = path_of(driver, PATHS[case][0](driver))
    found = folded(driver.recorded)
    (turn,) = found.turns(path.session, found.turn_count(path.session) - 1, 99)
    rows = {name: at for name, at in attrs.asdict(turn.losses).items() if at}
    assert ([named] if named is not None else []) == list(rows)
    for at in rows.values():
        kind = next(one.event.kind for one in driver.recorded if one.position == at)
        assert kind in ("block_evicted", "block_file_removed", "server_lost", "server_stopped")
    assert cause == turn.losses.cause


def test_first_words() -> None:
    """On one line, and not many."""
    assert "Hello there" == first_words("  Hello\n\tthere ")
    assert "" == first_words(" \n")
    long = first_words("word " * 100)
    assert WORDS_MAX == len(long)
    assert long.endswith("…")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<system-reminder>\nToday is Friday.\n</system-reminder>\n\nMend it", "Mend it"),
        ("<a>1</a> <b-c>2\n3</b-c> <i>Now", "<i>Now"),
        ("<a>" + "x" * 5000 + "</a>Mend it", "Mend it"),
        ("<a>all that there is</a>\n", "<a>all that there is</a>"),
        ("<a>1</a><a>2</a>", "<a>1</a><a>2</a>"),
        ("<a>1</b> Mend it", "<a>1</b> Mend it"),
        ("Mend <a>this</a>", "Mend <a>this</a>"),
    ],
)
def test_what_a_client_puts_before(text: str, words: str) -> None:
    """Elements at the beginning are left out, unless nothing else is there."""
    assert words == first_words(text)


def test_a_journal_of_another_row_each() -> None:
    """Rows of the server's own stream belong to no session."""
    found = folded(decode(row) for row in healthy())
    total = sum(found.row_count(one.id) for one in found.latest_first())
    streams = [row.stream for row in healthy()]
    assert sum(stream != "server" for stream in streams) == total


def test_what_a_snapshot_has() -> None:
    """A fold that goes on from it holds what the first one does, and changes nothing in it."""
    built = Builder()
    built.start()
    built.turn("one", "r1", ["Hello"], range(1, 9), (20, 21))
    built.turn("two", "r2", ["Hi"], range(1, 9), (20, 21))
    events = events_of(built)
    first = folded(events)
    held = first.contents()
    assert held == first.contents()
    assert held.sessions["one"] is first.contents().sessions["one"]
    rest = Summaries(held)
    built.turn("one", "r3", ["Hello", "a", "b"], range(1, 13), (20, 21))
    more = events_of(built)[len(events) :]
    folded(more, rest)
    assert folded(more, first).contents() == rest.contents() == folded(events_of(built)).contents()
    assert 8 * first.row_count("two") == len(held.sessions["two"].rows)
    assert held.sessions["one"].rows < rest.contents().sessions["one"].rows
    assert ["two", "one"] == list(rest.contents().sessions)
