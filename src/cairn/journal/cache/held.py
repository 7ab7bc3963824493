"""How many tokens and states are in memory, by the journal's state."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.journal.state import State


def tokens_held(state: State) -> int:
    """
    The tokens whose KV is in memory: those of blocks, and those in slabs of sessions that are in no
    full block in memory. Unused capacity and the slab of a shadow check do not count.
    """
    if state.model is None:
        return 0
    chunk = state.model.block_tokens
    alone = 0
    for session in state.sessions.values():
        if session.slab is not None:
            policy, start = state.model.policy, session.window_start
            let_go = range(policy.sinks, start) if policy and start else range(0)
            twice = 0
            for place, key in enumerate(session.slab_keys):
                if state.blocks[key].present:
                    begin, end = place * chunk, (place + 1) * chunk
                    gone = min(end, let_go.stop) - max(begin, let_go.start)
                    twice += chunk - max(0, gone)
            alone += session.cached_tokens - len(let_go) - twice
    return state.pool.block_tokens + alone


def states_held(state: State) -> int:
    """
    How many times the states of recurrent layers are in memory: in blocks, and at the ends of slabs
    if no such block has them.
    """
    model = state.model
    rule = model.checkpoints if model is not None else None
    if model is None or rule is None:
        return 0
    chunk = model.block_tokens
    found = sum(b.present and rule.at(b.start + chunk) for b in state.blocks.values())
    for session in state.sessions.values():
        if session.slab is not None and session.cached_tokens:
            end = len(session.slab_keys) * chunk == session.cached_tokens
            last = state.blocks[session.slab_keys[-1]] if session.slab_keys else None
            twice = end and rule.at(session.cached_tokens) and last is not None and last.present
            found += not twice
    return found


def tokens_in_slabs(state: State) -> Iterator[int]:
    """The number of tokens in each slab of a session that has any."""
    for session in state.sessions.values():
        if session.slab is not None and session.cached_tokens:
            yield session.cached_tokens
