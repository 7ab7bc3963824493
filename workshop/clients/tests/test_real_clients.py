"""
The parts of `make clients`, without a client: the figures, the scripted model's template, and how
programs are installed and stopped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from cairn.engine.prompt.template import Conversation, Message, render
from cairn.journal.rows.codec import decode
from cairn_clients import alone, coding, packages, scripted
from cairn_clients.figures import Request, faults, requests_of, turns_of
from cairn_clients.processes import Failed, Place, place, run, run_together
from tests.support.journals import healthy

CHUNK = 4


# --- figures ---------------------------------------------------------------------------------


def request(ids: range | tuple[int, ...], reused: int = 0, **changes: Any) -> Request:
    """An answered request, by its prompt; a continuation if it reuses anything."""
    usual: dict[str, Any] = {
        "name": "any",
        "protocol": "test",
        "ids": tuple(ids),
        "path": "continuation" if reused else "new_session",
        "reason": None if reused else "cold_start",
        "reused": reused,
        "answered": True,
    }
    return Request(**{**usual, **changes})


FIRST, SECOND = request(range(10)), request((*range(9), 90, 91, 92), 8)
TITLE = request(range(100, 106))


def found(*requests: Request, openings: int = 1) -> list[str]:
    """What is wrong with a client's requests."""
    return faults(turns_of(requests, CHUNK), openings, CHUNK)


def test_a_request_continues_the_one_whose_prompt_it_begins_with():
    """That is, all but the last chunk; the continued request is found whatever came in between."""
    third = request((*SECOND.ids, 93, 94), 12)
    turns = turns_of([FIRST, TITLE, SECOND, third], CHUNK)
    assert [None, None, FIRST, SECOND] == [turn.before for turn in turns]
    assert [0, 0, 9, 12] == [turn.same for turn in turns]
    assert [] == found(FIRST, TITLE, SECOND, third, openings=2)


def test_a_prompt_that_was_changed_in_front_is_an_opening():
    """Even if the server reused what it could of it; the divergence is reported."""
    moved = request((0, 1, 2, 3, 70, *range(5, 12)), 4, diverged="a clock")
    (one, *_) = found(FIRST, SECOND, moved)
    assert "2 requests continue none, not 1" in one
    assert "a clock" in one


def test_the_same_prompt_again_is_an_opening():
    """A client that repeats a request does not continue a conversation."""
    assert ["2 requests continue none", "no request continues another"] == [
        one.partition(",")[0] for one in found(FIRST, FIRST)
    ]


def test_an_opening_that_is_missing_is_reported():
    """Otherwise one that is lost at the beginning would count as one."""
    assert ["1 requests continue none, not 2"] == [
        one.partition(":")[0] for one in found(FIRST, SECOND, openings=2)
    ]


@pytest.mark.parametrize("written", [True, False], ids=["as written", "as settled"])
def test_an_answer_is_settled_once_the_server_is_idle(written: bool):
    """
    As it was written, or as settled if a template renders it differently. Before that, it may be
    new.
    """
    said, settled = (*range(14), 70), (*range(16),)
    later = (said,) if written else ((*range(10), 71), settled)
    before = attrs.evolve(FIRST, place=1, rested=5, later=later)
    after = request((*range(16), 90), 8, place=7)
    (one,) = found(before, after)
    assert one.endswith("reuses 8, and 12 were there" if written else "reuses 8, and 16 were there")
    assert [] == found(before, attrs.evolve(after, reused=16))
    assert [] == found(before, attrs.evolve(after, place=3))
    assert [] == found(attrs.evolve(before, rested=None), after)


def test_a_rest_without_settling_is_reported():
    """If nothing came after it; the next request ends the settling before it."""
    first = attrs.evolve(FIRST, place=1, rested=5, unsettled=True)
    second = attrs.evolve(SECOND, place=7, rested=9, unsettled=True)
    (one,) = found(first, second)
    assert "of 12 tokens and its answer were not settled" in one


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": "new_session", "reason": "diverged"}, "is a new_session (diverged)"),
        ({"reused": 4}, "reuses 4, and 8 were there"),
        ({"answered": False}, "was not answered to the end"),
    ],
)
def test_what_is_wrong_with_a_turn_is_reported(changes: dict[str, Any], words: str):
    """One sentence for each problem, and none without problems."""
    assert [] == found(FIRST, SECOND)
    (one,) = found(FIRST, attrs.evolve(SECOND, **changes))
    assert one.endswith(words)


