"""Which job the engine runs next: one test for each rule of ``scheduling.py``."""

from __future__ import annotations

from itertools import product

import attrs
import pytest

from cairn.actors.threads.scheduling import (
    COPIES_PER_PREFILL,
    JobKind,
    Waiting,
    drafts_in_turn,
    next_job,
    prefill_in_turn,
    rows_in_turn,
    rows_needed,
)

EVERYTHING = Waiting(calls=1, copies=1, prefills=1, embeds=1, idle=1, decoding=1)


def test_nothing_runs_if_nothing_waits() -> None:
    """Whatever ran before."""
    assert next_job(Waiting(decoded_last=True, copies_since_prefill=3)) is None


def test_a_job_runs_if_one_waits() -> None:
    """The thread never sleeps on a job, in no combination of what waits and what ran."""
    for calls, copies, prefills, embeds, idle, decoding in product((0, 2), repeat=6):
        for decoded_last, since in product((False, True), (0, COPIES_PER_PREFILL)):
            waiting = Waiting(
                calls=calls,
                copies=copies,
                prefills=prefills,
                embeds=embeds,
                idle=idle,
                decoding=decoding,
                decoded_last=decoded_last,
                copies_since_prefill=since,
            )
            some = calls or copies or prefills or embeds or idle or decoding
            assert bool(some) is (next_job(waiting) is not None), waiting


@pytest.mark.parametrize("decoded_last", [False, True])
def test_short_jobs_go_first(decoded_last: bool) -> None:
    """Before any pass."""
    assert JobKind.CALL is next_job(attrs.evolve(EVERYTHING, decoded_last=decoded_last))


def test_between_two_decode_passes_one_prefill_pass_runs() -> None:
    """Never two, however many wait."""
    waiting = Waiting(decoding=1, prefills=5)
    assert JobKind.DECODE is next_job(waiting)
    assert JobKind.PREFILL is next_job(attrs.evolve(waiting, decoded_last=True))


def test_decode_passes_follow_each_other_if_no_prompt_waits() -> None:
    """Idle-time work does not come between them."""
    assert JobKind.DECODE is next_job(Waiting(decoding=1, idle=1, decoded_last=True))


@pytest.mark.parametrize("decoded_last", [False, True])
def test_embeddings_are_never_ahead_of_an_answer(decoded_last: bool) -> None:
    """Whatever an answer waits for goes first; only work of idle time waits for them."""
    embeds = Waiting(embeds=5, idle=1, decoded_last=decoded_last)
    assert JobKind.EMBED is next_job(embeds)
    for kind in ("calls", "copies", "prefills", "decoding"):
        assert JobKind.EMBED is not next_job(attrs.evolve(embeds, **{kind: 1}))


def test_between_two_decode_passes_one_part_of_a_copy_runs() -> None:
    """And no prefill pass in addition to it."""
    waiting = Waiting(decoding=1, copies=5, prefills=5)
    assert JobKind.COPY is next_job(attrs.evolve(waiting, decoded_last=True))
    assert JobKind.DECODE is next_job(waiting)


def test_copies_go_before_prefill_passes() -> None:
    """Up to a number of parts; then a prefill pass that waits has its turn."""
    waiting = Waiting(copies=1, prefills=1, copies_since_prefill=COPIES_PER_PREFILL - 1)
    assert JobKind.COPY is next_job(waiting)
    enough = attrs.evolve(waiting, copies_since_prefill=COPIES_PER_PREFILL)
    assert JobKind.PREFILL is next_job(enough)
    assert JobKind.COPY is next_job(attrs.evolve(enough, prefills=0))


@pytest.mark.parametrize(
    "waiting",
    [Waiting(calls=1), Waiting(copies=1), Waiting(prefills=1), Waiting(decoding=1)],
    ids=["calls", "copies", "prefills", "decoding"],
)
def test_idle_time_work_runs_last(waiting: Waiting) -> None:
    """Only where nothing else waits."""
    assert JobKind.IDLE is next_job(Waiting(idle=1))
    assert next_job(waiting) is next_job(attrs.evolve(waiting, idle=1))


def test_answers_get_rows_in_turn() -> None:
    """Each waits for no more passes than it takes to serve the others once."""
    order = ["a", "b", "c", "d", "e"]
    served: list[str] = []
    for _ in range(5):
        rows, left = rows_in_turn(order, 2)
        served.extend(rows)
        order = [*left, *rows]
    assert list("abcdeabcde") == served


def test_all_answers_have_a_row_if_there_are_enough() -> None:
    """None waits."""
    assert (["a", "b"], []) == rows_in_turn(["a", "b"], 4)


@pytest.mark.parametrize(
    ("answers", "shapes", "rows"),
    [(1, (4,), 4), (4, (4,), 4), (1, (1, 2, 4), 1), (3, (1, 2, 4), 4), (1, (2, 3, 4), 2)],
)
def test_a_pass_has_the_fewest_rows_that_it_may_have(
    answers: int, shapes: tuple[int, ...], rows: int
) -> None:
    """The answers in it have rows, and the rest are dummies."""
    assert rows == rows_needed(answers, shapes)


@pytest.mark.parametrize(
    ("drafts", "rows", "lengths"),
    [
        (["abc"], 4, [3]),
        (["abcdef"], 4, [3]),
        (["abc", ""], 4, [2, 0]),
        (["abc", "abc", "a"], 7, [2, 1, 1]),
        (["abc", "abc"], 2, [0, 0]),
        ([], 4, []),
    ],
)
def test_drafts_get_the_rows_that_no_answer_needs(
    drafts: list[str], rows: int, lengths: list[int]
) -> None:
    """In turn, so that each answer has some of them."""
    given = drafts_in_turn([tuple(draft) for draft in drafts], rows)
    assert [tuple(draft[:length]) for draft, length in zip(drafts, lengths, strict=True)] == given


@pytest.mark.parametrize(
    ("passes", "place"),
    [
        ([(0, 0), (0, 0)], 0),
        ([(0, 0), (3, 0)], 1),
        ([(0, 2), (3, 0)], 1),
        ([(0, 3), (3, 0)], 0),
        ([(2, 0), (0, 0), (2, 0)], 0),
        ([(0, 0), (1, 0), (2, 0)], 2),
    ],
)
def test_a_pass_that_others_wait_for_has_their_turns(
    passes: list[tuple[int, int]], place: int
) -> None:
    """It goes first as often as they would have, and then the first one has its turn."""
    assert prefill_in_turn(passes) == place


def test_a_leader_has_a_turn_for_each_that_waits() -> None:
    """In a round of three others a leader of two has three passes, and each of them has one."""
    ran: list[str] = []
    waiting = [[name, 0] for name in ("a", "b", "leader", "c")]
    while len(ran) < 60:
        joined = [(2 if name == "leader" else 0, over) for name, over in waiting]
        place = prefill_in_turn([(count, int(over)) for count, over in joined])
        for one in waiting[:place]:
            one[1] = int(one[1]) + 1
        name = str(waiting.pop(place)[0])
        ran.append(name)
        waiting.append([name, 0])
    assert {name: ran.count(name) for name in "abc"} == {"a": 10, "b": 10, "c": 10}
    assert ran.count("leader") == 30
