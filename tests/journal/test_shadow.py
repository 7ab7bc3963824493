"""Which answers are checked a second time, and what is compared."""

from __future__ import annotations

import hashlib
import math
import uuid
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.invariants import check
from cairn.journal.keys import ids_hash
from cairn.journal.ledger import broken_keys
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.shadow import drawn_hash, first_difference, is_chosen, quarantined_session
from cairn.journal.state import Block, Pool, Session, SessionId, Shadow, Slab, State, Turn
from tests.journal.model import Driver, Talk, Violated
from tests.support.journals import MODEL


def test_the_share_is_met():
    """Of many ids, about the share is chosen; none with 0, all with 1."""
    ids = [str(uuid.UUID(int=place)) for place in range(4000)]
    for share in (0.01, 0.25, 0.5):
        chosen = sum(is_chosen(one, share) for one in ids)
        assert abs(chosen - share * len(ids)) < 5 * math.sqrt(share * len(ids))
    assert not any(is_chosen(one, 0.0) for one in ids)
    assert all(is_chosen(one, 1.0) for one in ids)


def test_a_larger_share_includes_a_smaller_one():
    """The choice follows from the id alone, and a larger share includes all of a smaller one."""
    ids = [str(uuid.UUID(int=place)) for place in range(500)]
    few = {one for one in ids if is_chosen(one, 0.1)}
    assert few == {one for one in ids if is_chosen(one, 0.1)}
    assert few < {one for one in ids if is_chosen(one, 0.3)}


def test_the_choice_can_be_computed_by_hand():
    """As docs/how-to/shadow-check.md says: an id is chosen at any share just above its number."""
    request = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
    digest = hashlib.sha256(b"cairn shadow check/" + request.encode()).hexdigest()
    share = int(digest[:16], 16) / 2**64
    assert 0.01 < share < 0.99
    assert not is_chosen(request, share - 1e-9)
    assert is_chosen(request, share + 1e-9)


def test_a_name_of_what_was_drawn_has_every_bit():
    """
    A different token, a different last bit of a log-probability, one more or less: a different
    hash.
    """
    names = {
        drawn_hash((1, 2), (-0.5, -1.0)),
        drawn_hash((1, 3), (-0.5, -1.0)),
        drawn_hash((1, 2), (-0.5, math.nextafter(-1.0, 0.0))),
        drawn_hash((1,), (-0.5,)),
        drawn_hash((2, 1), (-1.0, -0.5)),
        drawn_hash((), ()),
    }
    assert 6 == len(names)


def test_the_first_that_differs():
    """By token or log-probability; if one is longer, the first that the other lacks."""
    due = [(1, -0.5), (2, -1.0)]
    assert None is first_difference(due, list(due))
    assert 1 == first_difference(due, [(1, -0.5), (2, -1.5)])
    assert 0 == first_difference(due, [(3, -0.5), (2, -1.5)])
    assert 1 == first_difference(due, due[:1])
    assert 0 == first_difference([(1, 0.0)], [(1, -0.0)]), (
        "a bit that no comparison of numbers sees"
    )
    assert drawn_hash((1,), (0.0,)) != drawn_hash((1,), (-0.0,))


def test_a_name_of_what_was_drawn_is_of_no_machine():
    """Every byte of the hash is fixed, so that a journal gives the same result on any machine."""
    packed = (1).to_bytes(8, "little") + (7).to_bytes(4, "little") + bytes(6) + b"\xe0\xbf"
    assert hashlib.sha256(packed).hexdigest()[:32] == drawn_hash((7,), (-0.5,))


# --- INV-3 ---------------------------------------------------------------------------------------


CHUNK = 4
_MODEL = attrs.evolve(
    MODEL,
    fingerprint="fp",
    block_tokens=CHUNK,
    pool_slabs=4,
    pool_bytes=32,
    blocks_bytes=64,
    grain=CHUNK,
)
ANSWER = (5, 6, 7)


def state_of_two(**changes: Any) -> State:
    """
    Two blocks, the second built on the first, and a third on nothing; a session that answered on
    the first two, and its current check.
    """
    blocks = State().blocks
    for key, parent, start in (("a", None, 0), ("b", "a", CHUNK), ("c", None, 0)):
        block = Block(
            key=key,
            parent=parent,
            digest=f"of {key}",
            start=start,
            tokens=CHUNK,
            bytes=1,
            present=True,
        )
        blocks = blocks.set(key, block)
    turn = Turn(
        request="r1",
        fingerprint="fp",
        chain=(("user", "part", "alone"),),
        prompt_ids=tuple(range(9)),
        prompt_keys=("a", "b"),
        answered=True,
        answer_ids=ANSWER,
    )
    session = Session(
        id=SessionId("s1"),
        tenant="t",
        fingerprint="fp",
        group=None,
        named=True,
        state=SessionState.IDLE,
        last=turn,
    )
    in_hand = Shadow(of_session="s1", request="r1", slab=Slab(id=1, capacity_tokens=16, bytes=8))
    usual: dict[str, Any] = {
        "model": _MODEL,
        "blocks": blocks,
        "sessions": State().sessions.set(session.id, session),
        "pool": Pool(slabs=1, slab_bytes=8),
        "shadow": in_hand,
    }
    return State(**{**usual, **changes})


