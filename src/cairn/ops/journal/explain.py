"""``ops explain``: says in a few sentences what a request reused, what was computed, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.explanations import Explanation, explain
from cairn.journal.losses import Losses
from cairn.journal.rows.base import Base, state_of
from cairn.journal.rows.codec import decode
from cairn.journal.rows.export import require_complete
from cairn.journal.state import Model
from cairn.ops.common.completions import complete_session
from cairn.ops.common.locations import (
    Source,
    example,
    file_argument,
    journal_options,
    named,
    too_short_words,
)
from cairn.ops.common.output import printable
from cairn.ops.journal.sessions import time_text

_LOSSES = (
    *(ev.BlockEvicted, ev.BlockFileRemoved),
    *(ev.ServerStopped, ev.ServerLost, ev.ModelUnloaded),
)
_KINDS = frozenset(
    kind.kind
    for kind in (
        *(ev.ModelLoaded, ev.RequestReceived, ev.PathSelected),
        *(ev.BlockAdopted, ev.BlocksRestored, *_LOSSES),
    )
)
_LAST = "last"


@attrs.frozen(kw_only=True)
class Explained:
    """
    A request whose path was selected, and the explanation of it.

    Attributes:
        copied_of: node to the copied blocks that it computed, if this server did not.
    """

    request: str
    session: str
    time_us: int
    explanation: Explanation
    copied_of: Counter[str] = attrs.field(factory=Counter)


@click.command(
    "explain",
    epilog=example("ops explain last", "ops explain 246af73a", "ops explain last journal.jsonl"),
)
@click.argument(
    "target",
    metavar="[last|REQUEST|SESSION]",
    default=_LAST,
    shell_complete=complete_session,
)
@file_argument
@journal_options
def explain_command(data_dir: Path, journal: str | None, target: str, file: Path | None) -> None:
    """
    Explain why a prompt was computed, or reused.

    Says in a few sentences what the request reused, what was computed and why, what differed from
    the conversation that it was meant to continue, and what its client can do. Of a session, each
    request is explained. The first six characters of an id are enough. FILE is an export; without
    it, the server's journal is read.

    The sentences quote the prompt.
    """
    source = Source.of(data_dir, journal, file)
    base = source.base()
    found = list(_chosen(target, list(_explained(source, base))))
    if not found:
        raise StoreError(
            f"No request or session {target} is in the journal{too_short_words(target)}. `ops "
            "sessions` lists the sessions."
        )
    for number, one in enumerate(found):
        if number:
            click.echo()
        click.echo(f"request {one.request} of session {printable(one.session)}, ", nl=False)
        click.echo(time_text(one.time_us))
        click.echo(printable(one.explanation.text))
        for node, blocks in one.copied_of.items():
            click.echo(f"Node {node} computed {blocks} of the copied blocks.")


def _explained(source: Source, base: Base | None) -> Iterator[Explained]:
    """
    Each request whose path was selected, in order. What it copied is known once all are read.
    """
    model: Model | ev.ModelLoaded | None = state_of(base).model if base is not None else None
    received: dict[str, ev.RequestReceived] = {}
    # Of each session the rows of its last two requests.
    rows: dict[str, tuple[int, int]] = {}
    losses = Losses()
    adopted: dict[str, str] = {}  # the blocks of other nodes in memory, and who sealed them
    copied: dict[str, Counter[str]] = {}  # by request
    for row in require_complete(source.rows("read", base=base), base):
        if row.kind not in _KINDS:
            continue
        event = decode(row).event
        losses = losses.after(row.position, event)
        match event:
            case ev.ModelLoaded():
                model = event
            case ev.RequestReceived():
                received[event.session] = event
                rows[event.session] = (row.position, rows.get(event.session, (0, 0))[0])
            case ev.PathSelected() if event.session in received and model is not None:
                last, before = rows.get(event.nearest or "", (0, 0))
                since = before if event.nearest == event.session else last
                found = Explained(
                    request=event.request,
                    session=event.session,
                    time_us=row.time_us,
                    explanation=explain(
                        received[event.session],
                        event,
                        block_tokens=model.block_tokens,
                        min_cache_tokens=model.min_cache_tokens,
                        grain=model.grain,
                        cause=losses.since(since).cause,
                    ),
                )
                copied[event.request] = found.copied_of
                yield found
            case ev.BlockAdopted():
                adopted[event.key] = event.node
            case ev.BlocksRestored() if event.request in copied:
                copied[event.request].update(adopted[key] for key in event.keys if key in adopted)
            case ev.BlockEvicted():
                adopted.pop(event.key, None)
            case ev.ServerStopped() | ev.ServerLost() | ev.ModelUnloaded():
                adopted.clear()
            case _:
                pass


def _chosen(target: str, found: list[Explained]) -> Iterator[Explained]:
    if target == _LAST and found:
        yield found[-1]
        return
    name = named(target, {one.request for one in found} | {one.session for one in found})
    for one in found:
        if name in (one.request, one.session):
            yield one
