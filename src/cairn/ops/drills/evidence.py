"""Evidence that a stopped private server left: its log, and the output of `ops` on its journal."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

from cairn.ops.common.locations import log_path


def command(*arguments: object) -> str:
    """A command of `ops`, quoted for a shell."""
    return shlex.join(("ops", *map(str, arguments)))


def run_ops(*arguments: object) -> tuple[int, str]:
    """Run a command of `ops` in this process. Returns its exit code and its output."""
    from cairn.ops.cli import ops

    printed = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(printed):
        try:
            ops.main(list(map(str, arguments)), prog_name="ops", standalone_mode=False)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return code, printed.getvalue()


def logged(directory: Path, event: str, *, level: str = "error", **fields: Any) -> bool:
    """Whether the log of a private server has a line with these fields."""
    path = log_path(directory)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    expected = {"level": level, "event": event, **fields}
    return any(expected.items() <= line.items() for line in lines)
