"""
Every field of every event is bound: changed, removed, exchanged with that of the next event of its
kind, written twice or of another type, with the chain written again over it, it is found, or it is
in the list of what nothing binds.

The cases are generated from recorded histories and from journals made for tests. A seed chooses
one of each field and kind of change, in `make long` four; ``CAIRN_TAMPER=all`` runs all.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import msgspec
import pytest
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.errors import JournalError
from cairn.journal.forgetting import find
from cairn.journal.ledger import Clock
from cairn.journal.pruning import PruneOptions, prepare_prune
from cairn.journal.replay import Replay, replay
from cairn.journal.rows.base import Base, base_fault, base_of, histories_of
from cairn.journal.rows.codec import GENESIS, KINDS, Row, decode, row_hash
from cairn.journal.rows.export import read_export, to_line
from cairn.journal.rows.histories import Histories
from cairn.journal.rows.store import MemoryStore
from cairn.journal.rows.verification import verify_export
from cairn.journal.state import State
from tests.journal.model import played, tape
from tests.journal.unbound import UNBOUND, table
from tests.support.journals import (
    JUNE_US,
    Builder,
    conversation,
    handed_over,
    healthy,
    speaking,
    stored,
)

ROOT = Path(__file__).resolve().parents[2]
RECORDED = (
    "continuation",
    "shared-blocks",
    "evicted",
    "windowed",
    "cancelled",
    "killed",
    "prewarmed",
    "call-rejected",
    "bit-flipped",
    "session-dies",
    "slab-leaked",
)
PLAYED = (1, 19, 20, 28, 56)
"""Tapes of ``played`` on which every kind of event is that the others do not have."""
FAULTS = {"invariant_violated", "session_quarantined", "blocks_quarantined", "admission_closed"}
ALL = os.environ.get("CAIRN_TAMPER") == "all"
PLACES = 1_000_000 if ALL else 2
"""How many events of a kind are changed in each journal."""
SEED = 20261125
HINTS = {kind: get_type_hints(event) for kind, event in KINDS.items()}
COLUMNS = ("position", "stream", "seq", "event_id", "kind", "version", "time_us")

Payload = dict[str, Any]


@attrs.frozen
class Case:
    """
    A change of one field of a row.

    Attributes:
        at: the index of the row.
        row: the changed row; its hash is still that of the row before.
    """

    journal: str
    at: int
    kind: str
    field: str
    how: str
    row: Row

    def __str__(self) -> str:
        return f"{self.journal} row {self.row.position}: {self.kind}.{self.field} {self.how}"


def with_forgotten() -> list[Row]:
    """A journal in which a session was forgotten."""
    made = conversation()
    made.turn("s2", "r9", ["Hello", "Hi", "What?"], (*range(11, 19), 90, 91), (61, 62))
    made.stop()
    made.propose(ev.SessionClosed(session="s1", reason="forgotten"))
    made.propose(find("s1", made.rows, made.rows, None).event(["0123456789abcdef"]))
    assert made.bug is None, made.bug
    return made.rows


def with_handed_over() -> list[Row]:
    """A journal with an agent that was adopted, with its turn, and released again."""
    made = Builder()
    made.start()
    made.propose(*handed_over())
    made.stop()
    assert made.bug is None, made.bug
    return made.rows


def journals() -> dict[str, list[Row]]:
    """Journals in which nothing is wrong that is not on record."""
    found = {name: list(read_export(ROOT / f"tests/histories/{name}.jsonl")) for name in RECORDED}
    for seed in PLAYED:
        driver = played(tape(seed, 600), crashes=False)
        assert [] == driver.bugs
        found[f"played-{seed}"] = driver.rows
    found |= {"healthy": healthy(), "stored": stored(), "forgotten": with_forgotten()}
    return {**found, "handed over": with_handed_over()}


JOURNALS = journals()


# --- changes ----------------------------------------------------------------------------------


def changed(value: Any, hint: Any) -> Any:
    """Another value of a field's type."""
    options = choices(hint)
    if options:
        return next(option for option in (*options, *options) if option != value)
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.5
        case str():
            return as_text(value)
        case None:
            return 1 if int in get_args(hint) else "a"
        case list():
            return value[:-1] if value else ["a" if "str" in str(hint) else 1]
        case dict():
            if not value:
                return {"a": 1 if "int" in str(hint) else "a"}
            name = sorted(value)[0]
            return {**value, name: changed(value[name], Any)}
        case _:
            raise AssertionError(value)


