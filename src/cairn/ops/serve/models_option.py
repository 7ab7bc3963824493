"""The option ``--models``: a file of several models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

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


_ORDER = (
    ParameterSource.COMMANDLINE,
    ParameterSource.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP,
    ParameterSource.DEFAULT,
)
"""Where an option is set, what counts most first."""


def choose_models(context: click.Context) -> None:
    """
    Of one model and a file of several, keep what was set where it counts more: a model that the
    operator names on the command line counts more than `models` in the configuration file, and than
    the name and adapter there, which are of another model; that is printed. Options that contradict
    each other are left to ``read_models_option``, which refuses them. Modifies the
    parameters.
    """

    def place(option: str) -> int:
        source = context.get_parameter_source(option)
        return _ORDER.index(source) if source in _ORDER else 0

    options = context.params
    chosen = min(("model", "models"), key=lambda name: (options[name] is None, place(name)))
    if options[chosen] is None:
        return  # Pebble, perhaps with an adapter or a name
    for option in (*_OF_ONE, "models"):
        if options[option] is None or place(option) <= place(chosen):
            continue
        options[option] = None
        if chosen == "model" and option != "models":
            (known,) = (one for one in context.command.params if one.name == option)
            hint = known.get_error_hint(context)
            click.echo(f"{hint} is for another model than --model, and not used.", err=True)


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
