"""
The models that a server may load, as a file in TOML names them. Pure but for reading files; nothing
heavy is imported.

::

    default = "qwen"

    [models.qwen]
    path = "~/models/Qwen3-4B-4bit"
    aliases = ["gpt-4o", "claude-sonnet-4-5"]

    [models.pebble]
    builtin = true
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from cairn.engine.json_text import parsed
from cairn.engine.model.builtin import builtin_directory, builtin_fault
from cairn.engine.model.files import adapter_fault, directory_fault
from cairn.engine.model.generation_config import read_defaults, read_template_settings
from cairn.engine.names import NAME_MAX, is_name
from cairn.engine.prompt.template_settings import SWITCHES
from cairn.engine.sampling import Sampling

Dtype = Literal["auto", "float32", "model"]

_FILE_BYTES_MAX = 1 << 20
_MIB = 1024 * 1024

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_TOP = ("default", "models")
_KEYS: Mapping[str, tuple[type, str]] = {
    "path": (str, "a text: the model's directory"),
    "builtin": (bool, "true or false"),
    "adapter": (str, "a text: the adapter's directory"),
    "aliases": (list, "a list of texts"),
    "dtype": (str, "one of " + ", ".join(get_args(Dtype))),
    "block_tokens": (int, "a number from 8 to 4096"),
    "decode_rows": (int, "a number from 1 to 64"),
    "pool_mb": (int, "a number above 0"),
    "blocks_mb": (int, "a number above 0"),
}
_RANGES = {
    "block_tokens": (8, 4096),
    "decode_rows": (1, 64),
    "pool_mb": (1, 1 << 30),
    "blocks_mb": (1, 1 << 30),
}


class ModelsFault(Exception):
    """
    The file cannot be used; the message says what, where and what to do. The operator's.

    Attributes:
        faults: what is wrong, a sentence or two each: that of the file, or those of its tables.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__(*faults)
        self.faults = faults

    def __str__(self) -> str:
        """A line for each."""
        return "\n".join(self.faults)


@attrs.frozen(kw_only=True)
class ModelEntry:
    """
    A model that may be loaded.

    Attributes:
        name: what clients see.
        directory: where it lies.
        adapter: the directory of an adapter over it, if there is one.
        aliases: further names by which clients may ask for it.
        dtype: see ``Settings``; None, here and in what follows, where the command's option holds.
        block_tokens: C.
        decode_rows: W.
        pool_bytes: the budget of slabs.
        blocks_bytes: the budget of sealed blocks in memory.
    """

    name: str
    directory: str
    adapter: str | None = None
    aliases: tuple[str, ...] = ()
    dtype: Dtype | None = None
    block_tokens: int | None = None
    decode_rows: int | None = None
    pool_bytes: int | None = None
    blocks_bytes: int | None = None


@attrs.frozen(kw_only=True)
class ModelList:
    """
    The models of a file.

    Attributes:
        entries: in the order of the file; at least one.
        default: the one that is loaded first, and answers who names none of them.
    """

    entries: tuple[ModelEntry, ...]
    default: ModelEntry

    def named(self, name: str) -> ModelEntry | None:
        """The model of a name or an alias, if there is one."""
        return next((one for one in self.entries if name in (one.name, *one.aliases)), None)


@attrs.frozen(kw_only=True)
class ModelMetadata:
    """
    What a model's directory tells of it before it is loaded.

    Attributes:
        defaults: the sampling that its makers recommend.
        template: settings of the chat template that they recommend.
        switches: the settings of thinking that its template speaks of.
        vocabulary_tokens: the tokens that it knows; 0 where it is not told.
        context_tokens: the longest sequence that it takes; 0 where it is not told.
    """

    defaults: Sampling
    template: Mapping[str, Any]
    switches: frozenset[str]
    vocabulary_tokens: int
    context_tokens: int


def read_models(path: Path) -> ModelList:
    """
    Read a file of models, and look at their directories. A relative path is one from the file's
    folder on.

    Raises:
        ModelsFault: it cannot be used, or one of its models cannot be served.
    """
    return _models(_text_of(path), path, entry_fault)


