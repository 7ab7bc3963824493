"""The calls that are stored of an answer are those that its text has."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engine.answer.markers import Markers
from cairn.engine.answer.parts import AnswerForm, AnswerPart, AnswerParts, Called, Said
from cairn.engine.answer.tool_calls import NoCall, read_calls
from cairn.engine.prompt.turns import parts_text
from cairn.journal.call_formats import OPEN_MAX, READ_VERSIONS, READERS
from cairn.journal.calls import REJECTED_MAX, form_of
from cairn.journal.shown import STATES_MAX, shown_fault

THINK = ("<think>", "</think>")
QWEN = (*THINK, "<tool_call>", "</tool_call>")

VERSION = importlib.metadata.version("mlx-lm")

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


def markers_of(parser: str, **changes: Any) -> Markers:
    module = pytest.importorskip(f"mlx_lm.tool_parsers.{parser}")
    return Markers(
        thinking=THINK,
        calling=(module.tool_call_start, module.tool_call_end),
        parse=module.parse_tool_call,
        format=parser,
        **changes,
    )


def form(markers: Markers, version: str = VERSION) -> tuple[str, ...] | None:
    """What the state has of a model with these markers."""
    return form_of({"calls": markers.form_of_calls, "mlx_lm": version})


def parts_of(
    text: str,
    markers: Markers,
    tools: Sequence[Any],
    *,
    size: int = 99_999,
    complete: bool = True,
    **changes: Any,
) -> list[AnswerPart]:
    answer = AnswerParts(AnswerForm(markers=markers, tools=tuple(tools), **changes), name="a")
    parts: list[AnswerPart] = []
    for start in range(0, len(text), size):
        parts.extend(answer.add(text[start : start + size]).parts)
    return [*parts, *answer.finish(complete=complete).parts]


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


READ = sorted(
    name
    for name, (parser, _) in FORMATS.items()
    if parser in READERS and not name.startswith("JSON of GLM")
)
"""The formats whose calls are read again. GLM's parser also takes JSON, which is not its format."""


def fault(parts: str, text: str, markers: Markers, version: str = VERSION) -> str | None:
    return shown_fault(parts, text, markers.all_texts, form(markers, version))


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
    stored = parts_text(parts_of(text, markers, [tool("delete_file", schemas)]))
    for form_on_record in (form(markers), form(markers, "9.0"), None):
        assert shown_fault(stored, text, markers.all_texts, form_on_record) is None


FRAGMENTS = (
    *("<think>", "</think>", "\n", " ", "\n\n", "Hm", "x < y", "", "}", "{"),
    *(
        '{"name": "go", "arguments": {"to": "Rom"}}',
        '\n{"name": "go", "arguments": {"to": ',
        '"Rom"}}',
    ),
    *(
        '{"name": "go"}',
        '{"name": "go", "id": 1}',
        '{"name": "go", "x": 1}',
        '{"name": 3, "arguments": {}}',
    ),
    *('{"name": "go", "arguments": {"raw": 1}}', '{"name": "go", "arguments": NaN}', "[]", "[1]"),
    *(
        '{"name": "go", "arguments": {"to": NaN}}',
        '{"name": "go", "arguments": "{}"}',
        '"a',
        "null",
    ),
    *('[{"name": "go"}, {"name": "go", "arguments": {"a": "\\ud800"}}]', "go", 'go[ARGS]{"a": 1}'),
    *(
        "go [ARGS] ",
        "[ARGS]{}",
        '{"a": 1}',
        "<function=go>",
        "</function>",
        "<parameter=to>",
        "Rom",
    ),
    *("</parameter>", '<invoke name="go">', "</invoke>", '<parameter name="to">', "<invoke name=>"),
    *("<arg_key>", "to", "</arg_key>", "<arg_value>", "</arg_value>", "[go(a=1)]", "call:go{a:1}"),
)


