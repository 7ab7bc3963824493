"""
`ops bench --long`: what two clients say for hours, what is written down, and what it comes to.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import Result

from cairn.journal.rows.codec import Row
from cairn_bench import command
from cairn_bench.long import command as long_command
from cairn_bench.long import report as long_report
from cairn_bench.long import session as long
from cairn_bench.long.chart import chart
from cairn_bench.long.command import budgets, verified
from cairn_bench.long.plan import AGENT, SECOND, Asked, Plan, Talker, agent, second
from cairn_bench.long.record import (
    ANSWERED,
    LEFT,
    Begun,
    Look,
    NoRecord,
    Record,
    Session,
    Turn,
    read,
)
from cairn_bench.long.report import (
    Checked,
    continued,
    drift,
    fullest,
    goals,
    reused,
    told,
    violations,
)
from cairn_bench.long.session import hold, outcome_of, readings, rss_bytes, total
from cairn_bench.servers.processes import Kind, Running
from cairn_conform.client import Client
from cairn_conform.client_answers import Answer
from tests.support.journals import healthy, tampered
from tests.support.processes.subprocess_server import DEADLINE_S
from workshop.bench.tests.fake_completions import Fake, serving

pytestmark = pytest.mark.long

Invoke = Callable[..., Result]

ROOT = Path(__file__).parents[3]
HOLDS = Checked(rows=12, head="ab")
SECONDS = 200.0
TICK_S = 0.25
HISTORY = 600

# A fake in a process of its own, with an empty journal where a server has one.
_SERVE = f"""
import pathlib, sys, time
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.database.schema import migrate
from workshop.bench.tests.fake_completions import Fake, serving
port, data, fault = (*sys.argv[1:], "")[:3]
pathlib.Path(data).mkdir(exist_ok=True)
migrate(journal_url(pathlib.Path(data)))
with serving(Fake(fault, prefill_s=0), port=int(port)):
    time.sleep({10 * DEADLINE_S})
"""


def plan_of(seconds: float = SECONDS, *, salt: str = "salt") -> Plan:
    """A plan without pauses, of short conversations."""
    return Plan(
        salt=salt,
        seconds=seconds,
        every_s=0.0,
        pause_s=0.0,
        look_s=seconds / 10,
        history_tokens=HISTORY,
    )


class Ticking:
    """A clock that advances only when it is read."""

    def __init__(self, begun_s: float = 0.0) -> None:
        self._now_s = begun_s

    def now_s(self) -> float:
        """The time it shows."""
        self._now_s += TICK_S
        return self._now_s


@attrs.frozen
class Timed:
    """A client that takes the times of answers from the fake, and no clock's."""

    client: Client
    fake: Fake

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def ask(self, body: Mapping[str, Any]) -> Answer:
        """An answer, with those times."""
        took_s = self.fake.takes_s()
        answer = self.client.ask(body)
        return attrs.evolve(answer, began_s=0.0, first_s=took_s / 2, ended_s=took_s)


@pytest.fixture(autouse=True)
def _ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "Clock", Ticking)


def record_at(folder: Path, plan: Plan | None = None) -> Record:
    """A new record."""
    return Record.new(folder / "long.jsonl", Begun(plan=plan or plan_of(), model="fake"))


def held(fault: str, folder: Path, *, record: Record | None = None) -> Session:
    """A session with a fake."""
    fake = Fake(fault, prefill_s=0)
    record = record or record_at(folder)
    with serving(fake) as url:
        client: Any = Timed(Client(url, deadline_s=DEADLINE_S), fake)
        server = Running(kind=Kind(name="fake", command=()), client=client, pid=os.getpid())
        hold(server, record, threading.Event(), data=folder)
    return record.session


def verdicts(session: Session, checked: Checked = HOLDS) -> dict[str, bool | None]:
    """The result of each goal."""
    return {goal.name: goal.reached for goal in goals(session, checked)}


def turn_at(at_s: float, **more: Any) -> Turn:
    """An answered turn of the first client."""
    usual: dict[str, Any] = {
        "client": AGENT,
        "conversation": 0,
        "turn": 1,
        "continues": True,
        "thinking": False,
        "among": False,
        "path": "continuation",
        "outcome": ANSWERED,
        "first_s": 0.1,
        "total_s": 0.2,
        "prompt_tokens": 1000,
        "completion_tokens": 30,
    }
    return Turn(at_s=at_s, **{**usual, **more})


