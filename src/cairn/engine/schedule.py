"""
The canonical schedule: which passes are run for n tokens, and their shapes. Pure.

Positions are divided into aligned chunks of C tokens. The bits of the KV of a sequence follow from
its tokens alone (canonical computation; docs/why-the-same-bits.md has the experiment). With the
grain C that holds because a full chunk is always one pass of exactly C rows, and the remainder one
of exactly n mod C. With the grain 1 the engine gives a row the same bits in every pass, so that a
pass begins wherever the slab ends, and may compute several chunks.

Which job runs next is in ``actors/threads/scheduling.py``; all places where a request can wait are
in ``actors/requests/admission.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence

SMALLEST_SLAB = 512
COPIED_AT_ONCE_BYTES = 32 << 20
"""
The most bytes of blocks that are copied into a slab at once. No session decodes meanwhile. Copying
and hashing them takes a core ten to thirty milliseconds: about as long as a decode pass of a model
with keys and values of that size, and much longer than appending the event of one part.
"""


def passes(start: int, tokens: int, block_tokens: int) -> Iterator[tuple[int, int]]:
    """
    The passes that bring KV from ``[0, start)`` to ``[0, tokens)``, as half-open ranges, none of
    which crosses the end of a chunk.

    Args:
        start: a multiple of the grain.
        tokens: n, at least ``start``.
        block_tokens: C.
    """
    while start < tokens:
        end = pass_end(start, tokens, block_tokens, 0)
        yield start, end
        start = end


def pass_end(start: int, tokens: int, block_tokens: int, most: int) -> int:
    """
    The end of a prefill pass that may cross the ends of chunks (grain 1): the last end of a chunk
    that ``most`` tokens reach, but at least that of the first, or the end of the tokens.

    Args:
        start: where the pass begins.
        tokens: n, more than ``start``.
        block_tokens: C.
        most: the most tokens of a pass.
    """
    first = start - start % block_tokens + block_tokens
    more = max(0, start + most - first) // block_tokens * block_tokens
    return min(first + more, tokens)


def other_passes(
    start: int,
    tokens: int,
    block_tokens: int,
    *,
    name: str,
    most: Callable[[int], int],
    recorded: Collection[tuple[int, int]] = (),
) -> Iterator[tuple[int, int]]:
    """
    As ``passes``, cut elsewhere (grain 1): no pass is one of those that were recorded, and none
    has whole blocks only. A pass of one token is the exception, because it cannot be cut.

    The size of a pass follows from the name and from where the pass begins, so that it can be run
    again. It is never more than C tokens: a request waits for at most one.

    Args:
        start: where the slab ends.
        tokens: n, at least ``start``.
        block_tokens: C.
        name: of what is computed, such as the id of a request.
        most: the most tokens of a pass that begins at a position.
        recorded: passes that were run before, as half-open ranges.
    """
    while start < tokens:
        drawn = hashlib.sha256(f"cairn other cuts/{name}/{start}".encode()).digest()
        size = 1 + int.from_bytes(drawn[:8], "big") % block_tokens
        end = min(start + min(size, most(start)), tokens)
        while end > start + 1:
            whole = start % block_tokens == 0 and (end % block_tokens == 0 or end == tokens)
            if not whole and (start, end) not in recorded:
                break
            end -= 1
        yield start, end
        start = end


def copies(places: Sequence[int], most: int, every: int = 1) -> Iterator[Sequence[int]]:
    """
    Divide the blocks that are copied into a slab into parts, in order.

    Args:
        places: the indices of the blocks in their sequence, ascending.
        most: the most blocks in a part, as far as ``every`` allows.
        every: parts end only after a multiple of this many blocks of the sequence, and at the end,
            because a slab can continue only from there.
    """
    part: list[int] = []
    group: list[int] = []
    for place in places:
        group.append(place)
        if (place + 1) % every and place != places[-1]:
            continue
        if part and len(part) + len(group) > most:
            yield part
            part = []
        part, group = part + group, []
    if part:
        yield part


def slab_capacity(tokens: int, block_tokens: int, context_tokens: int) -> int:
    """
    The capacity of a slab for ``tokens``: a power of two up to the context, so that a growing
    conversation seldom needs another slab. Always a multiple of C.
    """
    capacity = SMALLEST_SLAB
    while capacity < tokens:
        capacity *= 2
    capacity = max(tokens, min(capacity, context_tokens))
    return -(-capacity // block_tokens) * block_tokens
