"""
What a shell may complete: models, sessions and chats that are here.

An error completes nothing: a shell shows no messages while a user types.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from cairn.journal.errors import JournalError
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import default_data_dir, url_of
from cairn.ops.models.short_names import KNOWN_MODELS

_LAST_ROWS = 2000
_SESSIONS_MAX = 50
_REPOSITORY = "models--"


def complete_model(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Directories, the models of the hub's cache, and short names."""
    directories = CompletionItem(incomplete, type="dir")
    if incomplete.startswith(("/", ".", "~")):
        return [directories]
    known = [*cached_models(), *(one.name for one in KNOWN_MODELS)]
    names = (name for name in known if name.startswith(incomplete))
    return [directories, *map(CompletionItem, names)]


def complete_pull(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Short names, and the models that are here: one that was cut off can be continued."""
    known = [*(one.name for one in KNOWN_MODELS), *cached_models()]
    return [name for name in known if name.startswith(incomplete)]


def complete_rm(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """The models of the hub's cache, by their short names if they have one."""
    here = cached_models()
    known = [*(one.name for one in KNOWN_MODELS if one.hub_name in here), *here]
    return [name for name in known if name.startswith(incomplete)]


def cached_models() -> list[str]:
    """
    The names of the models that the hub's client has downloaded. Does not import that client, which
    would take longer than a user waits for a completion.
    """
    home = os.environ.get("HF_HOME")
    named = os.environ.get("HF_HUB_CACHE")
    try:
        cache = Path(home) if home else Path.home() / ".cache" / "huggingface"
        found = list((Path(named) if named else cache / "hub").iterdir())
    except (OSError, RuntimeError):
        return []
    folders = [path.name for path in found if path.name.startswith(_REPOSITORY)]
    return sorted(name.removeprefix(_REPOSITORY).replace("--", "/") for name in folders)


def complete_session(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """The sessions of the journal's last rows, the last used one first."""
    try:
        found = list(_last_sessions(context))
    except (JournalError, Unreadable, OSError):
        return []
    return [name for name in found if name.startswith(incomplete)][:_SESSIONS_MAX]


def _last_sessions(context: click.Context) -> Iterator[str]:
    from cairn.journal.rows.database.schema import schema_revision
    from cairn.journal.rows.store_sql import SqlStore
    from cairn.journal.tenants import session_name

    given = context.params
    url = url_of(given.get("data_dir") or default_data_dir(), given.get("journal"))
    if schema_revision(url) is None:
        return
    store = SqlStore.open(url, read_only=True)
    try:
        streams = dict.fromkeys(row.stream for row in reversed(store.last(_LAST_ROWS)))
    finally:
        store.close()
    for stream in streams:
        kind, _, name = stream.partition("/")
        if kind == "session":
            yield session_name(name)


def complete_chat(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """The conversations that the running server stores, the last used one first."""
    from cairn.ops.chat.agents import Agents
    from cairn.ops.chat.client import TurnFailed
    from cairn.ops.chat.server import Server
    from cairn.ops.serve.api_keys import KEY_VARIABLE
    from cairn.ops.state.running import running

    try:
        server = running(context.params.get("data_dir") or default_data_dir())
        if server is None or server.url is None:
            return []
        key = os.environ.get(KEY_VARIABLE)
        agents = Agents(Server(server.url, "", key=key)).all()
    except (TurnFailed, Unreadable, OSError):
        return []
    return [one.agent_id for one in agents if one.agent_id.startswith(incomplete)]
