"""``ops agents``: lists the agents of a journal, and shows the conversation of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import attrs
import click
import msgspec

from cairn.engine.prompt.template import Message, message_of
from cairn.engine.prompt.turns import messages_of, parts_of
from cairn.journal import events as ev
from cairn.journal.agents import Agent, Agents
from cairn.journal.errors import StoreError
from cairn.journal.replay import replay
from cairn.journal.rows.base import Base, histories_of
from cairn.journal.rows.codec import decode
from cairn.journal.rows.export import require_complete
from cairn.journal.runs import lost_run
from cairn.journal.state import State, apply
from cairn.journal.tenants import LOCAL
from cairn.journal.turns import Place
from cairn.ops.common.completions import complete_chat
from cairn.ops.common.locations import Source, example, file_argument, journal_options
from cairn.ops.common.output import counted, facts, printable, table
from cairn.ops.fleet.move import move
from cairn.ops.journal.sessions import time_text, used


class _ListFirst(click.Group):
    """A group whose default command is ``list``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Arguments that do not begin with a command belong to ``list``."""
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListFirst, epilog=example("ops agents", "ops agents show review"))
def agents() -> None:
    """
    List the agents of a journal, show one, or hand one over to another node.

    Without a command: `ops agents list`. The server may be running.
    """


agents.add_command(move)


@attrs.frozen
class _Found:
    """The agents of a journal."""

    source: Source
    base: Base | None
    agents: Agents
    state: State

    @classmethod
    def of(cls, data_dir: Path, journal: str | None, file: Path | None) -> _Found:
        """Those of the journal that the options name."""
        source = Source.of(data_dir, journal, file)
        base = source.base()
        found = histories_of(base).fold()

        def watch(recorded: ev.Recorded, _: State) -> None:
            found.see(recorded)

        rows = require_complete(source.rows("fold", base=base), base)
        state = replay(rows, base=base, watch=watch).state
        # A server that was killed could not record its end. The next one will.
        for event in lost_run(state) if source.is_held is False else ():
            lost = ev.Recorded(
                position=state.position + 1,
                stream="server",
                seq=state.streams["server"] + 1,
                event_id="",
                time_us=0,
                event=event,
            )
            watch(lost, state)
            state = apply(state, lost)
        return cls(source, base, found, state)


@agents.command(name="list", epilog=example("ops agents", "ops agents list --data-dir /srv/cairn"))
@file_argument
@journal_options
def list_agents(data_dir: Path, journal: str | None, file: Path | None) -> None:
    """
    List the agents of a journal, the most recently used first.

    `status` says where the KV cache of an agent's history is: `hot` in memory, `warm` in files,
    `cold` nowhere, so it must be computed again; `moved` on another node of the fleet.
    While no server runs, all agents are cold; the next server finds the files. `context` counts the
    tokens of its last prompt and answer.
    """
    found = _Found.of(data_dir, journal, file)
    known = found.agents.of(None, released=True)
    columns = (
        "agent",
        "tenant",
        "status",
        "turns",
        "context",
        "limit",
        "model",
        "persists",
        "forked from",
        "last used",
        "moved to",
    )
    rows = [
        (
            agent.name,
            agent.tenant,
            _status(found, agent),
            agent.turns,
            found.agents.tokens(agent),
            agent.max_context,
            agent.model or None,
            "yes" if agent.persist else "no",
            agent.forked_from,
            used(agent.used_us),
            agent.released_to,
        )
        for agent in known
    ]
    one_tenant = all(agent.tenant == LOCAL for agent in known)
    hidden = [*(["tenant"] if one_tenant else [])]
    hidden += [] if any(agent.released for agent in known) else ["moved to"]
    table(columns, rows, hidden=hidden, spare=("persists", "limit", "model", "forked from"))


@agents.command(epilog=example("ops agents show review", "ops agents show review --tenant alice"))
@click.argument("name", shell_complete=complete_chat)
@file_argument
@journal_options
@click.option("--tenant", help="The agent's tenant, if agents of several tenants have this name.")
def show(
    name: str, data_dir: Path, journal: str | None, file: Path | None, tenant: str | None
) -> None:
    """
    Show an agent: how it was created, and its conversation, turn by turn.

    To fork the agent after a turn, pass the number of that turn.
    """
    found = _Found.of(data_dir, journal, file)
    agent = _chosen(found, name, tenant)
    places = found.agents.history(agent)
    texts = _texts(found, agent, places)
    created = texts[agent.created]
    assert isinstance(created, ev.AgentCreated | ev.SessionAdopted)
    facts(
        (
            ("agent", agent.name),
            ("tenant", agent.tenant if agent.tenant != LOCAL else None),
            ("created", f"{time_text(agent.created_s * 1_000_000)} (row {agent.created})"),
            ("forked from", agent.forked_from),
            ("adopted from", agent.adopted_from),
            ("handed over", _handed_over(agent)),
            ("model", agent.model or None),
            ("persists", "yes" if agent.persist else "no, it is deleted when the server stops"),
            ("status", _status(found, agent)),
            ("context", _context(found, agent)),
            ("session", agent.session),
            ("tools", ", ".join(_tools(created)) or None),
        )
    )
    if created.system is not None:
        _say(Message(role="system", content=created.system))
    for number, place in enumerate(places, 1):
        turn = texts[place.stored]
        assert isinstance(turn, ev.TurnStored | ev.TurnAdopted)
        click.echo()
        click.echo(
            f"turn {number}: {time_text(turn.created_s * 1_000_000)}, "
            f"{counted(place.tokens, 'token')}, ended by {place.finish_reason}, "
            f"request {turn.request}"
        )
        for message in (*messages_of(turn.question), message_of(parts_of(turn.answer))):
            _say(message)


def _chosen(found: _Found, name: str, tenant: str | None) -> Agent:
    """
    The agent with this name.

    Raises:
        click.UsageError: there is none, or there are several.
    """
    named = [one for one in found.agents.of(tenant, released=True) if one.name == name]
    if len(named) > 1:
        tenants = ", ".join(sorted(one.tenant for one in named))
        raise click.UsageError(
            f"Agents of several tenants have the name {name}: {tenants}. Choose one with --tenant."
        )
    if not named:
        of = f" of {tenant}" if tenant is not None else ""
        raise click.UsageError(
            f"There is no agent {name}{of} in {found.source.name}; `ops agents` lists them."
        )
    return named[0]


def _texts(found: _Found, agent: Agent, places: Sequence[Place]) -> dict[int, ev.Event]:
    """The events with the texts of an agent, by position."""
    wanted = {agent.created, *(place.stored for place in places)}
    pruned = (found.source.opened(row) for row in histories_of(found.base).rows)
    rows = chain(pruned, found.source.rows("read", base=found.base))
    read = [decode(row) for row in rows if row.position in wanted]
    if any(recorded.unread is not None for recorded in read):
        raise StoreError(
            f"The texts of agent {agent.name} cannot be read: its session was forgotten, or the "
            "keys are not here."
        )
    return {recorded.position: recorded.event for recorded in read}


def _context(found: _Found, agent: Agent) -> str:
    tokens = counted(found.agents.tokens(agent), "token")
    return tokens if agent.max_context is None else f"{tokens} of {agent.max_context}"


def _status(found: _Found, agent: Agent) -> str:
    return "moved" if agent.released else found.agents.status(agent, found.state)


def _handed_over(agent: Agent) -> str | None:
    return f"to {agent.released_to} (row {agent.released})" if agent.released else None


def _tools(created: ev.AgentCreated | ev.SessionAdopted) -> Iterator[str]:
    for tool in msgspec.json.decode(created.tools):
        yield tool["function"]["name"]


def _say(message: Message) -> None:
    """Print a message: its role, and its lines, indented."""
    if message.reasoning:
        _lines(f"{message.role} (thought)", message.reasoning)
    if message.content or not message.tool_calls:
        _lines(message.role, message.content)
    for call in message.tool_calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        _lines(f"{message.role} (call)", f"{call['function']['name']}({arguments})")


def _lines(heading: str, text: str) -> None:
    click.echo(f"{printable(heading)}:")
    for line in text.splitlines() or [""]:
        click.echo(f"  {printable(line)}")
