"""Results of self-tests in files: when one spares the test, and when the test runs again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from cairn.actors.boot import BootRefused
from cairn.actors.models import self_tests
from cairn.actors.models.self_tests import StoredSelfTests, code_hash
from cairn.engine.mlx import start as mlx_start
from cairn.engine.model import fingerprint
from cairn.engine.reports import SelfTestReport
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import serving

FIELDS: Mapping[str, Any] = {
    "weights": "w",
    "mlx": "1",
    "processor": "p",
    "environment": {"N": "1"},
}
PASSED = ev.SelfTestFinished(
    fingerprint="f",
    base_fingerprint=fingerprint.base_of(FIELDS),
    findings={"warm_equals_cold": True},
    passed=True,
    error_max=1e-6,
    decode_shapes=(1, 4),
    row_class=(64, 1, 16, 256, 1_100_000, 0),
    row_class_reason="",
    without_drafts="",
    duration_us=7,
    from_cache=False,
)


@pytest.fixture
def kept(tmp_path: Path) -> StoredSelfTests:
    """A folder with the result of a passed test."""
    found = StoredSelfTests(tmp_path / "cache" / "self-tests")
    found.write(FIELDS, PASSED)
    return found


def refused(kept: StoredSelfTests, fields: Mapping[str, Any] = FIELDS) -> str:
    """Why the file for a fingerprint is not used, as the log says. The file stays."""
    with capture_logs() as lines:
        assert kept.read(fields) is None
    ((word, file, fact),) = [(line["log_level"], line["file"], line["fact"]) for line in lines]
    assert ("warning", str(kept.path(fields))) == (word, file)
    return str(fact)


def test_a_result_is_read_as_it_was_written(kept: StoredSelfTests) -> None:
    """Field by field, by another process too; its owner alone can read it."""
    with capture_logs() as lines:
        assert PASSED == kept.read(FIELDS) == StoredSelfTests(kept.folder).read(dict(FIELDS))
    assert [] == lines
    (path,) = kept.folder.iterdir()
    assert (0o700, 0o600) == (kept.folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_the_fingerprint_counts(kept: StoredSelfTests, name: str) -> None:
    """With another version, device or setting the test runs, and nothing is logged."""
    with capture_logs() as lines:
        assert kept.read({**FIELDS, name: "another"}) is None
        assert kept.read({field: FIELDS[field] for field in FIELDS if field != name}) is None
    assert [] == lines


def test_another_engine_tests_again(kept: StoredSelfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of other code says nothing about this code."""
    monkeypatch.setattr(self_tests, "engine_code", lambda: "another")
    assert kept.read(FIELDS) is None


def test_the_code_of_the_engine_is_that_of_its_modules(tmp_path: Path) -> None:
    """A changed byte, name or folder of a module is other code; other files do not count."""
    found = set[str]()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "1"), ("deep/a.py", "1")):
        path = tmp_path / str(len(found)) / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        (path.parent / "a.txt").write_text(text)
        found.add(code_hash(tmp_path / str(len(found))))
    assert 4 == len(found)
    assert 64 == len(self_tests.engine_code())


