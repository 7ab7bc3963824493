"""``ops migrate``: brings a journal's schema up to date."""

from __future__ import annotations

from pathlib import Path

import click

from cairn.ops.common.locations import example, journal_options, url_of


@click.command(epilog=example("ops migrate", "ops migrate --journal postgresql://cairn@db/cairn"))
@journal_options
def migrate(data_dir: Path, journal: str | None) -> None:
    """
    Create a journal, or bring its schema up to date.

    Rows are never rewritten. Stop the server first.
    """
    from cairn.journal.rows.database import schema
    from cairn.ops.serve.data_dir import hold_journal

    url = url_of(data_dir, journal)
    if schema.schema_revision(url) is None:
        before = schema.migrate(url)
    else:
        with hold_journal(url, who="migrate"):
            before = schema.migrate(url)
    after = schema.schema_revision(url)
    if before is None:
        click.echo(f"created: schema {after}")
    elif before == after:
        click.echo(f"nothing to do: schema {after}")
    else:
        click.echo(f"migrated: schema {before} to {after}")
