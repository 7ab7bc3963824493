"""
The tokens that a grammar allows: even random choices among them lead to what was requested.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import decoders

from cairn.engine.answer import grammar as answer_grammar
from cairn.engine.answer.grammar import CannotConstrain, Constraint, Grammar, grammar_of
from cairn.engine.answer.grammar_matcher import GrammarCompiler, GrammarMatcher
from cairn.engine.answer.markers import SAYING, THINKING, Markers, markers_of
from cairn.engine.answer.parts import AnswerForm, AnswerParts, Called
from cairn.engine.errors import GrammarDeadEnd
from tests.support.models.tokenizers import KINDS, wrapped

STONE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "weight": {"type": "integer", "minimum": 0, "maximum": 900},
        "kind": {"enum": ["granite", "slate", "Über-石"]},
        "wet": {"type": "boolean"},
        "marks": {
            "type": "array",
            "items": {"type": "number", "minimum": 0, "maximum": 1},
            "maxItems": 3,
        },
    },
    "required": ["name", "weight", "kind"],
    "additionalProperties": False,
}
TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "properties": {"at": {"$ref": "#/$defs/place"}},
                "required": ["at"],
                "additionalProperties": False,
                "$defs": {"place": {"type": "string", "maxLength": 20}},
            },
        },
    },
    {"type": "function", "function": {"name": 'look "round"', "description": "No parameters."}},
)
BOTH = ("look", 'look "round"')


@attrs.frozen
class Model:
    """All of a model that grammars are about."""

    tokenizer: Any
    markers: Markers
    ends: frozenset[int]
    tokens: int
    compiler: GrammarCompiler

    def form(self, **changes: Any) -> AnswerForm:
        """How its answers are taken apart."""
        return AnswerForm(**{"markers": self.markers, "held": True, **changes})

    def matcher(self, constraint: Constraint, **form: Any) -> GrammarMatcher:
        """What an answer is held by."""
        return self.compiler.compile(grammar_of(constraint, self.form(**form)))

    def walk(self, matcher: GrammarMatcher, seed: int, *, most: int = 600) -> list[int]:
        """Choose random allowed tokens, up to an end token or the limit."""
        drawn, answer = random.Random(seed), list[int]()
        while len(answer) < most:
            token = drawn.choice(np.flatnonzero(matcher.allowed(answer)).tolist())
            if token in self.ends:
                break
            answer.append(token)
        return answer

    def said(self, tokens: Sequence[int]) -> str:
        """The text of an answer."""
        text: str = self.tokenizer.decode(tokens)
        return text

    def first(self, matcher: GrammarMatcher, *answer: str) -> set[str]:
        """The texts of the tokens that may come after a text."""
        ids = self.tokenizer.encode("".join(answer), add_special_tokens=False)
        return {self.said([token]) for token in np.flatnonzero(matcher.allowed(ids)).tolist()}

    def follow(self, matcher: GrammarMatcher, text: str) -> bool:
        """Whether a text may be an answer, token for token and to its end."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        taken = all(matcher.allowed(ids[:place])[token] for place, token in enumerate(ids))
        return taken and bool(matcher.allowed(ids)[sorted(self.ends)].all())


@pytest.fixture(scope="module")
def model(model_directory: Path) -> Model:
    """The random model's tokenizer, with Qwen's markers."""
    tokenizer = load_tokenizer(model_directory)
    known = markers_of(tokenizer)
    ends = frozenset(tokenizer.encode("<|im_end|><|endoftext|>"))
    tokens = len(tokenizer.get_vocab()) + 8
    compiler = GrammarCompiler(tokenizer, ends=ends, tokens=tokens, markers=known.texts)
    return Model(tokenizer, known, ends, tokens, compiler)


