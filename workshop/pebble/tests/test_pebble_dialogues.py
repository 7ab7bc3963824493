"""Pebble's dialogues: what is held out of them, how they become prompts and tokens."""

from __future__ import annotations

import itertools
import json
import re
from random import Random
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from cairn.engine.model.builtin import builtin_directory
from cairn_pebble import dialogues
from cairn_pebble.dialogues import Dialogue
from cairn_pebble.evaluation import SKILLS
from cairn_pebble.recipe import STAGES
from cairn_pebble.sequences import TURN_END, Renderer
from cairn_pebble.texts import (
    everyday,
    first_messages,
    plain,
    plain_tools,
    words,
    written_tools,
)
from cairn_pebble.texts.by_hand import allows
from cairn_pebble.texts.values import person
from cairn_pebble.texts.words import Split
from workshop.pebble.tests.pebble_parts import DRAWS, pebble_renderer, pebble_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Pebble's own tokenizer."""
    return pebble_tokenizer()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    """What turns dialogues into tokens."""
    return pebble_renderer()


def test_the_same_seed_gives_the_same_dialogues():
    """A dialogue follows from its seed."""
    first, second = (
        [plain.dialogue(rng, Split.TRAIN) for _ in range(50)] for rng in (Random(7), Random(7))
    )
    assert first == second


@pytest.mark.parametrize("draw", [words.name, words.place, words.number, words.word, person])
def test_held_out_texts_are_never_trained_on(draw: Any):
    """Nothing that is drawn for the evaluation is drawn for the training."""
    rng = Random(1)
    trained, held_out = (
        {draw(rng, split).casefold() for _ in range(4000)}
        for split in (Split.TRAIN, Split.HELD_OUT)
    )
    assert not trained & held_out


def test_wordings_are_held_out():
    """
    Of the combinations of some parts, the training sees most and the evaluation the rest; every
    part is seen in training.
    """
    rng, some = Random(1), ("ab", "cdefgh", "ijklmn")
    trained, held_out = (
        {words.phrase(rng, split, *some) for _ in range(4000)}
        for split in (Split.TRAIN, Split.HELD_OUT)
    )
    assert not trained & held_out
    assert 72 == len(trained | held_out)
    assert len(held_out) > 4
    assert set("".join(some)) == set("".join(trained))


def test_what_the_weights_have_read_before_is_not_evaluated():
    """
    A sentence with nothing before or after it, and the other wordings of the first data, are not
    drawn for the evaluation, though some are held out of the training.
    """
    rng = Random(1)
    some = (
        ("", "Now, ", "Please ", "Oh, "),
        ("{} the {}", "{} one {}", "what is it"),
        ("", " again"),
    )
    drawn = {words.phrase(rng, Split.HELD_OUT, *some) for _ in range(2000)}
    assert drawn
    assert not drawn & {*some[1], "Now, {} the {}", "Please {} the {}", "Now, what is it"}
    held_out = {one for one in some[1] if words.is_held_out_wording(one)}
    assert held_out


