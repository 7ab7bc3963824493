"""
The clients' packages, in pinned versions, in a folder that caches them.

Nothing here depends on them: this machine's npm and pip install them, and a client whose package
cannot be installed is skipped, with the reason.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

_INSTALL_S = 1200.0

#: By the names of clients.
NPM = {
    "claude-code": "@anthropic-ai/claude-code@2.1.328",
    "opencode": "opencode-ai@1.18.33",
    "codex": "@openai/codex@0.169.0",
}
PIP = {
    "anthropic": "anthropic==2.10.0",
    "openai": "openai==3.51.0",
    "langchain": "langchain-openai==1.7.3",
    "ollama": "ollama==0.6.3",
}
NAMES = (*NPM, *PIP)


class Unavailable(Exception):
    """A client cannot be installed on this machine. The message says why."""


def version(name: str) -> str:
    """The pinned version of a client."""
    pinned = NPM.get(name) or PIP[name]
    return pinned.rpartition("@" if name in NPM else "==")[2]


def install(name: str, cache: Path) -> None:
    """
    Install a client's package, unless this version is already there.

    Raises:
        Unavailable: the installation failed.
    """
    folder = _folder(name, cache)
    if is_installed(name, cache):
        return
    if name in NPM:
        npm = shutil.which("npm")
        if npm is None:
            raise Unavailable("there is no npm on this machine")
        # If the package needs a runtime of its own, it includes it, so engines are not checked.
        command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", NPM[name]]
    else:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target"]
        command = [*pip, str(folder), PIP[name]]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not end within {_INSTALL_S:.0f} s") from None
    if tried.returncode:
        lines = [line for line in tried.stderr.splitlines() if line.strip()] or ["?"]
        raise Unavailable(f"it could not be installed: {lines[-1][:200]}")
    (folder / ".complete").touch()


def is_installed(name: str, cache: Path) -> bool:
    """Whether this version of a client is in the folder."""
    return (_folder(name, cache) / ".complete").exists()


def program(name: str, cache: Path) -> Path:
    """
    The program of a client that npm installed.

    Raises:
        Unavailable: the package has none for this machine.
    """
    modules = _folder(name, cache) / "node_modules"
    system = {"Linux": "linux", "Darwin": "darwin"}.get(platform.system(), "")
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    places = {
        "claude-code": f"@anthropic-ai/claude-code-{system}-{machine}/claude",
        "opencode": f"opencode-{system}-{machine}/bin/opencode",
        "codex": f"@openai/codex-{system}-{machine}/vendor/*/bin/codex",
    }
    for found in sorted(modules.glob(places[name])):
        return found.resolve()
    raise Unavailable(f"its package has no program for {system}-{machine}")


def library(name: str, cache: Path) -> Path:
    """The folder from which Python imports a client that pip installed."""
    return _folder(name, cache)


def _folder(name: str, cache: Path) -> Path:
    return (cache / f"{name}-{version(name)}").resolve()
