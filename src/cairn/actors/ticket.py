"""
A request on its way: what a session needs of it, and the way back to its client.
"""

from __future__ import annotations

import attrs
import trio

from cairn.actors.messages import Generate, RefusalError, Reply
from cairn.journal.paths import Ask
from cairn.journal.state import Part


@attrs.frozen
class Committed:
    """
    A reply that may leave once the journal is committed up to ``receipt``.
    """

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
        capacity_tokens: of the slab that prompt and answer need.
    """

    command: Generate
    ask: Ask
    prompt_ids: tuple[int, ...]
    chain: tuple[Part, ...]
    keys: tuple[str, ...]
    seed: int
    max_tokens: int
    capacity_tokens: int


class Ticket:
    """
    One request between the HTTP layer and a session.

    Attributes:
        id: of the request.
        created_s: seconds since 1970.
        gone: why nobody waits for the answer any more, or None. The session looks at every step.
        seated: one of the rows that decode is its own, so it does not count as one that waits.
        rerouted: the session found, in its turn, that the rules choose another one by now.
        prefilled_tokens: how far the prompt has come, for keep-alives.
    """

    def __init__(self, request_id: str, prepared: Prepared, created_s: int) -> None:
        self.id = request_id
        self.prepared = prepared
        self.created_s = created_s
        self.gone: str | None = None
        self.seated = False
        self.rerouted = False
        self.accepted = False
        self._failed = False
        self.prefilled_tokens = 0
        self.left_turn = trio.Event()
        self.waiting = trio.CancelScope()
        self._send, self.replies = trio.open_memory_channel[Committed | RefusalError](float("inf"))

    def reply(self, receipt: int, reply: Reply) -> None:
        """
        Hand a reply over, to leave once it is committed. Never waits: an answer is bounded.
        """
        self._send.send_nowait(Committed(receipt, reply))

    def fail(self, error: RefusalError) -> None:
        """
        Hand over the end of a request that is not answered.
        """
        self._failed = True
        self._send.send_nowait(error)

    def leave(self, reason: str) -> None:
        """
        Nobody waits any more. A request that no session has taken ends at once. A client that was
        refused leaves for that, and not of itself.
        """
        if self.gone is None and not self._failed:
            self.gone = reason
        if not self.accepted:
            self.waiting.cancel()
