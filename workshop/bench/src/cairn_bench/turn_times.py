"""
What the events of a turn take on the thread that decides, by the length of the conversation.

A fold with as many blocks as are asked for, of which a conversation of each length has the first
ones; it goes on for some turns. Run it with ``python -P -m cairn_bench.turn_times``.

Milliseconds are those of the thread on the processor: *begin* is the request and the choice of its
path, *answer* its passes and the answer, *settle* what is computed ahead of the next prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from cairn_bench import matching
from cairn_bench.turns import STEPS, Conversation

_CHUNK = 64


def main() -> int:
    """Print what each step takes."""
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
