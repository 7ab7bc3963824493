"""
Each invariant can fail, is caught at the event that breaks it, and takes exactly what it should out
of service.

``history`` is legal; a damage makes one of its events wrong, or replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.invariants import SENTENCES, check
from cairn.journal.invariants.memory import acquired
from cairn.journal.keys import ids_hash
from cairn.journal.paths import RULES_VERSION
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.export import read_export
from cairn.journal.state import EMPTY, State
from tests.journal.model import (
    BLOCK_BYTES,
    CHUNKS,
    FILE_BYTES,
    FP_A,
    FP_B,
    LAYERS,
    Driver,
    Talk,
    Violated,
    World,
    blocks_ahead,
    plain,
    rendered,
)
from tests.support.journals import Builder, healthy

HISTORIES = Path(__file__).parents[1] / "histories"
C = CHUNKS[FP_A]
SYSTEM = ("system", (30, 31, 32, 33, 34))
HELLO = ("user", (10, 11, 12))
OTHER = ("user", (18, 19, 18, 19, 18, 19))
THOUGHT = (90, 50, 51, 52)
SAID = ("assistant", THOUGHT)
MORE = ("user", (13, 14, 15, 16, 17))
LONG = tuple(range(60, 80))

Damage = Callable[[Driver, Any], ev.Event | None]


def bystander(driver: Driver) -> None:
    """A different session, in the middle of its answer."""
    driver.ask(Talk(tenant="t1", group="g9", name="by", parts=(MORE, SAID, OTHER)), answer=LONG)
    for _ in range(9):
        driver.step("by")


def history(driver: Driver) -> None:
    """
    A history with a bit of everything: s1 continues after an answer with a thought in it, s2 shares
    blocks and is cut off, blocks are evicted and sealed again, and n, a named session, diverges.
    """
    one, two = (SYSTEM, HELLO), (SYSTEM, HELLO, SAID, MORE)
    driver.start()
    bystander(driver)
    driver.serve(talk(*one), answer=THOUGHT)
    driver.serve(talk(*two), answer=LONG[:6])
    driver.serve(talk(SYSTEM, OTHER))
    driver.ask(talk(SYSTEM, OTHER, ("assistant", (50, 51, 52)), MORE))
    for _ in range(3):
        driver.step("s2")
    driver.cancelled.add("s2")
    driver.finish("s2")
    driver.serve(talk(*one), cache_prompt=False, answer=THOUGHT)
    driver.release("s2")
    driver.propose(ev.SessionClosed(session="s2", reason="forgotten"))
    driver.spill(driver.spillable()[0])
    driver.spill(driver.spillable()[0])
    driver.spill(next(key for key in driver.evictable() if key not in driver.files))
    driver.propose(ev.BlockSpillFailed(key=driver.spillable()[0], reason="No space left on device"))
    gone = next(key for key in driver.evictable() if key in driver.files)
    driver.evict(gone)
    driver.load(gone)
    driver.reject(next(key for key in sorted(driver.files) if key != gone), "digest")
    driver.drop(next(key for key in sorted(driver.files) if key != gone))
    driver.evict(next(key for key in driver.evictable() if key not in driver.files))
    driver.propose(ev.OperatorActed(action="note", detail="all is well"))
    driver.serve(talk(*one, name="n"))
    driver.serve(talk(OTHER, name="n"))
    # m's next prompt begins with two blocks of its slab, one of s1's, and one that is computed.
    driver.foresees = True
    driver.serve(talk(*one, name="m"), answer=(90, 50, 51, 52, 53, 54, 55, 56))


def talk(*parts: tuple[str, tuple[int, ...]], **of: Any) -> Talk:
    """A conversation of tenant t1."""
    return Talk(**{"tenant": "t1", "group": None, "name": None, "parts": parts, **of})


def driver_of() -> Driver:
    """A server with room for four slabs."""
    return Driver(pool_slabs=4, blocks_kept=40, files_kept=40, spare_tokens=60)


def but(kind: type[ev.Event], when: Callable[[Any], bool] | None = None, **changes: Any) -> Damage:
    """
    The first event of a kind (for which ``when`` holds), with fields changed; a change may be a
    function of the event.
    """

    def damage(driver: Driver, event: Any) -> ev.Event | None:
        if not isinstance(event, kind) or getattr(event, "session", None) == "by":
            return None
        if when is not None and not when(event):
            return None
        given = {
            name: change(event) if callable(change) else change for name, change in changes.items()
        }
        return attrs.evolve(event, **given)

    return damage


def instead(
    kind: type[ev.Event], other: Damage, when: Callable[[Any], bool] | None = None
) -> Damage:
    """Replace the first event of a kind (for which ``when`` holds)."""

    def damage(driver: Driver, event: Any) -> ev.Event | None:
        if but(kind, when)(driver, event) is None:
            return None
        return other(driver, event)

    return damage


def of(step: str) -> Callable[[Any], bool]:
    """Whether an event is a pass of this step."""
    return lambda event: bool(event.step == step)


def _last_prefill(event: Any) -> bool:
    return event.step == "prefill" and bool(event.sampled)


def _full_prefill(event: Any) -> bool:
    return event.step == "prefill" and not event.sampled


def _covered(*runs: tuple[int, int, int]) -> Callable[[Any], ev.Coverage]:
    """Runs of layers: (how many, start, how far from where they should end)."""
    return lambda event: tuple((n, start, event.end + off) for n, start, off in runs)


def _more(name: str, by: int = 1) -> Callable[[Any], int]:
    return lambda event: getattr(event, name) + by


def _begun(_: Any, e: Any) -> ev.PrewarmStarted:
    """A prewarm of nothing, in the session of an event."""
    return Begun(
        session=e.session,
        next_role="user",
        rules_version=RULES_VERSION,
        tokens=0,
        base_tokens=0,
        new_ids=(),
        base_keys=0,
        new_keys=(),
        tokens_from_slab=0,
        blocks_from_slab=0,
        blocks_from_pool=0,
        partial_key=None,
        tokens_from_partial=0,
    )


def _pass(driver: Driver, event: Any, start: int, end: int, **changes: Any) -> ev.Event:
    """A prefill pass of the session's open request, with the report it would have."""
    request = driver.state.session(event.session).request
    assert request is not None
    return ev.CacheExtended(
        **{
            "session": event.session,
            "request": request.ask.request,
            "step": "prefill",
            "start": start,
            "end": end,
            "input_hash": ids_hash(request.prompt_ids[start:end]),
            "coverage": ((LAYERS, 0, end),),
            "sampled": (),
            "logprobs": (),
            "duration_us": 1,
            **changes,
        }
    )


def _sealed(driver: Driver, event: Any, start: int, key: str) -> ev.Event:
    held = driver.state.session(event.session)
    return ev.BlockSealed(
        session=event.session,
        key=key,
        parent=held.slab_keys[-1] if held.slab_keys else None,
        digest="d" * 16,
        start=start,
        end=start + C,
        bytes=BLOCK_BYTES,
        resealed=False,
        stored=True,
        memory_blocks=driver.state.pool.blocks + 1,
        memory_bytes=driver.state.pool.block_bytes + BLOCK_BYTES,
    )


def _emitted(driver: Driver, event: Any, ids: tuple[int, ...]) -> ev.Event:
    request = driver.state.session(event.session).request
    assert request is not None
    return ev.TokensEmitted(
        session=event.session,
        request=request.ask.request,
        first=request.emitted,
        emitted=len(ids),
        ids=ids,
        text="too soon",
    )


def _finished(driver: Driver, event: Any) -> ev.Event:
    held = driver.state.session(event.session).request
    assert held is not None
    assert held.path is not None
    return ev.RequestFinished(
        session=event.session,
        request=held.ask.request,
        finish_reason="stop",
        prompt_tokens=len(held.prompt_ids),
        cached_tokens=held.path.reused_tokens,
        answer_tokens=0,
        completion_tokens=0,
    )


def _evicting(driver: Driver, event: Any, key: str) -> ev.Event:
    pool = driver.state.pool
    return ev.BlockEvicted(
        key=key,
        bytes=BLOCK_BYTES,
        memory_blocks=pool.blocks - 1,
        memory_bytes=pool.block_bytes - BLOCK_BYTES,
        reason="space",
    )


def _pinned(driver: Driver, event: Any) -> ev.Event:
    return _evicting(driver, event, min(key for keys in driver.state.pins.values() for key in keys))


def _gone(driver: Driver, event: Any) -> ev.Event | None:
    gone = [key for key, block in driver.state.blocks.items() if not block.present]
    return _evicting(driver, event, gone[0]) if gone else None


def _lost(driver: Driver) -> str:
    """A block that is neither in memory nor in a file."""
    blocks = driver.state.blocks.items()
    return next(key for key, b in blocks if not b.present and b.file_bytes is None)


