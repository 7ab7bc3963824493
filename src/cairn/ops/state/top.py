"""``ops top``: what a running server does now, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import click
import httpx
import msgspec
from click.core import ParameterSource

from cairn.ops.chat.client import read_url
from cairn.ops.chat.server import server_at_hand, server_named, server_over
from cairn.ops.cli import Unreadable
from cairn.ops.common.http_client import http_client
from cairn.ops.common.locations import data_dir_option, example
from cairn.ops.common.output import abbreviated, printable, size_text
from cairn.ops.common.program import program
from cairn.ops.journal.sessions import age
from cairn.ops.serve.api_keys import api_key_option
from cairn.ops.serve.data_dir import server_at

_TIMEOUT_S = 5.0
_ROWS = 20
_WORDS = 30
_GENERATED = "cairn_tokens_emitted_total"


class Kv(msgspec.Struct):
    """Where the KV of a session is."""

    where: str


class Session(msgspec.Struct):
    """A session, as the server lists it."""

    id: str
    state: str
    turns: int
    prompt_tokens: int
    reused_tokens: int
    context_tokens: int
    used_us: int
    kv: Kv
    words: str = ""
    context_max: int | None = None
    bugs: tuple[str, ...] = ()


class _Page(msgspec.Struct):
    data: tuple[Session, ...]


@attrs.frozen(kw_only=True)
class Look:
    """
    What a server said at one moment.

    Attributes:
        health: the answer of ``/health``.
        generated: tokens of answers since the server started; None if that is not known.
        at_s: when, on a clock that never goes back.
    """

    health: Mapping[str, Any]
    sessions: tuple[Session, ...]
    generated: float | None
    at_s: float


@click.command(epilog=example("ops top", "ops top --once", "ops top --url http://127.0.0.1:8000"))
@click.option("--url", metavar="URL", help="The server. Default: as for `ops chat`.")
@api_key_option
@data_dir_option
@click.option("--once", is_flag=True, help="Print it once, and leave.")
@click.option(
    "--every",
    type=click.FloatRange(0.2, 60),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Look again after this many seconds.",
)
@click.pass_context
def top(
    context: click.Context,
    url: str | None,
    api_key: str | None,
    data_dir: Path,
    once: bool,
    every: float,
) -> None:
    """
    Show what a running server does now.

    The first lines say which model runs, how many requests run and wait, how many tokens a second
    answers get, and how full slabs, memory and disk are. Below are the sessions that were used
    last. Ctrl-C leaves. If stdout is not a terminal, it is printed once.
    """
    over = context.get_parameter_source("data_dir") is ParameterSource.COMMANDLINE
    if url is not None:
        server = server_named(read_url(url), api_key, _say)
    else:
        at_hand = None if over else server_at_hand(api_key, _say)
        # ``server_over`` would create the directory for a server of its own.
        if at_hand is None and server_at(data_dir) is None:
            raise Unreadable(
                f"No server is running. Start one with `{program()} serve`, or name it with --url."
            )
        server = at_hand or server_over(data_dir, None, api_key, _say)
    with http_client(server.url, key=server.key, timeout_s=_TIMEOUT_S) as client:
        look = taken(client, time.monotonic())
        if once or not sys.stdout.isatty():
            click.echo("\n".join(lines(look, None, time.time_ns() // 1000)))
            return
        _follow(client, look, every)


@cache
def _say(words: str) -> None:
    """Print what a server does that starts, each step once."""
    click.echo(f"Waiting: {words}.", err=True)


def _follow(client: httpx.Client, look: Look, every_s: float) -> None:
    """Show it again and again, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()

    def shown(now: Look, before: Look | None) -> Text:
        found = lines(now, before, time.time_ns() // 1000)
        cut = [line[: console.width] for line in found[: max(1, console.height - 1)]]
        return Text("\n".join(cut), no_wrap=True)

    with Live(shown(look, None), console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                time.sleep(every_s)
            except KeyboardInterrupt:
                return
            look, before = taken(client, time.monotonic()), look
            live.update(shown(look, before), refresh=True)


def taken(client: httpx.Client, at_s: float) -> Look:
    """
    Look at a server.

    Raises:
        Unreadable: it does not answer any more, or refuses to.
    """
    try:
        health, page, metrics = (
            client.get(path) for path in ("/health", f"/v1/sessions?limit={_ROWS}", "/metrics")
        )
        for answer in (page, metrics):
            answer.raise_for_status()
        return Look(
            health=msgspec.json.decode(health.content, type=dict[str, Any]),
            sessions=msgspec.json.decode(page.content, type=_Page).data,
            generated=_value(metrics.text, _GENERATED),
            at_s=at_s,
        )
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        raise Unreadable(
            f"The server at {client.base_url} does not answer: {printable(str(error))}."
        ) from error


def _value(metrics: str, name: str) -> float | None:
    """The sum of a metric's samples."""
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    ]
    return sum(found) if found else None


def lines(look: Look, before: Look | None, now_us: int) -> list[str]:
    """
    What is shown, line by line.

    Args:
        before: the look before, from which the rate follows; None if there is none.
        now_us: the time, in microseconds since 1970.
    """
    return [*_head(look, before), "", *_table(look.sessions, now_us)]


def _head(look: Look, before: Look | None) -> Iterator[str]:
    health = look.health
    model = printable(str(health.get("model", "?")))
    yield f"{model}  {health.get('status', '?')}{_rate(look, before)}"
    if (queue := health.get("queue")) is not None:
        yield f"running {queue['running']}  waiting {queue['queued']}"
    if (pool := health.get("pool")) is not None:
        full = _of(pool["bytes"], pool["bytes_total"])
        yield f"slabs   {pool['slabs']} of {pool['slabs_total']}  {full}"
    if (blocks := health.get("blocks")) is not None:
        yield f"memory  {blocks['count']} blocks  {_of(blocks['bytes'], blocks['bytes_total'])}"
        disk = _of(blocks["disk_bytes"], blocks["disk_bytes_total"])
        yield f"disk    {blocks['disk_count']} blocks  {disk}"


def _rate(look: Look, before: Look | None) -> str:
    if before is None or look.generated is None or before.generated is None:
        return ""
    passed_s = look.at_s - before.at_s
    more = look.generated - before.generated  # negative if the server was started again
    return f"  {max(0.0, more) / passed_s:.0f} tok/s" if passed_s > 0 else ""


def _of(used: int, total: int) -> str:
    share = f" ({100 * used // total} %)" if total else ""
    return f"{size_text(used)} of {size_text(total)}{share}"


def _table(sessions: Sequence[Session], now_us: int) -> Iterator[str]:
    rows = [("session", "state", "first words", "turns", "context", "reused", "kv", "used", "")]
    for one in sessions:
        share = f"{100 * one.reused_tokens // one.prompt_tokens} %" if one.prompt_tokens else ""
        most = f"/{one.context_max}" if one.context_max else ""
        rows.append(
            (
                abbreviated(printable(one.id)),
                one.state,
                printable(one.words)[:_WORDS],
                str(one.turns),
                f"{one.context_tokens}{most}",
                share,
                one.kv.where,
                age(now_us - one.used_us),
                f"{len(one.bugs)} bugs" if one.bugs else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
