"""From tokens to text: characters split over tokens, stop texts, and the count of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.engine.answer.text import AnswerText, Piece
from cairn.engine.mlx.model import load_model

VOCABULARY = 2048


class Spelled:
    """
    A detokenizer whose tokens are places in a list of texts. What is in ``late`` comes out at the
    end only.
    """

    def __init__(self, words: Sequence[str], late: str = "") -> None:
        self._words = words
        self._late = late
        self.text = ""

    def reset(self) -> None:
        """Begin a new text."""
        self.text = ""

    def add_token(self, token: int) -> None:
        """Take in a token."""
        self.text += self._words[token]

    def finalize(self) -> None:
        """Give what is left."""
        self.text += self._late


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Any:  # mlx-lm has no types
    """The random model's tokenizer."""
    return load_model(str(model_directory)).tokenizer


def answered(detokenizer: Any, tokens: Sequence[int], stop: Sequence[str] = ()) -> list[Piece]:
    """The pieces of an answer as a session takes them: to the first stop, then the end."""
    text = AnswerText(detokenizer, stop)
    pieces: list[Piece] = []
    for token in tokens:
        pieces.append(text.add(token))
        if pieces[-1].stopped:
            break
    pieces.append(text.finish())
    return pieces


def spelled(words: Sequence[str], *stop: str, late: str = "") -> list[Piece]:
    """The pieces of an answer whose tokens are these words."""
    return answered(Spelled(words, late), range(len(words)), stop)


