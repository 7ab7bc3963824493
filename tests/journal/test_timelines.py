"""When requests were received, got their path, computed and ended; and the spans of that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.spans import Span, prewarm_span, request_span
from cairn.journal.timelines import Prewarmed, Timeline, Timelines, tokens_a_second
from tests.support.journals import START_US, conversation, healthy, model_loaded

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "the text of a client"


def fold(recorded: Iterable[ev.Recorded]) -> list[Timeline | Prewarmed]:
    """What ended in these rows."""
    timelines = Timelines()
    return [ended for one in recorded if (ended := timelines.see(one)) is not None]


def recorded(*events: tuple[int, ev.Event]) -> Iterator[ev.Recorded]:
    """The model is loaded, and then these events, each at its time in milliseconds."""
    at_start = (0, model_loaded())
    for position, (time_ms, event) in enumerate((at_start, *events), start=1):
        yield ev.Recorded(
            position=position,
            stream=event.stream,
            seq=position,
            event_id=str(position),
            time_us=START_US + 1000 * time_ms,
            event=event,
        )


def of_kind(kind: type[ev.Event], **changes: Any) -> Any:
    """The first event of a kind in a healthy journal, with other values."""
    found = (one.event for one in map(decode, healthy()) if isinstance(one.event, kind))
    return attrs.evolve(next(found), **changes)


def received(**changes: Any) -> ev.RequestReceived:
    """A request that waited for 40 ms, with private texts."""
    texts = {"words": SECRET, "grammar": SECRET, "waited_us": 40_000, "traceparent": CALLER}
    return of_kind(ev.RequestReceived, **{**texts, **changes})


def selected(**changes: Any) -> ev.PathSelected:
    """A path that reuses eight tokens, with private texts."""
    texts = {"diverged_text": SECRET, "diverged_from": SECRET, "diverged_token": 8}
    return of_kind(
        ev.PathSelected,
        **{**texts, "reason": "diverged", "diverged_part": "system", "reused_tokens": 8, **changes},
    )


def restored(**changes: Any) -> ev.BlocksRestored:
    """Blocks that were copied."""
    fixed = {"session": "s1", "keys": ("k",), "digests": ("d",), "coverage": ((1, 0, 8),)}
    return ev.BlocksRestored(**{**fixed, "request": "r1", "start": 0, "end": 8, **changes})


def extended(step: str, start: int, end: int, duration_ms: int, **changes: Any) -> ev.CacheExtended:
    """Passes of the model."""
    return of_kind(
        ev.CacheExtended,
        step=step,
        start=start,
        end=end,
        duration_us=1000 * duration_ms,
        **changes,
    )


ANSWERED: tuple[tuple[int, ev.Event], ...] = (
    (100, received()),
    (101, of_kind(ev.PathSelected)),
    (130, selected()),
    (150, restored(duration_us=15_000)),
    (200, extended("prefill", 8, 12, 40)),
    (260, extended("prefill", 12, 16, 50, sampled=(7,))),
    (290, extended("decode", 16, 18, 25, sampled=(8, 9), text=SECRET)),
    (330, extended("decode", 18, 20, 35, sampled=(1, 2))),
    (360, of_kind(ev.RequestFinished, completion_tokens=5, finish_reason="length")),
)


def only(rows: Iterable[ev.Recorded]) -> Span:
    """The span of the one request in these rows."""
    (ended,) = fold(rows)
    assert isinstance(ended, Timeline)
    return request_span(ended)


def at(span: Span) -> tuple[str, int, int]:
    """A span's name and times, in milliseconds from the start."""
    return span.name, (span.began_us - START_US) // 1000, (span.ended_us - START_US) // 1000


