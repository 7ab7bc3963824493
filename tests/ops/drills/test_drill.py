"""`ops drill`: a drill passes only if everything that it should show was seen, and says so."""

import os
import shlex
from pathlib import Path

import attrs
import pytest
import trio

from cairn.actors.request_log import RequestLog
from cairn.engine.model import builtin
from cairn.http.metrics.registry import Metrics
from cairn.http.wire import errors
from cairn.journal import events as ev
from cairn.journal import invariants
from cairn.journal.ledger import Ledger
from cairn.ops.drills import command as drill
from cairn.ops.drills import evidence
from cairn.ops.drills.faults.damage import Damage
from cairn.ops.drills.faults.journal import row_removed
from cairn.ops.drills.files import in_a_file
from cairn.ops.drills.outcome import CHECKS, Check, Drill, Outcome, Scene
from cairn.ops.drills.running import on_a_server
from cairn.ops.drills.running_checks import Fault, is_bug_answer
from cairn.ops.drills.server.baseline import Baseline
from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.stored import beneath_a_server, on_stopped_server
from cairn.ops.drills.table import DRILLS
from cairn.ops.drills.unseen import unseen

FINE = tuple(Check(name, True, "so it is") for name in CHECKS)


async def left_out(damage: Damage) -> None:
    """Damage that changes nothing."""


def nothing_done(directory: Path) -> int:
    """Damage that changes no journal."""
    return 3


@pytest.fixture
def play(model_directory: Path, baseline: Baseline, tmp_path: Path):
    """Runs a drill; returns its outcome and its checks by name."""

    def played(one: Drill, baseline: Baseline = baseline) -> tuple[Outcome, dict[str, Check]]:
        scene = Scene(directory=tmp_path / "drill", model=model_directory, baseline=baseline)
        outcome = trio.run(one.play, scene)
        return outcome, {check.name: check for check in outcome.checks}

    return played


# --- a drill can fail ----------------------------------------------------------------------------


def test_without_the_damage_a_drill_does_not_pass(play):
    """Nothing is caught if nothing is damaged."""
    fault = Fault(damage=left_out, findings=("INV-1",), scope="session")
    outcome, checks = play(attrs.evolve(DRILLS["layer-short"], play=on_a_server(fault)))
    assert not outcome.passed
    assert Check("caught", False, "the damage was never done") == checks["caught"]


@pytest.mark.parametrize("way", [on_stopped_server, beneath_a_server])
def test_without_the_rewriting_a_drill_does_not_pass(play, way):
    """Nothing is caught if no row is changed."""
    outcome, checks = play(attrs.evolve(DRILLS["row-changed"], play=way(nothing_done)))
    assert not outcome.passed
    assert checks["caught"].passed is False


def test_without_a_damaged_file_a_drill_does_not_pass(play):
    """Nothing is rejected if a file is unchanged, and then its block is reused."""
    outcome, checks = play(attrs.evolve(DRILLS["file-flipped"], play=in_a_file(lambda path: None)))
    assert not outcome.passed
    assert Check("caught", False, "files rejected: none") == checks["caught"]
    assert checks["answered"].passed is False


def test_without_a_block_that_changed_a_drill_does_not_pass(play):
    """The shadow check finds every answer equal if nothing is damaged."""
    outcome, checks = play(attrs.evolve(DRILLS["block-unseen"], play=unseen(left_out)))
    assert not outcome.passed
    assert Check("caught", False, "the damage was never done") == checks["caught"]


def test_without_its_invariant_a_drill_does_not_pass(play, monkeypatch: pytest.MonkeyPatch):
    """If a check is removed from the invariants, the damage goes unnoticed."""
    monkeypatch.setitem(invariants.CHECKS, ev.TokensEmitted, ())
    outcome, checks = play(DRILLS["emission-early"])
    assert not outcome.passed
    assert Check("caught", False, "nothing was caught") == checks["caught"]


def uncounted(patch: pytest.MonkeyPatch) -> None:
    """The metrics do not count it."""
    patch.setattr(Metrics, "observe", lambda metrics, recorded: None)


def unlogged(patch: pytest.MonkeyPatch) -> None:
    """The log does not record it."""
    patch.setattr(RequestLog, "__call__", lambda log, recorded: None)


