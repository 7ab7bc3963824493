"""What ``ops serve`` prints when it is ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from cairn.actors.requests.messages import ServerFacts
from cairn.actors.server import Server
from cairn.engine.sampling import Sampling
from cairn.journal.cache.windows import SinkWindow
from cairn.ops.common.locations import log_path, options_of
from cairn.ops.common.output import counted, size_text
from cairn.ops.common.passes import TEST_AGAIN, decode_text, drafts_text, prefill_text, was_busy
from cairn.ops.common.program import as_called, program

CHECK_COSTS = (1, 5)
"""
A shadow check takes this many times as much computing time as the answer did: more if the answer
reused more. See docs/how-to/shadow-check.md.
"""


def greet(url: str, server: Server, options: dict[str, Any], exporters: Sequence[str] = ()) -> None:
    """
    Print where the server is, in six lines; with the option ``--verbose`` also its settings. If
    the self-test ran out of time, one line more says what that costs.

    Args:
        exporters: of traces; none if they are off.
    """
    named = options_of(options["data_dir"])
    lines = [
        f"Cairn serves {server.facts.model} at {url}",
        f"  page       {url}/",
        f"  chat       {program()} chat{named}",
        f"  OpenAI     base URL {url}/v1{_key_words(options)}",
        f"  Anthropic  base URL {url}{_key_words(options)}",
        f"  log        {log_path(options['data_dir']).absolute()}",
    ]
    facts = server.facts
    if was_busy(facts.row_class_reason):
        prefill = prefill_text(facts.row_class, facts.row_class_reason)
        make = " or `make serve ARGS=--test-again`" if program() == "./cairn" else ""
        lines.append(f"  warning    {prefill}: {as_called(TEST_AGAIN)}{make}")
    if options["verbose"]:
        lines += _settings(server, options, exporters)
    print("\n".join(lines), flush=True)


def _key_words(options: dict[str, Any]) -> str:
    """That clients need an API key, if they do."""
    return f", with the API key of {options['tenants']}" if options["tenants"] else ""


def _settings(
    server: Server, options: dict[str, Any], exporters: Sequence[str] = ()
) -> Iterator[str]:
    """The server's settings, a line each."""
    facts = server.facts
    journal = options["journal"] or (options["data_dir"] / "journal.db").absolute()
    answers = f"{counted(facts.decode_rows, 'answer')} at once{decode_text(facts.decode_shapes)}"
    answer = [one.facts.model for one in server.models if one.embeds is None]
    embed = [one.facts.model for one in server.models if one.embeds is not None]
    names = ", ".join(answer) + "; one in memory at a time"
    disk = size_text(server.statistics().disk_bytes_total)
    yield from (
        *([f"  models       {names}"] if len(answer) > 1 else []),
        *([f"  embeddings   {', '.join(embed)}"] if embed else []),
        f"  fingerprint  {facts.fingerprint}",
        *([f"  adapter      {options['adapter']}"] if options["adapter"] else []),
        f"  weights      {facts.dtype}",
        f"  blocks       {facts.block_tokens} tokens, {facts.kv_cache} cache",
        f"  disk         {disk} at most for sealed blocks",
        f"  prefill      {prefill_text(facts.row_class, facts.row_class_reason)}",
        f"  decoding     {answers}",
        f"  speculation  {drafts_text(facts.without_drafts)}",
        f"  checks       {_checks_of(facts.shadow_share, options['shadow_check'])}",
        f"  context      {facts.context_tokens} tokens{_bound_of(facts)}{_window_of(facts.policy)}",
        f"  sampling     {_sampling(facts.defaults)}, unless a request sets it",
        *([f"  API keys     for {options['tenants']}"] if options["tenants"] else []),
        *([f"  traces       sent by {', '.join(exporters)}"] if exporters else []),
        *([f"  options      {options['config']}"] if options["config"] is not None else []),
        f"  journal      {journal}",
    )


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
    return "off: --shadow-check 0" if given == 0 else "off: the self-test failed on this device"


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
