"""
The order in which blocks can be done without, kept up to date event by event.

The least recently used goes first, but no block before those that are built on it: a block without
the one before it cannot be found, so the front of a chain is of use as long as its end is. To sort
all blocks by that takes most of a second where there are a hundred thousand. Here the *ends* are
kept alone, those blocks on which nothing else there is built, by when they were last used. The
first of them is the first of all: whatever is built on a block was of use no later than the block
itself. When it goes, the block before it may be an end.

The fold has a use once for a whole chain, under its last block. What it means for the others, which
may be the ends of tomorrow, is kept here for each of them: a use of a chain is one update of a
dictionary by all of its keys, and the same object for all.

Rules of this module:

1. What is kept follows from the fold alone. It can be made from a state at any time, and then is
   the same as that which followed the events up to there.
2. What is kept is changed by ``follow`` and by nothing else. To look is to change nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from immutables import Map

from cairn.journal import events as ev
from cairn.journal.state import Block, SessionId, State, Use

_Rank = tuple[int, int, str]
"""
Smaller goes first: when it was last used, or is over; how far it is from the front (negative); its
key.
"""
_PARENT = -1
"""In the place of a place in the heap: an end only once those before it are gone."""


class Ends:
    """
    Those of some blocks on which no other of them is built, by when they were last used.

    Blocks that are not among these may stand between two that are: what is built on something is
    built on all before it.
    """

    def __init__(
        self,
        belongs: Callable[[Block], bool],
        since: Callable[[Block], int] = lambda block: block.last_used,
    ) -> None:
        """
        Args:
            belongs: whether a block is one of these.
            since: by what they stand in order, the smallest first.
        """
        self._belongs = belongs
        self._since = since
        self._blocks: Map[str, Block] = Map()
        self._members: set[str] = set()
        # key to how many of the blocks right behind it are among these, or have such behind them
        self._behind: dict[str, int] = {}
        self._ends: dict[str, _Rank] = {}
        # All of them, and some that are ends no more: to find those would take longer.
        self._heap: list[_Rank] = []

    def follow(self, blocks: Map[str, Block], keys: Iterable[str]) -> None:
        """Take in how these blocks are now. What they are built on is on record, and stays."""
        self._blocks = blocks
        for key in keys:
            block = blocks.get(key)
            was = key in self._members
            if block is not None and self._belongs(block):
                if not was:
                    self._members.add(key)
                    if key not in self._behind:
                        self._behind_grows(block.parent)
                if key not in self._behind:
                    self._ends_with(block)
            elif was:
                self._members.remove(key)
                if self._ends.pop(key, None) is not None:
                    self._behind_shrinks(self._blocks[key].parent)
        self._tidy()

    def others(self, keys: Iterable[str]) -> list[str]:
        """Those of some keys whose blocks are not among these."""
        members = self._members
        return [key for key in keys if key not in members]

    def used(self, blocks: Map[str, Block], keys: Sequence[str]) -> None:
        """
        Take in that a chain was used, and nothing else happened to it. Of most of its blocks there
        is nothing to take in: the front of a chain is as long of use as its end is.

        Args:
            keys: the chain's, from the first one on. The last of these may be an end, and no other.
        """
        self._blocks = blocks
        last = next((key for key in reversed(keys) if key in self._members), None)
        if last is not None and last in self._ends:
            self._ends_with(blocks[last])
        self._tidy()

    def in_order(self) -> Iterator[tuple[Block, int]]:
        """
        All of them, the first to go first, each with when it was last of use (or will be over): it,
        or anything that is built on it. Takes what is taken from it times the logarithm of how many
        ends there are.
        """
        blocks, last = self._blocks, 0
        behind: dict[str, int] = {}
        seen: set[str] = set()
        ahead = [(self._heap[0], 0)] if self._heap else []
        while ahead:
            rank, place = heapq.heappop(ahead)
            if place != _PARENT:
                for child in (2 * place + 1, 2 * place + 2):
                    if child < len(self._heap):
                        heapq.heappush(ahead, (self._heap[child], child))
                if self._ends.get(rank[2]) != rank or rank[2] in seen:
                    continue
                seen.add(rank[2])
            block = blocks[rank[2]]
            last = max(last, rank[0])
            yield block, last
            parent = block.parent
            while parent is not None and parent in self._behind:
                behind[parent] = behind.get(parent, self._behind[parent]) - 1
                if behind[parent]:
                    break
                before = blocks[parent]
                if parent in self._members:
                    heapq.heappush(ahead, (self._rank(before), _PARENT))
                    break
                parent = before.parent

    def _tidy(self) -> None:
        if len(self._heap) > 64 + 2 * len(self._ends):
            self._heap = list(self._ends.values())
            heapq.heapify(self._heap)

    def _ends_with(self, block: Block) -> None:
        rank = self._rank(block)
        if self._ends.get(block.key) != rank:
            self._ends[block.key] = rank
            heapq.heappush(self._heap, rank)

    def _behind_grows(self, key: str | None) -> None:
        """Something is behind this block that was not, and was all that there is behind its own."""
        while key is not None and key in self._blocks:
            self._behind[key] = self._behind.get(key, 0) + 1
            if self._behind[key] > 1:
                return
            if key in self._members:
                self._ends.pop(key, None)
                return
            key = self._blocks[key].parent

    def _behind_shrinks(self, key: str | None) -> None:
        while key is not None and key in self._blocks:
            self._behind[key] -= 1
            if self._behind[key]:
                return
            del self._behind[key]
            if key in self._members:
                self._ends_with(self._blocks[key])
                return
            key = self._blocks[key].parent

    def _rank(self, block: Block) -> _Rank:
        return self._since(block), -block.start, block.key


class Order:
    """
    The orders in which blocks leave memory, their files are removed, and their TTLs are over.

    Attributes:
        memory: of the blocks in memory.
        files: of those that have files.
        expiry: of both, those whose lives have an end, by when that is.
        found: the keys of all that are in memory or in a file.
    """

    def __init__(self, state: State) -> None:
        self._begin(state)

    def last_used(self, block: Block) -> int:
        """
        The position at which a block was last sealed or loaded, or a chain was used that it is of.
        """
        use = self._uses.get(block.key)
        return block.last_used if use is None else max(block.last_used, use.position)

    def expires_us(self, block: Block) -> int | None:
        """
        When a block's life is over, in microseconds since 1970: the last of what those who sealed
        and used it gave it. None where it has no end.
        """
        use = self._uses.get(block.key)
        return block.expires_us if use is None else _later(block.expires_us, use.expires_us)

    def _begin(self, state: State) -> None:
        # key to the last use of all chains that a block is of, and the last due of these
        self._uses = _of_each(state)
        self._last_expires_us = max((use.expires_us or 0 for use in state.uses.values()), default=0)
        self.memory = Ends(lambda block: block.present, self.last_used)
        self.files = Ends(lambda block: block.file_bytes is not None, self.last_used)
        self.found: set[str] = set()
        self.expiry = Ends(
            lambda block: (
                (block.present or block.file_bytes is not None)
                and self.expires_us(block) is not None
            ),
            lambda block: self.expires_us(block) or 0,
        )
        of_any = (
            key
            for key, block in state.blocks.items()
            if block.present or block.file_bytes is not None
        )
        self._follow(state, tuple(of_any))

    def follow(self, before: State, after: State, event: ev.Event) -> None:
        """
        Take in an event.

        Args:
            before: the fold up to it.
            after: the fold with it.
        """
        match event:
            case ev.ServerStopped() | ev.ServerLost() | ev.ModelUnloaded():
                self._begin(after)
            case ev.PathSelected() | ev.PrewarmStarted():
                session = SessionId(event.session)
                pinned = len(before.pins.get(session, ()))
                self._chain_used(after, after.pins.get(session, ())[pinned:])
            case (
                ev.BlockSealed()
                | ev.BlockEvicted()
                | ev.BlockLoaded()
                | ev.BlockSpilled()
                | ev.BlockFileRejected()
                | ev.BlockFileRemoved()
            ):
                self._follow(after, (event.key,))
            case _:
                # Pins and bugs change no order, but who asks for it sees the blocks as they are.
                self._follow(after, ())

    def _chain_used(self, state: State, keys: tuple[str, ...]) -> None:
        if not keys:
            self._follow(state, ())
            return
        use = state.uses[keys[-1]]
        if (use.expires_us or 0) >= self._last_expires_us:
            self._last_expires_us = use.expires_us or 0
            self._uses.update(dict.fromkeys(keys, use))
        else:  # some may have a longer life, which is not made shorter
            for key in keys:
                known = self._uses.get(key, use)
                expires_us = _later(known.expires_us, use.expires_us)
                same = expires_us == use.expires_us
                self._uses[key] = use if same else Use(position=use.position, expires_us=expires_us)
        if use.expires_us is not None:
            # Lives that had no end have one now. From the last one on: what is before it is no end.
            self.expiry.follow(state.blocks, self.expiry.others(reversed(keys)))
        for ends in (self.memory, self.files, self.expiry):
            ends.used(state.blocks, keys)

    def _follow(self, state: State, keys: tuple[str, ...]) -> None:
        self.memory.follow(state.blocks, keys)
        self.files.follow(state.blocks, keys)
        self.expiry.follow(state.blocks, keys)
        for key in keys:
            block = state.blocks[key]
            if block.present or block.file_bytes is not None:
                self.found.add(key)
            else:
                self.found.discard(key)


def _of_each(state: State) -> dict[str, Use]:
    """
    The last use of each block, of all chains that it is of, with the last due of these; of blocks
    that are of any. Takes what there are of them, however many chains share a front.
    """
    last_first = sorted(state.uses.items(), key=lambda use: use[1].position, reverse=True)
    found = dict(_fronts(state, last_first))
    dues = [use.expires_us or 0 for _, use in last_first]
    if all(one >= other for one, other in pairwise(dues)):
        return found  # as where all ask for lives of one length
    longest_first = sorted(last_first, key=lambda use: use[1].expires_us or 0, reverse=True)
    for key, use in _fronts(state, longest_first):
        if found[key].expires_us != use.expires_us:
            found[key] = Use(position=found[key].position, expires_us=use.expires_us)
    return found


def _fronts(state: State, uses: Iterable[tuple[str, Use]]) -> Iterator[tuple[str, Use]]:
    """Each block of these chains once, with the first of the uses that it is of."""
    seen: set[str] = set()
    for end, use in uses:
        key: str | None = end
        while key is not None and key in state.blocks and key not in seen:
            seen.add(key)
            yield key, use
            key = state.blocks[key].parent


def _later(one: int | None, other: int | None) -> int | None:
    """The later of two ends; None where neither has one."""
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)
