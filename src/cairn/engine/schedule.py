"""
The canonical schedule: which passes are run for n tokens, and their shapes. Pure.

Positions are cut into aligned chunks of C tokens. A full chunk is one pass of exactly C rows; what
is left is one pass of exactly n mod C rows. Nothing else is ever run in prefill, whatever was there
before, so the bits of the KV of a sequence follow from its tokens alone (design: canonical
computation; the experiment is told in docs/why-the-same-bits.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SMALLEST_SLAB = 512
COPIED_AT_ONCE_BYTES = 32 << 20
"""
The most bytes of blocks that are copied into a slab in one go: nobody decodes meanwhile. To copy
and to hash them takes a core some ten to thirty milliseconds: about what a decode pass takes where
keys and values are so large, and much more than the event that a part costs.
"""


def passes(start: int, tokens: int, block_tokens: int) -> Iterator[tuple[int, int]]:
    """
    The passes that bring KV from ``[0, start)`` to ``[0, tokens)``, as half-open ranges.

    Args:
        start: a multiple of C.
        tokens: n, at least ``start``.
        block_tokens: C.

    Raises:
        ValueError: ``start`` is not on a chunk's boundary.
    """
    if start % block_tokens:
        raise ValueError(f"{start} is not a multiple of {block_tokens}")
    while start < tokens:
        end = min(start + block_tokens, tokens)
        yield start, end
        start = end


def copies(places: Sequence[int], most: int, every: int = 1) -> Iterator[Sequence[int]]:
    """
    Blocks that are copied into a slab, in the parts in which that is done, in order.

    Args:
        places: of the blocks in their sequence, ascending.
        most: so many blocks make a part at most, as far as ``every`` allows.
        every: a part ends behind each so-manieth block of the sequence, and nowhere else but at the
            end: what a slab holds can be gone on from only there.
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
    The capacity class that holds ``tokens``: powers of two up to the context, so that a
    conversation that grows changes its slab seldom. Always a multiple of C.
    """
    capacity = SMALLEST_SLAB
    while capacity < tokens:
        capacity *= 2
    capacity = max(tokens, min(capacity, context_tokens))
    return -(-capacity // block_tokens) * block_tokens
