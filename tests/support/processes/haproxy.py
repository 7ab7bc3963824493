"""HAProxy with the configuration of the documentation, and servers that stand in for nodes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import attrs
import httpx

from tests.support.processes.child_process import die_with_parent
from tests.support.processes.subprocess_server import DEADLINE_S, Serving, eventually

CONFIGURATION = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "fleet.cfg"
_CHECK = "timeout check 1s"
_SERVER = "timeout server 1h"
_CLIENTS, _NODES = "127.0.0.1:8080", {"n1": "127.0.0.1:8001", "n2": "127.0.0.1:8002"}

Fault = Literal["none", "drops", "refuses", "hangs"]


def installed() -> bool:
    """Whether HAProxy is installed (Debian: apt-get install haproxy)."""
    return shutil.which("haproxy") is not None


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found: int = taken.getsockname()[1]
        return found


@contextlib.contextmanager
def running_haproxy(
    folder: Path,
    nodes: Mapping[str, str],
    *,
    check_s: int = 1,
    server_s: int = 3600,
    without: Sequence[str] = (),
) -> Iterator[Serving]:
    """
    Run HAProxy with ``fleet.cfg``, of which only the addresses are changed.

    Args:
        nodes: the address of each node, HOST:PORT, by its name in the file.
        check_s: how long an answer to a health check may take. A real server needs more than the
            file allows on a machine that runs other tests.
        server_s: how long an answer may take.
        without: how the lines begin that are left out, for a control.

    Yields:
        It, as the server that its clients see.
    """
    address = f"127.0.0.1:{free_port()}"
    text = CONFIGURATION.read_text(encoding="utf-8")
    assert 1 == text.count(_CLIENTS)
    text = text.replace(_CLIENTS, address)
    for name, usual in _NODES.items():
        assert 2 == text.count(usual)
        text = text.replace(usual, nodes[name])
    assert 1 == text.count(_CHECK)
    text = text.replace(_CHECK, f"timeout check {check_s}s")
    assert 1 == text.count(_SERVER)
    text = text.replace(_SERVER, f"timeout server {server_s}s")
    for start in without:
        text, count = re.subn(rf"^ +{re.escape(start)}.*\n", "", text, flags=re.MULTILINE)
        assert count, start
    file = folder / "fleet.cfg"
    file.write_text(text, encoding="utf-8")
    log = folder / "haproxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["haproxy", "-f", str(file)],
            stdout=output,
            stderr=output,
            text=True,
            preexec_fn=die_with_parent,
        )
    try:

        def is_up() -> bool:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            with contextlib.suppress(httpx.HTTPError):
                return 200 == httpx.get(f"http://{address}/health", timeout=5).status_code
            return False

        eventually(is_up)
        yield Serving(process, folder, f"http://{address}", log)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@attrs.define(eq=False)
class Node:
    """
    A server that answers each request with its own name, and notes it.

    Attributes:
        fault: what it does to a request: closes the connection, answers 503, or does not answer,
            not even that it is well.
    """

    name: str
    fault: Fault = "none"
    asked: list[str] = attrs.field(factory=list)
    address: str = ""
    awake: threading.Event = attrs.field(factory=threading.Event)


@contextlib.contextmanager
def running_node(name: str) -> Iterator[Node]:
    """A node on a free port, while the context lasts."""
    node = Node(name)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            size = int(self.headers.get("content-length", 0))
            self.rfile.read(size)
            if node.fault == "hangs":
                node.awake.wait(DEADLINE_S)
            if self.path != "/health":
                node.asked.append(self.path)
                if node.fault == "drops":
                    self.close_connection = True
                    return
            body = json.dumps({"node": name}).encode()
            refused = node.fault == "refuses" and self.path != "/health"
            self.send_response(503 if refused else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = handle_any  # noqa: N815  # http.server's names

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A health check resets its connection once it has the status."""

    server = Server(("127.0.0.1", 0), Handler)
    node.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield node
    finally:
        node.awake.set()
        server.shutdown()
        server.server_close()
