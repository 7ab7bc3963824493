"""Which agents exist, and what their histories are, according to the journal's events."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.agents import Agent, Agents, is_agent_name, session_of
from cairn.journal.lifecycle import SessionState
from cairn.journal.retention import Survey
from cairn.journal.state import EMPTY, Block, Model, Session, SessionId, Slab, State, Turn
from cairn.journal.turns import Turns
from tests.journal.test_turns import finished, kept, recorded, violated
from tests.support.journals import agent_created

STOPPED = ev.ServerStopped(boot="b", reason="asked to")
LOST = ev.ServerLost(boot="b")


def created(name: str = "notes", tenant: str = "t1", **changes: Any) -> ev.AgentCreated:
    """An agent is created."""
    return agent_created(name, **{"tenant": tenant, "system": None, **changes})


def deleted(name: str = "notes", tenant: str = "t1") -> ev.AgentDeleted:
    """An agent is deleted."""
    return ev.AgentDeleted(agent=name, tenant=tenant)


def turn(request: str, previous: str | None = None, agent: str = "notes") -> tuple[ev.Event, ...]:
    """A turn of an agent, from the row that stores it to its end."""
    return kept(request, previous, agent=agent), finished(request)


def seen(*events: ev.Event) -> tuple[Agents, Turns]:
    """The two folds of events whose positions start at 1."""
    turns = Turns()
    agents = Agents(turns)
    for position, event in enumerate(events, 1):
        agents.see(recorded(position, event))
    return agents, turns


def found(agents: Agents, name: str = "notes") -> Agent:
    """An agent that must exist."""
    agent = agents.find(name, "t1")
    assert agent is not None
    return agent


def requests(agents: Agents, turns: Turns, name: str = "notes") -> list[str]:
    """The requests of an agent's turns, the oldest first."""
    return [request for request, _ in turns.back_from(found(agents, name).head)][::-1]


def test_an_agent_goes_on_by_its_turns():
    """
    Each finished turn becomes the head; the agent has their number, their tokens and their time.
    """
    agents, _ = seen(created(), *turn("r1"), *turn("r2", "r1"))
    agent = found(agents)
    assert ("r2", 2, 5_000_000) == (agent.head, agent.turns, agent.used_us)
    assert [2, 4] == [place.stored for place in agents.history(agent)]
    assert 2 == agents.tokens(agent)
    assert "@t1/agent/notes" == agent.session
    assert (1, None) == (len(agents), agents.find("notes", "t2"))
    assert 0 == agents.tokens(found(seen(created())[0]))


@pytest.mark.parametrize(
    "end",
    [
        (ev.RequestCancelled(session="s1", request="r2", stage="decode"),),
        (LOST,),
        (finished("r2"), violated(5, "r2")),
        (),
    ],
    ids=["cancelled", "lost", "violated", "under way"],
)
def test_a_turn_that_came_to_nothing_changes_nothing(end: tuple[ev.Event, ...]):
    """However the turn ended, the agent is unchanged, and continues from there."""
    before = (created(), *turn("r1"))
    agents, turns = seen(*before, kept("r2", "r1", agent="notes"), *end)
    assert found(seen(*before)[0]) == found(agents)
    assert ["r1"] == requests(agents, turns)
    agents, turns = seen(*before, kept("r2", "r1", agent="notes"), *end, *turn("r3", "r1"))
    assert ["r1", "r3"] == requests(agents, turns)


def test_what_breaks_elsewhere_takes_no_turn_back():
    """A bug of another session is recorded at the last row, which may be the end of a turn."""
    for request in ("other", None):
        agents, turns = seen(created(), *turn("r1"), *turn("r2", "r1"), violated(5, request))
        assert ["r1", "r2"] == requests(agents, turns)


def test_a_turn_from_elsewhere_is_no_agents():
    """
    A turn does not count if it does not continue from the head, is of another tenant, or names an
    agent that does not exist.
    """
    agents, turns = seen(
        created(),
        *turn("r1"),
        *turn("r2"),
        *(kept("r3", "r1", tenant="t2", agent="notes"), finished("r3")),
        *turn("r4", "r1", agent="other"),
        *(kept("r5", "r1"), finished("r5")),
    )
    assert ["r1"] == requests(agents, turns)


