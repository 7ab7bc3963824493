"""
What is held in memory by the journal's account: pure figures over the fold.
"""

from __future__ import annotations

from cairn.journal.state import State


def tokens_held(state: State) -> int:
    """
    The tokens whose KV is in memory: those of blocks, and those of sessions' slabs that lie in no
    block there. What a slab has besides, and the slab of a shadow check, are no tokens.
    """
    if state.model is None:
        return 0
    chunk = state.model.chunk_tokens
    alone = 0
    for session in state.sessions.values():
        if session.slab is not None:
            twice = sum(state.blocks[key].present for key in session.slab_keys)
            policy = state.model.policy
            let_go = session.window_start - policy.sinks if policy and session.window_start else 0
            alone += max(0, session.cached_tokens - let_go - twice * chunk)
    return state.pool.blocks * chunk + alone
