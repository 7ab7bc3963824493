"""The output of commands: tables, lists of facts, and progress bars."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeVar

import attrs
import click

from cairn.ops.cli import Unreadable

Item = TypeVar("Item")

_NO_TERMINAL = "There is no terminal to ask at, so nothing was changed. Add --yes to do it."
_STEP_ROWS = 1000
_GAP = 2
_PROSE = 20  # the least width of a column of sentences
# A session's id may begin with its tenant (``cairn.journal.tenants``).
_UUID = re.compile(r"((?:@[\w.-]+/)?[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@attrs.frozen
class Shown:
    """A value of a table with a short form for terminals. As text it is the full one."""

    full: str
    short: str

    def __str__(self) -> str:
        """The full form."""
        return self.full


def confirm(question: str) -> None:
    """
    Ask before something that cannot be undone, on stderr.

    Raises:
        click.Abort: the answer was no, or Ctrl-C.
        Unreadable: there is no terminal to ask at, and stdin has no answer.
    """
    if sys.stdin is None:  # closed
        raise Unreadable(_NO_TERMINAL)
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort as abort:
        if sys.stdin.isatty() or not isinstance(abort.__context__, EOFError):
            raise
        click.echo(err=True)
        raise Unreadable(_NO_TERMINAL) from abort


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """The items, with a progress bar on stderr if that is a terminal."""
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


def start_words(step: str, done: int, total: int) -> str:
    """What a server does that starts, and how much of that it has done, if that is known."""
    share = f", {100 * done // total} %" if 0 < done <= total else ""
    return f"{printable(step)}{share}"


def printable(text: str) -> str:
    """Escape control characters, which would steer a terminal: clients choose names."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    hidden: Sequence[str] = (),
    spare: Sequence[str] = (),
    wrapped: str | None = None,
) -> None:
    """
    Print a table: aligned on a terminal, with tabs between the columns elsewhere.

    On a terminal, values are short (eight characters of an id) and each row is one line. If the
    columns do not fit, spare ones are left out, in the given order, and a line names them.

    Args:
        hidden: columns that a terminal never shows.
        spare: columns that a narrow terminal may leave out.
        wrapped: a column of sentences, which gets the remaining width.
    """
    if not sys.stdout.isatty():
        for cells in (columns, *rows):
            click.echo("\t".join(_cell(value, short=False) for value in cells))
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [[_cell(value, short=True) for value in row] for row in rows]
    if not texts:
        return
    console = Console(highlight=False)
    shown = dict(zip(columns, zip(*texts, strict=True), strict=True))
    shown = {name: cells for name, cells in shown.items() if name not in hidden}

    def missing(gap: int) -> int:
        widths = (
            _PROSE if name == wrapped else max(map(cell_len, (name, *cells)))
            for name, cells in shown.items()
        )
        return sum(widths) + gap * (len(shown) - 1) - console.width

    gap = _GAP if missing(_GAP) <= 0 else 1
    left_out = []
    for name in (name for name in spare if name in shown):
        if missing(gap) <= 0:
            break
        del shown[name]
        left_out.append(name)
    drawn = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    for name, cells in shown.items():
        number = any(cells) and all(cell.isdigit() or not cell for cell in cells)
        side: Literal["left", "right"] = "right" if number else "left"
        if name == wrapped:
            drawn.add_column(name, overflow="fold", ratio=1)
        else:
            drawn.add_column(name, justify=side, overflow="ellipsis", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        drawn.add_row(*map(Text, cells))
    console.print(drawn)
    if left_out:
        click.echo(f"(a wider terminal also shows: {', '.join(left_out)})")


def _cell(value: object, *, short: bool) -> str:
    if value is None:
        return ""
    text = printable(value.short if short and isinstance(value, Shown) else str(value))
    return abbreviated(text) if short else text


def abbreviated(text: str) -> str:
    """The first eight digits of a UUID, with its tenant; any other text unchanged."""
    named = _UUID.fullmatch(text)
    return named[1] if named else text


def facts(pairs: Iterable[tuple[str, object]], indent: int = 0) -> None:
    """Print a line for each name and value, aligned. Values of None are left out."""
    known = [(name, str(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in known), default=0) + 2
    for name, value in known:
        first, *rest = value.splitlines() or [""]
        click.echo(f"{' ' * indent}{f'{name}:':<{width}} {first}")
        for line in rest:
            click.echo(f"{' ' * (indent + width + 1)}{line}")


def counted(count: int, one: str, more: str | None = None) -> str:
    """
    A count with its noun, such as ``1 row``.

    Args:
        one: the singular.
        more: the plural; None: the singular with an s.
    """
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def size_text(size: float) -> str:
    """A number of bytes with a unit, such as ``1.5 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
