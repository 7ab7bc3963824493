"""
How long the passes of a turn take, by C: how much of the time to first token is due to chunks.

A turn adds some new words to a history that ends anywhere in a chunk. Cairn computes from the last
whole chunk on, in passes of C tokens and one over the rest; mlx-lm's loop runs one pass over the
new words. Both are measured on the model alone, without servers, as the mean over places in a
chunk. Run it with ``python -P -m cairn_bench.times.passes``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cairn.engine.schedule import passes
from cairn.ops.serve.preload import blas_environment
from cairn_bench.servers.sized_model import make_sized_model
from cairn_bench.servers.sizes import Size

_LARGEST = 128
_PLACES = range(0, _LARGEST, 16)
_COLD = 2048
_REPEATS = 3


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--model", help="a directory; else random weights, 8 layers of 256")
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 32, 64, _LARGEST])
    parser.add_argument("--history", type=int, nargs="+", default=[640, 1920])
    parser.add_argument("--words", type=int, nargs="+", default=[30, 60], help="new tokens")
    asked = parser.parse_args()
    turns = [(history, words) for history in asked.history for words in asked.words]
    with tempfile.TemporaryDirectory() as scratch:
        model = asked.model or str(Path(scratch, "model"))
        if asked.model is None:
            make_sized_model(Path(model), Size())
        print(
            "ms".ljust(12) + "".join(f"{h:,} + {n}".rjust(14) for h, n in turns) + "    cold 2,048"
        )
        plain = [pair for turn in turns for pair in _pairs(*turn)]
        found = _measured(model=model, spans=[], plain=plain, repeats=_REPEATS)["plain"]
        _tell("mlx-lm", found, len(turns))
        for chunk in asked.chunks:
            spans = [(start // chunk * chunk, end) for start, end in plain] + [(0, _COLD)]
            found = _measured(model=model, spans=spans, repeats=_REPEATS, block_tokens=chunk)
            count = sum(len(list(passes(*span, chunk))) for span in spans[:-1]) / len(plain)
            _tell(f"C = {chunk}", found["spans"], len(turns), f"{count:.1f} passes a turn")
    return 0


def _pairs(history: int, words: int) -> list[tuple[int, int]]:
    return [(history + place, history + place + words) for place in _PLACES]


def _tell(name: str, found: Sequence[Sequence[float]], turns: int, more: str = "") -> None:
    medians = [1000 * statistics.median(times) for times in found]
    each = len(_PLACES)
    means = [statistics.mean(medians[each * turn : each * turn + each]) for turn in range(turns)]
    cold = f"{medians[-1]:14.0f}" if len(medians) > each * turns else " " * 14
    print(
        name.ljust(12) + "".join(f"{mean:14.1f}" for mean in means) + cold + f"  {more}", flush=True
    )


def _measured(**job: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cairn_bench.servers.bare_model"],
        input=json.dumps({"decodes": [], **job}),
        env={**os.environ, **blas_environment()},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


if __name__ == "__main__":
    sys.exit(main())
