"""``ops agents``: which agents there are, by the journal, and what was said with one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import click
import msgspec

from cairn.engine.prompt.template import Message, message_of
from cairn.engine.prompt.turns import messages_of, parts_of
from cairn.journal import events as ev
from cairn.journal.agents import Agent, Agents
from cairn.journal.base import Base
from cairn.journal.codec import decode
from cairn.journal.replay import replay
from cairn.journal.state import State, apply
from cairn.journal.tenants import LOCAL
from cairn.journal.turns import Place, Turns
from cairn.ops.common.locations import Source, example, file_argument, journal_options
from cairn.ops.common.output import counted, facts, printable, table
from cairn.ops.journal.sessions import time_text, used


class _ListFirst(click.Group):
    """A group that without a command lists."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What is no command of the group's own belongs to ``list``."""
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListFirst, epilog=example("ops agents", "ops agents show review"))
def agents() -> None:
    """
    List the agents of a journal, or show the conversation of one.

    Without a command: `ops agents list`. Both read the journal, beside a running server as well.
    """


@attrs.frozen
class _Found:
    """What a journal has."""

    source: Source
    base: Base | None
    agents: Agents
    state: State

    @classmethod
    def of(cls, data_dir: Path, journal: str | None, file: Path | None) -> _Found:
        """What the options of a command point at."""
        found = Agents(Turns())

        def watch(recorded: ev.Recorded, _: State) -> None:
            found.turns.see(recorded)
            found.see(recorded)

        source = Source.of(data_dir, journal, file)
        base = source.base()
        state = replay(source.rows("fold", base=base), base=base, watch=watch).state
        if state.boot is not None and source.is_held is False:
            # A server that died could not write so. The next one will, and this is what follows.
            lost = ev.Recorded(
                position=state.position + 1,
                stream="server",
                seq=state.streams["server"] + 1,
                event_id="",
                time_us=0,
                event=ev.ServerLost(boot=state.boot),
            )
            watch(lost, state)
            state = apply(state, lost)
        return cls(source, base, found, state)


@agents.command(name="list", epilog=example("ops agents", "ops agents list --data-dir /srv/cairn"))
@file_argument
@journal_options
def list_agents(data_dir: Path, journal: str | None, file: Path | None) -> None:
    """
    List the agents of a journal, the last used one first.

    `status` says where the KV of an agent's history is: hot in memory, warm in files, cold nowhere,
    so that it is computed again. While no server runs all are cold: the next one looks what files
    there are. `context` are the tokens of its last prompt and answer.
    """
    found = _Found.of(data_dir, journal, file)
    known = found.agents.of(None)
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
    )
    rows = [
        (
            agent.name,
            agent.tenant,
            found.agents.status(agent, found.state),
            agent.turns,
            found.agents.tokens(agent),
            agent.max_context,
            agent.model or None,
            "yes" if agent.persist else "no",
            agent.forked_from,
            used(agent.used_us),
        )
        for agent in known
    ]
    one_tenant = all(agent.tenant == LOCAL for agent in known)
    hidden = ("tenant",) if one_tenant else ()
    table(columns, rows, hidden=hidden, spare=("persists", "limit", "model", "forked from"))


@agents.command(epilog=example("ops agents show review", "ops agents show review --tenant alice"))
@click.argument("name")
@file_argument
@journal_options
@click.option("--tenant", help="Whose it is, where agents of several are called so.")
def show(
    name: str, data_dir: Path, journal: str | None, file: Path | None, tenant: str | None
) -> None:
    """
    Show an agent: what it was created with, and what was said, turn by turn.

    The number of a turn is what a fork of the agent begins behind.
    """
    found = _Found.of(data_dir, journal, file)
    agent = _chosen(found, name, tenant)
    places = found.agents.history(agent)
    texts = _texts(found, agent, places)
    created = texts[agent.created]
    assert isinstance(created, ev.AgentCreated)
    facts(
        (
            ("agent", agent.name),
            ("tenant", agent.tenant if agent.tenant != LOCAL else None),
            ("created", f"{time_text(agent.created_s * 1_000_000)} (row {agent.created})"),
            ("forked from", agent.forked_from),
            ("model", agent.model or None),
            ("persists", "yes" if agent.persist else "no, it ends with the server"),
            ("status", found.agents.status(agent, found.state)),
            ("context", _context(found, agent)),
            ("session", agent.session),
            ("tools", ", ".join(_tools(created)) or None),
        )
    )
    if created.system is not None:
        _say(Message(role="system", content=created.system))
    for number, place in enumerate(places, 1):
        turn = texts[place.stored]
        assert isinstance(turn, ev.TurnStored)
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
    The agent of a name.

    Raises:
        click.ClickException: there is none, or there are several.
    """
    named = [one for one in found.agents.of(tenant) if one.name == name]
    if len(named) > 1:
        whose = ", ".join(sorted(one.tenant for one in named))
        raise click.UsageError(f"Agents of several are called {name}: {whose}. Name --tenant.")
    if not named:
        of = f" of {tenant}" if tenant is not None else ""
        raise click.UsageError(
            f"No agent {name}{of} is in {found.source.name}; `ops agents` lists those that are."
        )
    return named[0]


def _texts(found: _Found, agent: Agent, places: Sequence[Place]) -> dict[int, ev.Event]:
    """The rows that have the texts of an agent."""
    wanted = {agent.created, *(place.stored for place in places)}
    rows = found.source.rows("read", base=found.base)
    return {row.position: decode(row).event for row in rows if row.position in wanted}


def _context(found: _Found, agent: Agent) -> str:
    tokens = counted(found.agents.tokens(agent), "token")
    return tokens if agent.max_context is None else f"{tokens} of {agent.max_context}"


def _tools(created: ev.AgentCreated) -> Iterator[str]:
    for tool in msgspec.json.decode(created.tools):
        yield tool["function"]["name"]


def _say(message: Message) -> None:
    """Print a message: who, and what, each line set in."""
    if message.reasoning:
        _lines(f"{message.role} (thought)", message.reasoning)
    if message.content or not message.tool_calls:
        _lines(message.role, message.content)
    for call in message.tool_calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        _lines(f"{message.role} (call)", f"{call['function']['name']}({arguments})")


def _lines(who: str, text: str) -> None:
    click.echo(f"{printable(who)}:")
    for line in text.splitlines() or [""]:
        click.echo(f"  {printable(line)}")
