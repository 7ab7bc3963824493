"""Whether a model fits is decided by its size, before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.engine.errors import ModelRefused
from cairn.engine.machine.memory import (
    Budgets,
    budgets_for,
    device_memory,
    free_memory,
    machine_memory,
    memory_fault,
)
from cairn.engine.mlx import start as mlx_start
from cairn.engine.reports import PassShapes

GIB = 1 << 30


def test_a_model_that_fits_has_no_fault() -> None:
    """Up to the last byte it fits."""
    budgets = Budgets(pool_bytes=2 * GIB, blocks_bytes=1 * GIB)

    assert memory_fault(weights_bytes=5 * GIB, memory_bytes=8 * GIB, budgets=budgets) is None
    assert memory_fault(weights_bytes=5 * GIB + 1, memory_bytes=8 * GIB, budgets=budgets)


def test_the_fault_has_the_figures() -> None:
    """The size of the weights, the budgets, and the memory of the machine."""
    budgets = Budgets(pool_bytes=2 * GIB, blocks_bytes=512 << 20)
    fault = memory_fault(weights_bytes=(3 << 40) // 2, memory_bytes=16 * GIB, budgets=budgets)

    for figure in ("1.5 TiB", "2.0 GiB", "512.0 MiB", "16.0 GiB"):
        assert figure in (fault or "")


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        (0, 16),  # a quarter
        (16, 16),
        (34, 10),  # a third of what is left
        (52, 4),
        (60, 4),  # a sixteenth at least, so this one does not fit
    ],
)
def test_default_budgets(weights: int, share: int) -> None:
    """They make room for the weights as long as there is some."""
    found = budgets_for(weights_bytes=weights * GIB, memory_bytes=64 * GIB)

    assert Budgets(pool_bytes=share * GIB, blocks_bytes=share * GIB) == found
    fault = memory_fault(weights_bytes=weights * GIB, memory_bytes=64 * GIB, budgets=found)
    assert (weights > 56) == (fault is not None)


def test_budgets_that_the_operator_chose() -> None:
    """Budgets of any size are kept; whether they fit is a separate check."""
    found = budgets_for(weights_bytes=GIB, memory_bytes=8 * GIB, pool_bytes=9 * GIB, blocks_bytes=0)

    assert Budgets(pool_bytes=9 * GIB, blocks_bytes=0) == found


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/a/b", {"a/b/memory.max": "4096"}, 4096),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "2048"}, 2048),
        ("0::/a/b", {"a/b/memory.max": "1024", "a/memory.max": "2048"}, 1024),
        ("0::/not/here", {"memory.max": "512"}, 512),
        ("0::/", {"memory.max": "max"}, None),
        ("5:cpu,memory:/x\n0::/", {"memory/x/memory.limit_in_bytes": "256"}, 256),
        ("5:cpu:/x", {"memory/x/memory.limit_in_bytes": "256"}, None),
        (None, {}, None),
        ("junk\n0:no group\n\n0::/a", {"a/memory.max": "4096"}, 4096),
        ("0::/a\xff", {"memory.max": "4096"}, 4096),
        ("0::/a\0b", {"memory.max": "4096"}, 4096),
        ("0::/a", {"a/memory.max": "\xff", "memory.max": "4096"}, 4096),
    ],
)
def test_the_limit_of_control_groups(
    tmp_path: Path, group: str | None, files: dict[str, str], expected: int | None
) -> None:
    """
    The lowest limit on the way up counts, of either version; without one, the machine's memory.
    What cannot be read is passed over.
    """
    if group is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_bytes(f"{group}\n".encode("latin-1"))
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{text}\n".encode("latin-1"))

    whole = machine_memory(tmp_path / "nothing")
    assert (expected or whole) == machine_memory(tmp_path)
    assert whole > GIB // 4


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({}, 16),
        ({"max_recommended_working_set_size": 11 * GIB, "memory_size": 16 * GIB}, 11),
        ({"max_recommended_working_set_size": 32 * GIB}, 16),
        ({"total_memory": 80 * GIB, "free_memory": 3 * GIB}, 80),
    ],
    ids=["cpu", "metal", "metal in a small group", "cuda"],
)
def test_the_memory_of_a_device(reported: dict[str, int], expected: int) -> None:
    """
    Metal recommends a share of the machine's memory; a device with memory of its own has that.
    """
    assert expected * GIB == device_memory(16 * GIB, reported)


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                65536.
Pages active:                             300000.
Pages inactive:                            32768.
Pages speculative:                         16384.
Pages purgeable:                           16384.
"""


@pytest.mark.parametrize(
    ("meminfo", "vm_stat", "expected"),
    [
        ("MemTotal:   999 kB\nMemAvailable:   1024 kB\n", VM_STAT, 1 << 20),
        (None, VM_STAT, 2 * GIB),
        (None, "no such thing", None),
        ("MemTotal:   999 kB\n", VM_STAT, None),
        ("MemAvailable:   9999999999999 kB\n", VM_STAT, None),
    ],
    ids=["linux", "macos", "unknown", "old linux", "more than there is"],
)
def test_the_memory_that_is_free(
    tmp_path: Path, meminfo: str | None, vm_stat: str, expected: int | None
) -> None:
    """By the system's own count; all of it where the system does not say."""
    if meminfo is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text(meminfo)
    memory = machine_memory(tmp_path)
    assert (memory if expected is None else min(memory, expected)) == free_memory(
        tmp_path, lambda: vm_stat
    )
    assert 0 < free_memory() <= machine_memory()


@pytest.mark.parametrize("accept", [False, True])
def test_a_tight_model_is_refused_unless_that_is_accepted(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, accept: bool
) -> None:
    """
    On a machine of a few MiB the random model is refused before it is loaded, with the figures;
    who accepts that gets it, and the figures are kept for the record.
    """
    monkeypatch.setattr(mlx_start, "machine_memory", lambda: 8 << 20)
    loads: list[str] = []

    def start() -> mlx_start.Started:
        return mlx_start.start_engine(
            str(model_directory),
            name=None,
            block_tokens=None,
            decode_rows=None,
            kv_cache="slab",
            pool_bytes=64 << 20,
            blocks_bytes=None,
            tested_shapes=lambda fingerprint: PassShapes(),
            progress=lambda what, done, total: loads.append(what),
            accept_tight=accept,
        )

    if accept:
        assert "64.0 MiB" in (start().tight or "")
        return
    with pytest.raises(ModelRefused, match=r"does not fit in memory.*64\.0 MiB.*8\.0 MiB"):
        start()
    assert [] == loads
