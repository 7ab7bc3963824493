"""What all tests share: a random model, made once, and the word on whether the gate may count."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from cairn.engine.machine.blas import loaded_blas
from tests.support.random_model import make_random_model

if TYPE_CHECKING:
    from cairn.ops.drills import Reference

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell has what it puts in the background ignore signals, and so does `nohup`. The tests would
# inherit it, and the processes that they start: then no Ctrl-C would reach them.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

_NOT_RUN: list[str] = []


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    return make_random_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def other_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model with random weights."""
    return make_random_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def undisturbed(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What a private server answers that nobody damages: what drills compare with."""
    from cairn.ops.drills import reference  # most tests need no server

    return trio.run(reference, tmp_path_factory.mktemp("undisturbed"), model_directory)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test of bit-identity counts only where bits can differ at all."""
    if item.get_closest_marker("gate") is None or sys.platform != "linux":
        return
    blas = loaded_blas()
    if blas is None or "openblas" not in blas.name:
        reason = "no BLAS whose bits depend on shape is preloaded; `make test` provides one"
        if os.environ.get("CAIRN_GATE_REQUIRED") == "1":
            pytest.fail(f"gate not run: {reason}")
        _NOT_RUN.append(item.nodeid)
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in red that the gate did not run."""
    if _NOT_RUN:
        terminalreporter.write_line(f"gate NOT RUN: {len(_NOT_RUN)} tests prove nothing", red=True)
