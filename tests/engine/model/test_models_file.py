"""A file of models: what it may say, and what is told where it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.engine.model.builtin import builtin_directory
from cairn.engine.model.generation_config import read_defaults
from cairn.engine.model.models_file import ModelsFault, parse_models, read_metadata, read_models

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
"""


def test_what_a_file_says():
    """Paths go from the file's folder on; names, aliases and the default find their model."""
    models = parse_models(WHOLE, PATH)
    pebble, qwen = models.entries
    assert ("pebble", str(builtin_directory())) == (pebble.name, pebble.directory)
    assert (None, (), None) == (pebble.adapter, pebble.aliases, pebble.dtype)
    assert ("/srv/qwen", "/adapters/one", "float32") == (qwen.directory, qwen.adapter, qwen.dtype)
    assert (32, 2, 3 << 20, 4 << 20) == (
        qwen.block_tokens,
        qwen.decode_rows,
        qwen.pool_bytes,
        qwen.blocks_bytes,
    )
    assert qwen is models.default
    assert [qwen, qwen, pebble, None] == [
        models.named(name) for name in ("claude", "Qwen/Qwen3-4B", "pebble", "other")
    ]


def test_the_first_one_is_the_default():
    """Where the file names none."""
    models = parse_models('[models.b]\nbuiltin = true\n[models.a]\npath = "a"', PATH)
    assert "b" == models.default.name


FAULTS = [
    ("[models.a", "is no TOML: Expected"),
    ("", "names no model. Write a table"),
    ("models = 1", "names no model"),
    ('[model.a]\npath = "a"', "'model' is not known. Is models meant?"),
    ('\n[models.a]\npaht = "a"', "models.toml, line 2, [models.a]: 'paht' is not known. Is path"),
    ("[models]\na = 1", "[models.a] is no table"),
    ("[models.a]", "says nowhere where the model lies"),
    ('[models.a]\npath = ""', "says nowhere where"),
    ("[models.a]\nbuiltin = false", "says nowhere where"),
    ('[models.a]\npath = "a"\nbuiltin = true', "both path and builtin"),
    ("[models.a]\npath = {}", "[models.a]: path is {}; it must be a text"),
    ("[models.a]\npath = 1", "path is 1; it must be a text"),
    ('[models.a]\nbuiltin = "yes"', "builtin is 'yes'; it must be true or false"),
    ("[models.a]\nbuiltin = true\ndtype = 'half'", "it must be one of auto, float32, model"),
    ("[models.a]\nbuiltin = true\nblock_tokens = 4", "block_tokens is 4; it must be a number"),
    ("[models.a]\nbuiltin = true\ndecode_rows = true", "decode_rows is True"),
    ("[models.a]\nbuiltin = true\naliases = 'b'", "aliases is 'b'; it must be a list of texts"),
    ("[models.a]\nbuiltin = true\naliases = ['']", "the alias '' is no name"),
    ("[models.'']\nbuiltin = true", "a name has 1 to 200"),
    (
        "[models.a]\nbuiltin = true\naliases = ['b']\n[models.b]\nbuiltin = true",
        "'b' is a name or an alias of 'a' and of 'b'",
    ),
    (
        "[models.qwen3.5]\nbuiltin = true",
        'known. A name with a dot stands in quotes: [models."qwen3.5"].',
    ),
    ("[models.a]\nbuiltin = true\n[models.a.1.2]\n", "line 3, [models.a.1.2]: '1.2' is not known"),
    ("default = 'b'\n[models.a]\nbuiltin = true", "default is 'b', and no model has that name"),
    ("default = 1\n[models.a]\nbuiltin = true", "default is 1"),
]


@pytest.mark.parametrize(("text", "told"), FAULTS, ids=[told for _, told in FAULTS])
def test_what_cannot_be_used(text: str, told: str):
    """It is said what is wrong, where in the file, and what to do."""
    with pytest.raises(ModelsFault) as caught:
        parse_models(text, PATH)
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(PATH))


def test_models_are_looked_at(tmp_path: Path):
    """A directory that is none is told with the place in the file; a sound one is taken."""
    path = tmp_path / "models.toml"
    path.write_text('[models.a]\nbuiltin = true\n[models.b]\npath = "nothing"\n', "utf-8")
    with pytest.raises(ModelsFault, match=r"line 3, \[models\.b\]: There is no model directory"):
        read_models(path)
    path.write_text(f'[models.a]\npath = "{builtin_directory()}"\nadapter = "none"\n', "utf-8")
    with pytest.raises(ModelsFault, match="There is no adapter directory"):
        read_models(path)
    path.write_text("[models.a]\nbuiltin = true\n", "utf-8")
    assert ["a"] == [entry.name for entry in read_models(path).entries]


def test_all_that_is_wrong_is_told(tmp_path: Path):
    """A line for each table, whether the table is wrong or what it names."""
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
    told = str(caught.value).split("\n")
    assert len(heads) == len(told)
    for head, line in zip(heads, told, strict=True):
        assert line.startswith(f"{path}, {head}")


@pytest.mark.parametrize("content", [None, b"\xff", b"#" * (1 << 20) + b"#"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None):
    """It is not there, no text, or no file of models at all."""
    path = tmp_path / "models.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelsFault, match=r"models\.toml"):
        read_models(path)


def test_what_a_directory_tells_before_it_is_loaded():
    """What requests leave out, and how many tokens there are."""
    (entry,) = parse_models("[models.pebble]\nbuiltin = true", PATH).entries
    told = read_metadata(entry)
    assert read_defaults(builtin_directory()) == told.defaults
    assert {"enable_thinking"} == told.switches
    assert told.vocabulary_tokens > 0
    assert told.context_tokens > 0
