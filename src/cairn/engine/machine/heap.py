"""
Returns freed memory to the operating system.

The C library on Linux keeps freed memory for later allocations. On a CPU, blocks are allocated in
the same heap as the slab that they are copied from, so a released slab leaves holes between them
that an idle server does not fill. In addition each thread has its own heap, which keeps up to
64 MiB at its end forever, and a slab's arrays are freed on a different thread than they were
allocated on.
"""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8


def use_one_heap() -> None:
    """
    Make all threads of this process allocate from one heap. Call it before they start; does nothing
    unless the C library is glibc.
    """
    if (library := _glibc()) is not None:
        library.mallopt(_M_ARENA_MAX, 1)


def give_back_free_memory() -> None:
    """
    Return all free pages of the C library's heaps to the system. Takes a few milliseconds for a
    large slab; does nothing unless the C library is glibc.
    """
    if (library := _glibc()) is not None:
        library.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None  # musl has no malloc_trim
