"""The front page: what runs here, and how to call it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from cairn.actors.requests.messages import ServerFacts, Statistics
from cairn.journal.events import StallReason

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Cairn: {model}</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto;
         padding: 0 1rem; color: #222; background: #fff }}
  pre {{ background: #f3f3f0; padding: 1rem; overflow-x: auto; border-radius: 4px }}
  th {{ text-align: left; font-weight: normal; color: #666; padding-right: 2rem }}
  td {{ overflow-wrap: anywhere }}
  @media (prefers-color-scheme: dark) {{
    body {{ color: #ddd; background: #181818 }}
    pre {{ background: #242424 }}
    th {{ color: #999 }}
    a {{ color: #8bf }}
  }}
</style>
<h1>Cairn</h1>
<p>A session server for local language models. It speaks OpenAI's chat completions,
completions and responses and Anthropic's messages, and keeps conversations as agents.</p>
<table>
  <tr><th>model</th><td>{model}</td></tr>
  <tr><th>context</th><td>{context:,} tokens</td></tr>
  <tr><th>fingerprint</th><td><code>{fingerprint}</code></td></tr>
{sessions}  <tr><th>state</th><td>{state}</td></tr>
</table>
<h2>Call it</h2>
<pre>curl -N {base}/v1/chat/completions \\
  -H 'content-type: application/json' \\{header}
  -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'</pre>
<p>With the OpenAI client: base URL <code>{base}/v1</code>, {key}.</p>
<p>With the Anthropic client: base URL <code>{base}</code>, same key.</p>
<p>POST to <code>/v1/chat/completions</code>, <code>/v1/completions</code>,
   <code>/v1/responses</code>, <code>/v1/messages</code>,
   <code>/v1/messages/count_tokens</code> or <code>/v1/agents</code>.</p>
<p><a href="/v1/models">/v1/models</a> · <a href="/v1/agents">/v1/agents</a> ·
   <a href="/health">/health</a> · <a href="/metrics">/metrics</a></p>
<p>All addresses are described in <a href="/openapi.json">/openapi.json</a>.
   Every field, header and error code is in <code>docs/reference</code> of Cairn's
   repository.</p>
</html>
"""


_SESSIONS = "  <tr><th>sessions</th><td>{}</td></tr>\n"
_STALLS: Mapping[StallReason, str] = {
    "disk_full": "the journal's disk is full",
    "locked": "another program has locked the journal",
    "connection_lost": "the connection to the journal's database is lost",
}
_HEADER = """
  -H "authorization: Bearer $CAIRN_API_KEY" \\"""


def front_page(
    facts: ServerFacts,
    statistics: Statistics,
    base: str,
    *,
    sessions: int | None,
    with_keys: bool,
) -> str:
    """
    The page as HTML.

    Args:
        base: the URL that the reader used, without a slash at its end.
        sessions: how many there are; None for a reader who may not know.
        with_keys: whether the server requires API keys.
    """
    state = "serving"
    if statistics.admission_bug is not None:
        state = f"admission is closed; bug id {escape(statistics.admission_bug)}"
    elif statistics.journal_stall is not None:
        state = f"{_STALLS[statistics.journal_stall]}; no requests are answered"
    return _PAGE.format(
        model=escape(facts.model),
        context=facts.context_tokens,
        fingerprint=escape(facts.fingerprint),
        sessions="" if sessions is None else _SESSIONS.format(sessions),
        state=state,
        base=escape(base),
        header=_HEADER if with_keys else "",
        key="your API key" if with_keys else "any API key",
    )
