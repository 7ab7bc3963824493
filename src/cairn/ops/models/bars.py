"""The progress of a download on stderr."""

from __future__ import annotations

import sys
from typing import Any

import click

from cairn.ops.models.fitting import gigabytes

_LINE_EACH = 10
_LASTS = " ..."


class DownloadBars:
    """
    A bar with size, speed and the time that is left on a terminal; elsewhere a line for each tenth.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._what, self._total, self._tenth = "", 0, -1

    def __enter__(self) -> DownloadBars:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str, done: int, total: int) -> None:
        """See ``pull.Shows``."""
        self._what, self._total, self._tenth = what, total, -1
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, completed=done, total=total)
        self.reach(done)

    def reach(self, done: int) -> None:
        """See ``pull.Shows``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            return
        tenth = _LINE_EACH * done // self._total if self._total else _LINE_EACH
        if tenth > self._tenth:
            self._tenth = tenth
            sizes = f"{gigabytes(done)} of {gigabytes(self._total)}"
            click.echo(f"{self._what} {self._name}: {sizes}{_LASTS}", err=True)