def _filed(driver: Driver) -> str:
    """A block that is in memory and in a file."""
    blocks = driver.state.blocks.items()
    return next(key for key, b in blocks if b.present and b.file_bytes is not None)


def _spilling(driver: Driver, key: str) -> ev.Event:
    pool = driver.state.pool
    return ev.BlockSpilled(
        key=key,
        digest=driver.state.blocks[key].digest,
        bytes=FILE_BYTES,
        disk_blocks=pool.disk_blocks + 1,
        disk_bytes=pool.disk_bytes + FILE_BYTES,
    )


def _loading(driver: Driver, key: str) -> ev.BlockLoaded:
    pool = driver.state.pool
    return ev.BlockLoaded(
        key=key,
        digest=driver.state.blocks[key].digest,
        bytes=BLOCK_BYTES,
        memory_blocks=pool.blocks + 1,
        memory_bytes=pool.block_bytes + BLOCK_BYTES,
        duration_us=1,
    )


def _second_slab(driver: Driver, event: Any) -> ev.Event:
    pool = driver.state.pool
    return ev.SlabAcquired(
        session=event.session,
        slab=99,
        capacity_tokens=40,
        bytes=8,
        pool_slabs=pool.slabs + 1,
        pool_bytes=pool.slab_bytes + 8,
    )


def _received_again(driver: Driver, event: Any) -> ev.Event:
    request = driver.state.session(event.session).request
    assert request is not None
    return attrs.evolve(request.ask, request="r-other")


def _unsettled(driver: Driver, event: Any) -> ev.Event:
    return ev.SessionSettled(
        session=event.session, canonical_tokens=event.cached_tokens, complete=True
    )


def _two_faced(driver: Driver, event: Any) -> ev.Event:
    return attrs.evolve(event, request=driver.state.session("by").request.ask.request)  # type: ignore[union-attr]


def _other_tokens(event: Any) -> bool:
    return bool(event.reason == "other tokens")


def _provisional(event: Any) -> bool:
    return bool(event.reason == "provisional")


def _of_prewarm(event: Any) -> bool:
    """Whether an event is a pass or a share of what m prewarms."""
    return event.session == "m" and event.request is None


def _pass_ahead(driver: Driver, event: Any, start: int) -> ev.CacheExtended:
    """A settling pass of the right tokens, on whatever KV is there."""
    prewarm = driver.state.session(event.session).prewarm
    assert prewarm is not None
    return ev.CacheExtended(
        session=event.session,
        request=None,
        step="settle",
        start=start,
        end=start + C,
        input_hash=ids_hash(prewarm.ids[start : start + C]),
        coverage=((LAYERS, 0, start + C),),
        sampled=(),
        logprobs=(),
        duration_us=1,
    )


def _again(event: Any) -> bool:
    return bool(event.resealed)


def _based(event: Any) -> bool:
    return event.base_request is not None


def _edited(event: Any) -> bool:
    return event.base_request is not None and event.base_keys == 0


def _fresh(event: Any) -> bool:
    return event.base_request is None


def _goes_on(event: Any) -> bool:
    return bool(event.path == "continuation")


Ext, Trim, Seal, Share = ev.CacheExtended, ev.CacheTrimmed, ev.BlockSealed, ev.BlocksRestored
Rec, Sel, Emit, Fin = ev.RequestReceived, ev.PathSelected, ev.TokensEmitted, ev.RequestFinished
Acq, Rel, Evict, Note = ev.SlabAcquired, ev.SlabReleased, ev.BlockEvicted, ev.OperatorActed
Found, Spill, Load = ev.BlockFilesScanned, ev.BlockSpilled, ev.BlockLoaded
Reject, Drop = ev.BlockFileRejected, ev.BlockFileRemoved
Begun, Done, GivenUp = ev.PrewarmStarted, ev.PrewarmFinished, ev.PrewarmAbandoned