TEXTS: tuple[tuple[str, str], ...] = (
    *(
        ("json_tools", text)
        for text in (
            '{"name": "go", "arguments": {"to": "\\ud800", "b": "\\u00e4"}}',
            '{"name": "go", "arguments": {"to": NaN}}',
            '{"name": "go", "arguments": "{\\"to\\": 1e2}"}',
            '{"name": "go", "arguments": "[]"}',
            '{"name": "go", "arguments": "{"}',
            '{"name": "go", "arguments": {"to": 1, "to": 2}}',
            '{"name": "go", "arguments": null, "x": 1}',
            '{"name": "go", "id": "7"}',
            '{"name": "go", "x": 1}',
            '{"name": "", "arguments": {}}',
            '{"arguments": {}}',
            '[{"name": "go"}, {"name": "stay", "arguments": {}}]',
            '[{"name": "go"}, 1]',
            *("[]", "null", "7", "go", ""),
        )
    ),
    *(
        ("mistral", text)
        for text in (
            '[{"name": "go", "x": 1}]',
            *("[1]", "[]", "{}", "go", "go[ARGS]{", "[ARGS]{}", "go [ARGS] {}!stay[ARGS]{} and"),
            *('नमस्ते[ARGS]{"a": "ä"}', " [ARGS]no-go[ARGS]{}", 'go[ARGS]"{}"', "go[ARGS][]"),
        )
    ),
    *(("longcat", text) for text in ('{"name": "go", "arguments": {"a": true}}', "{}", "{")),
    ("qwen3_coder", "<function=go></function>\n"),
    (
        "qwen3_coder",
        "<function=go> <parameter=a> 1\n</parameter><parameter=></parameter></function>",
    ),
    *(
        ("qwen3_coder", text)
        for text in ("<function=></function>", "<function=go></function>.", "go")
    ),
    (
        "minimax_m2",
        "<invoke name='go'><parameter name=a>1</parameter></invoke><invoke name=x></invoke>",
    ),
    *(("minimax_m2", text) for text in ("<invoke name=></invoke>", "<invoke name=>", "go")),
    ("minimax_m2", "<invoke name=go>" + "<parameter name=" * (OPEN_MAX + 1) + "</invoke>"),
    ("glm47", "go<arg_key>a</arg_key>\\n<arg_value>[1]</arg_value><arg_key>b</arg_key>"),
    (
        "glm47",
        "go<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>",
    ),
)
"""Texts between the markers of a call: what is odd in each format."""


@pytest.mark.parametrize(("parser", "words"), TEXTS)
def test_a_text_is_read_as_the_server_reads_it(parser: str, words: str) -> None:
    """A reader may leave a text of tags unread, and JSON never."""
    parse = markers_of(parser).parse
    assert parse is not None
    try:
        calls = read_calls(parse, words, [tool("go", {"a": {"type": "integer"}})])
    except NoCall:
        calls = ()
    reading = READERS[parser](words)
    if reading is None:
        assert parser not in ("json_tools", "mistral")
        return
    assert [call.name for call in calls] == [name for name, _ in reading]
    for call, (_, fits) in zip(calls, reading, strict=True):
        assert fits(call.arguments)
        for other in ("{}", "[]", call.arguments.replace("1", "2"), call.arguments + " "):
            assert fits(other) == (other == call.arguments)


def test_a_backslash_of_json_in_a_format_that_is_not_read() -> None:
    """It is two, and no escape begins with the second one."""
    stored = [{"called": {"index": 0, "id": "1", "name": "go", "arguments": '{"a": "\\\\nGrüße"}'}}]
    text = '<c>{"name": "go", "arguments": {"a": "\\\\nGr\\u00fc\\u00dfe"}}</c>'
    assert shown_fault(json.dumps(stored), text, ("<c>", "</c>"), None) is None
    assert shown_fault(json.dumps(stored), text.replace("Gr", "Cr"), ("<c>", "</c>"), None)


def test_a_name_that_comes_twice() -> None:
    """Python has 1 and "1" apart, and JSON has them as one name: the last one is stored."""
    parse = markers_of("glm47").parse
    assert parse is not None
    words = """go<arg_key>a</arg_key><arg_value>{1: 'a', '1': 'b'}</arg_value>"""
    (call,) = read_calls(parse, words, [tool("go", {"a": {"type": "object"}})])
    assert '{"a": {"1": "b"}}' == call.arguments
    reading = READERS["glm47"](words)
    assert reading is not None
    assert [True] == [fits(call.arguments) for _, fits in reading]


