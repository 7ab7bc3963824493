"""
Errors at the addresses of OpenAI's responses: those of ``errors.py`` with the places of this
protocol's bodies. The envelope is the same.
"""

from __future__ import annotations

from cairn.http.wire.errors import ErrorAnswer, FormatPlaces, describe

ADDRESS = "/v1/responses"

#: Which place a tool has among those on offer says nothing to who sent others besides.
_PLACES = FormatPlaces(
    prompt="input",
    answer="text.format",
    schema="text.format.schema",
    parameters="tools.{name}.parameters",
)


def is_ours(path: str) -> bool:
    """Whether an address is one of responses."""
    return path == ADDRESS or path.startswith(f"{ADDRESS}/")


def responses_error(error: BaseException) -> ErrorAnswer:
    """What to tell the client. Writes to the log where the error is not foreseen."""
    return describe(error, _PLACES)