def session_of(*lines: Any, seconds: float = SECONDS) -> Session:
    """A made-up session."""
    return Session(begun=Begun(plan=plan_of(seconds), model="made up"), lines=lines)


# --- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [0.03, 0.085, 1.67, 4.0])
def test_a_plan_has_turns_enough(hours: float):
    """
    Of minutes or of hours: a turn begins at least each minute, and there are enough of them for
    several conversations; looks come within each tenth of it.
    """
    plan = Plan.of(hours, "salt")
    assert plan.every_s <= 60
    assert plan.seconds / plan.every_s >= 100
    assert plan.look_s <= plan.seconds / 10


def heard(talker: Talker, turns: int, tokens: Callable[[int], int]) -> list[Asked]:
    """
    The requests of a client that all get an answer.

    Args:
        tokens: the length of the conversation after a turn of that number.
    """
    found = []
    for _ in range(turns):
        found.append(talker.ask())
        talker.hear("an answer", tokens(found[-1].turn))
    return found


def test_histories_are_the_teeth_of_a_saw():
    """
    A conversation continues until it is long enough; the next one begins under the same system
    prompt, with words of its own. In the third one the model thinks.
    """
    asked = heard(agent(plan_of()), 9, lambda turn: 200 * (turn + 1))
    assert [(0, 0), (0, 1), (0, 2), (1, 0)] == [(one.conversation, one.turn) for one in asked[:4]]
    assert [2, 4, 6, 2] == [len(one.messages) for one in asked[:4]]
    assert 1 == len({one.messages[0]["content"] for one in asked})
    assert len(asked) == len({one.messages[-1]["content"] for one in asked})
    assert [False] * 6 + [True] * 3 == [one.thinking for one in asked]
    assert [one.turn > 0 for one in asked] == [one.continues for one in asked]


def test_the_second_client_goes_away_from_one_of_three():
    """It asks something short, and what was cut off is asked again."""
    talker = second(plan_of())
    asked = []
    for _ in range(9):
        asked.append(talker.ask())
        if asked[-1].leaves:
            talker.hear_nothing()
        else:
            talker.hear("an answer", 100)
    assert [False, False, True] * 3 == [one.leaves for one in asked]
    assert asked[2].messages == asked[3].messages
    assert {0, 1} == {one.conversation for one in asked}


def test_a_turn_without_an_answer_is_repeated_a_few_times():
    """The same request, and after three of them a new conversation."""
    talker = agent(plan_of())
    talker.hear("an answer", 100)
    asked = []
    for _ in range(4):
        asked.append(talker.ask())
        talker.hear_nothing()
    assert asked[0].messages == asked[1].messages == asked[2].messages
    assert [(0, 1), (0, 1), (0, 1), (1, 0)] == [(one.conversation, one.turn) for one in asked]


# --- a session with a fake -----------------------------------------------------------------------


def test_a_sound_server_reaches_all_goals(tmp_path: Path):
    """
    Every goal is measured and reached; both clients spoke, some turns were abandoned, conversations
    grew to their length and new ones began.
    """
    session = held("", tmp_path)
    assert dict.fromkeys(verdicts(session), True) == verdicts(session)
    assert {AGENT, SECOND} == {turn.client for turn in session.turns}
    assert {ANSWERED, LEFT} == {turn.outcome for turn in session.turns}
    longest = max(turn.tokens for turn in session.turns)
    assert HISTORY <= longest < 2 * HISTORY
    assert len({turn.conversation for turn in session.turns if turn.client == AGENT}) > 4
    assert all(turn.among for turn in session.turns if turn.client == SECOND)
    assert 10 <= len(session.looks)
    assert session.end is not None
    assert long.OVER == session.end.why


