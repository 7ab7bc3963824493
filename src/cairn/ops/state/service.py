"""
``ops service``: runs the server as a service of the operator's own: a unit of systemd on Linux, an
agent of launchd on macOS. Both start it at login, and again after a crash.
"""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import attrs
import click
from click.core import ParameterSource

from cairn.ops.cli import Unreadable
from cairn.ops.common.config_file import config_path
from cairn.ops.common.locations import data_dir_option, example
from cairn.ops.common.program import VARIABLE, as_called, program_name
from cairn.ops.serve.configured import Configured, located
from cairn.ops.state.running import health_of, running

NAME: Final = "cairn"
LABEL: Final = "io.cairn.server"
_COMMAND_S = 60.0
_STOP_S = 90
"""How long a service manager waits for the end of a server: its default drain, and the disk."""

_POLL_S = 0.5

NOT_ANSWERING = 1
"""The exit code if the service was installed, and its server did not answer in time."""

Runner = tuple[str, ...]


class Manager(Protocol):
    """
    A service manager.

    Attributes:
        file: where it looks for the service.
        start: commands that load and start the service.
        stop: commands that stop and unload it.
        status: the command that shows how it is.
        failed: the command that exits with 0 if it has ended by a fault; None without one.
        hint: what else the operator may want; empty if nothing.
    """

    @property
    def file(self) -> Path: ...

    @property
    def start(self) -> Sequence[Runner]: ...

    @property
    def stop(self) -> Sequence[Runner]: ...

    @property
    def status(self) -> Runner: ...

    @property
    def failed(self) -> Runner | None: ...

    @property
    def hint(self) -> str: ...

    def content(self, arguments: Sequence[str]) -> bytes:
        """The file of a service that runs this command."""


@attrs.frozen
class Systemd:
    """A user's systemd."""

    @property
    def file(self) -> Path:
        configured = os.environ.get("XDG_CONFIG_HOME", "")
        home = Path(configured) if configured.startswith("/") else Path.home() / ".config"
        return home / "systemd" / "user" / f"{NAME}.service"

    start = (
        ("systemctl", "--user", "daemon-reload"),
        ("systemctl", "--user", "enable", NAME),
        ("systemctl", "--user", "restart", NAME),
    )
    stop = (("systemctl", "--user", "disable", "--now", NAME),)
    status = ("systemctl", "--user", "status", "--no-pager", NAME)
    failed = ("systemctl", "--user", "--quiet", "is-failed", NAME)
    hint = (
        "It runs while you are logged in. `loginctl enable-linger` lets it run from the start of "
        "the machine on."
    )

    def content(self, arguments: Sequence[str]) -> bytes:
        """
        The unit. A start that was refused (exit code 2) is not repeated, because it would be
        refused again.
        """
        return f"""\
[Unit]
Description=Cairn, a server for local language models
After=network.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
ExecStart={" ".join(map(_unit_word, arguments))}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
KillMode=mixed
UMask=0077
NoNewPrivileges=yes
TimeoutStopSec={_STOP_S}

[Install]
WantedBy=default.target
""".encode()


