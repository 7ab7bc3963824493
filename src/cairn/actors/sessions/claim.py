"""
Claim, the first step of a request in its session: load blocks that it could reuse, then record that
the session takes the request and which path it is served by, in one append. If another request
computes blocks of its prompt at that moment, it joins that one instead, and its path is selected
when it has waited for these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from cairn.actors.errors import Broken
from cairn.actors.requests.messages import Accepted, Generate
from cairn.actors.requests.ticket import Ticket
from cairn.actors.sessions.cache import SessionCache
from cairn.actors.sessions.context import SessionContext
from cairn.actors.sessions.generate import Gone
from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.cache.adoption import may_adopt
from cairn.journal.explanations import explain
from cairn.journal.summaries import WORDS_MAX, first_words, is_of_client
from cairn.journal.tenants import session_name

if TYPE_CHECKING:  # SQLAlchemy is loaded with it, and only a fleet needs it
    from cairn.journal.rows.database.other_nodes import SealedRow


@attrs.frozen(kw_only=True)
class Claim:
    """
    Claims requests for one session.

    Attributes:
        group: the group that the session is opened in, if it is new.
        named: whether its client gave it its name.
    """

    context: SessionContext
    cache: SessionCache
    group: str | None
    named: bool

    async def claim(self, ticket: Ticket) -> int | None:
        """
        Claim a request if it is still this session's to serve.

        Returns:
            The receipt. None for a request that was refused, that its client has left, or that
            another session is to serve (``ticket.rerouted``).
        """
        sealed = await self._sealed_elsewhere(ticket)
        async with self.context.memory.eviction_lock:
            await self._load_blocks(ticket, sealed)
            if ticket.gone is not None:
                return None
            bug_id = self.context.sequencer.state.admission_bug
            if bug_id is not None:
                ticket.fail(Broken(bug_id))
                return None
            claimed = self._take(ticket)
        ticket.rerouted = claimed is None
        return claimed

    async def follow(self, ticket: Ticket, receipt: int) -> tuple[int, Accepted]:
        """
        Wait for the requests that this one joins, until its path is selected.

        Args:
            receipt: of the claim.

        Returns:
            The receipt of the decision, and the first reply to the client.

        Raises:
            Gone: no client waits for the answer any more.
            BugError: a bug found elsewhere has quarantined the session.
        """
        context, cache = self.context, self.cache
        while (bug := cache.quarantined_meanwhile()) is None and cache.request.path is None:
            if ticket.gone is not None:
                raise Gone.of(ticket.gone, "prefill")
            if context.sequencer.waits(cache.id):
                # There is no await between the look and this, so that no change is missed.
                await context.activity.wait_change()
                continue
            sealed = await self._sealed_elsewhere(ticket)
            async with context.memory.eviction_lock:
                await self._load(ticket, sealed)
                if self._may_decide(ticket):
                    receipt = context.sequencer.go_on(
                        cache.id, self._text, expected_seq=cache.seq + 1
                    )
                    cache.seq += 1
        if bug is not None:
            raise bug
        ticket.prefilled_tokens = cache.path.reused_tokens
        return receipt, self._accepted(ticket)

    def _may_decide(self, ticket: Ticket) -> bool:
        """Whether nothing has come between the end of a wait and the next decision."""
        meanwhile = ticket.gone is not None or self.cache.quarantined_meanwhile() is not None
        return not meanwhile and not self.context.sequencer.waits(self.cache.id)

    async def _sealed_elsewhere(self, ticket: Ticket) -> Mapping[str, Sequence[SealedRow]]:
        """The rows by which other nodes sealed blocks that the decision could reuse."""
        if not self.context.other_blocks.asks or ticket.gone is not None:
            return {}
        if not may_adopt(self.context.sequencer.state.rates):
            return {}
        chain, keys = self._chain(paths.chain_to_adopt, ticket), ticket.prepared.keys
        above = keys[: keys.index(chain[0])] if chain else ()
        return await self.context.other_blocks.sealed(chain, above)

    async def _load_blocks(self, ticket: Ticket, sealed: Mapping[str, Sequence[SealedRow]]) -> None:
        """Load blocks for a request that is still to be claimed."""
        ended = ticket.gone is not None or self.context.sequencer.state.admission_bug is not None
        if not ended and self._serves(ticket):
            await self._load(ticket, sealed)

    async def _load(self, ticket: Ticket, sealed: Mapping[str, Sequence[SealedRow]]) -> None:
        """Load blocks from files that the decision could reuse, also from those of other nodes."""
        context, prepared = self.context, ticket.prepared

        def still_needed() -> bool:
            return ticket.gone is None

        await context.memory.load(self._chain(paths.chain_to_load, ticket), still_needed)
        if sealed:
            keys, state = prepared.keys, context.sequencer.state
            sealed = context.memory.of_prompt(keys, sealed)
            chain = paths.adoptable(state, keys, self._chain(paths.chain_to_adopt, ticket), sealed)
            await context.memory.adopt(chain, sealed, keys, self._ttl_s(ticket), still_needed)

    def _chain(self, chosen: Callable[..., tuple[str, ...]], ticket: Ticket) -> tuple[str, ...]:
        """
        The blocks of a prompt that are to be read.

        Args:
            chosen: ``chain_to_load`` or ``chain_to_adopt``.
        """
        prepared = ticket.prepared
        return chosen(
            self.context.sequencer.state,
            self.cache.held,
            prepared.ask,
            prepared.keys,
            prepared.prompt_ids,
            len(prepared.prompt_ids) + prepared.max_tokens,
        )

    def _ttl_s(self, ticket: Ticket) -> int | None:
        """The TTL of what a request uses and leaves."""
        command = ticket.prepared.command
        if command.ttl_s is not None:
            return command.ttl_s
        return max(self.context.ttl_s, command.least_ttl_s)

    def _take(self, ticket: Ticket) -> int | None:
        """Record the request and the decision. None for another session's request."""
        context, cache, prepared = self.context, self.cache, ticket.prepared
        if not self._serves(ticket) or cache.is_quarantined:
            return None
        opened = None
        if not cache.opened:
            opened = ev.SessionOpened(
                session=cache.id,
                tenant=cache.tenant,
                fingerprint=prepared.ask.fingerprint,
                group=self.group,
                named=self.named,
            )
        cache.opened = True
        receipt = context.sequencer.begin(self._received(ticket), opened, self._text)
        cache.seq += 2 if opened is None else 3
        ticket.accepted, ticket.session = True, cache.id
        return receipt

    def _text(self, ids: tuple[int, ...]) -> str:
        return self.context.tokenizer.decode(ids)

    def _accepted(self, ticket: Ticket) -> Accepted:
        context, cache, prepared, path = self.context, self.cache, ticket.prepared, self.cache.path
        return Accepted(
            request=ticket.id,
            session=session_name(cache.id),
            model=context.facts.name,
            fingerprint=context.facts.fingerprint,
            path=path.path,
            reason=path.reason,
            prompt_tokens=len(prepared.prompt_ids),
            cached_tokens=path.reused_tokens,
            seed=prepared.seed,
            created_s=ticket.created_s,
            context_left=prepared.context_tokens - len(prepared.prompt_ids),
            explanation=self._explained() if prepared.command.explain else None,
        )

    def _explained(self) -> str:
        """The path in words."""
        state = self.context.sequencer.state
        model = state.model
        assert model is not None
        return explain(
            self.cache.request.ask,
            self.cache.path,
            block_tokens=model.block_tokens,
            min_cache_tokens=model.min_cache_tokens,
            grain=model.grain,
            cause=paths.cause_of_loss(state, self.cache.path),
        ).text

    def _serves(self, ticket: Ticket) -> bool:
        """Whether a request is still this session's to serve."""
        chosen = self.context.sequencer.choose(ticket.prepared.ask)
        return chosen == self.cache.id or (chosen is None and not self.cache.opened)

    def _received(self, ticket: Ticket) -> ev.RequestReceived:
        """The request, as its difference from the last one of the session."""
        prepared, command = ticket.prepared, ticket.prepared.command
        sessions = self.context.sequencer.state.sessions
        last = self.cache.session.last if self.cache.id in sessions else None
        base_tokens = paths.common_length(last.prompt_ids, prepared.prompt_ids) if last else 0
        base_keys = _common_parts(last.prompt_keys, prepared.keys) if last else 0
        base_parts = _common_parts(last.chain, prepared.chain) if last else 0
        return ev.RequestReceived(
            session=self.cache.id,
            request=ticket.id,
            protocol=command.protocol,
            client=command.client,
            tenant=ticket.tenant,
            fingerprint=prepared.ask.fingerprint,
            session_name=command.session_name,
            group=command.group,
            cache_prompt=command.cache_prompt,
            cache_mode=command.cache_mode,
            base_request=last.request if last else None,
            base_parts=base_parts,
            new_parts=prepared.chain[base_parts:],
            base_tokens=base_tokens,
            new_ids=prepared.prompt_ids[base_tokens:],
            base_keys=base_keys,
            new_keys=prepared.keys[base_keys:],
            prompt_tokens=len(prepared.prompt_ids),
            max_tokens=prepared.max_tokens,
            sampling=attrs.asdict(command.sampling),
            seed=prepared.seed,
            seed_given=command.seed is not None,
            requested_model=command.requested_model,
            grammar=prepared.grammar,
            thoughts=_thoughts(command),
            words=_words(command, is_new=last is None),
            ttl_s=self._ttl_s(ticket),
            waited_us=round(1e6 * (trio.current_time() - ticket.arrived)),
            traceparent=command.traceparent,
        )


def _thoughts(command: Generate) -> int:
    """How many messages of a request have the thinking of an answer."""
    messages = command.conversation.messages if command.conversation is not None else ()
    return sum(1 for one in messages if one.reasoning)


def _words(command: Generate, *, is_new: bool) -> str | None:
    """
    The first words of what a request asks. If its session is new, those of the conversation, too.
    """
    if command.conversation is None:
        return first_words(command.prompt) if isinstance(command.prompt, str) else None
    users = [one.content for one in command.conversation.messages if one.role == "user"]
    said = [text for text in users if not is_of_client(text)] or users
    if not said:
        return None
    if not is_new or len(said) == 1:
        return first_words(said[-1])
    return f"{first_words(said[0], WORDS_MAX // 2)} … {first_words(said[-1], WORDS_MAX // 2)}"


def _common_parts(one: Sequence[object], other: Sequence[object]) -> int:
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length
