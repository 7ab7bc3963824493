"""
From the decision to the end of the answer: the slab is brought to what is reused, the rest of the
prompt is run, and the answer is decoded. A client that goes away ends it at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs
import trio

from cairn.actors.requests.messages import FormatRefused, NoMemory
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.answer import Answer, into
from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.threads.engine import Decoding
from cairn.engine.answer.parts import AnswerParts
from cairn.engine.answer.text import AnswerText
from cairn.engine.prompt.template import Message
from cairn.engine.reports import DecodeRow, Drawn, NotHeld, PassReport, Wanted
from cairn.engine.schedule import passes
from cairn.journal import events as ev
from cairn.journal import eviction

_STAGES: Mapping[str, ev.CancelStage] = MappingProxyType(
    {
        "server_stopped": "server_stopped",
        "journal_full": "journal_full",
        "timed_out": "timed_out",
        "sibling_failed": "sibling_failed",
    }
)
"""Why nobody waits any more, where that says more than the step at which it was seen."""


class Gone(Exception):
    """Nobody waits for the answer any more."""

    def __init__(self, stage: ev.CancelStage) -> None:
        self.stage: ev.CancelStage = stage


@attrs.frozen
class Answering:
    """
    The answer to one request that the session has taken. Its methods are the steps, in order; each
    raises ``Gone`` where nobody waits any more.
    """

    context: SessionContext
    cache: SessionCache
    ticket: Ticket

    async def restore_prefix(self) -> None:
        """
        Bring the slab to what the decision reuses: trim it, or open one, and share blocks into it.

        Raises:
            BugError: a block that was to be copied was quarantined since. What is decided is not
                decided again, and what is in doubt is not copied.
        """
        cache, prepared = self.cache, self.ticket.prepared
        path = cache.path
        keep = path.blocks_from_slab * cache.chunk
        needed = len(prepared.prompt_ids) + prepared.max_tokens
        if cache.session.slab is not None and cache.session.slab.capacity_tokens < needed:
            await cache.release_slab("too small for the prompt and its answer")
        if cache.session.slab is None:
            await self._acquire_slab(prepared.capacity_tokens)
        if cache.session.cached_tokens > keep:
            await cache.trim(keep, "not shared with this request")
        if path.blocks_from_pool:
            keys = cache.request.prompt_keys[path.blocks_from_slab :][: path.blocks_from_pool]

            def wanted() -> bool:
                return self.ticket.gone is None and cache.doubt(keys) is None

            if not await cache.share(self.ticket.id, keys, keep, wanted):
                self._look("prefill")
                bug = cache.doubt(keys)
                assert bug is not None
                raise bug

    async def prefill(self) -> Drawn:
        """
        Run the canonical passes over what is not there, sealing each full chunk of a prompt that is
        long enough for that.

        Returns:
            The first token.
        """
        cache = self.cache
        prompt = cache.request.prompt_ids
        wanted = self._wanted()
        indexed = self.context.facts.reusable and cache.is_indexed(len(prompt))
        drawn = None
        for start, end in passes(cache.session.cached_tokens, len(prompt), cache.chunk):
            self._look("prefill")
            try:
                report = await cache.prefill(
                    prompt[start:end], wanted if end == len(prompt) else None, self.ticket.id
                )
            except NotHeld as fault:
                raise self._not_held(fault) from fault
            self.ticket.prefilled_tokens = end
            if end - start == cache.chunk and indexed:
                key = cache.request.prompt_keys[start // cache.chunk]
                if cache.can_seal(key, start):
                    await cache.seal(key, start, end)
                    self.ticket.sealed_tokens += end - start
            drawn = report.drawn
        assert drawn is not None
        self.ticket.prefilled.set()
        self._look("prefill")
        return drawn

    async def answer(self, first: Drawn) -> Message:
        """
        Decode to the end of the answer, releasing text as it becomes certain.

        Args:
            first: the first token.

        Returns:
            The answer, as its client will send it back.
        """
        context, cache, ticket = self.context, self.cache, self.ticket
        command = ticket.prepared.command
        answer = Answer(
            ticket,
            cache.path,
            AnswerText(context.detokenizer, command.stop, goes_on=command.conversation is None),
            AnswerParts(ticket.prepared.form, name=ticket.id),
            context.tokenizer,
            context.facts.eos_ids,
            cache.append,
            cache.noted,
        )
        if not answer.take([first]):
            decoding, reports = context.engine.decode(
                _rows(cache.slab_id, self._wanted()),
                token=first.token,
                left=ticket.prepared.max_tokens - 1,
                ends=context.facts.eos_ids,
            )
            try:
                await self._follow(answer, decoding, reports)
            except NotHeld as fault:
                raise self._not_held(fault) from fault
        answer.finish()
        return answer.said

    async def _follow(
        self,
        answer: Answer,
        decoding: Decoding,
        reports: trio.MemoryReceiveChannel[PassReport | BaseException | None],
    ) -> None:
        """Record passes and release their tokens, those that came together as one."""
        ended = False
        try:
            while not ended:
                batch: list[PassReport] = []
                ended, failure = into(batch, await reports.receive())
                while not ended:
                    try:
                        ended, failure = into(batch, reports.receive_nowait())
                    except trio.WouldBlock:
                        break
                self.cache.decoded(batch, self.ticket.id)
                if failure is not None:
                    raise failure
                if answer.ended:
                    continue  # these passes were under way when the answer ended; they are trimmed
                drawn = [report.drawn for report in batch if report.drawn is not None]
                if answer.take(drawn) or self.ticket.gone is not None:
                    self.context.engine.stop(decoding)
        finally:
            if not ended:
                self.context.engine.stop(decoding)
                with trio.CancelScope(shield=True):
                    while not ended:
                        ended, _ = into([], await reports.receive())
        if not answer.ended:
            self._look("decode")

    async def _acquire_slab(self, capacity: int) -> None:
        """
        Open a slab. The first answer to a request is refused where there is no room; the others
        wait, as theirs is no larger than that of the first.
        """
        while not await self.cache.acquire_slab(capacity):
            # Nothing comes between that and the wait, so that no end is missed.
            state = self.context.sequencer.state
            if self.ticket.first is None or not eviction.slab_will_come(state):
                self.ticket.fail(
                    NoMemory(
                        f"a slab of {capacity} tokens does not fit beside those in use; "
                        "try again, or ask for a smaller max_tokens",
                        retry_after_s=5,
                    )
                )
                raise Gone("no_memory")
            if self.ticket.gone is None:
                await self.context.activity.wait_change()
            self._look("prefill")

    def _not_held(self, fault: NotHeld) -> Gone:
        """Tell the client that its answer ends here, and why."""
        self.ticket.fail(FormatRefused(f"behind what is written of it, {fault}", "answer"))
        return Gone("not_held")

    def _wanted(self) -> Wanted:
        command = self.ticket.prepared.command
        return Wanted.first(
            command.sampling,
            seed=self.ticket.prepared.seed,
            prompt_ids=self.cache.request.prompt_ids,
            top=command.top_logprobs or 0,
            matcher=self.ticket.prepared.matcher,
        )

    def _look(self, stage: ev.CancelStage) -> None:
        """Go on only while somebody waits."""
        if self.ticket.gone is not None:
            raise Gone(_STAGES.get(self.ticket.gone, stage))


def _rows(slab: int, wanted: Wanted) -> Callable[[int], DecodeRow]:
    """Makes the rows of an answer, each of the token that the one before it gave."""

    def row(token: int) -> DecodeRow:
        nonlocal wanted
        wanted = wanted.after(token)
        return DecodeRow(slab=slab, token=token, wanted=wanted)

    return row