def checked(**changes: Any) -> ev.ShadowChecked:
    """A check that found no difference."""
    fine: dict[str, Any] = {
        "of_session": "s1",
        "request": "r1",
        "prompt_tokens": 9,
        "cuts": (4, 8, 9),
        "answer_tokens": 3,
        "keys": ("a", "b"),
        "digests": ("of a", "of b"),
        "memory_digests": ("of a", ""),
        "ids_expected": ids_hash(ANSWER),
        "drawn_expected": "drawn",
        "drawn": "drawn",
        "first_difference": None,
        "duration_us": 1,
    }
    return ev.ShadowChecked(**{**fine, **changes})


def found(event: ev.Event, **changes: Any) -> list[tuple[str, str]]:
    """What the checks report for an event: (invariant, message)."""
    place = ev.Recorded(position=1, stream="server", seq=1, event_id="e", time_us=0, event=event)
    return [(one.invariant, one.message) for one in check(state_of_two(**changes), place)]


def test_what_is_as_it_should_be_breaks_nothing():
    """Digests as on record, in memory or not, and the same tokens."""
    assert [] == found(checked())


@pytest.mark.parametrize(
    ("changes", "words", "keys"),
    [
        (
            {"digests": ("of a", "other")},
            "block b, met in the check of session s1, computed again is another",
            ("b",),
        ),
        (
            {"digests": ("other", "of b")},
            "block a, met in the check of session s1, computed again is another",
            ("a", "b"),
        ),
        (
            {"memory_digests": ("other", "")},
            "block a, met in the check of session s1, changed in memory",
            ("a", "b"),
        ),
        (
            {"memory_digests": ("of a", "other")},
            "block b, met in the check of session s1, changed in memory",
            ("b",),
        ),
        (
            {"drawn": "other", "first_difference": 2},
            "the answer to request r1 of session s1 computed again is another from its token 2 on",
            (),
        ),
        (
            {"ids_expected": "others"},
            (
                "the answer to request r1 of session s1 was compared with other tokens than are on "
                "record"
            ),
            (),
        ),
        ({"digests": ("of a",)}, "the number of digests is not the number of blocks", ()),
        ({"memory_digests": ()}, "the number of digests is not the number of blocks", ()),
    ],
)
def test_what_differs_breaks_the_invariant(
    changes: dict[str, Any], words: str, keys: tuple[str, ...]
):
    """INV-3; the blocks that differ and those built on them are quarantined, and no others."""
    event = checked(**changes)
    assert ("INV-3", words) == found(event)[0]
    assert keys == broken_keys(state_of_two(), event)


def test_a_difference_that_is_on_record_is_no_second_bug():
    """A block with a bug is measured again by each later check; the bug has its id already."""
    blocks = state_of_two().blocks
    known = blocks.set("b", attrs.evolve(blocks["b"], bug_id="CAIRN-1"))
    differs = checked(digests=("of a", "other"))
    assert [] == found(differs, blocks=known)
    ((invariant, _),) = found(attrs.evolve(differs, digests=("other", "other")), blocks=known)
    assert "INV-3" == invariant


def test_a_check_of_a_block_that_was_never_sealed():
    """A key that is not on record is not a legal step."""
    ((invariant, message),) = found(checked(keys=("a", "x")))
    assert ("INV-6", "shadow_checked of a block that was never sealed") == (invariant, message)


def slab(**changes: Any) -> dict[str, Any]:
    """The measures of a check's slab."""
    figures = {"slab": 1, "bytes": 8, "pool_slabs": 1, "pool_bytes": 8}
    return {"of_session": "s1", "request": "r1", **figures, **changes}


def test_a_check_without_a_model():
    """A slab needs a model."""
    began = ev.ShadowStarted(capacity_tokens=4, **slab())
    ((invariant, message),) = found(began, model=None, shadow=None)
    assert ("INV-6", "a shadow check started without a model") == (invariant, message)


