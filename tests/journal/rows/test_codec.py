"""Every event can be read from its row unchanged; a row that does not make an event is refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, UnknownEvent
from cairn.journal.rows import codec
from cairn.journal.rows.codec import GENESIS, Row, chain_fault, decode, encode, opened, row_hash
from cairn.journal.rows.sealing import KEY_BYTES, Key
from tests.journal.model import profile
from tests.support.journals import healthy

HASH = "a" * 64
TEXTS = st.text(max_size=12)  # no lone surrogates: they are refused elsewhere
NATURALS = st.one_of(st.integers(0, 200), st.integers(0, 2**80))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), FLOATS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
BY_TYPE: Mapping[str, st.SearchStrategy[Any]] = {
    "str": TEXTS,
    "str | None": st.one_of(st.none(), TEXTS),
    "int": NATURALS,
    "int | None": st.one_of(st.none(), NATURALS),
    "bool": st.booleans(),
    "float": FLOATS,
    "Mapping[str, Any]": st.dictionaries(TEXTS, JSON, max_size=4),
    "Mapping[str, str]": st.dictionaries(TEXTS, TEXTS, max_size=4),
    "Mapping[str, int]": st.dictionaries(TEXTS, NATURALS, max_size=4),
    "Mapping[str, bool]": st.dictionaries(TEXTS, st.booleans(), max_size=4),
    "tuple[int, ...]": st.lists(NATURALS, max_size=5).map(tuple),
    "tuple[float, ...]": st.lists(FLOATS, max_size=5).map(tuple),
    "tuple[str, ...]": st.lists(TEXTS, max_size=4).map(tuple),
    "tuple[tuple[str, str, str], ...]": st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=4).map(
        tuple
    ),
    "tuple[tuple[str, int, str], ...]": st.lists(st.tuples(TEXTS, NATURALS, TEXTS), max_size=4).map(
        tuple
    ),
    "Coverage": st.lists(st.tuples(NATURALS, NATURALS, NATURALS), max_size=3).map(tuple),
    "Step": st.sampled_from(["prefill", "decode", "settle"]),
    "Path": st.sampled_from(["continuation", "new_session"]),
    "FinishReason": st.sampled_from(ev.FinishReason.__args__),  # type: ignore[attr-defined]
    "NextRole": st.sampled_from(ev.NextRole.__args__),  # type: ignore[attr-defined]
    "CacheMode": st.sampled_from(ev.CacheMode.__args__),  # type: ignore[attr-defined]
    "AbandonReason": st.sampled_from(ev.AbandonReason.__args__),  # type: ignore[attr-defined]
    "RemovalReason": st.sampled_from(ev.RemovalReason.__args__),  # type: ignore[attr-defined]
    "FileFault": st.sampled_from(ev.FileFault.__args__),  # type: ignore[attr-defined]
    "ShadowResult": st.sampled_from(ev.ShadowResult.__args__),  # type: ignore[attr-defined]
    "ShadowSkip": st.sampled_from(ev.ShadowSkip.__args__),  # type: ignore[attr-defined]
    "CallFault": st.sampled_from(ev.CallFault.__args__),  # type: ignore[attr-defined]
    "StallReason": st.sampled_from(ev.StallReason.__args__),  # type: ignore[attr-defined]
    "CancelStage": st.sampled_from(ev.CancelStage.__args__),  # type: ignore[attr-defined]
}


BY_NAME: Mapping[str, st.SearchStrategy[Any]] = {
    "traceparent": st.sampled_from([None, f"00-{'ab' * 16}-{'cd' * 8}-01"]),
}
"""Fields whose values have a form of their own."""


def of_kind(kind: type[ev.Event]) -> st.SearchStrategy[ev.Event]:
    """Events of one kind, with any values that its fields may have."""
    fields = {
        field.name: BY_NAME.get(field.name, BY_TYPE[str(field.type)])
        for field in attrs.fields(kind)
    }

    def made(**values: Any) -> ev.Event:
        if "end" in values and "start" in values:
            values["start"], values["end"] = sorted((values["start"], values["end"]))
        return kind(**values)

    return st.builds(made, **fields)


def placed(event: ev.Event, position: int = 7) -> ev.Recorded:
    """An event at any position."""
    return ev.Recorded(
        position=position, stream=event.stream, seq=3, event_id="id-1", time_us=5, event=event
    )


def closed(session: str = "s1") -> Row:
    """The row of a short event."""
    return encode(placed(ev.SessionClosed(session=session, reason="done")), HASH)


EMITTED = ev.TokensEmitted(
    session="s1", request="r1", first=0, emitted=2, ids=(1, 2), text="Grüße 🪨"
)


@pytest.mark.parametrize("kind", ev.ALL_EVENTS, ids=lambda kind: kind.kind)
def test_every_kind_comes_back(kind: type[ev.Event]):
    """What is encoded is decoded to an equal event at the same place, and its chain holds."""

    @profile(40)
    @given(of_kind(kind))
    def check(event: ev.Event) -> None:
        recorded = placed(event)
        row = encode(recorded, HASH)

        assert recorded == decode(row)
        assert type(event) is type(decode(row).event)
        assert None is chain_fault(row, HASH)
        assert (kind.kind, kind.version, 7, 3) == (row.kind, row.version, row.position, row.seq)

    check()


def test_kinds_are_one_each():
    """No two events share a kind, and every class of events is in the list."""
    kinds = [kind.kind for kind in ev.ALL_EVENTS]
    assert len(kinds) == len(set(kinds))
    classes = {kind for kind in ev.Event.__subclasses__() if kind.__module__ == ev.__name__}
    assert classes == set(ev.ALL_EVENTS)


def test_private_fields_are_stored_apart():
    """Text and token ids are in the private payload and nowhere else."""
    row = encode(placed(EMITTED), HASH)

    assert {"ids": [1, 2], "text": "Grüße 🪨"} == json.loads(row.private or b"")
    assert {"session": "s1", "request": "r1", "first": 0, "emitted": 2} == json.loads(row.public)
    assert hashlib.sha256(row.private or b"").hexdigest() == row.private_digest
    assert (None, "") == (closed().private, closed().private_digest)


@pytest.mark.parametrize("number", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e22, -1e-7])
def test_floats_are_exact(number: float):
    """A log-probability is read back bit for bit."""
    event = ev.CacheExtended(
        session="s1",
        request="r1",
        step="decode",
        start=0,
        end=1,
        input_hash="-",
        coverage=(),
        sampled=(1,),
        logprobs=(number,),
        duration_us=0,
    )
    back = decode(encode(placed(event), HASH)).event
    assert isinstance(back, ev.CacheExtended)

    assert number.hex() == back.logprobs[0].hex()
    assert math.copysign(1, number) == math.copysign(1, back.logprobs[0])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_refused(number: float):
    """JSON would store it as null, and the row could not be read again."""
    event = ev.CacheExtended(
        session="s1",
        request=None,
        step="decode",
        start=0,
        end=1,
        input_hash="-",
        coverage=(),
        sampled=(1, 2),
        logprobs=(-0.5, number),
        duration_us=0,
    )
    with pytest.raises(ValueError):
        encode(placed(event), HASH)


def test_the_word_null_is_a_word():
    """Text that says null, and fields that are None, are stored unchanged."""
    event = attrs.evolve(EMITTED, text="null, inf and nan")
    assert event == decode(encode(placed(event), HASH)).event
    opened = ev.SessionOpened(session="s", tenant="t", fingerprint="f", group=None, named=False)
    assert opened == decode(encode(placed(opened), HASH)).event


def test_token_ids_of_prompts_are_shared():
    """The ids of two decoded prompts are the same objects, because they are kept for long."""
    begun = ev.PrewarmStarted(
        session="s1",
        rules_version=1,
        next_role="user",
        tokens=3,
        base_tokens=0,
        new_ids=(70_000, 70_001, 70_000),
        base_keys=0,
        new_keys=(),
        tokens_from_slab=0,
        blocks_from_slab=0,
        blocks_from_pool=0,
        partial_key=None,
        tokens_from_partial=0,
    )
    one, other = (decode(encode(placed(begun), HASH)).event for _ in range(2))
    assert begun == one == other
    assert isinstance(one, ev.PrewarmStarted)
    assert isinstance(other, ev.PrewarmStarted)
    assert [id(token) for token in one.new_ids] == [id(token) for token in other.new_ids]
    assert one.new_ids[0] is one.new_ids[2]


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "version"), [("no_such_kind", 1), ("session_closed", 2)])
def test_an_event_of_a_newer_cairn(kind: str, version: int):
    """A kind or version that is not known yet is an error for the operator."""
    with pytest.raises(UnknownEvent):
        decode(attrs.evolve(closed(), kind=kind, version=version))


@pytest.mark.parametrize(
    "public",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"{}",
        b"\xff",
        b'{"session":"s1"}',
        b'{"session":1,"reason":"x"}',
        b'{"session":"s1","reason":null}',
    ],
)
def test_a_damaged_payload(public: bytes):
    """A payload that does not make an event is refused, with the row's position."""
    with pytest.raises(DamagedRow) as caught:
        decode(attrs.evolve(closed(), public=public))

    assert 7 == caught.value.position


