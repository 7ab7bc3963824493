"""`ops version`, `ops help`, `ops completion`, `ops logs` and `ops config`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cairn import __version__
from cairn.ops.common.locations import log_path


def test_version(run):
    """One line; with --all a line for each package that answers depend on."""
    assert f"cairn {__version__}\n" == run("version").stdout == run("--version").stdout
    every = run("version", "--all").stdout.splitlines()
    assert ["cairn", "python", "mlx", "mlx-lm"] == [line.split()[0] for line in every[:4]]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run, shell: str, tmp_path: Path):
    """The shell reads it, where there is that shell, and asks the program that printed it."""
    script = run("completion", shell).stdout
    assert f"_OPS_COMPLETE={shell}_complete" in script
    if (found := shutil.which(shell)) is not None:
        file = tmp_path / "completion"
        file.write_text(script, encoding="utf-8")
        subprocess.run([found, "-n", str(file)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("words", "found"),
    [("ops ser", "serve"), ("ops serve --por", "--port"), ("ops completion f", "fish")],
)
def test_what_is_completed(words: str, found: str):
    """Commands, options and the values of arguments."""
    asked = {"_OPS_COMPLETE": "bash_complete", "COMP_WORDS": words}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cairn.ops"],
        env={**os.environ, **asked, "COMP_CWORD": str(words.count(" "))},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert f"plain,{found}" in done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ((), ("--help",)),
        (("serve",), ("serve", "--help")),
        (("journal", "prune"), ("journal", "prune", "--help")),
    ],
)
def test_help(run, asked: tuple[str, ...], same: tuple[str, ...]):
    """It is that of --help."""
    assert run(*same).stdout == run("help", *asked).stdout


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("servee",), "Did you mean `ops serve` or `ops service`?"),
        (("verify", "x"), "`ops verify` has no commands of its own."),
        (("journal", "x"), "No such command 'x'."),
    ],
)
def test_help_of_what_there_is_not(run, asked: tuple[str, ...], words: str):
    """An error, with similar names."""
    result = run("help", *asked)
    assert 2 == result.exit_code
    assert words in result.stderr


def test_no_command(run):
    """Help on stdout, and no failure."""
    result = run()
    assert (0, run("--help").stdout, "") == (result.exit_code, result.stdout, result.stderr)


def test_logs(run, tmp_path: Path):
    """The last lines of the log, or its path."""
    folder = tmp_path / "data"
    log_path(folder).parent.mkdir(parents=True)
    log_path(folder).write_text('{"event": "one"}\n{"event": "two"}\n')
    assert '{"event": "two"}\n' == run("logs", "-n", "1").stdout
    assert f"{log_path(folder)}\n" == run("logs", "--path").stdout
    missing = run("logs", "--data-dir", tmp_path / "none")
    assert 2 == missing.exit_code
    assert "There is no log at" in missing.stderr


def test_config_show(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each option, its value, and where that was set: all four places."""
    file = tmp_path / "c.toml"
    file.write_text("# mine\nqueue = 2\n")
    monkeypatch.setenv("CAIRN_CONFIG", str(file))
    monkeypatch.setenv("CAIRN_NO_PREWARM", "1")
    monkeypatch.setenv("CAIRN_API_KEYS", "alice=very-secret-key")
    result = run("config", "show", "--port", "9", "--allow-host", "a", "--allow-host", "b")
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in result.stdout.splitlines()}
    assert f"configuration file: {file}\n" == result.stderr
    assert ["2", f"{file}, line 2"] == rows["queue"]
    assert ["9", "command line"] == rows["port"]
    assert ["true", "$CAIRN_NO_PREWARM"] == rows["no_prewarm"]
    assert ["a, b", "command line"] == rows["allow_host"]
    assert ["(hidden)", "$CAIRN_API_KEYS"] == rows["api_key"]
    assert ["1024", "default"] == rows["max_tokens"]
    assert ["", "default"] == rows["disk_mb"]
    assert [str(tmp_path / "data"), "$CAIRN_DATA_DIR"] == rows["data_dir"]
    assert "very-secret-key" not in result.output


def test_config_show_without_a_file(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It says where one would be."""
    monkeypatch.delenv("CAIRN_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    result = run("config", "show")
    assert f"none; {tmp_path / 'cairn' / 'config.toml'} does not exist" in result.stderr
    assert ["", "default"] == result.stdout.splitlines()[1].split("\t")[1:]


@pytest.mark.parametrize("command", ["config show", "serve", "config show --config"])
def test_a_mistake_in_the_file(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    """The server does not start with it, and `config show` says the same."""
    file = tmp_path / "c.toml"
    file.write_text("prot = 1\n")
    monkeypatch.setenv("CAIRN_CONFIG", str(file))
    result = run(*command.split(), *([file] if command.endswith("--config") else []))
    assert (2, f"{file}, line 1: 'prot' is not an option. Did you mean port?\n") == (
        result.exit_code,
        result.stderr,
    )


def test_config_init(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file sets nothing; with its comments removed it is TOML. Written once, and never over."""
    monkeypatch.setenv("CAIRN_CONFIG", str(tmp_path / "new" / "c.toml"))
    file = tmp_path / "new" / "c.toml"
    assert f"Wrote {file}.\n" == run("config", "init").stdout
    text = file.read_text()
    assert {} == tomllib.loads(text)
    options = [line.removeprefix("# ") for line in text.splitlines() if " = " in line]
    assert {"port", "model", "disk_mb"} <= set(tomllib.loads("\n".join(options)))
    again = run("config", "init")
    assert (2, f"{file} exists, and was not changed.\n") == (again.exit_code, again.stderr)
    assert text == file.read_text()
    assert 0 == run("config", "show").exit_code


def test_config_show_names_itself(run):
    """An error about an option of the server has the usage of the command that was called."""
    result = run("config", "show", "--port", "abc")
    assert 2 == result.exit_code
    assert result.stderr.startswith("Usage: ops config show ")
    assert "Try 'ops config show --help' for help." in result.stderr


def test_config_show_warns_as_the_server_does(run, monkeypatch: pytest.MonkeyPatch):
    """A variable that sets nothing is named."""
    monkeypatch.setenv("CAIRN_PROT", "9")
    result = run("config", "show")
    assert "Warning: $CAIRN_PROT sets nothing. Did you mean $CAIRN_PORT?\n" in result.stderr
    assert 0 == result.exit_code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve --port abc", "'--port': it is 'abc'; it must be a whole number: 0 to 65535."),
        ("serve --port 70000", "'--port': it is 70000; it must be a whole number: 0 to 65535."),
        ("serve --drain nan", "'--drain': it is nan; it must be a number: 0 or more."),
        ("logs -n -1", "it is -1; it must be a whole number: 0 or more."),
        ("serve --dtype int4", "'int4' is not one of 'auto', 'float32', 'model'."),
    ],
)
def test_a_number_that_cannot_be_used(run, words: str, said: str):
    """The sentence of the configuration file."""
    result = run(*words.split())
    assert 2 == result.exit_code
    assert said in result.stderr
