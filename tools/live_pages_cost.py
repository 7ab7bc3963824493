"""
Measures what open live pages cost: tokens a second, and the server's processor time a token, of a
stream beside ten of them and beside none, in turns.

Run it as ``python -P tools/live_pages_cost.py``. It starts a server with the built-in model, whose
tokens take a few milliseconds each, so that what pages cost is as large a share as it can be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator

import httpx

from cairn_clients.sdk_tests import served


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--pages", default=10, type=int)
    parser.add_argument("--tokens", default=600, type=int, help="of each stream")
    parser.add_argument("--repeats", default=9, type=int)
    given = parser.parse_args()
    with served(None) as url:
        stream(url, given.tokens)
        rates: dict[bool, list[float]] = {False: [], True: []}
        costs: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * given.repeats):
            open_pages = bool(number % 2)
            with pages(url, given.pages if open_pages else 0) as frames:
                before, begins = processor_s(url), time.perf_counter()
                count = stream(url, given.tokens)
                took = time.perf_counter() - begins
                costs[open_pages].append((processor_s(url) - before) / count)
                rates[open_pages].append(count / took)
            print(
                f"{given.pages * open_pages:>3} pages, {frames[0]} frames: "
                f"{rates[open_pages][-1]:.1f} tokens a second, "
                f"{costs[open_pages][-1] * 1000:.3f} ms of processor time a token"
            )
    for what, found in (("tokens a second", rates), ("processor time a token", costs)):
        ratio = statistics.median(found[True]) / statistics.median(found[False])
        print(f"{what}, with {given.pages} live pages / without: {ratio:.3f}")


def processor_s(url: str) -> float:
    """The processor time that the server has used, by its metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return float(
        next(one for one in lines if one.startswith("process_cpu_seconds_total ")).split()[1]
    )


def stream(url: str, tokens: int) -> int:
    """Stream answers, one after the other, until they had this many tokens; how many they had."""
    count, seed = 0, 0
    while count < tokens:
        seed += 1
        body = {"prompt": "The path", "max_tokens": 400, "stream": True, "temperature": 1.0}
        body |= {"seed": seed, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if '"completion_tokens"' in line]
        count += json.loads(lines[-1].removeprefix("data: "))["usage"]["completion_tokens"]
    return count


@contextlib.contextmanager
def pages(url: str, count: int) -> Iterator[list[int]]:
    """Live pages that are open, and how many frames they have read."""
    frames, leave = [0], threading.Event()

    def read() -> None:
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream("GET", f"{url}/explorer/live/stream", timeout=5) as page,
        ):
            for line in page.iter_lines():
                frames[0] += line.startswith("data:")
                if leave.is_set():
                    return

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield frames
    finally:
        leave.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
