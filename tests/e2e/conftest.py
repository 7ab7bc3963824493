"""The servers of the end-to-end tests: one that many tests share, and others for a single test."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.model.builtin import builtin_directory
from tests.support.processes.forked_server import forking
from tests.support.processes.subprocess_server import Serving, assert_valid, started, user

Start = Callable[..., Serving]


# A server that is measured takes a second more to start, and answers more slowly. What only runs in
# a process of its own (the start, signals, connections, logs) runs in the tests of these modules.
STARTED = {"test_startup", "test_stopping", "test_log", "test_manners"}


@pytest.fixture(scope="module", autouse=True)
def _few_servers_are_started(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the servers of some modules, and measure their coverage; fork all others."""
    if request.path.stem in STARTED:
        with forking.turned_off():
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """Pebble's directory: these tests check what the model says."""
    return builtin_directory()


@contextlib.contextmanager
def servers(folder: Path, model_directory: Path) -> Iterator[Start]:
    """
    A function that starts servers. At the end of a test, those that still run become idle, stop,
    and leave a valid journal; none of them has logged a traceback.
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
                health = server.wait_idle()
                assert {"queued": 0, "running": 0} == health["queue"]
                assert 0 == server.stop()
                assert_valid(server.data_dir)
            assert "Traceback" not in server.stderr()


@pytest.fixture
def start(tmp_path: Path, model_directory: Path) -> Iterator[Start]:
    """Starts servers for one test; its arguments are options of `ops serve`."""
    with servers(tmp_path, model_directory) as factory:
        yield factory


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """One server for all tests that neither stop it nor exhaust it."""
    with servers(tmp_path_factory.mktemp("shared"), model_directory) as factory:
        yield factory()


@pytest.fixture(scope="session")
def cold(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """A server to compare with: it gets one request at a time, and never keeps a session's KV."""
    with servers(tmp_path_factory.mktemp("cold"), model_directory) as factory:
        yield factory()


@pytest.fixture(scope="session")
def lengthy(model_directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Two requests whose answers do not end by themselves, with their parameters: a bias keeps the
    model from the tokens that end an answer.
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
