"""
Reads tool calls as models write them: in JSON, in tags, as Python, in the formats of Gemma, GLM,
Kimi and Mistral. Pure.

The parsers that made the calls are code of mlx-lm, which the journal does not need. They have seen
the client's tools, too, which the journal has only as tokens: a parser makes of ``<v>3</v>`` the
number 3 or the text "3", as its tool's schema says. So a reading here says what is certain, which
is the name, the fields in order and the text of each value, and accepts for a value whatever some
schema may make of its text.

Every reader takes a number of steps in proportion to the length of its text.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

_TRUE = frozenset(("true", "1", "yes", "on"))
_FALSE = frozenset(("false", "0", "no", "off"))
_NONE = frozenset(("null", "none", "nil"))

Fits = Callable[[Any], bool]
"""Whether a stored value is one that a parser may have read."""


class ReadCall(msgspec.Struct, frozen=True):
    """
    A call as a text has it.

    Attributes:
        fields: the arguments in their order, each with what may be stored of it.
    """

    name: str
    fields: Mapping[str, Fits]

    def is_stored_as(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether it is the call of this name with these arguments."""
        return (
            name == self.name
            and list(arguments) == list(self.fields)
            and all(fits(arguments[field]) for field, fits in self.fields.items())
        )


ReadCalls = Sequence[ReadCall]
"""The calls of one text between two markers, in order."""


class Format(msgspec.Struct, frozen=True):
    """
    A way to write calls.

    Attributes:
        hint: a text that every call of this format has; empty for those that begin with JSON or a
            name.
        read: what a text may be read as; no reading if it is of another format.
        opened_by: the marker before the text, if the format needs a certain one.
        ends_answer: whether the end of the answer may end a call, as well as a marker.
    """

    hint: str
    read: Callable[[str], Iterable[ReadCalls]]
    opened_by: str = ""
    ends_answer: bool = False


# --- values --------------------------------------------------------------------------------------


def _dumped(value: Any) -> str | None:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None


def _is(value: Any, stored: Any) -> bool:
    """Whether a stored value is this one, with all types and the order of fields."""
    dumped = _dumped(value)
    return dumped is not None and dumped == _dumped(stored)


def _is_or_as_schema_says(value: Any, stored: Any) -> bool:
    """
    The same for a field of a JSON call. GLM's parser makes texts of other values, and other values
    of texts, as the schema says; its markers are those of other families.
    """
    if _is(value, stored):
        return True
    if isinstance(value, str):
        return any(_is(each, stored) for each in _literals(value))
    return isinstance(stored, str) and stored == str(value)


def _fits_text(text: str, stored: Any, *, all_else_is_false: bool = False) -> bool:
    """
    Whether some schema makes a stored value of a text.

    Args:
        all_else_is_false: whether the format has every boolean as false that is not "true".
    """
    bare = text.strip()
    if isinstance(stored, str):
        return stored.strip() == bare or any(_is(each, stored) for each in _literals(bare))
    word = bare.lower()
    if stored is None and word in _NONE:
        return True
    if isinstance(stored, bool):
        if all_else_is_false:
            return stored == (word == "true")
        if word in (_TRUE if stored else _FALSE):
            return True
    return any(_is(each, stored) for each in (*_numbers(bare), *_literals(bare)))


def _numbers(text: str) -> Iterator[Any]:
    """What a schema of numbers makes of a text."""
    for read in (int, float, lambda each: int(float(each))):
        try:
            yield read(text)
        except (ValueError, OverflowError):
            continue


def _literals(text: str) -> Iterator[Any]:
    """What a text is as JSON and as Python."""
    for read in (json.loads, partial(json.loads, strict=False), ast.literal_eval):
        try:
            yield read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue


def _object(text: str) -> dict[Any, Any] | None:
    """The object that a text is, also within a text of JSON; None if it is none."""
    value: Any = text
    for _ in range(2):
        if isinstance(value, str):
            value = next(_literals(value), None)
    return value if isinstance(value, dict) else None


def _texts(
    name: str, fields: Iterable[tuple[str, str]], *, all_else_is_false: bool = False
) -> ReadCall:
    """A call whose values are texts."""
    return ReadCall(
        name=name,
        fields={
            field: partial(_fits_text, text, all_else_is_false=all_else_is_false)
            for field, text in fields
        },
    )


