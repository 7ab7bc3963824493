"""`ops tail` shows the selected lines of the log or the events, and where to continue."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cairn.journal import events as ev
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import node_url
from cairn.journal.rows.export import to_line
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.journal.tail import Log, show_pretty
from tests.ops.test_commands import on_a_terminal
from tests.support.journals import FINGERPRINT, TENANT, Builder, healthy
from tests.support.processes.postgres import Postgres

LINES = [
    {
        "timestamp": f"2026-01-01T00:00:{second:02d}.000000Z",
        "level": "warning" if second % 10 == 0 else "info",
        "event": f"step {second}",
        "session": f"session-{second % 2}",
        "tokens": second,
    }
    for second in range(30)
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of thirty lines."""
    path = tmp_path / "data" / "logs" / "cairn.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def shown(result) -> list[dict]:
    """The objects on stdout."""
    assert 0 == result.exit_code
    return [json.loads(line) for line in result.stdout.split("\n")[:-1]]


def test_the_last_lines(run, log: Path):
    """Ten by default, or the requested number, and the cursor on stderr."""
    assert LINES[-10:] == shown(run("tail"))
    assert LINES[-3:] == shown(run("tail", "-n", 3))
    assert f"cursor: {log.stat().st_size}\n" == run("tail").stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("level=warning",), [0, 10, 20]),
        (("tokens=7",), [7]),
        (("--session", "session-1", "-n", "2"), [27, 29]),
        (("--grep", r"step 2[89]"), [28, 29]),
        (("--since", "2026-01-01T00:00:26Z"), [26, 27, 28, 29]),
        (("--since", "1h"), []),
        (("level=warning", "session=session-1"), []),
    ],
)
def test_what_is_asked_for(run, log: Path, arguments, expected):
    """Filters go together."""
    assert [LINES[index] for index in expected] == shown(run("tail", *arguments))


def test_going_on(run, log: Path):
    """After a cursor come the lines not yet shown; an unfinished one waits."""
    cursor = run("tail").stderr.split()[1]
    assert [] == shown(run("tail", "--after", cursor))
    with log.open("a") as file:
        file.write('{"event": "more"}\n{"event": "half')
    result = run("tail", "--after", cursor)
    assert [{"event": "more"}] == shown(result)
    with log.open("a") as file:
        file.write(' a line"}\n')
    assert [{"event": "half a line"}] == shown(run("tail", "--after", result.stderr.split()[1]))


def test_a_line_that_is_not_ours(run, log: Path):
    """A line that is no JSON is shown as it is."""
    log.write_text("Segmentation fault\n")
    assert "Segmentation fault\n" == run("tail").stdout


def test_events(run, stored):
    """The events with the fields of their payload, without texts and token ids."""
    stored(healthy())
    events = shown(run("tail", "--journal", "kind=path_selected", "path=continuation"))
    assert [19] == [event["position"] for event in events]
    result = run("tail", "--journal", "--after", 29)
    assert [30, 31] == [event["position"] for event in shown(result)]
    assert "cursor: 31\n" == result.stderr
    assert [30, 31] == [event["position"] for event in shown(run("tail", "--journal", "-n", 2))]
    assert 31 == len(shown(run("tail", "--journal", "-n", 99)))
    (event,) = shown(run("tail", "--journal", "position=12"))
    assert event["private"] is None
    (event,) = shown(run("tail", "--journal", "--private", "position=12"))
    assert {"ids": [21], "text": "a "} == event["private"]


def test_the_journal_of_a_node(run, postgres: Postgres, tmp_path: Path):
    """By the options of the other commands; a filter after --journal is no journal."""
    url = postgres.new_database()
    migrate(node_url(url, "n1"))
    with closing(SqlStore.open(node_url(url, "n1"))) as store:
        store.append(healthy())
    for arguments in (
        ("--node", "n1", "--journal", url),
        ("--journal", url, "--node", "n1"),
        ("--url", url, "--node", "n1"),
        ("--journal", node_url(url, "n1")),
        ("--journal", "--url", node_url(url, "n1")),
    ):
        result = run("tail", *arguments, "position=31")
        assert [31] == [event["position"] for event in shown(result)], result.output
    for arguments, words in (
        (("--node", "n1"), "needs the PostgreSQL database of the fleet"),
        (("--node", "n1", "--journal", "position=31"), "needs the PostgreSQL database"),
        (("--journal", url, "--url", url), "name two journals"),
        (("--journal", str(tmp_path / "none.db")), "There is no journal at"),
    ):
        refused = run("tail", *arguments)
        assert (2, True) == (refused.exit_code, words in refused.stderr), refused.output