def test_nothing_that_is_evaluated_is_trained_on(monkeypatch: pytest.MonkeyPatch):
    """
    Over all dialogues of the training and the evaluation: no combination of the parts of a sentence
    is in both, ignoring case and final punctuation; no name, town, password or number of the
    evaluation occurs anywhere in the training; no tool is in both.
    """
    wordings: dict[Split, set[str]] = {split: set() for split in Split}
    values: dict[Split, set[str]] = {split: set() for split in Split}
    read: dict[Split, list[str]] = {split: [] for split in Split}
    tools: dict[Split, set[str]] = {split: set() for split in Split}
    phrase, of_split = words.phrase, words.of_split

    def phrased(rng: Random, split: Split, *parts: Any) -> str:
        text = phrase(rng, split, *parts)
        wordings[split].add(text.strip(" ?.!").casefold())
        return text

    def valued(rng: Random, split: Split, draw: Any) -> str:
        value = of_split(rng, split, draw)
        values[split].add(value.casefold())
        return value

    for module in (dialogues, plain_tools, everyday, written_tools, first_messages):
        monkeypatch.setattr(module, "phrase", phrased)
    monkeypatch.setattr(words, "of_split", valued)
    rng = Random(2)
    draws = {Split.TRAIN: DRAWS, Split.HELD_OUT: [skill.draw for skill in SKILLS]}
    for split, some in draws.items():
        for draw in some:
            for _ in range(60):
                drawn = draw(rng, split)
                content = json.dumps([drawn.messages, drawn.tools], ensure_ascii=False)
                read[split].append(content.casefold())
                tools[split] |= {plain_name(tool) for tool in drawn.tools}
    assert min(map(len, wordings.values())) > 200
    assert min(map(len, values.values())) > 200
    assert min(map(len, tools.values())) > 60
    assert not wordings[Split.TRAIN] & wordings[Split.HELD_OUT]
    # A short made-up name may also be a word of some sentence, as "last" is.
    rare = {value for value in values[Split.HELD_OUT] if len(value) > 5 or value.isdigit()}
    assert len(rare) > 200
    seen = list(map(parts_of, read[Split.TRAIN]))
    assert not sorted(rare & {part for text in seen for part in text})
    # A value of several parts, such as a code or a date, does not occur in any text.
    several = sorted(value for value in values[Split.HELD_OUT] if not value.isalnum())[:150]
    assert len(several) > 100
    text = " | ".join(" ".join(text) for text in seen[::3])
    for value in several:
        assert f" {' '.join(parts_of(value))} " not in text, value
    assert not tools[Split.TRAIN] & tools[Split.HELD_OUT]


def parts_of(text: str) -> list[str]:
    """Words and numbers."""
    return re.findall(r"[^\W_]+", text)


def plain_name(tool: dict[str, Any]) -> str:
    """A tool's name in small letters, without the server's prefix."""
    name = re.sub(r"^mcp__[^_]+__", "", tool["function"]["name"])
    return re.sub(r"[^a-z]", "", name.casefold())


def test_four_thousand_tokens_are_four_thousand(renderer: Renderer):
    """The skill named after 4,000 tokens has that many between the fact and the question."""
    (skill,) = (one for one in SKILLS if "4,000" in one.name)
    rng, seen = Random(4), 0
    while seen < 8:
        dialogue = skill.draw(rng, Split.HELD_OUT)
        prompt = renderer.prompt(dialogue)
        told, *others = re.finditer(rf"(?<!\w){re.escape(dialogue.needed[0])}(?!\w)", prompt)
        if others:  # "garden" is in distracting texts as well
            continue
        seen += 1
        assert 4000 <= len(renderer.tokenizer.encode(prompt[told.end() :]).ids)


def test_first_messages_are_typed_in_many_ways():
    """Openings come in any case and with any punctuation; what an answer repeats stays as it is."""
    rng = Random(4)
    drawn = [first_messages.first_messages(rng, Split.TRAIN) for _ in range(4000)]
    said = [one.messages[-2]["content"] for one in drawn]
    assert len(set(said)) > 2500
    assert sum(text.islower() for text in said) > 300
    assert sum(text.isupper() for text in said) > 20
    assert sum(text[-1:].isalnum() for text in said) > 300
    assert sum(text.endswith(("!", "?")) for text in said) > 100
    greeted = 0
    for one in drawn:
        asked, answer = one.messages[-2]["content"], one.messages[-1]["content"]
        if found := re.fullmatch(r"Hello, (.+)! What can I do for you\?", answer):
            assert found[1] in asked
            greeted += 1
        if found := re.fullmatch(r"(\d) ([-+*]) (\d) = (\d)", answer):
            digits = [int(digit) for digit in re.findall(r"\d", asked)]
            assert sorted(digits) == sorted((int(found[1]), int(found[3])))
    assert greeted > 10


