"""The option ``--models``: a file of several models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from cairn.engine.model.models_file import ModelList, ModelsFault, read_models
from cairn.ops.cli import Unreadable

_OF_ONE = {"model": "--model", "adapter": "--adapter", "model_name": "--model-name"}

MODELS: Mapping[str, Any] = {
    "metavar": "FILE",
    "type": click.Path(dir_okay=False, path_type=Path),
    "help": "A TOML file of several models. One is in memory at a time, as requests name them.",
}
"""What the option is, without its name."""

models_option: Callable[[Any], Any] = click.option("--models", **MODELS)


def read_models_option(options: Mapping[str, Any]) -> ModelList | None:
    """
    The models of the option ``--models``; None if it is not given.

    Raises:
        Unreadable: the file cannot be used, or another option contradicts it.
    """
    path = options["models"]
    if path is None:
        return None
    for option, spelled in _OF_ONE.items():
        if options[option] is not None:
            raise Unreadable(
                f"{spelled} is for one model and cannot be used with --models. Omit one of them; "
                "in the file, each model has its own name, path and adapter."
            )
    try:
        return read_models(path)
    except ModelsFault as fault:
        raise Unreadable(str(fault)) from fault
