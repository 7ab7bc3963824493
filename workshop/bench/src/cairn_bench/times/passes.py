"""
How long a prefill pass takes by its number of tokens, beside mlx-lm's own pass over as many.

Also what it would save to compute the tokens of two requests in one pass: at most the difference
between two passes and one over twice as many tokens. Both are measured on the model alone, without
servers. Run it with ``python -P -m cairn_bench.times.passes``.
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

from cairn.ops.serve.preload import blas_environment
from cairn_bench.servers.sized_model import make_sized_model
from cairn_bench.servers.sizes import DEFAULT, SIZES

_REPEATS = 9
_COLUMNS = ("tokens", "ours, ms", "mlx-lm's, ms", "ratio", "two in one pass / apart")


def main() -> int:
    """Print a table for each history."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--model", help="a directory; else random weights of --size")
    parser.add_argument("--size", choices=SIZES, default=DEFAULT)
    parser.add_argument("--history", type=int, nargs="+", default=[640, 1920], help="in tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = asked.model or str(Path(scratch, "model"))
        if asked.model is None:
            make_sized_model(Path(model), SIZES[asked.size])
        for history in asked.history:
            spans = [(history, history + tokens) for tokens in asked.tokens]
            found = _measured(model=model, spans=spans, plain=spans, repeats=_REPEATS)
            print(f"after {history:,} tokens")
            print("".join(column.rjust(26) for column in _COLUMNS))
            for cells in rows_of(asked.tokens, found["spans"], found["plain"]):
                print("".join(cell.rjust(26) for cell in cells), flush=True)
    return 0


def rows_of(
    tokens: Sequence[int], ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> list[tuple[str, ...]]:
    """
    The rows of a table.

    Args:
        tokens: the numbers of tokens, ascending.
        ours, theirs: for each of them the seconds of each repeat.
    """
    medians = {n: statistics.median(times) for n, times in zip(tokens, ours, strict=True)}
    plain = {n: statistics.median(times) for n, times in zip(tokens, theirs, strict=True)}
    return [
        (
            str(n),
            f"{1000 * medians[n]:.1f}",
            f"{1000 * plain[n]:.1f}",
            f"{medians[n] / plain[n]:.2f}",
            f"{medians[2 * n] / (2 * medians[n]):.2f}" if 2 * n in medians else "",
        )
        for n in tokens
    ]


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
