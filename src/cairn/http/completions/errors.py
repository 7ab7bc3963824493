"""The address of OpenAI's older completions, and the field paths that its errors name."""

from __future__ import annotations

from cairn.http.wire.errors import FormatPlaces

ADDRESS = "/v1/completions"

PLACES = FormatPlaces(prompt="prompt")