def test_a_payload_that_makes_no_legal_event():
    """What an event's own constructor refuses is refused from a row as well."""
    row = encode(placed(EMITTED), HASH)
    with pytest.raises(DamagedRow):
        decode(attrs.evolve(row, public=b'{"session":"s1","request":"r1","first":-1}'))


@pytest.mark.parametrize("private", [b"", b"[]", b"{}", b"null", b'{"ids":["1"],"text":""}'])
def test_a_damaged_private_payload(private: bytes):
    """The same, with the damage in the private part."""
    row = encode(placed(EMITTED), HASH)
    with pytest.raises(DamagedRow):
        decode(attrs.evolve(row, private=private))


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_that_never_was(version: int):
    """A version below 1 has no upcasts, and is a damaged row."""
    with pytest.raises(DamagedRow):
        decode(attrs.evolve(closed(), version=version))


# --- the chain ------------------------------------------------------------------------------------


def test_a_forgotten_payload():
    """Without its private part, a row is still a link of the chain, though not an event."""
    row = encode(placed(EMITTED), HASH)
    forgotten = attrs.evolve(row, private=None)

    assert None is chain_fault(forgotten, HASH)
    assert row.hash == row_hash(forgotten)
    with pytest.raises(DamagedRow):
        decode(forgotten)


