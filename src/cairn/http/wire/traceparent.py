"""The trace context of a caller, as W3C's header ``traceparent`` has it."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.journal.events import TRACEPARENT

_LENGTH = len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def read_traceparent(headers: Sequence[str]) -> str | None:
    """
    The span that a client calls from.

    Args:
        headers: all headers of this name.

    Returns:
        The first four fields of the header. None if there is none, or an invalid one: such a header
        is ignored, as the specification has it, and the request begins a trace of its own.
    """
    if len(headers) != 1:
        return None
    header = headers[0].strip(" \t")
    context, more = header[:_LENGTH], header[_LENGTH:]
    if not TRACEPARENT.fullmatch(context):
        return None
    version, trace, parent, _ = context.split("-")
    if version == "ff" or not int(trace, 16) or not int(parent, 16):
        return None
    # Later versions may have more fields; this one has none.
    if more and (version == "00" or not more.startswith("-")):
        return None
    return context
