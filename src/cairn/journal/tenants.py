"""
Tenants: who may use which sessions and blocks.

A tenant is a name that the operator gave to an API key. What is a tenant's own can be had by no
other:

1. Blocks and parts of conversations get their names by a MAC under the tenant's own secret, with
   the tenant's name in it (``keys``). So no name that two tenants could both arrive at is in the
   index of blocks, in their files, or where a session is looked for by content.
2. The id of a session says whose it is. A client calls its sessions as it likes; what it says
   becomes an id within its own tenant, and of another's no client can speak.

``LOCAL`` is who uses a server without keys. Its secret and its ids are what they were before there
were tenants, so that nothing that was computed or named then is lost.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from cairn.journal.keys import framed

LOCAL: Final = "local"

NAME_MAX: Final = 32

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MARK = "@"
_END = "/"


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called so: no sign in it means anything in an id of a session."""
    return len(name) <= NAME_MAX and _NAME.fullmatch(name) is not None


def tenant_secret(root: bytes, tenant: str) -> bytes:
    """
    The secret of a tenant, which follows from the data directory's and the tenant's name: the same
    after a restart, and whatever the tenant's API key is by then.

    Args:
        root: the secret of the data directory.
    """
    if tenant == LOCAL:
        return root
    return hmac.new(root, framed((b"cairn tenant", tenant.encode())), hashlib.sha256).digest()


def session_id(tenant: str, name: str) -> str:
    """
    The id of the session that a tenant calls ``name``. No two of tenant and name have the same.

    For ``LOCAL`` it is the name itself. What begins with the mark of an id is marked for it, too.
    """
    if tenant == LOCAL and not name.startswith(_MARK):
        return name
    return f"{_MARK}{tenant}{_END}{name}"


def session_name(session: str) -> str:
    """What its own tenant calls a session, from its id."""
    if not session.startswith(_MARK):
        return session
    return session.partition(_END)[2]
