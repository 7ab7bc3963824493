"""From the text of an answer to its parts: thoughts, words and calls, however the text is cut."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.engine.answer.markers import SAYING, THINKING, Markers
from cairn.engine.answer.parts import (
    AnswerForm,
    AnswerPart,
    AnswerParts,
    Called,
    Rejected,
    Said,
    Thought,
)
from cairn.engine.prompt.template import message_of

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("look", "go")
)


def markers(parser: str, **changes: Any) -> Markers:
    """Those of a family, with thoughts in between tags of the usual name."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    known: dict[str, Any] = {
        "thinking": ("<think>", "</think>"),
        "calling": (module.tool_call_start, module.tool_call_end),
        "parse": module.parse_tool_call,
    }
    return Markers(**{**known, **changes})


QWEN = markers("json_tools")
HEADED = markers(
    "muse_spark",
    thinking=None,
    edges={
        "header": (("to=self|", THINKING), ("to=user|", SAYING), ("<atem:function_calls>", "tool")),
        THINKING: (("<eom>", "header"),),
        SAYING: (("<eom>", "header"),),
    },
    first="header",
)


def apart(
    pieces: Iterable[str],
    *,
    known: Markers = QWEN,
    begins: str = SAYING,
    tools: Sequence[Any] = TOOLS,
    complete: bool = True,
) -> tuple[list[AnswerPart], list[Rejected]]:
    """All parts, with consecutive parts of one kind joined; and the rejected calls."""
    parts = AnswerParts(AnswerForm(markers=known, begins=begins, tools=tuple(tools)), name="req-1")
    released = [parts.add(piece) for piece in pieces]
    released.append(parts.finish(complete=complete))
    found: list[AnswerPart] = []
    for part in itertools.chain.from_iterable(each.parts for each in released):
        last = found[-1] if found else None
        if isinstance(part, Said) and isinstance(last, Said):
            found[-1] = Said(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        else:
            found.append(part)
    return found, [one for each in released for one in each.rejected]


def call(name: str, **arguments: Any) -> str:
    """A call in the format of Qwen and Pebble."""
    words = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{words}\n</tool_call>"


def names(parts: Sequence[AnswerPart]) -> list[tuple[int, str, Any]]:
    """What is called, in order."""
    return [
        (part.index, part.name, json.loads(part.arguments))
        for part in parts
        if isinstance(part, Called)
    ]


WHOLE = f"<think>\nTwo cities.\n</think>\n\nI look.\n{call('look', city='Öslo')}\n{call('go')}"


def test_thoughts_words_and_calls():
    """Each is reported by itself, without markers and the ends of lines around them."""
    parts, rejected = apart([WHOLE])
    assert [Thought("Two cities."), Said("I look.")] == parts[:2]
    assert [(0, "look", {"city": "Öslo"}), (1, "go", {})] == names(parts)
    assert 4 == len(parts)
    assert [] == rejected


def test_ids_of_calls():
    """Ids are letters and digits, unique for each call, and the same for the same answer."""
    found = [[part.id for part in apart([WHOLE])[0] if isinstance(part, Called)] for _ in range(2)]
    assert found[0] == found[1]
    assert 2 == len(set(found[0]))
    assert all(len(one) == 9 and one.isalnum() for one in found[0])


def test_ids_that_a_model_gives():
    """A format whose calls have ids keeps them, except for one that occurs twice."""
    words = json.dumps([{"name": "look", "arguments": {}, "id": "abcdefghi"}] * 2)
    parts, _ = apart(["[TOOL_CALLS]" + words], known=markers("mistral"))
    first, second = (part.id for part in parts if isinstance(part, Called))
    assert "abcdefghi" == first
    assert second not in ("abcdefghi", "")


PIECES = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<to",
            "ol_call>",
            "</thi",
            "<",
            ">",
        ),
        *("\n", "\n\n", " ", "\t", "words", "Grüße 🪨", '{"name": "look", "arguments": {}}', "{"),
        *(call("look", city="Rom"), call("go"), "to=self|", "to=user|", "<eom>", "[TOOL_CALLS]"),
        *("<atem:function_calls>", '<atem:invoke name="go">', "</atem:function_calls>"),
    ]
)
FAMILIES = {
    "qwen": QWEN,
    "headed": HEADED,
    "mistral": markers("mistral"),
    "overlapping": markers("json_tools", thinking=("<thi", "nk>"), dropped=("b", "abc", "><")),
    "plain": Markers(),
}

