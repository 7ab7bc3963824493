"""INV-7: the tokens that are emitted, and the end of an answer."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.journal import events as ev
from cairn.journal.invariants.sentences import Violation, broken
from cairn.journal.repetition import repeats_at
from cairn.journal.state import OpenRequest, State


def emitted(state: State, event: ev.TokensEmitted) -> Iterator[Violation]:
    request = state.session(event.session).request
    assert request is not None
    if event.first != request.emitted:
        yield broken("INV-7", "tokens emitted out of order", request.emitted, event.first)
        return
    if event.emitted != len(event.ids):
        yield broken("INV-7", "other tokens emitted than counted", len(event.ids), event.emitted)
    made = request.sampled[event.first : event.first + len(event.ids)]
    if made != event.ids or not request.sampled:
        yield broken("INV-7", "tokens emitted that no pass made", made, event.ids)


def emitted_with(state: State, event: ev.CacheExtended) -> Iterator[Violation]:
    """Only decode steps release tokens, and no more than they and the passes before have made."""
    request, decodes = state.session(event.session).request, event.step == "decode"
    left = len(request.sampled) - request.emitted if request is not None else 0
    made = left + len(event.sampled) if decodes else 0
    if event.emitted > made or (event.text and not decodes):
        yield broken("INV-7", "tokens emitted that no pass made", f"<= {made}", event.emitted)


def finished(state: State, event: ev.RequestFinished) -> Iterator[Violation]:
    request = state.session(event.session).request
    assert request is not None and request.path is not None
    if not request.sampled:
        yield broken("INV-7", "an answer before the prompt has run", ">= 1 token", 0)
    if not request.emitted <= event.answer_tokens <= len(request.sampled):
        yield broken(
            "INV-7",
            "an answer of other tokens",
            f"{request.emitted} to {len(request.sampled)}",
            event.answer_tokens,
        )
    # Only its end token is not released, if it has one.
    held = event.answer_tokens - request.emitted
    if held > (event.finish_reason == "stop"):
        yield broken("INV-7", "an answer that was not released as a whole", 0, held)
    if event.answer_tokens > request.ask.max_tokens:
        most = request.ask.max_tokens
        yield broken("INV-7", "a longer answer than was asked for", most, event.answer_tokens)
    if event.prompt_tokens != len(request.prompt_ids):
        yield broken(
            "INV-7", "another prompt is billed", len(request.prompt_ids), event.prompt_tokens
        )
    if event.cached_tokens != request.path.reused_tokens:
        yield broken(
            "INV-7", "other reuse is reported", request.path.reused_tokens, event.cached_tokens
        )
    if event.completion_tokens != event.answer_tokens:
        yield broken(
            "INV-7", "another answer is billed", event.answer_tokens, event.completion_tokens
        )
    if event.finish_reason == "length" and event.answer_tokens != request.ask.max_tokens:
        yield broken(
            "INV-7",
            "an answer cut off at another length than was asked for",
            request.ask.max_tokens,
            event.answer_tokens,
        )
    yield from _repeated(request, event)


def _repeated(request: OpenRequest, event: ev.RequestFinished) -> Iterator[Violation]:
    """An answer with a guard ends where it repeats itself, and no other does."""
    answer = request.sampled[: event.answer_tokens]
    guarded = request.ask.sampling.get("repetition_guard", False)
    if any(token < 0 for token in answer):
        return  # placeholders of tokens that cannot be read
    at = repeats_at(answer) if guarded else None
    if event.finish_reason == "repetition" and at != event.answer_tokens:
        yield broken("INV-7", "an answer ended as a repetition that is none", at, len(answer))
    if at is not None and at < event.answer_tokens:
        yield broken("INV-7", "an answer that went on after a repetition", at, len(answer))
