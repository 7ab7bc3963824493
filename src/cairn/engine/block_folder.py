"""
Finds the block files in a folder by their names, and which run wrote each. Reads no KV.

A file is at ``<fingerprint>/<first two of the key>/<key>.safetensors``. While it is written its
name is ``<key>.<run>.unfinished``, and ``<key>.safetensors.rejected`` after it was set aside.

Rules of this module:

1. Only a regular file with such a name, at the place that belongs to it, can be Cairn's. No link is
followed below the folder, and no other directory is entered.
2. Nothing here removes or renames a file. It reports who wrote a file; the caller decides.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs

from cairn.engine.json_text import parsed

ENDING = ".safetensors"
UNFINISHED = ".unfinished"
ASIDE = ".rejected"

_FINGERPRINT = re.compile(r"[0-9a-f]+")
_NAMES = re.compile(
    r"(?P<key>[0-9a-f]+)(?:\.safetensors(?P<aside>\.rejected)?|\.(?P<run>[0-9a-z-]+)\.unfinished)"
)
_HEAD_MOST = 1024 * 1024
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a path that should be a regular file but may be a link or a pipe."""


@attrs.frozen(kw_only=True)
class Named:
    """
    A file whose name has the form of Cairn's.

    Attributes:
        run: the run that was writing it; None for a complete file.
    """

    path: Path
    kind: Literal["block", "draft", "aside"]
    fingerprint: str
    key: str
    run: str | None = None


def place_of(folder: Path, fingerprint: str, key: str) -> Path:
    """The path of a block's file."""
    return folder / fingerprint / key[:2] / f"{key}{ENDING}"


def files_in(folder: Path) -> tuple[list[Named], list[Path]]:
    """
    The files in the folder: those with names of Cairn's form, and the others. A directory that is
    not Cairn's, or cannot be read, counts as one file. Hidden files are ignored.
    """
    ours: list[Named] = []
    others: list[Path] = []
    for above in _entries(folder, others):
        if not (_FINGERPRINT.fullmatch(above.name) and above.is_dir(follow_symlinks=False)):
            others.append(Path(above.path))
            continue
        for shelf in _entries(Path(above.path), others):
            if len(shelf.name) != 2 or not shelf.is_dir(follow_symlinks=False):
                others.append(Path(shelf.path))
                continue
            for entry in _entries(Path(shelf.path), others):
                path = Path(entry.path)
                found = named(path)
                if found is None or not is_file(path):
                    others.append(path)
                else:
                    ours.append(found)
    return ours, others


def named(path: Path) -> Named | None:
    """What a path says; None if it has not the form of Cairn's. Does not look at the file."""
    fingerprint, shelf = path.parts[-3:-1]
    name = _NAMES.fullmatch(path.name)
    if name is None or not name["key"].startswith(shelf) or not _FINGERPRINT.fullmatch(fingerprint):
        return None
    kind: Literal["block", "draft", "aside"] = "block"
    if name["run"] is not None:
        kind = "draft"
    elif name["aside"] is not None:
        kind = "aside"
    return Named(path=path, kind=kind, fingerprint=fingerprint, key=name["key"], run=name["run"])


def is_file(path: Path) -> bool:
    """Whether a path is a regular file, and not a link. False if it cannot be examined."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def run_of(path: Path, fingerprint: str, key: str) -> str | None:
    """
    The run that wrote a block's file, by its metadata; None if they do not name this block.
    """
    return run_in(_metadata(path), fingerprint, key)


def run_in(metadata: dict[str, Any], fingerprint: str, key: str) -> str | None:
    """The run that wrote a block's file of this metadata; None if they do not name this block."""
    run = metadata.get("run")
    if (metadata.get("key"), metadata.get("fingerprint")) != (key, fingerprint):
        return None
    return run if isinstance(run, str) else None


def _entries(folder: Path, others: list[Path]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except OSError:
        others.append(folder)
        return
    yield from (entry for entry in entries if not entry.name.startswith("."))


def metadata_of(begin: bytes) -> dict[str, Any]:
    """The metadata of a safetensors file, from its first bytes; empty if they have none."""
    size = int.from_bytes(begin[:8], "little")
    try:
        head = parsed(begin[8 : 8 + size])
    except ValueError:
        return {}
    metadata = head.get("__metadata__") if isinstance(head, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _metadata(path: Path) -> dict[str, Any]:
    """The metadata of a safetensors file; empty if it cannot be read."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | NO_LINK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {}
            begin = file.read(8)
            size = int.from_bytes(begin, "little")
            return metadata_of(begin + file.read(size)) if size <= _HEAD_MOST else {}
    except OSError:
        return {}