def test_requests_are_read_from_a_journal():
    """With the tokens of their whole prompts, of which the journal has only the new part."""
    requests = requests_of([decode(row) for row in healthy()])
    rows = [(len(one.ids), one.path, one.reused, one.answered) for one in requests]
    assert [(10, "new_session", 0, True), (18, "continuation", 8, True)] == rows
    assert requests[1].ids[:10] == requests[0].ids
    assert requests[1].ids[:12] == requests[0].later[0][:12]
    assert requests[0].rested is not None
    assert requests[0].place < requests[0].rested < requests[1].place
    # That one became idle without the answer, whose end is in the third chunk.
    assert ["a prompt of 18 tokens reuses 8, and 12 were there"] == found(*requests)


# --- the scripted model ----------------------------------------------------------------------


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of the model which answers Claude Code."""
    folder = tmp_path_factory.mktemp("scripted") / "model"
    return load_tokenizer(scripted.make(folder, coding.claude_lines(), coding.AGREES))


def prompts_of(tokenizer: Any, *said: tuple[str, str], answers: list[Message]) -> Iterator[str]:
    """The prompt for each answer in a conversation."""
    messages: list[Message] = []
    for (role, content), answer in zip(said, answers, strict=True):
        messages.append(Message(role=role, content=content))
        # After the first turn, as in Claude Code. It is no cue.
        if len(messages) == 1:
            messages.append(Message(role="system", content=f"One says {coding.SEND}."))
        yield render(tokenizer, Conversation(messages=tuple(messages)))
        messages.append(answer)


def test_the_cue_is_what_was_said_last(tokenizer: Any):
    """By a user or a tool, and each prompt is the beginning of the next one."""
    call = {"type": "function", "function": {"name": "Bash", "arguments": {"command": "cat"}}}
    answers = [
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="assistant", content=coding.HAS_READ),
        Message(role="assistant", content=coding.AGREES),
    ]
    said = [("user", f"{coding.READ}, please."), ("tool", coding.KEPT), ("user", "Thank you.")]
    prompts = list(prompts_of(tokenizer, *said, answers=answers))
    assert ["<|cue 0|>", "<|cue 3|>", "<|cue 5|>"] == [one[-9:] for one in prompts]
    assert prompts[1].startswith(prompts[0])
    assert prompts[2].startswith(prompts[1] + coding.HAS_READ)


def test_a_cue_and_its_answer_are_a_token_each(tokenizer: Any):
    """The model sees one token back, and says each answer in one token."""
    for text in ("<|cue 2|>", coding.claude_lines()[0].answer):
        assert 1 == len(tokenizer.encode(text, add_special_tokens=False))


# --- packages, processes, networks -----------------------------------------------------------


def test_without_npm_a_client_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It says why, and leaves no partial installation."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(packages.Unavailable, match="no npm"):
        packages.install("codex", tmp_path)
    assert not packages.is_installed("codex", tmp_path)


def test_an_install_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the last line of the output, and it is tried again the next time."""
    failed = subprocess.CompletedProcess([], 1, "", "much\nno such version\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(packages.Unavailable, match="no such version"):
        packages.install("anthropic", tmp_path)
    assert not packages.is_installed("anthropic", tmp_path)


@pytest.fixture(name="here")
def here_() -> Iterator[Place]:
    """A place for short programs."""
    with place(0.5, {}) as found:
        yield found


def python(words: str) -> list[str]:
    """A program."""
    return [sys.executable, "-P", "-c", words]


def test_a_client_lives_in_a_home_of_its_own(here: Place):
    """In its own folder, without any of this process's environment."""
    patient = attrs.evolve(here, limit_s=60.0)
    words = "import os; print(os.environ['HOME'], os.getcwd(), 'PYTHONPATH' in os.environ)"
    assert f"{here.home} {here.work} False\n" == run(patient, *python(words))


def test_a_program_that_fails_is_reported(here: Place):
    """With its output."""
    patient = attrs.evolve(here, limit_s=60.0)
    with pytest.raises(Failed, match=r"(?s)ended with 3: .*no key"):
        run(patient, *python("import sys; print('no key'); sys.exit(3)"))


def test_a_program_that_does_not_end_is_ended(here: Place):
    """With its children, which hold its output open, and with those that run in parallel."""
    child = f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])"
    lingers = f"import subprocess, time; {child}; time.sleep(600)"
    with pytest.raises(Failed, match="did not end within"):
        run_together((here, python(lingers)), (here, python(lingers)))


def test_a_private_network_reaches_no_other_host():
    """Except itself; if the system permits a network namespace."""
    into = alone.command_into()
    if into is None:
        pytest.skip("no network of one's own on this system")
    words = (
        "import socket; from cairn_clients import alone; alone.raise_loopback();"
        "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname());"
        "print(alone.reaches_others())"
    )
    sources = Path(__file__).parents[1] / "src"
    done = subprocess.run(
        [*into, sys.executable, "-c", words],
        env={"PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("False\n", 0) == (done.stdout, done.returncode), done.stderr
