"""JSON to and from the wire. A body that cannot be decoded is refused with a helpful message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from cairn.http.wire.checks import ClientError, JsonObject, missing
from cairn.http.wire.suggestions import slip_for

T = TypeVar("T")

_NONE: JsonObject = MappingProxyType({})

_encoder = msgspec.json.Encoder()

_EXPECTED = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}


def encode(value: Any) -> bytes:
    """A value as JSON."""
    return _encoder.encode(value)


def decode_object(body: bytes) -> dict[str, Any]:
    """
    A body as an object.

    Raises:
        ClientError: it is not JSON, or not an object.
    """
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except RecursionError as error:
        raise _too_deep() from error
    except UnicodeDecodeError as error:
        raise ClientError("the body is not valid UTF-8", code="invalid_json") from error
    except ValueError as error:
        hint = "send a JSON object" if not body.strip() else str(error)
        raise ClientError(f"the body is not valid JSON: {hint}", code="invalid_json") from error


def to_struct(fields: JsonObject, kind: type[T]) -> T:
    """
    The fields as a struct; unknown ones are ignored.

    Raises:
        ClientError: a field is missing or of another type.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, fields, getattr(kind, "__struct_fields__", ())) from error
    except RecursionError as error:
        raise _too_deep() from error


def _too_deep() -> ClientError:
    return ClientError("the body is nested too deeply", code="invalid_json")


def _invalid(
    error: msgspec.ValidationError, fields: JsonObject = _NONE, known: Iterable[str] = ()
) -> ClientError:
    text = str(error)
    place = _PLACE.search(text)
    param = place[1] if place else ""
    if "..." in param:  # somewhere within: the decoder does not say where
        param = param.split("...")[0].rstrip("[.")
    if absent := _MISSING.search(text):
        instead = None if param else slip_for(absent[1], fields, known)
        return missing(f"{param}.{absent[1]}".lstrip("."), instead)
    if expected := _EXPECTED.search(text):
        kinds = [_WORDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
        got = _WORDS.get(expected[2], expected[2])
        return ClientError(
            f"{param or 'the body'} must be {' or '.join(kinds)}, not {got}",
            param=param or None,
            code="invalid_type",
        )
    fact = _PLACE.sub("", text)
    return ClientError(f"{param or 'the body'}: {fact}", param=param or None)