def test_a_check_beside_another():
    """Only one check runs at a time."""
    began = ev.ShadowStarted(capacity_tokens=4, **slab(slab=2, pool_slabs=2, pool_bytes=16))
    assert [("INV-6", "a shadow check started during another")] == found(began)
    assert [] == found(began, shadow=None)


@pytest.mark.parametrize("other", [{"request": "r2"}, {"of_session": "s2"}])
def test_a_result_of_another_check(other: dict[str, Any]):
    """A result must belong to the current check; without a check, no result is legal."""
    ended = ev.ShadowEnded(result="failed", **slab(pool_slabs=0, pool_bytes=0))
    for event in (checked(), ended):
        assert [] == found(event)
        words = f"{event.kind} of a shadow check that is not running"
        assert [("INV-6", words)] == found(attrs.evolve(event, **other))
        assert [("INV-6", words)] == found(event, shadow=None)


def test_a_check_ends_as_it_went():
    """A check has one result, and its end reports that result and no other."""
    in_hand = state_of_two().shadow
    assert in_hand is not None
    done = attrs.evolve(in_hand, checked=True)
    wrong = [("INV-6", "a shadow check ended with a result that it did not find")]
    for result, due in (("same", []), ("differs", wrong), ("failed", wrong)):
        ended = ev.ShadowEnded(
            result=result,  # type: ignore[arg-type]  # each is one
            **slab(pool_slabs=0, pool_bytes=0),
        )
        assert due == found(ended, shadow=done)
        assert (wrong if not due else []) == found(ended)
    assert [("INV-6", "a shadow check with two results")] == found(checked(), shadow=done)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slab": 2}, "a slab was released that the session does not have"),
        ({"bytes": 7}, "a slab of another size"),
        ({"pool_slabs": 1}, "slabs do not add up"),
        ({"pool_bytes": 8}, "bytes of slabs do not add up"),
    ],
)
def test_the_slab_of_a_check_is_the_one_that_it_had(changes: dict[str, Any], message: str):
    """INV-5: the slab that is released is the one that was acquired, by name and by size."""
    right = slab(pool_slabs=0, pool_bytes=0)
    assert [] == found(ev.ShadowEnded(result="failed", **right))
    wrong = ev.ShadowEnded(result="failed", **{**right, **changes})
    assert [("INV-5", message)] == found(wrong)


# --- what is quarantined -------------------------------------------------------------------------


def test_the_session_to_quarantine():
    """
    The session with the different answer is quarantined, unless a block of its prompt explains it:
    any request that reuses that block is cut off there. A block that covers the answer, or one that
    changed only in memory, does not explain it.
    """
    differs = checked(drawn="other", first_difference=0)
    assert "s1" == quarantined_session(state_of_two(), differs)
    assert None is quarantined_session(state_of_two(), checked(digests=("of a", "other")))
    in_prompt = attrs.evolve(differs, digests=("of a", "other"))
    assert None is quarantined_session(state_of_two(), in_prompt)
    over_answer = attrs.evolve(in_prompt, prompt_tokens=2 * CHUNK - 1)
    assert "s1" == quarantined_session(state_of_two(), over_answer)
    in_memory = attrs.evolve(differs, memory_digests=("other", ""))
    assert "s1" == quarantined_session(state_of_two(), in_memory)
    assert None is quarantined_session(state_of_two(), attrs.evolve(differs, ids_expected="others"))
    assert None is quarantined_session(state_of_two(sessions=State().sessions), differs)


def test_the_session_goes_in_the_same_append():
    """
    The row that breaks INV-3, the violation and the quarantine of the session are one append,
    whatever the session does at the time. If the server is lost after it, the next start finds all
    of them. A replay finds the same, and names the session.
    """
    driver = Driver()
    driver.start()
    talk = Talk(tenant="t1", group=None, name="n", parts=(("user", tuple(range(20))),))
    driver.serve(talk)
    driver.begin_check("n")
    driver.ask(attrs.evolve(talk, parts=(("user", tuple(range(30))),)))
    assert driver.state.session("n").request is not None
    with pytest.raises(Violated) as caught:
        driver.end_check("differs")
    events = [recorded.event for recorded in caught.value.outcome.recorded]
    wrong, violated, out = events
    assert isinstance(wrong, ev.ShadowChecked)
    assert isinstance(violated, ev.InvariantViolated)
    assert isinstance(out, ev.SessionQuarantined)
    assert ("n", violated.bug_id) == (out.session, out.bug_id)
    assert violated.bug_id == driver.state.session("n").bug_id
    assert None is driver.state.shadow
    (finding,) = replay(driver.rows).findings
    assert (True, True) == (finding.recorded, finding.reproduced)
    assert (None, "n", "n") == (finding.session, finding.of_session, finding.concerns)
