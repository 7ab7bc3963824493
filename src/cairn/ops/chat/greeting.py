"""What a chat on a terminal begins with. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.ops.common.output import size_text
from cairn.ops.models.fitting import Machine, gigabytes, suggestion
from cairn.ops.models.short_names import PEBBLE

PEBBLE_OPENINGS = (
    "Hello! My name is Jordis. Please remember that I live in Zanport.",
    "What is Cairn?",
    "What can you do?",
)
"""What Pebble can answer."""

OPENINGS = (
    "What can you help me with?",
    "Explain in three sentences what a KV cache is.",
    "Write a haiku about a pile of stones.",
)
"""What any model can answer."""


def openings_of(model: str) -> tuple[str, ...]:
    """The numbered messages to begin with."""
    return PEBBLE_OPENINGS if model == PEBBLE else OPENINGS


def greeting(
    *,
    version: str,
    model: str,
    where: str,
    context_tokens: int,
    machine: Machine | None,
) -> Sequence[str]:
    """
    Three lines: the model and what it can do, messages to begin with, and commands. For Pebble also
    what a real model would be.

    Args:
        where: the model is served, beginning with a space; empty if that was said.
        context_tokens: of the model; 0 if unknown.
        machine: this machine; None if the server is on another one.
    """
    about = f"a context of {context_tokens:,} tokens" if context_tokens else "ready"
    if model == PEBBLE:
        about = "a toy of 8 MB for the tour: it remembers what you tell it, and knows little else"
    numbered = "   ".join(f"{number} {text}" for number, text in enumerate(openings_of(model), 1))
    lines = [
        f"Cairn {version} · {model}{where}: {about}.",
        f"Type a number to begin:   {numbered}",
        "/tour shows in two minutes what Cairn does; /help lists the commands.",
    ]
    found = suggestion(machine) if model == PEBBLE and machine is not None else None
    if found is not None and machine is not None:
        lines.append(
            f"A real model that fits this machine ({size_text(machine.free_bytes)} of memory are "
            f"free): cairn chat --model {found.name} (downloads {gigabytes(found.weights_bytes)} "
            "once)."
        )
    return lines
