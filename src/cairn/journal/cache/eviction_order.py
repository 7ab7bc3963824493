"""
Keeps the order in which blocks are evicted up to date, event by event.

``Ends._rank`` is the order of blocks; that of slabs and sessions is in ``eviction.py``
(``slab_to_release``, ``session_to_forget``).

The block goes first that is least likely to be used soon, see ``rank``: in short, the one that was
used longest ago or that is expected the latest. By the last use alone, conversations that take
turns would each evict the next one, if there is room for all but one of them.

No block goes before the blocks that are built on it: a block cannot be found without its
predecessor, so the beginning of a chain is of use as long as its end. Sorting all blocks that way
takes most of a second with a hundred thousand of them. This module therefore sorts only the *ends*,
the blocks that no other block is built on. The first end is the first of all blocks, because a
block counts as of use as long as anything that is built on it. When an end is evicted, its
predecessor may become an end.

Ranks change with the position of the journal, but blocks of one kind keep their order: those that
are expected, and all others. There is a heap for each kind. A third one has the positions at which
an end changes from one kind to the other.

The fold records a use once for a whole chain, under its last block. Here it is recorded for every
block of the chain, because any of them may become an end later: a use of a chain is one update of a
dictionary by all of its keys, with the same object for all.

Rules of this module:

1. The order follows from the fold alone. It can be built from a state at any time, and is then the
   same as one that followed the events up to there.
2. Only ``follow`` changes the order. Reading it changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import attrs
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import Block, Session, SessionId, State, Use

_YOUNG = 10
"""A block is expected again only when a tenth of its interval has passed."""
_GRACE = 4
"""A block is no longer expected when it is a quarter of its interval late."""

_LOOSE = 64
"""So many entries may count no longer before those that do are collected again."""

_Uses = tuple[int, int | None]
_Entry = tuple[int, int, str]
"""
Smaller goes first: the last use or expiry, or the expected use (negative); the distance from the
beginning of the chain (negative); the key.
"""
_OTHERS, _EXPECTED, _PARENTS = 0, 1, 2
"""
The heap of an end: *parents* are no ends yet, but become ones once those built on them are gone.
"""


def is_expected(position: int, last: int, previous: int | None) -> bool:
    """Whether a block is expected at a position, see ``rank``. The same arguments."""
    if previous is None:
        return False
    interval, passed = last - previous, position - last
    return interval <= _YOUNG * passed and _GRACE * passed < (_GRACE + 1) * interval


def rank(position: int, last: int, previous: int | None) -> int:
    """
    How soon a block is likely to be used. The smallest rank is evicted first.

    A block is expected to be used again after the interval between its last two uses. Until then,
    and for another quarter of the interval, its rank is the number of positions to the expected
    use, negative. In the first tenth of the interval it does not count as expected yet, because it
    may be used several times in a row. The rank of a block that is not expected, or that was used
    only once, is the number of positions since its last use, negative.

    Args:
        position: of the last event, in the journal.
        last: position of the last use.
        previous: position of the use before that; None if there was none.
    """
    if previous is not None and is_expected(position, last, previous):
        return position - (last + last - previous)
    return last - position


def _next_change(position: int, last: int, previous: int | None) -> int | None:
    """The next position at which a block begins or ends to be expected; None if there is none."""
    if previous is None:
        return None
    interval = last - previous
    begins = last + -(-interval // _YOUNG)
    ends = last + -(-(_GRACE + 1) * interval // _GRACE)
    return next((at for at in (begins, ends) if at > position), None)


class Ends:
    """
    The blocks of a subset that no other block of the subset is built on, in the order of eviction.

    There may be blocks outside the subset between two that are in it: a block is built on all
    blocks before it.
    """

    def __init__(
        self,
        belongs: Callable[[Block], bool],
        uses: Callable[[Block], _Uses] = lambda block: (block.last_used, block.previous_use),
    ) -> None:
        """
        Args:
            belongs: whether a block is in the subset.
            uses: the positions of the last two uses of a block, None for one that was not. To order
                the blocks by something else, the smallest first: that, and None.
        """
        self._belongs = belongs
        self._uses = uses
        self._position = 0
        self._blocks: Map[str, Block] = Map()
        self._members: set[str] = set()
        # key to how many of its direct successors are in the subset, or have a successor that is
        self._successors: dict[str, int] = {}
        self._ends: dict[str, _Entry] = {}
        # Have all ends, and some blocks that no longer are: removing those would cost more.
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])
        self._changes: list[tuple[int, str]] = []

    def reach(self, position: int) -> None:
        """The journal is at this position; ranks are those at this position from now on."""
        self._position = position
        while self._changes and self._changes[0][0] <= position:
            _, key = heapq.heappop(self._changes)
            if key in self._ends:
                self._ends_with(self._blocks[key])

    def rank(self, block: Block) -> int:
        """The rank of a block by its own uses."""
        return rank(self._position, *self._uses(block))

    def follow(self, blocks: Map[str, Block], keys: Iterable[str]) -> None:
        """Update these blocks. What a block is built on is on record and does not change."""
        self._blocks = blocks
        for key in keys:
            block = blocks.get(key)
            was = key in self._members
            if block is not None and self._belongs(block):
                if not was:
                    self._members.add(key)
                    if key not in self._successors:
                        self._add_successor(block.parent)
                if key not in self._successors:
                    self._ends_with(block)
            elif was:
                self._members.remove(key)
                if self._ends.pop(key, None) is not None:
                    self._remove_successor(self._blocks[key].parent)
        self._tidy()

    def others(self, keys: Iterable[str]) -> list[str]:
        """The keys whose blocks are not in the subset."""
        members = self._members
        return [key for key in keys if key not in members]

    def used(self, blocks: Map[str, Block], keys: Sequence[str]) -> None:
        """
        Update a chain that was used and has not changed otherwise. Most of its blocks need no
        update, because the beginning of a chain is of use as long as its end.

        Args:
            keys: the keys of the chain, from the first one on. Only the last one that is in the
                subset can be an end.
        """
        self._blocks = blocks
        last = next((key for key in reversed(keys) if key in self._members), None)
        if last is not None and last in self._ends:
            self._ends_with(blocks[last])
        self._tidy()

    def in_order(self) -> Iterator[tuple[Block, int]]:
        """
        All blocks of the subset, the first to evict first. With each comes the largest rank (or the
        latest expiry) of it and all that is built on it. Takes time proportional to the number of
        blocks taken, times the logarithm of the number of ends.
        """
        blocks = self._blocks
        remaining: dict[str, int] = {}
        seen: set[str] = set()
        ahead = [self._at(kind, 0) for kind, heap in enumerate(self._heaps) if heap]
        heapq.heapify(ahead)
        while ahead:
            last, _, key, kind, place = heapq.heappop(ahead)
            if kind != _PARENTS:
                heap = self._heaps[kind]
                for child in (2 * place + 1, 2 * place + 2):
                    if child < len(heap):
                        heapq.heappush(ahead, self._at(kind, child))
                if self._ends.get(key) != heap[place] or key in seen:
                    continue
                seen.add(key)
            block = blocks[key]
            yield block, last
            parent = block.parent
            while parent is not None and parent in self._successors:
                remaining[parent] = remaining.get(parent, self._successors[parent]) - 1
                if remaining[parent]:
                    break
                before = blocks[parent]
                if parent in self._members:
                    own = max(last, self.rank(before))
                    heapq.heappush(ahead, (own, -before.start, parent, _PARENTS, 0))
                    break
                parent = before.parent

    def _at(self, kind: int, place: int) -> tuple[int, int, str, int, int]:
        """An entry of a heap, with its rank."""
        value, start, key = self._heaps[kind][place]
        own = value + self._position if kind == _EXPECTED else value - self._position
        return own, start, key, kind, place

    def _tidy(self) -> None:
        others, expected = self._heaps
        if max(len(others), len(expected), len(self._changes)) <= 64 + 2 * len(self._ends):
            return
        self._heaps, self._changes, ends = ([], []), [], list(self._ends)
        self._ends.clear()
        for key in ends:
            self._ends_with(self._blocks[key])

    def _ends_with(self, block: Block) -> None:
        position = self._position
        last, previous = self._uses(block)
        kind, value = _OTHERS, last
        if previous is not None and is_expected(position, last, previous):
            kind, value = _EXPECTED, previous - last - last
        entry = value, -block.start, block.key
        if self._ends.get(block.key) == entry:
            return
        self._ends[block.key] = entry
        heapq.heappush(self._heaps[kind], entry)
        change = _next_change(position, last, previous)
        if change is not None:
            heapq.heappush(self._changes, (change, block.key))

    def _add_successor(self, key: str | None) -> None:
        """
        Count a successor of this block that is new to the subset, or has the first such block after
        it.
        """
        while key is not None and key in self._blocks:
            self._successors[key] = self._successors.get(key, 0) + 1
            if self._successors[key] > 1:
                return
            if key in self._members:
                self._ends.pop(key, None)
                return
            key = self._blocks[key].parent

    def _remove_successor(self, key: str | None) -> None:
        while key is not None and key in self._blocks:
            self._successors[key] -= 1
            if self._successors[key]:
                return
            del self._successors[key]
            if key in self._members:
                self._ends_with(self._blocks[key])
                return
            key = self._blocks[key].parent


class Resting:
    """
    The sessions that are idle and have a TTL, by its end.

    A heap of all that were pushed: an entry counts as long as its session rests with that end, and
    the first one always does.
    """

    def __init__(self, sessions: Map[SessionId, Session]) -> None:
        self._begin(sessions)

    def _begin(self, sessions: Map[SessionId, Session]) -> None:
        self._sessions = sessions
        ends = ((_end_us(one), name) for name, one in sessions.items())
        self._heap = [(end, name) for end, name in ends if end is not None]
        heapq.heapify(self._heap)

    def follow(self, sessions: Map[SessionId, Session], changed: SessionId | None) -> None:
        """
        Apply an event.

        Args:
            sessions: all of them, with it.
            changed: the session that it may have changed; None if it changed none.
        """
        if changed is not None:
            before, after = self._sessions.get(changed), sessions.get(changed)
            end = _end_us(after)
            if end is not None and end != _end_us(before):
                heapq.heappush(self._heap, (end, changed))
        self._sessions = sessions
        if len(self._heap) > 2 * len(sessions) + _LOOSE:
            self._begin(sessions)
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)

    def first_us(self) -> int | None:
        """When the next TTL ends, in microseconds since 1970; None if none does."""
        return self._heap[0][0] if self._heap else None

    def ended(self, now_us: int) -> dict[SessionId, Session]:
        """The sessions whose TTL is over, by their ids."""
        found: dict[SessionId, Session] = {}
        places = [0]
        while places:
            place = places.pop()
            if place < len(self._heap) and self._heap[place][0] <= now_us:
                if self._counts(self._heap[place]):
                    name = self._heap[place][1]
                    found[name] = self._sessions[name]
                places += (2 * place + 1, 2 * place + 2)
        return found

    def _counts(self, entry: tuple[int, SessionId]) -> bool:
        return _end_us(self._sessions.get(entry[1])) == entry[0]


def _end_us(session: Session | None) -> int | None:
    """When a session expires that is idle; None for never."""
    if session is None or session.state not in (SessionState.IDLE, SessionState.COLD):
        return None
    return session.expires_us


class Order:
    """
    The orders in which blocks are evicted from memory, their files are dropped, and blocks and
    sessions expire.

    Attributes:
        memory: the blocks in memory.
        files: the blocks that have files.
        expiry: the blocks of both kinds that have a TTL, by its end.
        found: the keys of all blocks in memory or in a file.
        short: those of the short blocks in memory, which are evicted before all others.
        resting: the sessions that expire.
    """

    def __init__(self, state: State) -> None:
        self._begin(state)

    def uses(self, block: Block) -> tuple[int, int | None]:
        """
        The positions of the last two uses of a block: it was sealed or loaded, or a chain with it
        was used. None for the first of them if it was used once.
        """
        use = self._uses.get(block.key)
        if use is None or use.position < block.last_used:
            return block.last_used, block.previous_use
        return use.position, use.previous

    def rank(self, block: Block) -> int:
        """How soon a block is likely to be used, by its own uses. The smallest is evicted first."""
        return rank(self._position, *self.uses(block))

    def expires_us(self, block: Block) -> int | None:
        """
        When a block expires, in microseconds since 1970: the latest TTL that any request which
        sealed or used it asked for. None if it never expires.
        """
        use = self._uses.get(block.key)
        return block.expires_us if use is None else _later(block.expires_us, use.expires_us)

    def _begin(self, state: State) -> None:
        self._position = state.position
        # key to the last use of any chain with that block, and the latest expiry of those uses
        self._uses = _of_each(state)
        self._last_expires_us = max((use.expires_us or 0 for use in state.uses.values()), default=0)
        self.memory = Ends(lambda block: block.present, self.uses)
        self.files = Ends(lambda block: block.file_bytes is not None, self.uses)
        self.found: set[str] = set()
        self.short: set[str] = set()
        self.resting = Resting(state.sessions)
        self.expiry = Ends(
            lambda block: (
                (block.present or block.file_bytes is not None)
                and self.expires_us(block) is not None
            ),
            lambda block: (self.expires_us(block) or 0, None),
        )
        of_any = (
            key
            for key, block in state.blocks.items()
            if block.present or block.file_bytes is not None
        )
        self._follow(state, tuple(of_any))

    def follow(self, before: State, after: State, event: ev.Event) -> None:
        """
        Apply an event.

        Args:
            before: the fold up to it.
            after: the fold with it.
        """
        self.resting.follow(after.sessions, getattr(event, "session", None))
        match event:
            case ev.ServerStopped() | ev.ServerLost() | ev.ModelUnloaded() | ev.JournalPruned():
                self._begin(after)
            case ev.PathSelected() | ev.PrewarmStarted():
                session = SessionId(event.session)
                pinned = len(before.pins.get(session, ()))
                self._chain_used(after, after.pins.get(session, ())[pinned:])
            case (
                ev.BlockSealed()
                | ev.BlockEvicted()
                | ev.BlockLoaded()
                | ev.BlockAdopted()
                | ev.BlockSpilled()
                | ev.BlockFileRejected(node=None)
                | ev.BlockFileRemoved()
            ):
                self._follow(after, (event.key,))
            case _:
                # Pins and bugs change no order, but readers of the order see the current blocks.
                self._follow(after, ())

    def _chain_used(self, state: State, keys: tuple[str, ...]) -> None:
        if not keys:
            self._follow(state, ())
            return
        use = state.uses[keys[-1]]
        if (use.expires_us or 0) >= self._last_expires_us:
            self._last_expires_us = use.expires_us or 0
            self._uses.update(dict.fromkeys(keys, use))
        else:  # some may have a longer TTL, which is not shortened
            for key in keys:
                known = self._uses.get(key, use)
                expires_us = _later(known.expires_us, use.expires_us)
                same = expires_us == use.expires_us
                self._uses[key] = use if same else attrs.evolve(use, expires_us=expires_us)
        if use.expires_us is not None:
            # Blocks without a TTL have one now. Start from the last one: its predecessors are not
            # ends.
            self.expiry.follow(state.blocks, self.expiry.others(reversed(keys)))
        self._reach(state)
        for ends in (self.memory, self.files, self.expiry):
            ends.used(state.blocks, keys)

    def _reach(self, state: State) -> None:
        self._position = state.position
        self.memory.reach(state.position)
        self.files.reach(state.position)

    def _follow(self, state: State, keys: tuple[str, ...]) -> None:
        self._reach(state)
        self.memory.follow(state.blocks, keys)
        self.files.follow(state.blocks, keys)
        self.expiry.follow(state.blocks, keys)
        for key in keys:
            block = state.blocks[key]
            if block.present and state.is_short(block):
                self.short.add(key)
            else:
                self.short.discard(key)
            if block.present or block.file_bytes is not None:
                self.found.add(key)
            else:
                self.found.discard(key)


def _of_each(state: State) -> dict[str, Use]:
    """
    The last use of each block that is in any used chain, with the latest expiry of all its uses.
    Takes time proportional to the number of blocks, however many chains share a beginning.
    """
    last_first = sorted(state.uses.items(), key=lambda use: use[1].position, reverse=True)
    found = dict(_fronts(state, last_first))
    dues = [use.expires_us or 0 for _, use in last_first]
    if all(one >= other for one, other in pairwise(dues)):
        return found  # the usual case: all requests ask for the same TTL
    longest_first = sorted(last_first, key=lambda use: use[1].expires_us or 0, reverse=True)
    for key, use in _fronts(state, longest_first):
        if found[key].expires_us != use.expires_us:
            found[key] = attrs.evolve(found[key], expires_us=use.expires_us)
    return found


def _fronts(state: State, uses: Iterable[tuple[str, Use]]) -> Iterator[tuple[str, Use]]:
    """Each block of these chains once, with the first of the uses that include it."""
    seen: set[str] = set()
    for end, use in uses:
        key: str | None = end
        while key is not None and key in state.blocks and key not in seen:
            seen.add(key)
            yield key, use
            key = state.blocks[key].parent


def _later(one: int | None, other: int | None) -> int | None:
    """The later of two expiries; None if there is neither."""
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)
