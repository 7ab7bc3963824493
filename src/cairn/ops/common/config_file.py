"""
The configuration file: options of `ops serve`, one a line, as TOML. Reads it, and changes nothing.

::

    model = "~/models/Qwen3-4B-4bit"
    port = 8080
    allow_host = ["studio.local"]

Which options there are, and of which type, is checked by ``cairn.ops.serve.configured``.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from cairn.ops.cli import Unreadable

CONFIG_VARIABLE = "CAIRN_CONFIG"
"""The path of the configuration file, for all commands."""

_BYTES_MAX = 1 << 20
_TWICE = ("Cannot overwrite a value", "Cannot declare", "Duplicate")
_LINE = re.compile(r"at line (\d+)")
_KEY = re.compile(r"\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*=")
_TABLE = re.compile(r"\s*\[")


@attrs.frozen
class ConfigFile:
    """
    What a configuration file says.

    Attributes:
        values: by the name of the option, with underscores.
        lines: of those names, from 1; without those that are written in an unusual way.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def place(self, name: str) -> str:
        """Where an option is set, for messages."""
        line = self.lines.get(name)
        return f"{self.path}, line {line}" if line is not None else str(self.path)


def config_path() -> Path | None:
    """
    Where the configuration file is: ``$CAIRN_CONFIG``, else ``cairn/config.toml`` in
    ``$XDG_CONFIG_HOME``, else in ``~/.config``, on macOS too. None without a home directory.
    """
    if named := os.environ.get(CONFIG_VARIABLE):
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(home) if home else Path.home() / ".config") / "cairn" / "config.toml"
    except RuntimeError:
        return None


def read_config(named: Path | None = None) -> ConfigFile | None:
    """
    Read the configuration file.

    Args:
        named: its path; None for the usual one.

    Returns:
        None if there is none where it usually is.

    Raises:
        Unreadable: it cannot be used. One that the operator named must exist.
    """
    path = named or config_path()
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(_BYTES_MAX + 1)
    except OSError as error:
        is_named = named is not None or CONFIG_VARIABLE in os.environ
        if isinstance(error, FileNotFoundError) and not is_named:
            return None
        raise Unreadable(
            f"The configuration file {path} cannot be read: {error.strerror}. Check its path and "
            "who may read it."
        ) from error
    if len(raw) > _BYTES_MAX:
        raise Unreadable(
            f"The configuration file {path} is larger than {_BYTES_MAX} bytes. Check its path."
        )
    return parsed(raw, path)


def parsed(raw: bytes, path: Path) -> ConfigFile:
    """
    The contents of a configuration file.

    Args:
        path: the file's, for messages.

    Raises:
        Unreadable: it is not TOML, or sets an option twice.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Unreadable(
            f"{path}, line {line}: this is not UTF-8 text. Save the file as UTF-8."
        ) from error
    lines = _lines_of(text)
    for name, found in lines.items():
        if len(found) > 1:
            where = " and ".join(map(str, found))
            raise Unreadable(f"{path}, lines {where}: {name} is set more than once. Keep one.")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(_not_toml(str(error), path)) from error
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in values:
            raise Unreadable(f"{path}: {name} is set more than once. Keep one.")
        values[name] = value
    return ConfigFile(path, values, {name: found[0] for name, found in lines.items()})


def _lines_of(text: str) -> dict[str, list[int]]:
    """
    The lines that set each option. Only those before the first table, and none in a text of several
    lines, which no option has.
    """
    found: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if _TABLE.match(line) or '"""' in line or "'''" in line:
            break
        if key := _KEY.match(line):
            found.setdefault(key[1].replace("-", "_"), []).append(number)
    return found


def _not_toml(words: str, path: Path) -> str:
    line = _LINE.search(words)
    where = f"{path}, line {line[1]}" if line is not None else f"{path}, at its end"
    if words.startswith(_TWICE):
        return f"{where}: this is set more than once. Keep one."
    what = words.partition(" (at ")[0]
    return (
        f"{where}: this is not TOML ({what[:1].lower()}{what[1:]}). Write lines such as "
        'port = 8000 or model = "DIRECTORY".'
    )
