"""Which known name is meant by one that is spelt otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

#: How alike a field's name has to be to one that is known, where they differ in more than one
#: letter. `min_tokens`, which others have, is less like `max_tokens`.
_ALIKE = 0.9
#: Of a shorter name, one letter is too much to be a slip.
_LETTERS_MIN = 4
#: Of a name that is no longer, another letter is too much: `step` is not `stop`.
_LETTERS_FEW = 4
#: Fields of others' that are a letter from a known one (`seed`, `model`) and mean something else.
_OF_OTHERS = frozenset({"speed", "mode", "models"})
#: A body may have any number of fields, of any length; so many are looked at, up to so long a name.
_CANDIDATES_MAX = 64
_CANDIDATE_LETTERS_MAX = 100


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that one is a slip of; None where it is like none."""
    spelt = {_bare(one): one for one in known}
    bare = _bare(name)
    if bare in _OF_OTHERS and bare not in spelt:
        return None
    near = get_close_matches(bare, spelt, n=1, cutoff=_ALIKE)
    if not near:
        slips = [one for one, full in spelt.items() if _has_slips(full) and _is_slip(bare, one)]
        near = get_close_matches(bare, slips, n=1, cutoff=0)
    return spelt[near[0]] if near else None


def slip_for(missing_name: str, fields: Mapping[str, Any], known: Iterable[str]) -> str | None:
    """
    The field that may be sent for one that is missing; None where none is like it. Of very many
    fields the first ones are looked at.

    Args:
        known: names that mean what they say, whatever they are like.
    """
    known = frozenset(known)
    others = (
        name
        for name, value in fields.items()
        if value is not None and name not in known and len(name) <= _CANDIDATE_LETTERS_MAX
    )
    candidates = islice(others, _CANDIDATES_MAX)
    return next((name for name in candidates if meant(name, (missing_name,)) is not None), None)


def _bare(name: str) -> str:
    """A field's name without what other spellings have otherwise: `maxTokens` is `max_tokens`."""
    return name.replace("_", "").replace("-", "").casefold()


def _has_slips(name: str) -> bool:
    # A letter is all that tells `top_p` from `top_k`, and from `top_a` of others'.
    return len(_bare(name)) >= _LETTERS_MIN and all(len(part) > 1 for part in name.split("_"))


def _is_slip(one: str, other: str) -> bool:
    """
    Whether a letter more or less, two neighbours swapped or, in a name that is not short, a letter
    changed make one name of another.
    """
    short, long = sorted((one, other), key=len)
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = short[at : at + 2] == long[at : at + 2][::-1] and short[at + 2 :] == long[at + 2 :]
    return swapped or (len(long) > _LETTERS_FEW and short[at + 1 :] == long[at + 1 :])
