"""`ops bench`: its requests, their order, which results count, and its output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import Result

from cairn.ops.serve import preload
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from cairn.ops.serve.preload import blas_environment
from cairn_bench import command, report
from cairn_bench.chart import chart
from cairn_bench.parts.listed import PARTS, SCENARIOS_PART
from cairn_bench.parts.stage import Measure, Part, Stage
from cairn_bench.plan import planned
from cairn_bench.rows import NoRow, Row
from cairn_bench.runs import Run, hold
from cairn_bench.scenarios import SCENARIOS, Request, Scenario
from cairn_bench.servers import processes as servers
from cairn_bench.servers.asking import NoAnswer, NoResult, Sample, spread
from cairn_bench.servers.processes import DidNotStart, Kind, NeverAtRest, Running, Servers, Settled
from cairn_bench.servers.sizes import DEFAULT, SIZES, Size
from cairn_conform.client import Client
from cairn_conform.client_answers import Answer
from tests.support.processes.subprocess_server import DEADLINE_S
from workshop.bench.tests.fake_completions import Fake, serving

Invoke = Callable[..., Result]

ROOT = Path(__file__).parents[3]
NAMES = [scenario.name for scenario in SCENARIOS]

# A fake in a process of its own: its port, what is broken in it, and the key that it wants.
_SERVE = f"""
import sys, time
from workshop.bench.tests.fake_completions import Fake, serving
port, fault, key = (*sys.argv[1:], "", "")[:3]
with serving(Fake(fault, key=key or None, prefill_s=0), port=int(port)):
    time.sleep({10 * DEADLINE_S})
"""


def scenario_named(name: str) -> Scenario:
    """The scenario of that name."""
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


def asked(scenario: Scenario, salt: str, answer: Answer | None = None) -> list[Request]:
    """All requests of a scenario, each with the same answer."""
    answer = answer or Answer(status=200, text="one two three four")
    steps = scenario.steps(salt)
    found = [next(steps)]
    while True:
        try:
            found.append(steps.send(answer))
        except StopIteration:
            return found


def server_at(url: str, *, is_ours: bool = True) -> Running:
    """A server that runs already."""
    kind = Kind(name="fake", command=(), is_ours=is_ours)
    return Running(kind=kind, client=Client(url, deadline_s=DEADLINE_S))


def held(fake: Fake, name: str = "4 turns", *, is_ours: bool = True) -> Run:
    """A run of a scenario on a fake."""
    with serving(fake) as url:
        return hold(scenario_named(name), server_at(url, is_ours=is_ours), "salt", pause_s=0.0)


def fake_kind(name: str, *broken: str, is_ours: bool = False) -> Kind:
    """
    A fake in its own process.

    Args:
        broken: what is broken in it, and the key that it requires.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return Kind(
        name=name,
        command=(sys.executable, "-P", "-c", _SERVE, "{port}", *broken),
        environment={"PYTHONPATH": path},
        is_ours=is_ours,
    )


# --- what is asked -------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_salt_gives_the_same_requests(scenario: Scenario):
    """Two servers get the same requests, if their answers are equal."""
    assert asked(scenario, "one") == asked(scenario, "one")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_no_run_finds_what_another_left(scenario: Scenario):
    """With another salt, and in another scenario, each conversation begins otherwise."""
    begun = {request.messages[0]["content"] for request in asked(scenario, "one")}
    others = [asked(scenario, "two"), *(asked(o, "one") for o in SCENARIOS if o is not scenario)]
    for other in others:
        for request in other:
            assert request.messages[0]["content"] not in begun
    assert all(text.startswith(f"one {scenario.name} ") for text in begun)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_warm_request_has_an_earlier_one(scenario: Scenario):
    """
    A request is warm if and only if its first message was sent before; there are cold ones too, but
    more that are warm.
    """
    seen: set[str] = set()
    requests = asked(scenario, "one")
    for request in requests:
        first = request.messages[0]["content"]
        assert request.warm == (first in seen)
        seen.add(first)
    warm = sum(request.warm for request in requests)
    assert 0 < len(requests) - warm < warm


def test_edits_take_the_last_turn_back():
    """
    From the fourth turn on, every second request has the history of the one before it and a
    different last message.
    """
    requests = asked(scenario_named("edits"), "one")
    edits = [
        place
        for place, (before, now) in enumerate(pairwise(requests), start=1)
        if len(now.messages) == len(before.messages)
    ]
    assert [3, 5, 7, 9, 11] == edits
    for place in edits:
        before, now = requests[place - 1].messages, requests[place].messages
        assert before[:-1] == now[:-1]
        assert before[-1] != now[-1]


