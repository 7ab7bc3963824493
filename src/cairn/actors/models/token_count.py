"""
Counts tokens for models that are not loaded, with their tokenizers and templates alone, of which a
few are kept. No model is swapped for a count.

A count does not queue with requests. It waits for a tokenizer that is being loaded, and for a
thread (``threads/prompts.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import attrs
import cachetools
import structlog
import trio

from cairn.actors.errors import PromptRefused, PromptTooLong, Stopping, TimedOut
from cairn.actors.models.choice import Choice, not_loaded
from cairn.actors.requests.admission import check_count_queue
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate, PromptTokens
from cairn.actors.requests.prepare import characters_of
from cairn.actors.threads.engine import EngineGone, EngineThread
from cairn.actors.threads.prompts import LIMIT_S, GivenUp, PromptThreads, kind_of
from cairn.engine.answer.markers import markers_of
from cairn.engine.contract import Tokenizer
from cairn.engine.model.models_file import entry_fault
from cairn.engine.prompt import template as prompts
from cairn.engine.prompt.bounds import TextBound, bound_of
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.specials import SpecialTokens, specials_of

T = TypeVar("T")

log = structlog.get_logger("cairn")

TOKENIZERS_MAX = 2
"""How many are kept. One takes tens of megabytes, with a large vocabulary some hundred."""

PAUSE_S = 30.0
"""How long a tokenizer that could not be loaded is not tried again, in seconds."""

_CACHE_BYTES = 8 * 2**20


@attrs.frozen
class _Text:
    """What turns a conversation into token ids."""

    tokenizer: Tokenizer
    encoder: Encoder
    bound: TextBound | None
    context_tokens: int  # 0 if unknown


class TokenCounter:
    """Counts tokens with tokenizers of its own."""

    def __init__(self, engine: EngineThread, limits: Limits, threads: PromptThreads) -> None:
        self._engine = engine
        self._limits = limits
        self._threads = threads
        self._loading = trio.Lock()
        self._texts: cachetools.LRUCache[str, _Text] = cachetools.LRUCache(TOKENIZERS_MAX)
        self._pauses: dict[str, float] = {}
        self._counts = 0

    async def tokens(self, choice: Choice, command: Generate, tenant: str) -> PromptTokens:
        """
        The tokens of a prompt by a model's tokenizer, also of one that is too long to be answered.
        Changes which tokenizers are kept, and nothing else.

        Raises:
            ModelNotLoaded: the tokenizer cannot be loaded, or could not a short while ago.
            PromptRefused: the prompt cannot be rendered or tokenised.
            PromptTooLong: its bytes alone show that it cannot fit, so it is not tokenised.
            QueueFull: too many prompts wait to be counted.
            Stopping: the server stopped, and the engine's thread is busy.
            TimedOut: it took too long.
        """
        check_count_queue(self._counts, queue=self._limits.queue)
        self._counts += 1
        try:
            with trio.move_on_after(self._limits.request_s):
                async with self._loading:
                    text = await self._text_of(choice)
                kind = kind_of(characters_of(command))
                return await self._threads.run(kind, tenant, lambda: _tokens(text, command, tenant))
            raise TimedOut(self._limits.request_s)
        except prompts.TemplateError as error:
            raise PromptRefused(str(error)) from error
        except GivenUp as given_up:
            raise TimedOut(given_up.limit_s, "prompt") from given_up
        except EngineGone as gone:
            raise Stopping("the server was stopped before the tokens were counted") from gone
        finally:
            self._counts -= 1

    def forget(self, choice: Choice) -> None:
        """
        Drop the tokenizer of a model that was just loaded: its directory may have changed since
        the tokenizer was.
        """
        self._texts.pop(choice.name, None)
        self._pauses.pop(choice.name, None)

    def forget_texts(self, tenant: str) -> None:
        """Drop what is cached of a tenant's texts."""
        for text in self._texts.values():
            text.encoder.forget(tenant)

    async def _text_of(self, choice: Choice) -> _Text:
        name = choice.name
        known = self._texts.get(name)
        if known is not None:
            return known
        pause_s = self._pauses.get(name, -math.inf) - trio.current_time()
        if pause_s > 0:
            raise not_loaded(choice, pause_s)
        found = await self._loaded(choice)
        if isinstance(found, str):
            log.error("tokenizer not loaded", model=name, reason=found, pause_s=PAUSE_S)
            self._pauses[name] = trio.current_time() + PAUSE_S
            raise not_loaded(choice, PAUSE_S)
        self._texts[name] = found
        return found

    async def _loaded(self, choice: Choice) -> _Text | str:
        """A model's tokenizer, or a sentence on why it cannot be loaded."""
        fault = await _in_thread(entry_fault, choice.entry)
        if fault is not None:
            return fault
        directory = choice.entry.directory
        failed = await self._engine.load(lambda: _know_family(directory))
        if failed is not None:
            return failed
        with trio.move_on_after(LIMIT_S):
            known = choice.metadata.context_tokens
            return await _in_thread(_load, directory, known, choice.settings.special_tokens)
        return f"the tokenizer in {directory} was not loaded within {LIMIT_S:g} seconds"


async def _in_thread(run: Callable[..., T], *arguments: object) -> T:
    return await trio.to_thread.run_sync(run, *arguments, abandon_on_cancel=True)


# --- on other threads ----------------------------------------------------------------------------


def _know_family(directory: str) -> str | None:
    from cairn.engine.mlx.tokenizer import know_family  # MLX, on the engine's thread

    try:
        know_family(directory)
    except Exception as error:  # a directory may be broken in any way
        return str(error) or type(error).__name__
    return None


def _load(directory: str, context_tokens: int, special_tokens: SpecialTokens) -> _Text | str:
    from cairn.engine.mlx.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(directory)
    except Exception as error:  # likewise
        return str(error) or type(error).__name__
    specials = None
    if special_tokens == "text":
        specials = specials_of(tokenizer, markers_of(tokenizer).texts)
    encoder = Encoder(tokenizer, max_bytes=_CACHE_BYTES, specials=specials)
    return _Text(tokenizer, encoder, bound_of(tokenizer), context_tokens)


def _tokens(text: _Text, command: Generate, tenant: str) -> PromptTokens:
    if command.conversation is not None:
        rendered = text.encoder.render(command.conversation)
        _check_bytes(text, text.encoder.plain(rendered))
        return PromptTokens(ids=text.encoder.encode(rendered, tenant=tenant))
    if isinstance(command.prompt, str):
        _check_bytes(text, command.prompt)
        return PromptTokens(ids=text.encoder.encode_raw(command.prompt))
    ids = command.prompt or ()
    return PromptTokens(ids=ids, text=text.tokenizer.decode(ids))


def _check_bytes(text: _Text, prompt: str) -> None:
    """
    Refuse a prompt that is too long whatever its tokens are.

    Raises:
        PromptTooLong: its bytes do not fit into as many tokens as there may be.
    """
    if text.bound is None or not text.context_tokens:
        return
    least = text.bound.least_tokens(prompt)
    if least >= text.context_tokens:
        raise PromptTooLong(least, text.context_tokens, by_bytes=True)
