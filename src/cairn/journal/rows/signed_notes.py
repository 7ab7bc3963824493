"""
Checkpoints of a journal: a head that a key signed, as a signed note of C2SP (c2sp.org/signed-note)
in the form of a checkpoint (c2sp.org/tlog-checkpoint). Pure: the key is given.

A note's lines are its origin, the position, base64 of the head's hash, and ``EXTENSION``. A blank
line and the signatures follow. The hash is that of a chain and not of a tree: a witness can sign
the note too, and cannot ask for a proof that a later one contains it; ``ops verify`` checks that on
the rows.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator

import attrs

from cairn.journal.rows.heads import Head

EXTENSION = "cairn chain 1"
"""Says that the hash is the head of a chain of rows, and in which form these are hashed."""

_ED25519 = b"\x01"
_DASH = "\N{EM DASH} "
_KEY_BYTES = 32
_ID_BYTES = 4


@attrs.frozen
class PublicKey:
    """
    The public half of a key that signs checkpoints.

    Attributes:
        name: the signer's, without spaces and plus signs.
        key: 32 bytes of Ed25519.
    """

    name: str
    key: bytes

    @property
    def id(self) -> bytes:
        """The first bytes of its signatures, which tell keys of one name apart."""
        named = self.name.encode() + b"\n" + _ED25519 + self.key
        return hashlib.sha256(named).digest()[:_ID_BYTES]

    def origin_of(self, journal: str) -> str:
        """
        The first line of the notes of a journal.

        Args:
            journal: as ``Signer.journal``.
        """
        return f"{self.name}/{journal}" if journal else self.name

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """
        The key of a text NAME+ID+KEY, which C2SP calls a verifier key.

        Raises:
            ValueError: it is not one.
        """
        name, _, rest = text.strip().partition("+")
        key_id, _, encoded = rest.partition("+")
        try:
            decoded = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            decoded = b""
        found = cls(name, decoded[1:])
        is_key = decoded[:1] == _ED25519 and len(found.key) == _KEY_BYTES
        if not name or not is_key or key_id != found.id.hex():
            raise ValueError(f"{text!r} is not the public half of a key: NAME+ID+KEY")
        return found

    def __str__(self) -> str:
        return f"{self.name}+{self.id.hex()}+{_base64(_ED25519 + self.key)}"


@attrs.frozen
class Signer:
    """
    Signs the checkpoints of one journal.

    Attributes:
        seed: 32 random bytes, the private half.
        journal: tells the journals apart that one key signs for; empty for the first.
    """

    seed: bytes = attrs.field(repr=False)
    journal: str = ""

    @property
    def public(self) -> PublicKey:
        """The public half, which is named after itself."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw()
        return PublicKey(f"cairn-journal/{hashlib.sha256(key).hexdigest()[:16]}", key)

    @property
    def origin(self) -> str:
        """The first line of the notes."""
        return self.public.origin_of(self.journal)

    def note(self, head: Head) -> str:
        """The checkpoint of a head. The same head gives the same note."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        text = f"{self.origin}\n{head.position}\n{_base64(bytes.fromhex(head.hash))}\n{EXTENSION}\n"
        signature = Ed25519PrivateKey.from_private_bytes(self.seed).sign(text.encode())
        public = self.public
        return f"{text}\n{_DASH}{public.name} {_base64(public.id + signature)}\n"


@attrs.frozen
class Note:
    """
    A signed note that was read and not yet verified.

    Attributes:
        line: where it begins in the text that it was read from.
        text: what the signatures cover.
        signatures: (name of the key, id of the key and signature) each.
    """

    line: int
    text: str
    signatures: tuple[tuple[str, bytes], ...]

    @property
    def whole(self) -> str:
        """The note as it was read."""
        lines = (f"{_DASH}{name} {_base64(signed)}\n" for name, signed in self.signatures)
        return f"{self.text}\n{''.join(lines)}"

    @property
    def origin(self) -> str:
        """Its first line: the journal that it is of."""
        return self.text.split("\n", 1)[0]

    @property
    def head(self) -> Head:
        """
        What it says, signed or not.

        Raises:
            ValueError: it is not the checkpoint of a journal.
        """
        lines = self.text.split("\n")
        try:
            _, position, root, extension, *rest = lines
            if extension != EXTENSION or rest != [""] or str(int(position)) != position:
                raise ValueError
            hashed = base64.b64decode(root, validate=True)
            return Head.parse(f"{position}:{hashed.hex()}")
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"the note at line {self.line} is not the checkpoint of a journal"
            ) from error

    def signed_by(self, key: PublicKey) -> bool | None:
        """Whether a key's signature fits; None if the note has none of that key."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        for name, signature in self.signatures:
            if (name, signature[:_ID_BYTES]) != (key.name, key.id):
                continue
            try:
                public = Ed25519PublicKey.from_public_bytes(key.key)
                public.verify(signature[_ID_BYTES:], self.text.encode())
            except InvalidSignature:
                return False
            return True
        return None


def read_notes(text: str) -> Iterator[Note]:
    """
    The notes of a text, one after the other, in order.

    Raises:
        ValueError: what is there is not a signed note; the message names its line.
    """
    lines, begin, place = text.split("\n"), 0, 0
    while begin < len(lines) - (lines[-1] == ""):
        try:
            place = next(n for n in range(begin, len(lines)) if lines[n].startswith(_DASH))
        except StopIteration:
            raise ValueError(f"the note at line {begin + 1} has no signature") from None
        if place - begin < 2 or lines[place - 1] != "":
            raise ValueError(f"line {place + 1} is a signature, and no note is before it")
        body, signatures = lines[begin : place - 1], []
        while place < len(lines) and lines[place].startswith(_DASH):
            signatures.append(_signature(lines[place], place + 1))
            place += 1
        yield Note(begin + 1, "".join(f"{line}\n" for line in body), tuple(signatures))
        begin = place


def _signature(line: str, number: int) -> tuple[str, bytes]:
    name, _, encoded = line.removeprefix(_DASH).partition(" ")
    try:
        signature = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        signature = b""
    if not name or len(signature) <= _ID_BYTES:
        raise ValueError(f"line {number} is not a signature")
    return name, signature


def last_of(notes: Iterable[Note], key: PublicKey, origin: str) -> Head | None:
    """
    The head that a key signed last for a journal; None if there is none. After a loss that an
    operator accepted, earlier ones may be of higher rows.
    """
    signed = signed_heads(notes, key, origin)
    return signed[-1] if signed else None


def signed_heads(notes: Iterable[Note], key: PublicKey, origin: str) -> list[Head]:
    """The heads that a key signed for a journal, in the order of the notes."""
    return [note.head for note in notes if note.origin == origin and note.signed_by(key)]


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
