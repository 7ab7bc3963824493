"""Stacks show Cairn's own frames."""

from __future__ import annotations

import json
import traceback

from cairn.ops.common.stacks import own_frames

STACK = """\
Traceback (most recent call last):
  File "/home/cairn/.venv/lib/python3.11/site-packages/trio/_core/_run.py", line 10, in task_step
    msg = task.context.run(next_send_fn, next_send)
          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/contextlib.py", line 9, in inner
    return func()
  File "/home/cairn/src/cairn/actors/boot.py", line 3, in serve
    go()
  File "/x/lib/python3.11/site-packages/cairn/engine/a.py", line 4, in go
    read()
  File "/x/lib/python3.11/site-packages/mlx/core.py", line 5, in read
    one()
  File "/x/lib/python3.11/site-packages/mlx/core.py", line 6, in one
    two()
ValueError: [2, 3]
no frame
"""


def test_frames_of_others():
    """They are counted in one line; the one that raised the error stays."""
    assert [
        "Traceback (most recent call last):",
        "  ... 2 frames of trio, Python",
        '  File "/home/cairn/src/cairn/actors/boot.py", line 3, in serve',
        "    go()",
        '  File "/x/lib/python3.11/site-packages/cairn/engine/a.py", line 4, in go',
        "    read()",
        "  ... 1 frame of mlx",
        '  File "/x/lib/python3.11/site-packages/mlx/core.py", line 6, in one',
        "    two()",
        "ValueError: [2, 3]",
        "no frame",
    ] == own_frames(STACK).splitlines()


def _refuse(text: str) -> int:
    raise ValueError(f"no {text}")


def test_a_group_of_errors():
    """The bars of a group stay, and so do all its messages."""
    errors = []
    for text in ("1", "2"):
        try:
            json.loads(text, parse_int=_refuse)
        except ValueError as error:
            errors.append(error)
    whole = "".join(traceback.format_exception(ExceptionGroup("both", errors)))
    found = own_frames(whole)
    assert 2 == whole.count("ValueError: no ") == found.count("ValueError: no ")
    assert 2 == found.count("    |   ... ")
    assert 2 == found.count("in _refuse")
    assert len(found.splitlines()) < len(whole.splitlines())


def test_what_is_no_stack():
    """It stays as it is."""
    assert "a\n  b" == own_frames("a\n  b\n")
    assert "" == own_frames("")
