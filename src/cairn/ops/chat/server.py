"""The server of ``cairn chat``: a running one, or one that is started for the chat."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from cairn.ops.chat.client import NotCairn, StillStarting, look
from cairn.ops.chat.replies import Health
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import log_path, options_of
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.data_dir import Holder, make_home, server_at

DEFAULT_URL = "http://127.0.0.1:8000"

_LOOK_S = 0.1
ADDRESS_S = 30.0
"""How long a server may take from its start until it listens."""
_ENDING_S = 5.0  # enough for a machine under load
_HEARTBEAT_S = 1
_SERVES = re.compile(r"Cairn serves (?P<model>.*) at (?P<url>http://\S+)")
_LASTS = " ..."  # the end of a progress line


class Server:
    """
    A running server.

    Attributes:
        options: the options with which a command of `ops` finds it, beginning with a space.
        key: the user's API key, if it requires one.
    """

    def __init__(self, url: str, model: str, options: str = "", key: str | None = None) -> None:
        self.url = url
        self.model = model
        self.options = options
        self.key = key

    def health(self) -> Health | None:
        """
        Its health; None if it does not answer.

        Raises:
            Unreadable: it is starting, or refuses the key.
        """
        try:
            return look(self.url, self.key)
        except NotCairn:
            return None

    def end_words(self) -> str | None:
        """How it ended, and what to do; None if it is running, or was not started by us."""
        return None


class OwnServer(Server):
    """
    A server that is started for the chat and ends with it. Its output goes to a file beside its
    log. It requires no API key.

    Attributes:
        chosen: the model that it is started with; None for the default one.
    """

    def __init__(
        self, data_dir: Path, model: str | None, *more: str, is_apart: bool = False
    ) -> None:
        """
        Args:
            more: options of `ops serve`.
            is_apart: whether nothing that the operator configured counts for it.
        """
        super().__init__(url="", model="", options=options_of(data_dir))
        self._output = log_path(data_dir).with_name("chat.log")
        self._process: subprocess.Popen[str] | None = None
        self.chosen = model
        self._command = (
            *(sys.executable, "-P", "-m", "cairn.ops", "serve", "--port", "0"),
            *("--host", "127.0.0.1", "--heartbeat", str(_HEARTBEAT_S), "--no-api-keys"),
            *("--data-dir", str(data_dir), *more),
        )
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name != KEYS_VARIABLE
            and not (is_apart and name.startswith("CAIRN_") and name != "CAIRN_CACHE_DIR")
        }
        if is_apart:
            self._environment["CAIRN_CONFIG"] = os.devnull

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> str | None:
        """How it ended, if that was not waited for."""
        code = None if self._process is None else self._process.poll()
        return None if code is None else f"The server of this chat has ended ({_how(code)})"

    def start(self) -> None:
        """
        Start it. See ``wait_ready``.

        Raises:
            Unreadable: it could not be started.
        """
        named = [] if self.chosen is None else ["--model", self.chosen]
        try:
            self._output.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._output.open("w", encoding="utf-8") as output:
                self._process = subprocess.Popen(
                    (*self._command, *named),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    env=self._environment,
                    # Otherwise Ctrl-C, which stops an answer, would stop the server too.
                    process_group=0,
                )
        except OSError as error:
            raise Unreadable(
                f"{self._output} cannot be written: {error.strerror}. Check the free space on its "
                "disk and who owns the directory, or choose another with --data-dir."
            ) from error

    def wait_ready(self, report: Callable[[str], None]) -> None:
        """
        Wait until it is ready.

        Args:
            report: called with the current step of the start.

        Raises:
            Unreadable: it ended before it was ready.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        found = self._greeting(self._process.stdout, report)
        if found is None:
            how = _how(self._process.wait())
            self.wait()
            raise Unreadable(
                f"The server of this chat did not start ({how}). {self._last_words()}\n"
                f"Its full output is in {self._output}."
            )
        self.url, self.model = found["url"], found["model"]

    def end_words(self) -> str | None:
        """How it ended. Waits a moment, because it may have just cut off an answer."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        ended = self.ended
        if ended is None:
            return None
        self.wait()  # said once
        return f"{ended}. The next message starts it again; its output is in {self._output}."

    def end(self) -> None:
        """Tell it to drain and end; at the second call, to end at once."""
        if self._process is not None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait until it has ended."""
        if self._process is None:
            return
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def _greeting(self, stdout: IO[str], report: Callable[[str], None]) -> re.Match[str] | None:
        """The line on stdout that says that it is ready; None if it ended first."""
        while not select.select([stdout], [], [], _LOOK_S)[0]:
            lasting = [line for line in self._lines() if line.endswith(_LASTS)]
            if lasting:
                report(lasting[-1].removesuffix(_LASTS))
        return next(filter(None, map(_SERVES.match, stdout)), None)

    def _last_words(self) -> str:
        lines = [line for line in self._lines() if line.strip() and not line.endswith(_LASTS)]
        return lines[-1] if lines else "It printed nothing."

    def _lines(self) -> list[str]:
        return self._output.read_text(encoding="utf-8", errors="replace").splitlines()


