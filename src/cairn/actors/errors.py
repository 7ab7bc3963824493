"""
Why a request is refused. ``http/wire/errors.py`` turns each of these into an HTTP error.

Grouped by whose fault it is, with the status that a client gets::

    RefusalError
      |  the client's: the request cannot be served as it is
      |- PromptTooLong      400  the prompt leaves no room for an answer
      |- InputTooLong       400  a text to embed, or all of a request, are too long
      |- PromptRefused      400  the template or the tokenizer cannot take the prompt
      |- FormatRefused      400  decoding cannot be constrained to this format
      |- TooManyAnswers     400  more answers than the server ever has places for
      |- AgentExists        409  an agent of this name exists
      |- AgentBusy          409  the agent is busy; the client may try again
      |- AgentReleased      410  another node has the agent, under another name
      |- CannotHandOver     409  the agent cannot be released or adopted as things are
      |- NotReleasedYet     409  likewise: its own node has to release it first
      |- TooManyAgents      409  the tenant has as many agents as it may have
      |- SessionBusy        409  the session is answering, or being forgotten; may be tried again
      |- CannotForget       409  the session cannot be forgotten as things are
      |  the load's: the client may try again
      |- QueueFull          429  too many requests wait
      |- NoMemory           503  the KV cache does not fit, and no request will make room
      |- TimedOut           504  it took longer than the operator allows
      |  the operator's or the machine's: the client may try again
      |- ModelNotLoaded     503  the model cannot be loaded
      |- CannotRecord        503  the journal takes no rows: full disk, lock, lost connection
      |- JournalUnread       503  the journal of another node cannot be read
      |- NotForgotten        503  what is left of a session cannot be removed now
      |- StillStarting      503  the server is starting
      |- Stopping           503  the server is stopping
      |  ours
      |- Broken             500  an invariant was violated; has the bug id

A violated invariant is a ``BugError`` of the journal first (``journal/errors.py``). The session, or
the server's admission, that it takes out of service raises ``Broken`` for the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from cairn.journal.events import StallReason


class RefusalError(Exception):
    """
    A request that is not served. Its client gets the message, and the request changed nothing.

    Attributes:
        request: the request's id, which journal and log have too; None until the server has set it.
        session: the journal's id of the session that the request named, if it named one.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.request: str | None = None
        self.session: str | None = None


# --- the client's ---------------------------------------------------------------------------------


