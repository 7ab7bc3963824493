"""The address of OpenAI's responses, and the field paths that its errors name."""

from __future__ import annotations

from cairn.http.wire.errors import FormatPlaces

ADDRESS = "/v1/responses"

#: By name, because the index among the functions means nothing to a client that also sent tools of
#: another kind.
PLACES = FormatPlaces(
    prompt="input",
    answer="text.format",
    schema="text.format.schema",
    parameters="tools.{name}.parameters",
)
