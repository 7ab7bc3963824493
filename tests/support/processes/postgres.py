"""
A PostgreSQL server for the tests, on a socket in a temporary folder.

``initdb`` refuses to run as root. If the tests run as root, the server runs as the user
``postgres``, or as ``nobody`` if that user does not exist.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import psycopg

from tests.support.processes.child_process import die_with_parent

_DEADLINE_S = 60.0
_ROLE = "cairn"
_SOCKET = ".s.PGSQL.5432"
DURABLE = {"listen_addresses": "", "shared_buffers": "128MB", "max_connections": "20"}
"""Settings with PostgreSQL's own durability, to measure with."""
# No durability: the data is not needed after the tests.
_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "20",
}


class NotInstalled(Exception):
    """PostgreSQL is not installed on this machine."""


@attrs.frozen
class Postgres:
    """
    A running server, with its socket in ``folder``.

    Attributes:
        port: at which it also listens on the loopback, which is then in its URLs; None if it does
            not.
    """

    folder: Path
    port: int | None
    _begin: Callable[[], subprocess.Popen[Any]] = attrs.field(repr=False)
    _process: list[subprocess.Popen[Any]] = attrs.field(factory=list, repr=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, repr=False)

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"journal_{next(self._numbers)}"
        with self.connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        if self.port is not None:
            return f"postgresql://{_ROLE}@127.0.0.1:{self.port}/{name}"
        return f"postgresql://{_ROLE}@/{name}?host={self.folder}"

    def start(self) -> None:
        """Start the server, and wait until it takes connections."""
        self._process[:] = [self._begin()]
        _wait_until_ready(self, self._process[0])

    def stop(self) -> None:
        """Stop the server, which ends all connections. Its databases stay."""
        for process in self._process:
            process.send_signal(signal.SIGINT)
            process.wait(_DEADLINE_S)

    def connect(self, name: str) -> psycopg.Connection[Any]:
        """A connection to a database, in autocommit mode."""
        return psycopg.connect(
            host=str(self.folder),
            port=self.port,
            user=_ROLE,
            dbname=name,
            autocommit=True,
            connect_timeout=10,
        )


@contextlib.contextmanager
def running_postgres(
    settings: Mapping[str, str] = _SETTINGS, *, port: int | None = None
) -> Iterator[Postgres]:
    """
    Run a server while the context is open.

    Args:
        settings: of the server.
        port: a free one, for a server that listens on the loopback beside its socket.

    Raises:
        NotInstalled: PostgreSQL is not installed on this machine.
    """
    programs = _programs()
    # The path of a socket may have at most 107 bytes, and pytest's folders may be longer.
    folder = Path(tempfile.mkdtemp(prefix="cairn-postgres-"))
    as_user = _as_user(folder)
    data = folder / "data"
    try:
        made = subprocess.run(
            [
                str(programs / "initdb"),
                "--no-sync",
                "--auth=trust",
                "--encoding=UTF8",
                "--locale=C",
                f"--username={_ROLE}",
                f"--pgdata={data}",
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            **as_user,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        command = [str(programs / "postgres"), "-D", str(data), "-k", str(folder)]
        if port is not None:
            settings = {**settings, "listen_addresses": "127.0.0.1", "port": str(port)}
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]

        def begin() -> subprocess.Popen[Any]:
            with (folder / "log").open("wb") as log:
                return subprocess.Popen(
                    command,
                    cwd=folder,
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent,
                    **as_user,
                )

        server = Postgres(folder, port, begin)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def lossy_proxy(url: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """
    A way to a database that can lose its connections.

    Yields:
        The URL through the proxy, and a function that ends all connections through it for their
        clients, but not for the database.
    """
    target = url.partition("host=")[2]
    clients: list[socket.socket] = []
    held: list[socket.socket] = []

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                database = socket.socket(socket.AF_UNIX)
                database.connect(f"{target}/{_SOCKET}")
                clients.append(client)
                held.append(database)
                for ends in ((client, database), (database, client)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    def lose() -> None:
        for client in clients:
            client.shutdown(socket.SHUT_RDWR)
        clients.clear()

    with tempfile.TemporaryDirectory(prefix="cairn-proxy-") as folder:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/{_SOCKET}")
        listener.listen()
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield url.replace(target, folder), lose
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in (listener, *clients, *held):
                one.close()


def _programs() -> Path:
    """The folder of `initdb` and `postgres`, which on Debian is not on the PATH."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    versions = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if not versions:
        raise NotInstalled("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    return max(versions, key=lambda folder: [int(n) for n in re.findall(r"\d+", str(folder))])


def _as_user(folder: Path) -> dict[str, Any]:
    """Options to start a process as an unprivileged user that owns ``folder``."""
    # The preloaded BLAS is only for this process.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    if os.getuid() != 0:
        return {"env": environment}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {
        "env": environment,
        "user": user.pw_uid,
        "group": user.pw_gid,
        "extra_groups": [],
    }


def _wait_until_ready(server: Postgres, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + _DEADLINE_S
    while True:
        try:
            server.connect("postgres").close()
        except psycopg.OperationalError:
            said = (server.folder / "log").read_text(encoding="utf-8")
            assert process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.05)
        else:
            return
