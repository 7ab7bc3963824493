"""
The script that runs other projects' tests: how it reads their reports, and what it makes of them.
"""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

import cairn_clients.sdk_tests as sdk_tests
from cairn_clients.sdk_tests import (
    EXPLAINED,
    PAGE,
    SUITES,
    Result,
    await_server,
    read,
    table,
    unpack,
    write,
)

REPORT = """<testsuites><testsuite>
<testcase name="test_a[loose]"/>
<testcase name="test_b"><failure message="no"/></testcase>
<testcase name="test_c"><error message="no: broken"/></testcase>
<testcase name="test_d"><skipped message="slow"/></testcase>
</testsuite></testsuites>"""


REFUSED = "openai.BadRequestError: Error code: 400 - {'error': {'message': 'logit_bias ...'}}"


def result(*failed: str, message: str = REFUSED) -> Result:
    """A test of a suite with an explanation."""
    return Result(
        suite="openai-completions",
        package="openai==1",
        passed=3,
        skipped=0,
        failed=failed,
        messages=dict.fromkeys(failed, message),
    )


def test_a_report_is_read(tmp_path: Path) -> None:
    """A failed or broken test has its name; skipped tests are counted separately."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT, "utf-8")
    assert Result(
        suite=SUITES[0].name,
        package=SUITES[0].package,
        passed=1,
        skipped=1,
        failed=("test_b", "test_c"),
        messages={"test_b": "no", "test_c": "no: broken"},
    ) == read(SUITES[0], report)


def test_a_report_without_tests_is_an_error(tmp_path: Path) -> None:
    """A suite that collects nothing has not passed: its tests have moved, or `-k` matches none."""
    report = tmp_path / "report.xml"
    report.write_text("<testsuites><testsuite/></testsuites>", "utf-8")
    with pytest.raises(SystemExit, match=f"{SUITES[0].name}: pytest collected no test of tests/"):
        read(SUITES[0], report)


def test_a_broken_connection_is_tried_again(tmp_path: Path) -> None:
    """A server that takes the connection and closes it has not started yet."""
    log = tmp_path / "server.log"
    log.touch()

    def answer() -> None:
        for response in (b"", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        # It runs until its input ends.
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server:
            await_server(server, f"http://127.0.0.1:{listener.getsockname()[1]}", log)
            server.kill()
        answering.join(10)
    assert not answering.is_alive()


def test_a_failure_needs_its_word_and_a_word_its_failure() -> None:
    """An unexplained failure is named, and so is an explanation of a test that passes."""
    (known,) = EXPLAINED["openai-completions"]
    assert ([], []) == (result(f"{known}_1").unexplained(), result(f"{known}_1").unneeded())
    assert ["test_new"] == result("test_new").unexplained()
    assert [known] == result("test_new").unneeded()


@pytest.mark.parametrize(
    "message",
    ["openai.InternalServerError: Error code: 500 - logit_bias", "assert 'x' == 'y'", ""],
)
def test_an_explanation_is_of_one_failure(message: str) -> None:
    """A failure with a different message is unexplained, whatever its name."""
    (known,) = EXPLAINED["openai-completions"]
    failed = result(f"{known}_1", message=message)
    assert [f"{known}_1"] == failed.unexplained()
    assert "Not explained yet." in table([failed])


def test_the_table_has_the_figures_and_the_words() -> None:
    """One row for each suite; tests of one name and one explanation share a line."""
    (known,) = EXPLAINED["openai-completions"]
    made = table([result(f"{known}_1[loose]", f"{known}_1[strict]")])
    assert "| `openai-completions` | openai==1 | 3 | 2 | 0 |" in made
    assert f"- `openai-completions`, 2 of `{known}_1`: They send" in made


def test_only_the_text_between_the_marks_is_written(tmp_path: Path) -> None:
    """The rest of the page is unchanged."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{sdk_tests.BEGIN}\nold\n{sdk_tests.END}\nbehind\n", "utf-8")
    write(page, "new")
    text = page.read_text("utf-8")
    assert f"before\n{sdk_tests.BEGIN}\n\nnew\n\n{sdk_tests.END}\nbehind\n" == text


def test_only_one_folder_of_an_archive_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sibling folder, and none whose name only begins with its name."""
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        for name in ("p/tests/test_a.py", "p/tests-more/b.py", "p/setup.py"):
            made.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    monkeypatch.setattr(sdk_tests, "CACHE", tmp_path / "cache")
    unpack(archive, "p/tests")
    files = [one for one in (tmp_path / "cache").rglob("*") if one.is_file()]
    assert [tmp_path / "cache/p/tests/test_a.py"] == files


def test_the_page_has_each_suite_and_explanation() -> None:
    """The pins and explanations in the script are those on the page."""
    text = PAGE.read_text("utf-8")
    assert [] == [one.name for one in SUITES if f"| `{one.name}` | {one.package} |" not in text]
    reasons = {(suite, why.text) for suite, said in EXPLAINED.items() for why in said.values()}
    assert set() == {
        (suite, why) for suite, why in reasons if f"`{suite}`" not in text or why not in text
    }