def test_thoughts_do_not_come_back():
    """
    Thoughts are left out of the next request; for a model that does not think, half of its answer
    is.
    """
    scenario = scenario_named("thinking dropped")
    plain = asked(scenario, "one")
    thought = Answer(status=200, text="one two three four", reasoning="Hm.")
    said = [asked(scenario, "one", answer)[1].messages[2]["content"] for answer in (None, thought)]
    assert ["three four", "one two three four"] == said
    assert all(request.thinking for request in plain)


def test_all_servers_have_a_scenario_right_after_one_another():
    """
    The servers take turns by scenario and pause, not one after the other for the whole run; each
    begins as often as the others, give or take one.
    """
    names = ("a", "b", "c")
    steps = list(planned(SCENARIOS, (0.0, 0.5), names))
    rounds = [steps[place : place + 3] for place in range(0, len(steps), 3)]
    assert [(one, pause) for one in SCENARIOS for pause in (0.0, 0.5)] == [
        (turns[0].scenario, turns[0].pause_s) for turns in rounds
    ]
    for turns in rounds:
        assert 1 == len({(step.scenario.name, step.pause_s) for step in turns})
        assert set(names) == {step.server for step in turns}
    begins = [sum(turns[0].server == name for turns in rounds) for name in names]
    assert max(begins) - min(begins) <= 1


def test_the_page_has_every_scenario_and_no_other():
    """
    The table of scenarios describes each, in the order in which they are measured, with the number
    of its requests; those of the mean come first.
    """
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    told = re.findall(r"^\| `([^`]+)` \| .+ \| (\d+) \|$", page, flags=re.M)
    assert [(one.name, str(len(asked(one, "one")))) for one in SCENARIOS] == told
    assert [True] * 7 + [False] * 2 == [one.in_mean for one in SCENARIOS]


def test_the_page_has_every_part_and_no_other():
    """
    The table of parts describes each, in the order in which they are measured, in its own words.
    """
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    parts = page.split("| part | measures |\n")[1].split("\n\n")[0]
    told = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|$", parts, flags=re.M)
    assert [(part.name, part.told) for part in PARTS] == told[1:]
    assert SCENARIOS_PART == told[0][0]


# --- what counts as a result ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_server_gives_a_result(name: str):
    """
    Each scenario on a server whose hits equal its misses: some of the warm answers were compared,
    and what was computed ahead is reported.
    """
    run = held(Fake(prefill_s=0), name)
    assert run.hit_rate is not None
    assert 0 < run.hit_rate < 1
    assert 3 == run.cold_equal
    assert len(asked(scenario_named(name), "one")) == len(run.samples)
    count = len(run.samples)
    assert Settled(computed_tokens=8 * count, used_tokens=4 * count) == run.settled
    assert 0 < run.first_s <= max(sample.total_s for sample in run.samples)


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (Fake("a hit has other words"), "a warm answer differs from the cold one: token 1 of 24"),
        (
            Fake("a hit has other bits"),
            "a warm answer differs from the cold one: the same tokens, but",
        ),
        (Fake(reuses=0), "nothing was reused"),
        (Fake(hides=["cached_tokens"]), "nothing was reused"),
        (Fake(reuses=16), "the cache was hardly hit: 16 of"),
        (Fake(ignores=["cache_prompt"]), "without the cache "),
        (Fake(hides=["logprobs"]), "there are no log-probabilities to compare"),
    ],
    ids=[
        "words",
        "bits",
        "no hit",
        "hits not reported",
        "hardly a hit",
        "no miss",
        "no log-probabilities",
    ],
)
def test_a_run_that_shows_nothing_has_no_result(fake: Fake, words: str):
    """
    A run has no result if the cache was not hit, if a warm answer differs from the cold one, or if
    neither can be determined.
    """
    fake.prefill_s = 0
    with pytest.raises(NoResult, match=words):
        held(fake)


def test_one_hit_of_many_gives_no_result():
    """
    Even if all hits could reuse the same amount, so that only the server can report the size of a
    chunk.
    """

    class Once(Fake):
        """It hits once, and when it is asked for log-probabilities."""

        def cached(self, prompt: list[str], body: Any) -> int:
            found = super().cached(prompt, body)
            return found if self.served < 2 or "logprobs" in body else 0

    with pytest.raises(NoResult, match="the cache was hardly hit: 0 of"):
        held(Once(prefill_s=0), "repeats")