def in_service(patch: pytest.MonkeyPatch) -> None:
    """A violation does not quarantine anything."""
    patch.setattr(Ledger, "_taken_out", lambda *arguments: ())


def retried(patch: pytest.MonkeyPatch) -> None:
    """The error does not say that a retry gives the same answer."""
    kinds = errors._REFUSALS.items()
    patch.setattr(
        errors, "_REFUSALS", {refusal: attrs.evolve(kind, headers={}) for refusal, kind in kinds}
    )
    patch.setattr(errors, "_NO_RETRY", {})


def untold(patch: pytest.MonkeyPatch) -> None:
    """`ops replay` finds nothing."""
    patch.setattr(evidence, "run_ops", lambda *arguments: (2, "No bug id is in the journal."))


@pytest.mark.parametrize(
    ("check", "sabotage"),
    [
        ("counted", uncounted),
        ("logged", unlogged),
        ("journaled", in_service),
        ("answered", retried),
        ("replayed", untold),
    ],
)
def test_each_check_can_fail(play, monkeypatch: pytest.MonkeyPatch, check: str, sabotage):
    """A drill does not pass if one of the consequences of a bug is missing."""
    sabotage(monkeypatch)
    outcome, checks = play(DRILLS["layer-short"])
    assert not outcome.passed
    assert checks[check].passed is False


def test_another_bit_is_noticed(play, baseline: Baseline):
    """A bystander was affected if its log-probability differs in one digit."""
    before, beside, after = baseline.bystander
    (raw, logprob), *rest = after.tokens
    other = attrs.evolve(after, tokens=((raw, logprob + 1e-6), *rest))
    different = attrs.evolve(baseline, bystander=(before, beside, other))
    outcome, checks = play(DRILLS["layer-short"], different)
    assert not outcome.passed
    assert (
        Check("confined", False, "differs: the bystander's answer after the damage")
        == (checks["confined"])
    )