DAMAGES: dict[str, dict[str, Damage]] = {
    "INV-1": {
        "a layer one short in prefill": but(
            Ext, of("prefill"), coverage=_covered((1, 0, 0), (2, 0, -1))
        ),
        "a layer one short in decode": but(
            Ext, of("decode"), coverage=_covered((1, 0, -1), (2, 0, 0))
        ),
        "a layer one short in settling": but(
            Ext, of("settle"), coverage=_covered((2, 0, 0), (1, 0, -1))
        ),
        "a layer too far": but(Ext, of("decode"), coverage=_covered((2, 0, 0), (1, 0, 1))),
        "all layers short": but(Ext, coverage=_covered((LAYERS, 0, -1))),
        "a layer not measured": but(Ext, coverage=_covered((LAYERS - 1, 0, 0))),
        "a layer too many": but(Ext, coverage=_covered((LAYERS + 1, 0, 0))),
        "layers less than none": but(Ext, coverage=_covered((LAYERS + 1, 0, 0), (-1, 0, 0))),
        "nothing measured": but(Ext, coverage=()),
        "a layer short after sharing": but(Share, coverage=_covered((1, 0, -1), (2, 0, 0))),
        "a layer long after a trim": but(Trim, coverage=_covered((1, 0, 1), (2, 0, 0))),
        "shifted tokens in prefill": but(Ext, _full_prefill, input_hash=ids_hash((30, 31, 32, 33))),
        "other tokens in decode": but(Ext, of("decode"), input_hash=ids_hash((50,))),
        "other tokens in settling": but(Ext, of("settle"), input_hash=ids_hash((1, 2, 3, 4))),
        "other tokens than anticipated": but(Ext, _of_prewarm, input_hash=ids_hash((1, 2, 3, 4))),
        "a pass past what is anticipated": instead(
            Done, lambda d, e: attrs.evolve(_pass_ahead(d, e, e.tokens), input_hash=ids_hash(()))
        ),
        "more passes ahead than ran": but(Done, computed_tokens=_more("computed_tokens", C)),
        "fewer tokens prewarmed than recorded": but(Done, tokens=_more("tokens", -C)),
        "all ahead before it ran": instead(
            Ext,
            lambda d, e: Done(session="m", tokens=4 * C, computed_tokens=0),
            _of_prewarm,
        ),
        "given up after passes that did not run": instead(
            Ext,
            lambda d, e: GivenUp(session="m", reason="request", computed_tokens=C),
            _of_prewarm,
        ),
        "a gap before a pass": but(
            Ext, of("decode"), start=_more("end"), end=_more("end"), input_hash=ids_hash(())
        ),
        "a chunk cut in two": instead(
            Ext, lambda d, e: _pass(d, e, e.start, e.end - 1), _full_prefill
        ),
        "two chunks in one pass": instead(
            Ext, lambda d, e: _pass(d, e, e.start, e.end + C), _full_prefill
        ),
        "the chunk after the next": instead(
            Ext, lambda d, e: _pass(d, e, e.start + C, e.end + C), _full_prefill
        ),
        "a pass over nothing": instead(
            Ext, lambda d, e: _pass(d, e, e.start, e.start), _full_prefill
        ),
        "a settling pass too short": but(
            Ext,
            of("settle"),
            end=_more("end", -1),
            coverage=_covered((LAYERS, 0, -1)),
        ),
        "a decode step inside the prompt": but(
            Ext, lambda e: _full_prefill(e) and e.start == C, step="decode"
        ),
        "a decode step over nothing": but(
            Ext,
            of("decode"),
            end=lambda e: e.start,
            sampled=(),
            logprobs=(),
            input_hash=ids_hash(()),
            coverage=lambda e: ((LAYERS, 0, e.start),),
        ),
        "two tokens of one step": but(
            Ext, of("decode"), sampled=lambda e: (*e.sampled, 5), logprobs=(-1.0, -1.0)
        ),
        "a token of an inner chunk": but(Ext, _full_prefill, sampled=(5,), logprobs=(-1.0,)),
        "no token of the prompt's last pass": but(Ext, _last_prefill, sampled=(), logprobs=()),
        "a token of a settling pass": but(Ext, of("settle"), sampled=(5,), logprobs=(-1.0,)),
        "a draft in a prefill pass": but(Ext, of("prefill"), drafted=1),
        "more drafted than passes can": but(Ext, of("decode"), drafted=10_000),
        "more accepted than drafted": but(Ext, of("decode"), drafted=0, accepted=1),
        "all rows from drafts": but(
            Ext, of("decode"), drafted=9, accepted=lambda e: e.end - e.start
        ),
        "a log-probability missing": but(Ext, of("decode"), logprobs=()),
        "blocks restored after a gap": but(Share, start=_more("start", C)),
        "a trim from elsewhere": but(Trim, cached_tokens=_more("cached_tokens")),
        "a trim to a longer cache": but(
            Trim, end=_more("cached_tokens"), coverage=lambda e: ((LAYERS, 0, e.cached_tokens + 1),)
        ),
        "a block of the chunk before": but(
            Seal, lambda e: e.start > 0, start=_more("start", -C), end=_more("end", -C)
        ),
        "a block of half a chunk": but(Seal, start=_more("start", 2)),
        "at rest elsewhere": but(ev.SessionSettled, canonical_tokens=_more("canonical_tokens", C)),
        "at rest with decoded KV": instead(Trim, _unsettled, _provisional),
        "a settling pass on decoded KV": instead(
            Trim,
            lambda d, e: ev.CacheExtended(
                session=e.session,
                request=None,
                step="settle",
                start=e.cached_tokens,
                end=e.cached_tokens + C,
                input_hash=ids_hash(d.state.session(e.session).last.sequence[e.cached_tokens :]),  # type: ignore[union-attr]
                coverage=((LAYERS, 0, e.cached_tokens + C),),
                sampled=(),
                logprobs=(),
                duration_us=1,
            ),
            _provisional,
        ),
    },
    "INV-2": {
        "the window starts late in prefill": but(Ext, coverage=_covered((LAYERS, 1, 0))),
        "the window starts late in decode": but(
            Ext, of("decode"), coverage=_covered((LAYERS, 4, 0))
        ),
        "one layer's window": but(Ext, of("decode"), coverage=_covered((2, 0, 0), (1, 2, 0))),
        "the window moves in a trim": but(Trim, _provisional, coverage=_covered((LAYERS, 2, 0))),
        "the window moves when blocks are restored": but(
            Share, coverage=_covered((1, 4, 0), (2, 0, 0))
        ),
    },
    "INV-3": {
        "another digest when sealed again": but(Seal, _again, digest="0" * 16),
        "another digest for a prewarm": but(Share, _of_prewarm, digests=("0" * 16,)),
        "another key for a prewarm": but(
            Seal, lambda e: e.session == "m" and e.start == 3 * C, key="k" * 64
        ),
        "another digest when restored": but(Share, digests=lambda e: (*e.digests[:-1], "0" * 16)),
        "a digest missing": but(Share, digests=lambda e: e.digests[:-1]),
        "another parent": but(Seal, lambda e: e.start > 0, parent="another"),
        "no parent": but(Seal, lambda e: e.start > 0, parent=None),
        "another key in prefill": but(Seal, key="k" * 64),
        "another key in settling over the prompt": instead(
            Seal,
            lambda d, e: (
                attrs.evolve(e, key="k" * 64, resealed=False)
                if d.state.session(e.session).state == "settling"
                and e.end <= len(d.state.session(e.session).last.prompt_ids)  # type: ignore[union-attr]
                else None
            ),
        ),
        "sealed again and not said": but(Seal, _again, resealed=False),
        "sealed for the first time and said otherwise": but(
            Seal, lambda e: not e.resealed, resealed=True
        ),
        "of another size when sealed again": but(Seal, _again, bytes=_more("bytes")),
        "another digest when spilled": but(Spill, digest="0" * 16),
        "another digest when loaded": but(Load, digest="0" * 16),
        "of another size when loaded": but(
            Load, bytes=_more("bytes"), memory_bytes=_more("memory_bytes")
        ),
    },
    "INV-4": {
        "other reuse for a prewarm than the rules give": but(
            Begun, blocks_from_slab=_more("blocks_from_slab", -1)
        ),
        "more from the pool for a prewarm": but(Begun, blocks_from_pool=_more("blocks_from_pool")),
        "other rules for a prewarm": but(Begun, rules_version=_more("rules_version")),
        "more tokens prewarmed than recorded": but(Begun, new_ids=lambda e: (*e.new_ids, 1)),
        "base keys of an answer": but(
            Begun,
            new_keys=lambda e: e.new_keys[1:],
            base_keys=_more("base_keys"),
            tokens=_more("tokens", 0),
        ),
        "other blocks for a prewarm": but(Share, _of_prewarm, keys=("k" * 64,)),
        "another path": but(Sel, _goes_on, path="new_session", reason="cold_start"),
        "another reason": but(Sel, reason="shorter_history"),
        "fewer blocks from the slab": but(
            Sel,
            lambda e: e.blocks_from_slab,
            blocks_from_slab=_more("blocks_from_slab", -1),
            reused_tokens=_more("reused_tokens", -C),
        ),
        "more blocks from the pool": but(
            Sel, blocks_from_pool=_more("blocks_from_pool"), reused_tokens=_more("reused_tokens", C)
        ),
        "from the pool, not from the slab": but(
            Sel,
            lambda e: e.blocks_from_slab,
            tokens_from_slab=0,
            blocks_from_slab=0,
            blocks_from_pool=lambda e: e.blocks_from_slab,
        ),
        "another sum": but(Sel, reused_tokens=_more("reused_tokens", C)),
        "another count of rendered tokens": but(
            Sel, _goes_on, rerendered_tokens=_more("rerendered_tokens")
        ),
        "another neighbour": but(Sel, nearest="by"),
        "another part": but(Sel, lambda e: e.reason == "diverged", diverged_part="tools_changed"),
        "another place": but(
            Sel, lambda e: e.reason == "diverged", diverged_token=_more("diverged_token")
        ),
        "decided earlier": but(Sel, decided_at=_more("decided_at", -1)),
        "decided later": but(Sel, decided_at=_more("decided_at")),
        "other rules": but(Sel, rules_version=_more("rules_version")),
        "fewer blocks shared than decided": but(
            Share, keys=lambda e: e.keys[:-1], digests=lambda e: e.digests[:-1]
        ),
        "no blocks shared": but(Share, keys=(), digests=()),
        "more shared than the blocks hold": but(
            Share, end=_more("end", C), coverage=_covered((LAYERS, 0, C))
        ),
        "sharing ahead left out": instead(
            Share, lambda d, e: _pass_ahead(d, e, e.start), _of_prewarm
        ),
        "the first block shared left out": but(
            Share,
            lambda e: len(e.keys) > 1,
            keys=lambda e: e.keys[1:],
            digests=lambda e: e.digests[1:],
        ),
        "sharing left out": instead(Share, lambda d, e: _pass(d, e, e.start, e.start + C)),
        "the trim left out": instead(
            Trim,
            lambda d, e: _pass(
                d,
                e,
                e.cached_tokens,
                min(e.cached_tokens + C, d.state.session(e.session).request.ask.prompt_tokens),  # type: ignore[union-attr]
            ),
            _other_tokens,
        ),
        "a prompt built on another request": but(Rec, _based, base_request="r-none"),
        "a prompt built on nothing": but(Rec, _based, base_request=None),
        "a prompt of other length": but(Rec, prompt_tokens=_more("prompt_tokens")),
        "a key missing": but(Rec, _fresh, new_keys=lambda e: e.new_keys[:-1]),
        "a key too many": but(Rec, _fresh, new_keys=lambda e: (*e.new_keys, "k" * 64)),
        "a key of tokens that changed": but(
            Rec, _based, base_keys=_more("base_keys"), new_keys=lambda e: e.new_keys[1:]
        ),
        "base keys though the tokens changed": but(
            Rec, _edited, base_keys=1, new_keys=lambda e: e.new_keys[1:]
        ),
        "more base parts than the last request had": but(Rec, _based, base_parts=99),
        "another tenant's request": but(Rec, tenant="t2"),
        "another model's request": but(Rec, fingerprint=FP_B),
        "a name that is not the session's": but(Rec, _fresh, session_name="s9"),
        "the chain of another session": but(Rec, _based, base_parts=0),
    },
    "INV-5": {
        "a slab too many counted": but(Acq, pool_slabs=_more("pool_slabs")),
        "a slab's bytes not counted": but(Acq, pool_bytes=_more("pool_bytes", -1)),
        "a second slab": instead(Trim, _second_slab, _other_tokens),
        "a slab of half a block": but(Acq, capacity_tokens=_more("capacity_tokens")),
        "a slab longer than the context": but(Acq, capacity_tokens=1 << 20),
        "a block that is out of no window": but(Evict, reason="window"),
        "a full block that is superseded": but(Evict, reason="superseded"),
        "a file that is superseded": but(Drop, reason="superseded"),
        "a released slab still counted": but(Rel, pool_slabs=_more("pool_slabs")),
        "a released slab's bytes still counted": but(Rel, pool_bytes=_more("pool_bytes")),
        "another slab released": but(Rel, slab=_more("slab")),
        "a slab of another size released": but(Rel, bytes=_more("bytes")),
        "closed with its slab": instead(
            Rel, lambda d, e: ev.SessionClosed(session=e.session, reason="forgotten")
        ),
        "a block too many counted": but(Seal, memory_blocks=_more("memory_blocks")),
        "a block's bytes not counted": but(Seal, memory_bytes=_more("memory_bytes", -1)),
        "a block vanished": but(Seal, _again, stored=False),
        "a pinned block evicted": instead(Ext, _pinned, of("decode")),
        "a block evicted twice": instead(Note, _gone),
        "an evicted block still counted": but(Evict, memory_blocks=_more("memory_blocks")),
        "an evicted block's bytes still counted": but(Evict, memory_bytes=_more("memory_bytes")),
        "a block of another size evicted": but(Evict, bytes=_more("bytes", -1)),
        "a file found too many": but(Found, disk_blocks=1),
        "a file's bytes found too many": but(Found, disk_bytes=1),
        "a file too many counted": but(Spill, disk_blocks=_more("disk_blocks")),
        "a file's bytes not counted": but(Spill, disk_bytes=_more("disk_bytes", -1)),
        "a second file of a block": instead(Note, lambda d, e: _spilling(d, _filed(d))),
        "a file of a block not in memory": instead(Note, lambda d, e: _spilling(d, _lost(d))),
        "loaded from no file": instead(Note, lambda d, e: _loading(d, _lost(d))),
        "loaded though it is in memory": instead(Note, lambda d, e: _loading(d, _filed(d))),
        "a loaded block not counted": but(Load, memory_blocks=_more("memory_blocks", -1)),
        "a loaded block's bytes not counted": but(Load, memory_bytes=_more("memory_bytes", -1)),
        "a file was rejected that did not exist": instead(
            Note, lambda d, e: ev.BlockFileRejected(key=_lost(d), reason="digest", moved_to=None)
        ),
        "a file dropped that there was none": instead(
            Note,
            lambda d, e: ev.BlockFileRemoved(
                key=_lost(d),
                bytes=FILE_BYTES,
                disk_blocks=0,
                disk_bytes=0,
                reason="space",
            ),
        ),
        "a file of another size dropped": but(Drop, bytes=_more("bytes")),
        "a dropped file still counted": but(Drop, disk_blocks=_more("disk_blocks")),
        "a dropped file's bytes still counted": but(Drop, disk_bytes=_more("disk_bytes")),
    },
    "INV-6": {
        "a step out of order": instead(
            Trim, lambda d, e: ev.SessionClosed(session=e.session, reason="-")
        ),
        "decoding after the end": instead(
            Trim, lambda d, e: _pass_of_last(d, e, "decode"), _provisional
        ),
        "a block sealed while decoding": instead(
            Ext, lambda d, e: _sealed(d, e, 0, "k" * 64), of("decode")
        ),
        "a second request": instead(Ext, _received_again, of("decode")),
        "a second decision": instead(Acq, lambda d, e: d.selected(e.session)),
        "work before the decision": instead(
            Sel, lambda d, e: _pass(d, e, 0, C), lambda e: e.reason == "cold_start"
        ),
        "another request's pass": but(Ext, of("decode"), request="r-none"),
        "a pass of no request": but(Ext, of("prefill"), request=None),
        "an anticipation before the end": instead(
            Ext,
            _begun,
            of("decode"),
        ),
        "a prewarm started during another": instead(
            Ext,
            _begun,
            _of_prewarm,
        ),
        "at rest in the middle of an anticipation": instead(
            Ext,
            lambda d, e: ev.SessionSettled(
                session="m", canonical_tokens=d.state.session("m").cached_tokens, complete=False
            ),
            _of_prewarm,
        ),
        "all ahead that never began": instead(
            Begun, lambda d, e: Done(session=e.session, tokens=0, computed_tokens=0)
        ),
        "given up what never began": instead(
            Begun, lambda d, e: GivenUp(session=e.session, reason="request", computed_tokens=0)
        ),
        "render failed though it began": instead(
            Ext,
            lambda d, e: GivenUp(session="m", reason="render_failed", computed_tokens=0),
            _of_prewarm,
        ),
        "blocks shared for nothing": instead(
            Trim,
            lambda d, e: ev.BlocksRestored(
                session=e.session,
                request=None,
                start=e.cached_tokens,
                end=e.cached_tokens,
                keys=(),
                digests=(),
                coverage=((LAYERS, 0, e.cached_tokens),),
                duration_us=1,
            ),
            _provisional,
        ),
        "blocks restored for another prewarm": but(Share, _of_prewarm, request="r-none"),
        "a settling pass of a request": but(Ext, of("settle"), request="r-none"),
        "another request's end": but(Fin, request="r-none"),
        "another request's tokens": but(Emit, request="r-none"),
        "another request's call": instead(
            Emit,
            lambda d, e: ev.CallRejected(
                session=e.session, request="r-none", reason="truncated", text="", detail=""
            ),
            lambda e: e.first > 0,
        ),
        "opened twice": instead(
            Sel,
            lambda d, e: ev.SessionOpened(
                session=e.session, tenant="t1", fingerprint=FP_A, group=None, named=False
            ),
        ),
        "a request in two hands": instead(Rec, _two_faced),
        "an end without a request": instead(
            Trim,
            lambda d, e: ev.RequestCancelled(session=e.session, request="r1", stage="decode"),
            _provisional,
        ),
    },
    "INV-7": {
        "another token": but(Emit, ids=lambda e: (*e.ids[:-1], 99)),
        "a token left out": but(Emit, lambda e: e.first > 0, first=_more("first")),
        "a token twice": but(Emit, lambda e: e.first > 0, first=_more("first", -1)),
        "a token that is not made yet": but(Emit, ids=lambda e: (*e.ids, 50)),
        "a token that is not made yet, with a pass": but(
            Ext, of("decode"), emitted=_more("emitted", 2)
        ),
        "a token with a pass over the prompt": but(Ext, of("prefill"), emitted=1),
        "words with a pass of settling": but(Ext, of("settle"), text="too soon"),
        "a token before its pass": instead(
            Ext, lambda d, e: _emitted(d, e, e.sampled), of("decode")
        ),
        "words before the prompt has run": instead(
            Ext, lambda d, e: _emitted(d, e, ()), lambda e: e.step == "prefill" and e.start > 0
        ),
        "an answer before the prompt has run": instead(
            Ext, _finished, lambda e: e.step == "prefill" and e.start > 0
        ),
        "a longer answer than was made": but(Fin, answer_tokens=_more("answer_tokens")),
        "a shorter answer than was released": but(Fin, answer_tokens=_more("answer_tokens", -1)),
        "another prompt is billed": but(Fin, prompt_tokens=_more("prompt_tokens")),
        "other reuse is reported": but(Fin, cached_tokens=_more("cached_tokens", C)),
        "a longer answer is billed": but(Fin, completion_tokens=_more("completion_tokens")),
        "a shorter answer is billed": but(Fin, completion_tokens=_more("completion_tokens", -1)),
        "cut off before its length": but(
            Fin, lambda e: e.finish_reason == "stop", finish_reason="length"
        ),
        "cut off as a repetition": but(Fin, finish_reason="repetition"),
    },
}


