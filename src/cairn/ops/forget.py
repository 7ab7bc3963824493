"""
``ops forget``: removes the keys of a session, so that its texts cannot be read in any copy.

If a server uses the journal, it is asked to do that. Otherwise this command does it.

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
from urllib.parse import quote

import click
import msgspec

from cairn.actors.clock import clock
from cairn.actors.journal_keys import JournalKeys, open_keys
from cairn.journal import events as ev
from cairn.journal.errors import StoreError, StoreHeld
from cairn.journal.forgetting import Found, find, lost_with
from cairn.journal.ledger import Ledger
from cairn.journal.replay import Report, replay
from cairn.journal.rows.sealing import SERVER
from cairn.journal.runs import lost_run
from cairn.journal.state import SessionId
from cairn.ops.cli import Unreadable
from cairn.ops.common.completions import complete_session
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import (
    Source,
    blocks_option,
    example,
    journal_options,
    keys_in,
    named,
    snapshot_path,
    too_short_words,
    url_of,
)
from cairn.ops.common.output import confirm, counted, progress
from cairn.ops.journal.forget import remove_files, require_place
from cairn.ops.serve.api_keys import KEY_VARIABLE, api_key_option
from cairn.ops.serve.data_dir import Holder, hold_journal, server_of

if TYPE_CHECKING:
    from cairn.journal.rows.store_sql import SqlStore

_WHO = "forget"
_SURE = "Its texts cannot be restored. Forget it?"
_REQUEST = "POST /v1/sessions/SESSION/forget"
_CONNECT_S = 5.0


class _Refusal(msgspec.Struct):
    """Why a server does not do it."""

    message: str
    code: str = ""


class _Answer(msgspec.Struct):
    """What a server says that it did, or why not."""

    rows: int = 0
    blocks_removed: int = 0
    same_text: list[str] = []
    still_readable: list[str] = []
    error: _Refusal | None = None


@click.command(epilog=example("ops forget 6acffc27", "ops forget agent/notes --agent --yes"))
@click.argument("session", shell_complete=complete_session)
@journal_options
@blocks_option
@api_key_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--agent", is_flag=True, help="If it is an agent's session, delete the agent first.")
def forget(
    data_dir: Path,
    journal: str | None,
    blocks: Path | None,
    api_key: str | None,
    session: str,
    yes: bool,
    agent: bool,
) -> None:
    """
    Make the texts of a session unreadable, in all copies of the journal.

    Removes the keys of SESSION, with which its texts and token ids are sealed, from the data
    directory, or from a node's database: then they cannot be read in the journal, nor in exports
    and backups of it that were made before. The rows stay, so that the chain and its checkpoints
    hold, and `session_forgotten` records what was done. Also closes the session, and removes the
    files of its blocks that no other session has, and the snapshot.

    Not forgotten are: what other sessions have (those with the same beginning, or that quote words
    of it where they differ, are listed), what bugs of other sessions quote, token ids in the base
    of an earlier prune, names of sessions, models and tenants, numbers and times; what keys open
    that were handed over (`ops export --with-keys`, `ops bundle`) or are in a backup of keys.db, or
    of a node's database; and logs of other programs. The output says which of these there are.

    If a server uses the journal, it is asked to forget the session, and need not be stopped. With
    API keys, that needs the session's own, or the operator's. A server on PostgreSQL, or whose
    --data-dir is another one, is to be asked itself: POST /v1/sessions/SESSION/forget.

    If this is interrupted, run the same command again to finish.

    \b
    Exit code
      0  done
      1  you answered no; nothing was changed
      2  refused, or not finished; nothing is forgotten, unless the output says so
    """
    from cairn.journal.rows.store_sql import SqlStore
    from cairn.ops.serve.recorded_heads import require_known_head

    # Raises if there is no journal, before a lock or a key is made.
    Source.of(data_dir, journal).open().close()
    files, url = HeadFiles.of(data_dir, journal), url_of(data_dir, journal)
    source = Source.of(data_dir, journal)
    server = server_of(data_dir, url)
    if server is not None:
        name = _named(source, keys_in(files.keys, url), session)
        _ask(server, name, api_key, yes=yes, with_agent=agent)
        return
    other = f"and forget the session then, or ask it: {_REQUEST}"
    with hold_journal(url, other, who=_WHO):
        require_known_head(files, url, accept=False)
        with contextlib.ExitStack() as opened:
            keys = open_keys(files.keys, url)
            opened.callback(keys.close)
            try:
                store = SqlStore.open(url, keys=keys)
            except StoreHeld as error:
                itself = f"A server can forget the session itself: {_REQUEST}."
                raise StoreHeld(error.what, f"{itself} Otherwise: {error.advice}") from error
            opened.callback(store.close)
            name = _named(source, keys, session)
            place = (data_dir, url, blocks)
            _forget(store, keys, name, *place, yes=yes, with_agent=agent)


def _named(source: Source, keys: JournalKeys | None, session: str) -> str:
    """
    The id of the session that is meant.

    Raises:
        StoreError: there is none, or several.
    """
    # An agent without turns has texts, and no session.
    of_keys = keys.subjects() - {SERVER} if keys is not None else set()
    name = named(session, source.sessions(source.base()) | of_keys)
    if name is None:
        raise StoreError(
            f"No session {session} is in {source.name}{too_short_words(session)}; `ops sessions` "
            "lists them."
        )
    return name


def _ask(server: Holder, name: str, key: str | None, *, yes: bool, with_agent: bool) -> None:
    """
    Have a running server forget a session.

    Raises:
        Unreadable: it cannot be asked, or refuses.
    """
    import httpx

    from cairn.ops.common.http_client import http_client

    who = f"The server (process {server.process})"
    if server.address is None:
        raise Unreadable(
            f"{who} uses the journal, and its address is not known yet. Try again in a moment, or "
            "stop it."
        )
    who = f"The server at {server.address} (process {server.process})"
    if not yes:
        click.echo(f"{who} forgets session {name}, and goes on.", err=True)
        confirm(_SURE)
    address = f"/v1/sessions/{quote(name, safe='/')}/forget"
    query = {"agent": "true" if with_agent else "false"}
    try:
        with http_client(server.address, key=key) as client:
            client.timeout = httpx.Timeout(None, connect=_CONNECT_S)
            response = client.post(address, params=query)
        answer = msgspec.json.decode(response.content, type=_Answer)
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        raise Unreadable(
            f"{who} did not answer as it should: {error}. Run the same command again, which "
            "finishes what it began; or stop the server before."
        ) from error
    if answer.error is not None or response.status_code != 200:
        words = answer.error.message.rstrip(".") if answer.error is not None else "no reason given"
        is_key = response.status_code == 401
        hint = f" Give the API key with --api-key or ${KEY_VARIABLE}." if is_key else ""
        raise Unreadable(f"{who} refuses ({response.status_code}): {words}.{hint}")
    if not answer.rows:
        click.echo(f"Session {name} has no keys here: it was forgotten, or has no texts.")
        return
    click.echo(
        f"session {name}: {counted(answer.rows, 'row')} with texts; "
        f"{counted(answer.blocks_removed, 'block')} of its own"
    )
    _name_others(answer.same_text)
    click.echo(f"Session {name} is forgotten.")
    _name_places(answer.still_readable)


def _name_others(sessions: Sequence[str]) -> None:
    for other in sessions:
        click.echo(f"the same beginning is in session {other}, which keeps it")


def _name_places(places: Sequence[str]) -> None:
    if places:
        click.echo("It can still be read:")
    for place in places:
        click.echo(f"- {place}")


def _forget(
    store: SqlStore,
    keys: JournalKeys,
    name: str,
    data_dir: Path,
    url: str,
    blocks: Path | None,
    *,
    yes: bool,
    with_agent: bool,
) -> None:
    from cairn.journal.rows.database.same_blocks import places_elsewhere
    from cairn.journal.rows.database.urls import node_of

    node = node_of(url)
    base = store.base()
    left = store.head()[0] - (base.position if base is not None else 0)
    found = find(
        name,
        progress(store.read(), "read", left),
        progress(store.read(), "find the same text", left),
        base,
        store.opened,
    )
    _require_possible(found, with_agent=with_agent)
    require_place(node, found.shared, blocks)
    stored = keys.ids_of(name)
    if not stored:
        click.echo(f"Session {name} has no keys here: it was forgotten, or has no texts.")
        return
    if found.forgotten.issuperset(stored):
        keys.remove(name, stored)  # an earlier try ended before that
        click.echo(f"Session {name} is forgotten.")
        return
    click.echo(
        f"session {name}: {counted(found.rows, 'row')} with texts; "
        f"{counted(len(found.removed), 'block')} of its own"
    )
    _name_others(found.same_text)
    if not yes:
        confirm(_SURE)
    report = _closed(store, found)
    own = (found.runs, report, found.own_blocks)
    if not remove_files(store, data_dir, *own, who=_WHO, blocks=blocks):
        raise StoreError("Block files of the session are left, so nothing is forgotten yet.")
    remove_snapshot(data_dir)
    report = _reread(store)
    _append(store, report, [found.event(stored)])
    keys.remove(name, (*found.key_ids, *stored))
    click.echo(f"Session {name} is forgotten.")
    elsewhere = places_elsewhere(url, node, found.blocks) if node is not None else ()
    _name_places(found.traces.still_readable(report.state, keys.left_in, elsewhere))


def _require_possible(found: Found, *, with_agent: bool) -> None:
    """
    Refuse what would break an agent, or would not make the texts unreadable.

    Raises:
        StoreError: with what the operator can do.
    """
    if found.agent is not None and not with_agent:
        raise StoreError(
            f"{found.session} is the session of agent {found.agent.name}. Add --agent to delete "
            f"the agent too{lost_with(found.agent)}."
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
    events: list[ev.Event] = [*lost_run(state)]
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
    from cairn.actors.snapshots import SnapshotFile

    left = SnapshotFile(snapshot_path(data_dir)).remove()
    if left is not None:
        raise StoreError(
            f"A snapshot, which has texts of the session, cannot be removed: {left}. Remove it, "
            "and run the same command again."
        )
