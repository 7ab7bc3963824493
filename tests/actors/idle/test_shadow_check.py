"""The shadow check: what it chooses, what it finds, and that a request always goes first."""

from __future__ import annotations

import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from cairn.actors.boot import BootRefused
from cairn.actors.errors import Broken
from cairn.actors.idle import shadow_check as shadow
from cairn.actors.idle.activity import Activity
from cairn.actors.requests.messages import Accepted, Generate
from cairn.actors.server import Server
from cairn.actors.sessions.session import SessionActor
from cairn.engine.answer.grammar import Constraint
from cairn.engine.errors import GrammarDeadEnd, NotFinite
from cairn.engine.mlx import start as mlx_start
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.reports import SelfTestReport
from cairn.engine.sampling import Sampling
from cairn.engine.schedule import passes
from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from cairn.journal.shadow import is_chosen
from cairn.journal.state import SessionId
from cairn.journal.tenants import LOCAL
from tests.actors.sessions.test_grain import C as BLOCK
from tests.actors.sessions.test_grain import serving_any_cut
from tests.support.held_engine import Hold
from tests.support.in_process_server import (
    Said,
    ask,
    chat,
    generate,
    local,
    serving,
    turn_clock,
    wait_idle,
)
from tests.support.self_tests import without_row_class

LONG = "Stone on stone on stone, and then the wind that takes none of them. " * 6
C = 16
SETTINGS: dict[str, Any] = {
    "block_tokens": C,
    "decode_rows": 2,
    "shadow_share": 1.0,
    "prewarm": False,  # so that blocks over the answer have exactly its tokens
}


HELD = Constraint(schema={"type": "array", "items": {"type": "string"}, "minItems": 40})


def command(text: str, **changes: Any) -> Generate:
    """A request of one message."""
    messages = (Message(role="user", content=text),)
    return generate(Conversation(messages=messages), **{"max_tokens": 40, **changes})


class Watch:
    """Waits for events of a server."""

    def __init__(self, server: Server) -> None:
        self.seen: list[ev.Event] = []
        self._moved = trio.lowlevel.ParkingLot()
        server.observe(self._take)

    def _take(self, recorded: ev.Recorded) -> None:
        self.seen.append(recorded.event)
        self._moved.unpark_all()

    async def until(self, kind: type[ev.Event], count: int = 1) -> list[Any]:
        """Wait until a number of events of a kind are committed, and return them."""
        with trio.fail_after(120):
            while len(found := self.of(kind)) < count:
                await self._moved.park()
        return found

    def of(self, kind: type[ev.Event]) -> list[Any]:
        """The events of a kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]


def events(store: MemoryStore) -> list[ev.Event]:
    """The events in a store."""
    return [decode(row).event for row in store.rows]


def is_of_check(server: Server, slab: int) -> bool:
    """Whether a slab is that of the shadow check."""
    sessions = server.loaded.sequencer.state.sessions.values()
    return all(s.slab is None or s.slab.id != slab for s in sessions)


def hold_in_check(server: Server) -> Hold:
    """Hold the engine in a pass over the shadow check's slab."""
    return Hold(server, "run_chunk", lambda slab, *_: is_of_check(server, slab))


def fail_decoding(
    server: Server, monkeypatch: pytest.MonkeyPatch, fault: Exception, number: int
) -> None:
    """Make a decode pass of the first shadow check fail: the second one has the number 2."""
    device: Any = server.loaded.engine.device
    decode_pass, calls = device.decode, list[int]()

    def fails(rows: Any) -> Any:
        if is_of_check(server, rows[0].slab):
            calls.append(rows[0].token)
            if len(calls) == number:
                raise fault
        return decode_pass(rows)

    monkeypatch.setattr(device, "decode", fails)


