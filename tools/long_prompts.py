"""
Serves the built-in model to two tenants, and prints how long bob's request of one word takes alone
and while alice sends bodies of 8 MB, each of which is refused or counted.

Run it as ``python -P tools/long_prompts.py``.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes.subprocess_server import started

KEYS = {name: f"{name}-{'0' * 24}" for name in ("alice", "bob")}


def body(text: str) -> bytes:
    """A request's body."""
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "any", "max_tokens": 1, "messages": messages}).encode()


def ask(url: str, tenant: str, path: str, sent: bytes) -> int:
    """Send a request; the status of its answer."""
    headers = {"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"}
    return httpx.post(f"{url}{path}", content=sent, headers=headers, timeout=600).status_code


def seconds(work: Callable[[], Any]) -> float:
    """How long work takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Measure, and print a line for each case."""
    words = "Take the lower path, and count the cairns on the way. "
    cases = {
        "one of 2 MB": ("/v1/chat/completions", 1, 2_000_000),
        "one of 8 MB": ("/v1/chat/completions", 1, 8_000_000),
        "one of 30 MB": ("/v1/chat/completions", 1, 30_000_000),
        "one of 8 MB to be counted": ("/v1/messages/count_tokens", 1, 8_000_000),
        "five of 8 MB": ("/v1/chat/completions", 5, 8_000_000),
        "five of 0.5 MB": ("/v1/chat/completions", 5, 500_000),
    }
    keys = [part for name, key in KEYS.items() for part in ("--api-key", f"{name}={key}")]
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), *keys) as serving:
        url = str(serving.url)

        def bob() -> None:
            sent = body(f"Hello {os.urandom(4).hex()}")
            assert ask(url, "bob", "/v1/chat/completions", sent) == 200

        bob()
        print(f"alone: {min(seconds(bob) for _ in range(5)):.2f} s")
        for name, (path, count, size) in cases.items():
            statuses: list[int] = []

            def alice(path: str, sent: bytes, found: list[int]) -> None:
                found.append(ask(url, "alice", path, sent))

            # No two are the same, because what was tokenised once is known.
            bodies = [
                body(os.urandom(8).hex() + words * (size // len(words))) for _ in range(count)
            ]
            alices = [
                threading.Thread(target=alice, args=(path, sent, statuses)) for sent in bodies
            ]
            for thread in alices:
                thread.start()
            time.sleep(0.3)  # until they have been sent
            worst, asked = 0.0, 0
            while any(thread.is_alive() for thread in alices):
                worst, asked = max(worst, seconds(bob)), asked + 1
            print(f"{name}: alice {statuses}; the longest of bob's {asked}: {worst:.2f} s")


if __name__ == "__main__":
    main()
