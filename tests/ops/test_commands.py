"""The small commands, and what all commands have in common."""

import contextlib
import fcntl
import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import tomllib
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from cairn.engine.model.builtin import builtin_directory
from cairn.journal import events as ev
from cairn.journal.errors import StoreError
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.export import read_export
from cairn.journal.rows.heads import Head
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops import doctor
from cairn.ops.cli import COMMANDS, called_by, ops
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import bytes_on_disk, default_data_dir, self_tests_folder
from cairn.ops.common.output import table
from cairn.ops.doctor import Found
from cairn.ops.journal.growth import Growth, growth
from cairn.ops.journal.sessions import age, time_text, used
from cairn.ops.serve.data_dir import hold_directory, hold_journal
from cairn.ops.serve.recorded_heads import head_keeper
from tests.support import journals
from tests.support.journals import Builder, broken, healthy, tampered

ROOT = Path(__file__).parents[2]
OURS = [name for name in COMMANDS if name != "serve"]


@pytest.mark.parametrize("name", OURS)
def test_help(run, name: str):
    """Help repeats the sentence of the list of commands, and ends with an example."""
    result = run(name, "--help")
    assert 0 == result.exit_code
    assert COMMANDS[name][1].rstrip(".") in " ".join(result.stdout.split())
    assert f"  ops {name}" in result.stdout.split("Example:\n")[1]


@pytest.mark.parametrize("name", OURS)
def test_help_shows_the_name_of_the_program(name: str):
    """Usage and examples have the name by which it was called, and that changes nothing else."""
    before = CliRunner().invoke(ops, [name, "--help"], prog_name="ops").output
    shown = CliRunner().invoke(called_by("cairn", ops), [name, "--help"], prog_name="cairn").output
    assert f"Usage: cairn {name}" in shown
    assert f"  cairn {name}" in shown.split("Example:\n")[1]
    assert "  ops " not in shown.split("Example:\n")[1]
    assert before == CliRunner().invoke(ops, [name, "--help"], prog_name="ops").output


@pytest.mark.parametrize("program", ["cairn", "ops"])
def test_the_program_has_two_names(program: str):
    """As a module, as a launcher of the checkout, and as a script of the package."""
    module = {"cairn": "cairn", "ops": "cairn.ops"}[program]
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"Usage: {program} ")
    assert f"-m {module} " in (ROOT / program).read_text()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert "cairn.ops.cli:main" == scripts[program]