@pytest.mark.long_but("greedy", "held", "stopped")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling": Sampling(temperature=0.9, top_k=50, repetition_penalty=1.2)},
        {"sampling": Sampling(temperature=0.8, logit_bias=((7, 4.0),)), "top_logprobs": 5},
        {"stop": ("e",), "top_logprobs": None},
        {"constraint": HELD, "sampling": Sampling(temperature=0.9)},
        {"tenant": "alice"},
    ],
    ids=["greedy", "penalised", "biased", "stopped", "held", "of a tenant"],
)
def test_an_answer_is_computed_again_and_is_the_same(
    model_directory: Path, changes: dict[str, Any]
) -> None:
    """
    It compares all tokens of the answer, each block of the prompt, the blocks that settling
    computed over the answer, and the blocks in memory. The slab is released, and the journal
    verifies.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **SETTINGS) as server:
            watch = Watch(server)
            tenant = changes.get("tenant", LOCAL)
            asked = {name: value for name, value in changes.items() if name != "tenant"}
            await ask(server, command(LONG, **asked), tenant)
            await watch.until(ev.ShadowEnded)
            slabs = server.statistics().slabs
            engine: Any = server.loaded.engine.device
            assert slabs == engine.pool.measure()[0] == 1

    with capture_logs() as lines:
        trio.run(main)

    found = events(store)
    (checked,) = [event for event in found if isinstance(event, ev.ShadowChecked)]
    (finished,) = [event for event in found if isinstance(event, ev.RequestFinished)]
    (ended,) = [event for event in found if isinstance(event, ev.ShadowEnded)]
    blocks = [event for event in found if isinstance(event, ev.BlockSealed)]
    size = max(event.end - event.start for event in blocks)
    sealed = [event for event in blocks if event.end - event.start == size]
    assert "same" == ended.result
    assert finished.request == checked.request == ended.request
    assert (finished.prompt_tokens, finished.answer_tokens) == (
        checked.prompt_tokens,
        checked.answer_tokens,
    )
    assert None is checked.first_difference
    assert tuple(event.key for event in sealed) == checked.keys
    assert tuple(event.digest for event in sealed) == checked.digests == checked.memory_digests
    if "stop" not in changes:
        assert sealed[-1].end > checked.prompt_tokens, "nothing was settled over the answer"
    assert () == replay(store.read()).findings
    (line,) = [line for line in lines if line["event"] == "shadow check"]
    assert ("same", finished.request, finished.session) == (
        line["ended"],
        line["request"],
        line["session"],
    )


def test_request_ids_select_the_share_that_is_checked(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    With a share of 0 no answer is checked. With a larger share exactly those answers are checked
    that their request ids select.
    """
    monkeypatch.setattr(shadow, "TRIES", 100)  # the requests below interrupt each other's checks
    store = MemoryStore()
    share = 0.5
    known = [str(uuid.UUID(int=place)) for place in range(100)]
    ids = [one for one in known if is_chosen(one, share)][:2]
    ids[1:1] = [one for one in known if not is_chosen(one, share)][:2]

    async def main() -> None:
        async with serving(model_directory, **{**SETTINGS, "shadow_share": 0.0}) as server:
            assert server.loaded.shadow is None
        async with serving(model_directory, store, **{**SETTINGS, "shadow_share": share}) as server:
            watch = Watch(server)
            for place, one in enumerate(ids):
                given = iter([one])
                monkeypatch.setattr(
                    "cairn.actors.clock.new_id",
                    lambda given=given: next(given, str(uuid.uuid4())),
                )
                await ask(server, command(f"{place} {LONG}", max_tokens=2))
            await watch.until(ev.ShadowChecked, 2)
            await watch.until(ev.ShadowEnded, 2)

    trio.run(main)

    finished = [e.request for e in events(store) if isinstance(e, ev.RequestFinished)]
    checked = [e.request for e in events(store) if isinstance(e, ev.ShadowChecked)]
    assert ids == finished
    assert [ids[0], ids[3]] == checked


