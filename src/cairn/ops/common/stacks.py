"""
Stacks for people: Cairn's own frames, and a line in place of those of others. Pure.

Only what is shown is shortened. The journal and the log file have the whole stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

import attrs

_FRAME = re.compile(r'(?P<before>[ |]*)File "(?P<path>[^"]*)", line \d+')
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/([^/]+)")
_STANDARD = re.compile(r".*/lib(?:64)?/python3(?:\.\d+)?/")


@attrs.define
class _Frame:
    """
    A frame of a stack, or a line that is none.

    Attributes:
        of: whose frame it is; empty for Cairn's, and for a line that is none.
        before: what the line begins with: blanks, and bars in a group of errors.
    """

    of: str
    before: str
    lines: list[str]


def own_frames(stack: str) -> str:
    """
    A stack with the frames of other packages folded. The last frame before the error stays, because
    it was raised there.
    """
    return "\n".join(_lines(list(_frames(stack.splitlines()))))


def _frames(lines: list[str]) -> Iterator[_Frame]:
    frame: _Frame | None = None
    for line in lines:
        if found := _FRAME.match(line):
            if frame is not None:
                yield frame
            frame = _Frame(_owner(found["path"]), found["before"], [line])
        elif frame is not None and line.startswith(f"{frame.before}  "):
            frame.lines.append(line)  # the source, or marks below it
        else:
            if frame is not None:
                yield frame
            frame = None
            yield _Frame("", "", [line])
    if frame is not None:
        yield frame


def _owner(path: str) -> str:
    """The package of a file; empty for Cairn's own."""
    if installed := _INSTALLED.match(path):
        package = installed[1].removesuffix(".py")
        return "" if package.partition("_")[0] == "cairn" else package
    if _STANDARD.match(path) or path.startswith("<"):
        return "Python"
    return ""


def _lines(frames: list[_Frame]) -> Iterator[str]:
    place = 0
    for is_other, run in groupby(frames, key=lambda frame: bool(frame.of)):
        group = list(run)
        place += len(group)
        if not is_other:
            for frame in group:
                yield from frame.lines
            continue
        goes_on = place < len(frames) and _FRAME.match(frames[place].lines[0]) is not None
        last = [] if goes_on else [group.pop()]
        if group:
            owners = ", ".join(dict.fromkeys(frame.of for frame in group))
            count = f"{len(group)} frame{'s' if len(group) > 1 else ''}"
            yield f"{group[0].before}... {count} of {owners}"
        for frame in last:
            yield from frame.lines