def _prewarm_of_other_tokens(driver: Driver) -> ev.PrewarmStarted:
    """A conversation of s1 has ended, and what it prewarms differs from its first token on."""
    driver.start()
    session = driver.ask(talk(SYSTEM, HELLO))
    assert session == "s1"
    while driver.state.session("s1").state != "settling":
        driver.step("s1")
    driver.trim("s1", 2 * C, "provisional")
    return ev.PrewarmStarted(
        session="s1",
        next_role="user",
        rules_version=RULES_VERSION,
        tokens=3 * C,
        base_tokens=0,
        new_ids=tuple(range(3 * C)),
        base_keys=0,
        new_keys=driver.keys("t1", tuple(range(3 * C))),
        tokens_from_slab=0,
        blocks_from_slab=0,
        blocks_from_pool=0,
        partial_key=None,
        tokens_from_partial=0,
    )


def test_a_prewarm_pass_runs_on_kv_of_the_same_tokens():
    """
    The slab still holds the prompt, and the tokens of the pass are right: INV-1 detects it by the
    key.
    """
    driver = driver_of()
    begun = _prewarm_of_other_tokens(driver)
    driver.propose(begun)
    with pytest.raises(Violated) as caught:
        driver.propose(_pass_ahead(driver, begun, 2 * C))

    assert caught.value.outcome.bug is not None
    assert "INV-1" == caught.value.outcome.bug.invariant
    assert "a pass on rows of other tokens" in str(caught.value.outcome.bug)


def test_a_prewarm_is_not_longer_than_the_slab():
    """INV-4: a prewarm does not exceed its slab; breaking that affects no other session."""
    driver = driver_of()
    begun = _prewarm_of_other_tokens(driver)
    ids = tuple(range(100 * C))
    with pytest.raises(Violated) as caught:
        driver.propose(
            attrs.evolve(begun, tokens=100 * C, new_ids=ids, new_keys=driver.keys("t1", ids))
        )

    assert caught.value.outcome.bug is not None
    assert "INV-4" == caught.value.outcome.bug.invariant


