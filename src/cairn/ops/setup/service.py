"""
``cairn service``: the server as a service of this user, by systemd or launchd.

1. Options are checked before anything is written.
2. What the options and variables say at the installation is written into the unit, so that a later
   change of the shell's environment changes nothing. Keys are never written there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import click
from click.core import ParameterSource

from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import example
from cairn.ops.common.program import program
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.configured import Configured, ConfiguredCommand, located
from cairn.ops.setup.units import LABEL, UNIT, Service, launchd_plist, systemd_unit
from cairn.ops.state.running import health_of, running

NOT_SERVING = 1
"""The exit code if the service was installed, and its server did not answer in time."""

_WRITES_S = 60.0  # after the last answers, the cache is written to disk
_POLL_S = 0.5
_PASSED_ON = ("CAIRN_CACHE_DIR", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")
_EXIT_CODE = r"last exit code = (\d+)"
_OPTIONS = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


class Manager(Protocol):
    """What runs the services of a user."""

    @property
    def path(self) -> Path:
        """Where that is described."""

    def text(self, service: Service) -> bytes:
        """The file that describes a service."""

    def start(self) -> None:
        """Start the service, or start it again, and do so at each login."""

    def stop(self) -> None:
        """Stop the service, and do not start it at the next login."""

    def forget(self) -> None:
        """Forget the service, whose file was removed."""

    def has_failed(self) -> bool:
        """Whether the service ended by itself."""

    def status(self) -> int:
        """Show the state of the service. Returns the exit code."""

    def logs(self, lines: int, *, follow: bool) -> int:
        """Show what the service printed. Returns the exit code."""


@attrs.frozen
class Systemd:
    """The systemd of a user."""

    path: Path

    def text(self, service: Service) -> bytes:
        """See ``Manager``."""
        return systemd_unit(service).encode()

    def start(self) -> None:
        """See ``Manager``."""
        self._control("daemon-reload")
        self._control("enable", UNIT)
        self._control("restart", UNIT)

    def stop(self) -> None:
        """See ``Manager``."""
        self._control("disable", "--now", UNIT)

    def forget(self) -> None:
        """See ``Manager``."""
        self._control("daemon-reload")
        _called("systemctl", "--user", "reset-failed", UNIT)  # fails if it had not failed

    def has_failed(self) -> bool:
        """See ``Manager``."""
        return _called("systemctl", "--user", "is-failed", UNIT).returncode == 0

    def status(self) -> int:
        """See ``Manager``."""
        return _shown("systemctl", "--user", "--no-pager", "status", UNIT)

    def logs(self, lines: int, *, follow: bool) -> int:
        """See ``Manager``."""
        more = ["--follow"] if follow else []
        return _shown("journalctl", "--user", "--no-pager", f"--lines={lines}", "-u", UNIT, *more)

    def _control(self, *words: str) -> None:
        _done("systemctl", "--user", *words)


@attrs.frozen
class Launchd:
    """The launchd of a user."""

    path: Path
    output: Path

    def text(self, service: Service) -> bytes:
        """See ``Manager``."""
        return launchd_plist(service)

    def start(self) -> None:
        """See ``Manager``."""
        self.output.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _called("launchctl", "bootout", self._target)  # fails if it is not loaded
        _done("launchctl", "bootstrap", self._domain, str(self.path))

    def stop(self) -> None:
        """See ``Manager``."""
        _called("launchctl", "bootout", self._target)

    def forget(self) -> None:
        """See ``Manager``."""

    def has_failed(self) -> bool:
        """See ``Manager``."""
        found = re.search(_EXIT_CODE, _called("launchctl", "print", self._target).stdout)
        return found is not None and found[1] != "0"

    def status(self) -> int:
        """See ``Manager``."""
        return _shown("launchctl", "print", self._target)

    def logs(self, lines: int, *, follow: bool) -> int:
        """See ``Manager``."""
        return _shown("tail", "-n", str(lines), *(["-F"] if follow else []), str(self.output))

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _target(self) -> str:
        return f"{self._domain}/{LABEL}"


def manager() -> Manager:
    """
    What runs the services of this user.

    Raises:
        Unreadable: this machine has neither systemd nor launchd.
    """
    if sys.platform == "darwin":
        library = Path.home() / "Library"
        return Launchd(
            library / "LaunchAgents" / f"{LABEL}.plist", library / "Logs" / "cairn-service.log"
        )
    if shutil.which("systemctl") is None:
        raise Unreadable(
            "Services need systemd or launchd, and this machine has neither. Start "
            f"`{program()} serve` by what starts programs here."
        )
    home = os.environ.get("XDG_CONFIG_HOME")
    config = Path(home) if home else Path.home() / ".config"
    return Systemd(config.absolute() / "systemd" / "user" / UNIT)


@click.group(
    epilog=example("ops service install", "ops service install --port 8080", "ops service logs -f")
)
def service() -> None:
    """
    Run the server in the background, from login on.

    It is a service of your user, by systemd on Linux and by launchd on macOS. It is started again
    if it fails. `ops status`, `ops logs` and `ops chat` find it as they find any server.
    """


@service.command(
    context_settings=_OPTIONS,
    epilog=example(
        "ops service install",
        "ops service install --model mlx-community/Qwen3-4B-4bit --port 8080",
        "ops service install --show --models ~/models.toml",
    ),
)
@click.option("--show", is_flag=True, help="Print the file of the service, and change nothing.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until the server answers.",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def install(context: click.Context, show: bool, wait: float, options: tuple[str, ...]) -> None:
    """
    Install the service and start it, or install it again with other options.

    OPTIONS are those of `ops serve`. They are written into the file of the service with the values
    of variables such as $CAIRN_PORT. The configuration file is read at each start.

    \b
    Exit code
      0  the server answers
      1  it does not answer yet, or ended
      2  an option cannot be used, or the service cannot be installed
    """
    chosen, data_dir = _service(options, context)
    by = manager()
    text = by.text(chosen)
    if show:
        click.echo(text, nl=False)
        return
    if not by.path.exists() and (server := running(data_dir)) is not None:
        raise Unreadable(
            f"{server.words[0].upper()}{server.words[1:]} uses {data_dir}. Stop it first: "
            f"`{program()} stop`."
        )
    try:
        by.path.parent.mkdir(parents=True, exist_ok=True)
        by.path.write_bytes(text)
    except OSError as error:
        raise Unreadable(f"{by.path} cannot be written: {error.strerror}.") from error
    click.echo(f"Written: {by.path}", err=True)
    by.start()
    url = _serving(by, data_dir, wait)
    if url is None:
        words = "has ended" if by.has_failed() else f"does not answer after {wait:.0f} s"
        click.echo(f"The server {words}. See `{program()} service logs`.", err=True)
        context.exit(NOT_SERVING)
    click.echo(f"The service serves at {url}. It starts again when you log in.")
    if isinstance(by, Systemd):
        click.echo("To start it at boot, too: loginctl enable-linger", err=True)


@service.command(epilog=example("ops service status"))
@click.pass_context
def status(context: click.Context) -> None:
    """
    Show what systemd or launchd says of the service.

    `ops status` shows the server itself: its model, memory and sessions. The exit code is that of
    systemctl or launchctl.
    """
    context.exit(_installed().status())


@service.command(epilog=example("ops service logs", "ops service logs -f"))
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0), default=50, show_default=True)
@click.pass_context
def logs(context: click.Context, follow: bool, lines: int) -> None:
    """
    Show what the service printed, such as why it did not start.

    `ops logs` shows the log that the server itself writes.
    """
    context.exit(_installed().logs(lines, follow=follow))


@service.command(epilog=example("ops service uninstall"))
def uninstall() -> None:
    """
    Stop the service and remove its file. The data directory stays.

    Running answers are finished first, as long as the server's option --drain allows.
    """
    by = manager()
    if not by.path.exists():
        click.echo(f"No service is installed: {by.path} does not exist.", err=True)
        return
    by.stop()
    try:
        by.path.unlink(missing_ok=True)
    except OSError as error:
        raise Unreadable(f"{by.path} cannot be removed: {error.strerror}.") from error
    by.forget()
    click.echo(f"Stopped, and removed {by.path}.")


def _installed() -> Manager:
    by = manager()
    if not by.path.exists():
        raise Unreadable(f"No service is installed. Install it: `{program()} service install`.")
    return by


def _service(options: Sequence[str], context: click.Context) -> tuple[Service, Path]:
    """
    The service with some options of `ops serve`, and its data directory.

    Raises:
        click.UsageError: an option cannot be used.
        Unreadable: likewise, or it is a key.
    """
    from cairn.ops.serve.command import serve

    assert isinstance(serve, ConfiguredCommand)
    of_serve = serve.make_context("serve", list(options), context.parent)
    if of_serve.params["api_key"] or KEYS_VARIABLE in os.environ:
        raise Unreadable(
            "API keys are not written into the file of a service. Write them into a file that you "
            "alone can read, and name it with --api-key-file."
        )
    data_dir: Path = of_serve.params["data_dir"].absolute()
    given = [word for one in serve.settings() for word in _words(of_serve, one)]
    command = [sys.executable, "-P", "-m", "cairn", "serve", "--data-dir", str(data_dir), *given]
    if any("\n" in word for word in command):
        raise Unreadable("An option has a line break, which the file of a service cannot have.")
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    end_s = of_serve.params["drain"] + _WRITES_S
    return Service(command, environment, end_s, data_dir / "logs" / "service.log"), data_dir


def _words(context: click.Context, option: Configured) -> Iterator[str]:
    """An option as it is written in the command, if it was given; paths are absolute."""
    name = option.name or ""
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    value = context.params[name]
    if name == "data_dir" or value is None or context.get_parameter_source(name) not in given:
        return
    if option.is_flag:
        yield from [option.spelled] if value else []
        return
    for one in value if option.multiple else [value]:
        yield option.spelled
        # Relative paths are those of this shell; the service has another working directory.
        yield located(str(one), Path("here"), option.place) if option.place else str(one)


def _serving(by: Manager, data_dir: Path, wait_s: float) -> str | None:
    """Wait until the server answers. None if it does not in time, or has ended."""
    end_s = time.monotonic() + wait_s
    click.echo("Waiting until the server answers ...", err=True)
    while time.monotonic() < end_s and not by.has_failed():
        server = running(data_dir)
        if server is not None and server.url is not None and health_of(server.url, None):
            return server.url
        time.sleep(_POLL_S)
    return None


def _called(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unreadable(f"{command[0]} cannot be run: {error.strerror}.") from error


def _done(*command: str) -> None:
    done = _called(*command)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise Unreadable(
            f"`{' '.join(command)}` failed with exit code {done.returncode}: {said}. Log in as "
            "this user (not by `su` or `sudo`), and try again."
        )


def _shown(*command: str) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise Unreadable(f"{command[0]} cannot be run: {error.strerror}.") from error
