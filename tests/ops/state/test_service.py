"""`ops service`, with a service manager that writes down what it is asked for."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.ops.common.locations import log_path
from cairn.ops.serve.command import serve
from cairn.ops.serve.data_dir import hold
from cairn.ops.state import service as service_module
from cairn.ops.state.running import Running

ODD = """/models/a b%$"x\\'"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of its own, and no variable of Cairn's."""
    for name in [name for name in os.environ if name.startswith("CAIRN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@pytest.fixture(params=["linux", "darwin"])
def asked(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the service manager writes down its arguments; it fails if `fails` is there."""
    monkeypatch.setattr(sys, "platform", request.param)
    folder = home / "bin"
    folder.mkdir()
    name = "systemctl" if request.param == "linux" else "launchctl"
    program = folder / name
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{home}/asked\n'
        f"if [ -e {home}/fails ]; then echo no such bus >&2; exit 3; fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return home / "asked"


@pytest.fixture
def plain(run, monkeypatch: pytest.MonkeyPatch):
    """Runs `ops` without the variable that names the data directory."""
    monkeypatch.delenv("CAIRN_DATA_DIR")
    return run


def installed(home: Path) -> Path:
    (found,) = (path for path in home.rglob("*cairn*") if path.suffix in (".service", ".plist"))
    return found


def test_a_life(plain, home: Path, asked: Path, monkeypatch: pytest.MonkeyPatch):
    """It is installed, installed again with other options, looked at and removed."""
    done = plain("service", "install", "--wait", "0", "--model", ODD, "--port", "8111")
    assert 0 == done.exit_code, done.output
    file = installed(home)
    assert str(file) in done.output
    assert 0o600 == file.stat().st_mode & 0o777
    first = asked.read_text().splitlines()
    assert "bootstrap" in first[0] or "restart cairn" in first[-1]

    assert 0 == plain("service", "install", "--wait", "0").exit_code
    assert b"8111" not in file.read_bytes()
    assert 0 == plain("service", "status").exit_code
    log = log_path(home / ".local/share/cairn")
    log.parent.mkdir(parents=True)
    log.write_text('{"event": "hello", "level": "info", "timestamp": "2026-11-27T07:00:00Z"}\n')
    assert "hello" in plain("service", "logs").stdout
    assert 0 == plain("service", "uninstall").exit_code
    assert not file.exists()
    last = asked.read_text().splitlines()[-1]
    assert "bootout" in last or "disable --now cairn" in last
    monkeypatch.setenv("CAIRN_PROGRAM", "./cairn")
    none = plain("service", "status")
    assert (2, True) == (none.exit_code, "There is no service" in none.output)
    assert none.output.endswith("`./cairn service install`\n")


def test_what_is_shown_is_what_would_be_installed(plain, home: Path, asked: Path):
    """--show changes nothing."""
    shown = plain("service", "install", "--show", "--", "--port", "8111").stdout
    assert not asked.exists()
    assert 0 == plain("service", "install", "--wait", "0", "--", "--port", "8111").exit_code
    file = installed(home)
    assert f"# {file}\n{file.read_text()}" == shown


def test_a_manager_that_fails(plain, home: Path, asked: Path):
    """What it said is in the message."""
    (home / "fails").touch()
    done = plain("service", "install")
    assert 2 == done.exit_code
    assert "no such bus" in done.output


def test_no_manager(plain, monkeypatch: pytest.MonkeyPatch):
    """The message says what to do instead."""
    monkeypatch.setenv("PATH", "")
    done = plain("service", "install")
    assert 2 == done.exit_code
    assert "`ops serve`" in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--prot", "1"), "No such option"), (("--port", "-3"), "--port"), (("more",), "unexpected")],
)
def test_options_that_the_server_would_refuse(plain, asked: Path, options, words: str):
    """They are refused now, and nothing is written."""
    done = plain("service", "install", "--", *options)
    assert 2 == done.exit_code
    assert words in done.output
    assert not asked.exists()


def test_variables_that_a_service_would_not_see(plain, asked: Path, monkeypatch):
    """They are named, so that the server does not run with other settings than the operator saw."""
    monkeypatch.setenv("CAIRN_PORT", "8111")
    done = plain("service", "install")
    assert 2 == done.exit_code
    assert "CAIRN_PORT is set" in done.output
    assert not asked.exists()


@pytest.mark.parametrize("of", ["checkout", "wheel"])
def test_how_the_program_was_called(home: Path, of: str):
    """The launcher and the installed program note it in a variable, which is no setting."""
    (home / "systemctl").touch(mode=0o755)
    (home / "launchctl").touch(mode=0o755)
    program = Path(sys.executable).with_name("cairn")
    if of == "checkout":
        program = Path(shutil.copy(Path(__file__).parents[3] / "cairn", home))
        (home / ".venv").symlink_to(sys.prefix)
    done = subprocess.run(
        [program, "service", "install", "--show"],
        env={**os.environ, "PATH": f"{home}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert "cairn.service\n" in done.stdout or "io.cairn.server.plist\n" in done.stdout


def test_paths_are_those_of_the_shell(plain, home: Path, asked: Path, monkeypatch):
    """A service starts in another directory; names of models stay as they are."""
    monkeypatch.chdir(home)

    def words(*options: str) -> list[str]:
        shown = plain("service", "install", "--show", *options).stdout.partition("\n")[2]
        if sys.platform == "darwin":
            return plistlib.loads(shown.encode())["ProgramArguments"][5:]
        (line,) = (one for one in shown.splitlines() if one.startswith("ExecStart="))
        return shlex.split(line)[5:]

    given = ("--no-prewarm", "--model", "org/name", "--models", "m.toml", "--ttl", "7d")
    expected = ["--model", "org/name", "--models", str(home / "m.toml"), "--ttl", "604800"]
    assert [*expected, "--no-prewarm"] == words(*given)
    (home / "m").mkdir()
    assert ["--model", str(home / "m")] == words("--model", "m")


def test_a_key_is_not_written(plain, home: Path, asked: Path):
    """Others could read it in the list of processes."""
    done = plain("service", "install", "--api-key", "k" * 32)
    assert 2 == done.exit_code
    assert "--api-key-file" in done.output
    assert "kkk" not in done.output
    assert not asked.exists()


def test_a_server_that_runs_already(plain, home: Path, asked: Path):
    """It would have the data directory."""
    data_dir = home / ".local/share/cairn"
    data_dir.mkdir(parents=True)
    with hold(data_dir, f"sqlite:///{data_dir / 'journal.db'}"):
        done = plain("service", "install")
    assert 2 == done.exit_code
    assert "A server runs already" in done.output
    assert not asked.exists()


def test_it_waits_until_the_server_answers(plain, home: Path, asked: Path, monkeypatch):
    """And says where that is."""
    found = Running(home, 1, "http://127.0.0.1:8111")
    monkeypatch.setattr(service_module, "running", lambda _: found if asked.exists() else None)
    monkeypatch.setattr(service_module, "health_of", lambda *_: {"status": "ok"})
    done = plain("service", "install")
    assert (0, True) == (done.exit_code, "It serves at http://127.0.0.1:8111." in done.output)


def test_a_server_that_does_not_answer(plain, home: Path, asked: Path, monkeypatch):
    """One that has failed is not waited for."""
    wait = "0.1" if sys.platform == "darwin" else "600"  # launchd does not say that it failed
    done = plain("service", "install", "--wait", wait)
    assert 1 == done.exit_code
    assert "Its server does not answer" in done.output


def test_a_unit_as_systemd_reads_it(tmp_path: Path):
    """Its own check finds no fault, and its words come out as they went in."""
    arguments = [sys.executable, "-P", "-m", "cairn", "serve", "--model", ODD]
    unit = tmp_path / "cairn.service"
    unit.write_bytes(service_module.Systemd().content(arguments))
    (line,) = (one for one in unit.read_text().splitlines() if one.startswith("ExecStart="))
    assert '"/models/a b%%$$\\"x\\\\\'"' in line
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (0, "") == (done.returncode, done.stderr)


def test_a_property_list():
    """launchd gets the words as they are."""
    arguments = [sys.executable, "-P", "-m", "cairn", "serve", "--model", ODD]
    read = plistlib.loads(service_module.Launchd().content(arguments))
    assert arguments == read["ProgramArguments"]
    assert {"SuccessfulExit": False} == read["KeepAlive"]


def test_a_server_stops_within_the_time_of_its_manager():
    """Longer than its drain by default."""
    (drain,) = (option.default for option in serve.params if option.name == "drain")
    assert isinstance(drain, float)
    read = plistlib.loads(service_module.Launchd().content([]))
    assert read["ExitTimeOut"] >= 2 * drain