def test_the_list_loads_nothing(run):
    """`ops --help` lists all installed commands, and loads none of them."""
    listed = run("--help").stdout
    assert all(f"  {name} " in listed for name in COMMANDS)
    code = (
        "import sys\n"
        "from cairn.ops.cli import COMMANDS, ops\n"
        "ops(['--help'], standalone_mode=False)\n"
        "modules = {where.partition(':')[0] for where, _ in COMMANDS.values()}\n"
        "packages = {'cairn_bench', 'cairn_conform'}\n"
        "assert not (modules | packages) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["bench", "conform"])
def test_a_command_whose_package_is_not_installed(run, monkeypatch: pytest.MonkeyPatch, name: str):
    """Help leaves it out, and the command itself says how to install it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda package, *more: None if package == f"cairn_{name}" else find(package, *more),
    )
    listed = run("--help").stdout
    assert [f"  {one} " in listed for one in COMMANDS] == [one != name for one in COMMANDS]
    result = run(name, "--help")
    assert 2 == result.exit_code
    assert (
        f"`ops {name}` is not installed: clone Cairn's repository and run `make env` there.\n"
        == result.stderr
    )


def test_a_thread_in_native_code_does_not_abort_the_end():
    """
    An interpreter that is taken down kills the threads that come back to it from MLX, which aborts
    the process. So the command line ends without taking it down.
    """
    code = (
        "import sys, threading, time\n"
        "import mlx.core as mx\n"
        "from cairn.ops.cli import main\n"
        "class Late:\n"
        "    def __del__(self, sleep=time.sleep):\n"
        "        sleep(3)\n"
        "begun = threading.Event()\n"
        "def square(number):\n"
        "    begun.set()\n"
        "    time.sleep(1)  # and comes back while the interpreter is being taken down\n"
        "    return number * number\n"
        "square_of = mx.grad(square)\n"
        "threading.Thread(target=square_of, args=(mx.array(1.0),), daemon=True).start()\n"
        "begun.wait()\n"
        "sys.modules['late'] = Late()\n"
        "sys.argv = ['ops', '--help']\n"
        "{end}\n"
    )

    def ended(end: str) -> tuple[int, bytes]:
        command = [sys.executable, "-P", "-c", code.format(end=end)]
        done = subprocess.run(command, capture_output=True, check=False)
        return done.returncode, done.stdout

    code_of_main, said = ended("main()")
    assert 0 == code_of_main
    assert b"Usage" in said
    if sys.platform == "linux":  # elsewhere a thread that is killed does not unwind
        assert (-signal.SIGABRT, b"") == ended("pass")


@pytest.mark.parametrize(
    ("raised", "code", "stderr"),
    [
        ("SystemExit(3)", 3, ""),
        ("SystemExit('Why.')", 1, "Why.\n"),
        ("SystemExit", 0, ""),
        ("ValueError('Why.')", 1, "ValueError: Why.\n"),
        ("KeyboardInterrupt", 130, "Stopped.\n"),
    ],
)
def test_how_the_process_ends(raised: str, code: int, stderr: str):
    """The exit code is Python's own, and all output is flushed."""
    program = (
        "from cairn.ops import cli\n"
        "def fails(prog_name):\n"
        "    print('out')\n"
        f"    raise {raised}\n"
        "cli.ops = fails\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (code, "out\n") == (done.returncode, done.stdout)
    assert done.stderr.endswith(stderr)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("nothing", "Cairn is not installed here. Run `make env`.\n"),
        ("an empty environment", "Cairn is not installed here. Run `make env`.\n"),
        ("by make", ""),
        ("by pip", ""),
    ],
)
def test_the_launcher(tmp_path: Path, made: str, says: str):
    """It says what to do if the environment is missing or incomplete, however it was made."""
    launcher = shutil.copy(Path(__file__).parents[2] / "ops", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    if made != "nothing":
        python.parent.mkdir(parents=True)
        asked = "exit 1" if made == "an empty environment" else "exit 0"
        asked = "echo asked in vain" if made == "by make" else asked
        python.write_text(f"""#!/bin/sh
[ "$2" != -c ] || {{ {asked}; }}
echo "$@"
""")
        python.chmod(0o755)
    if made == "by make":
        (tmp_path / ".venv" / ".stamp").touch()
    done = subprocess.run([launcher, "verify", "a b"], capture_output=True, text=True, check=False)
    assert bool(says) == bool(done.returncode)
    assert says in done.stderr
    assert ("" if says else "-P -m cairn.ops verify a b\n") == done.stdout


@pytest.mark.parametrize("words", ["verify -", "sessions -", "replay some-id -", "agents -"])
def test_ctrl_c(words: str):
    """It is not a failed check: exit code 130, and one line."""
    command = [sys.executable, "-P", "-m", "cairn.ops", *words.split()]
    piped = subprocess.PIPE
    process = subprocess.Popen(command, stdin=piped, stdout=piped, stderr=piped)
    assert process.stdin is not None
    process.stdin.write(b"x" * 1_000_000)  # more than a pipe holds: it is reading by now
    process.send_signal(signal.SIGINT)
    assert (b"", b"Stopped.\n") == process.communicate(timeout=30)
    assert 130 == process.returncode


@pytest.mark.parametrize(
    ("raised", "code", "stderr"),
    [(KeyboardInterrupt(), 130, "Stopped.\n"), (StoreError("No."), 2, "No.\n")],
)
@pytest.mark.parametrize("words", ["verify", "export -o x.jsonl", "sessions", "tail --journal"])
def test_what_was_under_way_ends(
    run, stored, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, raised, code, stderr
):
    """A command's input is closed before the process ends: a bar shows the cursor again."""
    stored(healthy())
    monkeypatch.chdir(tmp_path)
    ended: list[bool] = []

    def watched(store: SqlStore, *of: Any, **named: Any) -> Iterator[Any]:
        try:
            yield from read(store, *of, **named)
        finally:
            ended.append(True)

    def fails(*_: object, **__: object) -> None:
        raise raised

    read = SqlStore.read
    monkeypatch.setattr(SqlStore, "read", watched)
    for name in (
        "journal.replay.Replay.feed",
        "ops.journal.export.to_line",
        "ops.journal.tail.to_line",
    ):
        monkeypatch.setattr(f"cairn.{name}", fails)
    result = run(*words.split())  # holds the error, and everything that the error references
    assert (code, "", stderr) == (result.exit_code, result.stdout, result.stderr)
    assert [True] == ended
    assert [tmp_path / "data"] == list(tmp_path.iterdir())


def test_unknown_command(run):
    """An unknown command."""
    assert 2 == run("dance").exit_code


def test_the_data_directory(monkeypatch: pytest.MonkeyPatch):
    """By CAIRN_DATA_DIR, by XDG_DATA_HOME, or in the home."""
    monkeypatch.delenv("CAIRN_DATA_DIR", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert Path.home() / ".local" / "share" / "cairn" == default_data_dir()
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert Path("/xdg/cairn") == default_data_dir()
    monkeypatch.setenv("CAIRN_DATA_DIR", "/mine")
    assert Path("/mine") == default_data_dir()


# --- export --------------------------------------------------------------------------------------


def test_export(run, stored, tmp_path: Path):
    """An export has all rows, in a file or on stdout."""
    stored(healthy())
    path = tmp_path / "x.jsonl"
    result = run("export", "-o", path)
    assert (0, "", f"31 rows, head 31:{healthy()[-1].hash}\n") == (
        *(result.exit_code, result.stdout),
        result.stderr,
    )
    assert healthy() == list(read_export(path))
    assert 0o600 == path.stat().st_mode & 0o777
    assert path.read_bytes() == run("export", "--format", "jsonl").stdout_bytes


def test_export_of_a_session_without_contents(run, stored, tmp_path: Path):
    """Omitted fields are left out, and hashes stay."""
    stored(healthy())
    path = tmp_path / "x.jsonl"
    run("export", "-o", path, "--session", "s1", "--no-private")
    rows = list(read_export(path))
    assert [row.hash for row in healthy() if row.stream == "session/s1"] == [r.hash for r in rows]
    assert {None} == {row.private for row in rows}


def test_export_of_a_session_by_the_beginning_of_its_id(run, talk: Path):
    """The short id from `ops sessions` is enough; a shorter or an ambiguous one is not."""
    folder = ("--data-dir", talk)
    whole = run("export", *folder, "--session", TALK)
    assert (0, TALK) == (whole.exit_code, json.loads(whole.stdout.splitlines()[0])["stream"][8:])
    assert whole.stdout == run("export", *folder, "--session", TALK[:8]).stdout
    short = run("export", *folder, "--session", TALK[:5])
    assert (2, "") == (short.exit_code, short.stdout)
    assert f"No session {TALK[:5]} is in {talk} (give at least 6 characters); " in short.stderr


def test_export_of_one_of_several_sessions(run, stored):
    """An ambiguous id has to be completed; a whole id means itself."""
    builder = Builder()
    builder.start()
    names = ("session-1", "session-12", "session-2")
    for name in names:
        builder.turn(name, f"of {name}", ["hello"], range(1, 9), [21, 22])
    stored(builder.rows)
    result = run("export", "--session", "session-")
    assert (2, "") == (result.exit_code, result.stdout)
    assert f"Several ids begin with session-: {', '.join(names)}.\n" == result.stderr
    assert 0 == run("export", "--session", "session-1").exit_code


def test_an_export_that_fails_leaves_the_old_one(run, stored, tmp_path: Path):
    """A file is replaced as a whole or not at all."""
    stored(healthy())
    path = tmp_path / "x.jsonl"
    path.write_text("old")
    result = run("export", "-o", path, "--session", "none")
    assert 2 == result.exit_code
    assert "No session none" in result.stderr
    assert 2 == run("export", "-o", tmp_path / "no" / "folder.jsonl").exit_code
    assert "old" == path.read_text()
    assert {"x.jsonl", "data"} == {found.name for found in tmp_path.iterdir()}


# --- migrate, sessions ---------------------------------------------------------------------------


def test_migrate(run):
    """A journal is made, and made once."""
    assert "created: schema 0001\n" == run("migrate").stdout
    assert "nothing to do: schema 0001\n" == run("migrate").stdout
    assert 0 == run("verify").exit_code


def test_migrate_beside_a_server(run, stored):
    """A journal that a server uses is not migrated: there would be two writers."""
    folder = stored(healthy())
    with hold_journal(journal_url(folder), who="serve"):
        result = run("migrate")
    assert (2, "") == (result.exit_code, result.stdout)
    assert result.stderr.startswith(f"A server (process {os.getpid()}) uses ")


def test_sessions(run, stored):
    """A line for each session, with its bug id where it is quarantined."""
    rows, bug_id = broken("INV-7")
    stored(rows)
    head, line = run("sessions").stdout.splitlines()
    assert head.startswith("id\tstate\t")
    assert ["s1", "quarantined", bug_id] == [line.split("\t")[index] for index in (0, 1, -1)]


def lines_of_sessions(run, *arguments) -> dict[str, dict[str, str]]:
    """The lines of `ops sessions` by the id of the session."""
    head, *lines = (line.split("\t") for line in run("sessions", *arguments).stdout.splitlines())
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def test_sessions_of_a_server_that_died(run, stored, tmp_path: Path):
    """Its requests and its memory are lost, unless a server uses the journal."""
    rows = healthy()
    decoding = next(row.position for row in rows if row.kind == "cache_extended")
    folder = stored(rows[:decoding])
    line = lines_of_sessions(run)["s1"]
    assert ("lost", "0", "0") == (line["state"], line["in slab"], line["blocks"])
    assert "lost" == lines_of_sessions(run, "--journal", folder / "journal.db")["s1"]["state"]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for arguments in ((), ("--journal", folder / "journal.db")):
            line = lines_of_sessions(run, *arguments)["s1"]
            assert line["state"] in ("prefilling", "decoding")
            assert int(line["in slab"]) > 0
    export = tmp_path / "x.jsonl"
    run("export", "-o", export)
    assert lines_of_sessions(run, export)["s1"]["state"] in ("prefilling", "decoding")


def on_a_terminal(width: int, *arguments: object) -> list[str]:
    """The lines that a command shows on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cairn.ops", *map(str, arguments)],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(width), "TERM": "dumb"},
    )
    os.close(theirs)
    shown = b""
    # Linux ends with an error when the other side is closed, macOS with nothing.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert 0 == process.wait(30)
    return shown.decode().splitlines()


@pytest.fixture
def talk(stored, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal of a session that has id and tenant of a real one."""
    monkeypatch.setattr(journals, "TENANT", "local")
    builder = Builder()
    builder.start()
    builder.turn(TALK, str(uuid.UUID(int=1)), ["hello"], range(1, 9), [21, 22])
    folder: Path = stored(builder.rows)
    return folder


TALK = "f221b9a8-dec4-4006-b7c0-1964353c27be"


def test_sessions_on_a_terminal(talk: Path):
    """One line each, with short ids."""
    head, line, left_out = on_a_terminal(80, "sessions", "--data-dir", talk)
    assert "id state first words client turns tokens reused last used" == " ".join(
        head.split()[:10]
    )
    assert ["f221b9a8", "idle", "hello", "an-agent", "1", "10", "0", "%"] == line.split()[:8]
    assert " d ago " in line
    assert max(map(len, (head, line))) <= 80
    assert "blocks" in left_out


def test_sessions_for_people(run, stored):
    """The last one first; a terminal shows twenty and how many more there are."""
    builder = Builder()
    builder.start()
    for number in range(1, 24):
        builder.turn(f"s{number}", f"r{number}", [f"word {number}"], range(1, 9), [21, 22])
    builder.turn("s1", "again", ["word 1", "a", "And?"], range(1, 13), [21])
    folder = stored(builder.rows)
    shown = [line.split() for line in on_a_terminal(200, "sessions", "--data-dir", folder)]
    assert ["s1", "s23"] == [line[0] for line in shown[1:3]]
    assert ["s1", "idle", "word", "1", "an-agent", "2", "13", "40", "%"] == shown[1][:9]
    assert "(3 more: ops sessions --all)" == " ".join(shown[-1])
    assert 20 == sum(line[0].startswith("s") for line in shown)
    every = on_a_terminal(200, "sessions", "--all", "--data-dir", folder)
    assert 23 == sum(line.startswith("s") for line in every)
    assert 24 == len(run("sessions").stdout.splitlines())


def test_sessions_for_programs(run, stored):
    """An object for each, one a line."""
    stored(healthy())
    objects = [json.loads(line) for line in run("sessions", "--json").stdout.splitlines()]
    first = {one["id"]: one for one in objects}["s1"]
    assert {"first_words", "turns", "tokens", "last_used", "bug_id"} < set(first)
    assert 0 <= first["reused"] <= 1
    assert first["last_used"].startswith("2026-")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "now"),
        (0, "now"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7200, "2 h ago"),
        (3e5, "3 d ago"),
    ],
)
def test_ages(seconds: float, words: str):
    """In the largest unit; a clock that went back shows no negative age."""
    assert words == age(round(seconds * 1_000_000))


