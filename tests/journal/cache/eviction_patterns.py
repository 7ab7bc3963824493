"""
Conversations that compete for memory, as events of the journal, to compare orders of eviction.

Each pattern is a list of turns: the conversation, and the keys of its prompt's blocks. They run
through the real fold and the real order; no engine and no actor takes part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs

from cairn.journal import events as ev
from cairn.journal.cache import eviction
from cairn.journal.cache.eviction_order import Order
from cairn.journal.state import Block, State, apply
from tests.support.journals import MODEL

SIZE = 10
"""Bytes of a block."""
TOKENS = 64
LONG = 10
"""Blocks of a conversation that does not grow."""
_DECODE_PASSES = 8

Turns = Sequence[tuple[str, tuple[str, ...]]]

_MODEL = attrs.evolve(
    MODEL, block_tokens=TOKENS, context_tokens=1 << 20, blocks_bytes=0, grain=TOKENS
)


class ByRecency(Order):
    """The control: of two uses of a block only the last counts."""

    def uses(self, block: Block) -> tuple[int, int | None]:
        """The last use alone."""
        last, _ = super().uses(block)
        return last, None


class Memory:
    """
    Memory for a number of blocks, in which conversations take turns.

    Attributes:
        state: the fold of all events so far.
        prompt_tokens: of all turns so far.
        reused_tokens: how many of them were reused.
    """

    def __init__(self, blocks: int, order: Callable[[State], Order] = Order) -> None:
        model = attrs.evolve(_MODEL, blocks_bytes=SIZE * blocks)
        self.state = State(model=model)
        self.prompt_tokens = self.reused_tokens = 0
        self._order = order(self.state)

    @property
    def ratio(self) -> float:
        """The share of the prompt tokens that was reused."""
        return self.reused_tokens / self.prompt_tokens

    def play(self, turns: Turns) -> Memory:
        """Serve one turn after the other. Changes the memory, and returns it."""
        for conversation, keys in turns:
            self._serve(conversation, keys)
        return self

    def _apply(self, event: ev.Event) -> None:
        before, position = self.state, self.state.position + 1
        seq = before.streams.get(event.stream, 0) + 1
        recorded = ev.Recorded(
            position=position,
            stream=event.stream,
            seq=seq,
            event_id=f"id-{position}",
            time_us=position,
            event=event,
        )
        self.state = apply(before, recorded)
        self._order.follow(before, self.state, event)

    def _serve(self, session: str, keys: tuple[str, ...]) -> None:
        known = self.state.blocks
        found = next(
            (at for at, key in enumerate(keys) if key not in known or not known[key].present),
            len(keys),
        )
        self.prompt_tokens += TOKENS * len(keys)
        self.reused_tokens += TOKENS * found
        request = f"r{self.state.position}"
        if session not in self.state.sessions:
            self._apply(
                ev.SessionOpened(
                    session=session, tenant="t", fingerprint="f", group=None, named=False
                )
            )
        self._apply(_received(session, request, keys))
        self._apply(_selected(session, request, found, self.state.position))
        for place in range(found, len(keys)):
            self._apply(_extended(session, request, "prefill", place))
            self._seal(session, keys, place)
        self._apply(_extended(session, request, "prefill", len(keys)))
        for _ in range(_DECODE_PASSES):
            self._apply(_extended(session, request, "decode", len(keys)))
        self._apply(
            ev.RequestFinished(
                session=session,
                request=request,
                finish_reason="stop",
                prompt_tokens=TOKENS * len(keys),
                cached_tokens=TOKENS * found,
                answer_tokens=0,
                completion_tokens=0,
            )
        )
        self._apply(ev.SessionSettled(session=session, canonical_tokens=0, complete=True))

    def _seal(self, session: str, keys: tuple[str, ...], place: int) -> None:
        known = self.state.blocks.get(keys[place])
        present = known is not None and known.present
        leaving: tuple[str, ...] | None = ()
        if not present:
            leaving = eviction.room_for_block(self.state, SIZE, order=self._order)
        for other in leaving or ():
            pool = self.state.pool
            self._apply(
                ev.BlockEvicted(
                    key=other,
                    bytes=SIZE,
                    memory_blocks=pool.blocks - 1,
                    memory_bytes=pool.block_bytes - SIZE,
                    reason="space",
                )
            )
        stored = leaving is not None
        pool, more = self.state.pool, int(stored and not present)
        self._apply(
            ev.BlockSealed(
                session=session,
                key=keys[place],
                parent=keys[place - 1] if place else None,
                digest=keys[place],
                start=TOKENS * place,
                end=TOKENS * (place + 1),
                bytes=SIZE,
                resealed=known is not None,
                stored=stored,
                memory_blocks=pool.blocks + more,
                memory_bytes=pool.block_bytes + SIZE * more,
            )
        )


def _received(session: str, request: str, keys: tuple[str, ...]) -> ev.RequestReceived:
    return ev.RequestReceived(
        session=session,
        request=request,
        protocol="openai",
        client=None,
        tenant="t",
        fingerprint="f",
        session_name=None,
        group=None,
        cache_prompt=True,
        cache_mode="full",
        base_request=None,
        base_parts=0,
        new_parts=(),
        base_tokens=0,
        new_ids=(),
        base_keys=0,
        new_keys=keys,
        prompt_tokens=TOKENS * len(keys),
        max_tokens=1,
        sampling={},
        seed=1,
        seed_given=False,
        thoughts=0,
        requested_model="none",
        ttl_s=None,
        grammar=None,
        words=None,
        waited_us=0,
        traceparent=None,
    )


def _selected(session: str, request: str, found: int, decided_at: int) -> ev.PathSelected:
    return ev.PathSelected(
        session=session,
        request=request,
        rules_version=1,
        decided_at=decided_at,
        path="continuation",
        reason=None,
        tokens_from_slab=0,
        blocks_from_slab=0,
        blocks_from_pool=found,
        partial_key=None,
        tokens_from_partial=0,
        reused_tokens=TOKENS * found,
        prewarmed_tokens=0,
        rerendered_tokens=0,
        nearest=None,
        diverged_part=None,
        diverged_token=None,
        diverged_text=None,
        diverged_from=None,
    )


def _extended(session: str, request: str, step: ev.Step, place: int) -> ev.CacheExtended:
    return ev.CacheExtended(
        session=session,
        request=request,
        step=step,
        start=TOKENS * place,
        end=TOKENS * (place + 1),
        input_hash="-",
        coverage=(),
        sampled=(),
        logprobs=(),
        duration_us=1,
    )


# --- patterns ------------------------------------------------------------------------------------

SYSTEM = tuple(f"system-{place}" for place in range(5))
"""The blocks of a system prompt that conversations share."""


def chain(name: str, blocks: int = LONG, shared: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The keys of a conversation's blocks, after those that it shares."""
    return shared + tuple(f"{name}-{place}" for place in range(blocks))