CALLS = {
    "function_gemma": "<start_function_call>call:look{city:<escape>Rom<escape>,days:3}"
    "<end_function_call>",
    "gemma4": '<|tool_call>call:look{city:<|"|>Rom<|"|>,days:3}<tool_call|>',
    "glm47": "<tool_call>look<arg_key>city</arg_key><arg_value>Rom</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    "json_tools": call("look", city="Rom", days=3),
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    '<|tool_call_argument_begin|>{"city": "Rom", "days": 3}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Rom<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "laguna": "<tool_call>look<arg_key>city</arg_key><arg_value>Rom</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    "longcat": "<longcat_tool_call>look<longcat_arg_key>city</longcat_arg_key>"
    "<longcat_arg_value>Rom</longcat_arg_value><longcat_arg_key>days</longcat_arg_key>"
    "<longcat_arg_value>3</longcat_arg_value></longcat_tool_call>",
    "minicpm5": '<function name="look"><param name="city">Rom</param>'
    '<param name="days">3</param></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Rom'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"city": "Rom", "days": 3}}]',
    "muse_spark": '<atem:function_calls><atem:invoke name="look"><atem:parameter name="city">"Rom"'
    '</atem:parameter><atem:parameter name="days">3</atem:parameter></atem:invoke>'
    "</atem:function_calls>",
    "pythonic": '<|tool_call_start|>[look(city="Rom", days=3)]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=city>\nRom\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
}
"""The same call in each of mlx-lm's formats."""

LOOSE = (
    {"type": "function", "function": {"name": "look"}},
    {"type": "function", "function": {"name": "look", "parameters": None}},
    {"type": "function", "function": {"name": "look", "parameters": {"properties": None}}},
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"properties": {"city": True, "days": True}}},
    },
)
"""Tools as clients may send them, that say little of what they take."""


