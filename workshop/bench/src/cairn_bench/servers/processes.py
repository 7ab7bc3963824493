"""
The servers to measure, each started here as a process on the loopback.

They end with the process that started them, even if that is killed: for each server, a small
process waits for the end of a pipe, and then stops it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from cairn.ops.common.config_file import CONFIG_VARIABLE
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.preload import blas_environment
from cairn_conform.client import Client
from cairn_conform.client_texts import new_salt, user

_DEADLINE_S: Final = 600.0
READY_S: Final = 300.0
_STOP_S: Final = 60.0
LOOK_S: Final = 0.05
_LOOKS: Final = 2
_AT_WORK: Final = ("restoring", "prefilling", "decoding", "settling")
_LAST_LINES: Final = 5
# The server replaces this process, so the started process is the server itself. The small process
# is its child, and may stop only its parent.
_WATCHED: Final = """
import os, signal, sys
server = os.getpid()
if os.fork() == 0:
    while os.read(0, 1):
        pass
    if os.getppid() == server:
        os.kill(server, signal.SIGTERM)
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class DidNotStart(Exception):
    """A server did not start; the message has its last output."""


class NeverAtRest(Exception):
    """A server did not become idle."""


@attrs.frozen(kw_only=True)
class Kind:
    """
    How a server is started.

    Attributes:
        name: for readers.
        command: with the placeholders ``{model}``, ``{port}`` and ``{data}``.
        environment: variables to set, or to remove if None.
        ready: the path that answers 200 when it serves.
        is_ours: whether it is Cairn: then it accepts ``cache_prompt``, and reports what it settles.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str | None] = attrs.field(factory=dict)
    ready: str = "/health"
    is_ours: bool = False


def ours() -> Kind:
    """Cairn, as `ops serve` starts it."""
    command = (sys.executable, "-P", "-m", "cairn.ops", "serve", "--model", "{model}")
    return Kind(
        name="cairn",
        command=(*command, "--port", "{port}", "--data-dir", "{data}"),
        # Only the benchmark sends it requests, whatever keys are set for other servers.
        environment={
            **blas_environment(),
            KEYS_VARIABLE: None,
            CONFIG_VARIABLE: os.devnull,
        },
        is_ours=True,
    )


def unrecorded() -> Kind:
    """Cairn with a journal that is never written, to measure the cost of writing."""
    command = (sys.executable, "-P", "-m", "cairn_bench.servers.null_store", "--model", "{model}")
    return Kind(
        name="cairn, nothing written",
        command=(*command, "--port", "{port}", "--data-dir", "{data}"),
        environment=blas_environment(),
        is_ours=True,
    )


def mlx_lm(*, same_footing: bool) -> Kind:
    """
    mlx-lm's server.

    Args:
        same_footing: with the BLAS that Cairn has; else as a user would start it.
    """
    command = (sys.executable, "-P", "-m", "mlx_lm", "server", "--model", "{model}")
    return Kind(
        name="mlx-lm" if same_footing else "mlx-lm, as installed",
        command=(*command, "--host", "127.0.0.1", "--port", "{port}", "--log-level", "ERROR"),
        environment=blas_environment() if same_footing else {"LD_PRELOAD": None},
    )


def llama(binary: Path, weights: Path) -> Kind:
    """llama.cpp's server, over the same model in its own format."""
    command = (str(binary), "--model", str(weights), "--host", "127.0.0.1", "--port", "{port}")
    return Kind(name="llama.cpp", command=command, environment={"LD_PRELOAD": None})


@attrs.frozen(kw_only=True)
class Settled:
    """
    What Cairn computed ahead of requests, counted from its start.

    Attributes:
        computed_tokens: how many.
        used_tokens: how many of them a request used later.
    """

    computed_tokens: int
    used_tokens: int

    def since(self, before: Settled) -> Settled:
        """The increase since then."""
        return Settled(
            computed_tokens=self.computed_tokens - before.computed_tokens,
            used_tokens=self.used_tokens - before.used_tokens,
        )


