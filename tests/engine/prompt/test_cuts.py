"""Where texts are cut, and which tokenizers' texts are not cut."""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cairn.engine.prompt.cuts import AddedToken, Cuts, NotShown, cuts_of, longest_of
from tests.journal.model import profile
from tests.support.models.tokenizers import (
    END,
    KINDS,
    MARK,
    START,
    added,
    bpe,
    like_mistral,
    like_qwen,
    overlapping,
    stripping,
    wrapped,
)

PLAIN = AddedToken("<t>", single_word=False, lstrip=False, rstrip=False, normalized=False)

WORDS = st.lists(st.text("ab<>|\n", min_size=1, max_size=5), min_size=1, max_size=12)


def cuts(tokenizer: Tokenizer) -> Cuts:
    """The cuts of a tokenizer."""
    return cuts_of(wrapped(tokenizer))[0]


@attrs.frozen
class Written:
    """A tokenizer of the library, serialised as a different version might do it."""

    real: Tokenizer
    change: Callable[[dict[str, Any]], None]

    @property
    def model(self) -> Any:
        """The library's model."""
        return self.real.model

    def to_str(self) -> str:
        """The JSON with the change in it."""
        written = json.loads(self.real.to_str())
        self.change(written)
        return json.dumps(written)


def rewritten(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], None]) -> Any:
    """A tokenizer whose serialised form has a change."""
    wrapper = wrapped(tokenizer)
    wrapper.encode.__self__._tokenizer = Written(wrapper.backend_tokenizer, change)
    return wrapper


def refused(tokenizer: Any) -> str:
    """Why nothing is cut."""
    with pytest.raises(NotShown) as reason:
        cuts_of(tokenizer)
    return str(reason.value)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_conversation_is_cut_in_front_of_its_tokens(kind: str) -> None:
    """With every kind of tokenizer, a conversation is cut into its messages."""
    text = f"{START}user\nOn.{END}{START}system\nSo?{END}"
    assert [f"{START}user\nOn.", END, f"{START}system\nSo?", END] == (
        cuts(KINDS[kind]()).pieces(text)
    )


def test_pieces_are_never_empty_and_make_up_the_text() -> None:
    """
    Tokens at the beginning, at the end and next to each other; texts without tokens, and the empty
    text.
    """
    found = cuts(like_qwen())
    assert [] == found.pieces("")
    assert ["no token"] == found.pieces("no token")
    assert [START] == found.pieces(START)
    assert ["a", START, START, f"{END}b", MARK] == found.pieces(f"a{START}{START}{END}b{MARK}")


def test_what_only_looks_like_a_token_cuts_nothing() -> None:
    """Parts of tokens, and tokens in a different case or with text inside, are text."""
    text = f"{START[:-1]} {START.upper()} <|im_ start|> {END[1:]}"
    assert [text] == cuts(like_qwen()).pieces(text)


def test_the_token_that_the_tokenizer_finds_is_the_one() -> None:
    """The longest at the first place; what begins within it is not a token."""
    found = cuts(overlapping())
    assert ["x", "<a><b>"] == found.pieces("x<a><b>")
    assert ["<a><b>", "a", f"{END}>", "<a>"] == found.pieces(f"<a><b>a{END}><a>")
    assert ["<", "b><|im_st", "art|>"] == found.pieces("<b><|im_start|>")
    assert ["\n<|im_st", "art|>"] == found.pieces("\n<|im_start|>")


def test_no_cut_where_white_space_is_taken_away() -> None:
    """
    Before a token that strips on its left, a text is cut only if no white space precedes it. Before
    a token of white space it is never cut.
    """
    found = cuts(stripping())
    assert [f"a {START} b", f"{END} \n\n", "</s>"] == found.pieces(f"a {START} b{END} \n\n</s>")
    assert ["a", f"{MARK}\n{MARK}", START] == found.pieces(f"a{MARK}\n{MARK}{START}")
    assert [f"{END}\u3000{MARK}"] == found.pieces(f"{END}\u3000{MARK}")