@settings(deadline=None)
@given(
    st.lists(PIECES, max_size=12).map("".join),
    st.data(),
    st.sampled_from(sorted(FAMILIES)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_gives_the_same(
    text: str, data: st.DataObject, family: str, thinks: bool, offers: bool, complete: bool
):
    """The parts do not depend on how the text is cut into pieces."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    known = FAMILIES[family]
    begins = known.first or (THINKING if thinks else SAYING)
    known_so: dict[str, Any] = {
        "known": known,
        "begins": begins,
        "tools": TOOLS if offers else (),
        "complete": complete,
    }
    whole = apart([text], **known_so)
    assert whole == apart(pieces, **known_so)
    assert whole == apart(text, **known_so)  # a character at a time


@settings(deadline=None)
@given(st.text("abc<>", max_size=10))
def test_markers_that_overlap(text: str):
    """The marker that ends first counts, regardless of how the text is cut."""
    known = FAMILIES["overlapping"]
    assert apart([text], known=known) == apart(text, known=known)


def echo(words: str, _: Any) -> dict[str, Any]:
    """A parser that takes all but some words, and gives them back."""
    if "no" in words:
        raise ValueError("no")
    return {"name": "look", "arguments": {"words": words}}


@pytest.mark.parametrize("family", sorted(CALLS))
@settings(deadline=None, max_examples=25)
@given(st.data(), st.booleans(), st.booleans())
def test_nothing_is_lost(family: str, data: st.DataObject, complete: bool, thinks: bool):
    """Of what is no marker and no white space all comes out, in order: as text or in a call."""
    known = markers(family, parse=echo)
    assert known.calling is not None
    every = [*(known.thinking or ()), *(marker for marker in known.calling if marker)]
    pieces = st.sampled_from([*every, "no", "yes", "words", "\n", " ", "7"])
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    parts, rejected = apart(
        [text], known=known, begins=THINKING if thinks else SAYING, complete=complete
    )
    shown = "".join(
        json.loads(part.arguments)["words"] if isinstance(part, Called) else part.text
        for part in parts
    )
    assert all(one.text in text for one in rejected)
    for marker in every:
        text, shown = text.replace(marker, ""), shown.replace(marker, "")
    assert "".join(text.split()) == "".join(shown.split())


@pytest.mark.parametrize("family", sorted(CALLS))
@pytest.mark.parametrize("tool", LOOSE, ids=["bare", "null", "no properties", "true"])
def test_every_format(family: str, tool: Any):
    """Each of mlx-lm's parsers makes the call, also where a tool says little of its parameters."""
    parts, rejected = apart([CALLS[family]], known=markers(family), tools=[tool])
    assert [] == rejected
    ((index, name, arguments),) = names(parts)
    assert (0, "look", {"city": "Rom", "days": "3"}) == (
        index,
        name,
        {key: str(value) for key, value in arguments.items()},
    )


@pytest.mark.parametrize("family", sorted(CALLS))
def test_half_a_call_is_none(family: str):
    """Wherever an answer ends in a call: it is made with all that it says, or is text."""
    text = CALLS[family]
    (whole,) = names(apart([text], known=markers(family))[0])
    for length in range(len(text)):
        for complete in (True, False):
            parts, rejected = apart([text[:length]], known=markers(family), complete=complete)
            assert [] == names(parts) or (complete and [whole] == names(parts))
            assert bool(names(parts)) or text[:length] == "".join(
                part.text for part in parts if not isinstance(part, Called)
            )
            assert all(text.startswith(one.text) for one in rejected)


THOUGHT_OF = "I should write a <tool_call> with the city."


def test_a_marker_that_is_spoken_of_in_thoughts():
    """It ends neither the thoughts nor the call after them."""
    text = f"<think>\n{THOUGHT_OF}\n</think>\n\nI look.\n{call('look', city='Rom')}"
    parts, rejected = apart([text])
    assert [Thought(THOUGHT_OF), Said("I look.")] == parts[:2]
    assert [(0, "look", {"city": "Rom"})] == names(parts)
    assert ["unparsable"] == [one.reason for one in rejected]
    assert rejected[0].text in text
    parts, _ = apart([f"<think>\n{THOUGHT_OF}\n</think>\n\nWell."], complete=False)
    assert [Thought(THOUGHT_OF), Said("Well.")] == parts


def test_a_marker_that_is_spoken_of_in_words():
    """A call after it is a call."""
    parts, _ = apart([f"{THOUGHT_OF}\n{call('look', city='Rom')}"])
    assert Said(THOUGHT_OF) == parts[0]
    assert [(0, "look", {"city": "Rom"})] == names(parts)


def test_markers_of_calls_without_number():
    """After many rejected calls, text that looks like a call is text."""
    text = "<tool_call>" * 100 + call("look")
    parts, rejected = apart([text])
    assert [Said(text)] == parts
    assert 64 == len(rejected)
    assert len(text) > sum(len(one.text) for one in rejected)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("A <think>word</think>", [Said("A <think>word</think>")]),
        ("`<think>` opens them.", [Said("`<think>` opens them.")]),
        (" \n<think>Hm.</think>Yes.", [Thought("Hm."), Said("Yes.")]),
        ("<think>A</think>\n<think>B</think>Yes.", [Thought("A\nB"), Said("Yes.")]),
    ],
)
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
def test_thoughts_come_before_words(text: str, wanted: list[AnswerPart], tools: Any):
    """After words, the marker that opens thoughts is one of the words."""
    assert wanted == apart([text], tools=tools)[0]


