"""
The option ``--models``: a file of the models that may be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from cairn.actors.models import Choice
from cairn.actors.settings import Settings
from cairn.engine.models_file import ModelEntry, ModelList, ModelsFault, read_models, told_of
from cairn.ops.cli import Unreadable

_OF_ONE = {"model": "--model", "adapter": "--adapter", "model_name": "--model-name"}

models_option: Callable[[Any], Any] = click.option(
    "--models",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A TOML file of several models, loaded one at a time as requests ask for them.",
)


def read_models_option(options: Mapping[str, Any]) -> ModelList | None:
    """
    The models that the command's options name; None where there is no file of them.

    Raises:
        Unreadable: the file cannot be used, or an option says otherwise.
    """
    path = options["models"]
    if path is None:
        return None
    for option, spelled in _OF_ONE.items():
        if options[option] is not None:
            raise Unreadable(
                f"{spelled} is about one model, and --models about several. Leave one of them out; "
                "in the file, each model has its name, its path and its adapter."
            )
    try:
        return read_models(path)
    except ModelsFault as fault:
        raise Unreadable(str(fault)) from fault


def choices_of(models: ModelList, settings: Settings) -> tuple[Choice, ...]:
    """
    The models with their settings: the command's, but for what the file says of one.

    Raises:
        Unreadable: a directory cannot be read any more.
    """
    try:
        return tuple(
            Choice(entry=entry, settings=_settings(entry, settings), told=told_of(entry))
            for entry in models.entries
        )
    except ModelsFault as fault:
        raise Unreadable(str(fault)) from fault


def _settings(entry: ModelEntry, settings: Settings) -> Settings:
    own = ("dtype", "chunk_tokens", "decode_rows", "pool_bytes", "blocks_bytes")
    said = {name: value for name in own if (value := getattr(entry, name)) is not None}
    return attrs.evolve(
        settings,
        model=entry.directory,
        model_name=entry.name,
        adapter=entry.adapter,
        **said,
    )
