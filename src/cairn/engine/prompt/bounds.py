"""
Bounds the tokens of a text from below by its bytes, so that what cannot fit is refused without
tokenising it.

A text of n bytes has at least n / m tokens if no token stands for more than m bytes of it. That is
exact only for a tokenizer that accounts for every byte, so the bound is made from what is known of
its steps, and there is none where one of them may drop text or put any length into one token:

- *Normalisers* may shorten a text, each by a factor that is known, or for which there is no bound.
- *Pre-tokenizers* and added tokens that strip may drop white space. It does not count then.
- *Models* have a token for each byte (byte-level, byte fallback); with any other, a token for
  unknown text stands for as much of it as there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from cairn.engine.prompt.cuts import (
    NotShown,
    Serialized,
    backend_of,
    serialized,
    steps_of,
)

SHRINK: Final[Mapping[str, int]] = {
    "ByteLevel": 1,
    "Prepend": 1,
    # A composed character may stand for one to three others, and a letter of one byte for a
    # mathematical one of four.
    "NFC": 4,
    "NFD": 4,
    "NFKC": 4,
    "NFKD": 4,
    "Lowercase": 4,
}
"""The most bytes of a text that become one byte, by normaliser. Replace has no fixed one."""

_KEEP: Final = frozenset({"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"})
_KEEP_IF: Final = frozenset({"Punctuation", "Split"})
_DROP_WHITE: Final = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})


@attrs.frozen
class TextBound:
    """
    How few tokens a text can have.

    Attributes:
        token_bytes: the most bytes of a text that one of its tokens stands for.
        white: whether white space counts; else it may be dropped.
    """

    token_bytes: int
    white: bool

    def least_tokens(self, text: str) -> int:
        """A number that the tokens of a text are never below."""
        if len(text) < self.token_bytes:
            return 0
        counted = text if self.white else "".join(text.split())
        return len(counted.encode(errors="replace")) // self.token_bytes


def bound_of(tokenizer: Any) -> TextBound | None:
    """
    The bound of a tokenizer; None if it may put any length of text into one token, or if its steps
    are not known. Modifies nothing.

    Args:
        tokenizer: mlx-lm's wrapper.
    """
    try:
        backend = backend_of(tokenizer)
        written = serialized(backend)
        normalizers = steps_of(written.normalizer, "normalizers")
        pre_tokenizers = steps_of(written.pre_tokenizer, "pretokenizers")
        shrink = _shrink(normalizers)
        drops = _drops_white(pre_tokenizers)
    except NotShown:
        return None
    vocabulary: Mapping[str, int] = backend.get_vocab(with_added_tokens=False)
    on_bytes = any(step.get("type") == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    if not _has_every_byte(written, vocabulary, on_bytes=on_bytes):
        return None
    strips = any(token.lstrip or token.rstrip for token in written.added_tokens)
    # A byte-level vocabulary writes one character for each byte, but added tokens as they are.
    longest = max(len(token if on_bytes else token.encode()) for token in vocabulary)
    added = (len(token.content.encode()) for token in written.added_tokens)
    return TextBound(max(longest, *added, 1) * shrink, white=not (drops or strips))


def _shrink(steps: list[Mapping[str, Any]]) -> int:
    """
    The most bytes of a text that become one byte.

    Raises:
        NotShown: a step may drop text.
    """
    factor = 1
    for step in steps:
        if step.get("type") == "Replace":
            found = step.get("pattern", {}).get("String")
            if not found or len(found.encode()) > len(step.get("content", "").encode()):
                raise NotShown("a normaliser may shorten a text to any length")
            continue
        if step.get("type") not in SHRINK:
            raise NotShown(f"a normaliser may drop text: {step.get('type')}")
        factor *= SHRINK[step["type"]]
    return factor


def _drops_white(steps: list[Mapping[str, Any]]) -> bool:
    """
    Whether white space may be dropped.

    Raises:
        NotShown: other text may be.
    """
    drops = False
    for step in steps:
        kind = step.get("type")
        kept = kind in _KEEP or (kind in _KEEP_IF and step.get("behavior") != "Removed")
        if not kept and kind not in _DROP_WHITE:
            raise NotShown(f"a pre-tokenizer may drop text: {kind}")
        drops = drops or kind in _DROP_WHITE
    return drops


def _has_every_byte(written: Serialized, vocabulary: Mapping[str, int], *, on_bytes: bool) -> bool:
    """Whether the model has a token for each byte, so that no text is unknown."""
    if written.model.type not in ("BPE", "Unigram"):
        return False  # a word that is unknown is one token
    if on_bytes:
        return all(character in vocabulary for character in _alphabet())
    return written.model.byte_fallback is True and all(
        f"<0x{byte:02X}>" in vocabulary for byte in range(256)
    )


def _alphabet() -> list[str]:
    """The characters by which byte-level tokenizers write the 256 bytes."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte) for byte in sorted(shown)] + [chr(0x100 + n) for n in range(256 - len(shown))]
