"""Copies of values that are made for each row."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.journal.copies import changed
from cairn.journal.state import EMPTY, OpenRequest, Session, State
from tests.support.journals import in_mid_request


def test_a_copy_is_that_of_evolve():
    """It has the changes, and the value is as before; also one that was copied already."""
    state = in_mid_request().ledger.state
    session = state.session("s1")
    assert session.request is not None
    cases: tuple[tuple[State | Session | OpenRequest, dict[str, Any]], ...] = (
        (EMPTY, {"position": 3}),
        (state, {"boot": None, "lease": 7}),
        (session, {"cached_tokens": 1}),
        (session.request, {"emitted": 5}),
        (changed(state, position=9), {"time_us": 1}),
    )
    for value, changes in cases:
        before = attrs.asdict(value, recurse=False)
        due = attrs.evolve(value, **changes)
        found = changed(value, **changes)
        assert (due, type(due)) == (found, type(found))
        assert before == attrs.asdict(value, recurse=False)


def test_a_field_that_there_is_not():
    """It is an error, as with evolve."""
    with pytest.raises(TypeError, match=r"\['tokens'\] of State"):
        changed(EMPTY, tokens=1, position=2)


@pytest.mark.parametrize("kind", [State, Session, OpenRequest])
def test_what_is_copied_has_nothing_to_check(kind: type[attrs.AttrsInstance]):
    """No validator, converter or hook would be passed over."""
    assert not hasattr(kind, "__attrs_post_init__")
    assert not [one.name for one in attrs.fields(kind) if one.validator or one.converter]
