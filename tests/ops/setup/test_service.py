"""`ops service`: the files that it writes, the programs that it calls, and what it refuses."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cairn.ops.cli import ops
from cairn.ops.serve.data_dir import hold
from cairn.ops.setup import service
from cairn.ops.setup.units import LABEL, UNIT, Service, launchd_plist, systemd_unit
from cairn.ops.state.running import Running

FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "{calls}"
case "$*" in
    *is-failed*) exit {failed} ;;
    *{broken}*) echo "Failed to connect to bus" >&2; exit 1 ;;
    print*) echo "    last exit code = {code}" ;;
esac
exit 0
"""


class Machine:
    """A home directory, and programs that write down how they were called."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._monkeypatch = monkeypatch
        self.programs = root / "bin"
        self.programs.mkdir()
        self.fake()
        monkeypatch.setenv("PATH", str(self.programs), prepend=":")
        monkeypatch.setenv("HOME", str(root))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.setenv("CAIRN_DATA_DIR", str(root / "data"))
        for name in ("CAIRN_CONFIG", "CAIRN_CACHE_DIR", "HF_HOME", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        self.on("linux")

    def fake(self, *, failed: bool = False, broken: str = "nothing-is", code: str = "0") -> None:
        """Make the programs; some of their calls fail."""
        text = FAKE.format(
            calls=self.root / "calls", failed=0 if failed else 1, broken=broken, code=code
        )
        for name in ("systemctl", "journalctl", "launchctl", "tail"):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)

    def on(self, platform: str) -> None:
        """Run on Linux or on macOS."""
        self._monkeypatch.setattr(sys, "platform", platform)

    def answers(self, url: str | None) -> None:
        """The server of the service answers, or does not."""
        found = None if url is None else Running(self.root / "data", 1, url)
        self._monkeypatch.setattr(service, "running", lambda _: found if self.calls else None)
        self._monkeypatch.setattr(service, "health_of", lambda *_: {"status": "ok"})

    @property
    def calls(self) -> list[str]:
        """The calls so far."""
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def unit(self) -> Path:
        """Where systemd's unit is."""
        return self.root / ".config" / "systemd" / "user" / UNIT

    @property
    def plist(self) -> Path:
        """Where launchd's property list is."""
        return self.root / "Library" / "LaunchAgents" / f"{LABEL}.plist"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with fake programs, on Linux."""
    return Machine(tmp_path, monkeypatch)


def run(*words: str) -> Result:
    """Call `cairn service`."""
    return CliRunner().invoke(ops, ["service", *words], prog_name="cairn")


def exec_start(unit: str) -> str:
    """The command of a unit."""
    return next(line for line in unit.splitlines() if line.startswith("ExecStart="))


def test_the_service_is_installed_and_started(machine: Machine):
    """The options of the command line and of variables are in the unit, with absolute paths."""
    machine.answers("http://127.0.0.1:8080")
    done = run("install", "--port", "8080", "--no-prewarm", "--models", "m.toml", "--ttl", "7d")
    assert 0 == done.exit_code, done.output
    assert "serves at http://127.0.0.1:8080" in done.stdout
    assert (
        f'ExecStart="{sys.executable}" "-P" "-m" "cairn" "serve" "--data-dir" '
        f'"{machine.root / "data"}" "--models" "{Path.cwd() / "m.toml"}" "--port" "8080" "--ttl" '
        '"604800" "--no-prewarm"'
    ) == exec_start(machine.unit.read_text())
    assert ["daemon-reload", f"enable {UNIT}", f"restart {UNIT}"] == [
        call.removeprefix("systemctl --user ") for call in machine.calls[:3]
    ]


def test_variables_are_written_and_keys_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    """A key would be in a file that says how a program is started."""
    monkeypatch.setenv("CAIRN_QUEUE", "3")
    monkeypatch.setenv("HF_HOME", "/models/hub")
    shown = run("install", "--show")
    assert 0 == shown.exit_code
    assert '"--queue" "3"' in shown.stdout
    assert 'Environment="HF_HOME=/models/hub"' in shown.stdout
    assert not machine.unit.exists()

    assert 2 == run("install", "--api-key", "k" * 32).exit_code
    monkeypatch.setenv("CAIRN_API_KEYS", "k" * 32)
    refused = run("install")
    assert 2 == refused.exit_code
    assert "--api-key-file" in refused.output
    assert "kkk" not in refused.output
    assert [] == machine.calls
    assert not machine.unit.exists()


@pytest.mark.parametrize("options", [("--prot", "1"), ("--port", "x"), ("--model-name", "a\nb")])
def test_an_option_that_cannot_be_used_changes_nothing(machine: Machine, options: tuple[str, ...]):
    """The message is that of `ops serve`."""
    refused = run("install", *options)
    assert 2 == refused.exit_code
    assert [] == machine.calls
    assert not machine.unit.exists()


def test_a_running_server_is_named(machine: Machine):
    """Two servers cannot use one data directory."""
    data_dir = machine.root / "data"
    data_dir.mkdir()
    with hold(data_dir, f"sqlite:///{data_dir / 'journal.db'}"):
        refused = run("install")
    assert 2 == refused.exit_code
    assert "`cairn stop`" in refused.output
    assert [] == machine.calls


def test_a_server_that_ends_is_reported(machine: Machine):
    """At once, and not after the whole wait."""
    machine.answers(None)
    machine.fake(failed=True)
    done = run("install", "--wait", "600")
    assert 1 == done.exit_code
    assert "has ended" in done.output
    assert "`cairn service logs`" in done.output


def test_a_server_that_does_not_answer_is_reported(machine: Machine):
    """After the wait."""
    machine.answers(None)
    done = run("install", "--wait", "0")
    assert 1 == done.exit_code
    assert "does not answer after 0 s" in done.output


def test_a_systemd_that_cannot_be_reached(machine: Machine):
    """Its message is shown, with what to do."""
    machine.answers(None)
    machine.fake(broken="daemon-reload")
    done = run("install")
    assert 2 == done.exit_code
    assert "Failed to connect to bus" in done.output
    assert "Log in as this user" in done.output


def test_it_is_looked_at_and_removed(machine: Machine):
    """Each command calls its program; without a service they say so."""
    assert 2 == run("status").exit_code
    assert 0 == run("uninstall").exit_code
    assert [] == machine.calls
    machine.answers("http://127.0.0.1:8000")
    assert 0 == run("install").exit_code
    before = len(machine.calls)
    assert [0, 0] == [run("status").exit_code, run("logs", "-f", "-n", "3").exit_code]
    done = run("uninstall")
    assert f"Stopped, and removed {machine.unit}.\n" == done.stdout
    assert not machine.unit.exists()
    assert [
        f"systemctl --user --no-pager status {UNIT}",
        f"journalctl --user --no-pager --lines=3 -u {UNIT} --follow",
        f"systemctl --user disable --now {UNIT}",
        "systemctl --user daemon-reload",
        f"systemctl --user reset-failed {UNIT}",
    ] == machine.calls[before:]


def test_on_macos_launchd_runs_it(machine: Machine):
    """The agent is loaded, looked at and removed."""
    machine.on("darwin")
    machine.answers("http://127.0.0.1:8000")
    done = run("install", "--port", "8000")
    assert 0 == done.exit_code, done.output
    found = plistlib.loads(machine.plist.read_bytes())
    assert [sys.executable, "-P", "-m", "cairn", "serve"] == found["ProgramArguments"][:5]
    assert ["--port", "8000"] == found["ProgramArguments"][-2:]
    domain = f"gui/{os.getuid()}"
    assert [
        f"launchctl bootout {domain}/{LABEL}",
        f"launchctl bootstrap {domain} {machine.plist}",
    ] == machine.calls[:2]
    assert 0 == run("logs").exit_code
    assert machine.calls[-1].startswith("tail -n 50 ")
    assert 0 == run("uninstall").exit_code
    assert f"launchctl bootout {domain}/{LABEL}" == machine.calls[-1]
    assert not machine.plist.exists()


@pytest.mark.parametrize(("code", "words"), [("2", "has ended"), ("0", "does not answer")])
def test_on_macos_an_end_is_an_exit_code(machine: Machine, code: str, words: str):
    """`launchctl print` has the last one."""
    machine.on("darwin")
    machine.answers(None)
    machine.fake(code=code)
    done = run("install", "--wait", "0.1")
    assert 1 == done.exit_code
    assert words in done.output


def test_a_machine_without_either(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    """The message says what to do instead."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    refused = run("install", "--show")
    assert 2 == refused.exit_code
    assert "`cairn serve`" in refused.output


