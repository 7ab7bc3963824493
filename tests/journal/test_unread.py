"""
Rows whose texts cannot be read: whichever sessions they are of, the rest is checked, and nothing
that is right is called wrong.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cairn.journal import events as ev
from cairn.journal.keys import ids_bytes
from cairn.journal.replay import Report, replay
from cairn.journal.rows.codec import GENESIS, Row, decode, encode, opened, row_hash
from cairn.journal.rows.sealing import SERVER, Key, key_id, subject_of
from cairn.journal.state import State
from cairn.journal.tenants import session_tenant
from cairn.journal.unread import is_placeholder, placeholders
from tests.support.journals import Builder

from .model import TAPES, played, profile, tape
from .test_histories import EXPECTED, base_of_history, rows_of


def key_of(subject: str) -> Key:
    """A key that follows from its subject, for tests."""
    return Key(hashlib.sha256(subject.encode()).digest())


def sealed(rows: Sequence[Row]) -> list[Row]:
    """The same events as a server seals them, chained again."""
    found: list[Row] = []
    for row in rows:
        recorded = decode(row)
        key = key_of(subject_of(recorded.event))
        found.append(encode(recorded, found[-1].hash if found else GENESIS, key))
    return found


def stored(rows: Iterable[Row], keys: Iterable[Key]) -> list[Row]:
    """Rows as they are read from a store with these keys."""
    held = {key.id: key for key in keys}
    return [opened(attrs.evolve(row, opened=None), held) for row in rows]


def subjects_of(rows: Iterable[Row]) -> list[str]:
    """Whose private fields the rows have, the server left out."""
    found = {subject_of(decode(row).event): None for row in rows if row.private is not None}
    return [subject for subject in found if subject != SERVER]


def unread(rows: Sequence[Row], gone: Iterable[str]) -> list[Row]:
    """The rows without the keys of some subjects."""
    kept = {*subjects_of(rows), SERVER} - set(gone)
    return stored(rows, map(key_of, sorted(kept)))


def news(report: Report) -> list[tuple[int, str]]:
    """The violations that are not on record."""
    return [(f.position, f.message) for f in report.findings if not f.recorded]


def without_private(event: Any) -> Any:
    """An event without its texts and token ids."""
    fields = (field for field in attrs.fields(type(event)) if field.metadata.get("private"))
    return attrs.evolve(event, **dict.fromkeys((field.name for field in fields), None))


def public(state: State) -> State:
    """A state without what follows from texts and token ids."""
    blocks = state.blocks
    for key, block in blocks.items():
        blocks = blocks.set(key, attrs.evolve(block, ids=bytes(len(block.ids))))
    faults = state.faults
    for bug_id, fault in faults.items():
        event = attrs.evolve(fault.event, expected="", actual="", trace="")
        faults = faults.set(bug_id, attrs.evolve(fault, event=event))
    sessions = state.sessions
    for name, session in sessions.items():
        last, request, prewarm = session.last, session.request, session.prewarm
        if last is not None:
            last = attrs.evolve(
                last,
                prompt_ids=(0,) * len(last.prompt_ids),
                answer_ids=(0,) * len(last.answer_ids),
            )
        if request is not None:
            request = attrs.evolve(
                request,
                ask=without_private(request.ask),
                prompt_ids=(0,) * len(request.prompt_ids),
                sampled=(0,) * len(request.sampled),
                texts=(),
                path=without_private(request.path) if request.path else None,
            )
        if prewarm is not None:
            prewarm = attrs.evolve(prewarm, ids=(0,) * len(prewarm.ids))
        slab_ids = tuple((0,) * len(part) for part in session.slab_ids)
        plain = attrs.evolve(
            session, last=last, request=request, prewarm=prewarm, slab_ids=slab_ids, texts_at={}
        )
        sessions = sessions.set(name, plain)
    return attrs.evolve(state, blocks=blocks, faults=faults, sessions=sessions)


HEALTHY = sorted(
    name
    for name in EXPECTED
    if base_of_history(name) is None and not any(f["invariant"] == "INV-8" for f in EXPECTED[name])
)


# --- nothing is called wrong ----------------------------------------------------------------------


@profile(60)
@given(TAPES, st.integers(0, 2**32 - 1))
@example(tape(3, 600), 5)
@example(tape(7, 900), 2**32 - 1)
def test_any_sessions_unread(data: bytes, chosen: int):
    """
    A journal of which the texts of some sessions cannot be read gives the same state but for these,
    and no finding that it does not give as a whole.
    """
    rows = sealed(played(data).rows)
    whole = replay(rows)
    subjects = subjects_of(rows)
    gone = [one for place, one in enumerate(subjects) if chosen >> place % 32 & 1]
    report = replay(unread(rows, gone))

    assert news(whole) == news(report)
    assert public(whole.state) == public(report.state)
    needed = sum(row.private is not None and subject_of(decode(row).event) in gone for row in rows)
    assert needed == report.not_checked.no_key
    assert 0 == whole.not_checked.no_key


@pytest.mark.parametrize("name", HEALTHY)
def test_a_history_with_sessions_unread(name: str):
    """The recorded histories, with each session unread and with all of them."""
    rows = sealed(rows_of(name))
    whole = replay(rows)
    subjects = subjects_of(rows)
    for gone in ([], *([one] for one in subjects), subjects):
        report = replay(unread(rows, gone))
        new = {found.bug_id for found in whole.findings if found.recorded}
        assert set(news(report)) <= set(news(whole))
        assert new == {found.bug_id for found in report.findings if found.recorded}
        if not news(whole):
            assert public(whole.state) == public(report.state)


@pytest.mark.parametrize("seed", [1, 7])
def test_a_session_unread_in_part(seed: int):
    """A session of which some rows can be read and earlier ones cannot gives no finding."""
    rows: list[Row] = []
    for row in played(tape(seed, 600)).rows:
        recorded = decode(row)
        subject = subject_of(recorded.event)
        key = key_of(subject if len(rows) % 7 < 4 else f"{subject}, later")
        rows.append(encode(recorded, rows[-1].hash if rows else GENESIS, key))
    kept = [key_of(f"{subject}, later") for subject in (*subjects_of(rows), SERVER)]
    report = replay(stored(rows, [key_of(SERVER), *kept]))
    assert [] == news(report)
    assert report.not_checked.no_key > 0
    assert report.not_checked.named > 0


def test_with_all_keys_everything_is_checked():
    """With all keys, sealed rows replay as plain ones do."""
    driver = played(tape(1, 600))
    rows = sealed(driver.rows)
    report = replay(unread(rows, []))
    assert replay(driver.rows).state == report.state
    assert not report.not_checked
    assert any(key_id(row.private) for row in rows)


# --- what is wrong is still found -----------------------------------------------------------------


def changed(rows: Sequence[Row], place: int, change: Callable[[ev.Event], ev.Event]) -> list[Row]:
    """The rows with one event changed, sealed and chained as if it had been recorded so."""
    found = list(rows[:place])
    for row in rows[place:]:
        recorded = decode(row)
        if row is rows[place]:
            recorded = attrs.evolve(recorded, event=change(recorded.event))
        key = key_of(subject_of(recorded.event))
        found.append(encode(recorded, found[-1].hash if found else GENESIS, key))
    return found


def other_ids(event: ev.Event) -> ev.Event:
    """The event, with other tokens."""
    assert isinstance(event, ev.TokensEmitted)
    return attrs.evolve(event, ids=tuple(one + 1 for one in event.ids))


def test_a_changed_row_of_a_readable_session_is_found():
    """Tokens that were changed in a session that can be read are found while others are unread."""
    rows = sealed(played(tape(7, 900)).rows)
    subjects = subjects_of(rows)
    tried = 0
    for place, row in enumerate(rows):
        event = decode(row).event
        if not isinstance(event, ev.TokensEmitted) or not event.ids:
            continue
        bad = changed(rows, place, other_ids)
        gone = [one for one in subjects if one != event.session]
        assert row.position in [at for at, _ in news(replay(unread(bad, gone)))]
        # The control: of an unread session it cannot be found, and is counted.
        assert row.position not in [at for at, _ in news(replay(unread(bad, [event.session])))]
        tried += 1
        if tried == 5:
            break
    assert 5 == tried


def test_numbers_of_an_unread_session_are_checked():
    """Slabs, blocks and the order of steps are checked whether texts can be read or not."""
    rows = sealed(played(tape(7, 900)).rows)
    subjects = subjects_of(rows)
    kinds: dict[type[ev.Event], Callable[[Any], ev.Event]] = {
        ev.SlabAcquired: lambda e: attrs.evolve(e, pool_slabs=e.pool_slabs + 1),
        ev.BlockSealed: lambda e: attrs.evolve(e, memory_bytes=e.memory_bytes + 1),
        ev.RequestFinished: lambda e: attrs.evolve(e, cached_tokens=e.cached_tokens + 1),
    }
    for kind, change in kinds.items():
        place = next(at for at, row in enumerate(rows) if type(decode(row).event) is kind)
        bad = changed(rows, place, change)
        found = news(replay(unread(bad, subjects)))
        assert rows[place].position in [at for at, _ in found], kind


# --- placeholders ---------------------------------------------------------------------------------


def test_placeholders_match_nothing():
    """They are no token's id, and differ in each place between rows."""
    one, other = placeholders(7, 0, 5000), placeholders(8, 0, 5000)
    assert 5000 == len(one) == len(set(one))
    assert all(ids < 0 for ids in one)
    assert not any(mine == theirs for mine, theirs in zip(one, other, strict=True))
    assert one[100:] == placeholders(7, 100, 5000)
    assert is_placeholder(ids_bytes(one))
    assert not is_placeholder(ids_bytes((1, 2, 3)))
    assert not is_placeholder(b"")