def test_a_request_is_a_span_with_its_steps():
    """
    A request begins when it arrived. Queue, decision, restore, prefill and decode are within it,
    each from its first row's beginning to its last row, with what was computed and for how long.
    """
    span = only(recorded(*ANSWERED))
    assert ("chat tiny", 60, 360) == at(span)
    assert [
        ("queue", 60, 100),
        ("decision", 100, 130),
        ("restore", 135, 150),
        ("prefill", 160, 260),
        ("decode", 265, 330),
    ] == [at(part) for part in span.parts]
    _, decision, restore, prefill, decoded = span.parts
    assert ("diverged", 8, "system", 8) == tuple(
        decision.attributes[f"cairn.{name}"]
        for name in ("reason", "reused_tokens", "diverged_part", "diverged_token")
    )
    assert {"cairn.tokens": 8, "cairn.steps": 1, "cairn.busy_ms": 15.0} == restore.attributes
    assert {"cairn.tokens": 8, "cairn.steps": 2, "cairn.busy_ms": 90.0} == prefill.attributes
    assert {"cairn.tokens": 4, "cairn.steps": 2, "cairn.busy_ms": 60.0} == decoded.attributes


def test_a_request_that_leaves_while_it_waits_for_another():
    """It has waited in the queue, and nothing was decided; what settles later is no step of it."""
    joined = ev.PrefixJoined(
        session="s1",
        request="r1",
        rules_version=1,
        decided_at=1,
        leader="s2",
        blocks=2,
        reused_blocks=0,
    )
    left = ev.RequestCancelled(session="s1", request="r1", stage="prefill")
    span = only(
        recorded((100, received()), (110, joined), (115, extended("settle", 8, 12, 5)), (120, left))
    )
    assert ["queue"] == [part.name for part in span.parts]
    assert "cancelled in prefill" == span.attributes["cairn.ended"]


def test_a_span_has_the_attributes_of_the_conventions():
    """Names of OpenTelemetry's GenAI conventions, with counts and times of the rows."""
    attributes = only(recorded(*ANSWERED)).attributes
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "cairn",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.conversation.id": "s1",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": 0.2,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "cairn.tokens_per_second": 40.0,
    }
    assert expected.items() <= attributes.items()
    assert "error.type" not in attributes


def test_an_unnamed_seed_is_no_request_attribute():
    """The seed is an attribute if the client chose it. The journal has it either way."""
    chosen = only(recorded(*ANSWERED)).attributes
    rows = (100, received(seed_given=False)), *ANSWERED[1:]
    assert "gen_ai.request.seed" in chosen
    assert "gen_ai.request.seed" not in only(recorded(*rows)).attributes


def test_a_raw_prompt_is_a_text_completion():
    """The operation follows from the protocol."""
    rows = (100, received(protocol="openai.completions")), *ANSWERED[1:]
    span = only(recorded(*rows))
    assert "text_completion tiny" == span.name
    assert "text_completion" == span.attributes["gen_ai.operation.name"]


def test_no_text_of_a_conversation_is_in_a_span():
    """Private fields of events are in no span: texts, words, grammars and token ids."""

    def values(span: Span) -> Iterator[object]:
        yield span.name
        yield span.error
        yield from span.attributes.values()
        for part in span.parts:
            yield from values(part)

    found = list(values(only(recorded(*ANSWERED))))
    assert found
    assert not [value for value in found if SECRET in str(value)]
    private = {
        name.name
        for kind in (ev.RequestReceived, ev.PathSelected, ev.CacheExtended)
        for name in attrs.fields(kind)
        if name.metadata.get("private")
    }
    assert {"words", "new_ids", "diverged_text"} <= private
    # A sequence in a span is of finish reasons alone.
    assert [("length",)] == [value for value in found if isinstance(value, tuple)]


def test_a_client_that_leaves_is_no_error():
    """What the client ended is no error; what the server ended is one, and says which."""
    begun = ANSWERED[:6]

    def ended_by(stage: str) -> Span:
        return only(recorded(*begun, (300, of_cancel(stage))))

    def of_cancel(stage: Any) -> ev.RequestCancelled:
        return ev.RequestCancelled(session="s1", request="r1", stage=stage)

    left, late = ended_by("decode"), ended_by("timed_out")
    assert (None, "cancelled in decode") == (left.error, left.attributes["cairn.ended"])
    assert ("timed_out", "timed_out") == (late.error, late.attributes["error.type"])
    assert "gen_ai.response.finish_reasons" not in left.attributes
    assert 1 == left.attributes["gen_ai.usage.output_tokens"]


def violated() -> ev.InvariantViolated:
    """A broken invariant of the request."""
    return ev.InvariantViolated(
        bug_id="b1",
        invariant="INV-3",
        at_position=5,
        session="s1",
        of_session=None,
        request="r1",
        fingerprint=None,
        cairn_version="0",
        message="",
        expected=SECRET,
        actual=SECRET,
        trace=SECRET,
    )


