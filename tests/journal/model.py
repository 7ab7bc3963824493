"""
A second implementation of the journal's core, slow and simple, and a simulated server.

``World`` computes what ``state.apply`` does, in dicts and lists that are changed in place;
``chosen`` and ``decided`` are path selection by looking at every session: no index, no fold,
nothing clever. They are written from the text of the design and share no code with ``state`` and
``paths``.

``Driver`` makes legal histories. It plays clients, session actors, engine and store, and reads a
tape of bytes for every choice. Its KV consists of numbers, each of which depends on all before it
and on the shape of the pass that made it. So its measurements are real, and it can check whether a
warm cache holds what a cold one would.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any

import attrs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.cache.adoption import may_adopt
from cairn.journal.cache.short_blocks import rest_to_seal, superseded
from cairn.journal.keys import (
    block_keys,
    fingerprint_of,
    ids_hash,
    part_alone,
    part_hash,
    short_block_key,
)
from cairn.journal.ledger import Clock, Ledger, Outcome
from cairn.journal.rows.codec import Row
from cairn.journal.state import OpenRequest, Session, SessionId, State, Turn, slab_ids

SECRETS = {"t1": b"one secret", "t2": b"another secret"}
LAYERS = 3
SLAB_BYTES = 1000
BLOCK_BYTES = 10
FILE_BYTES = 13
_KV = {"decode_rows": 2, "context_tokens": 512, "kv_policy": "full"}
FIELDS = {fingerprint_of(fields): fields for fields in ({"w": "a"} | _KV, {"w": "b"} | _KV)}
FP_A, FP_B = FIELDS
CHUNKS = {FP_A: 4, FP_B: 3}
NOTES: tuple[ev.Event, ...] = (
    ev.OperatorActed(action="note", detail="nothing follows"),
    ev.LossAccepted(fact="rows are lost", heads=("7:ab", "9:cd")),
    ev.JournalStalled(
        reason="disk_full", error="no room", rows_waiting=1, requests_refused=2, duration_us=3
    ),
    ev.ModelLoadFailed(name="other", reason="no room"),
)
RATES = ("prefill_tokens", "prefill_us", "adopted_tokens", "adopted_us", "declined")
AGENT = ev.AgentCreated(
    agent="notes",
    tenant="t1",
    model="",
    max_context=None,
    persist=True,
    created_s=1,
    forked_from=None,
    head=None,
    system="Be brief.",
    tools="[]",
)
FAULTS: tuple[ev.FileFault, ...] = ("missing", "unreadable", "foreign", "digest")


# --- the fold, a second time ----------------------------------------------------------------------


def plain(state: State) -> dict[str, Any]:
    """A state in the form of ``World.seen``."""
    shown = attrs.asdict(state, recurse=False)
    shown["model"] = attrs.asdict(state.model) if state.model else None
    shown["pool"] = attrs.asdict(state.pool)
    shown["rates"] = attrs.asdict(state.rates)
    shown["shadow"] = attrs.asdict(state.shadow) if state.shadow else None
    shown["sessions"] = {name: _plain_session(s) for name, s in state.sessions.items()}
    shown["blocks"] = {key: attrs.asdict(block) for key, block in state.blocks.items()}
    _spread(shown["sessions"], shown["blocks"], shown.pop("uses"), shown.pop("pins"))
    shown["children"] = dict(shown["children"].items())
    shown["faults"] = {bug: (f.position, f.event) for bug, f in state.faults.items()}
    for index in (
        "streams",
        "requests",
        "tips",
        "parts",
        "ends",
        "self_tests",
        "lost",
        "heads_seen",
        "released",
        "released_kept",
        "adopted",
    ):
        shown[index] = dict(shown[index].items())
    for index in ("turns", "agents"):
        shown[index] = {name: attrs.asdict(one) for name, one in shown[index].items()}
    return shown


def _spread(sessions: Any, blocks: Any, uses: Any, pins: Any) -> None:
    """What is stored once for a chain, or for a session, repeated for each block in it."""
    for session in sessions.values():
        session["pins"] = ()
    for block in blocks.values():
        block["pins"] = 0
    for name, keys in pins.items():
        assert keys
        sessions[name]["pins"] = keys
        for key in keys:
            if key in blocks:  # else a request waits for it to be sealed
                blocks[key]["pins"] += 1
    for end, use in uses.items():
        key = end
        while key is not None:
            block = blocks[key]
            if use.position > block["last_used"]:
                block.update(last_used=use.position, previous_use=use.previous)
            dues = [due for due in (block["expires_us"], use.expires_us) if due is not None]
            block["expires_us"] = max(dues, default=None)
            key = block["parent"]


def _plain_session(session: Session) -> dict[str, Any]:
    shown = attrs.asdict(session, recurse=False)
    shown["state"] = session.state.value
    for name in ("request", "last", "prewarm", "slab"):
        held = shown[name]
        shown[name] = attrs.asdict(held, recurse=False) if held is not None else None
    if (request := shown["request"]) is not None:
        stored = request["stored"]
        request["stored"] = attrs.asdict(stored) if stored is not None else None
        request["texts"] = "".join(request["texts"])
    shown["texts_at"] = dict(session.texts_at.items())
    shown["slab_ids"] = slab_ids(session, 0, session.canonical_tokens)
    return shown


class World:
    """The state that a journal implies, changed in place."""

    def __init__(self) -> None:
        self.position = 0
        self.time_us = 0
        self.boot: str | None = None
        self.model: dict[str, Any] | None = None
        self.streams: dict[str, int] = {}
        self.sessions: dict[str, dict[str, Any]] = {}
        self.blocks: dict[str, dict[str, Any]] = {}
        self.children: dict[str, tuple[str, ...]] = {}
        self.faults: dict[str, tuple[int, ev.Event]] = {}
        self.slabs: list[tuple[str, int]] = []
        self.disk_budget = 0
        self.rates = dict.fromkeys(RATES, 0)
        self.shadow: dict[str, Any] | None = None
        self.self_tests: dict[str, ev.Event] = {}
        self.admission_bug: str | None = None
        self.tested: ev.SelfTestFinished | None = None
        self.unstable_accepted = False
        self.lost: dict[str, int] = {}
        self.heads_seen: dict[str, tuple[int, str]] = {}
        self.lease = 1
        self.turns: dict[str, dict[str, Any]] = {}
        self.agents: dict[str, dict[str, Any]] = {}
        self.released: dict[str, str] = {}
        self.released_kept: dict[str, int] = {}
        self.adopted: dict[str, str] = {}
        # key of a block to the last two uses of it or of a chain that ended with it
        self.touched: dict[str, tuple[int, int | None]] = {}
        self.ended: list[str] = []  # sessions in the order in which their last turns ended

    def seen(self) -> dict[str, Any]:
        """The same as ``plain`` of the state after the same events."""
        here = [block for block in self.blocks.values() if block["present"]]
        files = [block["file_bytes"] for block in self.blocks.values()]
        sizes = [size for size in files if size is not None]
        found = [n for n in self.ended if n in self.sessions and not self.sessions[n]["named"]]
        tips: dict[str, tuple[str, ...]] = {}
        parts: dict[str, tuple[str, ...]] = {}
        ends: dict[str, tuple[str, ...]] = {}
        for name in found:
            chain = self.sessions[name]["last"]["chain"]
            for _, part, _ in chain:
                parts[part] = (*parts.get(part, ()), name)
            if chain:
                _, whole, alone = _heard(self.sessions[name]["last"])[-1]
                tips[whole] = (*tips.get(whole, ()), name)
                ends[alone] = (*ends.get(alone, ()), name)
        return {
            "position": self.position,
            "time_us": self.time_us,
            "boot": self.boot,
            "model": self.model,
            "streams": self.streams,
            "sessions": self.sessions,
            "requests": {
                s["request"]["ask"].request: n for n, s in self.sessions.items() if s["request"]
            },
            "tips": tips,
            "parts": parts,
            "ends": ends,
            "blocks": self.blocks,
            "children": self.children,
            "faults": self.faults,
            "pool": {
                "slabs": len(self.slabs),
                "slab_bytes": sum(size for _, size in self.slabs),
                "blocks": len(here),
                "block_bytes": sum(block["bytes"] for block in here),
                "block_tokens": sum(block["tokens"] for block in here),
                "disk_blocks": len(sizes),
                "disk_bytes": sum(sizes),
            },
            "shadow": self.shadow,
            "disk_budget": self.disk_budget,
            "rates": self.rates,
            "self_tests": self.self_tests,
            "admission_bug": self.admission_bug,
            "tested": self.tested,
            "unstable_accepted": self.unstable_accepted,
            "turns": self.turns,
            "turns_pruned": False,
            "lost": self.lost,
            "heads_seen": self.heads_seen,
            "lease": self.lease,
            "agents": self.agents,
            "released": self.released,
            "released_kept": self.released_kept,
            "adopted": self.adopted,
        }

    def take(self, recorded: ev.Recorded) -> None:
        """Apply one more event."""
        self.pass_over(recorded)
        event = recorded.event
        getattr(self, "_" + event.kind)(event)

    def pass_over(self, recorded: ev.Recorded) -> None:
        """Count one more row, which broke an invariant."""
        self.position = recorded.position
        self.time_us = max(self.time_us, recorded.time_us)
        self.streams[recorded.stream] = recorded.seq

    def _of(self, event: Any) -> dict[str, Any]:
        return self.sessions[event.session]

    def _server_started(self, event: ev.ServerStarted) -> None:
        self.boot, self.admission_bug = event.boot, None
        self._model_load_failed(event)

    def _server_stopped(self, event: ev.Event) -> None:
        self.boot = None
        self.agents = {name: agent for name, agent in self.agents.items() if agent["persist"]}
        self._model_unloaded(event)

    _server_lost = _server_stopped

    def _model_loaded(self, event: ev.ModelLoaded) -> None:
        names = (
            "name fingerprint layers block_tokens decode_rows context_tokens reusable "
            "pool_slabs pool_bytes blocks_bytes blocks_max kv_sinks kv_window kv_rows "
            "min_cache_tokens state_blocks grain"
        )
        self.model = {name: getattr(event, name) for name in names.split()}
        self.model["markers"] = tuple(event.fields.get("markers", ()))
        calls = event.fields.get("calls")
        self.model["calls"] = None if calls is None else tuple(calls)
        self._model_load_failed(event)

    def _model_unloaded(self, event: ev.Event) -> None:
        self.model, self.slabs, self.disk_budget, self.shadow = None, [], 0, None
        self.rates = dict.fromkeys(RATES, 0)
        for name in sorted(self.sessions, key=lambda name: self.sessions[name]["last_used"]):
            self._end(name, None)
        for session in self.sessions.values():
            session.update(slab=None, pins=(), prewarm=None)
            _empty(session)
            if session["state"] not in ("quarantined", "closed"):
                session["state"] = "cold" if session["last"] is None else "idle"
        for block in self.blocks.values():
            if block["present"]:
                block["gone"] = None
            block.update(present=False, pins=0)
            _forget_ids(block)

    def _self_test_finished(self, event: ev.SelfTestFinished) -> None:
        self.self_tests[event.base_fingerprint] = event
        self.tested = event

    def _model_load_failed(self, event: ev.Event) -> None:
        self.tested, self.unstable_accepted = None, False

    def _operator_acted(self, event: ev.OperatorActed) -> None:
        if event.action == "accept_unstable":
            self.unstable_accepted = True

    def _node_taken_over(self, event: ev.NodeTakenOver) -> None:
        self.lease = event.token

    def _heads_seen(self, event: ev.HeadsSeen) -> None:
        for node, position, row_hash in event.heads:
            self.heads_seen[node] = position, row_hash

    def _loss_seen(self, event: ev.LossSeen) -> None:
        self.heads_seen[event.node] = event.position, event.row_hash

    def _loss_accepted(self, event: ev.LossAccepted) -> None:
        for head in event.heads:
            self.lost[head] = self.position

    def _request_rejected(self, event: ev.Event) -> None:
        pass

    _embeddings_computed = _request_rejected
    _shadow_skipped = _request_rejected
    _journal_pruned = _request_rejected
    _journal_stalled = _request_rejected
    _turn_forgotten = _request_rejected

    def _agent_created(self, event: ev.AgentCreated) -> None:
        name = f"@{event.tenant}/agent/{event.agent}"
        self.agents[name] = {"head": event.head, "persist": event.persist, "awaited": 0}

    def _agent_deleted(self, event: ev.AgentDeleted) -> None:
        name = f"@{event.tenant}/agent/{event.agent}"
        del (self.released_kept if name in self.released else self.agents)[name]

    def _session_released(self, event: ev.SessionReleased) -> None:
        name = f"@{event.tenant}/agent/{event.agent}"
        del self.agents[name]
        self.released[name] = event.to
        self.released_kept[name] = self.position

    def _session_adopted(self, event: ev.SessionAdopted) -> None:
        name = f"@{event.tenant}/agent/{event.agent}"
        self.agents[name] = {"head": None, "persist": True, "awaited": event.turns}
        self.adopted[f"{event.node}:{event.position}:{event.row_hash}"] = name

    def _turn_adopted(self, event: ev.TurnAdopted) -> None:
        agent = self.agents[f"@{event.tenant}/agent/{event.agent}"]
        agent.update(head=event.request, awaited=agent["awaited"] - 1)
        turn = {"tenant": event.tenant, "agent": event.agent, "row": self.position}
        self.turns[event.request] = turn

    def _session_opened(self, event: ev.SessionOpened) -> None:
        self.sessions[event.session] = {
            "id": event.session,
            "tenant": event.tenant,
            "fingerprint": event.fingerprint,
            "group": event.group,
            "named": event.named,
            "state": "cold",
            "request": None,
            "last": None,
            "prewarm": None,
            "slab": None,
            "cached_tokens": 0,
            "canonical_tokens": 0,
            "window_start": 0,
            "slab_keys": (),
            "slab_ids": (),
            "prewarmed_rows": 0,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
            "pins": (),
            "bug_id": None,
            "last_used": self.position,
            "previous_use": None,
            "ttl_s": None,
            "expires_us": None,
            "texts_at": {},
            "planned_done": None,
        }

    def _due(self, session: dict[str, Any], *others: int | None) -> int | None:
        """
        When what a session uses now expires: the latest TTL that this or any other use gave it.
        """
        if session["ttl_s"] is not None:
            others = (*others, self.time_us + 1_000_000 * session["ttl_s"])
        return max((due for due in others if due is not None), default=None)

    def _request_received(self, event: ev.RequestReceived) -> None:
        rates, session = self.rates, self._of(event)
        slower = rates["adopted_us"] * rates["prefill_tokens"]
        if rates["prefill_tokens"] and slower > rates["prefill_us"] * rates["adopted_tokens"]:
            rates["declined"] += 1
        last = session["last"] or {"chain": (), "prompt_ids": (), "prompt_keys": ()}
        session["request"] = {
            "ask": event,
            "chain": (*last["chain"][: event.base_parts], *event.new_parts),
            "prompt_ids": (*last["prompt_ids"][: event.base_tokens], *event.new_ids),
            "prompt_keys": (*last["prompt_keys"][: event.base_keys], *event.new_keys),
            "sampled": (),
            "emitted": 0,
            "joined": None,
            "path": None,
            "row_checked": False,
            "texts": "",
            "stored": None,
        }
        session["planned_done"] = None
        if session["last"] is not None:
            session["previous_use"] = session["last_used"]
        session["drafted_tokens"] //= 2
        session["accepted_tokens"] //= 2
        session.update(state="restoring", fingerprint=event.fingerprint, last_used=self.position)
        session["ttl_s"] = event.ttl_s
        session["expires_us"] = self._due(session)

    def _prefix_joined(self, event: ev.PrefixJoined) -> None:
        session = self._of(event)
        session["request"]["joined"] = event
        for key in session["request"]["prompt_keys"][: event.blocks]:
            session["pins"] += (key,)
            if key in self.blocks:
                self.blocks[key]["pins"] += 1

    def _path_selected(self, event: ev.PathSelected) -> None:
        session = self._of(event)
        session["request"].update(joined=None, path=event)
        session["prewarmed_rows"] = 0
        used = event.blocks_from_slab + event.blocks_from_pool
        self._use_in_part(session, session["request"]["prompt_keys"][:used], event.partial_key)
        for key in session["request"]["prompt_keys"][:used]:
            self.blocks[key]["prewarmed"] = 0

    def _use_in_part(
        self, session: dict[str, Any], keys: Sequence[str], partial: str | None
    ) -> None:
        if partial is None:
            self._use(session, keys)
        else:
            self._latest_child(session, partial)
            self._use(session, (*keys, partial))

    def _latest_child(self, session: dict[str, Any], key: str) -> None:
        """A block is the last one that was sealed after another, or matched in part."""
        name = self.blocks[key]["parent"] or _no_parent(session["fingerprint"], session["tenant"])
        order = [
            other
            for other in self.children.get(name, ())
            if self.blocks[other]["present"] or self.blocks[other]["file_bytes"] is not None
        ]
        if key in order:
            order.remove(key)
        order.append(key)
        while len(order) > 64:
            del order[0]
        self.children[name] = tuple(order)

    def _use(self, session: dict[str, Any], keys: Sequence[str]) -> None:
        """A session uses the chain of these blocks, or seals a block."""
        previous = self._before(session, keys[-1]) if keys else None
        for key in keys:
            self._pin(session, key)
            self.blocks[key].update(last_used=self.position, previous_use=previous)
        if keys:
            self.touched[keys[-1]] = (self.position, previous)

    def _before(self, session: dict[str, Any], key: str) -> int | None:
        """When a chain that ends with this block was used before the session's request."""
        touched = self.touched.get(key, (None, None))
        earlier = (session["previous_use"], *touched)
        return next((at for at in earlier if at is not None and at < session["last_used"]), None)

    def _pin(self, session: dict[str, Any], key: str) -> None:
        session["pins"] += (key,)
        self.blocks[key]["pins"] += 1
        self.blocks[key]["expires_us"] = self._due(session, self.blocks[key]["expires_us"])

    def _unpin(self, session: dict[str, Any]) -> None:
        for key in session["pins"]:
            if key in self.blocks:
                self.blocks[key]["pins"] -= 1
        session["pins"] = ()

    def _slab_acquired(self, event: ev.SlabAcquired) -> None:
        held = {"id": event.slab, "capacity_tokens": event.capacity_tokens, "bytes": event.bytes}
        self._of(event)["slab"] = held
        _empty(self._of(event))
        self.slabs.append((event.session, event.bytes))

    def _slab_released(self, event: ev.SlabReleased) -> None:
        self._of(event)["slab"] = None
        _empty(self._of(event))
        self.slabs.remove((event.session, event.bytes))

    def _shadow_started(self, event: ev.ShadowStarted) -> None:
        held = {"id": event.slab, "capacity_tokens": event.capacity_tokens, "bytes": event.bytes}
        of = {"of_session": event.of_session, "request": event.request}
        self.shadow = {**of, "slab": held, "checked": False}
        self.slabs.append(("of a check", event.bytes))

    def _shadow_checked(self, event: ev.ShadowChecked) -> None:
        assert self.shadow is not None
        self.shadow["checked"] = True

    def _shadow_ended(self, event: ev.ShadowEnded) -> None:
        self.shadow = None
        self.slabs.remove(("of a check", event.bytes))

    def _blocks_restored(self, event: ev.BlocksRestored) -> None:
        session = self._of(event)
        session.update(cached_tokens=event.end, canonical_tokens=event.end)
        assert self.model is not None
        if event.end % self.model["block_tokens"] == 0:
            session["slab_keys"] += event.keys
        session["slab_ids"] = _working_on(session)[: event.end]
        session["prewarmed_rows"] = 0

    def _cache_extended(self, event: ev.CacheExtended) -> None:
        session = self._of(event)
        session["cached_tokens"] = event.end
        session["window_start"] = event.coverage[0][1]
        session["drafted_tokens"] += event.drafted
        session["accepted_tokens"] += event.accepted
        if event.step == "decode":
            session["state"] = "decoding"
        else:
            session["canonical_tokens"] = event.end
            session["slab_ids"] = _working_on(session)[: event.end]
            session["state"] = "prefilling" if event.step == "prefill" else "settling"
        if session["request"]:
            session["request"]["sampled"] += event.sampled
            session["request"]["emitted"] += event.emitted
            session["request"]["texts"] += event.text
        if session["prewarm"]:
            session["prewarm"]["computed_tokens"] += event.end - event.start
            session["prewarmed_rows"] += event.end - event.start
        assert self.model is not None
        if event.step == "prefill" and event.end - event.start >= self.model["block_tokens"]:
            self.rates["prefill_tokens"] += event.end - event.start
            self.rates["prefill_us"] += event.duration_us

    def _row_checked(self, event: ev.RowChecked) -> None:
        self._of(event)["request"]["row_checked"] = True

    def _cache_trimmed(self, event: ev.CacheTrimmed) -> None:
        session = self._of(event)
        assert self.model is not None
        session["cached_tokens"] = event.end
        while session["canonical_tokens"] > event.end:
            session["canonical_tokens"] -= 1
            session["prewarmed_rows"] -= session["prewarmed_rows"] > 0
        session["slab_ids"] = session["slab_ids"][: event.end]
        while len(session["slab_keys"]) * self.model["block_tokens"] > event.end:
            session["slab_keys"] = session["slab_keys"][:-1]

    def _block_sealed(self, event: ev.BlockSealed) -> None:
        new = {"bug_id": None, "file_bytes": None, "present": False, "expires_us": None}
        new["pins"] = sum(s["pins"].count(event.key) for s in self.sessions.values())
        known = self.blocks.get(event.key, new)
        assert self.model is not None
        short = event.end - event.start != self.model["block_tokens"]
        prewarmed = 0 if short else self._of(event)["prewarmed_rows"]
        if not short:
            self._of(event)["prewarmed_rows"] = 0
        self.blocks[event.key] = {
            "key": event.key,
            "parent": event.parent,
            "digest": event.digest,
            "start": event.start,
            "bytes": event.bytes,
            "present": event.stored,
            "tokens": event.end - event.start,
            "ids": b"",
            "prewarmed": known["prewarmed"] if known["present"] else prewarmed,
            "file_bytes": known["file_bytes"],
            "gone": None,
            "pins": known["pins"],
            "last_used": self.position,
            "previous_use": None,
            "expires_us": known["expires_us"],
            "bug_id": known["bug_id"],
            "node": None,
        }
        session = self._of(event)
        if not short:
            session["slab_keys"] += (event.key,)
        self._use(session, (event.key,))
        if self.model["grain"] == 1 and (event.stored or known["file_bytes"] is not None):
            span = session["slab_ids"][event.start : event.end]
            self.blocks[event.key]["ids"] = b"".join(i.to_bytes(4, "little") for i in span)
            self._latest_child(session, event.key)

    def _block_evicted(self, event: ev.BlockEvicted) -> None:
        self.blocks[event.key].update(present=False, gone=event.reason)
        _forget_ids(self.blocks[event.key])

    def _block_files_scanned(self, event: ev.BlockFilesScanned) -> None:
        self.disk_budget = event.budget_bytes

    def _block_spilled(self, event: ev.BlockSpilled) -> None:
        self.blocks[event.key]["file_bytes"] = event.bytes

    _block_spill_failed = _request_rejected

    def _block_loaded(self, event: ev.BlockLoaded) -> None:
        before, _ = self.touched[event.key]
        self.touched[event.key] = (self.position, before)
        self.blocks[event.key].update(present=True, last_used=self.position, previous_use=before)

    def _block_adopted(self, event: ev.BlockAdopted) -> None:
        before, _ = self.touched.get(event.key, (None, None))
        self.touched[event.key] = (self.position, before)
        pinned = sum(s["pins"].count(event.key) for s in self.sessions.values())
        known = self.blocks.get(event.key, {"pins": pinned, "expires_us": None})
        until_us = None if event.ttl_s is None else self.time_us + 1_000_000 * event.ttl_s
        dues = [due for due in (known["expires_us"], until_us) if due is not None]
        names = ("key", "parent", "digest", "start", "bytes", "node")
        self.blocks[event.key] = {
            **{name: getattr(event, name) for name in names},
            "tokens": event.end - event.start,
            "present": True,
            "ids": b"",
            "prewarmed": 0,
            "file_bytes": None,
            "gone": None,
            "bug_id": None,
            "pins": known["pins"],
            "last_used": self.position,
            "previous_use": before,
            "expires_us": max(dues, default=None),
        }
        rates = self.rates
        slower = rates["adopted_us"] * rates["prefill_tokens"]
        if rates["prefill_tokens"] and slower > rates["prefill_us"] * rates["adopted_tokens"]:
            rates.update(adopted_tokens=0, adopted_us=0)
        rates["adopted_tokens"] += event.end - event.start
        rates["adopted_us"] += event.duration_us
        rates["declined"] = 0

    def _adoption_declined(self, event: ev.AdoptionDeclined) -> None:
        """It changes nothing: requests count by themselves."""

    def _block_file_rejected(self, event: ev.BlockFileRejected | ev.BlockFileRemoved) -> None:
        if isinstance(event, ev.BlockFileRejected) and event.node is not None:
            return
        self.blocks[event.key]["file_bytes"] = None
        if isinstance(event, ev.BlockFileRemoved):
            self.blocks[event.key]["gone"] = event.reason
        _forget_ids(self.blocks[event.key])

    _block_file_removed = _block_file_rejected

    def _tokens_emitted(self, event: ev.TokensEmitted) -> None:
        self._of(event)["state"] = "decoding"
        self._of(event)["request"]["emitted"] += len(event.ids)
        self._of(event)["request"]["texts"] += event.text

    def _call_rejected(self, event: ev.CallRejected) -> None:
        assert "decoding" == self._of(event)["state"]

    def _turn_stored(self, event: ev.TurnStored) -> None:
        session = self._of(event)
        assert session["state"] in ("prefilling", "decoding")
        turn = {"tenant": event.tenant, "agent": event.agent, "row": self.position}
        session["request"]["stored"] = turn
        if event.texts:
            session["texts_at"][str(self.position)] = tuple(event.texts)

    def _request_finished(self, event: ev.RequestFinished) -> None:
        self._of(event)["state"] = "settling"
        turn = self._of(event)["request"]["stored"]
        if turn is not None:
            self.turns[event.request] = turn
            if event.session in self.agents and turn["agent"] is not None:
                self.agents[event.session]["head"] = event.request
        self._end(event.session, event.answer_tokens)

    def _request_cancelled(self, event: ev.RequestCancelled) -> None:
        self._of(event)["state"] = "settling"
        self._end(event.session, None)

    def _end(self, name: str, answer_tokens: int | None) -> None:
        session = self.sessions[name]
        request, session["request"] = session["request"], None
        if request is None:
            return
        session["last"] = {
            "request": request["ask"].request,
            "fingerprint": request["ask"].fingerprint,
            "chain": request["chain"],
            "prompt_ids": request["prompt_ids"],
            "prompt_keys": request["prompt_keys"],
            "answered": answer_tokens is not None,
            "answer_ids": request["sampled"][: answer_tokens or 0],
        }
        session["expires_us"] = self._due(session)
        self.ended = [other for other in self.ended if other != name] + [name]

    def _prewarm_started(self, event: ev.PrewarmStarted) -> None:
        session = self._of(event)
        last = session["last"]
        said = (*last["prompt_ids"], *last["answer_ids"])
        keys = (*last["prompt_keys"][: event.base_keys], *event.new_keys)
        session["prewarm"] = {
            "ids": (*said[: event.base_tokens], *event.new_ids),
            "keys": keys,
            "tokens_from_slab": event.tokens_from_slab,
            "blocks_from_slab": event.blocks_from_slab,
            "blocks_from_pool": event.blocks_from_pool,
            "partial_key": event.partial_key,
            "tokens_from_partial": event.tokens_from_partial,
            "computed_tokens": 0,
        }
        used = event.blocks_from_slab + event.blocks_from_pool
        self._use_in_part(session, keys[:used], event.partial_key)

    def _prewarm_finished(self, event: ev.PrewarmFinished) -> None:
        self._of(event).update(prewarm=None, planned_done=True)

    def _prewarm_abandoned(self, event: ev.PrewarmAbandoned) -> None:
        done = {"quarantined": True, "render_failed": None, "bug": None}
        self._of(event).update(prewarm=None, planned_done=done.get(event.reason, False))

    def _session_settled(self, event: ev.SessionSettled) -> None:
        self._of(event)["state"] = "idle"
        self._unpin(self._of(event))

    def _session_closed(self, event: ev.SessionClosed) -> None:
        del self.sessions[event.session]
        self.ended = [other for other in self.ended if other != event.session]

    def _invariant_violated(self, event: ev.InvariantViolated) -> None:
        self.faults[event.bug_id] = (self.position, event)
        if event.invariant == "INV-5":
            self.admission_bug = event.bug_id
        if event.session is None:
            return
        if self._of(event)["state"] in ("restoring", "prefilling", "decoding"):
            self._of(event)["state"] = "settling"
        self._end(event.session, None)

    def _session_quarantined(self, event: ev.SessionQuarantined) -> None:
        self._of(event).update(state="quarantined", prewarm=None, bug_id=event.bug_id)
        self._unpin(self._of(event))
        self._end(event.session, None)

    def _blocks_quarantined(self, event: ev.BlocksQuarantined) -> None:
        for key in event.keys:
            self.blocks[key]["bug_id"] = event.bug_id

    def _admission_closed(self, event: ev.AdmissionClosed) -> None:
        self.admission_bug = event.bug_id


