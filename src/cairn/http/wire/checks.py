"""
The error for a request that cannot be used, and the checks of all protocols that raise it.

The limits on the size of a request are checked before any work is done, so that one request cannot
delay the others while its prompt is rendered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from types import MappingProxyType
from typing import Any, Final, TypeVar

from cairn.engine.json_text import fault_of

T = TypeVar("T")

JsonObject = Mapping[str, Any]

BODY_BYTES_MAX: Final = 32 * 1024 * 1024
MESSAGES_MAX: Final = 10_000
TOOLS_MAX: Final = 1024
CALLS_MAX: Final = 1024


class ClientError(Exception):
    """
    The client's request cannot be used. It changed nothing.

    Attributes:
        message: what is wrong, and what to send instead.
        param: the path of the parameter in the body.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.headers = headers


def missing(where: str, instead: str | None = None) -> ClientError:
    """
    The error for a missing required field.

    Args:
        where: the path of the field in the body.
        instead: a field that may have been sent by mistake.
    """
    hint = "" if instead is None else f". Did you mean `{where}` instead of `{instead[:100]}`?"
    return ClientError(
        f"Missing required field `{where}`{hint}",
        param=where,
        code="missing_required_parameter",
    )


def given(value: T | None, where: str) -> T:
    """
    The value of a required field.

    Args:
        where: the path of the field in the body.

    Raises:
        ClientError: the field is missing.
    """
    if value is None:
        raise missing(where)
    return value


def schema_at(found: Any, where: str) -> JsonObject:
    """
    The schema at a path of the body.

    Raises:
        ClientError: it is missing, or cannot be read.
    """
    schema = object_at(found, where)
    check_json(schema, where)
    return schema


def object_at(found: Any, where: str) -> JsonObject:
    """
    The object at a path of the body.

    Raises:
        ClientError: it is missing, or is not an object.
    """
    if found is None:
        raise missing(where)
    if not isinstance(found, Mapping):
        raise ClientError(f"{where} must be an object", param=where, code="invalid_type")
    return found


def check_json(value: JsonObject, where: str) -> None:
    """
    Refuse JSON that cannot be passed on unchanged.

    Raises:
        ClientError: it is nested too deeply, or has an integer that is too large.
    """
    if (fault := fault_of(value)) is not None:
        raise ClientError(f"{where} {fault}", param=where)


def check_known(value: str, known: Collection[str], where: str) -> None:
    """
    Refuse a value that is not among the known ones.

    Raises:
        ClientError: it is unknown.
    """
    if value not in known:
        raise ClientError(
            f"{where} is {value[:40]!r}; it must be one of {', '.join(known)}", param=where
        )


def check_count(items: Sized, where: str, most: int) -> None:
    """
    Refuse a list that is too long.

    Args:
        where: the path of the parameter in the body.

    Raises:
        ClientError: there are more than ``most``.
    """
    if len(items) > most:
        raise ClientError(f"{where} has {len(items)} entries; send at most {most}", param=where)


def check_name(name: str, where: str) -> None:
    """
    Refuse a tool without a name, because its calls could not be distinguished from text.

    Args:
        where: the path of the name in the body.

    Raises:
        ClientError: the name is empty.
    """
    if not name:
        raise ClientError(f"{where} must not be empty", param=where)