def test_a_bug_ends_a_request_once():
    """A broken invariant ends the span with its name and bug id; what follows adds nothing."""
    cancelled = ev.RequestCancelled(session="s1", request="r1", stage="bug")
    span = only(recorded(*ANSWERED[:3], (140, violated()), (141, cancelled)))
    assert ("INV-3", "b1") == (span.error, span.attributes["cairn.bug_id"])
    assert ["queue", "decision"] == [part.name for part in span.parts]


def test_a_clock_that_is_set_back_gives_no_span_before_its_beginning():
    """Rows carry the wall clock. A span never ends before it begins."""
    times = (100, 90, 80, 70, 60, 50, 40, 30, 20)
    rows = [(time, event) for time, (_, event) in zip(times, ANSWERED, strict=True)]
    span = only(recorded(*rows))
    assert all(part.began_us <= part.ended_us for part in span.parts)


def prewarm_started() -> ev.PrewarmStarted:
    """A prewarm of 24 tokens."""
    return ev.PrewarmStarted(
        session="s1",
        next_role="user",
        rules_version=1,
        tokens=24,
        base_tokens=20,
        new_ids=(1, 2, 3, 4),
        base_keys=5,
        new_keys=("k",),
        tokens_from_slab=16,
        blocks_from_slab=4,
        blocks_from_pool=0,
        partial_key=None,
        tokens_from_partial=0,
    )


def prewarm_ended() -> ev.PrewarmAbandoned:
    """A request ended it after four tokens."""
    return ev.PrewarmAbandoned(session="s1", reason="request", computed_tokens=4)


def test_a_prewarm_is_of_the_request_before_it():
    """A prewarm names the session's last request; one that could not start is none."""
    failed = ev.PrewarmAbandoned(session="s1", reason="render_failed", computed_tokens=0)
    rows = (400, failed), (410, prewarm_started()), (450, prewarm_ended())
    found = fold(recorded(*ANSWERED, *rows))
    assert [Timeline, Prewarmed] == [type(one) for one in found]
    prewarm = found[-1]
    assert isinstance(prewarm, Prewarmed)
    assert "r1" == prewarm.request
    span = prewarm_span(prewarm)
    assert ("prewarm", 410, 450) == at(span)
    assert (24, 4, "request") == tuple(
        span.attributes[f"cairn.{name}"] for name in ("tokens", "computed_tokens", "reason")
    )


def test_every_request_of_a_journal_is_one_span():
    """Over a whole journal each request that ended gives one timeline, and all steps are within."""
    rows = [decode(row) for row in conversation().rows]
    received = [one.event for one in rows if isinstance(one.event, ev.RequestReceived)]
    lines = [one for one in fold(rows) if isinstance(one, Timeline)]
    assert [one.request for one in received] == [line.received.request for line in lines]
    for span in map(request_span, lines):
        for part in span.parts:
            assert span.began_us <= part.began_us <= part.ended_us <= span.ended_us
        for one, other in itertools.pairwise(span.parts):
            assert one.began_us <= other.began_us


@pytest.mark.parametrize(
    ("tokens", "first_us", "ended_us", "rate"),
    [
        (5, 1_000_000, 3_000_000, 2.0),
        (1, 1_000_000, 3_000_000, None),
        (0, None, 3_000_000, None),
        (5, 0, 3_000_000, None),
        (5, 3_000_000, 3_000_000, None),
        (5, 1_000_000, None, None),
    ],
)
def test_a_rate_needs_two_tokens_and_time(
    tokens: int, first_us: int | None, ended_us: int | None, rate: float | None
):
    """The rate counts the tokens after the first one; without any there is none."""
    assert rate == tokens_a_second(tokens, first_us, ended_us)


@pytest.mark.parametrize("value", ["", "00", CALLER.upper(), f"{CALLER}-00", f"x{CALLER[1:]}"])
def test_only_a_trace_context_is_recorded(value: str):
    """The journal takes no other text of a client as the span that it called from."""
    with pytest.raises(ValueError, match="trace context"):
        received(traceparent=value)
