"""The structured log: rotated JSON lines in the data directory, and plain text on stderr."""

from __future__ import annotations

import contextlib
import io
import logging
import logging.handlers
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

import structlog

from cairn.ops.common.log_lines import WORDS, text_line
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


LogFormat = Literal["text", "json"]

_JSON = structlog.processors.JSONRenderer()


def _harmless(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape control characters: clients choose names, and log lines contain them."""

    def shown(key: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if key == "exception":  # keep its line breaks
            return "\n".join(map(printable, value.splitlines()))
        return printable(value)

    return {key: shown(key, value) for key, value in event.items()}


def _without_words(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Leave texts of clients out."""
    event.pop(WORDS, None)
    return event


def _as_text(logger: object, method: str, event: structlog.typing.EventDict) -> str:
    """One line for people; a terminal alone is shown texts of clients."""
    return text_line(event, words=sys.stderr.isatty())


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at the time, so that lines come above a progress bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Stderr, or what takes its place while a bar is shown."""
        return sys.stderr


class _LogFile(logging.handlers.RotatingFileHandler):
    """
    A log file that its owner alone can read. On a full disk the server continues without log lines,
    and reports that once.
    """

    _reported = False

    def _open(self) -> io.TextIOWrapper:
        """Open the file. Creates it if it does not exist, which it does not after a rotation."""
        os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT, 0o600))
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the library's name
        """Report the first line that the disk did not take, and every other error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            print(f"The log {self.baseFilename} cannot be written: {error}", file=sys.stderr)


def set_up_logs(path: Path, form: LogFormat = "text") -> None:
    """
    Send all logs to ``path``, as lines of JSON, and to stderr.

    Args:
        form: of the lines on stderr: for people, or JSON.

    Raises:
        OSError: the file cannot be written.
    """
    structlog.configure(**_CONFIGURATION, cache_logger_on_first_use=True)
    file = _file(path)
    stack = structlog.processors.format_exc_info
    if form == "json":
        shown = _formatted(_Stderr(), _without_words, stack, _JSON)
    else:
        shown = _formatted(_Stderr(), stack, _harmless, _as_text)
    root = logging.getLogger()
    root.handlers = [file, shown]
    root.setLevel(logging.INFO)
    _silence_libraries()


@contextlib.contextmanager
def logs_in(path: Path) -> Iterator[None]:
    """Send all logs to ``path`` alone while the context lasts: for a private server."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers, root.level
    file = _file(path)
    # Cached loggers would keep this configuration after the context.
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
    """Drop log lines of these libraries below warnings: they are not about the server."""
    for name in ("httpx", "huggingface_hub", "alembic", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _file(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = _LogFile(path, maxBytes=_ROTATE_BYTES, backupCount=_ROTATED_FILES, encoding="utf-8")
    return _formatted(file, _without_words, structlog.processors.format_exc_info, _JSON)


def _formatted(
    handler: logging.Handler, *processors: structlog.typing.Processor
) -> logging.Handler:
    """The handler. Modified: it renders log lines with these processors."""
    first = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED, processors=[first, *processors]
        )
    )
    return handler