@pytest.mark.parametrize(
    ("fault", "goal"),
    [
        ("some are turned away", "errors"),
        ("streams have no end", "errors"),
        ("an invariant breaks", "violations"),
        ("continuations are lost", "continuations"),
        ("little is reused", "what was there is reused"),
        ("a hit has other words", "answers that are the cold ones"),
        ("KV has no bound", "KV of its budgets"),
        ("it grows slower", "drift of a turn"),
    ],
)
def test_each_fault_misses_its_goal(fault: str, goal: str, tmp_path: Path):
    """
    A server that is broken in one way misses the goal that it is about, and no journal is to blame.
    """
    found = verdicts(held(fault, tmp_path))
    assert False is found[goal]
    others = {name: reached for name, reached in found.items() if name != goal}
    # Where no answer is whole, nothing is there that could have been fast, or be a continuation;
    # where some are turned away, what was to be compared may be among them.
    if fault != "streams have no end":
        assert not [name for name, reached in others.items() if reached is False]


def test_a_server_that_stops_answering_ends_the_session(tmp_path: Path):
    """
    A server that does not answer is not tried for hours: ten errors in a row end the session, each
    of them recorded with its kind.
    """
    with serving(Fake()) as url:
        pass
    record = record_at(tmp_path)
    client = Client(url, deadline_s=DEADLINE_S)
    server = Running(kind=Kind(name="gone", command=(), is_ours=True), client=client)
    hold(server, record, threading.Event(), data=tmp_path)
    first = [turn for turn in record.session.turns if turn.client == AGENT]
    assert (10, {"no connection"}) == (len(first), {turn.outcome for turn in first})
    assert long.NO_ANSWER == getattr(record.session.end, "why", None)
    assert None is record.session.looks[0].violations
    found = verdicts(record.session)
    assert (False, None, None) == (found["errors"], found["violations"], found["KV of its budgets"])


def test_a_session_goes_on_where_it_was_cut_off(tmp_path: Path):
    """
    Held in two pieces, the second from the file alone, the session sends the same requests as in
    one; the resumption is reported, and time continues.
    """
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = held("", tmp_path / "whole")
    path = tmp_path / "cut" / "long.jsonl"
    lines = (tmp_path / "whole" / "long.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:60]) + lines[60][:20])
    record = Record.again(path)
    cut = held("", tmp_path / "cut", record=record)

    def said(session: Session) -> list[object]:
        return [
            (turn.client, turn.conversation, turn.turn, turn.outcome, turn.text)
            for turn in session.turns
        ]

    common = min(len(said(whole)), len(said(cut)))
    assert common > 100
    assert said(whole)[:common] == said(cut)[:common]
    assert 1 == cut.resumed
    assert "resumed 1 times" in told(cut)[0]
    # Those of the second client begin during them.
    times = [turn.at_s for turn in cut.turns if turn.client == AGENT]
    assert sorted(times) == times
    assert cut == read(path.read_bytes(), "it")


# --- what is written down ------------------------------------------------------------------------


def test_a_record_reads_as_it_was_written(tmp_path: Path):
    """
    Every kind of line is read back; a last line that was cut off is removed, and the next line
    takes its place.
    """
    record = record_at(tmp_path)
    record.add(turn_at(1.0, text="ä\n"))
    record.add(Look(at_s=2.0, violations=0))
    with record.path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "tu')
    again = Record.again(record.path)
    assert record.session == again.session
    again.add(turn_at(3.0))
    assert again.session == read(record.path.read_bytes(), "it")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "its first line does not name one"),
        ('{"kind": "look", "at_s": 1}\n', "its first line does not name one"),
        ("[]\n", "line 1 is invalid"),
        ('{"kind": "other"}\n', "line 1 is invalid"),
        ('{"kind": "turn", "at_s": 1}\n', "line 1 is invalid"),
        ("{\n", "line 1 is invalid"),
    ],
)
def test_an_invalid_record_is_refused(lines: str, words: str):
    """A file of something else, or with a line that is none, is named with the line."""
    with pytest.raises(NoRecord, match=f"^it is not a record of a long session: {words}"):
        read(lines.encode(), "it")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(status=200, done=True), ANSWERED),
        (Answer(status=200, done=False), "broken answer"),
        (Answer(status=200, fault="cut"), "broken answer"),
        (Answer(status=200, fault="an error in mid-stream", done=True), "broken answer"),
        (Answer(status=200, fault="late", hung=True), "timeout"),
        (Answer(status=0, fault="refused"), "no connection"),
        (Answer(status=429, error="full"), "status 429"),
    ],
)
def test_errors_have_kinds(answer: Answer, outcome: str):
    """An incomplete answer is reported by its kind, and in words."""
    found, why = outcome_of(answer)
    assert outcome == found
    assert bool(why) == (outcome != ANSWERED)


