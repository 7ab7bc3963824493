"""
Sends a server requests at once under one prompt, and prints what was prefilled and how long the
first tokens took.

Run it as ``python -P tools/requests_at_once.py URL COUNT [WORDS]``; each run needs words that the
server has not seen, so the prompt begins with the time.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

import httpx


def main(url: str, count: int, words: int = 600) -> None:
    """Send them, and print the figures."""
    text = f"{time.time()} " + " ".join(f"stone{place % 97}" for place in range(words))
    first: list[float] = []
    prompts: list[int] = []
    cached: list[int] = []

    def one(place: int) -> None:
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": f"Which is stone {place}?"},
        ]
        asked = {
            "messages": messages,
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun, seen = time.perf_counter(), False
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=600) as answer:
            for line in answer.iter_lines():
                if not seen and '"content"' in line:
                    first.append(time.perf_counter() - begun)
                    seen = True
                if '"usage":{' in line:
                    usage = httpx.Response(200, text=line.removeprefix("data: ")).json()["usage"]
                    prompts.append(usage["prompt_tokens"])
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"])

    begun = time.perf_counter()
    threads = [threading.Thread(target=one, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    print(
        f"{count} at once, prompts of {max(prompts)} tokens: {sum(prompts) - sum(cached)} "
        f"prefilled of {sum(prompts)}; first token {statistics.median(first):.2f} s (median), "
        f"{max(first):.2f} s (last); all after {took:.2f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:4]))
