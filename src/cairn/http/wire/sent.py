"""The base of what the server sends, and the object that it adds to every answer."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from cairn.journal.events import Path


class Sent(msgspec.Struct, forbid_unknown_fields=True):
    """
    Base of every JSON object that the server sends; ``/openapi.json`` is derived from its
    subclasses. A field that is ``UNSET`` is left out. All others are always sent, defaults too.
    """


class CairnObject(Sent, kw_only=True):
    """How Cairn served the request: its session, what it reused, and what it ignored."""

    request: str | UnsetType = UNSET
    session: str
    path: Path
    reason: str | None
    reused_tokens: int
    explanation: str | UnsetType = UNSET
    seed: int
    ignored: list[str] | UnsetType = UNSET
    choices: list[CairnObject] | UnsetType = UNSET
