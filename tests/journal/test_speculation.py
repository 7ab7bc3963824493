"""When a session drafts tokens: a rule over counts in the journal."""

from __future__ import annotations

import pytest

from cairn.journal.speculation import FOR_EACH, TRIED, of_next_request, pays


@pytest.mark.parametrize("accepted", [0, 1, 10])
def test_drafts_pay_while_enough_of_them_are_accepted(accepted: int) -> None:
    """Some may be wrong in any case, and some more for each that was right."""
    most = TRIED + FOR_EACH * accepted
    assert (True, False) == (pays(most, accepted), pays(most + 1, accepted))


def test_a_session_that_stopped_begins_again_with_a_later_request() -> None:
    """The counts are halved, so that it tries a few tokens."""
    drafted = TRIED + 1
    assert not pays(drafted, 0)
    assert pays(of_next_request(drafted), of_next_request(0))
    assert [0, 0, 1] == [of_next_request(count) for count in (0, 1, 2)]