def test_answers_that_were_decoded_together_are_the_same(model_directory: Path) -> None:
    """
    Answers that were decoded together, in the rows of one pass, are the same when computed alone.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **SETTINGS) as server:
            watch = Watch(server)
            async with trio.open_nursery() as nursery:
                for place in range(2):
                    nursery.start_soon(ask, server, command(f"{place} {LONG}", max_tokens=20))
            await watch.until(ev.ShadowEnded, 2)

    trio.run(main)
    ended = [event for event in events(store) if isinstance(event, ev.ShadowEnded)]
    assert ["same", "same"] == [one.result for one in ended if one.result != "interrupted"]


def test_a_request_goes_first(model_directory: Path) -> None:
    """
    A request that comes during a pass of a check is served next: the check runs no further pass,
    releases its slab, and starts again when the request is answered and its session is idle.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **SETTINGS) as server:
            watch = Watch(server)
            held = hold_in_check(server)
            await ask(server, command(LONG, max_tokens=4))
            await held.wait()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, server, command("Other. " + LONG, max_tokens=4))
                while server.loaded.activity.is_idle:
                    await trio.testing.wait_all_tasks_blocked()
                assert 1 == held.count
                held.go.set()
                (first,) = await watch.until(ev.ShadowEnded)
                assert "interrupted" == first.result
                assert 1 == held.count
            await watch.until(ev.ShadowEnded, 3)

    trio.run(main)

    names = {
        ev.ShadowStarted: "began",
        ev.ShadowEnded: "ended",
        ev.PathSelected: "request",
        ev.RequestFinished: "answered",
        ev.SessionSettled: "settled",
    }
    order = [names[type(event)] for event in events(store) if type(event) in names]
    first = ["request", "answered", "settled", "began"]
    assert first == order[:4]
    # Whether it starts before the slab is released depends on the engine's queue; its answer is
    # later.
    assert {"ended", "request"} == set(order[4:6])
    assert ["answered", "settled", "began", "ended", "began", "ended"] == order[6:]
    results = [e.result for e in events(store) if isinstance(e, ev.ShadowEnded)]
    assert ["interrupted", "same", "same"] == results
    assert () == replay(store.read()).findings


