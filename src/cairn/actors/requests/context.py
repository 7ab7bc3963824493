"""A request as it comes: its id, and how long its client waits."""

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
    A request that comes now.

    Attributes:
        request: its id.
        tenant: the tenant whose sessions and blocks it may use.
        limits: how long it may take, and how often its client hears that it still waits.
        deadline: on trio's clock. Behind it nothing more comes.
    """

    request: str
    tenant: str
    limits: Limits
    deadline: float = attrs.field()

    @deadline.default
    def _deadline(self) -> float:
        return trio.current_time() + self.limits.request_s

    @property
    def is_over(self) -> bool:
        """Whether its time is over."""
        return trio.current_time() >= self.deadline

    def until_beat(self) -> trio.CancelScope:
        """
        A scope to wait in until its client is to hear that it still waits, or its time is over.
        """
        beat = trio.current_time() + self.limits.heartbeat_s
        return trio.move_on_at(min(beat, self.deadline))

    def name(self, refusal: RefusalError, command: Generate) -> None:
        """Say in a refusal whose it is."""
        refusal.request = self.request
        if command.session_name is not None:
            refusal.session = session_id(self.tenant, command.session_name)