def test_a_fork_shares_what_came_before():
    """
    A fork has the turns up to its head and continues on its own; so does the agent it came from.
    """
    agents, turns = seen(
        created(),
        *turn("r1"),
        *turn("r2", "r1"),
        created("aside", forked_from="notes", head="r1"),
        *turn("r3", "r1", agent="aside"),
        *turn("r4", "r2"),
    )
    assert ["r1", "r2", "r4"] == requests(agents, turns)
    assert ["r1", "r3"] == requests(agents, turns, "aside")
    assert (3, 2) == (found(agents).turns, found(agents, "aside").turns)
    notes = found(agents)
    heads = [agents.head_after(notes, number) for number in range(4)]
    assert [None, "r1", "r2", "r4"] == heads
    for number in (-1, 4):
        with pytest.raises(IndexError):
            agents.head_after(notes, number)
    assert ["notes", "aside"] == [agent.name for agent in agents.of("t1")]
    assert () == agents.of("t2")
    assert 2 == len(agents.of(None))


def test_what_is_deleted_is_forgotten():
    """
    The turns of a deleted agent go, except those that another agent begins with; a new agent of its
    name has none.
    """
    agents, turns = seen(
        created(),
        *turn("r1"),
        *turn("r2", "r1"),
        created("aside", forked_from="notes", head="r1"),
        *(kept("r3"), finished("r3")),
        deleted(),
        deleted(),
        created(),
    )
    assert ["r1"] == requests(agents, turns, "aside")
    assert turns.held("r2") is None
    assert turns.place("r3", "t1") is not None
    assert (None, 0) == (found(agents).head, found(agents).turns)


@pytest.mark.parametrize("end", [STOPPED, LOST])
def test_what_does_not_persist_ends_with_the_server(end: ev.Event):
    """Such an agent and its turns end when the server stops or is lost."""
    agents, turns = seen(created(persist=False), *turn("r1"), created("stays"), end)
    assert ["stays"] == [agent.name for agent in agents.of("t1")]
    assert 0 == len(turns)


def test_names():
    """A name has no character with a meaning in a URL or in the name of a session."""
    for name in ("a", "Notes-2.b_c", "7", "a" * 64):
        assert is_agent_name(name)
    for name in ("", "-a", ".", "..", "a/b", "a b", "a@b", "ä", "a\n", "a" * 65):
        assert not is_agent_name(name)
    assert "agent/notes" == session_of("notes")


# --- where its KV is ------------------------------------------------------------------------------


def state(*, slab: bool = False, present: bool = False, file: bool = False) -> State:
    """A state in which the agent's session had its last turn."""
    block = Block(
        key="k1",
        parent=None,
        digest="d",
        start=0,
        tokens=4,
        bytes=1,
        present=present,
        file_bytes=1 if file else None,
    )
    last = Turn(
        request="r1",
        fingerprint="fp",
        chain=(("user", "h", "alone"),),
        prompt_ids=(1,),
        prompt_keys=("k1",),
        answered=True,
        answer_ids=(2,),
    )
    session = Session(
        id=SessionId("@t1/agent/notes"),
        tenant="t1",
        fingerprint="fp",
        group=None,
        named=True,
        state=SessionState.IDLE,
        last=last,
        slab=Slab(id=1, capacity_tokens=4, bytes=1) if slab else None,
    )
    model = Model(
        name="m",
        fingerprint="fp",
        layers=1,
        block_tokens=1,
        decode_rows=1,
        context_tokens=9,
        reusable=True,
        pool_slabs=1,
        pool_bytes=1,
        blocks_bytes=1,
        blocks_max=0,
        kv_sinks=0,
        kv_window=0,
        kv_rows=0,
        min_cache_tokens=0,
        state_blocks=0,
        grain=1,
    )
    return attrs.evolve(
        EMPTY,
        model=model,
        sessions=EMPTY.sessions.set(session.id, session),
        blocks=EMPTY.blocks.set("k1", block),
    )


def test_status():
    """
    Hot with a slab or a block in memory, warm with a file, else cold; after other models, cold.
    """
    agents, _ = seen(created(), *turn("r1"))
    agent = found(agents)
    for given, due in (
        (state(slab=True), "hot"),
        (state(present=True, file=True), "hot"),
        (state(file=True), "warm"),
        (state(), "cold"),
        (EMPTY, "cold"),
    ):
        assert due == agents.status(agent, given)
    loaded = state(present=True)
    assert loaded.model is not None
    other = attrs.evolve(loaded, model=attrs.evolve(loaded.model, fingerprint="other"))
    assert "cold" == agents.status(agent, other)


