"""
The server that uses a data directory: which process it is, and what it says of itself.

The lock of the data directory decides (``cairn.ops.serve.data_dir``): a server holds it as long as
it lives, and writes its process id and its address into it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import httpx
import msgspec

from cairn.ops.common.http_client import http_client
from cairn.ops.serve.data_dir import server_at

_TIMEOUT_S = 5.0
_PS_S = 10.0


@attrs.frozen
class Running:
    """
    A server that uses a data directory.

    Attributes:
        pid: its process id; None if the lock does not say.
        url: its address; None if it does not listen yet.
    """

    data_dir: Path
    pid: int | None
    url: str | None

    @property
    def words(self) -> str:
        """Which server it is, for messages."""
        where = f" at {self.url}" if self.url is not None else ""
        who = f" (process {self.pid})" if self.pid is not None else ""
        return f"the server{where}{who}"


def running(data_dir: Path) -> Running | None:
    """
    The server that uses a data directory; None if there is none. Changes nothing.

    Raises:
        Unreadable: the lock cannot be read.
    """
    holder = server_at(data_dir)
    if holder is None:
        return None
    pid = int(holder.process) if holder.process.isdigit() else None
    return Running(data_dir, pid, holder.address)


def is_the_server(server: Running) -> bool:
    """
    Whether the process with the recorded id is the one that holds the lock. It is not if the lock
    was taken in this moment and still names the process before, nor if the server runs in another
    container, which counts its processes differently.
    """
    if server.pid is None:
        return False
    files = Path(f"/proc/{server.pid}/fd")
    if files.parent.parent.joinpath("self").exists():
        return _has_open(files, server.data_dir / "lock")
    return " serve" in _command_of(server.pid)


def _has_open(files: Path, lock: Path) -> bool:
    try:
        return any(_same(file, lock) for file in files.iterdir())
    except OSError:
        return False  # it has ended, or is another user's


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False  # a socket, or closed meanwhile


def _command_of(pid: int) -> str:
    return _ps(pid, "command=")


def resident_bytes(pid: int) -> int | None:
    """The memory of a process that is in RAM, in bytes; None if that cannot be determined."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        kib = _ps(pid, "rss=")
        return 1024 * int(kib) if kib.isdigit() else None


def _ps(pid: int, column: str) -> str:
    """A column of `ps` for a process; empty if there is no such process, or no `ps`."""
    ps = shutil.which("ps")
    if ps is None:
        return ""
    command = [ps, "-o", column, "-p", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PS_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def health_of(url: str, key: str | None) -> Mapping[str, Any] | None:
    """
    What a server answers at ``/health``; None if nothing answers, or something else than Cairn.

    Args:
        key: the API key, if there is one.
    """
    try:
        with http_client(url, key=key, timeout_s=_TIMEOUT_S) as client:
            found = msgspec.json.decode(client.get("/health").content, type=dict[str, Any])
    except (httpx.HTTPError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if isinstance(found.get("status"), str) else None
