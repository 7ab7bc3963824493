"""
Parses times to live (TTL) as clients and operators write them.

*How does a TTL work?* ``http/wire/parameters.py`` reads it from a request, and
``http/messages/request.py`` from Anthropic's cache hints; ``actors/requests/limits.py`` has the
default. ``actors/sessions/claim.py`` chooses one and records it. ``journal/state.py``
(``_renewed``) derives when that expires, ``journal/eviction.py`` says what has expired, and
``actors/idle/expiry.py`` removes it.
"""

from __future__ import annotations

import re
from typing import Final

MOST_S: Final = 3650 * 86_400
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_WRITTEN: Final = re.compile(r"([0-9]{1,10})([smhd]?)")


def seconds_of(written: int | str) -> int:
    """
    Seconds, from a number of them or a text such as ``5m``, ``1h`` or ``24h``.

    Raises:
        ValueError: it is not a time, or longer than ten years.
    """
    found = _WRITTEN.fullmatch(str(written))
    if found is None:
        raise ValueError(
            "must be a number of seconds, or a text such as '5m', '1h', '24h' or '7d', and at most "
            "ten years ('3650d')"
        )
    seconds = int(found[1]) * _UNITS[found[2]]
    if seconds > MOST_S:
        raise ValueError(f"must be at most ten years ({MOST_S} seconds)")
    return seconds
