"""What all sessions of a server share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:  # it holds these and calls none of them
    from cairn.actors.idle.activity import Activity
    from cairn.actors.memory import Memory
    from cairn.actors.other_blocks import OtherBlocks
    from cairn.actors.sequencer import Sequencer
    from cairn.actors.sessions.gathering import Gathering
    from cairn.actors.sessions.next_prompt import NextPrompt
    from cairn.actors.threads.engine import EngineThread
    from cairn.engine.contract import Detokenizer, Tokenizer
    from cairn.engine.reports import ModelFacts
    from cairn.journal.turns import Turns


@attrs.frozen(kw_only=True)
class SessionContext:
    """
    What all sessions share.

    Attributes:
        detokenizer: a streaming detokenizer to copy.
        secret: of the data directory; the tenants' secrets are derived from it.
        activity: which requests are in flight in the whole server.
        patience_s: how long a session waits after one answer, in total, for an idle server.
        next_prompt: predicts what the next prompt begins with; None if prewarming is off.
        slab_idle_s: how long an idle session keeps a slab whose content is also in blocks.
        ttl_s: the TTL of conversations and blocks if a client sets none, in seconds.
        other_blocks: what other nodes of the fleet have sealed.
        turns: the stored turns.
        gathering: the decode passes that are not appended yet.
    """

    sequencer: Sequencer
    engine: EngineThread
    memory: Memory
    facts: ModelFacts
    tokenizer: Tokenizer
    detokenizer: Detokenizer = attrs.field(repr=False)
    secret: bytes = attrs.field(repr=False)
    activity: Activity
    patience_s: float
    next_prompt: NextPrompt | None
    slab_idle_s: float
    ttl_s: int
    other_blocks: OtherBlocks
    turns: Turns
    gathering: Gathering
