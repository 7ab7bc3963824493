"""
The sampling parameters and template settings that a model's makers recommend, from its
generation_config.json.

mlx-lm reads the end tokens from that file itself. They are only checked here, because mlx-lm
ignores what it cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from cairn.engine.json_text import parsed
from cairn.engine.prompt.template_settings import RENDERED
from cairn.engine.sampling import Sampling

NAME: Final = "generation_config.json"

_USUAL = Sampling()
_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class GenerationConfigFault(Exception):
    """The file cannot be used. The message says what, where and what to do."""


class _GenerationConfig(msgspec.Struct, kw_only=True):
    """The fields of the file that are used. A field that is null counts as left out."""

    temperature: float = _USUAL.temperature
    top_p: float = _USUAL.top_p
    top_k: int = _USUAL.top_k
    min_p: float = _USUAL.min_p
    repetition_penalty: float = _USUAL.repetition_penalty
    do_sample: bool = True
    eos_token_id: _TokenId | list[_TokenId] = []
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        self.sampling()
        if taken := sorted(RENDERED & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs.{taken[0]} belongs to the server")

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature if self.do_sample else 0.0,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


def read_defaults(directory: Path) -> Sampling:
    """
    The sampling parameters of a request that sets none. OpenAI's defaults apply to those that the
    file does not set.

    Raises:
        GenerationConfigFault: the file exists and cannot be used.
    """
    return _read(directory).sampling()


def read_template_settings(directory: Path) -> Mapping[str, Any]:
    """
    The template settings of a request that sets none: the file's ``chat_template_kwargs``, named as
    in a request. This is an extension of Cairn; no other engine reads them there.

    Raises:
        GenerationConfigFault: the file exists and cannot be used.
    """
    return _read(directory).chat_template_kwargs


def _read(directory: Path) -> _GenerationConfig:
    path = directory / NAME
    try:
        if not path.is_file():
            return _GenerationConfig()
        found = parsed(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            found = {name: value for name, value in found.items() if value is not None}
        return msgspec.convert(found, _GenerationConfig)
    except (OSError, ValueError) as error:
        raise GenerationConfigFault(
            f"{path} cannot be used: {error}. Correct it, or remove it to use OpenAI's defaults."
        ) from error