def test_a_session_on_a_terminal(talk: Path):
    """One line for each request; columns that do not fit are named."""
    for width, words in ((80, "a wider terminal also shows: sealed"), (120, "cold_start")):
        lines = on_a_terminal(width, "replay", TALK, "--data-dir", talk)
        assert lines[1].startswith("00000000 ")
        assert "new_session" in lines[1]
        assert any(words in line for line in lines)
        assert max(map(len, lines)) <= width


def test_times_and_tenants_for_people(capsys: pytest.CaptureFixture[str]):
    """
    The date is shown only if it is not today; without a terminal, everything is shown in full.
    """
    now = time.time_ns() // 1000
    shown = used(now)
    assert shown is not None
    assert time_text(now) == str(shown)
    assert shown.full[11:19] == shown.short
    old = used(0)
    assert old is not None
    assert "1970-01-01 00:00:00" == old.short
    table(("id", "tenant"), [(TALK, "local")], hidden=("tenant",))
    assert f"id\ttenant\n{TALK}\tlocal\n" == capsys.readouterr().out


# --- doctor --------------------------------------------------------------------------------------


@pytest.fixture
def healthy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX works here and there is a BLAS, whatever machine this is."""
    for name in ("check_mlx", "check_blas"):
        monkeypatch.setattr(doctor, name, lambda: Found("ok", "works"))


@pytest.mark.usefixtures("healthy_machine")
def test_doctor(run, stored):
    """A line for each check; a new machine and a healthy journal pass."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = run("doctor", "--port", port)
    assert 0 == result.exit_code
    assert "journal   none yet" in result.stdout
    stored(healthy())
    result = run("doctor", "--port", port)
    assert 0 == result.exit_code
    assert "ok    journal   up to row 31, " in result.stdout
    assert "KiB; the hashes of the last 31 rows are correct\n" in result.stdout
    assert "ok    bits      not tested yet" in result.stdout
    assert 13 == len(result.stdout.splitlines())


