"""
The time of a turn's events on the decision thread, by the length of the conversation.

The fold has the requested number of blocks, of which a conversation of each length has the first
ones; it continues for some turns. Run it with ``python -P -m cairn_bench.times.turns``.

Milliseconds are processor time of the thread: *begin* is the request and the choice of its path,
*answer* its passes and the answer, *settle* what is computed ahead of the next prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from cairn_bench.parts import matching
from cairn_bench.parts.turns import STEPS, Conversation

_CHUNK = 64


def main() -> int:
    """Print the time of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 8_000, 100_000])
    parser.add_argument("--blocks", type=int, default=100_000, help="that are in memory in all")
    parser.add_argument("--turns", type=int, default=9)
    asked = parser.parse_args()
    print(f"{asked.blocks:,} blocks, {asked.turns} turns\n")
    print(f"{'median of CPU ms':<20}" + "".join(f"{name:>10}" for name in (*STEPS, "in all")))
    for tokens in asked.tokens:
        index = matching.made_index(tokens, asked.blocks, _CHUNK)
        talk = Conversation(index.state, index.session, matching.SECRET, time.thread_time)
        turns = [talk.turn() for _ in range(asked.turns)]
        medians = [1000 * statistics.median(took[step] for took in turns) for step in STEPS]
        whole = 1000 * statistics.median(sum(took.values()) for took in turns)
        print(f"{tokens:<20,}" + "".join(f"{took:>10.2f}" for took in (*medians, whole)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