def _forget_ids(block: dict[str, Any]) -> None:
    if not block["present"] and block["file_bytes"] is None:
        block["ids"] = b""


def _no_parent(fingerprint: str, tenant: str) -> str:
    """What the first blocks of a tenant's sequences are filed under."""
    fields = (b"cairn beginning", fingerprint.encode(), tenant.encode())
    return "".join(len(one).to_bytes(8, "little").hex() + one.hex() for one in fields)


def _empty(session: dict[str, Any]) -> None:
    session.update(cached_tokens=0, canonical_tokens=0, window_start=0, slab_keys=())
    session.update(slab_ids=(), prewarmed_rows=0)


def _working_on(session: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that a session computes: of its request, its prewarm, or its last turn."""
    if (request := session["request"]) is not None:
        return (*request["prompt_ids"], *request["sampled"])
    if (prewarm := session["prewarm"]) is not None:
        return tuple(prewarm["ids"])
    return (*session["last"]["prompt_ids"], *session["last"]["answer_ids"])


# --- path selection, a second time ----------------------------------------------------------------


def _goes_on(last: dict[str, Any], chain: Sequence[tuple[str, str, str]]) -> bool:
    """
    Whether the conversation is the last one, followed by what its answer became, if it had one.
    """
    heard = _heard(last)
    if len(chain) < len(heard):
        return False
    for held, asked in zip(heard, chain, strict=False):
        if held != asked:
            return False
    behind = chain[len(heard) :]
    says = len(behind) > 0 and behind[0][0] in ("assistant", "continued")
    return not last["answered"] or says


def _heard(last: dict[str, Any]) -> Sequence[tuple[str, str, str]]:
    """The parts of the last conversation but for the beginning of an answer, which is completed."""
    held: Sequence[tuple[str, str, str]] = last["chain"]
    return [part for part in held if part[0] != "continued" or len(held) == 1]


def _visible(world: World, ask: paths.Ask) -> list[dict[str, Any]]:
    """The sessions that may be found by content, in the order of their last turns."""
    visible = []
    for name in world.ended:
        session = world.sessions[name]
        if session["named"] or session["tenant"] != ask.tenant:
            continue
        if ask.group is not None and session["group"] != ask.group:
            continue
        visible.append(session)
    return visible


def _by_length(session: dict[str, Any]) -> tuple[int, int]:
    return len(_heard(session["last"])), session["last_used"]


def chosen(world: World, ask: paths.Ask) -> str | None:
    """The session that serves the request, found by looking at all of them."""
    if ask.session_name is not None:
        for name, session in world.sessions.items():
            if name == ask.session_name and session["tenant"] == ask.tenant:
                return name
        return None
    if not ask.cache_prompt or ask.cache_mode == "prefix":
        return None
    fit: list[dict[str, Any]] = []
    for session in _visible(world, ask):
        works = session["state"] not in ("idle", "cold", "settling")
        other_model = session["last"]["fingerprint"] != ask.fingerprint
        if works or session["bug_id"] is not None or other_model:
            continue
        if _goes_on(session["last"], ask.chain):
            fit.append(session)
    return str(max(fit, key=_by_length)["id"]) if fit else None


def joined(world: World, name: str, request: OpenRequest) -> dict[str, Any] | None:
    """Whom the request joins, found by looking at what every session is about to seal."""
    mine = world.sessions[name]
    _, kept, shared, *_ = _stones(world, mine, request)
    best: dict[str, Any] | None = None
    for other in world.sessions.values():
        coming = _coming(world, mine, other)
        theirs = other["request"] or {"prompt_keys": ()}
        same = _same(theirs["prompt_keys"], request.prompt_keys)
        if coming is None or not coming & set(request.prompt_keys[kept + shared : same]):
            continue
        held = {key: dict(block) for key, block in world.blocks.items()}
        for key in coming:
            world.blocks[key] = {**held.get(key, {"bug_id": None, "prewarmed": 0}), "present": True}
        _, kept_then, shared_then, *_ = _stones(world, mine, request)
        world.blocks = held
        blocks = min(kept_then + shared_then, same)
        if blocks <= kept + shared or not coming & set(request.prompt_keys[:blocks]):
            continue
        path = theirs["path"]
        done = path.blocks_from_slab + path.blocks_from_pool
        if other["state"] == "prefilling":
            done = len(other["slab_keys"])
        if blocks - done > 2 * (blocks - kept - shared):  # it is too far behind
            continue
        found = {"leader": theirs["ask"].request, "blocks": blocks, "reused_blocks": kept + shared}
        found["since"] = theirs["path"].decided_at
        if best is None or (-blocks, found["since"]) < (-best["blocks"], best["since"]):
            best = found
    if best is not None:
        del best["since"]
    return best


def _coming(world: World, mine: dict[str, Any], other: dict[str, Any]) -> set[str] | None:
    """The blocks that a session is about to seal for its request; None if no other may join it."""
    request, model = other["request"], world.model
    if other["tenant"] != mine["tenant"] or request is None or request["path"] is None:
        return None
    if model is None or other["state"] == "decoding":
        return None
    if len(request["prompt_ids"]) < model["min_cache_tokens"]:
        return None
    needed = request["ask"].prompt_tokens + request["ask"].max_tokens
    if mine["slab"] and (not other["slab"] or other["slab"]["capacity_tokens"] < needed):
        return None
    path = request["path"]
    done = path.blocks_from_slab + path.blocks_from_pool
    if other["state"] == "prefilling":
        done = len(other["slab_keys"])
    bugs = [world.blocks.get(key, {"bug_id": None})["bug_id"] for key in request["prompt_keys"]]
    first = next((place for place, bug in enumerate(bugs) if bug is not None), len(bugs))
    return set(request["prompt_keys"][done:first])


def still_waits(world: World, name: str) -> bool:
    """Whether a request waits for the one that it joined."""
    mine = world.sessions[name]
    event = mine["request"]["joined"] if mine["request"] else None
    leaders = [s for s in world.sessions.values() if s["request"]]
    for other in leaders:
        if event is None or other["request"]["ask"].request != event.leader:
            continue
        free = {**mine, "slab": None}
        keys = mine["request"]["prompt_keys"]
        coming = _coming(world, free, other)
        if coming is None or not coming & set(keys[event.reused_blocks : event.blocks]):
            return False
        sealed = [place for place in range(event.blocks) if keys[place] not in coming]
        last = keys[max(sealed)] if sealed else None
        return (
            last is None
            or max(sealed) < event.reused_blocks
            or (world.blocks[last]["present"] and world.blocks[last]["bug_id"] is None)
        )
    return False


def decided(world: World, name: str, request: OpenRequest) -> dict[str, Any]:
    """The path, found by looking at all sessions and all blocks."""
    ask = paths.ask_of(request.ask, request.chain)
    mine = world.sessions[name]
    nearest = _nearest(world, mine, ask)
    tokens, kept, shared, partial, rows = _stones(world, mine, request)
    last = nearest["last"] if nearest is not None else None
    chunk = world.model["block_tokens"] if world.model is not None else 0
    reason = _why(world, mine, nearest, ask, tokens + shared * chunk + rows)
    if reason == "cold_start" or (
        reason == "diverged" and last and not _has_a_message(last, ask.chain)
    ):
        following = request.prompt_keys[kept + shared : kept + shared + 1]
        reason = "expired" if _all_expired(world, following) else reason
    held = (*last["prompt_ids"], *last["answer_ids"]) if last else ()
    prewarmed = sum(world.blocks[key]["prewarmed"] for key in request.prompt_keys[: kept + shared])
    first_ahead = mine["canonical_tokens"] - mine["prewarmed_rows"]
    prewarmed += sum(1 for row in range(tokens) if row >= first_ahead)
    chunk = world.model["block_tokens"] if world.model else 0
    same = _same(held, request.prompt_ids)
    rerendered = len(held) - same if reason is None else 0
    part = None
    if last is not None and reason == "diverged":
        part = _changed_part(last["chain"], ask.chain)
    return {
        "path": "continuation" if reason is None else "new_session",
        "reason": reason,
        "tokens_from_slab": tokens,
        "blocks_from_slab": kept,
        "blocks_from_pool": shared,
        "partial_key": partial,
        "tokens_from_partial": rows,
        "reused_tokens": tokens + shared * chunk + rows,
        "prewarmed_tokens": prewarmed,
        "rerendered_tokens": rerendered,
        "nearest": nearest["id"] if nearest is not None else None,
        "diverged_part": part,
        "diverged_token": same if reason == "diverged" or rerendered else None,
    }


def _same(one: Sequence[Any], other: Sequence[Any]) -> int:
    count = 0
    while count < len(one) and count < len(other) and one[count] == other[count]:
        count += 1
    return count


def _nearest(world: World, mine: dict[str, Any], ask: paths.Ask) -> dict[str, Any] | None:
    if mine["last"] is not None:
        return mine
    if ask.session_name is not None:
        return None
    visible = _visible(world, ask)
    going = [session for session in visible if _goes_on(session["last"], ask.chain)]
    if going:
        return max(going, key=_by_length)
    best, most = None, 0
    for session in visible:  # in the order of their last turns: the later one wins a tie
        common = _same(session["last"]["chain"], ask.chain)
        if common and common >= most:
            best, most = session, common
    if any(label not in FRONT for label, *_ in ask.chain[:most]):
        return best
    return _meant(visible, ask.chain) or best


FRONT = ("tools", "system")


def _front_of(chain: Sequence[tuple[str, ...]]) -> list[str]:
    return [part[2] for part in chain if part[0] in FRONT]


def _meant(visible: list[dict[str, Any]], chain: tuple[tuple[str, ...], ...]) -> Any:
    """A conversation that ends with a message of this one, and agrees with it before that."""
    said = [part[2] for part in chain if part[0] not in FRONT]
    ranked = []
    for age, session in enumerate(visible):
        theirs = [part[2] for part in session["last"]["chain"] if part[0] not in FRONT]
        for end in range(1, len(said) + 1):
            back = 0
            while back < min(end, len(theirs)) and theirs[-1 - back] == said[end - 1 - back]:
                back += 1
            whole = bool(back) and back == end == len(theirs)
            same_front = _front_of(session["last"]["chain"]) == _front_of(chain)
            if whole or back > (1 if same_front else 2):
                ranked.append((whole, end, back, age))
    return visible[max(ranked)[3]] if ranked else None


def _has_a_message(last: dict[str, Any], chain: tuple[tuple[str, ...], ...]) -> bool:
    """Whether a conversation shares more than what comes before its messages with a nearest one."""
    shared = chain[: _same(last["chain"], chain)]
    return any(part[0] not in FRONT for part in shared) or _ends_within(last, chain)


def _ends_within(last: dict[str, Any], chain: tuple[tuple[str, ...], ...]) -> bool:
    return last["chain"][-1][2] in {part[2] for part in chain}


def _all_expired(world: World, keys: Sequence[str]) -> bool:
    known = [world.blocks[key] for key in keys if key in world.blocks]
    left = [b for b in known if b["present"] or b["file_bytes"] or b["gone"] != "expired"]
    return bool(known) and not left


def _why(
    world: World,
    mine: dict[str, Any],
    nearest: dict[str, Any] | None,
    ask: paths.Ask,
    reused: int,
) -> str | None:
    if not ask.cache_prompt:
        return "cache_disabled"
    if ask.cache_mode == "prefix":
        return "cache_mode_prefix"
    if nearest is None:
        return "cold_start"
    last = nearest["last"]
    if not _goes_on(last, ask.chain):
        if _same(last["chain"], ask.chain) < len(ask.chain):
            return "diverged"
        answers = [part for part in ask.chain if part[0] == "assistant"]
        return "shorter_history" if answers or ask.session_name else "cold_start"
    if nearest["bug_id"] is not None:
        return "quarantined"
    if last["fingerprint"] != ask.fingerprint:
        return "fingerprint_changed"
    if nearest is not mine:
        return "session_busy"
    sealed = [world.blocks[key] for key in last["prompt_keys"] if key in world.blocks]
    assert world.model is not None
    least, chunk = world.model["min_cache_tokens"], world.model["block_tokens"]
    if not reused and not sealed and 0 < len(last["prompt_keys"]) * chunk < least:
        return "too_short"
    lost = [b for b in sealed if not b["present"] or b["bug_id"] is not None]
    if len(lost) * chunk <= reused:
        return None
    by_ttl = [
        b for b in lost if not b["present"] and not b["file_bytes"] and b["gone"] == "expired"
    ]
    return "expired" if len(by_ttl) == len(lost) else "evicted"


Stones = tuple[int, int, int, str | None, int]
"""
(tokens from the slab, blocks from the slab, blocks from the pool, the block of which only the first
rows come next, how many rows that are)
"""


def _stones(world: World, mine: dict[str, Any], request: OpenRequest) -> Stones:
    if world.model is None or not world.model["reusable"] or not request.ask.cache_prompt:
        return 0, 0, 0, None, 0
    needed = request.ask.prompt_tokens + request.ask.max_tokens
    roomy = mine["slab"] is not None and mine["slab"]["capacity_tokens"] >= needed
    chunk = world.model["block_tokens"]
    # The last prompt token is always computed.
    keys = [
        key
        for place, key in enumerate(request.prompt_keys, 1)
        if place * chunk < len(request.prompt_ids)
    ]
    own = mine if roomy and request.ask.cache_mode == "full" else None
    found = _with_rows(world, own, request.prompt_ids[:-1], keys, len(request.prompt_ids))
    of = (request.ask.fingerprint, request.ask.tenant)
    return _with_part(world, of, request.prompt_ids[:-1], keys, found)


def stones_ahead(world: World, name: str, begun: ev.PrewarmStarted) -> Stones:
    """What of a session's prewarm exists, found by looking at each block and row."""
    mine = world.sessions[name]
    keys = (*mine["last"]["prompt_keys"][: begun.base_keys], *begun.new_keys)
    said = (*mine["last"]["prompt_ids"], *mine["last"]["answer_ids"])
    ids = (*said[: begun.base_tokens], *begun.new_ids)
    found = _with_rows(world, mine, ids, keys, len(ids))
    return _with_part(world, (mine["fingerprint"], mine["tenant"]), ids, keys, found)


def _with_part(
    world: World,
    of: tuple[str, str],
    ids: Sequence[int],
    keys: Sequence[str],
    found: tuple[int, int, int],
) -> Stones:
    """Add the first rows of a block, if these are more than the slab has there."""
    assert world.model is not None
    chunk = world.model["block_tokens"]
    tokens, kept, shared = found
    place = kept + shared
    after = keys[place - 1] if place else _no_parent(*of)
    most, partial = max(1, tokens - kept * chunk), None
    for key in world.children.get(after, ()):  # the latest wins a tie
        block = world.blocks[key]
        packed = [block["ids"][at : at + 4] for at in range(0, len(block["ids"]), 4)]
        theirs = [int.from_bytes(one, "little") for one in packed]
        same = _same(theirs, ids[place * chunk :])
        usable = block["present"] and block["bug_id"] is None
        if usable and (same > most or (partial is not None and same == most)):
            most, partial = same, key
    if partial is None:
        return tokens, kept, shared, None, 0
    return kept * chunk, kept, shared, partial, most


def blocks_ahead(state: State, session: Session, keys: tuple[str, ...]) -> tuple[int, int]:
    """What a prewarm of full blocks reuses, by the rules: (blocks from the slab, from the pool)."""
    assert state.model is not None
    ids = tuple(range(len(keys) * state.model.block_tokens))
    reuse = paths.reusable_prewarm(state, session, ids, keys)
    return reuse.blocks, reuse.shared


def _with_rows(
    world: World,
    mine: dict[str, Any] | None,
    ids: Sequence[int],
    keys: Sequence[str],
    length: int,
) -> tuple[int, int, int]:
    """(tokens from the slab, blocks from the slab, blocks from the pool)."""
    assert world.model is not None
    chunk = world.model["block_tokens"]
    kept, shared = _lying(world, mine["slab_keys"] if mine else (), keys)
    if shared or mine is None or world.model["grain"] != 1:
        return kept * chunk, kept, shared
    if length < world.model["min_cache_tokens"]:
        return kept * chunk, kept, shared
    begun = mine["slab_keys"][kept:]
    canonical = mine["canonical_tokens"]
    if begun and world.blocks[begun[0]]["bug_id"] is not None:
        return kept * chunk, kept, shared
    if not begun and canonical >= (kept + 1) * chunk:  # it should have been sealed
        return kept * chunk, kept, shared
    same = 0
    while same < chunk and kept * chunk + same < min(len(ids), canonical):
        place = kept * chunk + same
        if mine["slab_ids"][place] != ids[place]:
            break
        same += 1
    return kept * chunk + same, kept, shared


def _lying(world: World, slab_keys: tuple[str, ...], keys: Sequence[str]) -> tuple[int, int]:
    """How many blocks from the front are in a slab, and how many more in memory."""
    kept = shared = 0
    for place, key in enumerate(keys):
        block = world.blocks.get(key)
        if block is None or block["bug_id"] is not None:
            break
        if not shared and slab_keys[place : place + 1] == (key,):
            kept += 1
        elif block["present"]:
            shared += 1
        else:
            break
    assert world.model is not None
    if every := world.model["state_blocks"]:
        if kept < len(slab_keys):  # no state of what is reused exists
            return _lying(world, (), keys)
        while shared and (kept + shared) % every:
            shared -= 1
    return kept, shared


def _changed_part(
    held: Sequence[tuple[str, str, str]], chain: Sequence[tuple[str, str, str]]
) -> str:
    common = _same(held, chain)
    labels = [part[0] for one in (held, chain) for part in one[common : common + 1]]
    if common < len(held) and common < len(chain):
        for label in ("model", "tools", "system"):
            if label in labels:
                return f"{label}_changed"
    return "messages_changed"


# --- eviction, a second time ----------------------------------------------------------------------


def value(position: int, last_used: int, previous_use: int | None) -> int:
    """
    How valuable a block is at a position of the journal: minus the positions until it is expected,
    or minus those since it was used.
    """
    unused = position - last_used
    if previous_use is not None:
        interval = last_used - previous_use
        if interval / 10 <= unused < interval * 5 / 4:
            return unused - interval
    return -unused


def _uses(block: dict[str, Any]) -> dict[str, Any]:
    return {name: block[name] for name in ("last_used", "previous_use")}


def leaving(
    world: dict[str, dict[str, Any]], there: Collection[str], position: int
) -> list[tuple[str, int]]:
    """
    The order in which blocks are evicted, and the value of each. Of the blocks that no other of
    them is built on, the least valuable goes first. A block is as valuable as any of them that is
    built on it.

    Args:
        world: all blocks by key.
        there: the blocks to order.
        position: of the journal.
    """
    own = {key: value(position, **_uses(world[key])) for key in there}
    among = list(there)
    above = {key: _above(world, key) for key in among}
    of_use = {key: max(own[o] for o in among if o == key or key in above[o]) for key in among}
    order = []
    while among:
        built_on = set[str]().union(*(above[key] for key in among))
        ends = [key for key in among if key not in built_on]
        first = min(ends, key=lambda key: (of_use[key], -world[key]["start"], key))
        among.remove(first)
        order.append((first, of_use[first]))
    return order


def _above(world: dict[str, dict[str, Any]], key: str) -> set[str]:
    """The blocks that a block is built on."""
    parent = world[key]["parent"]
    return {parent, *_above(world, parent)} if parent in world else set()


# --- a simulated server ---------------------------------------------------------------------------


def tape(seed: int, size: int) -> bytes:
    """A tape that is a prefix of all longer ones with its seed, so that a failure shrinks."""
    return random.Random(seed).randbytes(600)[:size]


TAPES = st.builds(tape, st.integers(0, 2**32), st.integers(100, 600))
"""Tapes for ``Driver``, drawn by Hypothesis: long, and of all bytes."""


def profile(examples: int) -> settings:
    """
    The same examples at every run, however long one takes: all of them in `make long`, otherwise a
    quarter, and a tenth in `make quick`.
    """
    part = {"long": 1, "default": 4, "quick": 10}[settings.get_current_profile_name()]
    return settings(
        max_examples=max(examples // part, 1),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def played(
    data: bytes,
    *,
    crashes: bool = True,
    kind: type[Driver] | None = None,
    state_blocks: int = 0,
) -> Driver:
    """
    The history on a tape, whose first bytes say how much memory there is, and whether the grain is
    1.
    """
    return (kind or Driver)(
        data[3:],
        crashes=crashes,
        reusable=data[0] % 10 != 9,
        pool_slabs=1 + data[1] % 4,
        blocks_kept=(2, 6, 12, 40)[data[2] % 4],
        files_kept=(0, 3, 10, 40)[data[2] // 4 % 4],
        min_cache_tokens=(0, 0, 0, 14)[data[1] // 4 % 4],
        state_blocks=state_blocks,
        any_cut=not state_blocks and data[2] // 16 % 2 == 1,
        shares=data[2] // 32 % 2 == 1,
    ).play()


Part = tuple[str, tuple[int, ...]]
_LABELS = {"tools": 1, "system": 2, "user": 3, "assistant": 4, "continued": 4}


@attrs.define
class Talk:
    """A conversation as its client has it."""

    tenant: str
    group: str | None
    name: str | None
    parts: tuple[Part, ...]
    answer: tuple[int, ...] | None = None


@attrs.define
class Slab:
    """Simulated KV: one number per token."""

    id: int
    capacity_tokens: int
    rows: list[int] = attrs.field(factory=list)


def run_pass(
    rows: list[int], fingerprint: str, ids: Sequence[int], *, decode: bool, any_cut: bool = False
) -> None:
    """
    Add the KV of one pass. It depends on the existing KV, on the tokens and, unless any cut into
    passes gives the same, on the pass's shape.
    """
    past, salt = tuple(rows), sum(fingerprint.encode())
    for place in range(len(ids)):
        if any_cut:
            rows.append(hash((tuple(rows), salt, ids[place], decode)))
        else:
            rows.append(hash((past, salt, tuple(ids[: place + 1]), len(ids), decode)))


def said(text: str) -> str:
    """The parts of an answer that is all words."""
    return json.dumps([{"said": {"text": text}}] if text else [])


def cold_rows(fingerprint: str, ids: Sequence[int], *, any_cut: bool = False) -> list[int]:
    """Canonical KV: what a cold prefill computes."""
    rows: list[int] = []
    chunk = CHUNKS[fingerprint]
    for start in range(0, len(ids), chunk):
        run_pass(rows, fingerprint, ids[start : start + chunk], decode=False, any_cut=any_cut)
    return rows


def digest_of(rows: Sequence[int]) -> str:
    """A digest over the bytes of KV."""
    return hashlib.sha256(repr(tuple(rows)).encode()).hexdigest()[:16]


def rendered(parts: Sequence[Part]) -> tuple[int, ...]:
    """
    The token ids of a prompt. A thought (a token of 90 to 99) is dropped from earlier answers.
    """
    ids: list[int] = []
    for label, content in parts:
        ids.append(_LABELS[label])
        ids.extend(t for t in content if label != "assistant" or not 90 <= t < 100)
    return (*ids, _LABELS["assistant"])


class Tape:
    """Choices, read from bytes; after the end every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def over(self) -> bool:
        """Whether all of it was read."""
        return self._at >= len(self._data)

    def below(self, count: int) -> int:
        """A number below ``count``."""
        if self.over:
            return 0
        self._at += 1
        return self._data[self._at - 1] % count

    def one_of(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[self.below(len(options))]


class Violated(Exception):
    """The ledger found a violation."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.bug}; {outcome.recorded[-1:]}")
        self.outcome = outcome


class Driver:
    """
    Makes a history. ``play`` it, then look at ``rows`` and ``ledger``.

    Attributes:
        damage: changes each event before it is proposed; a legal history changes none.
        rows: what was stored, with ``recorded`` and the ``states`` after each append.
        bugs: the ids of all violations and crashes.
        work: the sessions that are working.
        foresees: whether a prewarm follows every answer; otherwise the tape decides.
        lives: the TTLs that requests ask for, one after the other.
    """

    def __init__(
        self,
        tape: bytes = b"",
        *,
        crashes: bool = False,
        reusable: bool = True,
        pool_slabs: int = 3,
        blocks_kept: int = 12,
        files_kept: int = 40,
        min_cache_tokens: int = 0,
        spare_tokens: int = 0,
        state_blocks: int = 0,
        any_cut: bool = False,
        shares: bool = False,
    ) -> None:
        self.tape = Tape(tape)
        self.rows: list[Row] = []
        self.recorded: list[ev.Recorded] = []
        self.states: list[State] = []
        self.bugs: list[str] = []
        self.damage: Callable[[ev.Event], ev.Event] = lambda event: event
        self.talks: list[Talk] = []
        self.slabs: dict[str, Slab] = {}
        self.check: Slab | None = None
        self.store: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, tuple[int, ...]] = {}
        self.work: dict[str, Generator[None, None, None]] = {}
        self.cancelled: set[str] = set()
        self.hurried: set[str] = set()
        self.foresees = False
        self.lives: tuple[int | None, ...] = (None, 0, 3600, 60)
        self.fingerprint = FP_A
        self.texts: dict[str, str] = {}
        self._crashes = crashes
        self._reusable = reusable
        self.any_cut = any_cut
        self._pool_slabs = pool_slabs
        self._blocks_kept = blocks_kept
        self._files_kept = files_kept
        self._min_cache_tokens = min_cache_tokens
        self._spare_tokens = spare_tokens
        self._state_blocks = state_blocks
        self._shares = shares
        self._counts: dict[str, int] = {}
        self._seqs: dict[str, int] = {}
        clock = Clock(
            new_id=lambda: f"id-{self._count('id')}",
            now_us=lambda: 1_000_000 + self._count("time"),
            version="0.0.test",
        )
        self.ledger = Ledger(clock)

    @property
    def state(self) -> State:
        """The fold so far."""
        return self.ledger.state

    @property
    def chunk(self) -> int:
        """C of the model that is loaded."""
        return CHUNKS[self.fingerprint]

    def _count(self, name: str) -> int:
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name]

    # what the server's actors do with the ledger

    def propose(self, *events: ev.Event, undo: Callable[[], object] = lambda: None) -> None:
        """
        Propose events to the journal, with the sequence number that their owner expects.

        Args:
            undo: reverts what was done already if the journal refuses the events.
        """
        events = tuple(self.damage(event) for event in events)
        due = self._seqs.get(events[0].stream, 0) + 1
        try:
            self.take(self.ledger.propose(events, expected_seq=due))
        except Violated:
            undo()
            raise

    def take(self, outcome: Outcome) -> None:
        """Keep an outcome's rows."""
        self.rows.extend(outcome.rows)
        self.recorded.extend(outcome.recorded)
        self.states.extend([self.state] * len(outcome.rows))
        for recorded in outcome.recorded:
            self._seqs[recorded.stream] = recorded.seq
        if outcome.bug is not None:
            self.bugs.append(outcome.bug.bug_id)
            if outcome.bug.invariant != "CRASH":
                raise Violated(outcome)

    def start(self, fingerprint: str = FP_A) -> None:
        """The server starts and loads a model."""
        self.fingerprint = fingerprint
        self.propose(
            ev.ServerStarted(boot=f"boot-{self._count('boot')}", cairn_version="0", settings={})
        )
        self.load_model(fingerprint)

    def load_model(self, fingerprint: str) -> None:
        """A model is loaded."""
        self.fingerprint = fingerprint
        self.propose(
            ev.SelfTestFinished(
                fingerprint=fingerprint,
                base_fingerprint=fingerprint,
                findings={"cold equals warm": True},
                passed=True,
                error_max=1e-7,
                decode_shapes=(2,),
                row_class=(),
                row_class_reason="",
                without_drafts="",
                duration_us=5,
                from_cache=False,
            ),
            ev.ModelLoaded(
                name="tiny",
                fingerprint=fingerprint,
                fields=FIELDS[fingerprint],
                layers=LAYERS,
                block_tokens=self.chunk,
                decode_rows=2,
                context_tokens=512,
                reusable=self._reusable,
                pool_slabs=self._pool_slabs,
                pool_bytes=self._pool_slabs * SLAB_BYTES,
                blocks_bytes=self._blocks_kept * BLOCK_BYTES,
                blocks_max=0,
                min_cache_tokens=self._min_cache_tokens,
                state_blocks=self._state_blocks,
                grain=1 if self.any_cut else self.chunk,
                directory="",
                adapter="",
                dtype="",
                kv_sinks=0,
                kv_window=0,
                kv_rows=0,
            ),
        )
        self.find()

    def find(self) -> None:
        """Look for the files of earlier runs. Some have been lost, or damaged."""
        for key in sorted(self.files):
            if self.tape.below(5) == 4:
                self.reject(key, self.tape.one_of(("missing", "unreadable")))
        self.propose(
            ev.BlockFilesScanned(
                budget_bytes=self._files_kept * FILE_BYTES, removed_files=0, **self._filed()
            )
        )

    def end_run(self, kind: str) -> None:
        """The server stops, is lost, or unloads its model; everything in memory is gone."""
        boot = f"boot-{self._counts['boot']}"
        if kind == "stopped":
            self.propose(ev.ServerStopped(boot=boot, reason="signal"))
        elif kind == "lost":
            self.propose(ev.ServerLost(boot=boot))
        else:
            self.propose(ev.ModelUnloaded(fingerprint=self.fingerprint, reason="-", active_bytes=0))
        self.slabs.clear()
        self.check = None
        self.store.clear()
        self.work.clear()
        self.cancelled.clear()
        self.hurried.clear()

    # a request

    def ask(
        self,
        talk: Talk,
        *,
        cache_prompt: bool = True,
        cache_mode: ev.CacheMode = "full",
        answer: tuple[int, ...] = (50, 51, 52),
        room: int = 4,
        based: bool = True,
    ) -> str | None:
        """
        A client sends its conversation. Returns the session that took it, or None if none could.
        """
        chain, ids = self.chain(talk), rendered(talk.parts)
        ask = self.asked(talk, cache_prompt=cache_prompt, cache_mode=cache_mode)
        name = paths.choose_session(self.state, ask)
        if name is not None and self.state.sessions[name].state == "settling":
            self.hurried.add(name)
            self.finish(name)
            assert name == paths.choose_session(self.state, ask), "settling changed the choice"
        if not self._admitted(name, talk):
            self.propose(
                ev.RequestRejected(request="-", tenant=talk.tenant, status=529, code="busy")
            )
            self.propose(
                ev.EmbeddingsComputed(
                    request="-",
                    tenant=talk.tenant,
                    model="-",
                    fingerprint="-",
                    inputs=1,
                    tokens=2,
                    duration_us=3,
                )
            )
            return None
        if self.tape.below(4) < 3:
            self._load_chain(str(name), ask, ids, len(answer) + room)
            if self._shares:
                self._adopt_chain(str(name), ask, ids, len(answer) + room)
        session = str(name) if name is not None else self._open(talk)
        request = f"r{self._count('request')}"
        received = self._received(
            session, request, talk, ask, chain, ids, len(answer) + room, based
        )
        self.propose(received)
        self.propose(self.decided(session))
        self.work[session] = self._serve(session, request, talk, answer)
        return session

    def _load_chain(self, name: str, ask: paths.Ask, ids: tuple[int, ...], more: int) -> None:
        chain = paths.chain_to_load(
            self.state,
            self.state.sessions.get(SessionId(name)),
            ask,
            self.keys(ask.tenant, ids),
            ids,
            len(ids) + more,
        )
        for key in chain:
            loose = [other for other in self.evictable() if other not in chain]
            if key in self.store:
                continue
            if len(self.store) >= self._blocks_kept:
                if not loose:
                    return
                self.evict(loose[0])
            self.load(key)
            if key not in self.store:
                return

    def _adopt_chain(self, name: str, ask: paths.Ask, ids: tuple[int, ...], more: int) -> None:
        """Another node has computed the same prompt, and has the files of some of its blocks."""
        keys, session = self.keys(ask.tenant, ids), self.state.sessions.get(SessionId(name))
        if not may_adopt(self.state.rates):
            return
        found = [key for key in keys if self.tape.below(6)]
        chain = paths.chain_to_adopt(self.state, session, ask, keys, ids, len(ids) + more)
        chain = paths.adoptable(self.state, keys, chain, found)
        for place, key in enumerate(chain):
            if key in self.store:
                continue
            if key not in self.files and not may_adopt(self.state.rates):
                rates = attrs.asdict(self.state.rates)
                del rates["declined"]
                self.propose(ev.AdoptionDeclined(key=key, blocks=len(chain) - place, **rates))
                return
            if len(self.store) >= self._blocks_kept:
                loose = [other for other in self.evictable() if other not in keys]
                if not loose:
                    return
                self.evict(loose[0])
            if key in self.files:
                self.load(key)
            elif not self.adopt(keys, keys.index(key), self.cold(ids)):
                return

    def adopt(self, keys: Sequence[str], place: int, rows: Sequence[int]) -> bool:
        """A block is read from the file of another node, unless that was changed."""
        key, start = keys[place], place * self.chunk
        if self.tape.below(12) == 11:
            fault = self.tape.one_of(FAULTS)
            self.propose(ev.BlockFileRejected(key=key, reason=fault, moved_to=None, node="n2"))
            return False
        self.store[key] = tuple(rows[start : start + self.chunk])
        self.propose(
            ev.BlockAdopted(
                key=key,
                parent=keys[place - 1] if place else None,
                digest=digest_of(self.store[key]),
                start=start,
                end=start + self.chunk,
                bytes=BLOCK_BYTES,
                node="n2",
                position=7,
                row_hash="0" * 64,
                ttl_s=self.tape.one_of(self.lives),
                duration_us=self.tape.below(3) * 20,
                **self._kept(),
            ),
            undo=lambda: self.store.pop(key),
        )
        return True

    def chain(self, talk: Talk) -> tuple[tuple[str, str, str], ...]:
        """The chain of a conversation."""
        chain, parent = [], ""
        for label, content in talk.parts:
            parent = part_hash(
                secret=SECRETS[talk.tenant],
                tenant=talk.tenant,
                parent=parent,
                label=label,
                content=repr(content).encode(),
            )
            alone = part_alone(
                secret=SECRETS[talk.tenant],
                tenant=talk.tenant,
                label=label,
                content=repr(sorted(content) if label == "tools" else content).encode(),
            )
            chain.append((label, parent, alone))
        return tuple(chain)

    def asked(
        self, talk: Talk, *, cache_prompt: bool = True, cache_mode: ev.CacheMode = "full"
    ) -> paths.Ask:
        """What choosing a session reads of a conversation."""
        return paths.Ask(
            tenant=talk.tenant,
            fingerprint=self.fingerprint,
            chain=self.chain(talk),
            session_name=talk.name,
            group=talk.group,
            cache_prompt=cache_prompt,
            cache_mode=cache_mode,
        )

    def keys(self, tenant: str, ids: Sequence[int]) -> tuple[str, ...]:
        """The keys of a sequence."""
        return block_keys(
            secret=SECRETS[tenant],
            fingerprint=self.fingerprint,
            tenant=tenant,
            ids=ids,
            block_tokens=self.chunk,
        )

    def _admitted(self, name: str | None, talk: Talk) -> bool:
        if self.state.admission_bug is not None:
            return False
        if name is not None:
            return self.state.session(name).free  # a named one may be working, or quarantined
        return talk.name not in self.state.sessions  # it may be another tenant's

    def _open(self, talk: Talk) -> str:
        session = talk.name
        while session is None or session in self.state.sessions:
            session = f"s{self._count('session')}"
        self.propose(
            ev.SessionOpened(
                session=session,
                tenant=talk.tenant,
                fingerprint=self.fingerprint,
                group=talk.group,
                named=talk.name is not None,
            )
        )
        return session

    def _received(
        self,
        session: str,
        request: str,
        talk: Talk,
        ask: paths.Ask,
        chain: tuple[tuple[str, str, str], ...],
        ids: tuple[int, ...],
        max_tokens: int,
        based: bool,
    ) -> ev.RequestReceived:
        last = self.state.session(session).last if based else None
        base_tokens = _same(last.prompt_ids, ids) if last else 0
        base_parts = _same(last.chain, chain) if last else 0
        same_model = last is not None and last.fingerprint == self.fingerprint
        base_keys = base_tokens // self.chunk if same_model else 0
        calls = self._count("call")
        return ev.RequestReceived(
            session=session,
            request=request,
            protocol="openai",
            client="an-agent",
            tenant=talk.tenant,
            fingerprint=self.fingerprint,
            session_name=talk.name,
            group=talk.group,
            cache_prompt=ask.cache_prompt,
            cache_mode=ask.cache_mode,
            base_request=last.request if last else None,
            base_parts=base_parts,
            new_parts=chain[base_parts:],
            base_tokens=base_tokens,
            new_ids=ids[base_tokens:],
            base_keys=base_keys,
            new_keys=self.keys(talk.tenant, ids)[base_keys:],
            prompt_tokens=len(ids),
            max_tokens=max_tokens,
            sampling={"temperature": 0.5},
            seed=7,
            seed_given=False,
            requested_model="tiny",
            ttl_s=self.lives[self._count("ttl") % len(self.lives)],
            thoughts=0,
            grammar=None,
            words=None,
            waited_us=0,
            traceparent=f"00-{calls:032x}-{calls:016x}-01" if calls % 3 else None,
        )

    def selected(self, session: str) -> ev.PathSelected:
        """The decision, as the sequencer would record it."""
        held = self.state.session(session)
        assert held.request is not None
        decision = paths.select(self.state, held, held.request)
        return ev.PathSelected(
            session=session,
            request=held.request.ask.request,
            rules_version=paths.RULES_VERSION,
            decided_at=self.state.position,
            diverged_text=None if decision.diverged_token is None else "around it",
            diverged_from=None if decision.diverged_token is None else "around it before",
            **attrs.asdict(decision),
        )

    def decided(self, session: str) -> ev.PrefixJoined | ev.PathSelected:
        """Whom a request joins or its path, as the sequencer would record it."""
        held = self.state.session(session)
        assert held.request is not None
        found = paths.join(self.state, held, held.request)
        if found is None:
            return self.selected(session)
        return ev.PrefixJoined(
            session=session,
            request=held.request.ask.request,
            rules_version=paths.RULES_VERSION,
            decided_at=self.state.position,
            **attrs.asdict(found),
        )

    # what engine and store do

    def _coverage(self, session: str) -> ev.Coverage:
        held = len(self.slabs[session].rows) if session in self.slabs else 0
        return ((1, 0, held), (LAYERS - 1, 0, held))

    def _pool(self) -> dict[str, Any]:
        held = len(self.slabs) + (self.check is not None)
        return {"pool_slabs": held, "pool_bytes": held * SLAB_BYTES}

    def _kept(self) -> dict[str, Any]:
        return {"memory_blocks": len(self.store), "memory_bytes": len(self.store) * BLOCK_BYTES}

    def evict(self, key: str, reason: ev.RemovalReason = "space") -> None:
        """A block is evicted from memory, and may be written to a file before."""
        if key not in self.files and self.tape.below(2):
            self.spill(key)
        block = self.store.pop(key)
        self.propose(
            ev.BlockEvicted(key=key, bytes=BLOCK_BYTES, **self._kept(), reason=reason),
            undo=lambda: self.store.setdefault(key, block),
        )

    def _filed(self) -> dict[str, Any]:
        return {"disk_blocks": len(self.files), "disk_bytes": len(self.files) * FILE_BYTES}

    def spill(self, key: str) -> None:
        """A block in memory is written to a file; another file is dropped for it if necessary."""
        if not self._files_kept or self.tape.below(9) == 8:
            self.propose(ev.BlockSpillFailed(key=key, reason="No space left on device"))
            return
        if len(self.files) >= self._files_kept:
            self.drop(self.tape.one_of(sorted(self.files)), self._why_removed())
        self.files[key] = self.store[key]
        self.propose(
            ev.BlockSpilled(
                key=key, digest=digest_of(self.store[key]), bytes=FILE_BYTES, **self._filed()
            ),
            undo=lambda: self.files.pop(key),
        )

    def spillable(self) -> list[str]:
        """The blocks in memory that have no file."""
        return [key for key in sorted(self.store) if key not in self.files]

    def drop(self, key: str, reason: ev.RemovalReason = "space") -> None:
        """A block's file is dropped."""
        block = self.files.pop(key)
        self.propose(
            ev.BlockFileRemoved(key=key, bytes=FILE_BYTES, **self._filed(), reason=reason),
            undo=lambda: self.files.setdefault(key, block),
        )

    def _why_removed(self) -> ev.RemovalReason:
        return "space" if self.state.position % 2 else "expired"

    def reject(self, key: str, reason: ev.FileFault) -> None:
        """A block's file is not what was written."""
        del self.files[key]
        self.propose(ev.BlockFileRejected(key=key, reason=reason, moved_to=None))

    def load(self, key: str) -> None:
        """A block is read from its file; another one is evicted for it if necessary."""
        if len(self.store) >= self._blocks_kept:
            self.evict(self.evictable()[0])
        if key not in self.files:
            return  # dropped for the file of the evicted one
        self.store[key] = self.files[key]
        self.propose(
            ev.BlockLoaded(
                key=key,
                digest=digest_of(self.store[key]),
                bytes=BLOCK_BYTES,
                duration_us=2,
                **self._kept(),
            ),
            undo=lambda: self.store.pop(key),
        )

    def loadable(self) -> list[str]:
        """The blocks that could be loaded now."""
        if len(self.store) >= self._blocks_kept and not self.evictable():
            return []
        return [
            key
            for key in sorted(self.files)
            if key not in self.store and self.state.blocks[key].bug_id is None
        ]

    def evictable(self) -> list[str]:
        """The blocks that no session uses."""
        return [key for key in self.store if not self.state.is_pinned(key)]

    def release(self, session: str) -> None:
        """A session gives up its slab."""
        slab = self.slabs.pop(session)
        self.propose(
            ev.SlabReleased(
                session=session, slab=slab.id, bytes=SLAB_BYTES, reason="room", **self._pool()
            ),
            undo=lambda: self.slabs.setdefault(session, slab),
        )

    def checkable(self) -> list[str]:
        """The sessions whose last answer could be recomputed."""
        if self.check is not None or len(self.slabs) >= self._pool_slabs:
            return []
        return [
            name
            for name, session in sorted(self.state.sessions.items())
            if session.last and session.last.answered
            if session.last.fingerprint == self.fingerprint
        ]

    def begin_check(self, session: str) -> None:
        """Open a slab to recompute a session's last answer, if that is possible."""
        held = self.state.session(session)
        assert held.last is not None
        of: dict[str, Any] = {"of_session": session, "request": held.last.request}
        if self.tape.below(4) == 3:
            self.propose(ev.ShadowSkipped(reason="queue_full", **of))
            return
        self.check = Slab(id=self._count("slab"), capacity_tokens=99)
        self.propose(
            ev.ShadowStarted(
                slab=self.check.id, capacity_tokens=99, bytes=SLAB_BYTES, **of, **self._pool()
            ),
            undo=self._without_check,
        )

    def _without_check(self) -> None:
        self.check = None

    def end_check(self, result: str) -> None:
        """The current check releases its slab, whether it finished or not."""
        check, shadow = self.check, self.state.shadow
        assert check is not None
        assert shadow is not None
        of: dict[str, Any] = {"of_session": shadow.of_session, "request": shadow.request}
        held = self.state.sessions.get(SessionId(shadow.of_session))
        last = held.last if held is not None else None
        if result in ("same", "differs") and (last is None or last.request != shadow.request):
            result = "failed"  # the model has no older answer
        try:
            if result in ("same", "differs"):
                assert held is not None
                assert last is not None
                self._compare(held.tenant, last, of, differs=result == "differs")
        except Violated:
            result = "differs"
            raise
        finally:
            self.check = None
            self.propose(
                ev.ShadowEnded(
                    result=result,  # type: ignore[arg-type]  # one of the four
                    slab=check.id,
                    bytes=SLAB_BYTES,
                    **of,
                    **self._pool(),
                )
            )

    def _compare(self, tenant: str, last: Turn, of: dict[str, Any], *, differs: bool) -> None:
        rows = self.cold(last.sequence)
        known = self.state.blocks
        keys = list(itertools.takewhile(known.__contains__, self.keys(tenant, last.sequence)))
        kept = [digest_of(self.store[key]) if key in self.store else "" for key in keys]
        self.propose(
            ev.ShadowChecked(
                prompt_tokens=len(last.prompt_ids),
                cuts=(len(last.prompt_ids),),
                answer_tokens=len(last.answer_ids),
                keys=tuple(keys),
                digests=tuple(
                    digest_of(rows[place * self.chunk : (place + 1) * self.chunk])
                    for place in range(len(keys))
                ),
                memory_digests=tuple(kept),
                ids_expected=ids_hash(last.answer_ids),
                drawn_expected="what was drawn",
                drawn="something else" if differs else "what was drawn",
                first_difference=0 if differs else None,
                duration_us=3,
                **of,
            )
        )

    def releasable(self) -> list[str]:
        """The idle or quarantined sessions that hold a slab."""
        rest = ("idle", "quarantined")
        return [name for name in self.slabs if self.state.session(name).state in rest]

    def acquire(self, session: str, capacity_tokens: int) -> bool:
        """A session gets a slab, if necessary that of the current check, else another session's."""
        if self._pool()["pool_slabs"] >= self._pool_slabs and self.check is not None:
            self.end_check("interrupted")
        if self._pool()["pool_slabs"] >= self._pool_slabs:
            if not self.releasable():
                return False
            self.release(self.releasable()[0])
        capacity_tokens = -(-capacity_tokens // self.chunk) * self.chunk
        slab = Slab(id=self._count("slab"), capacity_tokens=capacity_tokens)
        self.slabs[session] = slab
        self.propose(
            ev.SlabAcquired(
                session=session,
                slab=slab.id,
                capacity_tokens=capacity_tokens,
                bytes=SLAB_BYTES,
                **self._pool(),
            ),
            undo=lambda: self.slabs.pop(session),
        )
        return True

    def trim(self, session: str, end: int, reason: str) -> None:
        """A session's KV is trimmed."""
        rows = self.slabs[session].rows
        held = len(rows)
        del rows[end:]
        self.propose(
            ev.CacheTrimmed(
                session=session,
                cached_tokens=held,
                end=end,
                coverage=self._coverage(session),
                reason=reason,
            )
        )

    def parts(self, session: str, keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """
        The parts in which blocks are copied into a slab: two at a time, or all blocks from one that
        has states to the next.
        """
        begin, held = 0, len(self.slabs[session].rows) // self.chunk
        for place in range(1, len(keys) + 1):
            ends = not self._state_blocks or (held + place) % self._state_blocks == 0
            if place == len(keys) or (ends and place - begin >= 2):
                yield keys[begin:place]
                begin = place

    def share(self, session: str, request: str | None, keys: tuple[str, ...]) -> None:
        """Blocks are copied from the store into a slab."""
        rows = self.slabs[session].rows
        start = len(rows)
        for key in keys:
            rows.extend(self.store[key])
        self.propose(
            ev.BlocksRestored(
                session=session,
                request=request,
                start=start,
                end=len(rows),
                keys=keys,
                digests=tuple(digest_of(self.store[key]) for key in keys),
                coverage=self._coverage(session),
                duration_us=3,
            )
        )

    def share_part(self, session: str, request: str | None, key: str, count: int) -> None:
        """The first rows of a block are copied from the store into a slab."""
        rows = self.slabs[session].rows
        start = len(rows)
        rows.extend(self.store[key][:count])
        self.propose(
            ev.BlocksRestored(
                session=session,
                request=request,
                start=start,
                end=len(rows),
                keys=(key,),
                digests=(digest_of((*rows[start:], *self.store[key][count:])),),
                coverage=self._coverage(session),
                duration_us=3,
            )
        )

    def extend(
        self,
        session: str,
        request: str | None,
        step: ev.Step,
        ids: tuple[int, ...],
        sampled: tuple[int, ...] = (),
        emitted: int = 0,
    ) -> None:
        """Passes of the model run, and tokens are released with them."""
        rows = self.slabs[session].rows
        start = len(rows)
        drafted = 0
        if step == "decode":
            held = self.state.sessions[SessionId(session)]
            if held.drafted_tokens <= 48 + 6 * held.accepted_tokens:
                drafted = start % 3
            for token in ids:
                run_pass(rows, self.fingerprint, (token,), decode=True, any_cut=self.any_cut)
        else:
            run_pass(rows, self.fingerprint, ids, decode=False, any_cut=self.any_cut)
        self.propose(
            ev.CacheExtended(
                session=session,
                request=request,
                step=step,
                start=start,
                end=len(rows),
                input_hash=ids_hash(ids),
                coverage=self._coverage(session),
                sampled=sampled,
                logprobs=tuple(-1 / token for token in sampled),
                drafted=drafted,
                accepted=min(drafted, len(ids) - 1),
                emitted=emitted,
                text="wörd " if emitted else "",
                duration_us=4,
            )
        )
        if emitted and request is not None:
            self.texts[request] = self.texts.get(request, "") + "wörd "

    def check_row(self, session: str, request: str, ids: Sequence[int]) -> None:
        """The last row of a slab is computed again."""
        rows = self.slabs[session].rows
        again = rows[:-1]
        run_pass(again, self.fingerprint, ids[len(again) : len(rows)], decode=False, any_cut=True)
        self.propose(
            ev.RowChecked(
                session=session,
                request=request,
                row=len(rows) - 1,
                held_digest=digest_of(rows[-1:]),
                digest=digest_of(again[-1:]),
            )
        )

    def seal_rest(self, session: str, tenant: str) -> None:
        """What a slab has after its last full block becomes a short one."""
        held = self.state.session(session)
        if (rest := rest_to_seal(self.state, held)) is not None:
            key = short_block_key(
                secret=SECRETS[tenant],
                fingerprint=self.fingerprint,
                tenant=tenant,
                parent=held.slab_keys[-1] if held.slab_keys else None,
                ids=slab_ids(held, *rest),
            )
            self.seal(session, key, rest[0], rest[1])

    def seal(
        self, session: str, key: str, start: int | None = None, end: int | None = None
    ) -> None:
        """
        A chunk of a slab, or its last one, becomes a block; room is made for it if possible.
        """
        rows = self.slabs[session].rows
        start = len(rows) - self.chunk if start is None else start
        end = start + self.chunk if end is None else end
        block = tuple(rows[start:end])
        known = self.state.blocks.get(key)
        held = self.state.session(session).slab_keys
        if key not in self.store and len(self.store) >= self._blocks_kept and self.evictable():
            self.evict(self.evictable()[0])
        fresh = key not in self.store
        stored = not fresh or len(self.store) < self._blocks_kept
        if stored:
            self.store[key] = block
        self.propose(
            ev.BlockSealed(
                session=session,
                key=key,
                parent=held[-1] if held else None,
                digest=digest_of(block),
                start=start,
                end=end,
                bytes=BLOCK_BYTES,
                resealed=known is not None,
                stored=stored,
                **self._kept(),
            ),
            undo=lambda: self.store.pop(key, None) if fresh else None,
        )
        for other in superseded(self.state, self.state.session(session), key):
            del self.store[other]
            self.propose(
                ev.BlockEvicted(key=other, bytes=BLOCK_BYTES, **self._kept(), reason="superseded")
            )

    # what a session does: at each yield, other sessions may run

    def _serve(
        self, session: str, request: str, talk: Talk, answer: tuple[int, ...]
    ) -> Generator[None, None, None]:
        held = self.state.session(session).request
        assert held is not None
        while held.path is None:
            if session in self.cancelled:
                yield from self._cancel(session, request, talk.tenant, "prefill")
                return
            if not paths.waits(self.state, self.state.session(session)):
                self.propose(self.decided(session))
                held = self.state.session(session).request
                assert held is not None
                continue
            yield
        path, ids = held.path, held.prompt_ids
        kept = path.tokens_from_slab
        yield
        slab = self.slabs.get(session)
        needed = held.ask.prompt_tokens + held.ask.max_tokens
        if slab is not None and slab.capacity_tokens < needed:
            self.release(session)
            slab = None
            yield
        if slab is not None and len(slab.rows) > kept:
            self.trim(session, kept, "other tokens")
            yield
        if slab is None and not self.acquire(
            session, needed + self._spare_tokens + self.tape.below(3) * 40
        ):
            self.propose(ev.RequestCancelled(session=session, request=request, stage="no_memory"))
            yield from self._settle(session, talk.tenant)
            return
        yield
        if path.blocks_from_pool:
            keys = held.prompt_keys[path.blocks_from_slab :][: path.blocks_from_pool]
            for part in self.parts(session, keys):
                if session in self.cancelled:
                    yield from self._cancel(session, request, talk.tenant, "prefill")
                    return
                self.share(session, request, part)
                yield
        if path.partial_key is not None:
            self.share_part(session, request, path.partial_key, path.tokens_from_partial)
            yield
        rows = self.slabs[session].rows
        checks = path.reused_tokens % self.chunk > 0
        while len(rows) < len(ids):
            if session in self.cancelled:
                yield from self._cancel(session, request, talk.tenant, "prefill")
                return
            start = len(rows)
            if checks:
                self.check_row(session, request, ids)
                checks = False
            end = start - start % self.chunk + self.chunk
            if self.any_cut:
                end += self.tape.below(3) * self.chunk
            end = min(end, len(ids))
            self.extend(
                session, request, "prefill", ids[start:end], answer[:1] if end == len(ids) else ()
            )
            for place in range(start // self.chunk, end // self.chunk):
                if self._indexed(ids):
                    self.seal(session, held.prompt_keys[place], place * self.chunk)
            yield
        assert self.cold(ids) == rows, "a warm cache holds other KV than a cold"
        yield from self._decode(session, request, talk, answer)

    def _decode(
        self, session: str, request: str, talk: Talk, answer: tuple[int, ...]
    ) -> Generator[None, None, None]:
        done, shown = 1, 0
        late = self.tape.below(2)  # whether emission runs a step behind
        silent = len(answer) == 1 and self.tape.below(2)  # an end token alone is not shown
        if not (late or silent):
            self._emit(session, request, 0, answer[:1])
            shown = 1
        while True:
            if session in self.cancelled:
                yield from self._cancel(session, request, talk.tenant, "decode")
                return
            if done == len(answer):
                break
            steps = min(1 + self.tape.below(3), len(answer) - done)
            emitted = done + steps - late - shown
            if done + steps == len(answer) and self.tape.below(2) == 0:
                emitted = 0  # the rest is released at the end
            self.extend(
                session,
                request,
                "decode",
                answer[done - 1 : done - 1 + steps],
                answer[done:][:steps],
                emitted,
            )
            done, shown = done + steps, shown + emitted
            yield
        unwanted = self.tape.below(2) if shown < done and done > 1 else 0
        done -= unwanted
        if shown < done and not silent:
            self._emit(session, request, shown, answer[shown:done])
            shown = done
        if shown % 3 == 1:
            self.propose(
                ev.CallRejected(
                    session=session,
                    request=request,
                    reason="truncated",
                    text="wörd",
                    detail="cut off",
                )
            )
        if shown % 2 == 0:
            self.propose(
                ev.TurnStored(
                    session=session,
                    request=request,
                    tenant=talk.tenant,
                    previous=None,
                    created_s=1,
                    question="[]",
                    answer=said(self.texts.get(request, "")),
                    note="nöte",
                    texts={"tools": "[]"},
                    texts_at={},
                    agent=None,
                )
            )
        opened = self.state.session(session).request
        assert opened is not None
        assert opened.path is not None
        self.propose(
            ev.RequestFinished(
                session=session,
                request=request,
                finish_reason="length" if done == opened.ask.max_tokens else "stop",
                prompt_tokens=len(rendered(talk.parts)),
                cached_tokens=opened.path.reused_tokens,
                answer_tokens=done,
                completion_tokens=done,
            )
        )
        talk.answer = answer[:done]
        if self.foresees or self.tape.below(3) == 2:
            onward: tuple[Part, ...] = (("assistant", talk.answer), ("user", ()))
            yield from self._settle(session, talk.tenant, rendered((*talk.parts, *onward))[:-1])
        else:
            yield from self._settle(session, talk.tenant)

    def _emit(self, session: str, request: str, first: int, ids: tuple[int, ...]) -> None:
        text = "wörd "
        self.propose(
            ev.TokensEmitted(
                session=session,
                request=request,
                first=first,
                emitted=len(ids),
                ids=ids,
                text=text,
            )
        )
        self.texts[request] = self.texts.get(request, "") + text

    def _cancel(
        self, session: str, request: str, tenant: str, stage: ev.CancelStage
    ) -> Generator[None, None, None]:
        open_request = self.state.session(session).request
        assert open_request is not None
        waited = open_request.path is None
        self.propose(ev.RequestCancelled(session=session, request=request, stage=stage))
        # A slab has rows of the turn before if the request never had a path.
        yield from self._settle(session, tenant, settles=not waited)

    def _settle(
        self,
        session: str,
        tenant: str,
        prewarm: tuple[int, ...] | None = None,
        *,
        settles: bool = True,
    ) -> Generator[None, None, None]:
        held = self.state.session(session)
        assert held.last is not None
        ids = held.last.sequence if settles else ()
        keys = self.keys(tenant, ids)
        if session in self.slabs and self.tape.below(12) == 11:
            self.release(session)
        slab = self.slabs.get(session)
        canonical = len(held.slab_keys) * self.chunk
        if self.any_cut and held.canonical_tokens < canonical + self.chunk:
            canonical = held.canonical_tokens
        if slab is not None and len(slab.rows) > canonical:
            self.trim(session, canonical, "provisional")
        yield
        complete = True
        if slab is not None and self._reusable and prewarm is not None and self._indexed(prewarm):
            complete = yield from self._anticipate(session, tenant, prewarm)
            ids = ()
        while slab is not None and self._indexed(ids):
            start = len(slab.rows)
            end = start - start % self.chunk + self.chunk
            if self.any_cut:
                end = min(end, len(ids))
            if start >= end or end > len(ids):
                break
            if session in self.hurried or end > slab.capacity_tokens:
                complete = False
                break
            self.settle_to(session, ids, end, keys)
            yield
        if session in self.slabs and session not in self.hurried:
            self.seal_rest(session, tenant)
        self.propose(
            ev.SessionSettled(
                session=session,
                canonical_tokens=len(slab.rows) if slab is not None else 0,
                complete=complete,
            )
        )

    def settle_to(
        self, session: str, ids: tuple[int, ...], end: int, keys: tuple[str, ...]
    ) -> None:
        """One settling pass, and the block if that made it full."""
        self.extend(session, None, "settle", ids[len(self.slabs[session].rows) : end])
        if end % self.chunk == 0:
            self.seal(session, keys[end // self.chunk - 1])

    def cold(self, ids: Sequence[int]) -> list[int]:
        """What a cold prefill computes."""
        return cold_rows(self.fingerprint, ids, any_cut=self.any_cut)

    def _indexed(self, ids: Sequence[int]) -> bool:
        return self._reusable and len(ids) >= self._min_cache_tokens

    def _anticipate(
        self, session: str, tenant: str, prewarm: tuple[int, ...]
    ) -> Generator[None, None, bool]:
        slab = self.slabs[session]
        if slab.rows and self.tape.below(3) == 2:  # so that more is shared
            self.trim(session, 0, "all of it")
        held = self.state.session(session)
        assert held.last is not None
        length = min(len(prewarm), slab.capacity_tokens)
        ids = prewarm[: length if self.any_cut else length // self.chunk * self.chunk]
        keys = self.keys(tenant, ids)
        base_tokens = _same(held.last.sequence, ids)
        base_keys = min(base_tokens, len(held.last.prompt_ids)) // self.chunk
        reuse = paths.reusable_prewarm(self.state, held, ids, keys)
        kept, shared = reuse.blocks, reuse.shared
        if reuse.total(self.chunk) == len(ids):
            return True
        self.propose(
            ev.PrewarmStarted(
                session=session,
                next_role="user",
                rules_version=paths.RULES_VERSION,
                tokens=len(ids),
                base_tokens=base_tokens,
                new_ids=ids[base_tokens:],
                base_keys=base_keys,
                new_keys=keys[base_keys:],
                tokens_from_slab=reuse.tokens,
                blocks_from_slab=kept,
                blocks_from_pool=shared,
                partial_key=reuse.partial,
                tokens_from_partial=reuse.rows,
            )
        )
        yield
        if len(slab.rows) > reuse.tokens:
            self.trim(session, reuse.tokens, "not anticipated")
        for part in self.parts(session, keys[kept : kept + shared]):
            if session in self.hurried:
                self.propose(
                    ev.PrewarmAbandoned(session=session, reason="request", computed_tokens=0)
                )
                return False
            self.share(session, None, part)
            yield
        if reuse.partial is not None:
            self.share_part(session, None, reuse.partial, reuse.rows)
            yield
        computed = 0
        while len(slab.rows) < len(ids):
            yield
            if session in self.hurried or self.tape.below(8) == 7:
                self.propose(
                    ev.PrewarmAbandoned(session=session, reason="request", computed_tokens=computed)
                )
                return False
            start = len(slab.rows)
            end = min(start - start % self.chunk + self.chunk, len(ids))
            self.settle_to(session, ids, end, keys)
            computed += end - start
        assert self.cold(ids) == slab.rows, "other KV than a cold cache has"
        self.propose(ev.PrewarmFinished(session=session, tokens=len(ids), computed_tokens=computed))
        return True

    def step(self, session: str) -> None:
        """A session takes its next step."""
        try:
            next(self.work[session])
        except StopIteration:
            self._done(session)
        except Violated:
            self._done(session)
            raise

    def _done(self, session: str) -> None:
        self.work.pop(session, None)
        self.cancelled.discard(session)
        self.hurried.discard(session)

    def finish(self, session: str) -> None:
        """A session works until it is idle."""
        self.until_selected(session)
        while session in self.work:
            self.step(session)

    def until_selected(self, session: str) -> None:
        """Those that a session waits for work, until its own path is selected."""
        while session in self.work and (request := self.state.session(session).request) is not None:
            if request.path is not None:
                break
            held = self.state.session(session)
            if request.joined is not None and paths.waits(self.state, held):
                self.step(self.state.requests[request.joined.leader])
            else:
                self.step(session)

    def serve(self, talk: Talk, **kwargs: Any) -> str:
        """Serve a request from its arrival until the session is idle."""
        session = self.ask(talk, **kwargs)
        assert session is not None
        self.finish(session)
        return session

    def crash(self, session: str) -> None:
        """A session's own code fails."""
        self.take(self.ledger.record_crash(session=session, message="it fell", trace="here"))
        self._done(session)

    # histories

    def play(self) -> Driver:
        """Play the history on the tape."""
        self.start()
        while not self.tape.over:
            self._move()
        return self

    def _move(self) -> None:
        move = self.tape.below(40)
        if move < 18 and self.work:
            session = self.tape.one_of(sorted(self.work))
            for _ in range(1 + self.tape.below(16)):
                if session in self.work:
                    self.step(session)
        elif move < 24 and len(self.work) < 5:
            self._client()
        elif move == 24 and self.work:
            self.cancelled.add(self.tape.one_of(sorted(self.work)))
        elif move in (25, 26) and self.evictable():
            self.evict(self.tape.one_of(self.evictable()), self._why_removed())
        elif move == 27 and self.releasable():
            self.release(self.tape.one_of(self.releasable()))
        elif move == 28:
            self._forget()
        elif move == 29 and self.tape.below(2) == 0:
            kinds = ("stopped", "lost") if self.state.requests else ("stopped", "lost", "unloaded")
            kind = self.tape.one_of(kinds)
            self.end_run(kind)
            fingerprint = self.tape.one_of((FP_A, FP_A, FP_B))
            if kind == "unloaded":
                self.load_model(fingerprint)
            else:
                if kind == "lost":
                    self.propose(ev.NodeTakenOver(token=self.state.lease + 1, by="operator"))
                    at, _ = self.state.heads_seen.get("n2", (0, ""))
                    self.propose(ev.HeadsSeen(heads=(("n2", at + 7, "ab"), ("n3", at + 1, "cd"))))
                    lost, position = f"{at + 1}:cd", at // 2
                    loss = ev.LossSeen(node="n3", lost=lost, position=position, row_hash="ef")
                    self.propose(loss)
                self.start(fingerprint)
        elif move == 30 and self._crashes and self.state.sessions:
            self.crash(self.tape.one_of(sorted(self.state.sessions)))
        elif move == 32 and self.loadable():
            self.load(self.tape.one_of(self.loadable()))
        elif move in (33, 34) and self.spillable():
            self.spill(self.tape.one_of(self.spillable()))
        elif move == 35 and self.files:
            self.reject(self.tape.one_of(sorted(self.files)), self.tape.one_of(FAULTS))
        elif move == 31:
            self.propose(self.tape.one_of((*NOTES, *self._of_agents(), *self._of_turns())))
        elif move >= 36 and self.check is not None:
            self.end_check(self.tape.one_of(("same", "same", "interrupted", "failed")))
        elif move >= 36 and self.checkable():
            self.begin_check(self.tape.one_of(self.checkable()))

    def _of_agents(self) -> list[ev.Event]:
        """What may become of the agent ``notes`` of tenant t1 now."""
        if "@t1/agent/notes" in self.state.agents:
            return [ev.AgentDeleted(agent="notes", tenant="t1")]
        return [attrs.evolve(AGENT, persist=self.tape.below(2) == 1)]

    def _of_turns(self) -> list[ev.Event]:
        """The deletions of the first stored turn."""
        turns = sorted(self.state.turns.items())[:1]
        return [ev.TurnForgotten(of_request=name, tenant=turn.tenant) for name, turn in turns]

    def _forget(self) -> None:
        resting = [
            name
            for name, session in sorted(self.state.sessions.items())
            if session.state in ("idle", "cold", "quarantined") and session.slab is None
        ]
        if resting:
            self.propose(ev.SessionClosed(session=self.tape.one_of(resting), reason="forgotten"))

    def _client(self) -> None:
        if not self.talks or self.tape.below(5) == 0:
            talk = self._new_talk()
            self.talks.append(talk)
        else:
            talk = self._changed(self.tape.one_of(self.talks))
            if talk not in self.talks:
                self.talks.append(talk)
        thought = (90 + self.tape.below(2),) if self.tape.below(3) == 0 else ()
        answer = thought + tuple(60 + self.tape.below(4) for _ in range(1 + self.tape.below(7)))
        self.ask(
            talk,
            cache_prompt=self.tape.below(12) != 11,
            cache_mode="prefix" if self.tape.below(8) == 7 else "full",
            answer=answer,
            room=1 + self.tape.below(8),
            based=self.tape.below(6) != 5,
        )

    def _words(self) -> tuple[int, ...]:
        return tuple(10 + self.tape.below(2) for _ in range(1 + self.tape.below(6)))

    def _new_talk(self) -> Talk:
        parts: list[Part] = []
        if self.tape.below(4) == 3:
            parts.append(("tools", (20 + self.tape.below(2),) * 5))
        if self.tape.below(2) == 1:
            parts.append(("system", (30 + self.tape.below(2),) * 6))
        parts.append(("user", self._words()))
        tenant = self.tape.one_of(("t1", "t1", "t2"))
        return Talk(
            tenant=tenant,
            group=self.tape.one_of((None, None, "g1", "g2")),
            name=self.tape.one_of((None, None, None, None, f"{tenant}-n1", "s1")),
            parts=tuple(parts),
        )

    def _changed(self, talk: Talk) -> Talk:
        how = self.tape.below(10)
        parts, answer = talk.parts, talk.answer
        if how < 6 and answer is not None:
            said = answer if self.tape.below(3) else (80, *answer[1:])
            more: tuple[Part, ...] = (("assistant", said), ("user", self._words()))
            parts = (*parts, *more)
        elif how == 6:
            parts = parts[: 1 + self.tape.below(len(parts))]
        elif how == 7:
            place = self.tape.below(len(parts))
            changed = (parts[place][0], (*parts[place][1], 40))
            parts = (*parts[:place], changed, *parts[place + 1 :])
        elif how == 8:
            parts = (*parts, ("user", self._words()))
        group = self.tape.one_of((None, "g1")) if how == 9 else talk.group
        return Talk(tenant=talk.tenant, group=group, name=talk.name, parts=parts)