@pytest.mark.usefixtures("healthy_machine")
def test_doctor_says_where_self_tests_are_kept(run, tmp_path, monkeypatch):
    """Where the results are, how many, and what follows if there can be none."""
    named, folder = "CAIRN_CACHE_DIR", tmp_path / "cache" / "self-tests"
    monkeypatch.setenv(named, str(tmp_path / "cache"))
    fact = f"ok    selftest  no result in {folder}; one that was cut off by a busy machine is not"
    assert fact in run("doctor").stdout
    folder.mkdir(parents=True)
    (folder / "one.json").touch()
    fact = f"1 result stored in {folder}; `ops serve --test-again` replaces one\n"
    assert fact in run("doctor").stdout
    monkeypatch.setenv("CAIRN_PROGRAM", "./cairn")
    assert fact.replace("`ops ", "`./cairn ") in run("doctor").stdout
    monkeypatch.delenv("CAIRN_PROGRAM")
    monkeypatch.setenv(named, str(folder / "one.json"))
    found = doctor.check_self_tests()
    assert ("warn", f"set {named}") == (found.status, found.advice)
    monkeypatch.delenv(named)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tmp_path / "xdg" / "cairn" / "self-tests" == self_tests_folder()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path / ".cache" / "cairn" / "self-tests" == self_tests_folder()

    def homeless() -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.setattr(Path, "home", homeless)
    found = doctor.check_self_tests()
    assert ("warn", f"set {named}") == (found.status, found.advice)


