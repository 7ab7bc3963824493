"""
The parts of the bench, in the order in which they are measured.

A part is added by a module of its own and a line here. The scenarios are the first part, and stand
apart, as they are held pause by pause on all servers (``plan``).
"""

from __future__ import annotations

from typing import Final

from cairn.ops.bench.bits import BITS
from cairn.ops.bench.capacity import CAPACITY
from cairn.ops.bench.decode import DECODE
from cairn.ops.bench.first_token import FIRST_TOKEN
from cairn.ops.bench.matching import MATCHING
from cairn.ops.bench.recovery import RECOVERY
from cairn.ops.bench.reuse import REUSE
from cairn.ops.bench.stage import Part
from cairn.ops.bench.throughput import THROUGHPUT

SCENARIOS_PART: Final = "scenarios"

PARTS: Final[tuple[Part, ...]] = (
    BITS,
    FIRST_TOKEN,
    DECODE,
    THROUGHPUT,
    RECOVERY,
    REUSE,
    CAPACITY,
    MATCHING,
)
