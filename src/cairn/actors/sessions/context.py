"""What all sessions of a server share."""

from __future__ import annotations

from typing import Any

import attrs

from cairn.actors.idle.activity import Activity
from cairn.actors.memory import Memory
from cairn.actors.sequencer import Sequencer
from cairn.actors.sessions.next_prompt import NextPrompt
from cairn.actors.threads.engine import EngineThread
from cairn.engine.prompt.template import Tokenizer
from cairn.engine.reports import ModelFacts
from cairn.journal.turns import Turns


@attrs.frozen(kw_only=True)
class SessionContext:
    """
    What all sessions share.

    Attributes:
        secret: the data directory's, from which those of tenants follow.
        detokenizer: a streaming detokenizer to copy.
        activity: which requests are in flight, in the whole server.
        patience_s: how long a session waits after one answer, in total, for moments without any.
        foresight: tells what the next prompt will begin with; None where that is not wanted.
        slab_idle_s: how long a session at rest keeps a slab that it can do without.
        ttl_s: the life of what is kept where a client says nothing of it, in seconds.
        turns: those that are kept.
    """

    sequencer: Sequencer
    engine: EngineThread
    memory: Memory
    facts: ModelFacts
    tokenizer: Tokenizer
    detokenizer: Any = attrs.field(repr=False)
    secret: bytes = attrs.field(repr=False)
    activity: Activity
    patience_s: float
    next_prompt: NextPrompt | None
    slab_idle_s: float
    ttl_s: int
    turns: Turns