def test_thoughts_after_a_call():
    """A call is no word: thoughts may follow it, and stay apart from those before."""
    parts, _ = apart([f"<think>A</think>{call('look')}\n<think>\nB</think>Yes."])
    assert [Thought("A"), Thought("\nB"), Said("Yes.")] == [parts[0], *parts[2:]]


@pytest.mark.parametrize(
    ("gap", "between"), [("", "\n"), ("\n", "\n"), ("\n\n", "\n\n"), (" ", "\n ")]
)
def test_words_on_both_sides_of_a_call(gap: str, between: str):
    """They stay separate when a client joins them."""
    parts, _ = apart([f"I look.\n{call('look')}{gap}Done."])
    said = "".join(part.text for part in parts if isinstance(part, Said))
    assert f"I look.{between}Done." == said


@pytest.mark.parametrize(
    ("gap", "kept"), [("", ""), ("\n", ""), ("\n\n", "\n"), (" \n\n\n", " \n\n")]
)
def test_the_end_of_a_line_before_a_call(gap: str, kept: str):
    """One newline belongs to the call: templates put one between words and calls."""
    parts, _ = apart([f"I look.{gap}{call('look')}"])
    assert Said(f"I look.{kept}") == parts[0]


def test_a_model_without_a_parser():
    """What would begin a call is text, though its format names a state for calls."""
    known = markers("muse_spark", thinking=None, calling=None, parse=None, edges=HEADED.edges)
    text = "Well.<atem:function_calls>no call</atem:function_calls>"
    for begins in (SAYING, "header"):
        parts, rejected = apart([text[5:]], known=known, begins=begins)
        assert ([Said(text[5:])], []) == (parts, rejected)


def test_a_model_that_repeats_itself_in_a_call():
    """What some parsers would be busy with for minutes is no call, unless it is JSON."""
    pair = "<arg_key>a</arg_key><arg_value>"

    def parse(words: str, _: Any) -> Any:
        raise AssertionError(words)

    for words in (f"look{pair * 65}", f"look{'</arg_value>' * 65}{pair * 65}"):
        text = f"<tool_call>{words}</tool_call>"
        parts, rejected = apart([text], known=markers("glm47", parse=parse))
        assert [Said(text)] == parts
        assert ["unparsable"] == [one.reason for one in rejected]
        assert "AssertionError" not in rejected[0].detail
    many = "".join(f"<arg_key>a{n}</arg_key><arg_value>{n}</arg_value>" for n in range(70))
    parts, _ = apart([f"<tool_call>look{many}</tool_call>"], known=markers("glm47"))
    assert 70 == len(names(parts)[0][2])
    assert [(0, "look", {"city": pair * 65})] == names(apart([call("look", city=pair * 65)])[0])


def test_what_is_certain_comes_at_once():
    """Words do not wait for the end; what may become a marker does, and the space before it."""
    parts = AnswerParts(AnswerForm(markers=QWEN, tools=TOOLS), name="req-1")
    assert (Said("I look"),) == parts.add("I look").parts
    assert () == parts.add("\n").parts
    assert () == parts.add("<tool_").parts
    assert (Said("\n<tool_box>"),) == parts.add("box>").parts
    assert () == parts.add("\n<tool_call>").parts
    assert () == parts.add('{"name": "go", "arguments": {}}').parts
    (done,) = parts.add("</tool_call>").parts
    assert isinstance(done, Called)
    assert () == parts.finish(complete=True).parts


