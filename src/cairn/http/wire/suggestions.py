"""Suggests the known name that a misspelt one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

#: How similar an unknown field must be to a known one if they differ in more than one letter.
#: `min_tokens`, a field of other servers, is less similar to `max_tokens`.
_ALIKE = 0.9
#: In a shorter name, a difference of one letter is not taken for a slip.
_LETTERS_MIN = 4
#: In a name that is no longer than this, a changed letter is not taken for a slip: `step` is not
#: `stop`.
_LETTERS_FEW = 4
#: Fields of other servers that differ by one letter from a known one (`seed`, `model`) but mean
#: something else.
_OF_OTHERS = frozenset({"speed", "mode", "models"})
#: A body may have any number of fields of any length; only this many are compared, and only names
#: of up to this length.
_CANDIDATES_MAX = 64
_CANDIDATE_LETTERS_MAX = 100


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name of which ``name`` is a misspelling; None if there is none."""
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
    The field that was probably sent instead of a missing one; None if no field is similar. Only the
    first fields of a very large body are compared.

    Args:
        known: names that are never taken for a misspelling.
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
    """
    A field's name in a form that ignores case and separators: `maxTokens` becomes `maxtokens`.
    """
    return name.replace("_", "").replace("-", "").casefold()


def _has_slips(name: str) -> bool:
    # One letter is the only difference between `top_p`, `top_k` and other servers' `top_a`.
    return len(_bare(name)) >= _LETTERS_MIN and all(len(part) > 1 for part in name.split("_"))


def _is_slip(one: str, other: str) -> bool:
    """
    Whether the names differ by one added or removed letter, by two neighbours swapped or, unless
    the name is short, by one changed letter.
    """
    short, long = sorted((one, other), key=len)
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    swapped = short[at : at + 2] == long[at : at + 2][::-1] and short[at + 2 :] == long[at + 2 :]
    return swapped or (len(long) > _LETTERS_FEW and short[at + 1 :] == long[at + 1 :])
