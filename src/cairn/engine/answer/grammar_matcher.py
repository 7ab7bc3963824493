"""
Constrained decoding: which tokens a grammar allows next. One of the two modules that import
llguidance.

Rules of this module:

1. The allowed tokens are a function of the grammar, the tokenizer and the tokens so far (P1). State
   that is kept from one token to the next is only used after comparing those tokens. Each answer
   has its own parser; what the library shares between parsers does not depend on any answer.
2. A token is matched by the bytes that it stands for in the text, markers included. Other tokens
   that the tokenizer calls special are never allowed; the caller says which tokens end an answer.
3. Any failure of the library over a client's schema becomes one of two errors: ``CannotConstrain``
   before the answer begins, ``GrammarDeadEnd`` in the middle of it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from cairn.engine.answer.grammar import CannotConstrain, Grammar
from cairn.engine.answer.markers import Markers
from cairn.engine.answer.token_bytes import NotRead, bytes_of_tokens
from cairn.engine.errors import GrammarDeadEnd
from cairn.engine.prompt.cuts import library_object
from cairn.engine.reports import ModelFacts

# A grammar is compiled while other requests wait to be tokenised, and matched between decode passes
# on the engine's thread, where ten milliseconds for a token are a lot. The library counts steps and
# reads no clock, so it refuses the same grammars on every machine.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=250_000,
    verbose_errors=False,
)

_FACT_MAX = 300
_NO_TOKEN = "no token of this model can come next"
# The library's errors about a schema are between these two: the place in the grammar, and its text.
_BEFORE, _AFTER = "failed to compile JSON schema: ", "\n   1 | "


class GrammarMatcher:
    """Follows one answer through a grammar. Not thread-safe."""

    def __init__(
        self, make: Callable[[], llguidance.LLMatcher], ends: Collection[int], tokens: int
    ) -> None:
        """
        Args:
            make: makes the library's parser, at the beginning of an answer.
            ends: token ids that end an answer.
            tokens: the length of a row of logits.

        Raises:
            CannotConstrain: the library cannot parse the grammar.
        """
        self._make = make
        self._ends = sorted(ends)
        self._tokens = tokens
        self._matcher = make()
        if self._matcher.is_error():
            raise CannotConstrain(_fact(self._matcher.get_error()), "answer")
        self._taken: tuple[int, ...] = ()

    def allowed(self, answer: Sequence[int]) -> npt.NDArray[np.bool_]:
        """
        Whether each token may come next, as a mask of shape ``(tokens,)``; at least one may.

        Args:
            answer: the token ids of the answer so far. An answer that does not continue the one of
                the call before is parsed from its beginning.

        Raises:
            GrammarDeadEnd: no token is allowed, or the library's limits are exceeded.
        """
        tokens = tuple(answer)
        if tokens[: len(self._taken)] != self._taken:
            self._matcher, self._taken = self._make(), ()
        fresh = tokens[len(self._taken) :]
        if not self._matcher.consume_tokens(list(fresh)):
            raise GrammarDeadEnd(_fact(self._matcher.get_error()))
        self._taken = tokens
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        # After an error the library's mask allows the end of the answer, which would hide it.
        failed = self._matcher.is_error()
        found = np.unpackbits(bits, count=self._tokens, bitorder="little").astype(np.bool_)
        found[self._ends] = not failed and self._matcher.is_accepting()
        if failed or not found.any():
            raise GrammarDeadEnd(_fact(self._matcher.get_error()))
        return found

    def fork(self) -> GrammarMatcher:
        """
        An independent copy. The library's limits count what a parser has done, so this one stays as
        it is whatever the copy follows.
        """
        copied = copy.copy(self)
        copied._matcher = self._matcher.deep_copy()
        return copied

    def adopt(self, fork: Any) -> None:
        """Go on from where a fork is."""
        self._matcher, self._taken = fork._matcher, fork._taken


class GrammarCompiler:
    """
    Compiles grammars for one model. Reads the model's vocabulary when it compiles the first one.
    Thread-safe.
    """

    def __init__(
        self, tokenizer: Any, *, ends: Collection[int], tokens: int, markers: Iterable[str]
    ) -> None:
        """
        Args:
            tokenizer: mlx-lm's wrapper.
            ends: token ids that end an answer.
            tokens: the length of a row of logits.
            markers: texts of tokens that a grammar may use even if the tokenizer calls them
                special.
        """
        self._tokenizer = tokenizer
        self._ends = [end for end in ends if end < tokens]
        self._tokens = tokens
        self._markers = frozenset(markers)
        self._making = threading.Lock()
        self._made_library: llguidance.LLTokenizer | None = None

    @property
    def _library(self) -> llguidance.LLTokenizer:
        with self._making:
            if self._made_library is None:
                self._made_library = self._made()
            return self._made_library

    def _made(self) -> llguidance.LLTokenizer:
        vocabulary = _vocabulary(self._tokenizer, self._ends, self._tokens, self._markers)
        return llguidance.LLTokenizer(vocabulary, n_vocab=self._tokens, eos_token=self._ends)

    def compile_text(self, text: str) -> GrammarMatcher:
        """
        A matcher for one answer under a grammar's text.

        Raises:
            CannotConstrain: no answer can satisfy the grammar, or the library cannot read this
                model's tokens. Does not say which schema is at fault.
        """
        library = self._library

        def make() -> llguidance.LLMatcher:
            grammar = llguidance.LLMatcher.grammar_from_lark(text)
            return llguidance.LLMatcher(library, grammar, log_level=0, limits=_LIMITS)

        matcher = GrammarMatcher(make, self._ends, self._tokens)
        try:
            matcher.allowed(())
        except GrammarDeadEnd as fault:
            raise CannotConstrain(f"no answer can satisfy it: {fault}", "answer") from fault
        return matcher

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """
        A matcher for one answer under a grammar.

        Raises:
            CannotConstrain: no answer can satisfy it. Names the tool whose schema is at fault.
        """
        # Read first, because a vocabulary that cannot be read is not the fault of any schema.
        assert self._library is not None
        try:
            return self.compile_text(grammar.text)
        except CannotConstrain as whole:
            for tool, schema in grammar.schemas:
                try:
                    self.compile_text(schema)
                except CannotConstrain as fault:
                    raise CannotConstrain(fault.fact, "schema", tool) from whole
            raise


def compiler_for(tokenizer: Any, markers: Markers, facts: ModelFacts) -> GrammarCompiler:
    """The grammar compiler of a loaded model."""
    return GrammarCompiler(
        tokenizer, ends=facts.eos_ids, tokens=facts.vocabulary_tokens, markers=markers.texts
    )


class _Vocabulary(llguidance.TokenizerWrapper):
    """The vocabulary of a model, in the form that the library takes."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], end: int) -> None:
        # The library's own __init__ is not called, because it tries out a tokenizer.
        self.is_tokenizer_wrapper = True
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None


def _vocabulary(
    tokenizer: Any, ends: Sequence[int], tokens: int, markers: frozenset[str]
) -> _Vocabulary:
    try:
        texts = bytes_of_tokens(tokenizer)
    except NotRead as error:
        raise CannotConstrain(_fact(str(error)), "answer") from error
    added = library_object(tokenizer).get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special and token.content not in markers}
    special.update(ends)
    texts = (texts + [b""] * tokens)[:tokens]
    return _Vocabulary(texts, sorted(id_ for id_ in special if id_ < tokens), ends[0])


def _fact(error: str) -> str:
    """The library's error on one line, without the grammar."""
    _, found, schema = error.partition(_BEFORE)
    said = (schema if found else error).split(_AFTER)[0].removesuffix("<non-verbose/>")
    said = " ".join(said.split())[:_FACT_MAX]
    return _NO_TOKEN if said == "NoExtensionBias" else said or "the library gives no reason"