@attrs.frozen
class Launchd:
    """A user's launchd."""

    @property
    def file(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    @property
    def start(self) -> Sequence[Runner]:
        return (("launchctl", "bootstrap", _domain(), str(self.file)),)

    @property
    def stop(self) -> Sequence[Runner]:
        return (("launchctl", "bootout", f"{_domain()}/{LABEL}"),)

    @property
    def status(self) -> Runner:
        return ("launchctl", "print", f"{_domain()}/{LABEL}")

    failed = None
    hint = ""

    def content(self, arguments: Sequence[str]) -> bytes:
        """The property list. launchd starts a failed server again, every 30 seconds at most."""
        return plistlib.dumps(
            {
                "Label": LABEL,
                "ProgramArguments": list(arguments),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": 30,
                "ExitTimeOut": _STOP_S,
                "ProcessType": "Interactive",
                "StandardErrorPath": str(Path.home() / "Library" / "Logs" / "cairn.log"),
            }
        )


def manager() -> Manager:
    """
    The service manager of this machine.

    Raises:
        Unreadable: it has none that this command knows.
    """
    found: Manager = Launchd() if sys.platform == "darwin" else Systemd()
    program = found.status[0]
    if shutil.which(program) is None:
        raise Unreadable(
            f"There is no `{program}` here, so `ops service` cannot run the server. Have it run by "
            "what your system has, with the command `ops serve`."
        )
    return found


@click.group(epilog=example("ops service install", "ops service status"))
def service() -> None:
    """Run the server as a service, from login on."""


@service.command(
    epilog=example(
        "ops service install",
        "ops service install --model ~/models/Qwen3-4B --port 8001",
        "ops service install --show",
    ),
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
)
@click.option("--show", is_flag=True, help="Print the file and where it would be. Change nothing.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until the server answers; 0 does not wait.",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SERVE]...")
def install(show: bool, wait: float, options: tuple[str, ...]) -> None:
    """
    Install the service, and start it. If it is installed, replace it, and start it again.

    A service does not see the variables of your shell, so settings are options of `ops serve` or in
    the configuration file (`ops config`). Relative paths are those of this shell.

    \b
    Exit code
      0  the server answers
      1  it does not answer in time, or has ended
      2  an option cannot be used, or the service cannot be installed
    """
    context = _checked(options)
    found = manager()
    words = [word for one in context.command.params for word in _words(context, one)]
    content = found.content([sys.executable, "-P", "-m", "cairn", "serve", *words])
    if show:
        click.echo(f"# {found.file}\n{content.decode()}", nl=False)
        return
    replaces = found.file.exists()
    data_dir: Path = context.params["data_dir"]
    if not replaces and (server := running(data_dir)) is not None:
        raise Unreadable(f"A server runs already: {server.words}. `ops stop` stops it.")
    try:
        found.file.parent.mkdir(parents=True, exist_ok=True)
        found.file.write_bytes(content)
        found.file.chmod(0o600)  # options may name what others need not know
    except OSError as error:
        raise Unreadable(f"{found.file} cannot be written: {error.strerror}.") from error
    if replaces and isinstance(found, Launchd):
        _run(found.stop[0], may_fail=True)  # it cannot be loaded twice
    for command in found.start:
        _run(command)
    click.echo(f"Cairn runs as a service ({found.file}).")
    after = "`ops service status` shows how it is, `ops service logs` what it does."
    click.echo(as_called(after))
    if wait and not _answers(found, data_dir, wait):
        after = "Its server does not answer. `ops service status` shows why."
        click.echo(as_called(after), err=True)
        raise SystemExit(NOT_ANSWERING)
    if found.hint:
        click.echo(found.hint)


@service.command(epilog=example("ops service status"))
def status() -> None:
    """
    Show what the service manager says of the service. Its exit code is that of this command.

    `ops status` shows what the server itself says.
    """
    found = _installed()
    raise SystemExit(subprocess.run(found.status, check=False).returncode)


@service.command(epilog=example("ops service logs", "ops service logs -f"))
@data_dir_option
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last N. [default: 10]")
@click.pass_context
def logs(context: click.Context, data_dir: Path, follow: bool, lines: int | None) -> None:
    """Show the log of the server; as `ops logs`, which has more options."""
    _installed()
    from cairn.ops.state.logs import logs as of_server

    context.invoke(of_server, data_dir=data_dir, follow=follow, lines=lines)


@service.command(epilog=example("ops service uninstall"))
def uninstall() -> None:
    """Stop the service, and remove it. The data directory stays."""
    found = _installed()
    for command in found.stop:
        _run(command)
    try:
        found.file.unlink()
    except OSError as error:
        raise Unreadable(f"{found.file} cannot be removed: {error.strerror}.") from error
    click.echo(f"The service is removed ({found.file}). The data directory stays as it is.")


def _installed() -> Manager:
    found = manager()
    if not found.file.exists():
        raise Unreadable(f"There is no service: {found.file} is missing. `ops service install`")
    return found


def _checked(options: Sequence[str]) -> click.Context:
    """
    What `ops serve` makes of its options.

    Raises:
        click.UsageError: it would refuse them, or they have a key, or this shell has variables that
            a service would not see.
    """
    from cairn.ops.serve.command import serve

    own = sorted(name for name in os.environ if name.startswith("CAIRN_") and name != VARIABLE)
    if own:
        config = config_path()
        where = f" or in {config}" if config is not None else ""
        raise click.UsageError(
            f"{', '.join(own)} {'are' if len(own) > 1 else 'is'} set in this shell, and a service "
            f"does not see that. Unset it, and set it as an option{where}."
        )
    context = serve.make_context(f"{program_name()} serve", list(options))
    if context.params["api_key"]:
        raise click.UsageError(
            "--api-key would be in the file of the service. Write keys into a file that you alone "
            "can read, and name it with --api-key-file."
        )
    return context


def _words(context: click.Context, option: click.Parameter) -> Iterator[str]:
    """
    An option of `ops serve` as it is written in the service. Its working directory is another one,
    so paths are absolute.
    """
    name = option.name or ""
    if (
        not isinstance(option, Configured)
        or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE
    ):
        return
    value = context.params[name]
    if option.is_flag:
        yield option.spelled
        return
    for one in value if option.multiple else (value,):
        yield option.spelled
        yield located(str(one), Path("here"), option.place) if option.place else str(one)


def _answers(found: Manager, data_dir: Path, wait_s: float) -> bool:
    """Wait until the server of a service answers; False if it does not in time, or has ended."""
    click.echo("Waiting until the server answers ...", err=True)
    end_s = time.monotonic() + wait_s
    while time.monotonic() < end_s:
        server = running(data_dir)
        if server is not None and server.url is not None and health_of(server.url, None):
            click.echo(f"It serves at {server.url}.")
            return True
        if found.failed is not None and subprocess.run(found.failed, check=False).returncode == 0:
            return False
        time.sleep(_POLL_S)
    return False


def _run(command: Runner, *, may_fail: bool = False) -> None:
    """
    Run a command of the service manager.

    Raises:
        Unreadable: it failed; the message has what it printed.
    """
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreadable(f"`{shown}` failed: {error}.") from error
    if done.returncode != 0 and not may_fail:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise Unreadable(f"`{shown}` failed: {said}")


def _unit_word(word: str) -> str:
    """A word of a command line in a unit, where %, $, quotes and backslashes have meanings."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _domain() -> str:
    """launchd's name for the services of this user's session."""
    return f"gui/{os.getuid()}"
