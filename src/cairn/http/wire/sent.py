"""The base of what the server sends."""

from __future__ import annotations

import msgspec


class Sent(msgspec.Struct, forbid_unknown_fields=True):
    """
    Base of every JSON object that the server sends; ``/openapi.json`` is derived from its
    subclasses. A field that is ``UNSET`` is left out. All others are always sent, defaults too.
    """
