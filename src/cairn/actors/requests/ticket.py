"""One answer of a request on its way: what a session needs, and the channel to the client."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import trio

from cairn.actors.errors import RefusalError
from cairn.actors.requests.messages import Generate, Reply, Waiting
from cairn.engine.answer.parts import AnswerForm
from cairn.engine.answer.token_bytes import TokenBytes
from cairn.engine.reports import GrammarMatcher
from cairn.journal.paths import Ask
from cairn.journal.state import Part


@attrs.frozen
class Committed:
    """A reply that may be sent once the journal is committed up to ``receipt``."""

    receipt: int
    reply: Reply


@attrs.frozen(kw_only=True)
class Prepared:
    """
    A request as ``prepare.py`` leaves it.

    Attributes:
        keys: of the prompt's full blocks.
        seed: the seed in use, given or drawn.
        max_tokens: clamped to the context.
        context_tokens: the limit of prompt and answer together.
        capacity_tokens: of the slab that prompt and answer need.
        form: of the answer.
        grammar: constrains the answer; None if nothing does.
        matcher: follows the answer through the grammar.
        token_bytes: the bytes of the model's tokens; None if the client does not ask for them.
    """

    command: Generate
    ask: Ask
    prompt_ids: tuple[int, ...]
    chain: tuple[Part, ...]
    keys: tuple[str, ...]
    seed: int
    max_tokens: int
    context_tokens: int
    capacity_tokens: int
    form: AnswerForm
    grammar: str | None = None
    matcher: GrammarMatcher | None = None
    token_bytes: TokenBytes | None = None


Replies = trio.MemoryReceiveChannel[Committed | RefusalError]
"""The channel from sessions to a client."""


class Ticket:
    """
    One answer of a request, between the HTTP layer and a session.

    Attributes:
        id: of the request.
        created_s: seconds since 1970.
        failed: whether it ended without an answer; its client gets the reason.
        gone: why the answer is no longer needed, by a key of ``admission.REJECTIONS``; else None.
            The session checks it at every step.
        admitted: whether it has a row, so that it no longer counts as waiting.
        rerouted: whether the session found that the rules by now choose another one.
        prefilled_tokens: how far the prompt has come, for keep-alives.
        prefilled: set once its prompt is prefilled, or never will be.
        sealed_tokens: prompt tokens whose KV was computed for this request and became blocks.
        finished: whether the answer is complete, committed or not.
        session: the journal's id of the session that took the request; empty before.
    """

    def __init__(
        self,
        request_id: str,
        prepared: Prepared,
        created_s: int,
        *,
        arrived: float,
        choice: int = 0,
        first: Ticket | None = None,
        on_leave: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            arrived: when the request arrived, on trio's clock.
            choice: the index of the answer among those of the request.
            first: the ticket of the first answer, whose channel this one shares; None for the first
                itself.
            on_leave: called when the answer is no longer needed.
        """
        self.id = request_id
        self.prepared = prepared
        self.created_s = created_s
        self.arrived = arrived
        self.session = ""
        self.gone: str | None = None
        self.admitted = False
        self.rerouted = False
        self.accepted = False
        self.failed = False
        self.prefilled_tokens = 0
        self.sealed_tokens = 0
        self.finished = False
        self.waiting = trio.CancelScope()
        self.prefilled = trio.Event()
        self.choice = choice
        self.first = first
        self._on_leave = on_leave
        self.replies: Replies
        if first is None:
            self._send, self.replies = trio.open_memory_channel[Committed | RefusalError](math.inf)
        else:
            self._send, self.replies = first._send, first.replies

    @property
    def tenant(self) -> str:
        """The tenant whose sessions and blocks it may use."""
        return self.prepared.ask.tenant

    def reply(self, receipt: int, reply: Reply) -> None:
        """Send a reply once it is committed. Never waits, because an answer is bounded."""
        if self.choice and not isinstance(reply, Waiting):
            reply = attrs.evolve(reply, choice=self.choice)
        self._send.send_nowait(Committed(receipt, reply))

    def fail(self, error: RefusalError) -> None:
        """End the request without an answer."""
        self.failed = True
        self._send.send_nowait(error)

    def leave(self, reason: str) -> None:
        """
        Note that the answer is no longer needed. A request that no session has taken ends at once.
        After ``fail`` the reason is not noted, because the client leaves for that one.
        """
        if self.gone is None and not self.failed:
            self.gone = reason
        if not self.accepted:
            self.waiting.cancel()
        self._on_leave()


def leave_together(tickets: Sequence[Ticket]) -> None:
    """
    Leave all answers of a request. If one of them failed, that is why the others end, and not the
    client.
    """
    reason = "sibling_failed" if any(ticket.failed for ticket in tickets) else "client"
    for ticket in tickets:
        ticket.leave(reason)
