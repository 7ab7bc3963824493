"""The 200 openings have their form, and loops are found by the rubric's rules."""

import re

import pytest

from cairn_pebble.first_chat.openings import (
    asked_in_one_chat,
    find_loop,
    normalised,
    read_openings,
    read_rubric,
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
