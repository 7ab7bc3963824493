"""Nodes of a fleet: servers in processes of their own, with one database and one secret."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs

from cairn.journal import events as ev
from cairn.journal.rows.database.urls import node_url
from tests.support.processes.subprocess_server import Serving, recorded, run_ops, started

E = TypeVar("E", bound=ev.Event)

SECRET_BYTES = 32


@attrs.frozen
class Fleet:
    """
    A database, and the folder with the data directory of each node.

    Attributes:
        options: of all nodes.
    """

    url: str
    folder: Path
    options: tuple[object, ...]

    @property
    def name(self) -> str:
        """The name of the database."""
        return self.url.partition("?")[0].rpartition("/")[2]

    def home(self, node: str) -> Path:
        """The data directory of a node, with the fleet's secret and journal key."""
        home = self.folder / node
        if not home.exists():
            home.mkdir(mode=0o700)
            for name in ("secret", "journal-key"):
                (home / name).write_bytes(bytes(SECRET_BYTES))
                (home / name).chmod(0o600)
        return home

    def where(self, node: str) -> tuple[object, ...]:
        """The options with which a command finds the journal of a node."""
        return ("--data-dir", self.home(node), "--journal", self.url, "--node", node)

    @contextmanager
    def node(self, node: str, *options: object) -> Iterator[Serving]:
        """A node that runs while the context lasts."""
        own = ("--journal", self.url, "--node", node, *self.options, *options)
        with started(self.home(node), *own) as server:
            yield server

    def recorded(self, node: str) -> list[ev.Recorded]:
        """A node's journal."""
        return recorded(self.home(node), node_url(self.url, node))

    def events(self, node: str) -> list[ev.Event]:
        """The events of a node's journal."""
        return [one.event for one in self.recorded(node)]

    def of_kind(self, node: str, kind: type[E]) -> list[E]:
        """The events of one kind in a node's journal."""
        return [event for event in self.events(node) if isinstance(event, kind)]

    def assert_valid(self, *nodes: str) -> None:
        """Assert that `ops verify` finds the journals of these nodes sound."""
        for node in nodes:
            code, out, err = run_ops("verify", *self.where(node))
            assert (0, True) == (code, "broken: 0" in out.splitlines()), out + err

    def audit(self) -> tuple[int, dict[str, Any]]:
        """What `ops verify --fleet` says: its exit code, and the verdict on all nodes."""
        own = ("--data-dir", self.home("n1"))
        code, out, err = run_ops("verify", "--fleet", self.url, *own)
        assert out, err
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return code, found