@pytest.mark.usefixtures("healthy_machine")
def test_doctor_finds(run, stored):
    """A failure is named with what to do, and gives exit code 1; a port in use only warns."""
    stored(tampered())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("doctor", "--port", taken.getsockname()[1])
    assert 1 == result.exit_code
    assert "fail  journal   the chain is broken at row 4 - run `ops verify`\n" in result.stdout
    assert "warn  port " in result.stdout
    place = str(default_data_dir() / "journal.db")
    result = run("doctor", "--data-dir", "/elsewhere", "--journal", place)
    assert f"run `ops verify --data-dir /elsewhere --journal {place}`\n" in result.stdout


def self_test(**fields: Any) -> ev.SelfTestFinished:
    """A self-test that passed and found a row class."""
    found: dict[str, Any] = {
        "fingerprint": "f",
        "base_fingerprint": "f",
        "findings": {"warm_equals_cold": True, "rows_do_not_matter": True},
        "passed": True,
        "error_max": 0.0,
        "decode_shapes": (2, 4),
        "row_class": (64, 12, 12, 252, 0, 0),
        "row_class_reason": "",
        "without_drafts": "",
        "duration_us": 1,
        "from_cache": False,
    }
    return ev.SelfTestFinished(**found | fields)


@pytest.mark.parametrize(
    ("tested", "found"),
    [
        (
            self_test(),
            Found(
                "ok",
                "reuse to the token with passes of 12 to 252 rows in steps of 12; decoding in "
                "passes of 2 or 4 rows; speculation: drafts from prompt and answer, with the same "
                "bits",
            ),
        ),
        (
            self_test(row_class=(), row_class_reason="it keeps states", decode_shapes=(1,)),
            Found(
                "ok",
                "reuse in whole blocks (it keeps states); decoding in passes of one size; "
                "speculation: drafts from prompt and answer, with the same bits",
            ),
        ),
        (
            self_test(row_class=(), row_class_reason="the search took longer than 180 s"),
            Found(
                "warn",
                "reuse in whole blocks (the search took longer than 180 s); decoding in passes of "
                "2 or 4 rows; speculation: drafts from prompt and answer, with the same bits",
                "the machine was too busy at the self-test; once it is idle, stop the server and "
                "start it with --test-again: `ops serve --test-again`",
            ),
        ),
        (
            self_test(passed=False, findings={"warm_equals_cold": False, "rows": True}),
            Found(
                "fail",
                "the last self-test failed: warm_equals_cold",
                "docs/models.md lists the families that are served",
            ),
        ),
        (
            self_test(row_class=(64, 12)),
            Found(
                "fail",
                "the last self-test cannot be read: not a row class: (64, 12)",
                "run `ops verify`",
            ),
        ),
    ],
)
def test_doctor_reads_the_last_self_test(stored, tested: ev.SelfTestFinished, found: Found):
    """What it found about the passes, in words."""
    made = Builder()
    made.propose(self_test(row_class=(), decode_shapes=()), tested)
    made.propose(ev.OperatorActed(action="note", detail="-"))
    assert found == doctor.check_bits(journal_url(stored(made.rows)))


