"""
Whether another program could write to the journal beside the server, which SQLite below 3.51.3 does
not bear.

Those versions can damage a database in write-ahead mode when two connections write or checkpoint:
one resets the log while the other still counts on it. Cairn opens one connection that writes; all
others are read-only, which never checkpoint; a lock beside the journal keeps a second server, `ops
migrate` and `ops journal prune` out. So an old version matters only where the lock says nothing:

1. where other users may write the journal or its folder, since their programs need not ask for it;
2. where the file lies on a file system of the network, since another machine may not see the lock
   (nor the memory that SQLite's connections share: with any version, that is no place for it).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

WAL_FIXED = (3, 51, 3)
"""The first version of SQLite that bears two writers."""

_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
    "davfs",
    "fuse.rclone",
    "fuse.s3fs",
    "fuse.sshfs",
    "vboxsf",
)
_MOUNTS = Path("/proc/self/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")


def warning(path: Path, version: tuple[int, ...]) -> tuple[str, str] | None:
    """
    What to say of SQLite's version for a journal at ``path``, and what to do; None where it does
    not matter.
    """
    if version >= WAL_FIXED:
        return None
    why = second_writer(path)
    if why is None:
        return None
    text = ".".join(map(str, version))
    return (
        f"SQLite {text} can damage a journal that two programs write to, and {why}",
        "put it into a folder of your own on a local disk, or use a Python with SQLite 3.51.3",
    )


def second_writer(path: Path) -> str | None:
    """Why another program could write to a file that we hold, or None where none should."""
    real = Path(os.path.realpath(path))
    for place in (real, real.parent):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue  # not there yet: the server makes it, for its user alone
        # In a folder like /tmp others cannot touch what is not theirs.
        shared = mode & (stat.S_IWGRP | stat.S_IWOTH)
        if shared and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            return f"other users may write to {place}"
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None  # not Linux
    kind = file_system(real, mounts)
    if kind.startswith(_NETWORK):
        return f"{real} lies on a file system of the network ({kind})"
    return None


def file_system(path: Path, mounts: Iterable[str]) -> str:
    """The kind of the file system on which a path lies, by the lines of Linux's table of mounts."""
    best, kind = -1, ""
    for line in mounts:
        fields = line.split()
        if len(fields) < 3:
            continue
        place = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[1]))
        depth = len(place.parts)
        if path.is_relative_to(place) and depth >= best:  # the later mount hides the earlier one
            best, kind = depth, fields[2]
    return kind
