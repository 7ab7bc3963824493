"""Chats with a scripted service, through a pipe and on a terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import attrs
import pytest
import structlog
import trio
from click.testing import CliRunner, Result

from cairn.actors.requests.messages import Accepted, Delta
from cairn.engine.answer.parts import Said
from cairn.engine.prompt import template as prompt
from cairn.ops.chat import server as chat_server
from cairn.ops.cli import ops
from cairn.ops.serve.data_dir import make_home, server_at
from tests.http.conftest import run_server
from tests.http.fake_service import ACCEPTED, FINISHED, FakeService, Hold, Step
from tests.support.processes.subprocess_server import DEADLINE_S
from tests.support.processes.terminal import Terminal


@attrs.define
class Faked:
    """A scripted service that answers at ``url``, from its own thread."""

    url: str
    service: FakeService
    token: trio.lowlevel.TrioToken

    def release(self, hold: Hold) -> None:
        """Continue the script."""
        trio.from_thread.run_sync(hold.released.set, trio_token=self.token)

    def conversations(self) -> list[prompt.Conversation]:
        """The body of each request."""
        found = [command.conversation for command in self.service.commands]
        return [conversation for conversation in found if conversation is not None]

    def asked(self) -> list[list[tuple[str, str]]]:
        """(role, text) of the messages of each request."""
        return [
            [(message.role, message.content) for message in conversation.messages]
            for conversation in self.conversations()
        ]


@contextlib.contextmanager
def faked(*scripts: tuple[Step, ...], refusal: Exception | None = None) -> Iterator[Faked]:
    """Serve scripts while the context is active."""
    service, shutdown = FakeService(*scripts, refusal=refusal), trio.Event()
    found: list[Faked] = []
    is_up = threading.Event()

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            url = await nursery.start(run_server, service, shutdown)
            found.append(Faked(url, service, trio.lowlevel.current_trio_token()))
            is_up.set()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert is_up.wait(DEADLINE_S)
        # Otherwise the service's log would go to what the chat takes for its own stdout.
        with structlog.testing.capture_logs():
            yield found[0]
    finally:
        trio.from_thread.run_sync(shutdown.set, trio_token=found[0].token)
        thread.join(DEADLINE_S)


def script(*texts: str, accepted: Accepted = ACCEPTED) -> tuple[Step, ...]:
    """An answer in pieces."""
    return (accepted, *(Delta(parts=(Said(text),)) for text in texts), FINISHED)


def piped(lines: str, *arguments: object) -> Result:
    """A chat whose lines come through a pipe."""
    result = CliRunner().invoke(ops, ["chat", *map(str, arguments)], input=lines)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@contextlib.contextmanager
def stub(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """
    A minimal server that sends the given answers, and has an agent; returns its address.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if self.path.endswith("/generate"):
                answer(self)
            else:
                self.send_agent()

        def do_DELETE(self) -> None:
            self.send_agent()

        def send_agent(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(AGENT)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)


AGENT = b'{"agent_id": "a", "model": "m", "turns": 0, "created": "", "last_accessed": ""}'
HEALTH = b'{"status": "ok", "model": "m", "fingerprint": "f", "journal_position": 1}'


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """
    An empty default data directory, and no server at the default address. A server that a chat left
    running is killed.
    """
    monkeypatch.setenv("CAIRN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(chat_server, "DEFAULT_URL", "http://127.0.0.1:1")
    make_home(tmp_path / "data")
    yield tmp_path / "data"
    left = server_at(tmp_path / "data")
    if left is not None:
        os.kill(int(left.process), signal.SIGKILL)


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Terminal]]:
    """Opens terminals with a chat each, and cleans up all of them."""
    if "CAIRN_DATA_DIR" not in os.environ:
        monkeypatch.setenv("CAIRN_DATA_DIR", str(tmp_path / "data"))
    with contextlib.ExitStack() as opened:

        def open_one(*arguments: object, **env: str) -> Terminal:
            kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "LD_PRELOAD")}
            command = [sys.executable, "-P", "-m", "cairn", "chat", *map(str, arguments)]
            made = Terminal(command, {**kept, "TERM": "xterm", "OPENBLAS_NUM_THREADS": "1", **env})
            opened.callback(made.close)
            return made

        yield open_one
