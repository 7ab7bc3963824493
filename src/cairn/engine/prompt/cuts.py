"""
Where a text may be cut so that its pieces give, one after the other, the token ids of the whole.

A tokenizer of the library ``tokenizers`` goes through a text in this order:

1. The added tokens that are matched before normalisation (``normalized: false``) are looked for
   from left to right, at each place the longest. What lies between them are stretches.
2. Each stretch is normalised, cut into words and encoded by itself. No step gets to see more than
   its stretch, and where that begins.
3. The post-processor adds its tokens around the result, where it is asked to.

So a text can be cut in front of such a token, and a piece begins with it. Why the pieces give the
same ids as the whole:

- *The same tokens are found.* A search from left to right knows nothing of what it has passed, so
  from the cut on it finds the same. Nothing that was found in front of the cut goes past it, or
  the token at the cut would not have been found; and what would go past it and was not found is no
  match without its end either. Two things look past the end of a match: a token that strips the
  white space behind it, which stops at the cut, since no token at which we cut begins with white
  space; and one that has to be a single word, and where there is one nothing is cut.
- *A token that strips on its left* takes white space away from the stretch in front of it. There a
  cut is made only where no white space is.
- *The same stretches follow.* Some steps ask whether a stretch is the beginning of the text, to put
  a space there (Metaspace, ``prepend_scheme: first``). That is why a piece begins with the token in
  place of ending with it: a stretch behind a token is the beginning neither of text nor of piece.
  What is put in front of every stretch (Prepend, ByteLevel's prefix) is put there all the same.

This was read out of the library's source, from 0.22 to 0.23. It holds for the components listed
here; where there is another one, or chance has a say (dropout), nothing is cut. `encoding` also
tries it out on every tokenizer before it relies on it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, Final

import attrs
import msgspec

_NORMALIZERS: Final = frozenset(
    {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Strip", "StripAccents"),
    }
)
_PRE_TOKENIZERS: Final = frozenset(
    {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"),
        *("Metaspace", "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    }
)
_PROCESSORS: Final = frozenset(
    {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"}
)
_MODELS: Final = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})

_DEPTH_MAX: Final = 128
"""
How many tokens may begin like others, one within the next: the search is nested as deep. Runs of
white space, the deepest that vocabularies have, are some thirty.
"""

_ENCODING_METHODS: Final = frozenset(
    {
        *("encode", "__call__", "_call_one", "_encode_plus", "_batch_encode_plus"),
        *("_convert_encoding", "_get_padding_truncation_strategies"),
        *("set_truncation_and_padding", "backend_tokenizer", "__getattribute__"),
    }
)
"""
What turns a text into ids in transformers. A model's own class that has one of these may do
anything to the text before the library sees it, as mlx-lm's NewlineTokenizer does.
"""


class NotShown(Exception):
    """
    It cannot be shown that a tokenizer treats the two sides of any token apart. Nobody's fault: its
    texts are encoded as a whole.
    """


@attrs.frozen
class AddedToken:
    """One of a tokenizer's added tokens, as far as cuts depend on it."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@attrs.frozen
class _Model:
    type: str | None = None
    dropout: float | None = None


@attrs.frozen
class _Serialized:
    """A ``tokenizer.json``, without what is large in it."""

    added_tokens: tuple[AddedToken, ...]
    normalizer: Mapping[str, Any] | None
    pre_tokenizer: Mapping[str, Any] | None
    post_processor: Mapping[str, Any] | None
    model: _Model


