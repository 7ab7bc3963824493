"""The calls that are stored of an answer are those that its text has, in every format."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engine.answer.markers import Markers
from cairn.engine.answer.parts import AnswerForm, AnswerPart, AnswerParts, Called
from cairn.engine.prompt.turns import parts_text
from cairn.journal.calls import READS_MAX, Steps
from cairn.journal.shown import shown_fault

THINK = ("<think>", "</think>")
QWEN = (*THINK, "<tool_call>", "</tool_call>")

Arguments = Mapping[str, Any]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """A text as it is, and everything else as JSON."""
    return value if isinstance(value, str) else dumped(value)


def each(form: str, arguments: Arguments, text: Callable[[Any], str] = bare) -> str:
    return "".join(form.format(name=name, value=text(arguments[name])) for name in arguments)


def python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def gemma_4(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_4(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_4, value)) + "]"
    return dumped(value)


def escaped(value: Any) -> str:
    return f"<escape>{value}<escape>" if isinstance(value, str) else dumped(value)


def fields(arguments: Arguments, text: Callable[[Any], str]) -> str:
    return ",".join(f"{name}:{text(value)}" for name, value in arguments.items())


def pairs(name: str, arguments: Arguments, prefix: str = "") -> str:
    key = f"<{prefix}arg_key>{{name}}</{prefix}arg_key>\n"
    return f"{name}\n" + each(f"{key}<{prefix}arg_value>{{value}}</{prefix}arg_value>\n", arguments)


def written(name: str, arguments: Arguments) -> str:
    return dumped({"name": name, "arguments": arguments})


FORMATS: dict[str, tuple[str, Callable[[str, Arguments], str]]] = {
    "JSON": ("json_tools", lambda name, given: f"\n{written(name, given)}\n"),
    "JSON with escapes": (
        "json_tools",
        lambda name, given: json.dumps({"name": name, "arguments": given}),
    ),
    "JSON in JSON": (
        "json_tools",
        lambda name, given: dumped({"name": name, "arguments": dumped(given)}),
    ),
    "JSON of GLM": ("glm47", written),
    "JSON of GLM, called function": (
        "glm47",
        lambda name, given: dumped({"function": name, "arguments": given}),
    ),
    "JSON of GLM, called tool": (
        "glm47",
        lambda name, given: dumped({"tool": {"name": name, "arguments": given}}),
    ),
    "JSON of GLM, after the name": ("glm47", lambda name, given: f"{name}\n{dumped(given)}"),
    "pairs": ("glm47", pairs),
    "pairs of Laguna": ("laguna", pairs),
    "pairs of LongCat": ("longcat", lambda name, given: pairs(name, given, "longcat_")),
    "JSON of LongCat": ("longcat", written),
    "functions": (
        "qwen3_coder",
        lambda name, given: (
            f"\n<function={name}>\n"
            + each("<parameter={name}>\n{value}\n</parameter>\n", given)
            + "</function>\n"
        ),
    ),
    "invocations": (
        "minimax_m2",
        lambda name, given: (
            f'\n<invoke name="{name}">\n'
            + each('<parameter name="{name}">{value}</parameter>\n', given)
            + "</invoke>\n"
        ),
    ),
    "prefixed invocations": (
        "muse_spark",
        lambda name, given: (
            f'\n<atem:invoke name="{name}">'
            + each('<atem:parameter name="{name}">{value}</atem:parameter>', given, dumped)
            + "</atem:invoke>\n"
        ),
    ),
    "parameters": (
        "minicpm5",
        lambda name, given: f'"{name}">' + each('<param name="{name}">{value}</param>', given),
    ),
    "data": (
        "minicpm5",
        lambda name, given: (
            f'"{name}">' + each('<param name="{name}"><![CDATA[{value}]]></param>', given)
        ),
    ),
    "Kimi K2": (
        "kimi_k2",
        lambda name, given: (
            f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
            f"{dumped(given)}<|tool_call_end|>"
        ),
    ),
    "Kimi K3": (
        "kimi_k3",
        lambda name, given: (
            f'<|open|>call tool="{name}" index="1"<|sep|>'
            + "".join(
                f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else ""}"'
                f"<|sep|>{bare(value)}<|close|>argument<|sep|>"
                for key, value in given.items()
            )
            + "<|close|>call<|sep|>"
        ),
    ),
    "JSON of Kimi K3": (
        "kimi_k3",
        lambda name, given: (
            f'<|open|>call tool="{name}"<|sep|><|open|>json type="object"<|sep|>{dumped(given)}'
            "<|close|>json<|sep|><|close|>call<|sep|>"
        ),
    ),
    "JSON of Mistral": ("mistral", lambda name, given: f"[{written(name, given)}]"),
    "headers": ("mistral", lambda name, given: f"{name}[ARGS]{dumped(given)}"),
    "Gemma": ("function_gemma", lambda name, given: f"call:{name}{{{fields(given, escaped)}}}"),
    "Gemma 4": ("gemma4", lambda name, given: f"call:{name}{{{fields(given, gemma_4)}}}"),
    "Python": ("pythonic", lambda name, given: f"[{python(name, given)}]"),
    "Python with JSON": (
        "pythonic",
        lambda name, given: f"[{name}({', '.join(f'{k}={dumped(v)}' for k, v in given.items())})]",
    ),
}
"""A parser, and how a model writes a call for it."""


def markers_of(parser: str) -> Markers:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return Markers(
        thinking=THINK,
        calling=(module.tool_call_start, module.tool_call_end),
        parse=module.parse_tool_call,
    )


def parts_of(text: str, markers: Markers, tools: Sequence[Any], **form: Any) -> list[AnswerPart]:
    answer = AnswerParts(AnswerForm(markers=markers, tools=tuple(tools), **form), name="a")
    return [*answer.add(text).parts, *answer.finish(complete=True).parts]


def tool(name: str, schemas: Arguments) -> dict[str, Any]:
    parameters = {"type": "object", "properties": schemas}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ODD = st.sampled_from(
    [
        *(
            "",
            " ",
            "\n",
            "'",
            '"',
            "\\",
            "\\n",
            "\\u00e4",
            "&amp;",
            "&",
            "<",
            ">",
            "{",
            "}",
            "[",
            "]",
        ),
        *(
            ",",
            ":",
            "=",
            "/",
            "a",
            "not",
            "Grüße",
            "🪨",
            "1",
            "0.5",
            "-1e3",
            "1_0",
            "true",
            "False",
        ),
        *(
            "null",
            "None",
            "[1, 2]",
            '{"a": 1}',
            "('a' 'b')",
            "<think>",
            "</think>",
            "<b>",
            "\t",
            "x",
        ),
        *("path", "owner", "</p>", "call:", "=1", "(", ")", "<|x|>", "yes", "NaN", "1e999"),
    ]
)
TEXT = st.lists(ODD, max_size=4).map("".join)
SIMPLE = st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
VALUE = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "path"]), inner, max_size=2),
    ),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["path", "owner", "dry_run", "n"]), VALUE, max_size=4)
TYPE = st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "null"])
SCHEMA: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    TYPE.map(lambda one: {"type": one}),
    st.lists(TYPE).map(lambda some: {"type": some}),
)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=25)
@given(st.data(), st.lists(ARGUMENTS, min_size=1, max_size=2))
def test_what_a_parser_makes_of_a_text_holds(
    name: str, data: st.DataObject, several: list[Arguments]
) -> None:
    """Whatever is in the arguments, and whatever the client's schema makes of them."""
    parser, write = FORMATS[name]
    markers = markers_of(parser)
    assert markers.calling is not None
    start, end = markers.calling
    schemas = {key: data.draw(SCHEMA) for one in several for key in one}
    text = "<think>\nHm, 'no'.</think>I will.\n" + "\n".join(
        start + write("delete_file", one) + end for one in several
    )
    parts = parts_of(text, markers, [tool("delete_file", schemas)])
    assert shown_fault(parts_text(parts), text, markers.all_texts) is None


