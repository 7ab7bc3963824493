"""
What the answers of all protocols share: collecting the replies of a whole answer, and Cairn's own
headers and object.
"""

from __future__ import annotations

from urllib.parse import quote

from msgspec import UNSET, UnsetType

from cairn.actors.requests.messages import Accepted, Delta, Finished, Reply, Waiting
from cairn.engine.answer.parts import AnswerPart
from cairn.http.wire.sent import Sent
from cairn.journal.events import Path


class CairnObject(Sent, kw_only=True):
    """How Cairn served the request: its session, what it reused, and what it ignored."""

    request: str | UnsetType = UNSET
    session: str
    path: Path
    reason: str | None
    reused_tokens: int
    seed: int
    ignored: list[str] | UnsetType = UNSET
    choices: list[CairnObject] | UnsetType = UNSET


class UnfinishedAnswer(Exception):
    """
    The replies ended before ``Finished``, or began without ``Accepted``: a bug in this server.
    """


class WholeAnswer:
    """Collects the replies of an answer that is sent as a whole. Takes each once and in order."""

    def __init__(self) -> None:
        self._parts: list[AnswerPart] = []
        self._accepted: Accepted | None = None
        self._finished: Finished | None = None

    def take(self, reply: Reply) -> None:
        """Add a reply."""
        match reply:
            case Accepted():
                self._accepted = reply
            case Delta():
                self._parts.extend(reply.parts)
            case Finished():
                self._finished = reply
            case Waiting():
                pass

    def headers(self) -> dict[str, str]:
        """The response headers that describe the request."""
        return accepted_headers(self._accepted)

    def _ends(self) -> tuple[Accepted, Finished]:
        """The first reply and the last. Raises ``UnfinishedAnswer`` if one of them is missing."""
        if self._accepted is None or self._finished is None:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return self._accepted, self._finished


def accepted_headers(accepted: Reply | None) -> dict[str, str]:
    """The response headers that describe a request; none before it is accepted."""
    if not isinstance(accepted, Accepted):
        return {}
    return {
        "x-request-id": accepted.request,
        # The client may have named the session in any script.
        "x-cairn-session": quote(accepted.session, safe="/:@+=,"),
        "x-cairn-path": accepted.path,
        "x-cairn-context-left": str(accepted.context_left),
    }


def cairn_object(accepted: Accepted, ignored: tuple[str, ...] = ()) -> CairnObject:
    """The ``cairn`` field of an answer, in every protocol."""
    return CairnObject(
        session=accepted.session,
        path=accepted.path,
        reason=accepted.reason,
        reused_tokens=accepted.cached_tokens,
        seed=accepted.seed,
        ignored=list(ignored) or UNSET,
    )
