"""
Whether another program could write to the journal beside the server. SQLite before 3.51.3 does not
tolerate that.

Those versions can damage a database in write-ahead mode if two connections write or checkpoint: one
resets the log while the other still relies on it. Cairn opens one connection that writes; all
others are read-only and never checkpoint, and a lock beside the journal keeps out a second server,
`ops migrate` and `ops journal prune`. So an old version matters only where the lock has no effect:

1. if other users may write to the journal or its directory, because their programs may ignore it;
2. if the file is on a network file system, because another machine may not see the lock (nor the
   memory that SQLite's connections share, so no version of SQLite supports that).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

WAL_FIXED = (3, 51, 3)
"""The first version of SQLite that tolerates two writers."""

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
MOUNTS = Path("/proc/self/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")


def warning(path: Path, version: tuple[int, ...]) -> tuple[str, str] | None:
    """
    A warning about SQLite's version for a journal at ``path``, and what to do; None if the version
    does not matter.
    """
    if version >= WAL_FIXED:
        return None
    why = second_writer(path)
    if why is None:
        return None
    text = ".".join(map(str, version))
    return (
        f"SQLite {text} can damage a journal that two programs write to, and {why}",
        "move it to a directory of your own on a local disk, or use a Python with SQLite 3.51.3",
    )


def second_writer(path: Path) -> str | None:
    """Why another program could write to a locked file; None if none should."""
    real = Path(os.path.realpath(path))
    for place in (real, real.parent):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue  # does not exist yet: the server creates it for its user alone
        # In a directory like /tmp, users cannot change files of others.
        shared = mode & (stat.S_IWGRP | stat.S_IWOTH)
        if shared and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            return f"other users may write to {place}"
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None  # not Linux
    kind = file_system(real, mounts)
    if kind.startswith(_NETWORK):
        return f"{real} is on a network file system ({kind})"
    return None


def file_system(path: Path, mounts: Iterable[str]) -> str:
    """The kind of a path's file system, by the lines of Linux's table of mounts."""
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
