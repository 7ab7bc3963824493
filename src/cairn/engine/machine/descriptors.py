"""How many descriptors this process may open, as its operator has granted them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KIND = resource.RLIMIT_NOFILE


def descriptors_max() -> int:
    """How many descriptors this process may have open at the same time."""
    soft, _ = resource.getrlimit(_KIND)
    return soft if soft != resource.RLIM_INFINITY else 2**31


@contextmanager
def descriptor_limits_held() -> Iterator[None]:
    """
    Do not let the imports in the context lower the limits of descriptors.

    ``mlx_lm`` sets both to fixed numbers when it is imported: it lowers what the operator granted,
    and fails where the hard limit is below its number. Within the hard limit the soft one may be
    raised, which macOS needs: its default is 256.
    """
    set_limits = resource.setrlimit

    def set_within(kind: int, limits: tuple[int, int], /) -> Any:
        if kind != _KIND:
            return set_limits(kind, limits)
        soft, hard = resource.getrlimit(kind)
        wanted = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
        if soft != resource.RLIM_INFINITY and wanted > soft:
            set_limits(kind, (wanted, hard))
        return None

    resource.setrlimit = set_within
    try:
        yield
    finally:
        resource.setrlimit = set_limits
