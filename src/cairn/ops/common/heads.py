"""
What a data directory knows of its journals from outside of them: the head record, the checkpoints,
and the public half of the key that signs these.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from cairn.actors.threads.heads import record_of
from cairn.journal.errors import StoreError
from cairn.journal.rows.heads import Head
from cairn.journal.rows.signed_notes import Note, PublicKey, read_notes
from cairn.ops.common.locations import url_of

_TAG_DIGITS = 8


@attrs.frozen
class HeadFiles:
    """
    The files of one journal.

    Attributes:
        tag: tells the journals of a data directory apart; empty for the one in it.
    """

    data_dir: Path
    tag: str

    @classmethod
    def of(cls, data_dir: Path, journal: str | None) -> HeadFiles:
        """The files of the journal that the options of a command name."""
        from cairn.journal.rows.database.urls import place_of, sqlite_path

        url = url_of(data_dir, journal)
        if not url.startswith("sqlite"):
            # The names of existing files have the driver.
            place = place_of(url).replace("postgresql://", "postgresql+psycopg://", 1)
            return cls(data_dir, _tag(place))
        path = Path(os.path.realpath(sqlite_path(url)))
        own = Path(os.path.realpath(data_dir / "journal.db"))
        return cls(data_dir, "" if path == own else _tag(str(path)))

    @property
    def record(self) -> Path:
        """The head record."""
        return self._named("head")

    @property
    def checkpoints(self) -> Path:
        """The signed notes, one after the other."""
        return self._named("checkpoints")

    @property
    def key(self) -> Path:
        """The private half of the key, which signs for all journals of the data directory."""
        return self.data_dir / "signing-key"

    @property
    def public(self) -> Path:
        """The public half."""
        return self.data_dir / "signing-key.pub"

    @property
    def keys(self) -> Path:
        """The keys of the journal's private fields."""
        return self._named("keys.db")

    def _named(self, name: str) -> Path:
        return self.data_dir / (f"{name}-{self.tag}" if self.tag else name)

    def recorded_head(self) -> Head | None:
        """
        What the head record says; None if there is none.

        Raises:
            StoreError: it cannot be read, or is damaged.
        """
        text = _text_of(self.record)
        if not text:
            return None
        try:
            return record_of(text)
        except ValueError as error:
            raise StoreError(
                f"The head record {self.record} is damaged, so nothing says up to which row the "
                "journal was written."
            ) from error

    def notes(self) -> list[Note]:
        """
        The checkpoints in the order in which they were signed.

        Raises:
            StoreError: they cannot be read.
        """
        return notes_of(self.checkpoints) if self.checkpoints.exists() else []

    def public_key(self) -> PublicKey | None:
        """
        The public half of the key; None before the first start.

        Raises:
            StoreError: it cannot be read.
        """
        text = _text_of(self.public)
        if text is None:
            return None
        try:
            return PublicKey.parse(text)
        except ValueError as error:
            raise StoreError(f"{self.public} is damaged: {error}.") from error


def is_elsewhere(data_dir: Path) -> bool:
    """Whether a data directory has heads of a journal, and no journal: its server named another."""
    return not (data_dir / "journal.db").exists() and any(data_dir.glob("head-*"))


def notes_of(path: Path) -> list[Note]:
    """
    The notes of a file.

    Raises:
        StoreError: it cannot be read, or what is there is not a signed note.
    """
    text = _text_of(path)
    if text is None:
        raise StoreError(f"{path} does not exist.")
    try:
        return list(read_notes(text))
    except ValueError as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error


def last_note(notes: Sequence[Note], position: int) -> Note | None:
    """The last note of a row up to a position; None if there is none."""
    for note in reversed(notes):
        try:
            if note.head.position <= position:
                return note
        except ValueError:
            continue
    return None


def _text_of(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise StoreError(f"{path} is damaged: it is not a text.") from error


def _tag(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()[:_TAG_DIGITS]
