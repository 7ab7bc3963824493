"""The progress of ``ops serve`` on stderr."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ShownProgress:
    """Progress bars on a terminal; elsewhere one line for each step."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._bars = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._tasks: dict[str, TaskID] = {}
        self._ended = False

    def __enter__(self) -> ShownProgress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        # The engine's thread may still load a model that is no longer needed; that is not shown.
        self._ended = True
        self.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._ended:
            return
        self._bars.start()  # again, for what takes time when the server stops
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
            if self._bars.disable:
                click.echo(f"{what} ...", err=True)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def close(self) -> None:
        """Remove the bars. May be called again."""
        self._bars.stop()
