"""
Names that follow from content: equal content has the same name, and different content never does.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.journal.keys import block_keys, ids_bytes, ids_hash, part_hash
from tests.journal.model import profile

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
CHUNKS = st.integers(1, 9)
OTHERS = st.sampled_from([{"secret": b"another"}, {"tenant": "u"}, {"fingerprint": "g"}])
SECRET = b"a secret"


def keys(ids: list[int], block_tokens: int = 4, **other: object) -> tuple[str, ...]:
    """The keys of a sequence, with one thing changed."""
    given: dict[str, object] = {"secret": SECRET, "fingerprint": "fp", "tenant": "t", **other}
    return block_keys(ids=ids, block_tokens=block_tokens, **given)  # type: ignore[arg-type]


def part(**other: object) -> str:
    """The name of a part, with one thing changed."""
    given: dict[str, object] = {
        "secret": SECRET,
        "tenant": "t",
        "parent": "p",
        "label": "user",
        "content": b"hello",
    }
    return part_hash(**{**given, **other})  # type: ignore[arg-type]


@profile(150)
@given(IDS, CHUNKS, st.integers(0, 10))
def test_known_keys_save_work_and_change_nothing(ids: list[int], chunk: int, known: int):
    """Keys computed after a beginning with known keys equal those of the whole computation."""
    whole = keys(ids, chunk)

    assert len(ids) // chunk == len(whole)
    assert whole == keys(ids, chunk, known=whole[:known])


@profile(100)
@given(IDS, CHUNKS, OTHERS)
def test_keys_of_another_secret_are_not_taken(ids: list[int], chunk: int, other: dict[str, Any]):
    """Keys of these tokens under another secret, or of another tenant, are computed again."""
    assert keys(ids, chunk) == keys(ids, chunk, known=keys(ids, chunk, **other))


def test_known_keys_are_not_computed(monkeypatch: pytest.MonkeyPatch):
    """Of the known keys, only the first is checked."""
    ids, hashed = list(range(40)), []
    whole = keys(ids)
    new = hmac.new

    def counting(*of: Any) -> hmac.HMAC:
        hashed.append(of)
        return new(*of)

    monkeypatch.setattr(hmac, "new", counting)
    assert whole == keys(ids, known=whole[:8])
    assert 1 + 2 == len(hashed)


@profile(150)
@given(IDS, IDS, CHUNKS)
def test_keys_agree_as_far_as_the_tokens(one: list[int], other: list[int], chunk: int):
    """Two sequences share a key exactly if all their tokens up to the chunk's end are equal."""
    for first, second in ((one, other), (one, one[: len(one) // 2] + other)):
        mine, theirs = keys(first, chunk), keys(second, chunk)
        for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            end = (place + 1) * chunk
            assert (first[:end] == second[:end]) == (a == b)
        assert len(set(mine)) == len(mine)


def test_a_key_covers_what_came_before():
    """The same chunk after a different beginning, or at a different place, has a different key."""
    same = [7, 7, 7, 7]
    assert len(set(keys(same * 6))) == 6
    assert keys([1, 2, 3, 4, *same])[1] != keys([1, 2, 3, 5, *same])[1]


@pytest.mark.parametrize(
    "other", [{"secret": b"another"}, {"fingerprint": "other"}, {"tenant": "other"}]
)
def test_everything_about_a_block_matters(other: dict[str, object]):
    """A different secret, fingerprint or tenant gives different keys to the same tokens."""
    ids = list(range(8))
    assert not set(keys(ids)) & set(keys(ids, 4, **other))


@profile(100)
@given(st.text(max_size=6), st.text(max_size=6))
def test_no_byte_moves_from_fingerprint_to_tenant(fingerprint: str, tenant: str):
    """Fields that are equal only when joined give different keys."""
    ids = list(range(4))
    joined = fingerprint + tenant
    seen = {
        keys(ids, fingerprint=joined[:cut], tenant=joined[cut:]) for cut in range(len(joined) + 1)
    }
    assert len(joined) + 1 == len(seen)


def test_an_incomplete_chunk_has_no_key():
    """Only full chunks can be sealed."""
    assert () == keys([])
    assert () == keys([1, 2, 3])
    assert 1 == len(keys([1, 2, 3, 4, 5, 6, 7]))


def test_a_key_is_what_it_always_was():
    """
    The keys of stored blocks must not change from version to version: a MAC over length-framed
    fields, written out here.
    """

    def frame(*fields: bytes) -> bytes:
        return b"".join(struct.pack("<Q", len(field)) + field for field in fields)

    head = frame(b"cairn block", b"fp", b"t")
    first = frame(b"", struct.pack("<4i", 1, 2, 3, 4))
    one = hmac.new(SECRET, head + first, hashlib.sha256).hexdigest()
    second = frame(one.encode(), struct.pack("<4i", 5, 6, 7, 8))
    two = hmac.new(SECRET, head + second, hashlib.sha256).hexdigest()

    assert (one, two) == keys([1, 2, 3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize(
    "other",
    [
        {"secret": b"another"},
        {"tenant": "other"},
        {"parent": "other"},
        {"label": "system"},
        {"content": b"hello "},
        {"parent": "", "content": b"hello"},
        {"parent": "pu", "label": "ser"},
        {"label": "userh", "content": b"ello"},
        {"tenant": "tp", "parent": ""},
    ],
)
def test_everything_about_a_part_matters(other: dict[str, object]):
    """
    A different secret, tenant, beginning, label or content gives a different name; so do moved
    bytes.
    """
    assert part() == part()
    assert part() != part(**other)


def test_a_part_is_no_block():
    """The two kinds of names cannot be confused."""
    assert part() not in keys(list(range(8)))
    assert 32 == len(part())
    assert {64} == {len(key) for key in keys(list(range(8)))}


@profile(100)
@given(IDS, IDS)
def test_ids_are_named_by_their_order(one: list[int], other: list[int]):
    """Sequences of token ids have the same name exactly if they are equal."""
    assert (one == other) == (ids_hash(one) == ids_hash(other))
    assert ids_hash(one) == ids_hash(tuple(one))
    assert struct.pack(f"<{len(one)}i", *one) == ids_bytes(one)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_id_has_32_bits(token: int):
    """An id that does not fit is refused, and not truncated."""
    with pytest.raises(OverflowError):
        ids_hash([token])
