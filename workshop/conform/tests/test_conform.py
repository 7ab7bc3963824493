"""
`ops conform`: passes sound servers, fails broken ones, and is fair to those that report little.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from cairn.ops.serve.api_keys import KEY_VARIABLE
from cairn_conform import case as conform_case
from cairn_conform.case import Case
from cairn_conform.client_answers import Answer, Streamed, Token, difference, whole
from cairn_conform.suite import ROWS
from tests.support.processes.subprocess_server import DEADLINE_S, started
from workshop.bench.tests.fake_completions import Fake, serving

Run = Callable[..., Result]
Meeting = Callable[[Fake], Fake]

_ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + '/restart').read()"

#: The faults of the fake, and the row that has to find each.
FAULTS = [
    ("hit-equals-miss", "a hit has other bits", "log-probabilities differ by at most 1e-12"),
    ("hit-equals-miss", "a hit has other words", "asked again: token 1 of 24"),
    ("shared-beginning", "a hit of a part has other words", "whose beginning was cached: token 1"),
    ("other-traffic", "the last conversation leaks", "after other conversations: token 1"),
    ("other-traffic", "neighbours change bits", "among other conversations: the same tokens, but"),
    ("turn-by-turn", "conversations go astray", "turn 3, compared with all at once: token 1"),
    ("exact-repeat", "nothing is left to compute", "the prompt with its answer, "),
    ("streaming", "the last piece is lost", "plain: streamed, compared with whole: the text"),
    ("streaming", "streams have other bits", "plain: streamed, compared with whole: the same tok"),
    ("streaming", "streams have no end", "plain: the stream ended without [DONE]"),
    ("streaming", "no stream is given", "plain: a stream was requested, and the answer was n"),
    ("seeds", "no seed holds", "seed 7 again: token 1 of 24"),
    ("seeds", "seeds are not looked at", "3 other seeds give the same answer"),
    ("limits", "one token too many", "max_tokens 1: 2 tokens"),
    ("limits", "stop is not looked at", "it is in the answer"),
    ("limits", "stop is sent", "it is in the answer"),
    ("limits", "the reason is always stop", "finish_reason is"),
    ("token-accounts", "the total is off", "first: total_tokens is"),
    (
        "token-accounts",
        "streams count otherwise",
        "the same prompt has different numbers of tokens",
    ),
    ("token-accounts", "more is cached than asked", "again: cached_tokens is"),
    ("token-accounts", "completions are miscounted", "first: completion_tokens is 25"),
    ("restart", "a restart changes words", "asked after the restart: token 1"),
    ("disconnect", "who leaves changes words", "after a client disconnected"),
    ("disconnect", "who leaves ends service", "got no answer: status 500"),
    ("disconnect", "who leaves turns others away", "was refused, and was answered before"),
    (
        "cut-off-prefill",
        "half a prefill is reused",
        "abandoned prompt, compared with a miss: token 1",
    ),
    ("odd-prompts", "fails at white space", "empty: status 500"),
    ("odd-prompts", "hangs at a long word", "a very long word: no answer within"),
    ("odd-prompts", "closes at a surrogate", "a lone surrogate: the connection was closed"),
    ("odd-prompts", "special tokens end service", "special tokens: the server stopped answering"),
    ("bad-bodies", "fails at broken JSON", "JSON that is cut off: status 500"),
    ("bad-bodies", "takes unknown roles", "an unknown role: answered"),
    ("bad-bodies", "refuses without an envelope", "refusals are not OpenAI's"),
    ("bad-bodies", "bad bodies end service", "the server stopped answering after it"),
]


def restart_of(url: str) -> str:
    """The command by which a fake is restarted."""
    return shlex.join([sys.executable, "-c", _ASK, url])


def report(result: Result) -> dict[str, Any]:
    """The rows of a report in JSON, by name."""
    return {row["row"]: row for row in json.loads(result.stdout)["rows"]}


def verdicts(rows: dict[str, Any]) -> dict[str, str]:
    """Their verdicts."""
    return {name: row["verdict"] for name, row in rows.items()}


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    """Makes concurrent requests overlap in a fake, however fast it is."""

    def met(fake: Fake) -> Fake:
        together = Case.together

        def at_once(case: Case, calls: Sequence[Callable[[], Any]]) -> list[Any]:
            with fake.gathering(len(calls)):
                return together(case, calls)

        monkeypatch.setattr(Case, "together", at_once)
        return fake

    return met


# --- sound servers and broken ones ---------------------------------------------------------------


def test_a_sound_server_passes_every_row(run: Run, meeting: Meeting):
    """A sound server passes every row, and the command ends with 0."""
    with serving(meeting(Fake(prefill_s=0.1))) as url:
        result = run("conform", url, "--json", "--restart", restart_of(url))
    rows = report(result)
    assert dict.fromkeys(ROWS, "passed") == verdicts(rows), result.stdout
    assert 0 == result.exit_code
    assert [] == [row["failures"] or row["not_tested"] for row in rows.values() if row["failures"]]


LONG = ("neighbours change bits", "hangs at a long word")
"""Faults that take ten seconds each."""


@pytest.mark.parametrize(
    ("row", "fault", "words"),
    [pytest.param(*one, marks=[pytest.mark.long] * (one[1] in LONG), id=one[1]) for one in FAULTS],
)
def test_a_row_finds_its_fault(row: str, fault: str, words: str, run: Run, meeting: Meeting):
    """The row for a fault fails, and says what it saw."""
    # Long enough for a client to disconnect in the middle of it.
    prefill_s = 0.3 if row in ("disconnect", "cut-off-prefill") else 0.01
    with serving(meeting(Fake(fault, prefill_s=prefill_s))) as url:
        options = ("--json", "--row", row, "--deadline", 10, "--restart", restart_of(url))
        result = run("conform", url, *options)
    rows = report(result)
    assert {row: "failed"} == verdicts(rows), result.stdout
    assert any(words in text for text in rows[row]["failures"]), rows[row]["failures"]
    assert 1 == result.exit_code


def test_every_row_has_a_fault():
    """Each row has a fault that breaks it."""
    assert list(ROWS) == list(dict.fromkeys(row for row, _, _ in FAULTS))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cairn_passes_every_row(run: Run, model_directory: Path, tmp_path: Path):
    """Cairn's own server passes every row, across a restart too."""
    data = tmp_path / "served"
    over = threading.Event()
    with contextlib.ExitStack() as running, socket.create_server(("127.0.0.1", 0)) as bell:
        server = running.enter_context(started(data, "--model", model_directory))
        port = server.address[1]

        def restart() -> None:
            visitor, _ = bell.accept()
            with visitor:
                server.stop()
                again = started(data, "--model", model_directory, "--port", port)
                running.enter_context(again)
            over.wait(DEADLINE_S * 10)  # a server dies with the thread that started it

        thread = threading.Thread(target=restart, daemon=True)
        thread.start()
        ring = f"import socket; socket.create_connection({bell.getsockname()!r}).recv(1)"
        command = shlex.join([sys.executable, "-c", ring])
        options = ("--json", "--words", 60, "--salt", "cairn", "--restart", command)
        result = run("conform", server.url, *options)
        over.set()
        thread.join(DEADLINE_S)
    rows = report(result)
    assert dict.fromkeys(ROWS, "passed") == verdicts(rows), result.stdout
    assert 0 == result.exit_code