def test_only_a_text_that_was_timed_is_wrong():
    """The answer that was timed counts, not only the ones that are asked for again."""

    class Once(Fake):
        """Its hits are wrong unless a request bypasses the cache."""

        def cached(self, prompt: list[str], body: Any) -> int:
            if "logprobs" in body:
                self.fault = ""
            return super().cached(prompt, body)

    with pytest.raises(NoResult, match="a warm answer differs from the cold one: the text differs"):
        held(Once("a hit has other words", prefill_s=0))


def test_a_peer_need_not_reuse_anything():
    """
    A peer's reuse is not checked: its run counts without a hit, and none of its answers is
    requested again.
    """
    fake = Fake("a hit has other words", reuses=0, prefill_s=0)
    run = held(fake, is_ours=False)
    assert (0.0, None, None) == (run.hit_rate, run.cold_equal, run.settled)
    assert len(run.samples) == fake.served


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (Fake("streams have no end", prefill_s=0), r"the stream ended without \[DONE\]"),
        (Fake(refuses=["seed"], prefill_s=0), "status 400: 'seed is not known here'"),
    ],
    ids=["no end", "refused"],
)
def test_an_incomplete_answer_ends_a_run(fake: Fake, words: str):
    """A stream without its end is not an answer, and neither is a refusal."""
    with pytest.raises(NoAnswer, match=f"fake: {words}"):
        held(fake, is_ours=False)


def test_a_run_ends_when_the_server_is_idle():
    """Our server's work after its answers is done before the next server is measured."""
    fake = Fake(settles=3, prefill_s=0)
    held(fake)
    assert 0 == fake.settling


def test_a_server_that_never_becomes_idle_is_reported(monkeypatch: pytest.MonkeyPatch):
    """The wait for rest has an end."""
    monkeypatch.setattr(servers, "READY_S", 0.0)
    fake = Fake(settles=1000)
    fake.settling = 1000
    with serving(fake) as url, pytest.raises(NeverAtRest, match="fake was not idle"):
        server_at(url).wait_at_rest()


def sample(first_s: float | None, ended_s: float = 9.0, **changes: Any) -> Sample:
    """A warm request whose client began at 1 s."""
    request = Request(messages=(), warm=True)
    told = {"prompt_tokens": 100, "cached_tokens": 64, **changes}
    answer = Answer(status=200, began_s=1.0, first_s=first_s, ended_s=ended_s, **told)
    return Sample(request=request, answer=answer)


def run_of(server: str, *first_s: float, scenario: str = "4 turns", pause_s: float = 0.5) -> Run:
    """A run with a cold request, and warm ones whose first tokens took so long."""
    cold = attrs.evolve(sample(9.0), request=Request(messages=(), warm=False))
    warm = (sample(1.0 + one) for one in first_s)
    return Run(scenario=scenario, server=server, pause_s=pause_s, samples=(cold, *warm))


def test_time_counts_to_the_first_text():
    """
    From the connection to the first text; an answer without any counts to its end. A run has the
    median of its warm requests.
    """
    assert (2.0, 8.0) == (sample(3.0).first_s, sample(3.0).total_s)
    assert 8.0 == sample(None).first_s
    assert 0.25 == run_of("cairn", 0.125, 0.25, 4.0).first_s


def test_a_hit_rate_is_of_tokens():
    """The reused share of the prompts' tokens, over the warm requests that report it."""
    told = (sample(2.0), sample(2.0, prompt_tokens=300, cached_tokens=36))
    silent = sample(2.0, cached_tokens=None)
    run = attrs.evolve(run_of("cairn"), samples=(*told, silent))
    assert 0.25 == run.hit_rate
    assert None is attrs.evolve(run, samples=(silent,)).hit_rate


def test_answers_to_compare_are_spread_over_the_run():
    """
    The first, the last and the middle one; all, where there are fewer; the last, if one is enough.
    """
    samples = [sample(float(place)) for place in range(2, 12)]
    assert [samples[0], samples[4], samples[9]] == list(spread(samples, 3))
    assert samples[:2] == list(spread(samples[:2], 3))
    assert samples[:1] == list(spread(samples[:1], 3))
    assert samples[-1:] == list(spread(samples, 1))


# --- what is told --------------------------------------------------------------------------------


def all_of(server: str, first_s: float, names: Sequence[str] = NAMES) -> list[Run]:
    """A run of each scenario, all as fast."""
    return [run_of(server, first_s, scenario=name) for name in names]


def test_ratios_are_of_the_same_scenario_and_pause():
    """
    Each run of a peer is compared with ours of its scenario and pause; one without is left out.
    """
    mine = [run_of("cairn", 0.125), run_of("cairn", 0.25, pause_s=5.0)]
    theirs = [run_of("mlx-lm", 0.25), run_of("mlx-lm", 0.5, scenario="edits")]
    (found,) = report.ratios([*theirs, *mine], "cairn")
    assert ("4 turns", "mlx-lm", 0.5) == (found.scenario, found.peer, found.pause_s)
    assert (0.5, 0.64, 0.64) == (found.value, found.ours_reused, found.theirs_reused)


