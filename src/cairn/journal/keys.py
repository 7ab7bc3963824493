"""
Names that follow from content: parts of a conversation, sealed blocks, token ids.

Every name that depends on a client's text is a MAC under the tenant's secret, so that a reader of
the journal cannot confirm a guess about the text. Each field is hashed with its length, so no two
lists of fields give the same bytes.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder(order="deterministic")


def framed(fields: Iterable[bytes]) -> bytes:
    """Fields as one text of bytes, each with its length."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


IdBytes = bytes
"""Token ids as ``ids_bytes`` gives them."""
ID_BYTES = 4
"""The size of each."""


def ids_bytes(ids: Sequence[int]) -> IdBytes:
    """Token ids as little-endian 32-bit integers."""
    packed = array("i", ids)
    if packed.itemsize != ID_BYTES:  # pragma: no cover - no platform of ours
        raise RuntimeError("array('i') is not 32 bits wide here")
    return packed.tobytes()


def ids_of(packed: IdBytes) -> tuple[int, ...]:
    """The token ids that ``ids_bytes`` packed."""
    return tuple(array("i", packed))


def ids_hash(ids: Sequence[int]) -> str:
    """A short name of a run of token ids, for comparing what ran with what should have run."""
    return hashlib.sha256(ids_bytes(ids)).hexdigest()[:32]


def fingerprint_of(fields: Mapping[str, Any]) -> str:
    """The hash that names the fields of a fingerprint, however they are ordered."""
    return hashlib.sha256(_encoder.encode(fields)).hexdigest()[:16]


def tested_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a fingerprint without ``row_class``, which the self-test finds."""
    return {name: field for name, field in fields.items() if name != "row_class"}


def block_keys(
    *,
    secret: bytes,
    fingerprint: str,
    tenant: str,
    ids: Sequence[int],
    block_tokens: int,
    known: Sequence[str] = (),
) -> tuple[str, ...]:
    """
    The keys of all full blocks of a sequence. Each key covers all tokens before it.

    Args:
        secret: the tenant's secret.
        ids: the token ids from position 0 on.
        block_tokens: C.
        known: keys of the first blocks of these tokens, which are then not computed again. They
            depend on the secret; if the first one is different now, none is used.
    """
    head = _head(fingerprint, tenant)

    def key_at(start: int, parent: str) -> str:
        return _key(secret, head, parent, ids[start : start + block_tokens])

    keys = list(known) if known and known[0] == key_at(0, "") else []
    for start in range(len(keys) * block_tokens, len(ids) - block_tokens + 1, block_tokens):
        keys.append(key_at(start, keys[-1] if keys else ""))
    return tuple(keys)


def short_block_key(
    *, secret: bytes, fingerprint: str, tenant: str, parent: str | None, ids: Sequence[int]
) -> str:
    """
    The key of a block of fewer than C tokens, after the last full block of a sequence. Arguments as
    for ``block_keys``.

    Args:
        parent: the key of that block; None if there is none.
        ids: the token ids of the short block.
    """
    return _key(secret, _head(fingerprint, tenant), parent or "", ids)


def _head(fingerprint: str, tenant: str) -> bytes:
    return framed((b"cairn block", fingerprint.encode(), tenant.encode()))


def _key(secret: bytes, head: bytes, parent: str, ids: Sequence[int]) -> str:
    fields = head + framed((parent.encode(), ids_bytes(ids)))
    return hmac.new(secret, fields, hashlib.sha256).hexdigest()


def part_hash(*, secret: bytes, tenant: str, parent: str, label: str, content: bytes) -> str:
    """
    The name of one part of a conversation, which covers all parts before it.

    Args:
        label: ``tools``, ``system``, ``user``, ``assistant``, ``tool``, ...
        content: the part in its canonical form.
    """
    fields = (b"cairn part", tenant.encode(), parent.encode(), label.encode(), content)
    return hmac.new(secret, framed(fields), hashlib.sha256).hexdigest()[:32]


def part_alone(*, secret: bytes, tenant: str, label: str, content: bytes) -> str:
    """The name of one part by itself, wherever it is. Arguments as for ``part_hash``."""
    fields = (b"cairn part alone", tenant.encode(), label.encode(), content)
    return hmac.new(secret, framed(fields), hashlib.sha256).hexdigest()[:32]