BEGINNINGS = {
    "no base": ("DELETE FROM bases", "begins at row 19: the rows before it are missing"),
    "state": ("UPDATE bases SET state = x'00'", "cannot be used: the state was changed"),
    "head": ("UPDATE bases SET head = hex(zeroblob(32))", "broken at row 19: it does not follow"),
    "position": ("UPDATE bases SET position = 17", "cannot be used: the state is that of row 18"),
    "rows": ("DELETE FROM events", "no row follows the base"),
}


@pytest.mark.usefixtures("healthy_machine")
@pytest.mark.parametrize("change", BEGINNINGS)
def test_doctor_checks_the_beginning(run, stored, change: str):
    """A pruned journal is valid with its own base, and not without it."""
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22, 23))
    made.stop()
    folder = stored(made.rows)
    run("journal", "prune", "--before", "30d", "--close-idle")
    url = journal_url(folder)
    assert "ok" == doctor.check_journal(url).status
    statement, says = BEGINNINGS[change]
    with contextlib.closing(sqlite3.connect(folder / "journal.db")) as other, other:
        other.execute(statement)
    found = doctor.check_journal(url)
    assert ("fail", "run `ops verify`") == (found.status, found.advice)
    assert says in found.fact


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"status":"ok","model":"m","fingerprint":"f","journal_position":1}', "ok"),
        (b'{"status":"ok"}', "warn"),
        (b"[1]", "warn"),
        (b"hello", "warn"),
    ],
)
def test_doctor_knows_cairn(body: bytes, status: str):
    """A port that Cairn itself uses is ok; any other server there is reported."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *of: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = doctor.check_port(server.server_port)
        thread.join()
    assert status == found.status
    assert (status == "ok") == ("is in use by Cairn" in found.fact)


@pytest.mark.parametrize("models", [None, Path("models.toml")])
def test_doctor_checks_the_models_to_serve(tmp_path: Path, models: Path | None):
    """The built-in one, or those of a file."""
    names = [name for name, _ in doctor.checks(tmp_path, "sqlite:///x", 8000, models)]
    assert ["model" if models is None else "models"] == [n for n in names if n.startswith("model")]


def test_doctor_compares_a_model_with_the_memory(monkeypatch: pytest.MonkeyPatch):
    """The built-in model fits; on a machine that is smaller than its weights it does not."""
    found = doctor.check_memory(None)
    assert "ok" == found.status
    assert "the weights of pebble take" in found.fact
    monkeypatch.setattr(doctor, "machine_memory", lambda: 1 << 20)
    assert "warn" == doctor.check_memory(None).status


def test_doctor_finds_the_server(tmp_path: Path):
    """By the lock of the data directory; one that does not answer is a warning."""
    assert Found("ok", f"none uses {tmp_path}") == doctor.check_server(tmp_path)
    with hold_directory(tmp_path, "", who="serve") as held:
        assert "warn" == doctor.check_server(tmp_path).status
        held.record_address("http://127.0.0.1:9")
        found = doctor.check_server(tmp_path)
    assert "warn" == found.status
    assert f"the server at http://127.0.0.1:9 (process {os.getpid()})" in found.fact


NEEDS_A_JOURNAL = [
    *("verify", "replay x", "sessions", "explain", "agents", "tail --journal", "export", "journal"),
    *("forget x", "bundle x"),
]


@pytest.mark.parametrize("words", NEEDS_A_JOURNAL)
def test_a_missing_journal(run, tmp_path: Path, words: str):
    """The message says who makes one, and nothing is created."""
    result = run(*words.split(), "--data-dir", tmp_path / "none")
    assert (2, []) == (result.exit_code, list(tmp_path.iterdir()))
    assert "There is no journal at" in result.stderr
    assert "Start the server once" in result.stderr
    assert "migrate" not in result.stderr


def test_doctor_names_all_invalid_tables(tmp_path: Path):
    """In the one line that the check has."""
    path = tmp_path / "models.toml"
    path.write_text('[models.a]\npath = "x"\n[models.b]\n', "utf-8")
    found = doctor.check_models(path)
    assert ("fail", 1) == (found.status, len(found.fact.splitlines()))
    assert ["a", "b"] == re.findall(r", \[models\.(.)\]", found.fact)


def test_doctor_checks_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The built-in model is there, or the check says what is missing and what to do."""
    assert ("ok", "pebble, ") == (doctor.check_model().status, doctor.check_model().fact[:8])
    shutil.copytree(builtin_directory(), tmp_path / "pebble")
    (tmp_path / "pebble" / "model.safetensors").unlink()
    monkeypatch.setattr(doctor, "builtin_directory", lambda: tmp_path / "pebble")
    found = doctor.check_model()
    assert "fail" == found.status
    assert "has no weights" in found.fact
    assert "install Cairn again" in found.advice