def test_the_mean_is_geometric_and_over_what_counts():
    """
    A ratio of a half and one of two are one together. Scenarios outside the mean do not count.
    """
    mine = [
        run_of("cairn", 0.25),
        run_of("cairn", 1.0, scenario="edits"),
        run_of("cairn", 64.0, scenario="batch"),
    ]
    theirs = all_of("mlx-lm", 0.5, ["4 turns", "edits", "batch"])
    (mean,) = report.means(report.ratios([*mine, *theirs], "cairn"))
    assert 1.0 == pytest.approx(mean.value)
    assert (2, False, False) == (mean.scenarios, mean.is_whole, mean.is_missed)
    assert "over 2 of 7 scenarios, so no goal applies" == mean.verdict


@pytest.mark.parametrize(("ours_s", "missed"), [(0.875, False), (0.9375, True)])
def test_a_goal_applies_to_the_whole_mean(ours_s: float, missed: bool):
    """At half a second of pause our time may be 0.9 of the peer's, not more."""
    found = report.ratios([*all_of("cairn", ours_s), *all_of("mlx-lm", 1.0)], "cairn")
    (mean,) = report.means(found)
    assert (missed, True) == (mean.is_missed, mean.is_whole)
    assert mean.verdict.endswith("missed" if missed else "reached")
    assert "the goal is at most 1.1: reached" == mean.worst_verdict


@pytest.mark.parametrize(("worst_s", "missed"), [(1.09375, False), (1.125, True)])
def test_no_scenario_may_be_much_slower(worst_s: float, missed: bool):
    """A goal of its own, beside that of the mean, and of the scenarios that count alone."""
    mine = [*all_of("cairn", 0.5, NAMES[:6]), run_of("cairn", worst_s, scenario=NAMES[6])]
    mine.append(run_of("cairn", 64.0, scenario="batch"))
    (mean,) = report.means(report.ratios([*mine, *all_of("mlx-lm", 1.0)], "cairn"))
    assert (worst_s, NAMES[6], missed) == (mean.worst, mean.worst_scenario, mean.is_missed)
    assert mean.verdict.endswith("reached")
    assert mean.worst_verdict.endswith("missed" if missed else "reached")
    some = report.means(report.ratios([*mine[1:], *all_of("mlx-lm", 1.0)], "cairn"))
    assert [False] == [one.is_missed for one in some]
    assert some[0].worst_verdict.endswith("no goal applies")


def test_figures_are_json():
    """What was measured, on what, and what was lost, for programs."""
    mine = attrs.evolve(run_of("cairn", 0.5), cold_equal=1, settled=Settled(**_AHEAD))
    lost = report.Lost(scenario="edits", server="mlx-lm", pause_s=0.5, why="gone")
    rows, none = [REACHED], [NoRow(name="a step", why="no hit")]
    runs = [mine, run_of("mlx-lm", 1.0)]
    found = report.as_json({"salt": "s"}, runs, [lost], "cairn", rows, none)
    again = json.loads(json.dumps(found))
    assert "s" == again["salt"]
    assert [0.5] == [ratio["ratio"] for ratio in again["ratios"]]
    assert [(0.5, 0.9, "4 turns", 1.1, False)] == [
        tuple(mean[of] for of in ("value", "goal", "worst_scenario", "worst_goal", "applies"))
        for mean in again["means"]
    ]
    assert _AHEAD == again["runs"][0]["settled"]
    assert [False, True] == [request["warm"] for request in again["runs"][0]["requests"]]
    assert "gone" == again["lost"][0]["why"]
    assert ("reached", {"one": 1}) == (again["rows"][0]["verdict"], again["rows"][0]["figures"])
    assert ["no hit"] == [one["why"] for one in again["no_rows"]]


_AHEAD = {"computed_tokens": 128, "used_tokens": 64}


def test_the_machine_is_described_without_its_paths():
    """Versions and processor, and the name of the BLAS, not its path."""
    found = report.machine("/somewhere/libopenblas.so")
    assert "libopenblas.so" == found["blas"]
    assert {"system", "processor", "python", "cairn", "mlx", "mlx-lm"} < set(found)
    assert None is report.machine(None)["blas"]