def test_no_prewarm_without_an_answer():
    """INV-4: after a request that was cut off, it is unknown what the client will send."""
    driver = driver_of()
    driver.start()
    driver.ask(talk(SYSTEM, HELLO, MORE))
    for _ in range(3):
        driver.step("s1")
    driver.cancelled.add("s1")
    driver.step("s1")
    assert "settling" == driver.state.session("s1").state
    with pytest.raises(Violated) as caught:
        driver.propose(
            Begun(
                session="s1",
                next_role="user",
                rules_version=RULES_VERSION,
                tokens=0,
                base_tokens=0,
                new_ids=(),
                base_keys=0,
                new_keys=(),
                tokens_from_slab=0,
                blocks_from_slab=0,
                blocks_from_pool=0,
                partial_key=None,
                tokens_from_partial=0,
            )
        )

    assert caught.value.outcome.bug is not None
    assert "INV-4" == caught.value.outcome.bug.invariant


STORY = (SYSTEM, OTHER, SAID, MORE, SAID, OTHER)


def _copying(driver: Driver) -> tuple[str, ...]:
    """Session q has an empty slab, and these blocks are to be copied into it."""
    driver.start()
    driver.serve(talk(*STORY))
    driver.ask(talk(*STORY, name="q"))
    while "q" not in driver.slabs:
        driver.step("q")
    request = driver.state.session("q").request
    assert request is not None
    assert request.path is not None
    assert request.path.blocks_from_pool > 3
    return request.prompt_keys[: request.path.blocks_from_pool]


@pytest.mark.parametrize("most", [1, 2, 100])
def test_blocks_are_shared_in_parts(most: int):
    """In any number of parts, with steps of other sessions in between."""
    driver = driver_of()
    keys = _copying(driver)
    request = driver.state.session("q").request.ask.request  # type: ignore[union-attr]
    for begin in range(0, len(keys), most):
        driver.share("q", request, keys[begin : begin + most])
        driver.serve(talk(HELLO, name=f"r{begin}"))

    session = driver.state.session("q")
    assert (len(keys) * C, keys) == (session.cached_tokens, session.slab_keys)
    assert not driver.bugs


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("one left out", "other blocks were restored than decided"),
        ("one twice", "other blocks were restored than decided"),
        ("one too many", "other blocks were restored than decided"),
        ("nothing", "blocks were restored at another place"),
        ("a pass too soon", "other reuse than decided"),
    ],
)
def test_a_part_that_is_not_the_next_one(fault: str, broken: str):
    """INV-4: the first part is followed by the next one, until all of them are there."""
    driver = driver_of()
    keys = _copying(driver)
    request = driver.state.session("q").request.ask.request  # type: ignore[union-attr]
    ids = driver.state.session("q").request.prompt_ids  # type: ignore[union-attr]
    driver.share("q", request, keys[:2])
    steps: dict[str, Callable[[], None]] = {
        "one left out": lambda: driver.share("q", request, keys[3:]),
        "one twice": lambda: driver.share("q", request, keys[1:]),
        "one too many": lambda: driver.share("q", request, (*keys[2:], keys[0])),
        "nothing": lambda: driver.share("q", request, ()),
        "a pass too soon": lambda: driver.extend("q", request, "prefill", ids[2 * C : 3 * C]),
    }
    with pytest.raises(Violated) as caught:
        steps[fault]()

    assert caught.value.outcome.bug is not None
    assert "INV-4" == caught.value.outcome.bug.invariant
    assert broken in str(caught.value.outcome.bug)


def test_a_part_that_ends_without_states():
    """INV-1: if layers have states, a part ends at a block that contains them."""
    driver = Driver(pool_slabs=4, blocks_kept=40, spare_tokens=60, state_blocks=2)
    keys = _copying(driver)
    request = driver.state.session("q").request.ask.request  # type: ignore[union-attr]
    driver.share("q", request, keys[:2])
    with pytest.raises(Violated) as caught:
        driver.share("q", request, keys[2:3])

    assert caught.value.outcome.bug is not None
    assert "INV-1" == caught.value.outcome.bug.invariant
    assert "up to one without states" in str(caught.value.outcome.bug)


def test_prewarmed_tokens_count_once():
    """The first request that reuses prewarmed blocks reports so; a later one does not."""
    driver = driver_of()
    history(driver)
    said = ("assistant", (90, 50, 51, 52, 53, 54, 55, 56))
    driver.serve(talk(SYSTEM, HELLO, said, MORE, name="m"))
    driver.serve(talk(SYSTEM, HELLO, said, MORE, ("assistant", (50,)), MORE, name="m"))

    mine = [one.event for one in driver.recorded if isinstance(one.event, ev.PathSelected)]
    prewarmed = [event.prewarmed_tokens for event in mine if event.session == "m"]
    # The third request has a different text for the second answer, and reuses the block again.
    assert [0, C, 0] == prewarmed


def test_a_block_that_is_there_stays_what_it_was():
    """
    After a block that is gone, one in memory is prewarmed again. It came from a request, so its
    reuse does not count as a success of prewarm; the reuse of the block before it does.
    """
    driver = driver_of()
    driver.start()
    story = talk(SYSTEM, HELLO)
    driver.serve(story)
    ids = rendered(story.parts)[: 2 * C]
    first, second = driver.keys("t1", ids)
    driver.evict(first)
    driver.ask(talk(OTHER, name="m"))
    while driver.state.session("m").state != "settling":
        driver.step("m")
    driver.trim("m", 0, "provisional")
    driver.propose(
        Begun(
            session="m",
            next_role="user",
            rules_version=RULES_VERSION,
            tokens=2 * C,
            base_tokens=0,
            new_ids=ids,
            base_keys=0,
            new_keys=(first, second),
            tokens_from_slab=0,
            blocks_from_slab=0,
            blocks_from_pool=0,
            partial_key=None,
            tokens_from_partial=0,
        )
    )
    for place, key in enumerate((first, second)):
        driver.extend("m", None, "settle", ids[place * C :][:C])
        driver.seal("m", key)

    assert [C, 0] == [driver.state.blocks[key].prewarmed for key in (first, second)]
    driver.serve(talk(SYSTEM, HELLO, MORE))
    path = [one.event for one in driver.recorded if isinstance(one.event, ev.PathSelected)][-1]
    assert (2 * C, C) == (path.reused_tokens, path.prewarmed_tokens)
    assert [0, 0] == [driver.state.blocks[key].prewarmed for key in (first, second)]


def _pass_of_last(driver: Driver, event: Any, step: str) -> ev.Event:
    return ev.CacheExtended(
        session=event.session,
        request=None,
        step=step,  # type: ignore[arg-type]  # one of them
        start=event.cached_tokens,
        end=event.cached_tokens + 1,
        input_hash=ids_hash((52,)),
        coverage=((LAYERS, 0, event.cached_tokens + 1),),
        sampled=(5,),
        logprobs=(-1.0,),
        duration_us=1,
    )


CASES = [(invariant, name) for invariant, cases in DAMAGES.items() for name in cases]


@attrs.define
class Broken:
    """A history with one wrong event."""

    driver: Driver
    violated: Violated
    before: dict[str, Any]
    place: int

    @property
    def event(self) -> Any:
        """The wrong event."""
        return self.driver.recorded[self.place].event


def damaged(damage: Damage) -> Broken:
    """The history up to the point where the damage was detected."""
    driver = driver_of()
    done: list[ev.Event] = []

    def once(event: ev.Event) -> ev.Event:
        wrong = None if done else damage(driver, event)
        if wrong is None:
            return event
        done.append(wrong)
        return wrong

    driver.damage = once
    with pytest.raises(Violated) as caught:
        history(driver)
    driver.damage = lambda event: event
    place = len(driver.rows) - len(caught.value.outcome.rows)
    while driver.recorded[place].event != done[0]:
        place += 1
    before = plain(driver.states[place - 1]) if place else {}
    return Broken(driver=driver, violated=caught.value, before=before, place=place)


def test_the_history_is_legal():
    """
    Without a damage there are no violations, and the history has every kind of event that is
    damaged.
    """
    driver = driver_of()
    history(driver)
    driver.finish("by")

    assert [] == driver.bugs
    assert () == replay(driver.rows).findings


