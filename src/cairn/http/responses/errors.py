"""
Errors at the addresses of OpenAI's responses: those of ``wire/errors.py``, with the field paths of
this protocol.
"""

from __future__ import annotations

from cairn.http.wire.errors import ErrorAnswer, FormatPlaces, describe

ADDRESS = "/v1/responses"

#: By name, because the index among the functions means nothing to a client that also sent tools of
#: another kind.
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
    """The answer to an error. Logs unexpected errors."""
    return describe(error, _PLACES)