# --- fairness ------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_is_not_reported_is_not_counted_against_a_server(run: Run, meeting: Meeting):
    """
    A server that reports neither log-probabilities nor usage fails no row; its texts are compared,
    and the rows say what was not reported.
    """
    with serving(meeting(Fake(hides=["logprobs", "usage"], prefill_s=0.1))) as url:
        result = run("conform", url, "--json", "--restart", restart_of(url))
    rows = report(result)
    expected = {**dict.fromkeys(ROWS, "passed"), "token-accounts": "skipped"}
    assert expected == verdicts(rows), result.stdout
    assert 0 == result.exit_code
    assert ["usage is not reported"] == rows["token-accounts"]["not_tested"]
    seen = " ".join(rows["hit-equals-miss"]["seen"])
    assert "texts of" in seen
    assert "(log-probabilities: not reported)" in seen
    assert "cached: not reported" in seen


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("hit-equals-miss", "a hit has other words"),
        ("turn-by-turn", "conversations go astray"),
        ("streaming", "the last piece is lost"),
        ("limits", "stop is not looked at"),
        ("cut-off-prefill", "half a prefill is reused"),
    ],
)
def test_texts_alone_show_a_fault(row: str, fault: str, run: Run):
    """A fault that changes texts is seen even if a server reports nothing but texts."""
    prefill_s = 0.3 if row == "cut-off-prefill" else 0.01
    with serving(Fake(fault, hides=["logprobs", "usage"], prefill_s=prefill_s)) as url:
        rows = report(run("conform", url, "--json", "--row", row))
    assert {row: "failed"} == verdicts(rows)


