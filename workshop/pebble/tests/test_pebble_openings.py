"""The 200 openings have their form, and loops are found by the rubric's rules."""

import dataclasses
import hashlib
import re
from pathlib import Path

import pytest

from cairn.engine.model.builtin import builtin_directory
from cairn_pebble.first_chat.openings import (
    asked_in_one_chat,
    find_loop,
    normalised,
    read_openings,
    read_rubric,
)
from cairn_pebble.first_chat.trained import trained_on
from cairn_pebble.first_chat.verdicts import (
    LONGEST_ANSWER,
    Asked,
    BadVerdicts,
    decided,
    read_transcript,
    read_verdicts,
    report,
    verdicts_of,
)


def test_there_are_200_different_openings() -> None:
    """No two openings are the same text, and each kind has several."""
    openings = read_openings()
    assert len(openings) == 200
    assert len({opening.text for opening in openings}) == 200
    assert len({opening.id for opening in openings}) == 200
    kinds = {opening.kind for opening in openings}
    assert all(sum(opening.kind == kind for opening in openings) >= 3 for kind in kinds)


def test_more_than_half_ask_for_more_than_an_honest_refusal() -> None:
    """A model that refuses everything cannot pass."""
    assert sum(not opening.honest_passes for opening in read_openings()) > 100


def test_each_pattern_compiles() -> None:
    """The patterns that decide a right answer compile, and none is found in an empty answer."""
    patterns = [opening.answer for opening in read_openings() if opening.answer is not None]
    assert len(patterns) >= 15
    assert [p for p in patterns if re.search(p, "", re.IGNORECASE)] == []


def test_the_rubric_names_each_verdict() -> None:
    """Verdicts, what the program decides, and what is counted are written."""
    assert {"fitting", "honest", "wrong", "loop", "automatic", "counts"} == set(read_rubric())


def test_forty_are_asked_in_one_chat() -> None:
    """The long chat has every fifth opening, of nearly all kinds."""
    asked = asked_in_one_chat(read_openings())
    assert len(asked) == 40
    assert len({opening.kind for opening in asked}) >= 16


@pytest.mark.parametrize(
    "text",
    [
        "Hello! Cairn a a a a",
        "I can help. I can help. I can help.",
        "you are in the garden and you are in the garden and you are in the garden and",
        "I like the sea. It is blue. I like the sea! It is wide. I like the sea.",
        "what you tell me here, Pebble,,,,,, yes",
        "well , , , , , , well",
        "aaaaaaaaah",
    ],
)
def test_a_loop_is_found(text: str) -> None:
    """Repeated words, runs, sentences and marks are loops."""
    assert find_loop(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No, no, no! I am fine...",
        "One, two, three, four, five.",
        "ha ha ha",
        "Yes. Yes. Yes.",
        "It is 1000000.",
        "I can keep a fact. I can help you. I can chat.",
    ],
)
def test_an_answer_without_a_loop(text: str) -> None:
    """What people write for stress, and lists of similar sentences, are none."""
    assert find_loop(text) is None


def test_a_run_of_the_opening_may_be_repeated() -> None:
    """An answer that quotes a run of marks of the opening is no loop."""
    assert find_loop("You typed !!!!!!!", opening="hey !!!!!!!") is None
    assert find_loop("You typed !!!!!!!", opening="hey") is not None


def test_case_spaces_and_punctuation_are_normalised() -> None:
    """Two texts of the same words are one."""
    assert normalised("what s up") == normalised("What  s-up?!")
    assert normalised("...") == "..."


def asked(name: str, said: str, finish_reason: str = "stop", answer_tokens: int = 9) -> Asked:
    """The answer to an opening, as the program decides it."""
    (opening,) = (one for one in read_openings() if one.id == name)
    return decided(opening, name, said, finish_reason, answer_tokens)


