"""
Does a cache hit change the answer? Compares the naive and the canonical schedule.

A conversation of some turns runs twice on one model, once with each schedule, and each turn's
answer is also computed cold. The comparison is bit for bit: the tokens of a greedy answer, their
log-probabilities, and those of the likeliest alternatives.

naive
    The new tokens run in one pass, on the KV that prefill and decoding left. Cold, the whole prompt
    runs in one pass. A decode pass has as many rows as there are sessions.
canonical
    Aligned chunks and an exact tail, on sealed blocks if they match. Decode passes always have W
    rows. The passes are those of ``cairn.engine.schedule``.

The naive schedule is the control. If it makes no difference, this machine's kernels do not depend
on the shape of a computation, and equal bits of the canonical schedule prove nothing. Run it with
``python -P tools/naive_control.py``; on Linux, ``--blas bundled`` shows such a case.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any

from cairn.engine.machine.blas import find_blas, loaded_blas
from cairn.engine.schedule import passes, slab_capacity

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parent))

from tests.support.models.random_model import make_random_model

CHUNK, ROWS = 64, 4
ANSWER, TOP = 24, 8

SAID = (
    "Describe the way from the lower cairn to the pass, and what can be seen on a clear day.",
    "And from there?",
    "Which of the two streams is easier to cross after rain, and where is the next shelter?",
    "Say it again, in one sentence.",
)
"""The user's messages, in a cycle: long and short turns."""


class Talk:
    """
    One conversation with one of the two schedules. Can also compute each answer cold.
    """

    def __init__(self, loaded: Any, *, canonical: bool) -> None:
        from cairn.engine.mlx.engine import MlxEngine

        self.canonical = canonical
        self.tokenizer = loaded.tokenizer
        self.context = loaded.context_tokens
        # The naive schedule begins with one row, and adds one for each further session.
        self.rows = {n: MlxEngine(loaded, decode_rows=n) for n in (1, ROWS)}
        self.engine = self.rows[ROWS if canonical else 1]
        for engine in self.rows.values():
            engine.pool, engine.blocks = self.engine.pool, self.engine.blocks
        self.slab = self.engine.open_slab(8192).slab
        self.held: list[int] = []
        self.settled = 0

    def turn(self, said: str) -> tuple[bool, bool, bool, float]:
        """
        Run one turn of the conversation, and compare its answer.

        Returns:
            Whether the answer has the same bits as a cold one, whether it has the same tokens,
            whether it has the same bits as among other sessions, and the largest difference between
            the log-probabilities of the same token.
        """
        text = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        prompt = self.held + list(self.tokenizer.encode(text))
        warm = self.answer(self.slab, prompt, self.reused(prompt))
        cold = self.from_nothing(prompt, beside=0)
        among = self.from_nothing(prompt, beside=ROWS - 1)
        self.held = prompt + [drawn.token for drawn in warm]
        both = zip(warm, cold, strict=True)
        agreed = list(takewhile(lambda two: two[0].token == two[1].token, both))
        apart = max((abs(a.logprob - b.logprob) for a, b in agreed), default=0.0)
        return warm == cold, len(agreed) == ANSWER, cold == among, apart

    def reused(self, prompt: list[int]) -> int:
        """Trim and fill the slab for a prompt; returns how many of its tokens need not run."""
        there = self.engine.pool.get(self.slab).caches[0].offset
        if not self.canonical:
            return int(there)  # the conversation only grows, so the prompt begins with all of it
        # Settle: canonical KV over what was decoded, in full chunks, then the tail as usual.
        keep = min(len(self.held), len(prompt) - 1) // CHUNK * CHUNK
        settled = self.settled
        self.engine.trim(self.slab, settled)
        for start, end in passes(settled, keep, CHUNK):
            self.engine.run_chunk(self.slab, prompt[start:end], None)
        self.settled = keep
        return keep

    def from_nothing(self, prompt: list[int], *, beside: int) -> list[Any]:
        """The cold answer to a prompt, with ``beside`` other sessions in its passes."""
        capacity = slab_capacity(len(prompt) + ANSWER, CHUNK, self.context)
        slabs = [self.engine.open_slab(capacity).slab for _ in range(beside + 1)]
        for number, slab in enumerate(slabs[1:], start=1):
            self.engine.run_chunk(slab, prompt[: 5 * number], None)
        answer = self.answer(slabs[0], prompt, 0, others=slabs[1:])
        for slab in slabs:
            self.engine.close_slab(slab)
        return answer

    def answer(
        self, slab: int, prompt: list[int], held: int, others: list[int] | None = None
    ) -> list[Any]:
        """Prefill the tokens that the slab does not hold, then decode greedily."""
        from cairn.engine.reports import DecodeRow, DrawSpec
        from cairn.engine.sampling import Sampling

        draw = DrawSpec(sampling=Sampling(temperature=0.0), seed=0, top=TOP)
        ranges = passes(held, len(prompt), CHUNK) if self.canonical else [(held, len(prompt))]
        for start, end in ranges:
            ids = prompt[start:end]
            report = self.engine.run_chunk(slab, ids, draw if end == len(prompt) else None)
        drawn: list[Any] = [report.drawn]
        live = [slab, *(others or [])]
        width = ROWS if self.canonical or len(live) > 1 else 1
        for _ in range(ANSWER - 1):
            rows: list[DecodeRow | None] = [
                DecodeRow(slab=one, token=drawn[-1].token, draw=draw) for one in live
            ]
            rows += [None] * (width - len(rows))
            first: Any = self.rows[width].decode(rows)[0]
            drawn.append(first.drawn)
        return drawn


