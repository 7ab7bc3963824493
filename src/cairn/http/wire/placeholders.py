"""
The placeholders for parts that this server's models cannot read.

A client does not choose what a tool returns, such as an image, and sends it with every later
request: a refusal would end the conversation. The same holds for what a user sent in a turn that
was already answered, perhaps by another model. In the current turn such a part is refused, because
the user can send something else. The texts are constant, so that a later prompt begins with the
same text.

Blocks that Anthropic does not show its own models have the empty text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

IMAGE: Final = "[an image, which this model does not see]"
DOCUMENT: Final = "[a document, which this model cannot read]"
UNKNOWN: Final = "[something that a tool gave, which this model cannot read]"
_SOUND: Final = "[a sound, which this model does not hear]"

OF_PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "image": IMAGE,
        "image_url": IMAGE,
        "input_image": IMAGE,
        "file": DOCUMENT,
        "input_file": DOCUMENT,
        "input_audio": _SOUND,
    }
)
"""The placeholders for parts of a message that are not text, by their types."""

_CALL: Final = "[a call of a tool, which another server ran]"
_RESULT: Final = "[what that tool gave, which was for that server]"
_SUMMARY: Final = "[a summary of what was said before, which was for that server]"
#: They say that another model took over, and which tools a server offered.
_UNSHOWN: Final = frozenset({"fallback", "mcp_tool_listing"})


def answered(roles: Sequence[str]) -> int:
    """How many messages are before the assistant's last one."""
    return max((index for index, role in enumerate(roles) if role == "assistant"), default=0)


def of_server_tools(kind: str) -> str | None:
    """
    The placeholder for a block that Anthropic's server or its tools made; None for other blocks.
    """
    if kind in _UNSHOWN:
        return ""
    if kind in ("server_tool_use", "mcp_tool_use"):
        return _CALL
    if kind == "compaction":
        return _SUMMARY
    # web_search_tool_result, mcp_tool_result and others, but not the client's own tool_result.
    return _RESULT if kind.endswith("_tool_result") else None
