"""A request on its way: what a session needs of it, and the way back to its client."""

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
    """A reply that may leave once the journal is committed up to ``receipt``."""

    receipt: int
    reply: Reply


@attrs.frozen(kw_only=True)
class Prepared:
    """
    A request with everything that follows from it alone.

    Attributes:
        keys: of the prompt's full chunks.
        seed: the one in use.
        max_tokens: clamped to the context.
        context_tokens: what prompt and answer may have together.
        capacity_tokens: of the slab that prompt and answer need.
        form: of the answer.
        grammar: what the answer is held to, or None.
        guide: follows it.
        token_bytes: the bytes of the model's tokens, read already; None where nobody asks for them.
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
"""What sessions say to a client."""


class Ticket:
    """
    One request between the HTTP layer and a session.

    Attributes:
        id: of the request.
        created_s: seconds since 1970.
        failed: it ended without an answer, and its client hears why.
        gone: why nobody waits for the answer any more, or None. The session looks at every step.
        seated: one of the rows that decode is its own, so it does not count as one that waits.
        rerouted: the session found, in its turn, that the rules choose another one by now.
        prefilled_tokens: how far the prompt has come, for keep-alives.
        prefilled: set once its prompt has its KV, or never will.
        sealed_tokens: of the prompt, those whose KV was computed for it and became blocks.
        finished: the answer is complete, if not committed yet.
    """

    def __init__(
        self,
        request_id: str,
        prepared: Prepared,
        created_s: int,
        *,
        choice: int = 0,
        first: Ticket | None = None,
        on_leave: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            choice: which of several answers that are asked for at once.
            first: the ticket of the first of them, whose client hears of this one in the same
                place; None for that one itself.
            on_leave: is called when nobody waits for it any more.
        """
        self.id = request_id
        self.prepared = prepared
        self.created_s = created_s
        self.gone: str | None = None
        self.admitted = False
        self.rerouted = False
        self.accepted = False
        self.failed = False
        self.prefilled_tokens = 0
        self.sealed_tokens = 0
        self.finished = False
        self.left_turn = trio.Event()
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
        """Hand a reply over, to leave once it is committed. Never waits: an answer is bounded."""
        if self.choice and not isinstance(reply, Waiting):
            reply = attrs.evolve(reply, choice=self.choice)
        self._send.send_nowait(Committed(receipt, reply))

    def fail(self, error: RefusalError) -> None:
        """Hand over the end of a request that is not answered."""
        self.failed = True
        self._send.send_nowait(error)

    def leave(self, reason: str) -> None:
        """
        Nobody waits any more. A request that no session has taken ends at once. A client that was
        refused leaves for that, and not of itself.
        """
        if self.gone is None and not self.failed:
            self.gone = reason
        if not self.accepted:
            self.waiting.cancel()
        self._on_leave()


def leave_together(tickets: Sequence[Ticket]) -> None:
    """
    The client of a request waits for none of its answers any more. Where one of them failed it is
    that which ends the others, and not the client.
    """
    reason = "sibling_failed" if any(ticket.failed for ticket in tickets) else "client"
    for ticket in tickets:
        ticket.leave(reason)
