"""
The models that a server may load, from a TOML file. Reads files; imports nothing heavy.

::

    default = "qwen"

    [models.qwen]
    path = "~/models/Qwen3-4B-4bit"
    aliases = ["gpt-4o", "claude-sonnet-4-5"]

    [models.pebble]
    builtin = true

    [models.qwen-embedding]
    path = "~/models/Qwen3-Embedding-0.6B"
    embeddings = true
    aliases = ["text-embedding-3-small"]
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import attrs
import msgspec

from cairn.engine.json_text import parsed
from cairn.engine.model.builtin import builtin_directory, builtin_fault
from cairn.engine.model.embedding_files import embedding_fault
from cairn.engine.model.files import adapter_fault, directory_fault
from cairn.engine.model.generation_config import read_defaults, read_template_settings
from cairn.engine.names import NAME_MAX, is_name
from cairn.engine.prompt.infill import Infill, infill_in
from cairn.engine.prompt.template_settings import SWITCHES
from cairn.engine.sampling import Sampling

Dtype = Literal["auto", "float32", "model"]

_FILE_BYTES_MAX = 1 << 20
_MIB = 1024 * 1024

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json")
_OF_ANSWERS = (
    *("builtin", "adapter", "block_tokens", "decode_rows", "pool_mb", "blocks_mb", "blocks_max"),
)
_Megabytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
_MUST_BE: Mapping[str, str] = {
    "path": "a text: the model's directory",
    "builtin": "true or false",
    "adapter": "a text: the adapter's directory",
    "embeddings": "true or false",
    "matryoshka": "true or false",
    "aliases": "a list of texts",
    "dtype": "one of " + ", ".join(get_args(Dtype)),
    "block_tokens": "a number from 8 to 4096",
    "decode_rows": "a number from 1 to 64",
    "pool_mb": "a number above 0",
    "blocks_mb": "a number above 0",
    "blocks_max": "a number above 0",
}


class ModelsFault(Exception):
    """
    The file cannot be used. The message says what, where and what to do.

    Attributes:
        faults: one of the file, or one of each table that is wrong; a sentence or two each.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__(*faults)
        self.faults = faults

    def __str__(self) -> str:
        """One line for each fault."""
        return "\n".join(self.faults)


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, rename={"directory": "path"}):
    """
    A model that may be loaded: a table ``[models.NAME]``. A setting that is None has the value of
    the command's option.

    Attributes:
        name: the name that clients see.
        directory: the model's.
        builtin: whether the table says ``builtin = true`` in place of a path.
        adapter: the directory of an adapter over it, if there is one.
        embeddings: whether it embeds texts, and answers nothing.
        matryoshka: whether its vectors may be cut to any length, whatever its files say.
        aliases: further names that clients may use for it.
        dtype: see ``Settings``.
        block_tokens: C.
        decode_rows: W.
        pool_mb: the budget of slabs, in MiB.
        blocks_mb: the budget of sealed blocks in memory, in MiB.
        blocks_max: the most sealed blocks in memory.
    """

    name: str
    directory: str = ""
    builtin: bool = False
    adapter: str | None = None
    embeddings: bool = False
    matryoshka: bool = False
    aliases: tuple[str, ...] = ()
    dtype: Dtype | None = None
    block_tokens: Annotated[int, msgspec.Meta(ge=8, le=4096)] | None = None
    decode_rows: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    pool_mb: _Megabytes | None = None
    blocks_mb: _Megabytes | None = None
    blocks_max: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def pool_bytes(self) -> int | None:
        """The budget of slabs."""
        return None if self.pool_mb is None else self.pool_mb * _MIB

    @property
    def blocks_bytes(self) -> int | None:
        """The budget of sealed blocks in memory."""
        return None if self.blocks_mb is None else self.blocks_mb * _MIB


@attrs.frozen(kw_only=True)
class ModelList:
    """
    The models of a file.

    Attributes:
        entries: those that answer, in the order of the file; at least one.
        default: the one that is loaded first, and that answers requests with an unknown name.
        embeddings: those that embed texts.
    """

    entries: tuple[ModelEntry, ...]
    default: ModelEntry
    embeddings: tuple[ModelEntry, ...] = ()

    def named(self, name: str) -> ModelEntry | None:
        """The model with a name or an alias, if there is one."""
        return next((one for one in self.entries if name in (one.name, *one.aliases)), None)


