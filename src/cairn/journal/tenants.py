"""
Tenants: which sessions and blocks an API key may use.

A tenant is a name that the operator gave to an API key. Tenants never share anything:

1. Blocks and parts of conversations are named by a MAC under the tenant's own secret, which
   includes the tenant's name (``keys``). So two tenants never arrive at the same name, neither in
   the prefix cache, nor in its files, nor where a session is looked up by its content.
2. The id of a session contains its tenant. A client may choose any name for a session; it becomes
   an id within its own tenant, so no client can refer to a session of another tenant.

``LOCAL`` is the tenant of a server without keys. Its secret and its ids are those that servers used
before there were tenants, so that nothing computed or named then is lost.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from cairn.journal.keys import framed

LOCAL: Final = "local"

NAME_MAX: Final = 32

KEY_MIN: Final = 16
"""The least characters of an API key."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MARK = "@"
_END = "/"


def is_tenant(name: str) -> bool:
    """Whether a tenant may have this name: no character in it has a meaning in a session id."""
    return len(name) <= NAME_MAX and _NAME.fullmatch(name) is not None


def tenant_secret(root: bytes, tenant: str) -> bytes:
    """
    The secret of a tenant. It is derived from the secret of the data directory and the tenant's
    name, so it stays the same after a restart or a change of the tenant's API key.

    Args:
        root: the secret of the data directory.
    """
    if tenant == LOCAL:
        return root
    return hmac.new(root, framed((b"cairn tenant", tenant.encode())), hashlib.sha256).digest()


def session_id(tenant: str, name: str) -> str:
    """
    The id of the session that a tenant calls ``name``. Each pair of tenant and name has its own.

    For ``LOCAL`` it is the name itself. A name that begins with the prefix of an id gets the prefix
    of its tenant, too.
    """
    if tenant == LOCAL and not name.startswith(_MARK):
        return name
    return f"{_MARK}{tenant}{_END}{name}"


def session_tenant(session: str) -> str:
    """The tenant of a session, from its id."""
    if not session.startswith(_MARK):
        return LOCAL
    return session.removeprefix(_MARK).partition(_END)[0]


AGENT_SESSIONS: Final = "agent/"
"""The prefix of the names of agents' sessions. No client may give another session such a name."""


def agent_session(tenant: str, agent: str) -> str:
    """The id of the session of an agent."""
    return session_id(tenant, f"{AGENT_SESSIONS}{agent}")


def session_name(session: str) -> str:
    """The name of a session within its tenant, from its id."""
    if not session.startswith(_MARK):
        return session
    return session.partition(_END)[2]


def agent_of(session: str) -> str | None:
    """The name of the agent that a session is of, from its id; None if it is not an agent's."""
    name = session_name(session)
    return name.removeprefix(AGENT_SESSIONS) if name.startswith(AGENT_SESSIONS) else None
