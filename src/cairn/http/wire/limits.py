"""
How much a request may bring, whatever the protocol. What is over a limit is refused before it costs
anything: one request must not keep the others waiting for its prompt to be put together.
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
    Refuse what is too many.

    Args:
        where: the parameter, as a path into the body.

    Raises:
        ClientError: there are more than ``most``.
    """
    if len(items) > most:
        raise ClientError(f"{where} has {len(items)} entries; send at most {most}", param=where)
