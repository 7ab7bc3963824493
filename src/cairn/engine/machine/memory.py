"""
Whether a model fits in this machine's memory. Checked before it is loaded, because the system may
kill a process that takes too much before it can report anything.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

_V1_NAME = "memory.limit_in_bytes"
_V2_NAME = "memory.max"
_VM_STAT_S = 5.0


@attrs.frozen(kw_only=True)
class Budgets:
    """Bytes of slabs, and of sealed blocks in memory."""

    pool_bytes: int
    blocks_bytes: int


def budgets_for(
    *,
    weights_bytes: int,
    memory_bytes: int,
    pool_bytes: int | None = None,
    blocks_bytes: int | None = None,
) -> Budgets:
    """
    The budgets of a model. The default of each is a quarter of the memory, or for a large model a
    third of what it leaves, but at least a sixteenth of the memory.
    """
    left = max(0, memory_bytes - weights_bytes)
    usual = min(memory_bytes // 4, max(left // 3, memory_bytes // 16))
    return Budgets(
        pool_bytes=usual if pool_bytes is None else pool_bytes,
        blocks_bytes=usual if blocks_bytes is None else blocks_bytes,
    )


def memory_fault(*, weights_bytes: int, memory_bytes: int, budgets: Budgets) -> str | None:
    """Why a model does not fit in memory, with the figures; None if it does."""
    if weights_bytes + budgets.pool_bytes + budgets.blocks_bytes <= memory_bytes:
        return None
    return (
        f"its weights take {_size(weights_bytes)}, the KV of sessions may take "
        f"{_size(budgets.pool_bytes)} and sealed blocks {_size(budgets.blocks_bytes)}, but the "
        f"machine has {_size(memory_bytes)}"
    )


def machine_memory(root: Path = Path("/")) -> int:
    """
    The machine's memory in bytes, or the limit of this process if that is less.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits(root)])


def free_memory(root: Path = Path("/"), vm_stat: Callable[[], str] | None = None) -> int:
    """
    The memory in bytes that other programs leave, with what the system can take back from files; at
    most ``machine_memory``, which is the answer where the system does not say.

    Args:
        root: where ``proc`` and ``sys`` are.
        vm_stat: returns the output of macOS's program of this name.
    """
    memory = machine_memory(root)
    try:
        text = (root / "proc/meminfo").read_text("ascii", errors="replace")
    except OSError:  # not Linux
        free = _mac_free((vm_stat or _vm_stat)())
    else:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
        free = 1024 * int(found[1]) if found is not None else None
    return memory if free is None else min(memory, free)


def _mac_free(text: str) -> int | None:
    """The free memory by the output of ``vm_stat``; None if that does not say."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(
        r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", text, re.MULTILINE
    )
    return int(size[1]) * sum(map(int, pages)) if size is not None and pages else None


def _vm_stat() -> str:
    """The output of ``vm_stat``; empty where there is no such program."""
    try:
        done = subprocess.run(
            ["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=_VM_STAT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def device_memory(machine_bytes: int, device: Mapping[str, Any]) -> int:
    """
    The memory that a device can use: a share of the machine's if it uses that, else its own.

    Args:
        device: MLX's description of the device.
    """
    if share := device.get("max_recommended_working_set_size"):  # Metal
        return min(machine_bytes, int(share))
    return int(device.get("total_memory") or machine_bytes)  # CUDA


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The limits of this process's control groups and of those above them."""
    try:
        # A group may have any name.
        listed = (root / "proc/self/cgroup").read_text("utf-8", errors="surrogateescape")
    except OSError:  # not Linux
        return
    mounts = root / "sys/fs/cgroup"
    for line in listed.splitlines():
        _, *rest = line.split(":", 2)
        if len(rest) != 2:
            continue  # not a line that the kernel writes
        controllers, group = rest
        if not controllers:
            yield from _limits(mounts, group, _V2_NAME)
        elif "memory" in controllers.split(","):
            yield from _limits(mounts / "memory", group, _V1_NAME)


def _limits(mount: Path, group: str, name: str) -> Iterable[int]:
    # In a container the group's own folder may be missing under its name; its parents exist.
    parts = [part for part in group.split("/") if part]
    for depth in range(len(parts), -1, -1):
        try:
            text = mount.joinpath(*parts[:depth], name).read_bytes().strip()
        except (OSError, ValueError):  # an impossible file name raises ValueError
            continue
        if text.isdigit():  # "max" means no limit
            yield int(text)


def _size(size: int) -> str:
    """A number of bytes, readable."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