class PromptTooLong(RefusalError):
    """The prompt leaves no room for an answer in the model's context."""

    def __init__(
        self,
        prompt_tokens: int,
        context_tokens: int,
        whose: str = "model",
        of_model: int = 0,
        *,
        by_bytes: bool = False,
    ) -> None:
        """
        Args:
            whose: what has this context: ``model`` or ``agent``.
            of_model: the model's own context, if the server's memory allows less; else 0.
            by_bytes: whether the tokens are not counted: it has so many at least by its bytes.
        """
        bound = "; the model itself takes {}, which the server's --pool-mb bounds"
        super().__init__(
            f"prompt is too long: {'at least ' if by_bytes else ''}{prompt_tokens} tokens > "
            f"{context_tokens - 1} maximum "
            f"(the {whose}'s context is {context_tokens} tokens and an answer needs at least one"
            f"{bound.format(of_model) if of_model else ''})"
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class InputTooLong(RefusalError):
    """A text to embed, or all of a request together, are too long."""


class PromptRefused(RefusalError):
    """The chat template or the tokenizer cannot take the prompt."""


class FormatRefused(RefusalError):
    """
    Decoding cannot be constrained to this format, or not any further.

    Attributes:
        fact: what is wrong, as the end of a sentence.
        about: ``schema``, ``calls`` or ``answer``, as in ``CannotConstrain``; ``calls_beside`` if
            calls that are allowed make a format impossible.
        tool: for ``schema``: the index and the name of the tool whose parameters are meant; None
            for the format of the answer itself.
    """

    def __init__(self, fact: str, about: str, tool: tuple[int, str] | None = None) -> None:
        super().__init__(f"no answer can be constrained to this: {fact}")
        self.fact = fact
        self.about = about
        self.tool = tool


class TooManyAnswers(RefusalError):
    """
    A request asks for more answers than an idle server has places for.

    Attributes:
        most: the number of places.
    """

    def __init__(self, answers: int, most: int) -> None:
        super().__init__(
            f"n is {answers}; at most {most} answers can run and wait at the same time. Ask for "
            "fewer, or ask the operator to raise --queue"
        )
        self.most = most


class AgentExists(RefusalError):
    """An agent of this name exists already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"agent {name!r} exists already; delete it, or choose another name")


class AgentBusy(RefusalError):
    """The agent is busy. The same request succeeds once it is not."""

    retry_after_s = 1

    def __init__(self, name: str, fact: str) -> None:
        super().__init__(
            f"agent {name!r} {fact}, and an agent does one thing at a time; try again in a moment"
        )


class AgentReleased(RefusalError):
    """
    The agent was handed over to another node, for good.

    Attributes:
        to: its name there.
    """

    def __init__(self, name: str, to: str) -> None:
        super().__init__(
            f"agent {name!r} was handed over to another node, where it is {to!r}; use that name"
        )
        self.to = to


class CannotHandOver(RefusalError):
    """The agent cannot be released, or adopted, as things are. Nothing was changed."""


class NotReleasedYet(CannotHandOver):
    """
    The agent cannot be adopted before its own node has released it. Nothing was changed.

    Attributes:
        tenant: whose agent it is.
    """

    def __init__(self, name: str, node: str, tenant: str) -> None:
        super().__init__(f"agent {name!r} is served by {node}, which has to release it first")
        self.tenant = tenant


class TooManyAgents(RefusalError):
    """The tenant has as many agents as it may have."""

    def __init__(self, most: int) -> None:
        super().__init__(f"there are {most} agents, which is the limit; delete one first")


class SessionBusy(RefusalError):
    """The session is at work. The same request succeeds once it is not."""

    retry_after_s = 1

    def __init__(self, name: str, fact: str) -> None:
        super().__init__(f"session {name!r} {fact}; try again in a moment")


class CannotForget(RefusalError):
    """The session cannot be forgotten as things are. Nothing was changed."""


# --- the load's -----------------------------------------------------------------------------------


class QueueFull(RefusalError):
    """Too many requests wait already."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoMemory(RefusalError):
    """The prompt's KV cache does not fit, and no request in progress will make room for it."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TimedOut(RefusalError):
    """The request took longer than the operator allows, or preparing it than the server does."""

    def __init__(
        self, limit_s: float, of: Literal["request", "prompt", "grammar"] = "request"
    ) -> None:
        """
        Args:
            of: what took too long.
        """
        sentences = {
            "request": f"request timed out after {limit_s:g} seconds; lower max_tokens, or ask the "
            "operator to raise --request-timeout",
            "prompt": f"the prompt was not rendered and tokenised within {limit_s:g} seconds; send "
            "a shorter one",
            "grammar": f"the format of the answer was not compiled within {limit_s:g} seconds; "
            "send a simpler schema",
        }
        super().__init__(sentences[of])
        self.limit_s = limit_s


# --- the operator's or the machine's --------------------------------------------------------------


class ModelNotLoaded(RefusalError):
    """The model could not be loaded. Other models may be served."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelBusy(RefusalError):
    """The model cannot be unloaded while requests are in flight or wait for one."""

    retry_after_s = 1


_STALLS: Mapping[StallReason, tuple[str, str]] = MappingProxyType(
    {
        "disk_full": (
            "the disk of the server's journal is full",
            "when the operator has freed some space",
        ),
        "locked": (
            "another program has locked the server's journal",
            "when the operator has ended it",
        ),
        "no_descriptors": (
            "the server may open no more files",
            "when other connections have ended",
        ),
        "connection_lost": (
            "the server has lost the connection to the database of its journal",
            "when the database answers",
        ),
    }
)
"""By the reason of a stall, what the client gets: the fact, and when it may try again."""


class CannotRecord(RefusalError):
    """The journal cannot be written for a time, so no request is served."""

    def __init__(self, reason: StallReason = "disk_full", retry_after_s: int = 10) -> None:
        fact, when = _STALLS[reason]
        super().__init__(f"{fact}, so no request can be recorded; try again {when}")
        self.reason = reason
        self.retry_after_s = retry_after_s


class JournalUnread(RefusalError):
    """The journal of another node cannot be read now, or is not sound. Nothing was changed."""

    retry_after_s = 10


class NotForgotten(RefusalError):
    """Something of a session cannot be removed now. The same request goes on where this ended."""

    retry_after_s = 10

    def __init__(self, name: str, fact: str, *, hint: str = "send the same request again") -> None:
        super().__init__(f"session {name!r} is not forgotten yet: {fact}; {hint}")


class StillStarting(RefusalError):
    """
    The server is starting.

    Attributes:
        step: what it does now.
        done, total: how much of that it has done; 0 of 0 if that is not known.
    """

    def __init__(self, step: str, done: int, total: int, retry_after_s: int) -> None:
        far = f" ({done} of {total})" if total else ""
        super().__init__(f"the server is starting: {step}{far}; try again in {retry_after_s} s")
        self.step = step
        self.done = done
        self.total = total
        self.retry_after_s = retry_after_s


class Stopping(RefusalError):
    """The server is draining."""

    def __init__(self, message: str, retry_after_s: int = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# --- ours -----------------------------------------------------------------------------------------


class Broken(RefusalError):
    """An invariant was violated, or a violation has quarantined the session that was named."""

    def __init__(self, bug_id: str) -> None:
        super().__init__(f"internal cache invariant violation; bug id {bug_id}")
        self.bug_id = bug_id
