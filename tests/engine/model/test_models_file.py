"""A file of models: what it may contain, and the message if it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.engine.model.builtin import builtin_directory
from cairn.engine.model.generation_config import read_defaults
from cairn.engine.model.models_file import (
    ModelEntry,
    ModelsFault,
    parse_models,
    read_metadata,
    read_models,
)

PATH = Path("/srv/models.toml")

WHOLE = """
default = "gpt-4o"

[models.pebble]
builtin = true

[models."Qwen/Qwen3-4B"]
path = "qwen"
adapter = "/adapters/one"
aliases = ["gpt-4o", "claude"]
dtype = "float32"
block_tokens = 32
decode_rows = 2
pool_mb = 3
blocks_mb = 4
blocks_max = 5
"""


def test_a_file_is_read():
    """Paths are relative to the file's folder; names, aliases and the default find their model."""
    models = parse_models(WHOLE, PATH)
    pebble, qwen = models.entries
    assert ("pebble", str(builtin_directory())) == (pebble.name, pebble.directory)
    assert (None, (), None) == (pebble.adapter, pebble.aliases, pebble.dtype)
    assert ("/srv/qwen", "/adapters/one", "float32") == (qwen.directory, qwen.adapter, qwen.dtype)
    assert (32, 2, 3 << 20, 4 << 20, 5) == (
        qwen.block_tokens,
        qwen.decode_rows,
        qwen.pool_bytes,
        qwen.blocks_bytes,
        qwen.blocks_max,
    )
    assert qwen is models.default
    assert [qwen, qwen, pebble, None] == [
        models.named(name) for name in ("claude", "Qwen/Qwen3-4B", "pebble", "other")
    ]


def test_the_first_model_is_the_default():
    """If the file names none."""
    models = parse_models('[models.b]\nbuiltin = true\n[models.a]\npath = "a"', PATH)
    assert "b" == models.default.name


def test_embedding_models_are_apart():
    """They answer nothing, so none of them is the default; names are shared by both kinds."""
    models = parse_models(
        '[models.v]\npath = "v"\nembeddings = true\n[models.a]\nbuiltin = true',
        PATH,
    )
    assert ["a"] == [one.name for one in models.entries]
    assert ["v"] == [one.name for one in models.embeddings]
    assert "a" == models.default.name
    with pytest.raises(ModelsFault, match="'a' is a name or an alias of both"):
        parse_models(
            '[models.v]\npath = "v"\nembeddings = true\naliases = ["a"]\n'
            "[models.a]\nbuiltin = true",
            PATH,
        )


FAULTS = [
    ("[models.a", "is not TOML: Expected"),
    ("", "lists no models. Write a table"),
    ("models = 1", "lists no models"),
    ('[model.a]\npath = "a"', "'model' is not known. Did you mean models?"),
    (
        '\n[models.a]\npaht = "a"',
        "models.toml, line 2, [models.a]: 'paht' is not known. Did you mean path",
    ),
    ("[models]\na = 1", "[models.a] is not a table"),
    ("[models.a]", "does not say where the model is"),
    ('[models.a]\npath = ""', "does not say where"),
    ("[models.a]\nbuiltin = false", "does not say where"),
    ('[models.a]\npath = "a"\nbuiltin = true', "both path and builtin"),
    ("[models.a]\npath = {}", "[models.a]: path is {}; it must be a text"),
    ("[models.a]\npath = 1", "path is 1; it must be a text"),
    ('[models.a]\nbuiltin = "yes"', "builtin is 'yes'; it must be true or false"),
    ("[models.a]\nbuiltin = true\ndtype = 'half'", "it must be one of auto, float32, model"),
    ("[models.a]\nbuiltin = true\nblock_tokens = 4", "block_tokens is 4; it must be a number"),
    ("[models.a]\nbuiltin = true\ndecode_rows = true", "decode_rows is True"),
    ("[models.a]\nbuiltin = true\naliases = 'b'", "aliases is 'b'; it must be a list of texts"),
    ("[models.a]\nbuiltin = true\naliases = ['b', 1]", "aliases is ['b', 1]; it must be a list"),
    ("[models.a]\nbuiltin = true\npool_mb = 99999999999999999999", "it must be a number above 0"),
    ("[models.a]\nbuiltin = true\naliases = ['']", "[models.a]: '' is not a valid name. Write"),
    ("[models.'']\nbuiltin = true", "'' is not a valid name. Write one of 1 to 200"),
    (
        "[models.a]\nbuiltin = true\naliases = ['b']\n[models.b]\nbuiltin = true",
        "'b' is a name or an alias of both 'a' and 'b'",
    ),
    (
        "[models.qwen3.5]\nbuiltin = true",
        'known. Put a name with a dot in quotes: [models."qwen3.5"].',
    ),
    ("[models.a]\nbuiltin = true\n[models.a.1.2]\n", "line 3, [models.a.1.2]: '1.2' is not known"),
    ("default = 'b'\n[models.a]\nbuiltin = true", "default is 'b', but no model that answers has"),
    (
        "default = 'v'\n[models.a]\nbuiltin = true\n[models.v]\npath = 'v'\nembeddings = true",
        "default is 'v', but no model that answers has that name. Choose one of a.",
    ),
    ("[models.v]\npath = 'v'\nembeddings = true", "lists no model that answers"),
    (
        "[models.v]\npath = 'v'\nembeddings = true\ndecode_rows = 2",
        "decode_rows is for models that answer, and this one has embeddings = true",
    ),
    ("[models.v]\nbuiltin = true\nmatryoshka = true", "matryoshka is for embedding models"),
    ("[models.v]\npath = 'v'\nembeddings = 1", "embeddings is 1; it must be true or false"),
    ("default = 1\n[models.a]\nbuiltin = true", "default is 1"),
]


