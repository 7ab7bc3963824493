"""
Servers of the end-to-end tests: one that many tests share, and others that a test has alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Serving, ask, assert_holds, started, user

Start = Callable[..., Serving]


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
    """
    Starts servers for this test alone; its arguments go to `ops serve`.
    """
    with servers(tmp_path, model_directory) as factory:
        yield factory


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """
    One server for all tests that neither stop it nor starve it.
    """
    with servers(tmp_path_factory.mktemp("shared"), model_directory) as factory:
        yield factory()


@pytest.fixture(scope="session")
def cold(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """
    A server to compare with: it is asked one thing at a time, and never keeps a session's KV.
    """
    with servers(tmp_path_factory.mktemp("cold"), model_directory) as factory:
        yield factory()


@pytest.fixture(scope="session")
def lengthy(cold: Serving) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Two things to ask whose answers have 250 tokens and more, with the parameters to ask them with.

    An answer follows from these alone, so what is long here is long everywhere.
    """
    found: list[dict[str, Any]] = []
    for seed in range(100):
        asked = {"messages": [user(f"Tell me of {seed} stones.")], "temperature": 3.0, "seed": seed}
        answer = ask(cold, **asked, max_tokens=250, cache_prompt=False)
        if answer.finish_reason == "length":
            found.append(asked)
        if len(found) == 2:
            break
    first, second = found
    return first, second