@pytest.mark.parametrize("parser", [*READERS, "pythonic", "gemma4", "kimi_k2"])
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_what_is_made_of_any_text_holds(parser: str, data: st.DataObject) -> None:
    """Also what looks like a call and is none, with markers where they do not belong."""
    markers = markers_of(parser)
    one = st.sampled_from((*FRAGMENTS, *(markers.calling or ()) * 6))
    text = "".join(data.draw(st.lists(one, max_size=14)))
    parts = parts_of(
        text,
        markers,
        [tool("go", {"to": {}})] if data.draw(st.booleans()) else [],
        size=data.draw(st.sampled_from((1, 3, 1000))),
        complete=data.draw(st.booleans()),
        begins=data.draw(st.sampled_from(("normal", "reasoning"))),
        may_think=data.draw(st.booleans()),
    )
    for version in (VERSION, "9.0"):
        assert fault(parts_text(parts), text, markers, version) is None


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


def stored(*parts: str | tuple[str, Arguments]) -> str:
    """An answer of words and calls."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            found.append({"said": {"text": part}})
            continue
        index = sum("called" in one for one in found)
        name, arguments = part
        call = {"index": index, "id": "c", "name": name, "arguments": dumped(arguments)}
        found.append({"called": call})
    return json.dumps(found)


SCHEMAS = {"path": {"type": "string"}, "n": {"type": "integer"}, "dry_run": {"type": "boolean"}}


@pytest.mark.parametrize("why", FORGED)
@pytest.mark.parametrize("name", READ)
def test_another_call_is_found(name: str, why: str) -> None:
    """The control is what the parser makes of the text."""
    parser, write = FORMATS[name]
    markers = markers_of(parser)
    assert markers.calling is not None
    text = r"I'll \n & do that." + markers.calling[0] + write("delete_file", TRUE)
    text += markers.calling[1]
    words, call = parts_of(text, markers, [tool("delete_file", SCHEMAS)])
    assert isinstance(words, Said)
    assert isinstance(call, Called)
    assert TRUE == json.loads(call.arguments)
    assert fault(parts_text([words, call]), text, markers) is None
    assert fault(stored(words.text, ("delete_file", TRUE)), text, markers) is None
    assert "call 0" == fault(stored(words.text, FORGED[why]), text, markers)


ROME, ULM = ("go", {"to": "Rom"}), ("go", {"to": "Ulm"})
MOVED: dict[str, tuple[str | tuple[str, Arguments], ...]] = {
    "the first is gone": ("Well", "and", ULM),
    "the second is gone": ("Well", ROME, "and"),
    "both are gone": ("Well", "and"),
    "one more": ("Well", ROME, "and", ULM, ULM),
    "one twice": ("Well", ROME, ROME, "and", ULM),
    "in another order": ("Well", ULM, "and", ROME),
    "before the words": (ROME, "Well", "and", ULM),
    "after the words": ("Well", "and", ROME, ULM),
    "words are gone": ("Well", ROME, ULM),
    "all words are gone": (ROME, ULM),
    "other words": ("Well", ROME, "or", ULM),
}


@pytest.mark.parametrize("why", MOVED)
@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one[0] != "mistral"])
def test_a_call_that_is_gone_or_moved_is_found(name: str, why: str) -> None:
    """In every format, also where the call itself is not read again."""
    parser, write = FORMATS[name]
    markers = markers_of(parser)
    assert markers.calling is not None
    start, end = markers.calling
    text = f"Well{start}{write(*ROME)}{end}\nand\n{start}{write(*ULM)}{end}"
    parts = parts_text(parts_of(text, markers, [tool("go", {})]))
    for version in (VERSION, "9.0"):
        assert fault(parts, text, markers, version) is None
        assert fault(stored("Well", ROME, "and", ULM), text, markers, version) is None
        assert fault(stored(*MOVED[why]), text, markers, version) is not None


@pytest.mark.parametrize("written", ["list", "headers"])
def test_calls_of_one_text_are_stored_together(written: str) -> None:
    """Those of Mistral, whose calls are the rest of the answer."""
    markers = markers_of("mistral")
    text = '[TOOL_CALLS]go[ARGS]{"to": "Rom"}go[ARGS] {"to": "Ulm"}'
    if written == "list":
        text = "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in (ROME, ULM)])
    assert fault(parts_text(parts_of(text, markers, [tool("go", {})])), text, markers) is None
    assert fault(stored(ROME, ULM), text, markers) is None
    was_cut = json.loads(stored(ROME, ULM))
    was_cut[1]["called"]["cut"] = "Ulm"
    assert "call 0" == fault(json.dumps(was_cut), text, markers)
    for calls in ((ROME,), (ULM,), (ULM, ROME), (ROME, ROME), (ROME, ULM, ULM), ()):
        assert fault(stored(*calls), text, markers) is not None


TWO = "".join(f"<tool_call>{written(*one)}</tool_call>" for one in (ROME, ULM))


def test_a_call_that_is_shown_as_words() -> None:
    """
    Text that is a call is one if its answer has another one. Whether it has any depends on tools,
    which are on record as tokens only; and an argument "raw" on their schemas.
    """
    markers = markers_of("json_tools")
    first, second = (f"<tool_call>{written(*one)}</tool_call>" for one in (ROME, ULM))
    assert fault(stored(TWO), TWO, markers) is None
    assert "call 1" == fault(stored(ROME, second), TWO, markers)
    assert "call 0" == fault(stored(first, ULM), TWO, markers)
    raw = f"<tool_call>{written('go', {'raw': 1})}</tool_call>"
    assert fault(stored(raw, ULM), raw + second, markers) is None
    # A text that another marker may take is not certain.
    longer = Markers(thinking=("x<tool_call>", "</y>"), calling=QWEN[2:], parse=markers.parse)
    for known, found in ((markers, "call 0"), (longer, None)):
        marks = (*known.all_texts, *QWEN)
        assert found == shown_fault(stored(first, ULM), TWO, marks, ("json_tools", *QWEN[2:]))
    # After this many that are none, all are words.
    many = "<tool_call>no</tool_call>" * REJECTED_MAX
    parts = parts_of(second + many + first, markers, [tool("go", {})])
    assert fault(parts_text(parts), second + many + first, markers) is None
    assert isinstance(parts[-1], Said)


def test_all_of_a_text_is_accounted_for() -> None:
    """Thoughts and words between two markers are there if the form of calls is on record."""
    text = "<think>Hm, no.</think>Yes."
    for known, found in ((None, None), ((), "words"), (("json_tools", *QWEN[2:]), "words")):
        assert found == shown_fault(stored("Yes."), text, QWEN, known)
        assert shown_fault(stored("Hm, no.", "Yes."), text, QWEN, known) is None
        assert "words" == shown_fault(stored("Hm, no.", "Yes.", "No."), text, QWEN, known)
    assert shown_fault("[]", "", QWEN, ()) is None
    assert "words" == shown_fault(stored("Yes."), "", QWEN, ())


HELD = '<tool_call>\n{"name": "go", "arguments": {"a": "x</tool_call>y", "a": [{}]}}\n</tool_call>'
HELD_CHANGES = {
    "a text": ("x<", "<"),
    "the name": ('"go"', '"a"'),
    "a field gone": (', \\"a\\": [{}]', ""),
    "a value": ("[{}]", "{}"),
    "an end gone": ("[{}]}", "[{}]"),
    "an end more": ("[{}]}", "[{}]}}"),
}


@pytest.mark.parametrize("after", ["", "\nDone."])
@pytest.mark.parametrize("why", HELD_CHANGES)
def test_a_constrained_call(why: str, after: str) -> None:
    """It is stored as the model wrote it, also with a field twice, and with a marker in it."""
    markers = markers_of("json_tools")
    text = f"Well{HELD}{after}"
    whole = parts_text(parts_of(text, markers, [tool("go", {})], held=True))
    assert '\\"a\\": [{}]}' in whole
    assert fault(whole, text, markers) is None
    assert HELD_CHANGES[why][0] in whole
    assert "call 0" == fault(whole.replace(*HELD_CHANGES[why]), text, markers)


@pytest.mark.parametrize("length", range(HELD.index("{"), len(HELD)))
@pytest.mark.parametrize("complete", [False, True])
def test_a_constrained_call_that_was_cut(length: int, complete: bool) -> None:
    """It is the end of the answer; its arguments are all that there was of them."""
    markers = markers_of("json_tools")
    text = "Well" + HELD[:length]
    (*words, last) = parts_of(text, markers, [tool("go", {})], held=True, complete=complete)
    whole = parts_text([*words, last])
    assert fault(whole, text, markers) is None
    if not isinstance(last, Called):
        return
    assert "call 0" == fault(whole.replace('"go"', '"a"'), text, markers)
    others = [last.arguments[:-1], last.arguments + "}", "{}"]
    if last.arguments.count("}") < 2:
        assert "call 0" == fault(parts_text([*words, attrs.evolve(last, cut=None)]), text, markers)
    calls = [attrs.evolve(last, arguments=other) for other in others]
    if last.cut is not None:
        calls += [attrs.evolve(last, cut=cut) for cut in (last.cut[:-1], last.cut[1:])]
    for call in calls:
        assert "call 0" == fault(parts_text([*words, call]), text, markers)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("json_tools", '<tool_call>\n{"name": "go", "arguments": {}x\n</tool_call>'),
        ("json_tools", '<tool_call>{"name": "go", "arguments": {}'),
        ("qwen3_coder", "<tool_call><function=go></function>"),
        ("kimi_k2", "<|tool_calls_section_begin|>functions.go:0<|tool_call_argument_begin|>{}"),
    ],
)
def test_words_that_are_stored_as_a_call(parser: str, text: str) -> None:
    """Text that the server did not take for a call is none."""
    markers = markers_of(parser)
    (said,) = parts_of(text, markers, [tool("go", {})])
    assert Said(text) == said
    assert fault(stored(text), text, markers) is None
    assert "call 0" == fault(stored(("go", {})), text, markers)


def test_what_no_schema_is_known_for() -> None:
    """Text in tags may be a number or a text, as the tool's schema says; its characters may not."""
    markers = markers_of("qwen3_coder")
    text = "<tool_call>" + FORMATS["functions"][1]("go", {"n": "12"}) + "</tool_call>"
    for value, found in (("12", None), (12, None), (1, "call 0"), (12.5, "call 0")):
        assert found == fault(stored(("go", {"n": value})), text, markers)


