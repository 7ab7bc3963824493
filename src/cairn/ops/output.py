"""
How commands speak: tables, and progress on whatever lasts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import click

Item = TypeVar("Item")

_STEP_ROWS = 1000


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """
    The items, with a progress bar on stderr where that is a terminal.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        for count, item in enumerate(items, start=1):
            yield item
            if count % _STEP_ROWS == 0:
                bar.update(task, completed=count)


def printable(text: str) -> str:
    """
    A text in which nothing steers a terminal: clients choose names, and they end up in tables.
    """
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """
    Print a table: drawn on a terminal, with tabs between the columns elsewhere.
    """
    texts = [["" if value is None else printable(str(value)) for value in row] for row in rows]
    if not sys.stdout.isatty():
        for cells in (columns, *texts):
            click.echo("\t".join(cells))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for column, cells in zip(columns, zip(*texts, strict=True) if texts else (), strict=False):
        number = all(cell.isdigit() or not cell for cell in cells)
        drawn.add_column(column, justify="right" if number else "left", overflow="fold")
    if texts:
        for cells in texts:
            drawn.add_row(*map(Text, cells))
        Console().print(drawn)


def facts(pairs: Iterable[tuple[str, object]], indent: int = 0) -> None:
    """
    Print names and values, one a line, the values aligned; a value of several lines is indented.
    """
    known = [(name, str(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in known), default=0) + 2
    for name, value in known:
        first, *rest = value.splitlines() or [""]
        click.echo(f"{' ' * indent}{f'{name}:':<{width}} {first}")
        for line in rest:
            click.echo(f"{' ' * (indent + width + 1)}{line}")