def test_a_chart_has_a_dot_for_each_warm_request():
    """
    An SVG with the servers' names: of the named scenario, at its longest pause; else of the first.
    """
    shown = [run_of("cairn", 0.5, 0.25), run_of("<mlx> & lm", 1.0)]
    other = [run_of("cairn", 0.5, pause_s=0.0), run_of("cairn", 0.5, scenario="edits")]
    picture = ET.fromstring(chart([*shown, *other], "4 turns"))
    dots = [one for one in picture.iter() if one.tag.endswith("circle")]
    assert 3 + len(shown) == len(dots)
    texts = [one.text for one in picture.iter() if one.tag.endswith("text")]
    assert {"cairn", "<mlx> & lm", "1000 ms", "100"} <= set(texts)
    assert chart(shown, "4 turns") == chart(shown, "not measured")


# --- servers -------------------------------------------------------------------------------------


def test_a_server_ends_with_its_context(tmp_path: Path):
    """It serves within the context, and its process has ended afterwards, even if that fails."""
    begun: list[Any] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **named: Any) -> Any:
        begun.append(popen(*arguments, **named))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocess, "Popen", noted)
        for error in (None, ValueError("no")):
            try:
                with servers.running(fake_kind("fake"), tmp_path, tmp_path / "run") as server:
                    assert None is begun[-1].poll()
                    assert None is not server.client.get("/v1/models")
                    if error is not None:
                        raise error
            except ValueError:
                pass
            assert None is not begun[-1].poll()
    assert 2 == len(begun)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Kind(name="x", command=(sys.executable, "-c", "import sys; sys.exit('no model')")),
            "x ended with 1: no model",
        ),
        (Kind(name="x", command=("/no/such/file",)), "x cannot be started: "),
        (fake_kind("x", "", "secret"), "x does not answer: status 401: 'there is no key'"),
    ],
    ids=["ends", "is not there", "refuses"],
)
def test_what_does_not_start_says_why(kind: Kind, words: str, tmp_path: Path):
    """
    The last words of one that ends before it serves, why it could not be started, or what it says
    to a first request.
    """
    with (
        pytest.raises(DidNotStart, match=words),
        servers.running(kind, tmp_path, tmp_path / "run"),
    ):
        raise AssertionError("it runs")


def test_the_places_are_put_into_a_command():
    """
    The command of each kind names the model, the port and, for ours, the folder for its data; a
    peer on the same footing gets the BLAS that ours gets, and one as installed gets none.
    """
    mine, same = servers.ours(), servers.mlx_lm(same_footing=True)
    as_installed = servers.mlx_lm(same_footing=False)
    assert {"{model}", "{port}", "{data}"} <= set(mine.command)
    assert {"{model}", "{port}"} <= set(same.command)
    assert blas_environment() == same.environment
    own = {KEYS_VARIABLE: None, "CAIRN_CONFIG": os.devnull}
    assert {**blas_environment(), **own} == mine.environment
    assert {"LD_PRELOAD": None} == as_installed.environment
    assert same.name != as_installed.name


def test_an_environment_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch):
    """A set LD_PRELOAD is kept, for all servers that are not as installed."""
    monkeypatch.setenv("LD_PRELOAD", "")
    assert {} == blas_environment()
    assert "LD_PRELOAD" not in servers.environment_with({"LD_PRELOAD": None})
    assert "" == servers.environment_with({})["LD_PRELOAD"]


def test_the_threads_of_the_blas_sleep(monkeypatch: pytest.MonkeyPatch):
    """
    A preloaded OpenBLAS spins only briefly for work, unless the environment sets a different value.
    """
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(preload, "find_blas", lambda: Path("libopenblas.so"))
    monkeypatch.setattr(sys, "platform", "linux")
    found = {"LD_PRELOAD": "libopenblas.so", "OPENBLAS_THREAD_TIMEOUT": "20"}
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    assert found == blas_environment()
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "26")
    assert {**found, "OPENBLAS_THREAD_TIMEOUT": "26"} == blas_environment()


def test_a_server_is_started_once_and_again_when_it_was_ended(tmp_path: Path):
    """Asked for by its name it is the same one, until it is ended; then it is another."""
    with Servers([fake_kind("fake")], tmp_path, tmp_path) as all_of_them:
        first = all_of_them.named("fake")
        assert first is all_of_them.named("fake")
        all_of_them.end("fake")
        assert None is first.client.get("/v1/models")
        again = all_of_them.named("fake")
        assert None is not again.client.get("/v1/models")
    assert None is again.client.get("/v1/models")


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch, model_directory: Path) -> Callable[..., list[object]]:
    """Puts fakes into the place of the servers; gives the arguments of a short run."""

    def put(*fault: str, peer: Sequence[str] = ()) -> list[object]:
        monkeypatch.setattr(command, "ours", lambda: fake_kind("cairn", *fault, is_ours=True))
        monkeypatch.setattr(command, "mlx_lm", lambda **_: fake_kind("mlx-lm", *peer))
        monkeypatch.setattr(command, "QUICK_PAUSES_S", (0.0, 0.5))  # two, so that they take turns
        return ["bench", "--quick", "--scenario", "4 turns", "--model", model_directory]

    return put


