"""The context of a request: its id, its tenant and its deadline."""

from __future__ import annotations

import attrs
import trio

from cairn.actors.errors import RefusalError
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate
from cairn.journal.tenants import session_id


@attrs.frozen
class RequestContext:
    """
    The id, the tenant and the deadline of a request that arrives now.

    Attributes:
        request: its id.
        tenant: the tenant whose sessions and blocks it may use.
        limits: how long it may take, and how often its client gets a keep-alive.
        arrived: on trio's clock: now.
        deadline: on trio's clock. The request ends then.
    """

    request: str
    tenant: str
    limits: Limits
    arrived: float = attrs.field(factory=trio.current_time)
    deadline: float = attrs.field()

    @deadline.default
    def _deadline(self) -> float:
        return self.arrived + self.limits.request_s

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return trio.current_time() >= self.deadline

    def until_beat(self) -> trio.CancelScope:
        """A scope to wait in until the next keep-alive is due, or the deadline has passed."""
        beat = trio.current_time() + self.limits.heartbeat_s
        return trio.move_on_at(min(beat, self.deadline))

    def name(self, refusal: RefusalError, command: Generate) -> None:
        """Set the ids of request and session in a refusal."""
        refusal.request = self.request
        if command.session_name is not None:
            refusal.session = session_id(self.tenant, command.session_name)
