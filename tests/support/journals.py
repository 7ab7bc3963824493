"""
Journals for tests, written through the ledger: a healthy one, and one for each invariant that an
event can violate.

``Builder`` simulates engine and store: it measures as they would, so its events are correct unless
a test changes them. Ids and times are counters, so the same calls give the same rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.errors import BugError
from cairn.journal.keys import (
    block_keys,
    fingerprint_of,
    ids_hash,
    part_alone,
    part_hash,
    tested_fields,
)
from cairn.journal.ledger import Clock, Ledger
from cairn.journal.rows.codec import Row, decode
from cairn.journal.state import Model

SECRET = b"a tenant's secret"
TENANT = "tenant-1"
FIELDS = {
    "weights": "w" * 8,
    "scale": 0.1,
    "name": "Grüße 🪨",
    "block_tokens": 4,
    "decode_rows": 2,
    "context_tokens": 1024,
    "kv_policy": "full",
    "row_class": [],
    "markers": ["<think>", "</think>"],
}
FINGERPRINT = fingerprint_of(FIELDS)
CHUNK = 4
CONTEXT = 1024
LAYERS = 3
SLAB_BYTES = 4096
BLOCK_BYTES = 256
START_US = 1_767_225_600_000_000
JUNE_US = 1_780_272_000_000_000
MODEL = Model(
    name="tiny",
    fingerprint="f",
    layers=1,
    block_tokens=4,
    decode_rows=1,
    context_tokens=64,
    reusable=True,
    pool_slabs=1,
    pool_bytes=1,
    blocks_bytes=80,
    blocks_max=0,
    kv_sinks=0,
    kv_window=0,
    kv_rows=0,
    min_cache_tokens=0,
    state_blocks=0,
    grain=4,
)
"""A loaded model, for tests of the fold without a journal."""


def model_loaded() -> ev.ModelLoaded:
    """The builder's model is loaded."""
    return ev.ModelLoaded(
        name="tiny",
        fingerprint=FINGERPRINT,
        fields=FIELDS,
        layers=LAYERS,
        block_tokens=CHUNK,
        decode_rows=2,
        context_tokens=CONTEXT,
        reusable=True,
        pool_slabs=64,
        pool_bytes=64 * SLAB_BYTES,
        blocks_bytes=1 << 40,
        blocks_max=0,
        directory="",
        adapter="",
        dtype="",
        kv_sinks=0,
        kv_window=0,
        kv_rows=0,
        min_cache_tokens=0,
        state_blocks=0,
        grain=CHUNK,
    )


def self_test(*, passed: bool) -> ev.SelfTestFinished:
    """The self-test of the builder's model."""
    return ev.SelfTestFinished(
        fingerprint=FINGERPRINT,
        base_fingerprint=fingerprint_of(tested_fields(FIELDS)),
        findings={"rows_do_not_matter": passed, "naive_differs": False},
        passed=passed,
        error_max=1e-7,
        decode_shapes=(2,),
        row_class=(),
        row_class_reason="",
        without_drafts="",
        duration_us=5,
        from_cache=False,
    )