@pytest.mark.long
def test_a_run_is_printed_as_a_table(
    run: Invoke, beside: Callable[..., list[object]], tmp_path: Path
):
    """
    A line for each run, the mean, how many answers were compared; figures and a chart, if wanted.
    """
    out = tmp_path / "figures"
    result = run(*beside(), "--salt", "s", "-o", out)
    assert 0 == result.exit_code, result.output
    head, *lines = result.stdout.splitlines()
    assert ["scenario", "pause", "server", "first token", "reused"] == head.split("\t")[:5]
    cells = [line.split("\t") for line in lines[:4]]
    assert [("0 s", "cairn"), ("0 s", "mlx-lm"), ("0.5 s", "mlx-lm"), ("0.5 s", "cairn")] == [
        (one[1], one[2]) for one in cells
    ]
    assert [False, True, True, False] == [bool(one[5]) for one in cells]
    assert "6 warm answers computed again, warm and cold: the same bits" in lines
    assert 4 == sum("over 1 of 7 scenarios, so no goal applies" in line for line in lines)
    assert "--salt s" in result.stderr
    figures = json.loads((out / "figures.json").read_text("utf-8"))
    assert ("s", 4, 2) == (figures["salt"], len(figures["runs"]), len(figures["ratios"]))
    assert str(tmp_path) not in json.dumps(figures)
    ET.fromstring((out / "chart.svg").read_text("utf-8"))


def made_up(*rows: Row, error: Exception | None = None, needs_peer: bool = False) -> Part:
    """A part of one step."""

    def measured(_: Stage) -> Sequence[Row]:
        if error is not None:
            raise error
        return rows

    return Part("bits", "made up", (Measure("a step", measured, needs_peer),))


REACHED = Row(name="a figure", value=0.5, goal=0.8, of="1 / 2", figures={"one": 1})
MISSED = Row(name="another", value=0.9, goal=0.8)


