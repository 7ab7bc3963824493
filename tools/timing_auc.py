"""
Measures whether a tenant learns from the time to its first token that another tenant has sent the
same prompt before.

Run it as ``PYTHONPATH=. python -P -m tools.timing_auc``. It starts a server with two tenants on the
built-in model. Before each measured request of tenant B, one request makes the server work as long:
tenant A sends the same prompt, tenant A sends another prompt of that length, or tenant B sends the
same prompt itself. A classifier that calls short times "sent before" is rated by the area under its
curve (AUC): 0.5 is a guess, 1.0 is certainty. It exits with 1 if that of the first against the
second is not between 0.45 and 0.55, or if the control, the third against the second, is not above
0.95.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tqdm import tqdm

from cairn.ops.serve.api_keys import KEYS_VARIABLE
from tests.support.processes.subprocess_server import Serving, started

KEYS: Final = {"a": "the-key-of-tenant-a-012345", "b": "the-key-of-tenant-b-012345"}
OTHER, NONE, SAME = "sent by another tenant", "not sent before", "sent by the same tenant"
AT_MOST: Final = 0.55
AT_LEAST: Final = 0.95
WORDS = ("stone", "slate", "lichen", "summit", "saddle", "path", "cairn", "rain", "scree", "ridge")


def prompt(draw: random.Random, words: int) -> str:
    """Words in an order that no other prompt has from its first words on."""
    return " ".join(draw.choice(WORDS) for _ in range(words))


def asked(server: Serving, tenant: str, text: str) -> tuple[float, int]:
    """Send a prompt; returns the seconds to its first token, and its cached tokens."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"}
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    connection.connect()
    begun, first, cached = time.perf_counter(), 0.0, 0
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    with connection.getresponse() as answer:
        if answer.status != 200:
            raise SystemExit(answer.read().decode())
        for line in answer:
            # The first delta, which has the role, comes before a prompt is computed.
            if not first and b'"content":"' in line and b'"content":""' not in line:
                first = time.perf_counter() - begun
            if b'"usage":{' in line:
                usage = json.loads(line.removeprefix(b"data: "))["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    connection.close()
    return first, cached


def auc(shorter: Sequence[float], longer: Sequence[float]) -> float:
    """How often a time of the first is shorter than one of the second; equal ones count half."""
    pairs = [(one < two) + (one == two) / 2 for one in shorter for two in longer]
    return sum(pairs) / len(pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each kind and the two areas."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--trials", type=int, default=300, help="measured requests of each kind")
    parser.add_argument("--words", type=int, default=300, help="words of a prompt")
    parser.add_argument("--seed", type=int, default=1)
    of = parser.parse_args(argv)
    draw = random.Random(of.seed)
    kinds = [OTHER, NONE, SAME] * of.trials
    draw.shuffle(kinds)
    times: dict[str, list[float]] = {OTHER: [], NONE: [], SAME: []}
    environment = {KEYS_VARIABLE: " ".join(f"{name}={key}" for name, key in KEYS.items())}
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder) / "data", env=environment) as server,
    ):
        for kind in tqdm(kinds, unit="request", disable=not sys.stderr.isatty()):
            text = prompt(draw, of.words)
            before = prompt(draw, of.words) if kind == NONE else text
            asked(server, "b" if kind == SAME else "a", before)
            took, cached = asked(server, "b", text)
            if (cached > of.words / 2) != (kind == SAME):
                raise SystemExit(f"{cached} tokens were cached of a prompt that was {kind}")
            times[kind].append(took)
    for kind, found in times.items():
        print(f"{kind}: first token {1000 * statistics.median(found):.1f} ms (median)")
    leak, control = auc(times[OTHER], times[NONE]), auc(times[SAME], times[NONE])
    print(f"AUC {leak:.3f} for another tenant's prompts, {control:.3f} for its own")
    return int(not (1 - AT_MOST < leak < AT_MOST and control > AT_LEAST))


if __name__ == "__main__":
    sys.exit(main())