@attrs.frozen(kw_only=True)
class ModelMetadata:
    """
    What a model's directory says about it before it is loaded.

    Attributes:
        defaults: the sampling parameters that its makers recommend.
        template: the settings of the chat template that they recommend.
        switches: the settings of thinking that its template mentions.
        infill: the special tokens for filling a gap that its tokenizer's files mention.
        vocabulary_tokens: the size of its vocabulary; 0 if unknown.
        context_tokens: the longest sequence that it takes; 0 if unknown.
    """

    defaults: Sampling
    template: Mapping[str, Any]
    switches: frozenset[str]
    vocabulary_tokens: int
    context_tokens: int
    infill: Infill | None = None


def read_models(path: Path) -> ModelList:
    """
    Read a file of models and check their directories. Paths are relative to the file's folder.

    Raises:
        ModelsFault: it cannot be used, or one of its models cannot be served.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
        if len(raw) > _FILE_BYTES_MAX:
            raise ModelsFault(
                f"{path} is larger than {_FILE_BYTES_MAX} bytes; is it the right file?"
            )
        text = raw.decode("utf-8")
    except OSError as error:
        raise ModelsFault(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ModelsFault(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from error
    return parse_models(text, path, entry_fault)


def parse_models(
    text: str, path: Path, fault_of: Callable[[ModelEntry], str | None] = lambda _: None
) -> ModelList:
    """
    The models of a file's text. Faults are reported for all tables at once, so that the operator
    can correct them together.

    Args:
        path: the file's, for messages; paths are relative to its folder.
        fault_of: why a model cannot be served, if it cannot. Without it, only the text is checked.

    Raises:
        ModelsFault: it cannot be used.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelsFault(f"{path} is not TOML: {error}.") from error
    _check_known(found, ("default", "models"), str(path))
    tables = found.get("models")
    if not isinstance(tables, dict) or not tables:
        raise ModelsFault(
            f"{path} lists no models. Write a table for each: [models.NAME] with path = "
            '"DIRECTORY", or builtin = true for Pebble.'
        )
    entries: list[ModelEntry] = []
    faults: list[str] = []
    for name, table in tables.items():
        try:
            entries.append(_entry(name, table, text, path))
        except ModelsFault as wrong:
            faults += wrong.faults
        else:
            if (fault := fault_of(entries[-1])) is not None:
                faults.append(f"{_where(path, name, text)}: {fault}")
    if faults:
        raise ModelsFault(*faults)
    _check_names(entries, path)
    answering = tuple(one for one in entries if not one.embeddings)
    if not answering:
        raise ModelsFault(
            f"{path} lists no model that answers, but embedding models alone. Add a table "
            "[models.NAME] for one, with builtin = true for Pebble."
        )
    models = ModelList(
        entries=answering,
        default=answering[0],
        embeddings=tuple(one for one in entries if one.embeddings),
    )
    default = found.get("default", answering[0].name)
    chosen = models.named(default) if isinstance(default, str) else None
    if chosen is None:
        raise ModelsFault(
            f"{path}: default is {default!r}, but no model that answers has that name. Choose one "
            f"of {', '.join(entry.name for entry in answering)}."
        )
    return attrs.evolve(models, default=chosen)


def entry_fault(entry: ModelEntry) -> str | None:
    """Why a model cannot be served, in a sentence; None if nothing is wrong. Reads no weights."""
    if entry.embeddings:
        return embedding_fault(entry.directory)
    if entry.directory == str(builtin_directory()):
        fault = builtin_fault()
    else:
        fault = directory_fault(entry.directory)
        if fault is not None and not _exists(entry.directory):
            fault += (
                " A models file names directories, and no models of a hub: `cairn pull NAME` "
                "downloads one, and prints its directory."
            )
    if fault is None and entry.adapter is not None:
        fault = adapter_fault(entry.adapter)
    return fault


def _exists(directory: str) -> bool:
    try:
        return Path(directory).exists()
    except OSError:
        return True  # it is said that it cannot be read


def read_metadata(entry: ModelEntry) -> ModelMetadata:
    """
    What the directory of a model says about it. For a model without a fault.

    Raises:
        ModelsFault: the directory can no longer be read.
    """
    directory = Path(entry.directory)
    try:
        config = parsed((directory / "config.json").read_text(encoding="utf-8"))
        return ModelMetadata(
            defaults=read_defaults(directory),
            template=read_template_settings(directory),
            switches=_switches(directory),
            infill=infill_in(_text_of(directory, _TOKENIZERS)),
            vocabulary_tokens=_count(config, "vocab_size"),
            context_tokens=_count(config, "max_position_embeddings"),
        )
    except Exception as error:
        raise ModelsFault(f"{directory} cannot be read: {error}.") from error


def _switches(directory: Path) -> frozenset[str]:
    """The settings whose names occur in the template. Only a loaded tokenizer knows for certain."""
    text = _text_of(directory, _TEMPLATES)
    return frozenset(name for name in SWITCHES if name in text)