@pytest.mark.parametrize(
    ("parts", "code", "words"),
    [
        ([made_up(REACHED)], 0, "a figure\t0.5\tat most 0.8\treached\t1 / 2"),
        ([made_up(REACHED), made_up(MISSED)], 3, "another\t0.9\tat most 0.8\tmissed"),
        ([made_up(error=NoResult("no hit"))], 1, "no result: a step: no hit"),
        ([made_up(error=DidNotStart("gone")), made_up(MISSED)], 1, "no result: a step: gone"),
        ([made_up(error=NeverAtRest("on and on"))], 1, "no result: a step: on and on"),
        ([made_up(error=NoAnswer("cairn", "status 500"))], 1, "a step: cairn: status 500"),
        ([made_up(error=NoAnswer("mlx-lm", "status 500"))], 0, "a step: mlx-lm: status 500"),
    ],
    ids=["reached", "missed", "no hit", "no start", "no rest", "no answer", "a peer's"],
)
def test_rows_of_other_parts_are_printed(
    parts: list[Part],
    code: int,
    words: str,
    run: Invoke,
    beside: Callable[..., list[object]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """
    Each row is a line. A missing result costs its own rows, and ends the command with 1 unless the
    fault is a peer's; a missed goal ends it with 3.
    """
    monkeypatch.setattr(command, "PARTS", parts)
    arguments = beside()
    del arguments[2:4]  # no scenario
    result = run(*arguments, "--part", "bits", "-o", tmp_path)
    assert code == result.exit_code, result.output
    assert words in result.stdout
    assert "mean" not in result.stdout
    figures = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    rows = sum(step.rows is not None for part in parts for step in part.measures)
    assert rows == len(figures["rows"]) + len(figures["no_rows"])
    assert not (tmp_path / "chart.svg").exists()


def chosen(
    *part_names: str, scenarios: Sequence[str] = (), peer: bool = True, quick: bool = False
) -> dict[str, list[str]]:
    """The names of the chosen parts, each with those of its measures."""
    parts = command.chosen_parts(part_names, scenarios, peer=peer, quick=quick)
    return {part.name: [one.name for one in part.measures] for part in parts}


def test_parts_are_chosen():
    """All of them, unless some are named, or scenarios are; without a peer, what needs none."""
    every = {part.name: [one.name for one in part.measures] for part in PARTS}
    assert every == chosen()
    assert {} == chosen(scenarios=["4 turns"])
    assert {"decode": every["decode"]} == chosen("decode", scenarios=["4 turns"])
    without = chosen(peer=False)
    assert [name for name in every if name != "throughput"] == list(without)
    assert every["prefill"][1:] == without["prefill"]


def test_a_quick_run_measures_less():
    """Some measures are left out, unless their part is named."""
    every, quick = chosen(), chosen(quick=True)
    assert {
        "conversations that fit",
        "conversations in turn",
        "documents, two in any order",
    } == set(chain(*every.values())) - set(chain(*quick.values()))
    assert "capacity" not in quick
    assert {"capacity": every["capacity"]} == chosen("capacity", quick=True)


def test_a_kind_is_started_with_further_options(tmp_path: Path):
    """An additional server is ours with options after its own, and data under its name."""
    started: list[tuple[Kind, Path, Path]] = []

    def start(*how: Any) -> Any:
        started.append(how)

    stage = Stage(
        own=servers.ours(),
        model=tmp_path,
        folder=tmp_path / "apart",
        salt="s",
        quick=True,
        named=start,
        peer=None,
        start=start,
        alone=start,
        quoting=lambda: tmp_path / "quoting",
    )
    stage.apart("other chunks", "--block-tokens", "16")
    stage.apart("null store", kind=servers.unrecorded())
    stage.apart("with drafts", model=stage.quoting())
    (one, model, folder), (other, *_), (_, quoting, _) = started
    assert (tmp_path, tmp_path / "quoting") == (model, quoting)
    assert (*servers.ours().command, "--block-tokens", "16") == one.command
    assert tmp_path / "apart" / "other-chunks" == folder
    assert servers.unrecorded().command == other.command


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("a hit has other bits", "a warm answer differs from the cold one"),
        ("streams have no end", "cairn: the stream ended without [DONE]"),
    ],
)
def test_without_a_result_the_exit_code_is_1(
    fault: str, words: str, run: Invoke, beside: Callable[..., list[object]]
):
    """
    If one of our warm answers differs from the cold one, or is missing, the command ends with a
    sentence, and prints nothing that could be mistaken for a figure.
    """
    result = run(*beside(fault))
    assert (1, "") == (result.exit_code, result.stdout)
    assert f"No result. {'4 turns: ' if 'warm' in words else ''}{words}" in result.stderr


@pytest.mark.long
def test_what_a_peer_does_not_answer_is_lost(run: Invoke, beside: Callable[..., list[object]]):
    """A peer that gives no answer costs its run, not ours: it is reported, and restarted."""
    result = run(*beside(peer=["streams have no end"]))
    assert 0 == result.exit_code, result.output
    lost = [line for line in result.stdout.splitlines() if line.startswith("lost: ")]
    assert ["lost: 4 turns, 0 s: ", "lost: 4 turns, 0.5 s: "] == [
        line.partition("mlx-lm: the stream ended")[0] for line in lost
    ]
    assert "mean" not in result.stdout


def test_a_missed_goal_has_a_code_of_its_own(
    run: Invoke, beside: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
):
    """A goal that applies and is not reached ends with 3; the table is still printed."""
    monkeypatch.setattr(report, "COUNTED", frozenset({"4 turns"}))
    monkeypatch.setattr(report, "GOALS", {0.0: 1e9, 0.5: 1e-9, 5.0: 1.0})
    monkeypatch.setattr(report, "WORST_GOAL", 1e9)
    result = run(*beside())
    assert command.MISSED == result.exit_code, result.output
    verdicts = [line for line in result.stdout.splitlines() if "goal" in line]
    assert ["reached)", "reached)", "missed)", "reached)"] == [
        line.split()[-1] for line in verdicts
    ]


def test_a_server_that_does_not_start_ends_with_2(
    run: Invoke, beside: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
):
    """The reason why a server did not start is shown, and nothing is measured without it."""
    arguments = beside()
    gone = Kind(name="mlx-lm", command=(sys.executable, "-c", "import sys; sys.exit('no BLAS')"))
    monkeypatch.setattr(command, "mlx_lm", lambda **_: gone)
    result = run(*arguments)
    assert (2, "") == (result.exit_code, result.stdout)
    assert "mlx-lm ended with 1: no BLAS" in result.stderr


def test_what_cannot_be_measured_is_a_sentence(run: Invoke, tmp_path: Path):
    """A model that is not there, and llama.cpp's server without the model that its file is of."""
    missing = run("bench", "--model", tmp_path / "none")
    assert (2, True) == (missing.exit_code, "There is no model directory at" in missing.stderr)
    weights = tmp_path / "model.gguf"
    weights.touch()
    unnamed = run("bench", "--llama-server", weights, weights)
    assert (2, True) == (unnamed.exit_code, "--llama-server needs --model" in unnamed.stderr)


