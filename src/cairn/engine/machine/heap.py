"""
Memory that was freed goes back to the system.

The C library of Linux keeps what is freed for what is allocated next. On a CPU blocks are cut from
a slab into the same heap, so what a slab leaves are holes between them, which nothing fills while a
server is idle. And each thread has a heap of its own, of whose free end up to 64 MiB are never
given back; what a slab's arrays are freed on is not the thread that made them.
"""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8


def use_one_heap() -> None:
    """
    Have all threads of this process allocate from one heap. Before they begin; nothing happens
    where the C library is not glibc.
    """
    if (library := _glibc()) is not None:
        library.mallopt(_M_ARENA_MAX, 1)


def give_back_free_memory() -> None:
    """
    Have the C library give whole pages that are free back to the system, wherever they lie in its
    heaps. Takes some milliseconds for a large slab; nothing happens where it is not glibc.
    """
    if (library := _glibc()) is not None:
        library.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None  # musl has none