def test_the_program_decides_loops_and_ends() -> None:
    """An answer that the guard ended is a loop; an empty or unended one is wrong; judges decide."""
    assert asked("greeting-1", "Hello!").verdict is None
    assert asked("greeting-1", "Hello! a a a a").verdict == "loop"
    assert asked("greeting-1", "orryryry", "length", 40).verdict == "loop"
    assert asked("greeting-1", "A long story", "length", LONGEST_ANSWER).verdict == "wrong"
    assert asked("greeting-1", " \n").verdict == "wrong"


def test_the_worse_verdict_counts(tmp_path: Path) -> None:
    """Where judges disagree, the worse one counts; refusals pass where the kind allows them."""
    some = [
        asked("greeting-1", "Hello!"),
        asked("knowledge-1", "I do not know."),
        asked("greeting-2", "a a a a"),
    ]
    files = [tmp_path / "one", tmp_path / "two"]
    files[0].write_text("# notes\ngreeting-1 fitting\nknowledge-1 honest\n", "utf-8")
    files[1].write_text("greeting-1 honest it says so\n\nknowledge-1 honest\n", "utf-8")
    judges = [read_verdicts(file, some) for file in files]
    assert verdicts_of(some, judges) == {
        "greeting-1": "honest",
        "knowledge-1": "honest",
        "greeting-2": "loop",
    }
    page = report({"weights": "0"}, some, judges, {"knowledge-1"})
    assert "| all | 0 | 2 | 0 | 1 | 1 | 3 |" in page
    assert "agree on 1 of 2" in page
    assert "in the training, 1 of 1 passed; of the others, 0 of 2" in page


def test_openings_that_are_messages_in_the_training_are_found() -> None:
    """Case, spaces and punctuation make no difference."""
    known, new = (
        dataclasses.replace(read_openings()[0], id=text, text=text)
        for text in ("HI  pebble!", "Is moss older than the stones it grows on?")
    )
    assert trained_on((known, new), draws=3000) == {known.id}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("greeting-1 good\nknowledge-1 honest\n", "line 1: greeting-1 needs one of"),
        ("greeting-1 wrong\n", "no verdict on knowledge-1"),
        ("greeting-2 wrong\n", "line 1: greeting-2 is no answer"),
        ("greeting-1 wrong\ngreeting-1 wrong\n", "line 2: greeting-1 has a verdict already"),
        ("knowledge-1 fitting\n", "the right answer is not in it"),
    ],
)
def test_a_bad_file_of_a_judge_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    """The message says which line is wrong, and why."""
    some = [asked("greeting-1", "Hello!"), asked("knowledge-1", "It is Rome.")]
    (tmp_path / "one").write_text(text, "utf-8")
    with pytest.raises(BadVerdicts, match=fault):
        read_verdicts(tmp_path / "one", some)


def page_of(folder: str, *judges: str) -> tuple[dict[str, str], str]:
    """What a recorded transcript says of its weights, and the report by its recorded verdicts."""
    judged = Path(__file__).parents[1] / "judged" / folder
    facts, some = read_transcript(judged / "transcript.jsonl")
    return facts, report(facts, some, [read_verdicts(judged / one, some) for one in judges], ())


def test_the_recorded_verdicts_are_what_the_page_says() -> None:
    """The figures of docs/benchmarks.md are those of the transcripts, and of the weights."""
    facts, page = page_of("20261128-2m-words", "judge-1.txt", "judge-2.txt")
    assert "agree on 234 of 240" in page
    assert "| all | 117 | 38 | 45 | 0 | 154 | 200 |" in page
    assert "89 of 113 are fitting" in page
    assert "| all | 24 | 10 | 6 | 0 | 33 | 40 |" in page
    weights = (builtin_directory() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == facts["weights"]
    _, of_the_release = page_of("20261127-2m", "judge-1.txt")
    assert "| all | 53 | 9 | 97 | 41 | 62 | 200 |" in of_the_release
    assert "| all | 13 | 3 | 23 | 1 | 15 | 40 |" in of_the_release
    _, of_a_round = page_of("20261127-2m-near", "judge-1.txt", "judge-2.txt")
    assert "| all | 67 | 45 | 87 | 1 | 112 | 200 |" in of_a_round
    assert "| all | 16 | 6 | 17 | 1 | 22 | 40 |" in of_a_round
