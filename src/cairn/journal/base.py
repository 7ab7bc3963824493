"""
What stands in the place of rows that were pruned: where they ended, the hash of the last of them,
and the fold of them all.

A journal without its first rows can be read on from its base as if they were there: the chain goes
on from its head, the fold from its state. Which base belongs to a journal, the last
``journal_pruned`` says, by its digest; so a base is as hard to change unseen as a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any, TypeVar, get_args

import attrs
import msgspec
from immutables import Map

from cairn.journal import events as ev
from cairn.journal.state import Fault, State

_Decoded = TypeVar("_Decoded")


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
        What names the base. It goes over the digest of the state, so that the state can be left out
        of an export.
        """
        digest = hashlib.sha256(b"cairn base 1")
        for field in (str(self.position), self.head, self.state_digest):
            encoded = field.encode()
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
        return digest.hexdigest()


@attrs.frozen(kw_only=True)
class _Kept:
    """
    The contents of ``Base.state``.
    """

    state: State
    loaded: ev.ModelLoaded | None


def base_of(state: State, head: str, loaded: ev.ModelLoaded | None = None) -> Base:
    """
    The base that stands for all rows up to where ``state`` is.

    Args:
        head: the hash of the last of them.
        loaded: the last model that they tell of: sessions above may be served by it still, and
            whoever runs them again has to know where it lies.
    """
    encoded = _encoded(_Kept(state=state, loaded=loaded if state.model is not None else None))
    return Base(
        position=state.position,
        head=head,
        state=encoded,
        state_digest=hashlib.sha256(encoded).hexdigest(),
    )


def state_of(base: Base) -> State:
    """
    The fold that a base stands for.

    Raises:
        ValueError: it is not there, or is not what it was when it was made.
    """
    return _kept(base).state


def loaded_of(base: Base) -> ev.ModelLoaded | None:
    """
    The model that was loaded when the rows of a base ended.

    Raises:
        ValueError: as for ``state_of``.
    """
    return _kept(base).loaded


def _kept(base: Base) -> _Kept:
    if base.state is None:
        raise ValueError("the state was left out")
    found = hashlib.sha256(base.state).hexdigest()
    if found != base.state_digest:
        raise ValueError(f"the state was changed: its digest is {found}")
    kept = _decoded(base.state, _Kept)
    if kept.state.position != base.position:
        raise ValueError(f"the state is that of row {kept.state.position}")
    return kept


def base_fault(base: Base | None, pruned: ev.JournalPruned | None) -> tuple[str, str, str] | None:
    """
    How base and journal fail to belong together (INV-8): (fact, expected, actual), or None.

    Args:
        pruned: the last event of its kind in the journal.
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
            state_of(base)
        except ValueError as error:
            return "the base was changed", base.state_digest, str(error)
    return None


def forgotten(state: State, kept: Collection[str] = ()) -> State:
    """
    A state less the texts and token ids that no later decision asks for: what a base keeps.

    Args:
        kept: the sessions whose token ids a later decision did compare with.
    """
    sessions = state.sessions
    for name, session in state.sessions.items():
        if session.last is not None and name not in kept:
            last = attrs.evolve(session.last, prompt_ids=(), answer_ids=())
            sessions = sessions.set(name, attrs.evolve(session, last=last))
    return attrs.evolve(
        state, sessions=sessions, faults=forgotten_faults(state.faults, state.position)
    )


def forgotten_faults(faults: Map[str, Fault], position: int) -> Map[str, Fault]:
    """
    The violations on record, those up to ``position`` without their private contents.
    """
    for bug_id, fault in faults.items():
        if fault.position <= position:
            event = attrs.evolve(fault.event, expected="", actual="", trace="")
            faults = faults.set(bug_id, attrs.evolve(fault, event=event))
    return faults


# --- a state as bytes ----------------------------------------------------------------------------


def encode_state(state: State) -> bytes:
    """
    A state as JSON; the same state gives the same bytes in every process.
    """
    return _encoded(state)


def decode_state(encoded: bytes) -> State:
    """
    The state of these bytes.

    Raises:
        ValueError: they are none.
    """
    return _decoded(encoded, State)


def _encoded(value: State | _Kept) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain, order="deterministic")


def _decoded(encoded: bytes, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(encoded, type=kind, dec_hook=_mapped)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ValueError(f"the state cannot be decoded: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Map):
        return dict(value.items())
    raise NotImplementedError(f"{type(value).__name__} is no part of a state")


def _mapped(kind: Any, value: Any) -> Any:
    """
    A ``Map`` of what JSON has; all else msgspec knows by itself.
    """
    key, content = get_args(kind)
    return Map(msgspec.convert(value, dict[key, content], dec_hook=_mapped))  # type: ignore[valid-type]