@pytest.mark.parametrize("split", Split)
def test_what_a_first_message_told_is_asked_for_later(split: Split):
    """
    The answer has the value that was told last; that a fact was not told is said to a first message
    only, because a later one may have been told before.
    """
    openings = [
        one
        for one in first_messages.OPENINGS
        if one.first or one.answer.startswith("Hello, {name}")
    ]
    rng, recalled, unknown = Random(4), 0, 0
    for _ in range(150):
        dialogue = first_messages.first_messages(rng, split, openings=openings)
        said = [one["content"] for one in dialogue.messages if one["role"] != "system"]
        names: list[str] = []
        for place, answer in enumerate(said[1::2]):
            if told := re.search(r"Hello, (.+)! What can I do for you\?$", answer):
                names.append(told[1])
            elif found := re.search(r"Your name is (.+)\.$", answer):
                assert names[-1] == found[1]
                recalled += len(names) > 1
            else:
                assert (0, True) == (place, answer.endswith(dialogues.UNKNOWN))
                unknown += 1
    assert min(recalled, unknown) > 5


@pytest.mark.parametrize("number", range(len(DRAWS)))
def test_a_prompt_is_a_server_s(renderer: Renderer, number: int):
    """Training and evaluation use what mlx-lm makes of the same conversation."""
    tokenizer: Any = load_tokenizer(builtin_directory())
    dialogue = DRAWS[number](Random(9), Split.TRAIN)
    assert renderer.prompt(dialogue) == tokenizer.apply_chat_template(
        dialogue.messages[:-1],
        tools=dialogue.tools or None,
        enable_thinking=dialogue.thinking,
        add_generation_prompt=True,
        tokenize=False,
    )


def test_thoughts_never_follow_empty_ones(renderer: Renderer, tokenizer: Tokenizer):
    """Empty thoughts mean that it should not think: no example teaches it to think anyway."""
    rng, thoughts = Random(6), 0
    for draw in DRAWS:
        for _ in range(12):
            ids = renderer.sequence(draw(rng, Split.TRAIN), rng).ids.tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False)
            assert "</think>\n\n<think>" not in text
            thoughts += text.count("<think>\n\n</think>")
    assert 100 < thoughts


def test_an_edit_changes_the_answer_that_is_due():
    """After an edit the old value is no longer expected, and no longer in the dialogue."""
    rng, seen = Random(5), 0
    while seen < 30:
        dialogue = dialogues.recall(rng, Split.HELD_OUT, questions=1)
        if not dialogue.edits:
            continue
        seen += 1
        ((place, before, after),) = dialogue.edits
        edited = dialogue.edited()
        assert before in dialogue.messages[place]["content"]
        assert after in edited.messages[place]["content"]
        assert after in edited.messages[-1]["content"]
        assert (after,) == edited.needed
        assert not any(stands(before, one["content"]) for one in edited.messages)