def test_a_fork_is_where_its_source_was():
    """A fork has the status of its source as long as it has no session of its own."""
    agents, _ = seen(
        created(),
        attrs.evolve(kept("r1", agent="notes"), session="@t1/agent/notes"),
        finished("r1"),
        created("aside", forked_from="notes", head="r1"),
    )
    assert "warm" == agents.status(found(agents, "aside"), state(file=True))


# --- after a prune --------------------------------------------------------------------------------


def test_a_fork_of_an_agent_whose_row_was_pruned():
    """
    The agent's turns are there, only the row that created it is not: neither a stop nor its
    deletion takes any of them from a fork that is created later.
    """
    agents, turns = seen(
        *turn("r1"),
        *turn("r2", "r1"),
        created("brief", persist=False),
        STOPPED,
        created("aside", forked_from="notes", head="r1"),
        deleted(),
        *turn("r3", "r1", agent="aside"),
    )
    assert ["r1", "r3"] == requests(agents, turns, "aside")
    assert 2 == found(agents, "aside").turns


def opened(session: str) -> ev.SessionOpened:
    """A session is opened."""
    return ev.SessionOpened(session=session, tenant="t1", fingerprint="f", group=None, named=False)


def plan(*events: ev.Event) -> Any:
    """What may be cut, if each row is old enough and the session s0 was opened and closed."""
    survey, fold = Survey(2**60), EMPTY
    gone = Session(id=SessionId("s0"), tenant="t1", fingerprint="f", group=None, named=False)
    for position, event in enumerate(
        (opened("s0"), ev.SessionClosed(session="s0", reason="done"), *events), 1
    ):
        sessions = EMPTY.sessions.set(gone.id, gone) if position == 1 else EMPTY.sessions
        fold = attrs.evolve(fold, position=position, sessions=sessions)
        survey.feed(recorded(position, event), fold)
    return survey.plan()


def test_rows_of_an_agent_may_go():
    """They keep no other row. What the agents need is named: their rows, and their turns."""
    assert 6 == plan(STOPPED, created(), *turn("r1")).cut
    assert 7 == plan(created(), *turn("r1"), created("aside", head="r1"), deleted()).cut
    agents, _ = seen(
        created(), *turn("r1"), created("aside", head="r1"), *turn("r2", "r1"), deleted()
    )
    assert ({4}, {"r1"}) == agents.needed()


def test_turns_of_agents_after_a_prune():
    """Those that an agent needs stay, though their rows are gone; those of no agent do not."""
    pruned = ev.JournalPruned(
        cut=9,
        head="h",
        rows=9,
        sessions=1,
        first_us=0,
        last_us=0,
        before_us=0,
        base_digest="d",
    )
    agents, turns = seen(
        created(), *turn("r1"), created("gone"), *turn("r2", agent="gone"), *turn("r3", "r1")
    )
    assert ["r1", "r3"] == requests(agents, turns, "notes")
    turns.see(recorded(11, pruned))
    assert 3 == len(turns)
    agents.see(recorded(11, deleted("gone")))
    agents.see(recorded(12, pruned))
    assert ["r1", "r3"] == requests(agents, turns, "notes")
    assert 2 == len(turns)


def test_the_context_of_an_agent():
    """The agent's own limit, and never more than the model's."""
    assert 9 == found(seen(created())[0]).context(9)
    assert [4, 3] == [found(seen(created(max_context=4))[0]).context(most) for most in (9, 3)]


def test_how_the_last_answer_of_an_agent_ended():
    """The finish reason of its last turn; None before the first."""
    agents, _ = seen(created(), *turn("r1"))
    assert finished("r1").finish_reason == agents.finish_reason(found(agents))
    agents, _ = seen(created())
    assert agents.finish_reason(found(agents)) is None


@pytest.mark.parametrize("end", [STOPPED, LOST], ids=lambda event: event.kind)
def test_agents_that_share_a_history_end_together(end: ev.Event):
    """Their common turns are dropped once; those of an agent that persists stay."""
    agents, turns = seen(
        created(persist=False),
        *turn("r1"),
        *turn("r2", "r1"),
        created("fork", persist=False, forked_from="notes", head="r1"),
        created("second fork", persist=False, forked_from="notes", head="r2"),
        end,
    )
    assert (0, 0) == (len(agents), len(turns))
