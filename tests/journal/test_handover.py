"""An agent that one journal releases and another one adopts: events, folds and what is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.agents import Agents
from cairn.journal.errors import StoreError
from cairn.journal.forgetting import find, lost_with
from cairn.journal.handover import NoSuchAgent, NotReleased, Released, released_agent
from cairn.journal.ledger import Clock, Ledger
from cairn.journal.pruning import PruneOptions, prepare_prune
from cairn.journal.replay import replay
from cairn.journal.rows.base import Base, histories_of
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.sealing import SERVER, Key, subject_of
from cairn.journal.rows.store import MemoryStore
from cairn.journal.state import EMPTY
from cairn.journal.turns import Turns
from tests.support.journals import NOTES, TENANT, Builder, agent_created, handed_over, speaking

ADOPTED, TURN, RELEASE = handed_over()
COME = f"@{TENANT}/agent/n2.come"
OUT = ev.SessionReleased(agent="notes", tenant=TENANT, to="n2.come", to_node="n2")
FAR = 2**62


def releasing() -> Builder:
    """The agent ``notes`` has three turns, and was released to node n2."""
    made = speaking()
    made.propose(OUT)
    assert made.bug is None, made.bug
    return made


def ids() -> Callable[[], str]:
    """Ids that are new."""
    numbers = count(1)
    return lambda: f"r{next(numbers)}"


def read(rows: Sequence[Row], name: str = "notes", tenant: str = TENANT) -> Released:
    """What node n2 reads in the journal of node n1."""
    return released_agent(MemoryStore(rows), "n1", name, tenant)


def folded(rows: Sequence[Row]) -> Agents:
    """The agents of these rows."""
    agents = Agents(Turns())
    for row in rows:
        agents.see(decode(row))
    return agents


def broken(*events: ev.Event, of: Callable[[], Builder] = Builder) -> str | None:
    """How the last of these events breaks INV-9; None if it breaks nothing."""
    made = of()
    for event in events[:-1]:
        made.propose(event)
        assert made.bug is None, made.bug
    made.propose(events[-1])
    if made.bug is None:
        return None
    assert "INV-9" == made.bug.invariant
    return made.bug.message


# --- one journal and the other --------------------------------------------------------------------


def test_what_is_read_is_what_is_adopted():
    """All turns, in order, with their texts and numbers, and the rows that they are in."""
    rows = releasing().rows
    found = read(rows)
    adopted, *turns = found.adoption(found.event.to, ids())
    assert isinstance(adopted, ev.SessionAdopted)
    assert ("n1", rows[-1].position, rows[-1].hash) == (
        adopted.node,
        adopted.position,
        adopted.row_hash,
    )
    assert ("n2.come", "notes", "Be brief.", 3) == (
        adopted.agent,
        adopted.of_agent,
        adopted.system,
        adopted.turns,
    )
    kept = [one.event for one in map(decode, rows) if isinstance(one.event, ev.TurnStored)]
    ends = [row for row in rows if row.kind == "request_finished"]
    previous: str | None = None
    for turn, stored, end in zip(turns, kept, ends, strict=True):
        assert isinstance(turn, ev.TurnAdopted)
        assert (stored.request, stored.question, stored.answer) == (
            turn.of_request,
            turn.question,
            turn.answer,
        )
        assert (previous, end.position, end.hash) == (
            turn.previous,
            turn.end_position,
            turn.end_hash,
        )
        assert rows[turn.position - 1].hash == turn.row_hash
        previous = turn.request
    assert ["n2.r1", "n2.r2", "n2.r3"] == [getattr(one, "request", "") for one in turns]

    target = Builder()
    target.propose(adopted, *turns)
    assert target.bug is None
    agents = folded(target.rows)
    (agent,) = agents.of(TENANT)
    assert (3, "n2.r3", "notes") == (agent.turns, agent.head, agent.adopted_from)
    old = folded(rows[:-1]).find("notes", TENANT)
    assert old is not None
    assert agents.tokens(agent) == folded(rows[:-1]).tokens(old)
    assert {COME} == {subject_of(event) for event in (adopted, *turns)}
    assert SERVER == subject_of(OUT)


def test_an_adopted_agent_is_handed_on():
    """Its turns are read in the rows by which they were adopted, once each."""
    target = Builder()
    target.propose(ADOPTED, TURN, RELEASE)
    found = read(target.rows, "n2.come")
    adopted, turn = found.adoption(found.event.to, ids())
    assert isinstance(adopted, ev.SessionAdopted)
    assert isinstance(turn, ev.TurnAdopted)
    assert ("n3.come", "n2.come", "Be brief.") == (
        adopted.agent,
        adopted.of_agent,
        adopted.system,
    )
    assert ("n2.r1", TURN.question) == (turn.of_request, turn.question)  # type: ignore[attr-defined]
    assert (turn.position, turn.row_hash) == (turn.end_position, turn.end_hash)


def test_what_is_not_there_or_not_released():
    """Of another tenant, of another name, or still served."""
    rows = releasing().rows
    with pytest.raises(NoSuchAgent):
        read(rows, tenant="other")
    with pytest.raises(NoSuchAgent):
        read(rows, "gone")
    with pytest.raises(NotReleased):
        read(rows[:-1])


def test_a_crash_after_a_release():
    """It is recorded at the last row, which it does not take back."""
    made = releasing()
    made.crash(None)
    assert "n2.come" == read(made.rows).event.to


def test_a_release_during_a_request_has_no_effect():
    """It is a bug; its row is in the journal, and the agent is served on."""
    made = speaking()
    made.start()
    asked = next(iter(made.steps(NOTES, "r6", ["Another"], tuple(range(40, 50)), (1,))))
    made.propose(attrs.evolve(asked, session_name=NOTES))
    made.propose(OUT)
    assert made.bug is not None
    assert "an agent was released during a request" == made.bug.message
    agent = folded(made.rows).find("notes", TENANT)
    assert agent is not None
    with pytest.raises(NotReleased):
        read(made.rows)


UNDONE: dict[str, tuple[ev.Event, ...]] = {
    "a release adopted twice": (ADOPTED, TURN, attrs.evolve(ADOPTED, agent="n2.two")),  # type: ignore[call-arg]
    "a name that is there": (agent_created("n2.come"), ADOPTED),
    "a released name": (ADOPTED, TURN, RELEASE, attrs.evolve(ADOPTED, position=10)),  # type: ignore[call-arg]
    "a turn more": (ADOPTED, TURN, attrs.evolve(TURN, request="n2.r2", previous="n2.r1")),  # type: ignore[call-arg]
    "an id twice": (
        attrs.evolve(ADOPTED, turns=2),  # type: ignore[call-arg]
        TURN,
        attrs.evolve(TURN, previous="n2.r1"),  # type: ignore[call-arg]
    ),
    "created twice": (ADOPTED, agent_created("n2.come")),
}


@pytest.mark.parametrize("name", UNDONE)
def test_a_wrong_step_has_no_effect(name: str):
    """The folds of agents and turns are as they were before it, and so is each history."""
    made = Builder()
    *events, last = UNDONE[name]
    made.propose(*events)
    assert made.bug is None, made.bug
    before = folded(made.rows)
    made.propose(last)
    assert made.bug is not None
    after = folded(made.rows)
    assert before.contents().agents == after.contents().agents
    assert before.turns.contents().places == after.turns.contents().places


def test_an_unrelated_bug_after_a_release():
    """A number that is taken is recorded at the last row, which it does not take back."""
    made = releasing()
    outcome = made.ledger.propose([ev.SessionClosed(session=NOTES, reason="x")], expected_seq=1)
    assert outcome.bug is not None
    assert "INV-6" == outcome.bug.invariant
    assert "n2.come" == read([*made.rows, *outcome.rows]).event.to


@pytest.mark.parametrize("at", ["private", "hash"])
def test_a_journal_that_was_changed_is_not_read(at: str):
    """Whatever row it is: nothing of the agent is taken."""
    rows = list(releasing().rows)
    changes: dict[str, Any] = {"time_us": 1} if at == "hash" else {"private": b"{}"}
    place = next(at for at, row in enumerate(rows) if row.private is not None)
    rows[place] = attrs.evolve(rows[place], **changes)
    with pytest.raises(StoreError, match="The journal of n1 is not sound"):
        read(rows)
    with pytest.raises(StoreError, match="The journal of n1 is not sound"):
        read([*releasing().rows[:3], *releasing().rows[4:]])


class Changing(MemoryStore):
    """A journal that another program changes while it is read."""

    change: Callable[[Row], Row | None] | None = None
    now: Base | None = None

    def base(self) -> Base | None:
        """A base that comes while the rows are read."""
        found, self.now = self.now, super().base()
        return found

    def row(self, position: int) -> Row | None:
        """A row as it is by now."""
        found = super().row(position)
        return found if self.change is None or found is None else self.change(found)


def test_a_journal_that_changes_while_it_is_read():
    """Nothing is taken, and the same can be tried again."""
    store = Changing(releasing().rows)
    store.change = lambda row: None
    with pytest.raises(StoreError, match="was changed while it was read"):
        released_agent(store, "n1", "notes", TENANT)
    store.change = lambda row: attrs.evolve(row, hash="ab" * 32)
    with pytest.raises(StoreError, match="was changed while it was read"):
        released_agent(store, "n1", "notes", TENANT)
    old = pruned(releasing().rows)
    base = old.base()
    assert base is not None
    late = Changing([*old.read()], base)
    late.now = base
    assert 3 == len(released_agent(late, "n1", "notes", TENANT).turns)
    late.now = attrs.evolve(base, state_digest="ab" * 32)
    with pytest.raises(StoreError, match="was pruned while it was read"):
        released_agent(late, "n1", "notes", TENANT)
    damaged = MemoryStore([*old.read()], attrs.evolve(base, state_digest="ab" * 32))
    with pytest.raises(StoreError, match="is not sound"):
        released_agent(damaged, "n1", "notes", TENANT)


def test_texts_that_cannot_be_read():
    """Of an agent whose session was forgotten without it, and without the keys."""
    sealed = bytes([1]) + bytes(30)
    store = Changing(releasing().rows)
    store.change = lambda row: attrs.evolve(row, private=sealed if row.private else None)
    with pytest.raises(StoreError, match="texts of agent notes cannot be read"):
        released_agent(store, "n1", "notes", TENANT)
    made = releasing()
    made.propose(ev.SessionClosed(session=NOTES, reason="forgotten"))
    made.propose(find(NOTES, made.rows, made.rows, None).event(["k1"]))
    assert made.bug is None
    with pytest.raises(StoreError, match="texts of agent notes cannot be read"):
        read(made.rows)


def test_what_is_needed_is_read_before_the_release():
    """So that an agent is released only if it can be adopted."""
    store = Changing(releasing().rows[:-1])
    with pytest.raises(NotReleased):
        released_agent(store, "n1", "notes", TENANT)
    store.change = lambda row: attrs.evolve(row, private=bytes([1]) + bytes(30))
    with pytest.raises(StoreError, match="texts of agent notes cannot be read"):
        released_agent(store, "n1", "notes", TENANT)


def test_a_prune_is_no_damage():
    """The first rows go while they are read."""
    store = Changing(releasing().rows[3:])
    store.now = pruned(releasing().rows).base()
    with pytest.raises(StoreError, match="was pruned while it was read"):
        released_agent(store, "n1", "notes", TENANT)


def test_only_the_rows_of_the_agent_are_opened():
    """The chain is read without keys, with a rest every so many rows."""
    made, subjects = releasing(), dict[str, str]()

    def key_of(subject: str) -> Key:
        key = Key(hashlib.sha256(subject.encode()).digest())
        subjects[key.id] = subject
        return key

    @attrs.frozen
    class Opening:
        """Notes which keys are used."""

        used: set[str]

        def get(self, key_id: str) -> Key:
            """See ``sealing.Keys``."""
            self.used.add(subjects[key_id])
            return key_of(subjects[key_id])

    events = [decode(row).event for row in made.rows]
    events += [agent_created("gone"), ev.AgentDeleted(agent="gone", tenant=TENANT)]
    sealed = Ledger(attrs.evolve(clock(), key_of=key_of)).propose(events)
    assert sealed.bug is None
    keys, rests = Opening(set()), []
    store = MemoryStore([attrs.evolve(row, opened=None) for row in sealed.rows])
    found = released_agent(store, "n1", "notes", TENANT, keys=keys, rest=lambda: rests.append(1))
    assert "Be brief." == found.created.system
    assert {NOTES} == keys.used
    assert {NOTES} < set(subjects.values())
    assert [1] == rests
    with pytest.raises(StoreError, match="texts of agent notes cannot be read"):
        released_agent(store, "n1", "notes", TENANT)


def test_a_release_of_no_agent():
    """It broke an invariant, and has no effect."""
    made = Builder()
    made.propose(OUT)
    assert () == folded(made.rows).of(None, released=True)


# --- invariants -----------------------------------------------------------------------------------


WRONG: dict[str, tuple[tuple[ev.Event, ...], str]] = {
    "none": ((OUT,), "an agent was released that does not exist"),
    "ends with its server": (
        (agent_created(persist=False), OUT),
        "an agent was released that is not kept whole",
    ),
    "has not all turns": ((ADOPTED, RELEASE), "an agent was released that is not kept whole"),
    "twice": ((agent_created(), OUT, OUT), "an agent was released that does not exist"),
    "created again": (
        (agent_created(), OUT, agent_created()),
        "the name of an agent that was released",
    ),
    "adopted back": (
        (ADOPTED, TURN, RELEASE, attrs.evolve(ADOPTED, position=10)),  # type: ignore[call-arg]
        "the name of an agent that was released",
    ),
    "a name that is there": (
        (agent_created("n2.come"), ADOPTED),
        "an agent was created twice",
    ),
    "adopted twice": (
        (ADOPTED, attrs.evolve(ADOPTED, agent="n2.two")),  # type: ignore[call-arg]
        "a release was adopted twice",
    ),
    "adopted again once deleted": (
        (ADOPTED, ev.AgentDeleted(agent="n2.come", tenant=TENANT), ADOPTED),
        "a release was adopted twice",
    ),
    "deleted twice": (
        (agent_created(), OUT, *[ev.AgentDeleted(agent="notes", tenant=TENANT)] * 2),
        "an agent was deleted that does not exist",
    ),
    "a turn of none": ((TURN,), "a turn was adopted that no agent awaits"),
    "a turn more": (
        (ADOPTED, TURN, attrs.evolve(TURN, request="n2.r2", previous="n2.r1")),  # type: ignore[call-arg]
        "a turn was adopted that no agent awaits",
    ),
    "out of order": (
        (ADOPTED, attrs.evolve(TURN, previous="n2.r0")),  # type: ignore[call-arg]
        "a turn after another one",
    ),
    "an id twice": (
        (
            ADOPTED,
            TURN,
            attrs.evolve(ADOPTED, agent="n2.two", position=10),  # type: ignore[call-arg]
            attrs.evolve(TURN, agent="n2.two"),  # type: ignore[call-arg]
        ),
        "a second turn of one request",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_step_is_found(name: str):
    """All steps before the last one break nothing."""
    events, message = WRONG[name]
    assert message == broken(*events)


def test_the_right_steps():
    """Adopted, handed on, and forgotten: the name cannot be used again even then."""
    deleted = ev.AgentDeleted(agent="n2.come", tenant=TENANT)
    assert None is broken(ADOPTED, TURN, RELEASE, deleted)
    again = (ADOPTED, TURN, RELEASE, deleted, agent_created("n2.come"))
    assert "the name of an agent that was released" == broken(*again)


@pytest.mark.parametrize(
    ("before", "session", "message"),
    [
        ((agent_created(), OUT), NOTES, "a request of an agent that was released"),
        ((ADOPTED,), COME, "a request before its agent has all turns"),
        ((ADOPTED, TURN), COME, None),
    ],
)
def test_who_is_served(before: tuple[ev.Event, ...], session: str, message: str | None):
    """A released agent never again, and one that is adopted once it has all turns."""
    made = Builder()
    made.start()
    made.propose(*before)
    for event in made.steps(session, "r1", ["Hello"], tuple(range(10)), (11,)):
        if isinstance(event, ev.SessionOpened):
            event = attrs.evolve(event, named=True)
        if isinstance(event, ev.RequestReceived):
            made.propose(attrs.evolve(event, session_name=session))
            break
        made.propose(event)
    assert message == (made.bug.message if made.bug is not None else None)


# --- prunes and forgetting ------------------------------------------------------------------------


def clock() -> Clock:
    """Whose ids are new, and whose time is late."""
    new = ids()
    return Clock(now_us=lambda: FAR, new_id=new, version="0.0.test")


def pruned(rows: Sequence[Row]) -> MemoryStore:
    """A journal whose old rows were pruned."""
    store = MemoryStore(rows)
    options = PruneOptions(before_us=FAR, close_idle=True)
    prepared = prepare_prune(store, options, clock())
    assert prepared.base is not None
    prepared.commit(store)
    for _ in store.removal():
        pass
    assert () == tuple(replay(store.read(), base=store.base()).findings)
    return store


def adopting() -> Iterator[Builder]:
    """A journal with an adopted agent and a deleted one, of which a base can be made."""
    made = Builder()
    made.start()
    made.propose(ADOPTED, TURN, agent_created("gone"))
    made.propose(ev.AgentDeleted(agent="gone", tenant=TENANT))
    made.stop()
    yield made


def test_a_prune_keeps_what_was_adopted():
    """The agent, its turn and its texts are in the base; that it was adopted is never forgotten."""
    (made,) = adopting()
    store = pruned(made.rows)
    base = store.base()
    agents = histories_of(base).fold()
    (agent,) = agents.of(TENANT)
    assert ("n1.notes", 1) == (agent.adopted_from, len(agents.history(agent)))
    held = {row.position for row in histories_of(base).rows}
    assert {agent.created, agents.history(agent)[0].stored} == held
    state = replay(store.read(), base=base).state
    assert {f"n1:9:{'ab' * 32}": COME} == dict(state.adopted.items())
    found = released_agent(made_after(store, RELEASE), "n2", "n2.come", TENANT)
    assert ["n1.r1"] == [getattr(turn.stored[1], "of_request", "") for turn in found.turns]


def made_after(store: MemoryStore, *events: ev.Event) -> MemoryStore:
    """The journal with more events."""
    report = replay(store.read(), base=store.base())
    outcome = Ledger(clock(), state=report.state, head=report.head).propose(events)
    assert outcome.bug is None, outcome.bug
    store.append(outcome.rows)
    return store


def test_a_prune_keeps_what_was_released():
    """The other node may not have adopted it yet. The name stays taken after it is forgotten."""
    store = pruned(releasing().rows)
    base = store.base()
    assert () == histories_of(base).fold().of(TENANT)
    found = released_agent(store, "n1", "notes", TENANT)
    assert 3 == len(found.turns)
    made_after(store, ev.AgentDeleted(agent="notes", tenant=TENANT))
    with pytest.raises(NoSuchAgent):
        released_agent(store, "n1", "notes", TENANT)
    assert {NOTES: "n2.come"} == dict(replay(store.read(), base=store.base()).state.released)


def test_a_base_of_other_rows_is_found():
    """Agents and turns of a base are those of its rows, also of those that were handed over."""
    wrong: tuple[tuple[list[Row], dict[str, Any]], ...] = (
        (next(adopting()).rows, {"adopted_from": "n1.other"}),
        (releasing().rows, {"released_to": "n2.other"}),
    )
    for rows, changes in wrong:
        held = histories_of(pruned(rows).base())
        held.check(10**6)
        (agent,) = held.agents
        with pytest.raises(ValueError, match="did not"):
            attrs.evolve(held, agents=(attrs.evolve(agent, **changes),)).check(10**6)
    (request,) = next(adopting()).ledger.state.turns
    held = histories_of(pruned(next(adopting()).rows).base())
    place = attrs.evolve(held.places[request], previous="n2.r0")
    with pytest.raises(ValueError, match="are not a turn"):
        attrs.evolve(held, places=held.places.set(request, place)).check(10**6)


def test_a_released_agent_is_forgotten():
    """Its session is that of an agent still, which has to be named, and its texts are found."""
    rows = releasing().rows
    found = find(NOTES, rows, rows, None)
    assert found.agent is not None
    assert ", which is lost if 'n2.come' is not adopted yet" == lost_with(found.agent)
    assert "as agent n2.come on another node" in found.traces.still_readable(EMPTY, "-")
    (made,) = adopting()
    found = find(COME, made.rows, made.rows, None)
    assert found.agent is not None
    assert (2, "n1.notes") == (found.plain, found.agent.adopted_from)
    assert "as agent n1.notes on another node" in found.traces.still_readable(EMPTY, "-")
    assert "" == lost_with(found.agent)


def same_text(session: str, *events: ev.Event) -> tuple[str, ...]:
    """The sessions with the same text, in the journal and once it was pruned."""
    made = Builder()
    made.start()
    made.propose(*events, agent_created("gone"), ev.AgentDeleted(agent="gone", tenant=TENANT))
    made.stop()
    assert made.bug is None, made.bug
    found = find(session, made.rows, made.rows, None)
    store = pruned(made.rows)
    assert found.same_text == find(session, store.rows, store.rows, store.base()).same_text
    forgotten = found.event(())
    assert found.same_text == forgotten.same_text
    made.propose(forgotten)
    assert made.bug is None, made.bug
    return found.same_text


def test_copies_of_a_turn_have_the_same_text():
    """Two forks that were both adopted: neither names the other, and their ids are new."""
    early: dict[str, Any] = {"agent": "n2.early", "of_agent": "n1.early"}
    adopted = attrs.evolve(ADOPTED, **early, position=10)  # type: ignore[call-arg]
    turn = attrs.evolve(TURN, agent="n2.early", request="n2.q1")  # type: ignore[call-arg]
    both = (ADOPTED, TURN, adopted, turn)
    assert (f"@{TENANT}/agent/n2.early",) == same_text(COME, *both)
    other = attrs.evolve(turn, answer="[]")  # type: ignore[call-arg]
    assert () == same_text(COME, ADOPTED, TURN, adopted, other)


def test_an_agent_that_came_back_has_the_same_text():
    """Also by way of other nodes; each is named where the other one is forgotten."""
    made = releasing()
    _, turn, *_ = read(made.rows).adoption("n1.back", ids())
    assert isinstance(turn, ev.TurnAdopted)
    back: dict[str, Any] = {"agent": "n1.back", "of_agent": "n3.x", "node": "n3"}
    made.propose(attrs.evolve(ADOPTED, **back))
    made.propose(attrs.evolve(turn, agent="n1.back", request="n1.b1", node="n3", position=5))
    assert made.bug is None, made.bug
    of = f"@{TENANT}/agent/n1.back"
    assert of in find(NOTES, made.rows, made.rows, None).same_text
    assert NOTES in find(of, made.rows, made.rows, None).same_text
