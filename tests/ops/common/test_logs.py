"""The log on a terminal shows nothing that it must not."""

import contextlib
import logging
import logging.handlers
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from cairn.ops.common.logs import set_up_logs

SECRET = "thirty-two bytes that nobody sees"


@contextlib.contextmanager
def logger(folder: Path) -> Iterator[structlog.stdlib.BoundLogger]:
    """A logger of a running server. No fixture, because it writes to the test's own stderr."""
    before, root = structlog.get_config(), logging.getLogger()
    others, level = root.handlers, root.level
    set_up_logs(folder / "logs" / "cairn.jsonl")
    ours = root.handlers
    root.handlers = others  # pytest's, which removes its own
    for handler in ours:
        root.addHandler(handler)
    yield structlog.get_logger("cairn.test")
    for handler in ours:
        root.removeHandler(handler)
        handler.close()
    structlog.configure(**before)
    root.setLevel(level)


def test_no_line_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Text from a client is escaped, and moves no cursor."""
    named = "\x1b[2J\x1b]0;owned\x07\x9b31m"
    with logger(tmp_path) as log:
        log.warning("parameter ignored", parameter=named, session="dreißig")
    shown = capsys.readouterr().err
    assert "parameter=\\x1b[2J" in shown
    assert "dreißig" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_a_stack_shows_no_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The stack of an error shows where it was raised, but not the values of its variables."""

    def fails(secret: str) -> None:
        raise RuntimeError("it failed\x1b[2J\x1b]0;owned\x07")

    with logger(tmp_path) as log:
        try:
            fails(SECRET)
        except RuntimeError:
            log.exception("session ended", session="s")
    shown = capsys.readouterr().err
    assert "RuntimeError: it failed" in shown
    assert not {"\x1b", "\x07"} & set(shown)
    assert "in fails" in shown
    assert SECRET not in shown


def test_a_formatted_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """An error given as text keeps its lines, and its control characters are escaped too."""
    with logger(tmp_path) as log:
        log.warning("nothing is reused", exception="Traceback:\n  here\nValueError: \x1b[2J\x07")
    shown = capsys.readouterr().err
    assert ["Traceback:", "  here", "ValueError: \\x1b[2J\\x07"] == shown.splitlines()[1:]


def test_a_log_is_its_owners_alone(tmp_path: Path):
    """So are the folder and the rotated files, whatever the umask."""
    before = os.umask(0o022)
    try:
        with logger(tmp_path) as log:
            log.warning("one")
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.handlers.RotatingFileHandler):
                    handler.doRollover()
            log.warning("two")
    finally:
        os.umask(before)
    folder = tmp_path / "logs"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {"cairn.jsonl": 0o600, "cairn.jsonl.1": 0o600} == modes
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)
    assert '"two"' in (folder / "cairn.jsonl").read_text()
