"""``ops logs``: the server's log."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.ops.common.locations import data_dir_option, example, log_path


@click.command(epilog=example("ops logs", "ops logs -f", "less $(ops logs --path)"))
@data_dir_option
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last N. [default: 10]")
@click.option(
    "--since", metavar="T", help="Only since a time (ISO 8601) or an age: 90s, 10m, 2h, 1d."
)
@click.option("--path", "only_path", is_flag=True, help="Print where the log is, and leave.")
@click.pass_context
def logs(
    context: click.Context,
    data_dir: Path,
    follow: bool,
    lines: int | None,
    since: str | None,
    only_path: bool,
) -> None:
    """
    Show the log of the server.

    The server writes it into its data directory, whatever shows its output. `ops tail` is the same
    with more filters, and also shows the events of the journal.
    """
    if only_path:
        click.echo(log_path(data_dir).absolute())
        return
    from cairn.ops.journal.tail import tail

    context.invoke(tail, data_dir=data_dir, follow=follow, lines=lines, since=since)
