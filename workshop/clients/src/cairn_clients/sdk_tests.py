"""
Run the tests of other projects' clients, unchanged, against a Cairn server, and write the results
to the table in docs/compatibility.md.

``python -P -m cairn_clients.sdk_tests`` downloads the source distributions of the SDKs and of
llama-cpp-python (which contains the tests of llama.cpp's server) from the package index, installs
each into its own environment under .cache/sdk-tests, starts ``ops serve`` with Pebble on a
temporary data directory, and runs the tests one after the other. ``--write`` writes the table in
docs/compatibility.md again. Exits with 1 if a test fails without an entry in ``EXPLAINED``, fails
in a different way than its entry says, or passes despite an entry. The names of suites select among
them.

The downloaded tests are not changed, and nothing of them is kept in the repository.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import attrs

ROOT = Path(__file__).resolve().parents[4]
CACHE = ROOT / ".cache" / "sdk-tests"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN = "<!-- Made by workshop/clients/src/cairn_clients/sdk_tests.py. -->"
END = "<!-- End of what is made. -->"

_START_S = 120.0
_SUITE_S = 3600.0


@attrs.frozen(kw_only=True)
class Suite:
    """
    A test suite of another project.

    Attributes:
        name: for readers, and to select it.
        package: the source distribution, pinned.
        inside: the folder in it from which the tests are run; nothing else is unpacked.
        needs: packages of the environment.
        tests: arguments of pytest.
        place: the path at which the API begins on a server, for ``TEST_API_BASE_URL``.
        of_llama: whether the server is passed to it in the way of llama.cpp's tests.
    """

    name: str
    package: str
    inside: str
    needs: tuple[str, ...]
    tests: tuple[str, ...]
    place: str = ""
    of_llama: bool = False


_PYTEST = ("pytest>=9,<10", "pytest-asyncio>=1.4,<2", "pytest-xdist>=3.6,<4")
_ANTHROPIC = (
    "anthropic[aiohttp]==2.10.0",
    *_PYTEST,
    "http-snapshot[httpx]==0.1.9",
    "inline-snapshot>=0.28",
    "respx",
    "rich>=13.7",
)
_OPENAI = ("openai[aiohttp]==3.51.0", *_PYTEST, "inline-snapshot>=0.28", "rich>=13.7", "trio>=0.22")

SUITES = (
    Suite(
        name="anthropic-messages",
        package="anthropic==2.10.0",
        inside="anthropic-2.10.0",
        needs=_ANTHROPIC,
        tests=("tests/api_resources/test_messages.py",),
    ),
    Suite(
        name="anthropic-beta-messages",
        package="anthropic==2.10.0",
        inside="anthropic-2.10.0",
        needs=_ANTHROPIC,
        tests=("tests/api_resources/beta/test_messages.py",),
    ),
    Suite(
        name="openai-chat-create",
        package="openai==3.51.0",
        inside="openai-3.51.0",
        needs=_OPENAI,
        tests=("tests/api_resources/chat/test_completions.py", "-k", "create"),
        place="/v1",
    ),
    Suite(
        name="openai-completions",
        package="openai==3.51.0",
        inside="openai-3.51.0",
        needs=_OPENAI,
        tests=("tests/api_resources/test_completions.py",),
        place="/v1",
    ),
    Suite(
        name="llama.cpp-anthropic",
        package="llama-cpp-python==0.3.36",
        inside="llama_cpp_python-0.3.36/vendor/llama.cpp/tools/server/tests",
        needs=("pytest>=8,<9", "filelock", "openai==2.14.0", "requests", "wget"),
        tests=("unit/test_compat_anthropic.py", "-m", "not slow"),
        of_llama=True,
    ),
)


@attrs.frozen
class Why:
    """
    Why a test may fail.

    Attributes:
        text: for the page.
        message: a pattern for the failure's message. It does not explain any different failure.
    """

    text: str
    message: str


_NO_TOKEN = (
    'They send `logit_bias: {"foo": 0}`, although `foo` is not a token id; those of chat '
    "completions also send a `max_tokens` of 0, and those of completions `echo` and `suffix`. The "
    "SDK's mock server checks no values. Cairn refuses an invalid value with a 400 that names it."
)

_NO_IMAGE = (
    "They send an image to a text model and expect llama.cpp's 500 and its message. Cairn refuses "
    "a user's image with a 400 that names its place, and reports an image from a tool as ignored."
)

_NOTHING_SAID = "It expects an answer to an empty list of messages. Cairn refuses that with a 400."
_OWN_ADDRESS = "It uses `/apply-template`, an endpoint that only llama.cpp has."
_A_PICTURE = "It downloads a picture for a vision model."

#: The expected failures, by suite and by the beginning of the test's name.
EXPLAINED: Mapping[str, Mapping[str, Why]] = {
    "openai-chat-create": {
        "test_method_create_with_all_params_overload": Why(
            _NO_TOKEN, r"Error code: 400 .*(logit_bias|max_tokens)"
        )
    },
    "openai-completions": {
        "test_method_create_with_all_params_overload": Why(
            _NO_TOKEN, r"Error code: 400 .*(logit_bias|echo|suffix)"
        )
    },
    "llama.cpp-anthropic": {
        "test_anthropic_empty_messages": Why(_NOTHING_SAID, r"\b400\b"),
        "test_anthropic_thinking_history_in_template": Why(_OWN_ADDRESS, r"\b404\b"),
        "test_anthropic_tool_result_with_image": Why(_NO_IMAGE, r"\b200 == 500\b"),
        "test_anthropic_vision_format_accepted": Why(_NO_IMAGE, r"\b400 == 500\b"),
        "test_anthropic_vision_base64_with_multimodal_model": Why(
            _A_PICTURE, r"\b400 == 200\b|huggingface|Max retries|Failed to resolve"
        ),
    },
}


@attrs.frozen(kw_only=True)
class Result:
    """
    The results of a suite.

    Attributes:
        failed: the names of tests that failed, with their parameters in brackets.
        messages: the failure messages, by those names.
    """

    suite: str
    package: str
    passed: int
    skipped: int
    failed: tuple[str, ...]
    messages: Mapping[str, str] = attrs.field(factory=dict)

    def why(self, name: str) -> str | None:
        """The explanation of a failed test; None if it has none, or failed in a different way."""
        message = self.messages.get(name, "")
        for beginning, why in EXPLAINED.get(self.suite, {}).items():
            if name.startswith(beginning) and re.search(why.message, message, re.DOTALL):
                return why.text
        return None

    def unexplained(self) -> list[str]:
        """The tests that failed without an explanation."""
        return [name for name in self.failed if self.why(name) is None]

    def unneeded(self) -> list[str]:
        """The explanations of tests that do not fail."""
        said = EXPLAINED.get(self.suite, {})
        return [one for one in said if not any(name.startswith(one) for name in self.failed)]


def main() -> int:
    """Run the selected suites."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help="the suites to run; all by default: " + ", ".join(_names()),
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table of docs/compatibility.md again"
    )
    parser.add_argument("--url", help="a running server, instead of one that is started")
    given = parser.parse_args()
    if unknown := set(given.suites) - set(_names()):
        parser.error(
            f"unknown suite: {', '.join(sorted(unknown))}; choose from {', '.join(_names())}"
        )
    chosen = [suite for suite in SUITES if not given.suites or suite.name in given.suites]
    if given.write and len(chosen) < len(SUITES):
        parser.error("--write needs all suites, because it writes the whole table")
    for suite in chosen:
        prepare(suite)
    with served(given.url) as url:
        results = [run(suite, url) for suite in chosen]
    for result in results:
        print(f"{result.suite}: {result.passed} passed, {len(result.failed)} failed")
        for name in result.failed:
            said = "" if result.why(name) else f", NOT EXPLAINED: {result.messages[name]}"
            print(f"  {name} fails{said}")
        for name in result.unneeded():
            print(f"  {name} is listed as a failure, but no test of that name fails")
    if given.write:
        write(PAGE, table(results))
    return int(any(result.unexplained() or result.unneeded() for result in results))