@pytest.mark.long
def test_what_is_refused_is_not_tested(run: Run, meeting: Meeting):
    """If a server refuses unknown fields, requests leave them out where possible."""
    refuses = ["logprobs", "seed", "cache_prompt", "stream_options"]
    with serving(meeting(Fake(refuses=refuses, prefill_s=0.1))) as url:
        rows = report(run("conform", url, "--json", "--restart", restart_of(url)))
    assert {**dict.fromkeys(ROWS, "passed"), "seeds": "skipped"} == verdicts(rows)
    assert ["a request with a seed was refused: status 400: 'seed is not known here'"] == rows[
        "seeds"
    ]["not_tested"]


def test_stop_texts_are_sent_as_the_server_accepts_them(run: Run):
    """
    A server that accepts stop texts only in a list gets them in one, and its handling is checked;
    the row says that a single one was refused.
    """
    for fault, verdict in (("", "passed"), ("stop is not looked at", "failed")):
        with serving(Fake(fault, lists_stops=True)) as url:
            options = ("--row", "streaming", "--row", "limits")
            rows = report(run("conform", url, "--json", *options))
        assert {"streaming": "passed", "limits": verdict} == verdicts(rows)
        refused = "a single stop text is refused (status 400: 'stop is of another type'), so it"
        assert any(refused in text for text in rows["limits"]["seen"])


def test_the_type_of_an_unknown_field_is_not_tested(run: Run):
    """
    The type of `logprobs` is not tested on a server that ignores the field, and the row says so; it
    is tested on one that reports log-probabilities.
    """
    found = {}
    for reported, ignores in ((True, ()), (False, ("logprobs",))):
        with serving(Fake(ignores=ignores)) as url:
            rows = report(run("conform", url, "--json", "--row", "bad-bodies"))
        assert {"bad-bodies": "passed"} == verdicts(rows)
        found[reported] = rows["bad-bodies"]["seen"]
    left_out = "logprobs that is a text: not tested, since log-probabilities are not reported"
    assert [False, True] == [left_out in found[reported] for reported in (True, False)]
    assert ["refused: 25 of 25", "refused: 24 of 24"] == [
        next(line for line in found[reported] if line.startswith("refused"))
        for reported in (True, False)
    ]


@pytest.mark.parametrize("reuses", [0, 8])
def test_without_a_cache_hits_are_not_tested(reuses: int, run: Run):
    """
    If nothing is reused, or only the beginning of the template, the rows about hits are not tested,
    and say why.
    """
    with serving(Fake(reuses=reuses)) as url:
        options = ("--row", "hit-equals-miss", "--row", "shared-beginning")
        result = run("conform", url, "--json", *options)
    rows = report(result)
    assert {"hit-equals-miss": "skipped", "shared-beginning": "skipped"} == verdicts(rows)
    assert "no request reused much of the prompt" in rows["hit-equals-miss"]["not_tested"][0]
    assert "hardly any of the beginning" in rows["shared-beginning"]["not_tested"][0]
    assert 0 == result.exit_code