def test_a_kind_of_the_log(run, log: Path):
    """No line of the log has one, so the message says where to find it."""
    result = run("tail", "kind=path_selected")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "add --journal" in result.stderr


def test_an_unknown_kind(run, stored):
    """No event will ever have it, so the message says that."""
    stored(healthy())
    result = run("tail", "--journal", "kind=nonsense")
    assert (2, "") == (result.exit_code, result.stdout)
    assert "there is no kind nonsense; the kinds are server_started, " in result.stderr
    result = run("tail", "--journal", "kind=path_selectd")
    assert "there is no kind path_selectd; did you mean path_selected?\n" in result.stderr


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("knd=path_selected", "no event has a field knd; did you mean kind?"),
        ("xyzzy=1", "no event has a field xyzzy.\n"),
        ("payload=1", "no event has a field payload.\n"),
        ("ids=1", "ids is private (texts or token ids), so events cannot be filtered by it; "),
    ],
)
def test_a_field_that_no_event_has(run, stored, value: str, message: str):
    """Otherwise it would wait forever, in silence."""
    stored(healthy())
    result = run("tail", "--journal", value)
    assert (2, "") == (result.exit_code, result.stdout)
    assert message in result.stderr


def test_every_field_of_an_event_can_be_filtered_by(run, stored):
    """Those of the line, and those of what happened."""
    stored(healthy())
    events = shown(run("tail", "--journal", "-n", 31))
    names = {name for event in events for name in (*event, *event["payload"])}
    for name in names - {"payload", "private", "kind"}:
        assert 0 == run("tail", "--journal", f"{name}=").exit_code


def test_an_id_as_a_terminal_shows_it(run, stored):
    """Its first eight digits are enough; any other beginning of a value is not."""
    whole = "3f2a1b4c-0000-4000-8000-000000000001"
    made = Builder()
    made.propose(
        ev.SessionOpened(
            session=whole, tenant=TENANT, fingerprint=FINGERPRINT, group=None, named=False
        )
    )
    stored(made.rows)
    for given, count in ((whole, 1), ("3f2a1b4c", 1), ("3f2a1b", 0)):
        assert count == len(shown(run("tail", "--journal", f"session={given}")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch=1",), "No entry of the log that was read has a field nosuch.\n"),
        (("tokns=1",), "No entry of the log that was read has a field tokns; did you mean tokens?"),
        (("--session", "nosuch"), "The log that was read has no session nosuch; "),
        (("tokens=99",), ""),
        (("--session", "session-1", "tokens=2"), ""),
        (("--grep", "nosuch"), ""),
    ],
)
def test_nothing_was_found_in_the_log(run, log: Path, arguments, message: str):
    """
    Misspelt names are distinguished from events that did not happen; otherwise it prints nothing.
    """
    result = run("tail", *arguments)
    cursor = f"cursor: {log.stat().st_size}\n"
    assert (0, "") == (result.exit_code, result.stdout)
    assert result.stderr.startswith(message) if message else cursor == result.stderr
    assert result.stderr.endswith(cursor)
    log.write_text("")
    assert "cursor: 0\n" == run("tail", *arguments).stderr


def test_nothing_was_found_in_the_journal(run, stored):
    """The same of events; a field that other journals have is none that is misspelt."""
    stored(healthy())
    message = run("tail", "--journal", "--session", "nosuch").stderr
    assert message.startswith("The journal that was read has no session nosuch; ")
    message = run("tail", "--journal", "bug_id=1").stderr
    assert message.startswith("No entry of the journal that was read has a field bug_id.\n")
    assert "cursor: 31\n" == run("tail", "--journal", "--session", "s1", "position=1").stderr


def test_a_cursor_beyond_the_end(run, stored, log: Path):
    """It is from a different or an older log: the message says so, and where it continues."""
    result = run("tail", "--after", 99999999)
    assert LINES == shown(result)
    assert result.stderr.startswith(
        f"The log has only {log.stat().st_size} bytes, and the cursor is 99999999: "
    )
    stored(healthy())
    result = run("tail", "--journal", "--after", 99999999)
    assert [] == shown(result)
    words = "There is no event 99999999: the journal ends at 31. Continuing after that.\n"
    assert f"{words}cursor: 31\n" == result.stderr
    assert "cursor: 31\n" == run("tail", "--journal", "--after", 31).stderr


