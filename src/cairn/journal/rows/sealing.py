"""
Sealed private payloads: encrypted under a key of the session that they are of, so that removing the
key makes them unreadable in every copy of the journal.

A sealed payload is the byte 1, the id of its key, and AES-256-GCM of the JSON text. The nonce
follows from the row's id, which no other row has; kind and position of the row are authenticated
with it, so that a payload cannot be opened in another row. The digest of a row covers the sealed
bytes, so the chain holds with and without keys, and no text can be guessed from a digest. A payload
that begins with ``{`` is plain.

Rules of this module:

1. It makes no key and reads no file: keys come from outside.
2. A row that cannot be opened is not an error here. ``codec.decode`` gives its event with
   placeholders, and says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs
import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cairn.journal import events as ev
from cairn.journal.tenants import agent_session

KEY_BYTES = 32
SERVER = ""
"""
The subject of private fields that are of no session. It is never forgotten. No session has this id.
"""

_SEALED = b"\x01"
_ID_BYTES = 8
_NONCE_BYTES = 12
_ID_DOMAIN = b"cairn journal key 1"


@attrs.frozen(eq=False)
class Key:
    """
    The key of a subject.

    Attributes:
        id: names it in the rows that it seals; says nothing about it.
        secret: ``KEY_BYTES`` random bytes.
    """

    secret: bytes = attrs.field(repr=False)
    id: str = attrs.field(init=False)
    _named: bytes = attrs.field(init=False, repr=False)
    _cipher: AESGCM = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        named = hashlib.sha256(_ID_DOMAIN + self.secret).digest()[:_ID_BYTES]
        object.__setattr__(self, "id", named.hex())
        object.__setattr__(self, "_named", _SEALED + named)
        object.__setattr__(self, "_cipher", AESGCM(self.secret))

    def seal(self, event_id: str, kind: str, position: int, plain: bytes) -> bytes:
        """The sealed bytes of the private payload of this row."""
        return self._named + self._cipher.encrypt(_nonce(event_id), plain, _about(kind, position))

    def open(self, event_id: str, kind: str, position: int, sealed: bytes) -> bytes | None:
        """The payload of a row that this key sealed; None if it is another row's, or changed."""
        about = _about(kind, position)
        try:
            return self._cipher.decrypt(_nonce(event_id), sealed[1 + _ID_BYTES :], about)
        except InvalidTag:
            return None


KeyOf = Callable[[str], Key]
"""Gives the key of a subject, and makes it if it has none."""


class Keys(Protocol):
    """The keys with which rows can be opened."""

    def get(self, key_id: str) -> Key | None:
        """The key of an id; None if it was removed, or never was here."""


Within = Callable[[Callable[[Any], None]], None]
"""Calls a function with a connection to the journal's database, in a transaction of its writer."""


class KeyRing(Keys, Protocol):
    """The keys of a journal that is written."""

    def commit(self, within: Within) -> None:
        """Store the new keys, before the rows that they seal. Raises as ``Store.append``."""


def subject_of(event: ev.Event) -> str:
    """Whose the private fields of an event are: a session, by its id, or the server."""
    if isinstance(event, ev.AgentCreated | ev.SessionAdopted | ev.TurnAdopted):
        return agent_session(event.tenant, event.agent)
    session: str | None = getattr(event, "of_session", None) or getattr(event, "session", None)
    return session or SERVER


def key_id(stored: bytes | None) -> str | None:
    """The id of the key that a stored payload needs; None if it is plain, or none."""
    if stored is None or stored[:1] != _SEALED:
        return None
    return stored[1 : 1 + _ID_BYTES].hex()


def keys_to_text(keys: Iterable[Key]) -> bytes:
    """Keys as JSON, to hand over beside an export."""
    handed = {key.id: key.secret.hex() for key in keys}
    return msgspec.json.encode({"keys": handed}, order="deterministic") + b"\n"


def keys_from_text(text: bytes) -> dict[str, Key]:
    """
    The keys that were handed over, by their ids.

    Raises:
        ValueError: it is not such a text.
    """
    read = msgspec.json.decode(text, type=dict[str, dict[str, str]])
    keys = [Key(bytes.fromhex(secret)) for secret in read.get("keys", {}).values()]
    return {key.id: key for key in keys}


def _about(kind: str, position: int) -> bytes:
    return f"{kind} {position}".encode()


def _nonce(event_id: str) -> bytes:
    return hashlib.sha256(event_id.encode()).digest()[:_NONCE_BYTES]
