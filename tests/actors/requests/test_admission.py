"""Which requests find a place, and which are refused: the pure decisions of admission."""

from __future__ import annotations

import pytest

from cairn.actors.errors import QueueFull, TooManyAnswers
from cairn.actors.requests.admission import check_count_queue, check_model_queue, check_places


@pytest.mark.parametrize("running", [0, 1, 2])
def test_as_many_answers_wait_as_the_queue_has_places(running: int) -> None:
    """Rows that are free count as places too, whichever of the answers gets them."""
    last = 2 + 3 - 1
    check_places(1, queue=3, rows=2, running=running, in_flight=last)
    with pytest.raises(
        QueueFull, match=f"running: {running}, waiting: {last + 1 - running}"
    ) as refused:
        check_places(1, queue=3, rows=2, running=running, in_flight=last + 1)
    assert 5 == refused.value.retry_after_s


def test_all_answers_of_a_request_need_a_place() -> None:
    """A request is refused if only some of its answers would fit."""
    check_places(3, queue=3, rows=2, running=2, in_flight=2)
    with pytest.raises(QueueFull, match="no room for 3 more"):
        check_places(3, queue=3, rows=2, running=2, in_flight=3)


def test_more_answers_than_places_is_the_clients_mistake() -> None:
    """An idle server could not serve them either, so trying again does not help."""
    check_places(5, queue=3, rows=2, running=0, in_flight=0)
    with pytest.raises(TooManyAnswers, match="n is 6; at most 5 answers"):
        check_places(6, queue=3, rows=2, running=0, in_flight=0)
    with pytest.raises(TooManyAnswers, match="n is 6; at most 5 answers"):
        check_model_queue(6, queue=3, rows=2, waiting=0)


def test_as_many_wait_for_a_model_as_are_admitted_together() -> None:
    """The queue and the model's rows."""
    check_model_queue(1, queue=3, rows=2, waiting=4)
    with pytest.raises(QueueFull, match="5 requests wait for a model"):
        check_model_queue(1, queue=3, rows=2, waiting=5)


def test_the_first_request_may_wait_for_a_model_with_unknown_rows() -> None:
    """Whatever that asks for. Further ones wait as if the model had one row."""
    check_model_queue(100, queue=0, rows=0, waiting=0)
    with pytest.raises(QueueFull):
        check_model_queue(1, queue=0, rows=0, waiting=1)


def test_as_many_counts_wait_as_requests_may() -> None:
    """Beside the one that is being counted."""
    check_count_queue(1, queue=1)
    with pytest.raises(QueueFull, match="2 counts wait"):
        check_count_queue(2, queue=1)
