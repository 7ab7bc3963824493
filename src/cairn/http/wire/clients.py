"""The name of a client, by its own word: the ``User-Agent`` of its request."""

from __future__ import annotations

import re

NAME_MAX = 40
"""The most characters of a name."""

BROWSER = "browser"
"""The name of all browsers: each of them says that it is several others."""

# The first product, without its version: what follows a slash is a part of the name unless it
# begins like a version (`OpenAI/Python 1.109.1`, but `claude-cli/2.1.5` and `x/v0.3`).
_NAME = re.compile(r"\s*(@?[A-Za-z][\w.@+-]*(?:/(?![vV]?\d)[A-Za-z@][\w.@+-]*)*)", re.ASCII)


def client_name(user_agent: str) -> str | None:
    """
    The name of a client without its version, so that an update makes no other client of it:
    ``claude-cli``, ``OpenAI/Python``, ``opencode``.

    Args:
        user_agent: the header as it came, of any length and content.

    Returns:
        At most ``NAME_MAX`` of ASCII's letters, digits and ``_ . @ + - /``; None if the header does
        not begin with a name.
    """
    found = _NAME.match(user_agent[:200])
    if found is None:
        return None
    name = found[1]
    return BROWSER if name == "Mozilla" else name[:NAME_MAX]