@pytest.mark.parametrize(("text", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_a_file_that_cannot_be_used(text: str, message: str):
    """The message says what is wrong, where in the file, and what to do."""
    with pytest.raises(ModelsFault) as caught:
        parse_models(text, PATH)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(PATH))


def test_directories_are_checked(tmp_path: Path):
    """A missing directory is reported with its place in the file."""
    path = tmp_path / "models.toml"
    path.write_text('[models.a]\nbuiltin = true\n[models.b]\npath = "nothing"\n', "utf-8")
    with pytest.raises(ModelsFault, match=r"line 3, \[models\.b\]: There is no model directory"):
        read_models(path)
    path.write_text(f'[models.a]\npath = "{builtin_directory()}"\nadapter = "none"\n', "utf-8")
    with pytest.raises(ModelsFault, match="There is no adapter directory"):
        read_models(path)
    path.write_text("[models.a]\nbuiltin = true\n", "utf-8")
    assert ["a"] == [entry.name for entry in read_models(path).entries]


@pytest.mark.parametrize("named", ["mlx-community/Qwen3-4B-4bit", "qwen3-4b"])
def test_a_name_of_a_hub_is_no_path(tmp_path: Path, named: str):
    """The sentence says what to do for one."""
    path = tmp_path / "models.toml"
    path.write_text(f'[models.a]\npath = "{named}"\n', "utf-8")
    with pytest.raises(ModelsFault, match=r"There is no model directory .*`cairn pull NAME`"):
        read_models(path)


def test_all_faults_are_reported(tmp_path: Path):
    """One line for each table, whether the table or its directory is wrong."""
    path = tmp_path / "models.toml"
    path.write_text(
        "[models.qwen3.5]\n[models.qwen3.6]\n[models.pebble]\nbuiltin = true\n"
        '[models.a]\npath = "nothing"\n[models.b]\npth = "b"\n',
        "utf-8",
    )
    with pytest.raises(ModelsFault) as caught:
        read_models(path)
    heads = [
        "line 1, [models.qwen3.5]: ",
        "line 2, [models.qwen3.6]: ",
        "line 5, [models.a]: There is no ",
        "line 7, [models.b]: 'pth' is not known",
    ]
    lines = str(caught.value).split("\n")
    assert len(heads) == len(lines)
    for head, line in zip(heads, lines, strict=True):
        assert line.startswith(f"{path}, {head}")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "is not UTF-8 text: invalid start byte at byte 0"),
        (b"#" * (1 << 20) + b"#", "is larger than 1048576 bytes"),
        (b"#" * (1 << 20) + "ü".encode(), "is larger than 1048576 bytes"),
    ],
    ids=["missing", "not text", "too large", "cut in a character"],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, what: str):
    """It is missing, not text, or far too large."""
    path = tmp_path / "models.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelsFault) as caught:
        read_models(path)
    assert str(caught.value).startswith(f"{path} {what}")


def test_metadata_is_read_from_a_directory():
    """The defaults of requests, and the sizes."""
    (entry,) = parse_models("[models.pebble]\nbuiltin = true", PATH).entries
    found = read_metadata(entry)
    assert read_defaults(builtin_directory()) == found.defaults
    assert {"enable_thinking"} == found.switches
    assert found.vocabulary_tokens > 0
    assert found.context_tokens > 0


@pytest.mark.parametrize("setting", ["path", "adapter"])
def test_a_home_that_does_not_exist(setting: str):
    """The message names the setting and its path."""
    table = {"path": "/model", setting: "~no-such-user/model"}
    text = "".join(f"{key} = '{value}'\n" for key, value in table.items())
    message = rf"\[models\.a\]: {setting} is '~no-such-user/model', .* Write the path in full"
    with pytest.raises(ModelsFault, match=message):
        parse_models(f"[models.a]\n{text}", PATH)


def test_sizes_of_a_model_with_several_parts(tmp_path: Path):
    """They are in the config of its text model; unknown sizes are 0."""
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 7}}', "utf-8")
    found = read_metadata(ModelEntry(name="a", directory=str(tmp_path)))
    assert (7, 0, frozenset()) == (
        found.vocabulary_tokens,
        found.context_tokens,
        found.switches,
    )


@pytest.mark.parametrize("config", [None, "[]", "{"])
def test_a_directory_that_can_no_longer_be_read(tmp_path: Path, config: str | None):
    """Its config.json is gone, or was replaced by something else."""
    if config is not None:
        (tmp_path / "config.json").write_text(config, "utf-8")
    with pytest.raises(ModelsFault, match="cannot be read"):
        read_metadata(ModelEntry(name="a", directory=str(tmp_path)))