def test_a_request_gets_the_only_slab(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    If the check holds the only slab, a request that needs one waits for the running pass and is
    answered; it is not refused for lack of memory. The session that spared its slab for the check
    records why, and loses nothing that is in blocks.
    """
    said: list[Said] = []
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, pool_slabs=1, **SETTINGS) as server:
            watch = Watch(server)
            held = hold_in_check(server)
            said.append(await ask(server, command(LONG, max_tokens=4)))
            await held.wait()
            assert 1 == server.statistics().slabs
            asked = trio.Event()
            wait_spare_slab = server.loaded.memory.wait_spare_slab

            async def waits() -> bool:
                asked.set()  # the pass cannot end before the request has found no room
                return await wait_spare_slab()

            monkeypatch.setattr(server.loaded.memory, "wait_spare_slab", waits)

            async def again() -> None:
                said.append(await ask(server, command("Other. " + LONG, max_tokens=4)))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(again)
                with trio.fail_after(120):
                    await asked.wait()
                held.go.set()
            await watch.until(ev.ShadowChecked, 2)

    trio.run(main)
    assert 2 == len(said)
    released = [event for event in events(store) if isinstance(event, ev.SlabReleased)]
    assert {"room for a shadow check"} == {event.reason for event in released}
    assert () == replay(store.read()).findings


def test_a_check_that_requests_interrupt_every_time_is_skipped(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A check that requests interrupt every time is skipped, and that is on record. Other ends, such
    as a full journal, do not count as tries.
    """

    async def main() -> None:
        async with serving(model_directory, **SETTINGS) as server:
            watch = Watch(server)
            assert server.loaded.shadow is not None
            settle, ends = server.loaded.engine.settle, list[bool]()

            async def interrupted(run: Any, record: Any, still_needed: Any) -> Any:
                if not watch.of(ev.ShadowStarted) or watch.of(ev.ShadowSkipped):
                    return await settle(run, record, still_needed)
                ends.append(len(ends) < 4)
                if not ends[-1]:
                    server.loaded.activity.arrivals += (
                        1  # a request that came and was answered meanwhile
                    )
                assert ends[-1] or not still_needed()
                return None

            monkeypatch.setattr(server.loaded.engine, "settle", interrupted)
            await ask(server, command(LONG, max_tokens=4))
            (skipped,) = await watch.until(ev.ShadowSkipped)
            assert "interrupted" == skipped.reason
            ended = await watch.until(ev.ShadowEnded, 1)
            assert {"interrupted"} == {one.result for one in ended}
            assert shadow.TRIES == ends.count(False)

    trio.run(main)


def test_a_check_waits_for_room(model_directory: Path) -> None:
    """
    If no slab is free and the only one cannot be spared, because its blocks are not in memory, the
    answer waits and the session keeps its slab. Once that session has ended, the answer is checked.
    """

    async def main() -> None:
        async with serving(model_directory, pool_slabs=1, blocks_bytes=1, **SETTINGS) as server:
            watch = Watch(server)
            await ask(server, command(LONG, max_tokens=4))
            await wait_idle(server)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert [] == watch.of(ev.ShadowStarted)
            assert [] == watch.of(ev.ShadowSkipped)
            assert [] == watch.of(ev.SlabReleased)
            turn_clock(server, 2 * 86_400)
            server.loaded.activity.changed()
            (ended,) = await watch.until(ev.ShadowEnded)
            assert "same" == ended.result
            assert 1 == len(watch.of(ev.SessionClosed))
            assert [] == watch.of(ev.ShadowSkipped)

    trio.run(main)


def test_a_request_that_comes_first_keeps_the_slab(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A request that comes while a different session's slab is being released for a check ends the
    check: no slab is opened ahead of the request, and no request waits for a lock of the check.
    """

    async def main() -> None:
        async with serving(model_directory, pool_slabs=1, **SETTINGS) as server:
            watch = Watch(server)
            give_up, asked, go = SessionActor.give_up_slab, trio.Event(), trio.Event()

            async def slowly(actor: SessionActor, reason: str) -> None:
                if reason == "room for a shadow check" and not asked.is_set():
                    asked.set()
                    await go.wait()
                await give_up(actor, reason)

            monkeypatch.setattr(SessionActor, "give_up_slab", slowly)
            await ask(server, command(LONG, max_tokens=4))
            with trio.fail_after(120):
                await asked.wait()
                await ask(server, command("Other. " + LONG, max_tokens=4))
            assert [] == watch.of(ev.ShadowStarted)
            go.set()
            await watch.until(ev.ShadowChecked, 2)

    trio.run(main)


def test_the_queue_of_checks_is_bounded(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If too many answers wait, the oldest is skipped, and that is on record."""
    monkeypatch.setattr(shadow, "WAITING_MAX", 1)

    async def main() -> None:
        async with serving(model_directory, **SETTINGS) as server:
            watch = Watch(server)
            assert server.loaded.shadow is not None
            monkeypatch.setattr(Activity, "upkeep_may_begin", False)
            for place in range(2):
                await ask(server, command(f"{place} {LONG}", max_tokens=2))
            (skipped,) = await watch.until(ev.ShadowSkipped)
            first, _ = watch.of(ev.RequestFinished)
            assert ("queue_full", first.request) == (skipped.reason, skipped.request)

    trio.run(main)


def test_a_failed_check_affects_no_request(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A failing pass of the check is logged and recorded; the slab is released, and requests are
    served as before.
    """

    async def main() -> None:
        async with serving(model_directory, **SETTINGS) as server:
            watch = Watch(server)

            fail_decoding(server, monkeypatch, RuntimeError("the device gave up"), 1)
            await ask(server, command(LONG, max_tokens=4))
            (skipped,) = await watch.until(ev.ShadowSkipped)
            (ended,) = await watch.until(ev.ShadowEnded)
            assert ("failed", "failed") == (skipped.reason, ended.result)
            await ask(server, command("Other. " + LONG, max_tokens=4))
            *_, ended = await watch.until(ev.ShadowEnded, 2)
            assert "same" == ended.result

    with capture_logs() as lines:
        trio.run(main)
    assert ["error"] == [
        line["log_level"] for line in lines if line["event"] == "a shadow check failed"
    ]


@pytest.mark.parametrize("where", ["open_slab", "close_slab", "record"])
def test_a_failed_check_stops_no_other_check(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """
    An answer whose slab cannot be opened, or whose result cannot be recorded, is skipped, and the
    next one is checked. Only if a slab could not be released, no further check begins: each is
    skipped, and requests are served as before.
    """

    async def main() -> None:
        async with serving(model_directory, **SETTINGS) as server:
            watch = Watch(server)
            device = server.loaded.engine.device
            real = getattr(device, where) if where != "record" else server.loaded.sequencer.append

            def fails(*arguments: Any, **settings: Any) -> Any:
                began = len(watch.of(ev.SlabAcquired)) == 1 and not watch.of(ev.ShadowSkipped)
                if began and (where != "record" or isinstance(arguments[0], ev.ShadowChecked)):
                    raise RuntimeError("the device gave up")
                return real(*arguments, **settings)

            if where == "record":
                monkeypatch.setattr(server.loaded.sequencer, "append", fails)
            else:
                monkeypatch.setattr(device, where, fails)
            await ask(server, command(LONG, max_tokens=4))
            if where != "close_slab":
                (skipped,) = await watch.until(ev.ShadowSkipped)
                assert "failed" == skipped.reason
                assert 1 == server.statistics().slabs
                await ask(server, command("Other. " + LONG, max_tokens=4))
                await watch.until(ev.ShadowChecked)
                (*_, ended) = await watch.until(ev.ShadowEnded, 1 if where == "open_slab" else 2)
                assert "same" == ended.result
            else:
                await watch.until(ev.ShadowChecked)
                assert server.loaded.shadow is not None
                await server.loaded.memory.wait_spare_slab()
                said = await ask(server, command("Other. " + LONG, max_tokens=4))
                (skipped,) = await watch.until(ev.ShadowSkipped)
                assert (said.accepted.request, "failed") == (skipped.request, skipped.reason)
            found = {one.invariant: one.bug_id for one in watch.of(ev.InvariantViolated)}
            due = {"shadow_checks": found.get("CRASH")} if where == "close_slab" else {}
            assert due == server.statistics().degraded

    with capture_logs():
        trio.run(main)


def test_the_end_of_all_checks_is_a_bug(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not even a skipped answer can be recorded, that is on record, and requests are served."""

    async def main() -> None:
        async with serving(model_directory, **SETTINGS) as server:
            watch, append = Watch(server), server.loaded.sequencer.append

            def fails(*of: ev.Event, **named: Any) -> int:
                if isinstance(of[0], ev.ShadowSkipped):
                    raise RuntimeError("no more room")
                return append(*of, **named)

            monkeypatch.setattr(server.loaded.sequencer, "append", fails)
            fail_decoding(server, monkeypatch, RuntimeError("the device gave up"), 1)
            await ask(server, command(LONG, max_tokens=4))
            (bug,) = await watch.until(ev.InvariantViolated)
            assert ("CRASH", None, "RuntimeError: no more room") == (
                *(bug.invariant, bug.session),
                bug.message,
            )
            assert {"shadow_checks": bug.bug_id} == server.statistics().degraded
            await ask(server, command("Other. " + LONG, max_tokens=4))

    with capture_logs() as lines:
        trio.run(main)
    (line,) = [line for line in lines if line["event"] == "no more shadow checks"]
    assert line["bug_id"]


def test_a_stop_during_a_check(model_directory: Path) -> None:
    """
    A server that stops during a pass of a check releases its slab before it records the stop. The
    answer is skipped, and the next server does not check it.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **SETTINGS) as server:
            held = hold_in_check(server)
            await ask(server, command(LONG, max_tokens=4))
            await held.wait()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.drain)
                while not server.loaded.activity.draining:
                    await trio.testing.wait_all_tasks_blocked()
                held.go.set()
        async with serving(model_directory, store, **SETTINGS) as server:
            watch = Watch(server)
            await ask(server, command("Other. " + LONG, max_tokens=2))
            await watch.until(ev.ShadowChecked)

    with capture_logs() as lines:
        trio.run(main)
    assert [] == [line for line in lines if line["log_level"] == "error"]
    kinds = [row.kind for row in store.rows]
    assert 0 < kinds.index("shadow_ended") < kinds.index("server_stopped")
    ended = [event for event in events(store) if isinstance(event, ev.ShadowEnded)]
    assert ["interrupted", "same"] == [one.result for one in ended]
    assert () == replay(store.read()).findings


def test_an_answer_that_was_a_bug_is_not_checked(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Observers see a row that breaks an invariant before they see the violation. Neither the request
    that it opens nor the answer that it ends is kept, nor a request that a session never ends.
    """

    async def main() -> None:
        async with serving(model_directory, **SETTINGS) as server:
            watch = Watch(server)
            append = server.loaded.sequencer.append

            def otherwise(*given: ev.Event, **settings: Any) -> int:
                changed = [
                    attrs.evolve(event, prompt_tokens=event.prompt_tokens + 1)
                    if isinstance(event, ev.RequestFinished)
                    else event
                    for event in given
                ]
                return append(*changed, **settings)

            monkeypatch.setattr(server.loaded.sequencer, "append", otherwise)
            with pytest.raises(Broken):
                await ask(server, command(LONG, max_tokens=4))
            await watch.until(ev.InvariantViolated)
            check = server.loaded.shadow
            assert check is not None
            assert not check.has_work

            place: dict[str, Any] = {"stream": "s", "seq": 1, "event_id": "e", "time_us": 0}
            received = attrs.evolve(watch.of(ev.RequestReceived)[0], request="another")
            finished = attrs.evolve(watch.of(ev.RequestFinished)[0], request="another")
            violated = attrs.evolve(
                watch.of(ev.InvariantViolated)[0], session=None, request=None, at_position=7
            )
            # Without the violation the answer is skipped, because its session has changed.
            for violations in ([violated], []):
                assert [] == watch.of(ev.ShadowSkipped)
                for position, event in enumerate([received, *violations, finished], start=7):
                    check(ev.Recorded(position=position, event=event, **place))
                await trio.testing.wait_all_tasks_blocked()
            await watch.until(ev.ShadowSkipped)

    trio.run(main)


def test_checks_are_refused_where_the_operator_accepts_differences(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A device that failed its self-test and was accepted anyway has expected differences. With shadow
    checks on, the server does not start, and names the two options of which one must go.
    """
    failed_test = SelfTestReport(findings={"cold equals warm": False}, error_max=0.0, duration_us=1)
    monkeypatch.setattr(mlx_start, "run_self_test", lambda *_: failed_test)

    async def main() -> None:
        async with serving(model_directory, accept_unstable=True, **SETTINGS):
            pass

    with pytest.raises(ExceptionGroup) as refused, capture_logs():
        trio.run(main)
    assert refused.group_contains(BootRefused, match="without one of the two")


def test_by_default_nothing_is_checked_where_differences_are_expected(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the operator did not ask for checks, such a device is served without them."""
    failed_test = SelfTestReport(findings={"cold equals warm": False}, error_max=0.0, duration_us=1)
    monkeypatch.setattr(mlx_start, "run_self_test", lambda *_: failed_test)

    async def main() -> None:
        settings = {**SETTINGS, "accept_unstable": True, "shadow_by_default": True}
        async with serving(model_directory, **settings) as server:
            assert None is server.loaded.shadow
            assert 0 == server.facts.shadow_share

    trio.run(main)


def passes_of(check: ev.ShadowChecked) -> list[tuple[int, int]]:
    """The prefill passes of a check: those over the prompt, and then those over the answer."""
    return list(pairwise((0, *check.cuts)))


def test_with_a_row_class_passes_are_cut_elsewhere() -> None:
    """
    No pass of a check over a prompt is one that was recorded, in a first turn and in one that
    continues. None has more tokens than a block, so that a request waits no longer.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving_any_cut(store, shadow_share=1.0, prewarm=False) as server:
            watch = Watch(server)
            long = "x" * (5 * BLOCK)
            first = await ask(server, generate(chat(long), max_tokens=2 * BLOCK))
            await watch.until(ev.ShadowEnded)
            await ask(server, generate(chat(long, first.text, "And then?"), max_tokens=4))
            await watch.until(ev.ShadowEnded, 2)

    trio.run(main)
    found = events(store)
    assert ["same", "same"] == [one.result for one in found if isinstance(one, ev.ShadowEnded)]
    for check in (one for one in found if isinstance(one, ev.ShadowChecked)):
        recorded = {
            (one.start, one.end)
            for one in found
            if isinstance(one, ev.CacheExtended) and one.step != "decode"
        }
        passes = passes_of(check)
        assert check.prompt_tokens in check.cuts
        assert 2 < len(passes)
        assert not recorded & set(passes)
        assert all(0 < end - start <= BLOCK for start, end in passes)
    assert () == replay(store.read()).findings


def test_with_the_grain_c_there_is_one_way_to_cut(model_directory: Path) -> None:
    """The passes are those of the canonical schedule."""
    store = MemoryStore()

    async def main() -> None:
        with without_row_class():
            async with serving(
                model_directory, store, **{**SETTINGS, "block_tokens": 48}
            ) as server:
                watch = Watch(server)
                await ask(server, command(LONG, max_tokens=4))
                (ended,) = await watch.until(ev.ShadowEnded)
                assert "same" == ended.result

    trio.run(main)
    (check,) = (one for one in events(store) if isinstance(one, ev.ShadowChecked))
    canonical = passes(0, check.prompt_tokens, 48)
    assert list(canonical) == passes_of(check)[: -(-check.prompt_tokens // 48)]


def test_prewarming_goes_first(model_directory: Path) -> None:
    """
    No check begins before the next prompt's beginning is computed. The answer and the blocks of its
    prompt are the same.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **{**SETTINGS, "prewarm": True}) as server:
            watch = Watch(server)
            await ask(server, command(LONG, max_tokens=24))
            await watch.until(ev.ShadowEnded)

    trio.run(main)
    kinds = [row.kind for row in store.rows]
    assert 1 == kinds.count("prewarm_finished")
    order = ["prewarm_started", "prewarm_finished", "session_settled", "shadow_started"]
    assert order == [kind for kind in kinds if kind in order]
    found = events(store)
    (checked,) = [event for event in found if isinstance(event, ev.ShadowChecked)]
    (ended,) = [event for event in found if isinstance(event, ev.ShadowEnded)]
    sealed = [event.key for event in found if isinstance(event, ev.BlockSealed)]
    assert "same" == ended.result
    assert checked.prompt_tokens // C <= len(checked.keys)
    assert tuple(sealed[: len(checked.keys)]) == checked.keys
    assert () == replay(store.read()).findings


# --- what it finds -------------------------------------------------------------------------------


def test_a_block_that_changed_in_memory_is_found(model_directory: Path) -> None:
    """
    INV-3: a bit of a block flips in memory and no request reuses the block. The check of the next
    answer finds it. The block and those built on it are quarantined; the session is not, and
    continues.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **SETTINGS) as server:
            watch = Watch(server)
            first = await ask(server, command(LONG, session_name="s"))
            await watch.until(ev.ShadowEnded)
            keys = server.loaded.sequencer.session("s").slab_keys

            def flip(engine: Any) -> None:
                array = engine.blocks.get(keys[1]).keys[0]
                array[0, 3, 1] = -array[0, 3, 1]

            await server.loaded.engine.call(flip, lambda done: None)
            onward = (
                Message(role="user", content=LONG),
                Message(role="assistant", content=first.text),
                Message(role="user", content="And then?"),
            )
            said = await ask(server, generate(Conversation(messages=onward), session_name="s"))
            assert said.accepted.cached_tokens > 2 * C
            _, ended = await watch.until(ev.ShadowEnded, 2)
            assert "differs" == ended.result
            assert SessionState.IDLE is server.loaded.sequencer.session("s").state
            blocks = server.loaded.sequencer.state.blocks
            assert None is blocks[keys[0]].bug_id
            assert all(blocks[key].bug_id for key in keys[1:])
            assert {"idle"} == set(server.statistics().sessions)
            again = await ask(server, command(LONG, session_name="other"))
            assert first.tokens == again.tokens
            assert C == again.accepted.cached_tokens

    trio.run(main)

    (found,) = replay(store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)
    assert found.message.endswith("changed in memory")


@pytest.mark.gate
def test_an_answer_on_kv_that_changed_is_found(model_directory: Path) -> None:
    """
    The control: bits of a slab flip between two turns, where no digest looks, and the next answer
    has different log-probabilities from a cold one. The check reports INV-3 and quarantines the
    session. A request that names the session gets the bug. The bits are those of the last layer, on
    which no KV of later tokens depends, or the next turn would find them before it is answered.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **SETTINGS) as server:
            watch = Watch(server)
            first = await ask(server, command(LONG, session_name="s"))
            await watch.until(ev.ShadowEnded)
            slab = server.loaded.sequencer.session("s").slab
            assert slab is not None

            def flip(engine: Any) -> None:
                keys = engine.pool.get(slab.id).caches[-1].keys
                keys[0, 0, 5] = -keys[0, 0, 5]

            await server.loaded.engine.call(flip, lambda done: None)
            onward = (
                Message(role="user", content=LONG),
                Message(role="assistant", content=first.text),
                Message(role="user", content="And then?"),
            )
            next_turn = generate(Conversation(messages=onward), session_name="s")
            await ask(server, next_turn)
            _, ended = await watch.until(ev.ShadowEnded, 2)
            assert "differs" == ended.result
            (out,) = await watch.until(ev.SessionQuarantined)
            with pytest.raises(Broken) as caught:
                await ask(server, next_turn)
            assert out.bug_id == caught.value.bug_id
            with trio.fail_after(60):
                while server.loaded.sequencer.state.sessions[SessionId("s")].slab is not None:
                    await trio.testing.wait_all_tasks_blocked()
            cold = await ask(server, attrs.evolve(next_turn, session_name=None))
            await watch.until(ev.ShadowEnded, 3)
            assert "same" == watch.of(ev.ShadowEnded)[-1].result
            assert cold.accepted.path == "new_session"

    trio.run(main)

    report = replay(store.read())
    (found,) = report.findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)


@pytest.mark.parametrize(
    "fault",
    [NotFinite("the log-probability of token 3 is nan"), GrammarDeadEnd("no token can come next")],
    ids=["no number", "held no further"],
)
def test_a_pass_that_draws_no_token_is_a_difference(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """
    A log-probability that is no longer finite, or a grammar that can no longer be followed, is a
    difference (INV-3) and not a failed check. The report names the token.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **SETTINGS) as server:
            watch = Watch(server)
            fail_decoding(server, monkeypatch, fault, 2)
            await ask(server, command(LONG, max_tokens=6))
            (ended,) = await watch.until(ev.ShadowEnded)
            assert "differs" == ended.result
            (checked,) = watch.of(ev.ShadowChecked)
            assert (2, 2) == (checked.answer_tokens, checked.first_difference)

    with capture_logs():
        trio.run(main)
    (found,) = replay(store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)


def test_a_request_that_is_served_when_a_check_differs_gets_the_bug(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A check finds a difference while the session serves its next request. That request ends with the
    bug id, none of its tokens is sent after the violation, the slab is released, and nothing else
    breaks.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store, **SETTINGS) as server:
            watch = Watch(server)
            there, go = trio.Event(), trio.Event()
            device: Any = server.loaded.engine.device
            decode_pass, settle, passes = device.decode, server.loaded.engine.settle, list[int]()

            def differs(rows: Any) -> Any:
                (report, *others) = decode_pass(rows)
                if is_of_check(server, rows[0].slab):
                    passes.append(rows[0].token)
                    drawn = attrs.evolve(report.drawn, token=report.drawn.token + 1)
                    report = attrs.evolve(report, drawn=drawn)
                return [report, *others]

            async def slowly(*job: Any) -> Any:
                done = await settle(*job)
                if len(passes) == 3 and not there.is_set():  # the last one
                    there.set()
                    await go.wait()
                return done

            monkeypatch.setattr(device, "decode", differs)
            monkeypatch.setattr(server.loaded.engine, "settle", slowly)
            first = await ask(server, command(LONG, max_tokens=4, session_name="s"))
            assert first.finished.prompt_tokens % C < C - 4, "a pass over the answer would follow"
            with trio.fail_after(120):
                await there.wait()
            onward = (
                Message(role="user", content=LONG),
                Message(role="assistant", content=first.text),
                Message(role="user", content="And then?"),
            )
            next_turn = generate(Conversation(messages=onward), session_name="s", max_tokens=200)

            async def read() -> None:
                async with local(server).generate(next_turn) as replies:
                    async for reply in replies:
                        if not isinstance(reply, Accepted):
                            go.set()

            with pytest.raises(Broken) as caught:
                await read()
            (violated,) = await watch.until(ev.InvariantViolated)
            assert violated.bug_id == caught.value.bug_id
            await watch.until(ev.ShadowEnded)
            await watch.until(ev.SlabReleased)
            assert server.loaded.sequencer.state.sessions[SessionId("s")].slab is None

    trio.run(main)

    kinds = [row.kind for row in store.rows]
    at = kinds.index("invariant_violated")
    assert ["shadow_checked", "invariant_violated", "session_quarantined"] == kinds[at - 1 : at + 2]
    assert "cache_extended" in kinds[:at]
    assert "cache_extended" not in kinds[at:]
    (found,) = replay(store.read()).findings
    assert ("INV-3", True, True) == (found.invariant, found.recorded, found.reproduced)


def test_a_check_waits_until_files_are_written(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """
    A session that writes its blocks to files is at work, although it is idle: no check begins
    before the last one is written.
    """
    store = MemoryStore()

    async def main() -> None:
        files: dict[str, Any] = {"blocks_folder": tmp_path, "disk_bytes": 2**26}
        async with serving(model_directory, store, **files, **SETTINGS) as server:
            watch = Watch(server)
            await ask(server, command(LONG, max_tokens=4))
            await watch.until(ev.ShadowEnded)

    trio.run(main)
    kinds = [row.kind for row in store.rows]
    assert "block_spilled" in kinds
    assert "block_spilled" not in kinds[kinds.index("shadow_started") :]