@pytest.mark.parametrize(("invariant", "name"), CASES)
def test_each_damage_is_caught(invariant: str, name: str):
    """
    The event is in the journal and has no effect. The violation follows at once, then what it takes
    out of service: the session, the blocks with their descendants, or admission.
    """
    broken = damaged(DAMAGES[invariant][name])
    outcome, driver = broken.violated.outcome, broken.driver
    assert outcome.bug is not None
    assert invariant == outcome.bug.invariant, outcome.bug

    wrong, fault, *rest = driver.recorded[broken.place :]
    assert isinstance(fault.event, ev.InvariantViolated)
    assert (wrong.position, outcome.bug.bug_id) == (fault.event.at_position, fault.event.bug_id)
    session = getattr(broken.event, "session", None)
    assert session == fault.event.session
    kinds = {
        "session": [ev.SessionQuarantined],
        "blocks": [ev.BlocksQuarantined],
        "admission": [ev.AdmissionClosed],
    }
    scope = SENTENCES[invariant][1]
    expected = kinds[scope] if session is not None or scope == "blocks" else []
    assert expected == [type(one.event) for one in rest]

    world = World()
    for recorded in driver.recorded:
        take = world.pass_over if recorded is wrong else world.take
        take(recorded)
    assert world.seen() == plain(driver.state)


@pytest.mark.unmeasured
@pytest.mark.parametrize(("invariant", "name"), CASES)
def test_nothing_else_is_touched(invariant: str, name: str):
    """
    Other sessions are unchanged, and the one that was answering finishes. The broken session can be
    brought to an end. New requests are served, unless the memory accounts do not add up.
    """
    broken = damaged(DAMAGES[invariant][name])
    driver, state = broken.driver, broken.driver.state
    session = getattr(broken.event, "session", None)

    for other, held in broken.before["sessions"].items():
        if other != session:
            assert held == plain(state)["sessions"][other]
    assert (invariant == "INV-5") == (state.admission_bug is not None)
    bugs = list(driver.bugs)
    driver.finish("by")
    if session in driver.state.sessions and session is not None:
        if (prewarm := driver.state.session(session).prewarm) is not None:
            computed = prewarm.computed_tokens
            driver.propose(GivenUp(session=session, reason="bug", computed_tokens=computed))
        if driver.state.session(session).slab is not None:
            driver.release(session)
        if driver.state.session(session).state == "settling":
            driver.propose(ev.SessionSettled(session=session, canonical_tokens=0, complete=False))
    newcomer = driver.ask(talk(SYSTEM, OTHER, SAID, HELLO))
    if invariant == "INV-5":
        assert newcomer is None
    else:
        assert newcomer is not None
        driver.finish(newcomer)
    assert bugs == driver.bugs
    assert 1 == len(bugs)


def _with_model(**changes: Any) -> Broken:
    """The history with a model whose budgets differ from those that engine and store use."""
    driver = driver_of()
    driver.damage = lambda event: (
        attrs.evolve(event, **changes) if isinstance(event, ev.ModelLoaded) else event
    )
    with pytest.raises(Violated) as caught:
        history(driver)
    place = len(driver.rows) - len(caught.value.outcome.rows)
    return Broken(driver=driver, violated=caught.value, before={}, place=place)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"pool_slabs": 1}, ev.SlabAcquired),
        ({"pool_bytes": 1500}, ev.SlabAcquired),
        ({"blocks_bytes": 3 * BLOCK_BYTES}, ev.BlockSealed),
        ({"blocks_max": 3}, ev.BlockSealed),
    ],
)
def test_budgets_are_not_exceeded(changes: dict[str, int], kind: type[ev.Event]):
    """A slab or block over the budget that the model was loaded with violates INV-5."""
    broken = _with_model(**changes)

    assert isinstance(broken.event, kind)
    assert "INV-5" == broken.violated.outcome.bug.invariant  # type: ignore[union-attr]


def test_the_budget_of_files_is_not_exceeded():
    """A file over the budget violates INV-5, and so does any file before there is a budget."""
    driver = driver_of()
    driver.damage = lambda event: (
        attrs.evolve(event, budget_bytes=FILE_BYTES) if isinstance(event, Found) else event
    )
    with pytest.raises(Violated) as caught:
        history(driver)
    assert "INV-5" == caught.value.outcome.bug.invariant  # type: ignore[union-attr]
    assert isinstance(caught.value.outcome.recorded[0].event, Spill)
    assert 1 == driver.state.pool.disk_blocks

    driver = driver_of()
    history(driver)
    driver.end_run("lost")
    driver.propose(ev.ServerStarted(boot="boot-2", cairn_version="0", settings={}))
    assert driver.state.pool.disk_blocks
    with pytest.raises(Violated) as caught:
        driver.propose(
            ev.BlockFilesScanned(budget_bytes=1, disk_blocks=1, disk_bytes=1, removed_files=0)
        )
    assert "INV-6" == caught.value.outcome.bug.invariant  # type: ignore[union-attr]


def test_no_request_is_received_after_admission_was_closed():
    """The request violates INV-5 too, and is not open."""
    driver = driver_of()
    driver.start()
    driver.serve(talk(SYSTEM, HELLO))
    (name,) = driver.state.sessions
    received = next(
        one.event for one in driver.recorded if isinstance(one.event, ev.RequestReceived)
    )
    damage = but(Rel, bytes=1)
    driver.damage = lambda event: damage(driver, event) or event
    with pytest.raises(Violated):
        driver.release(name)
    driver.damage = lambda event: event
    with pytest.raises(Violated) as caught:
        driver.propose(attrs.evolve(received, request="later"))

    assert caught.value.outcome.bug is not None
    assert "INV-5" == caught.value.outcome.bug.invariant
    assert "admission is closed" in str(caught.value.outcome.bug)
    assert not driver.state.requests


def test_a_quarantined_block_is_not_loaded():
    """A quarantined block is not loaded from its file."""
    driver = driver_of()
    history(driver)
    driver.finish("by")
    key = driver.loadable()[0] if driver.loadable() else _filed(driver)
    if driver.state.blocks[key].present:
        driver.evict(key)
    wrong = attrs.evolve(_loading(driver, key), digest="0" * 16)
    with pytest.raises(Violated):
        driver.propose(wrong)
    assert driver.state.blocks[key].bug_id is not None
    with pytest.raises(Violated) as caught:
        driver.propose(_loading(driver, key))
    assert "INV-3" == caught.value.outcome.bug.invariant  # type: ignore[union-attr]


def test_kv_past_the_end_of_its_slab():
    """A pass that wrote past the capacity of its slab violates INV-5."""
    damage = but(Acq, capacity_tokens=C)
    driver, done = driver_of(), False

    def once(event: ev.Event) -> ev.Event:
        nonlocal done
        wrong = None if done else damage(driver, event)
        done = done or wrong is not None
        return wrong or event

    driver.damage = once
    with pytest.raises(Violated) as caught:
        history(driver)

    first = caught.value.outcome.recorded[0].event
    assert isinstance(first, ev.CacheExtended)
    assert "INV-5" == caught.value.outcome.bug.invariant  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wrong",
    [
        ev.ServerStarted(boot="boot-2", cairn_version="0", settings={}),
        ev.ServerStopped(boot="boot-0", reason="signal"),
        ev.ServerLost(boot="boot-0"),
        ev.NodeTakenOver(token=2, by="operator"),
        ev.ModelUnloaded(fingerprint=FP_B, reason="-", active_bytes=0),
        ev.BlockEvicted(
            key="never sealed", bytes=1, memory_blocks=0, memory_bytes=0, reason="space"
        ),
        ev.BlockSpilled(key="never sealed", digest="d", bytes=1, disk_blocks=1, disk_bytes=1),
        ev.BlockSpillFailed(key="never sealed", reason="full"),
        ev.BlockLoaded(
            key="never sealed", digest="d", bytes=1, memory_blocks=1, memory_bytes=1, duration_us=1
        ),
        ev.BlockFileRejected(key="never sealed", reason="missing", moved_to=None),
        ev.BlockFileRemoved(
            key="never sealed", bytes=1, disk_blocks=0, disk_bytes=0, reason="space"
        ),
        ev.SessionClosed(session="missing", reason="-"),
        ev.ModelLoaded(
            name="second",
            fingerprint=FP_B,
            fields={},
            layers=1,
            block_tokens=4,
            decode_rows=1,
            context_tokens=8,
            reusable=True,
            pool_slabs=1,
            pool_bytes=1,
            blocks_bytes=1,
            blocks_max=0,
            directory="",
            adapter="",
            dtype="",
            kv_sinks=0,
            kv_window=0,
            kv_rows=0,
            min_cache_tokens=0,
            state_blocks=0,
            grain=4,
        ),
    ],
    ids=lambda event: event.kind,
)
def test_what_no_session_did_is_checked_too(wrong: ev.Event):
    """An impossible step of the server is recorded as INV-6, and affects no session."""
    driver = driver_of()
    history(driver)
    before = plain(driver.state)
    with pytest.raises(Violated) as caught:
        driver.propose(wrong)

    assert "INV-6" == caught.value.outcome.bug.invariant  # type: ignore[union-attr]
    after = plain(driver.state)
    for name in ("sessions", "blocks", "model", "boot", "pool", "admission_bug"):
        assert before[name] == after[name]
    driver.finish("by")


