"""
Which turns are stored, and where in the journal: a fold of its own, because no decision reads it.
It holds places, not texts, and ends with the rows: a turn whose rows were pruned is no longer
stored, unless it is in the history of an agent, which the base keeps (``rows/histories.py``).

Texts that come with every turn and seldom change are noted once in a session (``noted``). A session
is pruned as a whole, so a stored turn has all of its texts, whatever became of the turn that
brought them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import attrs

from cairn.journal import events as ev
from cairn.journal.tenants import agent_session


@attrs.frozen(kw_only=True)
class Place:
    """
    Where a stored turn is in the journal.

    Attributes:
        session: the session that served it.
        agent: the name of the agent that it belongs to; None for a turn that is looked up by its
            request.
        previous: the request of the turn before it.
        stored: the row of ``turn_stored``.
        finished: the row of ``request_finished``; 0 while the request is in progress. Of a turn
            that was adopted, both are ``turn_adopted``.
        texts_at: the rows of earlier turns that have texts of its note, each with its name.
        tokens: of its prompt and its answer together.
        finish_reason: how the answer ended; None while the request is in progress.
    """

    tenant: str
    session: str
    agent: str | None = None
    previous: str | None
    stored: int
    finished: int = 0
    texts_at: tuple[tuple[str, int], ...] = ()
    tokens: int = 0
    finish_reason: ev.FinishReason | None = None


@attrs.frozen(kw_only=True)
class TurnsContents:
    """
    All that a fold of the stored turns holds at one row.

    Attributes:
        places: of the stored turns, by their requests.
        under_way: of turns whose requests are in progress.
        texts: for each open session, the rows of texts, by name and digest.
        last: the last turn that was finished or adopted: (row of its end, request).
    """

    places: dict[str, Place] = attrs.field(factory=dict)
    under_way: dict[str, Place] = attrs.field(factory=dict)
    texts: dict[str, dict[tuple[str, bytes], int]] = attrs.field(factory=dict)
    last: tuple[int, str] = (0, "")

    def copy(self) -> TurnsContents:
        """A copy that a fold may change."""
        return TurnsContents(
            places=dict(self.places),
            under_way=dict(self.under_way),
            texts={session: dict(texts) for session, texts in self.texts.items()},
            last=self.last,
        )


class Turns:
    """The stored turns of a journal: call ``see`` with each of its events."""

    def __init__(self, begins: TurnsContents = TurnsContents()) -> None:
        """
        Args:
            begins: what an earlier fold held, to go on from there.
        """
        held = begins.copy()
        self._places, self._under_way, self._texts = held.places, held.under_way, held.texts
        self._last = held.last

    def __len__(self) -> int:
        return len(self._places)

    def contents(self) -> TurnsContents:
        """A copy of all that it holds now."""
        return TurnsContents(
            places=self._places, under_way=self._under_way, texts=self._texts, last=self._last
        ).copy()

    def see(self, recorded: ev.Recorded) -> None:
        """
        Apply the next event. An event that broke an invariant has no effect. If it came before the
        end of the request, no end follows; if it was the end itself, the violation takes the turn
        back (``broke``).
        """
        match recorded.event:
            case ev.TurnStored() as turn:
                self._under_way[turn.request] = Place(
                    tenant=turn.tenant,
                    session=turn.session,
                    agent=turn.agent,
                    previous=turn.previous,
                    stored=recorded.position,
                    texts_at=tuple(turn.texts_at.items()),
                )
                self._note(turn, recorded.position)
            case ev.SessionClosed(session=session):
                self._texts.pop(session, None)
            case ev.RequestFinished(request=request) as end if request in self._under_way:
                self._places[request] = attrs.evolve(
                    self._under_way.pop(request),
                    finished=recorded.position,
                    tokens=end.prompt_tokens + end.answer_tokens,
                    finish_reason=end.finish_reason,
                )
                self._last = recorded.position, request
            # An id that is known breaks an invariant, and the turn that has it stays.
            case ev.TurnAdopted() as turn if turn.request not in self._places:
                self._last = recorded.position, turn.request
                self._places[turn.request] = Place(
                    tenant=turn.tenant,
                    session=agent_session(turn.tenant, turn.agent),
                    agent=turn.agent,
                    previous=turn.previous,
                    stored=recorded.position,
                    finished=recorded.position,
                    tokens=turn.prompt_tokens + turn.answer_tokens,
                    finish_reason=turn.finish_reason,
                )
            case ev.InvariantViolated(invariant=invariant, at_position=at, request=named) if broke(
                self._last, at, named, invariant
            ):
                self._places.pop(self._last[1], None)
            case ev.RequestCancelled(request=request):
                self._under_way.pop(request, None)
            case ev.ServerLost():
                self._under_way.clear()
            case ev.TurnForgotten(of_request=request):
                self._places.pop(request, None)
            case ev.SessionForgotten(of_session=session):
                self.drop([one for one, at in self._places.items() if at.session == session])
            case ev.JournalPruned(cut=cut):
                # A reader that begins at the base has not seen them. Which turns of agents stay is
                # known to the fold of the agents.
                for request, place in list(self._places.items()):
                    if place.stored <= cut and place.agent is None:
                        del self._places[request]
                self._texts = {
                    session: {named: row for named, row in texts.items() if row > cut}
                    for session, texts in self._texts.items()
                    if max(texts.values()) > cut
                }
            case _:
                pass

    def noted(self, session: str, texts: Mapping[str, str]) -> dict[str, int]:
        """
        Which texts of a note an earlier turn of the session has under the same name, each with the
        row.
        """
        known = self._texts.get(session, {})
        found = {name: known.get(_named(name, text)) for name, text in texts.items()}
        return {name: row for name, row in found.items() if row is not None}

    def place(self, request: str, tenant: str) -> Place | None:
        """Where the turn of a request is, if it is stored, the tenant's, and not an agent's."""
        found = self._places.get(request)
        if found is None or found.tenant != tenant or found.agent is not None:
            return None
        return found

    def history(self, request: str, tenant: str) -> tuple[Place, ...] | None:
        """
        The turns up to and including that of a request, the oldest first; None if one of them is
        not stored, belongs to another tenant, or is an agent's.
        """
        places: list[Place] = []
        named: str | None = request
        while named is not None:
            place = self.place(named, tenant)
            if place is None:
                return None
            places.append(place)
            named = place.previous
        return tuple(reversed(places))

    # --- for agents ----------------------------------------------------------------------------

    def held(self, request: str | None) -> Place | None:
        """Where the turn of a request is, whichever tenant or agent it belongs to."""
        return self._places.get(request) if request is not None else None

    def back_from(self, request: str | None) -> Iterator[tuple[str, Place]]:
        """An agent's turns from that of a request back to the first, each with its request."""
        while (place := self.held(request)) is not None:
            assert request is not None
            yield request, place
            request = place.previous

    def of_agents(self, cut: int) -> set[str]:
        """The requests of the turns of agents in the rows up to one."""
        return {
            request
            for request, place in self._places.items()
            if place.agent is not None and place.stored <= cut
        }

    def drop(self, requests: Iterable[str]) -> None:
        """Forget the turns of these requests."""
        for request in requests:
            self._places.pop(request, None)

    def _note(self, kept: ev.TurnStored, row: int) -> None:
        """Record the texts that a turn brought, as digests."""
        if kept.texts:
            known = self._texts.setdefault(kept.session, {})
            known.update((_named(name, text), row) for name, text in kept.texts.items())


def broke(last: tuple[int, str], at: int, request: str | None, invariant: str) -> bool:
    """
    Whether a violation is of the last row that a fold applied: it names the row, and its request if
    it has one, because unrelated bugs are recorded at the last row, too. INV-9 never is unrelated.

    Args:
        last: that row, and its request; empty if it has none.
        at, request, invariant: of the violation.
    """
    return at == last[0] and (request == last[1] or invariant == "INV-9")


def _named(name: str, text: str) -> tuple[str, bytes]:
    return name, hashlib.sha256(text.encode()).digest()
