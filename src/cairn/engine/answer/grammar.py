"""
From what an answer must satisfy to a grammar. Pure; ``grammar_matcher`` finds out which tokens it
allows.

Rules of this module:

1. A grammar describes text, as ``answer.parts`` does, and never tokens: a marker that is spelled
out in pieces is the marker. Only how an answer ends is a matter of tokens.
2. ``answer.parts`` takes apart what a grammar allows in the same way: both see the end of a thought
and the beginning of a call at the same places.
3. Calls are written as the templates of their family write them, to the space, so that a client
that sends them back finds its prefix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import attrs

from cairn.engine.answer.closed_objects import closed
from cairn.engine.answer.markers import THINKING, Markers
from cairn.engine.answer.parts import AnswerForm

GRAMMAR_BYTES_MAX = 128 * 1024
"""The longest grammar, most of which is schemas. The journal records it with each request."""

_MULTIPLES_MAX = 10_000
"""
The largest value for ``multipleOf``. The library enumerates all remainders of each value, and if
two apply to the same number, those of their least common multiple. Within its own limits a value of
five digits takes seconds, and two values of four digits did not finish.
"""

_OPTIONAL_MAX = 480
"""
The most optional properties of an object. The library's parser needs four items for each, all at
the beginning of the object, and is limited to 2,000. More would end the answer there.
"""

#: Keywords whose values are not schemas, with lists of schemas, and with schemas by name.
_VALUES = frozenset({"const", "default", "enum", "examples"})
_ALTERNATIVES = frozenset({"allOf", "anyOf", "oneOf"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})

ANY_OBJECT: Mapping[str, Any] = MappingProxyType({"type": "object"})

#: One space, or a newline and its indentation. Unlimited white space would let a model that has
#: lost its way write it forever.
_FREELY = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,40}"}
#: As Python's ``json.dumps``, which templates use.
_AS_TEMPLATES = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}

#: No forced text: the library would have to tokenise it, and it has no tokenizer here.
_HEAD = '%llguidance {"no_forcing": true}'


@attrs.frozen(kw_only=True)
class Constraint:
    """
    What an answer must be after its thoughts: JSON, tool calls, or one of the two.

    Attributes:
        schema: the schema of the JSON; None if the answer must be calls.
        strict: refuse a schema that cannot be enforced as a whole. Otherwise the rest of it is
            ignored.
        calls: names of the tools that may be called.
        one_call: exactly one call, not several.

    Raises:
        ValueError: it allows neither.
    """

    schema: Mapping[str, Any] | None = None
    strict: bool = False
    calls: tuple[str, ...] = ()
    one_call: bool = False

    def __attrs_post_init__(self) -> None:
        if self.schema is None and not self.calls:
            raise ValueError("an answer that is neither JSON nor a call")


@attrs.frozen(kw_only=True)
class Grammar:
    """
    The grammar of one answer.

    Attributes:
        text: all of it, in the language of the library.
        schemas: a grammar for each schema alone, with the index of the tool whose parameters it
            describes, or None for the answer's own.
    """

    text: str
    schemas: tuple[tuple[int | None, str], ...]


class CannotConstrain(Exception):
    """
    No answer can be constrained to this. The client's fault, or the model's family is not
    supported.

    Attributes:
        fact: what is wrong, as the end of a sentence.
        about: ``schema`` if one cannot be enforced, ``calls`` if calls cannot, ``answer`` if
            nothing can.
        tool: for ``schema``: the index of the tool whose parameters it describes; None for the
            answer's own.
    """

    def __init__(self, fact: str, about: str, tool: int | None = None) -> None:
        super().__init__(fact)
        self.fact = fact
        self.about = about
        self.tool = tool


def grammar_of(constraint: Constraint, form: AnswerForm) -> Grammar:
    """
    The grammar of an answer. Modifies nothing.

    Args:
        form: how the answer is taken apart, with all tools.

    Raises:
        CannotConstrain: there is none.
    """
    markers = form.markers
    if markers.first is not None or markers.edges:
        raise CannotConstrain("the format of this model's answers is not supported", "answer")
    rules: list[str] = []
    schemas: list[tuple[int | None, str]] = []
    bodies: list[str] = []

    multiples: set[Decimal] = set()

    def schema_rule(name: str, place: int | None, schema: Mapping[str, Any], **ways: Any) -> None:
        multiples.update(_multiples(schema))
        if not _is_countable(multiples):
            raise CannotConstrain(
                "the values of multipleOf are too large together; without decimal points, their "
                f"sum and their least common multiple may be at most {_MULTIPLES_MAX}",
                "schema",
                place,
            )
        if (optional := _optional(schema)[1]) > _OPTIONAL_MAX:
            raise CannotConstrain(
                f"an object in it has {optional} optional properties, including those of its "
                f"alternatives; the limit is {_OPTIONAL_MAX}, so name others in `required`",
                "schema",
                place,
            )
        written = json.dumps({**closed(schema), "x-guidance": ways})
        rules.append(f"{name}: %json {written}")
        schemas.append((place, f"{_HEAD}\nstart: %json {written}"))

    if constraint.schema is not None:
        bodies.append("words")
        lenient = not constraint.strict
        schema_rule("words", None, constraint.schema, lenient=lenient, **_FREELY)
    offered = [
        (place, tool["function"])
        for place, tool in enumerate(form.tools)
        if tool["function"]["name"] in constraint.calls
    ]
    if offered:
        bodies.append("call" if constraint.one_call else r'call ("\n" call)*')
        rules.append("call: " + " | ".join(f"call_{place}" for place, _ in offered))
        for place, function in offered:
            before, behind = _around(function["name"], markers)
            lenient = function.get("strict") is not True
            rules.append(f"call_{place}: {_text(before)} arguments_{place} {_text(behind)}")
            parameters = _parameters(function, place)
            schema_rule(f"arguments_{place}", place, parameters, lenient=lenient, **_AS_TEMPLATES)
    if not bodies:
        raise CannotConstrain("none of the tools that may be called is in `tools`", "calls")
    lead, thoughts = _thoughts(form)
    start = f"start: {lead}({' | '.join(bodies)})"
    text = "\n".join([_HEAD, start, *thoughts, *rules]) + "\n"
    if len(text) > GRAMMAR_BYTES_MAX:
        raise CannotConstrain(
            f"its grammar has {len(text)} bytes, mostly schemas; the limit is {GRAMMAR_BYTES_MAX}",
            "answer",
        )
    return Grammar(text=text, schemas=tuple(schemas))


def _thoughts(form: AnswerForm) -> tuple[str, Sequence[str]]:
    """The part of the start rule before the body, and the rules that it uses."""
    markers = form.markers
    if markers.thinking is None or not (form.begins == THINKING or form.may_think):
        return "", ()
    opens, closes = markers.thinking
    thought = f"/(?s:.*){_pattern(closes)}/"
    if form.tools and markers.calling is not None:
        # The beginning of a call is read as one even in a thought.
        thought += f" & ~/(?s:.*){_pattern(markers.calling[0])}(?s:.*)/"
    # A lazy lexeme ends as early as possible: at the first marker, not at the last.
    rules = (f"THOUGHT: {thought}", "thought[lazy]: THOUGHT", r"GAP: /\n{0,2}/")
    if form.begins == THINKING:
        return "thought GAP ", rules
    return f"({_text(opens)} thought GAP)? ", rules


def _hermes(name: str, markers: tuple[str, str]) -> tuple[str, str]:
    start, end = markers
    return f'{start}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', f"}}\n{end}"


_FORMATS: Mapping[str, Callable[[str, tuple[str, str]], tuple[str, str]]] = MappingProxyType(
    {"json_tools": _hermes}
)
"""
Functions by the name of mlx-lm's parser. Each takes a tool's name and the markers of calls, and
returns the text before and after the arguments, which are JSON.
"""


def _around(name: str, markers: Markers) -> tuple[str, str]:
    written = _FORMATS.get(markers.format or "")
    if written is None or markers.calling is None:
        known = ", ".join(sorted(_FORMATS))
        raise CannotConstrain(
            f"the format of this model's calls ({markers.format or 'unknown'}) is not supported; "
            f"supported are {known}",
            "calls",
        )
    return written(name, markers.calling)


def _parameters(function: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object even if the schema does not say so."""
    given = function.get("parameters")
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(given, Mapping):
        raise CannotConstrain("it is not an object", "schema", place)
    return {**given, "type": "object"}


