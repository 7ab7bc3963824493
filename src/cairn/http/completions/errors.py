"""Errors at the address of OpenAI's older completions."""

from __future__ import annotations

from cairn.http.wire.errors import ErrorAnswer, FormatPlaces, describe

ADDRESS = "/v1/completions"

PLACES = FormatPlaces(prompt="prompt")


def completions_error(error: BaseException) -> ErrorAnswer:
    """The answer to an error. Logs unexpected ones."""
    return describe(error, PLACES)
