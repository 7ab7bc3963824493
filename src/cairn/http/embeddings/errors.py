"""The address of OpenAI's embeddings, and the field path that its errors name."""

from __future__ import annotations

from cairn.http.wire.errors import FormatPlaces

ADDRESS = "/v1/embeddings"

PLACES = FormatPlaces(prompt="input")
