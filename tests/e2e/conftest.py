"""Servers of the end-to-end tests: one that many tests share, and others that a test has alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.model.builtin import builtin_directory
from tests.support.subprocess_server import Serving, assert_holds, started, user

Start = Callable[..., Serving]


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """Pebble's: in these tests one hears what is said."""
    return builtin_directory()


@contextlib.contextmanager
def servers(folder: Path, model_directory: Path) -> Iterator[Start]:
    """
    A function that starts servers. In the end those that still run come to rest, stop, and leave a
    journal that holds; none of them has written a traceback.
    """
    with contextlib.ExitStack() as stack:
        begun: list[Serving] = []

        def start(
            *options: object, data_dir: Path | None = None, env: Mapping[str, str] | None = None
        ) -> Serving:
            home = data_dir or folder / f"home-{len(begun)}"
            context = started(home, "--model", model_directory, *options, env=env)
            server = stack.enter_context(context)
            begun.append(server)
            return server

        yield start
        for server in begun:
            if server.running:
                health = server.at_rest()
                assert {"queued": 0, "running": 0} == health["queue"]
                assert 0 == server.stop()
                assert_holds(server.data_dir)
            assert "Traceback" not in server.stderr()


@pytest.fixture
def start(tmp_path: Path, model_directory: Path) -> Iterator[Start]:
    """Starts servers for this test alone; its arguments go to `ops serve`."""
    with servers(tmp_path, model_directory) as factory:
        yield factory


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """One server for all tests that neither stop it nor starve it."""
    with servers(tmp_path_factory.mktemp("shared"), model_directory) as factory:
        yield factory()


@pytest.fixture(scope="session")
def cold(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """A server to compare with: it is asked one thing at a time, and never keeps a session's KV."""
    with servers(tmp_path_factory.mktemp("cold"), model_directory) as factory:
        yield factory()


@pytest.fixture(scope="session")
def lengthy(model_directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Two things to ask whose answers do not end by themselves, with the parameters to ask them with:
    the tokens that end an answer are biased away.
    """
    config = json.loads((model_directory / "generation_config.json").read_text(encoding="utf-8"))
    endless = {str(token): -100 for token in config["eos_token_id"]}
    first, second = (
        {
            "messages": [user(f"Tell me of {count} stones.")],
            "temperature": 3.0,
            "seed": count,
            "logit_bias": endless,
        }
        for count in (1, 2)
    )
    return first, second
