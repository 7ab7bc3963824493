"""
The parts of the bench, in the order in which they are measured.

To add a part, write a module for it and add a line here. The scenarios are the first part, and are
separate because they run pause by pause on all servers (``plan``).
"""

from __future__ import annotations

from typing import Final

from cairn_bench.parts.bits import BITS
from cairn_bench.parts.capacity import CAPACITY
from cairn_bench.parts.decode import DECODE
from cairn_bench.parts.drafts import DRAFTS
from cairn_bench.parts.first_token import FIRST_TOKEN
from cairn_bench.parts.matching import MATCHING
from cairn_bench.parts.prefill import PREFILL
from cairn_bench.parts.recovery import RECOVERY
from cairn_bench.parts.reuse import REUSE
from cairn_bench.parts.stage import Part
from cairn_bench.parts.throughput import THROUGHPUT

SCENARIOS_PART: Final = "scenarios"

PARTS: Final[tuple[Part, ...]] = (
    BITS,
    FIRST_TOKEN,
    PREFILL,
    DECODE,
    DRAFTS,
    THROUGHPUT,
    RECOVERY,
    REUSE,
    CAPACITY,
    MATCHING,
)