TRUE = {"path": "/home/ann/tmp/old", "dry_run": True, "owner": None, "n": 12}
FORGED: dict[str, tuple[str, Arguments]] = {
    "a part of a text": ("delete_file", {**TRUE, "path": "/home"}),
    "a character": ("delete_file", {**TRUE, "path": "/"}),
    "some characters": ("delete_file", {**TRUE, "path": "/homeann/old"}),
    "another boolean": ("delete_file", {**TRUE, "dry_run": False}),
    "another number": ("delete_file", {**TRUE, "n": 1}),
    "another type": ("delete_file", {**TRUE, "path": True}),
    "null": ("delete_file", {**TRUE, "path": None}),
    "not null": ("delete_file", {**TRUE, "owner": 12}),
    "values exchanged": ("delete_file", {**TRUE, "path": "owner", "owner": "/home/ann/tmp/old"}),
    "values of each other": ("delete_file", {**TRUE, "path": 12, "n": "/home/ann/tmp/old"}),
    "fields in another order": ("delete_file", dict(reversed(TRUE.items()))),
    "a field less": ("delete_file", {"path": TRUE["path"]}),
    "another field": ("delete_file", {**TRUE, "old": "tmp"}),
    "no arguments": ("delete_file", {}),
    "a part of the name": ("delete", TRUE),
    "another name": ("path", TRUE),
    "another path": ("delete_file", {**TRUE, "path": "/etc"}),
}


