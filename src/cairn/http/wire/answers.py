"""What the answers of all protocols share: taking in replies, and Cairn's headers and object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from urllib.parse import quote

from msgspec import UNSET

from cairn.actors.requests.messages import Accepted, Delta, Finished, Reply, Waiting
from cairn.engine.answer.parts import AnswerPart, Calling
from cairn.http.wire.json import encode
from cairn.http.wire.parameters import ReadRequest
from cairn.http.wire.sent import CairnObject, Sent


class UnfinishedAnswer(Exception):
    """
    The replies ended before ``Finished``, or began without ``Accepted``: a bug in this server.
    """


class WholeAnswer:
    """Collects the replies of an answer that is sent as a whole. Takes each once and in order."""

    def __init__(self, read: ReadRequest) -> None:
        self._ignored = read.ignored
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


class StreamedAnswer(ABC):
    """
    One answer as server-sent events, piece by piece. Takes each reply once and in order. Subclasses
    make the events.
    """

    def __init__(self, read: ReadRequest) -> None:
        self._ignored = read.ignored
        self._accepted: Accepted | None = None
        self._finished: Finished | None = None

    def take(self, reply: Reply) -> bytes:
        """The events to send for a reply; may be empty."""
        if self._accepted is None and isinstance(reply, Delta | Finished):
            raise UnfinishedAnswer("the replies began without being accepted")
        match reply:
            case Waiting():
                return self._keep_alive()
            case Accepted():
                self._accepted = reply
                return self._start(reply)
            case Delta():
                parts = b"".join(map(self._part, reply.parts))
                return parts if reply.calling is None else parts + self._calling(reply.calling)
            case Finished():
                self._finished = reply
                return self._finish(reply)

    def headers(self, first: Reply) -> dict[str, str]:
        """The response headers that describe the request, by its first reply."""
        return accepted_headers(first)

    def done(self) -> bytes:
        """
        The end of a complete stream.

        Raises:
            UnfinishedAnswer: the stream is not complete.
        """
        if self._finished is None:
            raise UnfinishedAnswer("the replies ended before the answer did")
        return self._end(self._finished)

    @abstractmethod
    def _keep_alive(self) -> bytes: ...

    @abstractmethod
    def _start(self, accepted: Accepted) -> bytes: ...

    @abstractmethod
    def _part(self, part: AnswerPart) -> bytes: ...

    @abstractmethod
    def _calling(self, calling: Calling) -> bytes: ...

    @abstractmethod
    def _finish(self, finished: Finished) -> bytes: ...

    @abstractmethod
    def _end(self, finished: Finished) -> bytes: ...


def named_event(name: str, value: Sent) -> bytes:
    """A server-sent event with a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(value))


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
        explanation=UNSET if accepted.explanation is None else accepted.explanation,
        seed=accepted.seed,
        ignored=list(ignored) or UNSET,
    )