def parse_models(text: str, path: Path) -> ModelList:
    """
    The models that a text names. Looks at none of them.

    Args:
        path: of the file, from whose folder relative paths go, and for messages.

    Raises:
        ModelsFault: it cannot be used.
    """
    return _models(text, path, lambda _: None)


def _models(text: str, path: Path, look: Callable[[ModelEntry], str | None]) -> ModelList:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelsFault(f"{path} is no TOML: {error}.") from error
    _check_known(found, _TOP, str(path))
    tables = found.get("models", {})
    if not isinstance(tables, dict) or not tables:
        raise ModelsFault(
            f"{path} names no model. Write a table for each: [models.NAME] with path = "
            '"DIRECTORY", or builtin = true for Pebble.'
        )
    entries = _entries(tables, text, path, look)
    _check_names(entries, path)
    default = found.get("default", entries[0].name)
    models = ModelList(entries=entries, default=entries[0])
    chosen = models.named(default) if isinstance(default, str) else None
    if chosen is None:
        raise ModelsFault(
            f"{path}: default is {default!r}, and no model has that name. There are "
            f"{_list(one.name for one in entries)}."
        )
    return attrs.evolve(models, default=chosen)


def entry_fault(entry: ModelEntry) -> str | None:
    """Why a model cannot be served, in a sentence; None where it may be. Reads no weights."""
    if entry.directory == str(builtin_directory()):
        fault = builtin_fault()
    else:
        fault = directory_fault(entry.directory)
    if fault is None and entry.adapter is not None:
        fault = adapter_fault(entry.adapter)
    return fault


def read_metadata(entry: ModelEntry) -> ModelMetadata:
    """
    What a model's directory tells of it. For one without a fault.

    Raises:
        ModelsFault: it cannot be read any more.
    """
    directory = Path(entry.directory)
    try:
        config = parsed((directory / "config.json").read_text(encoding="utf-8"))
        return ModelMetadata(
            defaults=read_defaults(directory),
            template=read_template_settings(directory),
            switches=_switches(directory),
            vocabulary_tokens=_count(config, "vocab_size"),
            context_tokens=_count(config, "max_position_embeddings"),
        )
    except Exception as error:
        raise ModelsFault(f"{directory} cannot be read: {error}.") from error


def _switches(directory: Path) -> frozenset[str]:
    """What a loaded tokenizer would tell for sure."""
    paths = [directory / name for name in _TEMPLATES]
    text = "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    return frozenset(name for name in SWITCHES if name in text)


