"""
What the answers of all protocols have in common: the replies of an answer that is sent as a whole,
and Cairn's own headers and object.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from cairn.actors.requests.messages import Accepted, Delta, Finished, Reply, Waiting
from cairn.engine.answer.parts import AnswerPart


class UnfinishedAnswer(Exception):
    """
    The replies ended before ``Finished``, or began without ``Accepted``. Ours, never a client's.
    """


class WholeAnswer:
    """The replies of an answer that is sent as a whole; each is taken once and in order."""

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
        """What is known of the request, for the response's headers."""
        return accepted_headers(self._accepted)

    def _ends(self) -> tuple[Accepted, Finished]:
        """
        The first reply and the last. Raises ``UnfinishedAnswer`` where one of them is missing.
        """
        if self._accepted is None or self._finished is None:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return self._accepted, self._finished


def accepted_headers(accepted: Reply | None) -> dict[str, str]:
    """
    What is known of a request, for the headers of its response; nothing before it is accepted.
    """
    if not isinstance(accepted, Accepted):
        return {}
    return {
        "x-request-id": accepted.request,
        # A session has the name that its client gave it, in any script.
        "x-cairn-session": quote(accepted.session, safe="/:@+=,"),
        "x-cairn-path": accepted.path,
        "x-cairn-context-left": str(accepted.context_left),
    }


def cairn_object(accepted: Accepted, ignored: tuple[str, ...]) -> dict[str, Any]:
    """How an answer came about, as a field of its own in every protocol's answer."""
    told = {
        "session": accepted.session,
        "path": accepted.path,
        "reason": accepted.reason,
        "reused_tokens": accepted.cached_tokens,
        "seed": accepted.seed,
    }
    return {**told, "ignored": list(ignored)} if ignored else told