def test_a_length_that_no_server_writes():
    """A row that claims a prompt of any length takes no memory for it."""
    assert len(placeholders(1, 0, 10**15)) < 10**7
    assert () == placeholders(1, 5, 2)


# --- what seals the rows --------------------------------------------------------------------------


def chained(rows: Iterable[Row]) -> list[Row]:
    """Rows with the chain that an attacker gives them."""
    found: list[Row] = []
    for row in rows:
        before = found[-1].hash if found else GENESIS
        digest = hashlib.sha256(row.private).hexdigest() if row.private is not None else ""
        linked = attrs.evolve(row, previous_hash=before, private_digest=digest)
        found.append(attrs.evolve(linked, hash=row_hash(linked)))
    return found


def forgotten(rows: Sequence[Row], session: str, key_ids: tuple[str, ...]) -> list[Row]:
    """The rows, and one more that says that a session was forgotten with these keys."""
    event = ev.SessionForgotten(
        of_session=session,
        tenant=session_tenant(session),
        key_ids=key_ids,
        rows=1,
        blocks=(),
        removed=(),
        same_text=(),
    )
    last = decode(rows[-1])
    recorded = attrs.evolve(last, position=last.position + 1, stream="server", event=event)
    servers = [row.seq for row in rows if row.stream == "server"]
    recorded = attrs.evolve(recorded, seq=servers[-1] + 1, event_id=str(uuid.UUID(int=1)))
    return [*rows, encode(recorded, rows[-1].hash)]