# --- downloads -------------------------------------------------------------------------------


def prepare(suite: Suite) -> None:
    """Download the tests and install their environment, unless they are in the cache."""
    python = _python(suite)
    marker = python.parents[1] / "needs.txt"
    needs = "\n".join(suite.needs)
    if not marker.is_file() or marker.read_text("utf-8") != needs:
        print(f"{suite.name}: environment", flush=True)
        _call(sys.executable, "-m", "venv", "--clear", str(python.parents[1]))
        _call(str(python), "-m", "pip", "install", "-q", *suite.needs)
        marker.write_text(needs, "utf-8")
    if not (CACHE / suite.inside).is_dir():
        print(f"{suite.name}: {suite.package}", flush=True)
        unpack(fetched(suite.package, python), suite.inside)


def fetched(package: str, python: Path) -> Path:
    """The archive of a source distribution."""
    folder = CACHE / "archives"
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package.replace('==', '-').replace('-', '[-_]')}.tar.gz"
    if not list(folder.glob(pattern)):
        source = ("--no-deps", "--no-binary", ":all:", "-d", str(folder), package)
        _call(str(python), "-m", "pip", "download", "-q", *source)
    (found,) = folder.glob(pattern)
    return found


def unpack(archive: Path, inside: str) -> None:
    """Unpack one folder of an archive, and nothing else."""
    with tarfile.open(archive) as whole:
        members = [one for one in whole if one.name.startswith(f"{inside}/")]
        whole.extractall(CACHE, members, filter="data")