def test_what_the_library_strips_is_white_space_here_too() -> None:
    """Python's white space includes all characters of the Unicode property in the library."""
    assert "\x85" in "".join(filter(str.isspace, map(chr, range(sys.maxunicode + 1))))
    tokenizer = bpe(tokens=added(START, lstrip=True, rstrip=True))
    stripped = [
        character
        for character in map(chr, [*range(0xD800), *range(0xE000, 0x11000)])
        if len(tokenizer.encode(f"{character}{START}{character}").ids) == 1
    ]
    assert len(stripped) > 20
    assert [] == [character for character in stripped if not character.isspace()]


@profile(300)
@given(words=WORDS, text=st.text("ab<>|\n", max_size=30))
def test_the_search_is_leftmost_and_longest(words: list[str], text: str) -> None:
    """The tree finds the same as trying all words at every position."""
    right: list[tuple[int, str]] = []
    place = 0
    while place < len(text):
        here = max((word for word in words if text.startswith(word, place)), key=len, default=None)
        if here is not None:
            right.append((place, here))
        place += len(here or "x")

    assert right == [(m.start(), m.group()) for m in re.finditer(longest_of(words), text)]


@profile(300)
@given(words=WORDS, text=st.text("ab<>|\n", max_size=30))
def test_the_search_is_that_of_the_library(words: list[str], text: str) -> None:
    """The library finds the same words in the same places."""
    made = Tokenizer(models.BPE())
    made.add_tokens(added(*dict.fromkeys(words)))
    # With an empty vocabulary nothing but added tokens comes out.
    right = [(a, text[a:b]) for a, b in made.encode(text).offsets]

    assert right == [(m.start(), m.group()) for m in re.finditer(longest_of(words), text)]


def test_thousands_of_tokens_are_one_search() -> None:
    """A vocabulary with rows of numbered tokens and runs of white space can be searched for."""
    tokens = [f"<unused{n}>" for n in range(6000)]
    tokens += ["\n" * n for n in range(1, 60)]
    found = Cuts([attrs.evolve(PLAIN, content=token) for token in tokens])
    text = "<unused" * 1000 + "<unused59>" + "\n" * 100 + "<unused5999>"
    assert ["<unused" * 1000, "<unused59>" + "\n" * 100, "<unused5999>"] == found.pieces(text)


@pytest.mark.parametrize("end", ["", "b"])
def test_tokens_that_are_nested_too_deep_are_refused(end: str) -> None:
    """
    A search that Python cannot compile is refused, whether each token is a prefix of the next or
    both only share a prefix. The refusal takes little more memory than the tokens.
    """
    tokens = [attrs.evolve(PLAIN, content="a" * n + end) for n in range(1, 2000)]
    tracemalloc.start()
    try:
        with pytest.raises(NotShown, match="nested too deep"):
            Cuts(tokens)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * sum(len(token.content) for token in tokens)


def test_runs_of_white_space_are_not_too_deep() -> None:
    """A hundred lengths of one character can still be searched, and the longest is found."""
    found = re.compile(longest_of([" " * n for n in range(1, 101)]))
    assert [100, 100, 50] == [len(match.group()) for match in found.finditer(" " * 250)]


def test_a_token_that_must_be_a_word_is_refused() -> None:
    """It depends on the adjacent characters, on the other side of a cut."""
    assert "single word" in refused(wrapped(bpe(tokens=added(START, single_word=True))))


def test_tokens_matched_after_the_normaliser_are_no_cuts() -> None:
    """They are matched in text that was already normalised."""
    tokenizer = bpe(tokens=added(START, END, normalized=True))
    assert "matched before normalisation" in refused(wrapped(tokenizer))

    tokenizer.add_tokens(added(MARK))
    text = f"{START}a{MARK}b{END}"
    assert [f"{START}a", f"{MARK}b{END}"] == cuts(tokenizer).pieces(text)


