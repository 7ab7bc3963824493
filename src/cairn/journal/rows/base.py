"""
The base: what replaces rows that were pruned. It has the position and hash of the last of them, and
the fold of them all.

A journal without its first rows can be read from its base as if they were there: the chain
continues from its head, the fold from its state. The last ``journal_pruned`` names the base that
belongs to a journal, by its digest, so changing a base is as easy to detect as changing a row.

Rules of this module:

1. The contents of a base have a version. Any field that ``State`` or what is in it gains, loses or
   reads differently raises it, and ``UPCASTS`` gets the step from the version before: the pruned
   rows are gone, so nothing else could say what the contents meant.
2. A base is read as a whole or not at all: no field is ignored, and none is filled in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, get_args

import attrs
import msgspec
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.errors import UnknownEvent
from cairn.journal.keys import ID_BYTES
from cairn.journal.retention import NeededIds
from cairn.journal.rows.histories import NO_HISTORIES, Histories
from cairn.journal.state import Block, Fault, State, StoredTurn

VERSION = 1
"""The version of what ``Base.state`` holds."""

Contents = dict[str, Any]


UPCASTS: Mapping[int, Callable[[Contents], Contents]] = {}
"""Maps a version to the function that converts its contents to version + 1."""


@attrs.frozen(kw_only=True)
class Base:
    """
    What is left of the rows up to ``position``.

    Attributes:
        head: the hash of the row at ``position``.
        state: the fold up to there, encoded, and the model that was loaded then; None in an export
            without private contents.
        state_digest: SHA-256 of ``state``.
    """

    position: int
    head: str
    state: bytes | None
    state_digest: str

    @property
    def digest(self) -> str:
        """
        Identifies the base. Covers the digest of the state, so that the state can be left out of an
        export.
        """
        digest = hashlib.sha256(b"cairn base 1")
        for field in (str(self.position), self.head, self.state_digest):
            encoded = field.encode()
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
        return digest.hexdigest()

    @cached_property
    def snapshot(self) -> _Snapshot:
        """
        What ``state`` holds, decoded once.

        Raises:
            ValueError: it is missing, or was changed after it was made.
            UnknownEvent: a newer Cairn made it.
        """
        kept = _decoded(_checked(self))
        if kept.state.position != self.position:
            raise ValueError(f"the state is that of row {kept.state.position}")
        return kept


@attrs.frozen(kw_only=True)
class _Snapshot:
    """The contents of ``Base.state``."""

    version: int
    state: State
    loaded: ev.ModelLoaded | None
    histories: Histories


def _checked(base: Base) -> bytes:
    """
    What ``Base.state`` holds.

    Raises:
        ValueError: it is missing, or was changed after it was made.
    """
    if base.state is None:
        raise ValueError("the state was left out")
    found = hashlib.sha256(base.state).hexdigest()
    if found != base.state_digest:
        raise ValueError(f"the state was changed: its digest is {found}")
    return base.state


def base_of(
    state: State,
    head: str,
    loaded: ev.ModelLoaded | None = None,
    histories: Histories = NO_HISTORIES,
) -> Base:
    """
    The base for all rows up to where ``state`` is.

    Args:
        head: the hash of the last of them.
        loaded: the last model that they load: it may still serve the sessions after the cut, and
            running those again requires its location.
        histories: what it keeps of agents.
    """
    loaded = loaded if state.model is not None else None
    encoded = _encoded(_Snapshot(version=VERSION, state=state, loaded=loaded, histories=histories))
    return Base(
        position=state.position,
        head=head,
        state=encoded,
        state_digest=hashlib.sha256(encoded).hexdigest(),
    )


def state_of(base: Base) -> State:
    """
    The fold that a base holds.

    Raises:
        ValueError: it is missing, or was changed after it was made.
        UnknownEvent: a newer Cairn made it.
    """
    return base.snapshot.state


def loaded_of(base: Base) -> ev.ModelLoaded | None:
    """
    The model that was loaded at the last row of a base.

    Raises:
        ValueError, UnknownEvent: as for ``state_of``.
    """
    return base.snapshot.loaded


def histories_of(base: Base | None) -> Histories:
    """
    What a base has of the agents of the rows that it replaces; nothing without a base, or of one
    that was changed, which is a violation.

    Raises:
        UnknownEvent: a newer Cairn made it.
    """
    if base is None:
        return NO_HISTORIES
    try:
        return base.snapshot.histories
    except ValueError:
        return NO_HISTORIES


def base_fault(
    base: Base | None, pruned: ev.JournalPruned | None, *, decoded: bool = True
) -> tuple[str, str, str] | None:
    """
    How base and journal do not match (INV-8): (fact, expected, actual), or None.

    Args:
        pruned: the last event of its kind in the journal.
        decoded: whether the state of the base is decoded too; else only its digest is checked.
    """
    if base is None and pruned is None:
        return None
    if base is None:
        assert pruned is not None
        return "the base that the journal stood on is gone", pruned.base_digest, "none"
    if pruned is None:
        return "no row says that the journal was pruned", "journal_pruned", base.digest
    if base.digest != pruned.base_digest:
        return "the base was changed", pruned.base_digest, base.digest
    if base.state is not None:
        try:
            _checked(base)
            if decoded:
                state_of(base)
                histories_of(base).check(base.position)
        except ValueError as error:
            return "the base was changed", base.state_digest, str(error)
    return None


def forgotten(state: State, kept: NeededIds) -> State:
    """A state without the texts and token ids that no later row needs: what a base holds."""
    sessions = state.sessions
    for name, session in state.sessions.items():
        last, request = session.last, session.request
        if last is not None and name not in kept.sessions:
            last = attrs.evolve(last, prompt_ids=(), answer_ids=())
        if request is not None:
            # A cut leaves none open. If one were, its texts would be no less private.
            request = attrs.evolve(
                request,
                texts=(),
                ask=attrs.evolve(request.ask, new_ids=(), grammar=None, words=None),
                prompt_ids=(),
                sampled=(),
                path=_without_texts(request.path),
            )
        # Nor is there a prewarm at a cut; a part of one would reveal what the answer was. A session
        # with a slab takes no request after a cut, so the ids of its rows are not needed.
        forgot = attrs.evolve(session, last=last, request=request, prewarm=None, slab_ids=())
        sessions = sessions.set(name, forgot)
    return pruned_at(attrs.evolve(state, sessions=sessions), state.position, kept)


def _without_texts(path: ev.PathSelected | None) -> ev.PathSelected | None:
    return attrs.evolve(path, diverged_text=None, diverged_from=None) if path else None


def pruned_at(state: State, cut: int, kept: NeededIds) -> State:
    """
    The state at a cut or at a later row, without what a base at the cut does not have beside its
    sessions: faults, stored turns, and the token ids of blocks that no later row names.
    """
    turns = forgotten_turns(state.turns, cut)
    return attrs.evolve(
        state,
        faults=forgotten_faults(state.faults, cut),
        blocks=forgotten_ids(state.blocks, kept.blocks),
        turns=turns,
        turns_pruned=state.turns_pruned or len(turns) < len(state.turns),
    )


def forgotten_turns(turns: Map[str, StoredTurn], position: int) -> Map[str, StoredTurn]:
    """The stored turns after ``position``. The others are looked up no more."""
    for request, turn in turns.items():
        if turn.row <= position:
            turns = turns.delete(request)
    return turns


def forgotten_ids(blocks: Map[str, Block], kept: Mapping[str, int]) -> Map[str, Block]:
    """The blocks with no more than these token ids of each; the others match whole only."""
    for key, block in blocks.items():
        ids = block.ids[: ID_BYTES * kept.get(key, 0)]
        if ids != block.ids:
            blocks = blocks.set(key, attrs.evolve(block, ids=ids))
    return blocks


def with_ids(state: State) -> set[str]:
    """The sessions of which a state has token ids."""
    found = set()
    for name, session in state.sessions.items():
        last, request = session.last, session.request
        open_ids = request is not None and (request.sequence or request.ask.new_ids)
        held_ids = session.prewarm is not None or bool(session.slab_ids)
        if open_ids or held_ids or (last is not None and last.sequence):
            found.add(str(name))
    return found


def forgotten_faults(faults: Map[str, Fault], position: int) -> Map[str, Fault]:
    """The recorded violations; those up to ``position`` without their private contents."""
    for bug_id, fault in faults.items():
        if fault.position <= position:
            event = attrs.evolve(fault.event, expected="", actual="", trace="")
            faults = faults.set(bug_id, attrs.evolve(fault, event=event))
    return faults


# --- encoding ------------------------------------------------------------------------------------


def _encoded(value: _Snapshot | Contents) -> bytes:
    """Encode as JSON; the same value gives the same bytes in every process."""
    # Fields of classes too: msgspec sorts those of a class with slots alone without that.
    return msgspec.json.encode(value, enc_hook=_plain, order="sorted")


def _decoded(encoded: bytes) -> _Snapshot:
    """Decode the contents and bring them up to the current version."""
    try:
        contents = msgspec.json.decode(encoded, type=Contents)
        version = msgspec.convert(contents["version"], int)
        if version > VERSION:
            raise UnknownEvent(
                f"the base of the pruned rows is of version {version}, which this Cairn does not "
                f"know ({VERSION} is its last); use the version that pruned the journal, or a "
                "newer one"
            )
        for older in range(version, VERSION):
            contents = UPCASTS[older](contents)
        kept = msgspec.convert(contents, _Snapshot, dec_hook=_mapped)
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError) as error:
        raise ValueError(f"the state cannot be decoded: {error}") from error
    if _encoded(kept) != _encoded(contents):
        raise ValueError("the state cannot be decoded: it has other fields than are known")
    return kept


def _plain(value: Any) -> Any:
    assert isinstance(value, Map), f"a state has no {type(value).__name__}"
    return dict(value.items())


def _mapped(kind: Any, value: Any) -> Any:
    """Convert JSON to a ``Map``; msgspec decodes everything else itself."""
    key, content = get_args(kind)
    return Map(msgspec.convert(value, dict[key, content], dec_hook=_mapped))  # type: ignore[valid-type]
