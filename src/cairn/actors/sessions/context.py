"""What all sessions of a server share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs

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
        quiet: whether no request is under way in the whole server, from its preparation on. Asked
            on any thread.
        calm: waits until that is so.
        one_ended: waits until a request has ended, or somebody waits for one no more.
        patience_s: how long a session waits for that behind one answer, all in all.
        foresight: tells what the next prompt will begin with; None where that is not wanted.
        slab_idle_s: how long a session at rest keeps a slab that it can do without.
        ttl_s: the life of what is kept where a client says nothing of it, in seconds.
        turns: those that are kept.
        rested: is called when a session has done what it had to do.
    """

    sequencer: Sequencer
    engine: EngineThread
    memory: Memory
    facts: ModelFacts
    tokenizer: Tokenizer
    detokenizer: Any = attrs.field(repr=False)
    secret: bytes = attrs.field(repr=False)
    quiet: Callable[[], bool]
    calm: Callable[[], Awaitable[None]]
    one_ended: Callable[[], Awaitable[None]]
    patience_s: float
    next_prompt: NextPrompt | None
    slab_idle_s: float
    ttl_s: int
    turns: Turns
    rested: Callable[[], None] = attrs.field(repr=False)