@attrs.frozen(kw_only=True)
class Running:
    """
    A running server.

    Attributes:
        pid: of its process; None if it was not started here.
        data: the folder of its data, if that is known.
    """

    kind: Kind
    client: Client
    pid: int | None = None
    data: Path | None = None

    def wait_at_rest(self) -> None:
        """
        Wait until it computes nothing more.

        A peer is not waited for: it is idle when its answers are complete.

        Raises:
            NeverAtRest: it does not become idle, or no longer answers.
        """
        end_s = time.monotonic() + READY_S
        looks = 0
        # Twice in a row, because its counters and files lag a moment.
        while self.kind.is_ours and looks < _LOOKS:
            looks = looks + 1 if _is_at_rest(self.client.get("/health")) else 0
            if time.monotonic() > end_s:
                raise NeverAtRest(f"{self.kind.name} was not idle within {READY_S:g} s")
            time.sleep(LOOK_S)

    def counted(self, name: str) -> int:
        """A counter of its metrics; 0 if it has none of that name."""
        return _counter((self.client.content("/metrics") or b"").decode(), name)

    def block_tokens(self) -> int | None:
        """C; None if it is not reported."""
        health = self.client.get("/health")
        told = health.get("block_tokens") if isinstance(health, Mapping) else None
        return told if isinstance(told, int) else None

    def settled(self) -> Settled | None:
        """What it has computed ahead so far; None if it is not reported."""
        if not self.kind.is_ours:
            return None
        return Settled(
            computed_tokens=self.counted("cairn_prewarmed_tokens_total"),
            used_tokens=self.counted("cairn_prewarmed_tokens_used_total"),
        )


def _is_at_rest(health: Any) -> bool:
    """Whether no request is open and all sessions are idle."""
    if not isinstance(health, Mapping):
        return False
    sessions = health.get("sessions", {})
    is_open = any(health.get("queue", {"not reported": 1}).values())
    return not (is_open or any(sessions.get(life) for life in _AT_WORK))


def _counter(metrics: str, name: str) -> int:
    found = re.search(rf"^{name} (\S+)$", metrics, flags=re.M)
    return int(float(found[1])) if found else 0


# --- processes -----------------------------------------------------------------------------------


class Servers:
    """
    All servers of a run, each in its own folder. They end with the context.

    Args:
        folder: for their data and output.
    """

    def __init__(self, kinds: Sequence[Kind], model: Path, folder: Path) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        self._model = model
        self._folder = folder
        self._open: dict[str, tuple[Running, contextlib.ExitStack]] = {}
        self._starts = 0

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as all_of_them:
            for _, ending in self._open.values():
                all_of_them.push(ending)

    def named(self, name: str) -> Running:
        """
        The server of that name. It is started unless it runs already.

        Raises:
            DidNotStart: it does not serve.
        """
        if name not in self._open:
            self._starts += 1
            ending = contextlib.ExitStack()
            server = ending.enter_context(
                running(self._kinds[name], self._model, self._folder / str(self._starts))
            )
            self._open[name] = (server, ending)
        return self._open[name][0]

    def end(self, name: str) -> None:
        """End it. The next use starts it again."""
        if name in self._open:
            _, ending = self._open.pop(name)
            ending.close()


@contextlib.contextmanager
def running(
    kind: Kind, model: Path, folder: Path, *, deadline_s: float = _DEADLINE_S
) -> Iterator[Running]:
    """
    A server, from when it serves until it has ended.

    Args:
        folder: for its data and output.
        deadline_s: for each request to it.

    Raises:
        DidNotStart: it ended, or did not serve in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    places = {"{model}": str(model), "{port}": str(port), "{data}": str(folder / "data")}
    log = folder / "server.log"
    command = [places.get(part, part) for part in kind.command]
    if shutil.which(command[0]) is None:
        raise DidNotStart(f"{kind.name} cannot be started: program not found: {command[0]}")
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WATCHED, *command],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment_with(kind.environment),
            # Ctrl-C is for us, and we stop it.
            start_new_session=True,
        )
        try:
            client = Client(f"http://127.0.0.1:{port}", deadline_s=deadline_s)
            _wait_ready(process, client, kind, log)
            yield Running(kind=kind, client=client, pid=process.pid, data=folder / "data")
        finally:
            _end(process)


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment, with a kind's changes. No server downloads models from a hub."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _wait_ready(process: subprocess.Popen[bytes], client: Client, kind: Kind, log: Path) -> None:
    """
    Wait until it answers a first request: some servers open the port before they load the model.
    """
    end_s = time.monotonic() + READY_S
    while client.content(kind.ready) is None:
        if process.poll() is not None:
            raise DidNotStart(f"{kind.name} ended with {process.returncode}: {_last_words(log)}")
        if time.monotonic() > end_s:
            raise DidNotStart(f"{kind.name} did not serve in {READY_S:g} s: {_last_words(log)}")
        time.sleep(LOOK_S)
    hello = {"messages": [user(f"{new_salt()} Hello.")], "max_tokens": 8, "temperature": 0}
    answer = client.ask(hello)
    if not answer.complete:
        raise DidNotStart(f"{kind.name} does not answer: {answer.outcome}: {_last_words(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _last_words(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return " / ".join(lines[-_LAST_LINES:])
