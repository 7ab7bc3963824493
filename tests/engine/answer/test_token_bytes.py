"""The bytes of tokens, those that are part of a character too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import decoders

from cairn.engine.answer.token_bytes import NotRead, TokenBytes, bytes_of_tokens
from tests.support.models.tokenizers import KINDS, added, bpe, wrapped

TEXT = "Über 🪨 and 石の上"


@pytest.mark.parametrize("kind", ["like qwen", "like gpt2"])
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(kind: str):
    """Joined they are the text, where single tokens have no text of their own."""
    made = KINDS[kind]()
    made.decoder = decoders.ByteLevel()
    tokenizer = wrapped(made)
    known = TokenBytes(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)

    assert any("\ufffd" in tokenizer.decode([id_]) for id_ in ids)
    assert TEXT == b"".join(known.of(id_, "") or b"" for id_ in ids).decode().removeprefix(" ")


def test_added_tokens_are_their_words():
    """Also those that look like markers to the library."""
    made = bpe(tokens=added("<think>", "石"))
    made.decoder = decoders.ByteLevel()
    tokenizer = wrapped(made)
    known = TokenBytes(tokenizer)
    ids = tokenizer.encode("<think>石", add_special_tokens=False)

    assert [b"<think>", "石".encode()] == [known.of(id_, "") for id_ in ids]


def test_what_cannot_be_read_tells_whole_characters(model_directory: Path):
    """
    Of a tokenizer of another library, and of an id beyond the vocabulary, only the text is known.
    """
    other, ours = TokenBytes(SimpleNamespace()), TokenBytes(load_tokenizer(model_directory))
    beyond = len(bytes_of_tokens(load_tokenizer(model_directory)))

    with pytest.raises(NotRead, match="not from the library"):
        bytes_of_tokens(SimpleNamespace())
    assert ["é".encode(), None] == [other.of(1, "é"), other.of(1, "\ufffd")]
    assert [b"", None] == [ours.of(beyond, ""), ours.of(beyond, "\ufffd")]


class PanicException(BaseException):
    """A panic of the library, which is not an Exception; its class cannot be imported."""


class Failing:
    """A tokenizer whose serialisation fails."""

    def __init__(self, error: BaseException) -> None:
        self.backend_tokenizer = self
        self._error = error

    def encode(self, text: str) -> list[int]:
        """Not called."""
        raise NotImplementedError

    def to_str(self) -> str:
        """The tokenizer as JSON."""
        raise self._error


def test_a_library_that_panics():
    """A panic means that the vocabulary cannot be read; an interrupt ends the process as always."""
    for error in (PanicException("range end out of bounds"), ValueError("no such type")):
        with pytest.raises(NotRead, match="tokens cannot be read"):
            bytes_of_tokens(Failing(error))
    with pytest.raises(KeyboardInterrupt):
        bytes_of_tokens(Failing(KeyboardInterrupt()))
