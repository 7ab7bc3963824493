"""
The bytes that tokens stand for, from the tokenizer's vocabulary.

A token may be part of a character. Its text is then U+FFFD and does not show its bytes. One of the
two modules that import llguidance, which reads vocabularies of every kind.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import llguidance

from cairn.engine.prompt.cuts import library_object


class NotRead(Exception):
    """A vocabulary cannot be read. The message says why."""


def bytes_of_tokens(tokenizer: Any) -> list[bytes]:
    """
    The bytes of each token, by its id. Takes a second for a large vocabulary.

    Args:
        tokenizer: mlx-lm's wrapper.

    Raises:
        NotRead: it is not from the library ``tokenizers``, or llguidance cannot read it.
    """
    backend = library_object(tokenizer)
    if backend is None:
        raise NotRead("this model's tokenizer is not from the library `tokenizers`")
    try:
        known = llguidance.LLTokenizer(backend.to_str(), slices=[])
    except Exception as error:  # the libraries raise nothing narrower
        raise NotRead(f"this model's tokens cannot be read: {error}") from error
    except BaseException as error:
        # A panic in Rust is not an Exception, and not the server's fault.
        if type(error).__name__ != "PanicException":
            raise
        raise NotRead("this model's tokens cannot be read") from error
    added = backend.get_added_tokens_decoder()
    # The library treats any added token in angle brackets as special; here many of them are words.
    return [
        added[id_].content.encode() if id_ in added else known.decode_bytes([id_])
        for id_ in range(known.vocab_size)
    ]


class TokenBytes:
    """The bytes of one model's tokens. Reads the vocabulary on first use. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        """
        Args:
            tokenizer: mlx-lm's wrapper. It must not be changed afterwards.
        """
        self._tokenizer = tokenizer
        self._table: Sequence[bytes] | None = None
        self._lock = threading.Lock()

    def read(self) -> None:
        """
        Read the vocabulary if that has not happened. Takes long, so not for a thread that others
        wait for.
        """
        with self._lock:
            if self._table is None:
                try:
                    self._table = bytes_of_tokens(self._tokenizer)
                except NotRead:
                    self._table = ()

    def of(self, token: int, text: str) -> bytes | None:
        """
        The bytes of a token; None if unknown.

        Args:
            text: the token alone, as the tokenizer decodes it. Used if the vocabulary cannot be
                read; it shows the bytes of whole characters.
        """
        self.read()
        assert self._table is not None
        if token < len(self._table):
            return self._table[token]
        return None if "\ufffd" in text else text.encode()
