"""The fewest tokens that a text of so many bytes can have."""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from cairn.engine.mlx.tokenizer import load_tokenizer
from cairn.engine.prompt import bounds
from cairn.engine.prompt.bounds import TextBound, bound_of
from cairn.engine.prompt.template import encode
from tests.support.models.tokenizers import KINDS, LINES, bpe, like_llama, wrapped

EVERY = [chr(point) for point in range(0x32400) if not 0xD800 <= point < 0xE000]
"""All characters that a normalisation changes, and those between them."""

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def with_bytes(made: Tokenizer) -> Tokenizer:
    """A tokenizer of pieces that has a token for each byte."""
    written = json.loads(made.to_str())
    vocabulary = written["model"]["vocab"]
    free = made.get_vocab_size()
    vocabulary.update({byte: free + place for place, byte in enumerate(BYTES)})
    return Tokenizer.from_str(json.dumps(written))


def composing() -> Tokenizer:
    """Byte-level after NFC, with a token that many bytes are composed into."""
    return bpe(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]))


def compatible() -> Tokenizer:
    """Byte-level after NFKC."""
    return bpe(normalizer=normalizers.NFKC())


def split_on_white() -> Tokenizer:
    """Byte-level after a step that drops white space."""
    made = bpe()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "like qwen": KINDS["like qwen"],
    "like gpt2": KINDS["like gpt2"],
    "stripping": KINDS["stripping"],
    "overlapping": KINDS["overlapping"],
    "like llama": lambda: with_bytes(like_llama()),
    "composing": composing,
    "compatible": compatible,
    "split on white": split_on_white,
}

TEXTS = [
    *LINES,
    " " * 4000,
    "\u212a\u0301" * 500,
    "\U0001d400" * 500,
    "\u1100\u1161\u11a8" * 300,
    "<|im_end|>" * 300,
    "   <|im_start|>   \n\n" * 100,
    "Über die Brücke 石の上にも三年 " * 50,
    "\ud800" * 100,
    "",
]


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_bound(kind: str) -> None:
    """Neither the longest tokens in a row, nor text that a normaliser shortens, nor white space."""
    tokenizer = wrapped(BOUNDED[kind]())
    bound = bound_of(tokenizer)
    assert bound is not None
    own = sorted(BOUNDED[kind]().get_vocab(), key=len)[-3:]
    for text in (*TEXTS, *(token * 200 for token in own), *(" ".join([one] * 50) for one in own)):
        if "\ud800" in text:
            assert 0 <= bound.least_tokens(text) <= len(text)  # refused later, as no such text is
            continue
        assert bound.least_tokens(text) <= len(encode(tokenizer, text, special=False))


def test_the_bound_is_reached(model_directory: Path) -> None:
    """
    A text of nothing but the longest token has exactly as many tokens; with a byte less to a token
    the bound would be broken.
    """
    tokenizer = load_tokenizer(str(model_directory))
    bound = bound_of(tokenizer)
    assert bound == TextBound(len("</tool_response>"), white=True)
    text = "</tool_response>" * 100
    tokens = len(encode(tokenizer, text, special=False))
    assert 100 == tokens == bound.least_tokens(text)
    assert tokens < TextBound(bound.token_bytes - 1, white=True).least_tokens(text)


def test_white_space_counts_only_where_it_stays() -> None:
    """A tokenizer that may drop it has a bound by the rest."""
    bound = TextBound(2, white=False)
    assert 2 == bound.least_tokens("a b \u2003 c\n\n\n\n d")
    assert 6 == TextBound(2, white=True).least_tokens("a b    c d   ")
    assert 0 == bound.least_tokens("a")


def no_bytes_for_all() -> Tokenizer:
    """Byte-level, with an alphabet of few bytes."""
    made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    return made


def whole_words() -> Tokenizer:
    """Words, with one token for all that are unknown."""
    return Tokenizer(models.WordLevel(vocab={"a": 0, "<unk>": 1}, unk_token="<unk>"))


def with_normalizer(normalizer: object) -> Callable[[], Tokenizer]:
    return lambda: bpe(normalizer=normalizer)


def with_split(step: object) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        made = bpe()
        made.pre_tokenizer = pre_tokenizers.Sequence([step, made.pre_tokenizer])
        return made

    return make


@pytest.mark.parametrize(
    "make",
    [
        KINDS["like mistral"],
        KINDS["like gemma"],
        KINDS["like t5"],
        KINDS["like bert"],
        no_bytes_for_all,
        whole_words,
        with_normalizer(normalizers.Strip()),
        with_normalizer(normalizers.Replace("ab", "")),
        with_normalizer(normalizers.Replace(Regex("a+"), "aaaa")),
        with_split(pre_tokenizers.CharDelimiterSplit("a")),
        with_split(pre_tokenizers.Split("a", "removed")),
        with_split(pre_tokenizers.Punctuation("removed")),
    ],
)
def test_where_one_token_may_stand_for_any_length_there_is_no_bound(
    make: Callable[[], Tokenizer],
) -> None:
    """Unknown words, dropped text, and steps that shorten."""
    assert bound_of(wrapped(make())) is None


def test_steps_that_keep_or_lengthen_text_have_a_bound() -> None:
    """Kept punctuation, split digits, and a replacement that is no shorter."""
    for make in (
        with_normalizer(normalizers.Replace("a", "bb")),
        with_normalizer(normalizers.Prepend("_")),
        with_split(pre_tokenizers.Punctuation("isolated")),
        with_split(pre_tokenizers.Digits(individual_digits=True)),
    ):
        assert bound_of(wrapped(make())) is not None


def test_a_tokenizer_of_another_library_has_no_bound() -> None:
    """Its steps are not known."""
    assert bound_of(object()) is None


Form = Literal["NFC", "NFD", "NFKC", "NFKD"]


def longest_before(form: Form) -> float:
    """The most bytes, for each byte of what a normaliser gives, over all characters."""
    decompose: Form = "NFD" if form in ("NFC", "NFD") else "NFKD"
    before: dict[str, int] = defaultdict(int)  # the longest single character that becomes it
    worst = 0.0
    for character in EVERY:
        parts = unicodedata.normalize(decompose, character)
        if len(parts) == 1:
            before[parts] = max(before[parts], len(character.encode()))
        worst = max(
            worst,
            len(character.encode()) / len(unicodedata.normalize(form, character).encode()),
        )
    if form in ("NFC", "NFKC"):
        for character in EVERY:
            parts = unicodedata.normalize("NFD", character)
            if len(parts) > 1:
                sizes = sum(max(before[part], len(part.encode())) for part in parts)
                made = len(unicodedata.normalize("NFC", character).encode())
                worst = max(worst, sizes / made)
    return worst


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_no_text_shrinks_by_more_than_the_factor_of_its_normaliser(form: Form) -> None:
    """Over all characters, and all that are composed of several."""
    assert 2 < longest_before(form) <= bounds.SHRINK[form]


def test_no_letter_shrinks_by_more_than_the_factor_of_lower_case() -> None:
    """Over all characters."""
    worst = max(len(one.encode()) / len(one.lower().encode()) for one in EVERY)
    assert 2 < worst <= bounds.SHRINK["Lowercase"]
