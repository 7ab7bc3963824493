"""The server that ``ops chat`` talks to: one that runs, or one of its own."""

from __future__ import annotations

import os
import re
import select
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from cairn.ops.chat.client import NotCairn, look
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import default_data_dir, log_path
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.data_dir import Holder, make_home, server_at

DEFAULT_URL = "http://127.0.0.1:8000"

_LOOK_S = 0.1
_ENDING_S = 5.0  # as a machine under load may take
_HEARTBEAT_S = 1
_SERVES = re.compile(r"Cairn serves (?P<model>.*) at (?P<url>http://\S+)")
_LASTS = " ..."  # the end of a line on something that lasts


class Server:
    """
    A server that runs, whoever started it.

    Attributes:
        options: what a command of `ops` needs to look at it, with a space before it.
        key: the user's API key for it, if it wants one.
    """

    def __init__(self, url: str, model: str, options: str = "", key: str | None = None) -> None:
        self.url = url
        self.model = model
        self.options = options
        self.key = key

    def end_words(self) -> str | None:
        """How it ended, and what follows; None where it runs, or is not ours."""
        return None


class OwnServer(Server):
    """
    A server in a process of its own, which lasts as long as the chat. What it has to say goes to a
    file beside its log. It wants no API key, whatever keys there are for other servers.
    """

    def __init__(self, data_dir: Path, model: str | None) -> None:
        super().__init__(url="", model="", options=_options(data_dir))
        self._said = log_path(data_dir).with_name("chat.log")
        self._process: subprocess.Popen[str] | None = None
        named = [] if model is None else ["--model", model]
        self._command = (
            *(sys.executable, "-P", "-m", "cairn.ops", "serve", "--port", "0"),
            *("--heartbeat", str(_HEARTBEAT_S), "--data-dir", str(data_dir), *named),
        )

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """
        Start it. See ``wait_ready``.

        Raises:
            Unreadable: it could not be started.
        """
        try:
            self._said.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._said.open("w", encoding="utf-8") as said:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    env={name: os.environ[name] for name in os.environ if name != KEYS_VARIABLE},
                    # Ctrl-C stops an answer, and would stop the server with it.
                    process_group=0,
                )
        except OSError as error:
            raise Unreadable(
                f"{self._said} cannot be written: {error.strerror}. Check the space on its disk "
                "and who owns the folder, or name another directory with --data-dir."
            ) from error

    def wait_ready(self, tell: Callable[[str], None]) -> None:
        """
        Wait until it answers.

        Args:
            tell: called with what lasts.

        Raises:
            Unreadable: it ended before.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        found = self._greeting(self._process.stdout, tell)
        if found is None:
            code = self._process.wait()
            raise Unreadable(
                f"The server of this chat did not start (exit code {code}). {self._last_words()}\n"
                f"All that it said is in {self._said}."
            )
        self.url, self.model = found["url"], found["model"]

    def end_words(self) -> str | None:
        """How it ended. One that just broke off an answer may need a moment more to be gone."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            return None
        return (
            f"The server of this chat has ended (exit code {code}). The next message starts it "
            f"again; what it said is in {self._said}."
        )

    def end(self) -> None:
        """Ask it to end; for the second time, at once."""
        if self._process is not None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait until it has drained."""
        if self._process is None:
            return
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _greeting(self, stdout: IO[str], tell: Callable[[str], None]) -> re.Match[str] | None:
        """The line on stdout by which it says that it is ready; None where it ends before."""
        while not select.select([stdout], [], [], _LOOK_S)[0]:
            lasting = [line for line in self._lines() if line.endswith(_LASTS)]
            if lasting:
                tell(lasting[-1].removesuffix(_LASTS))
        return next(filter(None, map(_SERVES.match, stdout)), None)

    def _last_words(self) -> str:
        lines = [line for line in self._lines() if line.strip() and not line.endswith(_LASTS)]
        return lines[-1] if lines else "It said nothing."

    def _lines(self) -> list[str]:
        return self._said.read_text(encoding="utf-8", errors="replace").splitlines()


def server_named(url: str, key: str | None) -> Server:
    """
    The server that the user named.

    Raises:
        Unreadable: there is none, or it does not let this user in.
    """
    try:
        found = look(url, key)
    except NotCairn as error:
        raise Unreadable(
            f"What answers at {url} is no server of Cairn's: {error}. Name another address with "
            "--url, or leave it out: then a server is started for the chat."
        ) from error
    if found is None:
        raise Unreadable(
            f"Nobody answers at {url}. Start a server there with `ops serve`, name another address "
            "with --url, or leave it out: then a server is started for the chat."
        )
    return Server(url, found.model, key=key)


def server_at_hand(key: str | None) -> Server | None:
    """
    The server at the default address, if one of Cairn's is there.

    Raises:
        Unreadable: it does not let this user in.
    """
    try:
        found = look(DEFAULT_URL, key)
    except NotCairn:
        return None
    return None if found is None else Server(DEFAULT_URL, found.model, key=key)


def server_over(data_dir: Path, model: str | None, key: str | None) -> Server:
    """
    The server that holds a data directory; where none does, one of the chat's own, not started yet.

    Args:
        model: what the server shall serve; one that runs serves what it was started with.
        key: the user's API key.

    Raises:
        Unreadable: one holds it and cannot be talked to, or the directory cannot be used.
    """
    make_home(data_dir)
    holder = server_at(data_dir)
    if holder is None:
        return OwnServer(data_dir, model)
    if model is not None:
        raise Unreadable(
            f"{_held_words(holder, data_dir)}. It serves the model that it was started with: leave "
            "--model out, stop that server, or name another directory with --data-dir."
        )
    if holder.address is None:
        raise Unreadable(
            f"{_held_words(holder, data_dir)}. Its address stands in the first line that it "
            "printed: name it with --url. Or stop it, or name another directory with --data-dir."
        )
    try:
        found = look(holder.address, key)
    except NotCairn:
        found = None
    if found is None:
        raise Unreadable(
            f"{_held_words(holder, data_dir)}, and nobody answers there: it is about to start or "
            "to stop. Try again in a moment, stop it, or name another directory with --data-dir."
        )
    return Server(holder.address, found.model, _options(data_dir), key)


def _held_words(holder: Holder, data_dir: Path) -> str:
    where = f" at {holder.address}" if holder.address else ""
    return f"A server{where} (process {holder.process}) uses {data_dir}"


def _options(data_dir: Path) -> str:
    """How a command of `ops` finds a data directory."""
    return "" if data_dir == default_data_dir() else f" --data-dir {shlex.quote(str(data_dir))}"
