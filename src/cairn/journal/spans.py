"""
Spans of requests and prewarms, for traces, from their timelines. Pure.

The names of attributes are those of OpenTelemetry's GenAI conventions where these have one, else
they begin with ``cairn.``. No span has a text or a token of a conversation: what two prompts differ
in is private, so a span has the place alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cairn.journal.tenants import session_name
from cairn.journal.timelines import Prewarmed, Stretch, Timeline

Value = str | bool | int | float | tuple[str, ...]

_OPERATIONS = {"openai.completions": "text_completion"}
_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")


@attrs.frozen(kw_only=True)
class Span:
    """
    A span to be sent.

    Attributes:
        began_us, ended_us: in microseconds since 1970.
        error: what failed, if anything did.
        parts: the spans within it.
    """

    name: str
    began_us: int
    ended_us: int
    attributes: Mapping[str, Value]
    error: str | None = None
    parts: tuple[Span, ...] = ()


def request_span(line: Timeline) -> Span:
    """The span of a request that ended, with those of its steps."""
    received, path = line.received, line.path
    assert line.ended_us is not None
    arrived_us = line.received_us - received.waited_us
    operation = _OPERATIONS.get(received.protocol, "chat")
    return Span(
        # The client's name for the model may be any text, so the span is named by the model's own.
        name=f"{operation} {line.model}",
        began_us=arrived_us,
        ended_us=line.ended_us,
        attributes=_given(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "cairn",
                "gen_ai.request.model": received.requested_model or line.model,
                "gen_ai.response.model": line.model,
                "gen_ai.conversation.id": session_name(received.session),
                "gen_ai.request.max_tokens": received.max_tokens,
                "gen_ai.request.seed": received.seed if received.seed_given else None,
                **{f"gen_ai.request.{name}": received.sampling.get(name) for name in _SAMPLING},
                "gen_ai.response.finish_reasons": _as_list(line.finish_reason),
                "gen_ai.response.time_to_first_chunk": _seconds(arrived_us, line.first_us),
                "gen_ai.usage.input_tokens": received.prompt_tokens,
                "gen_ai.usage.output_tokens": line.generated_tokens,
                "gen_ai.usage.cache_read.input_tokens": 0 if path is None else path.reused_tokens,
                "cairn.request": received.request,
                "cairn.session": received.session,
                "cairn.tenant": received.tenant,
                "cairn.protocol": received.protocol,
                "cairn.fingerprint": received.fingerprint,
                "cairn.ended": line.ended,
                "cairn.tokens_per_second": line.tokens_a_second,
                "cairn.bug_id": line.bug_id,
                "error.type": line.error,
            }
        ),
        error=line.error,
        parts=tuple(_parts(line, arrived_us)),
    )


def prewarm_span(prewarm: Prewarmed) -> Span:
    """The span of a prewarm that ended."""
    return Span(
        name="prewarm",
        began_us=prewarm.began_us,
        ended_us=max(prewarm.began_us, prewarm.ended_us),
        attributes=_given(
            {
                "gen_ai.conversation.id": session_name(prewarm.session),
                "cairn.session": prewarm.session,
                "cairn.tokens": prewarm.tokens,
                "cairn.computed_tokens": prewarm.computed_tokens,
                "cairn.reason": prewarm.reason,
            }
        ),
    )


def _parts(line: Timeline, arrived_us: int) -> list[Span]:
    parts = [_part("queue", arrived_us, line.received_us, {})]
    path = line.path
    if path is not None and line.selected_us is not None:
        attributes: dict[str, Value | None] = {
            "cairn.path": path.path,
            "cairn.reason": path.reason,
            "cairn.reused_tokens": path.reused_tokens,
            "cairn.tokens_from_slab": path.tokens_from_slab,
            "cairn.blocks_from_pool": path.blocks_from_pool,
            "cairn.tokens_from_partial": path.tokens_from_partial,
            "cairn.prewarmed_tokens": path.prewarmed_tokens,
            "cairn.rerendered_tokens": path.rerendered_tokens,
            "cairn.nearest": path.nearest,
            "cairn.diverged_part": path.diverged_part,
            "cairn.diverged_token": path.diverged_token,
            "cairn.joined": line.joined,
        }
        parts.append(_part("decision", line.received_us, line.selected_us, attributes))
    works = ("restore", line.restored), ("prefill", line.prefilled), ("decode", line.decoded)
    parts.extend(_work(name, work) for name, work in works if work is not None)
    return parts


def _work(name: str, work: Stretch) -> Span:
    attributes: dict[str, Value | None] = {
        "cairn.tokens": work.tokens,
        "cairn.steps": work.steps,
        "cairn.busy_ms": work.busy_us / 1000,
    }
    return _part(name, work.began_us, work.ended_us, attributes)


def _part(name: str, began_us: int, ended_us: int, attributes: Mapping[str, Value | None]) -> Span:
    # The clock of the rows may be set back.
    ended_us = max(began_us, ended_us)
    return Span(name=name, began_us=began_us, ended_us=ended_us, attributes=_given(attributes))


def _given(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def _as_list(value: str | None) -> tuple[str, ...] | None:
    return None if value is None else (value,)


def _seconds(began_us: int, ended_us: int | None) -> float | None:
    return None if ended_us is None else max(0, ended_us - began_us) / 1e6
