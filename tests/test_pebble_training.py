"""
How Pebble is made: the dialogues, what is held out of them, the judges, and the training itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_flatten
from mlx_lm.utils import load_tokenizer
from pebble import dialogues, words
from pebble.attention import causal_attention
from pebble.dialogues import Dialogue
from pebble.evaluation import SKILLS, SPOKEN, Skill, evaluate, spoken, tries
from pebble.export import export
from pebble.positions import GivenRope, spread_out
from pebble.recipe import STAGES, Shape, Stage
from pebble.sequences import TURN_END, Renderer, Sequence, template
from pebble.training import OtherTraining, Progress, Training, pool
from pebble.words import Split
from tokenizers import Tokenizer

from cairn.engine.builtin import builtin_directory

SMALL = Shape(hidden_size=32, layers=1, intermediate_size=32, heads=2, kv_heads=1, head_dim=16)
SHORT = Stage(name="short", tokens=300_000, longest=128, mix=((dialogues.echo, 1),))
DRAWS = [draw for stage in STAGES for draw, _ in stage.mix]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """
    Pebble's own.
    """
    return Tokenizer.from_file(str(builtin_directory() / "tokenizer.json"))


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> Renderer:
    """
    What turns dialogues into tokens.
    """
    return Renderer(tokenizer, template())


def test_the_same_seed_gives_the_same_dialogues():
    """
    A dialogue follows from its seed.
    """
    first, second = (
        [dialogues.dialogue(rng, Split.TRAIN) for _ in range(50)] for rng in (Random(7), Random(7))
    )
    assert first == second


@pytest.mark.parametrize("draw", [words.name, words.place, words.number, words.word])
def test_what_is_held_out_is_never_trained_on(draw: Any):
    """
    Nothing that is drawn for the evaluation is drawn for the training.
    """
    rng = Random(1)
    trained, held_out = (
        {draw(rng, split).casefold() for _ in range(4000)}
        for split in (Split.TRAIN, Split.HELD_OUT)
    )
    assert not trained & held_out


def test_wordings_are_held_out():
    """
    Of the combinations of some parts the training sees most and the evaluation the others; every
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
    A sentence with nothing before or behind it, and the other wordings of the first data, are not
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
    Of all dialogues of the training and all of the evaluation: no combination of the parts of a
    sentence is in both, also in other letters and without the sign at the end; no name, town,
    password or number of the evaluation stands anywhere in the training; no tool is in both.
    """
    wordings: dict[Split, set[str]] = {split: set() for split in Split}
    values: dict[Split, set[str]] = {split: set() for split in Split}
    texts: dict[Split, set[str]] = {split: set() for split in Split}
    tools: dict[Split, set[str]] = {split: set() for split in Split}
    phrase, of_split = words.phrase, words._of_split

    def phrased(rng: Random, split: Split, *parts: Any) -> str:
        text = phrase(rng, split, *parts)
        wordings[split].add(text.strip(" ?.!").casefold())
        return text

    def valued(rng: Random, split: Split, draw: Any) -> str:
        value = of_split(rng, split, draw)
        values[split].add(value.casefold())
        return value

    monkeypatch.setattr(dialogues, "phrase", phrased)
    monkeypatch.setattr(words, "_of_split", valued)
    rng = Random(2)
    draws = {Split.TRAIN: DRAWS, Split.HELD_OUT: [skill.draw for skill in SKILLS]}
    for split, some in draws.items():
        for draw in some:
            for _ in range(60):
                drawn = draw(rng, split)
                content = json.dumps([drawn.messages, drawn.tools], ensure_ascii=False)
                texts[split] |= set(re.findall(r"[^\W_]+", content.casefold()))
                tools[split] |= {tool["function"]["name"] for tool in drawn.tools}
    assert min(map(len, wordings.values())) > 200
    assert min(map(len, values.values())) > 200
    assert min(map(len, tools.values())) > 60
    assert not wordings[Split.TRAIN] & wordings[Split.HELD_OUT]
    # A short made-up name may be a word of some sentence as well, as "last" is.
    rare = {value for value in values[Split.HELD_OUT] if len(value) > 5 or value.isdigit()}
    assert len(rare) > 200
    assert not rare & texts[Split.TRAIN]
    assert not tools[Split.TRAIN] & tools[Split.HELD_OUT]


def test_four_thousand_tokens_are_four_thousand(renderer: Renderer):
    """
    The skill named after 4,000 tokens has as many between the fact and the question.
    """
    (skill,) = (one for one in SKILLS if "4,000" in one.name)
    rng, seen = Random(4), 0
    while seen < 8:
        dialogue = skill.draw(rng, Split.HELD_OUT)
        prompt = renderer.prompt(dialogue)
        told, *others = re.finditer(rf"(?<!\w){re.escape(dialogue.needed[0])}(?!\w)", prompt)
        if others:  # "garden" stands in texts to read past as well
            continue
        seen += 1
        assert 4000 <= len(renderer.tokenizer.encode(prompt[told.end() :]).ids)


@pytest.mark.parametrize("number", range(len(DRAWS)))
def test_a_prompt_is_a_server_s(renderer: Renderer, number: int):
    """
    What is trained and measured on is what mlx-lm makes of the same conversation.
    """
    tokenizer: Any = load_tokenizer(builtin_directory())
    dialogue = DRAWS[number](Random(9), Split.TRAIN)
    assert renderer.prompt(dialogue) == tokenizer.apply_chat_template(
        dialogue.messages[:-1],
        tools=dialogue.tools or None,
        enable_thinking=dialogue.thinking,
        add_generation_prompt=True,
        tokenize=False,
    )


def test_thoughts_never_stand_behind_empty_ones(renderer: Renderer, tokenizer: Tokenizer):
    """
    Empty thoughts say that it is not to think: nothing teaches it to think all the same.
    """
    rng, thoughts = Random(6), 0
    for draw in DRAWS:
        for _ in range(40):
            ids = renderer.sequence(draw(rng, Split.TRAIN), rng).ids.tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False)
            assert "</think>\n\n<think>" not in text
            thoughts += text.count("<think>\n\n</think>")
    assert 100 < thoughts


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.name)
def test_a_judge_knows_right_from_wrong(skill: Skill):
    """
    The answer that is due passes, one with other words does not, and neither does one that did not
    end.
    """
    rng = Random(3)
    for _ in range(20):
        dialogue = skill.draw(rng, Split.HELD_OUT)
        due = dialogue.messages[-1]["content"]
        assert skill.judge(dialogue, due, True)
        assert not skill.judge(dialogue, due, False)
        if skill.name == "ends its turn by itself":
            continue
        turned = "<think>" not in due
        wrong = f"<think>\nHm.\n</think>\n\n{due}" if turned else due.split("</think>")[1]
        wrong = wrong if "thinks" in skill.name else "I do not know."
        assert not skill.judge(dialogue, wrong, True)


@pytest.mark.parametrize(
    ("skill", "said"),
    [
        ("recalls a fact after 1 to 20 turns", "Your code is 4117."),  # a digit more
        ("recalls a fact after 1 to 20 turns", "<think>\nIt is 411."),  # only in the thoughts
        ("recalls a fact after 1 to 20 turns", "<think>\n\n</think>\n\n<think>\n411."),
        ("uses a tool's result", "The task: the total is 411 and the number is 17."),  # swapped
        ("ends its turn by itself", ""),
        ("thinks if asked to, and only then", "<think>\n\n</think>\n\nYour code is 411."),
        ("thinks if asked to, and only then", "<think>\nI know it.\n</think>\n\n"),
        ("thinks if asked to, and only then", "Your code is 411."),
    ],
)
def test_a_near_miss_is_wrong(skill: str, said: str):
    """
    What only looks right is wrong.
    """
    due = "The task: the total is 17 and the number is 411."
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": due}]
    dialogue = Dialogue("recall", messages, thinking=True, needed=("411",))
    assert not judge_of(skill)(dialogue, said, True)


@pytest.mark.parametrize(
    "said",
    [
        "Your name is not Jordis.",
        "Your name is Torvo. Your name is Jordis.",
        "Your sister's name is Jordis.",
        "Your name is Jordi.",
        "Jordis",
    ],
)
def test_only_the_answer_that_is_due_recalls(said: str):
    """
    Where the value stands, but not as the answer to what was asked, nothing was recalled.
    """
    messages = [
        {"role": "user", "content": "What is my name?"},
        {"role": "assistant", "content": "Your name is Jordis."},
    ]
    dialogue = Dialogue("recall", messages, needed=("Jordis",))
    for skill in (one for one in SKILLS if one.looked_up):
        assert skill.judge(dialogue, "Your name is Jordis.", True)
        assert not skill.judge(dialogue, said, True)


@pytest.mark.parametrize(
    "called",
    [
        '{"name": "find_task", "arguments": {"number": 17.0, "place": "Halden"}}',
        '{"name": "find_task", "arguments": {"number": "17", "place": "Halden"}}',
        '{"name": "find_task", "arguments": {"number": 17}}',
        '{"name": "find_tasks", "arguments": {"number": 17, "place": "Halden"}}',
        '{"name": "x", "name": "find_task", "arguments": {"number": 17, "place": "Halden"}}',
        '{"name": "find_task", "arguments": {"number": 17, "place": "Halden"}',
    ],
)
def test_a_call_is_exact(called: str):
    """
    Types and names of arguments count, each key stands once, and the order of keys is free.
    """
    due = '{"name": "find_task", "arguments": {"number": 17, "place": "Halden"}}'
    other_order = '{"arguments": {"place": "Halden", "number": 17}, "name": "find_task"}'
    dialogue = Dialogue("tool call", needed=(due,))
    judge = judge_of("calls the right tool of 1 to 30")
    for right in (due, other_order):
        assert judge(dialogue, f"<tool_call>\n{right}\n</tool_call>", True)
    assert not judge(dialogue, f"<tool_call>\n{called}\n</tool_call>", True)


def judge_of(skill: str) -> Any:
    """
    By name.
    """
    (judge,) = (one.judge for one in SKILLS if one.name == skill)
    return judge


def test_what_was_looked_up_is_told_by_kind(renderer: Renderer):
    """
    An evaluation says how many values of each kind were right; the kinds add up to the whole, and
    each is met.
    """
    results = list(evaluate(renderer, lambda prompt: ("", True), 60, 0))
    kinds: set[str] = set()
    for one in results:
        if one.skill.looked_up:
            assert one.tried == sum(tried for tried, _ in one.kinds.values())
            kinds |= one.kinds.keys()
        else:
            assert {} == one.kinds
    assert 4 == len(kinds)
    assert tries(60) == sum(one.tried for one in results)


def test_what_is_written_by_hand_is_in_no_training(renderer: Renderer):
    """
    No training dialogue has such a message, also in other letters; to say the value is right, and
    to say another thing is not.
    """
    rng, said = Random(8), set()
    for draw in DRAWS:
        for _ in range(60):
            said |= {one["content"].casefold() for one in draw(rng, Split.TRAIN).messages}
    for told, asked, _ in SPOKEN:
        assert told.casefold() not in said, told
        assert f"{told.casefold()} {asked.casefold()}" not in said
    values = iter([value for _, _, value in SPOKEN])
    assert all(one.right for one in spoken(renderer, lambda _: (f"It is {next(values)}.", True)))
    assert not any(one.right for one in spoken(renderer, lambda _: ("It is Nobody.", True)))


def test_an_edit_changes_the_answer_that_is_due():
    """
    After an edit the old value is due no more, and stands in the dialogue no more.
    """
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
    """
    Whether a word stands in a text by itself.
    """
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


@pytest.mark.parametrize("number", range(len(DRAWS)))
def test_answers_are_learned(renderer: Renderer, tokenizer: Tokenizer, number: int):
    """
    Ids are those of the rendered text; the last answer is learned with its end, and what others say
    is not.
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
    Behind empty thoughts an answer is learned from its first token on, wherever it stands; without
    them from its second.
    """
    thoughts = tokenizer.encode("<think>\n\n</think>\n\n").ids
    rng, behind, without = Random(3), 0, 0
    for _ in range(20):
        dialogue = dialogues.recall(rng, Split.TRAIN, questions=10)
        sequence = renderer.sequence(dialogue, rng)
        ids, answers = sequence.ids.tolist(), sequence.answers
        for first in np.flatnonzero(answers[1:] & ~answers[:-1]) + 1:
            if ids[first - len(thoughts) : first] == thoughts:
                behind += 1
            elif "<think>" not in tokenizer.decode(ids[first : first + 1], False):
                without += 1
                assert tokenizer.decode(ids[first - 3 : first - 1]) == "assistant\n"
    assert behind > 50
    assert without > 50


def test_thoughts_are_learned_before_earlier_answers_too(renderer: Renderer, tokenizer: Tokenizer):
    """
    Some earlier answers stand behind the thoughts that Pebble would have had, learned from their
    first token on; a server never sees them there, since the template takes them out.
    """
    rng, seen = Random(3), 0
    thinks, ends = (tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    for _ in range(20):
        dialogue = dialogues.recall(rng, Split.TRAIN, questions=10)
        assert renderer.prompt(dialogue).count("It was told to me") == 0
        sequence = renderer.sequence(dialogue, rng)
        ids, answers = sequence.ids.tolist(), sequence.answers
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


def test_no_dialogue_is_left_out_of_the_batches(renderer: Renderer, monkeypatch: Any):
    """
    Whatever was drawn and is short enough is learned from, the shortest too, in batches of one
    shape for each width; their gaps are padding that counts nothing.
    """
    drawn: list[Sequence] = []
    whole = Renderer.sequence

    def remembering(self: Renderer, dialogue: Dialogue, rng: Random | None = None) -> Sequence:
        drawn.append(whole(self, dialogue, rng))
        return drawn[-1]

    monkeypatch.setattr(Renderer, "sequence", remembering)
    stage = attrs.evolve(STAGES[-2], longest=1024)

    found = pool(renderer, stage, Random(1), 4096)

    learned = [one for one in drawn if len(one.ids) - 1 <= stage.longest]
    assert 20 < len(learned) < len(drawn)
    assert min(len(one.ids) for one in learned) < 100
    assert sum(int(one.answers[1:].sum()) for one in learned) == sum(
        int(batch.counts.sum()) for batch in found
    )
    due = sorted(int(one) for sequence in learned for one in sequence.ids[1:][sequence.answers[1:]])
    got = [int(token) for batch in found for token in batch.due[batch.counts > 0]]
    assert due == sorted(got)
    shapes = {batch.ids.shape for batch in found}
    assert len(shapes) == len({width for _, width in shapes})
    assert all(rows == max(1, 4096 // width) for rows, width in shapes)


def test_a_name_is_the_same_tokens_wherever_it_stands(tokenizer: Tokenizer):
    """
    So that it can be copied: in a sentence, at its beginning, and in JSON.
    """
    rng = Random(2)
    for _ in range(200):
        name = words.name(rng, Split.HELD_OUT)
        alone = tokenizer.encode(name).ids
        for text in (f"My name is {name}.", f'{{"name": "{name}"}}', f"{name} is here."):
            ids = tokenizer.encode(text).ids
            assert any(alone == ids[start : start + len(alone)] for start in range(len(ids))), text


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(renderer: Renderer, tmp_path: Path):
    """
    Left behind a checkpoint and taken up by a new process' worth of state, it ends at the same
    weights, bit for bit. What a checkpoint of another training has is not taken.
    """

    class Left(Exception):
        pass

    seen: list[int] = []

    def leaves(stands: Progress) -> None:
        seen.append(stands.tokens)
        if len(seen) == 2:
            raise Left

    longer = attrs.evolve(SHORT, name="longer", longest=256, tokens=150_000)
    stages = (attrs.evolve(SHORT, tokens=200_000), longer)

    def training(folder: str, seed: int = 0, stages: tuple[Stage, ...] = stages) -> Training:
        (tmp_path / folder).mkdir(exist_ok=True)
        return Training(renderer, SMALL, stages, tmp_path / folder, seed=seed)

    told: list[Progress] = []
    rest: list[Progress] = []
    whole = training("whole")
    whole.run(told.append)
    with pytest.raises(Left):
        training("left").run(leaves)
    again = training("left")
    again.run(rest.append)

    assert told[0].loss > told[1].loss
    assert told[1:] == rest
    with pytest.raises(OtherTraining, match="another recipe"):
        training("left", seed=1)
    other_mix = (attrs.evolve(stages[0], mix=((dialogues.talk, 1),)), longer)
    for others in (stages[:1], other_mix, (stages[0], attrs.evolve(longer, rates=(1.0, 0.5)))):
        with pytest.raises(OtherTraining, match="another recipe"):
            training("left", stages=others)
    # A recipe may go on where it ended.
    training("left", stages=(*stages, attrs.evolve(SHORT, name="more")))
    before, after = (dict(tree_flatten(one.model.parameters())) for one in (whole, again))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert np.array_equal(weight, after[name]), name


def test_given_positions_turn_as_counted_ones_do():
    """
    At 0, 1, 2, ... queries turn as by the embeddings that a server uses.
    """
    shape = Shape()
    states = mx.random.normal((2, 3, 700, shape.head_dim), key=mx.random.key(1))
    rope = GivenRope(shape.head_dim, shape.rope_theta)
    rope.positions = mx.tile(mx.arange(700, dtype=mx.float32), (2, 1))
    counted = RoPE(shape.head_dim, base=shape.rope_theta)(states)
    assert np.allclose(counted, rope(states), atol=1e-4)


def test_attention_in_blocks_is_attention():
    """
    Values and gradients are those of MLX's own, whatever the length.
    """
    for tokens in (1, 64, 200):
        queries, keys, values = (
            mx.random.normal((2, heads, tokens, 16), key=mx.random.key(heads + place))
            for place, heads in enumerate((4, 2, 2))
        )

        def usual(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            attend = mx.fast.scaled_dot_product_attention
            return attend(queries, keys, values, scale=0.25, mask="causal")

        def blocks(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            return causal_attention(queries, keys, values, scale=0.25)

        def gradients(attend: Any, given: tuple[mx.array, ...]) -> Any:
            return mx.grad(lambda *all_: (attend(*all_) ** 2).sum(), argnums=(0, 1, 2))(*given)

        given = (queries, keys, values)
        assert np.allclose(usual(*given), blocks(*given), atol=1e-5)
        for due, found in zip(gradients(usual, given), gradients(blocks, given), strict=True):
            assert np.allclose(due, found, atol=1e-3)


def test_turns_are_spread_and_left_whole():
    """
    Positions jump where a turn begins, and nowhere else; none is too high.
    """
    rng, turns, spread = Random(4), np.array([0, 10, 40]), 0
    for _ in range(200):
        steps = np.diff(spread_out(60, turns, 500, rng))
        assert {1.0} == set(np.delete(steps, [9, 39]))
        assert steps.sum() < 500
        spread += steps.sum() > 59
    assert 100 < spread < 200


def test_what_is_exported_is_what_was_trained(
    renderer: Renderer, tokenizer: Tokenizer, tmp_path: Path
):
    """
    mlx-lm loads the exported directory, and gives the logits of the model in training.
    """
    from mlx_lm import load

    training = Training(renderer, SMALL, (SHORT,), tmp_path)
    export(tmp_path / "model", training.model, tokenizer, template(), SMALL)
    loaded: Any = load(str(tmp_path / "model"))
    model, read = loaded
    ids = mx.array([read.encode("What is a cairn?")])
    assert np.array_equal(training.model(ids), model(ids))
    assert template() == read.chat_template


def test_the_evaluation_counts(renderer: Renderer):
    """
    Who always says the same ends each turn, thinks never, and recalls nothing.
    """
    results = {
        one.skill.name: (one.right, one.tried)
        for one in evaluate(renderer, lambda prompt: ("Hm.", True), 8, seed=1)
    }
    assert (8, 8) == results["ends its turn by itself"]
    assert (0, 8) == results["recalls a fact after 1 to 20 turns"]
    assert (0, 2) == results["recalls a fact across 4,000 tokens"]


def test_the_recipe_is_what_ships():
    """
    The shape in the recipe is that of the weights in the package.
    """
    config = json.loads((builtin_directory() / "config.json").read_text("utf-8"))
    shape = attrs.asdict(Shape())
    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names |= {"kv_heads": "num_key_value_heads"}
    assert shape == {name: config[names.get(name, name)] for name in shape}
