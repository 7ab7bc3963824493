"""
Which models fit a machine. Pure, except for ``this_machine``.

The server refuses a model whose weights, slabs and blocks are more than the memory
(``cairn.engine.machine.memory``); *no* is that. A model is suggested only if other programs need
not be closed for it.
"""

from __future__ import annotations

import enum
import sys

import attrs

from cairn.engine.machine.cuda import has_cuda
from cairn.engine.machine.memory import budgets_for, free_memory, machine_memory, memory_fault
from cairn.ops.models.short_names import KNOWN_MODELS, KnownModel

_BESIDE_WEIGHTS = 1.25
"""The memory that is enough for weights and the KV of a few conversations, in sizes of weights."""

_METAL_SHARE = 0.75
"""The share of a Mac's memory that its GPU may use, about; MLX knows it, and is not loaded here."""

_SUGGESTED = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-30b")


class Fit(enum.Enum):
    """Whether a model fits. The values are what lists show."""

    YES = "yes"
    TIGHT = "tight"
    SLOW = "slow"
    NO = "no"


FIT_WORDS = {
    Fit.YES: "fits the memory that is free now",
    Fit.TIGHT: "fits if other programs leave it room",
    Fit.SLOW: "fits, and is slow: a CPU computes fast in float32 alone, which does not fit",
    Fit.NO: "does not fit",
}
"""What each means, after the name of a model."""


@attrs.frozen(kw_only=True)
class Machine:
    """
    What a machine has for a model.

    Attributes:
        memory_bytes: its memory.
        free_bytes: what other programs leave of it now.
        on_cpu: whether it computes on its CPU, where weights are converted to float32.
    """

    memory_bytes: int
    free_bytes: int
    on_cpu: bool


def this_machine() -> Machine:
    """The machine that this process runs on."""
    memory, free = machine_memory(), free_memory()
    is_mac = sys.platform == "darwin"
    if is_mac:
        memory = int(memory * _METAL_SHARE)
    return Machine(
        memory_bytes=memory,
        free_bytes=min(memory, free),
        on_cpu=not is_mac and not has_cuda(),
    )


def fit_of(weights_bytes: int, float32_bytes: int, machine: Machine) -> Fit:
    """
    Whether a model fits.

    Args:
        weights_bytes: of its files.
        float32_bytes: of its weights in float32.
    """
    if not _is_loaded(weights_bytes, machine):
        return Fit.NO
    if machine.on_cpu and not _is_loaded(float32_bytes, machine):
        return Fit.SLOW
    computed = float32_bytes if machine.on_cpu else weights_bytes
    return Fit.YES if computed * _BESIDE_WEIGHTS <= machine.free_bytes else Fit.TIGHT


def _is_loaded(size: int, machine: Machine) -> bool:
    budgets = budgets_for(weights_bytes=size, memory_bytes=machine.memory_bytes)
    fault = memory_fault(weights_bytes=size, memory_bytes=machine.memory_bytes, budgets=budgets)
    return fault is None


def fit_of_known(model: KnownModel, machine: Machine) -> Fit:
    """Whether a model of the table fits, by its computed size."""
    return fit_of(model.weights_bytes, model.float32_bytes, machine)


def suggestion(machine: Machine) -> KnownModel | None:
    """The largest of the suggested models that fits the memory that is free; None if none does."""
    fitting = (
        model
        for model in reversed(KNOWN_MODELS)
        if model.name in _SUGGESTED and fit_of_known(model, machine) is Fit.YES
    )
    return next(fitting, None)


def suggested_words(machine: Machine, command: str) -> str:
    """
    A sentence that names a model that fits, beginning with a space; empty if none does.

    Args:
        command: that uses it, such as ``cairn pull``.
    """
    model = suggestion(machine)
    if model is None:
        return ""
    return (
        f" One that fits this machine: `{command} {model.name}` ({gigabytes(model.weights_bytes)})."
    )


def gigabytes(size: float) -> str:
    """A size of files, as disks and hubs give it: in units of a thousand."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
