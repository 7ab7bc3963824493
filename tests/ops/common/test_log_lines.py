"""A log that reads: one line a request on a terminal, and texts of clients nowhere else."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cairn.ops.common.log_lines import text_line

REQUEST: dict[str, Any] = {
    "event": "request",
    "timestamp": "2026-11-23T06:58:51.070764Z",
    "level": "info",
    "request": "2fb516f0-b716-4200-955b-b248b4883671",
    "session": "@alice/246af73a-52b1-4c5e-9c1f-3d1c2a4b5e6f",
    "path": "continuation",
    "reason": None,
    "prompt_tokens": 168,
    "reused_tokens": 128,
    "generated_tokens": 30,
    "first_token_ms": 40,
    "tokens_a_second": 62.0,
    "ended": "stop",
    "words": "hello there, how are you today",
}


def test_a_request_on_a_terminal() -> None:
    """Its status, words, tokens, times and path, on one line."""
    assert (
        '06:58:51  200  "hello there, how are ..."  168 tok, 128 reused (76 %)  first 40 ms  '
        "30 tok out  62.0 tok/s  continued 246af73a"
    ) == text_line(REQUEST, words=True)
    assert "hello" not in text_line(REQUEST, words=False)
    assert '"\\x1b[2J"' in text_line({**REQUEST, "words": "\x1b[2J"}, words=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "new_session", "reason": "cold_start"}, "  new 246af73a (cold_start)"),
        ({"path": None, "reused_tokens": 0}, "168 tok, 0 reused  first"),
        ({"ended": "cancelled in prefill", "first_token_ms": None}, "51  left  "),
        ({"ended": "cancelled in timed_out"}, "51  504  "),
        ({"ended": "cancelled in no_memory"}, "51  503  "),
        ({"ended": "bug", "bug_id": "b1"}, "  bug  bug b1"),
    ],
)
def test_requests_that_ended_otherwise(fields: dict[str, Any], words: str) -> None:
    """The line says how."""
    assert words in text_line({**REQUEST, **fields}, words=False)


def test_other_lines() -> None:
    """The time of day, a level that matters, and the fields that have a value."""
    entry = {
        "event": "request rejected",
        "level": "warning",
        "logger": "cairn",
        "timestamp": "2026-11-23T06:58:51Z",
        "code": "queue full",
        "status": 429,
        "tenant": None,
    }
    line = text_line(entry, words=False)
    assert "06:58:51  warn  request rejected  code='queue full' status=429" == line
    assert "06:58:51  warn  x\nTraceback" == text_line(
        {**entry, "event": "x", "code": None, "status": None, "exception": "Traceback"}, words=False
    )
    assert "06:58:51  ready" == text_line(
        {"event": "ready", "level": "info", "timestamp": entry["timestamp"]}, words=False
    )


SCRIPT = """
import sys
from pathlib import Path
import structlog
from cairn.ops.common.logs import set_up_logs
from cairn.ops.serve.progress import ShownProgress
set_up_logs(Path(sys.argv[1]), sys.argv[2])
log = structlog.get_logger("cairn")
with ShownProgress() as progress:
    progress("reading the journal", 1, 3)
    log.warning("the last run did not stop", words="a secret of a client")
    progress("reading the journal", 2, 3)
"""


def output(folder: Path, form: str, *, terminal: bool) -> str:
    """What a start with a progress bar and a line of the log writes to stderr."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-c", SCRIPT, str(folder / "log"), form]
    process = subprocess.Popen(
        command,
        stderr=theirs if terminal else subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    shown = b""
    if terminal:
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # Linux ends so when the other side is closed
            pass
    else:
        assert process.stderr is not None
        shown = process.stderr.read()
    os.close(ours)
    assert 0 == process.wait(60)
    return shown.decode()


def test_a_bar_and_the_log_never_share_a_line(tmp_path: Path) -> None:
    """A line of the log is written above the bar."""
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output(tmp_path, "text", terminal=True))
    lines = [line for part in shown.split("\n") for line in part.split("\r")]
    (line,) = [line for line in lines if "the last run did not stop" in line]
    assert "reading" not in line
    assert any("reading the journal" in line for line in lines)


def test_json_for_services(tmp_path: Path) -> None:
    """Each line is an object, and neither it nor the file has a text of a client."""
    shown = output(tmp_path, "json", terminal=False)
    (line,) = [line for line in shown.splitlines() if line.startswith("{")]
    assert "the last run did not stop" == json.loads(line)["event"]
    stored = (tmp_path / "log").read_text()
    assert "the last run did not stop" == json.loads(stored)["event"]
    for text in (shown, stored, output(tmp_path, "text", terminal=False)):
        assert "secret" not in text