def test_samples_of_a_scrape_are_summed_over_their_labels():
    """A name matches all of its labels, and no longer name; an invalid sample is skipped."""
    metrics = readings('# HELP a b 3\na{x="1"} 2.0\na{x="2"} 3.0\na_total 7\nnone\na x\n')
    assert (5, 2, 7) == (total(metrics, "a"), total(metrics, 'a{x="1"}'), total(metrics, "a_total"))
    assert None is total(metrics, "b")


def test_memory_of_a_process():
    """It is reported for this process; a missing process has none."""
    assert (rss_bytes(os.getpid()) or 0) > 1 << 20
    assert None is rss_bytes(1 << 30)


# --- what it comes to ----------------------------------------------------------------------------


def aged(late_s: float, **more: Any) -> Session:
    """A session whose turns of the last quarter take that long, the first ones' 0.2 s."""
    early = [turn_at(float(at)) for at in range(1, 20)]
    late = [turn_at(SECONDS - at, total_s=late_s, **more) for at in range(20, -1, -1)]
    return session_of(*early, *late)


def test_drift_is_of_turns_that_are_alike():
    """
    Late turns that take longer are drift; those with a different history, answer length or kind
    have no counterpart, however long they take.
    """
    found = drift(aged(0.3))
    assert found is not None
    assert 0.5 == pytest.approx(found.value)
    assert 0.0 == pytest.approx(found.first_text)
    for more in (
        {"prompt_tokens": 2000},
        {"completion_tokens": 60},
        {"thinking": True},
        {"among": True},
        {"continues": False},
        {"client": SECOND},
        {"outcome": "timeout"},
    ):
        assert None is drift(aged(0.3, **more))


def test_the_nearest_turn_is_the_one_beside():
    """
    Of early turns that are alike, the one with the nearest history counts, so that growth of a
    history is no drift.
    """

    def tooth(begun_s: float) -> list[Turn]:
        return [
            turn_at(begun_s + place, prompt_tokens=300 * place, total_s=0.1 + 0.05 * place)
            for place in range(20)
        ]

    found = drift(session_of(*tooth(1.0), *tooth(SECONDS - 19)))
    assert found is not None
    assert 20 == found.pairs
    assert 0.0 == pytest.approx(found.value)


@pytest.mark.parametrize(("late_s", "reached"), [(0.2, True), (0.209, True), (0.211, False)])
def test_drift_has_a_limit(late_s: float, reached: bool):
    """Less than 5 %."""
    assert reached == verdicts(aged(late_s))["drift of a turn"]


def test_violations_are_counted_over_all_servers():
    """A restarted server counts from zero, and the counts of the previous one remain."""
    looks = [Look(at_s=float(at), violations=n) for at, n in enumerate((1, 2, 0, 1, 1))]
    assert 3 == violations(session_of(*looks))
    assert 0 == violations(session_of(Look(at_s=1.0, violations=0)))
    assert None is violations(session_of(Look(at_s=1.0)))


def test_continuations_are_of_turns_that_continue():
    """
    First turns of conversations do not count, nor do those without an answer; without reported
    paths there is no share.
    """
    turns = [
        turn_at(1.0, continues=False, path="new_session"),
        turn_at(2.0),
        turn_at(3.0, path="new_session"),
        turn_at(4.0, outcome="timeout", path=None),
        turn_at(5.0),
        turn_at(6.0),
    ]
    assert 0.75 == continued(turns)
    assert None is continued([turn_at(1.0, path=None)])
    assert None is continued([])


@pytest.mark.parametrize(("cached", "share"), [(None, None), (0, 0.0), (64, 64 / 872), (960, 1.0)])
def test_reuse_is_of_what_the_turn_before_had(cached: int | None, share: float | None):
    """
    A continuation may reuse nothing. The expected reuse is the prompt of the previous turn, less
    two chunks; a first turn and a new conversation expect none.
    """
    turns = [
        turn_at(0, continues=False, cached_tokens=64),
        turn_at(1, prompt_tokens=1100, cached_tokens=cached),
        turn_at(2, conversation=1, continues=False, cached_tokens=0),
    ]
    assert share == reused(turns)
    assert 1.0 == continued(turns)


