"""INV-9: stored turns, agents, and the model that a fingerprint names."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.journal import events as ev
from cairn.journal.invariants.sentences import Violation, broken
from cairn.journal.keys import fingerprint_of, tested_fields
from cairn.journal.shown import shown_fault
from cairn.journal.state import Session, SessionId, State, is_known, release_name
from cairn.journal.tenants import AGENT_SESSIONS, agent_session, session_name, session_tenant

_NOT_NEEDED = "naive_differs"
"""The finding of a self-test that is good either way."""

# --- the model -----------------------------------------------------------------------------------


def tested(state: State, event: ev.SelfTestFinished) -> Iterator[Violation]:
    failed = sorted(
        name for name, holds in event.findings.items() if name != _NOT_NEEDED and not holds
    )
    if event.passed and failed:
        yield broken("INV-9", "a self-test that passed with failed checks", (), failed)


def loaded(state: State, event: ev.ModelLoaded) -> Iterator[Violation]:
    fields = event.fields
    due = fingerprint_of(fields)
    if event.fingerprint != due:
        yield broken("INV-9", "a fingerprint of other fields", due, event.fingerprint)
    sinks = "full" if not event.kv_window else f"sink_window {event.kv_sinks}+{event.kv_window}"
    facts = {
        "block_tokens": event.block_tokens,
        "decode_rows": event.decode_rows,
        "context_tokens": event.context_tokens,
        "kv_policy": sinks,
    }
    for name, fact in facts.items():
        if name in fields and fields[name] != fact:
            yield broken("INV-9", f"another {name} than the fingerprint has", fields[name], fact)
    if not event.kv_window and (event.kv_sinks or event.kv_rows):
        kept = (event.kv_sinks, event.kv_rows)
        yield broken("INV-9", "a window of no tokens", (0, 0), kept)
    row_class = fields.get("row_class")
    grain = event.block_tokens if not row_class else 1
    if row_class is not None and event.grain != grain:
        yield broken("INV-9", "another grain than the fingerprint has", grain, event.grain)
    yield from _as_tested(state, event)


def _as_tested(state: State, event: ev.ModelLoaded) -> Iterator[Violation]:
    """The model is the one that was tested, and passed, or the operator accepted that it failed."""
    test, fields = state.tested, event.fields
    if test is None:
        return
    names = (test.base_fingerprint, test.fingerprint)
    due = (fingerprint_of(tested_fields(fields)), event.fingerprint)
    if names != due:
        yield broken("INV-9", "another model than was tested", names, due)
    if not test.passed and not state.unstable_accepted:
        yield broken("INV-9", "a model that failed its self-test", "accept_unstable", test.findings)
    if test.decode_shapes and test.decode_shapes[-1] != event.decode_rows:
        shapes = test.decode_shapes
        yield broken("INV-9", "other decode passes than were tested", shapes, event.decode_rows)
    row_class = fields.get("row_class")
    if test.passed and row_class is not None and tuple(row_class) != test.row_class:
        yield broken("INV-9", "another row class than was tested", test.row_class, row_class)


# --- stored turns --------------------------------------------------------------------------------


def rejected(state: State, event: ev.CallRejected) -> Iterator[Violation]:
    request = state.session(event.session).request
    assert request is not None
    if event.text not in "".join(request.texts):
        yield broken("INV-9", "a rejected call that was not released", event.request, event.reason)


def stored(state: State, event: ev.TurnStored) -> Iterator[Violation]:
    session = state.session(event.session)
    request = session.request
    assert request is not None
    model = state.model
    markers, form = (model.markers, model.calls) if model is not None else ((), None)
    fault = shown_fault(event.answer, "".join(request.texts), markers, form)
    if fault is not None:
        said = "what the request released"
        yield broken("INV-9", "a stored answer that its request did not give", said, fault)
    if request.stored is not None:
        yield broken("INV-9", "a second turn of one request", request.stored, event.request)
    if event.tenant != session.tenant:
        yield broken("INV-9", "a turn of another tenant", session.tenant, event.tenant)
    agent = _agent_of(session)
    if event.agent != agent:
        yield broken("INV-9", "a turn of another agent", agent, event.agent)
        return
    yield from _continues(state, session, event)
    for name, row in event.texts_at.items():
        if name not in session.texts_at.get(str(row), ()):
            yield broken("INV-9", "a text that no turn of the session has", name, row)


def _agent_of(session: Session) -> str | None:
    """The agent that a session is of, by its name; None if it is not an agent's."""
    name = session_name(session.id)
    is_agents = session.named and name.startswith(AGENT_SESSIONS)
    return name.removeprefix(AGENT_SESSIONS) if is_agents else None


def _continues(state: State, session: Session, event: ev.TurnStored) -> Iterator[Violation]:
    """A turn continues the history of its agent, or from a turn of its tenant."""
    if event.agent is not None:
        agent = state.agents.get(session.id)
        if agent is not None and event.previous != agent.head:
            yield broken("INV-9", "a turn after another one", agent.head, event.previous)
        return
    if event.previous is not None:
        yield from _is_stored(state, event.previous, event.tenant, of_agent=False)