def _values(
    name: str, fields: Mapping[Any, Any], fits: Callable[[Any, Any], bool] = _is
) -> ReadCall:
    """A call whose values have types."""
    named = {
        field if isinstance(field, str) else str(_dumped(field)): value
        for field, value in fields.items()
    }
    return ReadCall(
        name=name, fields={field: partial(fits, value) for field, value in named.items()}
    )


# --- JSON ----------------------------------------------------------------------------------------


def _json(text: str) -> Iterator[ReadCalls]:
    """``{"name": "f", "arguments": {...}}``, a list of these, and what GLM writes instead."""
    try:
        found = json.loads(text.strip())
    except (ValueError, RecursionError):
        return
    one_by_one = found if isinstance(found, list) else [found]
    fits = _is if isinstance(found, list) else _is_or_as_schema_says
    calls = [_json_call(one, fits) for one in one_by_one]
    whole = [call for call in calls if call is not None]
    if whole and len(whole) == len(calls):
        yield whole
    if isinstance(found, list) and found and (first := _json_call(found[0], _is_or_as_schema_says)):
        yield [first]


def _json_call(found: Any, fits: Callable[[Any, Any], bool]) -> ReadCall | None:
    if not isinstance(found, dict):
        return None
    name: Any = found.get("name")
    arguments: Any = found.get("arguments")
    tool: Any = found.get("tool")
    if name is None or "arguments" not in found:
        if "arguments" in found:
            name = found.get("function")
        elif isinstance(tool, dict):
            name = tool.get("name")
            arguments = tool.get("arguments")
    if isinstance(name, dict):
        arguments = arguments or name.get("arguments")
        name = name.get("name")
    if isinstance(arguments, str):
        arguments = _object(arguments)
    elif arguments is None:
        arguments = {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return _values(name, arguments, fits)


# --- tags ----------------------------------------------------------------------------------------


_OPEN_MAX = 8
"""Expressions search all of the following text for the end of each tag that is left open."""


def _is_left_open(text: str, opening: str, closing: str) -> bool:
    """Whether a tag is open so often that no call is read."""
    last = text.rfind(closing)
    unclosed = text.count(opening, max(last, 0))
    return max(text.count(opening) - text.count(closing), unclosed) > _OPEN_MAX


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
    """The texts between two others, as short as they can be."""
    place = text.find(opening)
    while place >= 0:
        place += len(opening)
        end = text.find(closing, place)
        if end < 0:
            return
        yield text[place:end]
        place = text.find(opening, end + len(closing))


_BARE_NAME = re.compile(r"\s*([^\s<>]+)>?")


def _function_tags(text: str) -> Iterator[ReadCalls]:
    """``<function=f><parameter=k>v</parameter></function>`` of Qwen Coder."""
    text = text.removesuffix("\n")
    start = text.find("<function=")
    if start < 0 or not text.endswith("</function>"):
        return
    words = text[start + len("<function=") : -len("</function>")]
    if (head := _BARE_NAME.match(words)) is None:
        return
    fields = []
    for one in _between(words[head.end() :], "<parameter=", "</parameter>"):
        if (field := _BARE_NAME.match(one)) is not None:
            fields.append((field[1], one[field.end() :]))
    yield [_texts(head[1], fields, all_else_is_false=True)]


def _invoke_tags(text: str) -> Iterator[ReadCalls]:
    """``<invoke name="f"><parameter name="k">v</parameter></invoke>`` of MiniMax."""
    calls = []
    for words in _between(text, "<invoke name=", "</invoke>"):
        name, _, _ = words.partition(">")
        if name:
            calls.append(_texts(_unquoted(name), _named_parameters(words)))
    if calls:
        yield calls


def _named_parameters(words: str) -> Iterator[tuple[str, str]]:
    for one in _between(words, "<parameter name=", "</parameter>"):
        name, ends, value = one.partition(">")
        if name and ends:
            yield _unquoted(name), value


def _unquoted(name: str) -> str:
    name = name.strip()
    if name[:1] in ('"', "'") and name.endswith(name[:1]):
        return name[1:-1]
    return name


_PREFIXED_CALL = re.compile(
    r"<atem:invoke\b[^>]*?\bname=\"([^\"]+)\">"
    r"((?:<atem:parameter\b.*?</atem:parameter>|.)*?)(?:</atem:invoke>|\Z)",
    re.DOTALL,
)
_PREFIXED_FIELD = re.compile(
    r"<atem:parameter\b[^>]*?\bname=\"([^\"]+)\"[^>]*?>(.*?)</atem:parameter>", re.DOTALL
)


def _prefixed_tags(text: str) -> Iterator[ReadCalls]:
    """``<atem:invoke name="f"><atem:parameter name="k">v`` of Muse."""
    if _is_left_open(text, "<atem:parameter", "</atem:parameter>"):
        return
    calls = [
        _texts(name, _PREFIXED_FIELD.findall(words)) for name, words in _PREFIXED_CALL.findall(text)
    ]
    if calls:
        yield calls


_MINICPM_CALL = re.compile(
    r"\s*(?:<function\s+)?(?:name\s*=\s*)?(\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>(.*)", re.DOTALL
)
_MINICPM_FIELD = re.compile(
    r"<param\s+name\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>(.*?)</param>", re.DOTALL
)
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*\Z", re.DOTALL)


def _minicpm_tags(text: str) -> Iterator[ReadCalls]:
    """``<function name="f"><param name="k">v</param></function>`` of MiniCPM."""
    call = _MINICPM_CALL.match(text)
    if call is None or _is_left_open(text, "<param", "</param>"):
        return
    fields = []
    for field, value in _MINICPM_FIELD.findall(call[2]):
        data = _CDATA.match(value)
        fields.append((_unquoted(field), data[1] if data else value))
    yield [_texts(_unquoted(call[1]), fields)]


def _pair_tags(text: str, *, prefix: str) -> Iterator[ReadCalls]:
    """``f<arg_key>k</arg_key><arg_value>v</arg_value>`` of GLM, with a prefix of LongCat."""
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    if any(_is_left_open(text, f"<{tag}>", f"</{tag}>") for tag in (key, value)):
        return
    name, _, _ = text.partition(f"<{key}>")
    pair = rf"<{key}>(.*?)</{key}>(?:\\n|\s)*<{value}>(.*?)</{value}>"
    found = re.findall(pair, text, re.DOTALL)
    yield [_texts(name.strip(), [(field.strip(), each) for field, each in found])]


_XTML_CALL = re.compile(
    r"<\|open\|>call((?:(?!<\|sep\|>).)*)<\|sep\|>(.*?)<\|close\|>call<\|sep\|>", re.DOTALL
)
_XTML_FIELD = re.compile(
    r"<\|open\|>argument((?:(?!<\|sep\|>).)*)<\|sep\|>(.*?)<\|close\|>argument<\|sep\|>", re.DOTALL
)
_XTML_JSON = re.compile(
    r"<\|open\|>json(?:(?!<\|sep\|>).)*<\|sep\|>(.*?)<\|close\|>json<\|sep\|>", re.DOTALL
)
_XTML_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _xtml(text: str) -> Iterator[ReadCalls]:
    """``<|open|>call tool="f"<|sep|>`` of Kimi K3."""
    if any(
        _is_left_open(text, f"<|open|>{tag}", f"<|close|>{tag}")
        for tag in ("call", "argument", "json")
    ):
        return
    calls = [
        call
        for attributes, words in _XTML_CALL.findall(text)
        if (call := _xtml_call(_attributes(attributes), words)) is not None
    ]
    if calls:
        yield calls


def _xtml_call(attributes: Mapping[str, str], words: str) -> ReadCall | None:
    name = attributes.get("tool")
    if not name:
        return None
    if (block := _XTML_JSON.search(words)) is not None:
        try:
            arguments = json.loads(block[1])
        except (ValueError, RecursionError):
            return None
        return _values(name, arguments) if isinstance(arguments, dict) else None
    fields = [(_attributes(head).get("key"), value) for head, value in _XTML_FIELD.findall(words)]
    known = [(key, value) for key, value in fields if key is not None]
    return _texts(name, known) if len(known) == len(fields) else None


def _attributes(text: str) -> dict[str, str]:
    return {
        key: value.replace("&quot;", '"').replace("&amp;", "&")
        for key, value in _XTML_ATTRIBUTE.findall(text)
    }


# --- names before arguments ----------------------------------------------------------------------

_KIMI_CALL = re.compile(
    r"\s*(?:functions\.)?(.+?):\d+\s*<\|tool_call_argument_begin\|>\s*(.*)", re.DOTALL
)


def _kimi(text: str) -> Iterator[ReadCalls]:
    """``functions.f:0<|tool_call_argument_begin|>{...}`` of Kimi K2."""
    found = list(_between(text, "<|tool_call_begin|>", "<|tool_call_end|>")) or [text]
    calls = []
    for words in found:
        head = _KIMI_CALL.match(words)
        arguments = _object(head[2]) if head else None
        if head is None or arguments is None:
            return
        calls.append(_values(head[1], arguments))
    yield calls


_ARGUMENTS = "[ARGS]"


def _headers(text: str) -> Iterator[ReadCalls]:
    """``f[ARGS]{...}`` of Mistral."""
    calls, place = [], 0
    while (mark := text.find(_ARGUMENTS, place)) >= 0:
        end = len(text[place:mark].rstrip()) + place
        start = end
        while start > place and (text[start - 1] in "_-" or text[start - 1].isalnum()):
            start -= 1
        begin = mark + len(_ARGUMENTS)
        while begin < len(text) and text[begin].isspace():
            begin += 1
        try:
            arguments, place = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError):
            return
        if isinstance(arguments, str):
            arguments = _object(arguments)
        if start == end or not isinstance(arguments, dict | None):
            return
        calls.append(_values(text[start:end], arguments or {}))
    if calls:
        yield calls