def test_without_tools_text_is_text():
    """If none are available, what looks like a call is said as it is; thoughts are thoughts."""
    text = f"I look.\n{call('look', city='Rom')} \n"
    assert ([Said(text)], []) == apart([text], tools=())
    assert [Thought("Hm."), Said("Well.")] == apart(["<think>Hm.</think>\n\nWell."], tools=())[0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "unparsable"),
        ('{"name": "go", "arguments": {"html": "</tool_call>"}}', "unparsable"),
        ('{"name": "look", "arguments": {"city": ', "unparsable"),
        ("3", "unparsable"),
        ("[]", "unparsable"),
        ("[" * 100_000, "unparsable"),
        ('{"arguments": {}}', "no_name"),
        ('{"name": "", "arguments": {}}', "no_name"),
        ('{"name": 3, "arguments": {}}', "no_name"),
        ('{"name": "\\ud800", "arguments": {}}', "no_name"),
        ('{"name": "look", "arguments": "Rom"}', "invalid_arguments"),
        ('{"name": "look", "arguments": "\\ud800"}', "invalid_arguments"),
        ('{"name": "look", "arguments": [1]}', "invalid_arguments"),
        ('{"name": "look", "arguments": {"x": NaN}}', "invalid_arguments"),
        ('{"name": "look", "parameters": {"city": "Rom"}}', "invalid_arguments"),
    ],
)
def test_what_is_no_call_is_text(words: str, reason: str):
    """It is said as the model wrote it, including markers; the reason is reported."""
    text = f"I look.\n<tool_call>\n{words}\n</tool_call>\nDone."
    parts, rejected = apart([text])
    assert [Said(text)] == parts
    behind, end, _ = f"{words}\n</tool_call>".partition("</tool_call>")
    assert [(reason, f"<tool_call>\n{behind}{end}")] == [(one.reason, one.text) for one in rejected]
    rejected[0].detail.encode()


def test_a_call_among_others_that_is_none():
    """The others are calls all the same."""
    text = f"{call('look')}\n<tool_call>\nlook there\n</tool_call>\n{call('go')}"
    parts, rejected = apart([text])
    assert [(0, "look", {}), (1, "go", {})] == names(parts)
    assert Said("<tool_call>\nlook there\n</tool_call>") == parts[1]
    assert 1 == len(rejected)


def test_a_call_that_is_cut_off_is_text():
    """Also where a parser would make a call of the half."""
    half = "[TOOL_CALLS]" + json.dumps([{"name": "go", "arguments": {}}])
    parts, rejected = apart([half], known=markers("mistral"), complete=False)
    assert ([Said(half)], ["truncated"]) == (parts, [one.reason for one in rejected])
    parts, rejected = apart([half], known=markers("mistral"))
    assert ([(0, "go", {})], []) == (names(parts), rejected)


def test_a_call_whose_end_is_the_answers():
    """An answer that ends without the marker after a complete call has made the call."""
    text = call("look", city="Rom").removesuffix("\n</tool_call>")
    assert [(0, "look", {"city": "Rom"})] == names(apart([text])[0])


@pytest.mark.parametrize("arguments", ["null", "{}", '"{}"'])
def test_a_call_without_arguments(arguments: str):
    """Null says that there are none, as an empty object does."""
    words = f'{{"name": "go", "arguments": {arguments}}}'
    assert [(0, "go", {})] == names(apart([f"<tool_call>{words}</tool_call>"])[0])


def test_arguments_as_text():
    """Arguments that are JSON within a text are the object; what is no Unicode is escaped."""
    words = json.dumps({"name": "look", "arguments": json.dumps({"city": "Rom"})})
    parts, _ = apart([f"<tool_call>{words}</tool_call>"])
    assert [(0, "look", {"city": "Rom"})] == names(parts)
    odd = '<tool_call>{"name": "look", "arguments": {"city": "\\ud83d"}}</tool_call>'
    (part,), _ = apart([odd])
    assert isinstance(part, Called)
    assert '{"city": "\\ud83d"}' == part.arguments


