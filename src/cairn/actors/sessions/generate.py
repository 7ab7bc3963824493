"""
Restore the prefix, prefill, decode: from the decision to the end of the answer. A client that
disconnects ends it at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import attrs
import trio

from cairn.actors.errors import FormatRefused, NoMemory
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.answer import Answer, into
from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.gathering import GatheredPasses
from cairn.actors.threads.engine import Decoding
from cairn.engine.answer.parts import AnswerParts
from cairn.engine.answer.text import AnswerText
from cairn.engine.drafts import Drafter
from cairn.engine.errors import GrammarDeadEnd
from cairn.engine.reports import DecodeRow, Drawn, DrawSpec, PassReport
from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.state import continues_text

_STAGES: Mapping[str, ev.CancelStage] = MappingProxyType(
    {
        "server_stopped": "server_stopped",
        "journal_stalled": "journal_stalled",
        "timed_out": "timed_out",
        "sibling_failed": "sibling_failed",
    }
)
"""Reasons to end a request that are recorded in the place of the step at which it ended."""


class Gone(Exception):
    """No client waits for the answer any more."""

    def __init__(self, stage: ev.CancelStage) -> None:
        self.stage: ev.CancelStage = stage

    @classmethod
    def of(cls, why: str, stage: ev.CancelStage) -> Gone:
        """
        Args:
            why: a ticket's ``gone``.
            stage: where the request was.
        """
        return cls(_STAGES.get(why, stage))


@attrs.frozen
class Generation:
    """
    The answer to one request that the session has claimed. Its methods are the steps, in order;
    each raises ``Gone`` if no client waits for the answer any more.
    """

    context: SessionContext
    cache: SessionCache
    ticket: Ticket

    async def restore_prefix(self) -> None:
        """
        Bring the slab to what the decision reuses: trim it or open one, and copy blocks into it.

        Raises:
            BugError: a block that was to be copied has been quarantined since. It is not copied,
                and the decision is not made again.
        """
        cache, prepared = self.cache, self.ticket.prepared
        path = cache.path
        keep = path.tokens_from_slab
        needed = len(prepared.prompt_ids) + prepared.max_tokens
        if cache.session.slab is not None and cache.session.slab.capacity_tokens < needed:
            await cache.release_slab("too small for the prompt and its answer")
        if cache.session.slab is None:
            await self._acquire_slab(prepared.capacity_tokens)
        if cache.session.cached_tokens > keep:
            await cache.trim(keep, "not shared with this request")
        keys = cache.request.prompt_keys[path.blocks_from_slab :][: path.blocks_from_pool]
        copies = cache.copies(keys, keep, path.partial_key, path.tokens_from_partial)
        if copies:
            last = copies[-1].keys

            def still_needed() -> bool:
                return self.ticket.gone is None and cache.chain_bug(last) is None

            if not await cache.share(self.ticket.id, copies, still_needed):
                self._check_client("prefill")
                bug = cache.chain_bug(last)
                assert bug is not None
                raise bug

    async def prefill(self) -> Drawn:
        """
        Run the canonical passes over the rest of the prompt. The first one computes the last row
        of a slab that is continued to the token again. Seals each full block of a prompt that is
        long enough to be cached.

        Returns:
            The first token.
        """
        cache = self.cache
        prompt = cache.request.prompt_ids
        draw = self._draw()
        indexed = self.context.facts.reusable and cache.is_indexed(len(prompt))
        checked = paths.row_to_check(self.context.sequencer.state, cache.path)
        drawn = None
        start = cache.session.cached_tokens
        while start < len(prompt):
            self._check_client("prefill")
            again = start - 1 == checked
            end = self.context.facts.pass_end(start, len(prompt), alone=self._alone(), again=again)
            try:
                report = await cache.prefill(
                    prompt[start:end],
                    draw if end == len(prompt) else None,
                    self.ticket.id,
                    again=prompt[start - 1] if again else None,
                )
            except GrammarDeadEnd as fault:
                raise self._not_held(fault) from fault
            self.ticket.prefilled_tokens = end
            if indexed:
                await self._seal(start, end)
            start, drawn = end, report.drawn
        assert drawn is not None
        self.ticket.prefilled.set()
        self._check_client("prefill")
        return drawn

    def _alone(self) -> bool:
        """
        Whether no other request waits for the next pass to end in order to have one itself: those
        that have joined this one wait for all its passes, and without a free row no other runs.
        """
        joined = paths.followers(self.context.sequencer.state, self.ticket.id)
        runnable = min(self.context.activity.in_flight, self.context.facts.decode_rows)
        return runnable - joined <= 1

    async def _seal(self, start: int, end: int) -> None:
        """Seal the blocks that a pass over ``[start, end)`` has made full."""
        cache, size = self.cache, self.cache.block_tokens
        for place in range(start // size, end // size):
            key, begin = cache.request.prompt_keys[place], place * size
            if cache.can_seal(key, begin):
                await cache.seal(key, begin, begin + size)
                # Its first rows may be those of a partial match.
                self.ticket.sealed_tokens += begin + size - max(begin, cache.path.reused_tokens)

    async def decode(self, first: Drawn) -> Answer:
        """
        Decode to the end of the answer, and stream text as it becomes certain.

        Args:
            first: the first token.
        """
        context, cache, ticket = self.context, self.cache, self.ticket
        command = ticket.prepared.command
        answer = Answer(
            ticket,
            cache.path,
            AnswerText(
                context.detokenizer, command.stop, goes_on=continues_text(ticket.prepared.chain)
            ),
            AnswerParts(ticket.prepared.form, name=ticket.id),
            context.tokenizer,
            context.facts.eos_ids,
            cache.append,
            cache.rows_of_texts,
        )
        complete = answer.take([first])
        answer.release()
        if not complete:
            decoding, reports = context.engine.decode(
                _rows(cache.slab_id, self._draw()),
                token=first.token,
                left=ticket.prepared.max_tokens - 1,
                ends=context.facts.eos_ids,
                drafter=self._drafter(first.token),
            )
            try:
                await self._follow(answer, decoding, reports)
            except GrammarDeadEnd as fault:
                raise self._not_held(fault) from fault
        return answer

    async def _follow(
        self,
        answer: Answer,
        decoding: Decoding,
        reports: trio.MemoryReceiveChannel[PassReport | BaseException | None],
    ) -> None:
        """Record passes and stream their tokens. Passes that gather are one batch."""
        passes = GatheredPasses(self.context.gathering, trio.current_time())
        ended, failure = False, None
        try:
            while not ended:
                batch: list[PassReport] = []
                with trio.move_on_at(passes.append_at):
                    ended, failure = into(batch, await reports.receive())
                    while not ended:
                        try:
                            ended, failure = into(batch, reports.receive_nowait())
                        except trio.WouldBlock:
                            break
                now = trio.current_time()
                if batch:
                    passes.add(batch, now)
                # Passes that ran when the answer ended are recorded too, and trimmed.
                answer.take([one for report in batch for one in report.all_drawn])
                over = ended or answer.ended or self.ticket.gone is not None
                if passes.any and (over or passes.append_at <= now):
                    gathered = passes.take(now)
                    answer.release(partial(self.cache.decoded, gathered, self.ticket.id))
                if failure is not None:
                    raise failure
                if over:
                    self.context.engine.stop(decoding)
        finally:
            if not ended:
                self.context.engine.stop(decoding)
                with trio.CancelScope(shield=True):
                    while not ended:
                        ended, _ = into([], await reports.receive())
        if not answer.ended:
            self._check_client("decode")

    async def _acquire_slab(self, capacity: int) -> None:
        """
        Open a slab. Without room, wait until the requests that came before have theirs, and one in
        progress ends. Refuses the request if no wait would help.
        """
        try:
            with self.context.memory.in_line() as is_first:
                await self._wait_slab(capacity, is_first)
        finally:
            if self.context.memory.slab_is_awaited:
                self.context.activity.changed()  # another one is the first in the line

    async def _wait_slab(self, capacity: int, is_first: Callable[[], bool]) -> None:
        while not (is_first() and await self.cache.acquire_slab(capacity)):
            # There is no await between this and the wait, so that no change is missed.
            memory = self.context.memory
            never = is_first() and not memory.slab_will_come
            if never or not memory.slab_can_fit(capacity):
                self.ticket.fail(
                    NoMemory(
                        f"a slab of {capacity} tokens does not fit into the server's memory for "
                        "sessions; ask for a smaller max_tokens, or ask the operator to raise "
                        "--pool-mb",
                        retry_after_s=5,
                    )
                )
                raise Gone("no_memory")
            if self.ticket.gone is None:
                await self.context.activity.wait_change()
            self._check_client("prefill")

    def _not_held(self, fault: GrammarDeadEnd) -> Gone:
        """Report to the client why its answer ends here."""
        self.ticket.fail(FormatRefused(f"after the text that was sent, {fault}", "answer"))
        return Gone("grammar_failed")

    def _draw(self) -> DrawSpec:
        command = self.ticket.prepared.command
        return DrawSpec.first(
            command.sampling,
            seed=self.ticket.prepared.seed,
            prompt_ids=self.cache.request.prompt_ids,
            top=command.top_logprobs or 0,
            matcher=self.ticket.prepared.matcher,
        )

    def _drafter(self, first: int) -> Drafter | None:
        """Drafts the tokens after the first one; None if there are to be no drafts."""
        facts, session = self.context.facts, self.cache.session
        if facts.without_drafts:
            return None
        drafter = Drafter(
            self.cache.request.prompt_ids,
            ends=facts.eos_ids,
            drafted=session.drafted_tokens,
            accepted=session.accepted_tokens,
        )
        drafter.take([first])
        return drafter

    def _check_client(self, stage: ev.CancelStage) -> None:
        """Go on only while the client waits."""
        if self.ticket.gone is not None:
            raise Gone.of(self.ticket.gone, stage)


def _rows(slab: int, draw: DrawSpec) -> Callable[[Sequence[int]], DecodeRow]:
    """
    A function that makes the row for the last of the next tokens of an answer. Called with each
    token once.
    """

    def row(tokens: Sequence[int]) -> DecodeRow:
        nonlocal draw
        draw = draw.after(*tokens)
        return DecodeRow(slab=slab, token=tokens[-1], draw=draw)

    return row