def stands(word: str, text: str) -> bool:
    """Whether a text contains a whole word."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


@pytest.mark.parametrize("number", range(len(DRAWS)))
def test_answers_are_learned(renderer: Renderer, tokenizer: Tokenizer, number: int):
    """
    Ids are those of the rendered text; the last answer is learned with its end, and other messages
    are not.
    """
    dialogue = DRAWS[number](Random(9), Split.TRAIN)
    sequence = renderer.sequence(dialogue)
    text = renderer.text(dialogue).removesuffix("\n")
    assert text == tokenizer.decode(sequence.ids.tolist(), skip_special_tokens=False)
    answer = tokenizer.encode(dialogue.messages[-1]["content"] + TURN_END).ids
    assert sequence.answers[-len(answer) :].all()
    assert not sequence.answers[-len(answer) - 1]
    assert not sequence.answers[0]


def test_how_answers_begin_is_learned(renderer: Renderer, tokenizer: Tokenizer):
    """
    After empty thoughts an answer is learned from its first token on, at any place; without them
    from its second.
    """
    thoughts = tokenizer.encode("<think>\n\n</think>\n\n").ids
    rng, behind, without = Random(3), 0, 0
    for _ in range(20):
        dialogue = dialogues.recall(rng, Split.TRAIN, questions=10)
        sequence = renderer.sequence(dialogue, rng)
        ids, answers = sequence.ids.tolist(), sequence.answers > 0
        for first in np.flatnonzero(answers[1:] & ~answers[:-1]) + 1:
            if ids[first - len(thoughts) : first] == thoughts:
                behind += 1
            elif "<think>" not in tokenizer.decode(ids[first : first + 1], False):
                without += 1
                assert tokenizer.decode(ids[first - 3 : first - 1]) == "assistant\n"
    assert behind > 50
    assert without > 50


def test_the_tokens_that_choose_an_answer_are_learned_more(renderer: Renderer):
    """In small talk the first tokens of an answer weigh more; in a recall all weigh the same."""
    weights = {
        draw.__name__: set(renderer.sequence(draw(Random(3), Split.TRAIN)).answers.tolist())
        for draw in (dialogues.talk, dialogues.recall)
    }
    assert weights == {"talk": {0.0, 1.0, 3.0}, "recall": {0.0, 1.0}}


def test_thoughts_are_learned_before_earlier_answers_too(renderer: Renderer, tokenizer: Tokenizer):
    """
    Some earlier answers follow the thoughts that Pebble would have had, and are learned from their
    first token on; a server never sees them there, because the template removes them.
    """
    rng, seen = Random(3), 0
    thinks, ends = (tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    for _ in range(20):
        dialogue = dialogues.recall(rng, Split.TRAIN, questions=10)
        assert renderer.prompt(dialogue).count("It was told to me") == 0
        sequence = renderer.sequence(dialogue, rng)
        ids, answers = sequence.ids.tolist(), sequence.answers > 0
        for first in np.flatnonzero((sequence.ids == thinks) & answers):
            last = ids.index(ends, first)
            assert answers[first : last + 1].all()
            thought = tokenizer.decode(ids[first + 1 : last]).strip()
            assert thought in [*dialogue.thoughts.values(), *_last_thought(dialogue)]
            seen += 1
    assert 20 < seen


def _last_thought(dialogue: Dialogue) -> list[str]:
    found = re.match(r"<think>\n(.+)\n</think>", dialogue.messages[-1]["content"])
    return [found[1]] if found else []


def test_a_name_has_the_same_tokens_everywhere(tokenizer: Tokenizer):
    """So that it can be copied: in a sentence, at its beginning, and in JSON."""
    rng = Random(2)
    for _ in range(200):
        name = words.name(rng, Split.HELD_OUT)
        alone = tokenizer.encode(name).ids
        for text in (f"My name is {name}.", f'{{"name": "{name}"}}', f"{name} is here."):
            ids = tokenizer.encode(text).ids
            assert any(alone == ids[start : start + len(alone)] for start in range(len(ids))), text


def test_no_sentence_of_the_later_kinds_is_one_that_was_evaluated(monkeypatch: pytest.MonkeyPatch):
    """
    Apart from its value, no fact or question in everyday words is a sentence of the first kinds
    that was held out of them: no held-out combination comes back in a different form.
    """
    told: dict[Split, set[str]] = {split: set() for split in Split}
    draws: dict[Split, list[Any]] = {
        Split.TRAIN: [everyday.everyday, everyday.not_told, everyday.chatter],
        Split.HELD_OUT: [skill.draw for skill in SKILLS[:9]],
    }
    for split, some in draws.items():
        rng = Random(3)
        with monkeypatch.context() as patch:
            if split is Split.TRAIN:
                # Sentences of the first kinds that come back as they are: their combinations are
                # compared above.
                patch.setattr(dialogues, "tell", lambda *_: "")
                patch.setattr(dialogues, "ask", lambda *_: "")
            for draw, _ in itertools.product(some, range(150)):
                for one in draw(rng, split).messages:
                    if one["role"] == "user":
                        told[split] |= set(re.split(r"(?<=[.!?]) ", masked(one["content"])))
    assert min(map(len, told.values())) > 500
    both = {
        one for one in told[Split.TRAIN] & told[Split.HELD_OUT] if words.is_held_out_wording(one)
    }
    # A text that is no combination of a fact or question occurs in distracting texts.
    assert not {one for one in both if "my" in one.split() and "{}" in one}


def masked(text: str) -> str:
    """A text without the names and numbers in it."""
    text = re.sub(r"(?<=[a-z,:] )[A-Z][a-z]+|\d+", "{}", text)
    return text.strip(" ?.!").casefold()


@pytest.mark.parametrize("stage", STAGES[-3:], ids=lambda stage: stage.name)
def test_enough_unknown_facts_are_read(renderer: Renderer, stage: Any):
    """
    Of the tokens of each later stage, at least one in thirty is in dialogues that end with an
    unknown fact.
    """
    rng, read, untold = Random(1), 0.0, 0.0
    for draw, share in stage.mix:
        some = [draw(rng, Split.TRAIN) for _ in range(6)]
        tokens = sum(len(renderer.sequence(one).ids) for one in some) * share
        read += tokens
        untold += tokens * all(one.skill == "untold" for one in some)
    assert 1 / 30 < untold / read < 1 / 10


@pytest.mark.parametrize("split", Split)
def test_unknown_facts_are_not_invented(split: Split):
    """
    If Pebble should say that it does not know a fact, no message states it, not even in passing;
    for a near one, a fact about the same person, thing or kind is stated.
    """
    rng, near = Random(5), 0
    for _ in range(150):
        dialogue = everyday.near_miss(rng, split)
        assert dialogue.needed[0] in dialogue.messages[-1]["content"]
        asked = dialogue.messages[-2]["content"]
        told = " ".join(one["content"] for one in dialogue.messages[:-2]).casefold()
        who = re.search(r"my ([a-z ]+)'s name", asked)
        assert who is None or f"my {who[1]}" not in told, (asked, told)
        topics = set(re.findall(r"[a-z]{4,}", asked.casefold()))
        near += bool(topics & set(re.findall(r"[a-z]{4,}", told)))
    assert near > 75


def test_what_was_said_last_is_so():
    """If a fact is stated again, the answer has the new value, and the old one is further up."""
    rng = Random(5)
    for _ in range(60):
        dialogue = everyday.everyday(rng, Split.HELD_OUT, questions=1, changed=True)
        said = [one["content"] for one in dialogue.messages if one["role"] == "user"]
        places = [place for place, text in enumerate(said) if dialogue.needed[0] in text]
        assert places
        assert places[-1] > 0
        assert dialogue.needed[0] in dialogue.messages[-1]["content"]


def test_values_begin_alike():
    """Most values of such a dialogue begin with the letters or digits of another one."""
    rng, alike = Random(5), 0
    for _ in range(40):
        values = everyday.similar_values(rng, Split.TRAIN, words.name, 4)
        assert 4 == len(set(values))
        alike += len({value[:3] for value in values}) == 1
    assert alike > 20


@pytest.mark.parametrize("split", Split)
def test_calls_are_of_the_schema(split: Split):
    """
    A call of a tool as developers write them is one that its schema allows, with nested, optional
    and listed arguments too; what a wish does not name is left out.
    """
    rng, names, kinds, nested, left_out = Random(5), set(), set(), 0, 0
    for _ in range(150):
        dialogue = written_tools.written_tools(rng, split)
        schemas = {one["function"]["name"]: one["function"] for one in dialogue.tools}
        for one in dialogue.messages:
            found = re.search(r"<tool_call>\n(.+)\n</tool_call>", one["content"])
            if not found:
                continue
            call = json.loads(found[1])
            schema = schemas[call["name"]]["parameters"]
            assert allows(schema, call["arguments"]), (schema, call)
            names.add(call["name"])
            kinds |= {type(value) for value in call["arguments"].values()}
            nested += any(isinstance(value, dict) for value in call["arguments"].values())
            left_out += len(schema["properties"]) > len(call["arguments"])
    assert {str, int, float, bool, list, dict} == kinds
    assert nested > 10
    assert left_out > 10
    for form in (r"[a-z]+(_[a-z]+)+", r"[a-z]+([A-Z][a-z]+)+", r"[a-z]+(-[a-z]+)+", r"mcp__.+"):
        assert any(re.fullmatch(form, name) for name in names), form
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)


def test_a_tool_of_the_plain_kind_stays_where_it_was():
    """A pair of verb and noun that both kinds of tools have is held out of both, or of none."""
    for does, what in itertools.product(("get", "delete", "send"), ("ticket", "invoice", "page")):
        plain = plain_tools.is_held_out_pair(does, what)
        assert plain is None or plain is written_tools.is_held_out_tool(does, what)
    assert plain_tools.is_held_out_pair("get", "invoice") is not None
