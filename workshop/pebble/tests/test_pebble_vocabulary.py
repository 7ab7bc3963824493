"""How tokens are added to a vocabulary: texts without them, and old embeddings, stay the same."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from cairn_pebble.recipe import ADDED_TOKENS, RECIPES
from cairn_pebble.sequences import MARKER_TOKENS, SPECIAL_TOKENS
from cairn_pebble.vocabulary import new_merges, typed_words, with_merges, with_rows
from workshop.pebble.tests.pebble_parts import pebble_tokenizer

MERGES = [("z", "i"), ("z", "el"), ("zel", "lo")]


def test_the_most_frequent_pair_is_merged_first() -> None:
    """Until each word is one token."""
    words = {"hat": 3, "ha": 2, "at": 4}
    pieces = {word: tuple(word) for word in words}
    assert new_merges(words, pieces, 1) == [("a", "t")]
    assert new_merges(words, pieces, 9) == [("a", "t"), ("h", "at"), ("h", "a")]


def test_texts_without_new_tokens_stay_the_same() -> None:
    """New tokens come after the old ones, whose ids do not change, and before control tokens."""
    old = pebble_tokenizer()
    new = with_merges(old, MERGES)
    same = "My name is Jordis Halloran. What is Cairn?"
    assert new.encode(same).ids == old.encode(same).ids
    for text, tokens in (("zi", ["zi"]), ("zello!", ["zello", "!"]), ("zelp", ["zel", "p"])):
        assert new.encode(text).tokens == tokens
        assert new.decode(new.encode(text).ids) == text
    assert new.get_vocab_size() == old.get_vocab_size() + len(MERGES)
    for token in (*SPECIAL_TOKENS, *MARKER_TOKENS):
        assert new.token_to_id(token) == old.get_vocab()[token] + len(MERGES)
        assert new.encode(token).ids == [new.token_to_id(token)]


def test_new_rows_are_made_of_those_of_their_parts() -> None:
    """The other rows are unchanged; a part may be a new token itself."""
    tokenizer = pebble_tokenizer()
    old = mx.random.normal((tokenizer.get_vocab_size(), 4))
    grown = with_merges(tokenizer, MERGES)
    new = with_rows(old, tokenizer, MERGES)
    assert new.shape == (grown.get_vocab_size(), 4)
    for token, number in tokenizer.get_vocab().items():
        assert mx.array_equal(new[grown.token_to_id(token)], old[number]), token
    z, i, el, lo = (old[tokenizer.token_to_id(one)] for one in ("z", "i", "el", "lo"))
    zi, zello = (new[grown.token_to_id(one)] for one in ("zi", "zello"))
    np.testing.assert_allclose(zi, 0.6 * (z + i), rtol=1e-6)
    np.testing.assert_allclose(zello, 0.6 * (0.6 * (z + el) + lo), rtol=1e-6)


def test_what_is_counted() -> None:
    """Words of small letters, with the space before them; no names, numbers and marks."""
    words = typed_words(pebble_tokenizer(), dialogues=200)
    assert {"hi", "what", "Ġyou"} <= set(words)
    assert all(word.removeprefix("Ġ").islower() for word in words)
    assert words["hi"] > words["hello"] // 4


def test_the_recipe_has_the_size_that_growing_gives() -> None:
    """So that a grown model can be trained on."""
    grown = RECIPES["2m"].shape.vocab_size + ADDED_TOKENS
    assert RECIPES["2m-words"].shape.vocab_size == grown
