"""
Drafts of an answer's next tokens by prompt lookup: what followed the same tokens earlier in prompt
and answer. Pure, and without a second model.

A draft decides about speed alone: a token of it is only kept where the model draws the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cairn.journal.speculation import DRAFT_TOKENS_MAX, pays

LENGTHS = (6, 3)
"""How many of the last tokens are looked up, the most telling first."""

INDEXED_AT_ONCE = 2048
"""How many tokens of the prompt are indexed between two passes, from its end on."""


class Drafter:
    """
    Drafts the next tokens of one answer, as long as that pays.

    Attributes:
        drafted, accepted: the session's tokens so far that were drafted, and that were accepted.
    """

    def __init__(
        self, ids: Sequence[int], *, ends: Collection[int], drafted: int = 0, accepted: int = 0
    ) -> None:
        """
        Args:
            ids: the prompt.
            ends: tokens that end an answer; none is drafted.
        """
        self.drafted = drafted
        self.accepted = accepted
        self._ends = ends
        self._ids = list(ids)
        self._indexed = len(self._ids)  # places from here on are indexed
        self._places: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in LENGTHS}

    def take(self, tokens: Sequence[int], *, drafted: int = 0, accepted: int = 0) -> None:
        """
        Take in tokens that were drawn.

        Args:
            drafted, accepted: tokens of the draft that the pass computed, and that it accepted.
        """
        self.drafted += drafted
        self.accepted += accepted
        for token in tokens:
            for length, places in self._places.items():
                if len(self._ids) >= length:
                    places[tuple(self._ids[-length:])] = len(self._ids)
            self._ids.append(token)

    def draft(self, most: int) -> tuple[int, ...]:
        """
        What may come next: at most this many tokens. Empty if no place is known that has the last
        tokens, or once drafts do not pay.
        """
        most = min(most, DRAFT_TOKENS_MAX)
        if most <= 0 or not pays(self.drafted, self.accepted):
            return ()
        self._index_more()
        for length, places in self._places.items():
            place = places.get(tuple(self._ids[-length:]))
            if place is not None:
                return self._from(place, most)
        return ()

    def _from(self, place: int, most: int) -> tuple[int, ...]:
        """The tokens from a place on. Where they end they repeat, as what led there did."""
        ids, found = self._ids, list[int]()
        while len(found) < most:
            at = place + len(found)
            token = ids[at] if at < len(ids) else found[at - len(ids)]
            if token in self._ends:
                break
            found.append(token)
        return tuple(found)

    def _index_more(self) -> None:
        """Index more of the prompt. Later places go before earlier ones."""
        until = max(0, self._indexed - INDEXED_AT_ONCE)
        for place in range(self._indexed - 1, until - 1, -1):
            for length, places in self._places.items():
                if place >= length:
                    places.setdefault(tuple(self._ids[place - length : place]), place)
        self._indexed = until
