"""Errors in the form that Ollama's clients read: ``{"error": "..."}``, whole or as a line."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import attrs

from cairn.http.ollama.objects import OllamaErrorEnvelope
from cairn.http.wire.checks import ClientError
from cairn.http.wire.errors import ErrorAnswer, FormatPlaces, describe

ADDRESS: Final = "/api"

_PLACES = FormatPlaces(answer="format", schema="format")

INSTEAD: Final = MappingProxyType(
    {
        "pull": "models are downloaded by `cairn pull NAME` on the server's machine, and served by "
        "`cairn serve --model NAME`",
        "push": "models are not published from here",
        "create": "models are not made here; name one and its settings in the server's models file",
        "copy": "a model gets further names in the server's models file (`aliases`)",
        "delete": "models are removed by `cairn rm NAME` on the server's machine",
    }
)
"""What to do instead, by the last part of an address of Ollama's that is not here."""


@attrs.frozen(kw_only=True)
class OllamaError(ErrorAnswer):
    """The answer to an error at an address of Ollama's."""

    def envelope(self) -> OllamaErrorEnvelope:
        """The body, in the form that Ollama's clients read."""
        return OllamaErrorEnvelope(error=self.message, code=self.code, param=self.param)


def is_ours(path: str) -> bool:
    """Whether an address belongs to Ollama's API."""
    return path.startswith(f"{ADDRESS}/")


def ollama_error(error: BaseException) -> OllamaError:
    """The answer to an error. Logs unexpected errors."""
    answer = describe(error, _PLACES)
    fields = attrs.asdict(answer, recurse=False)
    return OllamaError(**fields)


def not_here(path: str) -> ClientError | None:
    """The error for an address of Ollama's that this server does not have; None for others."""
    name = path.rstrip("/").removeprefix(f"{ADDRESS}/")
    if not is_ours(path) or name not in INSTEAD:
        return None
    return ClientError(
        f"{ADDRESS}/{name} is not supported: {INSTEAD[name]}", code="not_found", status=404
    )
