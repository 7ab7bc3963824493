"""
The files that describe the server to systemd and to launchd.

Pure: they are texts of a ``Service``, and nothing is written here.
"""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

UNIT = "cairn.service"
"""The name of the systemd unit."""

LABEL = "cairn.server"
"""The label of launchd's agent."""

REFUSED = 2
"""The exit code of a server whose options cannot be used: a restart would not help."""

_RESTART_S = 5
_THROTTLE_S = 30


@attrs.frozen
class Service:
    """
    A server to run in the background.

    Attributes:
        command: the program and its arguments.
        environment: the variables that it gets besides those of every service.
        end_s: how long it may take to end, in seconds.
        output: the file that gets what it prints; systemd has a journal of its own.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    end_s: float
    output: Path


def systemd_unit(service: Service) -> str:
    """The unit of a user's systemd."""
    lines = [
        "[Unit]",
        "Description=Cairn, a server for language models",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(map(_quoted, service.command))}",
        *(
            f"Environment={_quoted(f'{name}={value}', in_command=False)}"
            for name, value in service.environment.items()
        ),
        "Restart=on-failure",
        f"RestartSec={_RESTART_S}",
        f"RestartPreventExitStatus={REFUSED}",
        # SIGTERM to the server alone, which lets running answers finish.
        "KillMode=mixed",
        f"TimeoutStopSec={service.end_s:.0f}",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str, *, in_command: bool = True) -> str:
    """A word as systemd reads it: with quotes, and without specifiers and variables."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{word.replace("$", "$$") if in_command else word}"'


def launchd_plist(service: Service) -> bytes:
    """The property list of a user's launchd agent."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(service.command),
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _THROTTLE_S,
            # launchd slows down and limits what is a background process.
            "ProcessType": "Interactive",
            "ExitTimeOut": round(service.end_s),
            "Umask": 0o077,
            "StandardOutPath": str(service.output),
            "StandardErrorPath": str(service.output),
        },
        sort_keys=False,
    )
