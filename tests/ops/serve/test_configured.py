"""Options from the command line, variables, the configuration file and their defaults."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from cairn.ops.cli import Unreadable
from cairn.ops.serve.command import serve
from cairn.ops.serve.configured import (
    COMMON,
    Configured,
    ConfiguredCommand,
    unknown_variables,
    variable_of,
)
from cairn.ops.serve.models_option import choose_models, read_models_option
from cairn.ops.serve.run import settings_of

assert isinstance(serve, ConfiguredCommand)
OPTIONS = serve.settings()


def context_with(text: str, folder: Path, *arguments: str) -> click.Context:
    """The command with a configuration file of that text."""
    file = folder / "c.toml"
    file.write_text(text, encoding="utf-8")
    return serve.make_context("serve", ["--config", str(file), *arguments])


def test_what_counts_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line before a variable, before the file, before the default."""
    text = "port = 1\nqueue = 2\nmax_tokens = 3\n"
    monkeypatch.setenv("CAIRN_PORT", "10")
    monkeypatch.setenv("CAIRN_QUEUE", "20")
    found = context_with(text, tmp_path, "--port", "100").params
    assert [100, 20, 3, 30.0] == [found[n] for n in ("port", "queue", "max_tokens", "drain")]


def test_each_kind_of_value(tmp_path: Path) -> None:
    """Flags, lists, numbers, times, choices and paths."""
    text = """
no_prewarm = true
cors = ["http://localhost:3000"]
heartbeat = 2
ttl = 90
keep = "30d"
dtype = "model"
api-key-file = "keys"
model = "~/m"
adapter = "./a"
journal = "postgresql://h/d"
"""
    found = context_with(text, tmp_path).params
    assert (True, 2.0, 90, 30 * 86_400) == (
        *(found["no_prewarm"], found["heartbeat"]),
        *(found["ttl"], found["keep"]),
    )
    assert ("http://localhost:3000",) == found["cors"]
    assert tmp_path / "keys" == found["api_key_file"]
    assert str(Path.home() / "m") == found["model"]
    assert str(tmp_path / "a") == found["adapter"]
    assert ("postgresql://h/d", "model") == (found["journal"], found["dtype"])


def test_names_of_a_hub_stay(tmp_path: Path) -> None:
    """A model is a path if it looks like one, or is there."""
    text = 'model = "org/name"\n'
    assert "org/name" == context_with(text, tmp_path).params["model"]
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert str(tmp_path / "org/name") == context_with(text, tmp_path).params["model"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "line 1: 'prot' is not an option. Did you mean port?"),
        ("zzz = 1", "line 1: 'zzz' is not an option. `ops config show` lists the options."),
        ('\nport = "x"', "line 2: port is 'x'; it must be a whole number: 0 to 65535."),
        ("port = 70000", "line 1: port is 70000; it must be a whole number: 0 to 65535."),
        ("port = true", "line 1: port is true; it must be a whole number"),
        ("drain = -1", "line 1: drain is -1; it must be a number: 0 or more."),
        ("request_timeout = 0", "must be a number: more than 0."),
        ("no_prewarm = 1", "line 1: no_prewarm is 1; it must be true or false."),
        ("host = 1", "line 1: host is 1; it must be a text."),
        ('cors = "*"', "line 1: cors is '*'; it must be a list of texts."),
        ('dtype = "int4"', "line 1: dtype is 'int4'; it must be one of auto, float32, model."),
        ("ttl = false", "must be a number of seconds, or a text such as 5m, 1h or 7d."),
        ('api_key = ["a=12345678"]', "line 1: api_key is secret: write keys into a file"),
        ("config = 'x'", "'config' is not an option."),
        ("[port]\na = 1", "[port] is a table. Write options on lines of their own"),
        ("help = true", "'help' is not an option."),
    ],
)
def test_mistakes_in_the_file(text: str, words: str, tmp_path: Path) -> None:
    """Each is refused with its line, what is wrong, and what it must be."""
    with pytest.raises(Unreadable) as refused:
        context_with(text, tmp_path)
    assert f"{tmp_path / 'c.toml'}" in str(refused.value)
    assert words in str(refused.value)
    assert "12345678" not in str(refused.value)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    """The operator can correct them together, those too that only the option itself refuses."""
    text = """prot = 1
queue = 'x'
ttl = "7 days"
keep = "1h"
cors = ["*", "x"]
drain = nan
node = "N-1"
sink_tokens = 2
"""
    with pytest.raises(Unreadable) as refused:
        context_with(text, tmp_path)
    lines = str(refused.value).splitlines()
    assert [f"{tmp_path / 'c.toml'}, line {n}" for n in range(1, 8)] == [
        line.partition(":")[0] for line in lines
    ]
    assert "ttl: '7 days' must be a number of seconds" in lines[2]
    assert "keep: '1h' is less than a day." in lines[3]


def test_an_option_that_needs_another(tmp_path: Path) -> None:
    """The error names the line of the file, and not an option that was not typed."""
    with pytest.raises(click.UsageError) as refused:
        context_with("sink_tokens = 2", tmp_path)
    assert "--sink-tokens has no effect with --kv-policy full" in refused.value.format_message()