STRANGE = Service(
    ("/a b/python", "-m", 'qu"ote', "100%", "$HOME", "back\\slash"),
    {"HF_HOME": "/a b/100%$x"},
    90.0,
    Path("/logs/service.log"),
)


def test_what_systemd_would_expand_is_escaped():
    """Spaces, quotes, percent signs, dollars and backslashes stay what they are."""
    unit = systemd_unit(STRANGE)
    assert 'ExecStart="/a b/python" "-m" "qu\\"ote" "100%%" "$$HOME" "back\\\\slash"' == exec_start(
        unit
    )
    assert 'Environment="HF_HOME=/a b/100%%$x"' in unit
    assert "TimeoutStopSec=90\n" in unit


def test_launchd_reads_the_property_list():
    """It is one of XML with what launchd knows."""
    text = launchd_plist(STRANGE)
    assert text.startswith(b"<?xml")
    found = plistlib.loads(text)
    assert list(STRANGE.command) == found["ProgramArguments"]
    assert {"HF_HOME": "/a b/100%$x"} == found["EnvironmentVariables"]
    assert {"SuccessfulExit": False} == found["KeepAlive"]
    assert 90 == found["ExitTimeOut"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("breaks", [False, True])
def test_systemd_accepts_the_unit(tmp_path: Path, breaks: bool):
    """Its verifier finds nothing; the control is a unit with an option that there is not."""
    text = systemd_unit(Service((sys.executable, "-c", "100%"), {"A": "b c"}, 90.0, tmp_path))
    path = tmp_path / UNIT
    path.write_text(text.replace("KillMode=mixed", "KillMode=none-such") if breaks else text)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = [line for line in done.stderr.splitlines() if UNIT in line]
    assert breaks == bool(said), done.stderr
