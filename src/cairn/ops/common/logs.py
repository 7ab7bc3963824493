"""The structured log: JSON lines in the data directory, rotated; for people on a terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import logging.handlers
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import structlog

from cairn.ops.common.output import printable

_ROTATE_BYTES = 16 * 1024 * 1024
_ROTATED_FILES = 5
_SHARED: list[structlog.typing.Processor] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
_CONFIGURATION: dict[str, Any] = {
    "processors": [*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    "logger_factory": structlog.stdlib.LoggerFactory(),
    "wrapper_class": structlog.stdlib.BoundLogger,
}


def _harmless(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """A line in which nothing steers a terminal: clients choose names, and they end up here."""

    def shown(key: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if key == "exception":  # its lines stay lines
            return "\n".join(map(printable, value.splitlines()))
        return printable(value)

    return {key: shown(key, value) for key, value in event.items()}


def _plain_stack(sink: TextIO, error: structlog.typing.ExcInfo) -> None:
    """
    An error's stack without what variables hold: secrets, and what clients said. It steers nothing
    either.
    """
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    sink.write("\n".join(map(printable, text.getvalue().splitlines())))


class _LogFile(logging.handlers.RotatingFileHandler):
    """
    A log file that its owner alone can read, and whose lines may be lost: on a full disk the server
    goes on, and says so once.
    """

    _reported = False

    def _open(self) -> io.TextIOWrapper:
        """
        Open the file, and make it where there is none, as when it was put away for the next one.
        """
        os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT, 0o600))
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the library's name
        """
        Tell of the first line that could not be written; of what is no matter of the disk, always.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            print(f"The log {self.baseFilename} cannot be written: {error}", file=sys.stderr)


def set_up_logs(path: Path) -> None:
    """
    Send all logs to ``path`` and to stderr.

    Raises:
        OSError: the file cannot be written.
    """
    structlog.configure(**_CONFIGURATION, cache_logger_on_first_use=True)
    file = _file(path)
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _harmless,
                structlog.dev.ConsoleRenderer(
                    colors=sys.stderr.isatty(),
                    exception_formatter=_plain_stack,
                ),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [file, shown]
    root.setLevel(logging.INFO)
    _silence_libraries()


@contextlib.contextmanager
def logs_in(path: Path) -> Iterator[None]:
    """
    Send all logs to ``path``, and nowhere else, while the context lasts: for a private server.
    """
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers, root.level
    file = _file(path)
    # Loggers are not kept: they would go on in this way when the context has ended.
    structlog.configure(**_CONFIGURATION, cache_logger_on_first_use=False)
    root.handlers = [file]
    root.setLevel(logging.INFO)
    _silence_libraries()
    try:
        yield
    finally:
        structlog.configure(**before)
        root.handlers = handlers
        root.setLevel(level)
        file.close()


def _silence_libraries() -> None:
    """Drop what these report below warnings: it is not about the server."""
    for name in ("httpx", "huggingface_hub", "alembic", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _file(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = _LogFile(path, maxBytes=_ROTATE_BYTES, backupCount=_ROTATED_FILES, encoding="utf-8")
    file.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    return file
