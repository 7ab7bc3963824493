"""What ``ops serve`` prints when it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from cairn.actors.requests.messages import ServerFacts
from cairn.actors.server import Server
from cairn.engine.row_class import RowClass
from cairn.engine.sampling import Sampling
from cairn.journal.windows import SinkWindow
from cairn.ops.common.output import counted
from cairn.ops.serve.api_keys import KEY_VARIABLE

CHECK_COSTS = (1, 5)
"""
A shadow check takes this many times as much computing time as the answer did: more if the answer
reused more. See docs/how-to/shadow-check.md.
"""


def greet(url: str, server: Server, options: dict[str, Any]) -> None:
    """Print the server's settings, and a command to try it with."""
    facts = server.facts
    journal = options["journal"] or (options["data_dir"] / "journal.db").absolute()
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    curl = f"curl {url}/v1/chat/completions -H 'content-type: application/json'"
    if options["tenants"]:
        curl = f'{curl} -H "authorization: Bearer ${KEY_VARIABLE}"'
    answers = f"{counted(facts.decode_rows, 'answer')} at once{_rows_of(facts.decode_shapes)}"
    prefill = _prefill_of(facts.row_class)
    shape = f"blocks of {facts.block_tokens} tokens, {prefill}{answers}, {facts.kv_cache} cache"
    names = ", ".join(listed.facts.model for listed in server.models) + "; one in memory at a time"
    lines = (
        f"Cairn serves {facts.model} at {url}",
        *([f"  models       {names}"] if len(server.models) > 1 else []),
        f"  fingerprint  {facts.fingerprint}  ({shape})",
        *([f"  adapter      {options['adapter']}"] if options["adapter"] else []),
        f"  weights      {facts.dtype}",
        f"  speculation  {_drafts_of(facts.without_drafts)}",
        f"  checks       {_checks_of(facts.shadow_share, options['shadow_check'])}",
        f"  context      {facts.context_tokens} tokens{_bound_of(facts)}{_window_of(facts.policy)}",
        f"  sampling     {_sampling(facts.defaults)}, unless a request sets it",
        *([f"  API keys     for {options['tenants']}"] if options["tenants"] else []),
        f"  journal      {journal}",
        f"  try it       {curl} -d '{body}'",
    )
    print("\n".join(lines), flush=True)


def _rows_of(shapes: Sequence[int]) -> str:
    """How many rows a decode pass has, if that depends on the number of answers."""
    return f" in passes of {' or '.join(map(str, shapes))} rows" if len(shapes) > 1 else ""


def _drafts_of(why_not: str) -> str:
    """Whether drafts of the next tokens are checked, and why not."""
    return f"off: {why_not}" if why_not else "drafts from prompt and answer, with the same bits"


def _checks_of(share: float, given: float | None) -> str:
    """
    How many answers are checked in idle time and what that costs, or why none is.

    Args:
        given: the share that the operator set.
    """
    if share:
        low, high = (f"{100 * times * share:.3g}" for times in CHECK_COSTS)
        return (
            f"{100 * share:.3g} % of answers computed again in idle time: {low} to {high} % more "
            "computing"
        )
    return "off" if given == 0 else "off: the self-test failed on this device"


def _prefill_of(row_class: RowClass | None) -> str:
    """The passes of a model that reuses KV up to any token; empty if it reuses whole blocks."""
    if row_class is None:
        return ""
    rows = f"{row_class.least} to {row_class.most} rows"
    if row_class.least == row_class.most:
        rows = f"{row_class.most} rows"
    elif row_class.quantum > 1:
        rows = f"{rows} in steps of {row_class.quantum}"
    return f"reuse to the token with prefill passes of {rows}, "


def _bound_of(facts: ServerFacts) -> str:
    """Why the context is shorter than the model's; empty if it is not."""
    of_model = facts.model_context_tokens
    return f" (of the model's {of_model}; --pool-mb limits it)" if of_model else ""


def _window_of(policy: SinkWindow | None) -> str:
    """What the KV policy limits, in words."""
    if policy is None:
        return ""
    return (
        f"; a token attends to the first {policy.sinks} and the last {policy.window}, and a "
        f"session keeps {policy.rows} at most"
    )


def _sampling(defaults: Sampling) -> str:
    """The temperature, and each other parameter that is not off."""
    plain = attrs.asdict(Sampling())
    return ", ".join(
        f"{name} {value:g}"
        for name, value in attrs.asdict(defaults).items()
        if name == "temperature" or value != plain[name]
    )
