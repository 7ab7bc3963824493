"""Token ids as shared objects: the same values, one object for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cairn.journal.token_ids import MOST, shared
from tests.journal.model import profile

IDS = st.lists(
    st.one_of(st.integers(0, 5000), st.integers(0, 2**31 - 1), st.integers(-3, MOST + 3)),
    max_size=30,
)


@profile(200)
@given(IDS)
def test_values_are_what_they_were(ids: list[int]):
    """Whatever the ids are: negative, beyond every vocabulary, or none at all."""
    assert tuple(ids) == shared(ids) == shared(iter(ids))


@profile(50)
@given(st.lists(st.integers(0, MOST - 1), max_size=30))
def test_an_id_is_there_once(ids: list[int]):
    """Two sequences of equal ids hold the same objects, whenever they were made."""
    one, other = shared(ids), shared(tuple(int(str(token)) for token in ids))
    assert [id(token) for token in one] == [id(token) for token in other]
    assert all(mine is theirs for mine, theirs in zip(one, other, strict=True))