def turn(
    name: str, blocks: int = LONG, shared: tuple[str, ...] = ()
) -> tuple[str, tuple[str, ...]]:
    """A turn of a conversation."""
    return name, chain(name, blocks, shared)


def cyclic(conversations: int, rounds: int = 12) -> Turns:
    """Conversations that take turns."""
    return [turn(f"c{place}") for _ in range(rounds) for place in range(conversations)]


def cyclic_of_many_lengths(rounds: int = 12) -> Turns:
    """Conversations of 3 to 19 blocks that take turns."""
    lengths = (3, 19, 6, 13, 4, 8)
    return [turn(f"c{at}", blocks) for _ in range(rounds) for at, blocks in enumerate(lengths)]


def by_chance(conversations: int, skew: float, turns: int, seed: int) -> Turns:
    """The conversation of each turn is drawn; the n-th with a weight of 1 / n ** skew."""
    names = [f"c{place}" for place in range(conversations)]
    weights = [1 / (place + 1) ** skew for place in range(conversations)]
    return [turn(name) for name in random.Random(seed).choices(names, weights, k=turns)]


def long_among_single(most: int, seed: int) -> Turns:
    """A conversation that grows, and up to ``most`` single prompts between two of its turns."""
    draw, turns = random.Random(seed), list[tuple[str, tuple[str, ...]]]()
    for place in range(50):
        turns.append(turn("long", LONG + place // 2))
        turns += [turn(f"single-{place}-{at}", 6) for at in range(draw.randint(1, most))]
    return turns


def scan(seed: int) -> Turns:
    """Four conversations that take turns; after a while with single prompts between them."""
    draw, turns = random.Random(seed), list[tuple[str, tuple[str, ...]]]()
    for place in range(160):
        turns.append(turn(f"c{place % 4}"))
        more = draw.choice((0, 0, 1, 2)) if place > 40 else 0
        turns += [turn(f"single-{place}-{at}", 8) for at in range(more)]
    return turns


def scan_at_once() -> Turns:
    """Four conversations that take turns, interrupted by forty single prompts."""
    among = [turn(f"single-{place}", 8) for place in range(40)]
    return [*cyclic(4), *among, *cyclic(4)]


def growing(turns: int = 180) -> Turns:
    """Eight conversations with the same system prompt that take turns and grow with each."""
    return [turn(f"c{at % 8}", 4 + at // 16, SYSTEM) for at in range(turns)]


def growing_by_chance(turns: int, seed: int) -> Turns:
    """The same, but some have more turns than others."""
    draw, length, found = random.Random(seed), dict[int, int](), []
    for _ in range(turns):
        (at,) = draw.choices(range(8), [1 / (place + 1) for place in range(8)])
        length[at] = length.get(at, 7) + 1
        found.append(turn(f"c{at}", length[at] // 2, SYSTEM))
    return found


def single_after_system(turns: int = 180) -> Turns:
    """Single prompts with the same system prompt, beside three conversations that have it too."""
    found = []
    for place in range(turns):
        found.append(turn(f"single-{place}", 4, SYSTEM))
        if not place % 3:
            found.append(turn(f"c{place // 3 % 3}", LONG, SYSTEM))
    return found


def phases(conversations: int, turns: int, seed: int | None = None) -> Turns:
    """
    Conversations that are replaced by others after so many turns, six times. Within a phase they
    take turns, or are drawn by chance.
    """
    draw = random.Random(seed)
    return [
        turn(f"{phase}-{draw.randrange(conversations) if seed is not None else at % conversations}")
        for phase in range(6)
        for at in range(turns)
    ]


def sliding(turns: int, seed: int) -> Turns:
    """A few conversations at a time, most turns for the newest; each is replaced in the end."""
    draw = random.Random(seed)
    return [
        turn(f"c{max(at // 8 + draw.choice((0, 0, 0, 1, 2, 3, -3)), 0)}") for at in range(turns)
    ]
