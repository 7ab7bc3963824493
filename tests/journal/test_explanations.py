"""Each kind of miss is explained by a sentence that names it, with the habit of the client."""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

import attrs
import pytest

from cairn.journal import explanations, paths
from cairn.journal.explanations import QUOTED, Explanation, explain, short
from cairn.journal.losses import Cause
from tests.journal.model import Driver
from tests.journal.test_paths import (
    FOLLOWED,
    HELLO,
    MORE,
    PARTS,
    PATHS,
    SYSTEM,
    TOOLS,
    path_of,
    started,
    talk,
)

Steps = Callable[[Driver], str | None]


def explained(
    driver: Driver, name: str | None, was: str | None = None, now: str | None = None
) -> Explanation:
    """The explanation of the request that a session has, with these texts where it differs."""
    path = path_of(driver, name)
    request = driver.state.session(path.session).request
    assert request is not None
    model = driver.state.model
    assert model is not None
    return explain(
        request.ask,
        attrs.evolve(path, diverged_from=was, diverged_text=now),
        block_tokens=model.block_tokens,
        min_cache_tokens=model.min_cache_tokens,
        grain=model.grain,
    )


def changed_front(*front: tuple[str, tuple[int, ...]]) -> Steps:
    """A conversation goes on with another beginning."""

    def steps(driver: Driver) -> str | None:
        driver.serve(talk(TOOLS, *PARTS))
        return driver.ask(talk(*front, *FOLLOWED[1:]))

    return steps


def edited(driver: Driver) -> str | None:
    """A message is edited."""
    driver.serve(talk(*FOLLOWED))
    return driver.ask(talk(SYSTEM, HELLO, ("assistant", (60,)), MORE))


def rendered_otherwise(driver: Driver) -> str | None:
    """The answer comes back in a form that is rendered differently."""
    driver.serve(talk(*PARTS))
    return driver.ask(talk(*PARTS, ("assistant", (50, 55)), MORE))


def too_short(driver: Driver) -> str | None:
    """A conversation that is too short for the cache goes on."""
    driver.serve(talk(*PARTS), answer=(50,))
    return driver.ask(talk(*PARTS, ("assistant", (50,)), MORE))


def of_paths(case: str) -> Steps:
    """The steps of a case of the paths."""
    return PATHS[case][0]


OTHER_SYSTEM = (TOOLS, ("system", (39, 31, 32, 33, 34)))
REORDERED = (("tools", tuple(reversed(TOOLS[1]))), SYSTEM)
BEFORE, AFTER = "You help. It is 14:05 now", "You help. It is 14:06 now"

# kind: (steps, the texts that differ, the habit, what the sentences say)
MISSES: dict[str, tuple[Steps, tuple[str | None, str | None], str | None, str]] = {
    "clock": (
        changed_front(*OTHER_SYSTEM),
        (BEFORE, AFTER),
        "clock",
        (
            "The system prompt differs from that of session s1 from token 7 on: `14:05` became "
            "`14:06`. A clock in the system prompt changes it from one request to the next"
        ),
    ),
    "reordered tools": (
        changed_front(*REORDERED),
        ('[{"name":"one"},{"na', '[{"name":"two"},{"na'),
        "reordered_tools",
        (
            "The order of the tools differs from that of session s1 from token 1 on: `one` became "
            "`two`. The client sent the same tools in another order"
        ),
    ),
    "edit": (
        edited,
        ("I like red wine", "I like blue wine"),
        None,
        (
            "A message differs from that of session s1 from token 11 on: `red` became `blue`. That "
            "is usual after an edit"
        ),
    ),
    "dropped thinking": (
        rendered_otherwise,
        ("<|assistant|><think>I should say", "<|assistant|>Hello, I am"),
        "dropped_thinking",
        (
            "It continues session s1, of which 2 tokens are rendered differently now, from token "
            "12 on: `<think>` became `Hello,`. The thinking of an "
            "earlier answer was dropped"
        ),
    ),
    "other model": (
        of_paths("another model"),
        (None, None),
        None,
        "another model, or another version or setting of it, served",
    ),
    "eviction": (of_paths("nothing is left"), (None, None), None, "were evicted to make room"),
    "expiry": (of_paths("all of it expired"), (None, None), None, "this conversation expired"),
    "too short": (too_short, (None, None), None, "it had fewer than 13 tokens"),
    "busy": (
        of_paths("the session works"),
        (None, None),
        None,
        "It continues session s1, which was busy with another request. Have the client wait",
    ),
    "disabled": (
        of_paths("no cache wanted"),
        (None, None),
        None,
        "The request disabled the cache (`cache_prompt: false`).",
    ),
}


