"""
Snapshots: all folds of a journal at one row, and their form as bytes.

A server that starts from a snapshot folds only the rows after it. A snapshot is a cache, and never
evidence: `ops verify` and every other reader begin at the journal's first row or its base.

Rules of this module:

1. A snapshot is encoded and decoded in pieces that take milliseconds each: a thread that encodes
   or decodes holds the interpreter's lock for no longer than that.
2. Its form is not stable, and nothing brings an old one up to date. Who stores one stores the
   version of the code with it, and gives it to that code alone.
3. It is data: decoding bytes that were changed may give a wrong snapshot, but runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, get_args, get_origin, get_type_hints

import attrs
import msgspec
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.agents import Agents, AgentsContents
from cairn.journal.rows.base import Base, histories_of
from cairn.journal.rows.codec import Row, chain_fault
from cairn.journal.runs import Runs
from cairn.journal.state import State
from cairn.journal.summaries import Summaries, SummariesContents
from cairn.journal.turns import Turns, TurnsContents

PIECE_ENTRIES = 64
"""How many entries of a map are in one piece."""


@attrs.frozen(kw_only=True)
class Place:
    """
    Where a journal was when a snapshot was made.

    Attributes:
        position: of the last row that was folded.
        head: its hash.
        base_digest: of the journal's base; None if no row was pruned.
    """

    position: int
    head: str
    base_digest: str | None


@attrs.frozen(kw_only=True)
class Snapshot:
    """
    All folds of a journal at one row, where no violation was left that is not on record.

    Attributes:
        boots, shared: the server's runs in the rows, see ``Runs``.
        pruned: the last ``journal_pruned``, with its row; None if there is none.
        forgotten: as in ``Folds``.
    """

    place: Place
    state: State
    turns: TurnsContents
    agents: AgentsContents
    summaries: SummariesContents
    boots: frozenset[str]
    shared: bool | None
    pruned: tuple[int, ev.JournalPruned] | None
    forgotten: dict[str, tuple[str, ...]]


class Folds:
    """
    The folds of a journal beside its state: call ``see`` with each of its events, in order.

    Attributes:
        pruned: the last ``journal_pruned``, with its row; None if there was none.
        forgotten: the ids of the keys of sessions that were forgotten; a start that has removed
            these keys clears it.
    """

    def __init__(self, begins: Snapshot | None = None, base: Base | None = None) -> None:
        """
        Args:
            begins: what earlier folds held, to go on from there.
            base: of the journal; without a snapshot they begin with what that has.
        """
        self.summaries = Summaries(SummariesContents() if begins is None else begins.summaries)
        if begins is not None:
            self.turns = Turns(begins.turns)
            self.agents = Agents(self.turns, begins.agents)
        else:
            self.agents = histories_of(base).fold()
            self.turns = self.agents.turns
        self.runs = Runs(set(begins.boots), begins.shared) if begins is not None else Runs()
        self.pruned = begins.pruned if begins is not None else None
        self.forgotten = dict(begins.forgotten) if begins is not None else {}

    def see(self, recorded: ev.Recorded) -> None:
        """Apply the next event."""
        self.runs.see(recorded)
        self.agents.see(recorded)
        self.summaries.see(recorded)
        event = recorded.event
        if isinstance(event, ev.JournalPruned):
            self.pruned = recorded.position, event
        elif isinstance(event, ev.SessionForgotten):
            before = self.forgotten.get(event.of_session, ())
            self.forgotten[event.of_session] = (*before, *event.key_ids)

    def snapshot(self, state: State, head: str) -> Snapshot:
        """
        All folds at the row that these have seen last. Copies them, and encodes nothing.

        Args:
            state: the fold up to that row.
            head: its hash.
        """
        base_digest = self.pruned[1].base_digest if self.pruned is not None else None
        return Snapshot(
            place=Place(position=state.position, head=head, base_digest=base_digest),
            state=state,
            turns=self.turns.contents(),
            agents=self.agents.contents(),
            summaries=self.summaries.contents(),
            boots=frozenset(self.runs.boots),
            shared=self.runs.shared,
            pruned=self.pruned,
            forgotten=dict(self.forgotten),
        )


def unusable(place: Place, base_digest: str | None, row: Row | None) -> str | None:
    """
    Why a snapshot is not one of this journal; None if it may be used.

    Args:
        place: of the snapshot.
        base_digest: of the journal's base; None if it has none.
        row: the journal's row at the position of the snapshot; None if it has none.
    """
    if place.base_digest != base_digest:
        return "rows were pruned since it was made"
    if row is None:
        return f"row {place.position}, after which it was made, is not in the journal"
    fault = chain_fault(row, row.previous_hash)
    if fault is not None:
        return f"row {place.position}: {fault[0]}"
    if row.hash != place.head:
        return f"row {place.position} is not the row after which it was made"
    return None


# --- the form ------------------------------------------------------------------------------------


def pieces(snapshot: Snapshot) -> Iterator[bytes]:
    """The bytes of a snapshot, in short pieces; ``snapshot_of`` needs all of them, in order."""
    for name, part in _parts(snapshot):
        for field in attrs.fields(type(part)):
            value = getattr(part, field.name)
            label = f"{name}.{field.name}".encode()
            for chunk in _chunks(value):
                yield label + b"\n" + msgspec.msgpack.encode(chunk)


def snapshot_of(encoded: Iterable[bytes]) -> Snapshot:
    """
    The snapshot of these pieces.

    Raises:
        ValueError: they are not those of a snapshot.
    """
    found: dict[str, Any] = {}
    for piece in encoded:
        label, _, payload = piece.partition(b"\n")
        form = _FORMS.get(label)
        if form is None:
            raise ValueError(f"it has a part {label[:40]!r}, which is not known")
        name = label.decode()
        try:
            value = form.decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{name} cannot be decoded: {error}") from error
        if form.is_map:
            found.setdefault(name, {}).update(value)
        else:
            found[name] = value
    missing = [label.decode() for label in _FORMS if label.decode() not in found]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    made: dict[str, Any] = {
        name: kind(
            **{
                field.name: _FORMS[f"{name}.{field.name}".encode()].made(
                    found[f"{name}.{field.name}"]
                )
                for field in attrs.fields(kind)
            }
        )
        for name, kind in _KINDS.items()
    }
    rest: _Rest = made.pop("rest")
    return Snapshot(**made, **attrs.asdict(rest, recurse=False))


@attrs.frozen(kw_only=True)
class _Rest:
    """The parts of a snapshot that are short."""

    boots: frozenset[str]
    shared: bool | None
    pruned: tuple[int, ev.JournalPruned] | None
    forgotten: dict[str, tuple[str, ...]]


@attrs.frozen
class _Form:
    """
    The form of one field.

    Attributes:
        is_map: whether it is encoded in pieces of its entries.
        made: makes the field's value of what was decoded.
    """

    decoder: msgspec.msgpack.Decoder[Any]
    is_map: bool
    made: Callable[[Any], Any]


_KINDS: Mapping[str, type[attrs.AttrsInstance]] = {
    "place": Place,
    "state": State,
    "turns": TurnsContents,
    "agents": AgentsContents,
    "summaries": SummariesContents,
    "rest": _Rest,
}


def _form(kind: Any) -> _Form:
    origin = get_origin(kind)
    if origin not in (Map, dict):
        return _Form(msgspec.msgpack.Decoder(kind), is_map=False, made=lambda value: value)
    key, content = get_args(kind)
    decoder = msgspec.msgpack.Decoder(dict[key, content])  # type: ignore[valid-type]
    return _Form(decoder, is_map=True, made=origin)


_FORMS: Mapping[bytes, _Form] = {
    f"{name}.{field}".encode(): _form(kind)
    for name, part in _KINDS.items()
    for field, kind in get_type_hints(part).items()
}


def _parts(snapshot: Snapshot) -> Iterator[tuple[str, attrs.AttrsInstance]]:
    yield "place", snapshot.place
    yield "state", snapshot.state
    yield "turns", snapshot.turns
    yield "agents", snapshot.agents
    yield "summaries", snapshot.summaries
    yield (
        "rest",
        _Rest(
            boots=snapshot.boots,
            shared=snapshot.shared,
            pruned=snapshot.pruned,
            forgotten=snapshot.forgotten,
        ),
    )


def _chunks(value: Any) -> Iterator[Any]:
    """What is encoded of a field, a piece after the other."""
    if not isinstance(value, Map | dict):
        yield value
        return
    entries = iter(value.items())
    yield dict(islice(entries, PIECE_ENTRIES))  # also of a map that is empty
    while chunk := dict(islice(entries, PIECE_ENTRIES)):
        yield chunk