def _multiples(schema: Any) -> set[Decimal]:
    """The values of all ``multipleOf`` keywords in a schema."""
    found = set[Decimal]()
    waiting = [schema]
    values = frozenset[str]() if _refers_to_values(schema) else _VALUES
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            number = value.get("multipleOf")
            # True is an int in Python. The library refuses values that are not positive numbers.
            if isinstance(number, int | float) and number is not True and 0 < number < math.inf:
                found.add(Decimal(str(number)).normalize())
            waiting.extend(_within(value, values))
        elif isinstance(value, list):
            waiting.extend(value)
    return found


def _within(schema: Mapping[str, Any], values: Collection[str]) -> Iterator[Any]:
    """
    The values in a schema that may be schemas, or lists of schemas.

    Args:
        values: the keywords whose values are not schemas.
    """
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from value.values()
        elif key not in values:
            yield value


def _refers_to_values(schema: Any) -> bool:
    """
    Whether a reference may lead into a plain value, which is then a schema. Every reference that is
    not a plain path counts as one that may.
    """
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            for key, one in value.items():
                if key.lower().endswith("ref") and isinstance(one, str):
                    plain = one.startswith("#") and "%" not in one
                    if not plain or _VALUES & set(one.split("/")):
                        return True
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return False


def _optional(schema: Any) -> tuple[int, int]:
    """
    The number of optional properties at the beginning of an object of this schema, including its
    alternatives, and the largest such number in the schema or below it.
    """
    if isinstance(schema, list):
        found = [_optional(one) for one in schema]
        return sum(here for here, _ in found), max((most for _, most in found), default=0)
    if not isinstance(schema, Mapping):
        return 0, 0
    properties, required = schema.get("properties"), schema.get("required")
    names = set(properties) if isinstance(properties, Mapping) else set()
    if isinstance(required, list):
        names -= {name for name in required if isinstance(name, str)}
    here, below = len(names), 0
    for keyword, value in schema.items():
        if keyword in _VALUES:
            continue
        is_named = keyword in _NAMED and isinstance(value, Mapping)
        beginning, most = _optional(list(value.values()) if is_named else value)
        below = max(below, most)
        if keyword in _ALTERNATIVES and isinstance(value, list):
            here += beginning
    return here, max(here, below)


def _is_countable(numbers: Collection[Decimal]) -> bool:
    """Whether the remainders of these, and of their least common multiple, can be enumerated."""
    places = max((-_exponent(number) for number in numbers), default=0)
    whole = [int(number.scaleb(max(places, 0))) for number in numbers]
    common = str(math.lcm(*whole)).rstrip("0")
    total = sum(int(number.scaleb(max(-_exponent(number), 0))) for number in numbers)
    return int(common or 1) <= _MULTIPLES_MAX and total <= _MULTIPLES_MAX


def _exponent(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)  # JSON has no infinite numbers
    return exponent


def _text(text: str) -> str:
    """A text as a string literal of a grammar."""
    return json.dumps(text)


def _pattern(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
