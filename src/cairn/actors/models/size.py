"""Whether a model would fit in memory, by its files alone: nothing of it is loaded."""

from __future__ import annotations

from pathlib import Path

import attrs

from cairn.actors.models.choice import Choice
from cairn.engine.machine.memory import budgets_for, machine_memory, memory_fault
from cairn.engine.model.files import weights_bytes
from cairn.engine.model.models_file import entry_fault


@attrs.frozen(kw_only=True)
class ModelSize:
    """
    What a model would take of the memory.

    Attributes:
        weights_bytes: of its weights, as its files have them; None if they cannot be read.
        memory_bytes: of the machine, or of what this process may take of it. A device that may use
            less is asked when the model is loaded.
        fault: why it cannot be served, or does not fit beside its slabs and blocks; None if it
            does.
    """

    weights_bytes: int | None
    memory_bytes: int
    fault: str | None


def size_of(choice: Choice) -> ModelSize:
    """The size of a model. Reads the headers of its files, so it is called on a thread."""
    memory = max(0, machine_memory() - choice.settings.beside_bytes)
    try:
        if (fault := entry_fault(choice.entry)) is not None:
            return ModelSize(weights_bytes=None, memory_bytes=memory, fault=fault)
        adapter = choice.entry.adapter
        size = weights_bytes(
            Path(choice.entry.directory), Path(adapter) if adapter is not None else None
        )
    except (OSError, ValueError) as error:  # its files changed between the two
        return ModelSize(weights_bytes=None, memory_bytes=memory, fault=str(error))
    budgets = budgets_for(
        weights_bytes=size,
        memory_bytes=memory,
        pool_bytes=choice.settings.pool_bytes,
        blocks_bytes=choice.settings.blocks_bytes,
    )
    fault = memory_fault(weights_bytes=size, memory_bytes=memory, budgets=budgets)
    return ModelSize(weights_bytes=size, memory_bytes=memory, fault=fault)
