"""
``ops takeover``: takes the journal of a node over from a server that cannot be stopped.

First the lease, so that the old server can commit nothing from then on, wherever it is and however
it hangs; then its connection, which has the lock; then the journal says so. If the last step is
missing, the same command finishes, with a higher token.
"""

from __future__ import annotations

import getpass
import os
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import click

from cairn.actors.clock import clock
from cairn.journal import events as ev
from cairn.journal.errors import DamagedRow, StoreError
from cairn.journal.ledger import Ledger
from cairn.journal.runs import LEASE_KINDS, lease_at_end, lost_run
from cairn.ops.common.locations import check_node, example, journal_of
from cairn.ops.common.output import confirm, counted
from cairn.ops.common.program import as_called

if TYPE_CHECKING:
    from cairn.journal.rows.store_sql import SqlStore


@click.command(epilog=example("ops takeover n1 --journal postgresql://cairn@db/cairn"))
@click.argument("node", callback=check_node)
@click.option(
    "--journal",
    metavar="URL",
    required=True,
    help="The PostgreSQL database of the fleet.",
)
@click.option("--by", metavar="NAME", help="Who does this, for the journal. Default: USER@HOST.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def takeover(node: str, journal: str, by: str | None, yes: bool) -> None:
    """
    Take NODE over from a server that hangs, or whose machine does not answer.

    From then on that server can commit nothing, and no client gets another token from it: it stops
    when it next writes. Its connection to the database is ended, and `node_taken_over` is appended
    to the journal of NODE. Then start the node elsewhere, with the fleet's `secret` and journal
    key: it checks the journal and continues from what was committed, and its agents go on.

    A server that can be stopped needs no takeover. Nothing takes a node over by itself.

    \b
    Exit code
      0  done
      1  you answered no; nothing was changed
      2  refused, or not finished; the output says which
    """
    from cairn.journal.rows.database.fleet import nodes_of, take_over
    from cairn.journal.rows.database.urls import place_of
    from cairn.journal.rows.store_sql import SqlStore

    url = journal_of(journal, node)
    assert url is not None
    nodes = nodes_of(url)
    if node not in nodes:
        known = f"the nodes are {', '.join(nodes)}" if nodes else "it has none; check --journal"
        raise click.UsageError(f"There is no node {node} in {place_of(journal)}; {known}.")
    if not yes:
        confirm(f"The server of {node}, if it runs, will stop. Take it over?")
    named = by or _this_user()
    token, ended = take_over(url, named)
    if ended:
        click.echo(f"ended {counted(len(ended), 'connection')} of the server of {node}")
    with closing(SqlStore.open(url, holder=named)) as store:
        _record(store, node, named)
    click.echo(
        as_called(
            f"{node} is taken over: lease {store.token or token}. Start it with `ops serve --node "
            f"{node}`, on any machine that has the fleet's `secret` and journal key."
        )
    )


def _record(store: SqlStore, node: str, by: str) -> None:
    """
    Append the takeover, and the end of the run that was under way. Reads only the rows on which
    these two depend, because the next start checks the whole journal, and clients wait for both.
    """
    rows = (*store.read(kinds=LEASE_KINDS), *store.last(1, stream="server"), *store.last(1))
    try:
        state = lease_at_end(store.base(), rows)
    except (DamagedRow, ValueError) as error:
        raise StoreError(
            f"The server of {node} can commit nothing any more, but its journal is damaged "
            f"({error}), so the takeover is not on record. Run `ops verify --node {node}`."
        ) from error
    assert store.token is not None
    events = [*lost_run(state), ev.NodeTakenOver(token=store.token, by=by)]
    outcome = Ledger(clock(), state=state, head=store.head()[1]).propose(events)
    if outcome.bug is not None:
        raise StoreError(f"The takeover of {node} cannot be recorded: {outcome.bug.message}.")
    store.append(outcome.rows)


def _this_user() -> str:
    user = str(os.getuid())
    with suppress(KeyError, OSError):  # a user without a name
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"
