"""Each check of INV-9 fails where it should, and nowhere else."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.invariants import check
from cairn.journal.replay import replay
from cairn.journal.retention import NeededIds
from cairn.journal.rows.base import base_of, forgotten, forgotten_turns, state_of
from cairn.journal.rows.codec import decode
from cairn.journal.state import State, lengthened_texts
from tests.support.journals import FIELDS, TENANT, self_test, stored

ROWS = stored()


def at(kind: str, number: int = 0) -> tuple[State, ev.Recorded]:
    """The state before an event of a kind, and the event."""
    row = [row for row in ROWS if row.kind == kind][number]
    return replay(ROWS, until=row.position - 1).state, decode(row)


Wrong = tuple[str, int, dict[str, Any], str]
WRONG: dict[str, Wrong] = {
    "fields": ("model_loaded", 0, {"fields": {}}, "a fingerprint of other fields"),
    "C": ("model_loaded", 0, {"block_tokens": 8}, "another block_tokens than the fingerprint has"),
    "window": ("model_loaded", 0, {"kv_window": 8}, "another kv_policy than the fingerprint has"),
    "sinks": ("model_loaded", 0, {"kv_sinks": 8}, "a window of no tokens"),
    "grain": ("model_loaded", 0, {"grain": 1}, "another grain than the fingerprint has"),
    "failed checks": (
        "self_test_finished",
        0,
        {"passed": True},
        "a self-test that passed with failed checks",
    ),
    "answer": ("turn_stored", 0, {"answer": "[]"}, "a stored answer that its request did not give"),
    "tenant": ("turn_stored", 0, {"tenant": "other"}, "a turn of another tenant"),
    "an agent's": ("turn_stored", 0, {"agent": "notes"}, "a turn of another agent"),
    "no agent's": ("turn_stored", 2, {"agent": None}, "a turn of another agent"),
    "no turn": ("turn_stored", 1, {"previous": "r9"}, "a turn that its tenant does not have"),
    "after another": ("turn_stored", 3, {"previous": None}, "a turn after another one"),
    "another row": (
        "turn_stored",
        1,
        {"texts_at": {"tools": 1}},
        "a text that no turn of the session has",
    ),
    "forgotten by another": (
        "turn_forgotten",
        0,
        {"tenant": "other"},
        "a turn that its tenant does not have",
    ),
    "an agent's turn forgotten": (
        "turn_forgotten",
        0,
        {"of_request": "r4"},
        "a turn that its tenant does not have",
    ),
    "created twice": ("agent_created", 1, {"agent": "notes"}, "an agent was created twice"),
    "no history": ("agent_created", 1, {"forked_from": None}, "a history of no agent"),
    "a fork of none": ("agent_created", 1, {"forked_from": "none"}, "a fork of no agent"),
    "a fork of a turn": (
        "agent_created",
        1,
        {"head": "r2"},
        "a turn that its tenant does not have",
    ),
    "not deleted": (
        "agent_deleted",
        0,
        {"tenant": "other"},
        "an agent was deleted that does not exist",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_field_is_found(name: str) -> None:
    """The event as it is breaks nothing; with a wrong field it breaks INV-9."""
    kind, number, fields, message = WRONG[name]
    state, recorded = at(kind, number)
    assert [] == check(state, recorded)
    wrong = attrs.evolve(recorded, event=attrs.evolve(recorded.event, **fields))
    assert ("INV-9", message) in [(one.invariant, one.message) for one in check(state, wrong)]


def test_a_fork_before_the_first_turn() -> None:
    """A fork may begin with nothing."""
    state, recorded = at("agent_created", 1)
    event: Any = recorded.event
    assert [] == check(state, attrs.evolve(recorded, event=attrs.evolve(event, head=None)))


def test_a_second_turn_of_one_request() -> None:
    """A request has one turn."""
    state, recorded = at("request_finished")
    _, turn = at("turn_stored")
    again = attrs.evolve(recorded, event=turn.event)
    assert "a second turn of one request" in [one.message for one in check(state, again)]


def test_a_rejected_call_was_released() -> None:
    """The text of a rejected call is in what was released."""
    state, recorded = at("turn_stored")
    for text, found in (("a b", []), ("c", ["a rejected call that was not released"])):
        call = ev.CallRejected(
            session="s1", request="r1", reason="no_name", text=text, detail="nothing"
        )
        checked = check(state, attrs.evolve(recorded, event=call))
        assert found == [one.message for one in checked]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (self_test(passed=False), "a model that failed its self-test"),
        (attrs.evolve(self_test(passed=True), fingerprint="f"), "another model than was tested"),
        (
            attrs.evolve(self_test(passed=True), decode_shapes=(2, 3)),
            "other decode passes than were tested",
        ),
        (
            attrs.evolve(self_test(passed=True), row_class=(1,)),
            "another row class than was tested",
        ),
        (self_test(passed=True), None),
        (attrs.evolve(self_test(passed=True), decode_shapes=()), None),
    ],
)
def test_a_model_is_the_one_that_was_tested(test: ev.SelfTestFinished, message: str | None) -> None:
    """The last self-test before a model is its own, and passed, or the operator accepted it."""
    state, recorded = at("model_loaded")
    assert [] == check(attrs.evolve(state, tested=None), recorded)
    found = check(attrs.evolve(state, tested=test), recorded)
    assert ([message] if message else []) == [one.message for one in found]
    assert "row_class" in FIELDS


def test_turns_of_before_a_prune_are_not_known() -> None:
    """A base has no stored turns, and rows after it may name them; agents stay."""
    state = replay(ROWS, until=at("agent_deleted")[1].position - 1).state
    assert {"r1", "r2", "r3", "r4"} == set(state.turns)
    assert {"r4"} == set(forgotten_turns(state.turns, state.turns["r3"].row))
    after = state_of(base_of(forgotten(state, NeededIds()), "h"))
    assert (set(), True) == (set(after.turns), after.turns_pruned)
    assert (
        set(state.agents)
        == set(after.agents)
        == {
            f"@{TENANT}/agent/notes",
            f"@{TENANT}/agent/copy",
        }
    )
    gone = attrs.evolve(at("turn_forgotten")[1], position=after.position + 1)
    gone = attrs.evolve(gone, seq=after.streams["server"] + 1)
    assert [] == check(after, gone)
    assert [] != check(attrs.evolve(after, turns_pruned=False), gone)


def test_texts_take_few_pieces() -> None:
    """However many pieces are added, few are kept, and nothing is lost."""
    texts: tuple[str, ...] = ()
    for number in range(1000):
        texts = lengthened_texts(texts, f"{number} ")
    assert len(texts) < 12
    assert "".join(f"{number} " for number in range(1000)) == "".join(texts)