def is_stone(text: str) -> bool:
    """Whether a text is JSON of the schema."""
    found = json.loads(text)
    return (
        {"name", "weight", "kind"} <= found.keys() <= STONE["properties"].keys()
        and len(found["name"]) <= 6
        and type(found["weight"]) is int
        and 0 <= found["weight"] <= 900
        and found["kind"] in STONE["properties"]["kind"]["enum"]
        and isinstance(found.get("wet", True), bool)
        and len(found.get("marks", [])) <= 3
        and all(0 <= mark <= 1 for mark in found.get("marks", []))
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_way_through_a_schema_ends_in_it(model: Model, seed: int) -> None:
    """Tokens at random, of those that may come, are JSON of the schema where they end."""
    text = model.said(model.walk(model.matcher(Constraint(schema=STONE)), seed))
    assert is_stone(text), text


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_any_way_through_calls_ends_in_them(model: Model, seed: int, once: bool) -> None:
    """
    Tokens at random, of those that may come, are calls of the tools that may be called and nothing
    else, however many markers stand in their arguments.
    """
    calls = BOTH[:1] if once else BOTH
    matcher = model.matcher(Constraint(calls=calls, one_call=once), tools=TOOLS)
    tokens = model.walk(matcher, seed, most=200)
    parts = AnswerParts(model.form(tools=TOOLS), name="a")
    steps = [parts.add(model.said(tokens)), parts.finish(complete=True)]
    found = [part for one in steps for part in one.parts]
    whole = [part for part in found if isinstance(part, Called)]
    assert {one.name for one in whole} <= set(calls)
    assert whole
    if len(tokens) < 200:
        assert found == whole
        assert all(set(json.loads(one.arguments)) <= {"at"} for one in whole)
        assert not once or len(whole) == 1


def test_calls_are_written_as_templates_write_them(model: Model) -> None:
    """Calls that a client sends back are rendered as they were generated, so reuse works."""
    matcher = model.matcher(Constraint(calls=BOTH), tools=TOOLS)
    look = (
        '<tool_call>\n{"name": "look", "arguments": {"at": "the </tool_call> sea"}}\n</tool_call>'
    )
    other = '<tool_call>\n{"name": "look \\"round\\"", "arguments": {}}\n</tool_call>'
    assert model.follow(matcher, look)
    assert model.follow(matcher, f"{look}\n{other}\n{look}")
    assert not model.follow(matcher, look.replace('": {', '":{'))
    assert not model.follow(matcher, look.replace('"at"', '"on"'))
    assert not model.follow(matcher, look.replace("look", "leap"))
    assert not model.follow(matcher, f"{look} {other}")
    single = model.matcher(Constraint(calls=BOTH, one_call=True), tools=TOOLS)
    assert model.follow(single, other)
    assert not model.follow(single, f"{look}\n{other}")


def test_json_or_calls(model: Model) -> None:
    """Where both are in order, an answer is one of them and not both."""
    matcher = model.matcher(Constraint(schema={"type": "object"}, calls=BOTH), tools=TOOLS)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": ""}}\n</tool_call>'
    assert model.follow(matcher, '{"a": [1, {"b": null}]}')
    assert model.follow(matcher, call)
    assert not model.follow(matcher, '{"a": 1}' + call)
    assert not model.follow(matcher, "Well, {}")


def test_white_space_has_an_end(model: Model) -> None:
    """JSON may be written on several lines with indentation, but not with endless white space."""
    matcher = model.matcher(Constraint(schema=STONE))
    stone = {"name": "a", "weight": 1, "kind": "slate", "marks": [1, 0.5]}
    for indent in (None, 2, 8, "\t"):
        assert model.follow(matcher, json.dumps(stone, indent=indent))
    assert model.follow(matcher, json.dumps(stone, separators=(",", ":")))
    assert model.first(matcher, "{\n" + " " * 39) >= {" ", '"'}
    for end in ("{\n" + " " * 40, "{ "):
        assert not any(text.isspace() for text in model.first(matcher, end))


@pytest.mark.parametrize(
    ("form", "before", "may_be"),
    [
        ({}, "", True),
        ({}, "<think>\nA b\n</think>\n\n", False),
        ({"may_think": True}, "", True),
        ({"may_think": True}, "<think>\nA <b>\n</think>\n\n", True),
        ({"may_think": True}, "<think></think>", True),
        ({"may_think": True}, "A b</think>", False),
        ({"begins": THINKING}, "A b\n</think>\n", True),
        ({"begins": THINKING}, "", False),
        ({"begins": THINKING}, "A b</think>\n\n\n", False),
        ({"begins": THINKING}, "A </think> b</think>", False),
    ],
)
def test_thoughts_before_the_answer(
    model: Model, form: dict[str, Any], before: str, may_be: bool
) -> None:
    """Thoughts are free, where there may be any, and the constraint holds behind them."""
    matcher = model.matcher(Constraint(schema=STONE), **form)
    stone = '{"name": "a", "weight": 1, "kind": "slate"}'
    assert may_be == model.follow(matcher, before + stone)


def test_a_thought_ends_where_its_reader_sees_the_end(model: Model) -> None:
    """
    At random, with markers in pieces too: what is reported as said is the JSON, and where a call
    may follow no thought has one in it.
    """
    for seed in range(8):
        drawn, answer = random.Random(seed), list[int]()
        matcher = model.matcher(Constraint(calls=BOTH), tools=TOOLS, begins=THINKING)
        pieces = ["<", "/", "think", ">", "tool", "_", "call", "</think>", "<tool_call>", " a"]
        liked = {model.tokenizer.encode(piece, add_special_tokens=False)[0] for piece in pieces}
        for place in range(300):
            allowed = np.flatnonzero(matcher.allowed(answer)).tolist()
            some = [token for token in allowed if token in liked]
            token = drawn.choice(some if some and place < 60 else allowed)
            if token in model.ends:
                break
            answer.append(token)
        text = model.said(answer)
        thought, closed, rest = text.partition("</think>")
        assert "<tool_call>" not in thought
        if closed and rest.strip("\n"):
            assert "<tool_call>\n".startswith(rest.lstrip("\n")[:12])


def test_what_may_come_follows_from_the_tokens_alone(model: Model) -> None:
    """
    A guide that went along says what one says that was just made, and goes back where it is asked
    for less: the same answer has the same choices, whatever was asked before (P1).
    """
    form = {"tools": TOOLS, "may_think": True}
    constraint = Constraint(schema=STONE, calls=BOTH)
    went = model.matcher(constraint, **form)
    answers = [model.walk(went, seed, most=80) for seed in range(3)]
    for answer in answers:
        for place in (*range(0, len(answer), 7), len(answer) // 2, 0):
            fresh = model.matcher(constraint, **form)
            expected = fresh.allowed(answer[:place])
            np.testing.assert_array_equal(expected, went.allowed(answer[:place]))


def test_a_fork_follows_tokens_that_may_be_rejected(model: Model) -> None:
    """The matcher stays where it is until it adopts the fork, and then is where the fork is."""
    matcher, alone = (model.matcher(Constraint(schema=STONE)) for _ in range(2))
    tokens = model.walk(alone, 3, most=9)
    first, second, third = (alone.allowed(tokens[:place]) for place in (0, 1, 9))
    assert (first != second).any()
    assert (second != third).any()

    assert (first == matcher.allowed(())).all()
    fork = matcher.fork()
    assert (second == fork.allowed(tokens[:1])).all()
    further = fork.fork()
    assert (third == further.allowed(tokens)).all()
    assert (second == fork.allowed(tokens[:1])).all()
    assert (first == matcher.allowed(())).all()
    matcher.adopt(further)
    # A parser that has taken the tokens already would refuse them a second time.
    assert (third == matcher.allowed(tokens)).all()


def test_ends_are_allowed_where_the_grammar_ends(model: Model) -> None:
    """All tokens that end an answer, where it may end, and there alone."""
    matcher = model.matcher(Constraint(schema={"type": "integer", "minimum": 1, "maximum": 12}))
    ends = sorted(model.ends)
    for text, may_end, may_go_on in [("", False, True), ("1", True, True), ("12", True, False)]:
        found = matcher.allowed(model.tokenizer.encode(text, add_special_tokens=False))
        assert [may_end] * 2 == found[ends].tolist()
        found[ends] = False
        assert may_go_on == bool(found.any())


def test_no_token_without_a_text_is_ever_drawn(model: Model) -> None:
    """Special tokens have no place in a text, and a row of logits is longer than the vocabulary."""
    matcher = model.matcher(Constraint(schema={"type": "string"}), may_think=True)
    turn = model.tokenizer.encode("<|im_start|>")
    found = matcher.allowed(model.tokenizer.encode('"a'))
    assert (model.tokens,) == found.shape
    assert not found[[*turn, *range(model.tokens - 8, model.tokens)]].any()
    # A marker is text like any other.
    assert found[model.tokenizer.encode("<think>")].all()
    # So is one that the tokenizer calls special, and the format has for a marker.
    compiler = GrammarCompiler(
        model.tokenizer, ends=model.ends, tokens=model.tokens, markers=("<|im_start|>",)
    )
    marked = compiler.compile(grammar_of(Constraint(schema={"type": "string"}), AnswerForm()))
    assert marked.allowed(model.tokenizer.encode('"a'))[turn].all()


REFUSED: dict[str, tuple[Constraint, dict[str, Any], str, int | None, str]] = {
    "unknown type": (
        Constraint(schema={"properties": {"a": {"type": "strin"}}}),
        {},
        "schema",
        None,
        "Invalid type: strin",
    ),
    "strict": (
        Constraint(schema={"type": "array", "uniqueItems": True}, strict=True),
        {},
        "schema",
        None,
        'Unimplemented keys: ["uniqueItems"]',
    ),
    "nowhere": (
        Constraint(schema={"$ref": "#/none"}),
        {},
        "schema",
        None,
        "'/none' does not exist",
    ),
    "the web": (Constraint(schema={"$ref": "http://a/b"}), {}, "schema", None, "not present"),
    "nothing": (
        Constraint(schema={"type": "integer", "minimum": 5, "maximum": 3}),
        {},
        "schema",
        None,
        "minimum (5) is greater than maximum (3)",
    ),
    "itself": (Constraint(schema={"$ref": "#"}), {}, "schema", None, "no answer can satisfy it"),
    "pattern": (
        Constraint(schema={"type": "string", "pattern": "((("}),
        {},
        "schema",
        None,
        "unclosed group",
    ),
    "too much": (
        Constraint(
            schema={"allOf": [{"pattern": f".*a.{{30}}{n}"} for n in range(4)], "type": "string"}
        ),
        {},
        "schema",
        None,
        "Unable to determine if regex is empty",
    ),
    "a large multiple": (
        Constraint(schema={"type": "integer", "multipleOf": 20011}),
        {},
        "schema",
        None,
        "multipleOf are too large together",
    ),
    "a large common multiple": (
        Constraint(schema={"allOf": [{"multipleOf": 12.7}, {"multipleOf": 8.9}]}),
        {},
        "schema",
        None,
        "multipleOf are too large together",
    ),
    "a tool's multiple beside others": (
        Constraint(calls=BOTH),
        {
            "tools": (
                {"function": {"name": "look", "parameters": {"items": [{"multipleOf": 6007}]}}},
                {"function": {"name": BOTH[1], "parameters": {"$defs": {"a": {"multipleOf": 7}}}}},
            )
        },
        "schema",
        1,
        "multipleOf are too large together",
    ),
    "a multiple that a reference finds among values": (
        Constraint(schema={"$ref": "#/default", "default": {"multipleOf": 20011}}),
        {},
        "schema",
        None,
        "multipleOf are too large together",
    ),
    "many that may be left out": (
        Constraint(schema={"items": {"properties": {f"p{n}": {} for n in range(481)}}}),
        {},
        "schema",
        None,
        "has 481 optional properties",
    ),
    "many that may be left out, of alternatives": (
        Constraint(
            schema={
                "anyOf": [
                    {"properties": {f"{kind}{n}": {} for n in range(241)}} for kind in ("p", "q")
                ]
            }
        ),
        {},
        "schema",
        None,
        "has 482 optional properties",
    ),
    "a multiple of nothing": (
        Constraint(schema={"type": "integer", "multipleOf": True}),
        {},
        "schema",
        None,
        "multipleOf",
    ),
    "a tool's": (
        Constraint(calls=BOTH),
        {"tools": (TOOLS[1], {"function": {"name": "look", "parameters": {"properties": 3}}})},
        "schema",
        1,
        "properties must be an object",
    ),
    "a tool's, strict": (
        Constraint(calls=BOTH),
        {
            "tools": (
                {"function": {"name": "look", "strict": True, "parameters": {"not": {}}}},
                TOOLS[1],
            )
        },
        "schema",
        0,
        'Unimplemented keys: ["not"]',
    ),
    "no object": (
        Constraint(calls=BOTH),
        {"tools": ({"function": {"name": "look", "parameters": []}},)},
        "schema",
        0,
        "it is not an object",
    ),
    "no tool": (Constraint(calls=("leap",)), {"tools": TOOLS}, "calls", None, "is in `tools`"),
    "another format": (
        Constraint(calls=BOTH),
        {"tools": TOOLS, "markers": Markers(calling=("[", "]"), format="glm47")},
        "calls",
        None,
        "(glm47) is not supported; supported are json_tools",
    ),
    "states of its own": (
        Constraint(schema=STONE),
        {"markers": Markers(edges={SAYING: (("<eom>", "header"),)}, first="header")},
        "answer",
        None,
        "answers is not supported",
    ),
    "too long": (
        Constraint(schema={"enum": ["a" * 100 + str(n) for n in range(2000)]}),
        {},
        "answer",
        None,
        f"the limit is {answer_grammar.GRAMMAR_BYTES_MAX}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced(model: Model, name: str) -> None:
    """
    It is refused before the answer begins, and it is said what is wrong and with which schema.
    """
    constraint, form, about, tool, fact = REFUSED[name]
    with pytest.raises(CannotConstrain) as caught:
        model.matcher(constraint, **form)
    assert (about, tool) == (caught.value.about, caught.value.tool)
    assert fact in caught.value.fact
    assert "\n" not in caught.value.fact
    assert "%json" not in caught.value.fact


def test_multiples_that_people_ask_for(model: Model) -> None:
    """
    Cents, halves, dozens and thousands are held, beside each other and a property of that name.
    """
    several = [0.01, 0.5, 5, 12, 1000.0]
    price = {"properties": {"multipleOf": {"anyOf": [{"multipleOf": one} for one in several]}}}
    matcher = model.matcher(Constraint(schema={"type": "array", "items": price}))
    assert model.follow(matcher, '[{"multipleOf": 0.07}]')
    cents = model.matcher(Constraint(schema={"type": "number", "multipleOf": 0.01}))
    assert model.follow(cents, "12.34")
    assert not model.follow(cents, "12.345")


def test_a_multiple_that_is_a_value(model: Model) -> None:
    """Only the keyword counts: in a constant, a default or an example it is a plain value."""
    value = {"multipleOf": 99999}
    matcher = model.matcher(
        Constraint(schema={"enum": [value], "default": value, "examples": [value], "const": value})
    )
    assert model.follow(matcher, '{"multipleOf": 99999}')


def test_as_many_that_may_be_left_out_as_are_taken(model: Model) -> None:
    """
    The library can follow an object of which so many properties may be left out; those that are
    required do not count.
    """
    required = [f"q{n}" for n in range(480)]
    names = [*(f"p{n}" for n in range(480)), *required]
    properties = {name: {"type": "integer"} for name in names}
    matcher = model.matcher(
        Constraint(schema={"type": "object", "properties": properties, "required": required})
    )
    assert '"' in model.first(matcher, '{"p1": 0, ')


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_that_is_not_strict_is_enforced_as_far_as_possible(
    model: Model, strict: bool
) -> None:
    """A keyword that the library does not know is passed over, but where the client insists."""
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}
    constraint = Constraint(schema=schema, strict=strict)
    if strict:
        with pytest.raises(CannotConstrain):
            model.matcher(constraint)
    else:
        assert model.follow(model.matcher(constraint), "[true, true]")
        assert not model.follow(model.matcher(constraint), "[1]")


def test_an_object_has_no_properties_that_its_schema_does_not_name(model: Model) -> None:
    """Of a format and of a call, unless the schema says that it may."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    matcher = model.matcher(Constraint(schema=schema))
    assert model.follow(matcher, '{"a": 1}')
    assert not model.follow(matcher, '{"a": 1, "b": 2}')
    opened = model.matcher(Constraint(schema={**schema, "additionalProperties": True}))
    assert model.follow(opened, '{"a": 1, "b": 2}')
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    calls = model.matcher(Constraint(calls=("look",)), tools=(tool,))
    call = '<tool_call>\n{"name": "look", "arguments": {"a": 1%s}}\n</tool_call>'
    assert model.follow(calls, call % "")
    assert not model.follow(calls, call % ', "b": 2')


def test_a_client_cannot_say_how_a_schema_is_read(model: Model) -> None:
    """The library's own settings in a schema are the server's to make."""
    schema = {**STONE, "x-compiler": {"lenient": True, "item_separator": "!"}, "uniqueItems": True}
    with pytest.raises(CannotConstrain):
        model.matcher(Constraint(schema=schema, strict=True))


def test_an_answer_that_can_go_on_no_further(model: Model) -> None:
    """
    A vocabulary without a closing brace begins an object and cannot end it: that is an error, and
    no answer that ends in the midst of one.
    """
    brace = model.tokenizer.encode("}")[0]
    compiler = GrammarCompiler(model.tokenizer, ends=(0,), tokens=brace, markers=())
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    matcher = compiler.compile(grammar_of(Constraint(schema=schema), AnswerForm()))
    opened = model.tokenizer.encode("{")
    assert matcher.allowed(())[opened].all()
    for _ in range(2):
        with pytest.raises(GrammarDeadEnd):
            matcher.allowed(opened)
    assert matcher.allowed(())[opened].all()


def test_a_grammar_whose_fault_is_in_no_schema(model: Model) -> None:
    """It is not blamed on a schema."""
    form = '%llguidance {"no_forcing": true}\nstart: '
    grammar = Grammar(text=f"{form}missing\n", schemas=((None, f"{form}%json {{}}"),))
    with pytest.raises(CannotConstrain, match="missing") as caught:
        model.compiler.compile(grammar)
    assert ("answer", None) == (caught.value.about, caught.value.tool)


def test_a_constraint_that_allows_nothing_is_none() -> None:
    """Neither JSON nor a call."""
    with pytest.raises(ValueError, match="neither"):
        Constraint()


BYTES = decoders.ByteLevel()
PIECES = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("kind", "decoder"),
    [
        ("like qwen", BYTES),
        ("like gpt2", BYTES),
        ("overlapping", BYTES),
        ("like llama", PIECES),
        ("like gemma", PIECES),
    ],
)
def test_tokenizers_of_several_kinds(kind: str, decoder: Any) -> None:
    """
    Whether tokens are of bytes or of pieces, and whatever is called special: an answer is held, and
    ends with the token that ends it.
    """
    made = KINDS[kind]()
    made.decoder = decoder
    tokenizer = wrapped(made)
    end = made.token_to_id("<|im_end|>" if kind != "like gpt2" else "<|endoftext|>")
    assert end is not None
    compiler = GrammarCompiler(
        tokenizer, ends=(end,), tokens=made.get_vocab_size() + 3, markers=("<think>",)
    )
    matcher = compiler.compile(grammar_of(Constraint(schema={"enum": [357]}), AnswerForm()))
    answer: list[int] = []
    while not (found := matcher.allowed(answer))[end]:
        answer.append(int(np.flatnonzero(found)[-1]))
    assert "357" == made.decode(answer)
    assert [end] == np.flatnonzero(found).tolist()


@pytest.mark.parametrize("kind", ["like mistral", "like t5", "like bert"])
def test_a_tokenizer_that_cannot_be_read(kind: str) -> None:
    """If the bytes of tokens are unknown, the message says so."""
    compiler = GrammarCompiler(wrapped(KINDS[kind]()), ends=(1,), tokens=200, markers=())
    grammar = grammar_of(Constraint(schema=STONE), AnswerForm())
    with pytest.raises(CannotConstrain, match="tokens cannot be read") as caught:
        compiler.compile(grammar)
    assert "answer" == caught.value.about
