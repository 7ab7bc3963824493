"""
What stands in the place of a part that this server's models cannot read.

A client does not choose what a tool gives it, an image for one, and sends it with every request
from then on: a refusal would end the conversation. So would one of what a user sent himself in a
turn that was answered, by another model for one. What he asks about now is refused, as he can send
something else. The texts are constant, so that what a prompt began with it begins with in the next
turn too.

What Anthropic takes back and shows its models nothing of has the empty text.
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
"""By their types, the parts of a message that are no text."""

_CALL: Final = "[a call of a tool, which another server ran]"
_RESULT: Final = "[what that tool gave, which was for that server]"
_SUMMARY: Final = "[a summary of what was said before, which was for that server]"
#: That another model answered from there on, and which tools a server had to offer.
_UNSHOWN: Final = frozenset({"fallback", "mcp_tool_listing"})


def answered(roles: Sequence[str]) -> int:
    """How many messages stand before the assistant's last one."""
    return max((index for index, role in enumerate(roles) if role == "assistant"), default=0)


def of_server_tools(kind: str) -> str | None:
    """
    What stands in the place of a block that Anthropic's server made, or that its server's tools
    did; None for a block of another kind.
    """
    if kind in _UNSHOWN:
        return ""
    if kind in ("server_tool_use", "mcp_tool_use"):
        return _CALL
    if kind == "compaction":
        return _SUMMARY
    # web_search_tool_result, mcp_tool_result and others; the client's own is none of them.
    return _RESULT if kind.endswith("_tool_result") else None
