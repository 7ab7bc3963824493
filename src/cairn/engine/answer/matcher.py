"""
Which tokens may come next in an answer that is held to a grammar. One of the two modules that know
the library llguidance.

Rules of this module:

1. What may come next is a function of the grammar, the tokenizer and the tokens so far (P1). What
   is kept from one token to the next is looked up with the tokens and never without. Each answer
   has a parser of its own; what the library builds for all of them does not depend on any.
2. Tokens are the bytes that they stand for in the text. Those of markers are, too, and those that a
   tokenizer calls special otherwise are allowed nowhere; which of them end an answer is said from
   outside.
3. Whatever the library says or does over somebody's schema is one of two errors: ``CannotHold``
   before the answer begins, ``NotHeld`` in the midst of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from cairn.engine.answer.grammar import CannotHold, Grammar
from cairn.engine.answer.markers import Markers
from cairn.engine.answer.token_bytes import NotRead, bytes_of_tokens
from cairn.engine.prompt.cuts import library_object
from cairn.engine.reports import ModelFacts, NotHeld

#: A grammar is compiled beside what waits for its token ids, and followed on the engine's thread
#: while everybody waits: some ten milliseconds for a token are a lot. The library counts steps and
#: reads no clock, so what it refuses is refused everywhere.
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
#: Its errors over a schema stand between these two: where it is in the grammar, and the grammar.
_BEFORE, _BEHIND = "failed to compile JSON schema: ", "\n   1 | "


class GrammarMatcher:
    """Follows one answer. For one thread at a time."""

    def __init__(
        self, matcher: Callable[[], llguidance.LLMatcher], ends: Collection[int], tokens: int
    ) -> None:
        """
        Args:
            matcher: makes the library's parser, at the beginning of an answer.
            ends: tokens that end an answer.
            tokens: the length of a row of logits.

        Raises:
            CannotHold: the library makes none of the grammar.
        """
        self._make = matcher
        self._ends = sorted(ends)
        self._tokens = tokens
        self._matcher = matcher()
        if self._matcher.is_error():
            raise CannotHold(_fact(self._matcher.get_error()), "answer")
        self._taken: tuple[int, ...] = ()

    def allowed(self, answer: Sequence[int]) -> npt.NDArray[np.bool_]:
        """
        Whether each token may come behind these: ``(tokens,)``. At least one may.

        Raises:
            NotHeld: it cannot be told.
        """
        tokens = tuple(answer)
        if tokens[: len(self._taken)] != self._taken:
            self._matcher, self._taken = self._make(), ()
        fresh = tokens[len(self._taken) :]
        if not self._matcher.consume_tokens(list(fresh)):
            raise NotHeld(_fact(self._matcher.get_error()))
        self._taken = tokens
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        # Of an error the library makes a mask that ends the answer.
        if self._matcher.is_error():
            raise NotHeld(_fact(self._matcher.get_error()))
        found = np.unpackbits(bits, count=self._tokens, bitorder="little").astype(np.bool_)
        found[self._ends] = self._matcher.is_accepting()
        if not found.any():
            raise NotHeld(_NO_TOKEN)
        return found


class GrammarCompiler:
    """
    Makes guides for the answers of one model, whose vocabulary it reads for the first of them. For
    one thread at a time.
    """

    def __init__(
        self, tokenizer: Any, *, ends: Collection[int], tokens: int, markers: Iterable[str]
    ) -> None:
        """
        Args:
            tokenizer: mlx-lm's wrapper.
            ends: tokens that end an answer.
            tokens: the length of a row of logits.
            markers: texts that stand for themselves in a grammar, whatever the tokenizer has them
                for.
        """
        self._tokenizer = tokenizer
        self._ends = [end for end in ends if end < tokens]
        self._tokens = tokens
        self._markers = frozenset(markers)

    @cached_property
    def _library(self) -> llguidance.LLTokenizer:
        vocabulary = _vocabulary(self._tokenizer, self._ends, self._tokens, self._markers)
        return llguidance.LLTokenizer(vocabulary, n_vocab=self._tokens, eos_token=self._ends)

    def guide(self, text: str) -> GrammarMatcher:
        """
        The guide of an answer.

        Args:
            text: of a grammar.

        Raises:
            CannotHold: no answer can be held to it; which schema it is, is not known. Or the
                library cannot read this model's tokens.
        """
        library = self._library

        def matcher() -> llguidance.LLMatcher:
            grammar = llguidance.LLMatcher.grammar_from_lark(text)
            return llguidance.LLMatcher(library, grammar, log_level=0, limits=_LIMITS)

        guide = GrammarMatcher(matcher, self._ends, self._tokens)
        try:
            guide.allowed(())
        except NotHeld as fault:
            raise CannotHold(f"no answer can begin under it: {fault}", "answer") from fault
        return guide

    def matcher_of(self, grammar: Grammar) -> GrammarMatcher:
        """
        The guide of an answer.

        Raises:
            CannotHold: no answer can be held to it.
        """
        assert self._library is not None  # read before, since its faults are no schema's
        try:
            return self.guide(grammar.text)
        except CannotHold as whole:
            for tool, schema in grammar.schemas:
                try:
                    self.guide(schema)
                except CannotHold as fault:
                    raise CannotHold(fault.fact, "schema", tool) from whole
            raise


def compiler_for(tokenizer: Any, markers: Markers, facts: ModelFacts) -> GrammarCompiler:
    """The guidance of a model that is loaded."""
    return GrammarCompiler(
        tokenizer, ends=facts.eos_ids, tokens=facts.vocabulary_tokens, markers=markers.texts
    )


class _Vocabulary(llguidance.TokenizerWrapper):
    """The tokens of a model, as the library asks for them."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], end: int) -> None:
        # Not the library's own beginning, which tries out a tokenizer.
        self.is_tokenizer_wrapper = True
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """Never: nothing is forced, so nothing is tokenised."""
        raise NotImplementedError("grammars force no text")


def _vocabulary(
    tokenizer: Any, ends: Sequence[int], tokens: int, markers: frozenset[str]
) -> _Vocabulary:
    try:
        texts = bytes_of_tokens(tokenizer)
    except NotRead as error:
        raise CannotHold(_fact(str(error)), "answer") from error
    added = library_object(tokenizer).get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special and token.content not in markers}
    special.update(ends)
    texts = (texts + [b""] * tokens)[:tokens]
    return _Vocabulary(texts, sorted(id_ for id_ in special if id_ < tokens), ends[0])


def _fact(error: str) -> str:
    """What the library says, without the grammar, on one line."""
    _, found, schema = error.partition(_BEFORE)
    said = (schema if found else error).split(_BEHIND)[0].removesuffix("<non-verbose/>")
    said = " ".join(said.split())[:_FACT_MAX]
    return _NO_TOKEN if said == "NoExtensionBias" else said or "the library gives no reason"