def _count(config: Any, name: str) -> int:
    """A count that stands in a config.json, or in what it says of text; 0 where it does not."""
    for holder in (config, config.get("text_config")):
        value = holder.get(name) if isinstance(holder, dict) else None
        if type(value) is int and value > 0:
            return value
    return 0


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
        if len(raw) > _FILE_BYTES_MAX:
            raise ModelsFault(
                f"{path} is larger than {_FILE_BYTES_MAX} bytes; is it the right one?"
            )
        return raw.decode("utf-8")
    except OSError as error:
        raise ModelsFault(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ModelsFault(
            f"{path} is no UTF-8 text: {error.reason} at byte {error.start}."
        ) from error


def _entries(
    tables: Mapping[str, Any], text: str, path: Path, look: Callable[[ModelEntry], str | None]
) -> tuple[ModelEntry, ...]:
    """
    The models of all tables. What is wrong with them is told of all: who mends one hears no more
    of the next.
    """
    entries: list[ModelEntry] = []
    faults: list[str] = []
    for name, table in tables.items():
        try:
            entries.append(_entry(name, table, text, path))
        except ModelsFault as wrong:
            faults += wrong.faults
        else:
            if (fault := look(entries[-1])) is not None:
                faults.append(f"{_where(path, name, text)}: {fault}")
    if faults:
        raise ModelsFault(*faults)
    return tuple(entries)


def _entry(name: str, table: Any, text: str, path: Path) -> ModelEntry:
    where = _where(path, name, text)
    if not isinstance(table, dict):
        raise ModelsFault(f"{where} is no table. Write [models.{_key(name)}] on a line of its own.")
    if not is_name(name):
        raise ModelsFault(f"{where}: a name has 1 to {NAME_MAX} printable characters.")
    if dotted := [one for one in _names_within(name, table) if one != name]:
        raise ModelsFault(
            *(
                f"{_line_of(path, one, text)}, [models.{one}]: {one.removeprefix(f'{name}.')!r} is "
                f"not known. A name with a dot stands in quotes: [models.{_key(one)}]."
                for one in dotted
            )
        )
    _check_known(table, tuple(_KEYS), where)
    for key, value in table.items():
        _check_value(key, value, where)
    if table.get("builtin"):
        if "path" in table:
            raise ModelsFault(f"{where} has both path and builtin. Leave one of them out.")
        directory = str(builtin_directory())
    elif table.get("path"):
        directory = _place(table["path"], path)
    else:
        raise ModelsFault(
            f'{where} says nowhere where the model lies. Write path = "DIRECTORY", or builtin = '
            "true for Pebble."
        )
    sizes = {
        f"{key}_bytes": table[f"{key}_mb"] * _MIB
        for key in ("pool", "blocks")
        if f"{key}_mb" in table
    }
    return ModelEntry(
        name=name,
        directory=directory,
        adapter=_place(table["adapter"], path) if "adapter" in table else None,
        aliases=tuple(table.get("aliases", ())),
        dtype=table.get("dtype"),
        block_tokens=table.get("block_tokens"),
        decode_rows=table.get("decode_rows"),
        **sizes,
    )


def _names_within(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """
    The names that TOML took apart at their dots, as they were meant; else the one of the table.
    """
    within = [(k, v) for k, v in table.items() if isinstance(v, dict) and k not in _KEYS]
    for key, value in within:
        yield from _names_within(f"{name}.{key}", value)
    if not within:
        yield name


def _check_known(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"Is {near[0]} meant?" if near else f"There are {_list(known)}."
            raise ModelsFault(f"{where}: {key!r} is not known. {meant}")


def _check_value(key: str, value: Any, where: str) -> None:
    kind, words = _KEYS[key]
    fits = type(value) is kind
    if fits and key in _RANGES:
        low, high = _RANGES[key]
        fits = low <= value <= high
    elif fits and key == "dtype":
        fits = value in get_args(Dtype)
    elif fits and key == "aliases":
        fits = all(isinstance(one, str) for one in value)
        if fits and (bad := [one for one in value if not is_name(one)]):
            raise ModelsFault(
                f"{where}: the alias {bad[0][:80]!r} is no name; one has 1 to {NAME_MAX} printable "
                "characters."
            )
    if not fits:
        raise ModelsFault(f"{where}: {key} is {value!r}; it must be {words}.")


def _check_names(entries: tuple[ModelEntry, ...], path: Path) -> None:
    """No two models answer to one name."""
    owners: dict[str, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if owners.get(name, entry.name) != entry.name:
                raise ModelsFault(
                    f"{path}: {name!r} is a name or an alias of {owners[name]!r} and of "
                    f"{entry.name!r}. Leave it to one of them."
                )
            owners[name] = entry.name


def _place(where: str, path: Path) -> str:
    try:
        return str(path.absolute().parent / Path(where).expanduser())
    except RuntimeError as error:
        raise ModelsFault(f"{path}: {where} names no place: {error}.") from error


def _where(path: Path, name: str, text: str) -> str:
    """Where a model's table stands, for people."""
    return f"{_line_of(path, name, text)}, [models.{_key(name)}]"


def _line_of(path: Path, name: str, text: str) -> str:
    """
    The file, and the line of a model's table; without it where that is written in a rarer way.
    """
    spelled = "|".join(re.escape(one) for one in (name, f'"{name}"', f"'{name}'"))
    head = re.compile(rf"\s*\[\s*models\s*\.\s*(?:{spelled})\s*\]")
    lines = (n for n, line in enumerate(text.splitlines(), start=1) if head.match(line))
    found = next(lines, None)
    return str(path) if found is None else f"{path}, line {found}"


def _key(name: str) -> str:
    """A name as a key of TOML has it."""
    shown = name[:80]
    return shown if re.fullmatch(r"[A-Za-z0-9_-]+", shown) else f'"{shown}"'


def _list(names: Iterator[str] | tuple[str, ...]) -> str:
    return ", ".join(names)