def test_without_a_miss_hits_are_not_tested(run: Run):
    """
    If all of a prompt was in the cache before the request, and the cache cannot be bypassed, the
    row says so.
    """
    options = ("--json", "--row", "hit-equals-miss", "--salt", "again")
    with serving(Fake(ignores=["cache_prompt"])) as url:
        first, second = (report(run("conform", url, *options)) for _ in range(2))
    assert {"hit-equals-miss": "passed"} == verdicts(first)
    assert {"hit-equals-miss": "skipped"} == verdicts(second)
    assert (
        "it was sent before (choose another --salt)" in second["hit-equals-miss"]["not_tested"][0]
    )


def test_a_server_may_report_hits_only(run: Run):
    """
    Some servers omit `cached_tokens` if nothing was reused. That is a miss, once they have reported
    a hit.
    """
    rows = ("hit-equals-miss", "shared-beginning")
    with serving(Fake(hides=["misses"])) as url:
        found = report(run("conform", url, "--json", "--row", rows[0], "--row", rows[1]))
    assert dict.fromkeys(rows, "passed") == verdicts(found)


def test_a_hit_is_not_compared_with_a_hit(run: Run):
    """
    If the cache cannot be bypassed, rows that need a miss are not tested, and say what would help.
    """
    fake = Fake()
    fake.refuses = frozenset(["cache_prompt"])
    with serving(fake) as url:
        rows = report(run("conform", url, "--json", "--row", "turn-by-turn"))
    assert {"turn-by-turn": "skipped"} == verdicts(rows)
    assert "give --restart to bypass" in rows["turn-by-turn"]["not_tested"][0]


def test_a_possible_hit_is_not_a_miss(run: Run):
    """
    A server that reports nothing about its cache may not know `cache_prompt`: its answers to it are
    compared, and count as a miss only after a restart.
    """
    options = ("--json", "--row", "shared-beginning")
    with serving(Fake(ignores=["cache_prompt"], hides=["cached_tokens"])) as url:
        without = report(run("conform", url, *options))
        with_restart = report(run("conform", url, *options, "--restart", restart_of(url)))
    assert {"shared-beginning": "skipped"} == verdicts(without)
    assert "may also have been a hit" in without["shared-beginning"]["not_tested"][0]
    assert {"shared-beginning": "passed"} == verdicts(with_restart)


def test_a_hit_after_a_restart_is_not_a_miss(run: Run):
    """A cache that survives a restart cannot be bypassed; the row is not tested."""
    with serving(Fake(ignores=["cache_prompt"], keeps=True)) as url:
        options = ("--json", "--row", "turn-by-turn", "--restart", restart_of(url))
        rows = report(run("conform", url, *options))
    assert {"turn-by-turn": "skipped"} == verdicts(rows)
    assert "even after a restart" in rows["turn-by-turn"]["not_tested"][0]


@pytest.mark.parametrize(
    ("fake", "verdict"),
    [
        (Fake("seeds are not looked at", sure=True), "skipped"),
        (Fake("seeds are not looked at", ends_after=2, hides=["logprobs"]), "skipped"),
        (Fake("seeds are not looked at", hides=["logprobs"]), "failed"),
    ],
    ids=["sure", "short", "long"],
)
def test_a_model_may_be_certain_of_its_answer(fake: Fake, verdict: str, run: Run):
    """
    If different seeds give the same answer, the server fails only if that is unlikely: by the
    log-probabilities, or without them by the length of the answer.
    """
    with serving(fake) as url:
        rows = report(run("conform", url, "--json", "--row", "seeds"))
    assert {"seeds": verdict} == verdicts(rows)
    assert "give the same answer" in "".join(
        rows["seeds"]["failures"] + rows["seeds"]["not_tested"]
    )