@pytest.mark.long
def test_a_size_is_that_of_the_model(
    run: Invoke,
    beside: Callable[..., list[object]],
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """
    A named size is made with random weights; its name is in the figures, so that the run can be
    repeated. It cannot be combined with a model, or with a long session.
    """
    made: list[Size] = []

    def noted(_folder: Path, size: Size, **_: Any) -> Path:
        made.append(size)
        return model_directory

    monkeypatch.setattr(command, "random_model", noted)
    *arguments, option, _ = beside()
    assert "--model" == option
    result = run(*arguments, "--size", "4x1024", "-o", tmp_path)
    assert 0 == result.exit_code, result.output
    figures = json.loads((tmp_path / "figures.json").read_text("utf-8"))
    assert ("4x1024", "random weights, 4 layers of 1024") == (figures["size"], figures["model"])
    assert [SIZES["4x1024"]] == made
    for others in (beside(), ["bench", "--long", "0.085"]):
        refused = run(*others, "--size", "4x1024")
        assert (2, True) == (refused.exit_code, "Omit" in refused.stderr)


def test_a_size_has_the_layers_of_a_real_model():
    """Those of Qwen3-0.6B; and the default."""
    real = SIZES["4x1024"]
    assert (1024, 3072, 16, 8, 128) == (
        real.hidden_size,
        real.intermediate_size,
        real.heads,
        real.kv_heads,
        real.head_dim,
    )
    assert "random weights, 8 layers of 256" == SIZES[DEFAULT].told


def test_a_quick_run_has_no_long_pauses():
    """It leaves out slow scenarios, unless they are named."""
    assert {"20 in turn", "edits", "documents", "batch", "branches"} == set(NAMES) - {
        one.name for one in command.chosen_scenarios((), quick=True)
    }
    assert NAMES == [one.name for one in command.chosen_scenarios((), quick=False)]
    assert ["batch"] == [one.name for one in command.chosen_scenarios(["batch"], quick=True)]
    assert max(command.QUICK_PAUSES_S) < max(command.PAUSES_S)


# --- the real servers ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cairn_is_measured(model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """
    Our own server: the cache is hit, warm answers equal the cold ones, and what was settled is
    reported. Keys that are set for other servers are not used for it.
    """
    monkeypatch.setenv(KEYS_VARIABLE, "alice=alice-has-this-key-0123")
    with servers.running(servers.ours(), model_directory, tmp_path) as server:
        found = hold(scenario_named("4 turns"), server, "salt", pause_s=0.0)
    assert 3 == found.cold_equal
    # How much that is goes by how busy the machine is.
    assert found.settled is not None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_journal_that_is_written_nowhere(model_directory: Path, tmp_path: Path):
    """The server of the bench answers as ours does, and leaves no journal."""
    with servers.running(servers.unrecorded(), model_directory, tmp_path) as server:
        found = hold(scenario_named("4 turns"), server, "salt", pause_s=0.0)
        assert server.data is not None
        assert not (server.data / "journal.db").exists()
    assert 3 == found.cold_equal


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", [servers.ours, servers.unrecorded])
def test_both_have_one_heap(
    kind: Callable[[], Kind], model_directory: Path, tmp_path: Path
) -> None:
    """
    The two servers differ in where rows go, and in nothing else: their threads share one heap.
    """
    with servers.running(kind(), model_directory, tmp_path) as server:
        assert server.pid is not None
        assert 0 == heaps_of_threads(server.pid)


def heaps_of_threads(pid: int) -> int:
    """For each, glibc reserves 64 MiB, aligned to that, of which the beginning is writable."""
    size, places = 64 << 20, []
    for line in Path(f"/proc/{pid}/maps").read_text("utf-8").splitlines():
        addresses, may, *others = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        places.append((start, end, may, len(others)))
    return sum(
        (start % size, end, may, others) == (0, left, "rw-p", 3)
        and (behind, then) == (start + size, "---p")
        for (start, end, may, others), (left, behind, then, _) in pairwise(places)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_peer_is_measured(model_directory: Path, tmp_path: Path):
    """mlx-lm's server answers the same requests; if it reports reused tokens, there are some."""
    kind = servers.mlx_lm(same_footing=True)
    with servers.running(kind, model_directory, tmp_path) as server:
        found = hold(scenario_named("4 turns"), server, "salt", pause_s=0.0)
    assert 4 == len(found.samples)
    assert found.hit_rate
