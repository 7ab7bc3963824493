"""
The error for an unknown address. The usual cause is the client's base URL: some clients expect /v1
in it, others add it themselves.
"""

from __future__ import annotations

from typing import Final

from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.routing import Map

from cairn.http.wire.checks import ClientError

_VERSION: Final = "/v1"
_SHOWN = 200


def meant_by(path: str, routes: Map) -> str | None:
    """
    The address that a client probably meant: the unknown one with exactly one /v1. None if that is
    unknown as well.
    """
    meant = path
    while meant.startswith(f"{_VERSION}{_VERSION}/"):
        meant = meant.removeprefix(_VERSION)
    if not meant.startswith(f"{_VERSION}/"):
        meant = f"{_VERSION}{meant}"
    return meant if meant != path and _is_there(meant, routes) else None


def nothing_at(path: str, meant: str | None) -> ClientError:
    """
    The error for an unknown address.

    Args:
        meant: as ``meant_by`` returns it.
    """
    # As a literal, because it may have control characters in it.
    words = f"nothing found at {path[:_SHOWN]!r}"
    if meant is None:
        words += "; GET / lists the addresses"
    else:
        fault = "has one /v1 too many" if len(meant) < len(path) else "lacks /v1"
        words += f": the client's base URL {fault}; the address is {meant[:_SHOWN]!r}"
    return ClientError(words, code="not_found", status=404)


def _is_there(path: str, routes: Map) -> bool:
    """Whether an address is known, for any method."""
    try:
        routes.bind("localhost").match(path)
    except MethodNotAllowed:
        return True
    except HTTPException:
        return False
    return True