def test_white_space_alone_is_no_place() -> None:
    """If all tokens begin with white space, nothing is cut."""
    assert "matched before" in refused(wrapped(bpe(tokens=added("\n\n", " x"))))


def test_chance_is_refused() -> None:
    """If merges are dropped or pieces drawn at random, ids differ from call to call."""
    tokenizer = like_qwen()
    tokenizer.model.dropout = 0.5
    assert "at random" in refused(wrapped(tokenizer))
    tokenizer.model.dropout = 0.0
    assert cuts(tokenizer).tokens

    drawing = wrapped(KINDS["like t5"]())
    drawing.backend_tokenizer.model.alpha = 0.5
    assert "at random" in refused(drawing)


def test_components_in_python_are_refused() -> None:
    """Their behaviour is unknown, and the library cannot serialise them."""

    class Own:
        """A pre-tokenizer that does nothing."""

        def pre_tokenize(self, text: Any) -> None:
            """Do nothing."""

    tokenizer = like_qwen()
    wrapper = wrapped(tokenizer)
    wrapper.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())
    assert "cannot be written" in refused(wrapper)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "model"])
def test_unknown_components_are_refused(part: str) -> None:
    """A step of a later version of the library may not stay within its stretch."""

    def change(written: dict[str, Any]) -> None:
        written[part] = {"type": "Foreseeing"}

    assert "Foreseeing" in refused(rewritten(like_qwen(), change))


def test_an_empty_token_is_refused() -> None:
    """It would match everywhere."""

    def change(written: dict[str, Any]) -> None:
        written["added_tokens"][0]["content"] = ""

    assert "an added token is empty" in refused(rewritten(like_qwen(), change))


def test_another_form_of_the_json_is_refused() -> None:
    """Missing flags are not assumed to be false."""

    def change(written: dict[str, Any]) -> None:
        del written["added_tokens"][0]["lstrip"]

    assert "an unknown form" in refused(rewritten(like_qwen(), change))


def test_a_component_within_sequences_is_looked_at() -> None:
    """Nested sequences are flattened."""
    tokenizer = like_mistral()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFC()])
    assert cuts(tokenizer).tokens

    def change(written: dict[str, Any]) -> None:
        inner = {"type": "Sequence", "normalizers": [{"type": "Sideways"}]}
        written["normalizer"]["normalizers"].append(inner)

    assert "Sideways" in refused(rewritten(tokenizer, change))


@pytest.mark.parametrize("template", ["<s>", "$A <s> $A"])
def test_a_template_that_changes_the_text_is_refused(template: str) -> None:
    """A template that omits the text's tokens, or has them twice."""
    tokenizer = like_mistral()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1)]
    )
    assert "once" in refused(wrapped(tokenizer))


def test_a_class_that_changes_texts_is_refused() -> None:
    """mlx-lm's own class, and any class with its own way from text to ids."""
    backend = like_qwen()
    own = NewlineTokenizer(tokenizer_object=backend)
    assert "NewlineTokenizer has its own encode" in refused(TokenizerWrapper(own))

    class Shouting(TokenizerWrapper):  # type: ignore[misc]
        """A wrapper that changes texts."""

        def encode(self, text: str, **kwargs: Any) -> Any:
            """Louder."""
            return self._tokenizer.encode(text.upper(), **kwargs)

    shouting = Shouting(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert "Shouting has its own encode" in refused(shouting)


def test_special_tokens_that_are_text_are_refused() -> None:
    """If transformers splits special tokens, nothing is cut."""
    split = PreTrainedTokenizerFast(tokenizer_object=like_qwen(), split_special_tokens=True)
    assert "split like any text" in refused(TokenizerWrapper(split))


def test_something_else_is_refused() -> None:
    """A tokenizer that is not the library's, such as one in Python, is used as a whole."""
    assert "not a tokenizer of the library" in refused(object())
