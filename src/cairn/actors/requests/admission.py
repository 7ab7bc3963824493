"""
Admission: whether a request is admitted; and the list of all places where a request can wait.

*Why does my request wait?* In this order:

 1. For its model, while another one is loaded, or asked for by earlier requests:
    ``models/queue.py``.
 2. For a thread that renders and tokenises its prompt, of which a tenant has one for short prompts
    and one for long ones: ``threads/prompts.py``.
 3. For a thread that compiles its grammar: ``threads/prompts.py``.
 4. For the first of several answers (``n``), which prefills the prompt of all of them:
    ``ModelServer._dispatch`` in ``models/model_server.py``.
 5. For the session that it names, which serves one request at a time: ``ModelServer._dispatch``.
 6. For a row: ``decode_rows`` requests run at a time: ``ModelServer._in_turn``.
 7. For the session to leave its idle-time work: ``sessions/inbox.py``.
 8. For blocks that are read from files, and for other sessions that load or evict
    (``eviction_lock``): ``sessions/claim.py`` and ``Memory.load`` in ``memory.py``.
 9. For blocks of its prompt that another request computes at that moment, which it has joined:
    ``Claim.follow`` in ``sessions/claim.py``.
10. For a slab, while requests that came before get theirs, others are evicted, and requests that
    have one end: ``memory.py`` and ``sessions/generate.py``.
11. For the engine's thread, between the passes of other sessions: ``threads/scheduling.py``.
12. For room for each block that its prompt seals, while others are written to files and evicted:
    ``Memory.seal`` in ``memory.py``.
13. For the journal, because a reply leaves after its events are committed:
    ``requests/replies.py`` and ``threads/writer.py``.

A request for embeddings waits at places 2 and 13, and between them for its turn and for all
answers in flight: ``models/embeddings.py``.

Before all of them, a request that continues stored turns waits until these are read from the
journal: ``agents/stored_turns.py``.

The thirteen places together last ``Limits.request_s`` at most. Places 1 to 6 are bounded in number,
by the functions here: a request that finds no place is refused at once, as is one that arrives
while the server stops, the journal cannot be written or a bug has closed admission. A request for a
busy agent is refused in ``agents/``, and one whose slab can never fit in ``sessions/generate.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cairn.actors.errors import Broken, QueueFull, Stopping, TooManyAnswers
from cairn.actors.requests.replies import unless_dead
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.journal_stalls import Stalls
from cairn.actors.threads.writer import JournalWriter
from cairn.journal import events as ev

RETRY_AFTER_S = 5
"""When a client that finds no place may try again."""

REJECTIONS: Mapping[str, tuple[int, str]] = {
    "client": (499, "client_gone"),
    "timed_out": (504, "timed_out"),
    "sibling_failed": (424, "sibling_failed"),
    "server_stopped": (503, "server_stopping"),
    "journal_stalled": (503, "journal_stalled"),
    "queue_full": (429, "queue_full"),
    "model_not_loaded": (503, "model_not_loaded"),
}
"""The status and the code with which the journal records a request that no session took, by why."""


@attrs.frozen
class Admission:
    """Refuses requests while none may come in, and records requests that no session took."""

    _sequencer: Sequencer
    _writer: JournalWriter
    _stalls: Stalls

    def check_open(self, *, stopping: bool) -> None:
        """
        Check that requests are admitted at all.

        Raises:
            Stopping: the server takes no more requests.
            CannotRecord: nothing can be recorded now.
        """
        if stopping:
            raise Stopping("the server is stopping; try again in a moment")
        if self._writer.stalled or self._writer.dead:
            raise self._stalls.refusal()

    async def check_bugs(self, quarantined_by: str | None = None) -> None:
        """
        Refuse a request if a bug has closed admission, or quarantined the session it names.

        Args:
            quarantined_by: the id of the latter bug.

        Raises:
            Broken: the bug is committed by then, so that a client that gets its id can look it up.
        """
        bug_id = self._sequencer.state.admission_bug or quarantined_by
        if bug_id is not None:
            await unless_dead(self._writer.wait_all_committed())
            raise Broken(bug_id)

    def reject(self, request: str, tenant: str, why: str) -> None:
        """
        Record that no session took a request.

        Args:
            why: a key of ``REJECTIONS``.
        """
        status, code = REJECTIONS[why]
        self._sequencer.append(
            ev.RequestRejected(request=request, tenant=tenant, status=status, code=code)
        )


# --- pure decisions -------------------------------------------------------------------------------


def check_places(answers: int, *, queue: int, rows: int, running: int, in_flight: int) -> None:
    """
    Whether there are places for the answers of a request over the model that is loaded.

    Args:
        queue: how many answers may wait.
        rows: how many run at a time.
        running: how many of those in flight have a row.
        in_flight: how many are prepared, wait or run.

    Raises:
        TooManyAnswers: there never are so many places.
        QueueFull: there are not now.
    """
    if answers > queue + rows:
        raise TooManyAnswers(answers, queue + rows)
    waiting = in_flight - running
    if waiting + answers > queue + rows - running:
        raise QueueFull(
            f"the server is busy (running: {running}, waiting: {waiting}) and has no room for "
            f"{answers} more; try again in a few seconds",
            retry_after_s=RETRY_AFTER_S,
        )


def check_model_queue(answers: int, *, queue: int, rows: int, waiting: int) -> None:
    """
    Whether there are places for the answers of a request whose model is not loaded.

    As many may wait for a model as can come in together once it is loaded. While its rows are
    unknown a first request may wait whatever it asks for, and ``check_places`` decides later.

    Args:
        queue: how many answers may wait.
        rows: how many the model runs at a time; 0 while that is not known.
        waiting: how many wait for any model.

    Raises:
        TooManyAnswers: there never are so many places.
        QueueFull: there are not now.
    """
    if rows and answers > queue + rows:
        raise TooManyAnswers(answers, queue + rows)
    is_full = waiting + answers > queue + max(1, rows)
    if is_full and (rows or waiting):
        raise QueueFull(
            f"{waiting} requests wait for a model already; try again in a few seconds",
            retry_after_s=RETRY_AFTER_S,
        )


def check_count_queue(counts: int, *, queue: int) -> None:
    """
    Whether one more prompt may wait to be counted by a tokenizer whose model is not loaded.

    Args:
        counts: how many are being counted or wait.

    Raises:
        QueueFull: the maximum number wait already.
    """
    if counts > queue:
        raise QueueFull(
            f"{counts} counts wait already; try again in a few seconds",
            retry_after_s=RETRY_AFTER_S,
        )
