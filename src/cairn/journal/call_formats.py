"""
Reads tool calls as models write them: JSON, and texts in tags. Pure.

``json_tools`` reads JSON with ``json.loads`` alone, in every version of mlx-lm. Other formats are
read only if the parser on record is of a version that was compared, because a later one may read a
text differently. Where values are texts in tags, the client's schema decides what becomes of them.
The journal does not have it, so whatever some schema makes of a text is accepted.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

READ_VERSIONS = frozenset(("0.32.1", "0.32.2"))
"""The versions of mlx-lm whose parsers were compared with the readers of this module."""

ReadCalls = Sequence[tuple[str, Callable[[str], bool]]]
"""
The calls of a text, in order: for each its name, and whether stored arguments are its own. Empty
if the text is no call.
"""


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """
    Arguments as they are stored: JSON text.

    Raises:
        ValueError, TypeError, RecursionError: they cannot be written as JSON.
    """
    # Names that are no texts become texts. Then a name may be there twice, and the last one counts.
    read = json.loads(json.dumps(arguments, allow_nan=False))
    text = json.dumps(read, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # An unpaired surrogate can only be written as an escape.
        return json.dumps(read, allow_nan=False)
    return text


# --- JSON ----------------------------------------------------------------------------------------


def json_value(text: str) -> Any:
    """A JSON value; None if it is none."""
    try:
        return json.loads(text.strip())
    except ValueError:
        return None


def _typed(found: Sequence[Any]) -> ReadCalls:
    """What the server makes of objects with name and arguments; nothing if one is no call."""
    calls = []
    for one in found:
        if not isinstance(one, dict):
            return ()
        name, arguments = one.get("name"), one.get("arguments")
        if arguments is None and ("arguments" in one or one.keys() <= {"name", "id"}):
            arguments = {}
        if isinstance(arguments, str):
            arguments = json_value(arguments)
        if not name or not isinstance(name, str) or not isinstance(arguments, dict):
            return ()
        try:
            calls.append((name, arguments_text(arguments).__eq__))
        except ValueError:
            return ()
    return calls


def _json_tools(text: str) -> ReadCalls:
    """``{"name": "f", "arguments": {...}}``, or a list of these."""
    found = json_value(text)
    return _typed(found if isinstance(found, list) else [found])


def _longcat(text: str) -> ReadCalls | None:
    """The same object, or pairs of tags."""
    found = json_value(text) if text.strip().startswith("{") else None
    return _pairs("longcat_").read(text) if found is None else _typed([found])


_ARGUMENTS = "[ARGS]"


def _mistral(text: str) -> ReadCalls:
    """A list of objects, or ``f[ARGS]{...}`` once or more. All other text is dropped."""
    found = json_value(text)
    if isinstance(found, list):
        return _typed([{"arguments": {}, **one} if isinstance(one, dict) else one for one in found])
    calls, place = [], 0
    while (mark := text.find(_ARGUMENTS, place)) >= 0:
        start = end = place + len(text[place:mark].rstrip())
        while start > place and _is_of_name(text[start - 1]):
            start -= 1
        place = mark + len(_ARGUMENTS)
        if start < end:
            while text[place : place + 1].isspace():
                place += 1
            try:
                arguments, place = json.JSONDecoder().raw_decode(text, place)
            except ValueError:
                return ()
            calls.append({"name": text[start:end], "arguments": arguments})
    return _typed(calls)


def _is_of_name(one: str) -> bool:
    kind = unicodedata.category(one)
    return one in "-\u200c\u200d" or kind[0] in "LM" or kind in ("Nd", "Nl", "Pc")


# --- tags ----------------------------------------------------------------------------------------

OPEN_MAX = 64
"""
The most tags of one name that may be open at once. Parsers search all of the following text for the
end of each, some again for each beginning, so a model that repeats itself would block the server.
"""

_TAG = re.compile(
    r"<(/?)((?:longcat_)?arg_(?:key|value)|function|parameter|param|(?:atem:)?(?:invoke|parameter))\b"
)


def open_too_often(text: str) -> str | None:
    """
    A tag that is open too often: by all its beginnings and ends, or by the beginnings after its
    last end. None if there is none.
    """
    balance, at_end = Counter[str](), Counter[str]()
    for closes, tag in _TAG.findall(text):
        balance[tag] += -1 if closes else 1
        at_end[tag] = 0 if closes else at_end[tag] + 1
    return next((tag for tag in balance if max(balance[tag], at_end[tag]) > OPEN_MAX), None)


@attrs.frozen(kw_only=True)
class _Tags:
    """
    A format whose values are texts in tags, by the expressions of its parser.

    Attributes:
        calls: what is of each call.
        name: in what is of a call.
        fields: what is of each value, in what is of a call.
        field: name and value.
        quoted: whether names may be in quotes.
    """

    calls: str
    name: str
    fields: str
    field: str
    quoted: bool = False

    def read(self, text: str) -> ReadCalls | None:
        """The calls of a text; None if it is not read."""
        found = []
        for words in [] if open_too_often(text) else re.findall(self.calls, text, re.DOTALL):
            if (name := re.match(self.name, words, re.DOTALL)) is None:
                return None
            fields = re.findall(self.fields, words, re.DOTALL)
            pairs = [re.fullmatch(self.field, one, re.DOTALL) for one in fields]
            texts = {self._named(pair[1]): pair[2] for pair in pairs if pair is not None}
            found.append((self._named(name[1]), partial(_is_made_of, texts)))
        return found or None

    def _named(self, text: str) -> str:
        name = text.strip()
        in_quotes = self.quoted and name[:1] in ('"', "'") and name.endswith(name[:1])
        return name[1:-1] if in_quotes else name


def _pairs(prefix: str) -> _Tags:
    """``f<arg_key>k</arg_key><arg_value>v</arg_value>``"""
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    between = rf"</{key}>(?:\\n|\s)*<{value}>"
    return _Tags(
        calls=r"\A(.*)\Z",
        name=rf"(.*?)<{key}>",
        fields=rf"<{key}>(.*?{between}.*?)</{value}>",
        field=rf"(.*?){between}(.*)",
    )


_FUNCTIONS = _Tags(
    calls=r"\A(?=.*</function>\n?\Z).*?<function=(.*)",
    name=r"\s*([^\s<>]+)",
    fields=r"<parameter=(.*?)</parameter>",
    field=r"\s*([^\s<>]+)>?(.*)",
)
_INVOCATIONS = _Tags(
    calls=r"<invoke name=(.*?)</invoke>",
    name=r"([^>]+)",
    fields=r"<parameter name=(.*?)</parameter>",
    field=r"([^>]+)>(.*)",
    quoted=True,
)


def _is_made_of(texts: Mapping[str, str], arguments: str) -> bool:
    """Whether stored arguments are what some schema makes of texts."""
    stored = json_value(arguments)
    if not isinstance(stored, dict) or arguments != arguments_text(stored):
        return False
    return list(stored) == list(texts) and all(_fits(texts[name], stored[name]) for name in texts)


_NONE = ("null", "none", "nil")
_TRUE = ("true", "1", "yes", "on")
_VALUES: Sequence[Callable[[str], Any]] = (
    int,
    float,
    lambda text: int(float(text)),
    partial(json.loads, strict=False),
    ast.literal_eval,
)


def _fits(text: str, stored: Any) -> bool:
    text = text.strip()
    if stored is None:
        return text.lower() in _NONE
    if isinstance(stored, bool):
        # A format has every boolean as false that is not "true".
        return text.lower() in _TRUE if stored else text.lower() != "true"
    if isinstance(stored, str) and stored.strip() == text:
        return True
    for read in _VALUES:
        try:
            made = json.loads(json.dumps(read(text)))  # with names as ``arguments_text`` has them
            if json.dumps(made) == json.dumps(stored):
                return True
        except (ValueError, OverflowError, SyntaxError, TypeError, MemoryError):
            continue
    return False


READERS: Mapping[str, Callable[[str], ReadCalls | None]] = {
    "json_tools": _json_tools,
    "longcat": _longcat,
    "mistral": _mistral,
    "qwen3_coder": _FUNCTIONS.read,
    "minimax_m2": _INVOCATIONS.read,
    "glm47": _pairs("").read,
}
"""Readers by mlx-lm's name of the format. Each says None of a text that it does not read."""