def test_nothing_steers_a_terminal(capsys: pytest.CaptureFixture[str], log: Path):
    """Values from a client are shown with their control characters escaped."""
    log.write_text('{"event": "a\\u001b[2Jb", "model": "c\\nd\\u009be"}\n')
    (entry,) = Log(log, 0).read()
    show_pretty(entry)
    assert capsys.readouterr().out.endswith("a\\x1b[2Jb model=c\\nd\\x9be\n")


@pytest.mark.parametrize(
    ("session", "shown_as"),
    [
        ("first day", "first day"),
        ("6acffc27-5d0e-4a0b-8f5c-0d4b3f6a9c11", "6acffc27"),
        ("@alice/54008dbd-5d0e-4a0b-8f5c-0d4b3f6a9c11", "@alice/54008dbd"),
    ],
)
def test_only_uuids_are_cut(
    capsys: pytest.CaptureFixture[str], log: Path, session: str, shown_as: str
):
    """A terminal shows the same short session as `ops sessions`, and a client's name whole."""
    log.write_text(json.dumps({"event": "settled", "session": session}) + "\n")
    (entry,) = Log(log, 0).read()
    show_pretty(entry)
    assert capsys.readouterr().out.endswith(f" settled session={shown_as}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--since", "soon"),
        ("--since", "999999999d"),
        ("--grep", "("),
        ("novalue",),
        ("--journal",),
        (),
    ],
)
def test_what_makes_no_sense(run, arguments):
    """Exit code 2, and nothing on stdout."""
    result = run("tail", *arguments)
    assert (2, "") == (result.exit_code, result.stdout)


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("text", ["soon", "999999999d", "0001-01-01T00:00+14:00"])
def test_an_invalid_time(run, text: str):
    """What is no time, or beyond all calendars in UTC, is named."""
    result = run("tail", "--since", text)
    assert (2, "") == (result.exit_code, result.stdout)
    assert f"{text} is not a time; write 10m or " in result.stderr


def test_following(log: Path):
    """New lines are shown as they come, also of a new file, and Ctrl-C ends it in order."""
    command = [sys.executable, "-P", "-m", "cairn.ops", "tail", "-f", "-n", "1", "level=info"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(log.parent.parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert LINES[-1] == json.loads(process.stdout.readline())
    with log.open("a") as file:
        file.write('{"level": "debug"}\n{"level": "info", "event": "new"}\n')
    assert {"level": "info", "event": "new"} == json.loads(process.stdout.readline())
    log.rename(log.with_suffix(".1"))
    log.write_text('{"level": "info", "event": "newer"}\n')
    assert {"level": "info", "event": "newer"} == json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (0, "", f"cursor: {log.stat().st_size}\n") == (process.returncode, stdout, stderr)


def test_decoding_is_folded_on_a_terminal(stored):
    """The rows of an answer's decoding are one line with their tokens; --all shows each."""
    built = Builder()
    built.start()
    built.turn("s1", "r1", ["Hello"], range(1, 9), (20, 21, 22))
    folder = stored(built.rows)
    events = [json.loads(to_line(row)) for row in built.rows]
    steps = [one["payload"] for one in events if one["payload"].get("step") == "decode"]
    tokens = sum(one["end"] - one["start"] for one in steps)
    options = ("tail", "--journal", "-n", "100", "--data-dir", folder)
    folded = on_a_terminal(200, *options)
    (line,) = [line for line in folded if "decoded" in line]
    assert f"decoded {tokens} tokens in 0 ms" in line
    assert "r1" in line
    assert not [line for line in folded if "decode" in line and "cache_extended" in line]
    every = on_a_terminal(200, *options, "--all")
    assert len(steps) == sum("decode" in line and "cache_extended" in line for line in every) > 0
    assert not [line for line in every if "decoded" in line]


def test_decoding_that_goes_on_is_shown_at_the_end(stored):
    """A journal that ends in the middle of an answer shows what was decoded until then."""
    built = Builder()
    built.start()
    built.turn("s1", "r1", ["Hello"], range(1, 9), (20, 21, 22))
    kinds = [json.loads(to_line(row))["payload"].get("step") for row in built.rows]
    folder = stored(built.rows[: kinds.index("decode") + 1])
    last = on_a_terminal(200, "tail", "--journal", "-n", "5", "--data-dir", folder)[-1]
    assert "decoded 2 tokens" in last