def test_doctor_survives_mlx(monkeypatch: pytest.MonkeyPatch):
    """An import that fails, crashes or hangs is a finding."""
    monkeypatch.setattr(doctor, "PROBE", "raise ImportError('no backend')")
    assert ("fail", "ImportError: no backend") == (
        doctor.check_mlx().status,
        doctor.check_mlx().fact,
    )
    monkeypatch.setattr(doctor, "PROBE", "import os; os.abort()")
    assert "crashed with signal 6" == doctor.check_mlx().fact
    monkeypatch.setattr(doctor, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "IMPORT_S", 0.3)
    assert "fail" == doctor.check_mlx().status


def test_sqlite_versions(stored):
    """An old SQLite matters only if a second program could write to the journal."""
    folder = stored(healthy())
    url = journal_url(folder)
    found = doctor.check_sqlite(url, (3, 40, 1))
    assert ("ok", True) == (found.status, found.fact.startswith("3.40.1 (older than 3.51.3: safe"))
    folder.chmod(0o770)
    found = doctor.check_sqlite(url, (3, 40, 1))
    assert ("warn", True) == (found.status, f"other users may write to {folder}" in found.fact)
    assert "SQLite 3.51.3" in found.advice
    assert "ok" == doctor.check_sqlite(url, (3, 51, 3)).status
    assert "ok" == doctor.check_sqlite("postgresql://h/d", (3, 40, 1)).status


MIB = 1024 * 1024
DAY_S = 86_400


@pytest.mark.parametrize(
    ("free", "grown", "status", "says", "grows"),
    [
        (100, Growth(0.0, DAY_S), "fail", "nothing can be journaled", ""),
        (1024, Growth(0.0, DAY_S), "warn", "free some space", ""),
        (4096, Growth(0.0, DAY_S), "ok", "", ""),
        (4096, Growth(2.0 * MIB, 2 * DAY_S), "ok", "", "grows by 1.0 MiB a day"),
        (4096, Growth(200.0 * MIB, DAY_S), "warn", "ops journal prune", "enough for 20 days"),
        # Rows of four minutes say nothing about a day.
        (4096, Growth(200.0 * MIB, 240), "ok", "", "grew by 200.0 MiB in 4 minutes"),
        (4096, Growth(5000.0 * MIB, 7200), "warn", "prune", "in 2 hours: not enough for the same "),
        (4096, Growth(1.0 * MIB, 1), "ok", "", "grew by 1.0 MiB in less than a minute"),
    ],
)
def test_room(free: int, grown: Growth, status: str, says: str, grows: str):
    """Free space is judged against the journal's growth, with what to do."""
    found = doctor.judge_room(free * MIB, grown, "so much free")
    assert status == found.status
    assert says in found.advice
    assert bool(says) == bool(found.advice)
    assert (grows or "so much free") in found.fact


