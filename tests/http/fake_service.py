"""A scripted stand-in for the actors: what it replies is written down beforehand."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from cairn.actors.messages import (
    Accepted,
    Delta,
    Finished,
    Generate,
    Reply,
    ServerFacts,
    Statistics,
    TokenInfo,
    Waiting,
)
from cairn.journal.events import Event, Recorded

FACTS = ServerFacts(
    model="cairn/small-1",
    fingerprint="f" * 16,
    context_tokens=4096,
    chunk_tokens=64,
    decode_rows=4,
    kv_cache="float32",
    started_s=1_700_000_000,
    default_max_tokens=512,
    vocabulary_tokens=2000,
)

STATISTICS = Statistics(
    sessions={"idle": 3, "decoding": 1},
    queued=2,
    running=1,
    slabs=4,
    slabs_total=8,
    slab_bytes=400,
    slab_bytes_total=1000,
    blocks=5,
    block_bytes=500,
    block_bytes_total=5000,
    disk_blocks=6,
    disk_bytes=600,
    disk_bytes_total=6000,
    kv_live_bytes=390,
    journal_position=77,
    bugs=1,
    admission_bug=None,
    journal_full=False,
)

ACCEPTED = Accepted(
    request="req-1",
    session="sess-1",
    path="new_session",
    reason="cold_start",
    prompt_tokens=2048,
    cached_tokens=128,
    seed=42,
    created_s=1_700_000_100,
)

FINISHED = Finished(
    finish_reason="stop", prompt_tokens=2048, cached_tokens=128, completion_tokens=3
)


def token(token_id: int, text: str, logprob: float) -> TokenInfo:
    """A token whose likeliest alternatives are itself and one impossible one."""
    raw = text.encode()
    top = ((token_id, text, raw, logprob), (0, "<s>", b"<s>", float("-inf")))
    return TokenInfo(id=token_id, text=text, raw=raw, logprob=logprob, top=top)


DELTAS = (
    Delta(text="Grüße", tokens=(token(1, "Gr", -0.25), token(2, "üße", -0.5))),
    Delta(text="", tokens=(token(3, "", -0.75),)),
    Delta(text="!", tokens=(token(4, "!", -1.0),)),
)

ANSWER: tuple[Reply, ...] = (ACCEPTED, *DELTAS, FINISHED)

QUEUED = Waiting(queued=True, prefilled_tokens=0)
PREFILLING = Waiting(queued=False, prefilled_tokens=512)


class Hold:
    """A step of a script that ends when ``release`` is called; until then nothing comes."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        self.released = trio.Event()


Step = Reply | Exception | Hold


class FakeService:
    """
    Plays a script for each request.

    Attributes:
        scripts: played in order; the last one again and again.
        refusal: raised on entering, if set.
        commands: what was asked for.
        entered, left: how many requests were entered and left.
        leaves: set once a request was left.
    """

    def __init__(self, *scripts: Sequence[Step], refusal: Exception | None = None) -> None:
        self.facts = FACTS
        self.figures = STATISTICS
        self.scripts = deque(scripts or [ANSWER])
        self.refusal = refusal
        self.commands: list[Generate] = []
        self.observers: list[Callable[[Recorded], None]] = []
        self.entered = 0
        self.left = 0
        self.leaves = trio.Event()
        self.on_leaving: Exception | None = None
        self._position = 0

    def statistics(self) -> Statistics:
        """The figures that were set."""
        return self.figures

    def change(self, **figures: Any) -> None:
        """Set some of the figures."""
        self.figures = attrs.evolve(self.figures, **figures)

    def observe(self, observer: Callable[[Recorded], None]) -> None:
        """Take an observer."""
        self.observers.append(observer)

    def commit(self, *events: Event) -> None:
        """Tell events to the observers, as if they had been committed."""
        for event in events:
            self._position += 1
            recorded = Recorded(
                position=self._position,
                stream=event.stream,
                seq=self._position,
                event_id=f"event-{self._position}",
                time_us=0,
                event=event,
            )
            for observer in self.observers:
                observer(recorded)

    @asynccontextmanager
    async def generate(self, command: Generate) -> AsyncIterator[AsyncIterator[Reply]]:
        """Play the next script, within a nursery as the real one does."""
        self.commands.append(command)
        if self.refusal is not None:
            raise self.refusal
        script = self.scripts.popleft() if len(self.scripts) > 1 else self.scripts[0]
        self.entered += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                yield self._replies(script)
                nursery.cancel_scope.cancel()
            if self.on_leaving is not None:
                raise self.on_leaving
        finally:
            self.left += 1
            self.leaves.set()

    async def _replies(self, script: Sequence[Step]) -> AsyncIterator[Reply]:
        for step in script:
            await trio.lowlevel.checkpoint()
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Hold):
                step.reached.set()
                await step.released.wait()
                continue
            yield step