def test_budgets_are_by_tier():
    """The peak of each, as a share of its budget; a tier without a budget is not reported."""
    looks = [
        Look(at_s=1.0, slab_bytes=3, slab_bytes_max=4, block_bytes=1, block_bytes_max=2),
        Look(at_s=2.0, slab_bytes=1, slab_bytes_max=4, block_bytes=3, block_bytes_max=2),
        Look(at_s=3.0, disk_bytes=1),
    ]
    assert {"slab_bytes": 0.75, "block_bytes": 1.5} == fullest(looks)
    assert False is verdicts(session_of(*looks))["KV of its budgets"]
    assert None is verdicts(session_of())["KV of its budgets"]


@pytest.mark.parametrize(
    ("checked", "words"),
    [
        (Checked(rows=12, head="ab"), "12 rows verified, head ab"),
        (Checked(rows=12, broken=2, why="INV-8"), "2 broken of 12 rows, first: INV-8"),
        (Checked(rows=None, broken=1, why="no file"), "could not be verified: no file"),
    ],
)
def test_a_journal_that_does_not_hold_is_a_missed_goal(checked: Checked, words: str):
    """A broken and an unreadable journal are both reported, and miss the goal."""
    found = goals(session_of(), checked)[-1]
    assert ("the journal", words, checked.holds) == (found.name, found.value, found.reached)


def test_a_session_of_nothing_has_a_report():
    """One that ended before its first turn has figures and a picture too."""
    ET.fromstring(chart(session_of()))
    assert "is unknown" in told(session_of())[-1]
    json.dumps(long_report.as_json({}, session_of(), HOLDS))


def test_a_chart_has_a_dot_for_each_answered_turn():
    """And a line for each kind of memory that was looked at."""
    looks = [Look(at_s=float(at), rss_bytes=at << 20, slab_bytes=1) for at in (1, 2)]
    picture = ET.fromstring(chart(session_of(turn_at(1.0), turn_at(2.0, outcome=LEFT), *looks)))
    tags = [one.tag.rpartition("}")[2] for one in picture.iter()]
    names = 6
    assert (1 + names, 4) == (tags.count("circle"), tags.count("polyline"))
    lines = [one.get("points", "") for one in picture.iter() if one.tag.endswith("polyline")]
    assert [2, 0, 0, 2] == [len(line.split()) for line in lines]


# --- the journal and the budgets -----------------------------------------------------------------


def test_the_whole_journal_is_verified(stored: Callable[[Sequence[Row]], Path], tmp_path: Path):
    """
    As in `ops verify`: its rows and head if it passes, the first failure if not, and the reason if
    it cannot be read.
    """
    assert Checked(rows=31, head=f"31:{healthy()[-1].hash}") == verified(stored(healthy()))
    nothing = verified(tmp_path / "nowhere")
    assert (None, False) == (nothing.rows, nothing.holds)
    assert "nowhere" in nothing.why


def test_a_changed_journal_is_broken(stored: Callable[[Sequence[Row]], Path]):
    """A row that was changed is named."""
    found = verified(stored(tampered()))
    assert (False, True) == (found.holds, found.broken > 0)
    assert "INV-8 at row 4: the row was changed" == found.why


