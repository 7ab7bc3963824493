"""The model that `cairn serve` and `cairn chat` are asked for: found here, or downloaded first."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from cairn.engine.json_text import parsed
from cairn.engine.model.files import is_path
from cairn.ops.cli import Interrupted, Unreadable
from cairn.ops.common.output import printable, size_text
from cairn.ops.common.program import program
from cairn.ops.models.bars import DownloadBars
from cairn.ops.models.fitting import (
    FIT_WORDS,
    Fit,
    Machine,
    fit_of,
    gigabytes,
    suggested_words,
    this_machine,
)
from cairn.ops.models.found import at_hand, bits_of, hub_cache, hub_folder
from cairn.ops.models.names import hub_name
from cairn.ops.models.pull import (
    Listed,
    disk_fault,
    download_model,
    free_disk,
    listed_on_hub,
)
from cairn.ops.models.short_names import PEBBLE

_FLOAT32_BITS = 32
_SMALL_BYTES = 1_000_000  # the configuration, which was read to know what the model is


@attrs.frozen
class ReadyModel:
    """
    A model to serve.

    Attributes:
        where: its directory; None for the built-in model.
        name: on the hub; None if it was given as a path.
    """

    where: str | None
    name: str | None


def ready_model(
    given: str | None,
    *,
    accept_tight: bool = False,
    until_then: str = "the server does not listen before",
) -> ReadyModel:
    """
    The model that an option names. One of a hub is looked for on this machine; if it is not here
    it is downloaded, with its progress on stderr.

    Args:
        given: a path, a short name or a name on the hub; None for the built-in model.
        accept_tight: whether one that does not fit in memory is downloaded too.
        until_then: what does not happen before the download has ended.

    Raises:
        Unreadable: there is no such model, or it cannot be downloaded, or does not fit.
        Interrupted: Ctrl-C ended the download.
    """
    if given is None or (given == PEBBLE and not is_path(given)):
        return ReadyModel(None, None)
    name = hub_name(given)
    if name is None:
        return ReadyModel(given, None)
    directory = at_hand(name)
    if directory is None:
        listed = listed_on_hub(name)
        machine = this_machine()
        if listed_fit(listed, machine) is Fit.NO and not accept_tight:
            raise Unreadable(memory_words(listed, machine, f"{program()} serve --model"))
        click.echo(
            f"{printable(name)} is downloaded first; {until_then}. `{program()} pull "
            f"{printable(given)}` does only that.",
            err=True,
        )
        directory = downloaded(listed, machine)
    return ReadyModel(str(directory), name)


def listed_fit(listed: Listed, machine: Machine) -> Fit:
    """Whether a model that the hub lists fits. Its configuration must be here."""
    config = next(file for file in listed.files if file.name == "config.json")
    text = (hub_folder(listed.name) / "blobs" / config.digest).read_text(encoding="utf-8")
    size = listed.weights_bytes
    return fit_of(size, round(size * _FLOAT32_BITS / bits_of(parsed(text))), machine)


def memory_words(listed: Listed, machine: Machine, command: str) -> str:
    """That a model does not fit in memory, and which one does."""
    return (
        f"{printable(listed.name)} does not fit in memory: its weights take "
        f"{gigabytes(listed.weights_bytes)}, and the KV of conversations comes on top; the machine "
        f"has {size_text(machine.memory_bytes)}.{suggested_words(machine, command)}"
    )


def downloaded(listed: Listed, machine: Machine) -> Path:
    """
    Say what a download takes and whether it fits; then download and check the model.

    Raises:
        Unreadable: it does not fit on the disk, or the download failed.
        Interrupted: Ctrl-C ended it.
    """
    name = printable(listed.name)
    missing, total = listed.missing_bytes, listed.total_bytes
    present = total - missing
    here = f"; {gigabytes(present)} are here" if present > _SMALL_BYTES else ""
    if (fault := disk_fault(listed)) is not None:
        raise Unreadable(fault)
    click.echo(f"{name}: {gigabytes(missing)} to download{here}.", err=True)
    click.echo(
        f"  disk    fits: {gigabytes(free_disk())} are free at {hub_cache()}\n"
        f"  memory  {FIT_WORDS[listed_fit(listed, machine)]}: {gigabytes(listed.weights_bytes)} of "
        f"weights; {size_text(machine.free_bytes)} of {size_text(machine.memory_bytes)} are free",
        err=True,
    )
    try:
        with DownloadBars(name) as bars:
            directory = download_model(listed, bars)
    except KeyboardInterrupt as interrupt:
        done = gigabytes(total - listed.missing_bytes)
        raise Interrupted(
            f"Stopped. {done} of {gigabytes(total)} are here; the next download of {name} "
            "continues there."
        ) from interrupt
    click.echo(f"Checked the hashes of {len(listed.files)} files.", err=True)
    return directory
