"""What all tests share: random models, a PostgreSQL server, and the check that the gate can run."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import coverage
import pytest
import trio
from hypothesis import settings

from cairn.engine.machine.blas import loaded_blas
from tests.support.models.random_model import make_random_model
from tests.support.processes.forked_server import forking
from tests.support.processes.postgres import NotInstalled, Postgres, running_postgres

if TYPE_CHECKING:
    from cairn.ops.drills.server.baseline import Baseline

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The servers that tests start do not read the configuration file of their user.
os.environ["CAIRN_CONFIG"] = os.devnull
# No test connects to another machine, and each HTTP client would read all certificates of this one.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull
# A shell makes its background jobs ignore these signals, and so does `nohup`. The tests and the
# processes that they start would inherit this, and Ctrl-C would not reach them.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# For `make quick`. Tests that set their own number of examples check for this profile by name.
settings.register_profile("quick", max_examples=10, deadline=None)
# No deadline, because the duration of an example depends on how busy the machine is.
settings.register_profile("default", max_examples=25, deadline=None)
# For `make long`.
settings.register_profile("long", max_examples=100, deadline=None)
settings.load_profile("default")

_NO_GATE = "gate not run: "
_IMPORTS_MLX = re.compile(
    r"^(from|import) (mlx|cairn\.engine\.mlx|tests\.support\.models\.model_families)", re.MULTILINE
)

# Hardly anything that is imported is garbage, and each full collection would look at all of it.
gc.disable()


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    return make_random_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="session")
def other_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model with random weights."""
    return make_random_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def baseline(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """The answers of an undamaged private server, which drills compare with."""
    # Most tests need no server.
    from cairn.ops.drills.server.baseline import record_baseline

    return trio.run(record_baseline, tmp_path_factory.mktemp("baseline"), model_directory)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for the tests, if it is installed."""
    try:
        with running_postgres() as server:
            yield server
    except NotInstalled as missing:
        pytest.skip(str(missing))


def pytest_configure(config: pytest.Config) -> None:
    """
    Keep the results of self-tests in a folder of this run, which all workers share: the servers
    that tests start test each model once, and no test uses the results of its user. Servers are
    measured by `make coverage` alone.
    """
    # Workers are measured if the process that starts them still has COVERAGE_PROCESS_CONFIG.
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not starts_workers and "CAIRN_MEASURE_SERVERS" not in os.environ:
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    if hasattr(config, "workerinput"):  # a worker has the environment of the process that began
        return
    folder = tempfile.TemporaryDirectory(prefix="cairn-tests-")
    os.environ["CAIRN_CACHE_DIR"] = folder.name
    config.add_cleanup(folder.cleanup)


def pytest_sessionstart() -> None:
    """Fork the servers that tests start, with the environment that no test has changed yet."""
    forking.turn_on()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make quick` does not collect modules that import MLX: that alone would take a second."""
    if config.getoption("--hypothesis-profile") != "quick" or not collection_path.is_file():
        return None
    return bool(_IMPORTS_MLX.search(collection_path.read_text(encoding="utf-8"))) or None


def mark_long_cases(items: Iterable[pytest.Item]) -> None:
    """
    Mark the cases of tests with ``long_but`` as ``long``, besides those that it names by their ids.

    Raises:
        pytest.UsageError: a test that was collected with several cases has none of a named id.
    """
    named: dict[str, set[str]] = {}
    found: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("long_but")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        case = getattr(item, "callspec").id  # noqa: B009  # an item without cases has none
        named[test] = set(marker.args)
        found.setdefault(test, set()).add(case)
        if case not in marker.args:
            item.add_marker(pytest.mark.long)
    for test, cases in found.items():
        # A single case may have been selected on the command line.
        if len(cases) > 1 and (none := named[test] - cases):
            raise pytest.UsageError(f"{test} has no case {', '.join(sorted(none))}")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Mark the tests that compute with a model, and those on PostgreSQL, by their fixtures, and the
    cases that are left to `make long`.
    """
    mark_long_cases(items)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if {"model_directory", "other_directory"} & fixtures:
            item.add_marker(pytest.mark.model)
        params = getattr(getattr(item, "callspec", None), "params", {}).values()
        on_postgres = any(isinstance(one, str) and one == "postgresql" for one in params)
        if "postgres" in fixtures or on_postgres:
            item.add_marker(pytest.mark.slow)  # the database server takes seconds to begin and end


def pytest_collection_finish() -> None:
    """Look for garbage in what the tests leave, and no longer in what was collected."""
    gc.collect()  # attrs leaves a class without slots for each of ours
    gc.freeze()
    gc.enable()


def computes_on_gpu() -> bool:
    """Whether MLX computes on a GPU here: then no BLAS takes part."""
    import mlx.core as mx  # most tests do not need it

    return mx.default_device().type == mx.DeviceType.gpu


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of bit-identity, or fail it, where bits cannot differ at all."""
    if item.get_closest_marker("gate") is None or sys.platform != "linux" or computes_on_gpu():
        return
    blas = loaded_blas()
    if blas is None or "openblas" not in blas.name:
        reason = "no BLAS whose bits depend on shape is preloaded; `make test` provides one"
        if os.environ.get("CAIRN_GATE_REQUIRED") == "1":
            pytest.fail(_NO_GATE + reason)
        pytest.skip(_NO_GATE + reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """
    Do not measure the coverage of tests with random examples, of the gate's, and of others, nor of
    the processes that they start.
    """
    # With random examples the figure would change from run to run. The gate compares bits in long
    # runs of lines that other tests run too, and so do those with the marker. All of them take two
    # to three times as long if they are measured.
    measured = coverage.Coverage.current()
    if measured is None or not (
        {"hypothesis", "gate", "unmeasured"} & {m.name for m in item.iter_markers()}
    ):
        return (yield)
    started = os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    measured.stop()
    try:
        return (yield)
    finally:
        measured.start()
        if started is not None:
            os.environ["COVERAGE_PROCESS_CONFIG"] = started


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were skipped, and how many ran on PostgreSQL."""
    # Read from the reports, because with several workers the tests run in other processes than this
    # hook.
    reports = terminalreporter.stats
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in reports.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in sorted(reasons.items()):
        is_gate = reason.startswith(_NO_GATE)
        terminalreporter.write_line(f"skipped {count}: {reason}", red=is_gate, yellow=not is_gate)
    if no_gate := sum(n for reason, n in reasons.items() if reason.startswith(_NO_GATE)):
        terminalreporter.write_line(f"gate NOT RUN: {no_gate} tests prove nothing", red=True)
    if used := sum("postgres" in report.nodeid for report in reports.get("passed", ())):
        terminalreporter.write_line(f"{used} tests ran on a PostgreSQL server")