def test_a_parser_that_makes_calls_of_anything():
    """What GLM's parser makes of words that it does not understand is none; a good one is."""
    known = markers("glm47")
    for words in ("I would rather not", "look at Rome", "Hello"):
        text = f"<tool_call>{words}</tool_call>"
        parts, rejected = apart([text], known=known)
        assert [Said(text)] == parts
        assert ["unparsable"] == [one.reason for one in rejected]
    assert [(0, "go", {})] == names(apart(["<tool_call>go</tool_call>"], known=known)[0])
    raw = {
        "type": "function",
        "function": {"name": "run", "parameters": {"properties": {"raw": {}}}},
    }
    parts, _ = apart(["<tool_call>run ls -l</tool_call>"], known=known, tools=[raw])
    assert [(0, "run", {"raw": "ls -l"})] == names(parts)
    good = "<tool_call>look<arg_key>city</arg_key><arg_value>12</arg_value></tool_call>"
    assert [(0, "look", {"city": "12"})] == names(apart([good], known=known)[0])


def test_thoughts_that_the_template_began():
    """The answer begins within them; they end with the marker."""
    parts, _ = apart(["\nHm.\n\n</think>\n\n  Well."], begins=THINKING)
    assert [Thought("Hm."), Said("  Well.")] == parts


@pytest.mark.parametrize("complete", [True, False])
def test_unfinished_thoughts_are_thoughts(complete: bool):
    """Whatever ended the answer; also with a call in them that was cut off."""
    assert [Thought("Hm.\n</th")] == apart(["<think>\nHm.\n</th"], complete=complete)[0]
    parts, _ = apart(['<think>Hm.\n<tool_call>{"name"'], complete=complete)
    assert [Thought('Hm.\n<tool_call>{"name"')] == parts


def test_a_call_in_mid_thought_ends_the_thoughts():
    """As with models that forget to close them."""
    parts, _ = apart([f"<think>\nI look.\n{call('look')}\nDone."])
    assert [Thought("I look."), Said("Done.")] == [parts[0], parts[2]]
    assert [(0, "look", {})] == names(parts)


def test_empty_thoughts_are_none():
    """Neither is the white space around them."""
    assert [Said("Well.")] == apart(["\n<think>\n\n</think>\n\nWell."])[0]


def test_a_format_with_headers():
    """Their contents are not shown; they determine the next state."""
    text = (
        " to=self|Hm.<eom><start>to=user|Well.<eom><start>to=go|<atem:function_calls>"
        '<atem:invoke name="go"></atem:invoke></atem:function_calls>'
    )
    parts, _ = apart([text], known=HEADED, begins="header")
    assert [Thought("Hm."), Said("Well.")] == parts[:2]
    assert [(0, "go", {})] == names(parts)
    silent, _ = apart([text], known=HEADED, begins="header", tools=())
    assert Said("Well.\n<atem:function_calls>" + text.partition("calls>")[2]) == silent[1]


@pytest.mark.parametrize("complete", [True, False])
def test_a_format_with_headers_that_is_not_kept(complete: bool):
    """An answer that has none is said, and so is a call behind a header that is none."""
    known: dict[str, Any] = {"known": HEADED, "begins": "header", "complete": complete}
    assert [Said("Hello <eo")] == apart(["Hello <eo"], **known)[0]
    half = '<atem:function_calls><atem:invoke name="go'
    parts, rejected = apart([f"to=self|Hm.<eom>to=go|{half}"], **known)
    assert [Thought("Hm."), Said(half)] == parts
    assert [("truncated", half)] == [(one.reason, one.text) for one in rejected]
    bad = "<atem:function_calls>go there</atem:function_calls>"
    parts, rejected = apart([f"to=go|{bad}<eom>to=user|Well."], **known)
    assert ([Said(f"{bad}\nWell.")], [bad]) == (parts, [one.text for one in rejected])


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n", SAYING),
        ("<|im_start|>assistant\n<think>\n", THINKING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", SAYING),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", SAYING),
    ],
)
def test_where_an_answer_begins(prompt: str, state: str):
    """The answer begins in thoughts only if the end of the prompt opens them."""
    assert state == QWEN.begins(prompt)
    assert SAYING == Markers().begins(prompt)
    assert "header" == HEADED.begins(prompt)