def test_a_server_that_starts_on_a_broken_journal_is_noticed(play, monkeypatch: pytest.MonkeyPatch):
    """A removed row is found, but a server starts anyway: the drill does not pass."""

    async def starts(scene: Scene) -> None:
        return None

    monkeypatch.setattr("cairn.ops.drills.stored.refusal_on_start", starts)
    outcome, checks = play(attrs.evolve(DRILLS["row-removed"], play=on_stopped_server(row_removed)))
    assert not outcome.passed
    assert Check("answered", False, "a server started on it") == checks["answered"]


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, baseline: Baseline):
    """Replaces the drills; no server is started for them."""

    async def same(directory: Path, model: Path) -> Baseline:
        return baseline

    def put(*drills: Drill) -> None:
        monkeypatch.setattr(drill, "DRILLS", {one.name: one for one in drills})

    monkeypatch.setattr(drill, "record_baseline", same)
    # A value that is set already is kept: the command does not restart itself to preload a BLAS.
    monkeypatch.setenv("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    return put


def made(
    name: str, *checks: Check, error: type[BaseException] | BaseException | None = None
) -> Drill:
    """A drill with these checks, or one that is interrupted."""

    async def play(scene: Scene) -> Outcome:
        scene.directory.mkdir(parents=True)
        if error is not None:
            raise error
        return Outcome(checks=checks, bug_id="1" * 36, command="ops replay 1", caught_ms=3.0)

    return Drill(name=name, invariant="INV-1", scope="session", damage="A thing.", play=play)


def test_the_list(run):
    """Each drill with what it breaks: every invariant, a crash and the world; at least twelve."""
    head, *lines = run("drill", "--list").stdout.splitlines()
    assert "drill\tbreaks\tout of service\twhat is damaged" == head
    assert {*invariants.SENTENCES, "CRASH", "WORLD"} == {line.split("\t")[1] for line in lines}
    assert len(lines) >= 12


@pytest.mark.parametrize(
    ("arguments", "words"), [((), "--list lists them"), (("flood",), "no drill flood")]
)
def test_no_such_drill(run, arguments, words: str):
    """Without a name, or with an unknown one: exit code 2, and where to look."""
    result = run("drill", *arguments)
    assert 2 == result.exit_code
    assert words in result.stderr


def test_the_story_of_one(run, quick, tmp_path: Path):
    """What was damaged, what was seen, how long it took, the bug id, and how to replay it."""
    quick(made("one", *FINE))
    result = run("drill", "one")
    assert 0 == result.exit_code
    assert result.stdout.startswith("one: A thing.\n  caught     yes  so it is (3 ms after the ")
    for words in ("1" * 36, "ops replay 1\n", "docs/bugs/INV-1.md", "passed in "):
        assert words in result.stdout
    (directory,) = (tmp_path / "data" / "drills").iterdir()
    assert str(directory) in result.stdout
    assert directory.name.endswith("-one")


def test_all_of_them(run, quick):
    """A table of all; those that did not pass are listed, and the exit code is 1."""
    quick(made("one", *FINE), made("other", *FINE[:-1], Check("replayed", False, "it is not so")))
    result = run("drill", "all")
    assert 1 == result.exit_code
    head, one, other, *rest = result.stdout.splitlines()
    assert ["drill", "breaks", *CHECKS, "seconds", "bug id"] == head.split("\t")
    assert ["yes"] * 7 == one.split("\t")[2:9]
    assert "NO" == other.split("\t")[8]
    assert "drills: 2, failed: other" == rest[0]
    assert "  replayed   NO   it is not so" in rest
    assert "[2/2] other ...\n" in result.stderr


def test_a_drill_that_fails_by_itself(run, quick):
    """An unexpected error is a failure, and the drills after it still run."""
    quick(made("one", error=RuntimeError("the roof fell in")), made("two", *FINE))
    result = run("drill", "all")
    assert 1 == result.exit_code
    assert "drills: 2, failed: one\n" in result.stdout
    assert "RuntimeError: the roof fell in" in result.stderr


def test_called_off(run, quick, tmp_path: Path):
    """Ctrl-C: the current drill leaves no directory, earlier ones keep theirs."""
    quick(made("one", *FINE), made("two", error=KeyboardInterrupt))
    result = run("drill", "all")
    assert 130 == result.exit_code
    (kept,) = (tmp_path / "data" / "drills").iterdir()
    assert kept.name.endswith("-one")


@pytest.mark.long
def test_the_command_that_a_drill_prints_works(run, monkeypatch: pytest.MonkeyPatch):
    """A real drill from the command line; the replay command that it prints shows the bug again."""
    monkeypatch.setenv("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    result = run("drill", "window-moved")
    assert 0 == result.exit_code, result.stdout
    (line,) = (line for line in result.stdout.splitlines() if "replay it:" in line)
    result = run(*shlex.split(line.split("ops ")[1]))
    assert 0 == result.exit_code
    assert "broken:       INV-2: " in result.stdout
    assert "meaning:      docs/bugs/INV-2.md" in result.stdout


@pytest.mark.long
def test_every_drill_passes_on_the_built_in_model(run, monkeypatch: pytest.MonkeyPatch):
    """Pebble's answers are long enough for each drill to do its damage during one."""
    monkeypatch.setenv("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    result = run("drill", "all")
    assert 0 == result.exit_code, result.stdout
    assert f"drills: {len(DRILLS)}, failed: none\n" in result.stdout


def test_a_damaged_built_in_model(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A sentence, as `ops serve` has it, and no traceback."""
    monkeypatch.setattr(builtin, "builtin_directory", lambda: tmp_path / "pebble")
    result = run("drill", "window-moved")
    assert 2 == result.exit_code
    assert "The built-in model is damaged; install Cairn again." in result.stderr


def test_an_answer_that_differs_from_the_documented_one():
    """The envelope of a bug is compared as a whole."""
    error = {
        "message": "internal cache invariant violation; bug id 7",
        "type": "internal_error",
        "param": None,
        "code": "kv_cache_inv_violation",
    }
    headers = {"x-should-retry": "false"}
    whole = Answer(status=500, headers=headers, error=error)
    streamed = Answer(status=200, headers={}, error=error, tokens=((b"a", -1.0),))
    assert is_bug_answer(whole, "7")
    assert is_bug_answer(streamed, "7")
    for other in (
        attrs.evolve(whole, status=503),
        attrs.evolve(whole, headers={}),
        attrs.evolve(whole, error={**error, "code": "internal_error"}),
        attrs.evolve(whole, error={**error, "detail": "a stack"}),
        attrs.evolve(streamed, tokens=()),
    ):
        assert not is_bug_answer(other, "7")
    assert not is_bug_answer(whole, "8")