def _is_stored(state: State, request: str, tenant: str, *, of_agent: bool) -> Iterator[Violation]:
    """A tenant has a turn, stored or deleted since. What was pruned is not known."""
    turn = state.turns.get(request)
    if turn is None and state.turns_pruned:
        return
    whose = (turn.tenant, turn.agent is not None) if turn is not None else None
    if whose != (tenant, of_agent):
        yield broken("INV-9", "a turn that its tenant does not have", (tenant, of_agent), whose)


def session_forgotten(state: State, event: ev.SessionForgotten) -> Iterator[Violation]:
    """A session that the journal has, its tenant, and blocks on record."""
    agents = session_name(event.of_session).startswith(AGENT_SESSIONS)  # perhaps without a turn
    for name in (*(() if agents else (event.of_session,)), *event.same_text):
        if not is_known(state, name):
            yield broken("INV-9", "a session was forgotten that never was", "a session", name)
    due = session_tenant(event.of_session)
    if event.tenant != due:
        yield broken("INV-9", "another tenant's session was forgotten", due, event.tenant)
    for key in (*event.blocks, *event.removed):
        if key not in state.blocks:
            yield broken("INV-9", "blocks of a forgotten session that never were", "a block", key)
            return
    if not set(event.removed) <= set(event.blocks):
        yield broken("INV-9", "blocks were removed of others", event.blocks, event.removed)


def forgotten(state: State, event: ev.TurnForgotten) -> Iterator[Violation]:
    yield from _is_stored(state, event.of_request, event.tenant, of_agent=False)


# --- agents --------------------------------------------------------------------------------------


def created(state: State, event: ev.AgentCreated) -> Iterator[Violation]:
    yield from _is_new(state, event.tenant, event.agent)
    if event.forked_from is None:
        if event.head is not None:
            yield broken("INV-9", "a history of no agent", None, event.head)
        return
    if agent_session(event.tenant, event.forked_from) not in state.agents:
        yield broken("INV-9", "a fork of no agent", event.tenant, event.forked_from)
    if event.head is not None:
        yield from _is_stored(state, event.head, event.tenant, of_agent=True)


def _is_new(state: State, tenant: str, agent: str) -> Iterator[Violation]:
    """No agent has this name, and none that was released had it."""
    named = agent_session(tenant, agent)
    if named in state.agents:
        yield broken("INV-9", "an agent was created twice", "a new name", agent)
    if named in state.released:
        yield broken("INV-9", "the name of an agent that was released", "a new name", agent)


def deleted(state: State, event: ev.AgentDeleted) -> Iterator[Violation]:
    named = agent_session(event.tenant, event.agent)
    if named not in state.agents and named not in state.released_kept:
        yield broken("INV-9", "an agent was deleted that does not exist", "one", event.agent)


# --- agents that are handed over -----------------------------------------------------------------


def released(state: State, event: ev.SessionReleased) -> Iterator[Violation]:
    named = agent_session(event.tenant, event.agent)
    agent, session = state.agents.get(named), state.sessions.get(SessionId(named))
    if agent is None:
        yield broken("INV-9", "an agent was released that does not exist", "one", event.agent)
        return
    if not agent.persist or agent.awaited:
        kept = (agent.persist, agent.awaited)
        yield broken("INV-9", "an agent was released that is not kept whole", (True, 0), kept)
    if session is not None and session.request is not None:
        request = session.request.ask.request
        yield broken("INV-9", "an agent was released during a request", None, request)


def adopted(state: State, event: ev.SessionAdopted) -> Iterator[Violation]:
    yield from _is_new(state, event.tenant, event.agent)
    if (known := state.adopted.get(release_name(event))) is not None:
        yield broken("INV-9", "a release was adopted twice", known, event.agent)


def turn_adopted(state: State, event: ev.TurnAdopted) -> Iterator[Violation]:
    agent = state.agents.get(agent_session(event.tenant, event.agent))
    if agent is None or not agent.awaited:
        yield broken("INV-9", "a turn was adopted that no agent awaits", event.agent, event.request)
        return
    if event.previous != agent.head:
        yield broken("INV-9", "a turn after another one", agent.head, event.previous)
    if event.request in state.turns:
        yield broken("INV-9", "a second turn of one request", "a new id", event.request)


def served(state: State, event: ev.RequestReceived) -> Iterator[Violation]:
    """An agent that was released is never served again, nor one before it has all of its turns."""
    if (to := state.released.get(event.session)) is not None:
        yield broken("INV-9", "a request of an agent that was released", to, event.session)
    agent = state.agents.get(event.session)
    if agent is not None and agent.awaited:
        yield broken("INV-9", "a request before its agent has all turns", 0, agent.awaited)
