"""
The canonical schedule: which passes are run for n tokens, and their shapes. Pure.

Positions are divided into aligned chunks of C tokens. A full chunk is one pass of exactly C rows;
the remainder is one pass of exactly n mod C rows. Prefill never runs any other shape, whatever the
cache holds, so the bits of the KV of a sequence follow from its tokens alone (canonical
computation; docs/why-the-same-bits.md has the experiment).

Which job runs next is in ``actors/threads/scheduling.py``; all places where a request can wait are
in ``actors/requests/admission.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SMALLEST_SLAB = 512
COPIED_AT_ONCE_BYTES = 32 << 20
"""
The most bytes of blocks that are copied into a slab at once. No session decodes meanwhile. Copying
and hashing them takes a core ten to thirty milliseconds: about as long as a decode pass of a model
with keys and values of that size, and much longer than appending the event of one part.
"""


def passes(start: int, tokens: int, block_tokens: int) -> Iterator[tuple[int, int]]:
    """
    The passes that bring KV from ``[0, start)`` to ``[0, tokens)``, as half-open ranges.

    Args:
        start: a multiple of C.
        tokens: n, at least ``start``.
        block_tokens: C.

    Raises:
        ValueError: ``start`` is not a multiple of C.
    """
    if start % block_tokens:
        raise ValueError(f"{start} is not a multiple of {block_tokens}")
    while start < tokens:
        end = min(start + block_tokens, tokens)
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
