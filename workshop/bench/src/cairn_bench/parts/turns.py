"""
What a turn of a long conversation costs the decision thread: its events, decided, checked,
numbered, chained and folded as in a server, but not stored.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
from immutables import Map

from cairn.actors.sequencer import Sequencer
from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.keys import block_keys, ids_hash
from cairn.journal.ledger import Clock, Ledger
from cairn.journal.rows.codec import Row
from cairn.journal.state import Session, Slab, State, Turn
from cairn.journal.token_ids import shared
from cairn_bench.servers.asking import NoResult

STEPS: Final = ("begin", "answer", "settle")
_NEW_TOKENS: Final = 100
_VOCABULARY: Final = 4000
_ROOM_TOKENS: Final = 1 << 24
_LIFE_S: Final = 86_400  # the default of `ops serve`


class Conversation:
    """
    A conversation whose session has all its KV in a slab, and continues turn by turn: a prompt with
    some more tokens, an answer that fills a block, and the prewarmed beginning of the next prompt.
    """

    def __init__(
        self,
        state: State,
        session: Session,
        secret: bytes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            state: a fold in which the session is idle, with its blocks in memory.
            secret: the secret of their keys.
            clock: gives seconds.
        """
        assert state.model is not None and session.last is not None
        self._chunk = state.model.block_tokens
        self._secret = secret
        self._clock = clock
        self._took: dict[str, float] = {}
        self._drawn = random.Random(1)
        self._numbers = itertools.count(1)
        keys = session.last.prompt_keys
        ready = attrs.evolve(
            session,
            slab=Slab(id=1, capacity_tokens=_ROOM_TOKENS, bytes=1),
            cached_tokens=len(keys) * self._chunk,
            canonical_tokens=len(keys) * self._chunk,
            slab_keys=keys,
        )
        outside = Clock(new_id=self._new_id, now_us=lambda: 1_000_000, version="bench")
        ledger = Ledger(outside, state=attrs.evolve(state, sessions=Map({session.id: ready})))
        self._sequencer = Sequencer(ledger, _Nowhere())  # type: ignore[arg-type]  # has no thread
        self._id = session.id

    def turn(self) -> dict[str, float]:
        """
        Run the next turn; returns the seconds of each of its steps.

        Raises:
            NoResult: the session did not continue with all that its slab holds.
            BugError: the events are not those of a turn.
        """
        self._took = dict.fromkeys(STEPS, 0.0)
        last, held = self.last, len(self.session.slab_keys)
        ids = last.sequence + self._some(_NEW_TOKENS)
        received = self._received(last, ids)
        began_s = self._clock()
        self._sequencer.begin(received, None, str)
        self._took["begin"] += self._clock() - began_s
        request = self.session.request
        if request is None or request.path is None or request.path.blocks_from_slab != held:
            raise NoResult(f"a turn: not all of {held} blocks stayed in memory")
        self._answer(received.request, ids, held * self._chunk)
        self._settle()
        return self._took

    @property
    def session(self) -> Session:
        """The session's state."""
        return self._sequencer.session(self._id)

    @property
    def last(self) -> Turn:
        """The session's last turn."""
        last = self.session.last
        assert last is not None
        return last

    def _answer(self, request: str, ids: tuple[int, ...], start: int) -> None:
        """The passes over the rest of the prompt, an answer of a chunk's tokens, and its end."""
        answer = self._some(self._chunk)
        keys = self._keys(ids, self.last.prompt_keys)
        for begin in range(start, len(ids), self._chunk):
            rows = ids[begin : begin + self._chunk]
            end = begin + len(rows)
            self._extended(
                "answer", request, "prefill", rows, answer[:1] if end == len(ids) else ()
            )
            if len(rows) == self._chunk:
                self._sealed("answer", keys[begin // self._chunk])
        self._extended("answer", request, "decode", answer[:-1], answer[1:])
        self._append(
            "answer",
            ev.TokensEmitted(
                session=self._id,
                request=request,
                first=0,
                emitted=len(answer),
                ids=answer,
                text="",
            ),
        )
        self._append(
            "answer",
            ev.RequestFinished(
                session=self._id,
                request=request,
                finish_reason="stop",
                prompt_tokens=len(ids),
                cached_tokens=start,
                answer_tokens=len(answer),
                completion_tokens=len(answer),
            ),
        )

    def _settle(self) -> None:
        """Prewarm: compute the answer's last block, with which the next prompt will begin."""
        session, last = self.session, self.last
        kept = len(session.slab_keys)
        self._append(
            "settle",
            ev.CacheTrimmed(
                session=self._id,
                cached_tokens=session.cached_tokens,
                end=kept * self._chunk,
                coverage=((1, 0, kept * self._chunk),),
                reason="provisional",
            ),
        )
        full = len(last.sequence) // self._chunk
        ids = last.sequence[: full * self._chunk]
        keys = self._keys(ids, last.prompt_keys)
        self._append(
            "settle",
            ev.PrewarmStarted(
                session=self._id,
                next_role="user",
                rules_version=paths.RULES_VERSION,
                tokens=len(ids),
                base_tokens=len(ids),
                new_ids=(),
                base_keys=len(last.prompt_keys),
                new_keys=keys[len(last.prompt_keys) :],
                tokens_from_slab=kept * self._chunk,
                blocks_from_slab=kept,
                blocks_from_pool=0,
                partial_key=None,
                tokens_from_partial=0,
            ),
        )
        for place in range(kept, full):
            rows = ids[place * self._chunk : (place + 1) * self._chunk]
            self._extended("settle", None, "settle", rows, ())
            self._sealed("settle", keys[place])
        computed = (full - kept) * self._chunk
        self._append(
            "settle",
            ev.PrewarmFinished(session=self._id, tokens=len(ids), computed_tokens=computed),
        )
        self._append(
            "settle",
            ev.SessionSettled(session=self._id, canonical_tokens=len(ids), complete=True),
        )

    def _extended(
        self,
        step: str,
        request: str | None,
        kind: ev.Step,
        rows: tuple[int, ...],
        sampled: tuple[int, ...],
    ) -> None:
        start = self.session.cached_tokens
        self._append(
            step,
            ev.CacheExtended(
                session=self._id,
                request=request,
                step=kind,
                start=start,
                end=start + len(rows),
                input_hash=ids_hash(rows),
                coverage=((1, 0, start + len(rows)),),
                sampled=sampled,
                logprobs=(-1.0,) * len(sampled),
                duration_us=1,
            ),
        )

    def _sealed(self, step: str, key: str) -> None:
        session, pool = self.session, self._sequencer.state.pool
        self._append(
            step,
            ev.BlockSealed(
                session=self._id,
                key=key,
                parent=session.slab_keys[-1],
                digest="d",
                start=session.cached_tokens - self._chunk,
                end=session.cached_tokens,
                bytes=1,
                resealed=False,
                stored=True,
                memory_blocks=pool.blocks + 1,
                memory_bytes=pool.block_bytes + 1,
            ),
        )

    def _append(self, step: str, event: ev.Event) -> None:
        began_s = self._clock()
        self._sequencer.append(event)
        self._took[step] += self._clock() - began_s

    def _received(self, last: Turn, ids: tuple[int, ...]) -> ev.RequestReceived:
        session = self.session
        keys = self._keys(ids, last.prompt_keys)
        said = tuple((role, self._new_id(), self._new_id()) for role in ("assistant", "user"))
        return ev.RequestReceived(
            session=self._id,
            request=self._new_id(),
            protocol="bench",
            tenant=session.tenant,
            fingerprint=session.fingerprint,
            session_name=None,
            group=None,
            cache_prompt=True,
            base_request=last.request,
            base_parts=len(last.chain),
            new_parts=said,
            base_tokens=len(last.prompt_ids),
            new_ids=ids[len(last.prompt_ids) :],
            base_keys=len(last.prompt_keys),
            new_keys=keys[len(last.prompt_keys) :],
            prompt_tokens=len(ids),
            max_tokens=self._chunk,
            sampling={},
            seed=0,
            seed_given=True,
            requested_model="m",
            ttl_s=_LIFE_S,
            grammar=None,
            words=None,
            waited_us=0,
            traceparent=None,
            client=None,
            thoughts=0,
            cache_mode="full",
        )

    def _keys(self, ids: Sequence[int], known: Sequence[str]) -> tuple[str, ...]:
        session = self.session
        return block_keys(
            secret=self._secret,
            fingerprint=session.fingerprint,
            tenant=session.tenant,
            ids=ids,
            block_tokens=self._chunk,
            known=known,
        )

    def _some(self, count: int) -> tuple[int, ...]:
        return shared(self._drawn.choices(range(_VOCABULARY), k=count))

    def _new_id(self) -> str:
        return f"n{next(self._numbers)}"


class _Nowhere:
    """Replaces the journal's writer: stores nothing and never waits."""

    def submit(self, rows: Sequence[Row], recorded: Sequence[ev.Recorded]) -> int:
        """The receipt."""
        return rows[-1].position