@pytest.mark.parametrize("kind", MISSES)
def test_ten_kinds_of_misses(kind: str) -> None:
    """A sentence names what was in the way of reuse."""
    steps, (was, now), habit, says = MISSES[kind]
    driver = started(min_cache_tokens=13 if kind == "too short" else 0)
    found = explained(driver, steps(driver), was, now)

    assert says in found.text
    assert habit == found.habit


def test_no_two_kinds_have_the_same_sentences() -> None:
    """What names one kind is said of no other."""
    said = {}
    for kind, (steps, (was, now), _, _) in MISSES.items():
        driver = started(min_cache_tokens=13 if kind == "too short" else 0)
        said[kind] = explained(driver, steps(driver), was, now).text
    for kind, (*_, says) in MISSES.items():
        assert [kind] == [other for other, text in said.items() if says in text]


def test_each_reason_has_a_sentence() -> None:
    """Each reason that the rules give is explained, and each case of the paths."""
    seen = set()
    for case, (steps, _, reason, _) in PATHS.items():
        driver = started()
        found = explained(driver, steps(driver), "a", "b")
        assert found.because.endswith(".")
        assert found.reused.endswith("."), case
        seen.add(reason)
    reasons = set(paths.Reason.__args__)  # type: ignore[attr-defined]  # a Literal has them
    assert {None, *reasons} - {"too_short"} == seen


def test_how_much_was_reused() -> None:
    """By where it was, and how much was computed."""
    driver = started()
    driver.serve(talk(*PARTS))
    found = explained(driver, driver.ask(talk(*FOLLOWED)))
    assert (
        "12 of 21 prompt tokens (57 %) were reused: 12 held by the session; 9 were computed."
        == found.reused
    )
    assert "It continues session s1." == found.because
    assert None is found.advice
    driver.finish("s1")
    found = explained(driver, driver.ask(talk(*PARTS)))
    assert "8 copied from sealed blocks; " in found.reused
    assert "It is a new conversation. Session s1 began with the same words" in found.because
    again = started()
    again.serve(talk(*FOLLOWED))
    found = explained(again, again.ask(talk(*FOLLOWED)))
    assert "It is the beginning of session s1, or its last request once more" in found.because
    cold = started()
    found = explained(cold, cold.ask(talk(*PARTS)))
    assert "None of the 11 prompt tokens was reused; all were computed." == found.reused


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ({"reason": "cold_start", "nearest": "s1", "reused_tokens": 4}, "of them is reused."),
        (
            {"reason": "cold_start", "nearest": "s1"},
            "nothing of them is stored that could be reused.",
        ),
        (
            {"reason": "cold_start", "nearest": "s1", "min_cache_tokens": 400},
            "could be reused; prompts of fewer than 400 tokens are too short to be cached",
        ),
        (
            {"reason": "cold_start", "nearest": None, "reused_tokens": 4},
            "none is continued, because",
        ),
        ({"reason": "cold_start", "nearest": None}, "no stored one begins like it"),
        (
            {"reason": "shorter_history", "nearest": "s0", "min_cache_tokens": 400},
            "a session of its own; prompts of fewer than 400 tokens are too short",
        ),
        (
            {
                "reason": "shorter_history",
                "nearest": "s0",
                "min_cache_tokens": 400,
                "reused_tokens": 4,
            },
            "it has a session of its own.",
        ),
    ],
)
def test_a_new_session_says_what_is_so(of: dict[str, Any], words: str) -> None:
    """What is reused is said of what is reused, and a prompt that is too short is called so."""
    assert words in sentence(**of).because


def sentence(
    *,
    session_name: str | None = None,
    thoughts: int = 0,
    was: str | None = None,
    now: str | None = None,
    min_cache_tokens: int = 0,
    base_tokens: int = 0,
    grain: int = 1,
    cause: Cause | None = None,
    **of: Any,
) -> Explanation:
    """The explanation of a made-up path."""
    driver = started()
    path = path_of(driver, driver.ask(talk(*PARTS)))
    request = driver.state.session(path.session).request
    assert request is not None
    return explain(
        attrs.evolve(
            request.ask, session_name=session_name, thoughts=thoughts, base_tokens=base_tokens
        ),
        attrs.evolve(path, diverged_from=was, diverged_text=now, **of),
        block_tokens=64,
        min_cache_tokens=min_cache_tokens,
        grain=grain,
        cause=cause,
    )