_ESCAPE = "<escape>"
_GEMMA_CALL = re.compile(r"call:(\w+)\{(.*?)\}", re.DOTALL)


def _gemma(text: str) -> Iterator[ReadCalls]:
    """``call:f{k:<escape>v<escape>,n:3}`` of FunctionGemma."""
    if (call := _GEMMA_CALL.search(text[: text.rfind("}") + 1])) is None:
        return
    rest, place, fields = call[2], 0, []
    while place < len(rest):
        colon = rest.find(":", place)
        if colon < 0:
            return
        key, place = rest[place:colon], colon + 1
        if rest.startswith(_ESCAPE, place):
            place += len(_ESCAPE)
            end = rest.find(_ESCAPE, place)
            if end < 0:
                return
            fields.append((key, rest[place:end]))
            place = end + len(_ESCAPE) + 1
            continue
        end = rest.find(",", place)
        end = len(rest) if end < 0 else end
        fields.append((key, rest[place:end]))
        place = end + 1
    yield [_texts(call[1], fields)]


_QUOTE = '<|"|>'
_GEMMA_4_HEAD = re.compile(r"call:([\w-]+)(?=\{)")
_GEMMA_4_KEY = re.compile(r"(?<=[{,])(\w+):")


def _gemma_4(text: str) -> Iterator[ReadCalls]:
    """``call:f{k:<|"|>v<|"|>,n:3}`` of Gemma 4, whose values are otherwise JSON."""
    calls, place = [], 0
    while (head := _GEMMA_4_HEAD.search(text, place)) is not None:
        place = _past_braces(text, head.end())
        if place < 0:
            break
        pieces = text[head.end() : place].split(_QUOTE)
        # Every second piece is a text.
        as_json = "".join(
            json.dumps(piece) if number % 2 else _GEMMA_4_KEY.sub(r'"\1":', piece)
            for number, piece in enumerate(pieces)
        )
        try:
            arguments = json.loads(as_json)
        except (ValueError, RecursionError):
            return
        if not isinstance(arguments, dict):
            return
        calls.append(_values(head[1], arguments))
    if calls:
        yield calls


