"""Freed memory leaves the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="only of glibc is known what it keeps",
)

_HELPERS = """
import ctypes, threading

from cairn.engine.machine.heap import give_back_free_memory, use_one_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def filled(size):
    piece = libc.malloc(size)
    ctypes.memset(piece, 1, size)
    return piece

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
"""

_HOLES = """
pieces = [filled(100_000) for _ in range(2000)]
for place, piece in enumerate(pieces):
    if place % 100 != 99:  # what stays lies between, and at the end
        libc.free(piece)
before = resident()
give_back_free_memory()
print(before, resident())
"""

_THREAD = """
def work():
    libc.free(filled(30_000_000))  # from here on glibc thinks that large pieces come and go
    pieces = [filled(100_000) for _ in range(400)]
    for piece in pieces:
        libc.free(piece)

thread = threading.Thread(target=work)
thread.start()
thread.join()
before = resident()
give_back_free_memory()
print(before, resident())
"""


def given_back(script: str) -> int:
    """How much freed memory a separate process returns, in kB."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _HELPERS + script], capture_output=True, text=True, check=True
    )
    before, after = (int(figure) for figure in done.stdout.split())
    return before - after


def test_holes_between_what_stays_are_given_back() -> None:
    """
    Of 200 MB, 2 MB stay allocated, spread over all of it. The rest is resident until returned.
    """
    assert 150_000 < given_back(_HOLES) < 200_000


def test_what_a_thread_freed_is_given_back() -> None:
    """
    With one heap for all threads. The control: with a heap of its own a thread keeps its free end.
    """
    assert given_back("use_one_heap()\n" + _THREAD) > 35_000
    assert given_back(_THREAD) < 20_000