def test_a_private_payload_that_came_from_nowhere():
    """A private payload cannot be added to a row that had none."""
    assert None is not chain_fault(attrs.evolve(closed(), private=b"{}"), HASH)


@profile(60)
@given(TEXTS)
def test_no_byte_moves_from_column_to_column(joined: str):
    """Rows whose columns differ have different hashes, even if the joined columns are the same."""
    seen = {
        row_hash(attrs.evolve(closed(), event_id=joined[:cut], kind=joined[cut:]))
        for cut in range(len(joined) + 1)
    }
    assert len(joined) + 1 == len(seen)


def test_no_byte_moves_from_the_payload_to_the_digest():
    """The same for the last two columns."""
    row = encode(placed(EMITTED), HASH)
    moved = attrs.evolve(
        row, public=row.public + row.private_digest.encode(), private=None, private_digest=""
    )
    assert row.hash != row_hash(moved)


def test_every_column_is_in_the_hash():
    """
    A row with any one column changed has a different hash; the private text counts by its digest.
    """
    row = encode(placed(EMITTED), HASH)
    for field in attrs.fields(Row):
        value = getattr(row, field.name)
        if field.name in ("private", "hash") or not field.eq:
            continue
        other: Any = value + 1 if isinstance(value, int) else value + value[:1]
        changed = attrs.evolve(row, **{field.name: other})
        assert row.hash != row_hash(changed), field.name
        assert None is not chain_fault(changed, HASH), field.name


