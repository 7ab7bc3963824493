"""What a chat on a terminal begins with. Pure."""

from __future__ import annotations

from collections.abc import Sequence

PEBBLE = "pebble"
"""The name of the built-in model."""

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

_GIB = 1024**3
# Name on the Hugging Face Hub, and gigabytes of its files.
_REAL_MODELS = (
    ("mlx-community/Qwen3-30B-A3B-4bit", 17.2),
    ("mlx-community/Qwen3-14B-4bit", 8.3),
    ("mlx-community/Qwen3-8B-4bit", 4.6),
    ("mlx-community/Qwen3-4B-4bit", 2.3),
    ("mlx-community/Qwen3-1.7B-4bit", 1.0),
    ("mlx-community/Qwen3-0.6B-4bit", 0.4),
)
# On a CPU the weights are converted to float32, eight times the size. Elsewhere the KV of
# conversations and other programs need more than the weights.
_TIMES_ON_CPU, _TIMES = 8, 2.5


def openings_of(model: str) -> tuple[str, ...]:
    """The numbered messages to begin with."""
    return PEBBLE_OPENINGS if model == PEBBLE else OPENINGS


def real_model(memory_bytes: int, *, on_cpu: bool) -> tuple[str, float] | None:
    """
    The largest suggested model that fits a machine, with the gigabytes to download; None if none
    does.
    """
    times = _TIMES_ON_CPU if on_cpu else _TIMES
    fitting = (one for one in _REAL_MODELS if one[1] * 1e9 * times <= memory_bytes)
    return next(fitting, None)


def greeting(
    *,
    version: str,
    model: str,
    where: str,
    context_tokens: int,
    machine: tuple[int, bool] | None,
) -> Sequence[str]:
    """
    Three lines: the model and what it can do, messages to begin with, and commands. For Pebble also
    what a real model would be.

    Args:
        where: the model is served, beginning with a space; empty if that was said.
        context_tokens: of the model; 0 if unknown.
        machine: the memory of this machine in bytes, and whether it computes on its CPU; None if
            the server is on another machine.
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
    if model == PEBBLE and machine is not None:
        memory_bytes, on_cpu = machine
        found = real_model(memory_bytes, on_cpu=on_cpu)
        if found is not None:
            name, size = found
            lines.append(
                f"A real model that fits this machine ({memory_bytes / _GIB:.0f} GiB): "
                f"cairn chat --model {name} (downloads {size} GB once)."
            )
    return lines
