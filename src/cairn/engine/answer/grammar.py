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

from cairn.engine.answer.markers import THINKING, Markers
from cairn.engine.answer.parts import AnswerForm

GRAMMAR_BYTES_MAX = 128 * 1024
"""The longest grammar, most of it schemas. It is on record with each request that has one."""

_MULTIPLES_MAX = 10_000
"""
How large the numbers may be of which others shall be multiples. The library goes through all
remainders of each, and where two are about one value, through those of their common multiple. Its
own limits let numbers of five digits take seconds each, and two of four digits are not seen to end.
"""

_OPTIONAL_MAX = 480
"""
How many properties of an object may be left out. The library has four items of its parser for each,
all at once when the object begins, and takes 2,000: more would end the answer there.
"""

#: Keywords whose values are values, and those whose values are schemas by names of their own.
_VALUES = frozenset({"const", "default", "enum", "examples"})
_ALTERNATIVES = frozenset({"allOf", "anyOf", "oneOf"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})

ANY_OBJECT: Mapping[str, Any] = MappingProxyType({"type": "object"})

#: A space, or the end of a line and what indents the next: models that lose their way write white
#: space without end.
_FREELY = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,40}"}
#: As Python's ``json.dumps`` does, and with it the templates.
_AS_TEMPLATES = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}

#: Rules are found by what stands in the text, not forced: a forced text is tokenised by the
#: library, which has no tokenizer here.
_HEAD = '%llguidance {"no_forcing": true}'


@attrs.frozen(kw_only=True)
class Constraint:
    """
    What an answer must be after its thoughts: JSON, tool calls, or one of the two.

    Attributes:
        schema: of the JSON; None if it must be calls.
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
        raise CannotConstrain("the grammar of this model's answers is not known here", "answer")
    rules: list[str] = []
    schemas: list[tuple[int | None, str]] = []
    bodies: list[str] = []

    multiples: set[Decimal] = set()

    def schema_rule(name: str, place: int | None, schema: Mapping[str, Any], **ways: Any) -> None:
        multiples.update(_multiples(schema))
        if not _is_countable(multiples):
            raise CannotConstrain(
                "the numbers that stand at multipleOf are too large together; their sum and their "
                f"least common multiple may be {_MULTIPLES_MAX} at most, without decimal points",
                "schema",
                place,
            )
        if (optional := _optional(schema)[1]) > _OPTIONAL_MAX:
            raise CannotConstrain(
                f"an object in it has {optional} properties that may be left out, with those of "
                f"its alternatives; {_OPTIONAL_MAX} may be left out at most, so name others in "
                "`required`",
                "schema",
                place,
            )
        written = json.dumps({**schema, "x-guidance": ways})
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
        raise CannotConstrain("none of the tools that may be called is on offer", "calls")
    lead, thoughts = _thoughts(form)
    start = f"start: {lead}({' | '.join(bodies)})"
    text = "\n".join([_HEAD, start, *thoughts, *rules]) + "\n"
    if len(text) > GRAMMAR_BYTES_MAX:
        raise CannotConstrain(
            f"its grammar has {len(text)} bytes, most of them of schemas; at most "
            f"{GRAMMAR_BYTES_MAX} are taken",
            "answer",
        )
    return Grammar(text=text, schemas=tuple(schemas))


def _thoughts(form: AnswerForm) -> tuple[str, Sequence[str]]:
    """What may stand before the body, and the rules for it."""
    markers = form.markers
    if markers.thinking is None or not (form.begins == THINKING or form.may_think):
        return "", ()
    opens, closes = markers.thinking
    thought = f"/(?s:.*){_pattern(closes)}/"
    if form.tools and markers.calling is not None:
        # What looks like a call is read as one, also in a thought.
        thought += f" & ~/(?s:.*){_pattern(markers.calling[0])}(?s:.*)/"
    # A lexeme that ends as soon as it can: at the first marker, and not at the last.
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
By the name of mlx-lm's parser: from a tool's name and the markers of calls to what stands before
and behind the arguments, which are JSON.
"""


def _around(name: str, markers: Markers) -> tuple[str, str]:
    written = _FORMATS.get(markers.format or "")
    if written is None or markers.calling is None:
        known = ", ".join(sorted(_FORMATS))
        raise CannotConstrain(
            f"the grammar of this model's calls ({markers.format or 'no format'}) is not known "
            f"here; that of {known} is",
            "calls",
        )
    return written(name, markers.calling)


def _parameters(function: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    """The schema of a tool's arguments. They are an object, whether the schema says so or not."""
    given = function.get("parameters")
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(given, Mapping):
        raise CannotConstrain("it is no object", "schema", place)
    return {**given, "type": "object"}


def _multiples(schema: Any) -> set[Decimal]:
    """The numbers that stand at ``multipleOf``, wherever that is a keyword."""
    found = set[Decimal]()
    waiting = [schema]
    values = frozenset[str]() if _refers_to_values(schema) else _VALUES
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            number = value.get("multipleOf")
            # True is an integer to Python. What is none, the library refuses.
            if isinstance(number, int | float) and number is not True and 0 < number < math.inf:
                found.add(Decimal(str(number)).normalize())
            waiting.extend(_within(value, values))
        elif isinstance(value, list):
            waiting.extend(value)
    return found


def _within(schema: Mapping[str, Any], values: Collection[str]) -> Iterator[Any]:
    """
    What stands in a schema and may be one, or a list of some.

    Args:
        values: keywords that have none.
    """
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from value.values()
        elif key not in values:
            yield value


def _refers_to_values(schema: Any) -> bool:
    """
    Whether a reference may lead into a value, which is a schema then. Taken for one that does is
    each that is no plain path.
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
    How many properties may be left out where an object of this schema begins, with those of its
    alternatives, and the most of that in it or below.
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
    """Whether somebody can go through the remainders of these, and of what they have in common."""
    places = max((-_exponent(number) for number in numbers), default=0)
    whole = [int(number.scaleb(max(places, 0))) for number in numbers]
    common = str(math.lcm(*whole)).rstrip("0")
    total = sum(int(number.scaleb(max(-_exponent(number), 0))) for number in numbers)
    return int(common or 1) <= _MULTIPLES_MAX and total <= _MULTIPLES_MAX


def _exponent(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)  # JSON has no other
    return exponent


def _text(text: str) -> str:
    """A text as a grammar has it."""
    return json.dumps(text)


def _pattern(text: str) -> str:
    """A regular expression of one text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
