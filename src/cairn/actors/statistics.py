"""The server at one moment, in numbers."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from cairn.actors.requests.messages import ContextUse, Statistics
from cairn.actors.sequencer import Sequencer
from cairn.actors.sessions.gathering import Gathering
from cairn.actors.threads.engine import EngineThread
from cairn.actors.threads.writer import JournalWriter
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.reports import ModelFacts
from cairn.journal.agents import Agent
from cairn.journal.cache.held import states_held, tokens_held, tokens_in_slabs
from cairn.journal.state import Session, State
from cairn.journal.tenants import session_name


def statistics_of(
    sequencer: Sequencer,
    writer: JournalWriter,
    engine: EngineThread,
    gathering: Gathering,
    *,
    text_cache_bytes: int,
    queued: int = 0,
    facts: ModelFacts | None = None,
    encoder: Encoder | None = None,
    degraded: Mapping[str, str] = MappingProxyType({}),
) -> Statistics:
    """
    The statistics of this moment, from journal, writer and engine. Changes nothing.

    Args:
        text_cache_bytes: the bytes of cached texts of the journal.
        queued: requests that wait for a session.
        facts: about the model, if one is loaded.
        encoder: over its tokenizer.
        degraded: the idle work that is not done, with the bug's id or the system's error.
    """
    state = sequencer.state
    sessions = collections.Counter(str(session.state) for session in state.sessions.values())
    model, memory = state.model, engine.memory
    return Statistics(
        sessions=dict(sessions),
        queued=queued,
        running=len(state.requests),
        slabs=state.pool.slabs,
        slabs_total=model.pool_slabs if model else 0,
        slab_bytes=state.pool.slab_bytes,
        slab_bytes_total=model.pool_bytes if model else 0,
        blocks=state.pool.blocks,
        block_bytes=state.pool.block_bytes,
        block_bytes_total=model.blocks_bytes if model else 0,
        disk_blocks=state.pool.disk_blocks,
        disk_bytes=state.pool.disk_bytes,
        disk_bytes_total=state.disk_budget,
        index_blocks=len(sequencer.order.found),
        kv_live_bytes=memory.slab_bytes + memory.block_bytes,
        kv_expected_bytes=_expected_bytes(state, facts) if facts is not None else 0,
        weights_bytes=memory.weights_bytes,
        active_bytes=memory.active_bytes,
        cache_bytes=memory.cache_bytes,
        journal_position=writer.committed,
        journal_head=str(writer.head),
        journal_checkpoint=str(writer.signed_head or ""),
        encoded_characters=encoder.encoded_characters if encoder else 0,
        cached_characters=encoder.cached_characters if encoder else 0,
        text_cache_bytes=text_cache_bytes + (encoder.cached_bytes if encoder else 0),
        bugs=len(state.faults),
        admission_bug=state.admission_bug,
        journal_stall=writer.stall,
        journal_log_bytes=writer.log_bytes,
        gather_delays=gathering.delays,
        degraded=degraded,
    )


def _expected_bytes(state: State, facts: ModelFacts) -> int:
    """What the tokens in slabs and blocks take by the model's shapes, each once."""
    if facts.growth is not None:
        return sum(facts.growth.bytes_at(tokens) for tokens in tokens_in_slabs(state))
    return tokens_held(state) * facts.kv_token_bytes + states_held(state) * facts.state_bytes


def contexts(
    state: State,
    agents: Iterable[Agent],
    context_of: Callable[[str], int],
    most: int,
    tenant: str,
) -> tuple[ContextUse, ...]:
    """
    How much of the context a tenant's conversations have filled, the last used one first.
    Conversations whose texts the journal no longer has are left out.

    Args:
        agents: the tenant's.
        context_of: returns the context of the model that answers a request for this name, in
            tokens.
        most: how many to return at most.
    """
    of_agents = {agent.session: agent for agent in agents}
    held = [
        (session, tokens)
        for session in state.sessions.values()
        if session.tenant == tenant
        and session.last is not None
        and (tokens := len(session.last.prompt_ids) + len(session.last.answer_ids))
    ]
    last = heapq.nlargest(most, held, key=lambda one: one[0].last_used)

    def left(session: Session, tokens: int) -> int:
        agent = of_agents.get(session.id)
        known = context_of(agent.model if agent is not None else "")
        return max(0, (agent.context(known) if agent is not None else known) - tokens)

    return tuple(
        ContextUse(session=session_name(session.id), tokens=tokens, left=left(session, tokens))
        for session, tokens in last
    )