_BRACE = re.compile(r'<\|"\|>.*?<\|"\|>|[{}]', re.DOTALL)


def _past_braces(text: str, start: int) -> int:
    """Where the braces that open at a place are closed; -1 if they are not."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        if len(found[0]) == 1:
            depth += 1 if found[0] == "{" else -1
            if depth == 0:
                return found.end()
    return -1


# --- Python --------------------------------------------------------------------------------------

_JSON_NAMES = {"true": True, "false": False, "null": None}
_PYTHON_CALL = re.compile(r"\[([\w.]+)\((.*?)\)\]", re.DOTALL)
_PYTHON_FIELD = re.compile(
    r"""(?<!\w)(\w+)=(?:"([^"]*)"|'([^']*)'|([^,]+))(?:,\s*|\Z)""",
    re.DOTALL,
)


class _JSONNames(ast.NodeTransformer):
    """Reads the names of JSON's values, too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _JSON_NAMES:
            return node
        return ast.copy_location(ast.Constant(_JSON_NAMES[node.id]), node)


def _python(text: str) -> Iterator[ReadCalls]:
    """``[f(k="v", n=3)]`` of LFM and Llama; also what is not quite Python."""
    start, end = text.find("["), text.rfind("]")
    if 0 <= start < end:
        try:
            body = ast.parse(text[start : end + 1], mode="eval").body
            calls = [_python_call(one) for one in getattr(body, "elts", ())]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            calls = []
        whole = [call for call in calls if call is not None]
        if whole and len(whole) == len(calls):
            yield whole
    # Older parsers read every text so.
    if (call := _PYTHON_CALL.search(text[: text.rfind(")]") + 2])) is not None:
        fields = [
            (key, double or single or bare)
            for key, double, single, bare in _PYTHON_FIELD.findall(call[2])
        ]
        yield [_texts(call[1], fields)]


def _python_call(node: ast.expr) -> ReadCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    name = ast.unparse(node.func)
    fields = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return None
        fields[keyword.arg] = ast.literal_eval(_JSONNames().visit(keyword.value))
    return _values(name, fields)


# --- a name alone --------------------------------------------------------------------------------


def _plain(text: str) -> Iterator[ReadCalls]:
    """``f``, ``f {...}`` and ``f k=v``, which GLM's parser reads."""
    bare = text.strip()
    if len(bare.split(maxsplit=1)) == 1:
        yield [_texts(bare, ())]
    for separator in ("\n", " "):
        name, _, rest = (each.strip() for each in bare.partition(separator))
        if not rest:
            continue
        for value in _literals(rest) if rest[0] in "{(" else ():
            if isinstance(value, dict):
                yield [_values(name, value, _is_or_as_schema_says)]
                break
        if separator == " " and (pairs := _pairs(rest)) is not None:
            yield [_texts(name, pairs)]


