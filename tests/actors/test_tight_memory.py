"""A model that may not fit in memory: what is recorded about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.engine.errors import ModelRefused
from cairn.engine.mlx import start as mlx_start
from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import serving

pytestmark = pytest.mark.trio


async def test_accepting_tight_memory_is_recorded(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The server stops before the model is loaded and says why. Once an operator accepts the numbers,
    they are on record, without a path, next to the budgets in force.
    """
    monkeypatch.setattr(mlx_start, "machine_memory", lambda: 8 << 20)
    store = MemoryStore()

    with pytest.raises(ExceptionGroup) as failed:
        async with serving(model_directory, store):
            pass

    assert failed.group_contains(ModelRefused, match="does not fit in memory")
    assert [ev.ServerStarted.kind, ev.ServerStopped.kind] == [row.kind for row in store.rows]
    async with serving(model_directory, store, accept_tight=True):
        pass
    events = [decode(row).event for row in store.rows]
    (acted,) = (event for event in events if isinstance(event, ev.OperatorActed))
    assert "accept_tight_memory" == acted.action
    assert "512.0 MiB" in acted.detail
    assert str(model_directory) not in acted.detail
    (loaded,) = (event for event in events if isinstance(event, ev.ModelLoaded))
    assert (512 << 20, 256 << 20) == (loaded.pool_bytes, loaded.blocks_bytes)
