"""The canonical schedule and the capacities of slabs, for all lengths."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.engine.schedule import (
    SMALLEST_SLAB,
    copies,
    other_passes,
    pass_end,
    passes,
    slab_capacity,
)

CHUNKS = st.sampled_from([1, 7, 16, 64, 100, 256, 512, 1000])


@given(chunk=CHUNKS, reused=st.integers(0, 40), added=st.integers(0, 5000))
def test_passes_cover_what_is_missing(chunk: int, reused: int, added: int) -> None:
    """Passes follow each other from the start to the last token, none of them empty."""
    start = reused * chunk

    found = list(passes(start, start + added, chunk))

    assert all(first < end for first, end in found)
    assert [start, *(end for _, end in found)] == [*(first for first, _ in found), start + added]


@given(chunk=CHUNKS, reused=st.integers(0, 40), added=st.integers(0, 5000))
def test_passes_are_aligned(chunk: int, reused: int, added: int) -> None:
    """
    Every pass begins on a chunk's boundary, all but the last have C rows, and the last has what is
    left.
    """
    start = reused * chunk

    found = list(passes(start, start + added, chunk))

    assert all(first % chunk == 0 for first, _ in found)
    assert all(end - first == chunk for first, end in found[:-1])
    assert all(end - first == (added % chunk or chunk) for first, end in found[-1:])


@given(chunk=CHUNKS, tokens=st.integers(1, 5000), data=st.data())
def test_reuse_changes_no_pass(chunk: int, tokens: int, data: st.DataObject) -> None:
    """
    The passes that remain after reuse are the same that would run without it, so a hit is computed
    like a miss.
    """
    reused = data.draw(st.integers(0, tokens // chunk)) * chunk
    cold = list(passes(0, tokens, chunk))

    assert [one for one in cold if one[0] >= reused] == list(passes(reused, tokens, chunk))


@pytest.mark.parametrize("shape", [4, 64])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 16), (5, 5), (3, 200), (64, 129)])
def test_other_passes_are_others(start: int, tokens: int, shape: int) -> None:
    """
    For many ids: they follow each other, have no more tokens than a block or the class allows,
    and none of more than one token was recorded or has whole blocks only.
    """
    chunk, seen = 16, set()

    def most(begin: int) -> int:
        return shape - begin % shape

    for name in map(str, range(40)):
        usual = {(start, tokens), (100, 108), (tokens - 2, tokens)}
        rule = {"name": name, "most": most, "recorded": usual}
        found = list(other_passes(start, tokens, chunk, **rule))
        assert found == list(other_passes(start, tokens, chunk, **rule))
        assert [start, *(end for _, end in found)] == [*(begin for begin, _ in found), tokens]
        for begin, end in found:
            assert 1 <= end - begin <= min(chunk, most(begin))
            whole = not begin % chunk and (not end % chunk or end == tokens)
            assert end - begin == 1 or not (whole or (begin, end) in usual)
        seen.add(tuple(found))
    assert tokens - start < 10 or len(seen) > 20, "the id does not matter"


def test_other_passes_can_be_computed_by_hand() -> None:
    """As docs/how-to/shadow-check.md says."""
    digest = hashlib.sha256(b"cairn other cuts/a request/3").digest()
    size = 1 + int.from_bytes(digest[:8], "big") % 64
    assert 1 < size
    (first, *_) = other_passes(3, 1000, 64, name="a request", most=lambda start: 256)
    assert (3, 3 + size) == first
    (first, *_) = other_passes(
        3, 1000, 64, name="a request", most=lambda start: 256, recorded={(3, 3 + size)}
    )
    assert (3, 2 + size) == first


@pytest.mark.parametrize(
    ("start", "chunk", "due"),
    [
        (1, 2, [(1, 2), (2, 4), (4, 5)]),
        (2, 2, [(2, 4), (4, 5)]),
        (3, 8, [(3, 5)]),
        (5, 8, []),
    ],
)
def test_passes_from_the_middle_of_a_chunk(
    start: int, chunk: int, due: list[tuple[int, int]]
) -> None:
    """The first one ends with the chunk, or with the tokens."""
    assert due == list(passes(start, 5, chunk))


@pytest.mark.parametrize(
    ("start", "tokens", "most", "end"),
    [
        (0, 100, 0, 4),
        (0, 100, 4, 4),
        (0, 100, 11, 8),
        (0, 100, 12, 12),
        (0, 10, 12, 10),
        (3, 100, 0, 4),
        (3, 100, 4, 4),
        (3, 100, 5, 8),
        (3, 100, 13, 16),
        (99, 100, 50, 100),
    ],
)
def test_a_pass_over_several_chunks(start: int, tokens: int, most: int, end: int) -> None:
    """It ends with the last chunk that it reaches, and has at least one, or with the tokens."""
    assert end == pass_end(start, tokens, 4, most)


@given(chunk=CHUNKS, context=st.integers(1, 1 << 18), data=st.data())
def test_a_capacity_holds_the_tokens(chunk: int, context: int, data: st.DataObject) -> None:
    """
    A slab has whole chunks and room for the tokens, and is no larger than the rounded-up context.
    """
    tokens = data.draw(st.integers(1, context))

    capacity = slab_capacity(tokens, chunk, context)

    assert capacity % chunk == 0
    assert tokens <= capacity < context + chunk


@given(chunk=CHUNKS, context=st.integers(1, 1 << 18), data=st.data())
def test_a_capacity_grows_with_the_tokens(chunk: int, context: int, data: st.DataObject) -> None:
    """More tokens never get a smaller slab."""
    fewer, more = sorted(data.draw(st.tuples(st.integers(1, context), st.integers(1, context))))

    assert slab_capacity(fewer, chunk, context) <= slab_capacity(more, chunk, context)


@given(chunk=CHUNKS, context=st.integers(1, 1 << 18), data=st.data())
def test_a_capacity_is_less_than_twice_what_is_needed(
    chunk: int, context: int, data: st.DataObject
) -> None:
    """A slab wastes less than half, except for the smallest size and the last chunk."""
    tokens = data.draw(st.integers(1, context))

    assert slab_capacity(tokens, chunk, context) < max(2 * tokens, SMALLEST_SLAB + 1) + chunk


def test_there_are_few_capacities() -> None:
    """A conversation that grows to the context moves to a larger slab a handful of times."""
    found = {slab_capacity(tokens, 64, 32768) for tokens in range(1, 32769)}

    assert {512, 1024, 2048, 4096, 8192, 16384, 32768} == found


@given(
    begin=st.integers(0, 20),
    count=st.integers(0, 60),
    gap=st.integers(0, 9),
    most=st.integers(0, 12),
    every=st.integers(1, 8),
)
def test_parts_of_a_copy(begin: int, count: int, gap: int, most: int, every: int) -> None:
    """
    All blocks in their order, none empty; each part but the last ends where one can go on, and one
    that is longer than it may be could not have ended before.
    """
    places = [place + gap * (place > begin) for place in range(begin, begin + count)]

    found = list(copies(places, most, every))

    assert places == [place for part in found for place in part]
    assert all(found)
    assert all((part[-1] + 1) % every == 0 for part in found[:-1])
    for part in found:
        ends = [place for place in part if (place + 1) % every == 0 or place == places[-1]]
        assert len(part) <= most or len(ends) == 1


def test_a_copy_has_no_more_parts_than_it_must() -> None:
    """Parts are as long as they may be."""
    assert [[3, 4, 5, 6, 7], [8, 9]] == list(copies(range(3, 10), 5, 4))
    assert [[0, 1, 2], [3, 4]] == list(copies(range(5), 3))
    assert [[0, 1, 2, 3, 4]] == list(copies(range(5), 100))
    assert [[0], [1]] == list(copies(range(2), 0))