def whole(detokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of all tokens, by the detokenizer alone."""
    detokenizer.reset()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    text: str = detokenizer.text
    return text


def said(pieces: Sequence[Piece]) -> str:
    """What a client reads."""
    return "".join(piece.text for piece in pieces)


def test_words_come_at_once() -> None:
    """Without a stop text nothing is held back, and each token comes with its own text."""
    assert [
        Piece(text="Stone", tokens=1),
        Piece(text=" on", tokens=1),
        Piece(text="", tokens=0),
    ] == spelled(["Stone", " on"])


@pytest.mark.parametrize("character", ["ü", "石", "🪨"])
def test_a_character_split_over_tokens(tokenizer: Any, character: str) -> None:
    """The bytes of a character wait for its last one, and its tokens come together with it."""
    tokens = tokenizer.encode(f"x{character}y")[1:-1]
    assert len(tokens) > 1

    text = AnswerText(tokenizer.detokenizer)
    pieces = [text.add(token) for token in tokens]

    assert [Piece(text="", tokens=0)] * (len(tokens) - 1) == pieces[:-1]
    assert Piece(text=character, tokens=len(tokens)) == pieces[-1]


@pytest.mark.parametrize("words", [" goes over", "  goes", "goes", " "])
def test_a_space_in_front_belongs_to_a_text_that_goes_on(tokenizer: Any, words: str) -> None:
    """After a raw prompt it separates two words; any other answer begins without one."""
    tokens = tokenizer.encode(words, add_special_tokens=False)
    for goes_on, due in ((True, words), (False, words.removeprefix(" "))):
        text = AnswerText(tokenizer.detokenizer, goes_on=goes_on)
        said = [text.add(token).text for token in tokens]
        assert due == "".join(said) + text.finish().text


def test_a_character_that_never_ends(tokenizer: Any) -> None:
    """Bytes that are no character are released at the end, as the detokenizer spells them."""
    tokens = tokenizer.encode("a🪨")[:-1]

    pieces = answered(tokenizer.detokenizer, tokens)

    assert "a\ufffd" == said(pieces)
    assert Piece(text="\ufffd", tokens=len(tokens) - 1) == pieces[-1]


def test_a_stop_text_of_characters_that_are_split(tokenizer: Any) -> None:
    """A stop text is found even if each of its characters is several tokens."""
    tokens = tokenizer.encode("a 🪨石 b")

    pieces = answered(tokenizer.detokenizer, tokens, ["🪨石"])

    assert "a " == said(pieces)
    assert [True, False] == [piece.stopped for piece in pieces[-2:]]


def test_a_stop_text_across_tokens() -> None:
    """What may begin a stop text waits, and nothing of it is released once it is one."""
    assert [
        Piece(text="ab", tokens=1),
        Piece(text="c", tokens=1),
        Piece(text="", tokens=0),
        Piece(text="", tokens=2, stop="STOP"),
        Piece(text="", tokens=0),
    ] == spelled(["ab", "cST", "O", "Pd", "e"], "STOP")


def test_what_was_no_stop_text_comes_after_all() -> None:
    """
    What waited is released as soon as it can be no stop text any more, with the tokens it is of.
    """
    assert [
        Piece(text="", tokens=0),
        Piece(text="", tokens=0),
        Piece(text="STONE", tokens=3),
        Piece(text="", tokens=0),
    ] == spelled(["ST", "O", "NE"], "STOP")


def test_a_stop_text_that_begins_in_itself() -> None:
    """The longest beginning of a stop text is held back: in "aab" the stop text "ab" is found."""
    assert [
        Piece(text="", tokens=0),
        Piece(text="a", tokens=2),
        Piece(text="", tokens=1, stop="ab"),
        Piece(text="", tokens=0),
    ] == spelled(["a", "a", "b"], "ab")
    assert "xa" == said(spelled(["xaa", "ba", "ab"], "abaab"))


def test_a_stop_text_at_the_very_end() -> None:
    """A stop text that the last token completes ends the answer before it."""
    pieces = spelled(["The end", ". ST", "OP"], "STOP")

    assert "The end. " == said(pieces)
    assert pieces[-2].stopped


def test_a_stop_text_that_the_end_completes() -> None:
    """Text that the detokenizer holds until the end is searched for stop texts too."""
    assert [
        Piece(text="a ", tokens=1),
        Piece(text="", tokens=0, stop="STOP"),
    ] == spelled(["a ST"], "STOP", late="OP")


def test_what_waits_is_released_at_the_end() -> None:
    """The beginning of a stop text that never came belongs to the answer."""
    assert [
        Piece(text="The end. ", tokens=1),
        Piece(text="", tokens=0),
        Piece(text="STO", tokens=1),
    ] == spelled(["The end. ST", "O"], "STOP")


@pytest.mark.parametrize("stop", [("ab", "b", "zz"), ("zz", "b", "ab"), ("b", "ab")])
def test_several_stop_texts(stop: tuple[str, ...]) -> None:
    """The one that begins first ends the answer and is reported, whatever their order."""
    pieces = spelled(["x", "ab", "y"], *stop)
    assert ("x", "ab") == (said(pieces), pieces[-2].stop)


@pytest.mark.parametrize("words", [["x", "abc"], ["x", "a", "b", "c"]], ids=["once", "by letter"])
@pytest.mark.parametrize("stop", [("ab", "abc"), ("abc", "ab")])
def test_stop_texts_that_begin_alike(stop: tuple[str, ...], words: list[str]) -> None:
    """The shorter one is reported, because letter by letter it is complete first."""
    assert ["ab"] == [piece.stop for piece in spelled(words, *stop) if piece.stopped]


def test_the_longest_of_several_is_waited_for() -> None:
    """As much is held back as the stop text with the longest beginning needs."""
    pieces = spelled(["ab", "c", "a"], "abcd", "cd")

    assert ["", "", "abc", "a"] == [piece.text for piece in pieces]


def test_an_empty_stop_text_stops_nothing() -> None:
    """An empty stop text is ignored."""
    assert "Stone on" == said(spelled(["Stone", " on"], "", "STOP"))


def test_nothing_after_a_stop() -> None:
    """Text and bytes that were still to come do not come at the end."""
    pieces = spelled(["aSTOPb"], "STOP", late="late")

    assert [Piece(text="a", tokens=1, stop="STOP"), Piece(text="", tokens=0)] == pieces


def test_answers_share_nothing(tokenizer: Any) -> None:
    """One detokenizer serves several answers at the same time."""
    detokenizer = tokenizer.detokenizer
    one, other = AnswerText(detokenizer), AnswerText(detokenizer)
    texts = ["", ""]
    words = tokenizer.encode("Stone 石 and wind"), tokenizer.encode("A cairn 🪨 marks")
    for first, second in zip(*(list(ids) + [None] * 9 for ids in words), strict=False):
        texts[0] += one.add(first).text if first is not None else ""
        texts[1] += other.add(second).text if second is not None else ""

    assert ["Stone 石 and wind", "A cairn 🪨 marks"] == [
        texts[0] + one.finish().text,
        texts[1] + other.finish().text,
    ]


TOKENS = st.lists(st.integers(0, VOCABULARY - 1) | st.integers(0, 260), max_size=40)
"""Of the whole vocabulary, and often the single bytes."""
many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(tokens=TOKENS)
def test_pieces_are_the_whole_text(tokenizer: Any, tokens: list[int]) -> None:
    """
    Whatever the tokens, the pieces together are the detokenizer's text, and every token is counted
    once.
    """
    pieces = answered(tokenizer.detokenizer, tokens)

    assert whole(tokenizer.detokenizer, tokens) == said(pieces)
    assert len(tokens) == sum(piece.tokens for piece in pieces)


@many
@given(tokens=TOKENS.filter(bool), data=st.data())
def test_pieces_are_the_text_before_a_stop(
    tokenizer: Any, tokens: list[int], data: st.DataObject
) -> None:
    """
    With a stop text cut out of the answer, the pieces are the text before its first occurrence;
    every token up to there is counted once.
    """
    text = whole(tokenizer.detokenizer, tokens)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 12))]

    pieces = answered(tokenizer.detokenizer, tokens, [stop])

    assert (text[: text.find(stop)] if stop else text) == said(pieces)
    assert bool(stop) == any(piece.stopped for piece in pieces)
    assert len(pieces) - 1 == sum(piece.tokens for piece in pieces)


@many
@given(
    words=st.lists(st.text("ab", min_size=0, max_size=3), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_several_stops_in_texts_that_repeat(words: list[str], stop: list[str]) -> None:
    """
    No stop text is ever in what a client reads, and what ended the answer is one of them. Tokens
    are counted once.
    """
    pieces = spelled(words, *stop)
    read, text = said(pieces), "".join(words)

    assert text.startswith(read)
    assert not any(one in read for one in stop)
    if any(piece.stopped for piece in pieces):
        assert text[len(read) :].startswith(tuple(stop))
    else:
        assert text == read
    assert len(pieces) - 1 == sum(piece.tokens for piece in pieces)