def as_text(value: str) -> str:
    """Another text; of JSON another JSON, of a hash another hash."""
    if re.fullmatch(r"[0-9a-f]+", value):
        return value[:-1] + ("0" if value[-1] != "0" else "1")
    if value.startswith("["):
        return json.dumps(with_first_text(json.loads(value)))
    return value + "a"


def with_first_text(value: Any) -> Any:
    """A JSON value with another first text in it; a list without one with one more."""
    match value:
        case str():
            return value + "a"
        case [first, *rest]:
            return [with_first_text(first), *rest]
        case {**fields} if fields:
            name = next(iter(fields))
            return {**fields, name: with_first_text(fields[name])}
        case [] | {}:
            return [{"said": {"text": "a"}}]
        case _:
            return "a"


def choices(hint: Any) -> tuple[Any, ...]:
    """The values of a literal type, or of an optional one."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return ()


def other_type(value: Any) -> Any:
    """A value of a type that the field never has."""
    match value:
        case str() | None:
            return 17.5
        case bool() | int() | float():
            return "17"
        case _:
            return "a"


def stored_text(payload: Payload) -> bytes:
    """A payload as it is stored, without spaces."""
    return msgspec.json.encode(payload)


def twice(payload: Payload, field: str) -> bytes:
    """A payload with one field written twice; the second has the value on record."""
    first = stored_text({field: changed(payload[field], Any)})
    return first[:-1] + b"," + stored_text(payload)[1:]


def with_texts(row: Row, public: bytes, private: bytes | None) -> Row:
    """A row with other payloads, whose digest fits."""
    digest = hashlib.sha256(private).hexdigest() if private is not None else ""
    return attrs.evolve(row, public=public, private=private, private_digest=digest)


def changes(rows: Sequence[Row], at: int, name: str) -> Iterator[Case]:
    """All changes of the fields of a row."""
    row = rows[at]
    after = next((other for other in rows[at + 1 :] if other.kind == row.kind), None)
    parts = [(json.loads(row.public), False)]
    if row.private is not None:
        parts.append((json.loads(row.private), True))
    for payload, hidden in parts:

        def with_part(text: bytes, hidden: bool = hidden, payload: Payload = payload) -> Row:
            return with_texts(row, row.public if hidden else text, text if hidden else row.private)

        for field, value in payload.items():

            def case(how: str, made: bytes, field: str = field) -> Case:
                return Case(name, at, row.kind, field, how, with_part(made))

            hint = HINTS[row.kind][field]
            yield case("changed", stored_text({**payload, field: changed(value, hint)}))
            rest = {key: each for key, each in payload.items() if key != field}
            yield case("removed", stored_text(rest))
            yield case("of another type", stored_text({**payload, field: other_type(value)}))
            yield case("duplicated", twice(payload, field))
            if after is not None:
                text = after.private if hidden else after.public
                other = json.loads(text or b"{}").get(field, value)
                if other != value:
                    yield case("swapped", stored_text({**payload, field: other}))


def columns(rows: Sequence[Row], at: int, name: str) -> Iterator[Case]:
    """All changes of the columns of a row."""
    row = rows[at]
    for column in COLUMNS:
        value = getattr(row, column)
        others = [changed(value, Any)]
        if at + 1 < len(rows):
            others.append(getattr(rows[at + 1], column))
        if column == "version":
            others = [0, 2]
        for other in others:
            if other != value:
                made = attrs.evolve(row, **{column: other})
                yield Case(name, at, "*", column, "changed", made)


def cases(alike_max: int) -> list[Case]:
    """The cases, a choice of each kind in each journal: so many of a field and a kind of change."""
    randomly = random.Random(SEED)
    found: list[Case] = []
    for name, rows in JOURNALS.items():
        places: dict[str, list[int]] = {}
        for at, row in enumerate(rows):
            places.setdefault(row.kind, []).append(at)
        for kind in sorted(places):
            chosen = randomly.sample(places[kind], min(PLACES, len(places[kind])))
            for at in sorted(chosen):
                found.extend(changes(rows, at, name))
        for at in randomly.sample(range(len(rows)), min(4 * PLACES, len(rows))):
            found.extend(columns(rows, at, name))
    if ALL:
        return found
    randomly.shuffle(found)
    alike: Counter[tuple[str, str, str]] = Counter()
    some: list[Case] = []
    for case in found:
        alike[case.kind, case.field, case.how] += 1
        if alike[case.kind, case.field, case.how] <= alike_max:
            some.append(case)
    return some


# --- verification -----------------------------------------------------------------------------


def chained(rows: Sequence[Row], previous_hash: str) -> Iterator[Row]:
    """The rows with a chain that holds."""
    for row in rows:
        linked = attrs.evolve(row, previous_hash=previous_hash)
        linked = attrs.evolve(linked, hash=row_hash(linked))
        previous_hash = linked.hash
        yield linked


@attrs.define
class Prefixes:
    """The fold of a journal up to each row, so that what comes before a change is read once."""

    _rows: Sequence[Row]
    _bases: dict[int, Base | None] = attrs.field(factory=dict)

    def before(self, wanted: Sequence[int]) -> None:
        """Fold up to these rows, given by their indices."""
        fold, needed = Replay(), set(wanted)
        for at, row in enumerate(self._rows):
            if at in needed:
                head = self._rows[at - 1].hash if at else GENESIS
                self._bases[at] = base_of(fold.state, head) if at else None
            fold.feed(row)
        assert [] == [one for one in fold.report().findings if not one.recorded]

    def found(self, at: int, rows: Iterator[Row]) -> bool:
        """Whether the rows from one on violate something that is not on record."""
        fold = Replay(self._bases[at])
        try:
            if self._rows[at].kind in FAULTS:  # compared with what the row before has given
                fold = Replay()
                for row in self._rows[:at]:
                    fold.feed(row)
            for count, row in enumerate(rows):
                fold.feed(row)
                # Looked at now and then: a report ends what is open.
                if count in (0, 1, 4, 16, 64) and self._has_news(fold):
                    return True
        except JournalError:
            return True
        return self._has_news(fold)

    @staticmethod
    def _has_news(fold: Replay) -> bool:
        return any(not one.recorded for one in fold.report(whole=False).findings)


def passed_over(all_cases: Sequence[Case], rewrite: bool) -> list[Case]:
    """The cases that verification does not find."""
    missed: list[Case] = []
    for name, rows in JOURNALS.items():
        mine = [case for case in all_cases if case.journal == name]
        prefixes = Prefixes(rows)
        prefixes.before([case.at for case in mine])
        for case in mine:
            tail = [case.row, *rows[case.at + 1 :]]
            before = rows[case.at - 1].hash if case.at else GENESIS
            found = prefixes.found(case.at, chained(tail, before) if rewrite else iter(tail))
            if not found:
                missed.append(case)
    return missed


@pytest.fixture(scope="module", params=[4] if ALL else [1, pytest.param(4, marks=pytest.mark.long)])
def alike(request: pytest.FixtureRequest) -> int:
    """How many cases there are of a field and a kind of change."""
    most: int = request.param
    return most


@pytest.fixture(scope="module")
def all_cases(alike: int) -> list[Case]:
    return cases(alike)


def test_all_events_are_changed(all_cases: list[Case], alike: int) -> None:
    """The cases are hundreds, of every kind of event but that of a prune, which names a base."""
    assert 750 * alike < len(all_cases)
    assert set(KINDS) - {"journal_pruned"} <= {case.kind for case in all_cases}


def test_each_change_is_found(all_cases: list[Case]) -> None:
    """With the chain written again, each change is found, but for the fields that are listed."""
    missed = passed_over(all_cases, rewrite=True)
    unlisted = [str(case) for case in missed if case.field not in UNBOUND.get(case.kind, {})]
    assert [] == unlisted


def test_the_list_is_not_longer_than_needed(all_cases: list[Case]) -> None:
    """Each field of the list was once not found."""
    if not ALL:
        pytest.skip("takes all cases")
    missed = {(case.kind, case.field) for case in passed_over(all_cases, rewrite=True)}
    listed = {(kind, field) for kind, fields in UNBOUND.items() for field in fields}
    assert set() == listed - missed


def test_without_the_chain_everything_is_found(all_cases: list[Case], alike: int) -> None:
    """A change of a row whose hashes are left as they are is found, whichever field it is."""
    some = random.Random(SEED).sample(all_cases, min(len(all_cases), 400 * alike))
    assert [] == [str(case) for case in passed_over(some, rewrite=False)]


def test_the_page_has_the_list() -> None:
    """docs/audit.md has the list, with its reasons, and names fields that exist."""
    assert table() in (ROOT / "docs" / "audit.md").read_text("utf-8")
    for kind, fields in UNBOUND.items():
        assert set(fields) <= (set(COLUMNS) if kind == "*" else set(HINTS[kind]))


def histories() -> tuple[Histories, list[Row], Row]:
    """What a base keeps of an agent, the rows after it, and the row that names the base."""
    store = MemoryStore(speaking().rows)
    clock = Clock(new_id=lambda: "a prune", now_us=lambda: 2**60, version="0.0.test")
    prepare_prune(store, PruneOptions(before_us=JUNE_US), clock).commit(store)
    *rows, pruned = store.read()
    return histories_of(store.base()), rows, pruned


HISTORIES, LEFT, NAMES_IT = histories()
FIRST_ROW, SECOND_ROW, THIRD_ROW = HISTORIES.rows[:3]
NOTES_AGENT = HISTORIES.agents[0]
KEPT_PLACES = dict(HISTORIES.places)
FORGED: dict[str, tuple[Histories, str]] = {
    "nothing": (Histories(), ""),
    "a text": (
        attrs.evolve(
            HISTORIES,
            rows=(
                attrs.evolve(FIRST_ROW, private=b'{"system":"x","tools":"[]"}'),
                *HISTORIES.rows[1:],
            ),
        ),
        "of an agent was changed",
    ),
    "a row is missing": (attrs.evolve(HISTORIES, rows=HISTORIES.rows[1:]), "are not those of its"),
    "rows are exchanged": (
        attrs.evolve(
            HISTORIES,
            rows=(
                attrs.evolve(THIRD_ROW, position=SECOND_ROW.position),
                attrs.evolve(SECOND_ROW, position=THIRD_ROW.position),
                FIRST_ROW,
                *HISTORIES.rows[3:],
            ),
        ),
        "of an agent was changed",
    ),
    "another agent": (
        attrs.evolve(HISTORIES, agents=(attrs.evolve(NOTES_AGENT, name="other"),)),
        "did not create other",
    ),
    "another tenant": (
        attrs.evolve(HISTORIES, agents=(attrs.evolve(NOTES_AGENT, tenant="other"),)),
        "did not create notes",
    ),
    "a turn of another request": (
        attrs.evolve(HISTORIES, places=Map({"r3": KEPT_PLACES["r4"], "r4": KEPT_PLACES["r3"]})),
        "are not a turn",
    ),
    "a turn after another": (
        attrs.evolve(
            HISTORIES,
            places=Map({**KEPT_PLACES, "r4": attrs.evolve(KEPT_PLACES["r4"], previous="x")}),
        ),
        "are not a turn",
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_what_a_base_keeps_of_agents(what: str) -> None:
    """
    A change is found by the digest of the base, which a row names. If base and row are written
    again to fit, what contradicts the rows that it keeps is found, and their hashes.
    """
    forged, words = FORGED[what]
    state, head = state_of_base()
    base = base_of(state, head, None, forged)
    kept = base_of(state, head, None, HISTORIES)
    named = decode(NAMES_IT).event
    assert isinstance(named, ev.JournalPruned)
    due = attrs.evolve(named, base_digest=kept.digest)
    assert base_fault(kept, due) is None
    fault = base_fault(base, due)
    assert fault is not None
    assert "the base was changed" == fault[0]
    rewritten = base_fault(base, attrs.evolve(named, base_digest=base.digest))
    if not words:
        assert rewritten is None  # as if no agent had been there: see docs/audit.md
        return
    assert rewritten is not None
    assert words in rewritten[2]


def state_of_base() -> tuple[State, str]:
    """The fold of the rows before the base, and the hash of the last of them."""
    rows = [row for row in speaking().rows if row.position < LEFT[0].position]
    return replay(rows).state, rows[-1].hash


def test_exports(all_cases: list[Case], alike: int, tmp_path: Path) -> None:
    """The same on exports: verification of the file finds what verification of the journal does."""
    some = random.Random(SEED).sample(all_cases, min(len(all_cases), 20 * alike))
    path = tmp_path / "export.jsonl"
    for rewrite in (True, False):
        unlisted = []
        for case in some:
            rows = JOURNALS[case.journal]
            tail = [case.row, *rows[case.at + 1 :]]
            before = rows[case.at - 1].hash if case.at else GENESIS
            made = [*rows[: case.at], *(chained(tail, before) if rewrite else tail)]
            path.write_bytes(b"".join(map(to_line, made)))
            listed = rewrite and case.field in UNBOUND.get(case.kind, {})
            if not (export_found(path) or listed):
                unlisted.append(str(case))
        assert [] == unlisted


def export_found(path: Path) -> bool:
    """Whether verification finds something in an export."""
    try:
        return any(not one.recorded for one in verify_export(path).findings())
    except JournalError:
        return True
