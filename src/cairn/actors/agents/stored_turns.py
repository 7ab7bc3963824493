"""
Stored turns: looked up in the journal, and deleted when their client asks for that.

Which turns there are, and at which rows, is a fold of the journal; their texts are read from its
rows on demand and cached (``text_cache.py``). A request that continues from many turns reads only
those that are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import msgspec
import structlog

from cairn.actors.agents.text_cache import TextCache
from cairn.actors.errors import Stopping
from cairn.actors.requests.messages import Finished, StoredTurn
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.writer import JournalWriter, WriterDied
from cairn.engine.prompt.turns import messages_of, parts_of
from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow
from cairn.journal.rows.codec import Row, decode
from cairn.journal.turns import Place, Turns

log = structlog.get_logger("cairn")


@attrs.frozen
class StoredTurns:
    """
    The turns from which clients may continue. ``_turns`` must see each committed event.

    Attributes:
        text_cache: the texts that were read, by their places.
    """

    _turns: Turns
    _writer: JournalWriter
    _sequencer: Sequencer
    text_cache: TextCache = attrs.field(factory=TextCache)

    async def turn(self, request: str, tenant: str) -> StoredTurn | None:
        """
        The turn of a request; None if the tenant has no such turn.

        Raises:
            RefusalError: the journal cannot be read now.
        """
        place = self._turns.place(request, tenant)
        found = await self.read([place]) if place is not None else None
        if place is None or found is None:
            return None
        turn = found[0]
        texts = await self._texts(place)
        return attrs.evolve(turn, texts={**texts, **turn.texts}) if texts is not None else None

    async def history(self, request: str, tenant: str) -> tuple[StoredTurn, ...] | None:
        """
        The turns up to and including a request's, the oldest first; None if the tenant has not all
        of them. Raises as ``turn``.
        """
        places = self._turns.history(request, tenant)
        return await self.read(places) if places is not None else None

    async def forget(self, request: str, tenant: str) -> bool:
        """
        Delete the turn of a request. False if the tenant has no such turn.

        Raises:
            RefusalError: that cannot be put on record now.
        """
        if self._turns.place(request, tenant) is None:
            return False
        if self._writer.stalled:
            await self._writer.wait_all_committed()
        try:
            forgotten = ev.TurnForgotten(of_request=request, tenant=tenant)
            await self._writer.wait_committed(self._sequencer.append(forgotten))
        except WriterDied as died:
            raise stopping() from died
        return True

    async def read(self, places: Sequence[Place]) -> tuple[StoredTurn, ...] | None:
        """The turns at these places; None if a text of one was pruned. Raises as ``turn``."""
        found: dict[Place, StoredTurn] = {}
        unread: list[Place] = []
        for place in places:
            known = self.text_cache.find(place)
            if known is None:
                unread.append(place)
            else:
                found[place] = known
        if unread:
            rows = await self._rows(
                [at for place in unread for at in (place.stored, place.finished)]
            )
            for place, stored, finished in zip(unread, rows[::2], rows[1::2], strict=True):
                turn = _turn_of(stored, finished)
                if turn is None:
                    return None
                found[place] = turn
        # A turn that was deleted while it was read is not cached.
        self.text_cache.use(
            [(place, found[place]) for place in places if self._is_held(place, found[place])]
        )
        return tuple(found[place] for place in places)

    def drop_deleted(self) -> None:
        """Drop the cached texts of turns that were deleted."""
        self.text_cache.forget(
            lambda place, turn: isinstance(place, Place) and not self._is_held(place, turn)
        )

    async def _texts(self, place: Place) -> dict[str, str] | None:
        """
        The texts of a turn that are in rows of earlier turns, deleted or not; None if one was
        pruned.
        """
        wanted = sorted({row for _, row in place.texts_at})
        rows = await self._rows(wanted)
        try:
            brought = {
                at: _texts_of(row, place.session) for at, row in zip(wanted, rows, strict=True)
            }
            return {name: brought[at][name] for name, at in place.texts_at}
        except (DamagedRow, LookupError) as error:
            log.warning("a stored turn cannot be read", row=place.stored, fact=str(error))
            return None

    async def _rows(self, positions: Sequence[int]) -> list[Row | None]:
        if not positions:
            return []
        try:
            return await self._writer.rows(positions)
        except WriterDied as died:
            raise stopping() from died

    def _is_held(self, place: Place, turn: StoredTurn) -> bool:
        return self._turns.held(turn.request) == place


def _turn_of(kept: Row | None, finished: Row | None) -> StoredTurn | None:
    """The turn that two rows describe; None if their text was pruned or forgotten."""
    if kept is None or finished is None:
        return None
    try:
        recorded = decode(kept)
        if recorded.unread is not None:
            return None
        turn, end = recorded.event, decode(finished).event
        assert isinstance(turn, ev.TurnStored | ev.TurnAdopted)
        assert isinstance(end, ev.RequestFinished | ev.TurnAdopted)
        return StoredTurn(
            request=turn.request,
            previous=turn.previous,
            created_s=turn.created_s,
            asked=messages_of(turn.question),
            parts=parts_of(turn.answer),
            note=turn.note if isinstance(turn, ev.TurnStored) else "",
            texts=turn.texts if isinstance(turn, ev.TurnStored) else {},
            finished=Finished(
                finish_reason=end.finish_reason,
                prompt_tokens=end.prompt_tokens,
                cached_tokens=end.cached_tokens,
                completion_tokens=end.completion_tokens,
            ),
        )
    except (DamagedRow, msgspec.MsgspecError, KeyError) as error:
        log.warning("a stored turn cannot be read", row=kept.position, fact=str(error))
        return None


def _texts_of(row: Row | None, session: str) -> Mapping[str, str]:
    """
    The texts that are new in a turn of a session.

    Raises:
        DamagedRow: the row cannot be read.
        LookupError: the row has no such turn.
    """
    recorded = decode(row) if row is not None else None
    event = recorded.event if recorded is not None and recorded.unread is None else None
    if not isinstance(event, ev.TurnStored) or event.session != session:
        raise LookupError("its texts are not in the rows that it names")
    return event.texts


def stopping() -> Stopping:
    """The refusal after the journal's writer has died."""
    return Stopping("the server stops because its journal cannot be written")