def _text_of(directory: Path, names: Sequence[str]) -> str:
    """The text of those of the files that exist."""
    paths = [directory / name for name in names]
    return "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())


def _count(config: Any, name: str) -> int:
    """A count from a config.json or its text_config; 0 if neither has it."""
    for holder in (config, config.get("text_config")):
        value = holder.get(name) if isinstance(holder, dict) else None
        if type(value) is int and value > 0:
            return value
    return 0


def _entry(name: str, table: Any, text: str, path: Path) -> ModelEntry:
    where = _where(path, name, text)
    if not isinstance(table, dict):
        raise ModelsFault(
            f"{where} is not a table. Write [models.{_key(name)}] on a line of its own."
        )
    if dotted := [one for one in _split_names(name, table) if one != name]:
        raise ModelsFault(
            *(
                f"{_where(path, one, text, one)}: {one.removeprefix(f'{name}.')!r} is not known. "
                f"Put a name with a dot in quotes: [models.{_key(one)}]."
                for one in dotted
            )
        )
    _check_known(table, tuple(_MUST_BE), where)
    try:
        entry = msgspec.convert({**table, "name": name}, ModelEntry)
    except msgspec.ValidationError as error:
        # It ends with the place of the value: "... - at `$.aliases[0]`".
        key = str(error).partition("`$.")[2].rstrip("`").partition("[")[0]
        raise ModelsFault(
            f"{where}: {key} is {table[key]!r}; it must be {_MUST_BE[key]}."
        ) from None
    if bad := [one for one in (name, *entry.aliases) if not is_name(one)]:
        raise ModelsFault(
            f"{where}: {bad[0][:80]!r} is not a valid name. Write one of 1 to {NAME_MAX} printable "
            "characters."
        )
    if entry.embeddings and (strange := [one for one in _OF_ANSWERS if one in table]):
        raise ModelsFault(
            f"{where}: {strange[0]} is for models that answer, and this one has embeddings = true. "
            "Leave one of them out."
        )
    if entry.matryoshka and not entry.embeddings:
        raise ModelsFault(
            f"{where}: matryoshka is for embedding models. Leave it out, or add embeddings = true."
        )
    if entry.builtin and "path" in table:
        raise ModelsFault(f"{where} has both path and builtin. Leave one of them out.")
    if not (entry.builtin or entry.directory):
        raise ModelsFault(
            f'{where} does not say where the model is. Write path = "DIRECTORY", or builtin = true '
            "for Pebble."
        )
    places = {"path": entry.directory, "adapter": entry.adapter}
    if entry.builtin:
        places["path"] = str(builtin_directory())
    for key, place in places.items():
        try:
            if place is not None:
                places[key] = str(path.absolute().parent / Path(place).expanduser())
        except RuntimeError:
            raise ModelsFault(
                f"{where}: {key} is {place!r}, whose home directory is not known. Write the path "
                "in full."
            ) from None
    return msgspec.structs.replace(entry, directory=places["path"], adapter=places["adapter"])


def _split_names(name: str, table: Mapping[str, Any]) -> list[str]:
    """
    The names of tables that TOML split at their dots, as they were meant; else the table's own.
    """
    within = [(k, v) for k, v in table.items() if isinstance(v, dict) and k not in _MUST_BE]
    return [one for k, v in within for one in _split_names(f"{name}.{k}", v)] or [name]


def _check_known(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(known)}."
            raise ModelsFault(f"{where}: {key!r} is not known. {meant}")


def _check_names(entries: Sequence[ModelEntry], path: Path) -> None:
    """Raise ModelsFault if two models have the same name or alias."""
    owners: dict[str, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if owners.setdefault(name, entry.name) != entry.name:
                raise ModelsFault(
                    f"{path}: {name!r} is a name or an alias of both {owners[name]!r} "
                    f"and {entry.name!r}. Remove it from one of them."
                )


def _where(path: Path, name: str, text: str, shown: str | None = None) -> str:
    """
    The place of a model's table in the file, for messages; without the line if it is written in an
    unusual way.
    """
    spelled = "|".join(re.escape(one) for one in (name, f'"{name}"', f"'{name}'"))
    head = re.compile(rf"\s*\[\s*models\s*\.\s*(?:{spelled})\s*\]")
    lines = (f", line {n}" for n, line in enumerate(text.splitlines(), 1) if head.match(line))
    return f"{path}{next(lines, '')}, [models.{shown or _key(name)}]"


def _key(name: str) -> str:
    """A name as a TOML key, in quotes if it needs them."""
    short = name[:80]
    return short if re.fullmatch(r"[A-Za-z0-9_-]+", short) else f'"{short}"'