class Builder:
    """
    A run without a server: each method proposes the events that the server would.

    Attributes:
        time_us: the time of the last row; a test may set it forward.
    """

    def __init__(self) -> None:
        self._ids = 0
        self.time_us = START_US
        self.rows: list[Row] = []
        self.bug: BugError | None = None
        self.ledger = Ledger(Clock(new_id=self._id, now_us=self._now, version="0.0.test"))

    def _id(self) -> str:
        self._ids += 1
        return str(uuid.uuid5(uuid.NAMESPACE_OID, str(self._ids)))

    def _now(self) -> int:
        self.time_us += 1000
        return self.time_us

    def propose(self, *events: ev.Event) -> None:
        """Append events to the journal, with the events that a violation adds."""
        outcome = self.ledger.propose(events)
        self.rows.extend(outcome.rows)
        self.bug = outcome.bug or self.bug

    def crash(self, session: str | None) -> None:
        """A session, or work of none, failed because of an error in its own code."""
        outcome = self.ledger.record_crash(
            session=session, message="ZeroDivisionError", trace="Traceback: here\n"
        )
        self.rows.extend(outcome.rows)
        self.bug = outcome.bug

    def start(self) -> None:
        """The server starts and loads its model."""
        self.propose(
            ev.ServerStarted(boot="boot-1", cairn_version="0.0.test", settings={"port": 1}),
            model_loaded(),
        )

    def keeping(self, **fields: Any) -> Callable[[ev.Event], ev.Event]:
        """For ``turn``: the turn is stored, with these fields, by its agent if any."""
        agent = fields.get("agent")

        def wrong(event: ev.Event) -> ev.Event:
            if agent is not None and isinstance(event, ev.SessionOpened):
                return attrs.evolve(event, named=True)
            if agent is not None and isinstance(event, ev.RequestReceived):
                return attrs.evolve(event, session_name=event.session)
            if isinstance(event, ev.RequestFinished):
                turn = {
                    "session": event.session,
                    "request": event.request,
                    "tenant": TENANT,
                    "agent": None,
                    "previous": None,
                    "created_s": 1,
                    "question": "[]",
                    "answer": f'[{{"said":{{"text":"{self._released(event.request)}"}}}}]',
                    "note": "{}",
                }
                self.propose(ev.TurnStored(**{**turn, **fields}))
            return event

        return wrong

    def _released(self, request: str) -> str:
        return released((decode(row).event for row in self.rows), request)[0]

    def stop(self) -> None:
        """The server shuts down cleanly."""
        self.propose(ev.ServerStopped(boot="boot-1", reason="signal"))

    def spill(self, size: int) -> None:
        """Every block in memory gets a file of ``size`` bytes, if it has none."""
        for block in list(self.ledger.state.blocks.values()):
            pool = self.ledger.state.pool
            if block.present and block.file_bytes is None:
                self.propose(
                    ev.BlockSpilled(
                        key=block.key,
                        digest=block.digest,
                        bytes=size,
                        disk_blocks=pool.disk_blocks + 1,
                        disk_bytes=pool.disk_bytes + size,
                    )
                )

    def turn(
        self,
        session: str,
        request: str,
        messages: Sequence[str],
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        wrong: Callable[[ev.Event], ev.Event] = lambda event: event,
    ) -> None:
        """
        A request from its arrival until the session is idle.

        Args:
            messages: the conversation; every second one is the assistant's.
            prompt: token ids, beginning with those of the session's last prompt.
            wrong: called with each event before it is proposed; returns the event to propose.
        """
        for event in self.steps(session, request, messages, tuple(prompt), tuple(answer)):
            self.propose(wrong(event))
            if self.bug is not None:
                return

    def steps(
        self,
        name: str,
        request: str,
        messages: Sequence[str],
        prompt: tuple[int, ...],
        answer: tuple[int, ...],
    ) -> Any:
        """The events of a turn, each based on the state after the events before it."""
        if name not in self.ledger.state.sessions:
            yield ev.SessionOpened(
                session=name, tenant=TENANT, fingerprint=FINGERPRINT, group=None, named=False
            )
        yield self._received(name, request, messages, prompt, len(answer))
        yield self._selected(name, request)
        path = self._open(name).path
        assert path is not None
        held = self.ledger.state.session(name)
        from_slab = path.blocks_from_slab * CHUNK
        if held.slab is None:
            yield self._slab(name)
        elif held.cached_tokens > from_slab:
            yield self.trimmed(name, held.cached_tokens, from_slab)
        if path.blocks_from_pool:
            yield self._shared(name, request, path)
        for start in range(path.reused_tokens, len(prompt), CHUNK):
            end = min(start + CHUNK, len(prompt))
            drawn = answer[:1] if end == len(prompt) else ()
            yield self.extended(name, request, "prefill", (start, end), prompt[start:end], drawn)
            if end % CHUNK == 0:
                yield self._sealed(name, prompt, end)
        yield ev.TokensEmitted(
            session=name, request=request, first=0, emitted=1, ids=answer[:1], text="a "
        )
        end = len(prompt)
        if len(answer) > 1:
            span = (end, end + len(answer) - 1)
            yield attrs.evolve(
                self.extended(name, request, "decode", span, answer[:-1], answer[1:]),
                emitted=len(answer) - 2,
                text="b" * (len(answer) - 2),
            )
            held_back = len(answer) - 1
            yield ev.TokensEmitted(
                session=name,
                request=request,
                first=held_back,
                emitted=1,
                ids=answer[held_back:],
                text="b",
            )
        yield ev.RequestFinished(
            session=name,
            request=request,
            finish_reason="stop",
            prompt_tokens=len(prompt),
            cached_tokens=path.reused_tokens,
            answer_tokens=len(answer),
            completion_tokens=len(answer),
        )
        canonical = len(prompt) // CHUNK * CHUNK
        if self.ledger.state.session(name).cached_tokens > canonical:
            yield self.trimmed(name, self.ledger.state.session(name).cached_tokens, canonical)
        yield ev.SessionSettled(session=name, canonical_tokens=canonical, complete=True)

    def _open(self, name: str) -> Any:
        request = self.ledger.state.session(name).request
        assert request is not None
        return request

    def _received(
        self,
        name: str,
        request: str,
        messages: Sequence[str],
        prompt: tuple[int, ...],
        answer_tokens: int,
    ) -> ev.RequestReceived:
        last = self.ledger.state.session(name).last
        parent, parts = "", []
        for index, text in enumerate(messages):
            label = "assistant" if index % 2 else "user"
            parent = part_hash(
                secret=SECRET, tenant=TENANT, parent=parent, label=label, content=text.encode()
            )
            alone = part_alone(secret=SECRET, tenant=TENANT, label=label, content=text.encode())
            parts.append((label, parent, alone))
        keys = block_keys(
            secret=SECRET, fingerprint=FINGERPRINT, tenant=TENANT, ids=prompt, block_tokens=CHUNK
        )
        base_tokens = (
            len(last.prompt_ids)
            if last and prompt[: len(last.prompt_ids)] == last.prompt_ids
            else 0
        )
        base_parts = (
            len(last.chain) if last and tuple(parts[: len(last.chain)]) == last.chain else 0
        )
        return ev.RequestReceived(
            session=name,
            request=request,
            protocol="openai",
            client="an-agent",
            tenant=TENANT,
            fingerprint=FINGERPRINT,
            session_name=None,
            group=None,
            cache_prompt=True,
            base_request=last.request if last else None,
            base_parts=base_parts,
            new_parts=tuple(parts[base_parts:]),
            base_tokens=base_tokens,
            new_ids=prompt[base_tokens:],
            base_keys=base_tokens // CHUNK,
            new_keys=keys[base_tokens // CHUNK :],
            prompt_tokens=len(prompt),
            max_tokens=max(answer_tokens, 8),
            sampling={"temperature": 0.7, "top_p": 1.0, "stop": ["\u2028", "Ende"]},
            seed=2**63 - 1,
            seed_given=True,
            requested_model="tiny",
            thoughts=0,
            grammar=None,
            words=messages[-1] if messages else None,
            waited_us=0,
            traceparent=None,
            cache_mode="full",
            ttl_s=None,
        )

    def _selected(self, name: str, request: str) -> ev.PathSelected:
        state = self.ledger.state
        session = state.session(name)
        decision = paths.select(state, session, self._open(name))
        return ev.PathSelected(
            session=name,
            request=request,
            rules_version=paths.RULES_VERSION,
            decided_at=state.position,
            diverged_text=None,
            diverged_from=None,
            **attrs.asdict(decision),
        )

    def coverage(self, end: int) -> ev.Coverage:
        return ((LAYERS, 0, end),)

    def _slab(self, name: str) -> ev.SlabAcquired:
        pool = self.ledger.state.pool
        return ev.SlabAcquired(
            session=name,
            slab=pool.slabs + 1,
            capacity_tokens=CONTEXT,
            bytes=SLAB_BYTES,
            pool_slabs=pool.slabs + 1,
            pool_bytes=pool.slab_bytes + SLAB_BYTES,
        )

    def trimmed(self, name: str, held: int, end: int) -> ev.CacheTrimmed:
        return ev.CacheTrimmed(
            session=name, cached_tokens=held, end=end, coverage=self.coverage(end), reason="settle"
        )

    def _shared(self, name: str, request: str, path: ev.PathSelected) -> ev.BlocksRestored:
        keys = self._open(name).prompt_keys[path.blocks_from_slab :][: path.blocks_from_pool]
        end = path.reused_tokens
        return ev.BlocksRestored(
            session=name,
            request=request,
            start=path.blocks_from_slab * CHUNK,
            end=end,
            keys=keys,
            digests=tuple(self.ledger.state.blocks[key].digest for key in keys),
            coverage=self.coverage(end),
            duration_us=5,
        )

    def extended(
        self,
        name: str,
        request: str | None,
        step: ev.Step,
        span: tuple[int, int],
        ran: tuple[int, ...],
        sampled: tuple[int, ...],
    ) -> ev.CacheExtended:
        return ev.CacheExtended(
            session=name,
            request=request,
            step=step,
            start=span[0],
            end=span[1],
            input_hash=ids_hash(ran),
            coverage=self.coverage(span[1]),
            sampled=sampled,
            logprobs=tuple(-1 / (3 + token) for token in sampled),
            duration_us=17,
        )

    def _sealed(self, name: str, prompt: tuple[int, ...], end: int) -> ev.BlockSealed:
        state = self.ledger.state
        key = self._open(name).prompt_keys[end // CHUNK - 1]
        held = state.session(name).slab_keys
        known = state.blocks.get(key)
        added = known is None or not known.present
        return ev.BlockSealed(
            session=name,
            key=key,
            parent=held[-1] if held else None,
            digest=ids_hash(prompt[:end]),
            start=end - CHUNK,
            end=end,
            bytes=BLOCK_BYTES,
            resealed=known is not None,
            stored=True,
            memory_blocks=state.pool.blocks + added,
            memory_bytes=state.pool.block_bytes + BLOCK_BYTES * added,
        )


FIRST = ("Hello", (11, 12, 13, 14, 15, 16, 17, 18, 19, 20), (21, 22, 23))
SECOND = ((*FIRST[1], *FIRST[2], 31, 32, 33, 34, 35), (41, 42))


def conversation(wrong: Callable[[ev.Event], ev.Event] = lambda event: event) -> Builder:
    """A running server with one session, ``s1``, and its requests ``r1`` and ``r2``."""
    made = Builder()
    made.start()
    text, prompt, answer = FIRST
    made.turn("s1", "r1", [text], prompt, answer, wrong=wrong)
    if made.bug is None:
        made.turn("s1", "r2", [text, "An answer", "And?"], *SECOND, wrong=wrong)
    return made


def healthy() -> list[Row]:
    """A correct conversation of two turns; the second reuses two blocks of the first."""
    made = conversation()
    made.stop()
    return made.rows


def aged() -> list[Row]:
    """
    Sessions s1 and s2 of January and s3 of June, none of them closed; s3 was compared with s1.
    """
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello", "Hi", "Who?"], range(11, 21), (21, 22, 23))
    made.turn("s2", "r2", ["Another"], range(40, 50), (51, 52))
    made.stop()
    made.time_us = JUNE_US
    made.start()
    made.turn("s3", "r3", ["Hello", "No", "Well"], (*range(11, 19), 90, 91), (61, 62))
    made.stop()
    return made.rows


def beside_files(size: int) -> tuple[Builder, set[str], set[str]]:
    """
    A run of January with files of a number of bytes each for all its blocks, up to where it stops,
    and then a clock in June.

    Returns:
        The builder, and the keys of the blocks that s1 has, and of those that s2 alone has.
    """
    builder = Builder()
    builder.start()
    builder.propose(
        ev.BlockFilesScanned(budget_bytes=1 << 30, disk_blocks=0, disk_bytes=0, removed_files=0)
    )
    builder.turn("s1", "r1", ["Hello", "Hi", "Who?"], range(11, 21), (21, 22))
    first = set(builder.ledger.state.blocks)
    builder.turn("s2", "r2", ["Another"], range(40, 50), (51, 52))
    second = set(builder.ledger.state.blocks) - first
    builder.spill(size)
    builder.stop()
    builder.time_us = JUNE_US
    return builder, first, second


def in_mid_request() -> Builder:
    """A server that was killed while session s1 had an answer in progress."""
    made = Builder()
    made.start()
    made.turn("s1", "r1", ["Hello"], range(11, 21), (21, 22, 23))
    prompt = (*range(11, 21), 21, 22, 23, 31, 32, 33, 34, 35777, 35)
    for event in made.steps("s1", "r2", ["Hello", "An answer", "And?"], prompt, (41, 42)):
        made.propose(event)
        if isinstance(event, ev.TokensEmitted):
            break
    return made


def _second(event: ev.Event) -> bool:
    return getattr(event, "request", None) == "r2"


def _invariant_1(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.CacheExtended) and _second(event) and event.step == "decode":
        return attrs.evolve(event, coverage=((LAYERS - 1, 0, event.end), (1, 0, event.end - 1)))
    return event


def _invariant_2(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.CacheExtended) and _second(event):
        return attrs.evolve(event, coverage=((LAYERS, 1, event.end),))
    return event


def _invariant_3(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.BlockSealed) and event.resealed:
        return attrs.evolve(event, digest="0" * 32)
    return event


def _invariant_4(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.PathSelected) and _second(event):
        return attrs.evolve(event, blocks_from_slab=1, reused_tokens=CHUNK)
    return event


def _invariant_5(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.SlabAcquired):
        return attrs.evolve(event, pool_bytes=event.pool_bytes + 1)
    return event


def _invariant_6(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.SessionSettled):
        return ev.RequestCancelled(session=event.session, request="r1", stage="decode")
    return event


def _invariant_7(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.TokensEmitted) and event.first > 0:
        return attrs.evolve(event, ids=(*event.ids[:-1], 99))
    return event


_WRONG = {
    "INV-1": _invariant_1,
    "INV-2": _invariant_2,
    "INV-4": _invariant_4,
    "INV-5": _invariant_5,
    "INV-6": _invariant_6,
    "INV-7": _invariant_7,
}

BREAKABLE = ("INV-1", "INV-2", "INV-3", "INV-4", "INV-5", "INV-6", "INV-7", "CRASH")


def broken(invariant: str) -> tuple[list[Row], str]:
    """
    A journal with a recorded violation of one invariant, and its bug id.

    Args:
        invariant: one of ``BREAKABLE``. For INV-8 no event is wrong; see ``tampered``.
    """
    if invariant == "INV-3":
        made = conversation()
        prompt = SECOND[0]
        # The store loses its blocks, so that another session computes the same blocks again.
        made.stop()
        made.start()
        made.turn("s2", "r3", ["Hello"], prompt[:9], (50, 51), wrong=_invariant_3)
    elif invariant == "CRASH":
        made = conversation()
        made.crash("s1")
    else:
        made = conversation(_WRONG[invariant])
    assert made.bug is not None, f"{invariant} did not break"
    assert made.bug.invariant == invariant, made.bug
    return made.rows, made.bug.bug_id


def unrecorded(invariant: str) -> list[Row]:
    """The same journal up to the row that broke it, as a writer without checks would leave it."""
    rows, _ = broken(invariant)
    end = next(index for index, row in enumerate(rows) if row.kind == "invariant_violated")
    return rows[:end]


def tampered() -> list[Row]:
    """A healthy journal in which a payload was changed afterwards (INV-8)."""
    rows = healthy()
    rows[3] = attrs.evolve(rows[3], public=rows[3].public.replace(b"openai", b"opened"))
    return rows


def released(events: Iterable[ev.Event], request: str | None = None) -> tuple[str, int]:
    """The text that events release, for one request if it is named, and how many tokens."""
    text, tokens = "", 0
    for event in events:
        match event:
            case ev.TokensEmitted() if request in (None, event.request):
                text, tokens = text + event.text, tokens + len(event.ids)
            case ev.CacheExtended() if request in (None, event.request):
                text, tokens = text + event.text, tokens + event.emitted
            case _:
                pass
    return text, tokens


NOTES = "@tenant-1/agent/notes"
"""The session of an agent of ``TENANT``."""


def agent_created(name: str = "notes", **fields: Any) -> ev.AgentCreated:
    """An agent, of ``TENANT`` if nothing else is given, comes to be."""
    plain = ev.AgentCreated(
        agent=name,
        tenant=TENANT,
        model="",
        max_context=None,
        persist=True,
        created_s=1,
        forked_from=None,
        head=None,
        system="Be brief.",
        tools="[]",
    )
    return attrs.evolve(plain, **fields)


def speaking() -> Builder:
    """
    The agent ``notes`` has two turns of January and one of June, in one session that is open still;
    another agent, of January, was deleted.
    """
    made = Builder()
    made.start()
    made.propose(agent_created("gone"), agent_created())
    keeps = made.keeping(agent="notes", texts={}, texts_at={})
    made.turn(NOTES, "r3", ["Another"], range(40, 50), (51, 52), wrong=keeps)
    prompt = (*range(40, 50), 51, 52, 60, 61, 62, 63)
    keeps = made.keeping(agent="notes", previous="r3", texts={}, texts_at={})
    made.turn(NOTES, "r4", ["Another", "Yes", "More"], prompt, (53, 54), wrong=keeps)
    made.propose(ev.AgentDeleted(agent="gone", tenant=TENANT))
    made.stop()
    made.time_us = JUNE_US
    made.start()
    prompt = (*prompt, 53, 54, 70, 71, 72, 73)
    keeps = made.keeping(agent="notes", previous="r4", texts={}, texts_at={})
    texts = ["Another", "Yes", "More", "Fine", "Last"]
    made.turn(NOTES, "r5", texts, prompt, (55, 56), wrong=keeps)
    made.stop()
    assert made.bug is None, made.bug
    return made


def stored() -> list[Row]:
    """
    A server that stores turns: r1 and r2 of s1, of which r1 is deleted; r3 of the agent ``notes``,
    whose history the agent ``copy`` begins with; and the operator accepted a failed self-test.
    """
    made = Builder()
    made.start()
    made.stop()
    made.propose(
        ev.ServerStarted(boot="boot-1", cairn_version="0.0.test", settings={"port": 1}),
        self_test(passed=False),
        ev.LossAccepted(fact="it ends at row 4, and had row 9 before", heads=(f"9:{'ab' * 32}",)),
        ev.OperatorActed(action="accept_unstable", detail="rows_do_not_matter"),
        model_loaded(),
    )
    text, prompt, answer = FIRST
    keeps = made.keeping(question="[]", texts={"tools": "[]"}, texts_at={})
    made.turn("s1", "r1", [text], prompt, answer, wrong=keeps)
    row = next(recorded for recorded in made.rows if recorded.kind == "turn_stored").position
    keeps = made.keeping(question="[2]", previous="r1", texts={}, texts_at={"tools": row})
    made.turn("s1", "r2", [text, "An answer", "And?"], *SECOND, wrong=keeps)
    made.propose(ev.TurnForgotten(of_request="r1", tenant=TENANT))
    agent = agent_created()
    made.propose(agent)
    keeps = made.keeping(agent="notes", texts={}, texts_at={})
    made.turn(NOTES, "r3", ["Another"], range(40, 50), (51, 52), wrong=keeps)
    prompt = (*range(40, 50), 51, 52, 60, 61, 62, 63)
    keeps = made.keeping(agent="notes", previous="r3", texts={}, texts_at={})
    made.turn(NOTES, "r4", ["Another", "Yes", "More"], prompt, (53, 54), wrong=keeps)
    made.propose(attrs.evolve(agent, agent="copy", forked_from="notes", head="r4"))
    made.propose(ev.AgentDeleted(agent="notes", tenant=TENANT))
    made.propose(
        ev.JournalStalled(
            reason="disk_full", error="full", rows_waiting=1, requests_refused=2, duration_us=3
        ),
        ev.RequestRejected(request="r5", tenant=TENANT, status=400, code="too_long"),
        ev.EmbeddingsComputed(
            request="r6",
            tenant=TENANT,
            model="minilm",
            fingerprint="e" * 64,
            inputs=2,
            tokens=9,
            duration_us=4,
        ),
        ev.ModelUnloaded(fingerprint=FINGERPRINT, reason="-", active_bytes=7),
    )
    made.stop()
    assert made.bug is None, made.bug
    return made.rows


def handed_over(**fields: Any) -> tuple[ev.Event, ...]:
    """
    The agent ``n2.come`` of ``TENANT``, which node n1 released with one turn, and which is released
    to node n3.

    Args:
        fields: of the first two events.
    """
    row = {"agent": "n2.come", "tenant": TENANT, "created_s": 1, "node": "n1", **fields}
    return (
        ev.SessionAdopted(
            **row,
            model="",
            max_context=None,
            of_agent="n1.notes",
            turns=1,
            position=9,
            row_hash="ab" * 32,
            system="Be brief.",
            tools="[]",
        ),
        ev.TurnAdopted(
            **row,
            request="n2.r1",
            of_request="n1.r1",
            previous=None,
            finish_reason="stop",
            prompt_tokens=5,
            cached_tokens=2,
            completion_tokens=3,
            answer_tokens=4,
            position=7,
            row_hash="cd" * 32,
            end_position=8,
            end_hash="ef" * 32,
            question='[{"role":"user","content":"Hello"}]',
            answer='[{"said":{"text":"Yes"}}]',
        ),
        ev.SessionReleased(agent="n2.come", tenant=TENANT, to="n3.come", to_node="n3"),
    )