def closed() -> list[Row]:
    """A sealed journal of sessions that are closed."""
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22))
    made.turn("s2", "r2", ["Good day"], range(31, 41), (41, 42))
    made.stop()
    for session in ("s1", "s2"):
        made.propose(ev.SessionClosed(session=session, reason="a request closed it"))
    assert made.bug is None
    return sealed(made.rows)


def test_a_session_is_forgotten_with_its_own_key():
    """With that of another session, or of the server, nothing is forgotten."""
    rows = closed()
    assert [] == news(replay(forgotten(rows, "s1", (key_of("s1").id,))))
    for whose in ("s2", SERVER):
        ((_, message),) = news(replay(forgotten(rows, "s1", (key_of(whose).id,))))
        assert "with the key of another" in message


def test_an_agent_that_never_was_is_not_forgotten():
    """Its name alone is no session."""
    rows = forgotten(closed(), "agent/never-was", (key_of("agent/never-was").id,))
    ((_, message),) = news(replay(rows))
    assert "never was" in message


def test_a_key_is_of_one_session():
    """Rows that were sealed again with the key of another session are found without keys."""
    rows = closed()
    again: list[Row] = []
    for row in rows:
        of = subject_of(decode(row).event)
        key = key_of("s1" if of == "s2" else of)
        again.append(encode(decode(row), again[-1].hash if again else GENESIS, key))
    assert "the key of another session" in news(replay(stored(again, ())))[0][1]


def test_a_plain_payload_among_sealed_ones():
    """It needs no key to be written, so it is no evidence; before the first sealed row it is."""
    rows = closed()
    plain = [
        attrs.evolve(row, private=row.plain, opened=None)
        if row.kind == "request_received" and row.stream == "session/s2"
        else row
        for row in rows
    ]
    ((_, message),) = news(replay(chained(plain)))
    assert "a private payload is plain" in message
    begun = next(place for place, row in enumerate(rows) if row.stream == "session/s2")
    first = [attrs.evolve(row, private=row.plain, opened=None) for row in rows[:begun]]
    assert [] == news(replay(chained([*first, *rows[begun:]])))


def test_a_payload_is_of_its_row():
    """Another row cannot be given the payload of one, though its id comes with it."""
    rows = closed()
    first, second = (place for place, row in enumerate(rows) if row.kind == "request_received")
    keys = {key.id: key for key in map(key_of, ("s1", "s2"))}
    moved = attrs.evolve(
        rows[second], private=rows[first].private, event_id=rows[first].event_id, opened=None
    )
    assert b"" == opened(moved, keys).opened
    assert opened(attrs.evolve(rows[first], opened=None), keys).opened