def test_a_trim_that_a_window_does_not_reach():
    """A slab that dropped tokens cannot be trimmed to where they would be attended to."""
    rows = list(read_export(HISTORIES / "windowed.jsonl"))
    before: list[State] = [EMPTY]
    trims: list[tuple[State, ev.Recorded]] = []

    def watch(recorded: ev.Recorded, state: State) -> None:
        if isinstance(recorded.event, ev.CacheTrimmed):
            trims.append((before[-1], recorded))
        before.append(state)

    replay(rows, watch=watch)
    past = 0
    for state, recorded in trims:
        event = recorded.event
        assert isinstance(event, ev.CacheTrimmed)
        start, model = state.session(event.session).window_start, state.model
        assert model is not None
        assert model.policy is not None
        end = model.block_tokens
        if not event.end or model.policy.reaches(start, end):
            continue
        past += 1
        wrong = attrs.evolve(event, end=end, coverage=((model.layers, start, end),))
        first, *_ = check(state, attrs.evolve(recorded, event=wrong))
        assert ("INV-2", model.policy.first(end)) == (first.invariant, int(first.expected))
        assert "trimmed to where tokens of the window are missing" == first.message
    assert past


def test_a_model_needs_chunks():
    """A model without chunks is refused before anything divides by their size."""
    driver = driver_of()
    driver.damage = lambda event: (
        attrs.evolve(event, block_tokens=0) if isinstance(event, ev.ModelLoaded) else event
    )
    with pytest.raises(Violated):
        driver.start()

    assert None is driver.state.model


def test_no_model_leaves_under_a_request():
    """Unloading a model while a request is open is a violation, and the model stays loaded."""
    driver = driver_of()
    history(driver)
    model = driver.state.model
    with pytest.raises(Violated) as caught:
        driver.end_run("unloaded")

    bug = caught.value.outcome.bug
    assert bug is not None
    assert "INV-6" == bug.invariant
    assert "a model was unloaded during a request" in str(bug)
    assert (model, True) == (driver.state.model, bool(driver.state.requests))


def test_no_request_without_a_model():
    """A request while no model is loaded is a violation, and leaves nothing."""
    driver = driver_of()
    history(driver)
    driver.finish("by")
    request = next(r.event for r in driver.recorded if isinstance(r.event, ev.RequestReceived))
    driver.end_run("unloaded")
    with pytest.raises(Violated) as caught:
        driver.propose(
            ev.SessionOpened(session="new", tenant="t1", fingerprint=FP_A, group=None, named=False),
            attrs.evolve(request, session="new", session_name=None),
        )

    assert "INV-4" == caught.value.outcome.bug.invariant  # type: ignore[union-attr]
    assert {} == dict(driver.state.requests)


def test_another_session_than_the_rules_choose():
    """A new session for a conversation that continues a different session violates INV-4."""
    driver = driver_of()
    driver.start()
    driver.serve(talk(SYSTEM, HELLO))
    driver.ask(talk(SYSTEM, HELLO, SAID, MORE))
    received = driver.state.session("s1").request.ask  # type: ignore[union-attr]
    driver.finish("s1")
    following = talk(SYSTEM, HELLO, SAID, MORE, SAID, OTHER)
    chain = driver.chain(following)
    with pytest.raises(Violated) as caught:
        driver.propose(
            ev.SessionOpened(session="new", tenant="t1", fingerprint=FP_A, group=None, named=False),
            attrs.evolve(
                received,
                session="new",
                request="r-new",
                base_request=None,
                base_parts=0,
                new_parts=chain,
                base_tokens=0,
                base_keys=0,
                prompt_tokens=2,
                new_ids=(1, 2),
                new_keys=(),
            ),
        )

    bug = caught.value.outcome.bug
    assert bug is not None
    assert ("INV-4", "another session serves than the rules choose") == (bug.invariant, bug.message)
    assert "quarantined" == driver.state.session("new").state
    assert "idle" == driver.state.session("s1").state


def test_a_request_is_in_one_hand():
    """A request id that another session is serving is taken; that session keeps its request."""
    broken = damaged(DAMAGES["INV-6"]["a request in two hands"])

    assert isinstance(broken.event, ev.RequestReceived)
    assert "by" == broken.driver.state.requests[broken.event.request]


def _decoded_to_a_boundary() -> Driver:
    """
    A session that has just ended an answer, and whose KV reaches the end of a chunk only by
    decoding.
    """
    driver = driver_of()
    driver.start()
    prompt = ("user", (10, 11, 12, 13))
    name = driver.ask(talk(prompt), answer=(50, 51, 52))
    assert name is not None
    while driver.state.session(name).state != "decoding" or driver.state.requests:
        before = driver.slabs[name].rows if name in driver.slabs else []
        if len(before) == 2 * C:
            break
        driver.step(name)
    return driver


def test_kv_that_decoding_made_cannot_be_sealed():
    """
    Decoded rows fill a chunk to its end. Their bits differ from canonical ones, and a sealed block
    would pass them on.
    """
    driver = _decoded_to_a_boundary()
    session = driver.state.session("s1")
    assert (2 * C, 6) == (session.cached_tokens, session.canonical_tokens)
    driver.propose(ev.RequestCancelled(session="s1", request="r1", stage="decode"))
    key = driver.keys("t1", (*driver.state.session("s1").last.prompt_ids, 50, 51))[1]  # type: ignore[union-attr]  # it has one
    with pytest.raises(Violated) as caught:
        driver.propose(_sealed(driver, driver.recorded[-1].event, C, key))

    bug = caught.value.outcome.bug
    assert bug is not None
    assert ("INV-1", "a block of KV that is not canonical") == (bug.invariant, bug.message)
    assert key not in driver.state.blocks


def test_a_prewarm_seals_no_block_past_its_prompt():
    """The slab was settled further than the next prompt goes, so no key is known for the block."""
    builder = Builder()
    builder.start()
    prompt, answer = tuple(range(11, 21)), (21, 22, 23)
    for event in builder.steps("s1", "r1", ["Hello"], prompt, answer):
        if isinstance(event, ev.SessionSettled):
            break
        builder.propose(event)
    builder.propose(builder.extended("s1", None, "settle", (8, 12), (*prompt, *answer)[8:12], ()))
    session = builder.ledger.state.session("s1")
    assert session.last is not None
    from_slab, from_pool = blocks_ahead(builder.ledger.state, session, session.last.prompt_keys[:1])
    builder.propose(
        ev.PrewarmStarted(
            session="s1",
            next_role="user",
            rules_version=RULES_VERSION,
            tokens=4,
            base_tokens=4,
            new_ids=(),
            base_keys=1,
            new_keys=(),
            tokens_from_slab=from_slab * 4,
            blocks_from_slab=from_slab,
            blocks_from_pool=from_pool,
            partial_key=None,
            tokens_from_partial=0,
        )
    )
    assert builder.bug is None
    state = builder.ledger.state
    builder.propose(
        ev.BlockSealed(
            session="s1",
            key="e" * 64,
            parent=state.session("s1").slab_keys[-1],
            digest="d" * 16,
            start=8,
            end=12,
            bytes=BLOCK_BYTES,
            resealed=False,
            stored=True,
            memory_blocks=state.pool.blocks + 1,
            memory_bytes=state.pool.block_bytes + BLOCK_BYTES,
        )
    )
    bug = builder.bug
    assert bug is not None
    assert ("INV-3", "a block past the prompt") == (bug.invariant, bug.message)


def test_nothing_canonical_is_built_on_what_is_not():
    """A settling pass that starts at a chunk boundary, but on decoded rows, is a violation."""
    driver = driver_of()
    driver.start()
    driver.ask(talk(("user", (10, 11, 12, 13))), answer=(50, 51, 52, 53, 54, 55, 56))
    while driver.state.session("s1").cached_tokens < 3 * C:
        driver.step("s1")
    if driver.state.session("s1").request is not None:
        driver.propose(
            ev.RequestFinished(
                session="s1",
                request="r1",
                finish_reason="stop",
                prompt_tokens=6,
                cached_tokens=0,
                answer_tokens=7,
                completion_tokens=7,
            )
        )
    driver.trim("s1", 2 * C, "not far enough")
    assert 6 == driver.state.session("s1").canonical_tokens
    last = driver.state.session("s1").last
    assert last is not None
    with pytest.raises(Violated) as caught:
        driver.extend("s1", None, "settle", last.sequence[2 * C : 3 * C])

    bug = caught.value.outcome.bug
    assert bug is not None
    assert ("INV-1", "a canonical pass on KV that is not") == (bug.invariant, bug.message)


