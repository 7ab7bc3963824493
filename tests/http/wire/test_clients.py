"""The name of a client, out of what real and hostile ones send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.http.wire.clients import BROWSER, NAME_MAX, client_name
from tests.http.explorer.attacks import ATTACKS

ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.@+-/")


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        ("claude-cli/2.1.5 (external, cli)", "claude-cli"),
        ("OpenAI/Python 1.109.1", "OpenAI/Python"),
        ("AsyncOpenAI/Python 2.0.0", "AsyncOpenAI/Python"),
        ("Anthropic/JS 0.60.0", "Anthropic/JS"),
        ("opencode/0.15.0 ai-sdk/provider-utils/3.0.9 runtime/bun/1.3.0", "opencode"),
        ("ai-sdk/openai-compatible/1.0.19 ai-sdk/provider-utils/3.0.9", "ai-sdk/openai-compatible"),
        ("codex_cli_rs/0.46.0 (Debian 12; x86_64) unknown", "codex_cli_rs"),
        ("curl/8.14.1", "curl"),
        ("python-httpx/0.28.1", "python-httpx"),
        ("some-tool/v0.3", "some-tool"),
        ("@scope/package/1.0", "@scope/package"),
        ("node", "node"),
        ("  Zed/0.2", "Zed"),
        ("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/141.0 Safari/537.36", BROWSER),
        ("a" * 500, "a" * NAME_MAX),
        ("name<script>alert(1)</script>", "name"),
        ("", None),
        ("   ", None),
        ("1.0", None),
        ("(comment) name/1", None),
        ("café/1", "caf"),
        ("\N{CYRILLIC SMALL LETTER A}pp/1", None),
    ],
)
def test_names(user_agent: str, name: str | None) -> None:
    """The first product without its version."""
    assert name == client_name(user_agent)


@given(st.text() | st.sampled_from(ATTACKS))
def test_any_header(user_agent: str) -> None:
    """A name is short and has no sign that means something elsewhere."""
    name = client_name(user_agent)
    assert name is None or (0 < len(name) <= NAME_MAX and set(name) <= ALLOWED)