def test_a_variable_with_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable."""
    monkeypatch.setenv("CAIRN_PORT", "many")
    with pytest.raises(click.UsageError) as refused:
        context_with("", tmp_path)
    assert "--port, set by $CAIRN_PORT" in refused.value.format_message()


def test_a_variable_that_sets_nothing() -> None:
    """A misspelt one is named, and others of the same prefix are not."""
    environ = {
        "CAIRN_PROT": "1",
        "CAIRN_PORT": "1",
        "CAIRN_FUZZ_EXAMPLES": "1",
        "CAIRN_API_KEY": "",
    }
    assert ["$CAIRN_PROT sets nothing. Did you mean $CAIRN_PORT?"] == list(
        unknown_variables(serve, environ)
    )


@pytest.mark.parametrize("option", OPTIONS, ids=lambda one: one.name)
def test_each_option_has_a_variable(option: Configured) -> None:
    """But the API keys, which have one of their own."""
    expected = None if option.name == "api_key" else variable_of(option)
    assert expected == option.envvar


def test_help_in_groups() -> None:
    """Ten common options first and in full, the others by name; --help-all explains all."""
    context = click.Context(serve, info_name="serve", terminal_width=88)
    short, long = serve.get_help(context), serve.help_of_all(context)
    common = [one for one in OPTIONS if one.group == COMMON]
    assert 10 == len(common) == len([line for line in short.splitlines() if line[:3] == "  -"]) - 2
    for one in OPTIONS:
        assert one.spelled in short
        assert f"  {one.spelled}" in long or f", {one.spelled}" in long
    assert (2, 1) == (short.count("--disk-mb"), short.count("--pool-slabs"))
    assert "INTEGER RANGE" not in long
    assert "<=x" not in long
    assert short.index("Common options") < short.index("More options")


def test_the_disk_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model, unless the operator sets it; what only shows something is not journaled."""
    options = serve.make_context("serve", ["--data-dir", str(tmp_path)]).params
    settings = settings_of(options, tmp_path)
    assert settings.disk_bytes is None
    assert not {"disk_mb", "verbose", "config"} & set(settings.on_record)
    monkeypatch.setenv("CAIRN_DISK_MB", "3")
    options = serve.make_context("serve", ["--data-dir", str(tmp_path)]).params
    assert 3 << 20 == settings_of(options, tmp_path).disk_bytes
    assert 3 == settings_of(options, tmp_path).on_record["disk_mb"]


@pytest.mark.parametrize(
    ("text", "arguments", "left"),
    [
        ('models = "m.toml"', ["--model", "a"], ("a", None)),
        ('model = "a"', ["--models", "m.toml"], (None, "m.toml")),
        ('model = "a"\nmodels = "m.toml"', [], ("a", "m.toml")),  # refused later
        ("", ["--model", "a", "--models", "m.toml"], ("a", "m.toml")),
        ('models = "m.toml"', [], (None, "m.toml")),
        ('model = "a"', [], ("a", None)),
    ],
)
def test_one_model_or_several(
    text: str, arguments: list[str], left: tuple[str | None, str | None], tmp_path: Path
) -> None:
    """What is set where it counts more replaces the other; two in one place are both left."""
    context = context_with(text, tmp_path, *arguments)
    choose_models(context)
    model, models = context.params["model"], context.params["models"]
    assert left == (model, None if models is None else models.name)


@pytest.mark.parametrize(
    ("text", "arguments", "left", "printed"),
    [
        ('model = "a"\nadapter = "x"', ["--model", "b"], ("b", None, None, None), ["adapter"]),
        (
            'models = "m.toml"\nadapter = "x"\nmodel_name = "n"',
            ["--model", "b", "--adapter", "y"],
            ("b", "y", None, None),
            ["model_name"],
        ),
        ('model = "a"\nadapter = "x"', ["--models", "m.toml"], (None, None, None, "m.toml"), []),
        ('model = "a"\nadapter = "x"', [], ("a", "x", None, None), []),
        ('model = "a"', ["--adapter", "y"], ("a", "y", None, None), []),
        ("", ["--adapter", "y", "--model-name", "n"], (None, "y", "n", None), []),
    ],
)
def test_name_and_adapter_are_those_of_the_model(
    text: str,
    arguments: list[str],
    left: tuple[str | None, ...],
    printed: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that the file sets for another model are not used, which is printed with the line."""
    context = context_with(text, tmp_path, *arguments)
    choose_models(context)
    found = [context.params[name] for name in ("model", "adapter", "model_name", "models")]
    assert list(left) == [None if one is None else Path(one).name for one in found]
    lines = capsys.readouterr().err.splitlines()
    assert printed == [line.partition(" ")[0] for line in lines]
    assert all("c.toml, line " in line and "is for another model" in line for line in lines)


def test_an_adapter_beside_several_models_is_refused(tmp_path: Path) -> None:
    """None of them is dropped without a word."""
    context = context_with('models = "m.toml"', tmp_path, "--adapter", "y")
    choose_models(context)
    with pytest.raises(Unreadable, match="--adapter is for one model"):
        read_models_option(context.params)
