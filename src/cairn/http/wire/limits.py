"""
Limits on the size of a request, in every protocol. They are checked before any work is done, so
that one request cannot delay the others while its prompt is rendered.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Final

from cairn.http.wire.errors import BODY_BYTES_MAX as BODY_BYTES_MAX
from cairn.http.wire.errors import ClientError

MESSAGES_MAX: Final = 10_000
TOOLS_MAX: Final = 1024
CALLS_MAX: Final = 1024


def check_count(items: Sized, where: str, most: int) -> None:
    """
    Refuse a list that is too long.

    Args:
        where: the path of the parameter in the body.

    Raises:
        ClientError: there are more than ``most``.
    """
    if len(items) > most:
        raise ClientError(f"{where} has {len(items)} entries; send at most {most}", param=where)
