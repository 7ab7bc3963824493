"""The option ``--models``: a file of the models that may be loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from cairn.engine.model.models_file import ModelList, ModelsFault, read_models
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
