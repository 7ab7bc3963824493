"""
``ops forget``: removes the keys of a session, so that its texts cannot be read in any copy.

The order of the steps is such that a crash between any two of them leaves a journal that can be
served, and the same command finishes: the session is closed; the files of its own blocks go; the
snapshot goes, which has texts; ``session_forgotten`` is appended; its keys go. If only the last
step is missing, the next start of the server does it, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cairn.actors.clock import clock
from cairn.actors.journal_keys import KeyFile
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.forgetting import Found, find
from cairn.journal.ledger import Ledger
from cairn.journal.replay import Report, replay
from cairn.journal.rows.sealing import SERVER
from cairn.journal.state import SessionId
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import (
    Source,
    example,
    journal_options,
    named,
    snapshot_path,
    too_short_words,
    url_of,
)
from cairn.ops.common.output import counted, progress
from cairn.ops.journal.forget import remove_files
from cairn.ops.serve.data_dir import hold_journal

if TYPE_CHECKING:
    from cairn.journal.rows.store_sql import SqlStore

_WHO = "forget"


@click.command(epilog=example("ops forget 6acffc27", "ops forget agent/notes --agent --yes"))
@click.argument("session")
@journal_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--agent", is_flag=True, help="If it is an agent's session, delete the agent first.")
def forget(data_dir: Path, journal: str | None, session: str, yes: bool, agent: bool) -> None:
    """
    Make the texts of a session unreadable, in all copies of the journal.

    Removes the keys of SESSION, with which its texts and token ids are sealed, from the data
    directory: then they cannot be read in the journal, nor in exports and backups of it that were
    made before. The rows stay, so that the chain and its checkpoints hold, and `session_forgotten`
    records what was done. Also closes the session, and removes the files of its blocks that no
    other session has, and the snapshot.

    Not forgotten are: what other sessions have (those with the same beginning are listed), names of
    sessions, models and tenants, numbers and times; keys that were handed over (`ops export
    --with-keys`, `ops bundle`) or are in a backup of keys.db; and logs of other programs.

    Stop the server first. If this is interrupted, run the same command again to finish.

    \b
    Exit code
      0  done
      2  refused, or not finished; nothing is forgotten, unless the output says so
    """
    from cairn.journal.rows.store_sql import SqlStore
    from cairn.ops.serve.recorded_heads import require_known_head

    files, url = HeadFiles.of(data_dir, journal), url_of(data_dir, journal)
    source = Source.of(data_dir, journal)
    with hold_journal(url, "and forget the session then", who=_WHO):
        require_known_head(files, url, accept=False)
        with contextlib.ExitStack() as opened:
            keys = KeyFile.open(files.keys)
            opened.callback(keys.close)
            # An agent without turns has texts, and no session.
            known = source.sessions(source.base()) | keys.subjects() - {SERVER}
            name = named(session, known)
            if name is None:
                raise StoreError(
                    f"No session {session} is in {source.name}{too_short_words(session)}; `ops "
                    "sessions` lists them."
                )
            store = SqlStore.open(url, keys=keys)
            opened.callback(store.close)
            _forget(store, keys, data_dir, name, yes=yes, with_agent=agent)


def _forget(
    store: SqlStore, keys: KeyFile, data_dir: Path, name: str, *, yes: bool, with_agent: bool
) -> None:
    base = store.base()
    left = store.head()[0] - (base.position if base is not None else 0)
    found = find(
        name,
        progress(store.read(), "read", left),
        progress(store.read(), "find the same text", left),
        base,
    )
    _require_possible(found, with_agent=with_agent)
    stored = keys.ids_of(name)
    if not stored:
        click.echo(f"Session {name} has no keys here: it was forgotten, or has no texts.")
        return
    if found.forgotten.issuperset(stored):
        keys.remove(stored)  # an earlier try ended before that
        click.echo(f"Session {name} is forgotten.")
        return
    click.echo(
        f"session {name}: {counted(found.rows, 'row')} with texts; "
        f"{counted(len(found.removed), 'block')} of its own"
    )
    for other in found.same_text:
        click.echo(f"the same beginning is in session {other}, which keeps it")
    if not yes:
        click.confirm("Its texts cannot be restored. Forget it?", abort=True, err=True)
    report = _closed(store, found)
    if not remove_files(store, data_dir, found.runs, report, found.own_blocks, who=_WHO):
        raise StoreError("Block files of the session are left, so nothing is forgotten yet.")
    remove_snapshot(data_dir)
    report = _reread(store)
    _append(store, report, [found.event(stored)])
    keys.remove((*found.key_ids, *stored))
    click.echo(f"Session {name} is forgotten.")


def _require_possible(found: Found, *, with_agent: bool) -> None:
    """
    Refuse what would break an agent, or would not make the texts unreadable.

    Raises:
        StoreError: with what the operator can do.
    """
    if found.agent is not None and not with_agent:
        raise StoreError(
            f"{found.session} is the session of agent {found.agent.name}. Add --agent to delete "
            "the agent too."
        )
    if found.needed_by:
        names = ", ".join(agent.name for agent in found.needed_by)
        raise StoreError(
            f"The history of these agents begins with turns of {found.session}: {names}. Delete "
            "them first."
        )
    if found.plain:
        raise StoreError(
            f"{counted(found.plain, 'row')} of {found.session} not sealed, so that texts would "
            "stay readable. `ops journal prune` removes old rows."
        )


def _closed(store: SqlStore, found: Found) -> Report:
    """Close the session, and delete its agent. The replay after that."""
    state = found.report.state
    events: list[ev.Event] = []
    if state.boot is not None:
        # No process uses the journal, so that run was lost; the next server would find the same.
        events.append(ev.ServerLost(boot=state.boot))
    if found.agent is not None:
        events.append(ev.AgentDeleted(agent=found.agent.name, tenant=found.agent.tenant))
    if SessionId(found.session) in state.sessions:
        events.append(ev.SessionClosed(session=found.session, reason="forgotten"))
    if not events:
        return found.report
    _append(store, found.report, events)
    return _reread(store)


def _reread(store: SqlStore) -> Report:
    return replay(store.read(), base=store.base())


def _append(store: SqlStore, report: Report, events: Sequence[ev.Event]) -> None:
    outcome = Ledger(clock(), state=report.state, head=report.head).propose(events)
    if outcome.bug is not None:
        raise StoreError(f"The session cannot be forgotten: {outcome.bug.message}.")
    store.append(outcome.rows)


def remove_snapshot(data_dir: Path) -> None:
    """Remove the snapshot of the journal, which has texts of the session."""
    path = snapshot_path(data_dir)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"{path}, which has texts of the session, cannot be removed: {error.strerror}. Remove "
            "it, and run the same command again."
        ) from error