def test_a_continuation_of_less_than_a_block() -> None:
    """It says that there is nothing to reuse yet, and not that anything is wrong."""
    found = sentence(path="continuation", reason=None)
    assert "It continues session s1, of which nothing is stored that could be reused." in found.text


def test_a_continuation_that_is_too_short() -> None:
    """It is called so if the prompt before was, and only then."""
    found = sentence(path="continuation", reason=None, min_cache_tokens=400, base_tokens=9)
    assert "could be reused; prompts of fewer than 400 tokens are too short to be" in found.because
    assert "A smaller `--min-cache-tokens` caches shorter prompts." == found.advice
    found = sentence(path="continuation", reason=None, min_cache_tokens=9, base_tokens=9)
    assert "too short" not in found.text


WHOLE = "this model reuses whole blocks of 64 tokens only"


@pytest.mark.parametrize(
    ("of", "is_so"),
    [
        ({"path": "continuation", "reason": None, "base_tokens": 9}, True),
        ({"path": "continuation", "reason": None, "base_tokens": 0}, False),
        ({"reason": "cold_start", "nearest": "s1"}, True),
        ({"reason": "cold_start", "nearest": "s1", "min_cache_tokens": 400}, False),
        ({"reason": "cold_start", "nearest": "s1", "reused_tokens": 4}, False),
        ({"reason": "cold_start", "nearest": None}, False),
        ({"reason": "diverged", "nearest": "s1", "diverged_token": 5}, True),
        ({"reason": "diverged", "nearest": "s1", "diverged_token": 0}, False),
        ({"reason": "session_busy", "nearest": "s1"}, False),
    ],
)
def test_reuse_in_whole_blocks(of: dict[str, Any], is_so: bool) -> None:
    """Where a model is reused in whole blocks, the sentence says so if that cost tokens."""
    assert is_so == (WHOLE in sentence(grain=64, **of).reused)
    assert WHOLE not in sentence(grain=1, **of).reused


def test_a_continuation_that_is_rendered_differently() -> None:
    """Where nothing is known of what differs, no thinking is blamed for it."""
    found = sentence(path="continuation", reason=None, rerendered_tokens=5)
    assert "5 tokens are rendered differently now" in found.text
    assert "thinking" not in found.text


def test_a_part_of_a_block_and_what_was_prewarmed() -> None:
    """The sentence has all sources."""
    found = sentence(
        reused_tokens=70, blocks_from_pool=1, tokens_from_partial=6, prewarmed_tokens=3
    )
    assert (
        "64 copied from sealed blocks and 6 copied from a part of a block, 3 of them prewarmed;"
        in found.reused
    )


@pytest.mark.parametrize(
    ("cause", "says", "says_not"),
    [
        ("evicted", "blocks were evicted to make room. Give the server more room", " lost "),
        ("lost", "blocks were lost with the server's memory when it restarted", "evicted"),
        (None, "were evicted to make room, or were lost", "nothing"),
    ],
)
def test_blocks_that_are_gone(cause: Cause | None, says: str, says_not: str) -> None:
    """What happened to them is named, and what helps against it."""
    found = sentence(reason="evicted", nearest="s0", cause=cause).text
    assert says in found
    assert says_not not in found


def test_what_is_quoted() -> None:
    """Control tokens are left out beside words, and backticks do not end what is quoted."""
    found = sentence(was="a one<|im_end|>", now="a `two`<|im_end|>", **DIVERGED)
    assert "`one` became `'two'`" in found.because
    found = sentence(was="a <|im_end|>", now="a b", **DIVERGED)
    assert "`<|im_end|>` became `b`" in found.because


def test_a_named_session_of_another_model() -> None:
    """It is that session: it continues no other one, and no new one is made."""
    found = sentence(reason="fingerprint_changed", nearest="s1", session_name="s1")
    assert "Session s1 is the one that another model" in found.because
    assert "starts again with this model." in found.because
    assert "continues" not in found.because
    found = sentence(reason="fingerprint_changed", nearest="s0")
    assert "It continues session s0, which another model" in found.because


def test_a_named_session_with_less_of_its_history() -> None:
    """It goes on from there, and gets no session of its own."""
    found = sentence(
        reason="shorter_history", nearest="s1", session_name="s1", min_cache_tokens=400
    )
    assert "too short" in found.because
    found = sentence(reason="shorter_history", nearest="s1", session_name="s1", reused_tokens=4)
    assert "has, or its last request once more, and the session goes on from here." in found.because
    assert "of its own" not in found.because


