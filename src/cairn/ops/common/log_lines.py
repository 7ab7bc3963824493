"""Lines of the log for people. Pure: from the fields of a log entry to a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.journal.explanations import short
from cairn.ops.common.output import printable
from cairn.ops.common.stacks import own_frames

WORDS = "words"
"""The field with a text of a client: a terminal alone shows it, and no file has it."""

_WORDS_MAX = 24
_STATUS = {
    "stop": "200",
    "length": "200",
    "repetition": "200",
    "bug": "500",
    "cancelled in timed_out": "504",
    "cancelled in prefill": "left",
    "cancelled in decode": "left",
}
"""What became of a request, as the status of an answer that is sent as a whole; else 503."""

_LEVELS = {"warning": "warn", "error": "error", "critical": "error"}
_FIRST = ("timestamp", "level", "event", "logger", "exception", WORDS)


def text_line(entry: Mapping[str, Any], *, words: bool) -> str:
    """
    One line for an entry, and the lines of its stack if it has one.

    Args:
        words: whether texts of clients may be shown.
    """
    moment = str(entry.get("timestamp", ""))[11:19]
    if entry.get("event") == "request" and "prompt_tokens" in entry:
        said = entry.get(WORDS) if words else None
        return f"{moment}  {_request(entry, said)}"
    level = _LEVELS.get(str(entry.get("level")), "")
    fields = [
        f"{name}={_value(value)}"
        for name, value in entry.items()
        if name not in _FIRST and value is not None
    ]
    head = [moment, level, printable(str(entry.get("event", "")))]
    line = "  ".join(part for part in (*head, " ".join(fields)) if part)
    stack = entry.get("exception")
    return line if stack is None else f"{line}\n{own_frames(stack)}"


def _request(entry: Mapping[str, Any], words: str | None) -> str:
    prompt, reused = entry["prompt_tokens"], entry["reused_tokens"]
    share = f" ({100 * reused // prompt} %)" if reused and prompt else ""
    said = None
    if words is not None:
        cut = words if len(words) <= _WORDS_MAX else f"{words[: _WORDS_MAX - 3]}..."
        said = f'"{printable(cut)}"'
    ended = str(entry["ended"])
    first, rate = entry.get("first_token_ms"), entry.get("tokens_a_second")
    session = printable(short(str(entry["session"])))
    path = f"continued {session}"
    if entry.get("path") != "continuation":
        path = f"new {session}" + (f" ({entry['reason']})" if entry.get("reason") else "")
    parts = (
        _STATUS.get(ended, "503"),
        said,
        f"{prompt} tok, {reused} reused{share}",
        f"first {first} ms" if first is not None else None,
        f"{entry['generated_tokens']} tok out",
        f"{rate} tok/s" if rate is not None else None,
        path,
        ended if ended not in ("stop", "length") else None,
        f"bug {entry['bug_id']}" if entry.get("bug_id") else None,
    )
    return "  ".join(part for part in parts if part is not None)


def _value(value: Any) -> str:
    text = printable(str(value))
    return repr(text) if " " in text else text
