"""
Prepares a request before it has a place: token ids, the chain of conversation parts, block keys,
limits, and the grammar that constrains its answer.

This happens in threads, because a long prompt takes long. ``threads/prompts.py`` says how many, and
gives each tenant its share of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import attrs
import structlog
import trio

from cairn.actors.errors import FormatRefused, PromptRefused, PromptTooLong, TimedOut
from cairn.actors.requests.messages import Generate, PromptTokens
from cairn.actors.requests.ticket import Prepared
from cairn.actors.sequencer import Sequencer
from cairn.actors.threads.prompts import GivenUp, Kind, PromptThreads, kind_of
from cairn.engine.answer.grammar import CannotConstrain, Constraint, grammar_of
from cairn.engine.answer.grammar_matcher import compiler_for
from cairn.engine.answer.markers import Markers, markers_of
from cairn.engine.answer.parts import AnswerForm
from cairn.engine.answer.token_bytes import TokenBytes
from cairn.engine.contract import ModelTokenizer, Tokenizer
from cairn.engine.prompt import template as prompts
from cairn.engine.prompt.bounds import bound_of
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.infill import infill_of
from cairn.engine.prompt.specials import SpecialTokens, specials_of
from cairn.engine.reports import GrammarMatcher, ModelFacts
from cairn.engine.sampling import BIASES_MAX, seed_of_choice
from cairn.journal.keys import block_keys
from cairn.journal.paths import Ask, keys_on_record
from cairn.journal.tenants import tenant_secret
from cairn.journal.token_ids import shared

T = TypeVar("T")

log = structlog.get_logger("cairn")

_SEED_BITS = 52
"""
The bits of a drawn seed. JavaScript and jq read integers exactly up to 2^53, and a client must be
able to send back the seed that it got. Further answers of a request have the seeds after its own.
"""


class Preparer:
    """
    Prepares requests for one model.

    Attributes:
        encoder: caches the token ids of texts.
        infill: the model's special tokens for filling a gap, if it has any.
    """

    def __init__(
        self,
        *,
        sequencer: Sequencer,
        facts: ModelFacts,
        tokenizer: ModelTokenizer,
        secret: bytes,
        max_tokens: int,
        threads: PromptThreads,
        special_tokens: SpecialTokens,
    ) -> None:
        """
        Uses template and tokenizer, which may take any time.

        Args:
            secret: the data directory's, from which those of tenants are derived.
            max_tokens: the longest answer if the client sets no limit.
            threads: in which requests are prepared.
            special_tokens: what special tokens in messages are.
        """
        self._sequencer = sequencer
        self._model = facts
        self._tokenizer = tokenizer
        self._secret = secret
        self._max_tokens = max_tokens
        self._markers = markers_of(tokenizer)
        specials = None
        if special_tokens == "text":
            specials = specials_of(tokenizer, self._markers.texts)
        self.encoder = Encoder(tokenizer, specials=specials)
        if self.encoder.whole_because is not None:
            log.info("prompts are tokenised as a whole", reason=self.encoder.whole_because)
        self.infill = infill_of(tokenizer)
        self._bound = bound_of(tokenizer)
        if self._bound is None:
            log.info("no number of bytes shows that a prompt is too long")
        self._compiler = compiler_for(tokenizer, self._markers, facts)
        self._token_bytes = TokenBytes(tokenizer)
        self._first_of_calls = _token_of(tokenizer, self._markers)
        self._threads = threads

    async def tokens(self, command: Generate, tenant: str) -> PromptTokens:
        """
        The tokens of a prompt, also of one that is too long to be answered.

        Raises:
            PromptRefused: the prompt cannot be rendered or tokenised.
            PromptTooLong: its bytes alone show that it cannot fit, so it is not tokenised.
            TimedOut: that takes too long.
        """

        def read(command: Generate, tenant: str) -> PromptTokens:
            ids, _, _ = self.read(command, tenant)
            is_text = command.conversation is not None or isinstance(command.prompt, str)
            return PromptTokens(ids=ids, text="" if is_text else self._tokenizer.decode(ids))

        return await self._tokenised(read, command, tenant)

    async def choices(self, command: Generate, tenant: str) -> list[Prepared]:
        """All answers that a request asks for. Its prompt is tokenised once."""
        first = await self._prepare(command, tenant)
        prepared = [first]
        # Only the first answer has the named session and the stored turn.
        command = attrs.evolve(first.command, session_name=None, keep=None)
        ask = attrs.evolve(first.ask, session_name=None)
        for choice in range(1, command.choices):
            # A matcher follows one answer.
            matcher = None
            if first.grammar is not None:
                text = first.grammar
                matcher = await self._run(
                    "grammar", tenant, partial(self._compiler.compile_text, text)
                )
            seed = seed_of_choice(first.seed, choice)
            prepared.append(
                attrs.evolve(first, command=command, ask=ask, seed=seed, matcher=matcher)
            )
        return prepared

    async def _prepare(self, command: Generate, tenant: str) -> Prepared:
        """Prepare the first answer."""
        prepared = await self._tokenised(self.prepared, command, tenant)
        constraint = command.constraint
        if constraint is None:
            return prepared
        try:
            return await self._run(
                "grammar", tenant, lambda: self.constrained(prepared, constraint)
            )
        except CannotConstrain as error:
            tool = None
            if error.tool is not None:
                tool = error.tool, prepared.form.tools[error.tool]["function"]["name"]
            about = error.about
            if about == "calls" and constraint.schema is not None:
                about = "calls_beside"  # calls are optional; the format is what is impossible
            raise FormatRefused(error.fact, about, tool) from error

    async def _tokenised(
        self, read: Callable[[Generate, str], T], command: Generate, tenant: str
    ) -> T:
        """Run ``read`` on a request, in a thread."""
        if isinstance(command.prompt, str):
            self._check_bytes(command.prompt, command)
        try:
            return await self._run(
                kind_of(characters_of(command)), tenant, lambda: read(command, tenant)
            )
        except prompts.TemplateError as error:
            raise PromptRefused(str(error)) from error

    async def _run(self, kind: Kind, tenant: str, work: Callable[[], T]) -> T:
        """
        Run work in a thread.

        Raises:
            TimedOut: it takes too long.
        """
        try:
            return await self._threads.run(kind, tenant, work)
        except GivenUp as given_up:
            raise TimedOut(
                given_up.limit_s, "grammar" if kind == "grammar" else "prompt"
            ) from given_up

    def prepared(self, command: Generate, tenant: str) -> Prepared:
        ids, chain_parts, form = self.read(command, tenant)
        command = self._without_calls(command)
        if not ids:
            raise PromptRefused("the prompt is empty; send at least one token")
        context, whose, of_model = self._context_of(command)
        if len(ids) >= context:
            raise PromptTooLong(len(ids), context, whose, of_model)
        secret = tenant_secret(self._secret, tenant)
        chain = prompts.chain_of(chain_parts, secret=secret, tenant=tenant)
        ask = Ask(
            tenant=tenant,
            fingerprint=self._model.fingerprint,
            chain=chain,
            session_name=command.session_name,
            group=command.group,
            cache_prompt=command.cache_prompt,
            cache_mode=command.cache_mode,
        )
        keys = block_keys(
            secret=secret,
            fingerprint=self._model.fingerprint,
            tenant=tenant,
            ids=ids,
            block_tokens=self._model.block_tokens,
            known=keys_on_record(self._sequencer.state, ask, ids),
        )
        wants_bytes = command.top_logprobs is not None
        if wants_bytes:
            self._token_bytes.read()
        asked = self._max_tokens if command.max_tokens is None else command.max_tokens
        max_tokens = min(asked, context - len(ids))
        return Prepared(
            command=command,
            ask=ask,
            prompt_ids=ids,
            chain=chain,
            keys=keys,
            seed=secrets.randbits(_SEED_BITS) if command.seed is None else command.seed,
            max_tokens=max_tokens,
            context_tokens=context,
            capacity_tokens=self._model.capacity_for(len(ids) + max_tokens),
            form=form,
            token_bytes=self._token_bytes if wants_bytes else None,
        )

    def _context_of(self, command: Generate) -> tuple[int, str, int]:
        """The limit of a prompt, whose it is, and the model's own if memory allows less."""
        context = self._model.context_tokens
        if command.context_max is not None and command.context_max < context:
            return command.context_max, "agent", 0
        return context, "model", self._model.model_context_tokens

    def _check_bytes(self, text: str, command: Generate) -> None:
        """
        Refuse a text that is too long whatever its tokens are, before it is tokenised.

        Raises:
            PromptTooLong: its bytes do not fit into as many tokens as there may be.
        """
        context, whose, of_model = self._context_of(command)
        least = self._bound.least_tokens(text) if self._bound is not None else 0
        if least >= context:
            raise PromptTooLong(least, context, whose, of_model, by_bytes=True)

    def _without_calls(self, command: Generate) -> Generate:
        """
        The same request. If its prompt has tools that may not be called, the token with which a
        call begins gets a bias that all but forbids it; the bias is recorded with the request.
        What begins like a call nevertheless is text.
        """
        asked, token = command.conversation, self._first_of_calls
        if asked is None or asked.calls or not asked.tools or token is None:
            return command
        biases = {**dict(command.sampling.logit_bias), token: -100.0}
        if len(biases) > BIASES_MAX:
            return command
        return attrs.evolve(command, sampling=attrs.evolve(command.sampling, logit_bias=biases))

    def constrained(self, prepared: Prepared, constraint: Constraint) -> Prepared:
        """The request with its grammar and a matcher for it."""
        grammar = grammar_of(constraint, prepared.form)
        matcher = self._compiler.compile(grammar)
        return attrs.evolve(prepared, grammar=grammar.text, matcher=matcher)

    async def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher for a recorded grammar, which was compiled before. For idle time."""
        return await trio.to_thread.run_sync(
            self._compiler.compile_text, grammar, abandon_on_cancel=False
        )

    def read(
        self, command: Generate, tenant: str
    ) -> tuple[tuple[int, ...], tuple[prompts.CanonicalPart, ...], AnswerForm]:
        """The token ids and conversation parts of a request, and the form of its answer."""
        if command.conversation is not None:
            conversation = command.conversation
            rendered = self.encoder.render(conversation)
            text = self.encoder.plain(rendered)
            self._check_bytes(text, command)
            ids = self.encoder.encode(rendered, tenant=tenant)
            offered = (*conversation.tools, *conversation.loaded_tools)
            markers, begun = self._markers, ""
            if conversation.continued:
                begun = conversation.messages[-1].content.strip()
            form = AnswerForm(
                markers=markers,
                begins=markers.continues(begun) if begun else markers.begins(text),
                tools=offered if conversation.calls else (),
                may_think=not begun and markers.may_think(text),
                held=command.constraint is not None,
            )
            return ids, prompts.conversation_parts(conversation), form
        if isinstance(command.prompt, str):
            ids = self.encoder.encode_raw(command.prompt)
            content = command.prompt.encode()
        else:
            ids = shared(command.prompt or ())
            content = repr(ids).encode()
        return ids, (("prompt", content, content),), AnswerForm()


def characters_of(command: Generate) -> int:
    """How long a request's prompt is, roughly: what its template adds is unknown."""
    if command.conversation is not None:
        return prompts.characters_of(command.conversation)
    return len(command.prompt or ())


def _token_of(tokenizer: Tokenizer, markers: Markers) -> int | None:
    """The token with which calls begin; None if the model has no such single token."""
    if markers.calling is None or not markers.calling[0]:
        return None
    ids = tokenizer.encode(markers.calling[0], add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 else None