def test_a_named_session_that_is_new() -> None:
    """It is said of the session, because no other conversation was looked for."""
    assert "Session s1 is new." == sentence(session_name="n").because


DIVERGED: dict[str, Any] = {
    "reason": "diverged",
    "nearest": "s1",
    "diverged_part": "system_changed",
    "diverged_token": 5,
}

# (text before, text now, habit, words)
HABITS = [
    ("Today is Monday, so", "Today is Tuesday, so", "clock", "`Monday` became `Tuesday`"),
    ("date: 2026-11-24 end", "date: 2026-11-25 end", "clock", "`2026-11-24` became"),
    ("on 24.11.2026, at", "on 25.11.2026, at", "clock", "became `25.11.2026`"),
    ("time=1764000000 x", "time=1764000060 x", "clock", "became `time=1764000060`"),
    ("Nov 24 is", "Nov 25 is", "clock", "`24` became `25`"),
    ("on 3 May 2026", "on 4 May 2026", "clock", "`3` became `4`"),
    ("October 3rd, 9 of 10", "October 3rd, 8 of 10", None, "`9` became `8`"),
    ("you may take 3 steps", "you may take 4 steps", None, "`3` became `4`"),
    ("decide on 5 markets", "decide on 6 markets", None, "`5` became `6`"),
    ("maybe", "market", None, "`maybe` became `market`"),
    ("at 10:00 and 3 people", "at 10:00 and 8 people", None, "`3` became `8`"),
    ("it is 14:05, red", "it is 14:05, blue", None, "`red` became `blue`"),
    ("14:05 " + "9" * 70, "14:05 " + "8" * 70, None, f"`{'9' * QUOTED}…` became"),
    ("x-anthropic-billing-header: cch=1a;", "x-anthropic-billing-header: cch=2b;", "billing_line",
     "`cch=1a` became `cch=2b`"),
    ('{"a":1,"cache_control":{', '{"a":1,"b":{', "moved_cache_hints", "`cache_control` became `b`"),
    ("it is 14:05.<|im_end|>", "it is 14:06.<|im_end|>", "clock", "`14:05` became `14:06`"),
    ("one two", "one new two", None, "`new` was added"),
    ("one old two", "one two", None, "`old` was removed"),
    ("the same", "the same", None, "from token 5 on."),
]  # fmt: skip


@pytest.mark.parametrize(("was", "now", "habit", "words"), HABITS)
def test_habits_of_clients(was: str, now: str, habit: str | None, words: str) -> None:
    """Each is recognised by the words that differ, and those around them."""
    found = sentence(was=was, now=now, **DIVERGED)
    assert habit == found.habit
    assert words in found.because
    assert (found.advice or "").startswith(
        {
            "clock": "A clock in the system prompt",
            "billing_line": "A billing line",
            "moved_cache_hints": "A cache hint in the system prompt",
            None: "What changes from request to request belongs in the last message.",
        }[habit]
    )


def test_what_differs_is_quoted_as_it_is() -> None:
    """The pieces are there for a page that shows them as a difference."""
    found = sentence(was=BEFORE, now=AFTER, **DIVERGED)
    assert ("14:05", "14:06") == (found.was, found.now)
    same = sentence(**DIVERGED)
    assert (None, None, None) == (same.was, same.now, same.habit)