def stored(*calls: tuple[str, Arguments], words: Sequence[str] = ()) -> str:
    said = [{"said": {"text": text}} for text in words]
    called = [
        {"called": {"index": index, "id": "c", "name": name, "arguments": dumped(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return json.dumps([*said, *called])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("words", ["I'll do that.", r"a\b & c", ""])
def test_another_call_is_found(name: str, words: str) -> None:
    """The control is what the parser makes of the text."""
    parser, write = FORMATS[name]
    markers = markers_of(parser)
    assert markers.calling is not None
    start, end = markers.calling
    text = words + start + write("delete_file", TRUE) + end
    schemas = {"path": {"type": "string"}, "n": {"type": "integer"}, "dry_run": {"type": "boolean"}}
    parts = parts_of(text, markers, [tool("delete_file", schemas)])
    (call,) = [part for part in parts if isinstance(part, Called)]
    assert list(TRUE) == list(json.loads(call.arguments))
    assert shown_fault(parts_text(parts), text, markers.all_texts) is None

    for why, forged in FORGED.items():
        other = stored(forged, words=[words])
        assert "call 0" == shown_fault(other, text, markers.all_texts), why


def test_what_no_schema_is_known_for() -> None:
    """Text in tags may be a number or a text, as the tool's schema says; its characters may not."""
    parser, write = FORMATS["functions"]
    text = "<tool_call>" + write("go", {"n": "12"}) + "</tool_call>"
    assert shown_fault(stored(("go", {"n": "12"})), text, QWEN) is None
    assert shown_fault(stored(("go", {"n": 12})), text, QWEN) is None
    assert "call 0" == shown_fault(stored(("go", {"n": 1})), text, QWEN)
    assert "qwen3_coder" == parser


TWO = (
    '<tool_call>{"name": "go", "arguments": {"to": "Rom"}}</tool_call>'
    '<tool_call>{"name": "go", "arguments": {"to": "Ulm"}}</tool_call>'
)


def test_calls_are_in_order() -> None:
    """Each is another one of the text."""
    rome, ulm = ("go", {"to": "Rom"}), ("go", {"to": "Ulm"})
    for text in (TWO, TWO.replace('"arguments": {', '"arguments":{')):
        assert shown_fault(stored(rome, ulm), text, QWEN) is None
        assert "call 1" == shown_fault(stored(ulm, rome), text, QWEN)
        assert "call 1" == shown_fault(stored(rome, rome), text, QWEN)


def test_calls_of_one_text_are_stored_together() -> None:
    """Also those of a list."""
    one, other = ("go", {"to": "Rom"}), ("go", {"to": "Ulm"})
    text = "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in (one, other)])
    markers = (*THINK, "[TOOL_CALLS]")
    assert shown_fault(stored(one, other), text, markers) is None
    assert "call 0" == shown_fault(stored(other), text, markers)
    assert "call 0" == shown_fault(stored(other, one), text, markers)
    headers = '[TOOL_CALLS]go[ARGS]{"to": "Rom"}go[ARGS]{"to": "Ulm"}'
    assert shown_fault(stored(one, other), headers, markers) is None
    assert "call 0" == shown_fault(stored(one, one), headers, markers)


def test_a_call_that_is_only_spoken_of() -> None:
    """What an answer says is not what it calls."""
    text = TWO.replace("Ulm", "Rom")
    words = stored(("go", {"to": "Rom"}), words=[text])
    assert "call 0" == shown_fault(words, text, QWEN)
    assert shown_fault(stored(words=[text]), text, QWEN) is None


HELD = '<tool_call>\n{"name": "go", "arguments": {"a": "x</tool_call>y", "a": [{}]}}\n</tool_call>'


def test_a_constrained_call() -> None:
    """It is stored as the model wrote it, also with a field twice, and with a marker in it."""
    markers = Markers(thinking=THINK, calling=QWEN[2:], parse=lambda words, _: json.loads(words))
    parts = parts_of(f"Well{HELD}", markers, [tool("go", {})], held=True)
    whole = parts_text(parts)
    assert '\\"a\\": [{}]}' in whole
    assert shown_fault(whole, f"Well{HELD}", QWEN) is None
    for one, other in (
        ("x<", "<"),
        ('"go"', '"a"'),
        (', \\"a\\": [{}]', ""),
        ("[{}]", "{}"),
    ):
        assert one in whole
        assert "call 0" == shown_fault(whole.replace(one, other), f"Well{HELD}", QWEN)


@pytest.mark.parametrize("length", range(HELD.index("{"), len(HELD)))
def test_a_constrained_call_that_was_cut(length: int) -> None:
    """It is the end of the answer; its arguments are all that there was of them."""
    markers = Markers(thinking=THINK, calling=QWEN[2:], parse=lambda words, _: json.loads(words))
    answer = AnswerParts(AnswerForm(markers=markers, tools=(tool("go", {}),), held=True), name="a")
    text = "Well" + HELD[:length]
    parts = [*answer.add(text).parts, *answer.finish(complete=False).parts]
    whole = parts_text(parts)
    assert shown_fault(whole, text, QWEN) is None
    (*_, call) = parts
    if isinstance(call, Called):
        assert "call 0" == shown_fault(whole.replace('"go"', '"a"'), text, QWEN)
        arguments = json.dumps(call.arguments)
        less = whole.replace(arguments, json.dumps(call.arguments[:-1]))
        assert less != whole
        assert "call 0" == shown_fault(less, text, QWEN)
        if call.cut is not None:
            cut = json.dumps(call.cut)
            other = whole.replace(cut, json.dumps(call.cut[:-1]))
            assert "call 0" == shown_fault(other, text, QWEN)


UNKNOWN = "<tool_call>@delete_file <<path>> /home/ann/tmp/old <<dry_run>> true</tool_call>"


def test_a_format_that_is_not_known() -> None:
    """Each text is whole, and they are in order. How many there are is not known."""
    true = {"path": "/home/ann/tmp/old", "dry_run": True}
    markers = Markers(
        thinking=THINK,
        calling=QWEN[2:],
        parse=lambda *_: {"name": "@delete_file", "arguments": true},
    )
    text = f"I'll & do. {UNKNOWN}\n{UNKNOWN}"
    parts = parts_of(text, markers, [tool("@delete_file", {})])
    assert shown_fault(parts_text(parts), text, QWEN) is None
    for name, arguments in (
        ("@delete", true),
        ("@delete_file", {"path": "/home"}),
        ("@delete_file", {"path": "/"}),
        ("@delete_file", {"dry_run": "/home/ann/tmp/old"}),
        ("@delete_file", {"path": "path"}),
    ):
        assert "call 0" == shown_fault(stored((name, arguments)), text, QWEN)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 2_000,
        "<tool_call>[" * 2_000,
        '<tool_call>{"name": "go", "arguments": {' * 700,
        '<tool_call>{"name": "go", "arguments": {"to": "Ulm"}}</think>' * 400,
        "<tool_call><function=go><parameter=to>" * 600 + "</parameter></function></tool_call>",
        "<tool_call>go<arg_key>to</arg_key><arg_value>" * 600 + "</arg_value></tool_call>",
        "<tool_call>go Rom to" * 1_200,
        "<tool_call>[go(to=" * 1_200 + ")]</tool_call>",
        "<tool_call>call:go{to:" * 1_000 + "}</tool_call>",
        "<tool_call>" + "x" * 50_000 + "[ARGS](call:=" + "x" * 50_000 + "</tool_call>",
        "<tool_call>@go to " * 1_200,
    ],
    ids=lambda text: text[:40],
)
def test_the_number_of_steps(text: str) -> None:
    """It is in proportion to the length, for texts in which much looks like a call."""
    several: list[list[tuple[str, Arguments]]] = [[("go", {"to": "Rom"})], [("@go", {})] * 50]
    for calls in several:
        steps = Steps()
        shown_fault(stored(*calls), text, QWEN, steps)
        assert steps.count <= (READS_MAX + 16) * len(text)