def test_no_token_comes_of_a_pass_over_nothing():
    """If a prompt ends at the end of a chunk, an empty pass there draws no second token."""
    driver = driver_of()
    driver.start()
    driver.ask(talk(("user", (10, 11))))
    while driver.state.session("s1").cached_tokens < C:
        driver.step("s1")
    with pytest.raises(Violated) as caught:
        driver.propose(
            _pass(driver, driver.recorded[-1].event, C, C, sampled=(51,), logprobs=(-1.0,))
        )

    assert "INV-1" == caught.value.outcome.bug.invariant  # type: ignore[union-attr]


def test_doubt_goes_down_to_the_descendants():
    """A second digest quarantines the block and all that are built on it, and no others."""
    broken = damaged(DAMAGES["INV-3"]["another digest when sealed again"])
    state = broken.driver.state
    doubted = {key for key, block in state.blocks.items() if block.bug_id is not None}

    root = broken.event.key
    expected = {root}
    while True:
        children = {key for key, block in state.blocks.items() if block.parent in expected}
        if children <= expected:
            break
        expected |= children
    assert expected == doubted
    assert 1 < len(doubted) < len(state.blocks)
    held = broken.driver.ask(talk(SYSTEM, OTHER))
    assert held is not None
    assert 0 == state.session("by").request.path.reused_tokens  # type: ignore[union-attr]
    path = broken.driver.state.session(held).request.path  # type: ignore[union-attr]
    assert path is not None
    assert 0 == path.reused_tokens
    going = talk(SYSTEM, HELLO, SAID, MORE, ("assistant", LONG[:6]), OTHER)
    assert root in broken.driver.state.session("s1").slab_keys
    assert "s1" == broken.driver.ask(going)
    path = broken.driver.state.session("s1").request.path  # type: ignore[union-attr]
    assert path is not None
    assert 0 == path.reused_tokens
    broken.driver.finish("s1")


def test_doubt_stays():
    """A quarantined block stays so when it is sealed again with its original digest."""
    broken = damaged(DAMAGES["INV-3"]["another digest when sealed again"])
    driver, key = broken.driver, broken.event.key
    driver.serve(talk(SYSTEM, HELLO), cache_prompt=False)
    last = next(
        recorded.event
        for recorded in reversed(driver.recorded)
        if isinstance(recorded.event, ev.BlockSealed) and recorded.event.key == key
    )

    assert driver.state.blocks[key].digest == last.digest
    assert 1 == len(driver.bugs)
    assert driver.bugs[0] == driver.state.blocks[key].bug_id


@pytest.mark.unmeasured
@pytest.mark.parametrize(("invariant", "name"), CASES)
def test_replay_finds_the_same(invariant: str, name: str):
    """
    Replaying the rows breaks the same invariant at the same row, even if the violation was not
    recorded. The resulting state is the ledger's.
    """
    broken = damaged(DAMAGES[invariant][name])
    driver = broken.driver
    driver.finish("by")
    report = replay(driver.rows)

    assert driver.state == report.state
    (finding,) = report.findings
    assert (driver.bugs[0], invariant) == (finding.bug_id, finding.invariant)
    assert driver.rows[broken.place].position == finding.position
    assert (True, True) == (finding.recorded, finding.reproduced)

    (unrecorded,) = replay(driver.rows[: broken.place + 1]).findings
    assert (invariant, finding.position) == (unrecorded.invariant, unrecorded.position)
    assert (False, True) == (unrecorded.recorded, unrecorded.reproduced)
    assert (finding.expected, finding.actual) == (unrecorded.expected, unrecorded.actual)


def test_a_session_drafts_only_while_that_pays() -> None:
    """A draft of a session whose drafts were all wrong breaks INV-1, and one that pays does not."""
    driver = driver_of()
    history(driver)
    place, recorded = next(
        (place, one)
        for place, one in enumerate(driver.recorded)
        if isinstance(one.event, ev.CacheExtended) and one.event.drafted
    )
    state, event = driver.states[place - 1], recorded.event
    assert isinstance(event, ev.CacheExtended)
    assert [] == check(state, recorded)
    for drafted, accepted, broken in ((48, 0, []), (49, 0, ["INV-1"]), (54, 1, [])):
        session = attrs.evolve(
            state.session(event.session),
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        )
        changed = attrs.evolve(state, sessions=state.sessions.set(session.id, session))
        assert broken == [one.invariant for one in check(changed, recorded)]


def test_a_slab_without_a_model() -> None:
    """No capacity is due then; a journal that was changed may have one."""
    rows = healthy()
    slab = next(one for one in map(decode, rows) if isinstance(one.event, ev.SlabAcquired))
    state = attrs.evolve(replay(rows[: slab.position - 1]).state, model=None)
    assert isinstance(slab.event, ev.SlabAcquired)
    assert [] == list(acquired(state, slab.event))


def test_a_lease_that_is_taken_twice():
    """
    A node is taken over between runs, with a token that no writer had before: otherwise two could
    commit. A wrong takeover is recorded as INV-6, without effect.
    """
    driver = driver_of()
    history(driver)
    driver.end_run("stopped")
    driver.propose(ev.NodeTakenOver(token=3, by="operator"))
    for token in (1, 3):
        with pytest.raises(Violated) as caught:
            driver.propose(ev.NodeTakenOver(token=token, by="operator"))
        bug = caught.value.outcome.bug
        assert bug is not None
        assert ("INV-6", "a lease was taken twice") == (bug.invariant, bug.message)
        assert 3 == driver.state.lease
    driver.propose(ev.NodeTakenOver(token=4, by="operator"))
    assert 4 == driver.state.lease


def test_a_head_that_goes_back():
    """
    The heads that a node sees of another one only grow, also within an event. One that does not is
    recorded as INV-6, without effect.
    """
    driver = driver_of()
    history(driver)
    driver.propose(ev.HeadsSeen(heads=(("n2", 7, "ab"), ("n3", 1, "cd"))))
    seen = {"n2": (7, "ab"), "n3": (1, "cd")}
    for wrong in (
        (("n2", 7, "ab"),),
        (("n3", 2, "ef"), ("n2", 6, "ab")),
        (("n3", 2, "ef"), ("n3", 2, "01")),
        (("n4", 0, ""),),
    ):
        with pytest.raises(Violated) as caught:
            driver.propose(ev.HeadsSeen(heads=wrong))
        bug = caught.value.outcome.bug
        assert bug is not None
        assert "INV-6" == bug.invariant
        assert "a head was seen that is not after the last one" == bug.message
        assert seen == dict(driver.state.heads_seen)
    driver.propose(ev.HeadsSeen(heads=(("n2", 9, "ef"),)))
    assert {**seen, "n2": (9, "ef")} == dict(driver.state.heads_seen)


def test_a_loss_of_another_head():
    """
    A loss that another node accepted is of the head that was seen last, and begins that node's
    heads again, also below it. One of another head is recorded as INV-6, without effect.
    """
    driver = driver_of()
    history(driver)
    driver.propose(ev.HeadsSeen(heads=(("n2", 7, "ab"),)))
    for node, lost in (("n2", "6:ab"), ("n2", "7:cd"), ("n3", "7:ab")):
        with pytest.raises(Violated) as caught:
            driver.propose(ev.LossSeen(node=node, lost=lost, position=3, row_hash="01"))
        bug = caught.value.outcome.bug
        assert bug is not None
        assert "INV-6" == bug.invariant
        assert "a loss was seen of another head than the last one" == bug.message
    driver.propose(ev.LossSeen(node="n2", lost="7:ab", position=3, row_hash="01"))
    assert {"n2": (3, "01")} == dict(driver.state.heads_seen)
    driver.propose(ev.HeadsSeen(heads=(("n2", 4, "ef"),)))
    assert {"n2": (4, "ef")} == dict(driver.state.heads_seen)


def _asks_for_less(event: ev.Event) -> ev.Event:
    return attrs.evolve(event, max_tokens=1) if isinstance(event, ev.RequestReceived) else event


def _releases_one_token(event: ev.Event) -> ev.Event:
    match event:
        case ev.TokensEmitted(first=2):
            return attrs.evolve(event, ids=(), first=1, emitted=0, text="")
        case ev.CacheExtended():
            return attrs.evolve(event, emitted=0, text="")
        case _:
            return event


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (_asks_for_less, "a longer answer than was asked for"),
        (_releases_one_token, "an answer that was not released as a whole"),
    ],
)
def test_an_answer_that_is_not_what_was_released(
    wrong: Callable[[ev.Event], ev.Event], message: str
):
    """An answer has all tokens that were released, and no more than were asked for."""
    built = Builder()
    built.start()

    built.turn("s1", "r1", ["Hi"], range(1, 9), (20, 21, 22), wrong=wrong)

    assert built.bug is not None
    assert ("INV-7", message) == (built.bug.invariant, built.bug.message)