def test_a_damaged_file_is_not_used(kept: StoredSelfTests) -> None:
    """Whichever byte was changed, and wherever the file ends."""
    path = kept.path(FIELDS)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "it is damaged" == refused(kept)
    for end in (0, 1, 64, 65, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert "it is damaged" == refused(kept)
    path.write_bytes(whole + b"\n")
    assert "it is damaged" == refused(kept)


def test_a_file_of_another_fingerprint_is_not_used(kept: StoredSelfTests) -> None:
    """A file that was renamed, or whose result is not that of a passed test of its key."""
    other = {**FIELDS, "mlx": "2"}
    kept.path(FIELDS).rename(kept.path(other))
    assert "it is of another fingerprint" == refused(kept, other)
    kept.write(other, PASSED)  # with the name of another fingerprint
    assert "it is not of a passed test" == refused(kept, other)
    kept.write(FIELDS, attrs.evolve(PASSED, row_class=(64, 3, 2, 1, 0, 0)))
    assert refused(kept).startswith("not a row class")
    kept.write(FIELDS, attrs.evolve(PASSED, error_max="much"))  # type: ignore[arg-type]
    assert refused(kept).startswith("Expected `float`")


def test_only_its_owner_may_be_able_to_write_a_file(kept: StoredSelfTests, tmp_path: Path) -> None:
    """A file that others could have written, a link and a folder are not used."""
    path = kept.path(FIELDS)
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert "other users can write it" == refused(kept)
    path.chmod(0o600)
    assert PASSED == kept.read(FIELDS)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "symbolic links" in refused(kept)
    path.unlink()
    path.mkdir()
    assert "it is not a file" == refused(kept)
    path.rmdir()
    os.mkfifo(path)
    assert "it is not a file" == refused(kept)


def test_another_users_file_is_not_used(
    kept: StoredSelfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if that user alone can write it."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "other users can write it" == refused(kept)


def test_a_failed_test_removes_an_earlier_result(kept: StoredSelfTests) -> None:
    """It contradicts that result, and is not kept itself."""
    for _ in range(2):
        kept.write(FIELDS, attrs.evolve(PASSED, passed=False))
        assert [] == list(kept.folder.iterdir())
        assert kept.read(FIELDS) is None


@pytest.mark.parametrize("draft", [True, False])
def test_what_cannot_be_written_is_logged(
    kept: StoredSelfTests, draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a file where the folder has to be. Nothing half written is left."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder, earlier = kept.folder, list(kept.folder.iterdir())
    if draft:
        monkeypatch.setattr(Path, "replace", full)
    else:
        kept = StoredSelfTests(earlier[0])
    with capture_logs() as lines:
        kept.write(FIELDS, PASSED)
    (line,) = lines
    assert ("warning", "the result of the self-test is not stored") == (
        line["log_level"],
        line["event"],
    )
    assert ("No space left on device" if draft else "File exists") == line["fact"]
    assert earlier == list(folder.iterdir())


# --- servers -------------------------------------------------------------------------------------


def recorded_tests(model_directory: Path, **changes: Any) -> list[ev.SelfTestFinished]:
    """The self-tests on record after a start with a new journal, which verifies."""
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, block_tokens=16, **changes):
            pass

    try:
        with capture_logs():
            trio.run(main)
    finally:
        assert () == replay(store.read()).findings
    found = [decode(row).event for row in store.rows]
    return [event for event in found if isinstance(event, ev.SelfTestFinished)]


def test_a_new_journal_takes_the_result_of_another(model_directory: Path, tmp_path: Path) -> None:
    """Its event says so, with the same findings. Another setting is tested by itself."""
    folder = tmp_path / "self-tests"
    (first,) = recorded_tests(model_directory, self_tests=folder)
    (again,) = recorded_tests(model_directory, self_tests=folder)
    (alone,) = recorded_tests(model_directory)
    (other,) = recorded_tests(model_directory, self_tests=folder, decode_rows=2)
    assert [False, True, False, False] == [t.from_cache for t in (first, again, alone, other)]
    assert attrs.evolve(first, from_cache=True, duration_us=0) == again
    assert first.base_fingerprint == again.base_fingerprint != other.base_fingerprint
    assert 2 == len(list(folder.iterdir()))


def test_an_operator_can_ask_for_the_test(model_directory: Path, tmp_path: Path) -> None:
    """`--test-again` runs it, whatever files and the journal have."""
    folder = tmp_path / "self-tests"
    recorded_tests(model_directory, self_tests=folder)
    (again,) = recorded_tests(model_directory, self_tests=folder, test_again=True)
    assert not again.from_cache
    (third,) = recorded_tests(model_directory, self_tests=folder)
    assert third.from_cache


def test_a_server_with_a_damaged_file_tests_again(model_directory: Path, tmp_path: Path) -> None:
    """Its result replaces the file."""
    folder = tmp_path / "self-tests"
    recorded_tests(model_directory, self_tests=folder)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    (again,) = recorded_tests(model_directory, self_tests=folder)
    (third,) = recorded_tests(model_directory, self_tests=folder)
    assert (False, True) == (again.from_cache, third.from_cache)


def test_a_device_that_fails_later_loses_its_result(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start tests again, although an earlier one had passed."""
    folder = tmp_path / "self-tests"
    recorded_tests(model_directory, self_tests=folder)
    assert 1 == len(list(folder.iterdir()))
    failed = SelfTestReport(findings={"warm_equals_cold": False}, error_max=0.0, duration_us=1)
    with monkeypatch.context() as patch:
        patch.setattr(mlx_start, "run_self_test", lambda *_: failed)
        with pytest.raises(ExceptionGroup) as refusal:
            recorded_tests(model_directory, self_tests=folder, test_again=True, decode_rows=4)
    assert refusal.group_contains(BootRefused, match="the self-test failed on this device")
    assert [] == list(folder.iterdir())
    (again,) = recorded_tests(model_directory, self_tests=folder)
    assert not again.from_cache


def test_a_result_for_want_of_time_is_not_stored(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was busy once would have the dearer passes in every data directory."""
    folder = tmp_path / "self-tests"
    late = SelfTestReport(findings={"one": True}, error_max=0.0, duration_us=1, row_class_late=True)
    with monkeypatch.context() as patch:
        patch.setattr(mlx_start, "run_self_test", lambda *_: late)
        (first,) = recorded_tests(model_directory, self_tests=folder)
    assert (True, False) == (first.passed, folder.exists())
    recorded_tests(model_directory, self_tests=folder)
    assert 1 == len(list(folder.iterdir()))
