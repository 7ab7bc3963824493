"""
Closes the objects of a schema where it does not say whether they may have further properties.

A small model writes properties that no schema names until its answer is cut off. So an object that
names its properties has these alone, as on llama.cpp's server; ``additionalProperties: true`` opens
it. Pure.

A schema that describes an object together with another one (in ``allOf``, in ``if``, as a ``$ref``
beside ``properties``) stays as it is, with all below it: if each were closed, they could exclude
each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import accumulate
from typing import Any

#: Keywords with schemas of the same object, or of values that other keywords have schemas of, too.
_TOGETHER = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "oneOf", "not"),
        *("if", "then", "else", "dependencies", "dependentSchemas"),
        *("contains", "patternProperties", "unevaluatedItems", "unevaluatedProperties"),
    }
)
#: Keywords with schemas of different values, and what they demand of an object.
_OWN = frozenset({"additionalItems", "additionalProperties", "items", "prefixItems", "properties"})
_DEMANDS = frozenset({"dependentRequired", "minProperties", "required"})
#: Keywords with schemas by name. Those of definitions describe nothing until they are referred to.
_DEFINITIONS = frozenset({"$defs", "definitions"})


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with such objects closed. Modifies nothing."""
    result = deepcopy(dict(schema))
    found = list(_schemas(result, "#", alone=True))
    references = [(place, ref, alone) for place, one, alone in found for ref in _references(one)]
    if any(not ref.startswith("#") or {"%", "~"} & set(ref) for _, ref, _ in references):
        return schema  # it is not clear where they lead
    shared: set[str] = set()
    waiting = [ref for _, ref, alone in references if not alone]
    while waiting:
        if (target := waiting.pop()) not in shared:
            shared.add(target)
            waiting += [ref for place, ref, _ in references if target in _above(place)]
    for place, one, alone in found:
        if alone and _is_silent(one) and not shared.intersection(_above(place)):
            one["additionalProperties"] = False
    return result


def _schemas(value: Any, place: str, *, alone: bool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """
    All objects in a schema: the place of each, as references spell it, and whether it is a schema
    that alone describes its value.
    """
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _schemas(one, f"{place}/{index}", alone=alone)
    if not isinstance(value, dict):
        return
    together = _TOGETHER & value.keys()
    sole = _sole(value, together)
    yield place, value, alone and (not together or sole is not None)
    for key, below in value.items():
        at, defines = f"{place}/{key}", key in _DEFINITIONS
        is_alone = alone and (defines or key == sole or (key in _OWN and not together))
        if (defines or key == "properties") and isinstance(below, dict):
            for name, one in below.items():
                yield from _schemas(one, f"{at}/{name}", alone=is_alone)
        else:
            yield from _schemas(below, at, alone=is_alone)


def _sole(schema: dict[str, Any], together: frozenset[str]) -> str | None:
    """The keyword, if any, whose schemas describe each alone all that this schema describes."""
    if len(together) != 1 or (_OWN | _DEMANDS) & schema.keys():
        return None
    (keyword,) = together
    is_one = keyword == "allOf" and isinstance(schema[keyword], list) and len(schema[keyword]) == 1
    return keyword if is_one or keyword in ("anyOf", "oneOf", "$ref") else None


def _is_silent(schema: dict[str, Any]) -> bool:
    """Whether a schema names properties, needs no others, and does not say whether there may be."""
    properties, kinds = schema.get("properties"), schema.get("type", "object")
    if not isinstance(properties, dict) or (kinds != "object" and "object" not in kinds):
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    return (
        not {"additionalProperties", "const", "enum"} & schema.keys()
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int)
        and least <= len(properties)
    )


def _references(schema: dict[str, Any]) -> list[str]:
    """Where a schema refers to by itself."""
    return [
        ref for key, ref in schema.items() if key.lower().endswith("ref") and isinstance(ref, str)
    ]


def _above(place: str) -> set[str]:
    """A place, and all that it is in."""
    return set(accumulate(place.split("/"), lambda above, key: f"{above}/{key}"))