def _python(suite: Suite) -> Path:
    name = f"{suite.package}-{'llama' if suite.of_llama else 'sdk'}".replace("==", "-")
    return CACHE / "environments" / name / "bin" / "python"


def _call(*command: str) -> None:
    # Without the BLAS that is preloaded for MLX.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(command, check=True, env=environment)


# --- the server ------------------------------------------------------------------------------


@contextmanager
def served(url: str | None, *options: str) -> Iterator[str]:
    """
    A server with Pebble on a free port, or the given one.

    Args:
        options: additional options of `ops serve`.
    """
    if url is not None:
        yield url.rstrip("/")
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "server.log"
        usual = ("--port", str(port), "--data-dir", f"{home}/data", "--max-tokens", "64")
        command = (sys.executable, "-P", "-m", "cairn.ops", "serve", *usual, *options)
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            await_server(server, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def await_server(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """
    Wait until a server answers.

    Raises:
        SystemExit: it has ended, or does not answer in time; with its output.
    """
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except OSError:  # URLError is one; a response that breaks off raises a different error
            time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text('utf-8')}")


# --- the tests -------------------------------------------------------------------------------


def run(suite: Suite, url: str) -> Result:
    """Run a suite. Shows the output of pytest."""
    print(f"== {suite.name}", flush=True)
    host, _, port = url.partition("://")[2].partition(":")
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", "")}
    environment |= {"TEST_API_BASE_URL": url + suite.place}
    if suite.of_llama:
        environment |= {"DEBUG_EXTERNAL": "1", "PORT": port}
        if host != "127.0.0.1":
            raise SystemExit("llama.cpp's tests need a server at 127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        workers = () if suite.of_llama else ("-n", "0")
        pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *workers)
        subprocess.run(
            (str(_python(suite)), *pytest, *suite.tests),
            cwd=CACHE / suite.inside,
            env=environment,
            timeout=_SUITE_S,
            check=False,
        )
        if not report.is_file():
            raise SystemExit(f"{suite.name}: pytest wrote no report")
        return read(suite, report)


def read(suite: Suite, report: Path) -> Result:
    """
    The results in a pytest report.

    Args:
        report: as JUnit's XML, written by our own pytest.

    Raises:
        SystemExit: it has no tests, so the suite has not passed.
    """
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    if not cases:
        raise SystemExit(
            f"{suite.name}: pytest collected no test of {' '.join(suite.tests)}; see above"
        )
    bad = [case for case in cases if {"failure", "error"} & {one.tag for one in case}]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return Result(
        suite=suite.name,
        package=suite.package,
        passed=len(cases) - len(bad) - len(skipped),
        skipped=len(skipped),
        failed=tuple(sorted(case.attrib["name"] for case in bad)),
        messages={case.attrib["name"]: _message(case) for case in bad},
    )


def _message(case: ElementTree.Element) -> str:
    """How a test failed, or broke."""
    return "\n".join(one.get("message", "") for one in case if one.tag in ("failure", "error"))


# --- the page --------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """The text of the page: a row for each suite, and the explanations of failed tests."""
    lines = ["| suite | of | passed | failed | skipped |", "|---|---|---|---|---|"]
    for one in results:
        cells = (f"`{one.suite}`", one.package, one.passed, len(one.failed), one.skipped)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for one in results:
        groups: dict[str, list[str]] = {}
        for name in one.failed:
            groups.setdefault(one.why(name) or "Not explained yet.", []).append(name)
        for why, names in groups.items():
            tests = sorted({re.sub(r"\[.*", "", name) for name in names})
            which = ", ".join(f"`{name}`" for name in tests)
            lines += ["", f"- `{one.suite}`, {len(names)} of {which}: {why}"]
    return "\n".join(lines)


def write(page: Path, made: str) -> None:
    """Replace the text between the page's two marks."""
    text = page.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{behind}", "utf-8")


def _names() -> list[str]:
    return [suite.name for suite in SUITES]


if __name__ == "__main__":
    sys.exit(main())
