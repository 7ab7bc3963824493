"""
The sampling parameters and template settings that a model's makers recommend, from its
generation_config.json.

mlx-lm reads the end tokens from that file itself. They are only checked here, because mlx-lm
ignores what it cannot read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cairn.engine.json_text import parsed
from cairn.engine.prompt.template_settings import RENDERED
from cairn.engine.sampling import Sampling

T = TypeVar("T")

NAME = "generation_config.json"

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


class GenerationConfigFault(Exception):
    """The file cannot be used. The message says what, where and what to do."""


def read_defaults(directory: Path) -> Sampling:
    """
    The sampling parameters of a request that sets none. OpenAI's defaults apply to those that the
    file does not set.

    Raises:
        GenerationConfigFault: the file exists and cannot be used.
    """
    return _read(directory, _defaults, Sampling())


def read_template_settings(directory: Path) -> Mapping[str, Any]:
    """
    The template settings of a request that sets none: the file's ``chat_template_kwargs``, named as
    in a request. This is an extension of Cairn; no other engine reads them there.

    Raises:
        GenerationConfigFault: the file exists and cannot be used.
    """
    return _read(directory, _template_settings, {})


def _read(directory: Path, what: Callable[[Mapping[str, Any]], T], otherwise: T) -> T:
    path = directory / NAME
    try:
        if not path.is_file():
            return otherwise
        found = parsed(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        return what({name: value for name, value in found.items() if value is not None})
    except (OSError, ValueError) as error:
        raise GenerationConfigFault(
            f"{path} cannot be used: {error}. Correct it, or remove it to have the usual defaults."
        ) from error


def _template_settings(found: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = found.get("chat_template_kwargs", {})
    if not isinstance(settings, dict):
        raise ValueError("chat_template_kwargs must be an object")
    if taken := sorted(RENDERED & settings.keys()):
        raise ValueError(f"chat_template_kwargs.{taken[0]} belongs to the server")
    return settings


def _defaults(found: Mapping[str, Any]) -> Sampling:
    _check_ends(found.get("eos_token_id", []))
    given: dict[str, Any] = {}
    for name in _NUMBERS:
        if name in found:
            given[name] = _number(name, found[name])
    if "top_k" in found:
        if type(found["top_k"]) is not int:
            raise ValueError(f"top_k must be an integer, not {found['top_k']!r}")
        given["top_k"] = found["top_k"]
    if not isinstance(found.get("do_sample", True), bool):
        raise ValueError(f"do_sample must be true or false, not {found['do_sample']!r}")
    if found.get("do_sample") is False:
        given["temperature"] = 0.0
    return Sampling(**given)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is no number that can be meant: it is too large") from None


def _check_ends(value: Any) -> None:
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {value!r}")
