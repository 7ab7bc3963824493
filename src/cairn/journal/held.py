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
            policy, start = state.model.policy, session.window_start
            let_go = range(policy.sinks, start) if policy and start else range(0)
            twice = 0
            for place, key in enumerate(session.slab_keys):
                if state.blocks[key].present:
                    begin, end = place * chunk, (place + 1) * chunk
                    gone = min(end, let_go.stop) - max(begin, let_go.start)
                    twice += chunk - max(0, gone)
            alone += session.cached_tokens - len(let_go) - twice
    return state.pool.blocks * chunk + alone