def main() -> int:
    """Run the conversation with both schedules, and print how many turns differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--model", type=Path, help="a model directory; else random weights")
    parser.add_argument("--blas", choices=("auto", "bundled"), default="auto", help="on Linux")
    asked = parser.parse_args()
    _preload(asked.blas)

    from cairn.engine.mlx.model import load_model

    if asked.model is not None:
        loaded = load_model(str(asked.model))
    else:
        # Each of its tokens depends on many before it. Pebble's predictions are so confident that
        # its tokens would be the same even if bits differ.
        with tempfile.TemporaryDirectory() as folder:
            loaded = load_model(str(make_random_model(Path(folder) / "random")))
    blas = loaded_blas()
    print(f"model  {loaded.name}, {len(loaded.shapes)} layers, {loaded.shapes[0].dtypes[0]}")
    print(f"BLAS   {blas.name if blas else 'of the system'}")
    print(f"turns  {asked.turns}, {ANSWER} greedy tokens each\n")
    print("turns whose answer  from a cache is not that from nothing    among others is   largest")
    print("                         in bits           in tokens         not that alone   distance")
    counts = {}
    for name in ("naive", "canonical"):
        talk = Talk(loaded, canonical=name == "canonical")
        found = [talk.turn(SAID[turn % len(SAID)]) for turn in range(asked.turns)]
        bits, tokens, among = (sum(not one[place] for one in found) for place in range(3))
        apart = max(one[3] for one in found)
        of = f"of {asked.turns}"
        print(f"{name:<24}{bits:>3} {of:<15}{tokens:>3} {of:<15}{among:>3} {of:<9}{apart:>8.0e}")
        counts[name] = (bits, among)
    if sum(counts["canonical"]):
        print("\nThe canonical way is not stable here: promise P1 does not hold on this device.")
        return 1
    if not sum(counts["naive"]):
        print("\nThe control did not fail: on this device the experiment shows nothing.")
        return 3
    return 0


def _preload(choice: str) -> None:
    """On Linux, restart with a BLAS whose bits depend on shapes, as `ops serve` does."""
    if sys.platform != "linux" or choice == "bundled" or "LD_PRELOAD" in os.environ:
        return
    library = find_blas()
    if library is not None:
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], environment)


if __name__ == "__main__":
    sys.exit(main())