def test_few_pieces_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can send texts of thousands of signs, and to compare them all would take seconds."""
    compared: list[int] = []

    class Watched(SequenceMatcher[str]):
        def __init__(self, junk: None, one: Any, other: Any, *, autojunk: bool) -> None:
            compared.extend((len(one), len(other)))
            super().__init__(junk, one, other, autojunk=autojunk)

    monkeypatch.setattr(explanations, "SequenceMatcher", Watched)
    found = sentence(
        was="{" * 2000 + "a" + "}" * 2000, now="{" * 2000 + "b" + "}" * 2000, **DIVERGED
    )
    assert ("a", "b") == (found.was, found.now)
    found = sentence(was="{}" * 2000, now="[]" * 2000, **DIVERGED)
    assert found.was is not None
    assert found.was.startswith("{}{}")
    assert max(compared) <= 128


def test_an_unknown_part() -> None:
    """A journal of a newer server may have a part that this one has no words for."""
    found = sentence(**{**DIVERGED, "diverged_part": None})
    assert "The prompt differs from that of session s1" in found.because
    assert None is found.advice


def test_thoughts_that_stay() -> None:
    """What is rendered differently for another reason is no habit."""
    found = sentence(
        path="continuation", reason=None, rerendered_tokens=3, diverged_token=4, was="ab", now="cd"
    )
    assert None is found.habit
    assert "3 tokens are rendered differently now, from token 4 on: `ab` became `cd`" in found.text


ANSWER = "<|im_start|>assistant\n"
THOUGHT = f"{ANSWER}<think>\nLet me look.\n</think>\n\nIt is red."
EMPTY = f"{ANSWER}<think>\n\n</think>\n\nIt is red."
CALL = '<tool_call>\n{"name": "look"'
ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>I look"

CHANGED = "An earlier answer comes back differently if the client changed it, or if the model's"

# (text before, text now, how many thoughts the client sent, whose doing: words of the advice)
THOUGHTS = {
    "the client dropped it": (THOUGHT, f"{ANSWER}It is red.", 0, "have the client send it back"),
    "the client dropped it from the channel": (
        *(ANALYSIS, "<|start|>assistant<|channel|>final<|message|>Red", 0),
        "have the client send it back",
    ),
    "the client sent an empty one": (
        *(THOUGHT, EMPTY, 0),
        "have the client send it back",
    ),
    "the template leaves it out": (
        *(THOUGHT, f"{ANSWER}It is red.", 1),
        "The client sent thinking back, and the model's chat template leaves out",
    ),
    "there was none": (
        *(EMPTY, f"{ANSWER}It is red.", 0),
        "leaves it out of earlier ones. The client can do nothing",
    ),
    "there was none, of another model": (
        *("[INST][THINK][/THINK]Red", "[INST]Red", 2),
        "begins an answer with an empty thinking block",
    ),
    "it is there still, and a call is written otherwise": (
        *(f"<think>\nx\n</think>\n{CALL}", '<think>\nx\n</think>\n<tool_call>\n{"name":"look"', 0),
        CHANGED,
    ),
    "one comes after what differs": (
        *("red <|im_end|> and now <think>", "blue <|im_end|> and now <think>", 0),
        CHANGED,
    ),
    "it was added": (f"{ANSWER}It is red.", THOUGHT, 1, CHANGED),
}


@pytest.mark.parametrize("case", THOUGHTS)
def test_whose_doing_it_is_that_thinking_is_gone(case: str) -> None:
    """The client is blamed for nothing that the template did, and for none that was not there."""
    was, now, thoughts, advice = THOUGHTS[case]
    found = sentence(
        path="continuation",
        reason=None,
        rerendered_tokens=3,
        diverged_token=4,
        was=was,
        now=now,
        thoughts=thoughts,
    )
    is_clients = "have the client" in advice
    assert ("dropped_thinking" if is_clients else None) == found.habit
    assert advice in (found.advice or "")


def test_what_the_template_left_out_is_what_differs() -> None:
    """
    The next request's answer begins as the last one did; that is not what the two have in common.
    """
    begins = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    block = "<think>\n\n</think>\n\n"
    asks = "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    of: dict[str, Any] = {"path": "continuation", "reason": None, "rerendered_tokens": 7}
    was, now = f"{begins}{block}Noted.<|im_end|>", f"{begins}Noted.{asks}{block}"
    found = sentence(**of, diverged_token=18, was=was, now=now)
    assert (block, "") == (found.was, found.now)
    assert "from token 18 on: `<think> </think>` was removed." in found.because
    assert "begins an answer with an empty thinking block" in (found.advice or "")
    found = sentence(**of, diverged_token=18, was=f"{begins}Noted.", now=f"{begins}{block}Noted.")
    assert ("", block) == (found.was, found.now)


def test_what_was_prewarmed_in_the_meantime() -> None:
    """Nothing was lost by a thought that the template drops, so there is nothing to advise."""
    found = sentence(
        path="continuation",
        reason=None,
        rerendered_tokens=3,
        diverged_token=4,
        reused_tokens=9,
        tokens_from_slab=9,
        was="ab<think>\nx</think>",
        now="ab",
    )
    assert "computed before, while the server was idle" in found.because
    assert (None, None) == (found.habit, found.advice)


def test_short_names() -> None:
    """A UUID is cut, a name that a client gave is not; its tenant is left out."""
    assert "246af73a" == short("@alice/246af73a-52b1-4c5e-9c1f-3d1c2a4b5e6f")
    assert "notes" == short("notes")