def test_an_answer_that_has_ended_cannot_be_abandoned(run: Run):
    """If answers are too short to disconnect in the middle of one, the row says so."""
    with serving(Fake(ends_after=1)) as url:
        rows = report(run("conform", url, "--json", "--row", "disconnect"))
    assert {"disconnect": "skipped"} == verdicts(rows)
    assert ["the answer had ended before its client could disconnect in decode"] == rows[
        "disconnect"
    ]["not_tested"]


class FasterThanMeasured(Fake):
    """Takes long for the prompts that are timed, and no time for all others."""

    def cached(self, prompt: list[str], body: Any) -> int:
        """Like that of a sound server."""
        self.prefill_s = 1.0 if {"how", "long"} <= set(prompt) else 0.0
        return super().cached(prompt, body)


def test_a_prefill_that_was_not_abandoned_is_not_tested(run: Run):
    """If the answer began before its client disconnected, no abandoned prefill was tested."""
    with serving(FasterThanMeasured(prefill_s=0)) as url:
        rows = report(run("conform", url, "--json", "--row", "disconnect"))
    assert {"disconnect": "skipped"} == verdicts(rows)
    assert any("could disconnect in prefill" in text for text in rows["disconnect"]["not_tested"])


@pytest.mark.parametrize(("rounds", "verdict"), [(1, "passed"), (10, "skipped")])
def test_requests_that_do_not_overlap_are_not_tested(
    rounds: int, verdict: str, run: Run, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
):
    """
    Concurrent requests that did not overlap are sent again; if they never do, nothing was tested.
    """
    fake = meeting(Fake())
    together, apart = Case.together, iter(range(rounds))

    def slow(case: Case, calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
        if next(apart, None) is None:
            return together(case, calls)
        return [call() for call in calls]

    monkeypatch.setattr(Case, "together", slow)
    with serving(fake) as url:
        rows = report(run("conform", url, "--json", "--row", "other-traffic"))
    assert {"other-traffic": verdict} == verdicts(rows)


def test_threads_that_cannot_be_started_end_the_row(run: Run, monkeypatch: pytest.MonkeyPatch):
    """
    If this machine cannot start another thread, the row says so, and waiting threads are released.
    """
    start = threading.Thread.start

    def third(thread: threading.Thread) -> None:
        if thread.name.startswith("ThreadPoolExecutor") and thread.name.endswith("_2"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(Fake(prefill_s=0)) as url:
        monkeypatch.setattr(threading.Thread, "start", third)
        rows = report(run("conform", url, "--json", "--row", "other-traffic"))
    assert {"other-traffic": "skipped"} == verdicts(rows)
    assert [
        "4 requests could not be sent at once from this machine: can't start new thread"
    ] == rows["other-traffic"]["not_tested"]


def test_threads_that_do_not_begin_end_the_row(run: Run, monkeypatch: pytest.MonkeyPatch):
    """The row does not wait for a thread that was started and never reaches its request."""

    class Pool(ThreadPoolExecutor):
        """Has one thread fewer than requested."""

        def __init__(self, threads: int) -> None:
            super().__init__(threads - 1)

    monkeypatch.setattr(conform_case, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(conform_case, "BEGIN_S", 0.2)
    with serving(Fake(prefill_s=0)) as url:
        rows = report(run("conform", url, "--json", "--row", "other-traffic"))
    assert {"other-traffic": "skipped"} == verdicts(rows)
    assert ["4 requests could not be sent at once from this machine within 0.2 s"] == rows[
        "other-traffic"
    ]["not_tested"]


def test_a_busy_server_is_not_lost(run: Run):
    """A server that is overloaded for a moment is tried again before it counts as lost."""
    with serving(Fake(rests=2)) as url:
        rows = report(run("conform", url, "--json", "--row", "odd-prompts"))
    assert {"odd-prompts": "passed"} == verdicts(rows)


@pytest.mark.long
def test_without_a_command_restarts_are_not_tested(run: Run, meeting: Meeting):
    """The row about restarts is not tested without `--restart`, and all others pass."""
    with serving(meeting(Fake(prefill_s=0.1))) as url:
        result = run("conform", url, "--json")
    rows = report(result)
    assert {**dict.fromkeys(ROWS, "passed"), "restart": "skipped"} == verdicts(rows)
    assert ["no --restart was given"] == rows["restart"]["not_tested"]
    assert 0 == result.exit_code


def test_a_failing_restart_command(run: Run):
    """If the restart command fails, the row is not tested, and says how it ended."""
    with serving(Fake()) as url:
        options = ("--json", "--row", "restart", "--restart", "exit 3")
        rows = report(run("conform", url, *options))
    assert {"restart": "skipped"} == verdicts(rows)
    assert ["the command of --restart ended with 3"] == rows["restart"]["not_tested"]


def test_the_token_that_ends_an_answer_may_be_counted(run: Run):
    """
    A server that counts the token that ended an answer, and reports no log-probability for it, is
    consistent; the row says so.
    """
    with serving(Fake(ends_after=7)) as url:
        rows = report(run("conform", url, "--json", "--row", "token-accounts"))
    assert {"token-accounts": "passed"} == verdicts(rows)
    words = "first: the token that ended the answer is counted, and not in logprobs"
    assert words in rows["token-accounts"]["seen"]


# --- the command ---------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_row(run: Run):
    """Without `--json` there is a table: name, verdict, question, findings; and the counts."""
    with serving(Fake("the total is off")) as url:
        result = run("conform", url, "--row", "seeds", "--row", "token-accounts", "--salt", "s")
    head, seeds, accounts, counts = result.stdout.splitlines()
    assert ["row", "verdict", "asks", "seen"] == head.split("\t")
    assert ["seeds", "passed", ROWS["seeds"].asks] == seeds.split("\t")[:3]
    assert ["token-accounts", "FAILED"] == accounts.split("\t")[:2]
    assert counts.startswith("passed: 1, failed: 1, skipped: 0 (")
    assert "--salt s" in result.stderr
    assert 1 == result.exit_code


def test_a_salt_repeats_the_requests(run: Run):
    """Two runs with a salt give the same answers; without one, no prompt is repeated."""
    reports = []
    for salt in ("one", "one", "two"):
        with serving(Fake()) as url:
            reports.append(report(run("conform", url, "--json", "--row", "limits", "--salt", salt)))
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]


def test_another_machine_is_refused_by_default(run: Run):
    """
    An address outside the loopback is refused with a sentence; `--anywhere` allows it, and warns.
    """
    with serving(Fake(), "0.0.0.0") as url:
        refused = run("conform", url, "--row", "seeds")
        asked = run("conform", url, "--row", "seeds", "--anywhere")
    assert 2 == refused.exit_code
    assert "0.0.0.0 is not this machine's loopback." in refused.stderr
    assert "" == refused.stdout
    assert 0 == asked.exit_code
    assert "Warning: 0.0.0.0 may be another machine" in asked.stderr


@pytest.mark.parametrize(
    "url", ["http://example.org", "http://127.0.0.1.example.org", "http://127.0.0.1@example.org"]
)
def test_a_name_is_not_certainly_the_loopback(url: str, run: Run):
    """A name that may lead anywhere is refused, however it looks."""
    result = run("conform", url)
    assert 2 == result.exit_code
    assert "is not this machine's loopback" in result.stderr


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://[::1", "http://127.0.0.1/é"]
)
def test_an_invalid_address_is_a_sentence(url: str, run: Run):
    """An invalid server address ends with 2 and an example of a valid one."""
    result = run("conform", url)
    assert 2 == result.exit_code
    assert "http://127.0.0.1:8000" in result.stderr


def test_where_nothing_listens_the_command_ends_with_2(run: Run):
    """A server that is not running cannot be tested."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = run("conform", f"http://127.0.0.1:{port}")
    assert 2 == result.exit_code
    assert "cannot be tested: the connection was refused." in result.stderr


@pytest.mark.parametrize("clock", ["timer", "socket"])
def test_a_server_that_never_answers_could_not_be_tested(
    run: Run, monkeypatch: pytest.MonkeyPatch, clock: str
):
    """
    The deadline ends a request on a connection that is accepted and then ignored: the timer's and
    the socket's deadline are equal, and either may be first.
    """
    if clock == "socket":
        monkeypatch.setattr("cairn.ops.common.http_client.Exchange.cut", lambda self: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = run("conform", f"http://127.0.0.1:{silent.getsockname()[1]}", "--deadline", 0.2)
    assert 2 == result.exit_code
    assert "no answer within 0.2 s" in result.stderr


def test_one_of_several_models_has_to_be_named(run: Run):
    """For a server that lists several models, the model has to be named."""
    with serving(Fake(models=["small", "large"])) as url:
        unnamed = run("conform", url, "--row", "seeds")
        named = run("conform", url, "--row", "seeds", "--model", "large", "--json")
    assert 2 == unnamed.exit_code
    assert "lists several models: small, large. Choose one with --model." in unnamed.stderr
    assert "large" == json.loads(named.stdout)["reported"]["model"]


def test_a_key_comes_from_the_environment_or_the_command(run: Run, monkeypatch: pytest.MonkeyPatch):
    """
    A server that requires a key gets the given one; without one, the message says how to give it.
    """
    with serving(Fake(key="secret")) as url:
        without = run("conform", url)
        named = run("conform", url, "--row", "seeds", "--api-key", "secret")
        monkeypatch.setenv(KEY_VARIABLE, "secret")
        with_key = run("conform", url, "--row", "seeds")
    assert (2, 0, 0) == (without.exit_code, named.exit_code, with_key.exit_code)
    assert "--api-key" in without.stderr
    assert "secret" not in named.output
    assert "secret" not in with_key.output


@pytest.mark.parametrize("key", ["sec\nret", "sécret"])
def test_a_key_that_cannot_be_sent_is_a_sentence(
    key: str, run: Run, monkeypatch: pytest.MonkeyPatch
):
    """
    A key with a line end, or with an invalid header character, ends with 2 and a sentence that does
    not show it.
    """
    monkeypatch.setenv(KEY_VARIABLE, key)
    result = run("conform", "http://127.0.0.1:9")
    assert 2 == result.exit_code
    assert "A key has no spaces" in " ".join(result.stderr.split())
    assert key not in result.output


def test_names_of_models_do_not_steer_a_terminal(run: Run):
    """A server's model names are shown without control characters."""
    for models in (["a\x1b[31m", "b"], ["a\x1b[31m"]):
        with serving(Fake(models=models)) as url:
            result = run("conform", url, "--row", "seeds")
        assert "\x1b" not in result.stderr
        assert r"a\x1b[31m" in result.stderr


def test_after_a_server_is_lost_the_rest_is_not_tested(run: Run):
    """The row in which a server was lost fails; later rows are not tested, and say why."""
    with serving(Fake("special tokens end service")) as url:
        result = run("conform", url, "--json", "--row", "odd-prompts", "--row", "bad-bodies")
    rows = report(result)
    assert {"odd-prompts": "failed", "bad-bodies": "skipped"} == verdicts(rows)
    assert ["the server stopped answering (in the row odd-prompts)"] == rows["bad-bodies"][
        "not_tested"
    ]
    assert 1 == result.exit_code


def test_a_server_that_can_be_restarted_is_not_lost(run: Run):
    """With `--restart`, the rows after the one that ended the server are still run."""
    with serving(Fake("special tokens end service")) as url:
        options = ("--row", "odd-prompts", "--row", "bad-bodies", "--restart", restart_of(url))
        rows = report(run("conform", url, "--json", *options))
    assert {"odd-prompts": "failed", "bad-bodies": "passed"} == verdicts(rows)


# --- answers -------------------------------------------------------------------------------------


def answer(text: str = "ab", *numbers: float, **fields: Any) -> Answer:
    """An answer with a token for each character."""
    tokens = tuple(
        Token((None, letter, None), number) for letter, number in zip(text, numbers, strict=False)
    )
    return Answer(status=200, text=text, tokens=tokens or None, **fields)


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (answer("ab", -1.0, -2.0), answer("ab", -1.0, -2.0), None),
        (answer("ab"), answer("ab", -1.0, -2.0), None),
        (answer("ab", float("nan")), answer("ab", float("nan")), None),
        (answer("ab", -1.0, -2.0), answer("ac", -1.0, -2.0), "token 2 of 2 is 'c'"),
        (answer("ab", -1.0, -2.0), answer("ab", -1.0, -2.5), "1 of 2 log-probabilities differ"),
        (answer("ab", 0.0, -2.0), answer("ab", -0.0, -2.0), "1 of 2 log-probabilities differ"),
        (answer("ab", -1.0, -2.0), answer("a", -1.0), "1 tokens, and it was 2"),
        (answer("abc"), answer("abd"), "the text differs from character 3: 'd', and it was 'c'"),
        (answer(reasoning="x"), answer(reasoning="y"), "the reasoning differs"),
        (answer(finish_reason="stop"), answer(finish_reason="length"), "finish_reason is length"),
    ],
)
def test_a_difference_in_words(was: Answer, now: Answer, words: str | None):
    """
    Two answers differ by tokens, log-probabilities to the last bit, texts, or why they ended; a
    value that only one of them reports is no difference.
    """
    found = difference(was, now)
    assert (words is None) == (found is None), found
    assert (words or "") in (found or "")


