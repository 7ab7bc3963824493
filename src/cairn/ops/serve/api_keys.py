"""
API keys from the command line, a file and the environment.

No message here contains a key, not even an invalid one: terminals keep what they show, and so does
the log of the program that starts the server.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import click

from cairn.journal.tenants import KEY_MIN, LOCAL, NAME_MAX, is_tenant
from cairn.ops.cli import Unreadable

KEYS_VARIABLE = "CAIRN_API_KEYS"
"""The keys that a server accepts."""

KEY_VARIABLE = "CAIRN_API_KEY"
"""The key that a client sends."""

_KEY_MAX = 200
_KEY = re.compile(r"[\x21-\x7e]+")
_MAKE_ONE = "`openssl rand -hex 24` creates a good one"


@attrs.frozen
class _Given:
    """A key with its tenant, and where it was given, for messages."""

    tenant: str
    key: str = attrs.field(repr=False)
    where: str
    is_named: bool


def read_keys(options: Sequence[str], file: Path | None) -> tuple[tuple[str, str], ...] | None:
    """
    (tenant, key) of all given keys; None if there are none.

    Args:
        options: the values of ``--api-key``.
        file: the value of ``--api-key-file``.

    Raises:
        Unreadable: a key cannot be used.
    """
    named = (_given(text, f"--api-key number {at}") for at, text in enumerate(options, start=1))
    given = [*named, *_from_file(file), *_from_environment()]
    if not given:
        return None
    _check_together(given)
    return tuple((one.tenant, one.key) for one in given)


def read_key(value: str | None) -> str | None:
    """
    A client's key; None if it is empty.

    Raises:
        click.BadParameter: it is invalid.
    """
    key = (value or "").strip()
    if not key:
        return None
    if not _KEY.fullmatch(key):
        raise click.BadParameter("A key has no spaces, and only ASCII characters.")
    return key


def _key(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    return read_key(value)


api_key_option = click.option(
    "--api-key",
    metavar="KEY",
    envvar=KEY_VARIABLE,
    callback=_key,
    help=f"Your API key, if the server requires one. Prefer ${KEY_VARIABLE}: other users can see "
    "options in the list of processes.",
)
"""The client's key, for a command that sends requests to a server."""


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    try:
        mode = file.stat().st_mode
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Unreadable(f"The file of API keys {file} cannot be read: {what}.") from error
    if stat.S_IMODE(mode) & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        click.echo(
            f"Warning: other users can read or write {file}. Run `chmod 600` on it.", err=True
        )
    found = [
        _given(line.strip(), f"Line {at} of {file}")
        for at, line in enumerate(lines, start=1)
        if line.strip() and not line.strip().startswith("#")
    ]
    if not found:
        raise Unreadable(f"{file} has no API key. Write one on each line, as NAME=KEY.")
    yield from found


def _from_environment() -> Iterator[_Given]:
    value = os.environ.get(KEYS_VARIABLE)
    if value is None:
        return
    if not value.split():
        # An operator who meant to set keys must not get an open server.
        raise Unreadable(
            f"${KEYS_VARIABLE} has no API key. Unset it, or set it to keys as NAME=KEY, separated "
            "by spaces."
        )
    for at, word in enumerate(value.split(), start=1):
        yield _given(word, f"Key number {at} of ${KEYS_VARIABLE}")


def _given(text: str, where: str) -> _Given:
    """A key as ``NAME=KEY``, or without a name."""
    name, parted, key = text.partition("=")
    if not parted:
        name, key = LOCAL, text
    if not is_tenant(name):
        raise Unreadable(
            f"{where} has a name that cannot be used. Write NAME=KEY; a name has 1 to {NAME_MAX} "
            "letters, digits, dots, dashes or underscores, and begins with a letter or a digit."
        )
    if not (KEY_MIN <= len(key) <= _KEY_MAX and _KEY.fullmatch(key)):
        # A key that ends with an equals sign, as base64 does, looks like a name.
        how = (
            "One that contains an equals sign needs NAME= before it"
            if parted
            else "To name it, write NAME=KEY"
        )
        raise Unreadable(
            f"{where} cannot be used: a key has {KEY_MIN} to {_KEY_MAX} ASCII characters and no "
            f"spaces. {how}. {_MAKE_ONE}."
        )
    return _Given(name, key, where, is_named=bool(parted))


def _check_together(given: Iterable[_Given]) -> None:
    known: dict[str, _Given] = {}
    nameless: _Given | None = None
    for one in given:
        other = known.setdefault(one.key, one)
        if other.tenant != one.tenant:
            raise Unreadable(
                f"{one.where} is the same as the key of {other.tenant}. Each tenant needs its own."
            )
        if one.is_named or other is not one:
            continue
        if nameless is not None:
            raise Unreadable(
                f"{one.where} has no name, and neither has another key. Write NAME=KEY: each name "
                "is a tenant, and tenants share neither sessions nor caches."
            )
        nameless = one
