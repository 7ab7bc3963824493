"""
The sampling parameters and template settings that a model's makers recommend, from its
generation_config.json.

mlx-lm reads the end tokens from that file itself. They are only checked here, because mlx-lm
ignores what it cannot read.
"""

from __future__ import annotations

import reprlib
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

_MUST_BE: Mapping[str, str] = {
    "top_k": "an integer",
    "do_sample": "true or false",
    "repetition_guard": "true or false",
    "eos_token_id": "a token id or a list of them",
    "chat_template_kwargs": "an object",
}
"""What a field must be, other than a number."""


class GenerationConfigFault(Exception):
    """The file cannot be used. The message says what, where and what to do."""


class _GenerationConfig(msgspec.Struct, kw_only=True):
    """The fields of the file that are used. A field that is null counts as left out."""

    temperature: float = _USUAL.temperature
    top_p: float = _USUAL.top_p
    top_k: int = _USUAL.top_k
    min_p: float = _USUAL.min_p
    repetition_penalty: float = _USUAL.repetition_penalty
    repetition_guard: bool = _USUAL.repetition_guard
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
            repetition_guard=self.repetition_guard,
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
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        found = {name: value for name, value in found.items() if value is not None}
        try:
            return msgspec.convert(found, _GenerationConfig)
        except msgspec.ValidationError as error:
            # If a value has another type, it ends with its place: "... - at `$.eos_token_id[0]`".
            name = str(error).partition("`$.")[2].rstrip("`").partition("[")[0]
            if name not in found:
                raise
            fault = f"must be {_MUST_BE.get(name, 'a number')}, not {reprlib.repr(found[name])}"
            if str(error).startswith("Number out of range"):
                fault = "is too large"
            raise ValueError(f"{name} {fault}") from None
    except (OSError, ValueError) as error:
        raise GenerationConfigFault(
            f"{path} cannot be used: {error}. Correct it, or remove it to use OpenAI's defaults."
        ) from error