EVENTS = (
    b': waiting\r\n\r\ndata: {"choices":[{"delta":{"role":"assistant"}}]}\r\n\r\n'
    b'data: {"choices":[{"delta":{"content":"\xc3\xa9"},"logprobs":{"content":[{"token":"\xc3\xa9",'
    b'"logprob":-1}]}}]}\n\ndata:{"choices":[{"delta":{"content":"t"},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


def cuts() -> Iterator[int]:
    """Every place at which a stream may be cut."""
    yield from range(len(EVENTS))


def test_a_stream_may_be_cut_anywhere():
    """However the bytes of a stream arrive, the answer is the same."""
    answers = set()
    for cut in cuts():
        stream = Streamed()
        stream.feed(EVENTS[:cut])
        stream.feed(EVENTS[cut:])
        answers.add(stream.answer())
    (found,) = answers
    assert ("ét", "stop", 3, 2, True) == (
        found.text,
        found.finish_reason,
        found.prompt_tokens,
        found.completion_tokens,
        found.done,
    )
    assert found.complete


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'{"choices": []}',
        b'{"choices": {"message": 1}}',
        b'{"choices": [{"message": "hi"}]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_body_that_is_not_a_completion_is_a_fault(body: bytes):
    """Any body with status 200 is read without raising, and an invalid one is not an answer."""
    found = whole(200, body)
    assert not found.complete
    assert "a body that is not a completion" in found.fault


def test_values_of_other_types_count_as_not_reported():
    """A value in an unusable form counts as not reported."""
    message = {"content": 7}
    choice = {"message": message, "logprobs": {"content": {}}, "finish_reason": 3}
    usage = {"prompt_tokens": "many", "prompt_tokens_details": [], "total_tokens": True}
    found = whole(200, json.dumps({"choices": [choice], "usage": usage}).encode())
    assert Answer(status=200) == found