def test_the_same_event_elsewhere_has_another_hash():
    """A row's hash depends on all rows before it."""
    event = placed(EMITTED)
    assert encode(event, GENESIS).hash != encode(event, HASH).hash


@pytest.mark.parametrize("column", ["position", "seq", "version", "time_us"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_number_out_of_its_range(column: str, value: int):
    """Such a number is a broken chain, and not an error of Cairn's."""
    changed: Any = {column: value}
    fault = chain_fault(attrs.evolve(closed(), **changed), HASH)

    assert fault is not None
    assert "the row was changed" == fault[0]


# --- older rows -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ClosedLater(ev.Event):
    """``session_closed`` as a later version might have it."""

    kind = "session_closed"
    version = 3
    session: str
    reason: str
    by: str
    when: int


def test_old_rows_are_brought_up_step_by_step(monkeypatch: pytest.MonkeyPatch):
    """
    A row of version 1 goes through each step to the current version; the row itself is unchanged.
    """
    row = closed()
    steps = {
        ("session_closed", 1): lambda payload: {**payload, "by": "server"},
        ("session_closed", 2): lambda payload: {**payload, "when": len(payload)},
    }
    monkeypatch.setattr(codec, "UPCASTS", steps)
    monkeypatch.setitem(codec.KINDS, "session_closed", ClosedLater)

    expected = ClosedLater(session="s1", reason="done", by="server", when=3)
    assert expected == decode(row).event
    assert None is chain_fault(row, HASH)
    second = attrs.evolve(row, version=2, public=b'{"session":"s1","reason":"","by":"me"}')
    assert ClosedLater(session="s1", reason="", by="me", when=3) == decode(second).event


def test_a_step_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    """If an upcast is missing, or fails on the payload, the row is refused."""
    monkeypatch.setitem(codec.KINDS, "session_closed", ClosedLater)
    with pytest.raises(DamagedRow):
        decode(closed())

    monkeypatch.setattr(codec, "UPCASTS", {("session_closed", 1): lambda payload: payload["gone"]})
    with pytest.raises(DamagedRow):
        decode(closed())


def test_a_range_that_ends_before_it_begins():
    """An event that exists is valid: its constructor refuses such a range."""
    with pytest.raises(ValueError, match=r"\[5, 4\) is not a range of tokens"):
        ev.BlocksRestored(
            session="s1",
            request="r1",
            start=5,
            end=4,
            keys=(),
            digests=(),
            coverage=(),
            duration_us=1,
        )


def test_a_count_is_not_negative():
    """No event can have such a count, and a row that has one is refused."""
    with pytest.raises(ValueError, match="tokens is -1; a count must not be negative"):
        ev.PrewarmFinished(session="s", tokens=-1, computed_tokens=0)


def test_the_plain_payload_of_a_row():
    """It is there if it was never sealed, or was opened with its key; sealed bytes are no JSON."""
    key, other = Key(bytes(KEY_BYTES)), Key(bytes([1] * KEY_BYTES))
    said = next(one for one in map(decode, healthy()) if isinstance(one.event, ev.TokensEmitted))
    plain, sealed = encode(said, GENESIS), encode(said, GENESIS, key)
    stored = attrs.evolve(sealed, opened=None)
    assert plain.private == plain.plain == sealed.plain == opened(stored, {key.id: key}).plain
    assert None is stored.plain
    assert None is opened(stored, {key.id: other}).plain
    assert None is attrs.evolve(plain, private=None).plain