class Cuts:
    """Finds the places at which one tokenizer's texts may be cut."""

    def __init__(self, tokens: Collection[AddedToken]) -> None:
        """
        Args:
            tokens: all that are matched before normalisation; also those at which no cut is made,
                since they may lie over one.

        Raises:
            NotShown: a cut in front of any of them could be seen.
        """
        if any(token.single_word for token in tokens):
            raise NotShown("an added token has to be a single word, and looks at what is beside it")
        self._cutting = {
            token.content: token.lstrip for token in tokens if not token.content[0].isspace()
        }
        if not self._cutting:
            raise NotShown("no added token is matched before normalisation")
        self._found = re.compile(longest_of([token.content for token in tokens]))

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens in front of which texts are cut."""
        return tuple(self._cutting)

    def pieces(self, text: str) -> list[str]:
        """A text in pieces, none empty. The ids of the pieces, joined, are those of the text."""
        starts = list(self._starts(text))
        return [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True) if a < b]

    def _starts(self, text: str) -> Iterator[int]:
        for match in self._found.finditer(text):
            start = match.start()
            strips = self._cutting.get(match.group())
            if strips is None or (strips and text[start - 1 : start].isspace()):
                continue
            yield start


def cuts_of(tokenizer: Any) -> tuple[Cuts, Any]:
    """
    Where texts may be cut for a tokenizer, and the library's object that encodes the pieces.
    Changes nothing.

    Args:
        tokenizer: mlx-lm's wrapper. It must not be changed afterwards.

    Raises:
        NotShown: with the reason.
    """
    backend = _backend(tokenizer)
    try:
        text = backend.to_str()
    except Exception as error:  # the library raises nothing narrower for a component in Python
        raise NotShown(f"the tokenizer cannot be written as JSON: {error}") from error
    try:
        written = msgspec.json.decode(text, type=_Serialized)
    except msgspec.MsgspecError as error:
        raise NotShown(f"the tokenizer's JSON has another form: {error}") from error

    _only(written.normalizer, "normalizers", _NORMALIZERS)
    _only(written.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS)
    for step in _only(written.post_processor, "processors", _PROCESSORS):
        _takes_once(step)
    if written.model.type not in _MODELS:
        raise NotShown(f"unknown model {written.model.type}")
    if written.model.dropout or getattr(backend.model, "alpha", None):
        raise NotShown("the model draws its merges or pieces at random")
    first = [token for token in written.added_tokens if not token.normalized]
    if not all(token.content for token in first):
        raise NotShown("an added token is empty")
    return Cuts(first), backend


def longest_of(words: Sequence[str]) -> str:
    """
    A regular expression that matches the longest of some words that begins at a place.

    It is a tree by first characters, so that a text which begins like many words costs no more than
    one of them: a vocabulary may have thousands of added tokens.

    Args:
        words: at least one, none empty.

    Raises:
        NotShown: the tree would be too deep.
    """
    return _tree(sorted(set(words)), 0, 0)


def _tree(words: Sequence[str], at: int, depth: int) -> str:
    """
    Args:
        words: sorted, and alike up to a place. Words of their own are not cut out of them, which
            would hold each as often as the tree is deep.
        at: that place.
    """
    if depth > _DEPTH_MAX:
        raise NotShown("the added tokens are nested too deep")
    branches: list[str] = []
    longer = (word for word in words if len(word) > at)
    for _, group in groupby(longer, key=lambda word: word[at]):
        alike = list(group)
        stem = _stem(alike[0][at:], alike[-1][at:])
        branches.append(re.escape(stem) + _tree(alike, at + len(stem), depth + 1))
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    # Greedy: the word that ends here is the answer only where no longer one matches.
    return f"(?:{joined})?" if len(words[0]) == at else joined


def _stem(first: str, last: str) -> str:
    """
    How far two words agree; if they are the first and the last in order, all between them do too.
    """
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(character for character, _ in alike)


def library_object(tokenizer: Any) -> Any:
    """The library's tokenizer behind transformers' and mlx-lm's; None where there is none."""
    return getattr(_owner(tokenizer), "backend_tokenizer", None)


def _owner(tokenizer: Any) -> Any:
    """transformers' tokenizer behind mlx-lm's."""
    return getattr(getattr(tokenizer, "encode", None), "__self__", None)


def _backend(tokenizer: Any) -> Any:
    """
    The library's tokenizer behind transformers' and mlx-lm's, where these two do nothing to a text.
    """
    backend = library_object(tokenizer)
    if backend is None:
        raise NotShown("it is no tokenizer of the library `tokenizers`")
    owner = _owner(tokenizer)
    for base in type(owner).__mro__:
        if base.__module__.startswith("transformers.tokenization_utils") or base is object:
            continue
        own = _ENCODING_METHODS.intersection(vars(base))
        if own:
            raise NotShown(f"{base.__name__} has its own {', '.join(sorted(own))}")
    if getattr(owner, "split_special_tokens", False):
        raise NotShown("special tokens are split like any text")
    return backend


def _only(
    component: Mapping[str, Any] | None, inner: str, known: frozenset[str]
) -> list[Mapping[str, Any]]:
    """
    The steps of a component, sequences taken apart.

    Raises:
        NotShown: one of them is not among the known ones.
    """
    if component is None:
        return []
    if component.get("type") == "Sequence":
        return [step for part in component[inner] for step in _only(part, inner, known)]
    if component.get("type") not in known:
        raise NotShown(f"unknown step {component.get('type')}")
    return [component]


def _takes_once(processor: Mapping[str, Any]) -> None:
    """Refuse a template that leaves out the text's ids, or has them twice."""
    if processor["type"] != "TemplateProcessing":
        return
    sequences = [part["Sequence"]["id"] for part in processor["single"] if "Sequence" in part]
    if sequences != ["A"]:
        raise NotShown("the post-processor does not take a text's tokens once")
