"""``cairn models``: which models are here, which are loaded, and which would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec

from cairn.ops.common.locations import data_dir_option, example
from cairn.ops.common.output import counted, printable, size_text, table
from cairn.ops.common.program import program
from cairn.ops.models.fitting import (
    Fit,
    Machine,
    fit_of,
    fit_of_known,
    gigabytes,
    suggested_words,
    this_machine,
)
from cairn.ops.models.found import Found, all_found
from cairn.ops.models.short_names import CHECKED, KNOWN_MODELS, KnownModel, known_model, short_name
from cairn.ops.serve.api_keys import api_key_option
from cairn.ops.state.running import health_of, running

COLUMNS = ("name", "state", "size", "context", "fits", "where")
"""What a line has."""

_NAMED = 3


@attrs.frozen(kw_only=True)
class Line:
    """
    A model in the list.

    Attributes:
        name: by which it can be served.
        state: ``loaded`` and the like if the server has it, ``here``, ``incomplete``, or empty if
            it is not on this machine.
        size_bytes: on disk, or what a download takes; None if unknown.
        context_tokens: None if unknown.
        fits: None if unknown.
        where: who holds it and the name there or its path.
    """

    name: str
    state: str
    size_bytes: int | None
    context_tokens: int | None
    fits: Fit | None
    where: str


@click.command(epilog=example("ops models", "ops models --all", "ops models --json"))
@click.option("--all", "of_all", is_flag=True, help="Also list all short names.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@data_dir_option
@api_key_option
def models(of_all: bool, as_json: bool, data_dir: Path, api_key: str | None) -> None:
    """
    List the models on this machine, and whether they are loaded and fit.

    Finds those in the cache of the Hugging Face Hub and in the folders of LM Studio, and the ones
    of the running server. The column fits is yes if a model fits the memory that is free now, tight
    if it fits once other programs are closed, slow if only its quantised weights fit on a CPU, and
    no. Needs no network.
    """
    server = running(data_dir)
    health = health_of(server.url, api_key) if server is not None and server.url else None
    machine = this_machine()
    found = all_found()
    lines = list(lines_of(found, health or {}, machine, of_all=of_all))
    if as_json:
        click.echo(msgspec.json.encode([_as_object(line) for line in lines]).decode())
        return
    table(COLUMNS, (_cells(line) for line in lines), spare=("where", "context"))
    for note in notes(found, machine, of_all=of_all):
        click.echo(note, err=True)


def lines_of(
    found: Found, health: Mapping[str, Any], machine: Machine, *, of_all: bool
) -> Iterator[Line]:
    """
    The lines of the list: what is here, and then what could be.

    Args:
        health: of the running server; empty if none runs.
        of_all: also list the models of the table that are not here.
    """
    served = {str(one["name"]): str(one["state"]) for one in health.get("models", ())}
    for held in found.models:
        known = known_model(held.name)
        state = served.pop(held.name, None) or served.pop(held.directory.name, None)
        here = "incomplete" if held.is_incomplete else "here"
        yield Line(
            name=short_name(held.name),
            state=here if state is None or state == "not_loaded" else state,
            size_bytes=held.files_bytes,
            context_tokens=held.context_tokens or None,
            fits=fit_of(held.weights_bytes, held.float32_bytes, machine)
            if held.weights_bytes
            else _fit_known(known, machine),
            where=held.held_by if known is None else f"{held.held_by}: {held.name}",
        )
    for name, state in served.items():
        yield Line(
            name=name,
            state=state.replace("_", " "),
            size_bytes=None,
            context_tokens=health["context_tokens"] if name == health.get("model") else None,
            fits=Fit.YES if state == "loaded" else None,
            where="the running server",
        )
    if of_all:
        here_names = {held.name for held in found.models}
        for known in KNOWN_MODELS:
            if known.hub_name not in here_names:
                yield Line(
                    name=known.name,
                    state="",
                    size_bytes=known.weights_bytes,
                    context_tokens=known.context_tokens,
                    fits=fit_of_known(known, machine),
                    where=f"{known.hub_name}: {known.words}",
                )


def _fit_known(known: KnownModel | None, machine: Machine) -> Fit | None:
    return None if known is None else fit_of_known(known, machine)


def notes(found: Found, machine: Machine, *, of_all: bool) -> Iterator[str]:
    """What the list does not say, a line each."""
    free, memory = size_text(machine.free_bytes), size_text(machine.memory_bytes)
    yield f"{free} of {memory} of memory are free."
    for holder, names in found.unreadable.items():
        shown = ", ".join(map(printable, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
        why = "GGUF, which mlx-lm cannot read" if holder == "Ollama" else "no models for MLX"
        yield f"{holder} also holds {counted(len(names), 'model')} ({shown}): {why}."
    if of_all:
        yield (
            f"Short names were checked on {CHECKED}; sizes of what is not here are computed. "
            f"Download one with `{program()} pull NAME`."
        )
    else:
        fitting = suggested_words(machine, f"{program()} pull")
        yield f"`{program()} models --all` lists more.{fitting}"


def _cells(line: Line) -> tuple[object, ...]:
    return (
        line.name,
        line.state.replace("_", " "),
        None if line.size_bytes is None else gigabytes(line.size_bytes),
        line.context_tokens,
        None if line.fits is None else line.fits.value,
        line.where,
    )


def _as_object(line: Line) -> dict[str, Any]:
    return {**attrs.asdict(line), "fits": None if line.fits is None else line.fits.value}
