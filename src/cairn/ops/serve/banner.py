"""What ``ops serve`` says when it is ready."""

from __future__ import annotations

from typing import Any

import attrs

from cairn.actors.requests.messages import ServerFacts
from cairn.actors.server import Server
from cairn.engine.sampling import Sampling
from cairn.journal.windows import SinkWindow
from cairn.ops.serve.api_keys import KEY_VARIABLE


def greet(url: str, server: Server, options: dict[str, Any]) -> None:
    """What somebody wants to know who started a server, and a line to try it with."""
    facts = server.facts
    journal = options["journal"] or (options["data_dir"] / "journal.db").absolute()
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
    curl = f"curl {url}/v1/chat/completions -H 'content-type: application/json'"
    if options["tenants"]:
        curl = f'{curl} -H "authorization: Bearer ${KEY_VARIABLE}"'
    shape = f"C = {facts.block_tokens}, W = {facts.decode_rows}, {facts.kv_cache} cache"
    names = ", ".join(listed.facts.model for listed in server.models) + "; one at a time in memory"
    lines = (
        f"Cairn serves {facts.model} at {url}",
        *([f"  models       {names}"] if len(server.models) > 1 else []),
        f"  fingerprint  {facts.fingerprint}  ({shape})",
        *([f"  adapter      {options['adapter']}"] if options["adapter"] else []),
        f"  weights      {facts.dtype}",
        f"  context      {facts.context_tokens} tokens{_bound_of(facts)}{_window_of(facts.policy)}",
        f"  sampling     {_sampling(facts.defaults)}, where a request says nothing of it",
        *([f"  API keys     of {options['tenants']}"] if options["tenants"] else []),
        f"  journal      {journal}",
        f"  try it       {curl} -d '{body}'",
    )
    print("\n".join(lines), flush=True)


def _bound_of(facts: ServerFacts) -> str:
    """What bounds a context that is shorter than the model's."""
    of_model = facts.model_context_tokens
    return f" (of the model's {of_model}; --pool-mb bounds it)" if of_model else ""


def _window_of(policy: SinkWindow | None) -> str:
    """A policy for people."""
    if policy is None:
        return ""
    return (
        f", of which a token attends to the first {policy.sinks} and the last {policy.window}; "
        f"a session holds {policy.rows} at most"
    )


def _sampling(defaults: Sampling) -> str:
    """Defaults for people: the temperature, and what is not off."""
    told = {name: getattr(defaults, name) for name in attrs.fields_dict(Sampling)}
    changed = {name: told[name] for name in told if told[name] != getattr(Sampling(), name)}
    return ", ".join(
        f"{name} {value:g}"
        for name, value in ({"temperature": told["temperature"]} | changed).items()
    )
