"""`ops replay` shows what led to a bug, reproduces it, and shows an earlier state."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import attrs
import pytest

from cairn.journal.rows.database.urls import journal_url, sqlite_path
from cairn.journal.rows.export import to_line
from tests.journal.model import Driver, Talk, Violated
from tests.support.journals import BREAKABLE, FINGERPRINT, broken, healthy, tampered, unrecorded


@pytest.fixture
def reruns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What runs the model again, replaced: its calls, each of which exits with 3."""
    calls = []

    def rerun(*arguments: object) -> int:
        calls.append(arguments)
        return 3

    module = ModuleType("cairn.ops.journal.replay_engine")
    monkeypatch.setattr(module, "rerun", rerun, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # A value that is set already is kept: the command does not restart itself to preload a BLAS.
    monkeypatch.setenv("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    return calls


@pytest.mark.parametrize("invariant", [name for name in BREAKABLE if name != "CRASH"])
def test_a_bug_is_reproduced(run, stored, invariant: str):
    """The story ends at the row that broke, and the check breaks again."""
    rows, bug_id = broken(invariant)
    stored(rows)
    result = run("replay", bug_id)
    assert 0 == result.exit_code
    assert f"bug:          {bug_id}\nbroken:       {invariant}: " in result.stdout
    assert f"fingerprint:  {FINGERPRINT[:4]}" in result.stdout
    for name in ("session:", "expected:", "actual:", "stack:", "\n> ", "on record:    yes"):
        assert name in result.stdout
    assert result.stdout.endswith("reproduced: the check failed again at the same row\n")


def test_a_crash_is_not_reproduced(run, stored):
    """A crash of the code is reported, and no check repeats it."""
    rows, bug_id = broken("CRASH")
    stored(rows)
    result = run("replay", bug_id)
    assert 1 == result.exit_code
    assert "  Traceback: here\n" in result.stdout
    assert "not reproduced" in result.stdout


@pytest.mark.parametrize("rows", [tampered(), unrecorded("INV-4")])
def test_a_bug_that_is_not_on_record(run, stored, rows):
    """The bug id from verify is enough."""
    stored(rows)
    bug_id = run("verify").stdout.split("\t")[0]
    result = run("replay", bug_id[:8])
    assert 0 == result.exit_code
    assert f"bug:          {bug_id}\n" in result.stdout
    assert "on record:    no" in result.stdout


def test_no_text_is_shown(run, stored):
    """What led to a bug is shown without texts and token ids."""
    rows, bug_id = broken("INV-1")
    stored(rows)
    result = run("replay", bug_id)
    assert "sampled=" not in result.stdout
    assert "text=" not in result.stdout


def test_a_session(run, stored):
    """A session's requests with what they reused, and that all of it came out the same."""
    stored(healthy())
    result = run("replay", "s1")
    assert 0 == result.exit_code
    first, second = (line.split("\t") for line in result.stdout.splitlines()[1:3])
    assert ["r1", "4", "new_session", "cold_start", "10", "0", "10", "3"] == first[:8]
    assert ["r2", "18", "continuation", "", "18", "8", "10", "2", *second[8:]] == second
    assert ["8", "0", "0", "0", "2", "stop"] == second[8:]
    assert result.stdout.endswith("same: 2 path decisions made again, all checks pass\n")


def test_a_session_that_broke(run, stored):
    """Exit code 1, and the bug id to continue with."""
    rows, bug_id = broken("INV-4")
    stored(rows)
    result = run("replay", "s1")
    assert 1 == result.exit_code
    assert f"broken at row 19: INV-4, {bug_id}" in result.stdout


def test_a_state_of_the_past(run, stored, tmp_path):
    """A session, or all of it, as it was at a position."""
    folder = stored(healthy())
    result = run("replay", "s1", "--at", 24)
    assert 0 == result.exit_code
    assert "as of row:  24\n" in result.stdout
    assert "state:           prefilling\n" in result.stdout
    assert "cached tokens:   18\n" in result.stdout
    result = run("replay", "--at", 17)
    assert "as of row:       17\n" in result.stdout
    assert "slabs:           1 (4096 bytes)" in result.stdout
    assert result.stdout == run("replay", "--at", 17, folder / "journal.db").stdout
    assert "not open" in run("replay", "s1", "--at", 2).stdout
    assert "31 (the last one)" in run("replay", "--at", 99).stdout


@pytest.mark.parametrize("target", ["nonsense-id", "s", "0" * 36])
def test_unknown(run, stored, target: str):
    """An unknown id: exit code 2, and where to look."""
    stored(healthy())
    result = run("replay", target)
    assert (2, "") == (result.exit_code, result.stdout)
    assert "`ops verify` lists the bug ids" in result.stderr


def test_nothing_named(run, stored):
    """Without a target there is nothing to do."""
    stored(healthy())
    assert 2 == run("replay").exit_code


@pytest.mark.parametrize("option", ["--no-private", "--session=s1"])
def test_an_export_with_gaps(run, stored, tmp_path, option: str):
    """A journal that cannot be folded is refused with a sentence."""
    stored(healthy())
    path = tmp_path / "x.jsonl"
    assert 0 == run("export", "-o", path, option).exit_code
    for command in (("replay", "s1"), ("sessions",), ("agents",)):
        result = run(*command, path)
        assert (2, "") == (result.exit_code, result.stdout)
        assert "Export the journal without" in result.stderr


def _changed(folder: Path, kind: str, new: bytes) -> int:
    """Changes the private contents of the last row of a kind in a stored journal; its position."""
    with sqlite3.connect(sqlite_path(journal_url(folder))) as database:
        ((position,),) = database.execute(
            "SELECT max(position) FROM events WHERE kind = ?", (kind,)
        ).fetchall()
        database.execute("UPDATE events SET private = ? WHERE position = ?", (new, position))
    database.close()
    return int(position)


@pytest.mark.parametrize("options", [(), ("--engine",)])
@pytest.mark.parametrize("new", [b'{"ids":[42],"text":"c"}', b"no event"])
def test_a_changed_row_under_a_session(run, stored, reruns, options: tuple[str, ...], new: bytes):
    """A session does not replay equally over a changed row, and the model is not run for it."""
    position = _changed(stored(healthy()), "tokens_emitted", new)
    bug_id = run("verify").stdout.split("\t")[0]
    result = run("replay", "s1", *options)
    assert 1 == result.exit_code
    assert f"broken at row {position}: INV-8, {bug_id}: " in result.stdout
    assert "same:" not in result.stdout
    assert [] == reruns


def test_a_changed_row_after_a_session(run, stored, reruns):
    """A change after a session's last row does not affect it."""
    rows = healthy()
    rows[-1] = attrs.evolve(rows[-1], public=rows[-1].public.replace(b"signal", b"sigkil"))
    stored(rows)
    assert 1 == run("verify").exit_code
    assert 0 == run("replay", "s1").exit_code
    assert 3 == run("replay", "s1", "--engine").exit_code


def test_a_state_of_the_past_from_standard_input(tmp_path: Path):
    """With ``--at`` alone, ``-`` is standard input and no id."""
    export = tmp_path / "x.jsonl"
    export.write_bytes(b"".join(map(to_line, healthy())))
    command = [sys.executable, "-P", "-m", "cairn.ops", "replay", "--at", "17", "-"]
    with export.open("rb") as stream:
        done = subprocess.run(command, stdin=stream, capture_output=True, text=True, check=True)
    assert "as of row:       17\n" in done.stdout


@pytest.mark.parametrize("options", [(), ("--engine",)])
def test_a_session_with_a_bug_that_is_not_on_record(run, stored, reruns, options: tuple[str, ...]):
    """It is named, and the model is not run: the fold ends there for this session."""
    stored(unrecorded("INV-4"))
    bug_id = run("verify").stdout.split("\t")[0]
    result = run("replay", "s1", *options)
    assert 1 == result.exit_code
    assert f"broken at row 19: INV-4, {bug_id}: another decision\n" in result.stdout
    assert [] == reruns


def test_engine(run, stored, reruns):
    """``--engine`` hands rows and session to what runs the model, and exits with its code."""
    rows, bug_id = broken("INV-7")
    folder = stored(rows)
    assert 3 == run("replay", bug_id, "--engine", "--data-dir", folder).exit_code
    assert [(rows, "s1")] == [arguments[:2] for arguments in reruns]


@pytest.mark.usefixtures("reruns")
def test_a_bug_of_a_shadow_check(run, stored, reruns):
    """
    Its row is in the server's stream, and still it is about a session: the session is shown and run
    again, it reports the bug, and the check is among its events.
    """
    driver = Driver()
    driver.start()
    driver.serve(Talk(tenant="t1", group=None, name="of-it", parts=(("user", (5,) * 20),)))
    while driver.check is None:
        driver.begin_check("of-it")
    with pytest.raises(Violated):
        driver.end_check("differs")
    stored(driver.rows)
    (bug_id,) = driver.bugs
    result = run("replay", bug_id)
    assert (0, True) == (result.exit_code, "session:      of-it\n" in result.stdout)
    assert 3 == run("replay", bug_id, "--engine").exit_code
    ((_, session, *_),) = reruns
    assert "of-it" == session
    result = run("replay", "of-it")
    assert (1, True) == (result.exit_code, bug_id in result.stdout)
    result = run("tail", "--journal", "--session", "of-it", "kind=shadow_checked")
    assert 1 == len(result.stdout.splitlines())


def test_an_agent_by_its_bare_name(run, stored):
    """Its session has a longer one, which is printed, and is shown."""
    driver = Driver()
    driver.start()
    for name in ("agent/guide", "agent/chat-81dbaef7", "@alice/agent/both", "@bob/agent/both"):
        driver.serve(Talk(tenant="t1", group=None, name=name, parts=(("user", (5,) * 20),)))
    stored(driver.rows)
    full = run("replay", "agent/guide")
    assert 0 == full.exit_code
    result = run("replay", "guide")
    assert (0, full.stdout) == (result.exit_code, result.stdout)
    assert "guide is an agent's name; its session is agent/guide.\n" in result.stderr
    assert "its session is agent/chat-81dbaef7.\n" in run("replay", "chat-81").stderr
    assert "No bug id or session guid " in run("replay", "guid").stderr
    both = run("replay", "both")
    assert 2 == both.exit_code
    assert "Several tenants have an agent both: @alice/agent/both, @bob/agent/both." in both.stderr


def test_an_engine_that_cannot_be_loaded(run, stored, monkeypatch: pytest.MonkeyPatch):
    """Where MLX or what needs it is not there, that is a sentence."""
    stored(healthy())
    monkeypatch.setitem(sys.modules, "cairn.ops.journal.replay_engine", None)
    result = run("replay", "s1", "--engine")
    assert (2, "") == (result.exit_code, result.stdout)
    assert result.stderr.startswith("The model cannot be run here: ")
    assert "`ops doctor`" in result.stderr


def test_a_request_that_was_lost(run):
    """A request that was open when its server was killed has an end, and is not shown as open."""
    history = Path(__file__).parents[2] / "histories" / "killed.jsonl"
    (session,) = (line.split("\t")[0] for line in run("sessions", history).stdout.splitlines()[1:])
    result = run("replay", session, history).stdout.splitlines()
    assert ["length", "lost", "stop"] == [line.split("\t")[-1] for line in result[1:4]]