def _how(code: int) -> str:
    """How a process ended, by its return code."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def looked(url: str, key: str | None, report: Callable[[str], None]) -> Health | None:
    """
    As ``look``, but waits while the server starts.

    Args:
        report: called again and again meanwhile, with what the server does.
    """
    while True:
        try:
            return look(url, key)
        except StillStarting as start:
            report(f"the server at {url} is starting: {start.step}")
            time.sleep(_LOOK_S)


def server_named(url: str, key: str | None, report: Callable[[str], None]) -> Server:
    """
    The server at an address that the user gave, when it is ready.

    Args:
        report: see ``looked``.

    Raises:
        Unreadable: there is none, or it refuses the key.
    """
    try:
        found = looked(url, key, report)
    except NotCairn as error:
        raise Unreadable(
            f"The server at {url} is not Cairn: {error}. Give another --url, or omit it to start a "
            "server for the chat."
        ) from error
    if found is None:
        raise Unreadable(
            f"Nothing answers at {url}. Start a server there with `ops serve`, give another --url, "
            "or omit it to start a server for the chat."
        )
    return Server(url, found.model, key=key)


def server_at_hand(key: str | None, report: Callable[[str], None]) -> Server | None:
    """
    The server at the default address, when it is ready; None if there is none, or it is not Cairn.

    Args:
        report: see ``looked``.

    Raises:
        Unreadable: it refuses the key.
    """
    try:
        found = looked(DEFAULT_URL, key, report)
    except NotCairn:
        return None
    return None if found is None else Server(DEFAULT_URL, found.model, key=key)


def server_over(
    data_dir: Path, model: str | None, key: str | None, report: Callable[[str], None]
) -> Server:
    """
    The server that uses a data directory, when it is ready; if none does, one for the chat, not yet
    started.

    Args:
        model: the model of a server for the chat.
        key: the user's API key.
        report: see ``looked``.

    Raises:
        Unreadable: a server uses the directory and cannot be used, or the directory cannot.
    """
    make_home(data_dir)
    holder = server_at(data_dir)
    if holder is None:
        return OwnServer(data_dir, model)
    if model is not None:
        raise Unreadable(
            f"{_held_words(holder, data_dir)}, with the model that it was started with. Omit "
            "--model, stop that server, or choose another directory with --data-dir."
        )
    until_s = time.monotonic() + ADDRESS_S
    while holder is not None and holder.address is None and time.monotonic() < until_s:
        report(f"the server (process {holder.process}) is starting")
        time.sleep(_LOOK_S)
        holder = server_at(data_dir)
    if holder is None:
        return OwnServer(data_dir, model)
    if holder.address is None:
        raise Unreadable(
            f"{_held_words(holder, data_dir)}. Give its address with --url (it is in the first "
            "line of its output), stop it, or choose another directory with --data-dir."
        )
    try:
        found = looked(holder.address, key, report)
    except NotCairn:
        found = None
    if found is None:
        raise Unreadable(
            f"{_held_words(holder, data_dir)}, but does not answer: it is stopping. Try again "
            "in a moment, stop it, or choose another directory with --data-dir."
        )
    return Server(holder.address, found.model, options_of(data_dir), key)


def _held_words(holder: Holder, data_dir: Path) -> str:
    where = f" at {holder.address}" if holder.address else ""
    return f"A server{where} (process {holder.process}) uses {data_dir}"
