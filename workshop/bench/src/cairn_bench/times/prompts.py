"""
Measure how long it takes to prepare a long conversation: each step before a session has it.

A conversation is rendered, tokenised and hashed, then again with one more short turn, as in the
next request. The ids of the turn are compared with those of the whole text. Run it with ``python -P
-m cairn_bench.times.prompts``; ``--model`` uses a tokenizer other than Pebble's.

Milliseconds are processor time over all threads, so they are meaningful on a busy machine too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
from mlx_lm.tokenizer_utils import load

from cairn.engine.model.builtin import builtin_directory
from cairn.engine.prompt import template as prompts
from cairn.engine.prompt.encoder import Encoder
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal.keys import block_keys

SECRET = b"no secret: what is named here is thrown away"
MESSAGE_WORDS = 120

T = TypeVar("T")


def conversation(tokenizer: Any, tokens: int) -> Conversation:
    """A conversation of about this many tokens, of words from Cairn's readme."""
    words = (Path(__file__).parents[4] / "README.md").read_text("utf-8").split()
    draw = random.Random(0)
    messages: list[Message] = []
    while tokens > 0 or len(messages) % 2 == 0:
        content = " ".join(draw.choices(words, k=MESSAGE_WORDS))
        messages.append(Message(role=("user", "assistant")[len(messages) % 2], content=content))
        tokens -= len(tokenizer.encode(content, add_special_tokens=False))
    return Conversation(messages=tuple(messages))


def turn(before: Conversation, number: int) -> Conversation:
    """The conversation with one more answer and question, which differ for each number."""
    said = (
        Message(role="assistant", content=f"To {number} stones."),
        Message(role="user", content="And then? Tell me where to cross it."),
    )
    return attrs.evolve(before, messages=before.messages + said)


def timed(name: str, step: Callable[[int], T], times: int) -> T:
    """
    Run a step several times, each with its number; print the median and return the last result.
    """
    took: list[float] = []
    for number in range(times):
        start = time.process_time()
        result = step(number)
        took.append(1000 * (time.process_time() - start))
    print(f"{name:<44}{statistics.median(took):>9.2f}")
    return result


def main() -> int:
    """Print the time of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=9, help="medians of so many")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--model", type=Path, help="a model directory; else Pebble's")
    asked = parser.parse_args()

    tokenizer: Any = load(asked.model or builtin_directory())
    before = conversation(tokenizer, asked.tokens)
    text = prompts.render(tokenizer, before)
    old = prompts.encode(tokenizer, text, special=False)
    turns = [prompts.render(tokenizer, turn(before, n)) for n in range(asked.times)]
    wholes = [prompts.encode(tokenizer, one, special=False) for one in turns]
    print(
        f"{len(before.messages)} messages, {len(text):,} characters, {len(old):,} tokens; ", end=""
    )
    print(f"a turn adds {len(wholes[0]) - len(old)}\n\n{'':<44}{'CPU ms':>9}")

    def at_once(number: int) -> tuple[int, ...]:
        return prompts.encode(tokenizer, turns[number], special=False)

    timed("tokenise the turn, as a whole", at_once, asked.times)
    timed("tokenise everything, nothing cached", lambda _: cold(tokenizer, text), asked.times)
    encoder = Encoder(tokenizer)
    if encoder.whole_because is not None:
        print(f"\nNothing is cached with this tokenizer: {encoder.whole_because}.")
        return 3
    encoder.encode(text, tenant="local")
    turned: dict[int, tuple[int, ...]] = {}

    def remembering(number: int) -> None:
        turned[number] = encoder.encode(turns[number], tenant="local")

    timed("tokenise the turn, the rest cached", remembering, asked.times)
    if wholes != [turned[number] for number in range(asked.times)]:
        print("\nThe ids are not those of the whole text.")
        return 1

    print()
    longer, ids = turn(before, 0), wholes[0]
    timed("render", lambda _: prompts.render(tokenizer, longer), asked.times)
    parts = timed("parts", lambda _: prompts.conversation_parts(longer), asked.times)
    timed("chain", lambda _: prompts.chain_of(parts, secret=SECRET, tenant="t"), asked.times)

    def keys(_: int) -> tuple[str, ...]:
        chunk = asked.block_tokens
        return block_keys(secret=SECRET, fingerprint="f", tenant="t", ids=ids, block_tokens=chunk)

    timed(f"keys of blocks of {asked.block_tokens}", keys, asked.times)
    return 0


def cold(tokenizer: Any, text: str) -> None:
    """Tokenise a text with an encoder that has an empty cache."""
    Encoder(tokenizer).encode(text, tenant="local")


if __name__ == "__main__":
    sys.exit(main())