def test_growth(stored):
    """
    Their share of the rows of the last seven days, of the bytes on disk; nothing if there are none.
    """
    assert 0.0 == growth("sqlite:////nowhere/journal.db").size
    now = time.time_ns() // 1000
    rows = [attrs.evolve(row, time_us=now - 10) for row in healthy()]
    old = [attrs.evolve(row, time_us=0) for row in healthy()]
    url = journal_url(stored([*old[:21], *rows[21:]]))
    size = sum(bytes_on_disk(url))
    assert size * 10 / 31 / 7 == pytest.approx(growth(url).daily)


@pytest.mark.parametrize("days", [2.0, 0.5])
def test_growth_of_a_young_journal(stored, days: float):
    """Its growth is measured since its first row; less than a day gives no daily figure."""
    began_us = time.time_ns() // 1000 - int(days * DAY_S * 1e6)
    url = journal_url(stored([attrs.evolve(row, time_us=began_us) for row in healthy()]))
    grown = growth(url)
    assert sum(bytes_on_disk(url)) == grown.size
    assert days * DAY_S == pytest.approx(grown.seconds, rel=0.01)
    assert grown.size / days == pytest.approx(grown.daily, rel=0.01)
    assert (days < 1) == grown.is_short


def test_growth_of_a_pruned_journal(run, stored):
    """Rows that were pruned do not count."""
    folder = stored(healthy())
    run("journal", "prune", "--before", "30d", "--close-idle")
    assert growth(journal_url(folder)).size > 0


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("verfy", "verify"), ("session", "sessions"), ("serv", "serve"), ("jurnal", "journal")],
)
def test_a_misspelt_command(run, typed: str, meant: str):
    """A typing error is reported with the closest command."""
    result = run(typed)
    assert 2 == result.exit_code
    assert f"No such command {typed!r}. Did you mean `ops {meant}`" in result.stderr


def test_an_unknown_command(run):
    """Nothing is suggested that is far from the input; options are suggested as options."""
    result = run("xyzzy")
    assert (2, False) == (result.exit_code, "Did you mean" in result.stderr)
    assert "No such command 'xyzzy'" in result.stderr
    assert "No such option" in run("--serve").stderr


def test_the_reference_is_current():
    """
    docs/reference/cli.md is the output of `python -m cairn.ops.reference`. It runs in its own
    process, because click caches a command's help option on first use.
    """
    path = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    command = [sys.executable, "-P", "-m", "cairn.ops.reference"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert printed.stdout == path.read_text(), (
        "python -m cairn.ops.reference > docs/reference/cli.md"
    )


def test_doctor_and_heads(tmp_path: Path):
    """The key and what is recorded; rows that are lost, and files that are damaged, fail."""
    url = journal_url(tmp_path)
    found = doctor.check_heads(tmp_path, None)
    assert ("ok", "no key yet; the server makes one") == (found.status, found.fact)
    migrate(url)
    with contextlib.closing(SqlStore.open(url)) as store:
        store.append(healthy())
    files = HeadFiles.of(tmp_path, None)
    with head_keeper(files, None, None):
        pass
    found = doctor.check_heads(tmp_path, None)
    assert ("ok", f"checkpoints are signed by {files.public_key()}") == (found.status, found.fact)
    with head_keeper(files, None, None) as keeper:
        keeper.committed(Head(31, healthy()[-1].hash))
    assert "recorded up to row 31; " in doctor.check_heads(tmp_path, None).fact
    with head_keeper(files, None, None) as keeper:
        keeper.committed(Head(40, healthy()[-1].hash))
    found = doctor.check_heads(tmp_path, None)
    assert "rows are lost: it ends at row 31, and had row 40 before" == found.fact
    files.record.write_text("x")
    assert "fail" == doctor.check_heads(tmp_path, None).status
    with head_keeper(files, None, None) as keeper:
        keeper.committed(Head(40, healthy()[-1].hash))
    (tmp_path / "journal.db").unlink()
    assert "the journal is gone; it had row 40" == doctor.check_heads(tmp_path, None).fact
