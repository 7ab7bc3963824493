"""
``ops agents move``: hands an agent over from one node of a fleet to another.

The servers append to their journals, because each has one writer. If the source does not run, this
command appends to its journal, as ``ops takeover`` does.

The target is asked first, which reads the agent in the source's journal and changes nothing before
it is released. So names, tenants and texts are known to be good by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any
from urllib.parse import quote

import click
import msgspec

from cairn.actors.clock import clock
from cairn.journal import events as ev
from cairn.journal.agents import is_agent_name
from cairn.journal.errors import StoreError
from cairn.journal.ledger import Ledger
from cairn.journal.nodes import node_named, on_node
from cairn.journal.replay import Replay
from cairn.journal.rows.base import histories_of
from cairn.journal.runs import lost_run
from cairn.journal.state import SessionId
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import check_node, example, journal_of
from cairn.ops.common.output import confirm, counted, progress
from cairn.ops.fleet.fingerprints import differences, loaded_models
from cairn.ops.serve.api_keys import KEY_VARIABLE, api_key_option

_TIMEOUT_S = 600.0
_CLOSED = "its agent was handed over"
_AGAIN = "If it does not run, start it; then run the same command again"


class _Refusal(msgspec.Struct):
    message: str
    code: str = ""


class _Answer(msgspec.Struct):
    turns: int = 0
    error: _Refusal | None = None
    of_tenant: str | None = None  # whose agent it is, where the node says so
    is_open: bool = False  # whether what was asked may have been done although it was refused
    hint: str = ""  # what else may be the reason of a refusal


@click.command(
    epilog=example(
        "ops agents move n1.notes --to n2 --journal postgresql://cairn@db/cairn \\",
        "    --server http://router:8080",
    )
)
@click.argument("name")
@click.option(
    "--to", "to_node", metavar="NODE", required=True, callback=check_node, help="Its new node."
)
@click.option("--as", "to", metavar="NAME", help="Its name there. Default: the same, on that node.")
@click.option(
    "--journal", metavar="URL", required=True, help="The PostgreSQL database of the fleet."
)
@click.option(
    "--server",
    "servers",
    metavar="[NODE=]URL",
    required=True,
    multiple=True,
    help="Where nodes answer: the router's address, or NODE=URL of each. May be repeated.",
)
@api_key_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def move(
    name: str,
    to_node: str,
    to: str | None,
    journal: str,
    servers: Sequence[str],
    api_key: str | None,
    yes: bool,
) -> None:
    """
    Hand the agent NAME over to another node, with its history.

    From then on its node answers 410 with the new name, for good, and the other node serves it. Its
    next answer is computed from its start, and has the same bits if both nodes have the same
    fingerprint; if they differ, the command says so before it asks. With API keys, give that of the
    agent's tenant. The node that it is handed over to must run. If its own does not, this command
    appends to the journal of that. A request that the agent is answering is not cut: the command
    refuses until it has ended.

    If this is interrupted, no node or one serves the agent: run the same command again to finish.

    \b
    Exit code
      0  done, or was done before
      1  you answered no; nothing was changed
      2  refused, or not finished; the output says which
    """
    from cairn.journal.rows.database.fleet import nodes_of, running_nodes
    from cairn.journal.rows.database.urls import place_of

    source = node_named(name)
    if source is None:
        raise click.UsageError(f"{name} does not begin with the name of a node, like n1.notes.")
    to = on_node(to_node, to if to is not None else name.partition(".")[2])
    if not is_agent_name(name) or not is_agent_name(to):
        raise click.UsageError(f"{to} is no name of an agent; choose one with --as.")
    if source == to_node:
        raise click.UsageError(f"{name} is on {to_node}. To copy it there, fork it.")
    url = journal_of(journal, None)
    assert url is not None
    known = nodes_of(url)
    for node in (source, to_node):
        if node not in known:
            raise click.UsageError(
                f"There is no node {node} in {place_of(url)}; the nodes are {', '.join(known)}."
            )
    places = _places(servers, (source, to_node))
    adopt = f"/v1/agents/{quote(to)}/adopt", {"source": name}
    answer = _ask(places, to_node, api_key, *adopt, unsent=f"Nothing was changed. {_AGAIN}.")
    if answer.error is None:
        click.echo(
            f"{name} was released before: it is {to} now, with {counted(answer.turns, 'turn')}."
        )
        return
    if answer.error.code != "agent_not_released" or answer.of_tenant is None:
        raise _refused(to_node, answer)
    _warn_of_differences(url, source, to_node)
    if not yes:
        confirm(f"{source} will never serve {name} again. Hand it over to {to_node}?")
    if source in running_nodes(url):
        released = _ask(places, source, api_key, f"/v1/agents/{quote(name)}/release", {"to": to})
        if released.error is not None:
            raise _refused(source, released)
    else:
        _release(url, source, name, answer.of_tenant, to, to_node)
    answer = _ask(places, to_node, api_key, *adopt)
    if answer.error is not None:
        words = (
            f"{name} is released, and no node serves it. Run the same command again to finish; if "
            f"the name {to} is taken, with another one (--as)."
        )
        raise _refused(to_node, answer, words)
    click.echo(f"{name} is handed over: it is {to} now, with {counted(answer.turns, 'turn')}.")


def _warn_of_differences(url: str, *nodes: str) -> None:
    """Say in what the models differ that two nodes loaded last; what is not known is not said."""
    if found := differences(loaded_models(url, nodes)):
        click.echo(
            "The fingerprints of these nodes differ, so answers may have other bits than before:",
            err=True,
        )
        for one in found:
            click.echo(f"  {one}", err=True)


def _places(servers: Sequence[str], nodes: Sequence[str]) -> dict[str | None, str]:
    """
    The addresses of nodes; that of the router under None.

    Raises:
        click.UsageError: one is not of these nodes.
    """
    places: dict[str | None, str] = {}
    for one in servers:
        node, apart, address = one.partition("=")
        if apart and "/" not in node:
            if node not in nodes:
                raise click.UsageError(f"--server {one}: only {' and '.join(nodes)} are asked.")
            places[node] = address
        else:
            places[None] = one
    return places


def _ask(
    places: dict[str | None, str],
    node: str,
    key: str | None,
    path: str,
    body: dict[str, Any],
    *,
    unsent: str = f"{_AGAIN}, which finishes what was begun.",
) -> _Answer:
    """
    Send a node a request.

    Args:
        unsent: what the operator can do if the node cannot be connected to.

    Raises:
        Unreadable: it cannot be asked.
    """
    import httpx

    from cairn.ops.common.http_client import http_client

    address = places.get(node, places.get(None))
    if address is None:
        raise click.UsageError(f"Where is {node}? Add --server {node}=http://HOST:PORT.")
    try:
        with http_client(address, key=key, timeout_s=_TIMEOUT_S) as client:
            response = client.post(path, json=body)
        answer = msgspec.json.decode(response.content, type=_Answer)
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        then = f"{_AGAIN}, which finishes what may have been begun."
        if isinstance(error, httpx.ConnectError):
            then = unsent
        raise Unreadable(
            f"{node} at {address} did not answer as it should: {error}. {then}"
        ) from error
    if response.status_code == 401:
        raise Unreadable(
            f"{node} refuses: it needs the API key of the agent's tenant. Give it with --api-key "
            f"or ${KEY_VARIABLE}."
        )
    if response.status_code != 200 and answer.error is None:
        raise Unreadable(f"{node} at {address} answered {response.status_code}, without a reason.")
    answer.of_tenant = response.headers.get("x-cairn-tenant")
    answer.is_open = response.status_code >= 500
    if node not in places and response.status_code in (400, 404):
        answer.hint = (
            f" If {address} is a node and not the router, give each node's address: --server "
            f"{node}=URL, and another --server for the other one."
        )
    return answer


def _refused(node: str, answer: _Answer, then: str = "") -> Unreadable:
    assert answer.error is not None
    if not then:
        then = "Nothing was changed."
        if answer.is_open:
            then = "Run the same command again, which finishes what may have been begun."
    return Unreadable(f"{node} refuses: {answer.error.message.rstrip('.')}. {then}{answer.hint}")


def _release(url: str, source: str, name: str, tenant: str, to: str, to_node: str) -> None:
    """
    Release an agent in the journal of a node that does not run.

    Raises:
        StoreError: the journal is in use or not sound, or the agent is not there.
    """
    from cairn.journal.rows.database.urls import node_url
    from cairn.journal.rows.heads import lost_words
    from cairn.journal.rows.store_sql import SqlStore
    from cairn.ops.fleet.witnesses import seen_by_others

    def warn(node: str, fact: str) -> None:
        click.echo(f"What {node} saw of {source} cannot be read: {fact}", err=True)

    own = node_url(url, source)
    seen = seen_by_others(own, warn)
    with closing(SqlStore.open(own, holder="ops agents move")) as store:
        for node, head in seen:
            if (words := lost_words(head, store)) is not None:
                raise StoreError(
                    f"The journal of {source} does not contain what {node} saw of it: {words}. "
                    f"Nothing was changed; a start of {source} says what to do."
                )
        fold, agents = Replay(store.base()), histories_of(store.base()).fold()
        for row in progress(store.read(), f"reading the journal of {source}", store.head()[0]):
            if (recorded := fold.feed(row)) is not None:
                agents.see(recorded)
        report = fold.report()
        if broken := [found for found in report.findings if not found.recorded]:
            raise StoreError(
                f"The journal of {source} failed verification at row {broken[0].position}, so the "
                f"agent is not released. Run `ops verify --node {source}`."
            )
        agent = agents.find(name, tenant)
        if agent is None:
            raise StoreError(f"There is no agent {name} on {source}; `ops agents` lists them.")
        if not agent.persist:
            raise StoreError(
                f"Agent {name} ends with its server (persist: false), and {source} does not run, "
                "so there is nothing to hand over. Nothing was changed."
            )
        events: list[ev.Event] = [*lost_run(report.state)]
        events.append(ev.SessionReleased(agent=name, tenant=tenant, to=to, to_node=to_node))
        if SessionId(agent.session) in report.state.sessions:
            events.append(ev.SessionClosed(session=agent.session, reason=_CLOSED))
        outcome = Ledger(clock(), state=report.state, head=report.head).propose(events)
        if outcome.bug is not None:
            raise StoreError(f"The agent cannot be released: {outcome.bug.message}.")
        store.append(outcome.rows)
