"""
Finds where a text may be cut so that the token ids of its pieces, joined, are those of the whole.

A tokenizer of the library ``tokenizers`` processes a text in this order:

1. It searches from left to right for the added tokens that are matched before normalisation
   (``normalized: false``), and takes the longest at each position. The text between two of them is
   a stretch.
2. It normalises each stretch, splits it into words and encodes it. A step sees only its own
   stretch, and whether that is the first one.
3. The post-processor adds its tokens around the result, if the caller requests it.

A text can therefore be cut before such a token, so that a piece begins with it. The pieces give the
same ids as the whole for these reasons:

- *The same tokens are found.* A search from left to right does not depend on the text before its
  position, so it finds the same tokens from the cut on. No match before the cut extends past it,
  because the token at the cut would not have been found then. A candidate that extends past the
  cut and did not match the whole text does not match the piece either. Two kinds of tokens look
  past their own end. One that strips the white space after it stops at the cut, because no token
  at which we cut begins with white space. One that must be a single word rules out all cuts.
- *A token that strips on its left* removes white space from the stretch before it. Before such a
  token we cut only if there is no white space.
- *The same stretches follow.* Some steps add a space to a stretch if it begins the text (Metaspace,
  ``prepend_scheme: first``). That is why a piece begins with the token instead of ending with it:
  a stretch after a token begins neither the text nor a piece. What a step adds to every stretch
  (Prepend, ByteLevel's prefix) does not depend on cuts.

This follows from the library's source, versions 0.22 to 0.23. It holds for the components listed
here; with any other component, or with randomness (dropout), nothing is cut. ``encoder`` also tests
it on every tokenizer before relying on it.
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
The longest series of tokens of which each is a prefix of the next. The search is nested that deep.
The longest ones in vocabularies are runs of white space, about thirty.
"""

_ENCODING_METHODS: Final = frozenset(
    {
        *("encode", "__call__", "_call_one", "_encode_plus", "_batch_encode_plus"),
        *("_convert_encoding", "_get_padding_truncation_strategies"),
        *("set_truncation_and_padding", "backend_tokenizer", "__getattribute__"),
    }
)
"""
The methods that turn a text into ids in transformers. A model's own class that overrides one of
them may change the text before the library sees it, as mlx-lm's NewlineTokenizer does.
"""


class NotShown(Exception):
    """
    It cannot be shown that a tokenizer treats the text before and after a token independently. This
    is not an error: its texts are encoded as a whole.
    """


@attrs.frozen
class AddedToken:
    """The properties of an added token that cuts depend on."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@attrs.frozen
class _Model:
    type: str | None = None
    dropout: float | None = None
    byte_fallback: bool | None = None


@attrs.frozen
class Serialized:
    """A ``tokenizer.json`` without its large parts."""

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
            tokens: all that are matched before normalisation, including those at which no cut is
                made, because they may overlap one.

        Raises:
            NotShown: a cut before any of them could change the ids.
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
        """The tokens before which texts are cut."""
        return tuple(self._cutting)

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text, none empty. Their ids, joined, are those of the text."""
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
    Where a tokenizer's texts may be cut, and the library's object that encodes the pieces. Modifies
    nothing.

    Args:
        tokenizer: mlx-lm's wrapper. It must not be changed afterwards.

    Raises:
        NotShown: its texts cannot be cut; the message has the reason.
    """
    backend = backend_of(tokenizer)
    written = serialized(backend)
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


def serialized(backend: Any) -> Serialized:
    """
    The library's tokenizer as JSON, without its large parts.

    Raises:
        NotShown: it cannot be written so.
    """
    try:
        text = backend.to_str()
    except Exception as error:  # the library raises nothing narrower for a component in Python
        raise NotShown(f"the tokenizer cannot be written as JSON: {error}") from error
    try:
        return msgspec.json.decode(text, type=Serialized)
    except msgspec.MsgspecError as error:
        raise NotShown(f"the tokenizer's JSON has an unknown form: {error}") from error


def longest_of(words: Sequence[str]) -> str:
    """
    A regular expression that matches the longest of the words at a position.

    It is a tree by first characters, because a vocabulary may have thousands of added tokens: a
    text that shares its beginning with many of them is matched as fast as with one.

    Args:
        words: at least one, none empty.

    Raises:
        NotShown: the tree would be too deep.
    """
    return _tree(sorted(set(words)), 0, 0)


def _tree(words: Sequence[str], at: int, depth: int) -> str:
    """
    Args:
        words: sorted, with the same first ``at`` characters. They are passed whole, because passing
            their ends would copy each word once for each level of the tree.
        at: the index from which they are matched.
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
    # Greedy: the word that ends here matches only if no longer one does.
    return f"(?:{joined})?" if len(words[0]) == at else joined


def _stem(first: str, last: str) -> str:
    """The common prefix of two words. If they are sorted, all words between them share it."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(character for character, _ in alike)


def library_object(tokenizer: Any) -> Any:
    """The library's tokenizer inside transformers' and mlx-lm's; None if there is none."""
    return getattr(_owner(tokenizer), "backend_tokenizer", None)


def _owner(tokenizer: Any) -> Any:
    """transformers' tokenizer inside mlx-lm's."""
    return getattr(getattr(tokenizer, "encode", None), "__self__", None)


def backend_of(tokenizer: Any) -> Any:
    """
    The library's tokenizer inside transformers' and mlx-lm's.

    Raises:
        NotShown: there is none, or these two may change a text.
    """
    backend = library_object(tokenizer)
    if backend is None:
        raise NotShown("it is not a tokenizer of the library `tokenizers`")
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
    The steps of a component, with sequences flattened.

    Raises:
        NotShown: one of them is unknown.
    """
    steps = steps_of(component, inner)
    for step in steps:
        if step.get("type") not in known:
            raise NotShown(f"unknown step {step.get('type')}")
    return steps


def steps_of(component: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a component, with sequences flattened."""
    if component is None:
        return []
    if component.get("type") == "Sequence":
        return [step for part in component[inner] for step in steps_of(part, inner)]
    return [component]


def _takes_once(processor: Mapping[str, Any]) -> None:
    """Raise NotShown for a template that does not contain the text's ids exactly once."""
    if processor["type"] != "TemplateProcessing":
        return
    sequences = [part["Sequence"]["id"] for part in processor["single"] if "Sequence" in part]
    if sequences != ["A"]:
        raise NotShown("the post-processor does not take a text's tokens once")