IN_A_TEXT = '<tool_call>\n{"name": "go", "arguments": {"a": "x</tool_call>y"}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_marker_in_arguments_ends_no_call_that_is_held(size: int) -> None:
    """
    Where calls are held to a grammar, one that is no JSON yet goes on; otherwise its marker ends it
    wherever it stands.
    """
    for held in (True, False):
        parts = AnswerParts(AnswerForm(markers=QWEN, tools=TOOLS, held=held), name="a")
        pieces = [IN_A_TEXT[at : at + size] for at in range(0, len(IN_A_TEXT), size)]
        released = [*map(parts.add, pieces), parts.finish(complete=True)]
        found = [part for one in released for part in one.parts]
        called = [(one.name, json.loads(one.arguments)) for one in found if isinstance(one, Called)]
        assert ([("go", {"a": "x</tool_call>y"})] if held else []) == called
        said = "".join(one.text for one in found if isinstance(one, Said))
        assert ("" if held else IN_A_TEXT) == said


HELD = '<tool_call>\n{"name": "go", "arguments": {"a": "} \\\\\\" {", "b": [{}]}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 7, 200])
def test_arguments_of_a_held_call_are_reported_as_they_come(size: int) -> None:
    """
    From the name on, behind the words before it; joined they are those of the call, which are what
    the model wrote, and what stands behind them is none.
    """
    parts = AnswerParts(AnswerForm(markers=QWEN, tools=TOOLS, held=True), name="a")
    text = "I go.\n" + HELD
    found = [parts.add(text[place : place + size]) for place in range(0, len(text), size)]
    found.append(parts.finish(complete=True))

    reported = [part for one in found for part in one.parts]
    assert "I go." == "".join(part.text for part in reported if isinstance(part, Said))
    (call,) = [part for part in reported if isinstance(part, Called)]
    assert '{"a": "} \\\\\\" {", "b": [{}]}' == call.arguments
    came = [one.calling for one in found if one.calling is not None]
    assert bool(came) == (size < len(text))
    assert {(0, call.id, "go")} >= {(one.index, one.id, one.name) for one in came}
    assert call.arguments.startswith("".join(one.arguments for one in came))
    if size == 1:
        assert call.arguments == "".join(one.arguments for one in came)
        first = next(place for place, one in enumerate(found) if one.calling is not None)
        assert HELD.index('{"a"') + len("I go.\n") == first
        said = [n for n, one in enumerate(found) if Said in map(type, one.parts)]
        assert max(said) <= first


@pytest.mark.parametrize("held", [True, False])
def test_a_call_that_is_held_and_cut_off_stays_one(held: bool) -> None:
    """
    Its arguments are as far as they came, since they were reported; the journal has it as cut. A
    free one is reported when it is complete, so it is text.
    """
    parts = AnswerParts(AnswerForm(markers=QWEN, tools=TOOLS, held=held), name="a")
    half = HELD[: HELD.index(', "b"')]
    came = parts.add(half)
    last = parts.finish(complete=False)

    assert ["truncated"] == [one.reason for one in last.rejected]
    if held:
        assert came.calling is not None
        (call,) = last.parts
        assert isinstance(call, Called)
        assert half == call.cut == last.rejected[0].text
        assert came.calling.arguments == call.arguments == half[half.index('{"a"') :]
        assert half == message_of(last.parts).content
        assert () == message_of(last.parts).tool_calls
    else:
        assert came.calling is None
        assert (Said(half),) == last.parts


def test_a_call_that_is_held_and_cut_off_before_its_name_is_text() -> None:
    """Nothing of it was reported before."""
    parts = AnswerParts(AnswerForm(markers=QWEN, tools=TOOLS, held=True), name="a")
    half = HELD[: HELD.index(', "arguments"')]
    assert None is parts.add(half).calling
    assert (Said(half),) == parts.finish(complete=False).parts