UNKNOWN = "<tool_call>@delete_file <<path>> /home/ann/tmp/old <<dry_run>> true</tool_call>"


def test_a_format_that_is_not_read() -> None:
    """Its texts are between the markers of the call."""
    markers = Markers(thinking=THINK, calling=QWEN[2:], parse=lambda *_: None, format="new")
    true = ("@delete_file", {"path": "/home/ann/tmp/old", "dry_run": True})
    text = f"/etc/passwd {UNKNOWN}\n{UNKNOWN}"
    assert fault(stored("/etc/passwd", true, true), text, markers) is None
    for name, path in (("@delete_all", true[1]["path"]), (true[0], "/etc/passwd"), (true[0], "/h")):
        other = (name, {**true[1], "path": path})
        found = fault(stored("/etc/passwd", true, other), text, markers)
        assert (None if path == "/h" else "call 1") == found


def test_what_is_not_read_after_all() -> None:
    """Too many ways, and JSON that is too deep, are compared as if the form were not on record."""
    markers = markers_of("json_tools")
    # Of what is left out, nothing is found then.
    many = "<think>" * (STATES_MAX * 3) + "x"
    assert fault(stored("<think>" * STATES_MAX), many, markers) is None
    assert "words" == fault(stored("<think>"), "<think><think>x", markers)
    ways = "<think>" * (STATES_MAX * 3)
    assert fault(stored("<think>" * STATES_MAX), ways, markers) is None
    assert "words" == fault(stored("<think>" * STATES_MAX + "x"), ways, markers)
    deep = f'<tool_call>{{"name": "go", "arguments": {"[" * 99_999}</tool_call>'
    assert fault(stored(deep), deep, markers) is None
    assert fault(stored(("go", {})), deep, markers) is None
    assert "call 0" == fault(stored(("no", {})), deep, markers)


def test_the_form_on_record() -> None:
    """What is strange is not on record; a parser that was not compared is not read again."""
    known = ["glm47", "<a>", "</a>"]
    assert ("glm47", "<a>", "</a>") == form_of({"calls": known, "mlx_lm": min(READ_VERSIONS)})
    assert ("", "<a>", "</a>") == form_of({"calls": known, "mlx_lm": "9.0"})
    assert ("json_tools", "<a>", "</a>") == form_of({"calls": ["json_tools", *known[1:]]})
    assert () == form_of({"calls": []})
    several: tuple[Any, ...] = (None, 3, "abc", {}, ["a"], ["a"] * 4)
    for strange in several:
        assert form_of({"calls": strange}) is None


def test_the_versions_that_were_compared() -> None:
    """A new version in the lock has to be compared, by the tests of this module, and be listed."""
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text()
    (locked,) = re.findall(r"^mlx-lm==([\w.]+)", lock, re.MULTILINE)
    assert locked in READ_VERSIONS