def test_budgets_follow_from_the_model(tmp_path: Path):
    """
    Space for a few conversations, by the model's configuration; the server's defaults if that does
    not say.
    """
    config = {"num_hidden_layers": 4, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    mib_a_token = 4 * 2 * 8 * 128 * 4 / (1 << 20)
    found = budgets(tmp_path)
    assert ("--pool-mb", "--blocks-mb", "--disk-mb") == found[::2]
    assert [3 * 8192, 3 * 6144, 6 * 6144] == [int(mib) / mib_a_token for mib in found[1::2]]
    for other in ("{}", "[]", "{", '{"num_attention_heads": 0, "num_hidden_layers": 1}'):
        (tmp_path / "config.json").write_text(other, "utf-8")
        assert () == budgets(tmp_path)


# --- the command ---------------------------------------------------------------------------------


def hurry(monkeypatch: pytest.MonkeyPatch, hour_s: float = 100.0) -> None:
    """
    Replaces a plan of hours by one without pauses.

    Args:
        hour_s: so many seconds are an hour of it, on a clock that ticks when it is looked at.
    """
    usual = Plan.of

    def plan(_: type[Plan], hours: float, salt: str) -> Plan:
        # What four hours would need is reckoned with what they would be.
        return usual(hours, salt) if hours == 4 else plan_of(hours * hour_s, salt=salt)

    monkeypatch.setattr(Plan, "of", classmethod(plan))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that were started."""
    found: list[Any] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **named: Any) -> Any:
        found.append(popen(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    return found


@pytest.fixture
def short(
    monkeypatch: pytest.MonkeyPatch, model_directory: Path, tmp_path: Path
) -> Callable[..., list[object]]:
    """
    Puts a fake into the place of the server, and a plan without pauses into that of hours; gives
    the arguments of a session.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

    def put(fault: str = "", *, drift_goal: float = 1e9) -> list[object]:
        def kind() -> Kind:
            return Kind(
                name="cairn",
                command=(sys.executable, "-P", "-c", _SERVE, "{port}", "{data}", fault),
                environment={"PYTHONPATH": path},
                is_ours=True,
            )

        monkeypatch.setattr(command, "ours", kind)
        hurry(monkeypatch)
        # The clock of answers is the machine's here, and it says nothing.
        monkeypatch.setattr(long_report, "DRIFT", drift_goal)
        return ["bench", "--long", "1", "--model", model_directory, "-o", tmp_path / "long"]

    return put


def test_a_session_is_reported(
    run: Invoke, short: Callable[..., list[object]], begun: list[Any], tmp_path: Path
):
    """
    A sentence for each figure, a line for each goal, and what four hours would need; the record,
    the figures and the chart are there, without the machine's paths, and the server has ended.
    """
    result = run(*short(), "--salt", "s")
    assert 0 == result.exit_code, result.output
    lines = result.stdout.splitlines()
    at = lines.index("goal\tvalue\tdue\tverdict")
    named = dict(line.split("\t")[::3] for line in lines[at + 1 :])
    assert {"reached"} == set(named.values())
    assert {"errors", "violations", "continuations", "the journal"} < set(named)
    assert any(line.startswith("4 hours (`ops bench --long 4 -o DIR`) would be") for line in lines)
    assert "--salt s" in result.stderr
    out = tmp_path / "long"
    figures = json.loads((out / "long.json").read_text("utf-8"))
    session = read((out / "long.jsonl").read_bytes(), "it")
    assert len(session.turns) == figures["turns"]
    assert "s" == figures["plan"]["salt"]
    assert str(tmp_path) not in json.dumps(figures)
    ET.fromstring((out / "long.svg").read_text("utf-8"))
    assert [True] == [process.poll() is not None for process in begun]
    assert session.looks[0].rss_bytes


def test_a_missed_goal_ends_with_3(run: Invoke, short: Callable[..., list[object]]):
    """The report is there all the same, and says which."""
    result = run(*short("some are turned away"))
    assert long_command.MISSED == result.exit_code, result.output
    missed = [line for line in result.stdout.splitlines() if line.endswith("\tmissed")]
    assert ["errors"] == [line.split("\t")[0] for line in missed]
    assert "status 503" in missed[0]
    assert "status 503: status 503: 'no room now'" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_report(
    number: signal.Signals,
    run: Invoke,
    short: Callable[..., list[object]],
    begun: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """
    The measurements so far are reported and written, the server has ended, the exit code is the
    signal's, and --resume holds the rest.
    """
    noted = long_command.Progress.__call__

    def signalled(self: Any, turn: Turn) -> None:
        noted(self, turn)
        os.kill(os.getpid(), number)

    arguments = short()
    with monkeypatch.context() as patched:
        patched.setattr(long_command.Progress, "__call__", signalled)
        result = run(*arguments)
    assert 128 + number == result.exit_code, result.output
    assert "Stopping after this turn" in result.stderr
    assert f"({long.STOPPED}): 1 turns" in result.stdout
    assert "the journal\t0 rows verified" in result.stdout
    assert (tmp_path / "long" / "long.json").exists()
    assert None is not begun[-1].poll()
    again = run(*arguments, "--resume")
    assert 0 == again.exit_code, again.output
    assert f"({long.OVER}; resumed 1 times)" in again.stdout


def test_a_second_signal_ends_it_at_once(
    run: Invoke,
    short: Callable[..., list[object]],
    begun: list[Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """Without a report, but not without ending the server."""

    def twice(_: Any, __: Turn) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    arguments = short()
    monkeypatch.setattr(long_command.Progress, "__call__", twice)
    result = run(*arguments)
    assert (128 + signal.SIGTERM, "") == (result.exit_code, result.stdout)
    assert None is not begun[-1].poll()


_HOLD = """
import os, pathlib, sys, time
from cairn_bench.servers.processes import running
from workshop.bench.tests.test_bench import fake_kind
with running(fake_kind("fake"), pathlib.Path("."), pathlib.Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process of another's")
def test_a_server_ends_when_its_parent_is_killed(tmp_path: Path):
    """After SIGKILL no process has time to stop a server, and it ends all the same."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    ) as bench:
        assert bench.stdout is not None
        server = os.pidfd_open(int(bench.stdout.readline()))
        bench.kill()
        ended, _, _ = select.select([server], [], [], DEADLINE_S)
        os.close(server)
    assert [server] == ended


def test_a_record_is_not_written_over(
    run: Invoke, short: Callable[..., list[object]], begun: list[Any]
):
    """
    A folder with a session is refused; with --resume, a complete one is reported again, without a
    server; one with different hours or a different salt is refused, and so is a missing one.
    """
    arguments = short()
    missing = run(*arguments, "--resume")
    assert (2, True) == (missing.exit_code, "Start a session without --resume" in missing.stderr)
    first = run(*arguments)
    assert 0 == first.exit_code, first.output
    refused = run(*arguments)
    assert (2, True) == (refused.exit_code, "already exists" in refused.stderr)
    assert 1 == len(begun)
    again = run(*arguments, "--resume")
    assert (0, first.stdout) == (again.exit_code, again.stdout)
    assert "there is nothing to resume" in again.stderr
    assert 1 == len(begun)
    for more in (("--long", "2"), ("--salt", "another")):
        other = run(*arguments, "--resume", *more)
        assert (2, True) == (other.exit_code, "belongs to a different session" in other.stderr)


def test_what_goes_with_a_long_session(run: Invoke, tmp_path: Path):
    """A folder does, other servers and scenarios do not, and --resume goes with nothing else."""
    for arguments, words in (
        (("--long", "1"), "--long needs -o"),
        (("--long", "nan", "-o", tmp_path), "nan is not a number"),
        (("--long", "inf", "-o", tmp_path), "it must be a number: 0.01 to 168"),
        (("--long", "1", "--quick"), "Omit the options for parts, peers and sizes"),
        (("--long", "1", "--no-peer"), "Omit the options for parts, peers and sizes"),
        (("--resume",), "--resume needs --long"),
    ):
        result = run("bench", *arguments)
        assert (2, True) == (result.exit_code, words in result.stderr), result.output


def test_a_server_that_does_not_start_is_reported(
    run: Invoke, short: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
):
    """Exit code 2, and its last words."""
    arguments = short()
    gone = Kind(name="cairn", command=(sys.executable, "-c", "import sys; sys.exit('no BLAS')"))
    monkeypatch.setattr(command, "ours", lambda: gone)
    result = run(*arguments)
    assert (2, True) == (result.exit_code, "cairn ended with 1: no BLAS" in result.stderr)


# --- the real server -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cairn_holds_a_session(
    run: Invoke, monkeypatch: pytest.MonkeyPatch, model_directory: Path, tmp_path: Path
):
    """
    Our own server: no errors, no violations, continuations, KV within its budgets, and a journal
    that holds; its reuse is reported. Its speed is not checked here.
    """
    hurry(monkeypatch, 30.0)
    monkeypatch.setattr(long_report, "DRIFT", 1e9)
    # A slow machine has two dozen turns in that time: one that was none would miss the goal.
    monkeypatch.setattr(long_report, "CONTINUED", 0.8)
    out = tmp_path / "long"
    result = run("bench", "--long", "1", "--model", model_directory, "-o", out)
    assert 0 == result.exit_code, result.output
    figures = json.loads((out / "long.json").read_text("utf-8"))
    reached = {goal["name"]: goal["reached"] for goal in figures["goals"]}
    names = ("errors", "violations", "continuations", "KV of its budgets", "the journal")
    assert dict.fromkeys(names, True) == {name: reached[name] for name in names}
    assert any(line.endswith("of all prompts' tokens were reused") for line in figures["told"])