def _raw(text: str) -> Iterator[ReadCalls]:
    """``f`` with any words, which GLM's parser makes one argument."""
    name, _, rest = text.strip().partition(" ")
    yield [_texts(name, (("raw", rest),))]


def _pairs(text: str) -> list[tuple[str, str]] | None:
    try:
        words = shlex.split(text) if "=" in text else []
    except ValueError:
        return None
    pairs = [(key.strip(), value) for key, _, value in (word.partition("=") for word in words)]
    return pairs if pairs and all("=" in word for word in words) else None


BEGINS_AS_JSON = Format(hint="", read=_json, ends_answer=True)
BEGINS_WITH_NAME = Format(hint="", read=_plain)
WITH_ANY_WORDS = Format(hint="", read=_raw)
WITH_HINT = (
    Format(hint="<function=", read=_function_tags),
    Format(hint="<invoke name=", read=_invoke_tags),
    Format(hint="<atem:invoke", read=_prefixed_tags),
    Format(hint=">", read=_minicpm_tags, opened_by="<function name="),
    Format(hint="<arg_key>", read=partial(_pair_tags, prefix="")),
    Format(hint="<longcat_arg_key>", read=partial(_pair_tags, prefix="longcat_")),
    Format(hint="<|open|>call", read=_xtml),
    Format(hint="<|tool_call_argument_begin|>", read=_kimi),
    Format(hint="[ARGS]", read=_headers, ends_answer=True),
    Format(hint="call:", read=_gemma),
    Format(hint="call:", read=_gemma_4),
    Format(hint="(", read=_python),
)
