"""
Hands an agent over from one node of a fleet to another: what the other node reads in the journal of
the first, and appends to its own.

``session_released`` comes first, and names the agent's next name and node. From then on the first
node serves it no more. Until the other one has appended ``session_adopted`` none does, so that two
never do; what was cut short between the two is finished by adopting it.

Token ids do not move: a prompt is rendered from texts, so the next one is the same on any node.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from cairn.journal import events as ev
from cairn.journal.agents import Agent
from cairn.journal.errors import StoreError
from cairn.journal.nodes import on_node
from cairn.journal.rows.base import Base, base_fault, histories_of
from cairn.journal.rows.codec import GENESIS, Row, chain_fault, decode, opened
from cairn.journal.rows.heads import Head
from cairn.journal.rows.sealing import Keys
from cairn.journal.rows.store import Store
from cairn.journal.turns import Place


class NoSuchAgent(Exception):
    """A journal has no agent of this name, or none whose history is still there."""


class NotReleased(Exception):
    """The agent is there, and was not released: its own node serves it."""


@attrs.frozen(kw_only=True)
class AdoptableTurn:
    """
    A turn of a released agent, with its texts.

    Attributes:
        stored, finished: its rows, of which each is one that was adopted.
    """

    stored: tuple[Head, ev.TurnStored | ev.TurnAdopted]
    finished: tuple[Head, ev.RequestFinished | ev.TurnAdopted]


@attrs.frozen(kw_only=True)
class Released:
    """
    A released agent, with its texts.

    Attributes:
        node: that released it.
        head: of the row by which it did.
        event: in that row.
        created: how it was created there.
        turns: the oldest first.
    """

    node: str
    head: Head
    event: ev.SessionReleased
    created: ev.AgentCreated | ev.SessionAdopted
    turns: tuple[AdoptableTurn, ...]

    def adoption(self, name: str, new_id: Callable[[], str]) -> tuple[ev.Event, ...]:
        """
        The events by which the node that it was released to adopts it. They are appended together.

        Args:
            name: of the agent there. If that of the release is taken, another one.
            new_id: makes ids for its turns.
        """
        to, created = self.event, self.created
        events: list[ev.Event] = [
            ev.SessionAdopted(
                agent=name,
                tenant=to.tenant,
                model=created.model,
                max_context=created.max_context,
                created_s=created.created_s,
                of_agent=to.agent,
                turns=len(self.turns),
                node=self.node,
                position=self.head.position,
                row_hash=self.head.hash,
                system=created.system,
                tools=created.tools,
            )
        ]
        previous = None
        for turn in self.turns:
            (stored_at, stored), (finished_at, finished) = turn.stored, turn.finished
            request = on_node(to.to_node, new_id())
            events.append(
                ev.TurnAdopted(
                    agent=name,
                    tenant=to.tenant,
                    request=request,
                    of_request=stored.request,
                    previous=previous,
                    created_s=stored.created_s,
                    finish_reason=finished.finish_reason,
                    prompt_tokens=finished.prompt_tokens,
                    cached_tokens=finished.cached_tokens,
                    completion_tokens=finished.completion_tokens,
                    answer_tokens=finished.answer_tokens,
                    node=self.node,
                    position=stored_at.position,
                    row_hash=stored_at.hash,
                    end_position=finished_at.position,
                    end_hash=finished_at.hash,
                    question=stored.question,
                    answer=stored.answer,
                )
            )
            previous = request
        return tuple(events)


_FOLDED = frozenset(
    kind.kind
    for kind in (
        ev.AgentCreated,
        ev.AgentDeleted,
        ev.InvariantViolated,
        ev.JournalPruned,
        ev.RequestCancelled,
        ev.RequestFinished,
        ev.ServerLost,
        ev.ServerStopped,
        ev.SessionAdopted,
        ev.SessionForgotten,
        ev.SessionReleased,
        ev.TurnAdopted,
        ev.TurnForgotten,
        ev.TurnStored,
    )
)
"""The kinds of rows by which it is known which agents and turns there are."""


_ROWS_A_REST = 200


def released_agent(
    store: Store,
    node: str,
    name: str,
    tenant: str,
    *,
    keys: Keys | None = None,
    rest: Callable[[], None] = lambda: None,
) -> Released:
    """
    Read a released agent in the journal of the node that released it. Checks the chain of the whole
    journal, and its base. Changes nothing.

    Args:
        store: the journal, without the keys of its texts, because other rows need not be opened. A
            server may be appending to it.
        keys: with which the agent's own rows are opened.
        rest: called every so many rows.

    Raises:
        NoSuchAgent: the tenant has no agent of this name there.
        NotReleased: its node serves it, and all that is needed to adopt it can be read.
        StoreError: the journal is not sound, or cannot be read, nor can the agent's texts.
    """
    base = store.base()
    histories = histories_of(base)
    agents, pruned = histories.fold(), None
    previous, position = (base.head, base.position) if base is not None else (GENESIS, 0)
    kept = histories.by_position()
    hashes = {at: row.hash for at, row in kept.items()}
    for count, row in enumerate(store.read()):
        if count % _ROWS_A_REST == 0:
            rest()
        fault = chain_fault(row, previous, position)
        if fault is not None:
            _require_base(store, base, node)
            raise _unsound(node, f"row {row.position}: {fault[0]}")
        previous, position = row.hash, row.position
        if row.kind in _FOLDED:
            recorded = decode(row)
            agents.see(recorded)
            hashes[row.position] = row.hash
            if isinstance(recorded.event, ev.JournalPruned):
                pruned = recorded.event
    _require_base(store, base, node)
    if (broken := base_fault(base, pruned)) is not None:
        raise _unsound(node, broken[0])
    agent = agents.find(name, tenant, released=True)
    if agent is None:
        raise NoSuchAgent
    places = agents.history(agent)
    if len(places) != agent.turns:
        raise _unreadable(node, name)

    def read(at: int) -> tuple[Head, ev.Event]:
        row: Row | None = kept[at] if at in kept else store.row(at)
        if row is None or row.hash != hashes[at]:
            raise StoreError(f"The journal of {node} was changed while it was read. Try again.")
        found = decode(row if keys is None else opened(row, keys))
        if found.unread is not None:
            raise _unreadable(node, name)
        return Head(at, row.hash), found.event

    return _read(read, node, agent, places)


def _require_base(store: Store, base: Base | None, node: str) -> None:
    """A prune removes rows, so that they cannot be compared."""
    if store.base() != base:
        raise StoreError(f"The journal of {node} was pruned while it was read. Try again.")


def _read(
    read: Callable[[int], tuple[Head, ev.Event]],
    node: str,
    agent: Agent,
    places: tuple[Place, ...],
) -> Released:
    _, created = read(agent.created)
    assert isinstance(created, ev.AgentCreated | ev.SessionAdopted)
    turns = []
    for place in places:
        stored_at, stored = read(place.stored)
        finished_at, finished = read(place.finished)
        assert isinstance(stored, ev.TurnStored | ev.TurnAdopted)
        assert isinstance(finished, ev.RequestFinished | ev.TurnAdopted)
        turns.append(AdoptableTurn(stored=(stored_at, stored), finished=(finished_at, finished)))
    if not agent.released:
        raise NotReleased
    head, event = read(agent.released)
    assert isinstance(event, ev.SessionReleased)
    return Released(node=node, head=head, event=event, created=created, turns=tuple(turns))


def _unsound(node: str, fact: str) -> StoreError:
    return StoreError(
        f"The journal of {node} is not sound ({fact}), so nothing of it is adopted. Run `ops "
        f"verify --node {node}`."
    )


def _unreadable(node: str, name: str) -> StoreError:
    return StoreError(
        f"The texts of agent {name} cannot be read in the journal of {node}: they were forgotten, "
        "or its keys are not here."
    )
